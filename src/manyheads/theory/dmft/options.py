"""Options of the solver: problems, the branches of a block, their sampling, and limits on the cost."""

from dataclasses import dataclass, field, replace
from typing import Literal, final

import numpy as np

from manyheads._constraints import CHECKED, Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.theory.dmft.branches.branch import Branch
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.grids.coarse_grid import EACH, TimeGrid
from manyheads.theory.dmft.ntk import PAIRS, neural_tangent_kernel
from manyheads.theory.dmft.problem import Problem

Keep = Literal["equal-time", "two-time"]
ALIKE = {"gelu": "relu", "tanh": "erf"}  # activations without a closed kernel, and one of about the same slope


@dataclass(frozen=True)
class Sampling:
    """Sampling of branches, and limits on the cost of a solution.

    Attributes
    ----------
    seed
        Of the samples.
    samples
        Heads, or neurons, of each of the two halves; None takes twice the fewest that match moments, at
        least 512 heads or 2,048 neurons.
    tolerance
        Root mean square error of the outputs that is asked for; None takes what the samples and the grid in time give.
    most
        Samples are doubled up to so many.
    memory
        Bytes that a solution may keep.
    seconds
        Seconds of one core that a solution may be foreseen to take, to a factor of a few on an unknown machine; None
        sets no bound. Samples are doubled, and grids in time refined, while the next solution alone stays within.
    """

    seed: int = constrained(0, Constraint(least=0))
    samples: int | None = constrained(None, Constraint(least=1, most="most"))
    tolerance: float | None = None
    most: int = constrained(65_536, Constraint(least=1))
    memory: float = 4e9
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        limits = {"tolerance": "float | None", "memory": "float", "seconds": "float | None"}
        for name, kind in limits.items():
            if (limit := getattr(self, name)) != np.inf:  # infinity is no limit
                Constraint(above=0).kept(name, limit, kind)


@final
@dataclass(frozen=True)
class Request:
    """Problem and form of the solution."""

    problems: tuple[Problem, ...]  # one, or two at L and 2L that are extrapolated to infinite depth
    attention: Branch  # samples are set here
    activation: str | None  # of an MLP in every block; None for none
    sampling: Sampling  # how sampled branches are sampled, and what a solution may cost
    every: int = 1  # steps of the longest interval of the grid in time
    keep: Literal["equal-time", "two-time"] = field(default="equal-time", metadata=CHECKED)
    cells: int | None = None  # cells of a continuum in depth; None are the blocks of the problem
    each: int = EACH  # single steps before longer intervals, and intervals of every length before the next
    factor: int = 1  # by which samples are multiplied

    def __post_init__(self) -> None:
        check_fields(self)
        if self.two_time and self.every > 1:
            raise UsageError(f"keep='two-time' with every={self.every}: functions of two times need every=1")

    @property
    def two_time(self) -> bool:
        """Whether functions of two times are kept."""
        return self.keep == "two-time"

    @property
    def branches(self) -> list[Branch]:
        """Branches of a block, of any number of samples."""
        return [self.attention] if self.activation is None else [self.attention, InfiniteWidthMLP(self.activation)]

    @property
    def sampled(self) -> bool:
        """Whether there are two halves."""
        return any(branch.sampled for branch in self.branches)

    def grids(self) -> list[TimeGrid]:
        """Return the moments of every problem."""
        return [TimeGrid.of(problem, self.every, self._tangent_kernel(problem), self.each) for problem in self.problems]

    def _tangent_kernel(self, problem: Problem) -> np.ndarray | None:
        """Return about the tangent kernel at the start; coarse grids only have to know it nearly."""
        if self.every == 1:
            return None
        named = self.activation if self.activation in PAIRS else ALIKE.get(self.activation or "")
        deep = problem if self.cells is None else replace(problem, depth=self.cells, depth_exponent=1.0)
        return neural_tangent_kernel(deep, named)

"""State of the recursion: fields of all moments on the sources, beside the system that does not change in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from manyheads.theory.dmft.branches.branch import BranchProcess
from manyheads.theory.dmft.grids.coarse_grid import IntervalState, TimeGrid, start_interval
from manyheads.theory.dmft.grids.depth import DepthStep
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.sources import Sources


class Moment(NamedTuple):
    """A moment t: its rows among those of all moments, from `lo` to `hi`, and the memory of the earlier moments."""

    time: int
    lo: int
    hi: int
    memory: np.ndarray  # m(t, t') (t,)

    @property
    def now(self) -> slice:
        """The rows of this moment."""
        return slice(self.lo, self.hi)


@final
@dataclass(frozen=True)
class System:
    """Constants of a solution; only branches keep a history of their own."""

    grid: TimeGrid
    layers: Sequence[Sequence[BranchProcess]]
    depth_step: DepthStep
    response_weight: float  # 1, or 0 for the negative control without responses

    @property
    def problem(self) -> Problem:
        """The problem over the moments."""
        return self.grid.moments

    @property
    def gain(self) -> float:
        """The factor eta gamma0."""
        return self.problem.learning_rate * self.problem.richness

    def moment(self, index: int) -> Moment:
        """Return a moment by its index."""
        rows = self.problem.rows
        return Moment(index, index * rows, (index + 1) * rows, self.grid.memory[index, :index])

    def learned(self, t: Moment, row: np.ndarray) -> np.ndarray:
        """Return kappa m(t, t') times a kernel, for the earlier moments (PT, lo)."""
        return self.depth_step.learned * np.repeat(t.memory, self.problem.rows) * row[:, : t.lo]

    def loss(self, index: int, output: np.ndarray) -> float:
        """Return the training loss of outputs (O, C) at a moment."""
        problem = self.problem
        return problem.loss_weights[index] @ problem.loss_function.value(problem.flat_targets, output)


class LayerFields(NamedTuple):
    """Fields on one side of all layers, over n = S P T rows: z^{l-1} below them, or g^l above them."""

    rows: np.ndarray  # coefficients on K sources (B, n, K)
    correlation: np.ndarray  # (B, n, n)
    response: np.ndarray | None  # RO^l of what a layer writes, RB^l of what it sends back; where they are asked for


@final
@dataclass(frozen=True)
class Fields:
    """The fields at all moments, zero at those that are not reached yet. A step fills in its own moment, in place."""

    below: LayerFields
    above: LayerFields
    g0: np.ndarray  # (S, PT, K)
    pooled: np.ndarray  # R z^L (S, O, K)
    errors: np.ndarray  # c_o Delta_oc (S, O, C)
    sources: Sources  # their covariances U^l and B^l
    interval: IntervalState | None  # outputs within an interval of a coarse grid

    @staticmethod
    def zeros(system: System, two_time: bool) -> "Fields":
        """Return the fields before the first moment."""
        problem, layers = system.problem, len(system.layers)
        sources = Sources(problem, layers, system.depth_step.sources)
        steps, n = problem.steps, problem.steps * problem.rows
        below, above = (
            LayerFields(
                np.zeros((layers, n, sources.size)),
                np.zeros((layers, n, n)),
                np.zeros((layers, n, n)) if two_time else None,
            )
            for _ in range(2)
        )
        return Fields(
            below,
            above,
            g0=np.zeros((steps, problem.rows, sources.size)),
            pooled=np.zeros((steps, problem.outputs, sources.size)),
            errors=np.zeros((steps, problem.outputs, problem.classes)),
            sources=sources,
            interval=start_interval(system.grid),
        )

    def two_time(self) -> dict[str, np.ndarray]:
        """Return the correlation and response functions of two times, where they were asked for."""
        if self.below.response is None or self.above.response is None:
            return {}
        return {
            "correlation": self.below.correlation,
            "backward_correlation": self.above.correlation,
            "response": self.below.response,
            "backward_response": self.above.response,
        }

"""State of the recursion: fields of all moments on the sources, beside the system that does not change in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from manyheads.theory.dmft.branches.branch import BranchInput, BranchProcess
from manyheads.theory.dmft.grids.coarse_grid import IntervalState, TimeGrid, start_interval
from manyheads.theory.dmft.grids.depth import DepthStep
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.sources import Sources
from manyheads.theory.dmft.trajectory import TwoTime


@final
@dataclass(frozen=True)
class Moment:
    """A moment t: its rows lo to hi among those of all moments, and the memory m(t, t') of the earlier ones."""

    index: int
    lo: int
    hi: int
    memory: np.ndarray  # (t,)

    @property
    def now(self) -> slice:
        """The rows of this moment."""
        return slice(self.lo, self.hi)


@final
@dataclass(frozen=True)
class System:
    """Constants of a solution; only branches keep a history of their own.

    Attributes
    ----------
    response_weight
        1, or 0 for the negative control without responses.
    """

    grid: TimeGrid
    layers: Sequence[Sequence[BranchProcess]]
    depth_step: DepthStep
    response_weight: float

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


@final
@dataclass(frozen=True)
class Fields:
    """The fields at all moments, as coefficients on K sources. A step fills in its own moment, in place.

    With n = S P T rows, B layers, O read-outs and C classes; zero at moments that are not reached yet.
    """

    z: np.ndarray  # z^{l-1} (B, n, K)
    g: np.ndarray  # g^l (B, n, K)
    g0: np.ndarray  # (S, PT, K)
    pooled: np.ndarray  # R z^L (S, O, K)
    errors: np.ndarray  # c_o Delta_oc (S, O, C)
    correlation: np.ndarray  # <z^{l-1} z^{l-1}> (B, n, n)
    backward_correlation: np.ndarray  # <g^l g^l> (B, n, n)
    sources: Sources  # their covariances U^l and B^l
    interval: IntervalState | None  # outputs within an interval of a coarse grid
    two_time: TwoTime | None  # responses too, where they were asked for

    @staticmethod
    def zeros(system: System, two_time: bool) -> "Fields":
        """Return the fields before the first moment."""
        problem, layers = system.problem, len(system.layers)
        sources = Sources(problem, layers, system.depth_step.sources)
        steps, n = problem.steps, problem.steps * problem.rows
        correlation, backward = (np.zeros((layers, n, n)) for _ in range(2))
        return Fields(
            z=np.zeros((layers, n, sources.size)),
            g=np.zeros((layers, n, sources.size)),
            g0=np.zeros((steps, problem.rows, sources.size)),
            pooled=np.zeros((steps, problem.outputs, sources.size)),
            errors=np.zeros((steps, problem.outputs, problem.classes)),
            correlation=correlation,
            backward_correlation=backward,
            sources=sources,
            interval=start_interval(system.grid),
            two_time=TwoTime.of(correlation, backward) if two_time else None,
        )


def correlate(
    sources: Sources, correlation: np.ndarray, history: np.ndarray, t: Moment, rows: np.ndarray
) -> np.ndarray:
    """Keep the rows of this moment and return their correlation with all moments so far, (PT, hi)."""
    history[t.now] = rows
    row = sources.covary(rows, t.hi) @ history[: t.hi].T
    correlation[t.now, : t.hi], correlation[: t.hi, t.now] = row, row.T
    return row


def branch_input(
    system: System, fields: Fields, t: Moment, layer: int, row: np.ndarray, response: np.ndarray
) -> BranchInput:
    """Return what the branches of a layer see: correlations on both sides, what weights learned, the response."""
    return BranchInput(
        t.index,
        fields.correlation[layer],
        fields.backward_correlation[layer],
        learned=system.learned(t, row),
        response=system.response_weight * response,
    )

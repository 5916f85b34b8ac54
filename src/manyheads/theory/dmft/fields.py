"""State of the recursion: fields of all moments on Gaussian sources, beside the system that does not change in time.

A row of K = PT + C + 2 B n coefficients (B layers, n = S P T) is a Gaussian variable, linear in

    chi (PT)                 the embedded tokens, of covariance X
    w0 (C)                   the initial read-out, of unit covariance
    sO^l, s^l (n each)       what layer l writes and sends back through its initial weights, of covariances U^l and B^l

so that kernels are products of rows with the covariance, and the response of a row to a source is a coefficient of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from manyheads.theory.dmft.branches.branch import BranchProcess
from manyheads.theory.dmft.grids.coarse_grid import IntervalState, TimeGrid, start_interval
from manyheads.theory.dmft.grids.depth import DepthStep
from manyheads.theory.dmft.problem import Problem


@final
class Sources:
    """The covariances of all sources, known up to the moment that was reached last."""

    def __init__(self, problem: Problem, layers: int, of_layers: bool):
        self.rows, self.classes, self.layers = problem.rows, problem.classes, layers
        self.n = problem.rows * problem.steps
        self.gram = problem.gram
        self.of_layers = of_layers  # infinite depth at depth exponent 1 has none
        self.start = problem.rows + problem.classes  # of the sources of the layers
        self.size = self.start + (2 * layers * self.n if of_layers else 0)  # K
        self.covariances = np.zeros((2 * layers if of_layers else 0, self.n, self.n))  # U^l, then B^l

    def tokens(self) -> np.ndarray:
        """Return chi as rows of coefficients (PT, K)."""
        return np.eye(self.rows, self.size)

    def readout(self) -> np.ndarray:
        """Return w0 as rows of coefficients (C, K)."""
        return np.eye(self.classes, self.size, k=self.rows)

    def covary(self, rows: np.ndarray, known: int) -> np.ndarray:
        """Return rows (m, K) times the covariance of the sources, of which `known` columns a layer are known."""
        out = np.zeros_like(rows)
        out[:, : self.rows] = rows[:, : self.rows] @ self.gram
        out[:, self.rows : self.start] = rows[:, self.rows : self.start]
        for number, covariance in enumerate(self.covariances):
            first = self.start + number * self.n
            block = slice(first, first + known)
            out[:, block] = rows[:, block] @ covariance[:known, :known]
        return out

    def response(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Return the responses (PT, n) of rows to one source: l is sO^l, B + l is s^l."""
        if not self.of_layers:
            return np.zeros((len(rows), self.n))
        first = self.start + number * self.n
        return rows[:, first : first + self.n]

    def of_layer(self, number: int, moment: int) -> np.ndarray:
        """Return a source at a moment as rows of coefficients (PT, K); zero where layers have none."""
        if not self.of_layers:
            return np.zeros((self.rows, self.size))
        return np.eye(self.rows, self.size, k=self.start + number * self.n + moment * self.rows)

    def fill(self, number: int, covariance: np.ndarray) -> None:
        """Keep the covariance (PT, known) of the present moment of a source with the past."""
        if self.of_layers:
            known, kept = covariance.shape[1], self.covariances[number]
            low = known - self.rows
            kept[low:known, :known], kept[:known, low:known] = covariance, covariance.T


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

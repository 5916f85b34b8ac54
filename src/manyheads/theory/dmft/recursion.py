"""Causal DMFT solver: one forward and one backward pass per training step.

The residual stream, per neuron, is linear in independent Gaussian sources: chi (covariance X), the initial
read-out w0, and for every layer sO^l ~ GP(0, U^l) forward and s^l ~ GP(0, B^l) backward. With the dressed backward
variable g^l_a(t) = -gamma0 d dloss/dh^l_a(t), the learned factor kappa = eta gamma0 beta0 L^(alpha_L - 1),
b = beta0 L^-alpha_L and the memory m of `Problem`,

    h^0(t)    = chi + eta gamma0 sum_{t'<t} m(t,t') X g^0(t')                                          (_embed)
    h^l(t)    = h^{l-1}(t) + b [ sO^l(t) + sum_{t'<t} (RO^l + kappa m U^l)(t,t') g^l(t') ]             (_cross_layer)
    w_c(t)    = w0_c + eta gamma0 sum_{t'<t} m(t,t') sum_o c_o Delta_oc(t') (R z^L)_o(t')              (_read_out)
    f_oc(t)   = <(R z^L)_o(t) w_c(t)> / gamma0
    g^L(t)    = J R^T c Delta(t) w(t)
    g^{l-1}(t) = g^l(t) + J b [ s^l(t) + sum_{t'<=t} RB^l z^{l-1}(t') + kappa sum_{t'<t} m B^l z^{l-1}(t') ]
                                                                                                       (_cross_layer)

where z is the stream, normalized if the problem says so, and J the projector of that normalization. The covariances U,
B and responses RO, RB of a layer come from its branches (`branches`). Rows of coefficients on the sources give every
kernel and every response. Without the sources of the layers the same recursion with midpoint steps solves the ordinary
differential equation in depth that depth exponent 1 ends in.

`recursion_step` is these equations at one moment. What does not change in time is the `System`; the `Fields` of all
moments are handed to each step: `_cross_layer` fills in those of its layer, `recursion_step` the others.

References
----------
Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limits. These equations and the order in which they are solved are
derived here.

State of the recursion: fields of all moments on Gaussian sources, beside the system that does not change in time.

A row of K = PT + C + 2 B n coefficients (B layers, n = S P T) is a Gaussian variable, linear in

    chi (PT)                 the embedded tokens, of covariance X
    w0 (C)                   the initial read-out, of unit covariance
    sO^l, s^l (n each)       what layer l writes and sends back through its initial weights, of covariances U^l and B^l

so that kernels are products of rows with the covariance, and the response of a row to a source is a coefficient of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np

from manyheads.errors import CertificateError
from manyheads.theory.dmft.branches.branch import BranchInput, BranchProcess
from manyheads.theory.dmft.dataset import Trajectory
from manyheads.theory.dmft.grids.coarse_grid import IntervalState, TimeGrid, mean_errors, start_interval
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


DIVERGED = 1e6  # outputs beyond so many times the targets are no training


def solve_recursion(
    problem: Problem,
    layers: Sequence[Sequence[BranchProcess]],
    depth_step: DepthStep,
    *,
    responses: bool = True,
    grid: TimeGrid | None = None,
    two_time: bool = False,
) -> Trajectory:
    """Solve the limit: layers from the bottom up, each of one branch or several that see the same stream.

    On a `grid` of a long training `problem` is its `moments`, with which processes are started, too; None solves every
    step. Without `responses` the solution is wrong: the negative control of tests and studies.
    """
    system = System(grid or TimeGrid.of(problem, every=1), layers, depth_step, 1.0 if responses else 0.0)
    fields = Fields.zeros(system, two_time)
    trajectory = Trajectory.zeros(system.problem, len(layers))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what diverges is refused by name
        for index in range(problem.steps):
            try:
                fields = recursion_step(system, fields, trajectory, system.moment(index))
            except CertificateError as error:
                error.partial = trajectory.until(index) if index else None
                raise
    trajectory.two_time = fields.two_time()
    return trajectory


def recursion_step(system: System, fields: Fields, trajectory: Trajectory, t: Moment) -> Fields:
    """Solve one moment and record it: forward through the layers, read out, backward through the layers."""
    problem, layers = system.problem, range(len(system.layers))
    h, stream, scales = _embed(system, fields, t), [], []
    for layer in layers:
        h, kernel, scale = _cross_layer(system, fields, t, layer, h)
        stream.append(kernel)
        scales.append(scale)
    z, scale = _normalize(system, fields, t, h)
    w = _read_out(system, fields, t)
    correlated = fields.sources.covary(z, t.hi)
    fields.pooled[t.time] = problem.pooling @ z
    output = problem.pooling @ correlated @ w.T / problem.richness  # f_oc(t) = <(R z^L)_o w_c> / gamma0
    _check(system, t, output)
    stream.append((correlated @ z.T) * np.outer(scale, scale))
    pooled = problem.pooling @ correlated @ fields.pooled[t.time].T
    observables = [
        {name: value for branch in layer for name, value in branch.observe().items()} for layer in system.layers
    ]
    errors, interval = mean_errors(system.grid, fields.interval, t.time, output, fields.errors[: t.time])
    fields.errors[t.time] = errors
    g, backward = _project_out(system, fields, t, (problem.pooling.T @ errors) @ w, z, scale), []
    for layer in reversed(layers):
        g, kernel, _ = _cross_layer(system, fields, t, layer, g, scales[layer])
        backward.append(kernel)
    fields.g0[t.time] = g
    backward.append(fields.sources.covary(g, t.hi) @ g.T)
    kernels = stream, backward[::-1], pooled
    trajectory.record(t.time, output, system.loss(t.time, output), kernels, observables)
    return replace(fields, interval=interval)


def _embed(system: System, fields: Fields, t: Moment) -> np.ndarray:
    """h^0(t) = chi + eta gamma0 sum_{t'<t} m X g^0(t')."""
    h = fields.sources.tokens()
    if system.problem.embedding:
        h += system.gain * system.problem.gram @ np.tensordot(t.memory, fields.g0[: t.time], 1)
    return h


def _cross_layer(
    system: System, fields: Fields, t: Moment, layer: int, x: np.ndarray, scale: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a field behind a layer, its kernel before the layer, and the scale of z^{l-1}.

    Upward, h^l(t) = h^{l-1}(t) + b [sO^l + (RO^l + kappa m U^l) g^l]. Downward, with the `scale` from the way up,
    g^{l-1}(t) = g^l(t) + J b [s^l + (RB^l + kappa m B^l) z^{l-1}].
    """
    sources, down, step = fields.sources, scale is not None, system.depth_step
    here, there = (fields.above, fields.below) if down else (fields.below, fields.above)
    known = t.hi if down else t.lo
    source, other = (layer + len(system.layers) * side for side in (down, not down))  # s^l or sO^l, and the other one
    correlations = fields.below.correlation[layer], fields.above.correlation[layer]
    change, kernels = np.zeros(1), []
    for _ in range(step.sweeps):
        seen = x + change / 2  # from the second on in the middle of the step in depth
        rows, size = (seen, np.ones(len(x))) if down else _normalize(system, fields, t, seen)
        here.rows[layer, t.now] = rows
        row = sources.covary(rows, t.hi) @ here.rows[layer, : t.hi].T
        here.correlation[layer, t.now, : t.hi], here.correlation[layer, : t.hi, t.now] = row, row.T
        feedback = system.response_weight * sources.response(rows, other)[:, :known]
        inputs = BranchInput(t.time, *correlations, system.learned(t, row), feedback)
        outputs = [branch.backward(inputs) if down else branch.forward(inputs) for branch in system.layers[layer]]
        covariance, response, learning = (
            np.sum([getattr(output, name) for output in outputs], axis=0)
            for name in ("covariance", "response", "learning")
        )
        response = system.response_weight * response
        memory = response.copy()  # response + kappa m covariance
        memory[:, : t.lo] += system.learned(t, learning)
        change = step.step * (sources.of_layer(source, t.time) + memory @ there.rows[layer, :known])
        sources.fill(source, covariance)
        if here.response is not None:
            here.response[layer, t.now, :known] = response
        if scale is not None:
            change = _project_out(system, fields, t, change, fields.below.rows[layer, t.now], scale)
        kernels.append(row[:, t.now] * np.outer(size, size))
    return x + change, kernels[0], size


def _read_out(system: System, fields: Fields, t: Moment) -> np.ndarray:
    """w_c(t) = w0_c + eta gamma0 sum_{t'<t} m sum_o c_o Delta_oc(t') (R z^L)_o(t')."""
    past = (t.memory, fields.errors[: t.time], fields.pooled[: t.time])
    return fields.sources.readout() + system.gain * np.einsum("t,toc,tok->ck", *past, optimize=True)


def _check(system: System, t: Moment, output: np.ndarray) -> None:
    """Refuse outputs that diverge."""
    grid = system.grid
    largest, bound = float(np.abs(output).max()), DIVERGED * (1 + float(np.abs(system.problem.flat_targets).max()))
    if not largest <= bound:
        longest = max(grid.lengths[: grid.intervals[t.time] + 1], default=1)  # so far
        raise CertificateError(
            f"the limit diverges at step {grid.times[t.time]}: take a smaller learning rate, momentum "
            "or richness" + (f", or intervals shorter than {longest} steps (`every`)" if longest > 1 else ""),
            measured=largest,
            threshold=bound,
        )


def _normalize(system: System, fields: Fields, t: Moment, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide every token by its root mean square over neurons, where the problem normalizes; return it too."""
    if not system.problem.norm:
        return stream, np.ones(len(stream))
    scale = np.sqrt((fields.sources.covary(stream, t.hi) * stream).sum(1))
    return stream / scale[:, None], scale


def _project_out(
    system: System, fields: Fields, t: Moment, rows: np.ndarray, z: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Send backward rows y through the normalization, J y = (y - z <z y>) / s."""
    if not system.problem.norm:
        return rows
    along = (fields.sources.covary(rows, t.hi) * z).sum(1)
    return (rows - along[:, None] * z) / scale[:, None]

"""Causal DMFT solver: one forward and one backward pass per training step.

The residual stream, per neuron, is linear in independent Gaussian sources (`sources`): chi (covariance X), the initial
read-out w0, and for every layer sO^l ~ GP(0, U^l) forward and s^l ~ GP(0, B^l) backward. With the dressed backward
variable g^l_a(t) = -gamma0 d dloss/dh^l_a(t), the learned factor kappa = eta gamma0 beta0 L^(alpha_L - 1),
b = beta0 L^-alpha_L and the memory m of `Problem`,

    h^0(t)    = chi + eta gamma0 sum_{t'<t} m(t,t') X g^0(t')                                          (embed)
    h^l(t)    = h^{l-1}(t) + b [ sO^l(t) + sum_{t'<t} (RO^l + kappa m U^l)(t,t') g^l(t') ]             (forward_layer)
    w_c(t)    = w0_c + eta gamma0 sum_{t'<t} m(t,t') sum_o c_o Delta_oc(t') (R z^L)_o(t')              (read_out)
    f_oc(t)   = <(R z^L)_o(t) w_c(t)> / gamma0
    g^{l-1}(t) = g^l(t) + J b [ s^l(t) + sum_{t'<=t} RB^l z^{l-1}(t') + kappa sum_{t'<t} m B^l z^{l-1}(t') ]
                                                                                                       (backward_layer)

where z is the stream, normalized if the problem says so, and J the projector of that normalization. The covariances U,
B and responses RO, RB of a layer come from its branches (`branches`). Rows of coefficients on the sources give every
kernel and every response. Without the sources of the layers the same recursion with midpoint steps solves the ordinary
differential equation in depth that depth exponent 1 ends in.

References
----------
Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limits. These equations and the order in which they are solved are
derived here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from manyheads.errors import CertificateError
from manyheads.limits.dmft.branches.branch import BranchInput, BranchProcess
from manyheads.limits.dmft.coarse_grid import DressedErrors, TimeGrid
from manyheads.limits.dmft.problem import Problem
from manyheads.limits.dmft.sources import Sources

DIVERGED = 1e6  # outputs beyond so many times the targets are no training


@dataclass(frozen=True)
class DepthStep:
    """Integration of a step in depth.

    Attributes
    ----------
    sweeps
        1 evaluates a layer at the stream below it; 2 or more at the middle of its own step (implicit midpoint).
    """

    step: float  # b, the factor of what a layer writes
    learned: float  # kappa, the factor of what its weights learn
    sources: bool = True  # whether layers have Gaussian sources of their own. Infinite depth at exponent 1 has none.
    sweeps: int = 1


def finite_depth_step(problem: Problem) -> DepthStep:
    """Return the step in depth of a network of finite depth."""
    scale, depth = problem.learning_rate * problem.richness * problem.branch, float(problem.depth)
    return DepthStep(
        step=problem.branch * depth**-problem.depth_exponent, learned=scale * depth ** (problem.depth_exponent - 1)
    )


@dataclass(frozen=True)
class TwoTime:
    """Two-time correlation and response functions of every layer, (B, n, n) over n = S P T rows t, a.

    Attributes
    ----------
    correlation, backward_correlation
        <z^{l-1}_a(t) z^{l-1}_b(t')> and <g^l_a(t) g^l_b(t')>.
    response, backward_response
        RO^l, zero for t' >= t, and RB^l, zero for t' > t: of what the layer writes to g^l, of what it sends to z^{l-1}.
    """

    correlation: np.ndarray
    backward_correlation: np.ndarray
    response: np.ndarray
    backward_response: np.ndarray

    @staticmethod
    def of(correlation: np.ndarray, backward_correlation: np.ndarray) -> "TwoTime":
        """Return these correlation functions beside responses that are still zero."""
        return TwoTime(correlation, backward_correlation, np.zeros_like(correlation), np.zeros_like(correlation))


@dataclass
class Trajectory:
    """The solution in time: S moments, B layers.

    Attributes
    ----------
    outputs, losses
        f (S, O, C) and the training loss (S,).
    stream, backward
        <h^l h^l>/d and <g^l g^l>/d at equal times (S, B + 1, PT, PT), the last level above the last layer.
    observables
        One dictionary a moment and layer: what its branches show (logits, attention).
    """

    outputs: np.ndarray
    losses: np.ndarray
    stream: np.ndarray
    backward: np.ndarray
    pooled: np.ndarray  # kernel of the read-outs (S, O, O)
    observables: list[list[dict[str, np.ndarray]]] = field(default_factory=list)
    two_time: TwoTime | None = None  # correlation and response functions where they were asked for

    @staticmethod
    def zeros(problem: Problem, layers: int) -> "Trajectory":
        """Return a trajectory of zeros over the moments of a problem."""
        steps, rows, outputs = problem.steps, problem.rows, problem.outputs
        return Trajectory(
            outputs=np.zeros((steps, outputs, problem.classes)),
            losses=np.zeros(steps),
            stream=np.zeros((steps, layers + 1, rows, rows)),
            backward=np.zeros((steps, layers + 1, rows, rows)),
            pooled=np.zeros((steps, outputs, outputs)),
        )

    def until(self, moments: int) -> "Trajectory":
        """Return the first moments, without functions of two times."""
        names = ("outputs", "losses", "stream", "backward", "pooled", "observables")
        return Trajectory(**{name: getattr(self, name)[:moments] for name in names})


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

    Raises
    ------
    CertificateError
        The limit diverges, or a kernel of sampled branches is not positive; `partial` is the trajectory up to there.
    """
    grid = grid or TimeGrid.of(problem, every=1)
    recursion = _Recursion(grid, layers, depth_step, 1.0 if responses else 0.0, two_time)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what diverges is refused by name
        for index in range(problem.steps):
            try:
                recursion.advance(_Moment.of(grid, index))
            except CertificateError as error:
                error.partial = recursion.result.until(index) if index else None
                raise
    recursion.result.two_time = recursion.two_time
    return recursion.result


@final
@dataclass(frozen=True)
class _Moment:
    """A moment t: its rows lo to hi among those of all moments, and the memory m(t, t') of the earlier ones."""

    index: int
    lo: int
    hi: int
    memory: np.ndarray  # (t,)

    @staticmethod
    def of(grid: TimeGrid, index: int) -> "_Moment":
        rows = grid.moments.rows
        return _Moment(index, index * rows, (index + 1) * rows, grid.memory[index, :index])

    @property
    def now(self) -> slice:
        return slice(self.lo, self.hi)


@final
class _Recursion:
    def __init__(
        self,
        grid: TimeGrid,
        layers: Sequence[Sequence[BranchProcess]],
        depth_step: DepthStep,
        response_weight: float,
        two_time: bool,
    ):
        problem = self.problem = grid.moments
        self.grid, self.layers, self.depth_step, self.response_weight = grid, layers, depth_step, response_weight
        self.dressed_errors = DressedErrors(grid).at
        self.gain = problem.learning_rate * problem.richness  # eta gamma0
        self.sources = Sources(problem, len(layers), depth_step.sources)
        size, n = self.sources.size, problem.steps * problem.rows
        self.z, self.g = np.zeros((len(layers), n, size)), np.zeros((len(layers), n, size))  # z^{l-1}, g^l
        self.g0 = np.zeros((problem.steps, problem.rows, size))
        self.errors = np.zeros((problem.steps, problem.outputs, problem.classes))  # c_o Delta_oc
        self.pooled = np.zeros((problem.steps, problem.outputs, size))  # R z^L
        self.correlation, self.backward_correlation = (np.zeros((len(layers), n, n)) for _ in range(2))
        self.two_time = TwoTime.of(self.correlation, self.backward_correlation) if two_time else None
        self.result = Trajectory.zeros(problem, len(layers))

    def advance(self, moment: _Moment) -> None:
        """Solve one moment: forward through the layers, read out, backward through the layers."""
        stream, scales = self.embed(moment), []
        for layer in range(len(self.layers)):
            stream, scale = self.forward_layer(moment, layer, stream)
            scales.append(scale)
        final, scale = self.normalize(moment, stream)
        readout = self.read_out(moment)
        output = self.project(moment, final, scale, readout)
        self.errors[moment.index] = self.dressed_errors(moment.index, output)
        backward = (self.problem.pooling.T @ self.errors[moment.index]) @ readout
        backward = self.project_out(moment, backward, final, scale)
        for layer in reversed(range(len(self.layers))):
            backward = self.backward_layer(moment, layer, backward, scales[layer])
        self.g0[moment.index] = backward
        self.result.backward[moment.index, 0] = self.sources.covary(backward, moment.hi) @ backward.T

    def embed(self, moment: _Moment) -> np.ndarray:
        """h^0(t) = chi + eta gamma0 sum_{t'<t} m X g^0(t')."""
        stream = self.sources.tokens()
        if self.problem.embedding:
            stream += self.gain * self.problem.gram @ np.tensordot(moment.memory, self.g0[: moment.index], 1)
        return stream

    def forward_layer(self, moment: _Moment, layer: int, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """h^l(t) = h^{l-1}(t) + b [sO^l(t) + sum_{t'<t} (RO^l + kappa m U^l) g^l(t')], and the scale of z^{l-1}."""
        written, correlation = np.zeros_like(stream), self.correlation[layer]
        for sweep in range(self.depth_step.sweeps):
            z, scale = self.normalize(moment, stream if self.depth_step.sweeps == 1 else stream + written / 2)
            row = self.correlate(moment, correlation, self.z[layer], z)
            if sweep == 0:
                self.result.stream[moment.index, layer] = row[:, moment.now] * np.outer(scale, scale)
            seen = self.sources.response(z, len(self.layers) + layer)[:, : moment.lo]
            inputs = self.branch_input(moment, layer, row, seen)
            outputs = [branch.forward(inputs) for branch in self.layers[layer]]
            covariance = _total(output.covariance for output in outputs)  # U^l
            response = self.response_weight * _total(output.response for output in outputs)  # RO^l
            written = self.depth_step.step * (
                (response + self.learned(moment, covariance)) @ self.g[layer, : moment.lo]
            )
            self.sources.add(written, layer, covariance, self.depth_step.step)
        if self.two_time is not None:
            self.two_time.response[layer, moment.now, : moment.lo] = response
        return stream + written, scale

    def backward_layer(self, moment: _Moment, layer: int, backward: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """g^{l-1}(t) = g^l(t) + J b [s^l(t) + sum_{t'<=t} RB^l z^{l-1}(t') + kappa sum_{t'<t} m B^l z^{l-1}(t')]."""
        sent, correlation = np.zeros_like(backward), self.backward_correlation[layer]
        for sweep in range(self.depth_step.sweeps):
            g = backward if self.depth_step.sweeps == 1 else backward + sent / 2
            row = self.correlate(moment, correlation, self.g[layer], g)
            if sweep == 0:
                self.result.backward[moment.index, layer + 1] = row[:, moment.now]
            inputs = self.branch_input(moment, layer, row, self.sources.response(g, layer)[:, : moment.hi])
            outputs = [branch.backward(inputs) for branch in self.layers[layer]]
            response = self.response_weight * _total(output.response for output in outputs)  # RB^l
            total = response.copy()
            total[:, : moment.lo] += self.learned(moment, _total(output.learned for output in outputs))
            sent = self.depth_step.step * (total @ self.z[layer, : moment.hi])
            covariance = _total(output.covariance for output in outputs)  # B^l
            self.sources.add(sent, len(self.layers) + layer, covariance, self.depth_step.step)
            sent = self.project_out(moment, sent, self.z[layer, moment.now], scale)
        if self.two_time is not None:
            self.two_time.backward_response[layer, moment.now, : moment.hi] = response
        return backward + sent

    def read_out(self, moment: _Moment) -> np.ndarray:
        """w_c(t) = w0_c + eta gamma0 sum_{t'<t} m sum_o c_o Delta_oc(t') (R z^L)_o(t')."""
        past = (moment.memory, self.errors[: moment.index], self.pooled[: moment.index])
        return self.sources.readout() + self.gain * np.einsum("t,toc,tok->ck", *past, optimize=True)

    def project(self, moment: _Moment, final: np.ndarray, scale: np.ndarray, readout: np.ndarray) -> np.ndarray:
        """f_oc(t) = <(R z^L)_o(t) w_c(t)> / gamma0; what is known at the top of the network is kept."""
        problem, result, t = self.problem, self.result, moment.index
        self.pooled[t] = problem.pooling @ final
        correlated = self.sources.covary(final, moment.hi)
        output = problem.pooling @ correlated @ readout.T / problem.richness
        self.check(moment, output)
        result.outputs[t] = output
        result.losses[t] = problem.loss_weights[t] @ problem.loss_function.value(problem.flat_targets, output)
        result.stream[t, -1] = (correlated @ final.T) * np.outer(scale, scale)
        result.pooled[t] = problem.pooling @ correlated @ self.pooled[t].T
        shown = [{name: value for branch in layer for name, value in branch.observe().items()} for layer in self.layers]
        result.observables.append(shown)
        return output

    def check(self, moment: _Moment, output: np.ndarray) -> None:
        """Refuse outputs that diverge."""
        largest, bound = float(np.abs(output).max()), DIVERGED * (1 + float(np.abs(self.problem.flat_targets).max()))
        if not largest <= bound:
            longest = max(self.grid.lengths[: self.grid.intervals[moment.index] + 1], default=1)  # so far
            raise CertificateError(
                f"the limit diverges at step {self.grid.times[moment.index]}: take a smaller learning rate, momentum "
                "or richness" + (f", or intervals shorter than {longest} steps (`every`)" if longest > 1 else ""),
                measured=largest,
                threshold=bound,
            )

    def correlate(self, moment: _Moment, correlation: np.ndarray, history: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Keep the rows of this moment and return their correlation with all moments so far, (PT, hi)."""
        history[moment.now] = rows
        row = self.sources.covary(rows, moment.hi) @ history[: moment.hi].T
        correlation[moment.now, : moment.hi], correlation[: moment.hi, moment.now] = row, row.T
        return row

    def branch_input(self, moment: _Moment, layer: int, row: np.ndarray, response: np.ndarray) -> BranchInput:
        """Return what the branches of a layer see: correlations on both sides, what weights learned, the response."""
        return BranchInput(
            moment.index,
            self.correlation[layer],
            self.backward_correlation[layer],
            learned=self.learned(moment, row),
            response=self.response_weight * response,
        )

    def learned(self, moment: _Moment, row: np.ndarray) -> np.ndarray:
        """Return kappa m(t, t') times a kernel, for the earlier moments (PT, lo)."""
        memory = np.repeat(moment.memory, self.problem.rows)
        return self.depth_step.learned * memory * row[:, : moment.lo]

    def normalize(self, moment: _Moment, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide every token by its root mean square over neurons, where the problem normalizes; return it too."""
        if not self.problem.norm:
            return stream, np.ones(len(stream))
        scale = np.sqrt((self.sources.covary(stream, moment.hi) * stream).sum(1))
        return stream / scale[:, None], scale

    def project_out(self, moment: _Moment, rows: np.ndarray, z: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Send backward rows y through the normalization: (y - z <z y>) / s."""
        if not self.problem.norm:
            return rows
        along = (self.sources.covary(rows, moment.hi) * z).sum(1)
        return (rows - along[:, None] * z) / scale[:, None]


def _total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum over the branches of one layer."""
    return np.sum(list(arrays), axis=0)

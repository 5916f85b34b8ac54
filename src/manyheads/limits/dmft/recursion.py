"""The solver: time is marched once, at each moment up through the branches and down again.

The residual stream, per neuron, is linear in independent Gaussian sources: chi (covariance X), the initial read-out
w0, and for every layer a forward source sO^l ~ GP(0, U^l) and a backward source s^l ~ GP(0, B^l). With the dressed
backward variable g^l_a(t) = -gamma0 d dloss/dh^l_a(t), the learned factor kappa = eta gamma0 beta0 L^(alpha_L - 1),
b = beta0 L^-alpha_L and the memory m of `Problem`,

    h^0(t)    = chi + eta gamma0 sum_{t'<t} m(t,t') X g^0(t')
    h^l(t)    = h^{l-1}(t) + b [ sO^l(t) + sum_{t'<t} (RO^l + kappa m U^l)(t,t') g^l(t') ]
    w_c(t)    = w0_c + eta gamma0 sum_{t'<t} m(t,t') sum_o c_o Delta_oc(t') (R z^L)_o(t')
    f_oc(t)   = <(R z^L)_o(t) w_c(t)> / gamma0
    g^{l-1}(t) = g^l(t) + J b [ s^l(t) + sum_{t'<=t} RB^l z^{l-1}(t') + kappa sum_{t'<t} m B^l z^{l-1}(t') ]

where z is the stream, normalised if the problem says so, and J the projector of that normalisation. Rows of
coefficients on the sources give every kernel and every response. Without the sources of the layers the same march with
midpoint steps solves the ordinary differential equation in depth that depth exponent 1 ends in.

References
----------
Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limits. These equations and the order in which they are solved are
derived here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from manyheads.errors import CertificateError
from manyheads.limits.dmft.branches.branch import Around, Process
from manyheads.limits.dmft.coarse_grid import Errors, TimeGrid
from manyheads.limits.dmft.problem import Problem

DIVERGED = 1e6  # outputs beyond so many times the targets are no training


@dataclass(frozen=True)
class Depthwise:
    """How a step in depth is taken.

    Attributes
    ----------
    step
        b, the factor of what a layer writes.
    learned
        kappa, the factor of what its weights learn.
    sources
        Whether layers have Gaussian sources of their own. Infinite depth at exponent 1 has none.
    sweeps
        1 evaluates a layer at the stream below it; 2 or more at the middle of its own step (implicit midpoint).
    """

    step: float
    learned: float
    sources: bool = True
    sweeps: int = 1


def blocks_in_depth(problem: Problem) -> Depthwise:
    """Return the steps of a network of finite depth."""
    scale, depth = problem.rate * problem.richness * problem.branch, float(problem.depth)
    return Depthwise(
        step=problem.branch * depth**-problem.depth_exponent, learned=scale * depth ** (problem.depth_exponent - 1)
    )


@dataclass
class March:
    """What the march leaves: outputs (S, O, C), losses (S,), kernels of the stream at equal times, what branches show.

    Attributes
    ----------
    stream
        <h^l h^l>/d (S, layers + 1, PT, PT), the last one above the last layer.
    backward
        <g^l g^l>/d (S, layers + 1, PT, PT).
    pooled
        Kernel of the read-outs (S, O, O).
    looks
        One dictionary a moment and layer: what its branches show.
    """

    outputs: np.ndarray
    losses: np.ndarray
    stream: np.ndarray
    backward: np.ndarray
    pooled: np.ndarray
    looks: list[list[dict[str, np.ndarray]]] = field(default_factory=list)


def march(
    problem: Problem,
    layers: Sequence[Sequence[Process]],
    depthwise: Depthwise,
    *,
    responses: bool = True,
    grid: TimeGrid | None = None,
) -> March:
    """Solve the limit: layers from the bottom up, each of one branch or several that see the same stream.

    Parameters
    ----------
    problem
        What is trained.
    layers
        Processes of the branches, one list a layer; they are used up.
    depthwise
        How a step in depth is taken.
    responses
        False leaves the response functions out: wrong, and there to show in a test what they are worth.
    grid
        Moments of a long training; `problem` is then its `moments`, with which processes are started, too. None marches
        through every step.

    Returns
    -------
    March, float64.

    Raises
    ------
    CertificateError
        The limit diverges, or a kernel of sampled branches is not positive; its `partial` is the march up to there.
    """
    grid = grid or TimeGrid.of(problem, every=1)
    solver = _Solver(grid, layers, depthwise, responses)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what diverges is refused by name
        for moment in range(problem.steps):
            try:
                solver.advance(moment)
            except CertificateError as error:
                error.partial = _cut(solver.result, moment) if moment else None
                raise
    return solver.result


def _cut(result: March, moments: int) -> March:
    """Return the first moments of a march."""
    names = ("outputs", "losses", "stream", "backward", "pooled", "looks")
    return replace(result, **{name: getattr(result, name)[:moments] for name in names})


@final
class _Solver:
    def __init__(self, grid: TimeGrid, layers: Sequence[Sequence[Process]], depthwise: Depthwise, responses: bool):
        problem = self.problem = grid.moments
        self.grid, self.layers, self.depthwise, self.dress = grid, layers, depthwise, Errors(grid).at
        self.weight = 1.0 if responses else 0.0
        rows, steps, count = problem.rows, problem.steps, len(layers)
        n = self.n = rows * steps
        self.base = rows + problem.classes
        self.width = width = self.base + (2 * count * n if depthwise.sources else 0)
        self.covariances = np.zeros((2 * count if depthwise.sources else 0, n, n))  # U^l, then B^l
        self.inner, self.outer = np.zeros((count, n, width)), np.zeros((count, n, width))  # z^{l-1}, g^l of all moments
        self.below, self.above = np.zeros((count, n, n)), np.zeros((count, n, n))  # H^{l-1}, G^l
        self.bottom = np.zeros((steps, rows, width))  # g^0
        self.errors = np.zeros((steps, problem.outputs, problem.classes))
        self.pools = np.zeros((steps, problem.outputs, width))
        self.result = March(
            outputs=np.zeros((steps, problem.outputs, problem.classes)),
            losses=np.zeros(steps),
            stream=np.zeros((steps, count + 1, rows, rows)),
            backward=np.zeros((steps, count + 1, rows, rows)),
            pooled=np.zeros((steps, problem.outputs, problem.outputs)),
        )

    def advance(self, moment: int) -> None:
        """One moment: up through the layers, read out, and down again."""
        problem, gain = self.problem, self.problem.rate * self.problem.richness
        self.moment, self.lo = moment, moment * problem.rows
        self.hi = self.lo + problem.rows
        self.now = slice(self.lo, self.hi)
        remembered = self.grid.memory[moment, :moment]  # (t,)
        self.remembered = np.repeat(remembered, problem.rows)  # (t PT,)
        stream = np.zeros((problem.rows, self.width))
        stream[:, : problem.rows] = np.eye(problem.rows)
        if problem.embedding:
            stream += gain * problem.gram @ np.tensordot(remembered, self.bottom[:moment], 1)
        self.scales: list[np.ndarray] = []
        for layer in range(len(self.layers)):
            stream = self._climb(layer, stream)
        final, scale = self._normalise(stream)
        pool = problem.reading @ final
        readout = np.zeros((problem.classes, self.width))
        readout[:, problem.rows : self.base] = np.eye(problem.classes)
        readout += gain * np.einsum(
            "t,toc,tok->ck", remembered, self.errors[:moment], self.pools[:moment], optimize=True
        )
        correlated = self._covary(final)
        output = problem.reading @ correlated @ readout.T / problem.richness
        self._check(output)
        error = self.dress(moment, output)
        self.pools[moment], self.errors[moment] = pool, error
        self._record(moment, output, correlated, final, scale, pool)
        backward = self._unnormalise((problem.reading.T @ error) @ readout, final, scale)
        for layer in reversed(range(len(self.layers))):
            backward = self._descend(layer, backward)
        self.bottom[moment] = backward
        self.result.backward[moment, 0] = self._covary(backward) @ backward.T

    def _check(self, output: np.ndarray) -> None:
        """Refuse outputs that diverge."""
        largest, bound = float(np.abs(output).max()), DIVERGED * (1 + float(np.abs(self.problem.wanted).max()))
        if not largest <= bound:
            longest = max(self.grid.lengths[: self.grid.intervals[self.moment] + 1], default=1)  # so far
            raise CertificateError(
                f"the limit diverges at step {self.grid.times[self.moment]}: take a smaller rate, momentum or richness"
                + (f", or intervals shorter than {longest} steps (`every`)" if longest > 1 else ""),
                measured=largest,
                threshold=bound,
            )

    def _climb(self, layer: int, stream: np.ndarray) -> np.ndarray:
        """Take one step in depth on the way up."""
        written = np.zeros_like(stream)
        for sweep in range(self.depthwise.sweeps):
            seen = stream if self.depthwise.sweeps == 1 else stream + written / 2
            inner, scale = self._normalise(seen)
            row = self._kernel_row(self.below[layer], self.inner[layer], inner)
            if sweep == 0:
                self.scales.append(scale)
                self.result.stream[self.moment, layer] = row[:, self.now] * np.outer(scale, scale)
            self.scales[layer] = scale
            around = Around(
                self.moment,
                self.below[layer],
                self.above[layer],
                learned=self._learned(row),
                response=self.weight * self._source(inner, len(self.layers) + layer)[:, : self.lo],
            )
            answers = [branch.write(around) for branch in self.layers[layer]]
            covariance = _total(answer.covariance for answer in answers)
            response = self.weight * _total(answer.response for answer in answers) + self._learned(covariance)
            written = self.depthwise.step * (response @ self.outer[layer, : self.lo])
            self._excite(written, layer, covariance)
        return stream + written

    def _descend(self, layer: int, backward: np.ndarray) -> np.ndarray:
        """Take one step in depth on the way down."""
        sent = np.zeros_like(backward)
        for sweep in range(self.depthwise.sweeps):
            seen = backward if self.depthwise.sweeps == 1 else backward + sent / 2
            row = self._kernel_row(self.above[layer], self.outer[layer], seen)
            if sweep == 0:
                self.result.backward[self.moment, layer + 1] = row[:, self.now]
            around = Around(
                self.moment,
                self.below[layer],
                self.above[layer],
                learned=self._learned(row),
                response=self.weight * self._source(seen, layer)[:, : self.hi],
            )
            answers = [branch.send(around) for branch in self.layers[layer]]
            total = self.weight * _total(answer.response for answer in answers)
            total[:, : self.lo] += self._learned(_total(answer.learned for answer in answers))
            sent = self.depthwise.step * (total @ self.inner[layer, : self.hi])
            self._excite(sent, len(self.layers) + layer, _total(answer.covariance for answer in answers))
            sent = self._unnormalise(sent, self.inner[layer, self.now], self.scales[layer])
        return backward + sent

    def _kernel_row(self, kernel: np.ndarray, history: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Keep the rows of this moment, and their covariance with all moments so far, (PT, hi)."""
        history[self.now] = rows
        row = self._covary(rows) @ history[: self.hi].T
        kernel[self.now, : self.hi], kernel[: self.hi, self.now] = row, row.T
        return row

    def _learned(self, row: np.ndarray) -> np.ndarray:
        """Return kappa m(t, t') times a kernel, for the earlier moments (PT, lo)."""
        return self.depthwise.learned * self.remembered * row[:, : self.lo]

    def _source(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Coefficients (PT, n) on one source of a layer: the response to it."""
        if not self.depthwise.sources:
            return np.zeros((len(rows), self.n))
        start = self.base + number * self.n
        return rows[:, start : start + self.n]

    def _excite(self, rows: np.ndarray, number: int, covariance: np.ndarray) -> None:
        """Add a layer's own source to its rows, and keep the covariance of that source."""
        if not self.depthwise.sources:
            return
        start = self.base + number * self.n + self.lo
        rows[np.arange(len(rows)), start + np.arange(len(rows))] += self.depthwise.step
        kept = self.covariances[number]
        kept[self.now, : self.hi], kept[: self.hi, self.now] = covariance, covariance.T

    def _covary(self, rows: np.ndarray) -> np.ndarray:
        """Rows times the covariance of all sources, (m, K)."""
        problem, out = self.problem, np.zeros_like(rows)
        out[:, : problem.rows] = rows[:, : problem.rows] @ problem.gram
        out[:, problem.rows : self.base] = rows[:, problem.rows : self.base]
        for number, covariance in enumerate(self.covariances):
            start = self.base + number * self.n
            block = slice(start, start + self.hi)
            out[:, block] = rows[:, block] @ covariance[: self.hi, : self.hi]
        return out

    def _normalise(self, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide every token by its root mean square over neurons, where the problem normalises; return it too."""
        if not self.problem.norm:
            return stream, np.ones(len(stream))
        scale = np.sqrt((self._covary(stream) * stream).sum(1))
        return stream / scale[:, None], scale

    def _unnormalise(self, rows: np.ndarray, inner: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Send backward rows through the normalisation: (y - z <z y>) / s."""
        if not self.problem.norm:
            return rows
        along = (self._covary(rows) * inner).sum(1)
        return (rows - along[:, None] * inner) / scale[:, None]

    def _record(
        self,
        moment: int,
        output: np.ndarray,
        correlated: np.ndarray,
        final: np.ndarray,
        scale: np.ndarray,
        pool: np.ndarray,
    ) -> None:
        result, problem = self.result, self.problem
        result.outputs[moment] = output
        result.losses[moment] = problem.shares[moment] @ problem.rule.value(problem.wanted, output)
        result.stream[moment, -1] = (correlated @ final.T) * np.outer(scale, scale)
        result.pooled[moment] = problem.reading @ correlated @ pool.T
        result.looks.append(
            [{name: value for branch in layer for name, value in branch.look().items()} for layer in self.layers]
        )


def _total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of what the branches of one layer answer."""
    return np.sum(list(arrays), axis=0)

r"""Variable-projection fits of a network of one hidden layer of sigmoids with vector outputs, batched over probes.

What a pair of tokens shows is a net in the features of the query,

.. math:: y_n = \sum_i \big(\sigma(f_n \cdot \vartheta_i - s_n) - b_n\big) C_i, \qquad \sigma(x) = 1 / (1 + e^{-x})

with features f_n (p,), known shifts s_n and baselines b_n; unknown are the slopes theta_i (p,) and the values C_i (D,)
of the m heads. The values are eliminated (they solve a linear least-squares problem), the slopes are found by
Levenberg and Marquardt's method with Kaufman's form of the Jacobian, for all probes of a stage together.

References
----------
Golub and Pereyra (1973), The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
separate, SIAM J. Numer. Anal. 10; Kaufman (1975), A variable projection method for solving separable nonlinear least
squares problems, BIT 15. The net of the pairs and its shifts are ours.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from scipy.special import expit, logit

from manyheads.errors import ShapeError
from manyheads.recovery._types import Array, Indices
from manyheads.recovery.refusals import FitError

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
EXACT = 1e-10  # relative error of an answer up to which it counts as exact but for rounding
MEMORY = 2**28  # bytes that the normal matrices and Jacobians of one block of probes may take
# Share of the mean squared derivative that a parameter without any is damped with. A saturated gate says nothing of
# its logit: damped relative to its own derivative alone, it would take any step, and a step into the far end of the
# gate is one without return.
FLOOR = 1e-6
STEP = 1.0  # most that one step may change the logit of one row through one parameter
CHOLESKY = 96  # size from which normal equations are solved one by one, at half the arithmetic, and not in a batch


@dataclass(frozen=True)
class NetDesign:
    """Data of the fit: features (n, p), and for each row the shift of all logits and the baseline of all units.

    The unit of head i in row n is sigma(f_n . theta_i - s_n) - b_n. A last feature of ones is an offset. With
    b_n = sigma(-s_n) a head that ignores the tokens has the unit zero: such heads leave the net.
    """

    features: Array
    shifts: Array
    baselines: Array

    @classmethod
    def of(cls, features: Any, shifts: Any = 0.0, *, centred: bool = False) -> "NetDesign":
        """Return the design of these features and shifts; `centred` takes off the unit of a head without logits."""
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or not features.size:
            raise ShapeError(f"features of shape {features.shape}: expected (rows, features)")
        shifts = np.broadcast_to(np.asarray(shifts, np.float64), features.shape[:1]).copy()
        return cls(features, shifts, expit(-shifts) if centred else np.zeros_like(shifts))

    def with_sum(self) -> "NetDesign":
        """Return the design with a last row whose units are one: its answer is the sum of the values."""
        features = np.concatenate([self.features, np.zeros((1, self.features.shape[1]))])
        return NetDesign(features, np.append(self.shifts, -np.inf), np.append(self.baselines, 0.0))

    def units(self, slopes: Array) -> Array:
        """Units (..., n, m) of the heads with these slopes (..., m, p)."""
        return self.gates(slopes) - self.baselines[:, None]

    def gates(self, slopes: Array) -> Array:
        """Gates (..., n, m) of the heads with these slopes (..., m, p)."""
        return expit(self.features @ np.swapaxes(slopes, -1, -2) - self.shifts[:, None])


class PairNets(NamedTuple):
    """Nets of many probes: slopes (..., m, p), values (..., m, D), relative residual (...)."""

    slopes: Array
    values: Array
    residual: Array

    def one(self, index: Any) -> "PairNets":
        """Return the net of one probe, or of some."""
        return PairNets(self.slopes[index], self.values[index], self.residual[index])

    def permute(self, order: Any) -> "PairNets":
        """Return the same single net with its heads in another order."""
        return PairNets(self.slopes[order], self.values[order], self.residual)


def read_gates(gates: Array, shifts: Array, least: float) -> Array:
    """Return logits (n, m) from gates (n, K, m), each at the shift where its gate is nearest to one half."""
    best = np.argmin(np.abs(gates - 0.5), axis=1)
    chosen = np.take_along_axis(gates, best[:, None], axis=1)[:, 0]
    return logit(np.clip(chosen, least, 1 - least)) + shifts[best]


def lift_pivots(triangle: Array) -> Array:
    """Lift pivots (b, m, m) at rounding level, so that equal units leave values that are finite and useless."""
    diagonal = np.abs(np.diagonal(triangle, axis1=1, axis2=2))
    floor = EPS * diagonal.max(1, keepdims=True) + TINY
    return triangle + np.where(diagonal < floor, floor, 0.0)[:, :, None] * np.eye(triangle.shape[1])


def kaufman_normal(features: Array, derivative: Array, basis: Array, values: Array) -> Array:
    """Return the normal matrices (b, m p, m p) of Kaufman's Jacobian, from the derivatives of the gates (b, n, m)."""
    probes, rows, heads = derivative.shape
    width = features.shape[1]
    jacobian = (derivative[..., None] * features[:, None, :]).reshape(probes, rows, heads * width)
    jacobian -= basis @ (np.swapaxes(basis, 1, 2) @ jacobian)
    gram = values @ np.swapaxes(values, 1, 2)
    blocks = (np.swapaxes(jacobian, 1, 2) @ jacobian).reshape(probes, heads, width, heads, width)
    return (blocks * gram[:, :, None, :, None]).reshape(probes, heads * width, heads * width)


def fit_nets(
    design: NetDesign, answers: Any, slopes: Any, *, iterations: int = 60, tolerance: float = 1e-7
) -> PairNets:
    r"""Fit the pair net to the answers at each probe, from the same or from given slopes.

    .. math:: \min_\vartheta \| Y - H(\vartheta) H(\vartheta)^+ Y \|^2

    Answers Y are (n, D) of one probe or (b, n, D) of many; starting slopes (m, p), or (b, m, p), one per probe. A probe
    ends when its squared residual falls by less than the share `tolerance` in a step. Whether the residual |Y - H C| /
    |Y| is small enough is for the caller to say.
    """
    answers, slopes = np.asarray(answers, np.float64), np.asarray(slopes, np.float64)
    single = answers.ndim == 2
    answers = answers[None] if single else answers
    slopes = np.array(np.broadcast_to(slopes, (len(answers), *slopes.shape[-2:])))
    rows, width = design.features.shape
    if answers.ndim != 3 or answers.shape[1] != rows or slopes.shape[2] != width or rows < slopes.shape[1]:
        raise ShapeError(
            f"answers {answers.shape} and slopes {slopes.shape} do not fit {rows} rows of {width} features: expected "
            "(probes, rows, outputs) and (heads, features), with at least as many rows as heads"
        )
    heads = slopes.shape[1]
    block = max(1, int(MEMORY / (8 * (3 * (heads * width) ** 2 + 3 * rows * heads * width + rows * rows))))
    parts = []
    for first in range(0, len(answers), block):
        fit = _Fit(design, answers[first : first + block], slopes[first : first + block])
        parts.append(fit.run(iterations, tolerance))
    nets = PairNets(*map(np.concatenate, zip(*parts, strict=True)))
    if not all(np.isfinite(part).all() for part in nets):
        raise FitError("a fit of the pair net left the finite numbers", np.inf, 1.0)
    return nets.one(0) if single else nets


@dataclass(frozen=True)
class NetState:
    """Nets of a batch of probes at some slopes, with the values of least squares; all of it to be overwritten."""

    slopes: Array  # (b, m, p)
    gates: Array  # (b, n, m)
    basis: Array  # orthonormal basis of the units, (b, n, m)
    values: Array  # (b, m, D); heads with the same units share theirs
    rest: Array  # (b, n, D)
    loss: Array  # (b,)

    @classmethod
    def at(cls, design: NetDesign, slopes: Array, answers: Array) -> "NetState":
        """Evaluate nets at slopes (b, m, p) against answers (b, n, D)."""
        count, heads, width = slopes.shape
        logits = design.features @ slopes.reshape(-1, width).T - design.shifts[:, None]  # one product for all probes
        gates = expit(logits).reshape(-1, count, heads).swapaxes(0, 1)
        basis, triangle = np.linalg.qr(gates - design.baselines[:, None])
        inner = basis.swapaxes(1, 2) @ answers
        rest = answers - basis @ inner
        loss: Array = np.einsum("bnd,bnd->b", rest, rest)
        loss[~np.isfinite(loss)] = np.inf
        return cls(slopes, gates, basis, np.linalg.solve(lift_pivots(triangle), inner), rest, loss)

    def take(self, chosen: Any) -> "NetState":
        """Return a copy of some of the nets."""
        return NetState(*(part[chosen] for part in vars(self).values()))

    def put(self, chosen: Any, other: "NetState") -> None:
        """Overwrite some of the nets."""
        for name, part in vars(other).items():
            getattr(self, name)[chosen] = part

    @property
    def derivative(self) -> Array:
        """Derivatives of the gates by their logits (b, n, m)."""
        return self.gates * (1 - self.gates)


class _Fit:
    """Levenberg and Marquardt over a block of probes, each with its own damping."""

    def __init__(self, design: NetDesign, answers: Array, slopes: Array):
        self.design = design
        self.basis: Array | None = None
        if answers.shape[2] > answers.shape[1]:  # outputs beyond the rows only turn: Y = Y' Q^T, exactly
            self.basis, triangle = np.linalg.qr(np.swapaxes(answers, 1, 2))
            answers = np.swapaxes(triangle, 1, 2)
        self.answers = answers
        self.reach = STEP / (np.abs(design.features).max(0) + TINY)  # (p,)
        self.total = (answers**2).sum((1, 2)) + TINY
        self.damping = np.full(len(answers), 1e-3)
        self.state = NetState.at(design, slopes, answers)

    def run(self, iterations: int, tolerance: float) -> tuple[Array, Array, Array]:
        active, loss = np.arange(len(self.answers)), self.state.loss
        for _ in range(iterations):
            if not len(active):
                break
            before = loss[active].copy()
            moved = self._step(active)
            fall = (before - loss[active]) / np.maximum(before, TINY)
            floor = loss[active] / self.total[active] < (EPS / 8) ** 2
            active = active[moved & (fall >= tolerance) & ~floor]
        values = self.state.values if self.basis is None else self.state.values @ np.swapaxes(self.basis, 1, 2)
        return self.state.slopes, values, np.sqrt(loss / self.total)

    def _step(self, active: Indices) -> NDArray[np.bool_]:
        """One accepted step per probe where one is found; which probes moved."""
        here, features = self.state.take(active), self.design.features
        back = here.derivative * (here.rest @ np.swapaxes(here.values, 1, 2))  # the rest is orthogonal to the units
        right = (np.swapaxes(back, 1, 2) @ features).reshape(len(active), -1)
        matrix = kaufman_normal(features, here.derivative, here.basis, here.values)
        diagonal = np.diagonal(matrix, axis1=1, axis2=2)
        scale = np.sqrt(diagonal + FLOOR * diagonal.mean(1, keepdims=True) + TINY)
        matrix = matrix / scale[:, :, None] / scale[:, None, :]
        right = right / scale
        moved = np.zeros(len(active), bool)
        for _ in range(8):
            open_ = np.flatnonzero(~moved)
            if not len(open_):
                break
            which = active[open_]
            damped = matrix[open_] + self.damping[which, None, None] * np.eye(matrix.shape[1])
            step = (_solve_definite(damped, right[open_]) / scale[open_]).reshape(here.slopes[open_].shape)
            slopes = here.slopes[open_] + np.clip(step, -self.reach, self.reach)
            trial = NetState.at(self.design, slopes, self.answers[which])
            better = trial.loss < here.loss[open_]
            kept = which[better]
            self.state.put(kept, trial.take(better))
            self.damping[kept] = np.maximum(self.damping[kept] / 10, 1e-15)
            self.damping[which[~better]] *= 8
            moved[open_[better]] = True
        return moved


def _solve_definite(matrices: Array, right: Array) -> Array:
    """Solve (b, s, s) x = (b, s), by Cholesky where that pays; no step where a matrix is not positive definite."""
    if matrices.shape[1] < CHOLESKY:
        try:
            return np.linalg.solve(matrices, right[..., None])[..., 0]
        except np.linalg.LinAlgError:
            pass
    steps = np.zeros_like(right)
    for matrix, side, step in zip(matrices, right, steps, strict=True):
        solved, failed = linalg.lapack.dposv(matrix.T, side, overwrite_a=True)[1:]
        if not failed:
            step[:] = solved
    return steps


def net_amplification(design: NetDesign, net: PairNets) -> tuple[Array, Array]:
    r"""Root mean square error of slopes and of values per unit of independent noise in the answers, (m,) and (m,).

    The least-squares estimate errs by J^+ times the noise, J the Jacobian in slopes and values together; values err
    inside the space that the answers span, whose coordinates are used.
    """
    heads, width = net.slopes.shape
    values = np.linalg.qr(net.values.T)[1].T  # (m, m') coordinates in the space of the values
    outputs, rows = values.shape[1], len(design.features)
    gates = design.gates(net.slopes)
    units = gates - design.baselines[:, None]
    derivative = gates * (1 - gates)
    by_slopes = np.einsum("ni,np,io->noip", derivative, design.features, values).reshape(rows * outputs, heads * width)
    by_values = np.einsum("ni,op->noip", units, np.eye(outputs)).reshape(rows * outputs, heads * outputs)
    jacobian = np.concatenate([by_slopes, by_values], axis=1)
    size = np.sqrt((jacobian**2).sum(0)) + TINY
    # a variance is wanted to a factor, not to digits: eigenvalues below the Gram matrix's rounding are lifted to it.
    share, turn = np.linalg.eigh((jacobian / size).T @ (jacobian / size))
    spread = (turn**2 / np.maximum(share, 8 * EPS * share[-1])).sum(1) / size**2
    slopes, found = spread[: heads * width].reshape(heads, width), spread[heads * width :].reshape(heads, outputs)
    return np.sqrt(slopes.mean(1)), np.sqrt(found.mean(1))

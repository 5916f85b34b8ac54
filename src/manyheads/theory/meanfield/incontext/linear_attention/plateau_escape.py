r"""Saddle-to-saddle dynamics of separate rank-one keys and queries, and the one drop of merged key-query weights.

Drop times are predicted from the initial weights. Gradient flow of a separate head i with value :math:`v_i`, key
:math:`k_i` and query :math:`q_i` in the negative gradient G:

.. math:: \dot v_i = k_i^\top Gq_i, \qquad \dot k_i = v_iGq_i, \qquad \dot q_i = v_iG^\top k_i .

**On a plateau** the circuit knows a set S of eigenvectors, and to leading order G is diagonal and constant:
:math:`g_d = 0` in S and :math:`\lambda_d^2` outside. With :math:`p = (k+q)/\sqrt2`, :math:`n = (k-q)/\sqrt2` and
:math:`\dot\tau_i = v_i` every head is one scalar equation, Newton's in the potential -F/2,

.. math:: p_{id} = p_{id}(0)e^{g_d\tau_i}, \quad n_{id} = n_{id}(0)e^{-g_d\tau_i}, \quad
          \ddot\tau_i = \tfrac12\sum_dg_d(p_{id}^2 - n_{id}^2) = \tfrac12F_i'(\tau_i),

while :math:`v_i^2 - |k_i|^2` and :math:`v_i^2 - |q_i|^2` are conserved. It diverges at a finite time, in proportion to
1/std of the initial weights. The first head to diverge ends the plateau, along the eigenvector d of the largest
remaining eigenvalue except with small probability.

**In the drop** this head is aligned, :math:`v = k_d = q_d = s`, and :math:`x = s/a` with :math:`a^3 = u_d^*` follows

.. math:: \dot x = a\lambda_d^2x^2(1 - x^3), \qquad
          t = t^* + \frac1{a\lambda_d^2}\Big[h(x) - h(0) - \frac1x\Big], \qquad
          h(x) = -\tfrac13\ln(1-x) + \tfrac16\ln(1+x+x^2) - \tfrac1{\sqrt3}\arctan\tfrac{2x+1}{\sqrt3},

matched to the divergence at :math:`t^*`. The circuit is :math:`u_d = u_d^*x^3`; for all other heads :math:`g_d` drops
to zero at the effective time :math:`t^* - 1/(a\lambda_d^2)`, because
:math:`\int(1-x^3)dt = \frac1{a\lambda_d^2}\int x^{-2}dx`.
What is neglected moves a drop by less than its width :math:`1/(a\lambda_d^2)` if the initialization is small.

**Merged weights.** Gradient flow of head i with value :math:`v_i` and matrix :math:`U_i` is
:math:`\dot v_i = \langle U_i, G\rangle`, :math:`\dot U_i = v_iG`. Near zero :math:`G = \Lambda^2`, and one mode of each
head grows,

.. math:: v_i = \langle U_i, \hat G\rangle = \tfrac12(v_i(0) + \langle U_i(0), \hat G\rangle)e^{\gamma t}, \qquad
          \hat G = \Lambda^2/\gamma, \quad \gamma = \|\Lambda^2\|_F,

along :math:`\Lambda^2`, in which all eigenvectors take part. So all heads become equal up to their sizes, and with
:math:`s = |v|`, :math:`s(0) = \tfrac12|v(0) + \langle U(0), \hat G\rangle|` and :math:`u_d = sw_d`

.. math:: \dot s = \sum_dw_dg_d, \qquad \dot w_d = sg_d, \qquad g_d = \lambda_d^2 - m_d\lambda_du_d, \qquad
          s^2 - |w|^2 = 0 .

All eigenvectors are learned in one drop, at :math:`\gamma^{-1}\ln(1/\text{std})` up to a constant. If all eigenvalues
are equal, :math:`u = u^*/(1 + (u^*/u(0) - 1)e^{-2\gamma t})`.

Source: Zhang, Singh, Latham, Saxe (arXiv 2501.16265) for the saddles, the scalar equation of an aligned head, and the
single drop of white inputs. The prediction from random initial weights, the matching, the closed form, the effective
initial size and the reduced equation for any spectrum are derived here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield.incontext.linear_attention.heads import Heads, MergedHeads, SeparateHeads, check_heads
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression
from manyheads.theory.meanfield.initial_value import solve_initial_value

PRECISION: dict[str, Any] = {"method": "DOP853", "rtol": 1e-9, "atol": 1e-14}
LARGEST_VALUE = 1e3  # value weight at which a diverging head is aligned: the rest is 1/(g v) in closed form
LONGEST = 1e9  # time without divergence: all weights of one sign zero, for instance
H_ZERO = -np.pi / (6 * 3**0.5)


@dataclass(frozen=True)
class Drop:
    r"""One drop of the loss: which head learns which eigenvector, and when."""

    direction: int  # index of the eigenvector; 0 is the largest eigenvalue
    head: int  # index of the head
    divergence: float  # t^*, at which the head would diverge without saturation
    width: float  # 1/(a lambda_d^2), duration of the drop

    @property
    def effective_time(self) -> float:
        """Time at which the eigenvector is gone for the other heads."""
        return self.divergence - self.width

    @property
    def half_time(self) -> float:
        """Time at which the circuit has half of its final value along the eigenvector."""
        return float(self.time_at(np.asarray(0.5 ** (1 / 3))))

    def time_at(self, x: Float[np.ndarray, " ..."]) -> Float[np.ndarray, " ..."]:
        """Return when the head has reached the share x of its final weights, 0 < x < 1."""
        closed = -np.log1p(-x) / 3 + np.log(1 + x + x * x) / 6 - np.arctan((2 * x + 1) / 3**0.5) / 3**0.5
        return self.divergence + self.width * (closed - H_ZERO - 1 / x)

    def share(self, times: Float[np.ndarray, " time"]) -> Float[np.ndarray, " time"]:
        """Return the share x of the final weights at each time, by interpolation and two Newton steps."""
        grid = 1 / (1 + np.exp(-np.linspace(-16, 30, 2000)))
        x = np.interp(times, self.time_at(grid), grid)
        for _ in range(2):
            x = np.clip(x - (self.time_at(x) - times) * x * x * (1 - x**3) / self.width, grid[0], grid[-1])
        return x


@dataclass(frozen=True)
class Staircase:
    """Predicted training with separate rank-one keys and queries: min(H, D) drops, in the order of time."""

    task: InContextRegression
    drops: tuple[Drop, ...]

    @property
    def half_times(self) -> Float[np.ndarray, " dim"]:
        """Time at which half of each eigenvector is learned; infinity for those that are not."""
        times = np.full(self.task.dim, np.inf)
        for drop in self.drops:
            times[drop.direction] = drop.half_time
        return times

    def learned(self, times: Float[np.ndarray, " time"]) -> Float[np.ndarray, "time dim"]:
        """Return the share of its optimum that the circuit has reached along each eigenvector."""
        shares = np.zeros((len(times), self.task.dim))
        for drop in self.drops:
            shares[:, drop.direction] = drop.share(times) ** 3
        return shares


def predict_staircase(task: InContextRegression, heads: SeparateHeads) -> Staircase:
    """Predict the drops of separate rank-one heads from their initial weights."""
    check_heads(task, heads)
    value, key, query = (np.asarray(weight, np.float64) for weight in heads)
    if key.ndim != 3 or key.shape[1:] != (1, task.dim):
        raise UsageError(f"keys of shape {key.shape}: expected rank one and dimension {task.dim}, (H, 1, {task.dim})")
    state = _Plateau(np.arange(len(value)), value, (key + query)[:, 0] / 2**0.5, (key - query)[:, 0] / 2**0.5)
    growth, begin, drops = task.spectrum**2, 0.0, []
    for _ in range(min(len(value), task.dim)):
        solution = _until_divergence(state, growth)
        tau, value = np.split(solution.y[:, -1], 2)
        winner = int(np.abs(value).argmax())
        winning = np.abs(state.moved(tau, value, growth).amplitude(winner))
        direction = int((growth * winning**2).argmax())
        width = task.optimum[direction] ** (-1 / 3) / growth[direction]
        divergence = begin + solution.t[-1] + 1 / (growth[direction] * LARGEST_VALUE)
        drop = Drop(direction, int(state.heads[winner]), divergence, width)
        if drop.effective_time <= begin:
            raise CertificateError(
                f"eigenvector {direction} is learned in the drop before it: initialize with a smaller std",
                measured=(divergence - begin) / width,
                threshold=1.0,
            )
        tau, value = np.split(solution.sol(drop.effective_time - begin), 2)
        state = state.moved(tau, value, growth).without(winner)
        growth = np.where(np.arange(task.dim) == direction, 0.0, growth)
        begin = drop.effective_time
        drops.append(drop)
    return Staircase(task, tuple(drops))


@dataclass(frozen=True)
class _Plateau:
    """Heads that have learned nothing yet: value weights (H,), symmetric and antisymmetric parts (H, D)."""

    heads: np.ndarray
    value: np.ndarray
    even: np.ndarray
    odd: np.ndarray

    def moved(self, tau: np.ndarray, value: np.ndarray, growth: np.ndarray) -> "_Plateau":
        factor = np.exp(growth * tau[:, None])
        return _Plateau(self.heads, value, self.even * factor, self.odd / factor)

    def without(self, head: int) -> "_Plateau":
        return _Plateau(*(np.delete(part, head, axis=0) for part in (self.heads, self.value, self.even, self.odd)))

    def amplitude(self, head: int) -> np.ndarray:
        return self.even[head] if self.value[head] > 0 else self.odd[head]


def _until_divergence(state: _Plateau, growth: np.ndarray) -> Any:
    """Integrate Newton's equation of every head until the first one diverges."""
    heads = len(state.heads)

    def field(time: float, phase: np.ndarray) -> np.ndarray:
        tau, value = np.split(phase, 2)
        moved = state.moved(tau, value, growth)
        return np.concatenate([moved.value, (moved.even**2 - moved.odd**2) @ growth / 2])

    def diverged(time: float, phase: np.ndarray) -> float:
        return float(np.abs(phase[heads:]).max() - LARGEST_VALUE)

    diverged.terminal = True  # type: ignore[attr-defined]
    begin = np.concatenate([np.zeros(heads), state.value])
    solution = solve_ivp(
        field, (0.0, LONGEST), begin, events=diverged, rtol=1e-9, atol=1e-12, dense_output=True, method="DOP853"
    )
    if solution.status != 1:
        largest = float(np.abs(solution.y[heads:, -1]).max())
        raise CertificateError("no head grows: draw other weights", measured=largest, threshold=LARGEST_VALUE)
    return solution


@dataclass(frozen=True)
class SingleDrop:
    """Predicted training with merged key-query weights from the effective initial size s(0)."""

    task: InContextRegression
    size: float

    @property
    def half_times(self) -> Float[np.ndarray, " dim"]:
        """Time at which half of each eigenvector is learned."""
        crossings = [lambda time, state, d=d: self._shares(state)[d] - 0.5 for d in range(self.task.dim)]
        slowest = self.task.spectrum[-1] ** 2
        horizon = (np.log1p(1 / self.size) + 10) / slowest + 10 / (slowest * self.task.spectrum[-1])
        found = solve_ivp(self._field, (0.0, float(horizon)), self._start(), events=crossings, **PRECISION)
        return np.asarray([times[0] if len(times) else np.inf for times in found.t_events])

    def learned(self, times: Float[np.ndarray, " time"]) -> Float[np.ndarray, "time dim"]:
        """Return the share of its optimum that the circuit has reached along each eigenvector."""
        remedy = "the reduced equation of merged heads could not be solved to the last time: end earlier"
        return self._shares(solve_initial_value(self._field, self._start(), times, remedy, **PRECISION).T)

    def _shares(self, state: np.ndarray) -> np.ndarray:
        """Return u / u* from s and w, state of shape (1 + D,) or (1 + D, T)."""
        return (state[0] * state[1:]).T / self.task.optimum

    def _start(self) -> np.ndarray:
        """Return s and w at time 0, (1 + D,)."""
        squared = self.task.spectrum**2
        return self.size * np.concatenate([[1.0], squared / np.linalg.norm(squared)])

    def _field(self, time: float, state: np.ndarray) -> np.ndarray:
        """Return the derivative of s and w."""
        slope = self.task.spectrum**2 * (1 - self._shares(state))  # g, as m u* = lambda
        return np.concatenate([[state[1:] @ slope], state[0] * slope])


def predict_single_drop(task: InContextRegression, heads: MergedHeads) -> SingleDrop:
    """Predict the drop of merged heads from their initial weights."""
    check_heads(task, heads)
    value, matrix = (np.asarray(weight, np.float64) for weight in heads)
    if matrix.shape[1:] != (task.dim, task.dim):
        raise UsageError(f"key-query weights of shape {matrix.shape}: expected (H, {task.dim}, {task.dim})")
    squared = task.spectrum**2
    mode = value + np.einsum("hdd,d->h", matrix, squared) / np.linalg.norm(squared)
    size = float(np.linalg.norm(mode) / 2)
    if not size > 0:
        raise CertificateError("no head grows: draw other weights", measured=size, threshold=0.0)
    return SingleDrop(task, size)


def predict_drops(task: InContextRegression, heads: Heads) -> SingleDrop | Staircase:
    """Predict when the loss of linear attention drops under gradient flow.

    Parameters
    ----------
    heads
        Initial weights, as `draw_heads` returns them: merged, or separate with rank-one keys and queries.

    Returns
    -------
    `half_times`, (D,), at which half of each eigenvector is learned, and `learned(times)`, (T, D), the share of its
    optimum that the circuit has reached; times are steps times learning rate.

    Raises
    ------
    UsageError
        Heads of another dimension, or separate heads of a rank above one.
    CertificateError
        Separate heads whose initialization is so large that drops overlap, or from which none grows.

    Examples
    --------
    >>> import jax
    >>> from manyheads.theory.meanfield.incontext.linear_attention.heads import draw_heads
    >>> task = InContextRegression((1.0, 0.5), prompt_length=32)
    >>> [drop.direction for drop in predict_drops(task, draw_heads(jax.random.key(0), 2, 4, 0.02)).drops]
    [0, 1]
    """
    return predict_single_drop(task, heads) if isinstance(heads, MergedHeads) else predict_staircase(task, heads)

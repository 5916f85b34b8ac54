r"""Population loss and gradients of the linear model on a sparse contextual bigram, in closed form for any weights.

With the query :math:`k`, one-hot tokens :math:`X\in\{0,1\}^{N\times T}`, a value matrix and one attention row per
query,

.. math:: f = V X a^{(k)}, \qquad L = \tfrac12 \mathbb E|f - e_y|^2 .

The histogram :math:`z = X a` has :math:`\mathbb E z = s\mu` and :math:`\mathbb E zz^\top = |a|^2 S + s^2\mu\mu^\top`,
with :math:`s = 1^\top a` and :math:`S = \mathrm{diag}\mu - \mu\mu^\top`; with the target,
:math:`\mathbb E[e_y z^\top] = (a\cdot q) P S + s\, P\mu\,\mu^\top`. Averaging over the query gives everything below.

================================  ==================================================================
symbol                            name in code
================================  ==================================================================
:math:`W = V - \mu 1^\top`        `value`, (N, N): the trained matrix; :math:`f = \mu + W X a`
:math:`A`, row :math:`a^{(k)}`    `attention`, (N, T)
:math:`|A|_\mu^2`                 `Overlaps.attention_squared_norm`, :math:`\sum_k\mu_k|a^{(k)}|^2`
:math:`K_V`                       `Overlaps.value_squared_norm`, :math:`\operatorname{tr} WSW^\top`
================================  ==================================================================

:math:`\mu + WXa = VXa` while :math:`1^\top a = 1`; the centred form keeps its mean when a proximal step changes that
sum. Derived here; the model is that of Ren, Wang and Lee (arXiv 2410.23438).
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError
from manyheads.theory.bigram.task import BigramTask

F = TypeVar("F", float, np.ndarray)


class Overlaps(NamedTuple, Generic[F]):
    """What determines the loss, numbers of one state or (R,) of several runs."""

    value_squared_norm: F  # K_V = tr W S W^T
    attention_squared_norm: F
    value_signal: F  # K_VP / K_P with K_VP = tr W S Pt^T: 1 at the solution
    attention_signal: F  # <Q - 1/T, A> / K_Q: 1 at the solution, NaN if K_Q = 0


class PopulationGradients(NamedTuple):
    """Gradient in the value matrix (N, N) and in the attention (N, T), float64."""

    value: np.ndarray
    attention: np.ndarray


class _Rows(NamedTuple):
    """Squared norm, product with the true weights, and sum of each row of the attention, (N,) each."""

    squared_norms: np.ndarray
    overlaps: np.ndarray
    sums: np.ndarray


def excess_of_signals(
    task: BigramTask, value_norm: np.ndarray, attention_norm: np.ndarray, value: np.ndarray, attention: np.ndarray
) -> np.ndarray:
    r"""Return the excess loss over its initial value, from squared norms :math:`K_V`, :math:`|A|^2` and both signals.

    .. math:: (|A|^2K_V - 2\langle Q,A\rangle\alpha_VK_P + |Q|^2K_P) / |Q|^2K_P
    """
    transition = task.transition_squared_norm
    overlap = (attention * task.attention_squared_norm + 1 / task.length) * value * transition
    return (attention_norm * value_norm - 2 * overlap) / (task.weight_squared_norm * transition) + 1


def check_weights(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> None:
    """Refuse weights (N, N) and (N, T) whose shapes differ from those of the task."""
    shapes, expected = (value.shape, attention.shape), ((task.vocabulary,) * 2, (task.vocabulary, task.length))
    if shapes != expected:
        raise ShapeError(
            f"value {shapes[0]} and attention {shapes[1]}: this task needs {expected[0]} and {expected[1]}"
        )


@takes_arrays
def measure_overlaps(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> Overlaps[float]:
    """Measure the overlap of a value matrix (N, N) and an attention (N, T) with the task, in float64."""
    check_weights(task, value, attention)
    mu, rows = task.stationary, _rows(task, attention)
    value = np.asarray(value, float)
    inner = float(mu @ (value * task.centred).sum(0))
    mean = value @ mu
    signal = float(mu @ (rows.overlaps - rows.sums / task.length))
    squared_norm = float(mu @ (value**2).sum(0)) - float(mean @ mean)
    share = signal / task.attention_squared_norm if task.attention_squared_norm > 1e-12 else float("nan")
    return Overlaps(squared_norm, float(mu @ rows.squared_norms), inner / task.transition_squared_norm, share)


@takes_arrays
def excess(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> float:
    r"""Return the excess loss over the Bayes loss, :math:`\tfrac12\mathbb E|f - \mathbb E[e_y|X,k]|^2`, exactly.

    .. math:: \tfrac12\sum_k\mu_k\big(|a|^2\operatorname{tr}WSW^\top - 2(a\cdot q)\operatorname{tr}WS\tilde P^\top
              + |q|^2K_P + s^2|W\mu|^2\big)

    for any value matrix (N, N) and attention (N, T), constrained or not.
    """
    check_weights(task, value, attention)
    mu, rows = task.stationary, _rows(task, attention)
    value = np.asarray(value, float)
    mean = value @ mu
    squared_norm = float(mu @ (value**2).sum(0)) - float(mean @ mean)
    inner = float(mu @ (value * task.centred).sum(0))
    constant = task.weight_squared_norm * task.transition_squared_norm
    total = float(mu @ rows.squared_norms) * squared_norm - 2 * float(mu @ rows.overlaps) * inner + constant
    return 0.5 * (total + float(mu @ rows.sums**2) * float(mean @ mean))


@takes_arrays
def gradients(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> PopulationGradients:
    r"""Return the preconditioned, projected gradients of stage one.

    .. math:: G_V = |A|_\mu^2 W - \langle Q,A\rangle_\mu\tilde P, \qquad
              G_a^{(k)} = K_V(a - s/T) - K_{VP}(q - 1/T)

    The gradient of the loss in :math:`W` is multiplied by :math:`\mathrm{diag}(1/\mu)` from the right, that in
    :math:`a^{(k)}` is divided by :math:`\mu_k` and centred over positions. Requires :math:`W\mu = 0`; rows of the
    attention may have any sum.
    """
    check_weights(task, value, attention)
    value, attention = np.asarray(value, float), np.asarray(attention, float)
    mu, rows = task.stationary, _rows(task, attention)
    off = np.abs(value @ mu).max()
    if off > 1e-6 * (1 + np.abs(value).max()):
        raise ShapeError(
            f"value moves the stationary distribution by {off:.2g}: subtract (value @ stationary) from every column"
        )
    squared_norm, inner = float(mu @ (value**2).sum(0)), float(mu @ (value * task.centred).sum(0))
    for_value = float(mu @ rows.squared_norms) * value - float(mu @ rows.overlaps) * task.centred
    for_attention = squared_norm * (attention - rows.sums[:, None] / task.length) + inner / task.length
    on_support = np.take_along_axis(for_attention, task.positions, 1) - inner * task.weights
    np.put_along_axis(for_attention, task.positions, on_support, axis=1)
    return PopulationGradients(for_value, for_attention)


def _rows(task: BigramTask, attention: np.ndarray) -> _Rows:
    """Measure each row in float64, without a dense copy of the true weights."""
    squared_norms = np.einsum("kt,kt->k", attention, attention, dtype=float)
    on_support = np.take_along_axis(attention, task.positions, axis=1).astype(float)  # (N, Q)
    return _Rows(squared_norms, (on_support * task.weights).sum(1), attention.sum(1, dtype=float))

r"""Loss and gradients of the linear model on a sparse contextual bigram, exactly, for any weights.

With the query :math:`k`, one-hot tokens :math:`X\in\{0,1\}^{N\times T}`, a value matrix and one attention row a query,

.. math:: f = V X a^{(k)}, \qquad L = \tfrac12 \mathbb E|f - e_y|^2 .

The histogram :math:`z = X a` has :math:`\mathbb E z = s\mu` and :math:`\mathbb E zz^\top = |a|^2 S + s^2\mu\mu^\top`,
with :math:`s = 1^\top a` and :math:`S = \mathrm{diag}\mu - \mu\mu^\top`; with the answer,
:math:`\mathbb E[e_y z^\top] = (a\cdot q) P S + s\, P\mu\,\mu^\top`. All below follows by averaging over the query.

============================  =========================================================================
symbol                        name in code
============================  =========================================================================
:math:`V`                     `full_value`, (N, N)
:math:`W = V - \mu 1^\top`    `value`, (N, N): what is trained; the model is then :math:`f = \mu + W X a`
:math:`A`, row :math:`a^{(k)}`  `attention`, (N, T)
:math:`|A|_\mu^2`             `Overlaps.attention_energy`, :math:`\sum_k\mu_k|a^{(k)}|^2`
:math:`\langle Q,A\rangle_\mu`  `Overlaps.attention_overlap`
:math:`K_V, K_{VP}`           `Overlaps.value_energy`, `Overlaps.value_overlap`
============================  =========================================================================

The two forms of the model are one while :math:`1^\top a = 1`. The centred one keeps its mean when a proximal step lets
the sum go. Derived here; the model is that of Ren, Wang and Lee (arXiv 2410.23438).
"""

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.bigram.task import BigramTask
from manyheads.errors import ShapeError


class Overlaps(NamedTuple):
    r"""The few numbers that loss and gradients depend on, all float.

    Attributes
    ----------
    value_energy, value_overlap
        :math:`K_V = \operatorname{tr} W S W^\top` and :math:`K_{VP} = \operatorname{tr} W S \tilde P^\top`.
    attention_energy, attention_overlap
        :math:`|A|_\mu^2` and :math:`\langle Q, A\rangle_\mu`.
    value_signal
        :math:`\alpha_V = K_{VP}/K_P`: 1 at the solution.
    attention_signal
        :math:`\alpha_A = \langle Q - 1/T, A\rangle_\mu / K_Q`: 1 at the solution. Not a number when all positions are
        looked at alike, where there is nothing to find.
    """

    value_energy: float
    value_overlap: float
    attention_energy: float
    attention_overlap: float
    value_signal: float
    attention_signal: float


class Gradients(NamedTuple):
    """A gradient for the value matrix (N, N) and one for the attention (N, T), float64."""

    value: np.ndarray
    attention: np.ndarray


class _Rows(NamedTuple):
    """Of each row of the attention, (N,): its square norm, its product with the true weights, its sum."""

    energies: np.ndarray
    overlaps: np.ndarray
    sums: np.ndarray


def check_weights(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> None:
    """Refuse weights whose shapes do not belong to a task.

    Raises
    ------
    ShapeError
        With the shapes given and expected.
    """
    shapes, expected = (value.shape, attention.shape), ((task.vocabulary,) * 2, (task.vocabulary, task.length))
    if shapes != expected:
        raise ShapeError(
            f"value {shapes[0]} and attention {shapes[1]}: this task needs {expected[0]} and {expected[1]}"
        )


@takes_arrays
def measure_overlaps(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> Overlaps:
    """Measure how much weights have of the task's transition and of its positions.

    Parameters
    ----------
    task
        The task.
    value, attention
        Centred value matrix (N, N) and attention (N, T), of any float type; sums run in float64.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> found = measure_overlaps(task, 0.5 * task.centred, task.attention)
    >>> round(found.value_signal, 6), round(found.attention_signal, 6), round(found.value_energy, 6)
    (0.5, 1.0, 0.05)
    """
    check_weights(task, value, attention)
    law, rows = task.stationary, _rows(task, attention)
    value = np.asarray(value, float)
    inner = float(law @ (value * task.centred).sum(0))
    mean = value @ law
    signal = float(law @ (rows.overlaps - rows.sums / task.length))
    return Overlaps(
        float(law @ (value**2).sum(0)) - float(mean @ mean),
        inner,
        float(law @ rows.energies),
        float(law @ rows.overlaps),
        inner / task.transition_energy,
        signal / task.attention_energy if task.attention_energy > 1e-12 else float("nan"),
    )


@takes_arrays
def excess(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> float:
    r"""Return how far the loss is above the best, :math:`\tfrac12\mathbb E|f - \mathbb E[e_y|X,k]|^2`, exactly.

    .. math:: \tfrac12\sum_k\mu_k\big(|a|^2\operatorname{tr}WSW^\top - 2(a\cdot q)\operatorname{tr}WS\tilde P^\top
              + |q|^2K_P + s^2|W\mu|^2\big)

    Parameters
    ----------
    task
        The task.
    value, attention
        Centred value matrix (N, N) and attention (N, T); neither needs to fulfil any constraint.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> round(excess(task, task.centred, task.attention), 12)
    0.0
    """
    check_weights(task, value, attention)
    law, rows = task.stationary, _rows(task, attention)
    value = np.asarray(value, float)
    mean = value @ law
    energy = float(law @ (value**2).sum(0)) - float(mean @ mean)
    inner = float(law @ (value * task.centred).sum(0))
    constant = task.weight_energy * task.transition_energy
    total = float(law @ rows.energies) * energy - 2 * float(law @ rows.overlaps) * inner + constant
    return 0.5 * (total + float(law @ rows.sums**2) * float(mean @ mean))


def bayes_loss(task: BigramTask) -> float:
    r"""Return the least loss that any predictor has, :math:`\tfrac12(1 - |\mu|^2 - K_P\sum_k\mu_k|q^{(k)}|^2)`.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> round(bayes_loss(draw_task(np.random.default_rng(0), 3, 10, 1)), 6)  # (1 - 1/3 - 1/5) / 2
    0.233333
    """
    law = task.stationary
    return 0.5 * (1 - float(law @ law) - task.transition_energy * task.weight_energy)


@takes_arrays
def gradients(task: BigramTask, value: np.ndarray, attention: np.ndarray) -> Gradients:
    r"""Return the preconditioned, projected gradients that training descends.

    .. math:: G_V = |A|_\mu^2 W - \langle Q,A\rangle_\mu\tilde P, \qquad
              G_a^{(k)} = K_V(a - s/T) - K_{VP}(q - 1/T)

    They are those of the loss of :math:`f = \mu + WXa`: that of :math:`W` times :math:`\mathrm{diag}(1/\mu)` from the
    right, that of :math:`a^{(k)}` divided by :math:`\mu_k` and freed of its mean over the positions.

    Parameters
    ----------
    task
        The task.
    value
        Centred value matrix (N, N) with :math:`W\mu = 0`.
    attention
        (N, T); its rows may have any sum.

    Raises
    ------
    ShapeError
        The shapes are not those of the task, or :math:`W\mu \ne 0`.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> both = gradients(task, task.centred, task.attention)
    >>> bool(abs(both.value).max() < 1e-12), bool(abs(both.attention).max() < 1e-12)
    (True, True)
    """
    check_weights(task, value, attention)
    value, attention = np.asarray(value, float), np.asarray(attention, float)
    law, rows = task.stationary, _rows(task, attention)
    off = np.abs(value @ law).max()
    if off > 1e-6 * (1 + np.abs(value).max()):
        raise ShapeError(
            f"value moves the stationary law by {off:.2g}: subtract (value @ stationary) from every column"
        )
    energy, inner = float(law @ (value**2).sum(0)), float(law @ (value * task.centred).sum(0))
    for_value = float(law @ rows.energies) * value - float(law @ rows.overlaps) * task.centred
    for_attention = energy * (attention - rows.sums[:, None] / task.length) + inner / task.length
    np.put_along_axis(
        for_attention,
        task.positions,
        np.take_along_axis(for_attention, task.positions, 1) - inner * task.weights,
        axis=1,
    )
    return Gradients(for_value, for_attention)


@takes_arrays
def raw_gradients(task: BigramTask, full_value: np.ndarray, attention: np.ndarray) -> Gradients:
    r"""Return the plain gradients of :math:`L` in :math:`V` and :math:`A`, exactly, with no constraint on either.

    .. math::
        \partial_V L &= \sum_k\mu_k\big[|a|^2VS + s^2V\mu\mu^\top - (a\cdot q)PS - s\,P\mu\mu^\top\big] \\
        \partial_{a^{(k)}} L &= \mu_k\big[(v - |V\mu|^2)\,a + |V\mu|^2 s 1 - (c - V\mu\cdot P\mu)\,q
                              - (V\mu\cdot P\mu) 1\big]

    with :math:`v = \operatorname{tr}V\,\mathrm{diag}\mu\,V^\top`, :math:`c = \operatorname{tr}V\,\mathrm{diag}\mu\,
    P^\top`.

    Parameters
    ----------
    task
        The task.
    full_value
        :math:`V`, (N, N), the mean included.
    attention
        (N, T).

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> both = raw_gradients(task, task.transition, task.attention)
    >>> bool(abs(both.value).max() < 1e-12), bool(abs(both.attention).max() < 1e-12)
    (True, True)
    """
    check_weights(task, full_value, attention)
    full_value, attention = np.asarray(full_value, float), np.asarray(attention, float)
    law, rows = task.stationary, _rows(task, attention)
    spread = np.diag(law) - np.outer(law, law)  # S
    mean = full_value @ law  # V mu; P mu is mu itself
    for_value = float(law @ rows.energies) * full_value @ spread - float(law @ rows.overlaps) * task.transition @ spread
    for_value += np.outer(float(law @ rows.sums**2) * mean - float(law @ rows.sums) * law, law)
    square, cross = float(mean @ mean), float(mean @ law)
    energy = float(law @ (full_value**2).sum(0)) - square
    inner = float(law @ (full_value * task.transition).sum(0)) - cross
    for_attention = energy * attention + square * rows.sums[:, None] - inner * task.attention - cross
    return Gradients(for_value, law[:, None] * for_attention)


def _rows(task: BigramTask, attention: np.ndarray) -> _Rows:
    """Measure each row, in float64 whatever the type of the attention, without a dense copy of the true weights."""
    energies = np.einsum("kt,kt->k", attention, attention, dtype=float)
    on_support = np.take_along_axis(attention, task.positions, axis=1).astype(float)  # (N, Q)
    return _Rows(energies, (on_support * task.weights).sum(1), attention.sum(1, dtype=float))

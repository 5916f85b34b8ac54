r"""Why attention entropy drops and rebounds, and when it cannot.

Dictionary: component l of a neuron has the target :math:`\mu_l`, the weight :math:`v_l = \mu_l (1 - \delta_l)`, the
logit :math:`s_l = v_l^2/2` (theorem 1 for exp attention) and the attention :math:`p = \mathrm{softmax}(s)`, whose
entropy is H. What follows is derived here; the paper shows it as a picture.

*The rate.* :math:`\dot H = -\mathrm{Cov}_p(s, \dot s)`: entropy falls as long as the larger logits climb faster, and
can rise only when a smaller one catches up.

*The end.* Near the end :math:`s_l = \mu_l^2/2 - \mu_l^2 \delta_l` to first order, so that

.. math:: H - H_\infty \simeq \sum_l p_l\,(s_l - \bar s)\,\mu_l^2 \delta_l ,

and the slowest component decides. With a rate r(mu) that grows with mu that is the *smallest* one, whose logit is
below the mean: the entropy comes to its end **from below, whatever the targets, unless all are equal**. For two
components this is the late gap,

.. math:: \tfrac12 (v_1^2 - v_2^2) - \tfrac12 (\mu_1^2 - \mu_2^2) \simeq \mu_2^2 \delta_2 - \mu_1^2 \delta_1 > 0 .

*No bounce.* With one rate for all, :math:`s_l = (1 - \delta)^2 \mu_l^2/2`: a common factor grows, and entropy only
falls. With a linear activation, :math:`\dot v = \mu e^{v^2/2}`, both s and its derivative increase with mu at every
time, so their covariance is never negative (Chebyshev): entropy falls all the way to one-hot. With all targets equal it
does not move. Softmax attention divides all rates by one number: the same path, another clock.

*Stable rank without attention.* The lower layer goes straight from its start :math:`W_0` to what it wants, B, and its
stable rank :math:`|W|_F^2/\sigma_1^2` need not fall all the way: see `final_rank_slope`.

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, section 4 and
figure 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfinv

from manyheads._arrays import follows_caller, takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.joma.theory.salient_first import EXP, Law, find_log_deficit

Array = np.ndarray[Any, np.dtype[Any]]

BOUNCE = 1e-3  # nat: a rise of the entropy that counts as a bounce


@follows_caller
def entropy_of(logits: Any, present: Any = True) -> Any:
    """Entropy of softmax(logits) over the last axis, in nat; entries that are not `present` do not take part.

    Examples
    --------
    >>> float(entropy_of(np.zeros(4)).round(6)), float(np.log(4).round(6))
    (1.386294, 1.386294)
    """
    s = jnp.asarray(logits)
    here = jnp.broadcast_to(jnp.asarray(present), s.shape)
    p = jax.nn.softmax(s, where=here, axis=-1)
    shifted = jnp.where(here, s - s.max(-1, where=here, initial=-jnp.inf, keepdims=True), 0)
    return jnp.log(jnp.exp(shifted).sum(-1, where=here)) - (p * shifted).sum(-1, where=here)


@follows_caller
def entropy_rate(logits: Any, velocity: Any) -> Any:
    r"""Rate :math:`\dot H = -\mathrm{Cov}_p(s, \dot s)` at which entropy changes, in nat per unit of time, last axis.

    Examples
    --------
    >>> float(entropy_rate(np.array([1.0, 0.0]), np.array([1.0, 0.0])).round(6))
    -0.196612
    """
    s, ds = jnp.asarray(logits), jnp.asarray(velocity)
    p = jax.nn.softmax(s, axis=-1)
    return -((p * s * ds).sum(-1) - (p * s).sum(-1) * (p * ds).sum(-1))


@takes_arrays
def entropy_curve(targets: ArrayLike, times: ArrayLike, law: Law = EXP) -> Array:
    """Entropy of the attention at the given times, exactly: every component by quadrature, no step size, shape (T,).

    Parameters
    ----------
    targets
        mu > 0, shape (M,).
    times
        Zero or later, shape (T,).

    Examples
    --------
    >>> curve = entropy_curve([1.0, 2.0, 3.0], [0.0, 0.7, 2.0, 30.0])
    >>> curve.round(3).tolist()  # ln 3, falling, rising, resting
    [1.099, 0.173, 0.344, 0.349]
    """
    mu, t = np.asarray(targets, np.float64), np.asarray(times, np.float64)
    if mu.ndim != 1 or t.ndim != 1:
        raise ShapeError(f"targets {mu.shape}, times {t.shape}: expected (M,) and (T,)")
    v = -mu * np.expm1(-find_log_deficit(mu, t[:, None], law))  # (T, M)
    return np.asarray(entropy_of(v**2 / 2))


@takes_arrays
def linear_entropy_curve(targets: ArrayLike, shares: ArrayLike) -> Array:
    r"""Entropy under a linear activation at shares of the time of blow-up, from the erf solution, shape (T,).

    .. math:: v_l = \sqrt 2\,\mathrm{erfinv}(\sqrt{2/\pi}\,\mu_l t), \qquad t^* = \sqrt{\pi/2}/\max \mu

    Examples
    --------
    >>> linear_entropy_curve([1.0, 2.0, 3.0], [0.0, 0.9, 0.999999]).round(2).tolist()
    [1.1, 0.94, 0.0]
    """
    mu, share = np.asarray(targets, np.float64), np.asarray(shares, np.float64)
    if not (np.all(mu > 0) and np.all((share >= 0) & (share < 1))):
        raise UsageError(f"targets={targets!r}, shares={shares!r}: expected positive targets, shares in [0, 1)")
    v = np.sqrt(2) * erfinv(share[:, None] * mu / mu.max())
    return np.asarray(entropy_of(v**2 / 2))


@takes_arrays
def predict_approach(targets: ArrayLike, law: Law = EXP) -> int:
    """Tell from which side the entropy comes to its end: -1 from below (a bounce), 1 from above, 0 it does not move.

    Derived from the slowest components, those of the smallest final rate; components that tie are taken together.

    Raises
    ------
    UsageError
        Targets that are not positive, or a law for which leading order does not decide.

    Examples
    --------
    >>> from manyheads.joma.theory.salient_first import UNIFORM
    >>> predict_approach([1.0, 2.0, 3.0]), predict_approach([1.0, 2.0, 3.0], UNIFORM), predict_approach([2.0, 2.0])
    (-1, 1, 0)
    """
    mu = np.asarray(targets, np.float64)
    if mu.ndim != 1 or not np.all(mu > 0):
        raise UsageError(f"targets={targets!r}: expected positive targets, shape (M,)")
    if np.ptp(mu) == 0:
        return 0
    log_rates = law.log_rate(mu, mu, np)
    s = mu**2 / 2
    p = np.exp(s - s.max())
    slowest = log_rates <= log_rates.min() + 1e-12
    leading = float((p * (s - p @ s / p.sum()) * mu**2)[slowest].sum())
    if leading == 0:
        raise UsageError(f"law {law.name!r}: the slowest component sits at the mean, leading order does not decide")
    return int(np.sign(leading))


@takes_arrays
def late_gap(targets: tuple[float, float], log_deficits: tuple[ArrayLike, ArrayLike]) -> Array:
    r"""How much the gap of two logits exceeds its end: :math:`\tfrac12(v_1^2 - v_2^2) - \tfrac12(\mu_1^2 - \mu_2^2)`.

    Written with the deficits, :math:`\mu_2^2 (\delta_2 - \delta_2^2/2) - \mu_1^2 (\delta_1 - \delta_1^2/2)`, so that it
    keeps its digits however late. Positive at the end whenever the first component is the faster one.

    Examples
    --------
    >>> float(late_gap((3.0, 2.0), (18.6, 1.0)).round(3))
    1.201
    """
    (one, two), (first, second) = targets, (np.exp(-np.asarray(part, np.float64)) for part in log_deficits)
    return np.asarray(two**2 * (second - second**2 / 2) - one**2 * (first - first**2 / 2))


@takes_arrays
def final_rank_slope(wanted: ArrayLike, start: ArrayLike) -> float:
    r"""Slope of the stable rank at the end of a straight line from `start` to `wanted`, over twice the rank there.

    .. math:: \frac{1}{2\,\mathrm{sr}} \frac{d\,\mathrm{sr}}{da}\Big|_{a=1}
        = \frac{u^\top W_0 v}{\sigma_1(B)} - \frac{\langle B, W_0 \rangle}{|B|_F^2}, \qquad W = (1 - a) W_0 + a B,

    with B's first singular vectors u, v: from the derivatives of :math:`|W|_F^2` and :math:`\sigma_1`. It changes its
    sign with the start, so a start that is as likely as its negative is followed by a rise at the end in half of all
    layers, attention or none. Derived here.

    Parameters
    ----------
    wanted, start
        B and :math:`W_0`, shape (K, M); the largest singular value of B is simple.

    Raises
    ------
    ShapeError
        Matrices of different shapes.

    Examples
    --------
    >>> round(final_rank_slope([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]), 12)  # 1/2 - 2/5
    0.1
    """
    b, w = np.asarray(wanted, np.float64), np.asarray(start, np.float64)
    if b.ndim != 2 or b.shape != w.shape:
        raise ShapeError(f"wanted {b.shape}, start {w.shape}: expected two matrices of one shape")
    left, sizes, right = np.linalg.svd(b, full_matrices=False)
    return float(left[:, 0] @ w @ right[0] / sizes[0] - (b * w).sum() / (b**2).sum())


class Bounce(NamedTuple):
    """How far a curve falls from its start to its lowest point, and how far it rises from there to its end."""

    drop: Any
    rise: Any


@follows_caller
def measure_bounce(curve: Any) -> Bounce:
    """Measure drop and rise of curves (..., T).

    Examples
    --------
    >>> found = measure_bounce(np.array([3.0, 1.0, 2.5]))
    >>> float(found.drop), float(found.rise)
    (2.0, 1.5)
    """
    values = jnp.asarray(curve)
    lowest = values.min(-1)
    return Bounce(values[..., 0] - lowest, values[..., -1] - lowest)

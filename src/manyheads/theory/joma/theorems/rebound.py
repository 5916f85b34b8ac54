r"""Drop and rebound of attention entropy and stable rank (section 4, figure 4), with their conditions.

Dictionary: component l of a neuron has the target :math:`\mu_l`, the weight :math:`v_l = \mu_l (1 - \delta_l)`, the
logit :math:`s_l = v_l^2/2` (theorem 1 for exp attention) and the attention :math:`p = \mathrm{softmax}(s)`, whose
entropy is H. All of the following is derived here; the paper shows curves.

*Rate of change.* :math:`\dot H = -\mathrm{Cov}_p(s, \dot s)`: entropy falls while the larger logits grow faster, and
rises only when a smaller one catches up.

*Approach to the limit.* Late in training :math:`s_l = \mu_l^2/2 - \mu_l^2 \delta_l` to first order, so that

.. math:: H - H_\infty \simeq \sum_l p_l\,(s_l - \bar s)\,\mu_l^2 \delta_l ,

and the slowest component decides. With a rate r(mu) that grows with mu that is the *smallest* one, whose logit is
below the mean: the entropy approaches its limit **from below for any targets that are not all equal**.

*No rebound.* With one rate for all, :math:`s_l = (1 - \delta)^2 \mu_l^2/2`: a common factor grows, and entropy
decreases. With a linear activation, :math:`\dot v = \mu e^{v^2/2}`, both s and its derivative increase with mu at every
time, so their covariance is nonnegative (Chebyshev) and entropy decreases to zero. With equal targets it is constant.
Softmax attention divides all rates by a common factor: the same trajectory at other times.

*Stable rank without attention.* The lower layer moves on a straight line from its initialization :math:`W_0` to its
target B; its stable rank :math:`|W|_F^2/\sigma_1^2` need not decrease monotonically: see `final_rank_slope`.

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, section 4 and
figure 4.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.special import erfinv

from manyheads._arrays import follows_caller, takes_arrays
from manyheads._namespaces import Array
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.theorems.salient_first import EXP, RateLaw, find_log_deficit

REBOUND = 1e-3  # nat: the smallest rise of the entropy that counts as a rebound


@follows_caller
def entropy_of(logits: Float[ArrayLike, "... tokens"], present: Array | bool = True) -> Array:
    """Compute the entropy of softmax(logits) over the `present` entries of the last axis, in nat."""
    s = jnp.asarray(logits)
    here = jnp.broadcast_to(jnp.asarray(present), s.shape)
    p = jax.nn.softmax(s, where=here, axis=-1)
    shifted = jnp.where(here, s - s.max(-1, where=here, initial=-jnp.inf, keepdims=True), 0)
    return jnp.log(jnp.exp(shifted).sum(-1, where=here)) - (p * shifted).sum(-1, where=here)


@takes_arrays
def entropy_curve(
    targets: Float[ArrayLike, " tokens"], times: Float[ArrayLike, " times"], law: RateLaw = EXP
) -> Float[np.ndarray, " times"]:
    """Compute the attention entropy at the given times, in nat, every component by exact quadrature.

    Targets mu > 0; times of zero or later.

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
def linear_entropy_curve(
    targets: Float[ArrayLike, " tokens"], fractions: Float[ArrayLike, " times"]
) -> Float[np.ndarray, " times"]:
    r"""Compute the entropy under a linear activation at fractions of the blow-up time, by the erf law.

    .. math:: v_l = \sqrt 2\,\mathrm{erfinv}(\sqrt{2/\pi}\,\mu_l t), \qquad t^* = \sqrt{\pi/2}/\max \mu
    """
    mu, fraction = np.asarray(targets, np.float64), np.asarray(fractions, np.float64)
    if not (np.all(mu > 0) and np.all((fraction >= 0) & (fraction < 1))):
        raise UsageError(f"targets={targets!r}, fractions={fractions!r}: expected targets > 0, fractions in [0, 1)")
    v = np.sqrt(2) * erfinv(fraction[:, None] * mu / mu.max())
    return np.asarray(entropy_of(v**2 / 2))


@takes_arrays
def predict_approach(targets: Float[ArrayLike, " tokens"], law: RateLaw = EXP) -> int:
    """Predict the side from which the entropy approaches its limit: -1 below (a rebound), 1 above, 0 constant.

    The slowest components decide, those of the smallest final rate, ties taken together.

    Raises `UsageError`: targets that are not positive, or a rate law for which leading order does not decide.
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
        raise UsageError(
            f"law {law.name!r}: the logit of the slowest component is the mean, so leading order does not decide"
        )
    return int(np.sign(leading))


@takes_arrays
def final_rank_slope(target: Float[ArrayLike, "neurons tokens"], init: Float[ArrayLike, "neurons tokens"]) -> float:
    r"""Compute the slope of the stable rank at the end of a straight line from `init` to `target`, over twice the rank.

    .. math:: \frac{1}{2\,\mathrm{sr}} \frac{d\,\mathrm{sr}}{da}\Big|_{a=1}
        = \frac{u^\top W_0 v}{\sigma_1(B)} - \frac{\langle B, W_0 \rangle}{|B|_F^2}, \qquad W = (1 - a) W_0 + a B,

    with the leading singular vectors u, v of B, whose largest singular value is simple. It is odd in :math:`W_0`: with
    a symmetric distribution of the initialization the stable rank rises at the end in half of all layers, without
    attention too. Derived here.
    """
    b, w = np.asarray(target, np.float64), np.asarray(init, np.float64)
    if b.ndim != 2 or b.shape != w.shape:
        raise ShapeError(f"target {b.shape}, init {w.shape}: expected two matrices of one shape")
    left, sizes, right = np.linalg.svd(b, full_matrices=False)
    return float(left[:, 0] @ w @ right[0] / sizes[0] - (b * w).sum() / (b**2).sum())

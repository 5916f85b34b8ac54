r"""Theorem 2: winner-take-all attention under a linear activation and a stationary gradient.

Dictionary (the paper's letter, the field's name)
-------------------------------------------------
======================  ===============================================================================================
v, (M,)                 token weights of the single neuron, zero at initialization
z, (M,)                 attention logits, initially zero (exp) or one (linear)
:math:`\Delta`          gain of each token, E[g x]: frequency weighted by the backpropagated gradient, constant
s                       sharpness, :math:`r/T^2` from the learning-rate ratio r and the temperature T; 1 in the paper
======================  ===============================================================================================

Exp attention: :math:`\dot v_l = \Delta_l e^{z_l/T}` and, by theorem 1, :math:`z_l = \frac{r}{2T} v_l^2`, hence

.. math:: \dot v_l = \Delta_l e^{s v_l^2/2}, \qquad
          \operatorname{erf}(v_l \sqrt{s/2}) = \sqrt{2s/\pi}\, \Delta_l t,

because :math:`\int_0^v e^{-s u^2/2} du = \sqrt{\pi/(2s)} \operatorname{erf}(v \sqrt{s/2})`. The ratio
:math:`\operatorname{erf}(v_l\sqrt{s/2})/\Delta_l` is the same for all tokens. At
:math:`t^* = \sqrt{\pi/(2s)}/\max|\Delta|` the weight of the largest gain diverges, the other weights stay finite, and
the attention is one-hot.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA", ICLR 2024 (arXiv 2310.00535), theorem 2. The blow-up time, the limits
of the other weights, the sharpness, the scale :math:`\sqrt{s/2}` and the solution for linear attention are derived
here.
"""

import math

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.special import erf, erfinv

from manyheads._arrays import takes_arrays
from manyheads.errors import UsageError


@takes_arrays
def blowup_time(gains: Float[ArrayLike, " tokens"], s: float = 1.0) -> float:
    r"""Compute :math:`t^* = \sqrt{\pi/(2s)} / \max|\Delta|`, at which the weight of the largest gain diverges.

    Raises `UsageError`: no gain, or only zeros.

    Examples
    --------
    >>> round(blowup_time([0.5, -2.0]), 6)
    0.626657
    """
    return math.sqrt(math.pi / (2 * s)) / float(np.abs(_check(gains, s)).max())


def _check(gains: Float[ArrayLike, " tokens"], s: float) -> Float[np.ndarray, " tokens"]:
    delta = np.asarray(gains, np.float64)
    if delta.ndim != 1 or not np.isfinite(delta).all() or not np.abs(delta).max(initial=0) > 0:
        raise UsageError(f"gains of shape {delta.shape}: expected (M,), finite, and not all zero")
    if not s > 0:
        raise UsageError(f"sharpness {s}: must be positive")
    return delta


@takes_arrays
def reaching_time(gains: Float[ArrayLike, " tokens"], level: float, s: float = 1.0) -> float:
    r"""Compute when the largest :math:`|v|` reaches a level: :math:`\operatorname{erf}(\sqrt{s/2}\, level)\, t^*`."""
    return float(erf(level * math.sqrt(s / 2))) * blowup_time(gains, s)


@takes_arrays
def weights_at(
    gains: Float[ArrayLike, " tokens"], times: Float[ArrayLike, " times"], s: float = 1.0
) -> Float[np.ndarray, "times tokens"]:
    r"""Compute :math:`v_l(t) = \sqrt{2/s}\, \operatorname{erf}^{-1}(\sqrt{2s/\pi}\, \Delta_l t)`; v(0) = 0.

    Raises `UsageError`: a time at or after the blow-up.
    """
    delta, t = _check(gains, s), np.asarray(times, np.float64)
    end = blowup_time(delta, s)
    if t.max(initial=0) >= end:
        raise UsageError(f"time {t.max():.6g}: expected times before the blow-up at {end:.6g}")
    return np.asarray(math.sqrt(2 / s) * erfinv(math.sqrt(2 * s / math.pi) * np.multiply.outer(t, delta)))


@takes_arrays
def frozen_weights(gains: Float[ArrayLike, " tokens"], s: float = 1.0) -> Float[np.ndarray, " tokens"]:
    r"""Compute the weights at the blow-up, :math:`\sqrt{2/s}\,\operatorname{erf}^{-1}(\Delta_l/\max|\Delta|)`.

    Infinite for the largest gain, ties included.
    """
    delta = _check(gains, s)
    return np.asarray(math.sqrt(2 / s) * erfinv(delta / np.abs(delta).max()))


@takes_arrays
def common_ratio(gains: Float[ArrayLike, " tokens"], weights: Float[ArrayLike, " tokens"], scale: float) -> float:
    r"""Compute the range over tokens of :math:`\operatorname{erf}(scale \cdot v_l)/\Delta_l` over its mean.

    Zero in theory at scale :math:`\sqrt{s/2}`.
    """
    ratios = erf(scale * np.asarray(weights)) / _check(gains, 1.0)
    return float(np.ptp(ratios) / np.abs(ratios.mean()))


@takes_arrays
def linear_attention_at(
    gains: Float[ArrayLike, " tokens"],
    times: Float[ArrayLike, " times"],
    init: float = 1.0,
    learning_rate_ratio: float = 1.0,
) -> tuple[Float[np.ndarray, "times tokens"], Float[np.ndarray, "times tokens"]]:
    r"""Compute v and z under linear attention (T = 1), :math:`\dot v = \Delta z, \dot z = r \Delta v`: no blow-up.

    .. math:: v_l = \frac{z_0}{\sqrt r} \sinh(\sqrt r \Delta_l t), \qquad z_l = z_0 \cosh(\sqrt r \Delta_l t)

    No weight converges. Derived here.
    """
    delta, root = _check(gains, learning_rate_ratio), math.sqrt(learning_rate_ratio)
    phase = root * np.multiply.outer(np.asarray(times, np.float64), delta)
    return np.asarray(init / root * np.sinh(phase)), np.asarray(init * np.cosh(phase))

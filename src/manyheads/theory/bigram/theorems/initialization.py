r"""Initialization of training from scratch: how far from uniform it may be, and which sign it leads to.

**Uniform values** :math:`V = 11^\top/N` are :math:`W = V - \mu1^\top = 0` where tokens are equally frequent. Elsewhere
:math:`W = (1/N - \mu)1^\top` moves the stationary distribution: projected gradients keep :math:`W\mu`, and the excess
loss keeps :math:`\tfrac12|1/N - \mu|^2`.

**Perturbed.** Near zero both signals grow from :math:`\alpha_V + \alpha_A + \delta` with the drift
:math:`\delta = 1/(TK_Q)` (`manyheads.theory.bigram.theorems.signal`). Independent entries of standard deviation
:math:`w` in the values, and :math:`c/T` in the attention, have signals of standard deviation

.. math:: \frac w{K_P}\Big(\sum_j\mu_j^2|\tilde P_j|^2\Big)^{1/2}, \qquad
          c\,\delta\Big(\sum_k\mu_k^2|q^{(k)} - 1/T|^2\Big)^{1/2},

:math:`w/\sqrt{NK_P}` and :math:`c\,\delta\sqrt{K_Q/N}` at equal frequencies. The attention's squared norm is then
:math:`(1 + c^2)/T`, and so much larger is the early noise of the values. With :math:`s` the root sum of squares of both
signals over :math:`\delta`,

.. math:: \Pr(\text{sign-flipped solution}) = \Phi\big(-1/\sqrt{\rho^2(1 + c^2) + s^2}\big),

so a perturbation that does not shrink as :math:`1/T` leads to flipped signs in half of the runs.

**Softmax** weights are positive and exclude the sign-flipped solution. With equal weights and the learning rate
:math:`\eta_A/\max a^2`, time in units of :math:`1/\eta`, :math:`x = Ta` of the true positions and
:math:`\alpha_V = \delta v`,

.. math:: \dot v = x, \qquad \dot x = x^2v \ (x \le 1), \qquad \dot x = v \ (x \ge 1),

so :math:`v^2 - 2\ln x` is conserved below one. Values of the wrong sign, :math:`v(0) = -c`, turn around at
:math:`\ln x = -c^2/2`, and after

.. math:: 2\int_0^c e^{(c^2 - s^2)/2}\,ds

:math:`x` is 1 and :math:`v` is :math:`+c`: training continues as if the sign had been right, where linear attention
ends at the sign-flipped solution for all :math:`c > 1`. At the end the sum :math:`p` of the attended weights saturates,
:math:`\dot p = v(1 - pv)(1 - p)^2` in place of :math:`v(1 - pv)`, and the escape comes later by a constant.

The initializations are those that the reviews of Ren, Wang and Lee (arXiv 2410.23438) ask for; all formulas are derived
here.
"""

import math

from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import erf

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask


def value_spread(task: BigramTask, std: float) -> float:
    """Return the standard deviation of the value signal of independent entries, in units of the drift."""
    mu = task.stationary
    signal = std * float(mu**2 @ (task.centred**2).sum(0)) ** 0.5 / task.transition_squared_norm
    return signal * task.length * task.attention_squared_norm


def attention_spread(task: BigramTask, relative: float, init_noise: float) -> float:
    r"""Return the same of the attention, for entries of standard deviation `relative` / T, with the noise they add.

    `init_noise` is :math:`\rho`; zero gives the signal alone.
    """
    away = (task.weights**2).sum(1) - 1 / task.length
    return relative * math.sqrt(float(task.stationary**2 @ away) + init_noise**2)


def sign_correction(wrong: float) -> float:
    """Return the e-foldings after which a softmax head has turned values of -`wrong` drifts into as many of them."""
    if not wrong >= 0:
        raise UsageError(f"wrong={wrong}: give a number of drifts, zero or more")
    return 2 * math.exp(wrong**2 / 2) * math.sqrt(math.pi / 2) * float(erf(wrong / math.sqrt(2)))


def saturation_delay(limit: float = 0.3) -> float:
    r"""Return the e-foldings by which saturation delays the escape of a softmax head, the product at `limit`.

    :math:`v^2/2 = \ln(1-p) + p/(1-p)` while both grow, so the time is a quadrature in :math:`p`; without saturation
    :math:`v = p`, and it is :math:`\tfrac12\ln(x/(1-x))` at the product :math:`x` up to the same constant.
    """
    if not 0 < limit < 1:
        raise UsageError(f"limit={limit}: give a product of both signals between 0 and 1")

    def signal(p: float) -> float:
        # the series avoids cancellation
        return math.sqrt(2 * (math.log1p(-p) + p / (1 - p))) if p > 1e-3 else p * math.sqrt(1 + 4 * p / 3)

    def excess_slowness(p: float) -> float:
        v = signal(p)
        return 1 / (v * (1 - p * v) * (1 - p) ** 2) - 1 / p

    last = brentq(lambda p: p * signal(p) - limit, 1e-6, 1 - 1e-6)
    slow, _ = quad(excess_slowness, 1e-9, last)
    return float(slow) + math.log(last) - 0.5 * math.log(limit / (1 - limit))

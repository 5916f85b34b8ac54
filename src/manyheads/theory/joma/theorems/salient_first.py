r"""Theorem 4: salient components are learned first; exact learning times and the affine law of the log deficit.

Dictionary: a component v starts at zero and goes to its target :math:`\mu > 0` by

.. math:: \dot v = (\mu - v)\,r(v), \qquad \delta = 1 - v/\mu,

with the rate r that attention gives it; theorem 4 has :math:`r = e^{v^2/2}` (exp attention, :math:`z = v^2/2` by
theorem 1). In the *log deficit* :math:`L = \ln(1/\delta)` the flow is :math:`\dot L = r(\mu(1 - e^{-L}))`, which is
not stiff and keeps its digits for any deficit. Hence, for any rate law r that is smooth and positive on [0, mu],

.. math::
    t(\delta) = \frac{1}{r(\mu)} \Big[\ln\frac1\delta
    + \int_\delta^1 \Big(\frac{r(\mu)}{r(\mu(1-s))} - 1\Big) \frac{ds}{s} \Big],
    \qquad \ln\frac1\delta = r(\mu)\,t - B(\mu) + O(\delta),

with the *offset* :math:`B = \int_0^1` of the same integrand. The paper gives the ratio of two log deficits up to
constants; the exact time, the offset, the other rate laws, and the condition for overshooting are derived here.

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, theorem 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Float

from manyheads._arrays import takes_arrays
from manyheads.errors import CertificateError, UsageError

Given = Float[ArrayLike, "*shape"]
Values = Float[np.ndarray, "*shape"]

LARGEST = 25.0  # exp(25²/2) is 5e135: beyond, rates of regression, exp(mu²) and more, leave double precision
ORDER = 16  # Gauss-Legendre points of a panel
TOLERANCE = 1e-12
NEWTON_STEPS = 60


@dataclass(frozen=True)
class RateLaw:
    """Rate law of a component, by the logarithm of r(v; mu).

    ln r is elementwise, a function of v, mu and their array module (`numpy` or `jax.numpy`), nondecreasing in v.

    Examples
    --------
    >>> float(EXP.log_rate(2.0, 3.0, np))
    2.0
    """

    name: str  # identity: laws of equal names are equal
    log_rate: Callable[[Any, Any, ModuleType], Any] = field(compare=False, repr=False)


def _regression(v: Any, mu: Any, xp: ModuleType) -> Any:
    # (mu e^{mu²/2} - v e^{v²/2}) / (mu - v) = e^{v²/2} [1 + mu (e^y - 1) / (mu - v)] with y = (mu² - v²)/2, and the
    # quotient is (mu + v)/2 (e^y - 1)/y, which has no pole at v = mu.
    y = (mu - v) * (mu + v) / 2
    small = xp.abs(y) < 1e-8
    safe = xp.where(small, 1.0, y)
    quotient = xp.where(small, 1 + y / 2, xp.expm1(safe) / safe)
    return v**2 + xp.log1p(mu * (mu + v) / 2 * quotient)


EXP = RateLaw("exp", lambda v, mu, xp: v**2 / 2 + 0 * mu)
"""Theorem 4: exp attention, and softmax attention up to a change of time common to all components."""

UNIFORM = RateLaw("uniform", lambda v, mu, xp: 0 * (v + mu))
"""Attention that does not learn: every component relaxes at rate one."""

LINEAR = RateLaw("linear", lambda v, mu, xp: xp.log1p(v**2) / 2 + 0 * mu)
"""Linear attention initialized at z = 1: z² - v² is conserved, so r = (1 + v²)^(1/2)."""

REGRESSION = RateLaw("regression", _regression)
"""Exp attention under a squared loss on h = v exp(v²/2): r = e^{v²/2} (mu e^{mu²/2} - v e^{v²/2}) / (mu - v)."""


@takes_arrays
def final_rate(target: Given, law: RateLaw = EXP) -> Values:
    r"""Compute the slope r(mu) of the affine law, e^{mu²/2} for exp attention."""
    mu = _targets(target)
    return np.asarray(np.exp(law.log_rate(mu, mu, np)))


@takes_arrays
def exact_time(target: Given, log_deficit: Given, law: RateLaw = EXP) -> Values:
    r"""Compute by quadrature when a component that starts at zero reaches :math:`v = \mu (1 - e^{-L})`.

    Targets mu are positive and at most 25, log deficits L = ln(1/delta) of any size >= 0; they broadcast.

    Raises `UsageError`: targets or deficits outside their ranges. `CertificateError`: two quadratures, one of twice as
    many points, differ by more than 1e-12 relative.

    Examples
    --------
    >>> float(exact_time(2.0, np.log(1e6)).round(6))
    2.72823
    """
    mu, goal = np.broadcast_arrays(_targets(target), np.asarray(log_deficit, np.float64))
    if not np.all((goal >= 0) & np.isfinite(goal)):
        raise UsageError(f"log_deficit={log_deficit!r}: expected ln(1/delta), zero or more and finite")
    return (goal + _offset(mu, np.exp(-goal), law)) / final_rate(mu, law)


@takes_arrays
def affine_offset(target: Given, law: RateLaw = EXP) -> Values:
    r"""Compute the offset B of the affine law :math:`\ln(1/\delta) = r(\mu)\,t - B(\mu)`; the rest is below mu² delta.

    .. math:: B(\mu) = \int_0^1 \frac{e^{\mu^2 (s - s^2/2)} - 1}{s}\,ds \quad \text{(exp attention)}

    Examples
    --------
    >>> affine_offset([1.0, 2.0, 3.0]).round(3).tolist()
    [0.881, 6.344, 55.501]
    """
    mu = _targets(target)
    return _offset(mu, np.zeros_like(mu), law)


@takes_arrays
def find_log_deficit(target: Given, time: Given, law: RateLaw = EXP) -> Values:
    r"""Invert `exact_time`: the log deficit L = ln(1/delta) at a time, v = mu (1 - exp(-L)).

    Newton's iteration from the larger of two lower bounds, t r(0) and r(mu) t - B. The time is a concave function of
    the log deficit where r is nondecreasing, so the iteration converges monotonically.

    Raises `UsageError`: negative times, or targets outside their range. `CertificateError`: the iteration did not
    converge.
    """
    mu, t = np.broadcast_arrays(_targets(target), np.asarray(time, np.float64))
    if not np.all((t >= 0) & np.isfinite(t)):
        raise UsageError(f"time={time!r}: expected times of zero or more")
    rate, offset = final_rate(mu, law), affine_offset(mu, law)
    found = np.maximum(t * np.exp(law.log_rate(0 * mu, mu, np)), rate * t - offset)
    for _ in range(NEWTON_STEPS):
        left = t - exact_time(mu, found, law)
        step = left * np.exp(law.log_rate(-mu * np.expm1(-found), mu, np))
        found = np.maximum(found + step, 0)
        if np.all(np.abs(step) <= 1e-12 * (1 + found)):
            return found
    worst = float(np.max(np.abs(step) / (1 + found)))
    raise CertificateError(
        "the Newton iteration for the log deficit did not converge: split the times", measured=worst, threshold=1e-12
    )


@takes_arrays
def deficit_ratio(first: Given, second: Given, log_deficit: Given, law: RateLaw = EXP) -> Values:
    r"""Compute the ratio of two log deficits, :math:`\ln(1/\delta_j)/\ln(1/\delta_k)`, if the second is `log_deficit`.

    It goes to :math:`r(\mu_j)/r(\mu_k)`, which is :math:`e^{(\mu_j^2 - \mu_k^2)/2}` for exp attention, slowly:

    .. math:: \frac{L_j}{L_k} = \frac{r_j}{r_k} \Big[1 + \frac{r_k\,(\tau_k - \tau_j)}{L_k}\Big] + O(\delta).

    with the *waiting time* :math:`\tau = B/r`. The limit is no bound at finite times: it is exceeded wherever the
    waiting time of j is the shorter one. For exp attention :math:`\tau` is largest near mu = 1.87.
    """
    goal = np.asarray(log_deficit, np.float64)
    if not np.all(goal > 0):
        raise UsageError(f"log_deficit={log_deficit!r}: a ratio needs positive ones")
    return find_log_deficit(first, exact_time(second, goal, law), law) / goal


def _targets(target: ArrayLike) -> Values:
    mu = np.asarray(target, np.float64)
    if not np.all((mu > 0) & (mu <= LARGEST)):
        raise UsageError(
            f"target={target!r}: expected positive targets of at most {LARGEST:g}; flip the sign of negative ones"
        )
    return mu


def _offset(mu: np.ndarray, deficit: np.ndarray, law: RateLaw) -> Values:
    """Integrate (r(mu)/r(mu (1 - s)) - 1)/s from the deficit to one, elementwise."""
    if mu.size == 0:
        return np.zeros(mu.shape)
    panels = math.ceil(2 + 2 * float(mu.max()))
    coarse, fine = (_integral(mu, deficit, law, count) for count in (panels, 2 * panels))
    error = float(np.max(np.abs(fine - coarse) / (1 + np.abs(fine))))
    if not error <= TOLERANCE:
        raise CertificateError(
            f"the quadrature of the rate law {law.name!r} did not converge", measured=error, threshold=TOLERANCE
        )
    return fine


def _integral(mu: np.ndarray, deficit: np.ndarray, law: RateLaw, panels: int) -> Values:
    nodes, quadrature = np.polynomial.legendre.leggauss(ORDER)
    places = ((np.arange(panels)[:, None] + (1 + nodes) / 2) / panels).ravel()  # in (0, 1)
    weights = np.tile(quadrature / 2 / panels, panels)
    width = (1 - deficit)[..., None]
    s = deficit[..., None] + width * places  # (..., points)
    end = mu[..., None]
    gain = law.log_rate(end, end, np) - law.log_rate(end * (1 - s), end, np)
    return np.asarray((width * np.expm1(gain) / s) @ weights)

r"""Lucky neurons: when the first of many randomly initialized neurons is won, and by which token.

Under exp attention, a linear activation and a constant gain :math:`\Delta` (theorem 2) a weight that begins at
:math:`v_0` with logit :math:`z_0` obeys :math:`\dot v = \Delta e^{z_0 + (v^2 - v_0^2)/2}`, and reaches a level V at

.. math:: T(v_0) = \frac{\sqrt{2\pi}}{\Delta}\, e^{v_0^2/2 - z_0} [Q(v_0) - Q(V)]_+

with the normal tail Q. Two initializations of attention differ by much:

* "aligned", :math:`z_0 = v_0^2/2`: attention begins where the weights are large. For standard normal :math:`v_0` the
  tail :math:`Q(v_0)` is uniform, so the first of n neurons arrives after
  :math:`\sqrt{2\pi}(1 - Q(V))^{n+1}/((n + 1)\Delta)` on average: a power law in the width.
* "uniform", :math:`z_0 = 0`: up to Q(V) the time is Mills' ratio over the gain, about :math:`1/v_0` for a large
  :math:`v_0`. The largest of n normal numbers grows as :math:`(2 \ln n)^{1/2}`, so width helps by its logarithm only.

A token of smaller gain wins a neuron that starts beyond the separatrix :math:`T_2(v_2) = T_1(v_1)`: for aligned
attention and equal standard deviations of one with probability :math:`\Delta_2/(2 \Delta_1)`. Some of n neurons is won
with :math:`1 - (1 - p)^n`. Derived here from theorem 2.
"""

import math

import numpy as np
from jaxtyping import ArrayLike, Float, Int
from scipy.special import ndtr
from scipy.stats import norm

from manyheads._arrays import takes_arrays
from manyheads.errors import UsageError

ATTENTIONS = ("aligned", "uniform")
GRID = np.linspace(-9.0, 9.0, 36_001)  # standard normal numbers, for quadrature


@takes_arrays
def winning_time(
    init: Float[ArrayLike, "*shape"], gain: float, level: float, attention: str = "aligned"
) -> Float[np.ndarray, "*shape"]:
    """Compute when a weight that begins at `init` reaches the level; zero if it begins above.

    Raises `UsageError`: a gain that is not positive, or another attention than "aligned" and "uniform".
    """
    if attention not in ATTENTIONS or not gain > 0:
        raise UsageError(f"attention={attention!r}, gain={gain}: expected one of {ATTENTIONS} and a positive gain")
    v = np.asarray(init, np.float64)
    left = np.maximum(ndtr(-v) - ndtr(-level), 0.0)
    factor = np.exp(np.minimum(v, level) ** 2 / 2) if attention == "uniform" else 1.0
    return np.asarray(math.sqrt(2 * math.pi) / gain * factor * left)


def mean_first_time(width: int, gain: float, level: float, std: float = 1.0, attention: str = "aligned") -> float:
    """Compute the mean time at which the first of `width` neurons reaches the level, by quadrature."""
    largest = np.diff(ndtr(GRID) ** width)  # probability of the largest of n normal numbers
    middle = (GRID[1:] + GRID[:-1]) / 2
    return float(largest @ winning_time(std * middle, gain, level, attention))


def winning_probability(
    gains: tuple[float, float], level: float, horizon: float, std: float = 1.0, attention: str = "aligned"
) -> float:
    """Compute the probability that the second of two tokens reaches the level first, and before the horizon."""
    middle = (GRID[1:] + GRID[:-1]) / 2
    first, second = (winning_time(std * GRID, gain, level, attention) for gain in gains)
    times = (second[1:] + second[:-1]) / 2
    # The first token is later than t if its start is below the one from which it arrives at t: times fall with starts.
    # Starts above the level arrive at once; a tie goes to the first token.
    start = np.interp(-times, -first, GRID)
    later = np.where(times > 0, ndtr(start), ndtr(level / std))
    weights = norm.pdf(middle) * np.diff(GRID)
    return float(weights @ (later * (times < horizon)))


@takes_arrays
def some_neuron(probability: Float[ArrayLike, ""], width: Int[ArrayLike, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Compute the probability that at least one of `width` neurons is won, 1 - (1 - p)^n."""
    return np.asarray(-np.expm1(np.asarray(width, np.float64) * np.log1p(-np.asarray(probability, np.float64))))


@takes_arrays
def shared_output(
    init: Float[ArrayLike, "networks neurons"], target: float, level: float
) -> Float[np.ndarray, "networks neurons"]:
    r"""Compute what each neuron adds to an output that the neurons learn together, uniform attention at the start.

    All neurons see one gain, which fades as their summed change of output :math:`h = v e^z` approaches the target, so
    they have one accumulated gain :math:`\tau`, with
    :math:`\sqrt{2\pi} e^{v_0^2/2}[Q(v_0) - Q(v)] = \tau` for each. It is found by bisection; weights end at `level`.
    """
    v0 = np.asarray(init, np.float64)

    def change(tau: np.ndarray) -> np.ndarray:
        tail = ndtr(-v0) - tau * np.exp(-(v0**2) / 2) / math.sqrt(2 * math.pi)
        v = np.minimum(-norm.ppf(np.maximum(tail, ndtr(-level))), level)
        return np.asarray(v * np.exp((v**2 - v0**2) / 2) - v0)

    low = np.zeros((len(v0), 1))
    high = winning_time(v0, 1.0, level, "uniform").min(1, keepdims=True)
    for _ in range(60):
        tau = (low + high) / 2
        over = change(tau).sum(1, keepdims=True) > target
        low, high = np.where(over, low, tau), np.where(over, tau, high)
    return change((low + high) / 2)

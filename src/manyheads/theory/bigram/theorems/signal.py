r"""Signal system: two signals and the squared norms of the noise reproduce stage one.

Without noise the weights stay on :math:`W = \alpha_V\tilde P`, :math:`A = 1/T + \alpha_A(Q - 1/T)`, where

.. math::
    \dot\alpha_V &= \eta_V\,[K_Q\alpha_A(1 - \alpha_A\alpha_V) + (1 - \alpha_V)/T], \\
    \dot\alpha_A &= \eta_A\,K_P\alpha_V(1 - \alpha_A\alpha_V), \\
    \text{excess} &= \tfrac12K_P\,[K_Q(1 - \alpha_A\alpha_V)^2 + (1 - \alpha_V)^2/T].

The plane has two stationary points: :math:`(1, 1)`, the solution, and a saddle at :math:`\alpha_V = 0`,
:math:`\alpha_A = -1/(TK_Q)`. The hyperbola :math:`\alpha_A\alpha_V = 1` is nearly flat: along it only the drift
:math:`1/T` acts. Its other branch contains the **sign-flipped solution** :math:`(-1, -1)`, whose excess is only
:math:`2K_P/T`. It is not a minimum: there :math:`\dot\alpha_V = 2\eta_V/T`, and a run drifts along the branch, towards
:math:`\alpha_V\to0^-`, for a time that grows with T. The map `W -> -W, a -> 2/T - a` corrects it.

**With the noise of batches of B**, at equal frequencies and to leading order in :math:`1/T`, let :math:`E` and
:math:`F` be the squared norms of the noise in the attention and in the values:

.. math::
    \dot\alpha_V &= \eta_V[K_Q\alpha_A + 1/T - |A|^2\alpha_V], \quad |A|^2 = 1/T + K_Q\alpha_A^2 + E, \\
    \dot\alpha_A &= \eta_A[K_P\alpha_V - K_V\alpha_A], \quad K_V = K_P\alpha_V^2 + F, \\
    \dot E &= -2\eta_AK_VE + \eta_A^2TK_V/B, \\
    \dot F &= -2\eta_V|A|^2F + \eta_V^2|A|^2\,((1 - 1/N)(N-1) - 1/N)/B .

With :math:`\eta_V = \eta/K_Q`, :math:`\eta_A = \eta/K_P` time counts in units of :math:`1/\eta` and the noise in

.. math:: \kappa_2 = \frac{\eta T}{B K_PK_Q} .

Noise also determines the sign. The growing mode is :math:`\alpha_V + \alpha_A + \delta` with
:math:`\delta = 1/(TK_Q)`, and until it is large the noise of the value gradient sums up to
:math:`\delta\rho z` with a normal :math:`z`:

.. math:: \rho^2 = \frac{\kappa_2K_Q}{2N}, \qquad
          \Pr(\text{sign-flipped solution}) = \Phi(-1/\rho) = \Phi\big(-\sqrt{2N/(\kappa_2K_Q)}\big).

The system without noise is that of Ren, Wang and Lee (arXiv 2410.23438) up to the factor :math:`1/K_Q` of the drift;
the noise, the sign and the escape time are derived here.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.integrate import solve_ivp
from scipy.stats import norm

from manyheads._arrays import takes_arrays
from manyheads.errors import CertificateError, UsageError
from manyheads.theory.bigram.task import BigramTask

POINTS = 4096  # times of the search for the escape, a few hundredths of a unit apart
PRECISION = 1e-10


@dataclass(frozen=True)
class SignalSystem:
    r"""Parameters of the signal system."""

    transition_squared_norm: float  # K_P
    attention_squared_norm: float  # K_Q
    length: int  # T
    vocabulary: int  # N
    value_learning_rate: float  # eta_V; time is measured in steps
    attention_learning_rate: float  # eta_A
    batch: float = float("inf")  # samples of a step, which determine the noise; infinite for none

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if wrong := {name: value for name, value in named.items() if not value > 0}:
            raise UsageError(f"{wrong}: give positive squared norms, rates, length, vocabulary and batch")

    @classmethod
    def of(
        cls, task: BigramTask, value_learning_rate: float, attention_learning_rate: float, batch: float = float("inf")
    ) -> "SignalSystem":
        """Return the system of a task."""
        rates = value_learning_rate, attention_learning_rate, batch
        return cls(task.transition_squared_norm, task.attention_squared_norm, task.length, task.vocabulary, *rates)

    @property
    def growth(self) -> float:
        r"""Rate of the exponential growth of small signals, :math:`\eta = \sqrt{\eta_V\eta_AK_PK_Q}`, per step."""
        rates = self.value_learning_rate * self.attention_learning_rate
        return (rates * self.transition_squared_norm * self.attention_squared_norm) ** 0.5

    @property
    def noise_ratio(self) -> float:
        r"""Noise against signal, :math:`\kappa_2 = \eta T/(BK_PK_Q)`."""
        return self.growth * self.length / (self.batch * self.transition_squared_norm * self.attention_squared_norm)

    @property
    def init_noise(self) -> float:
        r"""Standard deviation :math:`\rho` of the summed early noise, in units of the drift; for balanced rates."""
        return (self.noise_ratio * self.attention_squared_norm / (2 * self.vocabulary)) ** 0.5

    @property
    def drift(self) -> float:
        r"""Drift :math:`\delta = 1/(TK_Q)` from which small signals grow."""
        return 1 / (self.length * self.attention_squared_norm)

    @property
    def flip_probability(self) -> float:
        r"""Probability of the sign-flipped solution, :math:`\Phi(-1/\rho)`, as T grows; for balanced rates."""
        return self.flip_probability_from(0.0)

    def flip_probability_from(self, spread: float, shift: float = 0.0) -> float:
        r"""Return :math:`\Phi(-(1 + m)/\sqrt{\rho^2 + s^2})`: signals start at a sum of mean m, std s (in drifts)."""
        std = math.hypot(self.init_noise, spread)
        return float(norm.cdf(-(1 + shift) / std)) if std else float(shift < -1)

    def typical_init(self, spread: float = 0.0) -> tuple[float, float]:
        r"""Return effective initial signals, of the median run that reaches the solution.

        Early noise of such a run is a normal :math:`z > -1/\rho`; its median is added to :math:`\alpha_V`. Initial
        signals whose sum has a standard deviation of `spread` drifts are part of it.
        """
        std = math.hypot(self.init_noise, spread)
        if not std:
            return 0.0, 0.0
        middle = float(norm.isf(norm.cdf(1 / std) / 2))
        return self.drift * std * middle * (self.value_learning_rate * self.attention_squared_norm / self.growth), 0.0


class SignalTrajectory(NamedTuple):
    """The system at given times, float64 arrays of one length; `times` in steps."""

    times: np.ndarray
    value_signal: np.ndarray
    attention_signal: np.ndarray
    attention_noise: np.ndarray
    value_noise: np.ndarray


@takes_arrays
def solve_signals(system: SignalSystem, times: np.ndarray, init: tuple[float, float] = (0.0, 0.0)) -> SignalTrajectory:
    """Solve the system from given signals of values and attention, without initial noise.

    `times` (K,) are in steps and increasing; the first is the initial time.
    """
    times = np.asarray(times, float)
    if times.ndim != 1 or len(times) < 2 or (np.diff(times) <= 0).any():
        raise UsageError("times: give two or more, each later than the one before")
    found = solve_ivp(
        partial(_derivative, system),
        (times[0], times[-1]),
        [*init, 0.0, 0.0],
        method="LSODA",  # loud noise makes it stiff
        t_eval=times,
        rtol=PRECISION,
        atol=PRECISION / system.length,  # small signals are of size 1 / T
    )
    if not (found.success and np.isfinite(found.y).all()):
        raise CertificateError(
            "the solver of the signal system stopped before the last time: use smaller learning rates or fewer steps",
            measured=float(found.t[-1]) if found.t.size else float(times[0]),
            threshold=float(times[-1]),
        )
    return SignalTrajectory(times, *found.y)


def predict_escape(
    system: SignalSystem, limit: float = 0.3, spread: float = 0.0, init: tuple[float, float] | None = None
) -> float:
    r"""Predict the steps after which a typical run has :math:`\alpha_A\alpha_V` above a limit.

    It starts from the signals `init`, by default those of `SignalSystem.typical_init(spread)`. Runs that reach the
    sign-flipped solution are excluded. The time of the system is stretched by :math:`\eta/\ln(1+\eta)`, since a step of
    training multiplies by :math:`1+\eta` what grows like :math:`e^\eta` in the system. Infinite where noise keeps the
    product below the limit for :math:`10\,(\ln T + 3)` units of time.

    Measured against medians over 400 runs of `manyheads.theory.bigram.training.reduced_model` with :math:`\eta = .05`,
    N = 3 and 10, T = 1,000 and 100,000: within 6% for :math:`\kappa_2\le8.7`; at 16 within 3% for T = 100,000 and 23%
    too pessimistic for T = 1,000, N = 3.
    """
    if not 0 < limit < 1:
        raise UsageError(f"limit={limit}: give a product of both signals between 0 and 1")
    horizon = 10 * (np.log(system.length) + 3) / system.growth
    path = solve_signals(system, np.linspace(0.0, horizon, POINTS), init or system.typical_init(spread))
    product = path.value_signal * path.attention_signal
    above = np.flatnonzero(product > limit)
    if not above.size:
        return float("inf")
    last = above[0]
    share = (limit - product[last - 1]) / (product[last] - product[last - 1])
    time = float(path.times[last - 1] + share * (path.times[last] - path.times[last - 1]))
    return time * system.growth / float(np.log1p(system.growth))


def value_noise_directions(vocabulary: int) -> float:
    """Return the share of a batch's value noise that is not along the transition, at equal frequencies."""
    return (1 - 1 / vocabulary) * (vocabulary - 1) - 1 / vocabulary


def _derivative(system: SignalSystem, time: float, state: np.ndarray) -> tuple[float, float, float, float]:
    """Return the right-hand side, which does not depend on time."""
    value, attention, attention_noise, value_noise = state
    share, noise = 1 / system.length, 1 / system.batch
    norm = share + system.attention_squared_norm * attention**2 + attention_noise  # |A|^2
    values = system.transition_squared_norm * value**2 + value_noise  # K_V
    directions = value_noise_directions(system.vocabulary)
    by_value, by_attention = system.value_learning_rate, system.attention_learning_rate
    return (
        by_value * (system.attention_squared_norm * attention + share - norm * value),
        by_attention * (system.transition_squared_norm * value - values * attention),
        -2 * by_attention * values * attention_noise + by_attention**2 * values * noise / share,
        -2 * by_value * norm * value_noise + by_value**2 * norm * directions * noise,
    )

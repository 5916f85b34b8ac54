r"""The few numbers that stage one moves: two signals, and the energy of the noise that it puts everywhere else.

Without noise the weights stay on :math:`W = \alpha_V\tilde P`, :math:`A = 1/T + \alpha_A(Q - 1/T)`, where

.. math::
    \dot\alpha_V &= \eta_V\,[K_Q\alpha_A(1 - \alpha_A\alpha_V) + (1 - \alpha_V)/T], \\
    \dot\alpha_A &= \eta_A\,K_P\alpha_V(1 - \alpha_A\alpha_V), \\
    \text{excess} &= \tfrac12K_P\,[K_Q(1 - \alpha_A\alpha_V)^2 + (1 - \alpha_V)^2/T].

The plane has two stationary points: :math:`(1, 1)`, the solution, and a saddle at :math:`\alpha_V = 0`,
:math:`\alpha_A = -1/(TK_Q)`. The hyperbola :math:`\alpha_A\alpha_V = 1` is nearly flat: along it only the drift
:math:`1/T` moves. Its other branch holds the **mirror point** :math:`(-1, -1)`, whose excess is :math:`2K_P/T` only.
It is no minimum: there :math:`\dot\alpha_V = 2\eta_V/T`, and a run creeps on along the branch, towards
:math:`\alpha_V\to0^-`, for a time that grows with T. Its cure is `W -> -W, a -> 2/T - a`.

**With the noise of batches of B**, at equal frequencies and to leading order in :math:`1/T`, write :math:`E` for the
energy that noise has put into the attention and :math:`F` for that in the values:

.. math::
    \dot\alpha_V &= \eta_V[K_Q\alpha_A + 1/T - |A|^2\alpha_V], \quad |A|^2 = 1/T + K_Q\alpha_A^2 + E, \\
    \dot\alpha_A &= \eta_A[K_P\alpha_V - K_V\alpha_A], \quad K_V = K_P\alpha_V^2 + F, \\
    \dot E &= -2\eta_AK_VE + \eta_A^2TK_V/B, \\
    \dot F &= -2\eta_V|A|^2F + \eta_V^2|A|^2\,((1 - 1/N)(N-1) - 1/N)/B .

With :math:`\eta_V = \eta/K_Q`, :math:`\eta_A = \eta/K_P` time counts in units of :math:`1/\eta` and the noise in

.. math:: \kappa_2 = \frac{\eta T}{B K_PK_Q} .

Noise also decides the start. The growing mode is :math:`\alpha_V + \alpha_A + \delta` with
:math:`\delta = 1/(TK_Q)`, and until it is large the value gradient adds independent kicks that sum up to
:math:`\delta\rho z` with a normal :math:`z`:

.. math:: \rho^2 = \frac{\kappa_2K_Q}{2N}, \qquad
          \Pr(\text{the run goes to the mirror side}) = \Phi(-1/\rho) = \Phi\big(-\sqrt{2N/(\kappa_2K_Q)}\big).

Everything in this module is derived here but the system without noise, which is that of Ren, Wang and Lee (arXiv
2410.23438) up to the factor :math:`1/K_Q` of the drift.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.integrate import solve_ivp
from scipy.stats import norm

from manyheads._arrays import takes_arrays
from manyheads.bigram.task import BigramTask
from manyheads.errors import CertificateError, UsageError

POINTS = 4096  # at which a boost is looked for, a few hundredths of a time unit apart
PRECISION = 1e-10


@dataclass(frozen=True)
class SignalSystem:
    r"""The numbers that the system depends on.

    Attributes
    ----------
    transition_energy, attention_energy
        :math:`K_P` and :math:`K_Q`.
    length, vocabulary
        :math:`T` and :math:`N`.
    value_rate, attention_rate
        :math:`\eta_V` and :math:`\eta_A`; time counts in steps.
    batch
        Samples of a step, which make the noise; infinite for none.

    Examples
    --------
    >>> system = SignalSystem(0.2, 0.5, length=1000, vocabulary=3, value_rate=0.02, attention_rate=0.05, batch=10)
    >>> round(system.growth, 6), round(system.noise_ratio, 6), round(system.mirror_share, 3)
    (0.01, 10.0, 0.137)
    """

    transition_energy: float
    attention_energy: float
    length: int
    vocabulary: int
    value_rate: float
    attention_rate: float
    batch: float = float("inf")

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if wrong := {name: value for name, value in named.items() if not value > 0}:
            raise UsageError(f"{wrong}: energies, rates, length, vocabulary and batch are positive")

    @classmethod
    def of(
        cls, task: BigramTask, value_rate: float, attention_rate: float, batch: float = float("inf")
    ) -> "SignalSystem":
        """Return the system of a task."""
        return cls(
            task.transition_energy,
            task.attention_energy,
            task.length,
            task.vocabulary,
            value_rate,
            attention_rate,
            batch,
        )

    @property
    def growth(self) -> float:
        r"""Rate of the exponential growth of small signals, :math:`\eta = \sqrt{\eta_V\eta_AK_PK_Q}`, per step."""
        return (self.value_rate * self.attention_rate * self.transition_energy * self.attention_energy) ** 0.5

    @property
    def noise_ratio(self) -> float:
        r"""Noise against signal, :math:`\kappa_2 = \eta T/(BK_PK_Q)`."""
        return self.growth * self.length / (self.batch * self.transition_energy * self.attention_energy)

    @property
    def kick(self) -> float:
        r"""Standard deviation :math:`\rho` of the sum of early kicks, in units of the drift; for balanced rates."""
        return (self.noise_ratio * self.attention_energy / (2 * self.vocabulary)) ** 0.5

    @property
    def mirror_share(self) -> float:
        r"""Share of runs that go to the mirror side, :math:`\Phi(-1/\rho)`, as T grows; for balanced rates."""
        return float(norm.cdf(-1 / self.kick)) if self.kick else 0.0

    def typical_start(self) -> tuple[float, float]:
        r"""Return the signals from which the median of the runs on the right side starts.

        The kicks of a run on the right side are a normal :math:`z > -1/\rho`; the median of those is put into
        :math:`\alpha_V`.
        """
        if not self.kick:
            return 0.0, 0.0
        middle = float(norm.isf(norm.cdf(1 / self.kick) / 2))
        drift = 1 / (self.length * self.attention_energy)
        return drift * self.kick * middle * (self.value_rate * self.attention_energy / self.growth), 0.0


class SignalPath(NamedTuple):
    """The system at given times, float64 arrays of one length; `times` count in steps."""

    times: np.ndarray
    value_signal: np.ndarray
    attention_signal: np.ndarray
    attention_noise: np.ndarray
    value_noise: np.ndarray


@takes_arrays
def signal_excess(system: SignalSystem, value_signal: Any, attention_signal: Any) -> Any:
    """Return the excess loss on the plane of the two signals.

    Examples
    --------
    >>> system = SignalSystem(0.2, 0.5, length=1000, vocabulary=3, value_rate=1, attention_rate=1)
    >>> signal_excess(system, 1.0, 1.0), signal_excess(system, -1.0, -1.0)  # the second is 2 K_P / T
    (0.0, 0.0004)
    """
    valley = system.attention_energy * (1 - value_signal * attention_signal) ** 2
    return 0.5 * system.transition_energy * (valley + (1 - value_signal) ** 2 / system.length)


@takes_arrays
def solve_signals(system: SignalSystem, times: np.ndarray, start: tuple[float, float] = (0.0, 0.0)) -> SignalPath:
    """Solve the system from given signals.

    Parameters
    ----------
    system
        Energies, rates, noise.
    times
        Rising, in steps, (K,); the first is where the system starts.
    start
        Signals of values and attention there. Noise has put nothing anywhere yet.

    Raises
    ------
    UsageError
        Times that do not rise.
    CertificateError
        The solver did not get to the last time.

    Examples
    --------
    >>> system = SignalSystem(0.2, 0.5, length=1000, vocabulary=3, value_rate=0.02, attention_rate=0.05)
    >>> path = solve_signals(system, np.array([0.0, 200.0, 2000.0]))
    >>> path.value_signal.round(3).tolist()  # 200 steps: sinh(2) / 500 = .0073
    [0.0, 0.007, 1.001]
    """
    times = np.asarray(times, float)
    if times.ndim != 1 or len(times) < 2 or (np.diff(times) <= 0).any():
        raise UsageError("times: give two or more, each later than the one before")
    found = solve_ivp(
        partial(_slope, system),
        (times[0], times[-1]),
        [*start, 0.0, 0.0],
        method="LSODA",  # loud noise makes it stiff
        t_eval=times,
        rtol=PRECISION,
        atol=PRECISION / system.length,  # small signals are of size 1 / T
    )
    if not (found.success and np.isfinite(found.y).all()):
        raise CertificateError(
            "the solver of the signal system stopped before the last time; smaller rates or a shorter time",
            measured=float(found.t[-1]) if found.t.size else float(times[0]),
            threshold=float(times[-1]),
        )
    return SignalPath(times, *found.y)


def predict_boost(system: SignalSystem, limit: float = 0.3) -> float:
    r"""Predict after how many steps a typical run on the right side has :math:`\alpha_A\alpha_V` above a limit.

    The time of the system is stretched by :math:`\eta/\ln(1+\eta)`, since a step of training multiplies by
    :math:`1+\eta` what grows like :math:`e^\eta` in the system.

    Returns
    -------
    float
        Steps; infinity where noise keeps the product below the limit for :math:`10\,(\ln T + 3)` units of time.

    Notes
    -----
    Measured here against medians over 400 runs of `manyheads.bigram.training.reduced_model` with :math:`\eta = .05`,
    N = 3 and 10,
    T = 1,000 and 100,000: within 6% for :math:`\kappa_2\le8.7`, and at 16 within 3% for T = 100,000 and 23% too
    pessimistic for T = 1,000, N = 3.

    Examples
    --------
    >>> system = SignalSystem(0.2, 0.5, length=100_000, vocabulary=3, value_rate=0.02, attention_rate=0.05, batch=1e5)
    >>> round(predict_boost(system) * system.growth, 1)  # ln T - .3 while noise is small
    11.2
    """
    if not 0 < limit < 1:
        raise UsageError(f"limit={limit}: the product of both signals goes from 0 to 1")
    horizon = 10 * (np.log(system.length) + 3) / system.growth
    path = solve_signals(system, np.linspace(0.0, horizon, POINTS), system.typical_start())
    product = path.value_signal * path.attention_signal
    above = np.flatnonzero(product > limit)
    if not above.size:
        return float("inf")
    last = above[0]
    share = (limit - product[last - 1]) / (product[last] - product[last - 1])
    time = float(path.times[last - 1] + share * (path.times[last] - path.times[last - 1]))
    return time * system.growth / float(np.log1p(system.growth))


def _directions(vocabulary: int) -> float:
    """Return how much of a batch's scatter of the values is not along the transition, for equal frequencies."""
    return (1 - 1 / vocabulary) * (vocabulary - 1) - 1 / vocabulary


def _slope(system: SignalSystem, time: float, state: np.ndarray) -> tuple[float, float, float, float]:
    """Return the right side; the time does not enter."""
    value, attention, spread, scatter = state
    share, noise = 1 / system.length, 1 / system.batch
    energy = share + system.attention_energy * attention**2 + spread  # |A|^2
    values = system.transition_energy * value**2 + scatter  # K_V
    value_rate, attention_rate, directions = system.value_rate, system.attention_rate, _directions(system.vocabulary)
    return (
        value_rate * (system.attention_energy * attention + share - energy * value),
        attention_rate * (system.transition_energy * value - values * attention),
        -2 * attention_rate * values * spread + attention_rate**2 * values * noise / share,
        -2 * value_rate * energy * scatter + value_rate**2 * energy * directions * noise,
    )

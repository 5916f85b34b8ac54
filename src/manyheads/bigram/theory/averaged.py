r"""Stochastic gradient descent on average: the two signals, dressed with the energies of the noise they carry.

Without noise, :math:`W = \alpha_V\tilde P` and :math:`A = 1/T + \alpha_A(Q - 1/T)` stay what they are and two numbers
tell all. A batch of finite size adds noise to both, which the next steps damp and the next batches renew:

.. math::
    \alpha_V' &= \alpha_V - \eta_W(|A|^2\alpha_V - \langle Q,A\rangle), \qquad
    \alpha_A' = \alpha_A - \eta_A(K_V\alpha_A - K_P\alpha_V), \\
    E' &= (1-\eta_AK_V)^2 E + \eta_A^2T\sigma^2, \qquad
    F' = (1-\eta_W|A|^2)^2 F + \eta_W^2 |A|^2\,(N-1)\operatorname{tr}R/B,

with :math:`E` the energy of the attention beside its signal and :math:`F` that of the values,

.. math::
    |A|^2 = \alpha_A^2K_Q + 1/T + E, \quad \langle Q,A\rangle = \alpha_AK_Q + 1/T, \quad K_V = \alpha_V^2K_P + F.

Where it comes to rest, :math:`E = T\eta_A/2B` whatever the values are, and the noise, which counts in
:math:`|A|^2 K_V`, pulls :math:`\alpha_V` down and pushes :math:`\alpha_A` up along the valley
:math:`\alpha_V\alpha_A = 1`: :math:`\alpha_A^4 \approx 4\eta t\,E/K_Q` with the balanced rates :math:`\eta_W=\eta/K_Q`,
:math:`\eta_A=\eta/K_P`. So plain descent neither fails nor arrives: its loss falls like :math:`t^{-1/2}`.

The variance of one coordinate is :math:`\sigma^2 = N\operatorname{tr}(C_WR)/B`,
:math:`R = S - \langle Q,A\rangle(C_{PW}+C_{PW}^\top) + |A|^2C_W`, :math:`C_W = W\mathrm{diag}(\mu)W^\top`, with rows of
the attention taken alike and :math:`F` spread evenly over directions. Derived here for equally frequent tokens; the
noiseless part is the reduced system of Ren, Wang and Lee (arXiv 2410.23438).
"""

from typing import NamedTuple

import numpy as np

from manyheads.bigram.finite import StepSettings
from manyheads.bigram.task import BigramTask
from manyheads.errors import UsageError


class Averages(NamedTuple):
    """Signals and noise energies after each number of steps, (steps + 1,) each; `excess` over that of the start."""

    value_signal: np.ndarray
    attention_signal: np.ndarray
    attention_noise: np.ndarray
    value_noise: np.ndarray
    excess: np.ndarray


def predict_descent(
    task: BigramTask,
    settings: StepSettings,
    steps: int,
    *,
    signals: tuple[float, float] = (0.0, 0.0),
    noise: bool = True,
) -> Averages:
    r"""Iterate the averages over steps without penalty.

    Parameters
    ----------
    task
        The task; tokens about equally frequent.
    settings
        Batch and rates; a strength is refused.
    steps
        How many.
    signals
        :math:`\alpha_V, \alpha_A` at the start.
    noise
        False: the noiseless two-dimensional system.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=1000, sparsity=2)
    >>> rates = StepSettings(4096, 0.2 / task.attention_energy, 0.2 / task.transition_energy)
    >>> clean = predict_descent(task, rates, 100, signals=(0.4, 0.4), noise=False)
    >>> noisy = predict_descent(task, rates, 100, signals=(0.4, 0.4))
    >>> bool(clean.excess[-1] < 1e-3), bool(0.05 < noisy.excess[-1] < 0.2)
    (True, True)
    """
    if settings.strength:
        raise UsageError(f"strength={settings.strength}: the averages hold for descent without penalty")
    law, size, length = task.stationary, task.vocabulary, task.length
    energy, spread = task.transition_energy, task.attention_energy
    cross = (task.centred * law) @ task.centred.T  # C_P
    covariance = np.diag(law) - np.outer(law, law)  # S
    second, fourth = float((cross * covariance).sum()), float((cross**2).sum())
    even = float(np.trace(covariance)) / (size - 1)  # of noise that is spread over all directions
    (v, u), e, f = signals, 0.0, 0.0
    rows = np.empty((steps + 1, 5))
    for step in range(steps + 1):
        power = u * u * spread + 1 / length + e
        overlap = u * spread + 1 / length
        values = v * v * energy + f
        loss = power * values - 2 * overlap * v * energy + task.weight_energy * energy
        rows[step] = v, u, e, f, loss
        left = 1 - settings.attention_rate * values, 1 - settings.value_rate * power
        if noise:
            mixed = (v * v * second + f * even) - (2 * overlap * v - power * v * v) * v * v * fourth
            residual = float(np.trace(covariance)) - 2 * overlap * v * energy + power * values
            e_new = settings.attention_rate**2 * length * size * max(mixed, 0.0) / settings.batch
            f_new = settings.value_rate**2 * power * (size - 1) * residual / settings.batch
            e, f = left[0] ** 2 * e + e_new, left[1] ** 2 * f + f_new
        v, u = left[1] * v + settings.value_rate * overlap, left[0] * u + settings.attention_rate * energy * v
    return Averages(*rows.T[:4], excess=rows[:, 4] / (spread + 1 / length) / energy)

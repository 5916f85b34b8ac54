r"""Stability: the largest learning rate of a batch, and what a penalty does to the noise of the attention.

**Divergence.** With balanced rates of growth :math:`\eta` per step the noise of the attention reaches the squared norm
:math:`E = \eta_AT/2B`, and the step of the values multiplies them by :math:`1 - \eta_V|A|^2`. It is unstable once
:math:`\eta_VE` is of order one, that is for

.. math:: \eta > \eta_* \propto \sqrt{BK_PK_Q/T} .

`divergence_growth` finds the constant by iterating the mean squares: with :math:`K = K_P\alpha_V^2 + F`,
:math:`A = 1/T + K_Q\alpha_A^2 + E` and the residual's own part :math:`h = 1 + \tfrac{N}{N-1}AK` of the noise,

.. math::
    \alpha_V &\leftarrow \alpha_V + \eta_V(K_Q\alpha_A + 1/T - A\alpha_V), &
    E &\leftarrow (1 - \eta_AK)^2E + \eta_A^2TKh/B, \\
    \alpha_A &\leftarrow \alpha_A + \eta_A(K_P\alpha_V - K\alpha_A), &
    F &\leftarrow (1 - \eta_VA)^2F + \eta_V^2A\,dh/B,

:math:`d = (1 - 1/N)(N - 1) - 1/N`: the signal system of `manyheads.theory.bigram.theorems.signal` in steps of finite
size.

**Penalty.** Off the true positions a weight fluctuates with standard deviation :math:`s`,
:math:`s^2 = \eta_A\sigma^2/2K_V`; a penalty of :math:`r` standard deviations :math:`\sigma` of its gradient makes the
density of :math:`u = a/s` proportional to

.. math:: e^{-u^2/2 - \beta|u|}, \qquad \beta = \frac{r}{\alpha_V^2}\sqrt{2/\eta},

with :math:`K_V = \alpha_V^2K_P` and r counted in the standard deviation at the solution, :math:`\sqrt{K_P/B}`. So a
penalty acts where :math:`r\gtrsim\sqrt\eta`. That of the authors, :math:`\lambda = \varepsilon K_P/(Q^2N^3)`, has
:math:`r = \varepsilon\sqrt{K_PB}/(Q^2N^3)`: one standard deviation takes a batch of
:math:`(Q^2N^3/\varepsilon)^2/K_P`, a polynomial of N and Q as in their theorem.

The form of the authors' penalty is that of the reviews and answers of Ren, Wang and Lee (arXiv 2410.23438); the rest is
derived here.
"""

import math

from scipy.special import erfcx

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.signal import value_noise_directions
from manyheads.theory.bigram.training.proximal_sgd import LIMIT


def divergence_growth(task: BigramTask, batch: int, duration: float) -> float:
    """Return the smallest growth per step at which the mean squares diverge within `duration` e-foldings, to 1%."""
    if batch < 1 or not duration > 0:
        raise UsageError(f"batch={batch}, duration={duration}: give a sample or more, and a positive duration")
    scale = math.sqrt(batch * task.transition_squared_norm * task.attention_squared_norm / task.length)
    low, high = scale / 8, 8 * scale
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _diverges(task, batch, middle, duration) else (middle, high)
    return math.sqrt(low * high)


def _diverges(task: BigramTask, batch: int, growth: float, duration: float) -> bool:
    """Iterate the mean squares."""
    tokens, length, kp, kq = task.vocabulary, task.length, task.transition_squared_norm, task.attention_squared_norm
    directions = value_noise_directions(tokens)
    for_values, for_attention = growth / kq, growth / kp
    value = attention = noise = value_noise = 0.0
    for _ in range(math.ceil(duration / growth)):
        norm, values = 1 / length + kq * attention**2 + noise, kp * value**2 + value_noise
        own = 1 + tokens / (tokens - 1) * norm * values
        value, attention, noise, value_noise = (
            value + for_values * (kq * attention + 1 / length - norm * value),
            attention + for_attention * (kp * value - values * attention),
            (1 - for_attention * values) ** 2 * noise + for_attention**2 * length * values * own / batch,
            (1 - for_values * norm) ** 2 * value_noise + for_values**2 * norm * directions * own / batch,
        )
        if not abs(value) + abs(attention) + noise + value_noise < LIMIT:
            return True
    return False


def theory_penalty(task: BigramTask, precision: float) -> float:
    r"""Return the authors' penalty, :math:`\varepsilon K_P/(Q^2N^3)` with constant one."""
    return precision * task.transition_squared_norm / (task.sparsity**2 * task.vocabulary**3)


def penalty_ratio(task: BigramTask, penalty: float, batch: int) -> float:
    r"""Return a penalty in standard deviations of a coordinate of the gradient at the solution."""
    return penalty / math.sqrt(task.transition_squared_norm / batch)


def remaining_noise(ratio: float, growth: float, value_signal: float = 1.0) -> float:
    r"""Return the mean square of :math:`u`, the noise of a weight under a penalty over that without one."""
    beta = ratio / value_signal**2 * math.sqrt(2 / growth)
    # moments of exp(-u^2/2 - beta u) on u > 0, from Mills' ratio
    mills = math.sqrt(math.pi / 2) * float(erfcx(beta / math.sqrt(2)))
    return 1 + beta**2 - beta / mills

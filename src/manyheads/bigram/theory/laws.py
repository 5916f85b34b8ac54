r"""How many samples: laws for stage one and for the penalty of stage two.

Each law says whether it is derived here or measured here. None is taken from the paper (Ren, Wang and Lee, arXiv
2410.23438), whose bounds are worst cases and hold for batches that nobody could draw. All assume that tokens are about
equally frequent. That of transfer is `manyheads.bigram.predict_transfer`, that of screening
`manyheads.bigram.predict_screening`.
"""

import math

from scipy.stats import norm

from manyheads.bigram.task import BigramTask
from manyheads.bigram.training.proximal_sgd import StepSettings
from manyheads.errors import UsageError

RELIABLE_RATIO = 8.0  # of noise to signal in stage one: above it the boost comes later than the law says, or never
STAGE_ONE_OFFSET = 1.3


def balanced_settings(task: BigramTask, batch: int, *, noise_ratio: float = 4.0) -> StepSettings:
    r"""Return the rates of stage one for a batch and a ratio of noise to signal :math:`\kappa_2`.

    :math:`\eta = \kappa_2BK_PK_Q/T`, :math:`\eta_V = \eta/K_Q`, :math:`\eta_A = \eta/K_P`: signals grow like
    :math:`(1+\eta)^n`. Derived here.

    Raises
    ------
    UsageError
        A ratio that is not positive, or a growth of one or more a step, with the batch that is small enough.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10_000, 2)
    >>> settings = balanced_settings(task, 64, noise_ratio=8.0)
    >>> round(settings.attention_rate * task.transition_energy, 4)
    0.0052
    """
    if not noise_ratio > 0 or batch < 1:
        raise UsageError(f"noise_ratio={noise_ratio}, batch={batch}: both are positive")
    transition, attention = task.transition_energy, _attention_energy(task)
    growth = noise_ratio * batch * transition * attention / task.length
    if growth >= 1:
        raise UsageError(
            f"a batch of {batch} at noise_ratio={noise_ratio:g} would grow by {growth:.2g} a step: at most "
            f"{max(1, int(0.5 * batch / growth))} samples keep to gradient flow"
        )
    return StepSettings(batch, growth / attention, growth / transition)


def find_noise_ratio(task: BigramTask, settings: StepSettings) -> float:
    r"""Return noise against signal in stage one, :math:`\kappa_2 = \eta T/(BK_PK_Q)`, of given rates.

    :math:`\eta = \sqrt{\eta_V\eta_AK_PK_Q}` is the growth per step.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10_000, 2)
    >>> round(find_noise_ratio(task, balanced_settings(task, 64, noise_ratio=3.0)), 6)
    3.0
    """
    energies = task.transition_energy * _attention_energy(task)
    growth = (settings.value_rate * settings.attention_rate * energies) ** 0.5
    return growth * task.length / (settings.batch * energies)


def stage_one_samples(task: BigramTask, noise_ratio: float) -> float:
    r"""Return the samples after which stage one has boosted (both signals' product above .3), from scratch.

    .. math:: n = \frac{T(\ln T + 1.3)}{\kappa_2K_PK_Q}

    Measured here. Its form is derived: :math:`\ln T` units of time until a drift of :math:`1/T` is of order one, at
    :math:`B/\eta` samples each. The offset depends on the noise and was measured at :math:`\kappa_2\approx 9`, N = 3;
    it is -.2 without noise. `manyheads.bigram.theory.signal.predict_boost` predicts it.

    Parameters
    ----------
    task
        Energies and length.
    noise_ratio
        :math:`\kappa_2`, up to 8.

    Raises
    ------
    UsageError
        A ratio above 8, where the law is too optimistic.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 5000, 2)
    >>> f"{stage_one_samples(task, 8.0):,.0f}"
    '59,939'
    """
    if not 0 < noise_ratio <= RELIABLE_RATIO:
        raise UsageError(
            f"noise_ratio={noise_ratio:.3g}: the law holds above 0 and up to {RELIABLE_RATIO:g}; beyond, noise delays "
            "or prevents the boost: manyheads.bigram.theory.signal.predict_boost"
        )
    time = math.log(task.length) + STAGE_ONE_OFFSET
    return task.length * time / (noise_ratio * task.transition_energy * _attention_energy(task))


def mirror_share(task: BigramTask, noise_ratio: float) -> float:
    r"""Return the share of runs whose signals both come out negative.

    .. math:: \Pr = \Phi(-1/\rho), \qquad
              \rho^2 = \frac{\kappa_2K_Q}{2K_P}\operatorname{tr}\big(\tilde P\,\mathrm{diag}\mu\,\tilde P^\top S\big),

    with the trace :math:`K_P/N` at equal frequencies. Derived here, for long contexts and balanced rates: the drift is
    :math:`\delta = 1/(TK_Q)`, and the value gradient of untrained weights, along :math:`\tilde P`, has a variance that
    sums up over the time :math:`1/(2\eta)` to :math:`\rho^2\delta^2`.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 5000, 2)
    >>> [round(mirror_share(task, ratio), 3) for ratio in (2.0, 4.0, 8.0)]
    [0.008, 0.043, 0.113]
    """
    if not noise_ratio > 0:
        raise UsageError(f"noise_ratio={noise_ratio}: a positive number")
    law = task.stationary
    square = (task.centred * law) @ task.centred.T
    spread = float(square.diagonal() @ law - law @ square @ law)
    kick = noise_ratio * _attention_energy(task) / (2 * task.transition_energy) * spread
    return float(norm.cdf(-(kick**-0.5)))


def noise_strength(ratio: float, value_energy: float, batch: int) -> float:
    r"""Return the penalty that is `ratio` standard deviations of the attention's gradient, :math:`r\sqrt{K_V/B}`.

    Derived here, at equal frequencies. Noise is zero altogether above :math:`r = \sqrt{2\ln T}`; 2 to 3 is better at
    few samples. The root is the standard deviation of the gradient over positions, so no knowledge of the task is
    needed: `manyheads.bigram.training.proximal_sgd.observe` measures it.

    Examples
    --------
    >>> noise_strength(2.0, 0.25, 100)
    0.1
    """
    if not (ratio >= 0 and value_energy >= 0 and batch >= 1):
        raise UsageError(f"ratio={ratio}, value_energy={value_energy}, batch={batch}: from 0, 0 and 1")
    return ratio * math.sqrt(value_energy / batch)


def find_shrinkage(task: BigramTask, ratio: float, batch: int) -> float:
    r"""Return by which share of itself the penalty shrinks a weight 1/Q at the solution, :math:`rQ/\sqrt{K_PB}`.

    A weight settles where :math:`K_Va = K_{VP}q - \lambda`; at the solution :math:`K_V = K_{VP} = K_P`. Derived here.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> round(find_shrinkage(draw_task(np.random.default_rng(0), 3, 4000, 2), ratio=2.0, batch=5 * 16), 6)
    1.0
    """
    return noise_strength(ratio, 1.0, batch) * task.sparsity / task.transition_energy**0.5


def required_batch(task: BigramTask, ratio: float, shrinkage: float) -> int:
    r"""Return the batch at which the penalty shrinks a weight 1/Q by a given share, :math:`r^2Q^2/(K_P\delta^2)`.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.bigram.task import draw_task
    >>> required_batch(draw_task(np.random.default_rng(0), 3, 4000, 2), ratio=2.0, shrinkage=0.5)
    320
    """
    if not 0 < shrinkage < 1:
        raise UsageError(f"shrinkage={shrinkage}: between 0 and 1, where nothing is left of the weight")
    return math.ceil((find_shrinkage(task, ratio, 1) / shrinkage) ** 2 - 1e-9)


def _attention_energy(task: BigramTask) -> float:
    energy = task.attention_energy
    if energy <= 1e-12:
        raise UsageError("every position counts alike in this task: K_Q = 0, and there is no position to find")
    return energy

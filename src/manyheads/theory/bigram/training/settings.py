"""Settings of the two-stage algorithm: learning rates from guessed squared norms, penalty, budgets.

The growth per step, the two learning rates and the shrinkage of the penalty follow from guesses of the task's two
squared norms. An error of a factor changes the growth by its square root; the switch and early stopping use samples
only.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from manyheads._constraints import Constrained, Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask, typical_squared_norm
from manyheads.theory.bigram.theorems.sample_complexity import attention_squared_norm
from manyheads.theory.bigram.training.proximal_sgd import StepSettings

SWITCH = 8.0  # robust z-score; the largest of 10^6 normal ones is 5


@dataclass(frozen=True)
class FirstStage(Constrained):
    r"""Stage one: learning rates from guesses of the squared norms, switch and budget.

    The growth per step is :math:`\eta = \kappa_2\,B K_P K_Q / T` and the learning rates are :math:`\eta/K_Q` for values
    and :math:`\eta/K_P` for attention. The samples are close to :math:`T(\ln T + 1.3)/(\kappa_2 K_P K_Q)` up to
    :math:`\kappa_2 = 8`; above, noise dominates (measured here).

    Attributes
    ----------
    transition_squared_norm
        A guess of :math:`K_P`; see `manyheads.theory.bigram.task.typical_squared_norm`. If it is wrong by a factor f,
        the growth is wrong by its square root.
    sparsity
        Largest number of attended positions of a query: a fit keeps at most so many, and fewer if samples confirm
        fewer. As a guess of Q it determines the learning rates, :math:`K_Q = 1/Q - 1/T`.
    noise_ratio
        :math:`\kappa_2`, noise against signal: at most 8.
    switch
        Robust z-score that the largest weight of every row must reach.
    extra
        Growth times to continue after the switch: the smaller weights of a row become visible later than its largest.
    patience
        Budget, in multiples of the steps that the scaling law predicts.
    """

    transition_squared_norm: float = constrained(rule=Constraint(above=0, below=1))
    sparsity: int = constrained(rule=Constraint(least=1))
    batch: int = constrained(64, Constraint(least=1))  # samples of a step
    noise_ratio: float = constrained(8.0, Constraint(above=0))
    switch: float = constrained(SWITCH, Constraint(above=5))  # the largest of 10^6 normal z-scores
    extra: float = constrained(1.0, Constraint(least=0, below=10))
    patience: float = constrained(4.0, Constraint(above=0))

    def squared_norm(self, length: int) -> float:
        """Return the guess of K_Q in a context of this length."""
        if self.sparsity >= length:
            raise UsageError(f"sparsity={self.sparsity} in a context of {length}: give fewer positions")
        return 1 / self.sparsity - 1 / length

    def growth(self, length: int) -> float:
        """Return the growth per step."""
        growth = self.noise_ratio * self.batch * self.transition_squared_norm * self.squared_norm(length) / length
        if growth > 0.5:
            raise UsageError(
                f"a growth of {growth:.2g} per step is too fast for gradient flow: use a batch of at most "
                f"{max(1, int(self.batch * 0.5 / growth))} at noise_ratio={self.noise_ratio}"
            )
        return growth

    def steps(self, length: int) -> StepSettings:
        """Return learning rates and batch of a step."""
        growth = self.growth(length)
        return StepSettings(self.batch, growth / self.squared_norm(length), growth / self.transition_squared_norm)


@dataclass(frozen=True)
class SecondStage:
    r"""Stage two: kind of step, batch, growth per step, penalty, budget and early stopping.

    The ratio r is the penalty in standard deviations of one coordinate of the attention's gradient:
    :math:`\lambda = r\sigma`. Above :math:`\sqrt{2\ln T}` no noise is left; 2 to 3 is better with few samples.
    """

    kind: Literal["proximal", "plain", "none"] = constrained("proximal")  # l1 penalty; none; no stage two
    batch: int = constrained(1024, Constraint(least=1))  # samples of a step
    growth: float = constrained(0.1, Constraint(above=0, most=0.5))  # growth per step, as in `FirstStage`
    ratio: float = constrained(2.5, Constraint(above=0))
    samples: int = constrained(150_000, Constraint(least=1))  # budget
    every: int = constrained(5, Constraint(least=1))  # steps between two evaluations of the held-out loss

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind != "none" and self.samples < self.batch * self.every:
            raise UsageError(f"samples={self.samples}: give at least {self.batch * self.every}, or kind='none'")

    @property
    def penalized(self) -> bool:
        """Whether there is a penalty."""
        return self.kind == "proximal"

    def shrinkage(self, first: FirstStage) -> float:
        r"""Return the share by which the penalty shrinks a weight 1/Q: :math:`r Q/\sqrt{K_P B}`.

        The weight of a position converges to :math:`K_V a = K_{VP} q - \lambda`, and :math:`\lambda = r\sqrt{K_V/B}`.
        """
        return self.ratio * first.sparsity / math.sqrt(first.transition_squared_norm * self.batch)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the whole run."""

    first: FirstStage
    second: SecondStage = field(default_factory=SecondStage)
    held_out: int = constrained(1500, Constraint(least=2))  # early stopping, and as many for the final loss
    fresh: int = constrained(100_000, Constraint(least=1))  # samples of the refit

    def __post_init__(self) -> None:
        check_fields(self)
        share = self.second.shrinkage(self.first) if self.second.penalized else 0.0
        least = math.ceil(self.second.batch * share**2 - 1e-9)
        if share >= 1:
            raise UsageError(
                f"the penalty ratio={self.second.ratio} at batch={self.second.batch} is {share:.2f} of a weight 1/Q "
                f"and sets all to zero: use a batch above {least}, or a smaller ratio"
            )
        if share > 0.5:
            warnings.warn(
                f"the penalty shrinks a weight 1/Q by {share:.0%}; a batch of {4 * least} shrinks it by half",
                stacklevel=3,
            )

    @classmethod
    def for_task(cls, task: BigramTask) -> "TrainingSettings":
        r"""Return default settings, from the task's vocabulary, length and sparsity alone.

        The largest weight of a row, 1/Q or more, reaches a z-score of :math:`\sqrt{2T/\kappa_2K_Q}/Q` on the plateau:
        :math:`\kappa_2` makes it twice the switch. The penalty shrinks a weight 1/Q by .35 at the most.
        """
        guess, length, sparsity = typical_squared_norm(task.vocabulary), task.length, task.sparsity
        first = FirstStage(guess, sparsity)
        z_score = 2 * SWITCH * sparsity
        ratio = min(first.noise_ratio, 2 * length / (first.squared_norm(length) * z_score**2))
        growth = ratio * guess * first.squared_norm(length) / length  # of a batch of one
        first = FirstStage(guess, sparsity, batch=max(1, min(first.batch, int(0.1 / growth))), noise_ratio=ratio)
        second = SecondStage()
        batch = math.ceil(second.batch * max(1.0, second.shrinkage(first) / 0.35) ** 2)
        return cls(first, SecondStage(batch=batch, samples=60 * batch))


def balanced_settings(task: BigramTask, batch: int, *, noise_ratio: float = 4.0) -> StepSettings:
    r"""Return the learning rates of stage one for a batch and a noise-to-signal ratio :math:`\kappa_2`.

    :math:`\eta = \kappa_2BK_PK_Q/T`, :math:`\eta_V = \eta/K_Q`, :math:`\eta_A = \eta/K_P`: signals grow like
    :math:`(1+\eta)^n`. Derived here.
    """
    if not noise_ratio > 0 or batch < 1:
        raise UsageError(f"noise_ratio={noise_ratio}, batch={batch}: give positive numbers")
    transition, attention = task.transition_squared_norm, attention_squared_norm(task)
    growth = noise_ratio * batch * transition * attention / task.length
    if growth >= 1:
        raise UsageError(
            f"a batch of {batch} at noise_ratio={noise_ratio:g} grows by {growth:.2g} a step, too fast for gradient "
            f"flow: use a batch of at most {max(1, int(0.5 * batch / growth))}"
        )
    return StepSettings(batch, growth / attention, growth / transition)

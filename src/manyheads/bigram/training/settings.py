"""Settings of a training run, with the refusals that need no sample: rates from guessed energies, too much penalty.

The growth per step, the two rates and the shrinkage of the penalty follow from a guess of the task's two energies. What
is guessed too large or too small by a factor changes the growth by its square root only, and the switch and the early
stop of the run look at nothing but samples.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from manyheads.bigram.training.proximal_sgd import StepSettings
from manyheads.errors import UsageError

SWITCH = 8.0  # robust standard deviations; the largest of 10^6 normal ones is 5

Second = Literal["proximal", "constrained", "plain", "none"]
Finish = Literal["none", "round", "scale", "values", "joint"]


@dataclass(frozen=True)
class FirstStage:
    r"""Stage one: rates from a guess of the energies, and when to give up.

    The growth per step is :math:`\eta = g\,B K_P K_Q / T` and the rates are :math:`\eta/K_Q` for values and
    :math:`\eta/K_P` for attention. Samples needed are close to :math:`T(\ln T + 1.3)/(g K_P K_Q)` up to g = 8; above,
    noise takes over (measured here).

    Attributes
    ----------
    transition_energy
        A guess of :math:`K_P`; see `manyheads.bigram.task.typical_energy`. Wrong by a factor f, growth is wrong by
        its square root.
    sparsity
        The most positions that a query may look at: a fit keeps no more of them, and fewer where samples confirm fewer.
        As a guess of Q it sets the rates, :math:`K_Q = 1/Q - 1/T`.
    batch
        Samples of a step.
    growth
        g, signal against noise: above 8 noise wins.
    switch
        Robust standard deviations by which one entry of every row must stand out.
    settle
        How long to go on after the switch, in growth times: the smaller weights of a row come out of the noise later
        than its largest, which is what the switch sees.
    patience
        Give up after so many times the steps that the law promises.
    """

    transition_energy: float
    sparsity: int
    batch: int = 64
    growth: float = 8.0
    switch: float = SWITCH
    settle: float = 1.0
    patience: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.transition_energy < 1:
            raise UsageError(f"transition_energy={self.transition_energy}: a guess of K_P, between 0 and 1")
        _check_counts(sparsity=self.sparsity, batch=self.batch)
        if not 0 < self.growth < math.inf or not 0 < self.patience < math.inf:
            raise UsageError(f"growth={self.growth}, patience={self.patience}: both are positive and finite")
        if not 0 <= self.settle < 10:
            raise UsageError(f"settle={self.settle}: growth times after the switch, from 0 to 10")
        if not 5 < self.switch < math.inf:
            raise UsageError(f"switch={self.switch}: the largest of 10^6 normal noises stands out by 5; give more")

    def energy(self, length: int) -> float:
        """Return the guess of K_Q in a context of this length."""
        if self.sparsity >= length:
            raise UsageError(f"sparsity={self.sparsity} in a context of {length}: nothing is sparse about that")
        return 1 / self.sparsity - 1 / length

    def rate(self, length: int) -> float:
        """Return the growth per step."""
        rate = self.growth * self.batch * self.transition_energy * self.energy(length) / length
        if rate > 0.5:
            raise UsageError(
                f"a growth of {rate:.2g} per step is no gradient flow: batch at most "
                f"{max(1, int(self.batch * 0.5 / rate))} at growth={self.growth}"
            )
        return rate

    def steps(self, length: int) -> StepSettings:
        """Return rates and batch of a step."""
        rate = self.rate(length)
        return StepSettings(self.batch, rate / self.energy(length), rate / self.transition_energy)


@dataclass(frozen=True)
class SecondStage:
    r"""Stage two: kind, batch, rate, strength of the penalty, budget and early stop.

    Attributes
    ----------
    kind
        "proximal": the penalty, rows may sum to anything; "constrained": the penalty, rows sum to one; "plain": no
        penalty; "none": no stage two at all.
    batch
        Samples of a step.
    rate
        Growth per step, as in `FirstStage`.
    ratio
        The penalty in standard deviations of one coordinate of the attention's gradient: :math:`\lambda = r\sigma`.
        Noise is zero altogether above :math:`\sqrt{2\ln T}`; 2 to 3 is better with few samples.
    samples
        Budget.
    every
        Steps between two looks at the samples held out.
    """

    kind: Second = "proximal"
    batch: int = 1024
    rate: float = 0.1
    ratio: float = 2.5
    samples: int = 150_000
    every: int = 5

    def __post_init__(self) -> None:
        if self.kind not in ("proximal", "constrained", "plain", "none"):
            raise UsageError(f"kind={self.kind!r}: proximal, constrained, plain or none")
        _check_counts(batch=self.batch, every=self.every, samples=self.samples)
        if not 0 < self.rate <= 0.5 or not 0 < self.ratio < math.inf:
            raise UsageError(f"rate={self.rate}, ratio={self.ratio}: both positive, the rate at most a half")
        if self.kind != "none" and self.samples < self.batch * self.every:
            raise UsageError(f"samples={self.samples}: at least {self.batch * self.every}, or kind='none'")

    @property
    def penalised(self) -> bool:
        """Whether there is a penalty."""
        return self.kind in ("proximal", "constrained")

    def shrinkage(self, first: FirstStage) -> float:
        r"""Return by which share of itself the penalty shrinks an entry 1/Q: :math:`r Q/\sqrt{K_P B}`.

        An entry q settles where :math:`K_V a = K_{VP} q - \lambda`, and :math:`\lambda = r\sqrt{K_V/B}`.

        Examples
        --------
        >>> round(SecondStage(batch=4096, ratio=2.0).shrinkage(FirstStage(0.25, 2)), 4)
        0.125
        """
        return self.ratio * first.sparsity / math.sqrt(first.transition_energy * self.batch)


@dataclass(frozen=True)
class TrainingSettings:
    """The whole run.

    Attributes
    ----------
    first, second
        The two stages.
    finish
        What is done at the end: "none"; "round"; "scale": round and fit one factor to fresh samples; "values": round
        and fit the values; "joint": keep the `first.sparsity` largest positions of a query, fit values and weights.
        Rounding keeps what is above a tenth of a row's largest entry: it belongs after a stage two, for at the switch
        noise reaches that far.
    held_out
        Samples that decide when stage two stops, and as many fresh ones on which the result is certified.
    fresh
        Samples of the fit.
    """

    first: FirstStage
    second: SecondStage = field(default_factory=SecondStage)
    finish: Finish = "joint"
    held_out: int = 1500
    fresh: int = 100_000

    def __post_init__(self) -> None:
        if self.finish not in ("none", "round", "scale", "values", "joint"):
            raise UsageError(f"finish={self.finish!r}: none, round, scale, values or joint")
        _check_counts(held_out=self.held_out, fresh=self.fresh)
        if self.held_out < 2:
            raise UsageError(f"held_out={self.held_out}: at least 2 samples, for a standard error")
        share = self.second.shrinkage(self.first) if self.second.penalised else 0.0
        least = math.ceil(self.second.batch * share**2 - 1e-9)
        if share >= 1:
            raise UsageError(
                f"the penalty ratio={self.second.ratio} at batch={self.second.batch} is {share:.2f} of a weight 1/Q "
                f"and sets all to zero: batch above {least}, or a smaller ratio"
            )
        if share > 0.5:
            warnings.warn(
                f"the penalty shrinks a weight 1/Q by {share:.0%}; a batch of {4 * least} would shrink it by half",
                stacklevel=3,
            )


def _check_counts(**counts: int) -> None:
    """Refuse what counts samples, steps or positions and is no whole number above zero."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise UsageError(f"{name}={count}: give a whole number, one or more")

r"""Rules for another batch size and number of tokens: scaling rules, published fits, exponents that were measured.

The theory keeps both. A rule multiplies the learning rates of all classes, or the share :math:`\eta\lambda` of a weight
that decay takes in a step, by powers of the ratios of the batch size, the tokens and the number of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from manyheads.errors import UsageError
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters

RATE, SHARE = "learning rate", "rate x decay"


class Rule(NamedTuple):
    """The number that a rule changes, its optimizer, source and conditions, and its powers of ratios to the base."""

    changes: str
    optimizer: str  # empty for a measured exponent
    source: str
    basis: str
    batch: float = 0
    tokens: float = 0
    weights: float = 0
    batch_of_tokens: float = 0  # the batch size goes as this power of the tokens; 0 where it is free


RULES = {
    "sqrt": Rule(RATE, "adam", "Malladi et al. 2022, arXiv:2205.10287",
        "derived where the noise of gradients dominates, at a fixed number of samples", batch=0.5),
    "linear": Rule(RATE, "sgd", "Goyal et al. 2017, arXiv:1706.02677",
        "measured on ImageNet up to a batch of 8192, at a fixed number of samples", batch=1),
    "horizon": Rule(RATE, "adam", "Bjorck et al. 2025, arXiv:2409.19913, as cited by others",
        "measured on language models at a fixed batch size", tokens=-0.32),
    "steplaw": Rule(RATE, "adam", "Li et al. 2025, arXiv:2503.04715",
        "measured on language models whose batch size goes as tokens^0.571; its power of the weights is left out",
        tokens=0.307, batch_of_tokens=0.571),
    "timescale": Rule(SHARE, "adam", "Wang & Aitchison 2024, arXiv:2405.13698",
        "batch / (rate x decay x tokens) stays; measured on vision models and a NanoGPT", batch=1, tokens=-1),
    "power-lines": Rule(SHARE, "adam", "Bergsma et al. 2025, arXiv:2505.13738, from a review of it",
        "batch / (rate x decay x tokens) goes as (tokens / weights)^-0.527; measured on language models to 3.3 billion",
        batch=1, tokens=-0.473, weights=-0.527),
}  # fmt: skip


def find_rule(name: str) -> Rule:
    """Return a rule by its name, or one of an exponent that was measured, such as "batch=0.4"."""
    axis, _, power = name.partition("=")
    try:
        if axis in ("batch", "tokens") and abs(own := float(power)) < 10:
            return Rule(RATE, "", "", "an exponent of your own", **{axis: own})
        return RULES[name]
    except (KeyError, ValueError):
        known = ", ".join(RULES)
        raise UsageError(f"rule {name!r}: choose from none, {known}, batch=POWER and tokens=POWER, below 10") from None


@dataclass(frozen=True)
class TrainingChange:
    """Another batch size and number of tokens than those at which the base was tuned, and the rules for them.

    Attributes
    ----------
    batch, tokens, weights
        At the base and now; the number of weights matters to the rule `power-lines` alone.
    rules
        Names of `RULES`, at most one a number and size; or exponents of the learning rate that a preflight measured,
        "batch=0.4" or "tokens=-0.3".
    optimizer
        That of the parametrization.

    Examples
    --------
    >>> change = TrainingChange(batch=(256, 1024), rules=("sqrt", "timescale"))
    >>> new = change.at(BaseHyperparameters(1e-3, weight_decay=0.1))
    >>> new.learning_rate, new.epsilon, new.weight_decay
    (0.002, 5e-09, 0.2)
    """

    batch: Sequence[float] = (1, 1)
    tokens: Sequence[float] = (1, 1)
    rules: Sequence[str] = ()
    weights: Sequence[float] = ()
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "weights"):
            value = getattr(self, name)
            if (value or name != "weights") and not (len(value) == 2 and all(0 < each < math.inf for each in value)):
                raise UsageError(f"{name}={value!r}: give the number at the base and the one now, both positive")
        seen: dict[tuple[str, str], str] = {}
        if len(set(self.rules)) < len(self.rules):
            raise UsageError(f"rules {' '.join(self.rules)}: give each once")
        for name, rule in self._rules():
            if rule.optimizer not in ("", self.optimizer):
                raise UsageError(f"rule {name}: it is for {rule.optimizer}, not for {self.optimizer}; give batch=POWER")
            if rule.weights and not self.weights:
                raise UsageError(f"rule {name}: give weights, their number at the base and now")
            for axis in ("batch", "tokens"):
                changes = getattr(rule, axis) or rule.batch_of_tokens  # found at batch sizes of its own
                if changes and (other := seen.setdefault((rule.changes, axis), name)) != name:
                    raise UsageError(f"rules {other} and {name} both change the {rule.changes} with {axis}: give one")
        if min(self.betas((0.9,))) < 0:
            raise UsageError(
                f"rule sqrt: 1 - beta × {self._ratio('batch'):g} leaves no beta of 0.9; change the batch less"
            )

    def _rules(self) -> list[tuple[str, Rule]]:
        return [(name, find_rule(name)) for name in self.rules if name != "none"]

    def _ratio(self, axis: str) -> float:
        given = getattr(self, axis)
        return given[1] / given[0] if given else 1.0

    def _factor(self, rule: Rule) -> float:
        return math.prod(self._ratio(axis) ** getattr(rule, axis) for axis in ("batch", "tokens", "weights"))

    def factor(self, changes: str) -> float | None:
        """Return the factor on the learning rate or on rate x decay; None where no rule changes it."""
        found = [self._factor(rule) for _, rule in self._rules() if rule.changes == changes]
        return math.prod(found) if found else None

    def betas(self, betas: Sequence[float]) -> list[float]:
        """Return Adam's betas: under `sqrt` 1 - beta goes as the batch size."""
        return [1 - (1 - beta) * (self._ratio("batch") if "sqrt" in self.rules else 1) for beta in betas]

    def at(self, base: BaseHyperparameters) -> BaseHyperparameters:
        """Return the hyperparameters of the base, stds included, at the new batch size and number of tokens."""
        rate, share = self.factor(RATE) or 1.0, self.factor(SHARE)
        return replace(
            base,
            learning_rate=base.learning_rate * rate,
            epsilon=base.epsilon * (self._ratio("batch") ** -0.5 if "sqrt" in self.rules else 1),
            weight_decay=base.weight_decay * (share / rate if share else 1),
            muon=base.muon and replace(base.muon, learning_rate=base.muon.learning_rate * rate),
            learning_rates={name: each * rate for name, each in base.learning_rates.items()},
        )

    def sentences(self) -> list[str]:
        """Say of every number whether it is derived, follows a rule or was measured."""
        said = ["derived: all factors of N, H and L; none of batch and tokens"]
        for name, rule in self._rules():
            origin = f"rule {name} ({rule.source})" if rule.optimizer else f"measured {name}"
            said.append(f"{origin}: {rule.changes} × {self._factor(rule):.4g}; {rule.basis}")
            if name == "sqrt":
                betas = ", ".join(f"{beta:.4g}" for beta in self.betas((0.9, 0.95)))
                said.append(f"rule sqrt: epsilon × {self._ratio('batch') ** -0.5:.4g}; betas 0.9, 0.95 become {betas}")
            off = self._ratio("batch") / self._ratio("tokens") ** rule.batch_of_tokens
            if rule.batch_of_tokens and not 0.9 < off < 1.1:
                said.append(f"rule {name}: its batch size is {1 / off:.3g} times yours, and its rate belongs to that")
        if self.factor(SHARE) is None:
            said.append("rule none: weight decay unchanged by batch and tokens, an assumption")
        unruled = {axis for axis in ("batch", "tokens") if self._ratio(axis) != 1}
        unruled -= {
            axis for name, rule in self._rules() if rule.changes == RATE for axis in unruled if getattr(rule, axis)
        }
        return said + [f"rule none: learning rate unchanged by {axis}, an assumption" for axis in sorted(unruled)]

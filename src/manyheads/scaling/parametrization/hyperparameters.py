"""Hyperparameters tuned at the base shape: AdamW's or SGD's, and Muon's beside AdamW's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.models.parts import HIDDEN, PARTS, Parameter
from manyheads.transformer.scaling import ROLES

POSITIVE = Constraint(above=0, below=1e100)
NOT_NEGATIVE = Constraint(least=0, below=1e100)
NO_DECAY_WORDS: Mapping[str, tuple[str, ...]] = {
    "norm": ("gain", "shift", "norm"),
    "bias": ("bias", "shift"),
    "1-d": ("gain", "shift", "norm", "bias", "sink"),
}
"""Word of recipes for parameters without weight decay → endings of their parts and roles; `"embedding"` is another."""


@dataclass(frozen=True)
class MuonHyperparameters:
    """Hyperparameters of Muon, tuned at the base shape; defaults are those of `torch.optim.Muon`.

    Attributes
    ----------
    learning_rate
        Rate of its groups before the shape factor; under a schedule its peak.
    weight_decay
        Decoupled; the shape factor does not multiply it.
    epsilon
        Least Frobenius norm of a gradient that is divided by its norm.
    momentum, nesterov, ns_steps
        Taken over unchanged at every shape.
    """

    learning_rate: float = constrained(rule=POSITIVE)
    weight_decay: float = constrained(0.1, NOT_NEGATIVE)
    epsilon: float = constrained(1e-7, POSITIVE)
    momentum: float = constrained(0.95, NOT_NEGATIVE)
    nesterov: bool = True
    ns_steps: int = 5

    def __post_init__(self) -> None:
        check_fields(self, "muon: ")


@dataclass(frozen=True)
class BaseHyperparameters:
    """Hyperparameters tuned at the base shape.

    Attributes
    ----------
    learning_rate
        The learning rate; under a schedule its peak.
    epsilon
        Adam's epsilon.
    weight_decay
        Decoupled weight decay.
    stds
        Standard deviation of the init at the base by role (`manyheads.transformer.scaling.ROLES`, and `"hidden"`) or by
        part (`manyheads.models.parts.PARTS`). Without one, weights have the family's usual one,
        which a plain module has not, gains are one, biases and shifts zero. That of a gain is the number itself. A
        role's is not that of its parts that start at zero where others do not, such as the shifts of `"norm"`.
    no_decay
        Parameters without weight decay, in the words of recipes: `"norm"`, gains and shifts of all norms; `"bias"`, all
        biases and the shifts of norms; `"1-d"`, all parameters of one axis; `"embedding"`, tables of tokens and
        positions. Or a role, or a part of it (`manyheads.models.parts.PARTS`), such as `"patch"`.
    learning_rates
        Learning rates at the base of roles or parts that were tuned apart, such as those of the gains behind queries
        and keys beside Muon: ``{"query_gain": 0.05, "key_gain": 0.05}``. A part's counts before its role's, and both
        are scaled as `learning_rate` is. Not of matrices that Muon trains.
    muon
        Those of Muon, where the matrices of the blocks are trained with it; the others are then AdamW's.

    Raises
    ------
    UsageError
        A number outside its range, or an unknown role.

    Examples
    --------
    >>> BaseHyperparameters(learning_rate=3e-4, weight_decay=0.1, no_decay=("norm", "bias", "router")).epsilon
    1e-08
    """

    learning_rate: float = constrained(rule=POSITIVE)
    epsilon: float = constrained(1e-8, POSITIVE)
    weight_decay: float = constrained(0.0, NOT_NEGATIVE)
    stds: Mapping[str, float] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    muon: MuonHyperparameters | None = None
    learning_rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, rule in (("stds", NOT_NEGATIVE), ("learning_rates", POSITIVE)):
            if not isinstance(value := getattr(self, name), Mapping):
                raise UsageError(f"{name}={value!r}: expected a mapping from role to number")
            for role, number in value.items():
                rule.kept(f"{name}[{role!r}]", number, "float")
        if isinstance(self.no_decay, str) or not (
            isinstance(self.no_decay, Collection) and all(isinstance(word, str) for word in self.no_decay)
        ):
            raise UsageError(f"no_decay={self.no_decay!r}: expected words in a tuple, such as ('norm', 'bias')")
        if not isinstance(self.muon, MuonHyperparameters | None):
            raise UsageError(f"muon={self.muon!r}: expected MuonHyperparameters(learning_rate=...), or None")
        known = (*ROLES, HIDDEN)
        words = [name for name in self.no_decay if name not in NO_DECAY_WORDS]
        named = (*self.stds, *words, *self.learning_rates)
        if unknown := [role for role in named if role not in known and role not in PARTS]:
            parts = ", ".join(part for part in PARTS if part not in known)
            raise UsageError(
                f"no role is called {unknown[0]!r}: choose from {', '.join(known)}; or from their parts, {parts}; for "
                f"no_decay, from {', '.join((*NO_DECAY_WORDS, 'embedding'))} as well"
            )

    def of(self, rule: str) -> BaseHyperparameters | MuonHyperparameters:
        """Return those of the optimizer that steps a weight."""
        if rule != "muon":
            return self
        if self.muon is None:
            raise UsageError("optimizer='muon': give BaseHyperparameters(muon=MuonHyperparameters(learning_rate=...))")
        return self.muon

    def rate_of(self, parts: Sequence[str], rule: str) -> float:
        """Return the learning rate at the base of a parameter that holds some parts; refuse several, or Muon's."""
        own = {part: self.learning_rates.get(part, self.learning_rates.get(PARTS.get(part, part))) for part in parts}
        rates = {rate for rate in own.values() if rate is not None}
        if not rates:
            return self.of(rule).learning_rate
        if rule == "muon" or (len(own) > 1 and (len(rates) > 1 or None in own.values())):
            why = "Muon trains it" if rule == "muon" else f"it is one parameter with {' and '.join(own)}"
            raise UsageError(f"learning_rates names {next(part for part in own if own[part])}, and {why}: leave it out")
        return rates.pop()

    def decays(self, parameter: Parameter) -> bool:
        """Whether a parameter has weight decay: no word of `no_decay` means one of its parts or their roles."""

        def means(word: str, part: str) -> bool:
            role = PARTS.get(part, part)
            if word == "1-d" and parameter.axes is not None:
                return parameter.axes == 1
            if word == "embedding":
                return role in ("embedding", "positional") and part != "patch" and not part.endswith("bias")
            return part.endswith(NO_DECAY_WORDS[word]) if word in NO_DECAY_WORDS else word in (part, role)

        return not any(means(word, part) for word in self.no_decay for part in parameter.parts)

"""Audit of the learning rate, epsilon, weight decay and init of every parameter.

The comparison knows no framework: it takes what every parameter needs (`manyheads.scaling.parametrization.targets`)
and what it has. `manyheads.scaling.audit.torch_models` reads the second off a PyTorch model and its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.parts import HIDDEN, Parameter
from manyheads.scaling.audit.findings import OTHER_FACTOR, OTHER_STD, Audit, Finding
from manyheads.scaling.parametrization.hyperparameters import NO_DECAY_WORDS, BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import Factors, ParameterTarget
from manyheads.scaling.torch.init import init_is_right
from manyheads.transformer.shape import Shape

ROUNDING = 1e-6  # relative difference of rates, epsilons and decays that is still called equal


@dataclass(frozen=True)
class ActualSettings:
    """Settings of one parameter and its group; None if absent or not compared."""

    learning_rate: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    std: float | None = None  # root mean square of its entries now; of gains the one farthest from the rest
    count: int = 0  # of its entries
    rule: str = ""  # what steps it, "adam", "sgd" or "muon"; empty if not compared
    rounding: float = 0.0  # relative rounding of its number type


def compare_settings(
    targets: Iterable[ParameterTarget],
    settings: Mapping[str, ActualSettings],
    hyperparameters: BaseHyperparameters,
    tied: float = 1.0,
) -> tuple[Finding, ...]:
    """Compare what parameters have with what they need; one that is missing from the settings is never trained.

    `tied` is the unembedding's learning rate over the embedding's, by which a tied embedding that was scaled as both is
    recognized.
    """
    targets = tuple(targets)
    rules = {target.factors.rule for target in targets}
    alike = {rule: _share_a_factor([each for each in targets if each.factors.rule == rule], settings) for rule in rules}
    lost = _share_a_decay(targets, settings)
    findings = []
    for target in targets:
        name = target.parameter.name
        if name not in settings:
            meaning = "it is in no group: it is never trained"
            findings.append(Finding(name, target.role, "learning_rate", target.learning_rate, 0.0, 0.0, False, meaning))
            continue
        own = settings[name]
        if own.rule and own.rule != target.factors.rule:
            words = _explain_rule(target, own.rule)
            findings.append(Finding(name, target.role, "optimizer", 1.0, 0.0, 0.0, False, words))
            continue
        for quantity in ("learning_rate", "epsilon", "weight_decay"):
            actual, expected = getattr(own, quantity), getattr(target, quantity)
            if actual is not None:
                right, expected = _near_enough(quantity, target, own)
                shared = lost if quantity == "weight_decay" else alike[target.factors.rule]
                words = "" if right else _explain(quantity, target, own, hyperparameters, tied, shared)
                findings.append(
                    Finding(name, target.role, quantity, expected, actual, _over(actual, expected), right, words)
                )
        if own.std is not None and target.initial is not None:
            right = init_is_right(target.start, target.initial, own.std, own.count, own.rounding)
            factor = _over(own.std, target.initial)
            words = "" if right else _explain_start(target, factor, own.std)
            findings.append(Finding(name, target.role, "initial", target.initial, own.std, factor, right, words))
    return tuple(findings)


def audit_learning_rates(
    p: Parametrization,
    shape: Shape,
    learning_rates: Mapping[str, float],
    hyperparameters: BaseHyperparameters,
    epsilons: Mapping[str, float] | None = None,
    weight_decays: Mapping[str, float] | None = None,
) -> Audit:
    """Compare rates by role, as `optax.multi_transform` takes them, with what the parametrization prescribes.

    Numbers are by role, and what is not given is not compared; in multiplier form rates are those beside its
    multipliers. Refused are unknown roles, and decays by role where a part of a role is no_decay.

    Examples
    --------
    >>> from manyheads.transformer.scaling import Shape
    >>> from manyheads.scaling import Parametrization
    >>> p = Parametrization(base=Shape(8, 2, 2))
    >>> rates = {"query": 0.1, "value": 0.025}
    >>> audit = audit_learning_rates(p, Shape(8, 8, 2), rates, BaseHyperparameters(learning_rate=0.1))
    >>> [(each.name, each.factor) for each in audit.faults]
    [('query', 4.0)]
    """
    table = p.table(shape)
    known = [row.role for row in table.rows]
    given: dict[str, Mapping[str, Any]] = {
        "learning_rate": learning_rates,
        "epsilon": epsilons or {},
        "weight_decay": weight_decays or {},
    }
    for numbers in given.values():
        if unknown := [role for role in numbers if role not in known]:
            raise UsageError(f"no role is called {unknown[0]!r}: choose from {', '.join(known)}")
    words = (*known, HIDDEN, *NO_DECAY_WORDS)
    if weight_decays and (parts := [name for name in hyperparameters.no_decay if name not in words]):
        raise UsageError(f"no_decay={parts[0]!r} is no role of the table, and decays are given by role: spare a role")
    rows = [row for row in table.rows if any(row.role in numbers for numbers in given.values())]
    settings = {
        row.role: ActualSettings(**{key: each[row.role] for key, each in given.items() if row.role in each})
        for row in rows
    }
    targets = [
        ParameterTarget.of(
            Parameter(row.role, (row.role,)),
            row.role,
            Factors(row.initial, row.learning_rate, row.epsilon, row.rule),
            None,
            hyperparameters,
        )
        for row in rows
    ]
    return Audit(compare_settings(targets, settings, hyperparameters))


def _near_enough(quantity: str, target: ParameterTarget, own: ActualSettings) -> tuple[bool, float]:
    """Return whether a number is right, and what was expected: of head blocks the learning rate is bounded only."""
    actual, expected = getattr(own, quantity), getattr(target, quantity)
    low, high = sorted((1.0, target.highest))
    # The share of a step goes with the rate that was chosen.
    if quantity == "weight_decay" and own.learning_rate and math.isfinite(own.learning_rate):
        expected /= min(max(own.learning_rate / target.learning_rate, low), high)
    if quantity != "learning_rate":
        low = high = 1.0
    slack = ROUNDING * abs(expected)
    return low * expected - slack <= actual <= high * expected + slack, expected


def _explain_rule(target: ParameterTarget, rule: str) -> str:
    """Explain a weight in the wrong optimizer."""
    if rule != "muon":
        return "it is in AdamW and was Muon's at the base: its update has another size"
    role = target.role
    if role in ("embedding", "positional"):
        return (
            "it needs AdamW: its inputs are one-hot, so that under Muon a row moves by D^-1/2 to V^-1/2 as the tokens "
            "of a batch pass D, and no power of a size scales it"
        )
    if role == "unembedding":
        return "it needs AdamW: under Muon its rate would go as D^-1/2, and not as the 1/D of AdamW that it has here"
    return "it needs AdamW, as at the base"


def _over(actual: float, expected: float) -> float:
    return actual / expected if expected else (math.inf if actual else 1.0)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 10 * ROUNDING * abs(other)


def _share_a_factor(targets: Iterable[ParameterTarget], settings: Mapping[str, ActualSettings]) -> bool:
    """Whether all learning rates are consistent with each other, more of them than one forgotten class explains.

    Zeros tell nothing.
    """
    pairs = [(target, settings[name]) for target in targets if (name := target.parameter.name) in settings]
    found = [
        (target.factors.learning_rate, own.learning_rate / target.learning_rate)
        for target, own in pairs
        if own.rule in ("", target.factors.rule) and own.learning_rate is not None
    ]
    if not found or not found[0][1] or not all(_near(ratio, found[0][1]) for _, ratio in found):
        return False
    factors = [factor for factor, _ in found]
    return _near(factors[0], 1) or not _near(min(factors), max(factors))


def _share_a_decay(targets: Iterable[ParameterTarget], settings: Mapping[str, ActualSettings]) -> bool:
    """Whether the weight decays of all of Muon's matrices are off by one factor, of two classes or more."""
    pairs = [(target, settings[name]) for target in targets if (name := target.parameter.name) in settings]
    found = [
        (target.role, (own.weight_decay or 0.0) / target.weight_decay)
        for target, own in pairs
        if target.factors.rule == own.rule == "muon" and target.weight_decay
    ]
    return len({role for role, _ in found}) > 1 and all(_near(found[0][1], ratio) for _, ratio in found)


def _explain(
    quantity: str, target: ParameterTarget, own: ActualSettings, given: BaseHyperparameters, tied: float, alike: bool
) -> str:
    """Explain a wrong learning rate, epsilon or decay: cause and effect."""
    actual = getattr(own, quantity)
    expected = _near_enough(quantity, target, own)[1]
    factor = _over(actual, expected)
    own_factor = 1 / target.factors.learning_rate if quantity == "weight_decay" else getattr(target.factors, quantity)
    tuned = given.of(target.factors.rule)
    common = getattr(tuned, quantity)
    base = target.learning_rate / target.factors.learning_rate if quantity == "learning_rate" else common
    if not math.isfinite(actual):
        return "it is not finite"
    is_rate, given_instead = quantity == "learning_rate", "(give the schedule in place of the optimizer)"
    causes = {
        "all learning rates are off by this factor and consistent with each other: the tuned one was different, or a "
        f"schedule has changed them without a trace of its peak {given_instead}": is_rate and alike,
        "it is zero: its group is switched off, or a schedule that leaves no trace of its peak has not begun "
        f"{given_instead}": is_rate and not actual,
        "a tied embedding treated twice, as embedding and as unembedding": (
            is_rate and target.parameter.tied and _near(actual, target.learning_rate * tied)
        ),
        f"it has the base's {quantity.replace('_', ' ')}: its group was forgotten, or not rescaled": (
            _near(actual, base) and not _near(own_factor, 1)
        ),
        "it has the common learning rate, and its own was tuned apart": (
            is_rate and not _near(base, common) and _near(actual, common * own_factor)
        ),
        "it was scaled twice": _near(actual, base * own_factor**2),
        "all weight decays of Muon are off by this factor: another one was tuned, or it was lost": (
            quantity == "weight_decay" and alike and target.factors.rule == "muon"
        ),
    }
    cause = next((words for words, holds in causes.items() if holds), OTHER_FACTOR)
    if is_rate:
        ends = " to ".join(f"{end:.3g}" for end in sorted({factor, factor / target.highest}))
        return f"{cause}; every step moves it {ends} times as far as at the base" if actual else cause
    if quantity == "epsilon":
        damped = "small gradients are damped that were not" if factor > 1 else "noise is amplified that was damped"
        if not actual:
            return f"{cause}; it is zero: {damped}"
        return f"{cause}; relative to its gradients epsilon is {factor:.3g} times what it was at the base: {damped}"
    if not tuned.weight_decay or not target.weight_decay:
        return "it should have none, as at the base"
    if not actual or own.learning_rate == 0:
        return f"{cause}; no step removes a share of the weight"
    rate = own.learning_rate
    known = rate is not None and math.isfinite(rate)
    base = target.learning_rate / target.factors.learning_rate
    share = rate * actual / (base * tuned.weight_decay) if known else factor
    return f"{cause}; with its learning rate, a step removes {share:.3g} times the share of the weight that it took"


def _explain_start(target: ParameterTarget, factor: float, actual: float) -> str:
    if math.isnan(actual):
        return "it contains NaN"
    if math.isinf(actual):
        return "it is not finite"
    if target.start == "zero":
        return "it should start at zero: it adds a fixed random shift"
    if not target.initial:
        return f"{OTHER_STD}: it should be zero"
    if not factor:
        return f"{OTHER_STD}: it is zero"
    if target.start == "one":
        return f"a gain that starts at {factor:.3g} times what it should: so does what is behind it"
    own, cause = target.factors.initial, OTHER_STD
    if not _near_std(own) and _near_std(factor * own):
        cause = "it starts with the base's std"
    elif not _near_std(own) and _near_std(factor / own):
        cause = "its std was scaled twice"
    if set(target.role.split("+")) <= {"query", "key"}:
        return f"{cause}: the first logits are {factor:.3g} times those wanted"
    if target.role == "unembedding":
        return f"{cause}: the first outputs are {factor:.3g} times those of the base"
    if target.role in ("embedding", "positional"):
        return f"{cause}: the stream starts at {factor:.3g} times the base's, beside which the blocks' share changes"
    return f"{cause}: what it computes starts at {factor:.3g} times the base's"


def _near_std(ratio: float) -> bool:
    """Whether a ratio of stds is one, as well as a sample of some hundred numbers can tell."""
    return 0.8 < ratio < 1.25

"""Applied factors: multipliers in the forward pass of a PyTorch model, read off its trace or its modules, or given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from manyheads.errors import UsageError
from manyheads.models.infer.multipliers import ACCURACY, ForwardPass, read_multipliers
from manyheads.models.infer.roles import SHARED, UNUSED, Roles
from manyheads.models.names import join_layers
from manyheads.models.parts import Architecture, Parameter
from manyheads.models.torch.lazy_torch import Module
from manyheads.models.torch.model import SIZES, ModelOptions, TorchModel, read_model, unwrap
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters, MuonHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import (
    ForwardMultipliers,
    ParameterTarget,
    forward_multipliers,
    missing_multipliers,
    parameter_targets,
    usual_multipliers,
)
from manyheads.transformer.shape import Shape

WORDS = {name: f"{name}s" for name in ("logit", "output", "embedding", "position", "value")}
WORDS |= {"branch": "branches", "hidden": "hidden units", "input": "inputs of weights", "stream": "stream"}
WORDS |= {"bias": "biases and sinks", "gate": "gates"}
GIVE = (
    "give folded=ForwardMultipliers(branch=..., logit=..., output=...), what the model multiplies relative to the base"
)
FOLLOWS = {"logit": "N", "branch": "L", "output": "D", "embedding": "D", "position": "D"}
WITHIN = {"stream": "the stream", "input": "the output of the norm before it"}
WITHIN |= {"value": "its values", "hidden": "its hidden units", "bias": "its own numbers", "gate": "its gate"}
"""Multipliers that are one in every parametrization, with what they multiply."""
EXPONENTS = ("-1/2", "-1", "1/2")  # powers of a size that are told from constants
KEEP = {"logit": "keep the key dimension of the base", "branch": "keep its depth", "output": "keep its width"}


class ModelTargets(NamedTuple):
    """A model, what it multiplies relative to the base, and the targets of its trained parameters."""

    model: TorchModel
    forward: ForwardMultipliers
    targets: tuple[ParameterTarget, ...]
    notes: tuple[str, ...]  # multipliers that could not be measured


def model_targets(
    p: Parametrization, model: Module, hyperparameters: BaseHyperparameters, options: ModelOptions
) -> ModelTargets:
    """Return the targets of every trained parameter of a model, with missing factors folded into them."""
    read = read_model(model, options)
    forward, notes = find_multipliers(p, unwrap(model), read, options)
    return ModelTargets(read, forward, parameter_targets(p, read.architecture, hyperparameters, forward), notes)


def find_multipliers(
    p: Parametrization, model: Module, read: TorchModel, reading: ModelOptions
) -> tuple[ForwardMultipliers, tuple[str, ...]]:
    """Return what a model multiplies in its forward pass, relative to the base, and what is not known.

    It is measured at every shape but the base, also where the parametrization leaves a multiplier alone, unless it was
    given, or the model is of a family of transformers whose forward pass is known.
    """
    shape, base, folded = read.architecture.shape, p.base, reading.folded
    if read.architecture.forward is not None:
        check_base(p, shape, reading.roles.shape)
        return read.architecture.forward, ()
    if isinstance(folded, ForwardMultipliers):
        return folded, ()
    said = usual_multipliers(p, shape) if folded else forward_multipliers(p, shape)
    if (logit := _find_scaling(p, read, folded)) is not None:
        said = replace(said, logit=logit)
    if read.architecture.root_width:
        said = replace(said, embedding=(shape.width / base.width) ** 0.5)
    if (folded and read.architecture.family) or (shape == base and p.richness == 1):
        return said, ()
    wider = shape.width != base.width
    moves = {"logit": shape.key_dim != base.key_dim, "branch": shape.depth != base.depth}
    moves |= {"output": wider or p.richness != 1, "embedding": wider, "position": wider}
    found = read_multipliers(model, read, reading.example)
    unnamed = found.roles if reading.roles is None else None  # a role map states what names only suggest
    notes = _judge_names(unnamed, read.architecture, moves["branch"]) if unnamed else []
    for name in sorted(moves, key=lambda each: not moves[each]):
        measured, moved = getattr(found, name), moves[name]
        if name == "logit" and logit is not None:
            continue
        if moved:
            _refuse_unknown(name, found, said, p, read)
        if measured.unknown and (name == "position" or _carried(name, read)):
            reason = measured.unknown[0]
            notes.append(f"{WORDS[name]}: not judged whether the model multiplies them as the base, {reason}")
        choices, values = _choices(name, p, read, folded, moved, measured.normed), measured.values
        near = {
            (value, own): [abs(each - value) <= found.accuracy * value for each in values.values()]
            for value, own in choices
        }
        fitting = [choice for choice, fits in near.items() if all(fits)]
        if values and not fitting:  # the module that leaves the choice of those before it
            most = max(near.values(), key=lambda fits: [*fits, False].index(False))
            module, number = list(values.items())[most.index(False)]
            raise UsageError(_wrong(name, module, number, choices, folded, moved))
        if values:
            (value, own), before = fitting[0], base.key_dim**-0.5 if name == "logit" else 1.0
            if name in ("logit", "embedding") and moved:
                said = replace(said, **{name: own})
            if name != "embedding" and abs(value / own - before) > 1e-6 * before:
                here = f"{value / own:.6g}; here the model multiplies by {value:.6g}"
                notes.append(f"{WORDS[name]}: not judged whether the base multiplies them by {here}")
        if alike := _coincidences(name, list(measured.values.values()), p, shape):
            remedy = "which is their multiplier as well at this shape; audit another shape, or run preflight"
            notes.append(f"{WORDS[name]}: not judged whether they follow {alike}, {remedy}")
    _refuse_other_parts(p, read.architecture, found.acting, said)
    return said, tuple(dict.fromkeys([*notes, *_judge_branches(found, p, shape)]))


def _judge_names(roles: Roles, architecture: Architecture, deeper: bool) -> list[str]:
    """Refuse names whose part the forward pass does not show; return notes on shared and idle ones."""
    remedy, notes = "state the parts by roles=, if they are right", dict[str, str]()
    if reason := next(iter(roles.trace.refused), ""):
        raise UsageError(f"the forward pass has no derivation, whatever the names say: {reason}; {remedy}")
    for name in [each.name for each in architecture.parameters if roles.why.get(each.name)]:
        reason = roles.why[name]
        if UNUSED not in reason and (deeper or SHARED not in reason):
            said = f"{name} has no derived part in the forward pass, whatever its name says"
            raise UsageError(f"{said}: {reason}; {remedy}")
        notes.setdefault(join_layers(name), f"roles: not judged whether {name} has its part, {reason}")
    return list(notes.values())


def _refuse_other_parts(
    p: Parametrization, named: Architecture, acting: Sequence[Parameter], forward: ForwardMultipliers
) -> None:
    """Refuse parts that are not those of the forward pass, where that changes a factor of the table."""
    others = {one.name: (one, other) for one, other in zip(named.parameters, acting, strict=False) if one != other}
    if not others:
        return
    tuned, wrong = BaseHyperparameters(1.0, muon=MuonHyperparameters(1.0)), list(others)
    mine = parameter_targets(p, named, tuned, forward)
    with suppress(UsageError):  # of parts of one parameter that need different factors
        theirs = parameter_targets(p, replace(named, parameters=tuple(acting)), tuned, forward)
        pairs = zip(mine, theirs, strict=True)
        wrong = [one.parameter.name for one, other in pairs if not one.factors.near(other.factors)]
    if wrong:
        name = next((each for each in others if each in wrong), next(iter(others)))
        said, shown = ("+".join(each.parts) for each in others[name])
        remedy = "correct it by roles=, or give what infer_roles returns"
        raise UsageError(f"{name} is called {said} and acts as {shown}, and their factors differ here; {remedy}")


def check_base(p: Parametrization, here: Shape, base: Shape) -> None:
    """Refuse another base than the one at which roles were inferred, or one that leaves out what has changed."""
    same = all(getattr(p.base, name) == getattr(base, name) for name in SIZES)
    for name, size in {"key_heads": "heads", "hidden": "width", "query_rank": "", "key_value_rank": ""}.items():
        given, traced, now = (getattr(each, name) for each in (p.base, base, here))
        grown = getattr(here, size) / getattr(base, size) if size else 1
        same &= given == traced if given is not None else now == (traced and traced * grown)
    if not same:
        raise UsageError(f"base={p.base}, and roles were inferred at {base}: give Parametrization(base=found.shape)")


def _judge_branches(found: ForwardPass, p: Parametrization, shape: Shape) -> list[str]:
    """Refuse multipliers within branches that follow a size; return notes on those that are not known."""
    notes = []
    for name, words in WITHIN.items():
        measured, seen = getattr(found, name), set()
        if measured.unknown:
            more = f" ({len(measured.unknown) - 1} more)" if len(measured.unknown) > 1 else ""
            notes.append(f"{WORDS[name]}: multipliers not judged, {measured.unknown[0]}{more}")
        if alike := _coincidences(name, list(measured.values.values())[:1], p, shape):
            notes.append(f"{WORDS[name]}: not judged whether they follow {alike}, which is one at this shape")
        for module, number in measured.values.items():
            if abs(number - 1) <= found.accuracy:
                continue
            every = (*EXPONENTS, "1", *(f"/{each}" for each in (*EXPONENTS, "1")))
            powers = [word for _, word, each in _powers(p, shape, every) if abs(number - each) <= found.accuracy * each]
            if powers:
                said = f"{module} takes {words} times {number:.6g}, which is {powers[0]}, and 1 is expected"
                remedy = f"leave it out; or, if the base does as well, which preflight tells, {GIVE}"
                raise UsageError(f"{said} at every shape: {remedy}")
            if (shown := f"{number:.4g}") not in seen:
                seen.add(shown)
                here = f"here {module} takes {words} times that"
                notes.append(f"{WORDS[name]}: not judged whether the base multiplies them by {shown} as well; {here}")
    return notes


def _powers(p: Parametrization, shape: Shape, exponents: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Yield the letter, the words and the value of powers of the sizes that are not those of the base."""
    for letter, size in {"N": "key_dim", "H": "heads", "L": "depth", "D": "width"}.items():
        here, base = getattr(shape, size), getattr(p.base, size)
        for words in exponents if here != base else ():
            ratio, exponent = words.startswith("/"), float(Fraction(words.removeprefix("/")))
            power = f"({letter}/{letter}0)^{words[1:]}" if ratio else f"{letter}^{words}"
            yield letter, power, (here / base if ratio else here) ** exponent


def _coincidences(name: str, numbers: Sequence[float], p: Parametrization, shape: Shape) -> str:
    """Return powers of sizes that a right multiplier does not follow, and that equal it here and not at the base."""
    return " or ".join(
        words
        for letter, words, power in _powers(p, shape, EXPONENTS)
        if letter != FOLLOWS.get(name) and any(abs(each - power) <= ACCURACY * each for each in numbers)
    )


def _wrong(name: str, module: str, number: float, choices: list[tuple[float, float]], folded: bool, moved: bool) -> str:
    """Explain a multiplier that is none of those expected, or not that of the modules before."""
    expected = " or ".join(dict.fromkeys(f"{value:.6g}" for value, _ in choices))
    said = f"{module} multiplies its {WORDS[name]} by {number:.6g}, and"
    if moved:
        remedy = "folded=False if it applies all of forward_multipliers(p, shape); or " * folded + GIVE
        return f"{said} folded={folded} expects {expected} in every layer: {remedy}"
    remedy = f"if the base multiplies by this number as well, which preflight tells, {GIVE}"
    return f"{said} {expected} in every layer is expected, as {FOLLOWS[name]} stays: {remedy}"


def logit_scale(p: Parametrization, key_dim: int) -> float:
    """Return what a parametrization multiplies q . k by, if the base has the usual scale."""
    return float(p.base.key_dim ** (p.logit_exponent - 0.5) * key_dim**-p.logit_exponent)


def _choices(
    name: str, p: Parametrization, read: TorchModel, folded: bool, moved: bool, normed: bool
) -> list[tuple[float, float]]:
    """Return what a multiplier may be, and what that is relative to the base; constants of the base are not known."""
    shape = read.architecture.shape
    if name == "position":  # a factor there is folded into no weight
        return [(1.0, 1.0)]
    own = getattr(forward_multipliers(p, shape), name)
    if name == "logit":
        n = shape.key_dim
        usual = [(n**-0.5, usual_multipliers(p, shape).logit)] if folded and not (normed and moved) else []
        return [*usual, (logit_scale(p, n), own), (n**-p.logit_exponent, own)]
    if name == "embedding":  # none, or the root of the width (Gemma)
        return [(1.0, 1.0), (shape.width**0.5, (shape.width / p.base.width) ** 0.5)]
    if folded:
        return [(1.0, 1.0)]
    # Relative to the base, or as a power of the size itself.
    power = p.branch.ratio(p.base, Shape(1, 1, 1)) if name == "branch" else 1 / p.base.width
    return [(own, own), (own * power, own)]


def _carried(name: str, read: TorchModel) -> bool:
    """Whether a parameter would carry a factor."""
    parameters = (*read.architecture.parameters, *read.architecture.frozen)
    carries = {"unembedding": "output", **read.architecture.carries}
    carried = {carries.get(part) for each in parameters for part in each.parts}
    return name in carried or (name == "output" and any(each.tied for each in parameters))


def _refuse_unknown(
    name: str, found: ForwardPass, said: ForwardMultipliers, p: Parametrization, read: TorchModel
) -> None:
    """Refuse a multiplier that was not measured, if one is to be folded or was said to be applied."""
    measured, shape, reason = getattr(found, name), read.architecture.shape, ""
    if name == "embedding" or not _carried(name, read):  # see `describe_missing_factors`
        return
    missing = getattr(missing_multipliers(p, shape, said), name)
    applied = getattr(forward_multipliers(p, shape), name) / getattr(usual_multipliers(p, shape), name)
    if measured.normed and not measured.unknown:
        module, number = next(iter(measured.values.items()))
        if abs(number - shape.key_dim**-0.5) <= found.accuracy * number:
            reason = f"a norm (QK-norm) stands behind {module}, and no gain of the parts query_gain and key_gain"
    elif measured.unknown:
        reason = measured.unknown[0]
    if reason and abs(missing - 1) > 1e-9:
        words = f"the factor {missing:.4g} on the {WORDS[name]} would have no known effect in a weight"
        raise UsageError(f"{words}: {reason}; {KEEP[name]}, or multiply in the model and {GIVE}")
    if reason and abs(applied - 1) > 1e-9:
        words = f"whether the model multiplies its {WORDS[name]} by {applied:.4g} cannot be told"
        raise UsageError(f"{words}: {reason}; give example=, a batch that it takes, or {GIVE}")


def _find_scaling(p: Parametrization, read: TorchModel, folded: bool) -> float | None:
    """Return what modules say they multiply their logits by, relative to the base; None where they do not say."""
    n, n0 = read.architecture.shape.key_dim, p.base.key_dim
    if read.architecture.fixed_scale:  # a constant of the configuration: as the base has it
        powers = {n**-0.5: 0.5, logit_scale(p, n): p.logit_exponent}
        for number, power in powers.items():
            if read.scales and all(abs(each - number) <= 1e-6 * number for each in read.scales.values()):
                return float((n / n0) ** -power)
        return 1.0
    usual, wanted = n**-0.5, logit_scale(p, n)
    logit = None
    for name, scale in read.scales.items():
        if abs(scale - wanted) <= 1e-6 * wanted:
            found = (n / n0) ** -p.logit_exponent
        elif abs(scale - usual) <= 1e-6 * usual and folded:
            found = (n / n0) ** -0.5
        else:
            allowed = f"N^-1/2 = {usual:.6g} or " if folded else ""
            words = f"{name} multiplies its logits by {scale:.6g}, which is not {allowed}the {wanted:.6g} of the"
            raise UsageError(f"{words} parametrization: set it by scale_logits(model, parametrization)")
        if logit not in (None, found):
            raise UsageError(f"{name} scales its logits otherwise than the layers before it: use scale_logits on all")
        logit = found
    return logit

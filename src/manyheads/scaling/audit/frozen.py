"""Frozen parameters that would have to carry a factor of the forward pass.

What a model does not multiply is folded into std and rate of the weight behind it. A frozen weight has no rate, and is
not drawn anew. It holds the factor if it started with it, which its std tells, and any factor if it is zero; what it
was trained with elsewhere cannot be seen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from manyheads.models.parts import Architecture, Parameter
from manyheads.models.torch.model import TorchModel
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import ForwardMultipliers, missing_multipliers, parameter_targets
from manyheads.scaling.torch.applied_factors import WORDS
from manyheads.scaling.torch.init import init_is_right, measure_init


@dataclass(frozen=True)
class FrozenCarrier:
    """A frozen parameter into which a factor of the forward pass belongs."""

    parameter: Parameter
    factor: str  # a field of `ForwardMultipliers`
    value: float
    initial: float | None  # its std, or gain, with the factor; None where not known, or that of a third of it


def list_frozen_carriers(
    p: Parametrization, architecture: Architecture, hyperparameters: BaseHyperparameters, forward: ForwardMultipliers
) -> tuple[FrozenCarrier, ...]:
    """Return the frozen parameters of a model that would have to hold a factor other than one."""
    factors = asdict(missing_multipliers(p, architecture.shape, forward))
    found = []
    for parameter in architecture.frozen:
        for part in parameter.parts:
            name = "output" if parameter.closes or part == "unembedding" else architecture.carries.get(part)
            value = 1.0 if name is None else factors[name] * (forward.embedding if parameter.closes else 1)
            if name is not None and abs(value - 1) > 1e-9:
                initial = None
                if len(parameter.parts) == 1:
                    alone = replace(architecture, parameters=(parameter,), open_end="")
                    initial = parameter_targets(p, alone, hyperparameters, forward)[0].initial
                found.append(FrozenCarrier(parameter, name, value, initial))
    return tuple(found)


def describe_missing_factors(
    p: Parametrization, read: TorchModel, hyperparameters: BaseHyperparameters, forward: ForwardMultipliers
) -> list[str]:
    """Say which factors no parameter carries because the one that should is frozen, and what to do."""
    carrier: dict[str, list[FrozenCarrier]] = {}
    for each in list_frozen_carriers(p, read.architecture, hyperparameters, forward):
        if not _holds(each, read.frozen[each.parameter.name]):
            carrier.setdefault(each.factor, []).append(each)
    said = [_say(some, bool(read.scales)) for some in carrier.values()]
    # A map may leave frozen parameters out: then it is not known where the factor is.
    known = (*read.architecture.parameters, *read.architecture.frozen)
    if len(read.architecture.frozen) < len(read.frozen):
        for name, value in asdict(missing_multipliers(p, read.architecture.shape, forward)).items():
            parts = [part for part, factor in read.architecture.carries.items() if factor == name]
            parts = [part for part in parts if not part.endswith(("bias", "gain", "shift"))] or ["unembedding"]
            where = " and ".join(parts)
            told = any(part in parameter.parts for part in parts for parameter in known)
            told |= name == "output" and any(parameter.tied for parameter in known)
            if abs(value - 1) > 1e-9 and not told:
                said.append(
                    f"the factor {value:.4g} on the {WORDS[name]} belongs into {where}, and the role map gives no "
                    "parameter that part: name the frozen ones, too"
                )
    return said


def _holds(carrier: FrozenCarrier, tensor: Any) -> bool:
    """Whether a frozen parameter starts with its factor, or is zero; without numbers it does not."""
    start = "random" if carrier.parameter.start == "zero" and carrier.initial else carrier.parameter.start
    quantized = not tensor.is_floating_point() or tensor.element_size() == 1  # their scale stands elsewhere
    found = {} if quantized else measure_init(tensor, start, offset=carrier.parameter.offset)
    if not found:
        return False
    std, count, rounding = found["std"], found["count"], found["rounding"]
    return std == 0 or (carrier.initial is not None and init_is_right(start, carrier.initial, std, count, rounding))


def _say(carrier: list[FrozenCarrier], scalable: bool) -> str:
    first, several = carrier[0], len(carrier) > 1
    names = first.parameter.name + (f" and {len(carrier) - 1} more, which are" if several else ", which is")
    what = "them" if several else "it"
    own = ""
    if first.factor == "logit":
        own = "let the attention scale its logits (scale_logits(model, parametrization)); or " if scalable else ""
        what = "what belongs to the queries" if any(len(each.parameter.parts) > 1 for each in carrier) else what
    return (
        f"the factor {first.value:.4g} on the {WORDS[first.factor]} belongs into {names} frozen: nothing here "
        f"puts it there, and in trained numbers it cannot be seen; {own}multiply {what} by {first.value:.4g} once, if "
        "that is missing"
    )

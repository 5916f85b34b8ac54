"""Frozen parameters into which a factor of the forward pass belongs, and where nothing puts it.

What a model does not multiply is folded into the weight behind it (`manyheads.limits.parametrization.targets`), by
the spread at which
it starts and by its rate. A frozen weight has no rate, and is not drawn anew. It holds the factor if it started with
it, which its spread tells, and any factor if it is zero; what it was trained with elsewhere cannot be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from manyheads.limits.checks.init_test import starts_right
from manyheads.limits.parametrization.architecture import CARRIES
from manyheads.limits.parametrization.targets import Tuned, list_wants, missing_factors, usual_forward
from manyheads.limits.torch.init import measure_start

if TYPE_CHECKING:
    from manyheads.limits.parametrization.architecture import Anatomy, Place
    from manyheads.limits.parametrization.parametrization import Parametrization
    from manyheads.limits.parametrization.targets import Forward
    from manyheads.limits.torch.groups import TorchModel

MULTIPLIES: Mapping[str, str] = {
    "logit": "logits",
    "branch": "branches",
    "output": "outputs",
    "embedding": "embeddings",
}
"""What a factor multiplies, in words."""


@dataclass(frozen=True)
class Owed:
    """A frozen parameter into which a factor of the forward pass belongs.

    Attributes
    ----------
    place
        The parameter.
    factor, value
        Which one, a field of `Forward`, and how much.
    initial
        Standard deviation (of gains the number) at which it would have started with the factor; None where that is
        not known, or holds for a third of it.
    """

    place: Place
    factor: str
    value: float
    initial: float | None


def list_owed(p: Parametrization, anatomy: Anatomy, tuned: Tuned, forward: Forward | None = None) -> tuple[Owed, ...]:
    """Return the frozen parameters of a model that would have to hold a factor other than one.

    Parameters
    ----------
    forward
        What the model multiplies itself, as `list_wants` takes it.

    Examples
    --------
    >>> from manyheads.transformer.scaling import Shape
    >>> from manyheads.limits import Parametrization
    >>> from manyheads.limits.parametrization.architecture import read_map
    >>> anatomy = read_map({"k": "key", "q": "query"}, Shape(16, 2, 1), names=["k"], frozen=["q"])
    >>> [(each.place.name, each.factor) for each in list_owed(Parametrization(base=Shape(4, 2, 1)), anatomy, Tuned(1))]
    [('q', 'logit')]
    """
    forward = forward or usual_forward(p, anatomy.shape)
    factors = asdict(missing_factors(p, anatomy.shape, forward))
    found = []
    for place in anatomy.frozen:
        for part in place.parts:
            name = "output" if place.closes or part == "unembedding" else CARRIES.get(part)
            value = 1.0 if name is None else factors[name] * (forward.embedding if place.closes else 1)
            if name is not None and abs(value - 1) > 1e-9:
                alone = replace(anatomy, places=(place,), open_end="") if len(place.parts) == 1 else None
                initial = list_wants(p, alone, tuned, forward)[0].initial if alone else None
                found.append(Owed(place, name, value, initial))
    return tuple(found)


def name_uncarried(p: Parametrization, read: TorchModel, tuned: Tuned, forward: Forward) -> list[str]:
    """Say which factors no parameter of a PyTorch model carries because the one that should is frozen, and what to do.

    Parameters
    ----------
    forward
        What the model multiplies itself, relative to the base.
    """
    owed: dict[str, list[Owed]] = {}
    for each in list_owed(p, read.anatomy, tuned, forward):
        if not _holds(each, read.frozen[each.place.name]):
            owed.setdefault(each.factor, []).append(each)
    said = [_say(some, bool(read.scales)) for some in owed.values()]
    # A map may leave frozen parameters out: then nobody knows where the factor is.
    known = (*read.anatomy.places, *read.anatomy.frozen)
    if len(read.anatomy.frozen) < len(read.frozen):
        for name, value in asdict(missing_factors(p, read.anatomy.shape, forward)).items():
            parts = [part for part, factor in CARRIES.items() if factor == name and not part.endswith("bias")]
            parts = parts or ["unembedding"]
            told = any(part in place.parts for part in parts for place in known)
            told |= name == "output" and any(place.tied for place in known)
            if abs(value - 1) > 1e-9 and not told:
                said.append(
                    f"the factor {value:.4g} on the {MULTIPLIES[name]} belongs into {' and '.join(parts)}, and the "
                    "role map gives no parameter that part: name the frozen ones, too"
                )
    return said


def _holds(owed: Owed, tensor: Any) -> bool:
    """Whether a frozen parameter starts with its factor, or is zero; without numbers it does not."""
    start = "random" if owed.place.start == "zero" and owed.initial else owed.place.start
    quantised = not tensor.is_floating_point() or tensor.element_size() == 1  # their scale stands elsewhere
    found = {} if quantised else measure_start(tensor, start, offset=owed.place.offset)
    if not found:
        return False
    spread, count, rounding = found["spread"], found["count"], found["rounding"]
    return spread == 0 or (owed.initial is not None and starts_right(start, owed.initial, spread, count, rounding))


def _say(owed: list[Owed], scalable: bool) -> str:
    first, several = owed[0], len(owed) > 1
    names = first.place.name + (f" and {len(owed) - 1} more, which are" if several else ", which is")
    what = "them" if several else "it"
    own = ""
    if first.factor == "logit":
        own = "let the attention scale its logits (scale_logits(model, parametrization)); or " if scalable else ""
        what = "what belongs to the queries" if any(len(each.place.parts) > 1 for each in owed) else what
    return (
        f"the factor {first.value:.4g} on the {MULTIPLIES[first.factor]} belongs into {names} frozen: nothing here "
        f"puts it there, and in trained numbers it cannot be seen; {own}multiply {what} by {first.value:.4g} once, if "
        "that is missing"
    )

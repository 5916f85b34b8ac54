"""Applied factors: multipliers in the forward pass of a PyTorch model, read off its modules, measured, or given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyheads.errors import UsageError
from manyheads.limits.parametrization.targets import (
    ForwardMultipliers,
    forward_multipliers,
    missing_multipliers,
    usual_multipliers,
)
from manyheads.limits.torch.forward_pass import ForwardPass, measure_forward
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.limits.parametrization.parametrization import Parametrization
    from manyheads.limits.torch.model import ModelOptions, TorchModel

WORDS = {"logit": "logits", "branch": "branches", "output": "outputs", "embedding": "embeddings"}
GIVE = (
    "give folded=ForwardMultipliers(branch=..., logit=..., output=...), what the model multiplies relative to the base"
)
KEEP = {"logit": "keep the key dimension of the base", "branch": "keep its depth", "output": "keep its width"}


def find_multipliers(p: Parametrization, model: Any, read: TorchModel, reading: ModelOptions) -> ForwardMultipliers:
    """Return what a model multiplies its branches, logits and outputs by, relative to the base.

    Where a size changes on which a multiplier depends, it is measured, unless it was given, or the model is of a family
    of transformers whose forward pass is known.
    """
    shape, base, folded = read.architecture.shape, p.base, reading.folded
    if isinstance(folded, ForwardMultipliers):
        return folded
    said = usual_multipliers(p, shape) if folded else forward_multipliers(p, shape)
    if (logit := _find_scaling(p, read, folded)) is not None:
        said = replace(said, logit=logit)
    if read.architecture.root_width:
        said = replace(said, embedding=(shape.width / base.width) ** 0.5)
    moves = {
        "logit": shape.key_dim != base.key_dim and logit is None,
        "branch": shape.depth != base.depth,
        "output": shape.width != base.width or p.richness != 1,
        "embedding": shape.width != base.width,
    }
    if (folded and reading.roles is None) or not any(moves.values()):
        return said
    found = measure_forward(model, read, reading.example)
    for name in (name for name in moves if moves[name]):
        _refuse_unknown(name, found, said, p, read)
        for module, number in getattr(found, name).values.items():
            choices = _choices(name, p, read, folded)
            fitting = [each for value, each in choices if abs(number - value) <= found.accuracy * value]
            if not fitting:
                raise UsageError(
                    f"{module} multiplies its {WORDS[name]} by {number:.6g}, and folded={folded} expects "
                    f"{' or '.join(dict.fromkeys(f'{value:.6g}' for value, _ in choices))}: "
                    f"{'folded=False if it applies all of forward_multipliers(p, shape); or ' * folded}{GIVE}"
                )
            if name in ("logit", "embedding"):
                said = replace(said, **{name: fitting[0]})
    return said


def logit_scale(p: Parametrization, key_dim: int) -> float:
    """Return what a parametrization multiplies q . k by, if the base has the usual scale."""
    return float(p.base.key_dim ** (p.logit_exponent - 0.5) * key_dim**-p.logit_exponent)


def _choices(name: str, p: Parametrization, read: TorchModel, folded: bool) -> list[tuple[float, float]]:
    """Return what a multiplier may be, and what that is relative to the base; constants of the base are not known."""
    shape, asked = read.architecture.shape, forward_multipliers(p, read.architecture.shape)
    if name == "logit":
        n, own = shape.key_dim, asked.logit
        usual = [(n**-0.5, usual_multipliers(p, shape).logit)] if folded else []
        return [*usual, (logit_scale(p, n), own), (n**-p.logit_exponent, own)]
    if name == "embedding":  # none, or the root of the width (Gemma)
        return [(1.0, 1.0), (shape.width**0.5, (shape.width / p.base.width) ** 0.5)]
    if folded:
        return [(1.0, 1.0)]
    own = getattr(asked, name)
    # Relative to the base, or as a power of the size itself.
    return [(own, own), (own * (p.branch.ratio(p.base, Shape(1, 1, 1)) if name == "branch" else 1 / p.base.width), own)]


def _refuse_unknown(
    name: str, found: ForwardPass, said: ForwardMultipliers, p: Parametrization, read: TorchModel
) -> None:
    """Refuse a multiplier that was not measured, if one is to be folded or was said to be applied."""
    measured, shape = getattr(found, name), read.architecture.shape
    parameters = (*read.architecture.parameters, *read.architecture.frozen)
    carried = {
        read.architecture.carries.get(part, "output" if part == "unembedding" else "")
        for each in parameters
        for part in each.parts
    }
    carried |= {"output" for each in parameters if each.tied}
    if name == "embedding" or name not in carried or not measured.unknown:  # see `describe_missing_factors`
        return
    missing = getattr(missing_multipliers(p, shape, said), name)
    applied = getattr(forward_multipliers(p, shape), name) / getattr(usual_multipliers(p, shape), name)
    if abs(missing - 1) > 1e-9:
        raise UsageError(
            f"the factor {missing:.4g} on the {WORDS[name]} would have no known effect in a weight: "
            f"{measured.unknown[0]}; {KEEP[name]}, or multiply in the model and {GIVE}"
        )
    if abs(applied - 1) > 1e-9:
        raise UsageError(
            f"whether the model multiplies its {WORDS[name]} by {applied:.4g} cannot be told: {measured.unknown[0]}; "
            f"give example=, a batch that it takes, or {GIVE}"
        )


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
            raise UsageError(
                f"{name} multiplies its logits by {scale:.6g}, which is not {allowed}the {wanted:.6g} of the "
                "parametrization: set it by scale_logits(model, parametrization)"
            )
        if logit not in (None, found):
            raise UsageError(f"{name} scales its logits otherwise than the layers before it: use scale_logits on all")
        logit = found
    return logit

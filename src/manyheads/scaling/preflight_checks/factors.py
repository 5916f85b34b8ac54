"""Factors of the forward pass, read off traces at two shapes: applied, folded into weights, both or neither."""

from __future__ import annotations

import math
from typing import Any

from manyheads.models.infer.multipliers import ACCURACY, ForwardPass, read_multipliers
from manyheads.models.names import join_layers
from manyheads.models.parts import PARTS
from manyheads.models.torch.model import TorchModel
from manyheads.scaling.axes import Axis
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import (
    ForwardMultipliers,
    forward_multipliers,
    role_factors,
    usual_multipliers,
)
from manyheads.scaling.preflight_checks.result import FactorUse, State
from manyheads.scaling.torch.applied_factors import WITHIN
from manyheads.scaling.torch.init import measure_init
from manyheads.transformer.shape import Shape

NAMES = ("logit", "branch", "output", "embedding")
NEAR = 0.25
"""Weights carry a factor if they start nearer to it than this share of its distance from one, in logarithms: above the
sampling error of a standard deviation over a thousand entries, 2%, for factors from 1.1."""
DEVIATIONS = 6.0
"""Standard errors of a measured std that a weight may start from that of the table where the factor is one."""


class Factors:
    """What one model multiplies in its forward pass and how the weights behind it start."""

    def __init__(self, model: Any, read: TorchModel, example: Any) -> None:
        self.read = read
        self.measured: ForwardPass = read_multipliers(model, read, example)
        self.stds = dict(self._stds())

    def forward(self, name: str, base: Factors) -> tuple[list[float], str]:
        """Return a multiplier over that of the base, for every module, or why it is not known."""
        here, before = getattr(self.measured, name), getattr(base.measured, name)
        if unknown := [*here.unknown, *before.unknown]:
            return [], unknown[0]
        if not here.values or not before.values or min([*here.values.values(), *before.values.values()]) <= 0:
            return [], "none was seen"
        groups: dict[str, float] = {}
        for module, value in before.values.items():
            groups.setdefault(join_layers(module), value)  # layers that the base has not are held against its first
        first = next(iter(groups.values()))
        return [
            value / before.values.get(module, groups.get(join_layers(module), first))
            for module, value in here.values.items()
        ], ""

    def _stds(self) -> Any:
        """Yield for every factor the RMS of the weights that would carry it."""
        squares: dict[tuple[str, str], list[tuple[float, int]]] = {}
        carries = self.read.architecture.carries
        for parameter in self.read.architecture.parameters:
            tensor, part = self.read.tensors[parameter.name], parameter.parts[0]
            name = "output" if part == "unembedding" or parameter.closes else carries.get(part)
            if name not in NAMES or len(parameter.parts) > 1 or part.endswith(("bias", "shift")):
                continue
            found = measure_init(tensor, parameter.start, None, parameter.offset)
            if found.get("std", 0.0) > 0:
                squares.setdefault((name, part), []).append((found["std"] ** 2, found["count"]))
        for key, each in squares.items():
            count = sum(entries for _, entries in each)
            yield key, (math.sqrt(sum(square * entries for square, entries in each) / count), count)


def find_uses(p: Parametrization, axis: Axis, shape: Shape, here: Factors, base: Factors) -> list[FactorUse]:
    """Return how every factor is provided for that the parametrization asks for at a shape, factors of one as well."""
    asked, usual, role = forward_multipliers(p, shape), usual_multipliers(p, shape), role_factors(p, shape)
    found = []
    for name in (*NAMES, "position", *WITHIN):
        wanted = getattr(asked, name, 1.0) / getattr(usual, name, 1.0)
        forward, reason = here.forward(name, base)
        forward = [each / getattr(usual, name, 1.0) for each in forward]
        if not forward and name not in NAMES:  # the growth of updates judges what it scales
            continue
        allowed = [wanted, 1.0, *([(shape.width / p.base.width) ** 0.5] if name == "embedding" else [])]
        near = max(10 * ACCURACY, here.measured.accuracy, base.measured.accuracy)
        forward = sorted(forward, key=lambda each: min(abs(math.log(each / one)) for one in allowed))
        applied = forward[-1] if forward else None  # the farthest from what is right
        ratios = []
        for key, (std, count) in here.stds.items():
            if key[0] == name and key in base.stds and not getattr(here.measured, name).normed:
                plain = role[PARTS[key[1]]].initial / (asked.output if key[1] == "unembedding" else 1.0)
                before, entries = base.stds[key]
                ratios.append((std / before / plain, DEVIATIONS * math.sqrt(0.5 / count + 0.5 / entries)))
        state: State = "unknown"
        if applied is not None:
            fitting = [one for one in allowed if all(abs(math.log(each / one)) <= near for each in forward)]
            state, reason = _state(wanted, fitting[0] if fitting else None, ratios)
        carried = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios)) if ratios else None
        found.append(FactorUse(name, axis, shape, wanted, applied, carried, state, reason))
    return found


def multipliers(p: Parametrization, shape: Shape, uses: list[FactorUse]) -> ForwardMultipliers:
    """Return what the forward pass multiplies relative to the base: as measured, and as usual where it is not known."""
    asked, usual = forward_multipliers(p, shape), usual_multipliers(p, shape)
    applied = {use.name for use in uses if use.state in ("applied", "both")}
    chosen = {name: getattr(asked if name in applied else usual, name) for name in NAMES}
    if root := [use.forward for use in uses if use.name == "embedding" and use.state == "folded"]:
        chosen["embedding"] = root[0]
    return ForwardMultipliers(**chosen)


def _state(wanted: float, forward: float | None, ratios: list[tuple[float, float]]) -> tuple[State, str]:
    """Return how the factor is provided for by a forward multiplier, None if it is a wrong one, and by weights."""
    if forward is None:
        return "other", ""
    here = abs(math.log(forward / wanted)) < 1e-6  # the forward pass has the factor
    if not ratios:
        if here:
            return "applied" if wanted != 1 else "unchanged", ""
        return "unknown", "the weights that would carry it start at zero, are frozen, or share a matrix with others"

    def carry(factor: float) -> bool:
        """Whether all weights start at so many times what they would without it."""
        share = NEAR * max(abs(math.log(wanted)), abs(math.log(forward)))
        return all(abs(math.log(ratio / factor)) <= (share or slack) for ratio, slack in ratios)

    if carry(wanted / forward):
        return ("unchanged" if wanted == 1 and here else "applied" if here else "folded"), ""
    if here and wanted != 1 and carry(wanted):
        return "both", ""
    return ("neither" if not here and carry(1.0) else "other"), ""

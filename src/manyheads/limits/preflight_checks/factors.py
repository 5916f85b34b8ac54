"""Factors of the forward pass, measured by function at two shapes: applied, folded into weights, both or neither."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manyheads.limits.axes import Axis
from manyheads.limits.parametrization.parts import PARTS
from manyheads.limits.parametrization.targets import (
    ForwardMultipliers,
    forward_multipliers,
    role_factors,
    usual_multipliers,
)
from manyheads.limits.preflight_checks.result import FactorUse, State
from manyheads.limits.torch.forward_pass import ForwardPass, measure_forward
from manyheads.limits.torch.init import measure_init
from manyheads.limits.torch.model import TorchModel
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.limits.parametrization.parametrization import Parametrization

NAMES = ("logit", "branch", "output")
NEAR = 0.25
"""A factor counts as the prescribed one if it is nearer to it than this share of its distance from one, in logarithms:
above the sampling error of a standard deviation over a thousand entries, 2%, for factors from 1.1."""


class Factors:
    """What one model multiplies in its forward pass and how the weights behind it start."""

    def __init__(self, model: Any, read: TorchModel, example: Any) -> None:
        self.read = read
        self.measured: ForwardPass = measure_forward(model, read, example)
        self.stds = dict(self._stds())

    def forward(self, name: str) -> tuple[float | None, str]:
        """Return the geometric mean of a multiplier over modules, or why it is not known."""
        found = getattr(self.measured, name)
        values = list(found.values.values())
        if not values or found.unknown or min(values) <= 0:
            return None, found.unknown[0] if found.unknown else "none was seen"
        return math.exp(sum(map(math.log, values)) / len(values)), ""

    def _stds(self) -> Any:
        """Yield for every factor the RMS of the weights that would carry it."""
        squares: dict[tuple[str, str], list[float]] = {}
        carries = self.read.architecture.carries
        for parameter in self.read.architecture.parameters:
            tensor, part = self.read.tensors[parameter.name], parameter.parts[0]
            name = "output" if part == "unembedding" or parameter.closes else carries.get(part)
            if name not in NAMES or len(parameter.parts) > 1 or part.endswith(("bias", "shift")):
                continue
            std = measure_init(tensor, parameter.start, None, parameter.offset)["std"]
            if std > 0:
                squares.setdefault((name, PARTS[part]), []).append(std**2)
        for key, found in squares.items():
            yield key, math.sqrt(sum(found) / len(found))


def find_uses(p: Parametrization, axis: Axis, shape: Shape, here: Factors, base: Factors) -> list[FactorUse]:
    """Return how every factor that the parametrization asks for at a shape is provided for."""
    asked, usual, role = forward_multipliers(p, shape), usual_multipliers(p, shape), role_factors(p, shape)
    found = []
    for name in NAMES:
        wanted = getattr(asked, name) / getattr(usual, name)
        if abs(wanted - 1) < 1e-6:
            continue
        (now, reason), (then, other) = here.forward(name), base.forward(name)
        applied = now / then / getattr(usual, name) if now and then else None
        ratios = []
        for key, std in here.stds.items():
            if key[0] == name and key in base.stds:
                plain = role[key[1]].initial / (asked.output if key[1] == "unembedding" else 1.0)
                ratios.append(std / base.stds[key] / plain)
        carried = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        state, why = _state(wanted, applied, carried, reason or other)
        found.append(FactorUse(name, axis, shape, wanted, applied, carried, state, why))
    return found


def multipliers(p: Parametrization, shape: Shape, uses: list[FactorUse]) -> ForwardMultipliers:
    """Return what the forward pass multiplies relative to the base: as measured, and as usual where it is not known."""
    asked, usual = forward_multipliers(p, shape), usual_multipliers(p, shape)
    applied = {use.name for use in uses if use.state in ("applied", "both")}
    chosen = {name: getattr(asked if name in applied else usual, name) for name in NAMES}
    return ForwardMultipliers(**chosen)


def _state(wanted: float, forward: float | None, weights: float | None, reason: str) -> tuple[State, str]:
    if forward is None:
        return "unknown", reason
    if weights is None:
        if abs(math.log(forward) / math.log(wanted) - 1) < NEAR:
            return "applied", ""
        return "unknown", "the weights that would carry it start at zero, are frozen, or share a matrix with others"
    places = []
    for number in (forward, weights):
        share = math.log(number) / math.log(wanted)
        places.append(1 if abs(share - 1) < NEAR else 0 if abs(share) < NEAR else None)
    if None in places:
        return "other", ""
    states: dict[Any, State] = {(1, 0): "applied", (0, 1): "folded", (1, 1): "both", (0, 0): "neither"}
    return states[tuple(places)], ""

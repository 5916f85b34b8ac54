"""Expected growth of what every module's weights move, from the parametrization and what is folded into them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyheads.errors import UsageError
from manyheads.models.names import join_layers
from manyheads.models.parts import LATENT, PARTS, ROUTER, SINK
from manyheads.models.torch.model import TorchModel
from manyheads.scaling.checks.growth_powers import least_growth, required_growth
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters, MuonHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.power_laws import Power
from manyheads.scaling.parametrization.targets import ForwardMultipliers, parameter_targets, role_factors
from manyheads.scaling.preflight_checks.training import OUTPUTS, STREAM
from manyheads.transformer.scaling import ROLES
from manyheads.transformer.shape import Shape

FOREIGN = (*LATENT, ROUTER, SINK)
IN_BLOCKS = ("query", "key", "value", "output", "mlp_in", "mlp_out", "norm", "bias", "logit_bias", *FOREIGN)


@dataclass(frozen=True)
class Expected:
    """Size of an update at one shape relative to the base: prescribed, and the least that a right one may show."""

    required: float
    least: float


def role_powers(p: Parametrization) -> dict[str, tuple[Power, Power]]:
    """Return the prescribed power of what every role's weights move, and the least one that is right as well.

    What W_O reads shrinks with N at logit exponent 1, where attention flattens: logits there are sums of N random
    terms over N.
    """
    required, least = required_growth(p), least_growth(p, early=p.optimizer == "sgd")
    flatter = Power(key_dim=min(0.0, 0.5 - p.logit_exponent))
    found = {}
    for role in (*ROLES, "hidden", *FOREIGN):
        logit = role in ("query", "key", "logit_bias", "query_up")
        quantity = "query_by_weights" if logit else "value_by_weights"
        if role not in IN_BLOCKS:
            found[role] = Power(), Power()
        else:
            found[role] = required[quantity], least[quantity] * (flatter if role == "output" else Power())
    return found


def expected_updates(
    p: Parametrization, read: TorchModel, forward: ForwardMultipliers, shape: Shape
) -> dict[str, Expected]:
    """Return the expected update of every module whose weights have a role, and of the stream and the outputs."""
    tuned = BaseHyperparameters(1.0, muon=MuonHyperparameters(1.0))
    powers, factors = role_powers(p), role_factors(p, shape)
    found: dict[str, Expected] = {}
    targets = parameter_targets(p, read.architecture, tuned, forward)
    for target in sorted(targets, key=lambda each: -read.tensors[each.parameter.name].dim()):  # matrices first
        name, roles = target.parameter.name, [PARTS[part] for part in target.parameter.parts]
        folded = target.factors.initial / factors[roles[0]].initial
        ratios = [tuple(each.ratio(shape, p.base) * folded for each in powers[role]) for role in roles]
        expected = Expected(max(one for one, _ in ratios), min(other for _, other in ratios))
        for group in (join_layers(name), join_layers(name.rpartition(".")[0])):
            found.setdefault(group, expected)
    return found


def expected_arrays(p: Parametrization, roles: Mapping[str, str], shape: Shape) -> dict[str, Expected]:
    """Return the expected update of every array of a JAX model by its role."""
    powers = role_powers(p)
    if unknown := [role for role in roles.values() if role not in powers]:
        raise UsageError(f"no role is called {unknown[0]!r}: choose from {', '.join(powers)}")
    found = {}
    for name, role in roles.items():
        required, least = (each.ratio(shape, p.base) for each in powers[role])
        before = min(1.0, p.branch.ratio(shape, p.base)) if role in ("output", "mlp_out") else 1.0
        found[name] = Expected(required, least * before)  # the branch factor may stand before the matrix
    return found


def whole_updates(p: Parametrization, shape: Shape) -> dict[str, Expected]:
    """Return the expected change of the stream and of the outputs, as prefixes of names."""
    required, least = required_growth(p), least_growth(p, early=p.optimizer == "sgd")
    quantities = {STREAM: "residual", OUTPUTS: "outputs"}
    return {
        name: Expected(required[quantity].ratio(shape, p.base), least[quantity].ratio(shape, p.base))
        for name, quantity in quantities.items()
    }


def find_expected(name: str, found: Mapping[str, Expected], whole: Mapping[str, Expected]) -> Expected | None:
    """Look up what is expected of a measured update; None for a module without a role."""
    if name in found:
        return found[name]
    return next((each for prefix, each in whole.items() if name.startswith(prefix)), None)


def slope(sizes: Sequence[int], logarithms: Sequence[float]) -> float:
    """Return the least-squares slope of logarithms of values over those of sizes."""
    x = [math.log(size) for size in sizes]
    middle = sum(x) / len(x)
    x = [each - middle for each in x]
    return sum(a * b for a, b in zip(x, logarithms, strict=True)) / sum(a * a for a in x)

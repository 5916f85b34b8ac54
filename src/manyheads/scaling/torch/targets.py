"""Targets of a PyTorch model's parameters: the model is read, its multipliers are found, factors are folded."""

from __future__ import annotations

from typing import Any, NamedTuple

from manyheads.models.torch.model import ModelOptions, TorchModel, read_model, unwrap
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import ForwardMultipliers, ParameterTarget, parameter_targets
from manyheads.scaling.torch.applied_factors import find_multipliers


class ModelTargets(NamedTuple):
    """A model, what it multiplies relative to the base, and the targets of its trained parameters."""

    model: TorchModel
    forward: ForwardMultipliers
    targets: tuple[ParameterTarget, ...]
    notes: tuple[str, ...]  # multipliers that could not be measured


def model_targets(
    p: Parametrization, model: Any, hyperparameters: BaseHyperparameters, options: ModelOptions
) -> ModelTargets:
    """Return the targets of every trained parameter of a model."""
    read = read_model(model, options)
    forward, notes = find_multipliers(p, unwrap(model), read, options)
    return ModelTargets(read, forward, parameter_targets(p, read.architecture, hyperparameters, forward), notes)

"""Audits of a PyTorch model and its optimizer, or its groups: the settings of every parameter beside its targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.infer.inferred import InferredRoles
from manyheads.models.torch.lazy_torch import Module
from manyheads.models.torch.model import ModelOptions, TorchModel
from manyheads.scaling.audit.findings import Audit, Finding
from manyheads.scaling.audit.frozen import describe_missing_factors
from manyheads.scaling.audit.muon_groups import GroupRow, MixedGroups, judge_muon, patch_target, read_mixed
from manyheads.scaling.audit.parameter_settings import ActualSettings, compare_settings
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.table import OUTSIDE
from manyheads.scaling.parametrization.targets import (
    ForwardMultipliers,
    ParameterTarget,
    given_std,
    parameter_targets,
    role_factors,
)
from manyheads.scaling.torch.applied_factors import model_targets
from manyheads.scaling.torch.init import measure_init
from manyheads.scaling.torch.optimizer_groups import find_optimizer, has_stepped, read_groups, read_peaks
from manyheads.transformer.shape import Shape


def audit_model(
    p: Parametrization,
    model: Module,
    groups: Any,
    hyperparameters: BaseHyperparameters,
    roles: Mapping[str, str] | str | PathLike[str] | InferredRoles | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | ForwardMultipliers = True,
    fresh: bool | None = None,
    example: Any = None,
    heads: int | None = None,
) -> Audit:
    """Compare a PyTorch model and its optimizer with what the parametrization prescribes.

    Raises `UsageError`: no groups, an optimizer of the other kind or of none that is known, groups that train another
    model, or what `torch_groups` refuses.

    Parameters
    ----------
    p, model, hyperparameters, roles, shape, folded, example, heads
        As `torch_groups` takes them.
    groups
        Its torch.optim optimizer, a schedule over it, or the list of groups. Beside Muon a list of optimizers, or of
        schedules over them; or of groups that name their rule (`use_muon`, `algorithm`, `ns_steps` or `betas`), and
        where a Muon cuts matrices how (`num_heads`, or `split`: whole, thirds, heads or head-columns). Under a schedule
        the rate it starts from counts, the groups' `initial_lr`, and under one cycle their `max_lr`. Two schedules
        leave no peak on the optimizer: that of `CyclicLR` is read off the schedule, and that of `ReduceLROnPlateau` is
        forgotten once it has been lowered. Where the peak is not known, rates are held against each other.
    fresh
        Whether the weights are as they started, so that their stds can be judged; None: if the optimizer has not
        made a step, of which gradient descent without momentum keeps no trace. A std is right within its sampling
        error at a false-alarm rate of 1e-6 a parameter.
    """
    options = ModelOptions(roles, shape, folded, example, heads)
    read, forward, targets, unmeasured = model_targets(p, model, hyperparameters, options)
    mixed = read_mixed(groups) if p.optimizer == "muon" else _read_alone(p, groups, hyperparameters)
    notes, hidden = [*mixed.notes, *unmeasured], mixed.hidden
    asked, fresh = fresh, not mixed.stepped if fresh is None else fresh
    settings, owners, doubled = _collect(read, mixed.rows, fresh)

    def patched(target: ParameterTarget) -> ParameterTarget:
        name, size = target.parameter.name, read.architecture.shape
        if target.parameter.parts != ("patch",) or name not in owners or owners[name].rule != "muon":
            return target
        return patch_target(p, target, read.tensors[name].numel() // size.width, size, hyperparameters)

    targets = tuple(map(patched, targets))
    settings, random = _leave_random_biases(targets, settings, read, hyperparameters)
    if hidden and p.optimizer == "muon":
        settings = {name: replace(each, learning_rate=None) for name, each in settings.items()}
        notes.append(f"rates: not judged, for {hidden}")
    elif hidden:
        hyperparameters, settings, said = _hold_against_each_other(targets, settings, hyperparameters)
        targets = parameter_targets(p, read.architecture, hyperparameters, forward)
        notes.append(f"rates: {said}, for {hidden}")
    factors = role_factors(p, read.architecture.shape)
    tied = factors["unembedding"].learning_rate / factors["embedding"].learning_rate
    findings = compare_settings(targets, settings, hyperparameters, tied) + doubled
    if p.optimizer == "muon":
        judged = [
            judge_muon(p, target, owners[name], hyperparameters.of("muon"), read.architecture)
            for target in targets
            if (name := target.parameter.name) in owners and owners[name].rule == target.factors.rule == "muon"
        ]
        findings += tuple(finding for some, _ in judged for finding in some)
        findings += tuple(
            Finding(target.parameter.name, target.role, "block", 1.0, 0.0, 0.0, False, target.conflict)
            for target in targets
            if target.conflict and target.factors.rule != "muon"
        )
        notes += dict.fromkeys(note for _, some in judged for note in some)
    unknown = sorted({target.role for target in targets if target.initial is None} | random)
    if not fresh:
        notes.append("initial stds: not judged, the weights have been trained")
    elif asked is None and any(each.quantity == "initial" and not each.right for each in findings):
        notes.append(
            "initial stds: judged as those of a model before its first step; if yours is trained, say fresh=False "
            "(--trained on the command line)"
        )
    if fresh and unknown:
        notes.append(f"initial stds of {', '.join(unknown)}: not judged, give BaseHyperparameters(stds={{role: std}})")
    notes += describe_missing_factors(p, read, hyperparameters, forward)
    if read.architecture.post_norm:
        notes.append("post-norm: depth is outside the theory; width and key dimension are judged")
    return Audit(findings, (*notes, *OUTSIDE))


def _read_alone(p: Parametrization, groups: Any, hyperparameters: BaseHyperparameters) -> MixedGroups:
    """Read one optimizer, a schedule over it, or a list of groups, all of one rule."""
    groups, schedules = find_optimizer(groups)
    rows, notes = read_groups(p, groups, hyperparameters)
    learning_rates, hidden = read_peaks(rows, schedules)
    pairs = zip(rows, learning_rates, strict=True)
    found = tuple(GroupRow(row, p.optimizer, learning_rate, False) for row, learning_rate in pairs)
    return MixedGroups(found, tuple(notes), has_stepped(groups), hidden)


def _leave_random_biases(
    targets: Sequence[ParameterTarget], settings: dict[str, ActualSettings], read: TorchModel, base: BaseHyperparameters
) -> tuple[dict[str, ActualSettings], set[str]]:
    """Leave out stds of random biases of a plain module, unknown at the base; return what is left, and their roles."""
    left = {
        target.parameter.name: target.role
        for target in targets
        if not read.architecture.family
        and target.parameter.parts[0].endswith("bias")
        and given_std(target.parameter.parts[0], base) is None
        and target.parameter.name in settings
        and settings[target.parameter.name].std
    }
    return settings | {name: replace(settings[name], std=None) for name in left}, set(left.values())


def _hold_against_each_other(
    targets: Sequence[ParameterTarget], settings: dict[str, ActualSettings], hyperparameters: BaseHyperparameters
) -> tuple[BaseHyperparameters, dict[str, ActualSettings], str]:
    """Take for tuned the rate at the base that the middle one of the parameters has; if it is zero, judge no rates."""
    found = [
        (settings[target.parameter.name].learning_rate or 0.0) / target.factors.learning_rate
        for target in targets
        if target.parameter.name in settings
    ]
    if common := statistics.median_low(found) if found else 0.0:
        words = "held against each other, and not against the tuned one"
        return replace(hyperparameters, learning_rate=common), settings, words
    settings = {name: replace(each, learning_rate=None) for name, each in settings.items()}
    return hyperparameters, settings, "not judged, they are zero"


def _collect(
    read: TorchModel, groups: Sequence[GroupRow], fresh: bool
) -> tuple[dict[str, ActualSettings], dict[str, GroupRow], tuple[Finding, ...]]:
    """Return what every parameter has, its group, and the parameters that are in more than one group."""
    names = {id(tensor): name for name, tensor in read.tensors.items()}
    parts = {parameter.name: parameter for parameter in read.architecture.parameters}
    settings: dict[str, ActualSettings] = {}
    owners: dict[str, GroupRow] = {}
    doubled = []
    for number, group in enumerate(groups):
        row = group.row
        tensors = row["params"]
        for entry in [tensors] if hasattr(tensors, "requires_grad") else tensors:
            tensor = entry[1] if isinstance(entry, tuple) else entry  # (name, tensor), as torch.optim takes them too
            name = names.get(id(tensor))
            if name is None:
                if not tensor.requires_grad:
                    continue
                raise UsageError(f"group {number} holds a tensor {tuple(tensor.shape)} of another model: audit its own")
            if name in settings:
                meaning = "it is in two groups: every step is made twice"
                if group.rule != owners[name].rule:
                    meaning = "it is in Muon and in AdamW: it is stepped by two optimizers"
                role, first = "+".join(parts[name].parts), settings[name].learning_rate or 0.0
                both = first + group.learning_rate
                factor = both / first if first else math.inf
                doubled.append(Finding(name, role, "learning_rate", first, both, factor, False, meaning))
                continue
            parameter = parts[name]
            start = measure_init(tensor, parameter.start, read.padding.get(name), parameter.offset) if fresh else {}
            owners[name] = group
            settings[name] = ActualSettings(
                learning_rate=group.learning_rate,
                epsilon=float(row["eps"]) if group.rule == "adam" and "eps" in row else None,
                weight_decay=float(row["weight_decay"]),
                rule=group.rule,
                **start,
            )
    return settings, owners, tuple(doubled)

"""Audits of a PyTorch model and its optimizer, or its groups: what every parameter has, read off them and judged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyheads.errors import UsageError
from manyheads.limits.checks.audit import Audit, Finding, Has, judge
from manyheads.limits.parametrization.table import OUTSIDE
from manyheads.limits.parametrization.targets import Forward, Tuned, Want, given_spread, list_wants, role_factors
from manyheads.limits.torch.applied_factors import find_forward
from manyheads.limits.torch.frozen import name_uncarried
from manyheads.limits.torch.groups import Reading, TorchModel, read_model, unwrap
from manyheads.limits.torch.init import measure_start
from manyheads.limits.torch.optimizer_groups import find_optimizer, has_stepped, read_groups, read_peaks
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.limits.parametrization.parametrization import Parametrization


def audit_model(
    p: Parametrization,
    model: Any,
    groups: Any,
    tuned: Tuned,
    roles: Mapping[str, str] | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | Forward = True,
    fresh: bool | None = None,
    example: Any = None,
) -> Audit:
    """Compare a PyTorch model and its optimizer with what the parametrization wants.

    Parameters
    ----------
    p, model, tuned, roles, shape, folded, example
        As `torch_groups` takes them.
    groups
        Its torch.optim optimizer, a schedule over it, or the list of groups. Under a schedule the rate it starts from
        counts, the groups' `initial_lr`, and under one cycle their `max_lr`. Two schedules leave no peak on the
        optimizer: that of `CyclicLR` is read off the schedule, and that of `ReduceLROnPlateau` is forgotten once it
        has been lowered. Where the peak is not known, rates are held against each other.
    fresh
        Whether the weights are as they started, so that their spreads can be judged; None: if the optimizer has not
        made a step, of which gradient descent without momentum keeps no trace. A spread is right within its sampling
        error at a false-alarm rate of 1e-6 a parameter.

    Raises
    ------
    UsageError
        No groups, an optimizer of the other kind or of none that is known, groups that train another model, or what
        `torch_groups` refuses.
    """
    reading = Reading(roles, None if shape is None else Shape.of(shape), folded, example)
    read = read_model(model, reading)
    forward = find_forward(p, unwrap(model), read, reading)
    wants = list_wants(p, read.anatomy, tuned, forward)
    groups, schedules = find_optimizer(groups)
    rows, notes = read_groups(p, groups, tuned)
    rates, hidden = read_peaks(rows, schedules)
    asked, fresh = fresh, not has_stepped(groups) if fresh is None else fresh
    has, doubled = _collect(p, read, rows, rates, fresh)
    has, random = _leave_random_biases(wants, has, read, tuned)
    if hidden:
        tuned, has, said = _hold_against_each_other(wants, has, tuned)
        wants = list_wants(p, read.anatomy, tuned, forward)
        notes.append(f"rates: {said}, for {hidden}")
    factors = role_factors(p, read.anatomy.shape)
    tied = factors["unembedding"].rate / factors["embedding"].rate
    findings = judge(wants, has, tuned, tied) + doubled
    unknown = sorted({want.role for want in wants if want.initial is None} | random)
    if not fresh:
        notes.append("initial spreads: not judged, the weights have been trained")
    elif asked is None and any(each.quantity == "initial" and not each.right for each in findings):
        notes.append(
            "initial spreads: judged as those of a model before its first step; if yours is trained, say fresh=False "
            "(--trained on the command line)"
        )
    elif unknown:
        notes.append(
            f"initial spreads of {', '.join(unknown)}: not judged, no spread at the base is known "
            "(Tuned(spreads={role: standard deviation}))"
        )
    notes += name_uncarried(p, read, tuned, forward)
    if read.anatomy.post_norm:
        notes.append("post-norm: depth is outside the theory; width and key dimension are judged")
    return Audit(findings, (*notes, *OUTSIDE))


def _leave_random_biases(
    wants: Sequence[Want], has: dict[str, Has], read: TorchModel, tuned: Tuned
) -> tuple[dict[str, Has], set[str]]:
    """Leave out how random biases of a plain module start, whose spread at the base was not given, as `nn.Linear`'s.

    Returns what is left, and the roles of those that were left out.
    """
    left = {
        want.place.name: want.role
        for want in wants
        if not read.anatomy.family
        and want.place.parts[0].endswith("bias")
        and given_spread(want.place.parts[0], tuned) is None
        and want.place.name in has
        and has[want.place.name].spread
    }
    return has | {name: replace(has[name], spread=None) for name in left}, set(left.values())


def _hold_against_each_other(
    wants: Sequence[Want], has: dict[str, Has], tuned: Tuned
) -> tuple[Tuned, dict[str, Has], str]:
    """Take for tuned the rate at the base that the middle one of the parameters has; if it is zero, judge no rates."""
    found = [(has[want.place.name].rate or 0.0) / want.factors.rate for want in wants if want.place.name in has]
    common = statistics.median_low(found) if found else 0.0
    if common:
        return replace(tuned, rate=common), has, "held against each other, and not against the tuned one"
    return tuned, {name: replace(each, rate=None) for name, each in has.items()}, "not judged, they are zero"


def _collect(
    p: Parametrization, read: TorchModel, rows: Sequence[Mapping[str, Any]], rates: Sequence[float], fresh: bool
) -> tuple[dict[str, Has], tuple[Finding, ...]]:
    """Return what every parameter has, and those that are in more than one group."""
    names = {id(tensor): name for name, tensor in read.tensors.items()}
    parts = {place.name: place for place in read.anatomy.places}
    has: dict[str, Has] = {}
    doubled = []
    for number, row in enumerate(rows):
        tensors = row["params"]
        for entry in [tensors] if hasattr(tensors, "requires_grad") else tensors:
            tensor = entry[1] if isinstance(entry, tuple) else entry  # (name, tensor), as torch.optim takes them too
            name = names.get(id(tensor))
            if name is None:
                if not tensor.requires_grad:
                    continue
                raise UsageError(
                    f"group {number} holds a tensor of shape {tuple(tensor.shape)} that is no trained parameter of "
                    "this model: audit the model together with the optimizer that trains it"
                )
            if name in has:
                meaning = "it is in two groups: every step is made twice"
                role = "+".join(parts[name].parts)
                doubled.append(Finding(name, role, "rate", 1.0, 2.0, 2.0, False, meaning))
                continue
            place = parts[name]
            start = measure_start(tensor, place.start, read.padding.get(name), place.offset) if fresh else {}
            has[name] = Has(
                rate=rates[number],
                epsilon=float(row["eps"]) if p.optimizer == "adam" else None,
                weight_decay=float(row["weight_decay"]),
                **start,
            )
    return has, tuple(doubled)

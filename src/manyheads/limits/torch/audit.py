"""Audits of a PyTorch model and its optimizer, or its groups: what every parameter has, read off them and judged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.limits.checks.audit import Audit, Finding, Has, judge
from manyheads.limits.parametrization.table import OUTSIDE
from manyheads.limits.parametrization.targets import Tuned, Want, role_factors
from manyheads.limits.torch.frozen import name_uncarried
from manyheads.limits.torch.groups import Reading, TorchModel, find_logit, read_model, torch_wants
from manyheads.limits.torch.init import measure_start

if TYPE_CHECKING:
    from manyheads.limits.parametrization.parametrization import Parametrization


DIVIDING = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")
"""Optimizers of torch.optim that divide every entry of the gradient by its size, and so scale as Adam does."""


def audit_torch(
    p: Parametrization, model: Any, groups: Any, tuned: Tuned, reading: Reading | None = None, fresh: bool | None = None
) -> Audit:
    """Compare a model and its optimizer with what the parametrization wants.

    Parameters
    ----------
    model
        The model.
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
        No groups, an optimizer of the other kind or of none that is known, or groups that train another model.
    """
    reading = reading or Reading()
    read = read_model(model, reading)
    wants = torch_wants(p, read, tuned, reading.folded)
    groups, schedules = _under_schedule(groups)
    rows, notes = _rows(p, groups, tuned)
    rates, hidden = _peaks(rows, schedules)
    asked, fresh = fresh, not _has_stepped(groups) if fresh is None else fresh
    has, doubled = _collect(p, read, rows, rates, fresh)
    if hidden:
        tuned, has, said = _hold_against_each_other(wants, has, tuned)
        wants = torch_wants(p, read, tuned, reading.folded)
        notes.append(f"rates: {said}, for {hidden}")
    factors = role_factors(p, read.anatomy.shape)
    tied = factors["unembedding"].rate / factors["embedding"].rate
    findings = judge(wants, has, tuned, tied) + doubled
    unknown = sorted({want.role for want in wants if want.initial is None})
    if not fresh:
        notes.append("initial spreads: not judged, the weights have been trained")
    elif asked is None and any(each.quantity == "initial" and not each.right for each in findings):
        notes.append(
            "initial spreads: judged as those of a model before its first step; if yours is trained, say fresh=False "
            "(--trained on the command line)"
        )
    elif unknown:
        notes.append(f"initial spreads of {', '.join(unknown)}: not judged, no spread at the base is known")
    if reading.folded:
        notes += name_uncarried(p, read, tuned, find_logit(p, read))
    if read.anatomy.post_norm:
        notes.append("post-norm: depth is outside the theory; width and key dimension are judged")
    return Audit(findings, (*notes, *OUTSIDE))


def _rows(p: Parametrization, groups: Any, tuned: Tuned) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the groups of an optimizer or of a list, completed, and what has to be said about them."""
    rows = getattr(groups, "param_groups", groups)
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(
            f"{type(groups).__name__} has no parameter groups: give a torch.optim optimizer, or the list of groups "
            "(dictionaries with params, lr, eps, weight_decay) it was made from"
        )
    if not rows or not all("params" in row for row in rows):
        raise UsageError("no group with params: make the groups by Parametrization.torch_groups(model, tuned)")
    kind = p.optimizer if rows is groups else _kind(groups)
    if kind != p.optimizer:
        raise UsageError(
            f"{type(groups).__name__} is audited against optimizer={p.optimizer!r}: make the Parametrization with "
            f"optimizer={kind!r} (--optimizer {kind} on the command line)"
        )
    for key in ("lr", "weight_decay", *(["eps"] if p.optimizer == "adam" else [])):
        if short := [number for number, row in enumerate(rows) if key not in row]:
            raise UsageError(f"group {short[0]} says no {key}: audit the optimizer itself, which fills in its defaults")
        if odd := [row[key] for row in rows if not _is_number(row[key])]:
            raise UsageError(f"a group has {key}={odd[0]!r}: expected one number, as Adam's and SGD's groups have")
    notes = []
    decoupled = rows is groups or type(groups).__name__ == "AdamW"
    coupled = not decoupled and not all(row.get("decoupled_weight_decay", False) for row in rows)
    if coupled and kind == "adam" and tuned.weight_decay:
        notes.append("weight decay inside Adam's gradient is outside the theory: use AdamW, where it is decoupled")
    return list(rows), notes


def _under_schedule(groups: Any) -> tuple[Any, list[Any]]:
    """Return the optimizer under a schedule and the schedules that make it up, or what was given and none."""
    torch = require("torch")
    optimizer = getattr(groups, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(groups, "get_last_lr"):
        return groups, []
    schedules, parts = [], [groups]
    while parts:
        part = parts.pop()
        schedules.append(part)
        parts += getattr(part, "_schedulers", [])
    return optimizer, schedules


def _peaks(rows: Sequence[Mapping[str, Any]], schedules: Sequence[Any]) -> tuple[list[float], str]:
    """Return the rate of every group that was tuned, and why it is not known what it was, empty where it is."""
    # The peak of a one-cycle schedule, what other schedules start from, or the rate; a tensor, perhaps.
    keys = [next(key for key in ("max_lr", "initial_lr", "lr") if _is_number(row.get(key))) for row in rows]
    rates = [float(row[key]) for row, key in zip(rows, keys, strict=True)]
    for schedule in schedules:
        if len(peaks := getattr(schedule, "max_lrs", ())) == len(rows):
            return [float(peak) for peak in peaks], ""
        if type(schedule).__name__ == "ReduceLROnPlateau" and schedule.last_epoch > 0 and "lr" in keys:
            return rates, "ReduceLROnPlateau does not keep the rates that it has lowered"
    # CyclicLR cycles the momentum as a one-cycle schedule does, and writes no peak beside it.
    if any("base_momentum" in row and key != "max_lr" for row, key in zip(rows, keys, strict=True)):
        return rates, "CyclicLR keeps its peak to itself: give the schedule in place of the optimizer"
    return rates, ""


def _hold_against_each_other(
    wants: Sequence[Want], has: dict[str, Has], tuned: Tuned
) -> tuple[Tuned, dict[str, Has], str]:
    """Take for tuned the rate at the base that the middle one of the parameters has; if it is zero, judge no rates."""
    found = [(has[want.place.name].rate or 0.0) / want.factors.rate for want in wants if want.place.name in has]
    common = statistics.median_low(found) if found else 0.0
    if common:
        return replace(tuned, rate=common), has, "held against each other, and not against the tuned one"
    return tuned, {name: replace(each, rate=None) for name, each in has.items()}, "not judged, they are zero"


def _kind(optimizer: Any) -> str:
    """Return after which law an optimizer scales."""
    torch = require("torch")
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if isinstance(optimizer, tuple(getattr(torch.optim, name) for name in DIVIDING)):
        return "adam"
    raise UsageError(
        f"how the steps of {type(optimizer).__name__} scale is not described here: known are SGD and those that divide "
        f"a gradient by its size, {', '.join(DIVIDING)}. If yours does one of the two, give its groups, "
        "optimizer.param_groups, in its place"
    )


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and float(value) == value
    except (TypeError, ValueError, RuntimeError):
        return False


def _has_stepped(groups: Any) -> bool:
    """Whether an optimizer says that it has made a step; some prepare their state before."""
    state = getattr(groups, "state", None) or {}
    return any(not isinstance(own, Mapping) or float(own.get("step", 1)) > 0 for own in state.values())


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
            start = measure_start(tensor, parts[name].start, read.padding.get(name)) if fresh else {}
            has[name] = Has(
                rate=rates[number],
                epsilon=float(row["eps"]) if p.optimizer == "adam" else None,
                weight_decay=float(row["weight_decay"]),
                **start,
            )
    return has, tuple(doubled)

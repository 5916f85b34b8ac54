"""Audits of a PyTorch model and its optimizer, or its groups: what every parameter has, read off them and judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.limits.audits import Audit, Finding, Has, judge
from manyheads.limits.tables import OUTSIDE
from manyheads.limits.torch_groups import Reading, TorchModel, read_model, torch_wants
from manyheads.limits.wants import Tuned, role_factors

if TYPE_CHECKING:
    from manyheads.limits.parametrization import Parametrization


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
        Its torch.optim optimizer, or the list of groups; under a schedule the groups' `initial_lr` counts, under one
        cycle their `max_lr`.
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
    rows, notes = _rows(p, groups, tuned)
    asked, fresh = fresh, not _has_stepped(groups) if fresh is None else fresh
    has, doubled = _collect(p, read, rows, fresh)
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
            f"optimizer={kind!r}"
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
    p: Parametrization, read: TorchModel, rows: Sequence[Mapping[str, Any]], fresh: bool
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
            start = _measure(tensor, parts[name].start, read.padding.get(name)) if fresh else {}
            has[name] = Has(
                # The peak of a one-cycle schedule, what other schedules start from, or the rate; a tensor, perhaps.
                rate=float(row.get("max_lr", row.get("initial_lr", row["lr"]))),
                epsilon=float(row["eps"]) if p.optimizer == "adam" else None,
                weight_decay=float(row["weight_decay"]),
                **start,
            )
    return has, tuple(doubled)


def _measure(tensor: Any, start: str, padding: int | None) -> dict[str, Any]:
    """Return the root mean square of a parameter and its count; of gains, the entry farthest from their mean."""
    torch = require("torch")
    if tensor.is_meta:
        return {}
    values, count = tensor.detach(), tensor.numel()
    if start == "one":
        flat = values.double().flatten()
        spread = float(flat[(flat - flat.mean()).abs().argmax()])
    else:
        if padding is not None and not bool(values[padding].any()):  # a row that is zero by design
            count -= values[padding].numel()
        # Summed in double precision without a copy of the table in it.
        spread = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(max(count, 1))
    return {"spread": spread, "count": count, "rounding": float(torch.finfo(values.dtype).eps)}

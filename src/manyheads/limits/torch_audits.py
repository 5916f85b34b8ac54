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


def audit_torch(
    p: Parametrization, model: Any, groups: Any, tuned: Tuned, reading: Reading | None = None, fresh: bool | None = None
) -> Audit:
    """Compare a model and its optimizer with what the parametrization wants.

    Parameters
    ----------
    model
        The model.
    groups
        Its torch.optim optimizer, or the list of groups; under a schedule the groups' `initial_lr` counts.
    fresh
        Whether the weights are as they started, so that their spreads can be judged; None: if the optimizer has not
        made a step. A spread is right within its sampling error at a false-alarm rate of 1e-6 a parameter.

    Raises
    ------
    UsageError
        No groups, an optimizer of the other kind, or groups that train another model.
    """
    reading = reading or Reading()
    read = read_model(model, reading)
    wants = torch_wants(p, read, tuned, reading.folded)
    rows, notes = _rows(p, groups, tuned)
    if fresh is None:
        fresh = not getattr(groups, "state", None)
    has, doubled = _collect(p, read, rows, fresh)
    factors = role_factors(p, read.anatomy.shape)
    tied = factors["unembedding"].rate / factors["embedding"].rate
    findings = judge(wants, has, tuned, tied) + doubled
    unknown = sorted({want.role for want in wants if want.initial is None})
    if not fresh:
        notes.append("initial spreads: not judged, the weights have been trained")
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
    for key in ("lr", "weight_decay", *(["eps"] if p.optimizer == "adam" and rows is groups else [])):
        if short := [number for number, row in enumerate(rows) if key not in row]:
            raise UsageError(f"group {short[0]} says no {key}: audit the optimizer itself, which fills in its defaults")
    adam = any("eps" in row for row in rows)
    if rows is not groups and adam != (p.optimizer == "adam"):
        raise UsageError(
            f"{type(groups).__name__} is audited against optimizer={p.optimizer!r}: make the Parametrization with "
            f"optimizer={'adam' if adam else 'sgd'!r}"
        )
    notes = []
    coupled = rows is not groups and adam and not any(row.get("decoupled_weight_decay", True) for row in rows)
    if coupled and type(groups).__name__ != "AdamW" and tuned.weight_decay:
        notes.append("weight decay inside Adam's gradient is outside the theory: use AdamW, where it is decoupled")
    return list(rows), notes


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
        for tensor in [tensors] if hasattr(tensors, "requires_grad") else tensors:
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
                rate=float(row.get("initial_lr", row["lr"])),  # a tensor, perhaps
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

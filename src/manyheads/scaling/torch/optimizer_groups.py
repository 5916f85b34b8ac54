"""Parameter groups of a PyTorch optimizer or a list: their rule, their learning rates, the peak under a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.torch.lazy_torch import torch
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization

DIVIDING = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")
"""Optimizers of torch.optim that divide every entry of the gradient by its size, and so scale as Adam does."""
LIKE_ADAM = ("Lion", "AdamWScheduleFree", "Adam_mini", "AdamMini")
"""Class names of other packages whose optimizers follow Adam's table with decoupled decay; Lion has no epsilon."""
SAYS_NOTHING = "audit the optimizer itself, which fills in its defaults"
OTHER_RULES: Mapping[str, tuple[str, ...]] = {
    "Muon": ("ns_steps", "ns_coefficients", "adjust_lr_fn"),
    "Adadelta or SAM": ("rho",),
    "Adafactor": ("relative_step", "scale_parameter"),
    "Rprop": ("etas", "step_sizes"),
    "LBFGS": ("max_iter",),
    "Prodigy or D-Adaptation": ("d_coef",),
    "SOAP or Shampoo": ("precondition_frequency",),
    "GaLore": ("update_proj_gap",),
    "LARS": ("trust_coefficient",),
}
"""Optimizers whose steps scale otherwise than Adam's and SGD's → keys that mark their groups."""


def read_groups(
    p: Parametrization, groups: Any, hyperparameters: BaseHyperparameters
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the groups of an optimizer or of a list, completed, and what has to be said about them."""
    rows = getattr(groups, "param_groups", groups)
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(f"{type(groups).__name__} has no parameter groups: give a torch.optim optimizer, or groups")
    if not rows or not all("params" in row for row in rows):
        raise UsageError("no group with params: make the groups by torch_groups(parametrization, model, ...)")
    known = [] if rows is groups else [(type(groups).__name__, _kind(groups))]
    _refuse_other_rules(rows)
    kinds = ["adam" if "betas" in row else "sgd" if "dampening" in row else "" for row in rows]
    known += [(f"group {number}", kind) for number, kind in enumerate(kinds) if kind]
    if other := [(who, kind) for who, kind in known if kind != p.optimizer]:
        who, kind = other[0]
        raise UsageError(
            f"{who} is audited against optimizer={p.optimizer!r}: make the Parametrization with "
            f"optimizer={kind!r} (--optimizer {kind} on the command line)"
        )
    without = p.optimizer != "adam" or type(groups).__name__ == "Lion"
    for key in ("lr", "weight_decay", *([] if without else ["eps"])):
        if short := [number for number, row in enumerate(rows) if key not in row]:
            raise UsageError(f"group {short[0]} says no {key}: {SAYS_NOTHING}")
        if odd := [row[key] for row in rows if not _is_number(row[key])]:
            raise UsageError(f"a group has {key}={odd[0]!r}: expected one number, as Adam's and SGD's groups have")
    notes = []
    usual = rows is groups or type(groups).__name__ in ("AdamW", *LIKE_ADAM)
    coupled = not all(row.get("decoupled_weight_decay", usual) for row in rows)
    if coupled and p.optimizer == "adam" and hyperparameters.weight_decay:
        notes.append("weight decay inside Adam's gradient is outside the theory: use AdamW, where it is decoupled")
    return list(rows), notes


def _refuse_other_rules(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups whose keys say that they are stepped by a rule that is not described here."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if rule := _other_rule(row):
            found.setdefault(rule, []).append(number)
    for rule, numbers in found.items():
        others = [number for number in range(len(rows)) if number not in numbers]
        beside = f"; of {len(rows)} groups, {_listed(others)} have no such mark" if others else ""
        raise UsageError(
            f"{_listed(numbers)} {'is' if len(numbers) == 1 else 'are'} marked as those of {rule}, whose steps scale "
            f"otherwise than Adam's and SGD's{beside}. "
            + (
                "Audit Muon beside AdamW with Parametrization(optimizer='muon') (--optimizer muon)"
                if rule.startswith(("Muon", "use_muon"))
                else "They are not described here; train the matrices with AdamW to audit this model"
            )
        )


def _other_rule(row: Mapping[str, Any]) -> str:
    """Return the rule that a group's keys name, or nothing."""
    if row.get("use_muon"):
        return "use_muon=True"
    algorithm = row.get("algorithm")
    if isinstance(algorithm, str) and algorithm.lower() not in ("adam", "adamw", "sgd"):
        return f"algorithm={algorithm!r}"
    return next((f"{rule} ({key})" for rule, keys in OTHER_RULES.items() for key in keys if key in row), "")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"group{'' if len(numbers) == 1 else 's'} {shown}"


def _kind(optimizer: Any) -> str:
    """Return after which law an optimizer scales."""
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if divides(optimizer):
        return "adam"
    raise UsageError(
        f"how the steps of {type(optimizer).__name__} scale is not described here: known are SGD and those that divide "
        f"a gradient by its size, {', '.join((*DIVIDING, *LIKE_ADAM))}. If yours does one of the two, give its groups, "
        "optimizer.param_groups, in its place; Muon beside AdamW is optimizer='muon', with a list of both"
    )


def divides(optimizer: Any) -> bool:
    """Tell whether an optimizer divides the gradient by its size, as Adam does."""
    known = tuple(getattr(torch.optim, name) for name in DIVIDING)
    return isinstance(optimizer, known) or type(optimizer).__name__ in LIKE_ADAM


def find_optimizer(groups: Any) -> tuple[Any, list[Any]]:
    """Return the optimizer under a schedule and the schedules that make it up, or what was given and none."""
    optimizer = getattr(groups, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(groups, "get_last_lr"):
        return groups, []
    schedules, parts = [], [groups]
    while parts:
        part = parts.pop()
        schedules.append(part)
        parts += getattr(part, "_schedulers", [])
    return optimizer, schedules


def read_peaks(rows: Sequence[Mapping[str, Any]], schedules: Sequence[Any]) -> tuple[list[float], str]:
    """Return the rate of every group that was tuned, and why it is not known what it was, empty where it is."""
    # The peak of a one-cycle schedule, what other schedules start from, or the rate; a tensor, perhaps.
    keys = [next(key for key in ("max_lr", "initial_lr", "lr") if _is_number(row.get(key))) for row in rows]
    learning_rates = [float(row[key]) for row, key in zip(rows, keys, strict=True)]
    for schedule in schedules:
        if len(peaks := getattr(schedule, "max_lrs", ())) == len(rows):
            return [float(peak) for peak in peaks], ""
        if type(schedule).__name__ == "ReduceLROnPlateau" and schedule.last_epoch > 0 and "lr" in keys:
            return learning_rates, "ReduceLROnPlateau does not keep the rates that it has lowered"
    # CyclicLR cycles the momentum as a one-cycle schedule does, and writes no peak beside it.
    if any("base_momentum" in row and key != "max_lr" for row, key in zip(rows, keys, strict=True)):
        return learning_rates, "CyclicLR keeps its peak to itself: give the schedule in place of the optimizer"
    return learning_rates, ""


def has_stepped(groups: Any) -> bool:
    """Whether an optimizer says that it has made a step; some prepare their state before."""
    state = getattr(groups, "state", None) or {}
    return any(not isinstance(own, Mapping) or float(own.get("step", 1)) > 0 for own in state.values())


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and float(value) == value
    except (TypeError, ValueError, RuntimeError):
        return False

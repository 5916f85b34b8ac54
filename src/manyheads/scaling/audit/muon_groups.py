"""Optimizer groups of Muon beside AdamW: which rule steps a group, what it orthogonalizes, where it differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from manyheads.errors import UsageError
from manyheads.models.parts import Architecture
from manyheads.models.torch.lazy_torch import torch
from manyheads.scaling.audit.findings import Finding
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.muon import FACTORS, FUSED, PER_HEAD
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import Factors, ParameterTarget
from manyheads.scaling.torch.optimizer_groups import SAYS_NOTHING, divides, find_optimizer, has_stepped, read_peaks
from manyheads.transformer.shape import Shape

ADAM_NAMES = ("adam", "adamw")
THIRDS = (
    "thirds of queries, keys and values: not judged whether all queries come first, then all keys, then all values, "
    "which names do not tell"
)
SPLIT_KEYS = ("whole", "thirds", "heads", "head-columns")
"""What a group of a Muon that splits matrices may say under `split`: how it cuts them before it orthogonalizes."""


class GroupRow(NamedTuple):
    """One group of an optimizer."""

    row: Mapping[str, Any]
    rule: str  # "muon" or "adam"
    learning_rate: float  # that was tuned: the peak under a schedule
    splits: bool  # whether its optimizer may cut matrices; torch.optim.Muon does not


class MixedGroups(NamedTuple):
    """All groups of one or several optimizers."""

    rows: tuple[GroupRow, ...]
    notes: tuple[str, ...]
    stepped: bool
    hidden: str  # why the peak of a schedule is not known, empty where it is


def read_mixed(given: Any) -> MixedGroups:
    """Read a list of optimizers, or of schedules over them, or of groups that name their rule."""
    parts = list(given) if isinstance(given, list | tuple) else [given]
    if parts and all(isinstance(part, Mapping) for part in parts):
        parts = [parts]
    rows: list[GroupRow] = []
    notes, stepped, hidden, scheduled = [], False, "", []
    for part in parts:
        optimizer, schedules = find_optimizer(part)
        groups = getattr(optimizer, "param_groups", optimizer)
        if not isinstance(groups, Sequence) or not all(isinstance(row, Mapping) and "params" in row for row in groups):
            raise UsageError(f"{type(part).__name__} has no parameter groups: give optimizers, schedules, or groups")
        peaks, unknown = read_peaks(groups, schedules)
        splits = not isinstance(optimizer, torch.optim.Muon)
        for number, (row, peak) in enumerate(zip(groups, peaks, strict=True)):
            if short := [key for key in ("lr", "weight_decay") if key not in row]:
                raise UsageError(f"group {number} says no {short[0]}: {SAYS_NOTHING}")
            rows.append(GroupRow(row, _rule_of(optimizer, row, number), peak, splits))
        scheduled.append(bool(schedules))
        stepped |= has_stepped(optimizer)
        hidden = hidden or unknown
    if any(scheduled) and not all(scheduled):
        notes.append("schedules: one optimizer has none; the ratio of the two learning rates changes in training")
    return MixedGroups(tuple(rows), tuple(notes), stepped, hidden)


def _rule_of(optimizer: Any, row: Mapping[str, Any], number: int) -> str:
    """Return the rule of a group, from its optimizer or the words it names it by."""
    if isinstance(optimizer, torch.optim.Muon):
        return "muon"
    if divides(optimizer):
        return "adam"
    if isinstance(marked := row.get("use_muon"), bool):
        return "muon" if marked else "adam"
    name = str(row.get("algorithm", "")).lower()
    if name in (*ADAM_NAMES, "muon"):
        return "muon" if name == "muon" else "adam"
    if not name and ("ns_steps" in row or "betas" in row):
        return "muon" if "ns_steps" in row else "adam"
    raise UsageError(
        f"group {number} does not say whether Muon or AdamW steps it"
        f"{f' (algorithm={name!r})' if name else ''}: give it use_muon=True or False, or algorithm='muon' or 'adamw'"
    )


def patch_target(
    p: Parametrization, target: ParameterTarget, inputs: int, shape: Shape, hyperparameters: BaseHyperparameters
) -> ParameterTarget:
    """Return what a matrix of pixels needs under Muon, which may have stepped it at the base; the table has AdamW's.

    Its inputs are dense: D rows and as many columns as at the base move by one at the rate (D / columns)^1/2.
    """
    width, before = shape.width, p.base.width
    factor = FACTORS[p.muon.factor].at
    grown = (width / before) ** 0.5 if p.scheme == "completep" else 1.0
    rate_factor = factor(width, inputs) / factor(before, inputs) if p.scheme == "completep" else 1.0
    each = target.factors
    factors = Factors(each.initial, each.learning_rate * grown / rate_factor, each.epsilon * grown, "muon")
    std = None if target.initial is None else target.initial / each.initial
    return ParameterTarget.of(target.parameter, target.role, factors, std, hyperparameters)


def judge_muon(
    p: Parametrization, target: ParameterTarget, group: GroupRow, tuned: Any, architecture: Architecture
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Compare what a group of Muon does to a matrix with what the parametrization says; return findings and notes."""
    found, name, row = [], target.parameter.name, group.row
    wrong, note = _judge_block(p, target, group, architecture)
    found.append(Finding(name, target.role, "block", 1.0, float(not wrong), float(not wrong), not wrong, wrong))
    named = row.get("adjust_lr_fn") or "original"
    if "adjust_lr_fn" in row and named != p.muon.factor:
        given = FACTORS[named].formula if named in FACTORS else repr(named)
        words = (
            f"adjust_lr_fn is {given}, and at the base it was {FACTORS[p.muon.factor].formula}: another shape factor"
        )
        found.append(Finding(name, target.role, "shape_factor", 1.0, 0.0, 0.0, False, words))
    for key in ("momentum", "nesterov", "ns_steps"):
        expected = getattr(tuned, key)
        if key in row and row[key] != expected:
            words = f"{key} is not the base's {expected!r}: it is taken over unchanged at every shape"
            numbers = float(expected), float(row[key])
            factor = numbers[1] / numbers[0] if numbers[0] else math.inf
            found.append(Finding(name, target.role, key, *numbers, factor, False, words))
    return tuple(found), note


def _judge_block(
    p: Parametrization, target: ParameterTarget, group: GroupRow, architecture: Architecture
) -> tuple[str, tuple[str, ...]]:
    """Return what is wrong with how a group cuts a matrix, and a note."""
    shape = architecture.shape
    roles, row = set(target.role.split("+")), group.row
    attention = roles & {"query", "key", "value", "output"}
    split = row.get("split", "heads" if row.get("num_heads") else "whole") if group.splits else "whole"
    if split not in SPLIT_KEYS:
        raise UsageError(f"split={split!r} of a group of Muon: expected one of {', '.join(SPLIT_KEYS)}")
    if not attention:
        return "" if split == "whole" else f"split={split!r}, and this matrix has no heads", ()
    if len(roles) > 1:
        if split == "thirds" and architecture.interleaved:
            return "its rows are head after head, each with its query, key and value: a third mixes all three", ()
        if split == "whole" and target.conflict:
            return f"queries, keys and values in one polar factor, and {target.conflict}: split the matrix", ()
        unknown = not architecture.family and split == "thirds"
        return "", (FUSED,) if split == "whole" else (THIRDS,) if unknown else ()
    if roles == {"output"}:
        wanted = "head-columns" if p.muon.split == "heads" else "whole"
        if split in ("heads", "thirds"):
            return "rows of W_O are the stream's, its heads are columns: this split mixes all heads in a block", ()
    else:
        wanted = "heads" if p.muon.per_head else "whole"
        heads = row.get("num_heads", shape.heads)
        own = shape.group_heads if roles <= {"key", "value"} else shape.heads
        if split == "heads" and heads not in (own, shape.heads):
            return f"num_heads={heads}, and this matrix has {own} heads", ()
    if split != wanted:
        words = {"heads": "head by head", "head-columns": "head by head, by columns"}
        found, base = (words.get(each, each) for each in (split, wanted))
        return f"orthogonalized {found}, and at the base {base} (Muon(split={p.muon.split!r}))", ()
    return "", (PER_HEAD,) if split != "whole" else ()

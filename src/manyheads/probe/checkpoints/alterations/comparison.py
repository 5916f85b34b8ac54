"""Comparison of checkpoints with reference checkpoints, tensor by tensor."""

from collections.abc import Mapping, Sequence

import numpy as np

from manyheads._overview import distinct_texts
from manyheads.errors import UsageError
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.refusals import CheckpointRefused, shorten
from manyheads.probe.checkpoints.alterations.changes import measure_changes
from manyheads.probe.checkpoints.alterations.detection import HUGE
from manyheads.probe.checkpoints.alterations.transformations import explain_moments, explain_orders
from manyheads.probe.checkpoints.contents import Contents, Finding, Notes, read_contents
from manyheads.probe.checkpoints.folder import check_folder
from manyheads.probe.checkpoints.series import Source, as_checkpoint, list_sources, path_of, read_order, step_of


def compare_with(
    against: Source | Sequence[Source],
    contents: Sequence[Contents],
    opened: Mapping[str, Checkpoint],
    unchecked: Notes,
    follow_links: bool,
) -> list[Finding]:
    """Find differences from reference checkpoints."""
    if not (sources := list_sources(against)):
        raise UsageError("against is an empty list: give the checkpoints to compare with, or None")
    order = read_order(sources)
    numbers = order.steps or map(step_of, order.sources)
    steps = {id(each): step for each, step in zip(order.sources, numbers, strict=True)}
    findings: list[Finding] = []
    for content in contents:
        alone = len(sources) == len(contents) == 1
        same = [each for each in sources if alone or (content.step is not None and steps[id(each)] == content.step)]
        if not same:
            unchecked.setdefault(("against a source", "none of its step was given"), []).append(content.name)
            continue
        try:
            other = as_checkpoint(same[0], follow_links)
            theirs = read_contents(str(path_of(same[0])), other, [], {})
            check_folder(theirs, other.path, {})
        except CheckpointRefused as refusal:
            findings.append(Finding("file", str(path_of(same[0])), type(refusal).__name__, str(refusal)))
            continue
        if differing := _differences(content, theirs, opened[content.name], other):
            what = f"{len(differing)} differences from {theirs.name}"
            findings.append(Finding("against", content.name, what, shorten(differing, 20, 300)))
    return findings


def _differences(ours: Contents, theirs: Contents, one: Checkpoint, other: Checkpoint) -> list[str]:
    """Describe differences in names, types, shapes, values, configuration and tokenizer."""
    found = [f"lacks {name}" for name in sorted(theirs.entries.keys() - ours.entries.keys())]
    found += [f"also holds {name}" for name in sorted(ours.entries.keys() - theirs.entries.keys())]
    for name in sorted(ours.entries.keys() & theirs.entries.keys()):
        mine, its = ours.entries[name], theirs.entries[name]
        if mine.shape != its.shape:
            found.append(f"{name} has shape {mine.shape}, in the source {its.shape}")
        elif ours.hashes[name] != theirs.hashes[name] or mine.dtype != its.dtype:
            found.append(f"{name} {_difference(name, ours, theirs, one, other)}")
    if (a := ours.config) is not None and (b := theirs.config) is not None:
        keys = (key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key))
        found += [f"configuration: {key} is {a.get(key)}, in the source {b.get(key)}" for key in keys]
    if ours.tokenizer and theirs.tokenizer and ours.tokenizer != theirs.tokenizer:
        found.append("the tokenizer differs")
    return found


def _difference(name: str, ours: Contents, theirs: Contents, one: Checkpoint, other: Checkpoint) -> str:
    """Describe the difference between the values of a tensor."""
    if any(name not in each.extremes or each.extremes[name].largest > HUGE for each in (ours, theirs)):
        return "has different values"
    (change,), _ = measure_changes([other, one], name, [each.precision(name) for each in (theirs, ours)])
    matrix = sum(extent > 1 for extent in ours.entries[name].shape) > 1
    told = list(explain_moments(change, matrix)) + (list(explain_orders(other, one, name)) if matrix else [])
    if told:
        return min(told, key=lambda each: each.residual).what
    if not change.moved:
        return f"is {ours.entries[name].dtype}, in the source {theirs.entries[name].dtype}"
    share = np.sqrt(change.moved / max(change.before, change.after))
    jump = max(change.jumps, key=lambda each: each.times, default=None)
    if jump and jump.times > 1e3:
        after, before = distinct_texts(jump.after, jump.before, digits=4)
        return f"is {after} at {list(jump.place)}, in the source {before}"
    return "is rounded" if change.is_rounding else f"differs by {share:.2g} of its norm"

"""Detection of altered tensors and entries in a series of checkpoints.

A tensor of an inner checkpoint was altered if its distances to both neighbours are far larger than the distance between
the neighbours. At either end the expected change is extrapolated from its own changes elsewhere, from those of the same
tensor in other layers and from those of all tensors over the same interval. A transformation of the tensor by itself
that explains most of a change is an alteration whatever its size; a factor that training may have caused is one if the
norm grows or shrinks by far more than over other intervals and than the norms of other matrices.
"""

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyheads._overview import distinct_texts
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.refusals import shorten
from manyheads.probe.checkpoints.alterations.changes import Change, Jump, measure_changes
from manyheads.probe.checkpoints.alterations.transformations import (
    LARGE,
    Explanation,
    Strips,
    explain_moments,
    explain_orders,
    name_lines,
)
from manyheads.probe.checkpoints.contents import Contents, Finding, Notes, matrix_shape

# Smaller distance to a neighbour over the distance between the neighbours: matrices, vectors; 1 in a stationary phase.
AWAY = (2.0, 3.0)
# Change at an end over the largest extrapolated one, and the same if only other tensors give one.
BEYOND, BEYOND_OTHERS = 8.0, 20.0
# Change of an entry over the RMS change of its row and column: reverted, at an end; for matrices and for vectors.
JUMPS = ((5.0, 10.0), (8.0, 30.0))
# Ratio of the norms of a scaled matrix; its logarithm over the median of other intervals and the largest of others.
GROWN, GROWTHS = 1.5, 2.5
# Rows of zeros: their change over the largest of other rows, at the first checkpoint; over their RMS, at the last.
STARTED, DECAYED = 1.5, 1e-2
HUGE = 1e150  # largest entry whose square fits in double precision
PEAK = 32.0  # largest entry over the next largest one of its tensor, in a single checkpoint
FLOOR = 1e-8  # the smallest entry that is not zero over the next one: of n random entries the ratio is uniform


@dataclass
class _Trajectory:
    """Changes of one tensor over the checkpoints that hold it."""

    places: list[int]
    changes: list[Change]
    past: list[float]
    matrix: bool
    explanations: dict[int, Explanation] = field(default_factory=dict)

    def sizes(self) -> dict[tuple[int, int], float]:
        """Return the RMS change over each interval in which it exceeds rounding."""
        intervals = zip(itertools.pairwise(self.places), self.changes, strict=True)
        return {interval: change.rms for interval, change in intervals if not change.is_rounding}

    def growths(self) -> dict[tuple[int, int], float]:
        """Return the growth of a matrix over each interval."""
        intervals = zip(itertools.pairwise(self.places), self.changes, strict=True)
        return {interval: change.growth for interval, change in intervals if self.matrix}

    def outgrows(self, interval: int, usual: "_ReferenceChanges") -> bool:
        """Whether the norm is scaled by far more than over other intervals, and than others over this one."""
        if self.explanations[interval].factor == 1 or len(self.changes) == 1:
            return False
        growths, key = self.growths(), (self.places[interval], self.places[interval + 1])
        growth = growths.pop(key)
        others = usual.growths[key] - {growth}
        return growth > max(np.log(GROWN), GROWTHS * max(np.median(list(growths.values())), *others))


class _ReferenceChanges:
    """Changes over each interval: the median RMS of all tensors, those of the same tensor in other layers, growths."""

    def __init__(self, trajectories: Mapping[str, _Trajectory]):
        sizes: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.other_layers: dict[tuple[str, tuple[int, int]], list[tuple[str, float]]] = defaultdict(list)
        for name, trajectory in trajectories.items():
            for interval, size in trajectory.sizes().items():
                sizes[interval].append(size)
                self.other_layers[_kind(name), interval].append((name, size))
        self.medians = {interval: float(np.median(each)) for interval, each in sizes.items()}
        self.growths: dict[tuple[int, int], set[float]] = defaultdict(set)
        for trajectory in trajectories.values():
            for interval, growth in trajectory.growths().items():
                self.growths[interval].add(growth)


def find_alterations(
    contents: Sequence[Contents], checkpoints: Mapping[str, Checkpoint], known: set[str]
) -> tuple[list[Finding], set[str]]:
    """Find altered tensors and entries in checkpoints that are in their order; return their names too.

    `known` tensors are left out.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    altered: set[str] = set()
    names = sorted(set().union(*(each.samples for each in contents)) - known)
    trajectories = {
        name: trajectory for name in names if (trajectory := _measure_trajectory(name, contents, checkpoints))
    }
    usual = _ReferenceChanges(trajectories)
    zeros = {(place, name) for place in range(len(contents)) for name in _find_zero_tensors(place, contents)}
    for place, name in sorted(zeros):
        found[contents[place].name, "altered tensors"].append(f"{name} is zero")
    lines = {name: told for name in names if (told := _find_zero_lines(name, contents, checkpoints))}
    altered |= lines.keys()
    for name, told in lines.items():
        for place, text in told.items():
            found[contents[place].name, "altered entries"].append(f"{name}: {text}")
    for name, trajectory in trajectories.items():
        blank = lines.get(name, {})
        cleared = {at for at in range(len(trajectory.changes)) if blank.keys() & set(trajectory.places[at : at + 2])}
        taken = set(cleared)
        for places, jump, intervals in _find_jumps(trajectory):
            if intervals & cleared and 0.0 in (jump.before, jump.after):
                continue  # one of a row of zeros
            taken |= intervals
            altered.add(name)
            text = f"{name}{list(jump.place)}: {' -> '.join(distinct_texts(jump.before, jump.after, digits=4))}"
            found[_name_places(places, contents), "altered entries"].append(text)
        for places, interval in _find_altered(name, trajectory, usual, taken):
            if not any((place, name) in zeros for place in places):
                pair = _name_places(trajectory.places[interval : interval + 2], contents)
                change = trajectory.changes[interval]
                what = f"changes by {np.sqrt(change.moved / max(change.before, change.after)):.2g} of its norm"
                what = trajectory.explanations[interval].what if interval in trajectory.explanations else what
                found[_name_places(places, contents), "altered tensors"].append(f"{name} {what}, {pair}")
                altered.add(name)
    whats = {
        "altered tensors": "tensors with changes atypical of training",
        "altered entries": "entries, rows or columns with outlying values",
    }
    for content in contents:
        if alone := list(_find_outliers(content, contents)):
            found[content.name, "altered entries"] += alone
    findings = [
        Finding(kind, where, f"{len(texts)} {whats[kind]}", shorten(texts, length=200))
        for (where, kind), texts in found.items()
    ]
    return findings, altered | {name for _, name in zeros}


def _name_places(places: Sequence[int], contents: Sequence[Contents]) -> str:
    return " to ".join(contents[place].name for place in places)


def _measure_trajectory(
    name: str, contents: Sequence[Contents], checkpoints: Mapping[str, Checkpoint]
) -> _Trajectory | None:
    """Measure the changes of a tensor over the checkpoints that hold it, finite and in the usual shape."""
    shapes = [each.entries[name].shape if name in each.samples else None for each in contents]
    usual = max(dict.fromkeys(shape for shape in shapes if shape is not None), key=shapes.count)
    places = [at for at, shape in enumerate(shapes) if shape == usual and name not in contents[at].nonfinite]
    if len(places) < 2 or any(contents[place].extremes[name].largest > HUGE for place in places):
        return None
    held = [checkpoints[contents[place].name] for place in places]
    changes, past = measure_changes(held, name, [contents[place].precision(name) for place in places])
    trajectory = _Trajectory(places, changes, past, _has_columns(name, usual) and min(usual) > 1)
    for interval, change in enumerate(changes):
        if change.moved > LARGE**2 * max(change.before, change.after):
            told = list(explain_moments(change, trajectory.matrix))
            if trajectory.matrix:
                told += explain_orders(held[interval], held[interval + 1], name)
            if told:
                trajectory.explanations[interval] = min(told, key=lambda each: (each.weak, each.residual))
    return trajectory


def _find_jumps(trajectory: _Trajectory) -> list[tuple[tuple[int, ...], Jump, set[int]]]:
    """Return the entries that jump, with their checkpoints and intervals."""
    back, away = JUMPS[0 if trajectory.matrix else 1]
    last = len(trajectory.changes) - 1
    by_place: dict[tuple[int, ...], dict[int, Jump]] = defaultdict(dict)
    for interval, change in enumerate(trajectory.changes):
        for jump in change.jumps if change.size >= 8 else ():
            by_place[jump.place][interval] = jump
    found: list[tuple[tuple[int, ...], Jump, set[int]]] = []
    for jumps in by_place.values():
        for interval, jump in jumps.items():
            then = jumps.get(interval + 1)
            if not then or min(jump.times, then.times) <= back:
                continue
            least = min(abs(jump.after - jump.before), abs(then.after - then.before))
            if abs(then.after - jump.before) < 0.5 * least:
                found.append(((trajectory.places[interval + 1],), jump, {interval, interval + 1}))
        taken = {each for _, _, intervals in found for each in intervals}
        for interval, jump in jumps.items():
            near = max((jumps[i].times for i in (interval - 1, interval + 1) if i in jumps), default=0.0)
            if interval not in taken and jump.times > max(away, 3 * near if np.isfinite(near) else np.inf):
                found.append((_locate(trajectory, interval, last), jump, {interval}))
    return found


def _locate(trajectory: _Trajectory, interval: int, last: int) -> tuple[int, ...]:
    """Return the checkpoint at the end of a series, if only one interval is concerned, or both around an inner one."""
    if last and interval in (0, last):
        return (trajectory.places[0 if interval == 0 else -1],)
    return (trajectory.places[interval], trajectory.places[interval + 1])


def _find_altered(
    name: str, trajectory: _Trajectory, usual: _ReferenceChanges, taken: set[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the checkpoints in which the tensor was altered, each with an interval that shows it."""
    last = len(trajectory.changes) - 1
    lengths = [np.sqrt(change.moved) for change in trajectory.changes]
    strong = {at for at, told in trajectory.explanations.items() if not told.weak or trajectory.outgrows(at, usual)}
    small = {at for at, change in enumerate(trajectory.changes) if change.size < 8 or change.is_rounding}
    for inner in range(last):
        both = {inner, inner + 1}
        if both & (taken | small):
            continue
        away = AWAY[not trajectory.matrix] if not both <= strong else 1.0
        if min(lengths[inner], lengths[inner + 1]) > away * trajectory.past[inner]:
            taken = taken | both
            yield (trajectory.places[inner + 1],), inner
    for interval in range(last + 1):
        at_end = interval in (0, last)
        if interval in taken | small:
            continue
        if interval in strong or (at_end and _exceeds_reference(name, trajectory, interval, usual)):
            yield _locate(trajectory, interval, last), interval


def _exceeds_reference(name: str, trajectory: _Trajectory, interval: int, usual: _ReferenceChanges) -> bool:
    """Tell whether the change at an end far exceeds those of this tensor elsewhere and of others."""
    key = (trajectory.places[interval], trajectory.places[interval + 1])
    expected = [usual.medians[key]]
    history = [size * usual.medians[key] / usual.medians[at] for at, size in trajectory.sizes().items() if at != key]
    alike = [size for other, size in usual.other_layers[_kind(name), key] if other != name]
    expected += [float(np.median(each)) for each in (history, alike) if each]
    beyond = BEYOND if history or (alike and len(trajectory.changes) == 1) else BEYOND_OTHERS
    return trajectory.changes[interval].rms > beyond * max(expected)


@functools.cache
def _kind(name: str) -> str:
    """Return the name of a tensor without the numbers of its layer and expert."""
    return re.sub(r"\d+", "#", name)


def _find_zero_tensors(place: int, contents: Sequence[Contents]) -> Iterator[str]:
    """Yield the tensors that became zero, or are zero unlike those of all other layers."""
    content = contents[place]
    blank = [name for name, peak in content.extremes.items() if not peak.largest and content.entries[name].size]
    layers, zero = (Counter(map(_kind, names)) for names in (content.extremes if blank else (), blank))
    for name in blank:
        before = next((each.extremes[name].largest for each in contents[:place][::-1] if name in each.extremes), 0.0)
        alone = zero[_kind(name)] == 1 < layers[_kind(name)] and _has_columns(name, content.entries[name].shape)
        if content.entries[name].size >= 8 and (before or alone):
            yield name


def _find_zero_lines(name: str, contents: Sequence[Contents], checkpoints: Mapping[str, Checkpoint]) -> dict[int, str]:
    """Return the checkpoints where rows or columns of a matrix are zero and were not before, nor are after."""
    found: dict[int, list[str]] = defaultdict(list)
    places = [place for place, content in enumerate(contents) if name in content.extremes]
    for number, place in enumerate(places):
        content = contents[place]
        shape = content.entries[name].shape
        near = [each for each in places[max(number - 1, 0) : number + 2] if each != place]
        known = near and content.zero_lines.get(name) and content.extremes[name].largest and _has_columns(name, shape)
        if not known or min(matrix_shape(shape)[1:]) < 2:
            continue
        if any(contents[each].entries[name].shape != shape for each in near):
            continue
        for side, extent in zip(("rows", "columns"), matrix_shape(shape)[1:], strict=True):
            lines = content.zero_lines[name][side]
            for each in near:
                lines = np.setdiff1d(lines, contents[each].zero_lines.get(name, {}).get(side, [])).astype(np.int64)
            if lines.size and len(near) == 1:
                ends = [checkpoints[contents[each].name] for each in (place, near[0])]
                lines = _select_cleared(ends, name, side, lines, place < near[0])
            for matrix in np.unique(lines // extent):
                these = lines[lines // extent == matrix] % extent
                inside = f" of matrix {matrix}" if len(shape) == 3 else ""
                verb = "are" if len(these) > 1 else "is"
                found[place].append(f"{side if len(these) > 1 else side[:-1]} {name_lines(these)}{inside} {verb} zero")
    return {place: ", ".join(texts) for place, texts in found.items()}


def _select_cleared(
    ends: Sequence[Checkpoint], name: str, side: str, lines: NDArray[np.int64], first: bool
) -> NDArray[np.int64]:
    """Return the lines that neither started at zero, as padding does, nor decayed to it."""
    strips = [Strips(each, name) for each in ends]
    zeroed, other = (each.columns if side == "rows" else each.rows.T for each in strips)
    if side == "columns" and len(ends[0].entry(name).shape) == 3:  # columns of one of several matrices
        return lines
    others = np.setdiff1d(np.arange(len(other)), lines)
    sizes = np.sqrt(np.mean(other[lines] ** 2, axis=1))
    rest = (other - zeroed if first else other)[others]
    usual = np.sqrt(np.mean(rest**2, axis=1))
    return lines[sizes > (STARTED * usual.max() if first else DECAYED * np.median(usual))]


def _has_columns(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is a matrix; stacked biases of experts are not."""
    return len(shape) > 1 and "bias" not in name.rpartition(".")[2]


def _find_outliers(content: Contents, contents: Sequence[Contents]) -> Iterator[str]:
    """Yield single entries far above or far below all others of their tensor, within one checkpoint."""
    for name, peak in content.extremes.items():
        if content.entries[name].size < 8:
            continue
        if peak.largest > PEAK * peak.second and (len(contents) == 1 or peak.largest > HUGE):
            index, value, bound, others = peak.place, peak.largest, "at most", peak.second
        elif 0 < peak.smallest < FLOOR * peak.next:
            index, value, bound, others = peak.low, peak.smallest, "at least", peak.next
        else:
            continue
        places = [int(each) for each in np.unravel_index(index, content.entries[name].shape)]
        yield f"{name}{places}: {f', the others {bound} '.join(distinct_texts(value, others, digits=4))}"


def note_unchecked(contents: Sequence[Contents], against: bool, unchecked: Notes) -> None:
    """Note the checks that need more checkpoints, with the reason."""
    if len(contents) < 4:
        unchecked[f"the order of {len(contents)} checkpoints of undoubted step", "it takes four"] = []
    if len(contents) == 1 and not against:
        what = "sign, order of rows and heads, transposition, shift, scale, single entries of ordinary size"
        why = "one checkpoint does not show them; give its neighbours, or its source with --against"
        unchecked[what, why] = []
    zero = [name for name, peak in (contents[0].extremes.items() if contents else ()) if not peak.largest]
    entries = {name: contents[0].entries[name] for name in zero}
    if blank := [name for name, entry in entries.items() if _has_columns(name, entry.shape) and entry.size]:
        unchecked[f"whether {shorten(blank)} started at zero", "no checkpoint before the first shows it"] = []
    if far := _count_large_changes(contents):
        what = "alterations smaller than what training changes"
        unchecked[what, f"{far} tensors change by more than half of their norm between neighbours"] = []
    if share := _share_within_training(contents):
        what = "entries that shrink, as by one bit of the exponent, in the first or last checkpoint"
        unchecked[what, f"{share:.0%} of them are below {JUMPS[0][1]:g} times the RMS change to its neighbour"] = []


def _share_within_training(contents: Sequence[Contents]) -> float:
    """Return the share of sampled entries of trained tensors at the ends whose change to zero would be no jump.

    No further checkpoint shows such a change, and one of many entries that are trained may become as small.
    """
    small, count = 0, 0
    for end, near in (contents[:2], contents[:-3:-1]) if len(contents) > 1 else ():
        for name in end.extremes.keys() & near.extremes.keys():
            shape, ours, its = end.entries[name].shape, *(np.float64(each.samples[name]) for each in (end, near))
            if ours.shape != its.shape or ours.size < 8 or not (rms := np.sqrt(np.mean((ours - its) ** 2))):
                continue
            away = JUMPS[0 if _has_columns(name, shape) and min(shape) > 1 else 1][1]
            small, count = small + int(np.sum(np.abs(ours) <= away * rms)), count + ours.size
    return small / max(count, 1)


def _count_large_changes(contents: Sequence[Contents]) -> int:
    """Count the tensors that change by more than half of their norm over some interval."""
    far = set()
    for one, other in itertools.pairwise(contents):
        for name in one.extremes.keys() & other.extremes.keys():
            a, b = one.samples[name].astype(np.float64), other.samples[name].astype(np.float64)
            if a.shape == b.shape and np.linalg.norm(b - a) > 0.5 * max(np.linalg.norm(a), np.linalg.norm(b)):
                far.add(name)
    return len(far)

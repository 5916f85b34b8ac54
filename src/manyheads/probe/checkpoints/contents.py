"""Contents of a checkpoint in one pass by blocks: sha256, entries that are not finite, a sample, equidistant values.

Weights that were rounded to at most 256 levels, such as those of int8, and stored as floats are equidistant. Whatever
shares a scale, the tensor, a row, a column or a group, so do `LENGTH` neighbours along a row or a column. They are on a
grid if their differences are integer multiples of one step, up to the rounding of the type, and span at most 255 steps.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.checkpoints.tensor_file import DTYPES, TensorEntry
from manyheads.models.parameters import parameter_roles
from manyheads.models.refusals import CheckpointRefused, FamilyUnknown, FileMissing
from manyheads.probe.checkpoints.series import step_of

BLOCK = 2**20  # number of entries in a block
SAMPLE = 256  # entries of a tensor that are kept
# Relative spacing of the numbers of a type.
PRECISION = {dtype: float(ml_dtypes.finfo(DTYPES[dtype]).eps) for dtype in DTYPES if dtype.startswith(("F", "BF"))}

# Types whose values may be held in a finer one, and types of 256 values.
NARROW, EIGHT_BITS = ("F16", "BF16"), ("F8_E4M3", "F8_E5M2")

# Neighbours that share a scale, half as many in small matrices; segments of a block that are tested along either side,
# how many of a tensor at least, and the share of them on grids. Of clean ones of 32 values in BF16 fewer than .001 are,
# of 16 up to .02, of rounded ones more than .9.
LENGTH, TRIED, LEAST, SHARE = 32, 16, 8, 0.75
# Least number of different values of a segment, and most steps that it spans.
VALUES, STEPS = 9, 255
# Moments m4 / m2^2, 9/5 of uniform numbers, below which values of BF16 may be torch's, which draws 256 in that type.
UNIFORM = 2.1
# Numbers of steps from the value of least size up to which the step is fitted, one fit after the other.
WINDOWS = (4.5, 9.5, 20.5, 45.5, 100.5, 255.5)


class GridTest:
    """Test of one matrix, fed by blocks of rows."""

    def __init__(self, spacing: float):
        self.spacing = spacing
        self.counts = {"rows": [0, 0], "columns": [0, 0]}  # segments on grids, and all; without a side that is clean
        self.moments = np.zeros(3)

    def add(self, block: NDArray[Any]) -> None:
        """Test segments of a block, (rows, columns)."""
        for side, count in list(self.counts.items()):
            segments = _draw_segments(block if side == "rows" else block.T)
            segments = segments[np.count_nonzero(np.diff(np.sort(segments)), axis=1) >= VALUES - 1]
            if len(segments):
                count[0] += int(_are_on_grids(segments, self.spacing).sum())
                count[1] += len(segments)
                self.moments += [np.mean(segments**power) * len(segments) for power in (0, 2, 4)]
            if count[1] >= LEAST and count[0] < SHARE * count[1]:
                del self.counts[side]

    @property
    def passed(self) -> bool:
        """Whether the matrix is on grids."""
        count, second, fourth = self.moments
        uniform = self.spacing > 2**-8 and fourth * count < UNIFORM * second**2
        return any(each[1] >= LEAST for each in self.counts.values()) and not uniform


def _draw_segments(lines: NDArray[Any]) -> NDArray[np.float64]:
    """Return segments of lines, (segments, values), that start at multiples of their length."""
    count, width = lines.shape
    length = LENGTH if count * (width // LENGTH) >= LEAST else LENGTH // 2
    places = width // length
    chosen = np.random.default_rng(0).choice(count * places, min(count * places, TRIED), replace=False)
    line, place = np.divmod(chosen, max(places, 1))
    return lines[line[:, None], length * place[:, None] + np.arange(length)].astype(np.float64)


def _are_on_grids(segments: NDArray[np.float64], spacing: float) -> NDArray[np.bool_]:
    """Return which segments, (segments, values), are on grids; several steps are tried for each."""
    ordered, largest = np.sort(segments, axis=1), np.abs(segments).max(axis=1)
    gaps = np.diff(ordered, axis=1)
    inner = np.abs(ordered[:, 1:]) <= largest[:, None] / 4  # the others are rounded too coarsely in BF16
    least = [np.where((gaps > 0) & where, gaps, np.inf).min(axis=1) for where in (inner, gaps > 0)]
    candidates = [each / part for each in least for part in (1, 2, 3)]
    candidates += [largest / 127, largest / 128, (ordered[:, -1] - ordered[:, 0]) / STEPS]
    steps = np.stack(candidates, 1)[:, :, None]
    steps = np.where(np.isfinite(steps), steps, largest[:, None, None])
    apart = (segments - np.take_along_axis(segments, np.abs(segments).argmin(axis=1)[:, None], 1))[:, None, :]
    for window in WINDOWS:
        numbers = np.where(np.abs(apart) <= window * steps, np.rint(apart / steps), 0.0)
        squares = np.sum(numbers**2, axis=2, keepdims=True)
        steps = np.where(squares > 0, np.sum(numbers * apart, axis=2, keepdims=True) / np.maximum(squares, 1), steps)
    numbers = np.rint(apart / steps)
    rounded = 0.75 * spacing * np.abs(segments)[:, None, :]
    rounded = rounded + np.minimum(spacing * largest[:, None, None] / 2, 0.02 * steps)
    fits = (np.abs(apart - numbers * steps) <= rounded).all(axis=2)
    return (fits & (np.ptp(numbers, axis=2) <= STEPS)).any(axis=1)


Notes: TypeAlias = dict[tuple[str, str], list[str]]
"""(Omitted check, reason) → the checkpoints concerned."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not what it should be."""

    # "file", "configuration", "tokenizer", "tensors", "dtype", "shape", "rounded", "not finite", "duplicate", "copied
    # tensors", "step", "order", "apart", "interchanged tensors", "altered tensors", "altered entries" or "against"
    kind: str
    where: str  # the checkpoint or checkpoints
    what: str  # what is wrong there
    evidence: str  # the figures or names it rests on


class Extremes(NamedTuple):
    """Absolute values of a tensor: the largest two and the place of the first, the smallest two that are not zero."""

    largest: float = 0.0
    second: float = 0.0
    place: int = 0
    smallest: float = math.inf
    next: float = math.inf
    low: int = 0

    def merge(self, sizes: NDArray[np.float64], start: int) -> "Extremes":
        """Return the extremes of these and further values, whose first one has the place `start`."""
        two = np.argpartition(sizes, -min(2, sizes.size))[-2:]
        new = [(float(sizes[at]), start + int(at)) for at in two]
        *_, second, first = sorted([(self.largest, self.place), (self.second, -1), *new])
        sizes = np.where(sizes > 0, sizes, np.inf)
        two = np.argpartition(sizes, min(2, sizes.size) - 1)[:2]
        new = [(float(sizes[at]), start + int(at)) for at in two]
        least, following, *_ = sorted([(self.smallest, self.low), (self.next, -1), *new])
        return Extremes(first[0], second[0], first[1], least[0], following[0], least[1])


@dataclass
class Contents:
    """What is kept of a checkpoint once it has been read, by names of tensors."""

    name: str  # in the series
    step: int | None
    entries: dict[str, TensorEntry]
    files: dict[str, str]  # that hold the tensors
    config: dict[str, object] | None
    tokenizer: str | None = None  # digest
    hashes: dict[str, str] = field(default_factory=dict)  # sha256 of the bytes
    # Up to `SAMPLE` entries of every tensor of floats, at the same places in every checkpoint.
    samples: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    extremes: dict[str, Extremes] = field(default_factory=dict)  # of tensors of finite floats
    narrow: dict[str, set[str]] = field(default_factory=dict)  # types of `NARROW` that hold all finite values
    # Rows or columns of zeros of all matrices of a tensor, counted through.
    zero_lines: dict[str, dict[str, NDArray[np.int64]]] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)  # number of entries that are NaN or infinite
    # Matrices of at most 256 equidistant values in each tensor, row, column or group, as of int8.
    grids: set[str] = field(default_factory=set)

    def precision(self, name: str) -> float:
        """Return the relative spacing of the floating-point numbers of a tensor."""
        return max(PRECISION[dtype] for dtype in {self.entries[name].dtype, *self.narrow.get(name, ())})


def read_contents(name: str, checkpoint: Checkpoint, findings: list[Finding], unchecked: Notes) -> Contents:
    """Read every tensor once, and check what a checkpoint says about itself."""
    content = Contents(
        name,
        step_of(checkpoint),
        dict(checkpoint.entries),
        {tensor: file.path.name for tensor, file in checkpoint.file_of.items()},
        None if checkpoint.config is None else dict(checkpoint.config),
    )
    for tensor in checkpoint.names:
        _digest(content, tensor, blocks(checkpoint, tensor, checkpoint.entry(tensor)))
    if content.nonfinite:
        worst = ", ".join(f"{tensor} {count:,}" for tensor, count in list(content.nonfinite.items())[:5])
        total = f"{sum(content.nonfinite.values()):,} entries of {len(content.nonfinite)} tensors are NaN or infinite"
        findings.append(Finding("not finite", name, total, worst))
    try:
        parameter_roles(checkpoint)
    except (FamilyUnknown, FileMissing) as refusal:
        unchecked.setdefault(("whether configuration and weights belong together", refusal.found), []).append(name)
    except CheckpointRefused as refusal:
        findings.append(Finding("configuration", name, "configuration and weights contradict each other", str(refusal)))
    return content


def digest_contents(content: Contents) -> str:
    """Return one sha256 of the names, dtypes, shapes and bytes of all tensors."""
    names, entries = sorted(content.hashes), content.entries
    said = [(name, entries[name].dtype, entries[name].shape, content.hashes[name]) for name in names]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def blocks(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> Iterator[NDArray[Any]]:
    """Read a tensor by blocks of rows."""
    if not entry.shape:
        yield checkpoint.tensor(name)
        return
    step = max(1, BLOCK * entry.shape[0] // max(entry.size, 1))
    for start in range(0, entry.shape[0], step):
        yield checkpoint.tensor(name, slice(start, start + step))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many matrices a tensor holds, and their rows and columns; filters are rows."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, shape[0], int(np.prod(shape[1:])))


def _digest(content: Contents, name: str, parts: Iterable[NDArray[Any]]) -> None:
    """Record sha256, sampled entries, non-finite entries, extremes and narrower types of a tensor."""
    entry, digest, done, samples, extremes = content.entries[name], hashlib.sha256(), 0, [], Extremes()
    rows: list[NDArray[np.bool_]] = []
    columns: list[NDArray[np.bool_]] = []
    floats, broken = entry.dtype in PRECISION, 0
    matrix = len(entry.shape) > 1
    grid = GridTest(PRECISION[entry.dtype]) if floats and matrix and entry.dtype not in EIGHT_BITS else None
    narrow = {dtype for dtype in NARROW if floats and PRECISION[dtype] > PRECISION[entry.dtype]}
    places = np.arange(min(entry.size, SAMPLE))
    if entry.size > SAMPLE:  # one in each of equal strata: the same in every checkpoint, and in no step with the rows
        edges = np.linspace(0, entry.size, SAMPLE + 1).astype(np.int64)
        places = edges[:-1] + np.random.default_rng(0).integers(0, np.diff(edges))
    for block in parts:
        flat = block.reshape(-1)
        digest.update(flat.view(np.uint8).data)
        if floats and flat.size:
            sizes = np.abs(flat.astype(np.float64))
            broken += int(flat.size - np.count_nonzero(np.isfinite(flat)))
            extremes = extremes.merge(sizes, done)
            if grid:
                grid.add(block.reshape(-1, matrix_shape(entry.shape)[2]))
            if matrix:
                nonzero = (block if block.ndim == 3 else block.reshape(1, len(block), -1)) != 0
                rows.append(nonzero.any(axis=2).reshape(-1))
                columns.append(nonzero.any(axis=1).reshape(-1))
            narrow -= {dtype for dtype in narrow if (flat.astype(DTYPES[dtype]).astype(flat.dtype) != flat).any()}
        here = places[(places >= done) & (places < done + flat.size)]
        samples.append(flat[here - done].astype(np.float32))
        done += flat.size
    content.hashes[name] = digest.hexdigest()
    if not floats:
        return
    content.samples[name] = np.concatenate(samples) if samples else np.empty(0, np.float32)
    if broken:
        content.nonfinite[name] = broken
        return
    content.extremes[name], content.narrow[name] = extremes, narrow
    if grid and grid.passed:
        content.grids.add(name)
    if rows:
        joined = np.concatenate(columns) if len(entry.shape) == 3 else np.any(columns, axis=0)
        lines = {"rows": np.flatnonzero(~np.concatenate(rows)), "columns": np.flatnonzero(~joined)}
        if any(each.size for each in lines.values()):
            content.zero_lines[name] = lines

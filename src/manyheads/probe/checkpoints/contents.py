"""Contents of a checkpoint in one pass by blocks: sha256, entries that are not finite, and a sample of entries."""

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
from manyheads.probe.checkpoints.grids import GridTest
from manyheads.probe.checkpoints.series import step_of

BLOCK = 2**20  # number of entries in a block
SAMPLE = 256  # entries of a tensor that are kept
# Relative spacing of the numbers of a type.
PRECISION = {dtype: float(ml_dtypes.finfo(DTYPES[dtype]).eps) for dtype in DTYPES if dtype.startswith(("F", "BF"))}


# Types whose values may be held in a finer one, and types of 256 values.
NARROW, EIGHT_BITS = ("F16", "BF16"), ("F8_E4M3", "F8_E5M2")


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

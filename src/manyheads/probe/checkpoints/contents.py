"""Contents of a checkpoint in one pass by blocks: sha256, entries that are not finite, and a sample of entries."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.models.checkpoint import Checkpoint
from manyheads.models.files import read_json
from manyheads.models.header import TensorEntry
from manyheads.models.parameters import parameter_map
from manyheads.models.refusals import CheckpointRefused, FamilyUnknown, FileMissing
from manyheads.probe.checkpoints.series import step_of

BLOCK_BYTES = 2**23
# Entries of a tensor that are kept.
SAMPLE = 256


@dataclass(frozen=True)
class Finding:
    """One thing that is not what it should be.

    Attributes
    ----------
    kind
        "file", "configuration", "tensors", "dtype", "shape", "not finite", "duplicate", "copied tensors", "step",
        "order", "apart" or "interchanged tensors".
    where
        The checkpoint or checkpoints.
    what
        What is wrong there.
    evidence
        The figures or names it rests on.
    """

    kind: str
    where: str
    what: str
    evidence: str


@dataclass
class Contents:
    """What is kept of a checkpoint once it has been read.

    Attributes
    ----------
    name, step
        Name in the series, and the step in it or None.
    entries
        Name of every tensor → dtype, shape, bytes.
    files
        Name of every tensor → name of the file that holds it.
    hashes
        Name of every tensor → sha256 of its bytes.
    samples
        Name of every matrix → up to `SAMPLE` entries, at the same places in every checkpoint.
    config
        The configuration, or None.
    """

    name: str
    step: int | None
    entries: dict[str, TensorEntry]
    files: dict[str, str]
    hashes: dict[str, str]
    samples: dict[str, NDArray[np.float32]]
    config: dict[str, Any] | None


def read_contents(name: str, checkpoint: Checkpoint, findings: list[Finding]) -> Contents:
    """Read every tensor once, and check what a checkpoint says about itself."""
    hashes, samples, unfinished = {}, {}, {}
    for tensor in checkpoint.names:
        entry = checkpoint.entry(tensor)
        hashes[tensor], sample, broken = _digest(_blocks(checkpoint, tensor, entry), entry)
        if _is_matrix(entry):
            samples[tensor] = sample
        if broken:
            unfinished[tensor] = broken
    if unfinished:
        worst = ", ".join(f"{tensor} {count:,}" for tensor, count in list(unfinished.items())[:5])
        total = f"{sum(unfinished.values()):,} entries of {len(unfinished)} tensors are NaN or infinite"
        findings.append(Finding("not finite", name, total, worst))
    try:
        parameter_map(checkpoint)
    except (FamilyUnknown, FileMissing):
        pass  # names of this model cannot be explained: no finding
    except CheckpointRefused as refusal:
        findings.append(Finding("configuration", name, "configuration and weights contradict each other", str(refusal)))
    config = None if checkpoint.config is None else dict(checkpoint.config)
    step = step_of(checkpoint)
    state = checkpoint.path / "trainer_state.json"
    if step is not None and state.is_file():
        try:
            told = read_json(state, follow_links=True).get("global_step")
        except CheckpointRefused as refusal:
            findings.append(Finding("file", name, "trainer_state.json cannot be read", str(refusal)))
        else:
            if isinstance(told, int) and told != step:
                what = f"trainer_state.json is of step {told}, the name of step {step}"
                findings.append(Finding("step", name, what, f"global_step {told}"))
    files = {tensor: file.path.name for file in checkpoint.files for tensor in file.entries}
    return Contents(name, step, dict(checkpoint.entries), files, hashes, samples, config)


def digest_contents(content: Contents) -> str:
    """Return one sha256 of the names, dtypes, shapes and bytes of all tensors."""
    said = [(name, content.entries[name].dtype, content.entries[name].shape, content.hashes[name])
            for name in sorted(content.hashes)]  # fmt: skip
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _is_matrix(entry: TensorEntry) -> bool:
    return entry.dtype.startswith(("F", "BF")) and len(entry.shape) >= 2 and entry.size >= 4


def _blocks(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> Iterator[NDArray[Any]]:
    """Read a tensor by blocks of rows."""
    if not entry.shape:
        yield checkpoint.tensor(name)
        return
    step = max(1, BLOCK_BYTES * entry.shape[0] // max(entry.nbytes, 1))
    for start in range(0, entry.shape[0], step):
        yield checkpoint.tensor(name, slice(start, start + step))


def _digest(blocks: Iterable[NDArray[Any]], entry: TensorEntry) -> tuple[str, NDArray[np.float32], int]:
    """Return sha256, the sampled entries, and how many entries are not finite."""
    digest, broken, done, parts = hashlib.sha256(), 0, 0, []
    places = np.arange(entry.size)
    if entry.size > SAMPLE:  # one in each of equal strata: the same in every checkpoint, and in no step with the rows
        edges = np.linspace(0, entry.size, SAMPLE + 1).astype(np.int64)
        places = edges[:-1] + np.random.default_rng(0).integers(0, np.diff(edges))
    for block in blocks:
        flat = block.reshape(-1)
        digest.update(flat.view(np.uint8).data)
        if entry.dtype.startswith(("F", "BF")):
            broken += int(flat.size - np.count_nonzero(np.isfinite(flat)))
        here = places[(places >= done) & (places < done + flat.size)]
        parts.append(flat[here - done].astype(np.float32))
        done += flat.size
    return digest.hexdigest(), np.concatenate(parts) if parts else np.empty(0, np.float32), broken

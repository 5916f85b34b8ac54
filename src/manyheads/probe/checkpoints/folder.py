"""Checks of the files beside the weights: dtype of the configuration, trainer's state, tokenizer, adapters."""

import hashlib
import json
from collections import Counter
from pathlib import Path

from manyheads._json import Json
from manyheads.models.checkpoints.files import read_json
from manyheads.models.refusals import CheckpointRefused
from manyheads.probe.checkpoints.contents import PRECISION, Contents, Finding, Notes
from manyheads.probe.checkpoints.tokens import TOKENIZERS

# PyTorch's names of the types of a safetensors file.
TORCH = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def check_folder(content: Contents, path: Path, unchecked: Notes) -> list[Finding]:
    """Check the files beside the weights against the weights, and note the tokenizer."""
    folder, name = (path if path.is_dir() else path.parent), content.name
    findings = _check_dtype(content) + _check_state(content, folder)
    if adapters := sorted(each.name for each in folder.glob("adapter_model.*")):
        unchecked.setdefault((adapters[0], "an adapter is not read, only the weights that it changes"), []).append(name)
    try:
        found, why = _digest_tokenizer(folder), "there is none beside the weights"
    except CheckpointRefused as refusal:
        found, why = None, refusal.found
    if found is None:
        unchecked.setdefault(("the tokenizer", why), []).append(name)
        return findings
    content.tokenizer, largest = found
    rows = (content.config or {}).get("vocab_size")
    if isinstance(rows, int) and largest >= rows:
        what = f"the tokenizer gives ids up to {largest}, the model has {rows} embeddings"
        findings.append(Finding("tokenizer", name, what, f"vocab_size {rows}"))
    return findings


def _check_dtype(content: Contents) -> list[Finding]:
    """Compare the dtype that the configuration states with that of most entries."""
    config = content.config or {}
    said = TORCH.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    counts: Counter[str] = Counter()
    for entry in content.entries.values():
        if entry.dtype in PRECISION:
            counts[entry.dtype] += entry.size
    usual = max(counts, key=counts.__getitem__, default=said)
    if said is None or "quantization_config" in config or usual == said:
        return []
    what = f"the configuration says {said}, most entries are {usual}"
    shares = ", ".join(f"{dtype} {count:,}" for dtype, count in counts.most_common())
    return [Finding("dtype", content.name, what, f"entries: {shares}")]


def _check_state(content: Contents, folder: Path) -> list[Finding]:
    """Compare the step of a trainer's state with that of the name."""
    state = folder / "trainer_state.json"
    if content.step is None or not state.is_file():
        return []
    try:
        told = read_json(state, follow_links=True).get("global_step")
    except CheckpointRefused as refusal:
        return [Finding("file", content.name, "trainer_state.json cannot be read", str(refusal))]
    if not isinstance(told, int) or told == content.step:
        return []
    what = f"trainer_state.json is of step {told}, the name of step {content.step}"
    return [Finding("step", content.name, what, f"global_step {told}")]


def _digest_tokenizer(folder: Path) -> tuple[str, int] | None:
    """Return a digest of the vocabulary and merges of a tokenizer, and its largest id, or -1 where it is not read."""
    for file in (folder / name for name in TOKENIZERS if name != "tokenizer_config.json"):
        if not file.is_file():
            continue
        if file.suffix == ".json":
            said, largest = _vocabulary(read_json(file, follow_links=True), file)
        else:
            with file.open("rb") as stream:
                said, largest = hashlib.file_digest(stream, "sha256").hexdigest(), -1
        return hashlib.sha256(f"{file.name} {said}".encode()).hexdigest(), largest
    return None


def _vocabulary(table: dict[str, Json], file: Path) -> tuple[str, int]:
    """Return the parts of a tokenizer that determine token ids, whatever version wrote them, and its largest id."""
    model = table.get("model")
    if not isinstance(model, dict):  # vocab.json: token -> id
        merges = file.parent / "merges.txt"
        said: list[Json] = [table, merges.read_text("utf-8", "replace") if merges.is_file() else ""]
        ids = list(table.values())
    else:
        vocabulary, merges_ = model.get("vocab"), model.get("merges") or []
        tokens = [each for each in table.get("added_tokens") or [] if isinstance(each, dict)]
        added = [(each.get("content"), each.get("id")) for each in tokens]
        merged = [each if isinstance(each, str) else " ".join(map(str, each)) for each in merges_]
        said = [vocabulary, merged, added, table.get("normalizer"), table.get("pre_tokenizer")]
        listed = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
        ids = [*listed, *(number for _, number in added)]
    return json.dumps(said, sort_keys=True), max((each for each in ids if isinstance(each, int)), default=-1)

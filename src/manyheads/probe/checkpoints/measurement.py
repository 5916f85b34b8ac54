"""Attention and weights of a checkpoint series on the same tokens: what a live recording of a fixed batch holds.

A checkpoint is a unit of work: one forward pass gives the figures of all its layers, and loading it costs more than
measuring it. Its figures are appended to the logs of a store when they are complete, so that a run that is killed goes
on with the checkpoint in which it stopped.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from manyheads._extras import require
from manyheads._extras import xarray as xr
from manyheads._json import Json
from manyheads._namespaces import Array
from manyheads.errors import UsageError
from manyheads.models.checkpoints.checkpoint import open_checkpoint
from manyheads.models.checkpoints.loading import load_model
from manyheads.models.refusals import CheckpointRefused
from manyheads.models.torch.lazy_torch import torch
from manyheads.probe.attention.datasets import take_snapshot
from manyheads.probe.attention.recording import record_attention
from manyheads.probe.checkpoints import series, verification, weights
from manyheads.probe.checkpoints.tokens import Tokens, check_fit, check_tokens, digest_tokens
from manyheads.probe.live.reading import as_series, encode_snapshot, open_recording
from manyheads.probe.live.recorder import run_in_evaluation
from manyheads.probe.live.step_log import StepLog
from manyheads.study.execution.progress import progress_bar


class SeriesRefused(CheckpointRefused):
    """A checkpoint series that is not what it says."""

    usual = "mend the series, or draw it nevertheless with findings='warn' (--findings warn)"


class SeriesWarning(UserWarning):
    """A checkpoint series that is measured although it is not what it says."""


class _Member(NamedTuple):
    """A checkpoint of the series: its step, name and folder, and the sha256 of its tensors."""

    step: int
    name: str
    folder: Path
    sha256: str


def measure_checkpoints(
    checkpoints: Sequence[Path | str],
    tokens: Array,
    *,
    rows: int | None = None,
    store: Path | str | None = None,
    findings: Literal["refuse", "warn"] = "refuse",
    dtype: str = "float32",
    device: str = "cpu",
    follow_links: bool = False,
    progress: bool | None = False,
) -> "xr.DataTree":
    """Measure attention and weights of a series of checkpoints on the same tokens.

    The series is verified first (`verify_checkpoints`). The result is that of a live recording of a fixed batch:
    `find_alarms`, `dormant_heads` and `manyheads probe health` read both.

    Parameters
    ----------
    checkpoints
        Folders with `config.json` and weights in safetensors format, of models that transformers loads. In the order of
        the steps where every name holds one (`step1000`, `checkpoint-500`), otherwise numbered in the order given. All
        numbers in a name count (`stage2-step1000`); where steps start anew the checkpoints are numbered in their order.
    tokens
        Token ids, (sequences, length) or one sequence; `read_tokens` reads files. Every token counts.
    rows
        As in `record_attention`.
    store
        Folder that every measured checkpoint is appended to. Checkpoints that it holds are not measured again.
    findings
        What to do if the verification finds something: "refuse", or "warn" and go on.
    dtype, device
        In which, and where, the model computes; "auto": as the weights are stored.
    follow_links
        Whether files may be symbolic links, as in a Hugging Face cache.
    progress
        Whether a bar is shown; None: if standard error is a terminal.

    Returns
    -------
    xr.DataTree
        `attention_fixed`: as `AttentionRecord.dataset`, over (step, layer, head). `weights`: as `weight_spectra`, over
        (step, matrix) and (step, head_matrix, layer, head). Both with the coordinate `checkpoint` (step); null levels
        stand beside the figures. `attrs["verification"]`: what was verified.

    Raises
    ------
    ExtraMissing
        PyTorch or transformers is not installed.
    SeriesRefused, CheckpointRefused
        The verification found something; a checkpoint that cannot be read.
    UsageError
        Tokens that the model does not take; a model that cannot be recorded; two checkpoints of one step; a store of
        other tokens, options or weights.

    Examples
    --------
    >>> import tempfile, torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from manyheads.probe import measure_checkpoints
    >>> folder = Path(tempfile.mkdtemp())
    >>> sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 9}
    >>> for step in (0, 10):
    ...     model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    ...     model.save_pretrained(folder / f"step{step}")
    >>> tree = measure_checkpoints(sorted(folder.iterdir()), torch.arange(8))
    >>> tree["attention_fixed"].entropy.sizes
    Frozen({'step': 2, 'layer': 1, 'head': 2})
    """
    require("transformers")
    ids = check_tokens(tokens)
    if findings not in ("refuse", "warn"):
        raise UsageError(f"findings={findings!r}: expected 'refuse' or 'warn'")
    _check_place(dtype, device)
    order = series.read_order(list(checkpoints))
    found = verification.verify_checkpoints(order.sources, follow_links=follow_links)
    _act_on(found, findings)
    members = _members([Path(str(source)) for source in order.sources], order.steps, found)
    config: Mapping[str, Json] = open_checkpoint(members[0].folder, follow_links=follow_links).config or {}
    check_fit(ids, config)
    logs = _open_logs(store, config, {"rows": rows, "tokens": digest_tokens(ids), "dtype": dtype, "device": device})
    missing = {group: _missing(log, members, store) for group, log in logs.items()}
    with progress_bar("checkpoints", len(members), len(members) - max(map(len, missing.values())), progress) as advance:
        for member in sorted(set().union(*missing.values())):
            about = {"step": member.step, "checkpoint": member.name, "sha256": member.sha256}
            if member in missing["attention_fixed"]:
                logs["attention_fixed"].append(about | _measure_attention(member, ids, rows, (dtype, device)))
            if member in missing["weights"]:
                spectra = weights.weight_spectra(open_checkpoint(member.folder, follow_links=follow_links))
                logs["weights"].append(about | {"dataset": spectra.to_dict()})
            advance()
    if store is None:
        tree = xr.DataTree.from_dict({group: as_series(*log.read()) for group, log in logs.items()})
    else:
        tree = open_recording(store)
    tree.attrs["verification"] = str(found)
    return tree


def _check_place(dtype: str, device: str) -> None:
    """Refuse a type that PyTorch does not compute in, and a device that is not there."""
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise UsageError(f"dtype={dtype!r}: expected 'auto' or a floating-point type of PyTorch, such as 'bfloat16'")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device={device!r} cannot be used ({reason}): give one that is there, such as 'cpu'"
        ) from error


def _act_on(found: verification.Verification, findings: str) -> None:
    """Refuse a series, or warn of it, because of what was found; checkpoints that cannot be read are refused."""
    if found.passed:
        return
    first, *more = found.findings
    text = f"{first.what} ({first.evidence})" + (f", and {len(more)} further findings" if more else "")
    if findings == "refuse" or found.compared < len(found.checkpoints):
        raise SeriesRefused(first.where, f"{text}; `manyheads probe verify` lists them")
    warnings.warn(f"{first.where}: {text}", SeriesWarning, stacklevel=3)


def _members(folders: Sequence[Path], steps: list[int] | None, found: verification.Verification) -> list[_Member]:
    """Return the checkpoints with their steps, or numbers in the order given."""
    if files := [folder for folder in folders if not folder.is_dir()]:
        raise UsageError(f"{files[0]} is no folder: give the folder with config.json and the weights")
    numbers = list(range(len(folders))) if steps is None else steps
    if twice := [step for step in numbers if numbers.count(step) > 1]:
        raise UsageError(f"two checkpoints are of step {twice[0]}: give one checkpoint for each step")
    numbered = zip(numbers, found.checkpoints, folders, strict=True)
    return [_Member(step, name, folder, found.sha256[name]) for step, name, folder in numbered]


def _open_logs(store: Path | str | None, config: Mapping[str, Json], options: Mapping[str, Json]) -> dict[str, StepLog]:
    """Open the logs of both groups; what they are about decides whether they can be continued."""
    architectures = config.get("architectures") or [config.get("model_type", "")]
    headers: dict[str, dict[str, Json]] = {"attention_fixed": {"of": "checkpoints", **options}, "weights": {}}
    logs = {}
    for group, header in headers.items():
        path = None if store is None else Path(store) / f"{group}.jsonl"
        logs[group] = StepLog(path, {"group": group, "model": str(architectures[0]), **header})
    return logs


def _missing(log: StepLog, members: Sequence[_Member], store: Path | str | None) -> list[_Member]:
    """Return the checkpoints that a log does not hold, and those after them, whose steps have to be written again."""
    held = {line["step"]: line["sha256"] for line in log.read()[1]}
    for member in members:
        if held.get(member.step, member.sha256) != member.sha256:
            raise UsageError(
                f"{store} holds other weights of step {member.step} than {member.name}: give another store"
            )
    first = next((place for place, member in enumerate(members) if member.step not in held), len(members))
    others = held.keys() - {member.step for member in members}
    if first < len(members) and others and max(others) > members[first].step:
        raise UsageError(
            f"{store} holds step {max(others)}, which is not among the checkpoints and comes after step "
            f"{members[first].step}, which is to be added: give all checkpoints, or another store"
        )
    return list(members[first:])


def _measure_attention(member: _Member, ids: Tokens, rows: int | None, place: tuple[str, str]) -> dict[str, Json]:
    """Run the tokens through the model of a checkpoint and return the figures of its attention."""
    dtype, device = place
    model = load_model(member.folder, dtype).to(device)
    if getattr(model.config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
        raise UsageError(
            f"{type(model).__name__} does not run on token ids alone: record it with record_attention in a script"
        )
    with record_attention(model, rows=rows, seed=member.step) as record:
        run_in_evaluation(model, {"input_ids": torch.from_numpy(ids)})
    snapshot = take_snapshot(record.layers, record.figures)
    layers = {"layers": snapshot.layers, "not_measured": record.unmeasured()}
    return layers | encode_snapshot(snapshot, rows)

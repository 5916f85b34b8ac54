"""`manyheads probe attention` and `probe health`: attention and rank over a checkpoint series, and its alarms."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Union

import tyro

from manyheads._extras import xarray as xr
from manyheads._overview import printable, render_table
from manyheads.cli.parsing import OptionalInt, OptionalPath, Switch
from manyheads.cli.probe.checkpoints import Paths, as_json, given_checkpoints, number
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.probe.reports.shapes import Reading

OPTIONS = ("rows", "store", "findings", "dtype", "device", "follow_links")


@dataclass(frozen=True)
class Attention:
    """Measure attention and rank of weights over checkpoints, on the same tokens, and write a report.

    CHECKPOINT is a folder with config.json and safetensors, such as the Hugging Face Trainer saves, or a folder of
    such. The series is verified first. The store keeps every checkpoint that is measured: the same command goes on
    where it was interrupted, and `manyheads probe health STORE` looks for alarms.
    """

    tokens: Annotated[Path, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
    """Token ids (.npy, .npz: sequences x length, or one stream), or a text for the tokenizer beside the checkpoint."""
    checkpoints: Paths = None  # Folders of checkpoints; ordered by the steps in their names (step1000, checkpoint-500).
    store: Path = Path("probe")  # Folder for the figures.
    report: OptionalPath = None  # HTML file; report.html in the store if absent.
    length: OptionalInt = None  # Tokens of a sequence: of a text or stream 512 or what the model takes, if absent.
    sequences: OptionalInt = None  # Number of sequences: of a text or stream 8, if absent.
    tokenizer: OptionalPath = None  # Folder of the tokenizer; that of the first checkpoint if absent.
    rows: OptionalInt = None  # Rows measured of each sequence; all, with the exact largest logit, if absent.
    findings: Literal["refuse", "warn"] = "refuse"  # What to do if the verification finds something.
    dtype: Literal["float32", "bfloat16", "float64", "auto"] = "float32"  # Precision of the model; auto: as stored.
    device: str = "cpu"  # Where the model runs, as PyTorch calls it; other than cpu takes --rows.
    follow_links: Switch = False  # Files may be symbolic links, as in a Hugging Face cache.
    json: Switch = False  # Print JSON with every figure instead of a table.

    def run(self) -> int:
        """Measure, write the report, print the table, and return the exit status."""
        from manyheads.probe import measure_checkpoints
        from manyheads.probe.checkpoints.measurement import SeriesWarning
        from manyheads.probe.checkpoints.series import path_of, read_order
        from manyheads.probe.checkpoints.tokens import read_tokens
        from manyheads.probe.reports.pictures import write_recording_report

        folders = list(map(path_of, read_order(given_checkpoints(self.checkpoints)).sources))
        cut = {"length": self.length, "sequences": self.sequences}
        ids = read_tokens(self.tokens, folders[0], **cut, tokenizer=self.tokenizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SeriesWarning)
            options = {name: getattr(self, name) for name in OPTIONS}
            tree = measure_checkpoints(folders, ids, **options, progress=None)
        for warning in (each for each in caught if each.category is SeriesWarning):
            print(f"manyheads: warning: {' '.join(str(warning.message).split())}", file=sys.stderr)
        command = shlex.join(["manyheads", *sys.argv[1:]])
        out = write_recording_report(tree, self.report or self.store / "report.html", command)
        if self.json:
            print(json.dumps({name: as_json(node.to_dataset()) for name, node in tree.children.items()}, indent=1))
        else:
            print("\n".join(_as_text(tree, ids.shape, (self.store, out))))
        return 0


def _as_text(tree: xr.DataTree, shape: tuple[int, ...], written: tuple[Path, Path]) -> Iterator[str]:
    """Yield the lines of the table, the theory's reading, dormant heads, and what was written."""
    from manyheads.probe.heads.dormant import dormant_heads
    from manyheads.probe.reports.shapes import read_shapes, summarize_shapes

    found = tree["attention_fixed"].to_dataset()
    last, readings = found.isel(step=-1), read_shapes(tree)
    steps = f"{found.sizes['step']} checkpoints, steps {found.step.values[0]} to {found.step.values[-1]}"
    layers = f"{found.sizes['layer']} layer{'s' * (found.sizes['layer'] != 1)} of {found.sizes['head']} heads"
    yield f"{steps}; {layers}; {shape[0]} x {shape[1]} tokens"
    yield ""
    yield _table(last, readings)
    yield ""
    yield from summarize_shapes(readings)
    if dormant := dormant_heads(last):
        yield f"dormant at step {last.step.item()}: {'; '.join(map(printable, dormant))}"
    if found.attrs.get("not_measured"):
        yield f"not measured: {printable(found.attrs['not_measured'])}"
    yield f"written: {written[1]}, and the figures in {written[0]} (manyheads probe health {written[0]})"


def _table(last: xr.Dataset, readings: list[Reading]) -> str:
    """Return a line for each layer: entropy over the series, logits and sinks at its end, rank of the lower MLP."""
    ranks = {each.layer: each for each in reversed(readings) if each.figure == "stable rank"}
    head = ["layer", "entropy", "(uniform)", "shape", "max logit", "first token", "rank of MLP", "(Gaussian)", "shape"]
    rows = []
    for each in (one for one in readings if one.figure == "entropy"):
        layer, rank = last.sel(layer=each.layer), ranks.get(each.layer)
        logit = layer.max_logit.max().item() if "max_logit" in layer else float("nan")
        cells = [str(each.layer), _path(each), number(each.level), _shape(each)]
        cells += [number(logit), number(layer.first_mass.mean().item())]
        rows.append([*cells, *(("-",) * 3 if rank is None else (_path(rank), number(rank.level), _shape(rank)))])
    return render_table(head, rows)


def _path(each: Reading) -> str:
    """Return first, lowest and last value of a curve."""
    known = [value for value in each.values.tolist() if value == value]
    chosen = [known[0], min(known), known[-1]] if known else [float("nan")]
    return " -> ".join(dict.fromkeys(map(number, chosen)))


def _shape(each: Reading) -> str:
    return "-" if each.shape is None else each.shape.label


@dataclass(frozen=True)
class Health:
    """Look for alarms and dormant heads in the recording of a training.

    RECORDING is the store of `manyheads probe attention`, or the folder that `AttentionRecorder` was given as store=,
    with figures of a fixed batch for alarms; updates that `UpdateRecorder` wrote there are judged too. Each detector is
    named, with its false-alarm rate; no alarm says anything about the final loss.
    """

    recording: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECORDING", help_behavior_hint="")]
    """Folder of a recording."""
    clean: Annotated[Union[None, tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")] = None
    """Recordings of clean trainings by the same recipe, at least 4, with which it is compared."""
    probes: OptionalInt = None  # Planned number of probes; those that are there if absent.
    false_alarm: float = 0.05  # Chance of an alarm of the detector of changes in a clean training.
    max_logit: float = 50.0  # Largest logit that is no alarm.
    silent: int = 48  # Probes at the start without alarms of the detector of changes: at least those of the warm-up.
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if there is an alarm.

    def run(self) -> int:
        """Judge and print; return the exit status."""
        from manyheads.probe import find_alarms
        from manyheads.probe.heads.dormant import dormant_heads

        curves, updates = _fixed_batch(self.recording)
        options = {name: getattr(self, name) for name in ("probes", "false_alarm", "max_logit", "silent")}
        clean = [_fixed_batch(path)[0] for path in self.clean or ()]
        alarms = find_alarms(curves, updates=updates, clean=clean, **options)
        last = curves.isel(step=-1)
        dormant = dormant_heads(last) if "relative_output" in last else []
        if self.json:
            print(json.dumps({"alarms": [asdict(alarm) for alarm in alarms], "dormant": dormant}, indent=1))
        else:
            probes = f"{curves.sizes['step']} probes, {curves.sizes['layer']} layers"
            few = "" if curves.sizes["step"] > self.silent else f"; changes are judged from probe {self.silent + 1} on"
            print(f"{probes}: {len(alarms) or 'no'} alarm{'s' * (len(alarms) != 1)}{few}")
            lines = [str(alarm) for alarm in alarms]
            if dormant:
                lines.append(f"dormant at step {last.step.item()}: {'; '.join(dormant)}")
            for line in lines:
                print(printable(line))
        return 1 if self.strict and alarms else 0


def _fixed_batch(path: Path) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the figures of a fixed batch, with the query-key circuits of the same heads, and the recorded updates.

    Circuits are left out, and updates are None, if they were not recorded.
    """
    import numpy as np

    from manyheads.probe.live.reading import open_recording

    tree = open_recording(path)
    if "attention_fixed" not in tree.children:
        why = "those of the training's own batches move with the batches"
        remedy = "record with AttentionRecorder(model, batch={...}, store=...)"
        raise UsageError(f"{path} holds no figures of a fixed batch: {why}, so {remedy}")
    curves = tree["attention_fixed"].to_dataset()
    updates = tree["updates"].to_dataset() if "updates" in tree.children else None
    weights = tree["weights"].to_dataset() if "weights" in tree.children else curves
    if "head_stable_rank" not in weights:
        return curves, updates
    circuits = weights.sel(head_matrix="query-key")[["head_stable_rank", "head_frobenius"]]
    same = all(np.array_equal(circuits[name], curves[name]) for name in ("step", "layer", "head"))
    both = {"stable_rank": circuits.head_stable_rank, "frobenius": circuits.head_frobenius} if same else {}
    return curves.assign(both), updates

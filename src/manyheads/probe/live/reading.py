"""Stores of live recordings, read as data sets over the steps of the training."""

from pathlib import Path

import numpy as np

from manyheads._extras import xarray as xr
from manyheads.errors import FileRefused, UsageError
from manyheads.probe.attention.datasets import LayerHeads, Snapshot, has_intervals, stack_snapshots
from manyheads.probe.live.step_log import REMEDY, Line, read_log
from manyheads.study.store.disk import trusting_nothing


def open_recording(store: Path | str) -> "xr.DataTree":
    """Read what recorders appended to the folder of a store, while the training runs or later.

    Returns
    -------
    xr.DataTree
        A node for each kind of recording that is there. `attention` (the training's own batches) and `attention_fixed`
        (a fixed batch): as `AttentionRecord.dataset`, over (step, layer, head). `updates`: as
        `UpdateRecorder.dataset`, over (step, matrix). In each `cost_seconds` and `elapsed_seconds` (step): the time
        that was spent on measuring before the step was written, and that of the training. Of checkpoints that
        `measure_checkpoints` measured: `attention_fixed`, without times, and `weights`, with the coordinate
        `checkpoint` (step).
    """
    paths = sorted(Path(store).glob("*.jsonl"))
    if not paths:
        raise FileRefused(f"{store} holds no recording: give the folder that a recorder was given as store=")
    found = {}
    for path in paths:
        header, lines = read_log(path)
        if lines:
            with trusting_nothing(path, REMEDY):
                found[path.stem] = as_series(header, lines)
    return xr.DataTree.from_dict(found)


def as_series(header: Line, lines: list[Line]) -> "xr.Dataset":
    """Gather the lines of a log over the steps."""
    if not lines:
        raise UsageError("nothing was recorded yet: run the training with the recorder in it")
    gather = {"updates": _gather_updates, "weights": _gather_datasets}.get(header["group"], _gather_attention)
    found = gather(header, lines)
    for name, title in (("cost", "time spent on measuring so far"), ("elapsed", "time of the training so far")):
        if name in lines[0]:
            found[f"{name}_seconds"] = "step", [float(line[name]) for line in lines], {"long_name": title, "units": "s"}
    if "checkpoint" in lines[0]:
        found = found.assign_coords(checkpoint=("step", [str(line["checkpoint"]) for line in lines]))
    found.attrs["model"] = str(header["model"])
    return found


def _gather_attention(header: Line, lines: list[Line]) -> "xr.Dataset":
    layers: tuple[LayerHeads, ...] = ()
    unmeasured: list[str] = []
    snapshots = []
    for line in lines:
        if "layers" in line:
            layers, unmeasured = tuple(LayerHeads(*layer) for layer in line["layers"]), line["not_measured"]
        values, errors, levels = (
            {name: np.array(table, dtype=float) for name, table in line[kind].items()}
            for kind in ("values", "errors", "levels")
        )
        snapshots.append(Snapshot(layers, values, errors, levels, np.array(line["weight"], dtype=float)))
    return stack_snapshots([line["step"] for line in lines], snapshots, header["rows"], unmeasured)


def encode_snapshot(snapshot: Snapshot, rows: int | None) -> Line:
    """Return the figures of a step as a line of a log holds them."""
    errors = snapshot.errors if has_intervals(rows) else {}
    return {"values": snapshot.values, "errors": errors, "levels": snapshot.levels, "weight": snapshot.weight}


def _gather_datasets(_: Line, lines: list[Line]) -> "xr.Dataset":
    """Stack data sets of numbers that were written as `Dataset.to_dict` returns them."""
    for line in lines:
        for variable in line["dataset"]["data_vars"].values():
            variable["data"] = np.array(variable["data"], dtype=float)
    steps = xr.Variable("step", np.array([line["step"] for line in lines], dtype=np.int64))
    found = [xr.Dataset.from_dict(line["dataset"]) for line in lines]
    return xr.concat(found, steps, coords="minimal", compat="override", join="exact", combine_attrs="override")


FIGURES = {
    "update_ratio": ("RMS of the update over RMS of the weight, weight decay taken out", "1"),
    "weight_rms": ("RMS of the weight before the update", "1"),
    "gradient_rms": ("RMS of the gradient that the optimizer gets", "1"),
    "significand_bits": ("bits of the significands of the weights before the update", "1"),
    "orthogonality": ("sum of the update's singular values / (sqrt(rank) Frobenius norm)", "1"),
    "stable_rank": ("stable rank of the update", "1"),
}
HEAD_FIGURES = {f"head_{name}": FIGURES[name] for name in ("update_ratio", "weight_rms", "gradient_rms")}
ABOUT = ("role", "layer", "optimizer", "weight_decay")
HEAD_MATRICES = ("query", "key", "value", "output")
LEVELS = {
    "significand_bits_dtype": "bits of the significands of this type",
    "update_ratio_rounding": "RMS of the rounding of weights of this type over RMS of the weight",
    "orthogonality_random": "orthogonality of a Gaussian matrix of this shape",
    "stable_rank_random": "stable rank of a Gaussian matrix of this shape",
}


def _gather_updates(header: Line, lines: list[Line]) -> "xr.Dataset":
    about = {name: each for line in lines for name, each in line.get("matrices", {}).items()}
    place = {name: column for column, name in enumerate(about)}
    found = xr.Dataset(
        coords={
            "step": np.array([line["step"] for line in lines], dtype=np.int64),
            "matrix": list(about),
            **{key: ("matrix", [each[key] for each in about.values()]) for key in ABOUT},
        }
    )
    found["step"].attrs["long_name"] = "optimizer updates before this one"
    for name, (title, unit) in FIGURES.items():
        table = np.full((len(lines), len(about)), np.nan)
        for row, line in zip(table, lines, strict=True):
            for matrix, figures in line["figures"].items():
                row[place[matrix]] = float(figures.get(name, np.nan))
        if not np.isnan(table).all():
            found[name] = ("step", "matrix"), table, {"long_name": title, "units": unit}
    layers = {name: each.get("attention_layer", -1) for name, each in about.items()}
    parts = [figures.get("head_weight_rms", {}) for line in lines for figures in line["figures"].values()]
    heads = [len(row) for each in parts for row in each.values()]
    for name, (title, unit) in HEAD_FIGURES.items() if heads else ():
        blocks = np.full((len(lines), len(HEAD_MATRICES), max(layers.values()) + 1, max(heads)), np.nan)
        for block, line in zip(blocks, lines, strict=True):
            for matrix, figures in line["figures"].items():
                for part, row in figures.get(name, {}).items():
                    block[HEAD_MATRICES.index(part), layers[matrix], : len(row)] = np.array(row, dtype=float)
        by_head = ("step", "head_matrix", "attention_layer", "head")
        found[name] = by_head, blocks, {"long_name": title + ", of a head", "units": unit}
    if heads:
        found = found.assign_coords(head_matrix=list(HEAD_MATRICES))
    for name, title in LEVELS.items():
        if name.rpartition("_")[0] in found:
            values = [float(each["levels"].get(name, np.nan)) for each in about.values()]
            found[name] = "matrix", values, {"long_name": title, "units": "1"}
    return found

"""Curves of trainings by others: tables (CSV), arrays (NPZ), and result lists of JoMA's authors (PT)."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads._extras import require
from manyheads._namespaces import Floats
from manyheads.errors import FileRefused, UsageError

Figures = dict[str, Floats]
Scalars = dict[str, float | None]

FIGURES = ("entropy", "stable_rank")
LEVELS = {"entropy": "uniform_entropy", "stable_rank": "random_stable_rank"}
SCALARS = ("learning_rate", *LEVELS.values())
COLUMNS = ("step", "layer", *FIGURES, "loss", *SCALARS)


@dataclass(frozen=True, eq=False)
class RunCurves:
    """Curves of one training.

    Figures are "entropy" of attention in nats, mean over heads, and "stable_rank" of the MLP's lower matrix: (S, L),
    from the lowest layer to the top; either may be absent. Levels, where known, are by figure the entropy of uniform
    attention and the stable rank of a random matrix.
    """

    name: str  # in tables
    steps: NDArray[np.int64]  # (S,), in rising order
    figures: dict[str, Floats]
    levels: dict[str, float]
    loss: Floats | None = None  # (S,), best a validation loss, NaN where it was not measured
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.figures or set(self.figures) - set(FIGURES):
            raise UsageError(f"{self.name}: give curves of {' or '.join(FIGURES)}")
        if len(self.steps) < 2:
            raise UsageError(f"{self.name}: {len(self.steps)} steps: expected two or more, in rising order")
        if (wrong := np.flatnonzero(np.diff(self.steps) <= 0)).size:
            before, step = self.steps[wrong[0] : wrong[0] + 2]
            given = f"step {step} is repeated" if step == before else f"step {step} follows {before}"
            raise UsageError(f"{self.name}: {given}: expected each step once, in rising order")
        for name, values in self.figures.items():
            if values.ndim != 2 or len(values) != len(self.steps) or not values.shape[1]:
                raise UsageError(f"{self.name}: {name} {values.shape}: expected ({len(self.steps)} steps, layers)")
        if self.loss is not None and self.loss.shape != self.steps.shape:
            raise UsageError(f"{self.name}: loss {self.loss.shape}: expected ({len(self.steps)},), one for each step")


def read_curves(path: Path | str) -> RunCurves:
    """Read the curves of one training.

    Parameters
    ----------
    path
        A .csv file with a line for each step and layer, and columns step, layer, entropy or stable_rank, and perhaps
        loss, learning_rate, uniform_entropy, random_stable_rank. Or an .npz file with arrays of these names: step (S,),
        entropy and stable_rank (S, L), loss (S,), the others numbers. `manyheads.probe.reports.shapes.curves_of` makes
        the same of a recording of the probe.

    Raises
    ------
    FileRefused
        A file that is none of these.
    UsageError
        Steps that do not rise, or curves that do not match them.
    """
    path = Path(path)
    readers = {".csv": _read_table, ".npz": _read_arrays}
    if path.suffix.lower() not in readers:
        raise FileRefused(f"{path}: expected curves in a .csv or .npz file, or with read_runs in a .pt file")
    return readers[path.suffix.lower()](path)


def read_runs(path: Path | str) -> list[RunCurves]:
    """Read the curves of all trainings in a file: one, as `read_curves`, or the list of results in a .pt file.

    JoMA's authors publish such lists of dictionaries (repository luckmatters), of which "keys" (steps),
    "this_entropies" (steps, layers), "this_val_loss" (steps) and "lr" are read, by PyTorch and without running code.

    Raises `ExtraMissing`: PyTorch is not installed. `FileRefused` or `UsageError`: as of `read_curves`; a .pt file that
    holds anything else.
    """
    path = Path(path)
    if path.suffix.lower() not in (".pt", ".pth"):
        return [read_curves(path)]
    torch = require("torch")
    with _refusing(path, "torch.load(weights_only=True) fails, give a list of results"):
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise FileRefused(f"{path}: expected a list of dictionaries with keys, this_entropies and this_val_loss")
    return [_read_result(path, place, each) for place, each in enumerate(found)]


def _read_result(path: Path, place: int, result: dict[str, ArrayLike]) -> RunCurves:
    name = f"{path.stem}[{place}]"
    given: dict[str, Floats | None] = {}
    for key in ("keys", "this_entropies", "this_val_loss", "lr"):
        try:
            given[key] = None if result.get(key) is None else np.asarray(result[key], np.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FileRefused(f"{path}: {key} of result {place}: expected an array of numbers") from error
    steps, entropy, rate = given["keys"], given["this_entropies"], given["lr"]
    if steps is None or entropy is None or steps.ndim != 1 or (rate is not None and rate.size != 1):
        raise FileRefused(f"{path}: result {place}: expected keys (steps,), this_entropies (steps, layers), one lr")
    scalars = dict.fromkeys(SCALARS) | {"learning_rate": None if rate is None else float(rate.item())}
    return replace(_curves(path, steps, {"entropy": entropy}, given["this_val_loss"], scalars), name=name)


def with_losses(run: RunCurves, path: Path | str) -> RunCurves:
    """Add losses by step: from the trainer_state.json of the Hugging Face Trainer, or a CSV with step and loss.

    The validation loss is taken where there is one. Steps without a loss get none; FileRefused if all have none.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        with _refusing(path, "no trainer_state.json of the Hugging Face Trainer"):
            log = json.loads(path.read_text(encoding="utf-8"))["log_history"]
            log = [entry for entry in log if isinstance(entry, dict) and "step" in entry]
        key = "eval_loss" if any("eval_loss" in entry for entry in log) else "loss"
        found = {int(entry["step"]): float(entry[key]) for entry in log if key in entry}
        rates = [float(entry["learning_rate"]) for entry in log if "learning_rate" in entry]
    else:
        rows = _rows(path, ("step", "loss"))
        found = {int(row["step"]): _number(row["loss"], path, "loss") for row in rows if row["loss"]}
        rates = []
    loss = np.array([found.get(int(step), np.nan) for step in run.steps])
    if not np.isfinite(loss).any():
        few = ", ".join(map(str, sorted(found)[:4])) or "none"
        raise FileRefused(f"{path}: no loss at a step of {run.name} (steps with one: {few})")
    rate = run.learning_rate if run.learning_rate is not None or not rates else max(rates)
    return replace(run, loss=loss, learning_rate=rate)


@contextmanager
def _refusing(path: Path, why: str) -> Iterator[None]:
    """Turn what fails while a file is read into a refusal."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except Exception as error:  # of pickle, zipfile, zlib, csv, numpy, torch
        raise FileRefused(f"{path}: {why} ({type(error).__name__}: {str(error)[:100]})") from error


def _rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    with _refusing(path, "no table of curves"), path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = tuple(reader.fieldnames or ())
        rows = [{name: (row.get(name) or "").strip() for name in columns} for row in reader]
    if missing := [name for name in needed if name not in columns]:
        raise FileRefused(f"{path} has no column {missing[0]!r}: expected {', '.join(COLUMNS)}")
    return rows


def _number(text: str, path: Path, column: str) -> float:
    try:
        return float(text) if text else np.nan
    except ValueError:
        raise FileRefused(f"{path}: {column} {text[:20]!r}: expected a number") from None


def _read_table(path: Path) -> RunCurves:
    rows = _rows(path, ("step", "layer"))
    numbers = [{name: _number(text, path, name) for name, text in row.items() if name in COLUMNS} for row in rows]
    keys = [(row["step"], row["layer"]) for row in numbers]
    if len(set(keys)) < len(keys) or not np.isfinite(np.array(keys, float)).all():
        raise FileRefused(f"{path}: give one line for each step and layer, with both; average over heads first")
    steps, layers = sorted({step for step, _ in keys}), sorted({layer for _, layer in keys})
    figures = {}
    for name in FIGURES:
        values = {key: row.get(name, np.nan) for key, row in zip(keys, numbers, strict=True)}
        curve = np.array([[values.get((step, layer), np.nan) for layer in layers] for step in steps])
        if np.isfinite(curve).any():
            figures[name] = curve
    losses = {row["step"]: row["loss"] for row in numbers if np.isfinite(row.get("loss", np.nan))}
    given = {name: next((row[name] for row in numbers if np.isfinite(row.get(name, np.nan))), None) for name in SCALARS}
    loss = np.array([losses.get(step, np.nan) for step in steps]) if losses else None
    return _curves(path, np.array(steps), figures, loss, given)


def _read_arrays(path: Path) -> RunCurves:
    with _refusing(path, "no arrays of curves"), np.load(path, allow_pickle=False) as archive:
        given = {name: np.asarray(archive[name], np.float64) for name in archive.files if name in COLUMNS}
    if "step" not in given or given["step"].ndim != 1:
        raise FileRefused(f"{path} has no array 'step' (steps,): expected {', '.join(COLUMNS)}")
    if odd := [name for name in SCALARS if name in given and given[name].size != 1]:
        raise FileRefused(f"{path}: {odd[0]} {given[odd[0]].shape}: expected one number")
    scalars = {name: float(given[name].item()) if name in given else None for name in SCALARS}
    figures = {name: given[name] for name in FIGURES if name in given}
    return _curves(path, given["step"], figures, given.get("loss"), scalars)


def _curves(path: Path, steps: Floats, figures: Figures, loss: Floats | None, scalars: Scalars) -> RunCurves:
    levels = {figure: level for figure, name in LEVELS.items() if (level := scalars[name]) is not None}
    if not np.isfinite(steps).all() or (steps != steps.astype(np.int64)).any():
        raise FileRefused(f"{path}: steps that are no whole numbers")
    return RunCurves(path.stem, steps.astype(np.int64), figures, levels, loss, scalars["learning_rate"])

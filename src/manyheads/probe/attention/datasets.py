r"""Figures of recorded attention: sums over calls by layer, their levels, and intervals of the sampling of rows.

Early rows differ most from each other, so the first r/4 of r rows are taken for certain; the others are drawn one each
from equal strata of the rest. A row that stands for :math:`a_i` rows enters with that weight, and rows whose query is
padding do not count:

.. math:: \hat\mu = \frac{\sum_i a_i v_i}{\sum_i a_i w_i}, \qquad
    \mathrm{se}^2 = \frac{\sum_{(i,j)} (a_i e_i - a_j e_j)^2}{(\sum_i a_i w_i)^2}, \quad e_i = v_i - \hat\mu w_i,

with v_i the sum of a figure over the sequences of a batch, w_i the number of sequences in which row i counts, and pairs
(i, j) of neighbouring strata: conservative, because neighbours differ in their means as well.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads._namespaces import Floats
from manyheads.errors import UsageError

FIGURES = {
    "entropy": ("attention entropy of a row", "nat"),
    "logsumexp": ("log-sum-exp of the logits of a row", "nat"),
    "mean_logit": ("mean logit under the attention of a row", "nat"),
    "max_logit": ("largest logit of any row", "nat"),
    "collision": ("collision probability of a row, sum p^2", "1"),
    "first_mass": ("attention to the first key that a row may see", "1"),
    "sink_mass": ("attention to the learned sink", "1"),
    "key_entropy": ("attention entropy of a row among the keys alone", "nat"),
    "idle_mass": ("attention to the first key and the learned sink", "1"),
    "distance": ("mean distance back to the attended key", "tokens"),
    "relative_output": ("RMS of a head's output over that of all heads of the layer", "1"),
}

CERTAIN = 0.25  # share of the rows that are taken for certain
# Rows from which on intervals are given: with 16, nominal 95% intervals of skewed figures cover 80 to 86%.
LEAST_FOR_INTERVAL = 64
NORMAL_95 = 1.959964  # quantile of the normal distribution for a two-sided 95% interval


@dataclass(frozen=True)
class RowSample:
    """Rows of one sequence."""

    index: NDArray[np.int64]  # their numbers, ascending, (r,)
    weight: Floats  # for how many rows each of them stands, (r,); the sum is the length of the sequence
    certain: int  # how many of them, from the first, stand for themselves alone

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return self.certain == len(self.index)


def draw_rows(length: int, rows: int | None, rng: np.random.Generator) -> RowSample:
    """Draw rows of a sequence.

    Of `rows` None, or at least `length`, all are taken; `rng` chooses within strata.
    """
    if rows is None or rows >= length:
        return RowSample(np.arange(length), np.ones(length), length)
    certain = int(rows * CERTAIN)
    edges = np.round(np.linspace(certain, length, rows - certain + 1)).astype(int)
    drawn = rng.integers(edges[:-1], edges[1:])
    sizes = np.concatenate([np.ones(certain), np.diff(edges)])
    return RowSample(np.concatenate([np.arange(certain), drawn]), sizes, certain)


def estimate_mean(sums: Floats, counts: Floats, sample: RowSample) -> tuple[Floats, Floats]:
    """Estimate the mean of a figure over all rows that count, and its standard error.

    Sums over the batch are (heads, r), and the numbers of sequences in which each row counts (heads or 1, r). Both
    results are (heads,): NaN if no row counts; the error is 0 for all rows, NaN for a single stratum.
    """
    total = counts @ sample.weight
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (sums @ sample.weight) / total
    if sample.whole:
        return mean, np.zeros_like(mean)
    residual = ((sums - mean[:, None] * counts) * sample.weight)[:, sample.certain :]
    strata = residual.shape[1]
    if strata < 2:
        return mean, np.full_like(mean, np.nan)
    paired = strata // 2 * 2
    square = np.sum((residual[:, 0:paired:2] - residual[:, 1:paired:2]) ** 2, axis=1)
    if strata % 2:  # the last one, with its neighbour: half of the square for one stratum
        square += (residual[:, -1] - residual[:, -2]) ** 2 / 2
    return mean, np.sqrt(square) / np.broadcast_to(total, mean.shape)


def layer_number(name: str) -> int | None:
    """Return the number of the layer in the name of a module: the first one that stands between dots."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else None


@dataclass
class LayerRecord:
    """Weighted sums over the calls of one attention module."""

    cross: bool  # whether it attends to another sequence
    heads: int
    key_heads: int  # shared by the heads
    calls: int = 0
    weight: float = 0.0  # rows in the calls that count
    _sums: dict[str, Any] = field(default_factory=lambda: defaultdict(float), repr=False)
    _variances: dict[str, Any] = field(default_factory=lambda: defaultdict(float), repr=False)
    _levels: dict[str, Any] = field(default_factory=lambda: defaultdict(float), repr=False)
    _largest: list[Any] = field(default_factory=list, repr=False)

    def add(
        self,
        found: Mapping[str, tuple[Floats, Floats]],
        levels: Mapping[str, Floats],
        weight: float,
        largest: Floats | None,
    ) -> None:
        """Add one call: means with standard errors and levels, (H,) or (1,) each; its rows; its largest logits."""
        self.calls += 1
        if not weight:
            return
        self.weight += weight
        for name, (mean, error) in found.items():
            self._sums[name] = self._sums[name] + weight * mean
            self._variances[name] = self._variances[name] + (weight * error) ** 2
        for name, level in levels.items():
            self._levels[name] += weight * level.mean()
        self._largest.append(largest)

    def figures(self) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, float]]:
        """Return means (H,), their standard errors (H,) and levels at logits of zero."""
        means = {name: total / self.weight for name, total in self._sums.items()}
        errors = {name: np.sqrt(square) / self.weight for name, square in self._variances.items()}
        levels = {name: float(total / self.weight) for name, total in self._levels.items()}
        square, _ = means.pop("output_square"), errors.pop("output_square")
        means["relative_output"] = np.sqrt(square / np.mean(square)) if square.any() else np.full_like(square, np.nan)
        levels["relative_output"] = 1.0
        # An interval of the sum would need the covariance: it is taken as the larger one, of perfect correlation.
        tables: tuple[dict[str, Any], ...] = (means, errors, levels)
        for table in tables:
            table["idle_mass"] = table["first_mass"] + table.get("sink_mass", 0.0)
        if all(each is not None for each in self._largest):
            means["max_logit"], levels["max_logit"] = np.max(self._largest, axis=0), 0.0
        return means, errors, levels


class LayerHeads(NamedTuple):
    """An attention module: its name, whether it attends to another sequence, and its numbers of heads."""

    module: str
    cross: bool
    heads: int
    key_heads: int


@dataclass(frozen=True)
class Snapshot:
    """Figures of all layers at one time."""

    layers: tuple[LayerHeads, ...]  # the modules, in the order of the first calls
    values: Mapping[str, Floats]  # name → means and their standard errors, (layer, head); NaN where there is none
    errors: Mapping[str, Floats]
    levels: Mapping[str, Floats]  # name → value at logits of zero, (layer,)
    weight: Floats  # rows that the measured ones stand for, (layer,)


def take_snapshot(records: Mapping[str, LayerRecord], chosen: Collection[str]) -> Snapshot:
    """Gather the chosen figures of layers."""
    measured = {name: record for name, record in records.items() if record.weight}
    if not measured:
        raise UsageError("nothing was recorded: run the model, in training or evaluation, within the with block")
    layers = tuple(LayerHeads(name, each.cross, each.heads, each.key_heads) for name, each in measured.items())
    heads = max(layer.heads for layer in layers)
    means, errors, levels = zip(*(record.figures() for record in measured.values()), strict=True)

    def padded(tables: tuple[dict[str, Floats], ...]) -> dict[str, Floats]:
        """Stack figures by head into (layer, head), NaN where there is none."""
        names = [name for name in FIGURES if name in chosen and any(name in table for table in tables)]
        found = {name: np.full((len(tables), heads), np.nan) for name in names}
        for layer, table in enumerate(tables):
            for name in table.keys() & found.keys():
                found[name][layer, : len(table[name])] = table[name]
        return found

    values = padded(means)
    at_zero = {name: np.array([table.get(name, np.nan) for table in levels]) for name in values}
    return Snapshot(layers, values, padded(errors), at_zero, np.array([each.weight for each in measured.values()]))


def stack_snapshots(
    steps: Sequence[int], snapshots: Sequence[Snapshot], rows: int | None, unmeasured: list[str]
) -> "xr.Dataset":
    """Gather figures over (step, layer, head); layers that a step lacks are NaN there."""
    layers = {layer.module: layer for snapshot in snapshots for layer in snapshot.layers}
    shape = len(snapshots), len(layers), max(layer.heads for layer in layers.values())
    place = {name: row for row, name in enumerate(layers)}

    def stacked(kind: str, name: str) -> Floats:
        found = np.full(shape if kind in ("values", "errors") else shape[:2], np.nan)
        for step, snapshot in enumerate(snapshots):
            table = snapshot.weight if kind == "weight" else getattr(snapshot, kind).get(name)
            chosen = [place[layer.module] for layer in snapshot.layers]
            if table is not None:
                found[(step, chosen) if table.ndim == 1 else (step, chosen, slice(table.shape[1]))] = table
        return found

    found = xr.Dataset(
        coords={
            "step": np.array(steps, dtype=np.int64),
            "layer": np.arange(shape[1]),
            "head": np.arange(shape[2]),
            "module": ("layer", list(layers)),
            "attention": ("layer", ["cross" if layer.cross else "self" for layer in layers.values()]),
            "heads": ("layer", [layer.heads for layer in layers.values()]),
            "key_heads": ("layer", [layer.key_heads for layer in layers.values()]),
        }
    )
    found["step"].attrs["long_name"] = "optimizer updates so far"
    found["layer"].attrs["long_name"] = "attention module, in the order of the first calls"
    found["head"].attrs["long_name"] = "head"
    found.attrs = {"rows": "all" if rows is None else rows, "not_measured": ", ".join(unmeasured)}
    by_layer, by_head = ("step", "layer"), ("step", "layer", "head")
    for name, (title, unit) in FIGURES.items():
        if not any(name in snapshot.values for snapshot in snapshots):
            continue
        mean, level = stacked("values", name), stacked("levels", name)
        found[name] = by_head, mean, {"long_name": title, "units": unit}
        found[f"{name}_uniform"] = by_layer, level, {"long_name": f"{title}, at logits of zero", "units": unit}
        if has_intervals(rows) and any(name in snapshot.errors for snapshot in snapshots):
            margin = NORMAL_95 * stacked("errors", name)
            for side, edge in (("low", mean - margin), ("high", mean + margin)):
                attributes = {"long_name": f"{title}, {side} end of the 95% interval over rows", "units": unit}
                found[f"{name}_{side}"] = by_head, edge, attributes
    attributes = {"long_name": "rows that the measured ones stand for", "units": "1"}
    found["measured_rows"] = by_layer, stacked("weight", ""), attributes
    return found


def has_intervals(rows: int | None) -> bool:
    """Whether so many sampled rows give intervals that cover what they say."""
    return rows is not None and rows >= LEAST_FOR_INTERVAL

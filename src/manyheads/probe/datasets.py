"""Datasets of recorded attention: sums over calls by layer, and the figures with their levels and intervals."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import UsageError
from manyheads.probe.row_sampling import LEAST_FOR_INTERVAL, NORMAL_95

if TYPE_CHECKING:
    import xarray as xr

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


def layer_number(name: str) -> int | None:
    """Return the number of the layer in the name of a module: the first one that stands between dots.

    Examples
    --------
    >>> layer_number("model.layers.3.self_attn")
    3
    """
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else None


@dataclass
class LayerRecord:
    """Weighted sums over the calls of one attention module.

    Attributes
    ----------
    cross
        Whether it attends to another sequence.
    heads, key_heads
        H, and the number of key heads that they share.
    calls, weight
        Calls so far, and rows in them that count.
    """

    cross: bool
    heads: int
    key_heads: int
    calls: int = 0
    weight: float = 0.0
    _sums: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _variances: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _levels: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _largest: list[np.ndarray | None] = field(default_factory=list, repr=False)

    def add(
        self,
        found: Mapping[str, tuple[np.ndarray, np.ndarray]],
        levels: Mapping[str, np.ndarray],
        weight: float,
        largest: np.ndarray | None,
    ) -> None:
        """Add one call: means with standard errors and levels, (H,) or (1,) each; its rows; its largest logits."""
        self.calls += 1
        if not weight:
            return
        self.weight += weight
        for name, (mean, error) in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * mean
            self._variances[name] = self._variances.get(name, 0.0) + (weight * error) ** 2
        for name, level in levels.items():
            self._levels[name] = self._levels.get(name, 0.0) + weight * level.mean()
        self._largest.append(largest)

    def figures(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float]]:
        """Return means (H,), their standard errors (H,) and levels at logits of zero."""
        means = {name: total / self.weight for name, total in self._sums.items()}
        errors = {name: np.sqrt(square) / self.weight for name, square in self._variances.items()}
        levels = {name: float(total / self.weight) for name, total in self._levels.items()}
        square = means.pop("output_square")
        errors.pop("output_square")
        means["relative_output"] = np.sqrt(square / np.mean(square)) if square.any() else np.full_like(square, np.nan)
        levels["relative_output"] = 1.0
        # An interval of the sum would need the covariance: it is taken as the larger one, of perfect correlation.
        tables: tuple[dict[str, Any], ...] = (means, errors, levels)
        for table in tables:
            table["idle_mass"] = table["first_mass"] + table.get("sink_mass", 0.0)
        largest = [each for each in self._largest if each is not None]
        if len(largest) == len(self._largest):
            means["max_logit"], levels["max_logit"] = np.max(largest, axis=0), 0.0
        return means, errors, levels


def as_dataset(
    layers: Mapping[str, LayerRecord], rows: int | None, chosen: Collection[str], unmeasured: list[str]
) -> "xr.Dataset":
    """Gather the chosen figures of layers over (layer, head), as `AttentionRecord.dataset` describes them."""
    import xarray as xr

    measured = {name: layer for name, layer in layers.items() if layer.weight}
    if not measured:
        raise UsageError("nothing was recorded: run the model, in training or evaluation, within the with block")
    figures = [layer.figures() for layer in measured.values()]
    heads = max(layer.heads for layer in measured.values())
    coordinates = {
        "layer": np.arange(len(measured)),
        "head": np.arange(heads),
        "module": ("layer", list(measured)),
        "attention": ("layer", ["cross" if layer.cross else "self" for layer in measured.values()]),
        "key_heads": ("layer", [layer.key_heads for layer in measured.values()]),
    }
    found = xr.Dataset(coords=coordinates)
    found["layer"].attrs["long_name"] = "attention module, in the order of the first calls"
    found["head"].attrs["long_name"] = "head"
    found.attrs = {
        "rows": "all" if rows is None else rows,
        "not_measured": ", ".join(unmeasured),
    }
    for name, (title, unit) in FIGURES.items():
        if name not in chosen or not any(name in means for means, _, _ in figures):
            continue
        mean = _padded([means.get(name) for means, _, _ in figures], heads)
        level = [levels.get(name, np.nan) for _, _, levels in figures]
        found[name] = ("layer", "head"), mean, {"long_name": title, "units": unit}
        found[f"{name}_uniform"] = "layer", level, {"long_name": f"{title}, at logits of zero", "units": unit}
        if rows is not None and rows >= LEAST_FOR_INTERVAL and any(name in errors for _, errors, _ in figures):
            margin = NORMAL_95 * _padded([errors.get(name) for _, errors, _ in figures], heads)
            for side, edge in (("low", mean - margin), ("high", mean + margin)):
                attributes = {"long_name": f"{title}, {side} end of the 95% interval over rows", "units": unit}
                found[f"{name}_{side}"] = ("layer", "head"), edge, attributes
    found["measured_rows"] = (
        "layer",
        [layer.weight for layer in measured.values()],
        {"long_name": "rows that the measured ones stand for", "units": "1"},
    )
    return found


def _padded(values: "list[np.ndarray | None]", heads: int) -> np.ndarray:
    """Stack figures by head into (layer, head), NaN where there is none."""
    table = np.full((len(values), heads), np.nan)
    for row, value in zip(table, values, strict=True):
        if value is not None:
            row[: len(value)] = value
    return table

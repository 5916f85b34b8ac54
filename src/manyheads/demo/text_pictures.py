"""Figures and tables of `demo/text`, from its stored values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import xarray as xr

from manyheads.study import Curve, Lines, Listing
from manyheads.study.panels import Panel, Picture, spread_curve


def text_panels(predicted: xr.Dataset, cell: xr.Dataset, key_dim: int, updates: int) -> tuple[Panel, ...]:
    """Draw loss, entropy and stable rank over training, one attention pattern, a sample and the costs."""
    return (*_curves(predicted, cell, key_dim), _pattern(cell), _sample(cell), _cost(cell, updates))


def _curves(predicted: xr.Dataset, cell: xr.Dataset, key_dim: int) -> Iterator[Lines]:
    steps = cell["step"].values
    ends = (float(steps[0]), float(steps[-1]))

    def lines(title: str, label: str, curves: list[Curve], note: str, shows: tuple[str, ...] = ()) -> Lines:
        return Lines(title, "step", label, tuple(curves), note=note, shows=shows)

    losses = [spread_curve(steps, cell["validation_loss"].values, "transformer, validation")]
    losses += [
        Curve(ends, (float(level), float(level)), f"n-gram, context {context}", "predicted", context + 1)
        for context, level in zip(predicted["context"].values.tolist(), predicted["ngram"].values, strict=True)
    ]
    seeds = f"Mean over {cell.sizes['replicate']} seeds, bands from the smallest to the largest."
    note = f"Dashed: n-gram models on the same characters. {seeds}"
    yield lines("Loss on held-out text", "cross-entropy [nat/character]", losses, note, ("validation loss is lower",))
    uniform = Curve(ends, (float(predicted["uniform"]),) * 2, "uniform attention", "reference")
    note = "Mean over windows and positions; attention uniform over n characters has entropy ln n. One line a head, "
    entropies = [*_by_head(cell["entropy"], steps), uniform]
    yield lines("Attention entropy, each head", "entropy [nat]", entropies, f"{note}of the first seed.")
    ranks = [
        spread_curve(steps, cell["stable_rank"].sel(layer=layer).values, f"layer {layer}", group=int(layer))
        for layer in cell["layer"].values
    ]
    note = f"Squared Frobenius over squared spectral norm. {seeds}"
    yield lines("Stable rank of the lower MLP matrix", "stable rank", ranks, note)
    note = f"At most the key dimension, {key_dim}. One line a head, of the first seed."
    circuits = _by_head(cell["query_key_rank"], steps)
    yield lines("Stable rank of query times key, each head", "stable rank", circuits, note)


def _pattern(cell: xr.Dataset) -> Picture:
    first = cell.isel(replicate=0)
    sharpness = first["entropy"].isel(step=-1).values  # (L, H)
    layer, head = np.unravel_index(sharpness.argmin(), sharpness.shape)
    names = tuple(first["snippet"].values.tolist())
    title = f"Attention of the head of lowest entropy: layer {layer}, head {head}"
    values = tuple(tuple(map(float, row)) for row in first["pattern"].values[layer, head])
    note = "From the validation text, after training, first seed. · is a space, ¶ a line end."
    return Picture(title, "key", "query", values, "attention", names, names, note)


def _sample(cell: xr.Dataset) -> Listing:
    first = cell.isel(replicate=0)
    rows = (("prompt", str(first["prompt"].values)), ("sampled", str(first["written"].values)))
    return Listing("Sampled text", ("", "text"), rows, "Temperature 0.6, first seed. ¶ is a line end.")


def _cost(cell: xr.Dataset, updates: int) -> Listing:
    weights, step, seconds = int(cell["weights"][0]), int(cell["step_flops"][0]), float(cell["seconds"].mean())
    rows = (
        ("weights", f"{weights:,}"),
        ("matrix-multiply FLOPs of a training step", f"{step:,}"),
        ("of the whole training", f"{step * updates:.4g}"),
        ("measured seconds, recording included", f"{seconds:.1f}"),
        ("FLOPs a second", f"{step * updates / seconds:.3g}"),
    )
    note = "Forward and backward, a multiply-add counted as two; masked pairs are counted, since they are computed."
    return Listing("Costs of training", ("quantity", "value"), rows, note)


def _by_head(values: xr.DataArray, steps: np.ndarray) -> list[Curve]:
    """Draw one line a head of the first seed, coloured by layer: heads of two seeds do not correspond."""
    x, curves = tuple(map(float, steps)), []
    for layer, head in itertools.product(values["layer"].values, values["head"].values):
        y = tuple(map(float, values.sel(layer=layer, head=head).isel(replicate=0).values))
        curves.append(Curve(x, y, "" if head else f"layer {layer}", group=int(layer)))
    return curves

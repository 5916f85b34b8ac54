"""Figures and tables of `demo/text`, from its stored values."""

from __future__ import annotations

import numpy as np
import xarray as xr

from manyheads.study import Curve, Lines, Listing
from manyheads.study.panels import Panel, Picture, spread_curve


def text_panels(predicted: xr.Dataset, cell: xr.Dataset, key_dim: int, updates: int) -> tuple[Panel, ...]:
    """Draw loss, entropy and stable rank over training, one attention pattern, a sample and the costs."""
    return (*_curves(predicted, cell, key_dim), _pattern(cell), _sample(cell), _cost(cell, updates))


def _curves(predicted: xr.Dataset, cell: xr.Dataset, key_dim: int) -> tuple[Lines, ...]:
    steps = cell["step"].values
    ends = (float(steps[0]), float(steps[-1]))
    losses = [spread_curve(steps, cell["validation_loss"].values, "transformer, validation")]
    losses += [
        Curve(ends, (float(level), float(level)), f"n-gram, context {context}", "predicted", context + 1)
        for context, level in zip(predicted["context"].values.tolist(), predicted["ngram"].values, strict=True)
    ]
    uniform = float(predicted["uniform"])
    entropies = _by_head(cell["entropy"], steps)
    entropies.append(Curve(ends, (uniform, uniform), "uniform attention", "reference"))
    ranks = [
        spread_curve(steps, cell["stable_rank"].sel(layer=layer).values, f"layer {layer}", group=int(layer))
        for layer in cell["layer"].values
    ]
    seeds = f"Mean over {cell.sizes['replicate']} seeds, bands from the smallest to the largest."
    return (
        Lines(
            "Loss on held-out text",
            "step",
            "cross-entropy [nat/character]",
            tuple(losses),
            note=f"Dashed: n-gram models on the same characters. {seeds}",
            shows=("validation loss is lower",),
        ),
        Lines(
            "Attention entropy, each head",
            "step",
            "entropy [nat]",
            tuple(entropies),
            note="Mean over windows and positions; attention uniform over n characters has entropy ln n. One line "
            "a head, of the first seed.",
        ),
        Lines(
            "Stable rank of the lower MLP matrix",
            "step",
            "stable rank",
            tuple(ranks),
            note=f"Squared Frobenius over squared spectral norm. {seeds}",
        ),
        Lines(
            "Stable rank of query times key, each head",
            "step",
            "stable rank",
            tuple(_by_head(cell["query_key_rank"], steps)),
            note=f"At most the key dimension, {key_dim}. One line a head, of the first seed.",
        ),
    )


def _pattern(cell: xr.Dataset) -> Picture:
    first = cell.isel(replicate=0)
    sharpness = first["entropy"].isel(step=-1).values  # (L, H)
    layer, head = np.unravel_index(sharpness.argmin(), sharpness.shape)
    names = tuple(first["snippet"].values.tolist())
    return Picture(
        f"Attention of the head of lowest entropy: layer {layer}, head {head}",
        "key",
        "query",
        tuple(tuple(map(float, row)) for row in first["pattern"].values[layer, head]),
        value_label="attention",
        x_ticks=names,
        y_ticks=names,
        note="From the validation text, after training, first seed. · is a space, ¶ a line end.",
    )


def _sample(cell: xr.Dataset) -> Listing:
    first = cell.isel(replicate=0)
    rows = (("prompt", str(first["prompt"].values)), ("sampled", str(first["written"].values)))
    return Listing(
        "Sampled text",
        ("", "text"),
        rows,
        note="Temperature 0.6, first seed. ¶ is a line end.",
    )


def _cost(cell: xr.Dataset, updates: int) -> Listing:
    weights = int(cell["weights"][0])
    step = int(cell["step_flops"][0])
    seconds = float(cell["seconds"].mean())
    rows = (
        ("weights", f"{weights:,}"),
        ("matrix-multiply FLOPs of a training step", f"{step:,}"),
        ("of the whole training", f"{step * updates:.4g}"),
        ("measured seconds, recording included", f"{seconds:.1f}"),
        ("FLOPs a second", f"{step * updates / seconds:.3g}"),
    )
    return Listing(
        "Costs of training",
        ("quantity", "value"),
        rows,
        note="Forward and backward, a multiply-add counted as two; masked pairs are counted, since they are computed.",
    )


def _by_head(values: xr.DataArray, steps: np.ndarray) -> list[Curve]:
    """Draw one line a head of the first seed, coloured by layer: heads of two seeds do not correspond."""
    return [
        Curve(
            tuple(map(float, steps)),
            tuple(map(float, values.sel(layer=layer, head=head).isel(replicate=0).values)),
            f"layer {layer}" if head == 0 else "",
            group=int(layer),
        )
        for layer in values["layer"].values
        for head in values["head"].values
    ]

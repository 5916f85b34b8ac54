"""The pictures of `demo/text`: what its report shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from manyheads.study import Curve, Lines, Listing, Panel, Picture, spread_curve

if TYPE_CHECKING:
    from manyheads.demo.text import TextTraining


def text_panels(study: TextTraining, predicted: xr.Dataset, cell: xr.Dataset) -> tuple[Panel, ...]:
    """Return loss, entropy and stable rank over training, one pattern, what the model writes, and what it costs."""
    return (*_curves(study, predicted, cell), _pattern(cell), _sample(cell), _cost(study, cell))


def _curves(study: TextTraining, predicted: xr.Dataset, cell: xr.Dataset) -> tuple[Lines, ...]:
    steps = cell["step"].values
    ends = (float(steps[0]), float(steps[-1]))
    losses = [spread_curve(steps, cell["validation_loss"].values, "transformer, validation")]
    losses += [
        Curve(ends, (float(level), float(level)), f"counting, {context} before", "predicted", context + 1)
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
            "Loss on text it has not seen",
            "step",
            "cross-entropy [nat/character]",
            tuple(losses),
            note=f"Dashed: what counting the characters before gives on the same text. {seeds}",
        ),
        Lines(
            "Attention entropy, each head",
            "step",
            "entropy [nat]",
            tuple(entropies),
            note="How many characters a head looks at: exp(entropy). One line a head, of the first seed.",
        ),
        Lines(
            "Stable rank of the lower MLP matrix",
            "step",
            "stable rank",
            tuple(ranks),
            note="How many directions the matrix really uses: squared Frobenius over squared spectral norm.",
        ),
        Lines(
            "Stable rank of query times key, each head",
            "step",
            "stable rank",
            tuple(_by_head(cell["query_key_rank"], steps)),
            note=f"At most the key dimension, {study.key_dim}. One line a head, of the first seed.",
        ),
    )


def _pattern(cell: xr.Dataset) -> Picture:
    first = cell.isel(replicate=0)
    sharpness = first["entropy"].isel(step=-1).values  # (L, H)
    layer, head = np.unravel_index(sharpness.argmin(), sharpness.shape)
    names = tuple(first["snippet"].values.tolist())
    return Picture(
        f"Where the sharpest head looks: layer {layer}, head {head}",
        "character that is looked at",
        "character that looks",
        tuple(tuple(map(float, row)) for row in first["pattern"].values[layer, head]),
        value_label="attention",
        x_ticks=names,
        y_ticks=names,
        note="From the validation text, after training, first seed. · is a space, ¶ a line end.",
    )


def _sample(cell: xr.Dataset) -> Listing:
    first = cell.isel(replicate=0)
    rows = (("given", str(first["prompt"].values)), ("written", str(first["written"].values)))
    return Listing(
        "What it writes",
        ("", "text"),
        rows,
        note="Drawn character by character at temperature 0.6. ¶ is a line end.",
    )


def _cost(study: TextTraining, cell: xr.Dataset) -> Listing:
    weights = int(cell["weights"][0])
    step = int(cell["step_flops"][0])
    seconds = float(cell["seconds"].mean())
    rows = (
        ("weights", f"{weights:,}"),
        ("matrix-multiply FLOPs of a training step", f"{step:,}"),
        ("of the whole training", f"{step * study.steps:.4g}"),
        ("measured seconds, looking included", f"{seconds:.1f}"),
        ("FLOPs a second", f"{step * study.steps / seconds:.3g}"),
    )
    return Listing(
        "What it costs",
        ("quantity", "value"),
        rows,
        note="Exact, forward and backward; a multiply-add counts two; masked pairs are counted, as they are run.",
    )


def _by_head(values: xr.DataArray, steps: np.ndarray) -> list[Curve]:
    """Return one line a head of the first seed, coloured and named by layer: heads of two seeds are not the same."""
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

"""Figures and tables of `joma/real-text`: small multiples by depth and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from manyheads.curves.drop_and_rise import DropAndRise
from manyheads.curves.summaries import EARLY, RunSummary
from manyheads.errors import UsageError
from manyheads.statistics import mean_interval, spearman
from manyheads.study import Curve, Lines, Listing
from manyheads.study.panels import Multiples, Panel, Picture, spread_curve

BANDS = "Lines are means over seeds, bands range from the smallest to the largest."


def real_text_panels(predicted: xr.Dataset, trained: xr.Dataset, found: RunSummary) -> tuple[Panel, ...]:
    """Draw entropy and rank by depth and learning rate, losses, rebounds against losses, and the tables."""
    uniform, random = float(predicted["uniform"]), float(predicted["random_rank"])
    return (
        _multiples(
            trained["entropy"].mean("head"),
            found,
            ("Attention entropy by layer, for every depth and learning rate", "entropy [nat]"),
            ("uniform attention", uniform),
            f"Colour: layer, 0 at the bottom; mean over heads. {BANDS} Dotted: uniform attention, {uniform:.2f} nat. "
            "In each plot: the lowest validation loss [nat/character], ★ at the best learning rate.",
        ),
        _multiples(
            trained["stable_rank"],
            found,
            ("Stable rank of the lower MLP matrix by layer", "stable rank"),
            ("random matrix", random),
            f"As above. Dotted: a random matrix of the same shape, {random:.1f}.",
        ),
        _losses(found),
        _rebounds(found),
        _final(found, uniform),
        _heads(trained, found, uniform),
        _correlations(found),
        _drop_and_rise(found),
    )


def _multiples(
    values: xr.DataArray, found: RunSummary, words: tuple[str, str], level: tuple[str, float], note: str
) -> Multiples:
    steps = values["step"].values
    span = (float(steps[0]), float(steps[-1]))
    depths, rates = np.unique(found.depth), np.unique(found.learning_rate)

    def plot(depth: int, rate: float) -> tuple[Curve, ...]:
        cell = values.isel(cell=found.position(depth, rate)).transpose("layer", "replicate", "step").values
        layers = [spread_curve(steps, cell[layer], f"layer {layer}", group=layer) for layer in range(depth)]
        return (*layers, Curve(span, (level[1], level[1]), level[0], "reference"))

    def caption(depth: int, rate: float) -> str:
        loss = found.best[found.position(depth, rate)].mean()
        return f"{'★ ' if found.best_learning_rate[depth] == rate else ''}{loss:.2f}"

    return Multiples(
        words[0],
        "step",
        words[1],
        curves=_table(plot, depths, rates),
        row_labels=tuple(_layers(depth) for depth in depths),
        column_labels=tuple(f"learning rate {rate:g}" for rate in rates),
        captions=_table(caption, depths, rates),
        note=note,
    )


def _losses(found: RunSummary) -> Lines:
    rates = np.unique(found.learning_rate)
    curves = [
        spread_curve(rates, found.best[found.depth == depth].T, _layers(depth), group=group)
        for group, depth in enumerate(np.unique(found.depth))
    ]
    return Lines(
        "Lowest validation loss",
        "learning rate",
        "cross-entropy [nat/character]",
        tuple(curves),
        log_x=True,
        note=BANDS,
    )


def _rebounds(found: RunSummary) -> Lines:
    rebound = found.rise.mean(-1)  # (C,)
    curves = [
        Curve(
            tuple(rebound[found.learning_rate == rate].tolist()),
            tuple(found.best[found.learning_rate == rate].mean(-1).tolist()),
            f"learning rate {rate:g}",
            group=group,
        )
        for group, rate in enumerate(np.unique(found.learning_rate))
    ]
    return Lines(
        "Rebound and loss",
        "rebound of the entropy, mean over layers [nat]",
        "lowest validation loss [nat/character]",
        tuple(curves),
        note="One point per depth, joined from shallow to deep within a learning rate; means over seeds.",
        shows=("The rebound of attention entropy",),
    )


def _final(found: RunSummary, uniform: float) -> Picture:
    rates = np.unique(found.learning_rate)
    rows, names = [], []
    for depth in np.unique(found.depth):
        for layer in reversed(range(depth)):
            level = [found.entropies[found.position(depth, rate), :, layer, -1].mean() / uniform for rate in rates]
            rows.append(tuple(map(float, level)))
            names.append(f"{_layers(depth)}: {layer}")
    return Picture(
        "Final attention entropy",
        "learning rate",
        "layer",
        tuple(rows),
        value_label="final entropy / uniform",
        x_ticks=tuple(f"{rate:g}" for rate in rates),
        y_ticks=tuple(names),
        note="Each layer of each network, mean over heads and seeds; 0 is one-hot attention.",
        shows=("collapses to one-hot",),
    )


def _heads(trained: xr.Dataset, found: RunSummary, uniform: float) -> Panel:
    """Draw the heads of lowest and highest entropy of each layer: heads of two seeds do not correspond."""
    depth = int(found.depth.max())
    rate = found.best_learning_rate[depth]
    values = trained["entropy"].isel(cell=found.position(depth, rate)).transpose("layer", "head", "replicate", "step")
    order = np.sort(values.values, axis=1)  # (L, H, R, S), at each moment
    steps = values["step"].values
    span = (float(steps[0]), float(steps[-1]))
    names = ("lowest entropy", "highest entropy") if order.shape[1] > 1 else ("single head",)
    level = Curve(span, (uniform, uniform), "uniform attention", "reference")
    plots = [
        (*(spread_curve(steps, order[layer, end], f"layer {layer}", group=layer) for layer in range(depth)), level)
        for end in (0, -1)[: len(names)]
    ]
    return Multiples(
        f"By head: {_layers(depth)}, learning rate {rate:g}",
        "step",
        "entropy [nat]",
        (tuple(plots),),
        row_labels=("",),
        column_labels=names,
        note=f"Heads of a layer with the lowest and with the highest entropy at each step. {BANDS}",
    )


def _correlations(found: RunSummary) -> Listing:
    rebound = found.rise  # (C, R)
    rows = [
        ("all depths and learning rates", "mean over layers", *_over(found.pooled)),
        ("all depths and learning rates", "top layer", *_over(found.pooled_top)),
        ("within a learning rate", "mean over layers", *_over(found.within)),
        ("within a learning rate", "top layer", *_over(found.within_top)),
        ("within depth and learning rate, over seeds", "mean over layers", *_over(found.within_cells, "each cell")),
    ]
    for rate in np.unique(found.learning_rate):
        chosen = found.learning_rate == rate
        rows.append(
            (f"learning rate {rate:g}, over depths and seeds", "mean over layers", *_pairs(rebound, found.best, chosen))
        )
    for share in EARLY:
        when = f"after {share:.0%} of the run"
        rows.append((f"rebound {when}", "mean over layers", *_over(found.early_rise(share))))
        rows.append((f"validation loss {when}", "", *_over(found.early_loss(share))))
    return Listing(
        "Rank correlation with the lowest validation loss",
        ("of", "layers", "Spearman", "99% interval", "pairs"),
        tuple(rows),
        note="Of the rebound, unless stated. Negative: larger rebound, lower loss. Per seed over its cells or per "
        "cell over its seeds with Student's interval where the last column says so; otherwise over all "
        "pairs as if independent.",
    )


def _over(samples: np.ndarray, pairs: str = "each seed") -> tuple[str, str, str]:
    interval = mean_interval(samples)
    return f"{samples.mean():+.2f}", f"{interval.low:+.2f} … {interval.high:+.2f}", pairs


def _pairs(rebound: np.ndarray, best: np.ndarray, chosen: np.ndarray) -> tuple[str, str, str]:
    try:
        result = spearman(rebound[chosen].ravel(), best[chosen].ravel())
    except UsageError:  # too few pairs, or constant values
        return "none", "", str(rebound[chosen].size)
    return (
        f"{result.value:+.2f}",
        f"{result.interval.low:+.2f} … {result.interval.high:+.2f}",
        str(rebound[chosen].size),
    )


def _drop_and_rise(found: RunSummary) -> Listing:
    rows = []
    for depth in np.unique(found.depth):
        for layer in range(depth):
            where = found.position(depth, found.best_learning_rate[depth])
            cells = [_mean_and_range(measured, where, layer) for measured in (found.entropy, found.rank)]
            rows.append((_layers(depth), str(layer), f"{found.best_learning_rate[depth]:g}", *cells[0], *cells[1]))
    return Listing(
        "Drop and rebound at the best learning rate, by layer",
        (
            "network",
            "layer",
            "learning rate",
            "entropy drop [nat]",
            "rebound [nat]",
            "rank drop [level]",
            "rebound [level]",
        ),
        tuple(rows),
        note="Each run by itself, mean and range over seeds; noise alone makes both positive. Ranks over the "
        "random level.",
    )


def _mean_and_range(measured: DropAndRise, cell: int, layer: int) -> tuple[str, str]:
    both = (measured.drop[cell, :, layer], measured.rise[cell, :, layer])
    drop, rebound = (f"{values.mean():.2f} ({values.min():.2f} … {values.max():.2f})" for values in both)
    return drop, rebound


def _table(make: Callable[[int, float], Any], depths: np.ndarray, rates: np.ndarray) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(make(int(depth), float(rate)) for rate in rates) for depth in depths)


def _layers(depth: int) -> str:
    return f"{depth} layer{'s' if depth > 1 else ''}"

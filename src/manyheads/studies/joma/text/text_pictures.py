"""Figures and tables of `joma/real-text`: small multiples by depth and learning rate."""

from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.curves.summaries import EARLY, RunSummary, changes
from manyheads.errors import UsageError
from manyheads.statistics import mean_interval
from manyheads.statistics.rank_correlation import spearman
from manyheads.study.panels import Multiples, Picture, spread_curve

BANDS = "Lines are means over seeds, bands range from the smallest to the largest."


def pictures(theory: st.Data, trained: st.Data, runs: RunSummary) -> st.Panels:
    """Draw entropy and rank by depth and learning rate, losses, rebounds against losses, and the tables."""
    uniform, random = float(theory["uniform"]), float(theory["random_rank"])
    best, rates = runs.best, runs.best["learning_rate"].values.tolist()
    yield _multiples(
        trained["entropy"].mean("head"),
        runs,
        ("Attention entropy by layer, for every depth and learning rate", "entropy [nat]"),
        ("uniform attention", uniform),
        f"Colour: layer, 0 at the bottom; mean over heads. {BANDS} Dotted: uniform attention, {uniform:.2f} nat. "
        "In each plot: the lowest validation loss [nat/character], ★ at the best learning rate.",
    )
    yield _multiples(
        trained["stable_rank"],
        runs,
        ("Stable rank of the lower MLP matrix by layer", "stable rank"),
        ("random matrix", random),
        f"As above. Dotted: a random matrix of the same shape, {random:.1f}.",
    )
    labels = "Lowest validation loss", "learning_rate", "cross-entropy [nat/character]"
    losses = {_layers(depth): best.sel(depth=depth) for depth in runs.best_rates}
    yield st.lines(*labels, losses, log="x", x_label="learning rate", note=BANDS)
    points = [data.mean("replicate").values.T.tolist() for data in (runs.rise.mean("layer"), best)]  # (rate, depth)
    yield st.Lines(
        "Rebound and loss",
        "rebound of the entropy, mean over layers [nat]",
        "lowest validation loss [nat/character]",
        tuple(
            st.Curve(tuple(x), tuple(y), f"learning rate {rate:g}", group=group)
            for group, (rate, x, y) in enumerate(zip(rates, *points, strict=True))
        ),
        note="One point per depth, joined from shallow to deep within a learning rate; means over seeds.",
        shows=("The rebound of attention entropy",),
    )
    layers = [(depth, layer) for depth in runs.best_rates for layer in reversed(range(depth))]
    final = runs.entropy.isel(step=-1).mean("replicate") / uniform
    yield Picture(
        "Final attention entropy",
        "learning rate",
        "layer",
        tuple(tuple(final.sel(depth=depth).isel(layer=layer).values.tolist()) for depth, layer in layers),
        value_label="final entropy / uniform",
        x_ticks=tuple(f"{rate:g}" for rate in rates),
        y_ticks=tuple(f"{_layers(depth)}: {layer}" for depth, layer in layers),
        note="Each layer of each network, mean over heads and seeds; 0 is one-hot attention.",
        shows=("collapses to one-hot",),
    )
    yield _heads(trained, runs, uniform)
    yield _correlations(runs)
    yield _drop_and_rise(runs)


def _multiples(
    values: xr.DataArray, runs: RunSummary, words: tuple[str, str], level: tuple[str, float], note: str
) -> Multiples:
    steps, best = values["step"].values, runs.best_rates
    rates, span = runs.best["learning_rate"].values.tolist(), (float(steps[0]), float(steps[-1]))
    reference = st.Curve(span, (level[1], level[1]), level[0], "reference")

    def plot(depth: int, rate: float) -> tuple[st.Curve, ...]:
        cell = values.sel(depth=depth, learning_rate=rate).transpose("layer", "replicate", "step").values
        return (*(spread_curve(steps, cell[at], f"layer {at}", group=at) for at in range(depth)), reference)

    def caption(depth: int, rate: float) -> str:
        loss = float(runs.best.sel(depth=depth, learning_rate=rate).mean())
        return f"{'★ ' if best[depth] == rate else ''}{loss:.2f}"

    return Multiples(
        words[0],
        "step",
        words[1],
        curves=tuple(tuple(plot(depth, rate) for rate in rates) for depth in best),
        row_labels=tuple(map(_layers, best)),
        column_labels=tuple(f"learning rate {rate:g}" for rate in rates),
        captions=tuple(tuple(caption(depth, rate) for rate in rates) for depth in best),
        note=note,
    )


def _heads(trained: st.Data, runs: RunSummary, uniform: float) -> Multiples:
    depth, rate = max(runs.best_rates.items())
    values = trained["entropy"].sel(depth=depth, learning_rate=rate).transpose("layer", "head", "replicate", "step")
    order, steps = np.sort(values.values, axis=1), values["step"].values  # (L, H, R, S), at each moment
    level = st.Curve((float(steps[0]), float(steps[-1])), (uniform, uniform), "uniform attention", "reference")
    names = ("lowest entropy", "highest entropy") if order.shape[1] > 1 else ("single head",)
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


def _correlations(runs: RunSummary) -> st.Listing:
    mean, top = runs.rise.mean("layer"), runs.top_rise
    rows = []

    def row(of: str, layers: str, value: Any, interval: Any, pairs: str) -> None:
        bounds = f"{interval.low:+.2f} … {interval.high:+.2f}" if interval else ""
        found = f"{value:+.2f}" if interval else "none"
        rows.append({"of": of, "layers": layers, "Spearman": found, "99% interval": bounds, "pairs": pairs})

    def over(of: str, layers: str, samples: np.ndarray, pairs: str = "each seed") -> None:
        row(of, layers, samples.mean(), mean_interval(samples), pairs)

    for of, within in (("all depths and learning rates", False), ("within a learning rate", True)):
        for layers, rise in (("mean over layers", mean), ("top layer", top)):
            over(of, layers, runs.correlation(rise, within=within))
    over("within depth and learning rate, over seeds", "mean over layers", runs.between_seeds(mean), "each cell")
    for rate in mean["learning_rate"].values.tolist():
        pair = [each.sel(learning_rate=rate).values.ravel() for each in (mean, runs.best)]
        try:
            found = spearman(*pair)
            value, interval = found.value, found.interval
        except UsageError:  # too few pairs, or constant values
            value, interval = None, None
        row(f"learning rate {rate:g}, over depths and seeds", "mean over layers", value, interval, str(pair[0].size))
    for share in EARLY:
        over(f"rebound after {share:.0%} of the run", "mean over layers", runs.early_rise(share))
        over(f"validation loss after {share:.0%} of the run", "", runs.early_loss(share))
    return st.table(
        "Rank correlation with the lowest validation loss",
        rows,
        "Of the rebound, unless stated. Negative: larger rebound, lower loss. Per seed over its cells or per "
        "cell over its seeds with Student's interval where the last column says so; otherwise over all "
        "pairs as if independent.",
    )


def _drop_and_rise(runs: RunSummary) -> st.Listing:
    measured = {"entropy": (changes(runs.entropy), "nat"), "rank": (changes(runs.rank), "level")}

    def row(depth: int, rate: float, layer: int) -> dict[str, str]:
        found = {"network": _layers(depth), "layer": str(layer), "learning rate": f"{rate:g}"}
        for name, (parts, unit) in measured.items():
            for part, words in (("drop", "drop"), ("rise", "rebound")):
                values = parts[part].sel(depth=depth, learning_rate=rate).isel(layer=layer).values
                found[f"{name} {words} [{unit}]"] = f"{values.mean():.2f} ({values.min():.2f} … {values.max():.2f})"
        return found

    return st.table(
        "Drop and rebound at the best learning rate, by layer",
        [row(depth, rate, layer) for depth, rate in runs.best_rates.items() for layer in range(depth)],
        "Each run by itself, mean and range over seeds; noise alone makes both positive. Ranks over the random level.",
    )


def _layers(depth: int) -> str:
    return f"{depth} layer{'s' if depth > 1 else ''}"

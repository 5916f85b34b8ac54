"""`joma/real-text`: attention entropy and stable rank of transformers trained on text (figures 6 and 8).

The grid is that of the figures, depths by learning rates. Added are the levels of uniform attention and of a random
matrix, several seeds, the same statistics for every run, and a comparison with the validation loss. Tokens are
characters and blocks are pre-norm; in the paper they are words and post-norm, so shapes can be compared, not numbers.
"""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

import manyheads.study as st
from manyheads.curves.summaries import EARLY, RunSummary, changes
from manyheads.data.characters import read_characters
from manyheads.errors import UsageError
from manyheads.statistics import mean_interval
from manyheads.statistics.rank_correlation import spearman
from manyheads.study.panels import Multiples, Picture, spread_curve
from manyheads.theory.joma.text import record
from manyheads.theory.joma.theorems.rebound import REBOUND
from manyheads.theory.papers import TIAN
from manyheads.transformer import Shape, Transformer, standard_scaling
from manyheads.transformer.weights import draw_weights

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


ADAM = optax.scale_by_adam()  # one object: training compiles once per optimizer
HIGH, NEGLIGIBLE = 0.7, 0.3  # usual thresholds of a high and of a negligible correlation
COLLAPSED = 0.02  # nat; the largest weight of such a row is above 0.99
ROUNDING = 1e-5  # of an entropy or a relative stable rank in single precision


class RealText(st.Study):
    """Attention entropy and stable rank of the MLP, by layer, over training on text."""

    name = "joma/real-text"
    claim = "Attention entropy of the bottom layer drops and rebounds in training on text"
    source = TIAN.at("figures 6 and 8, and the authors' reply to reviewers; the statistics are this study's own")
    revision = 3  # correlations: intervals end at -1 and 1
    grid = {"depth": "depths", "learning_rate": "learning_rates"}

    text: Path | None = st.setting(None, "a UTF-8 file; by default Python's own documentation")
    depths: tuple[int, ...] = st.sweep((1, 2, 4), "numbers of layers", small=(1, 2), full=(1, 2, 3, 5, 10))
    learning_rates: tuple[float, ...] = st.sweep(
        (1e-3, 3e-3, 1e-2, 1e-1),
        "constant learning rates of Adam",
        above=0,
        small=(1e-3, 0.01, 0.1, 0.4),
        full=(1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3, 1e-2),
    )
    key_dim: int = st.setting(16, "key dimension of a head", small=4, full=200)
    heads: int = st.setting(4, "heads of a layer", full=1)
    length: int = st.setting(64, "characters of a window", least=2, small=8, full=35)
    batch: int = st.setting(8, "windows of a step", least=1, small=2, full=20)
    steps: int = st.setting(300, "updates", least="snapshots", multiple="snapshots", small=6, full=59_000)
    snapshots: int = st.setting(20, "how often the statistics are recorded", least=2, small=3, full=59)

    def check(self) -> None:
        Shape(self.key_dim, self.heads, self.depths[0])

    def predict(self, key: st.Key) -> st.Data:
        """Return the entropy of uniform causal attention and the stable rank of a random matrix of the MLP's shape."""
        return record.reference_levels(self.length, self.key_dim * self.heads)

    def train(self, key: st.Key, depth: int, learning_rate: float) -> st.Data:
        vocabulary, text = read_characters(self.text)
        for_model, for_batches = jax.random.split(key)
        config = record.character_config(Shape(self.key_dim, self.heads, depth), len(vocabulary), self.length)
        scaling = standard_scaling(config.shape, config.inputs)
        model = Transformer(_draw(config, scaling, for_model), scaling, config)
        every = self.steps // self.snapshots
        adam = adam_at(learning_rate)
        done = record.train_and_record(model, text, self.batch, adam, self.steps, for_batches, every=every)
        return record.recorded_dataset(done, ("validation_loss", "entropy", "stable_rank"))

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        runs = RunSummary(trained, float(theory["random_rank"]))
        # Outcomes are known for the default text and size alone.
        holds, refuted = ("holds", "refuted") if self == type(self)() else (None, None)
        yield from self._correlations(runs, holds, refuted)
        level = "of the random level"
        bottom, top = runs.at_best(runs.entropy, 0), runs.at_best(runs.entropy, -1, least=2)
        rank = runs.at_best(runs.rank, None)
        for words, figure, expected, unit in (
            ("the attention entropy of the bottom layer drops", bottom["drop"], holds, "nat"),
            ("the attention entropy of the bottom layer rebounds", bottom["rise"], holds, "nat"),
            ("the attention entropy of the top layer drops", top["drop"], holds, "nat"),
            ("the attention entropy of the top layer rebounds", top["rise"], refuted, "nat"),
            ("the stable rank of the lower MLP matrix drops", rank["drop"], holds, level),
            ("the stable rank of the lower MLP matrix rebounds", rank["rise"], refuted, level),
        ):
            yield st.Claim(
                f"At the best learning rate {words}",
                figure,
                st.above(REBOUND),
                f"an inequality; {REBOUND:g} {unit} is the smallest change that counts. Minimum and rise are located "
                "on the other seeds, so that noise alone gives zero",
                f"drop or rise ({unit})",
                expected,
                resolution=ROUNDING,
            )
        yield st.Claim(
            "At the highest learning rate the attention of the bottom layer collapses to one-hot",
            runs.entropy.isel(layer=0, step=-1, learning_rate=-1).mean("depth"),
            st.near(0, (np.inf, COLLAPSED)),
            f"a row of entropy {COLLAPSED} nat has a weight above 0.99, and less than a hundredth of the gradient "
            "passes; mean over depths",
            "attention entropy (nat)",
            holds,
            resolution=ROUNDING,
        )

    def _correlations(self, runs: RunSummary, holds: str | None, refuted: str | None) -> st.Claims:
        rise, middle = runs.rise.mean("layer"), EARLY[len(EARLY) // 2]
        # The change of a coefficient when two neighbours of the order are exchanged, over all cells and within one
        # learning rate.
        depths, rates = len(self.depths), len(self.learning_rates)
        grain, grain_within = _grain(depths * rates), _grain(depths) / rates
        correlation: dict[str, Any] = {"quantity": "rank correlation", "bounds": (-1.0, 1.0)}
        high, options = st.near(-1, (np.inf, 1 - HIGH)), correlation | {"expected": refuted}
        text = "rebound of attention entropy is highly correlated with low validation loss"
        basis = f"rank correlation over depths and learning rates of a seed; from {HIGH} on it is called high"
        yield st.Claim(f"The {text}", runs.correlation(rise), high, basis, resolution=grain, **options)
        text, figure = f"Within a learning rate the {text}", runs.correlation(rise, within=True)
        basis = "the same with ranks within each learning rate, so that its choice does not contribute"
        yield st.Claim(text, figure, high, basis, resolution=grain_within, **options)
        between = runs.between_seeds(rise)
        widened = mean_interval(between).widened(_grain(rise.sizes["replicate"]) / len(between))
        text = "Between seeds of one depth and learning rate the rebound is uncorrelated with the validation loss"
        basis = f"correlations up to {NEGLIGIBLE} are called negligible; mean over cells"
        yield st.Claim(text, (between.mean(), widened), st.near(0, NEGLIGIBLE), basis, expected=holds, **correlation)
        text = f"After {middle:.0%} of a run the validation loss ranks the final losses better than the rebound does"
        figure = np.abs(runs.early_loss(middle)) - np.abs(runs.early_rise(middle))
        region = st.near(1, (1.0, np.inf))
        basis = "an inequality between two rank correlations of the same runs, paired by seed"
        quantity = "difference of rank correlations"
        yield st.Claim(text, figure, region, basis, quantity, holds, bounds=(-2.0, 2.0), resolution=2 * grain)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield from pictures(theory, trained, RunSummary(trained, float(theory["random_rank"])))

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included, which differs between releases of Python.

        Raises
        ------
        UsageError
            The text cannot be read, or is too short for the windows.
        """
        return record.digest_text(self.text, self.length)

    def flops(self, cell: st.Cell) -> int:
        shape = Shape(self.key_dim, self.heads, int(cell["depth"]))
        return self.steps * record.step_flops(shape, len(read_characters(self.text)[0]), self.length, self.batch)


_draw = eqx.filter_jit(draw_weights)  # one program instead of one per array


def adam_at(learning_rate: float) -> optax.GradientTransformation:
    """Build Adam with its learning rate as data, so that one compiled program serves all learning rates."""
    # float32 by name: under 64-bit types a learning rate in double precision would promote the weights.
    return optax.GradientTransformation(ADAM.init, jax.tree_util.Partial(_adam_update, jnp.float32(learning_rate)))


def _adam_update(learning_rate: jax.Array, gradient: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
    step, state = ADAM.update(gradient, state, weights)
    return jax.tree.map(lambda leaf: -learning_rate * leaf, step), state


def _grain(count: int) -> float:
    """Return the change of Spearman's coefficient of `count` pairs when two neighbours are exchanged."""
    return 12 / (count**3 - count) if count > 1 else 2.0

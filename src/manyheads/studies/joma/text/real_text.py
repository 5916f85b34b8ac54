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

import manyheads.study as st
from manyheads.curves.summaries import EARLY, RunSummary
from manyheads.data.characters import read_characters
from manyheads.statistics import mean_interval
from manyheads.studies.joma.text.text_pictures import pictures
from manyheads.theory.joma.text.record import (
    character_config,
    digest_text,
    recorded_dataset,
    reference_levels,
    step_flops,
    train_and_record,
)
from manyheads.theory.joma.theorems.rebound import REBOUND
from manyheads.theory.papers import TIAN
from manyheads.transformer import Shape, Transformer, standard_scaling
from manyheads.transformer.weights import draw_weights

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
        return reference_levels(self.length, self.key_dim * self.heads)

    def train(self, key: st.Key, depth: int, learning_rate: float) -> st.Data:
        vocabulary, text = read_characters(self.text)
        for_model, for_batches = jax.random.split(key)
        config = character_config(Shape(self.key_dim, self.heads, depth), len(vocabulary), self.length)
        scaling = standard_scaling(config.shape, config.inputs)
        model = Transformer(_draw(config, scaling, for_model), scaling, config)
        every = self.steps // self.snapshots
        adam = adam_at(learning_rate)
        done = train_and_record(model, text, self.batch, adam, self.steps, for_batches, every=every)
        return recorded_dataset(done, ("validation_loss", "entropy", "stable_rank"))

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
        return digest_text(self.text, self.length)

    def flops(self, cell: st.Cell) -> int:
        shape = Shape(self.key_dim, self.heads, int(cell["depth"]))
        return self.steps * step_flops(shape, len(read_characters(self.text)[0]), self.length, self.batch)


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

"""`joma/real-text`: attention entropy and stable rank of transformers trained on text (figures 6 and 8).

The grid is that of the figures, depths by learning rates. Added are the levels of uniform attention and of a random
matrix, several seeds, the same statistics for every run, and a comparison with the validation loss. Tokens are
characters and blocks are pre-norm; in the paper they are words and post-norm, so shapes can be compared, not numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.curves.summaries import EARLY, RunSummary
from manyheads.data import read_characters
from manyheads.errors import UsageError
from manyheads.statistics import mean_interval
from manyheads.studies.joma.text.text_pictures import real_text_panels
from manyheads.study import Cell, Claim, Source, Study, Verdict, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.text.record import recorded_dataset, reference_levels, train_and_record
from manyheads.theory.joma.text.transformers import character_config, digest_text, step_flops
from manyheads.theory.joma.theorems.rebound import REBOUND
from manyheads.theory.papers import TIAN
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.transformer import Transformer
from manyheads.transformer.weights import draw_weights

ADAM = optax.scale_by_adam()  # one object: training compiles once per optimizer
HIGH, NEGLIGIBLE = 0.7, 0.3  # usual thresholds of a high and of a negligible correlation
COLLAPSED = 0.02  # nat; the largest weight of such a row is above 0.99
ROUNDING = 1e-5  # of an entropy or a relative stable rank in single precision


@dataclass(frozen=True)
class RealText(Study):
    """Attention entropy and stable rank of the MLP, by layer, over training on text.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation, which every installation has.
    depths, learning_rates
        Numbers of layers, and constant learning rates of Adam: one cell each.
    key_dim, heads
        Shape of a layer.
    length, batch
        Characters of a window, and windows of a step.
    steps
        Updates.
    snapshots
        How often the statistics are recorded.
    """

    name: ClassVar[str] = "joma/real-text"
    claim: ClassVar[str] = "Attention entropy of the bottom layer drops and rebounds in training on text"
    source: ClassVar[Source] = replace(
        TIAN, locus="figures 6 and 8, and the authors' reply to reviewers; the statistics are this study's own"
    )
    revision: ClassVar[int] = 3  # correlations: intervals end at -1 and 1

    text: Path | None = None
    depths: tuple[int, ...] = (1, 2, 4)
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 1e-1)
    key_dim: int = 16
    heads: int = 4
    length: int = 64
    batch: int = 8
    steps: int = 300
    snapshots: int = 20

    def __post_init__(self) -> None:
        for name in ("depths", "learning_rates"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or len(values) < 2:
                raise UsageError(f"{name}={values}: expected two or more, in rising order")
        Shape(self.key_dim, self.heads, self.depths[0])
        if not self.learning_rates[0] > 0:
            raise UsageError(f"learning_rates={self.learning_rates}: expected positive numbers")
        for name, least in (("length", 2), ("batch", 1), ("snapshots", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: expected {least} or more")
        if self.steps % self.snapshots or self.steps < self.snapshots:
            raise UsageError(f"steps={self.steps}: expected a multiple of snapshots={self.snapshots}")

    @classmethod
    def full(cls) -> RealText:
        """Return the study with the grid, width, windows and updates of the paper, for three seeds."""
        return cls(
            depths=(1, 2, 3, 5, 10),
            learning_rates=(1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3, 1e-2),
            key_dim=200,
            heads=1,
            length=35,
            batch=20,
            steps=59_000,
            snapshots=59,
        )

    @classmethod
    def small(cls) -> RealText:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            depths=(1, 2), learning_rates=(1e-3, 0.01, 0.1, 0.4), key_dim=4, length=8, batch=2, steps=6, snapshots=3
        )

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included, which differs between releases of Python.

        Raises
        ------
        UsageError
            The text cannot be read, or is too short for the windows.
        """
        return digest_text(self.text, self.length)

    def cells(self) -> tuple[Cell, ...]:
        """Return every depth at every learning rate."""
        return grid(depth=self.depths, learning_rate=self.learning_rates)

    def flops(self, cell: Cell) -> int:
        """Return the matrix-multiply FLOPs of all updates of one run."""
        shape = Shape(self.key_dim, self.heads, int(cell["depth"]))
        return self.steps * step_flops(shape, len(read_characters(self.text)[0]), self.length, self.batch)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the entropy of uniform causal attention and the stable rank of a random matrix of the MLP's shape."""
        return reference_levels(self.length, self.key_dim * self.heads)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train once at a constant learning rate, and record the statistics at equal distances."""
        vocabulary, text = read_characters(self.text)
        for_model, for_batches = jax.random.split(key)
        shape = Shape(self.key_dim, self.heads, int(cell["depth"]))
        config = character_config(shape, len(vocabulary), self.length)
        scaling = standard_scaling(config.shape, config.inputs)
        model = Transformer(_draw(config, scaling, for_model), scaling, config)
        done = train_and_record(
            model,
            text,
            self.batch,
            adam_at(float(cell["learning_rate"])),
            self.steps,
            for_batches,
            every=self.steps // self.snapshots,
        )
        return recorded_dataset(done, ("validation_loss", "entropy", "stable_rank"))

    def claims(self) -> tuple[Claim, ...]:
        """Test the statement of the paper on rebound and loss, and drop and rebound at the best learning rate."""
        return (*self._correlations(), *_drop_and_rebound(), _collapse())

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Decide the claims; outcomes are known for the default text and size alone, not for the size of the paper."""
        verdicts = super().compare(predicted, trained)
        return verdicts if self == RealText() else tuple(replace(each, expected=None) for each in verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropy and stable rank by layer for every depth and learning rate, rebound against loss, and tables."""
        return real_text_panels(predicted, trained, _summary(predicted, trained))

    def _correlations(self) -> tuple[Claim, ...]:
        middle = EARLY[len(EARLY) // 2]
        # The change of a coefficient when two neighbours of the order are exchanged, over all cells and within one
        # learning rate.
        depths, rates = len(self.depths), len(self.learning_rates)
        grain, grain_within = _grain(depths * rates), _grain(depths) / rates

        def early(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = _summary(predicted, trained)
            return np.abs(found.early_loss(middle)) - np.abs(found.early_rise(middle))

        def between_seeds(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            values = _summary(predicted, trained).within_cells  # (C,)
            grain = _grain(trained.sizes["replicate"]) / len(values)
            return values.mean(), mean_interval(values).widened(grain)

        return (
            Claim(
                "The rebound of attention entropy is highly correlated with low validation loss",
                _statistic(lambda found: found.pooled),
                quantity="rank correlation",
                bounds=(-1.0, 1.0),
                target=-1.0,
                tolerance=(float("inf"), 1 - HIGH),
                expected="refuted",
                resolution=grain,
                basis=f"rank correlation over depths and learning rates of a seed; from {HIGH} on it is called high",
            ),
            Claim(
                "Within a learning rate the rebound of attention entropy is highly correlated with low validation loss",
                _statistic(lambda found: found.within),
                quantity="rank correlation",
                bounds=(-1.0, 1.0),
                target=-1.0,
                tolerance=(float("inf"), 1 - HIGH),
                expected="refuted",
                resolution=grain_within,
                basis="the same with ranks within each learning rate, so that its choice does not contribute",
            ),
            Claim(
                "Between seeds of one depth and learning rate the rebound is uncorrelated with the validation loss",
                between_seeds,
                quantity="rank correlation",
                bounds=(-1.0, 1.0),
                target=0.0,
                tolerance=NEGLIGIBLE,
                basis=f"correlations up to {NEGLIGIBLE} are called negligible; mean over cells",
            ),
            Claim(
                f"After {middle:.0%} of a run the validation loss ranks the final losses better than the rebound does",
                early,
                quantity="difference of rank correlations",
                bounds=(-2.0, 2.0),
                target=1.0,
                tolerance=(1.0, float("inf")),
                resolution=2 * grain,
                basis="an inequality between two rank correlations of the same runs, paired by seed",
            ),
        )


_draw = eqx.filter_jit(draw_weights)  # one program instead of one per array


def adam_at(learning_rate: float) -> optax.GradientTransformation:
    """Build Adam with its learning rate as data, so that one compiled program serves all learning rates."""
    # float32 by name: under 64-bit types a learning rate in double precision would promote the weights.
    return optax.GradientTransformation(ADAM.init, jax.tree_util.Partial(_adam_update, jnp.float32(learning_rate)))


def _adam_update(learning_rate: jax.Array, gradient: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
    step, state = ADAM.update(gradient, state, weights)
    return jax.tree.map(lambda leaf: -learning_rate * leaf, step), state


def _summary(predicted: xr.Dataset, trained: xr.Dataset) -> RunSummary:
    return RunSummary(trained, float(predicted["random_rank"]))


def _statistic(of: Callable[[RunSummary], Any]) -> Measure:
    return lambda predicted, trained: of(_summary(predicted, trained))


def _grain(count: int) -> float:
    """Return the change of Spearman's coefficient of `count` pairs when two neighbours are exchanged."""
    return 12 / (count**3 - count) if count > 1 else 2.0


def _drop_and_rebound() -> tuple[Claim, ...]:
    def claim(words: str, of: Callable[[RunSummary], Any], expected: Expected, unit: str) -> Claim:
        return Claim(
            f"At the best learning rate {words}",
            _statistic(of),
            quantity=f"drop or rise ({unit})",
            target=REBOUND,
            tolerance=(0.0, float("inf")),
            expected=expected,
            resolution=ROUNDING,
            basis=f"an inequality; {REBOUND:g} {unit} is the smallest change that counts. Minimum and rise are located "
            "on the other seeds, so that noise alone gives zero",
        )

    level = "of the random level"
    return (
        claim("the attention entropy of the bottom layer drops", lambda found: found.bottom.drop, "holds", "nat"),
        claim("the attention entropy of the bottom layer rebounds", lambda found: found.bottom.rise, "holds", "nat"),
        claim("the attention entropy of the top layer drops", lambda found: found.top.drop, "holds", "nat"),
        claim("the attention entropy of the top layer rebounds", lambda found: found.top.rise, "refuted", "nat"),
        claim("the stable rank of the lower MLP matrix drops", lambda found: found.mean_rank.drop, "holds", level),
        claim("the stable rank of the lower MLP matrix rebounds", lambda found: found.mean_rank.rise, "refuted", level),
    )


def _collapse() -> Claim:
    return Claim(
        "At the highest learning rate the attention of the bottom layer collapses to one-hot",
        _statistic(lambda found: found.bottom_at_highest),
        quantity="attention entropy (nat)",
        target=0.0,
        tolerance=(float("inf"), COLLAPSED),
        resolution=ROUNDING,
        basis=f"a row of entropy {COLLAPSED} nat has a weight above 0.99, and less than a hundredth of the gradient "
        "passes; mean over depths",
    )

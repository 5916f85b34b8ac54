"""`joma/real-text`: transformers of several depths and learning rates on real text, their entropies and ranks watched.

In the manner of the paper's Figures 6 and 8, with what the figures leave out: the level of uniform attention and of a
random matrix, seeds, the same statistics for every run, and a comparison with the validation loss itself. Tokens
are characters and blocks are pre-norm; the paper's are words and post-norm. So shapes can be compared, not numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.costs import ModelShape, transformer_cost
from manyheads.data import TextWindows, read_characters
from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.text.pictures import real_text_panels
from manyheads.joma.text.record import look_at
from manyheads.joma.text.summaries import EARLY, Summary, summarise
from manyheads.joma.text.transformers import character_config, digest_text
from manyheads.joma.theory.rebound import BOUNCE
from manyheads.spectra import causal_entropy_level, expected_stable_rank
from manyheads.study import Cell, Panel, Source, Study, Verdict, grid
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import Snapshot, train
from manyheads.transformer.transformer import Transformer
from manyheads.transformer.weights import draw_weights

ADAM = optax.scale_by_adam()  # made once: a training compiles anew for every optimiser it is given
WINDOWS = 64  # windows of the validation text on which everything is measured
HIGH, NEGLIGIBLE = 0.7, 0.3  # where a correlation begins to be called high, and up to where negligible
COLLAPSED = 0.02  # nat: the largest weight of such a row is above 0.99
ROUNDING = 1e-5  # of an entropy or a rank's share, measured in single precision


@dataclass(frozen=True)
class RealText(Study):
    """Entropy of attention and stable rank of the MLP, by layer, over training runs on real text.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation, which every installation has.
    depths, rates
        Numbers of layers, and Adam's constant learning rates: one cell each.
    key_dim, heads
        Shape of a layer.
    length, batch
        Characters of a window, and windows of a step.
    steps
        Updates.
    snapshots
        How often a run is looked at.
    """

    name: ClassVar[str] = "joma/real-text"
    claim: ClassVar[str] = "on real text attention entropy drops: does it rebound, where, and does it tell of the loss?"
    source: ClassVar[Source] = replace(
        SOURCE, locus="figures 6 and 8, and the authors' reply to reviewers; the statistics are this study's own"
    )

    text: Path | None = None
    depths: tuple[int, ...] = (1, 2, 4)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 1e-1)
    key_dim: int = 16
    heads: int = 4
    length: int = 64
    batch: int = 8
    steps: int = 300
    snapshots: int = 20

    def __post_init__(self) -> None:
        for name in ("depths", "rates"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or len(values) < 2:
                raise UsageError(f"{name}={values}: give two or more, in rising order")
        Shape(self.key_dim, self.heads, self.depths[0])
        if not self.rates[0] > 0:
            raise UsageError(f"rates={self.rates}: learning rates are positive")
        for name, least in (("length", 2), ("batch", 1), ("snapshots", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: it must be at least {least}")
        if self.steps % self.snapshots or self.steps < self.snapshots:
            raise UsageError(f"steps={self.steps}: take a multiple of snapshots={self.snapshots}")

    @classmethod
    def full(cls) -> RealText:
        """Return the study with the paper's depths, rates, width, windows and number of updates; run three seeds."""
        return cls(
            depths=(1, 2, 3, 5, 10),
            rates=(1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 1e-3, 1e-2),
            key_dim=200,
            heads=1,
            length=35,
            batch=20,
            steps=59_000,
            snapshots=59,
        )

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included: it differs between releases of Python.

        Raises
        ------
        UsageError
            The text cannot be read, or is too short for the windows.
        """
        return digest_text(self.text, self.length)

    def cells(self) -> tuple[Cell, ...]:
        """Return every depth at every rate."""
        return grid(depth=self.depths, rate=self.rates)

    def flops(self, cell: Cell) -> int:
        """Return the matrix-multiply FLOPs of all updates of one run."""
        size = len(read_characters(self.text)[0])
        shape = ModelShape(int(cell["depth"]), self.key_dim * self.heads, self.heads, vocabulary=size, causal=True)
        cost = transformer_cost(shape, self.length, self.batch, training=True, convention="dense")
        return self.steps * cost.flops

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the levels that need no training: uniform causal attention, and a random matrix of the MLP's shape."""
        width = self.key_dim * self.heads
        uniform = {"long_name": "entropy of uniform causal attention", "units": "nat"}
        random = {"long_name": "stable rank of a random matrix", "units": "1"}
        return xr.Dataset(
            {
                "uniform": ((), causal_entropy_level(self.length), uniform),
                "random_rank": ((), expected_stable_rank(4 * width, width), random),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train once at a constant rate, and look at loss, entropies and ranks at equal distances."""
        vocabulary, (training, validation) = read_characters(self.text)
        for_model, for_batches = jax.random.split(key)
        shape = Shape(self.key_dim, self.heads, int(cell["depth"]))
        config = character_config(shape, len(vocabulary), self.length)
        scaling = standard_scaling(config.shape, config.inputs)
        model = Transformer(_draw(config, scaling, for_model), scaling, config)
        starts = np.linspace(0, len(validation) - self.length - 1, WINDOWS).astype(np.int32)
        held_out = TextWindows(validation, self.length, self.batch).cut(jnp.asarray(starts))

        def look(snapshot: Snapshot) -> dict[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in look_at(snapshot.model, held_out).items()}

        done = train(
            model,
            cross_entropy,
            TextWindows(training, self.length, self.batch),
            adam_at(float(cell["rate"])),
            self.steps,
            for_batches,
            every=self.steps // self.snapshots,
            measure=look,
        )
        return _dataset(done.measured)

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the paper's statement with what rebounds say, and name what drops and rebounds at the best rate."""
        found = summarise(trained, float(predicted["random_rank"]))
        return (*_correlations(found), *_valleys(found), _collapse(found))

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropy and rank by layer for every depth and rate, rebound against loss, and the tables behind it."""
        return real_text_panels(predicted, trained, summarise(trained, float(predicted["random_rank"])))


_draw = eqx.filter_jit(draw_weights)  # draws array by array: compiled once, it is one program


def adam_at(rate: float) -> optax.GradientTransformation:
    """Return Adam with its rate as data: trainings that differ in nothing but the rate share one compiled program."""
    # float32 by name: under 64-bit types a rate in double precision would lift the weights.
    return optax.GradientTransformation(ADAM.init, jax.tree_util.Partial(_adam_update, jnp.float32(rate)))


def _adam_update(rate: jax.Array, gradient: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
    step, state = ADAM.update(gradient, state, weights)
    return jax.tree.map(lambda leaf: -rate * leaf, step), state


def _correlations(found: Summary) -> tuple[Verdict, ...]:
    middle = EARLY[len(EARLY) // 2]
    # What it takes to exchange two neighbours in the order, among all cells and within one rate.
    cells, rates = len(found.rate), len(np.unique(found.rate))
    grain, grain_within = _grain(cells), _grain(cells // rates) / rates
    return (
        Verdict.from_samples(
            "the bounce of attention entropy is highly correlated with low validation loss",
            found.pooled,
            target=-1.0,
            tolerance=(float("inf"), 1 - HIGH),
            expected="refuted",
            resolution=grain,
            basis=f"rank correlation over all depths and rates of a seed; 'high' is commonly said from {HIGH} on",
        ),
        Verdict.from_samples(
            "within a learning rate the bounce is highly correlated with low validation loss",
            found.within,
            target=-1.0,
            tolerance=(float("inf"), 1 - HIGH),
            expected="refuted",
            resolution=grain_within,
            basis="the same with ranks taken inside each rate: what the choice of the rate does has no part in it",
        ),
        Verdict.from_samples(
            "between seeds of one depth and one rate the bounce says nothing about the loss",
            found.within_cells,
            target=0.0,
            tolerance=NEGLIGIBLE,
            resolution=_grain(found.best.shape[1]) / cells,
            basis=f"correlations up to {NEGLIGIBLE} are commonly called negligible; mean over cells",
        ),
        Verdict.from_samples(
            f"after {middle:.0%} of a run its validation loss ranks the final losses better than its bounce does",
            np.abs(found.early_loss[middle]) - np.abs(found.early_rebound[middle]),
            target=1.0,
            tolerance=(1.0, float("inf")),
            resolution=2 * grain,
            basis="an inequality between two rank correlations of the same runs, paired by seed",
        ),
    )


def _grain(count: int) -> float:
    """Return by how much Spearman's coefficient of so many pairs changes when two neighbours change places."""
    return 12 / (count**3 - count) if count > 1 else 2.0


def _valleys(found: Summary) -> tuple[Verdict, ...]:
    def claim(words: str, samples: np.ndarray, expected: Any, unit: str) -> Verdict:
        return Verdict.from_samples(
            words,
            samples,
            target=BOUNCE,
            tolerance=(0.0, float("inf")),
            expected=expected,
            resolution=ROUNDING,
            basis=f"an inequality; {BOUNCE:g} {unit} is the least that is counted as a bounce. Lowest point and rise "
            "are where the other seeds have them, so that noise alone gives zero",
        )

    return (
        claim("at the best rate the entropy of the bottom layer drops", found.bottom.drop, "holds", "nat"),
        claim("at the best rate the bottom layer's entropy then rebounds", found.bottom.rebound, "holds", "nat"),
        claim("at the best rate the entropy of the top layer drops", found.top.drop, "holds", "nat"),
        claim("at the best rate the top layer's entropy then rebounds", found.top.rebound, "refuted", "nat"),
        claim("at the best rate the lower MLP's stable rank drops", found.ranks.drop, "holds", "of the random level"),
        claim(
            "at the best rate the lower MLP's stable rank then rebounds",
            found.ranks.rebound,
            "refuted",
            "of the random level",
        ),
    )


def _collapse(found: Summary) -> Verdict:
    return Verdict.from_samples(
        "at the highest rate every head of the bottom layer ends one-hot",
        found.bottom_at_highest,
        target=0.0,
        tolerance=(float("inf"), COLLAPSED),
        resolution=ROUNDING,
        basis=f"a row of entropy {COLLAPSED} nat has a weight above 0.99 and lets less than a hundredth of the "
        "gradient through; mean over depths",
    )


def _dataset(measured: list[tuple[int, dict[str, np.ndarray]]]) -> xr.Dataset:
    labels = {
        "validation_loss": (("step",), "loss on held-out text", "nat"),
        "entropy": (("step", "layer", "head"), "attention entropy", "nat"),
        "stable_rank": (("step", "layer"), "stable rank of the lower MLP matrix", "1"),
    }
    series = {name: np.stack([seen[name] for _, seen in measured]) for name in labels}
    depth, heads = series["entropy"].shape[1:]
    return xr.Dataset(
        {
            name: (dims, series[name], {"long_name": text, "units": units})
            for name, (dims, text, units) in labels.items()
        },
        coords={
            "step": ("step", np.asarray([step for step, _ in measured]), {"long_name": "step"}),
            "layer": ("layer", np.arange(depth), {"long_name": "layer, from the bottom"}),
            "head": ("head", np.arange(heads), {"long_name": "head"}),
        },
    )

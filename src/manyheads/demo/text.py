"""`demo/text`: a small causal transformer trained on text, with attention entropy and stable rank over training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.data import ngram_losses, read_characters
from manyheads.data.characters import Split, Vocabulary
from manyheads.demo.sampling import continue_text, find_prose, join_lines, mark_whitespace
from manyheads.demo.text_pictures import text_panels
from manyheads.errors import UsageError
from manyheads.spectra import causal_entropy_level
from manyheads.study import Cell, Claim, Source, Study
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset
from manyheads.theory.joma.text.record import held_out_starts, recorded_dataset, train_and_record
from manyheads.theory.joma.text.transformers import character_config, digest_text, step_flops
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import count_weights, with_weights
from manyheads.transformer.transformer import Transformer, initialize

CONTEXTS = (0, 1, 2, 3)  # characters of context of the n-gram models
SNIPPET = 40  # characters of the validation text whose attention pattern is kept
SHOWN = "characters of the pattern"
SAMPLED = 240  # characters sampled from the trained model


@dataclass(frozen=True)
class TextTraining(Study):
    """Validation loss of a small transformer against n-gram models, and statistics of its attention.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation, which every installation has.
    key_dim, heads, depth
        Shape of the transformer.
    length
        Characters of a window.
    batch
        Windows of a step.
    steps
        Updates.
    learning_rate
        Peak of Adam's learning rate: a linear warm-up over a twentieth of the steps, then a half cosine.
    snapshots
        How often the statistics are recorded.
    """

    name: ClassVar[str] = "demo/text"
    claim: ClassVar[str] = "A small transformer predicts text better than bigram and trigram models"
    source: ClassVar[Source] = Source(
        "shannon1951",
        "Prediction and Entropy of Printed English",
        "Claude E. Shannon",
        1951,
        kind="article",
        venue="Bell System Technical Journal",
        volume="30",
        pages="50--64",
        identifier="10.1002/j.1538-7305.1951.tb01366.x",
        locus="the n-gram entropies; smoothed here by Witten and Bell's method C",
    )

    text: Path | None = None
    key_dim: int = 16
    heads: int = 4
    depth: int = 2
    length: int = 64
    batch: int = 8
    steps: int = 1200
    learning_rate: float = 1e-2
    snapshots: int = 24

    def __post_init__(self) -> None:
        Shape(self.key_dim, self.heads, self.depth)
        for name in ("length", "batch", "steps", "snapshots"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected 1 or more")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate={self.learning_rate}: expected a positive number")

    @classmethod
    def full(cls) -> TextTraining:
        """Return the study with a training long enough to overtake n-grams of longer context."""
        return cls(steps=20_000, batch=16, learning_rate=4e-3, snapshots=100)

    @classmethod
    def small(cls) -> TextTraining:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dim=4, heads=2, depth=1, length=16, batch=2, steps=3, snapshots=3)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included, which differs between releases of Python.

        Raises
        ------
        UsageError
            The text cannot be read, or is too short for the windows.
        """
        return digest_text(self.text, self.length, before=max(CONTEXTS))

    def flops(self, cell: Cell) -> int:
        """Return the matrix-multiply FLOPs of all updates."""
        return self.steps * self._step_flops(len(self._read()[0]))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the validation cross-entropy of n-gram models, and the entropy of uniform attention."""
        vocabulary, (training, validation) = self._read()
        # On the held-out characters of the transformer: 64 windows differ from the whole text by about 0.08 nat.
        starts = held_out_starts(validation, self.length, max(CONTEXTS))
        tested = (starts[:, None] + np.arange(1, self.length + 1)).ravel()
        losses = [
            ngram_losses(training, validation, len(vocabulary), context)[tested - context].mean()
            for context in CONTEXTS
        ]
        uniform = causal_entropy_level(self.length)
        return dataset(
            {
                "ngram": ("context", losses, "validation loss of an n-gram model", "nat"),
                "uniform": ((), uniform, "entropy of uniform causal attention", "nat"),
            },
            coords={"context": (list(CONTEXTS), "characters of context")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train once, record the statistics, and keep the trained weights."""
        vocabulary, (training, validation) = self._read()
        for_model, for_batches, for_writing = jax.random.split(key, 3)
        model = self._model(for_model, len(vocabulary))
        start = time.perf_counter()
        done = train_and_record(
            model,
            (training, validation),
            self.batch,
            _optimizer(self.learning_rate, self.steps),
            self.steps,
            for_batches,
            every=max(1, self.steps // self.snapshots),
            before=max(CONTEXTS),
        )
        seconds = time.perf_counter() - start
        prompt = find_prose(vocabulary, validation, self.length)
        snippet = prompt[:SNIPPET]
        patterns = done.model.record(jnp.asarray(snippet)[None], patterns=True).layers.patterns[:, 0]  # (L, H, T, T)
        written = continue_text(done.model, jnp.asarray(prompt), for_writing, SAMPLED)
        found = dataset(
            {
                **stored_weights(done.model.weights),
                "loss": ("update", done.losses, "training loss", "nat"),
                "pattern": (("layer", "head", "query", "key"), np.asarray(patterns), "attention"),
                "weights": ((), count_weights(done.model), "number of weights"),
                "step_flops": ((), self._step_flops(len(vocabulary)), "FLOPs of a training step", "FLOP"),
                "seconds": ((), seconds, "time of the training", "s"),
                "prompt": ((), join_lines(vocabulary.decode(prompt)), "prompt", None),
                "written": ((), join_lines(vocabulary.decode(np.asarray(written))), "sampled continuation", None),
                "snippet": ("query", list(mark_whitespace(vocabulary.decode(snippet))), SHOWN, None),
            }
        )
        found["seconds"].attrs["deterministic"] = False
        return recorded_dataset(done).assign(found)

    def claims(self) -> tuple[Claim, ...]:
        """Compare the final validation loss with that of n-gram models."""

        def loss_of(context: int) -> Callable[[xr.Dataset], float]:
            return lambda predicted: float(predicted["ngram"].sel(context=context))

        return tuple(
            Claim(
                f"The validation loss is lower than that of {model} model",
                lambda predicted, trained: trained["validation_loss"].isel(cell=0, step=-1).values,
                quantity="validation loss (nat/character)",
                target=loss_of(context),
                tolerance=(float("inf"), 0.0),
                basis="an inequality; its error over seeds is in the interval",
            )
            for context, model in ((1, "a bigram"), (2, "a trigram"))
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show loss, entropy and stable rank over training, one attention pattern, a sample and the costs."""
        return text_panels(predicted, trained.isel(cell=0), self.key_dim, self.steps)

    def _read(self) -> tuple[Vocabulary, Split]:
        return read_characters(self.text)

    def _step_flops(self, vocabulary: int) -> int:
        return step_flops(Shape(self.key_dim, self.heads, self.depth), vocabulary, self.length, self.batch)

    def _model(self, key: jax.Array, vocabulary: int) -> Transformer:
        config = character_config(Shape(self.key_dim, self.heads, self.depth), vocabulary, self.length)
        return initialize(config, standard_scaling(config.shape, config.inputs), key)


def stored_weights(weights: Any) -> dict[str, tuple[Any, ...]]:
    """Collect trained arrays as variables, each named by its path: ``weights.blocks.query``."""
    named = {f"weights{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(weights)}
    return {
        name: (tuple(f"{name}.{axis}" for axis in range(leaf.ndim)), np.asarray(leaf), f"trained array {name}")
        for name, leaf in named.items()
    }


def trained_model(study: TextTraining, trained: xr.Dataset, replicate: int = 0) -> Transformer:
    """Rebuild the transformer of one replicate from ``/trained`` of a run of `demo/text`."""
    vocabulary = len(read_characters(study.text)[0])
    blank = study._model(jax.random.key(0), vocabulary)
    one = trained.isel(cell=0, replicate=replicate)
    names = [f"weights{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(blank.weights)]
    leaves = [jnp.asarray(one[name].values) for name in names]
    return with_weights(blank, jax.tree.unflatten(jax.tree.structure(blank.weights), leaves))


@lru_cache(maxsize=4)
def _optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """Build one object for equal arguments: training compiles once per optimizer."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, peak, steps // 20 + 1, steps, 0.05 * peak), b2=0.99)

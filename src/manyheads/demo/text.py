"""`demo/text`: a small causal transformer learns a real text, and its heads are watched while it does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.costs import ModelShape, transformer_cost
from manyheads.data import Split, TextWindows, Vocabulary, ngram_losses, read_characters
from manyheads.demo.observation import find_prose, show_running, show_signs, write_on
from manyheads.demo.pictures import text_panels
from manyheads.errors import UsageError
from manyheads.joma.text.record import look_at
from manyheads.joma.text.transformers import character_config, digest_text
from manyheads.spectra import causal_entropy_level
from manyheads.study import Cell, Panel, Source, Study, Verdict
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import Snapshot, count_weights, train, with_weights
from manyheads.transformer.transformer import Transformer, initialise

CONTEXTS = (0, 1, 2, 3)  # n-gram models that see so many characters
WINDOWS = 64  # windows of the validation text on which transformer and n-grams are tested
SHOWN = 40  # characters of the validation text whose attention is drawn
WRITTEN = 240  # characters that the trained model writes


@dataclass(frozen=True)
class TextTraining(Study):
    """A small transformer learns more of a text than the two characters before tell.

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
    rate
        Peak of Adam's learning rate: a linear warm-up over a twentieth of the steps, then a half cosine.
    snapshots
        How often it is looked at.
    """

    name: ClassVar[str] = "demo/text"
    claim: ClassVar[str] = "a small transformer learns more of a text than the two characters before tell"
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
    rate: float = 1e-2
    snapshots: int = 24

    def __post_init__(self) -> None:
        Shape(self.key_dim, self.heads, self.depth)
        for name in ("length", "batch", "steps", "snapshots"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not self.rate > 0:
            raise UsageError(f"rate={self.rate}: a learning rate is positive")

    @classmethod
    def full(cls) -> TextTraining:
        """Return the study with a training long enough to overtake longer n-grams."""
        return cls(steps=20_000, batch=16, rate=4e-3, snapshots=100)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included: it differs between releases of Python.

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
        """Return the validation cross-entropy of n-gram models of the training text, and the level of no attention."""
        vocabulary, (training, validation) = self._read()
        # On the very characters on which the transformer is tested: 64 windows lie about 0.08 nat from the whole text.
        tested = (self._tested(validation)[:, None] + np.arange(1, self.length + 1)).ravel()
        losses = [
            ngram_losses(training, validation, len(vocabulary), context)[tested - context].mean()
            for context in CONTEXTS
        ]
        return xr.Dataset(
            {
                "ngram": ("context", losses, {"long_name": "validation loss of an n-gram model", "units": "nat"}),
                "uniform": (
                    (),
                    causal_entropy_level(self.length),
                    {"long_name": "entropy of uniform causal attention", "units": "nat"},
                ),
            },
            coords={"context": ("context", list(CONTEXTS), {"long_name": "characters that it sees"})},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train once, measure between chunks of steps, and keep the trained weights."""
        vocabulary, (training, validation) = self._read()
        for_model, for_batches, for_writing = jax.random.split(key, 3)
        model = self._model(for_model, len(vocabulary))
        held_out = TextWindows(validation, self.length, self.batch).cut(jnp.asarray(self._tested(validation)))

        def look(snapshot: Snapshot) -> dict[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in look_at(snapshot.model, held_out).items()}

        windows = TextWindows(training, self.length, self.batch)
        every = max(1, self.steps // self.snapshots)
        start = time.perf_counter()
        done = train(
            model,
            cross_entropy,
            windows,
            _optimiser(self.rate, self.steps),
            self.steps,
            for_batches,
            every=every,
            measure=look,
        )
        seconds = time.perf_counter() - start
        prompt = find_prose(vocabulary, validation, self.length)
        snippet = prompt[:SHOWN]
        patterns = done.model.record(jnp.asarray(snippet)[None], patterns=True).layers.patterns[:, 0]  # (L, H, T, T)
        written = write_on(done.model, jnp.asarray(prompt), for_writing, WRITTEN)
        texts = {"prompt": (prompt, "what it was given"), "written": (np.asarray(written), "what it writes")}
        return self._dataset(done, np.asarray(patterns), seconds).assign(
            {
                name: ((), show_running(vocabulary.decode(tokens)), {"long_name": meaning})
                for name, (tokens, meaning) in texts.items()
            }
            | {
                "snippet": (
                    "query",
                    list(show_signs(vocabulary.decode(snippet))),
                    {"long_name": "characters looked at"},
                )
            }
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the final validation loss with that of n-gram models, and the first entropies with no attention."""
        final = trained["validation_loss"].isel(cell=0, step=-1).values
        basis = "an inequality: the loss is below, or it is not; its error over seeds is in the interval"
        return tuple(
            Verdict.from_samples(
                f"it predicts better than counting what follows the {words} before",
                final,
                target=float(predicted["ngram"].sel(context=context)),
                tolerance=(float("inf"), 0.0),
                basis=basis,
            )
            for context, words in ((1, "one character"), (2, "two characters"))
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show loss, entropy and stable rank over training, one pattern, what it writes, and what it costs."""
        return text_panels(self, predicted, trained.isel(cell=0))

    def _dataset(self, done: Any, patterns: np.ndarray, seconds: float) -> xr.Dataset:
        steps = np.asarray([step for step, _ in done.measured])
        series = {name: np.stack([seen[name] for _, seen in done.measured]) for name in done.measured[0][1]}
        dims = {
            "validation_loss": ("step",),
            "entropy": ("step", "layer", "head"),
            "stable_rank": ("step", "layer"),
            "query_key_rank": ("step", "layer", "head"),
        }
        labels = {
            "validation_loss": ("loss on held-out text", "nat"),
            "entropy": ("attention entropy", "nat"),
            "stable_rank": ("stable rank of the lower MLP matrix", "1"),
            "query_key_rank": ("stable rank of query times key", "1"),
        }
        measured = {
            name: (dims[name], series[name], dict(zip(("long_name", "units"), labels[name], strict=True)))
            for name in dims
        }
        size = len(self._read()[0])
        return xr.Dataset(
            measured
            | {
                **stored_weights(done.model.weights),
                "loss": ("update", done.losses, {"long_name": "training loss", "units": "nat"}),
                "pattern": (("layer", "head", "query", "key"), patterns, {"long_name": "attention", "units": "1"}),
                "weights": ((), count_weights(done.model), {"long_name": "number of weights", "units": "1"}),
                "step_flops": ((), self._step_flops(size), {"long_name": "FLOPs of a training step", "units": "FLOP"}),
                "seconds": ((), seconds, {"long_name": "time of the training", "units": "s", "deterministic": False}),
            },
            coords={
                "step": ("step", steps, {"long_name": "step"}),
                "layer": ("layer", np.arange(self.depth), {"long_name": "layer"}),
                "head": ("head", np.arange(self.heads), {"long_name": "head"}),
            },
        )

    def _tested(self, validation: np.ndarray) -> np.ndarray:
        """Return where the windows begin on which the loss is measured, behind the longest context."""
        return np.linspace(max(CONTEXTS), len(validation) - self.length - 1, WINDOWS).astype(np.int32)

    def _read(self) -> tuple[Vocabulary, Split]:
        return read_characters(self.text)

    def _step_flops(self, vocabulary: int) -> int:
        shape = ModelShape(self.depth, self.key_dim * self.heads, self.heads, vocabulary=vocabulary, causal=True)
        return transformer_cost(shape, self.length, self.batch, training=True, convention="dense").flops

    def _model(self, key: jax.Array, vocabulary: int) -> Transformer:
        config = character_config(Shape(self.key_dim, self.heads, self.depth), vocabulary, self.length)
        return initialise(config, standard_scaling(config.shape, config.inputs), key)


def stored_weights(weights: Any) -> dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, str]]]:
    """Return trained arrays as variables, each named like its place: ``weights.blocks.query``."""
    variables = {}
    for path, leaf in jax.tree.leaves_with_path(weights):
        name = f"weights{jax.tree_util.keystr(path)}"
        dims = tuple(f"{name}.{axis}" for axis in range(leaf.ndim))
        variables[name] = (dims, np.asarray(leaf), {"long_name": f"trained array {name}", "units": "1"})
    return variables


def trained_model(study: TextTraining, trained: xr.Dataset, replicate: int = 0) -> Transformer:
    """Rebuild a transformer that `demo/text` trained, from what its run holds.

    Parameters
    ----------
    study
        The study of the run.
    trained
        ``/trained`` of its tree.
    replicate
        Which of the trained systems.
    """
    vocabulary = len(read_characters(study.text)[0])
    blank = study._model(jax.random.key(0), vocabulary)
    one = trained.isel(cell=0, replicate=replicate)
    names = [f"weights{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(blank.weights)]
    leaves = [jnp.asarray(one[name].values) for name in names]
    return with_weights(blank, jax.tree.unflatten(jax.tree.structure(blank.weights), leaves))


@lru_cache(maxsize=4)
def _optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """Return one object for equal arguments: training compiles once for each optimiser it is given."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20 + 1, steps, 0.05 * rate), b2=0.99)

"""`demo/text`: a small causal transformer learns a real text, and its heads are watched while it does."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.attention import attention_entropy, causal
from manyheads.attention.configuration import TransformerConfig
from manyheads.attention.inputs import TokenInput
from manyheads.attention.losses import cross_entropy
from manyheads.attention.scaling import Shape, standard_scaling
from manyheads.attention.training import Snapshot, count_weights, train
from manyheads.attention.transformer import Transformer, initialise
from manyheads.costs import ModelShape, transformer_cost
from manyheads.data import TextWindows, Vocabulary, build_vocabulary, load_text, ngram_losses, split_tokens
from manyheads.spectra import causal_entropy_level, traced_stable_rank
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Picture, Source, Study, Verdict, spread_curve

VOCABULARY = 96  # most characters of a text; rarer ones become one unknown symbol
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
        venue="Bell System Technical Journal 30",
        identifier="10.1002/j.1538-7305.1951.tb01366.x",
        locus="the n-gram entropies; smoothed here by Witten and Bell's method C",
    )

    revision: ClassVar[int] = 2

    text: Path | None = None
    key_dim: int = 16
    heads: int = 4
    depth: int = 2
    length: int = 64
    batch: int = 8
    steps: int = 1200
    rate: float = 1e-2
    snapshots: int = 24

    @classmethod
    def full(cls) -> TextTraining:
        """Return the study with a training long enough to overtake longer n-grams."""
        return cls(steps=20_000, batch=16, rate=4e-3, snapshots=100)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included: it differs between releases of Python."""
        return {"text": load_text(self.text).sha256}

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
            return {name: np.asarray(value) for name, value in _look(snapshot.model, held_out).items()}

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
        prompt = _prose(vocabulary, validation, self.length)
        snippet = prompt[:SHOWN]
        patterns = done.model.record(jnp.asarray(snippet)[None], patterns=True).layers.patterns[:, 0]  # (L, H, T, T)
        written = _write(done.model, jnp.asarray(prompt), for_writing, WRITTEN)
        texts = {"prompt": (prompt, "what it was given"), "written": (np.asarray(written), "what it writes")}
        return self._dataset(done, np.asarray(patterns), seconds).assign(
            {
                name: ((), _running(vocabulary.decode(tokens)), {"long_name": meaning})
                for name, (tokens, meaning) in texts.items()
            }
            | {"snippet": ("query", list(_visible(vocabulary.decode(snippet))), {"long_name": "characters looked at"})}
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
        cell = trained.isel(cell=0)
        steps = cell["step"].values
        ends = (float(steps[0]), float(steps[-1]))
        losses = [spread_curve(steps, cell["validation_loss"].values, "transformer, validation")]
        losses += [
            Curve(ends, (float(level), float(level)), f"counting, {context} before", "predicted", context + 1)
            for context, level in zip(CONTEXTS, predicted["ngram"].values, strict=True)
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
                note=f"At most the key dimension, {self.key_dim}. One line a head, of the first seed.",
            ),
            self._pattern(cell),
            self._sample(cell),
            self._cost(cell),
        )

    def _pattern(self, cell: xr.Dataset) -> Picture:
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

    def _sample(self, cell: xr.Dataset) -> Listing:
        first = cell.isel(replicate=0)
        rows = (("given", str(first["prompt"].values)), ("written", str(first["written"].values)))
        return Listing(
            "What it writes",
            ("", "text"),
            rows,
            note="Drawn character by character at temperature 0.6. ¶ is a line end.",
        )

    def _cost(self, cell: xr.Dataset) -> Listing:
        weights = int(cell["weights"][0])
        step = int(cell["step_flops"][0])
        seconds = float(cell["seconds"].mean())
        rows = (
            ("weights", f"{weights:,}"),
            ("matrix-multiply FLOPs of a training step", f"{step:,}"),
            ("of the whole training", f"{step * self.steps:.4g}"),
            ("measured seconds, looking included", f"{seconds:.1f}"),
            ("FLOPs a second", f"{step * self.steps / seconds:.3g}"),
        )
        return Listing(
            "What it costs",
            ("quantity", "value"),
            rows,
            note="Exact, forward and backward; a multiply-add counts two; masked pairs are counted, as they are run.",
        )

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

    def _read(self) -> tuple[Vocabulary, tuple[np.ndarray, np.ndarray]]:
        return _prepare(self.text)

    def _step_flops(self, vocabulary: int) -> int:
        shape = ModelShape(self.depth, self.key_dim * self.heads, self.heads, vocabulary=vocabulary, causal=True)
        return transformer_cost(shape, self.length, self.batch, training=True, convention="dense").flops

    def _model(self, key: jax.Array, vocabulary: int) -> Transformer:
        config = TransformerConfig(
            Shape(self.key_dim, self.heads, self.depth),
            TokenInput(vocabulary),
            length=self.length,
            outputs=vocabulary,
            causal=True,
            read_out="token",
            activation="relu",
        )
        return initialise(config, standard_scaling(config.shape, config.inputs), key)


@lru_cache(maxsize=4)
def _prepare(path: Path | None) -> tuple[Vocabulary, tuple[np.ndarray, np.ndarray]]:
    """Return vocabulary and the two parts of a text; the vocabulary is that of the part that is trained on."""
    content = load_text(path).content
    vocabulary = build_vocabulary(content[: int(0.9 * len(content))], VOCABULARY)
    return vocabulary, tuple(split_tokens(vocabulary.encode(content), 0.1))  # type: ignore[return-value]


@lru_cache(maxsize=4)
def _optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """Return one object for equal arguments: training compiles once for each optimiser it is given."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20 + 1, steps, 0.05 * rate), b2=0.99)


@eqx.filter_jit
def _look(model: Transformer, held_out: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Measure loss, entropy of every head, and stable ranks."""
    layers = model.record(held_out[0]).layers
    scale = model.scaling.logit(model.config.shape.key_dim)
    entropy, _ = attention_entropy(layers.queries, layers.keys, scale=scale, mask=causal)  # (L, B, H, T)
    blocks = model.weights.blocks
    product = jnp.einsum("lhdn,lhen->lhde", blocks.query, blocks.key)  # (L, H, d, d)
    return {
        "validation_loss": cross_entropy(model, held_out),
        "entropy": entropy.mean((1, 3)),
        "stable_rank": traced_stable_rank(blocks.mlp_in),
        "query_key_rank": traced_stable_rank(product),
    }


@eqx.filter_jit
def _write(model: Transformer, prompt: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Let the model go on after a prompt, at temperature 0.6, seeing the last window only."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1] / 0.6
        token = jax.random.categorical(key, logits.astype(jnp.float32)).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, prompt, jax.random.split(key, count))[1]


def _prose(vocabulary: Vocabulary, tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the window with the most letters among many: a text may begin with a table."""
    starts = np.linspace(0, len(tokens) - length, 500).astype(int)
    return max((tokens[start : start + length] for start in starts), key=lambda window: _letters(vocabulary, window))


def _letters(vocabulary: Vocabulary, window: np.ndarray) -> int:
    return sum(symbol.isalpha() for symbol in vocabulary.decode(window))


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


def _visible(text: str) -> str:
    """Show spaces and line ends, one sign for each character."""
    return text.replace(" ", "·").replace("\n", "¶")


def _running(text: str) -> str:
    """Show a text in one paragraph, its line ends as signs."""
    return re.sub(r" *\n\s*", " ¶ ", re.sub(r" {2,}", " ", text)).strip()

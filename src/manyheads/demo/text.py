"""`demo/text`: a small causal transformer trained on text, with attention entropy and stable rank over training."""

import itertools
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

import manyheads.study as st
from manyheads.data.characters import Split, Vocabulary, read_characters
from manyheads.data.ngrams import ngram_losses
from manyheads.spectra.levels import causal_entropy_level
from manyheads.study import Curve, Lines, Listing, panels, tables
from manyheads.theory.joma.text.record import (
    character_config,
    digest_text,
    held_out_starts,
    recorded_dataset,
    step_flops,
    train_and_record,
)
from manyheads.transformer import Shape, Transformer, initialize, standard_scaling
from manyheads.transformer.training import count_weights, with_weights
from manyheads.transformer.weights import Weights

CONTEXTS = (0, 1, 2, 3)  # characters of context of the n-gram models
SNIPPET = 40  # characters of the validation text whose attention pattern is kept
SHOWN = "characters of the pattern"
SAMPLED = 240  # characters sampled from the trained model


class TextTraining(st.Study):
    """Validation loss of a small transformer against n-gram models, and statistics of its attention."""

    name = "demo/text"
    claim = "A small transformer predicts text better than bigram and trigram models"
    source = st.Source(
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

    text: Path | None = st.setting(None, "UTF-8 file; by default Python's own documentation")
    key_dim: int = st.setting(16, "Key dimension of the transformer", small=4)
    heads: int = st.setting(4, "Its heads", small=2)
    depth: int = st.setting(2, "Its blocks", small=1)
    length: int = st.setting(64, "Characters of a window", least=1, small=16)
    batch: int = st.setting(8, "Windows of a step", least=1, small=2, full=16)
    steps: int = st.setting(1200, "Updates", least=1, small=3, full=20_000)
    learning_rate: float = st.setting(1e-2, "Peak with Adam: short warm-up, then a half cosine", above=0, full=4e-3)
    snapshots: int = st.setting(24, "How often the statistics are recorded", least=1, small=3, full=100)

    def check(self) -> None:
        Shape(self.key_dim, self.heads, self.depth)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, also of the default one, which differs between releases of Python."""
        return digest_text(self.text, self.length, before=max(CONTEXTS))

    def flops(self, cell: st.Cell) -> int:
        """Return the matrix-multiply FLOPs of all updates."""
        return self.steps * self._step_flops(len(self._read()[0]))

    def predict(self, key: st.Key) -> st.Record:
        """Return the validation cross-entropy of n-gram models, and the entropy of uniform attention."""
        vocabulary, (training, validation) = self._read()
        # On the held-out characters of the transformer: 64 windows differ from the whole text by about 0.08 nat.
        starts = held_out_starts(validation, self.length, max(CONTEXTS))
        tested = (starts[:, None] + np.arange(1, self.length + 1)).ravel()
        known = training, validation, len(vocabulary)
        losses = [ngram_losses(*known, context)[tested - context].mean() for context in CONTEXTS]
        return {
            "context": ("context", list(CONTEXTS), "characters of context"),
            "ngram": ("context", losses, "validation loss of an n-gram model", "nat"),
            "uniform": ((), causal_entropy_level(self.length), "entropy of uniform causal attention", "nat"),
        }

    def train(self, key: st.Key) -> st.Data:
        """Train once, record the statistics, and keep the trained weights."""
        vocabulary, (training, validation) = self._read()
        for_model, for_batches, for_writing = jax.random.split(key, 3)
        model = self._model(for_model, len(vocabulary))
        start = time.perf_counter()
        given = self.batch, _optimizer(self.learning_rate, self.steps), self.steps, for_batches
        every = max(1, self.steps // self.snapshots)
        done = train_and_record(model, (training, validation), *given, every=every, before=max(CONTEXTS))
        seconds = time.perf_counter() - start
        prompt = find_prose(vocabulary, validation, self.length)
        snippet = prompt[:SNIPPET]
        patterns = done.model.record(jnp.asarray(snippet)[None], patterns=True).layers.patterns[:, 0]  # (L, H, T, T)
        written = continue_text(done.model, jnp.asarray(prompt), for_writing, SAMPLED)
        found = {
            "loss": ("update", done.losses, "training loss", "nat"),
            "pattern": (("layer", "head", "query", "key"), np.asarray(patterns), "attention"),
            "weights": ((), count_weights(done.model), "number of weights"),
            "step_flops": ((), self._step_flops(len(vocabulary)), "FLOPs of a training step", "FLOP"),
            "seconds": ((), seconds, {"long_name": "time of the training", "units": "s", "deterministic": False}),
            "prompt": ((), join_lines(vocabulary.decode(prompt)), "prompt", None),
            "written": ((), join_lines(vocabulary.decode(np.asarray(written))), "sampled continuation", None),
            "snippet": ("query", list(mark_whitespace(vocabulary.decode(snippet))), SHOWN, None),
        }
        return recorded_dataset(done).assign(tables.record(stored_weights(done.model.weights) | found))

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for context, model in ((1, "a bigram"), (2, "a trigram")):
            yield st.Claim(
                f"The validation loss is lower than that of {model} model",
                trained["validation_loss"].isel(step=-1),
                st.below(theory["ngram"].sel(context=context)),
                "an inequality; its error over seeds is in the interval",
                "validation loss (nat/character)",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield from _curves(theory, trained, self.key_dim)
        yield from (_pattern(trained), _sample(trained), _cost(trained, self.steps))

    def _read(self) -> tuple[Vocabulary, Split]:
        return read_characters(self.text)

    def _step_flops(self, vocabulary: int) -> int:
        return step_flops(Shape(self.key_dim, self.heads, self.depth), vocabulary, self.length, self.batch)

    def _model(self, key: jax.Array, vocabulary: int) -> Transformer:
        config = character_config(Shape(self.key_dim, self.heads, self.depth), vocabulary, self.length)
        return initialize(config, standard_scaling(config.shape, config.inputs), key)


def stored_weights(weights: Weights) -> dict[str, tuple[tuple[str, ...], np.ndarray, str]]:
    """Collect trained arrays as variables, each named by its path: ``weights.blocks.query``."""
    named = {f"weights{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(weights)}
    return {
        name: (tuple(f"{name}.{axis}" for axis in range(leaf.ndim)), np.asarray(leaf), f"trained array {name}")
        for name, leaf in named.items()
    }


def trained_model(study: TextTraining, trained: st.Data, replicate: int = 0) -> Transformer:
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


@eqx.filter_jit
def continue_text(model: Transformer, prompt: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Sample `count` characters after a prompt at temperature 0.6, given the last window."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1] / 0.6
        token = jax.random.categorical(key, logits.astype(jnp.float32)).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, prompt, jax.random.split(key, count))[1]


def find_prose(vocabulary: Vocabulary, tokens: np.ndarray, length: int) -> np.ndarray:
    """Find the window with the most letters among 500, since a text may begin with a table."""
    starts = np.linspace(0, len(tokens) - length, 500).astype(int)
    windows = (tokens[start : start + length] for start in starts)
    return max(windows, key=lambda window: sum(symbol.isalpha() for symbol in vocabulary.decode(window)))


def mark_whitespace(text: str) -> str:
    """Replace spaces and line ends by visible signs, character by character."""
    return text.replace(" ", "·").replace("\n", "¶")


def join_lines(text: str) -> str:
    """Join a text to one paragraph, with a sign for each line end."""
    return re.sub(r" *\n\s*", " ¶ ", re.sub(r" {2,}", " ", text)).strip()


def _curves(predicted: st.Data, cell: st.Data, key_dim: int) -> Iterator[Lines]:
    steps = cell["step"].values
    ends = (float(steps[0]), float(steps[-1]))
    losses = [panels.spread_curve(steps, cell["validation_loss"].values, "transformer, validation")]
    losses += [
        Curve(ends, (float(level), float(level)), f"n-gram, context {context}", "predicted", context + 1)
        for context, level in zip(predicted["context"].values.tolist(), predicted["ngram"].values, strict=True)
    ]
    seeds = f"Mean over {cell.sizes['replicate']} seeds, bands from the smallest to the largest."
    note = f"Dashed: n-gram models on the same characters. {seeds}"
    axes, shows = ("step", "cross-entropy [nat/character]"), ("validation loss is lower",)
    yield Lines("Loss on held-out text", *axes, tuple(losses), note=note, shows=shows)
    uniform = Curve(ends, (float(predicted["uniform"]),) * 2, "uniform attention", "reference")
    note = "Mean over windows and positions; attention uniform over n characters has entropy ln n. One line a head, "
    entropies = (*_by_head(cell["entropy"], steps), uniform)
    note = f"{note}of the first seed."
    yield Lines("Attention entropy, each head", "step", "entropy [nat]", entropies, note=note)
    ranks = tuple(
        panels.spread_curve(steps, cell["stable_rank"].sel(layer=layer).values, f"layer {layer}", group=int(layer))
        for layer in cell["layer"].values
    )
    note = f"Squared Frobenius over squared spectral norm. {seeds}"
    yield Lines("Stable rank of the lower MLP matrix", "step", "stable rank", ranks, note=note)
    note = f"At most the key dimension, {key_dim}. One line a head, of the first seed."
    circuits = tuple(_by_head(cell["query_key_rank"], steps))
    yield Lines("Stable rank of query times key, each head", "step", "stable rank", circuits, note=note)


def _pattern(cell: st.Data) -> panels.Picture:
    first = cell.isel(replicate=0)
    sharpness = first["entropy"].isel(step=-1).values  # (L, H)
    layer, head = np.unravel_index(sharpness.argmin(), sharpness.shape)
    names = tuple(first["snippet"].values.tolist())
    title = f"Attention of the head of lowest entropy: layer {layer}, head {head}"
    values = tuple(tuple(map(float, row)) for row in first["pattern"].values[layer, head])
    note = "From the validation text, after training, first seed. · is a space, ¶ a line end."
    return panels.Picture(title, "key", "query", values, "attention", names, names, note)


def _sample(cell: st.Data) -> Listing:
    first = cell.isel(replicate=0)
    rows = (("prompt", str(first["prompt"].values)), ("sampled", str(first["written"].values)))
    return Listing("Sampled text", ("", "text"), rows, "Temperature 0.6, first seed. ¶ is a line end.")


def _cost(cell: st.Data, updates: int) -> Listing:
    weights, step, seconds = int(cell["weights"][0]), int(cell["step_flops"][0]), float(cell["seconds"].mean())
    rows = (
        ("weights", f"{weights:,}"),
        ("matrix-multiply FLOPs of a training step", f"{step:,}"),
        ("of the whole training", f"{step * updates:.4g}"),
        ("measured seconds, recording included", f"{seconds:.1f}"),
        ("FLOPs a second", f"{step * updates / seconds:.3g}"),
    )
    note = "Forward and backward, a multiply-add counted as two; masked pairs are counted, since they are computed."
    return Listing("Costs of training", ("quantity", "value"), rows, note)


def _by_head(values: xr.DataArray, steps: np.ndarray) -> list[Curve]:
    """Draw one line a head of the first seed, coloured by layer: heads of two seeds do not correspond."""
    x, curves = tuple(map(float, steps)), []
    for layer, head in itertools.product(values["layer"].values, values["head"].values):
        y = tuple(map(float, values.sel(layer=layer, head=head).isel(replicate=0).values))
        curves.append(Curve(x, y, "" if head else f"layer {layer}", group=int(layer)))
    return curves

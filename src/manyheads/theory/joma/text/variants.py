"""Variants of a small transformer on text: tokens, normalization, masked tokens, widths and heads, one change each."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from manyheads.attention import attention_entropy, causal
from manyheads.data import TextWindows
from manyheads.data.characters import read_characters, read_words
from manyheads.spectra.traced_ranks import traced_stable_rank
from manyheads.theory.joma.text.record import character_config, held_out_starts
from manyheads.transformer import Shape, Transformer, TransformerConfig
from manyheads.transformer.losses import cross_entropy

Batch = tuple[Int[Array, "batch length"], Int[Array, "batch length"], Bool[Array, "batch length"]]
MASKED = 0.15  # share of the tokens that an encoder is asked for


@dataclass(frozen=True)
class Variant:
    """One transformer: its tokens, the place of its normalization, and its shape."""

    tokens: Literal["words", "characters", "shuffled"] = "words"  # shuffled: words in random order
    norm: Literal["pre", "post"] = "pre"  # "pre" or "post"
    masked: bool = False  # a bidirectional encoder that is asked for masked tokens, in place of a decoder
    widen: int = 1  # factor on the width of the stream
    heads: int = 4  # among which it is divided


VARIANTS = {
    "words": Variant(),
    "characters": Variant(tokens="characters"),
    "post-norm": Variant(norm="post"),
    "encoder": Variant(masked=True),
    "double-width": Variant(widen=2),
    "one-head": Variant(heads=1),
    "shuffled-words": Variant(tokens="shuffled"),
}


@lru_cache(maxsize=4)
def read_tokens(kind: str, path: Path | None, vocabulary: int) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
    """Read a text as tokens of a kind: size of the vocabulary, and (training, validation)."""
    if kind == "characters":
        known, split = read_characters(path)
        return len(known), (split.train, split.validation)
    words, split = read_words(path, vocabulary)
    parts = (split.train, split.validation)
    if kind == "shuffled":
        rng = np.random.default_rng(0)
        parts = (rng.permutation(split.train), rng.permutation(split.validation))
    return len(words), parts


def variant_config(variant: Variant, width: int, depth: int, length: int, vocabulary: int) -> TransformerConfig:
    """Configure a transformer with ReLU; one token more than the vocabulary stands for a masked one."""
    key_dim = width * variant.widen // variant.heads
    config = character_config(Shape(key_dim, variant.heads, depth), vocabulary + 1, length)
    return replace(config, causal=not variant.masked, norm=variant.norm)


class LanguageWindows(eqx.Module):
    """Batches (inputs, targets, asked) of a text: the next token, or the masked ones where there is a mask token."""

    windows: TextWindows
    mask_token: int | None = eqx.field(static=True)

    def __call__(self, key: jax.Array) -> Batch:
        """Draw a batch."""
        for_windows, for_mask = jax.random.split(key)
        return self.ask(self.windows(for_windows), for_mask)

    def ask(self, windows: tuple[jax.Array, jax.Array], key: jax.Array) -> Batch:
        """Ask for every next token, or mask random tokens and ask for these."""
        inputs, following = windows
        if self.mask_token is None:
            return inputs, following, jnp.ones(inputs.shape, bool)
        asked = jax.random.bernoulli(key, MASKED, inputs.shape).at[:, 0].set(True)  # one a window at least
        return jnp.where(asked, jnp.int32(self.mask_token), inputs), inputs, asked


def asked_loss(model: Transformer, batch: Batch) -> jax.Array:
    """Average the cross-entropy over the tokens that are asked for, in nat."""
    inputs, targets, asked = batch
    if model.config.causal:
        return cross_entropy(model, batch)
    outputs = model(inputs)
    chosen = jnp.take_along_axis(outputs, targets[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(outputs, axis=-1) - chosen
    return jnp.where(asked, losses, 0).sum() / asked.sum()


def held_out_batch(windows: LanguageWindows) -> Batch:
    """Cut the held-out windows of a validation text, with one mask for all runs."""
    starts = held_out_starts(np.asarray(windows.windows.tokens), windows.windows.length)
    return windows.ask(windows.windows.cut(jnp.asarray(starts)), jax.random.key(0))


@eqx.filter_jit
def layer_statistics(model: Transformer, inputs: jax.Array) -> dict[str, jax.Array]:
    """Measure, for each layer, attention entropy over heads, positions and inputs, and both stable ranks of the MLP."""
    layers, blocks = model.record(inputs).layers, model.weights.blocks
    scale = model.scaling.logit(model.config.shape.key_dim)
    mask = causal if model.config.causal else None
    entropy, _ = attention_entropy(layers.queries, layers.keys, scale=scale, mask=mask)  # (L, B, H, T)
    assert blocks.mlp_in is not None
    assert blocks.mlp_out is not None
    # One batch of eigenvalues for both matrices: they have one Gram size.
    ranks = traced_stable_rank(jnp.stack([blocks.mlp_in, jnp.swapaxes(blocks.mlp_out, -1, -2)]))  # (2, L)
    return {"entropy": entropy.mean((1, 2, 3)), "lower_rank": ranks[0], "upper_rank": ranks[1]}

"""Sampling from a trained transformer of characters, and display of text."""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.data.characters import Vocabulary
from manyheads.transformer.transformer import Transformer


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

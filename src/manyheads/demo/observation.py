"""What is shown of a text and of a transformer that learned it: a prompt, what it writes, signs for white space."""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.data import Vocabulary
from manyheads.transformer.transformer import Transformer


@eqx.filter_jit
def write_on(model: Transformer, prompt: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Let the model go on after a prompt, at temperature 0.6, seeing the last window only."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1] / 0.6
        token = jax.random.categorical(key, logits.astype(jnp.float32)).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, prompt, jax.random.split(key, count))[1]


def find_prose(vocabulary: Vocabulary, tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the window with the most letters among many: a text may begin with a table."""
    starts = np.linspace(0, len(tokens) - length, 500).astype(int)
    return max((tokens[start : start + length] for start in starts), key=lambda window: _letters(vocabulary, window))


def _letters(vocabulary: Vocabulary, window: np.ndarray) -> int:
    return sum(symbol.isalpha() for symbol in vocabulary.decode(window))


def show_signs(text: str) -> str:
    """Show spaces and line ends, one sign for each character."""
    return text.replace(" ", "·").replace("\n", "¶")


def show_running(text: str) -> str:
    """Show a text in one paragraph, its line ends as signs."""
    return re.sub(r" *\n\s*", " ¶ ", re.sub(r" {2,}", " ", text)).strip()

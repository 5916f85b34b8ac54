"""Tasks of the transformers: handwritten digits, and the next character of a real text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.data import TextWindows, load_digits, load_text
from manyheads.data.characters import build_vocabulary
from manyheads.data.digits import cut_patches, normalize
from manyheads.data.draws import draw_integers
from manyheads.errors import check_integer
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import PatchInput, TokenInput
from manyheads.transformer.shape import Shape

PATCH = 2  # pixels: an image of 8 x 8 becomes 16 tokens of 4 numbers
VOCABULARY = 64  # most characters of a text; rarer ones become one unknown symbol


class ImageBatches(eqx.Module):
    """Batches of images, cut into patches, with their labels, as a function of a key."""

    patches: jax.Array  # (samples, T, dim), float32
    labels: jax.Array  # (samples,), int32
    size: int = eqx.field(static=True)  # images of a batch, drawn with replacement

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw (patches (size, T, dim), labels (size,))."""
        chosen = draw_integers(key, (self.size,), len(self.labels))
        return self.patches[chosen], self.labels[chosen]


@dataclass(frozen=True, eq=False)
class Task:
    """One task for transformers of every shape: everything about them but the shape, and where batches come from."""

    template: TransformerConfig  # A configuration whose shape is exchanged
    batches: Any  # key -> (inputs, answers), a pytree with the data as leaves

    def config(self, shape: Shape) -> TransformerConfig:
        """Return the configuration at a shape."""
        return replace(self.template, shape=shape)


def digits_task(batch: int = 16) -> Task:
    """Return a vision transformer's task: the ten handwritten digits, 16 patches of 2 x 2 pixels, mean pooling."""
    check_integer("batch", batch)
    digits = load_digits()
    patches = cut_patches(normalize(digits.images, np.float32), PATCH)  # (samples, 16, 4)
    config = TransformerConfig(Shape(1, 1, 1), PatchInput(patches.shape[-1]), patches.shape[-2], outputs=10)
    return Task(config, ImageBatches(jnp.asarray(patches, jnp.float32), jnp.asarray(digits.labels, jnp.int32), batch))


def text_task(text: Path | None = None, batch: int = 8, length: int = 32) -> Task:
    """Return a causal transformer's task: the next character of a text, by default Python's documentation."""
    check_integer("batch", batch)
    words = load_text(text).content
    vocabulary = build_vocabulary(words, VOCABULARY)
    tokens = vocabulary.encode(words)
    config = TransformerConfig(
        Shape(1, 1, 1), TokenInput(len(vocabulary)), length, len(vocabulary), causal=True, read_out="token"
    )
    return Task(config, TextWindows(tokens, length, batch))

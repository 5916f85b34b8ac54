"""Transformers of characters: configuration, cost of a training step, and the identity of their text."""

from __future__ import annotations

from pathlib import Path

from manyheads.costs import ModelShape, transformer_cost
from manyheads.data import load_text
from manyheads.data.characters import read_characters
from manyheads.errors import UsageError
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import TokenInput
from manyheads.transformer.shape import Shape


def character_config(shape: Shape, vocabulary: int, length: int) -> TransformerConfig:
    """Configure a causal pre-norm transformer with ReLU that predicts the next of `vocabulary` characters."""
    return TransformerConfig(
        shape,
        TokenInput(vocabulary),
        length=length,
        outputs=vocabulary,
        causal=True,
        read_out="token",
        activation="relu",
    )


def step_flops(shape: Shape, vocabulary: int, length: int, batch: int) -> int:
    """Count the matrix-multiply FLOPs of a training step, masked pairs included, as they are computed."""
    model = ModelShape(shape.depth, shape.key_dim * shape.heads, shape.heads, vocabulary=vocabulary, causal=True)
    return transformer_cost(model, length, batch, training=True, convention="dense").flops


def digest_text(path: Path | None, length: int, before: int = 0) -> dict[str, str]:
    """Hash the text of a study, the default one included, which differs between releases of Python.

    The held-out tenth must hold a window of `length` characters, the next one, and `before` characters in front.
    """
    text, reach = load_text(path), length + before
    held_out = len(read_characters(path)[1].validation)
    if held_out <= reach:
        raise UsageError(
            f"{text.name} leaves {held_out} held-out characters, too few for a window: give a text of more than "
            f"{10 * (reach + 1)} characters, or a shorter --length"
        )
    return {"text": text.sha256}

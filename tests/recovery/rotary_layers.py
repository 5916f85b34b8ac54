"""Random layers with rotary positions."""

import numpy as np

from manyheads.recovery.layers.rotary import RotaryLayer


def planted_rotary_layer(
    rng: np.random.Generator, dim: int, heads: int, *, base: float = 1e4, key_bias: float = 0.0, gain: float = 1.7
) -> RotaryLayer:
    """Return a layer of random query, key, value and output matrices, turned with frequencies base^(-2f/r)."""
    rank = dim // heads
    query, key, value = (rng.standard_normal((heads, dim, rank)) / dim**0.5 for _ in range(3))
    output = rng.standard_normal((heads, rank, dim)) / dim**0.5
    biases = key_bias * rng.standard_normal((2, heads, 1, rank))
    query, key = (
        np.concatenate([w, b], axis=1) * (gain / rank**0.5) ** 0.5 for w, b in zip((query, key), biases, strict=True)
    )
    frequencies = base ** (-np.arange(rank // 2) / (rank // 2))
    bias = 0.1 * rng.standard_normal(dim)
    return RotaryLayer.of_projections(query, key, value @ output, frequencies, bias=bias)

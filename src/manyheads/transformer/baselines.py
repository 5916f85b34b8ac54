"""Baselines: a pooled MLP, which is blind to order, and an MLP-RNN.

Both read the inputs of a transformer, have a field `weights` and are called the same way; `match_hidden` gives them the
number of weights of any other model.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.data.draws import draw_vectors
from manyheads.errors import UsageError
from manyheads.transformer.inputs import Input, VectorInput, embed

SIZE = Constraint(least=1)


@dataclass(frozen=True)
class BaselineConfig:
    """Shapes of a baseline; `UsageError` if a size is below 1, or vectors do not have the width."""

    inputs: Input  # as for a transformer
    outputs: int = constrained(rule=SIZE)  # numbers that the read-out returns
    width: int = constrained(rule=SIZE)  # d of the embedding; that of vectors is their dimension
    hidden: int = constrained(rule=SIZE)  # of the hidden layers, or of the recurrent state
    layers: int = constrained(2, SIZE)  # of the MLP, or of the recurrent cell

    def __post_init__(self) -> None:
        check_fields(self, "BaselineConfig: ")
        if isinstance(self.inputs, VectorInput) and self.inputs.dim != self.width:
            raise UsageError(f"vectors of {self.inputs.dim} numbers and width={self.width}: make them equal")


class BaselineWeights(NamedTuple):
    """Weights of a baseline."""

    embedding: jax.Array | None  # (rows, d)
    first: jax.Array  # (d, hidden)
    recurrent: Any  # (hidden, hidden), None in the pooled MLP
    deeper: jax.Array | None  # (layers - 1, hidden, hidden), None with one layer
    biases: jax.Array  # (layers, hidden)
    mixing: Any  # (hidden, hidden), after the pool, None in the MLP-RNN
    unembedding: jax.Array  # (hidden, outputs)


class _Baseline(eqx.Module):
    weights: BaselineWeights
    config: BaselineConfig = eqx.field(static=True)

    def _first_layer(self, x: jax.Array) -> jax.Array:
        weights = self.weights
        return embed(jnp.asarray(x), self.config.inputs, weights.embedding) @ weights.first + weights.biases[0]


class PooledMLP(_Baseline):
    r"""Blind to order: :math:`f = U\,\mathrm{relu}(M\,\tfrac1T\sum_t \phi(x_t))` with an MLP :math:`\phi` a token.

    The value does not change when the tokens are permuted, and every such function of tokens from a finite set has
    this form (Zaheer et al., *Deep Sets*, NeurIPS 2017, Theorem 2).

    Examples
    --------
    >>> from manyheads.transformer.inputs import TokenInput
    >>> model = initialize_pooled(BaselineConfig(TokenInput(5), outputs=3, width=4, hidden=8), jax.random.key(0))
    >>> model(jnp.zeros((2, 7), int)).shape
    (2, 3)
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the outputs (..., outputs) of tokens (..., T) or vectors (..., T, dim)."""
        weights, z = self.weights, self._first_layer(x)
        for matrix, bias in zip(_matrices(weights.deeper), weights.biases[1:], strict=True):
            z = jax.nn.relu(z) @ matrix + bias
        pooled = jax.nn.relu(z).mean(-2)  # (..., hidden)
        return jax.nn.relu(pooled @ weights.mixing) @ weights.unembedding


class RecurrentMLP(_Baseline):
    r"""Walks through the sequence: :math:`h_t = \mathrm{cell}(x_t, h_{t-1})`, :math:`f = U h_T`.

    With one layer the cell is Elman's, :math:`h_t = \tanh(W x_t + R h_{t-1} + b)` (J. Elman, *Finding structure in
    time*, Cognitive Science 14, 1990); each further layer is :math:`\tanh(W_j \cdot + b_j)` on top of it. Sequential
    depth grows with the length.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the outputs (..., outputs) of tokens (..., T) or vectors (..., T, dim)."""
        weights, z = self.weights, self._first_layer(x)

        def cell(state: jax.Array, drive: jax.Array) -> tuple[jax.Array, None]:
            state = jnp.tanh(drive + state @ weights.recurrent)
            for matrix, bias in zip(_matrices(weights.deeper), weights.biases[1:], strict=True):
                state = jnp.tanh(state @ matrix + bias)
            return state, None

        start = jnp.zeros((*z.shape[:-2], self.config.hidden), z.dtype)
        return jax.lax.scan(cell, start, jnp.moveaxis(z, -2, 0))[0] @ weights.unembedding


def initialize_pooled(config: BaselineConfig, key: jax.Array, dtype: Any = jnp.float32) -> PooledMLP:
    """Make a pooled MLP: Gaussian weights of variance 2/fan-in before a relu, 1/fan-in elsewhere."""
    embedding, first, deeper, mixing, unembedding, biases = _draw(config, 2, ("deeper", "square"), key, dtype)
    return PooledMLP(BaselineWeights(embedding, first, None, deeper, biases, mixing, unembedding), config)


def initialize_recurrent(config: BaselineConfig, key: jax.Array, dtype: Any = jnp.float32) -> RecurrentMLP:
    """Make an MLP-RNN: Gaussian weights of variance 1/fan-in; gradients fade if there are inputs."""
    embedding, first, recurrent, deeper, unembedding, biases = _draw(config, 1, ("square", "deeper"), key, dtype)
    return RecurrentMLP(BaselineWeights(embedding, first, recurrent, deeper, biases, None, unembedding), config)


def count_baseline(config: BaselineConfig) -> int:
    """Count the weights of either baseline in closed form."""
    rows = 0 if isinstance(config.inputs, VectorInput) else config.inputs.rows
    d, hidden, layers = config.width, config.hidden, config.layers
    # One square matrix beside the layers - 1 deeper ones: the mixing after the pool, or the recurrence.
    return rows * d + d * hidden + layers * hidden**2 + layers * hidden + hidden * config.outputs


def match_hidden(config: BaselineConfig, target: int, tolerance: float = 0.01) -> BaselineConfig:
    """Choose the hidden width with which a baseline has `target` weights, up to a relative `tolerance`.

    If no hidden width comes within the tolerance, the embedding's width moves too, by as little as will do.

    Raises `UsageError`: no width within a factor of two comes that close.

    Examples
    --------
    >>> from manyheads.transformer.inputs import TokenInput
    >>> matched = match_hidden(BaselineConfig(TokenInput(17), 16, width=32, hidden=1), 20_000)
    >>> abs(count_baseline(matched) / 20_000 - 1) <= 0.01
    True
    """
    within = range(max(1, config.width // 2), 2 * config.width + 1)
    widths = [config.width] if isinstance(config.inputs, VectorInput) else within
    for width in sorted(widths, key=lambda width: abs(width - config.width)):
        candidate = _nearest(replace(config, width=width), target)
        if abs(count_baseline(candidate) / target - 1) <= tolerance:
            return candidate
    given = f"no baseline of {config.layers} layers has {target} weights within {tolerance:.2%}"
    raise UsageError(f"{given}: change the number of layers, the width or the tolerance")


def _nearest(config: BaselineConfig, target: int) -> BaselineConfig:
    """Solve layers h^2 + linear h + constant = target for the hidden width h, and round to the nearer count."""
    constant = count_baseline(replace(config, hidden=1)) - config.width - 2 * config.layers - config.outputs
    linear = config.width + config.layers + config.outputs
    discriminant = linear**2 + 4 * config.layers * max(target - constant, 0)
    low = max(1, (math.isqrt(discriminant) - linear) // (2 * config.layers))
    candidates = [replace(config, hidden=hidden) for hidden in (low, low + 1)]
    return min(candidates, key=lambda candidate: abs(count_baseline(candidate) - target))


def _matrices(deeper: jax.Array | None) -> jax.Array | tuple[()]:
    return () if deeper is None else deeper


def _draw(config: BaselineConfig, gain: int, inner: tuple[str, str], key: jax.Array, dtype: Any) -> list[Any]:
    """Draw embedding, first, inner and last matrices of variance gain/fan-in, then biases of zero.

    Each is drawn from a key of its own that an absent one has too.
    """
    layers, hidden, inputs = config.layers, config.hidden, config.inputs
    known = {"square": (hidden, hidden), "deeper": (layers - 1, hidden, hidden) if layers > 1 else None}
    table = None if isinstance(inputs, VectorInput) else (inputs.rows, config.width)
    shapes = table, (config.width, hidden), *(known[name] for name in inner), (hidden, config.outputs)
    stds = [each**0.5 for each in (1 / inputs.fan_in, gain / config.width, gain / hidden, gain / hidden, 1 / hidden)]
    return [*_gaussians(shapes, stds, key, jnp.dtype(dtype)), jnp.zeros((layers, hidden), dtype)]


# Compiled as a whole, with the stds as data: rounding is that of one array after the other.
@partial(jax.jit, inline=True, static_argnums=(0, 3))
def _gaussians(shapes: tuple[tuple[int, ...] | None, ...], stds: list[float], key: jax.Array, dtype: Any) -> list[Any]:
    keys = jax.random.split(key, len(shapes))
    sizes = {place: math.prod(shape) for place, shape in enumerate(shapes) if shape is not None}
    vectors = draw_vectors(jax.random.normal, keys[jnp.array(list(sizes))], list(sizes.values()), dtype)
    drawn = dict(zip(sizes, vectors, strict=True))
    return [None if shape is None else stds[place] * drawn[place].reshape(shape) for place, shape in enumerate(shapes)]

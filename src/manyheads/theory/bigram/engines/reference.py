r"""Stochastic gradient step in JAX: the engine without the extra `fast`, and the reference of the compiled kernels.

Per sample :math:`b` with context :math:`x`, query :math:`k` and target :math:`y`, with :math:`s = 1^\top a^{(k)}`:

.. math:: \xi_b = \sum_t a^{(k)}_t e_{x_t}, \qquad r_b = \mu + W\xi_b - e_y,

.. math:: G_W = \frac1B \sum_b r_b (\xi_b - s\mu)^\top \mathrm{diag}(1/\mu), \qquad
          G^{(k)}_t = \frac{1}{B\mu_k} \sum_{b:\,k_b=k} (W^\top r_b)_{x_t} - \text{mean over } t.

Contexts are never one-hot: one weighted histogram forward, one gather backward. :math:`W` and everything of its size is
float64, everything of length :math:`T` float32.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from manyheads._trees import PyTree, T
from manyheads.theory.bigram.engines.generator import QUERY, SLOT, TARGET, mix, pick, sample_keys

Pair: TypeAlias = tuple[Array, Array]

FEW = 16  # up to this number of tokens comparing with every threshold is faster than searching
BLOCK = 1 << 22  # words drawn at once, 16 MB


class Tables(NamedTuple):
    """Thresholds of all draws (uint64), positions (N, Q), and the token distribution (N,)."""

    tokens: Any
    slots: Any
    targets: Any
    positions: Any
    stationary: Any


class Rates(NamedTuple):
    """Learning rates, soft threshold and divergence limit of a compiled step."""

    value: Any
    attention: Any
    threshold: Any
    limit: Any


def sum_gradients(value: Array, attention: Array, tables: Tables, keys: Pair, alive: Array) -> Pair:
    """Return the sums over a block of samples behind both gradients: (N, N) float64 and (N, T) float32."""
    tokens, queries, targets = draw_block(tables, keys, attention.shape[1])
    seen = histogram(tokens, attention[queries], len(tables.stationary)).astype(jnp.float64)  # (b, N)
    residual = tables.stationary + seen @ value.T
    residual = residual.at[jnp.arange(len(targets)), targets].add(-1.0) * alive[:, None]
    by_value = residual.T @ (seen - seen.sum(1, keepdims=True) * tables.stationary)
    at_token = jnp.take_along_axis((residual @ value).astype(jnp.float32), tokens, axis=1)  # (b, T)
    return by_value, jnp.zeros_like(attention).at[queries].add(at_token)


def draw_block(tables: Tables, keys: Pair, length: int) -> tuple[Array, Any, Any]:
    """Return the samples of a block of keys, (b,) each: tokens (b, T), queries (b,) and targets (b,)."""
    first, second = keys
    counters = jnp.arange(length, dtype=jnp.uint32)
    tokens = _tokens(mix(counters, first[:, None], second[:, None]), tables.tokens)  # (b, T)
    queries = pick(tables.tokens, mix(QUERY, first, second))
    slots = pick(tables.slots[queries], mix(SLOT, first, second))
    attended = jnp.take_along_axis(tokens, tables.positions[queries, slots][:, None], axis=1)[:, 0]
    return tokens, queries, pick(tables.targets[attended], mix(TARGET, first, second))


def _tokens(words: Array, bounds: Array) -> Array:
    """Count the thresholds that each word reaches."""
    bounds = bounds.astype(jnp.uint32)
    if len(bounds) < FEW:
        counts = jnp.zeros(words.shape, jnp.int32)
        for bound in bounds:
            counts += (words >= bound).astype(jnp.int32)
        return counts
    return jnp.searchsorted(bounds, words, side="right").astype(jnp.int32)


def histogram(tokens: Array, weights: Array, size: int) -> Array:
    """Sum the weights of each token, one row a sample."""
    if size <= FEW:
        return jnp.stack([jnp.where(tokens == token, weights, 0).sum(1) for token in range(size)], axis=1)
    return jax.vmap(lambda row, weight: jnp.zeros(size, weights.dtype).at[row].add(weight))(tokens, weights)


@partial(jax.jit, static_argnames="batch")
def mean_gradients(value: Array, attention: Array, tables: Tables, roots: Array, step: Array, *, batch: int) -> Pair:
    """Return both preconditioned gradients of one step; that of the attention has no mean over the positions."""
    length = attention.shape[1]
    size = min(batch, max(1, BLOCK // length))
    blocks = -(-batch // size)
    first, second = sample_keys(roots, step[None], jnp.arange(blocks * size, dtype=jnp.uint32))
    alive = (jnp.arange(blocks * size) < batch).astype(jnp.float64)

    def add(sums: Pair, block: tuple[Array, ...]) -> tuple[Pair, None]:
        one, two, living = block
        return jax.tree.map(jnp.add, sums, sum_gradients(value, attention, tables, (one, two), living)), None

    start = jnp.zeros_like(value), jnp.zeros_like(attention)
    parts = tuple(part.reshape(blocks, size) for part in (first, second, alive))
    (by_value, by_attention), _ = jax.lax.scan(add, start, parts)
    by_attention = by_attention - by_attention.mean(1, keepdims=True)
    scale = (1 / (batch * tables.stationary)).astype(jnp.float32)
    return by_value / (batch * tables.stationary), by_attention * scale[:, None]


def shrink(rows: Array, threshold: Array) -> Array:
    """Soft threshold: move every weight towards zero by `threshold`; smaller ones become zero."""
    return rows - jnp.clip(rows, -threshold, threshold)


@partial(jax.jit, static_argnames=("batch", "shrinking"))
def descend_in_jax(
    state: Pair, tables: Tables, roots: Array, span: Pair, rates: Rates, *, batch: int, shrinking: bool
) -> tuple[Array, Array, Array, Array]:
    """Make the steps from `span[0]` on, before `span[1]`; stop where an entry of the value passes `rates.limit`.

    Returns value, attention, the first step that was not made, and the largest entry of the value.
    """

    def step(carry: PyTree) -> PyTree:
        value, attention, number, _ = carry
        by_value, by_attention = mean_gradients(value, attention, tables, roots, number.astype(jnp.uint32), batch=batch)
        value = value - rates.value * by_value
        attention = attention - rates.attention.astype(jnp.float32) * by_attention
        if shrinking:
            attention = shrink(attention, rates.threshold.astype(jnp.float32))
        return value, attention, number + 1, jnp.abs(value).max()

    def more(carry: PyTree) -> Array:
        return (carry[2] < span[1]) & (carry[3] <= rates.limit)  # false for NaN

    return jax.lax.while_loop(more, step, (*state, span[0], jnp.zeros(())))


def as_jax(tree: T) -> T:
    """Move NumPy arrays and numbers to JAX: integers as int64, numbers as float64, inside `jax.enable_x64`."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)

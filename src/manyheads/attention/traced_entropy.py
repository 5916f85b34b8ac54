"""Streaming attention entropy in JAX: compiled loops over heads and blocks of rows, small in the backward pass too.

With `BANDS` bands of rows a causal mask costs (1 + 1/BANDS) / 2 of what no mask costs.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from manyheads._trees import PyTree
from manyheads.attention.masks import Mask
from manyheads.attention.softmax import align, batch_of, reduce_rows

BANDS = 7  # at most, of rows, each with the keys that a rule lets it see; each is compiled on its own
PIECES = 4  # at least, blocks of rows in a band


@partial(jax.jit, static_argnames="block")
def traced_entropy(
    q: jax.Array, k: jax.Array, scale: float | jax.Array, rule: Mask | None, block: int
) -> tuple[jax.Array, jax.Array]:
    """Compute `attention_entropy` in JAX."""
    batch = batch_of(q, k, rule)
    q, k, rule = align(q, k, rule, jnp.promote_types(jnp.result_type(q, k), jnp.float32))

    def one_head(operands: tuple[jax.Array, jax.Array, Mask | None]) -> tuple[jax.Array, jax.Array]:
        q, k, rule = operands
        shape = q.shape[0], k.shape[0]
        parts = []
        for band, keys in _bands(rule, shape, block):

            def reduce(q_rows: jax.Array, rows: jax.Array, keys: slice = keys) -> tuple[jax.Array, jax.Array]:
                # The highest precision: accelerators otherwise round float32 factors to ten bits.
                products = jnp.matmul(q_rows, k[keys].T, precision=jax.lax.Precision.HIGHEST)  # (rows, keys)
                masks = (None, None) if rule is None else (f(rows, shape, keys) for f in (rule.allowed, rule.bias))
                return reduce_rows(products * jnp.asarray(scale, q.dtype), *masks)

            parts.append(_over_rows(reduce, q, band, block))
        return jax.tree.map(lambda *pieces: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), *parts)

    return _over_leading(one_head, (q, k, rule), batch, max(1, block // max(1, q.shape[-2])))


def _over_leading(function: Callable[..., PyTree], operands: PyTree, batch: tuple[int, ...], together: int) -> PyTree:
    """Apply `function` over leading axes that broadcast, at most `together` members at a time.

    Every leaf of `operands` has one axis per entry of `batch`, of that size or of size 1, which is shared, not copied.
    """
    if not batch:
        return function(operands)
    size, inner = batch[0], batch[1:]
    leaves, structure = jax.tree.flatten(operands)
    moving = [leaf.shape[0] == size for leaf in leaves]

    def member(parts: list[jax.Array]) -> PyTree:
        fresh = iter(parts)
        chosen = [next(fresh) if moves else leaf[0] for leaf, moves in zip(leaves, moving, strict=True)]
        return _over_leading(function, jax.tree.unflatten(structure, chosen), inner, together)

    parts = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
    chunk = together // max(1, math.prod(inner))
    if chunk >= size:
        return jax.vmap(member)(parts)
    return jax.lax.map(member, parts, batch_size=chunk if chunk > 1 else None)


def _bands(rule: Mask | None, shape: tuple[int, int], block: int) -> list[tuple[range, slice]]:
    """Return bands of consecutive rows with the keys that they may see; one band if all may see every key."""
    n, m = shape
    count = min(BANDS, n // (PIECES * block))
    edges = [n * band // count for band in range(count + 1)] if count else []
    bands = [range(start, stop) for start, stop in pairwise(edges)]
    reached = [range(m) if rule is None else rule.reach(band, shape) for band in bands]
    if all(len(keys) == m for keys in reached):
        return [(range(n), slice(0, m))]
    return [(band, slice(keys.start, keys.stop)) for band, keys in zip(bands, reached, strict=True)]


def _over_rows(function: Callable[..., PyTree], q: jax.Array, band: range, block: int) -> PyTree:
    """Apply `function(q rows, row numbers)` to equal pieces of at most `block` rows of a band of q (n, N)."""

    # The checkpoint makes the backward pass compute a piece again instead of keeping all exponentials; the row numbers
    # depend on the queries, since the backward pass would otherwise hold the mask of all rows.
    @jax.checkpoint
    def piece_of(q: jax.Array, rows: jax.Array) -> PyTree:
        return function(*jax.lax.optimization_barrier((q, rows)))

    n, q = len(band), q[band.start : band.stop]
    pieces = max(1, -(-n // block))
    if pieces == 1:
        return piece_of(q, np.arange(band.start, band.stop))
    height = -(-n // pieces)
    padded = jnp.pad(q, ((0, pieces * height - n), (0, 0)))
    # Rows beyond the last are cut off below.
    rows = np.minimum(np.arange(band.start, band.start + pieces * height), band.stop - 1)
    operands = padded.reshape(pieces, height, -1), rows.reshape(pieces, height)
    results = jax.lax.map(lambda piece: piece_of(*piece), operands)
    return jax.tree.map(lambda result: result.reshape(pieces * height)[:n], results)

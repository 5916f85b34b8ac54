"""Streaming attention entropy: a few query rows at a time against all keys.

Row r attends with p_j = exp(s_j - lse), s_j = scale q_r . k_j. With the row's largest logit subtracted,

    Z = sum_j exp(s_j - max),    lse = max + log Z,    H = log Z - sum_j exp(s_j - max) (s_j - max) / Z,

both terms of H are non-negative, so nothing cancels. The shorter formula lse - E_p[s] cancels at large logits; the
common -sum p log(p + 1e-8) is biased downwards. With Z = z 2^k, 1 <= z < 2, the whole part k log 2 is added last and
without error of its own: a long row, whose entropy is large, is rounded once.

Keys that a rule hides from a band of rows are left out: with `BANDS` bands a causal mask costs (1 + 1/BANDS) / 2 of
what no mask costs.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import follows_caller
from manyheads.attention.masks import Mask, add_bias, as_rule, evaluate, shift_rows
from manyheads.errors import ShapeError, check_integer

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float

    from manyheads.attention.masks import MaskLike


# log 2 in two parts: the first has 16 bits, so that its product with a whole number below 256 is exact in float32.
LOG2_HIGH = 45426 / 65536
LOG2_LOW = math.log(2) - LOG2_HIGH

BANDS = 7
"""Most bands of rows, each with the keys that a rule lets it see; each is compiled on its own."""

PIECES = 4
"""Fewest blocks of rows in a band."""


@follows_caller
def attention_entropy(
    q: "Float[ArrayLike, '... n key_dim']",
    k: "Float[ArrayLike, '... m key_dim']",
    *,
    scale: "float | Float[Array, ''] | None" = None,
    mask: "MaskLike" = None,
    block: int = 128,
) -> "tuple[Float[Array, '... n'], Float[Array, '... n']]":
    """Entropy and log-sum-exp of every attention row, without the n x m pattern.

    H_r = -sum_j p_rj log p_rj,  lse_r = log sum_j exp(s_rj),  s = scale q k^T + bias, over the allowed keys.

    Parameters
    ----------
    q, k
        Queries (..., n, N) and keys (..., m, N), floating. Leading axes broadcast: with grouped heads give queries
        (..., groups, heads per group, n, N) and keys (..., groups, 1, m, N). bfloat16 and float16 are computed in
        float32.
    scale
        Factor on the dot products; None means N**-0.5.
    mask
        Booleans that broadcast to (..., n, m), True where attending is allowed, or a rule of
        `manyheads.attention.masks`. n queries count as the last n of the m keys. Floats of that shape are the bias:
        additive masks as transformers builds them, ALiBi, relative positions. Both: `np.where(allowed, bias, -np.inf)`
        or `causal & bias`.
    block
        At most so many query rows at a time. The extra memory is a few arrays of block x m numbers, in the backward
        pass too, whatever n and the number of heads; under `jax.vmap`, that much for each member.

    Returns
    -------
    entropy, logsumexp
        (..., n), in nats; the first lies in [0, log(number of allowed keys)]. A row that may attend to nothing has
        entropy 0 and log-sum-exp -inf.

    Raises
    ------
    ShapeError
        Shapes or dtypes that do not fit together.
    UsageError
        `block` is below 1.

    Notes
    -----
    The error against double precision is at most 4 eps max(1, max |s|), eps being that of the dtype computed in, as
    long as H < 8. Beyond, in nearly uniform rows of more than 2980 keys, rounding the exact entropy to float32 alone
    may cost 4 eps (for H < 16), and the error is at most 8 eps. Measured for float32, logits from 0.1 to 3000 and 128
    to 4096 keys: 0.9 of 4 eps max(1, max |s|) up to 2048 keys, 1.4 of it at 4096.

    Examples
    --------
    Queries of zero attend uniformly, here to one, two and three keys:

    >>> import numpy as np
    >>> from manyheads.attention import attention_entropy, causal
    >>> entropy, logsumexp = attention_entropy(np.zeros((3, 4)), np.ones((3, 4)), mask=causal)
    >>> np.exp(entropy).round(12)
    array([1., 2., 3.])
    """
    q, k = (array if isinstance(array, jax.Array) else np.asarray(array) for array in (q, k))
    rule = as_rule(mask)
    _check(q, k, rule, block)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _compiled(q, k, scale, rule, int(block))


def _check(q: Any, k: Any, rule: Mask | None, block: int) -> None:
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], k.shape[-2]):
        raise ShapeError(f"queries {q.shape} and keys {k.shape}: expected (..., n, N) and (..., m, N) with m, N >= 1")
    if not (jnp.issubdtype(q.dtype, jnp.floating) and jnp.issubdtype(k.dtype, jnp.floating)):
        raise ShapeError(f"queries of dtype {q.dtype} and keys of dtype {k.dtype}: give real floating-point arrays")
    check_integer("block", block)
    batch_shapes = [q.shape[:-2], k.shape[:-2], *([] if rule is None else [rule.batch_shape])]
    try:
        np.broadcast_shapes(*batch_shapes)
    except ValueError as error:
        raise ShapeError(
            f"leading axes of queries, keys and mask {batch_shapes} do not broadcast; a mask for (batch, heads, n, m) "
            "needs an axis of size 1 for the heads"
        ) from error
    evaluate(rule, (q.shape[-2], k.shape[-2]), np.arange(1))  # refuses a mask that does not fit


@partial(jax.jit, static_argnames="block")
def _compiled(q: Any, k: Any, scale: Any, rule: Mask | None, block: int) -> tuple[Any, Any]:
    dtype = jnp.promote_types(jnp.result_type(q, k), jnp.float32)
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], () if rule is None else rule.batch_shape)
    depth = len(batch)
    q, k = (array.astype(dtype).reshape((1,) * (depth + 2 - array.ndim) + array.shape) for array in (q, k))
    rule = None if rule is None else rule.align(depth)

    def one_head(operands: Any) -> tuple[Any, Any]:
        q, k, rule = operands
        shape = q.shape[0], k.shape[0]
        parts = []
        for band, keys in _bands(rule, shape, block):

            def reduce(q_rows: Any, rows: Any, keys: range = keys) -> tuple[Any, Any]:
                added = None if rule is None else rule.bias(rows, shape)
                return _reduce(q_rows, k, scale, (evaluate(rule, shape, rows), added), keys)

            parts.append(_over_rows(reduce, q, band, block))
        return jax.tree.map(lambda *pieces: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), *parts)

    found: tuple[Any, Any] = _over_leading(one_head, (q, k, rule), batch, max(1, block // max(1, q.shape[-2])))
    return found


def _over_leading(function: Callable[..., Any], operands: Any, batch: tuple[int, ...], together: int) -> Any:
    """Apply `function` over leading axes that broadcast, at most `together` members at a time.

    Every leaf of `operands` carries one axis per entry of `batch`, of that size or of size 1. What has size 1 is
    shared by the loop and not copied.
    """
    if not batch:
        return function(operands)
    size, inner = batch[0], batch[1:]
    leaves, structure = jax.tree.flatten(operands)
    moving = [leaf.shape[0] == size for leaf in leaves]

    def member(parts: list[Any]) -> Any:
        fresh = iter(parts)
        chosen = [next(fresh) if moves else leaf[0] for leaf, moves in zip(leaves, moving, strict=True)]
        return _over_leading(function, jax.tree.unflatten(structure, chosen), inner, together)

    parts = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
    chunk = together // max(1, math.prod(inner))
    if chunk >= size:
        return jax.vmap(member)(parts)
    return jax.lax.map(member, parts, batch_size=chunk if chunk > 1 else None)


def _bands(rule: Mask | None, shape: tuple[int, int], block: int) -> list[tuple[range, range]]:
    """Return bands of consecutive rows with the keys that they may see; one band if all may see every key."""
    n, m = shape
    count = min(BANDS, n // (PIECES * block))
    edges = [n * band // count for band in range(count + 1)] if count else []
    bands = [range(start, stop) for start, stop in pairwise(edges)]
    reached = [(band, range(m) if rule is None else rule.reach(band, shape)) for band in bands]
    return reached if any(len(keys) < m for _, keys in reached) else [(range(n), range(m))]


def _over_rows(function: Callable[..., Any], q: Any, band: range, block: int) -> Any:
    """Apply `function(q rows, row numbers)` to equal pieces of at most `block` rows of a band of q (n, N).

    Equal pieces waste fewer rows on padding than full ones and a remainder: less than one row per piece.
    """
    # The checkpoint makes the backward pass compute a piece again instead of keeping all n x m exponentials.
    function = jax.checkpoint(_tied(function))
    n, q = len(band), q[band.start : band.stop]
    pieces = max(1, -(-n // block))
    if pieces == 1:
        return function(q, np.arange(band.start, band.stop))
    height = -(-n // pieces)
    padded = jnp.pad(q, ((0, pieces * height - n), (0, 0)))
    # Rows beyond the last are cut off below.
    rows = np.minimum(np.arange(band.start, band.start + pieces * height), band.stop - 1)
    operands = padded.reshape(pieces, height, -1), rows.reshape(pieces, height)
    results = jax.lax.map(lambda piece: function(*piece), operands)
    return jax.tree.map(lambda result: result.reshape(pieces * height)[:n], results)


def _tied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the row numbers depend on the queries, as differentiation sees it.

    It would otherwise compute the mask of all rows once for the backward pass of all heads: n x m booleans.
    """
    return lambda q, rows: function(*jax.lax.optimization_barrier((q, rows)))


def _reduce(q: Any, k: Any, scale: Any, masks: tuple[Any, Any], keys: range) -> tuple[Any, Any]:
    """Return entropy and log-sum-exp of some rows, from the keys that they may see and what is added to the logits."""
    allowed, bias = (
        mask if mask is None or mask.shape[-1] == 1 else mask[..., keys.start : keys.stop] for mask in masks
    )
    k = k[keys.start : keys.stop]
    # The highest precision: accelerators otherwise round float32 factors to ten bits.
    logits = jnp.matmul(q, k.T, precision=jax.lax.Precision.HIGHEST) * jnp.asarray(scale, q.dtype)  # (rows, m)
    logits, level = add_bias(logits, bias, allowed)
    row = shift_rows(logits, True if allowed is None else allowed)
    total = row.safe_total[:, 0]
    entropy = _add_log(-jnp.sum(row.exponentials * row.shifted, axis=-1) / total, total)
    return entropy, jnp.where(row.empty[:, 0], -jnp.inf, (level + row.shift)[:, 0] + jnp.log(total))


def _add_log(term: Any, total: Any) -> Any:
    """Return term + log(total) for total >= 1, rounded once where the logarithm is large."""
    mantissa, exponent = jax.lax.stop_gradient(jnp.frexp(total))
    unit = 2 * mantissa / total  # a power of two, exactly; total * unit lies in [1, 2), and log(1) = 0 stays exact
    whole = (exponent - 1).astype(total.dtype)
    return whole * LOG2_HIGH + (jnp.log(total * jax.lax.stop_gradient(unit)) + whole * LOG2_LOW + term)

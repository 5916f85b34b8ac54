"""Streaming attention entropy: a few query rows at a time against all keys.

Row r attends with p_j = exp(s_j - lse), s_j = scale q_r . k_j. With the row's largest logit subtracted,

    Z = sum_j exp(s_j - max),    lse = max + log Z,    H = log Z - sum_j exp(s_j - max) (s_j - max) / Z,

both terms of H are non-negative, so nothing cancels. The shorter formula lse - E_p[s] cancels at large logits; the
common -sum p log(p + 1e-8) is biased downwards.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from manyheads._arrays import follows_arrays
from manyheads._namespaces import Array, cast, in_common_dtype, is_torch, kind, like, namespace
from manyheads.attention.masks import Mask, as_array, as_rule, causal, cut, evaluate, part_of
from manyheads.attention.softmax import align, batch_of, reduce_rows
from manyheads.errors import ShapeError, check_integer

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Float

    from manyheads.attention.masks import MaskLike

Reduced = tuple[Array, Array]  # entropy and log-sum-exp of rows


@follows_arrays
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
    may cost 4 eps (for H < 16), and the error is at most 8 eps. Tensors on a GPU
    without gradients and with no mask but `causal` take one pass of a kernel, which has run under Triton's interpreter
    on a CPU only; there its error is at most 16 eps max(1, scale |q| |k|).

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.attention import attention_entropy, causal
    >>> entropy, logsumexp = attention_entropy(np.zeros((3, 4)), np.ones((3, 4)), mask=causal)
    >>> np.exp(entropy).round(12)
    array([1., 2., 3.])
    """
    queries, of_keys, rule = as_array(q, "queries"), as_array(k, "keys"), as_rule(mask)
    _check(queries, of_keys, rule, block)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if namespace(queries, of_keys, scale, rule).__name__ == "jax.numpy":
        from manyheads.attention.traced_entropy import traced_entropy

        return traced_entropy(queries, of_keys, scale, rule, int(block))
    if is_torch(queries) and is_torch(of_keys) and (rule is None or rule is causal) and not hasattr(scale, "shape"):
        from manyheads.attention.flash_kernel import serves

        wanted = queries.requires_grad or of_keys.requires_grad
        if queries.dtype == of_keys.dtype and queries.element_size() <= 4 and not wanted and serves(queries):
            return _by_kernel(queries, of_keys, float(scale), rule is causal)
    return _stream(queries, of_keys, scale, rule, int(block))


def _by_kernel(q: Array, k: Array, scale: float, falling: bool) -> Reduced:
    """Take both figures of all rows from one pass on a GPU; heads that share keys are not copied."""
    from manyheads.attention.flash_kernel import attend

    batch = batch_of(q, k, None)
    shared = batch[-1] if batch and k.ndim == len(batch) + 2 and k.shape[-3] == 1 else 1
    queries = q.expand(*batch, *q.shape[-2:]).reshape(1, -1, *q.shape[-2:])
    parts = (*batch[:-1], 1) if shared > 1 else batch
    keys = k.expand(*parts, *k.shape[-2:]).reshape(1, -1, *k.shape[-2:])
    found = attend(queries, keys, None, ("entropy", "logsumexp"), scale=scale, causal=falling)[1]
    entropy, logsumexp = (found[name].reshape(*batch, q.shape[-2]) for name in ("entropy", "logsumexp"))
    return entropy.clamp_min(0.0), logsumexp


def _check(q: Array, k: Array, rule: Mask | None, block: int) -> None:
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], k.shape[-2]):
        given = f"queries {tuple(q.shape)} and keys {tuple(k.shape)}"
        raise ShapeError(f"{given}: expected (..., n, N) and (..., m, N) with m, N >= 1")
    if kind(q) != "f" or kind(k) != "f":
        raise ShapeError(f"queries of dtype {q.dtype} and keys of dtype {k.dtype}: give real floating-point arrays")
    check_integer("block", block)
    try:
        batch_of(q, k, rule)
    except ValueError as error:
        shapes = [tuple(q.shape[:-2]), tuple(k.shape[:-2]), *([] if rule is None else [rule.batch_shape])]
        remedy = "a mask for (batch, heads, n, m) needs an axis of size 1 for the heads"
        raise ShapeError(f"leading axes of queries, keys and mask {shapes} do not broadcast; {remedy}") from error
    evaluate(rule, (q.shape[-2], k.shape[-2]), np.arange(1))  # refuses a mask that does not fit


def _stream(q: Array, k: Array, scale: Array, rule: Mask | None, block: int) -> Reduced:
    """Loop over blocks of rows of one head, or of several heads that are shorter than a block."""
    batch, pattern, xp = batch_of(q, k, rule), (q.shape[-2], k.shape[-2]), namespace(q)
    (q, k), dtype = in_common_dtype(q, k)
    q, k, rule = align(q, k, rule, xp.promote_types(dtype, xp.float32))
    scale = cast(scale, q.dtype)
    reduce: Callable[..., Reduced] = _reduce
    if xp is np and (rule is None or rule.bias(np.arange(1), pattern) is None):
        k = np.ascontiguousarray(k.swapaxes(-1, -2)).swapaxes(-1, -2)  # as products read it
        reduce = _in_place(np.empty((2, min(block, math.prod(batch) * pattern[0]) * pattern[1]), q.dtype))
    elif is_torch(q) and xp.is_grad_enabled():
        import torch.utils.checkpoint as checkpoint

        # Once more in the backward pass instead of keeping all n x m exponentials.
        reduce = functools.partial(checkpoint.checkpoint, _reduce, use_reentrant=False)
    found = []
    for *index, rows in _parts((*batch, pattern[0]), block):
        span = range(*rows.indices(pattern[0]))
        reach = range(pattern[1]) if rule is None else rule.reach(span, pattern)
        keys = slice(reach.start, max(reach.stop, reach.start + 1))
        queries = cut(q, tuple(index))[..., rows, :] * scale
        place = part_of(rule, tuple(index)), span, pattern, keys
        found.append(reduce(queries, cut(k, tuple(index))[..., keys, :].swapaxes(-1, -2), *place))
    entropy, logsumexp = (xp.concat([each.reshape(-1) for each in parts]) for parts in zip(*found, strict=True))
    return entropy.reshape(*batch, pattern[0]), logsumexp.reshape(*batch, pattern[0])


def _parts(sizes: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of axes, at most `most` entries at a time, in the order of the entries."""
    steps = [max(1, most // max(1, math.prod(sizes[axis + 1 :]))) for axis in range(len(sizes))]
    ranges = (range(0, max(1, size), step) for size, step in zip(sizes, steps, strict=True))
    for starts in itertools.product(*ranges):
        yield tuple(slice(each, min(each + step, size)) for each, step, size in zip(starts, steps, sizes, strict=True))


def _reduce(q: Array, k: Array, rule: Mask | None, span: range, pattern: tuple[int, int], keys: slice) -> Reduced:
    logits, rows = q @ k, np.arange(span.start, span.stop, dtype=np.int32)
    masks = (None, None) if rule is None else (rule.allowed(rows, pattern, keys), rule.bias(rows, pattern, keys))
    return reduce_rows(logits, *(like(logits, mask) for mask in masks))


def _in_place(space: np.ndarray) -> Callable[..., Reduced]:
    """Return a reduction of NumPy arrays: logits and exponentials of every block lie in the same place."""

    def reduce(q: Array, k: Array, rule: Mask | None, span: range, pattern: tuple[int, int], keys: slice) -> Reduced:
        shape = (*batch_of(q, k, rule), q.shape[-2], k.shape[-1])
        logits, room = (each[: math.prod(shape)].reshape(shape) for each in space)
        np.matmul(q, k, out=logits)
        if rule is not None:
            free, first = rule.free(span, pattern), keys.start
            if free.start <= first:
                first = min(max(first, free.stop), keys.stop)
            rows = np.arange(span.start, span.stop, dtype=np.int32)
            allowed = rule.allowed(rows, pattern, slice(first, keys.stop))
            np.copyto(logits[..., first - keys.start :], -np.inf, where=~allowed)
        return reduce_rows(logits, None, None, room)

    return reduce

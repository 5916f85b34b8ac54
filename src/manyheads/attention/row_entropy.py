"""Rows of logits: their log-sum-exp and entropy, in NumPy and PyTorch.

With Z = z 2^k, 1 <= z < 2, the whole part k log 2 of log Z is added last and without error of its own: a long row,
whose entropy is large, is rounded once.
"""

import math

import numpy as np

from manyheads._namespaces import Array, DType, cast, namespace, without_gradient
from manyheads.attention.masks import Mask
from manyheads.attention.softmax import add_bias, shift_rows

# log 2 in two parts: the first has 16 bits, so that its product with a whole number below 256 is exact in float32.
LOG2_HIGH = 45426 / 65536
LOG2_LOW = math.log(2) - LOG2_HIGH


def batch_of(q: Array, k: Array, rule: Mask | None) -> tuple[int, ...]:
    """Return the leading axes of the result."""
    return np.broadcast_shapes(q.shape[:-2], k.shape[:-2], () if rule is None else rule.batch_shape)


def align(q: Array, k: Array, rule: Mask | None, dtype: DType) -> tuple[Array, Array, Mask | None]:
    """Give queries, keys and mask equally many leading axes, and the first two a dtype."""
    depth = len(batch_of(q, k, rule))
    q, k = (cast(each, dtype).reshape((1,) * (depth + 2 - each.ndim) + tuple(each.shape)) for each in (q, k))
    return q, k, None if rule is None else rule.align(depth)


def reduce_rows(logits: Array, allowed: Array, bias: Array, room: Array = None) -> tuple[Array, Array]:
    """Return entropy and log-sum-exp of rows from logits (..., m), which NumPy overwrites, and their bias.

    NumPy puts exponentials into `room`.
    """
    logits, level = add_bias(logits, bias, allowed)
    row = shift_rows(logits, True if allowed is None else allowed, room)
    xp, total = namespace(logits), row.safe_total[..., 0]
    weighted = np.vecdot(row.exponentials, row.shifted) if xp is np else xp.sum(row.exponentials * row.shifted, axis=-1)
    entropy = _add_log(-weighted / total, total)
    return entropy, xp.where(row.empty[..., 0], -math.inf, (level + row.shift)[..., 0] + xp.log(total))


def _add_log(term: Array, total: Array) -> Array:
    """Return term + log(total) for total >= 1, rounded once where the logarithm is large."""
    xp = namespace(total)
    mantissa, exponent = (without_gradient(part) for part in xp.frexp(without_gradient(total)))
    unit = 2 * mantissa / without_gradient(total)  # a power of two, exactly; total * unit lies in [1, 2)
    whole = cast(exponent - 1, total.dtype)
    return whole * LOG2_HIGH + (xp.log(total * unit) + whole * LOG2_LOW + term)

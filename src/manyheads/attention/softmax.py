"""Softmax over the allowed keys of attention rows, the sums that it is made of, and the entropy of the rows.

With Z = z 2^k, 1 <= z < 2, the whole part k log 2 of log Z is added last and without error of its own: a long row,
whose entropy is large, is rounded once.
"""

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from manyheads._arrays import follows_arrays
from manyheads._namespaces import (
    Array,
    DType,
    cast,
    in_common_dtype,
    is_jax,
    is_torch,
    like,
    namespace,
    row_maximum,
    without_gradient,
)
from manyheads.attention.masks import Mask, as_array

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Bool, Float


@follows_arrays
def masked_softmax(
    logits: "Float[ArrayLike, '... m']", allowed: "Bool[ArrayLike, '... m'] | None" = None
) -> "Float[Array, '... m']":
    """Softmax over the allowed keys, exactly zero on the others and on a row that may attend to nothing.

    p_j = exp(s_j) / sum_{l allowed} exp(s_l) for allowed j, else 0. The derivative is finite everywhere; it is zero on
    a row without any key, and a forbidden logit, even an infinite one, does not reach the result. `allowed` broadcasts
    to the logits (..., m); None allows everything.

    Examples
    --------
    >>> import numpy as np
    >>> masked_softmax(np.zeros((2, 2)), np.array([[True, False], [False, False]])).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    logits = as_array(logits, "logits")
    (computed,), dtype = in_common_dtype(logits)
    return cast(softmax(np.array(computed) if namespace(logits, allowed) is np else computed, allowed), dtype)


def softmax(logits: Array, allowed: Array | None = None) -> Array:
    """Softmax of floating logits over the allowed keys; an array of NumPy is overwritten."""
    if is_torch(logits):  # its own softmax keeps nothing but the result for the backward pass
        xp, finite = namespace(logits), logits != -math.inf
        allowed = finite if allowed is None else finite & allowed
        empty = ~allowed.any(-1, keepdim=True)
        elsewhere = xp.where(empty, 0.0, -math.inf).to(logits.dtype)
        return xp.where(empty, 0.0, xp.softmax(xp.where(allowed, logits, elsewhere), -1))
    if allowed is None and is_jax(logits):
        return sys.modules["jax"].nn.softmax(logits, axis=-1)
    row = shift_rows(logits, True if allowed is None else allowed, logits)
    if isinstance(row.exponentials, np.ndarray):
        return np.divide(row.exponentials, row.safe_total, out=row.exponentials)
    return row.exponentials / row.safe_total


class ShiftedRows(NamedTuple):
    """The pieces of a softmax over the allowed keys, as every reduction over a row needs them."""

    shift: Array  # (..., 1) largest allowed logit, or 0 without any; no derivative flows through it
    shifted: Array  # (..., m) logits - shift, finite where the exponential is 0
    exponentials: Array  # (..., m) exp(shifted), 0 on forbidden keys
    empty: Array  # (..., 1) True where nothing may be attended to
    safe_total: Array  # (..., 1) sum of the exponentials, 1 where the row is empty


def shift_rows(logits: Array, allowed: Array | bool = True, out: Array | None = None) -> ShiftedRows:
    """Subtract from each row its largest allowed logit and exponentiate.

    A softmax does not depend on the shift, hence the stopped derivative. Both `where` are needed: without the inner one
    a forbidden logit that overflows turns the derivative into 0 * inf. Logits of NumPy are overwritten by the shifted
    ones, or by the exponentials if they are `out`, where NumPy puts these.
    """
    xp = namespace(logits, allowed)
    if xp is np:
        shift, shifted, exponentials = _exponentials(logits, allowed, out)
    else:
        # A logit that overflowed to -inf has no weight; as an allowed key it would make 0 * inf of p log p.
        allowed = allowed & (logits != -math.inf)
        peak = row_maximum(xp.where(allowed, logits, -math.inf))
        shift = without_gradient(xp.where(peak == -math.inf, 0, peak))
        shifted = xp.where(allowed, logits - shift, 0)
        exponentials = xp.where(allowed, xp.exp(shifted), 0)
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    empty = total == 0
    return ShiftedRows(shift, shifted, exponentials, empty, xp.where(empty, 1, total))


def _exponentials(logits: np.ndarray, allowed: Array, out: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shift, shifted logits and exponentials of NumPy arrays in few passes over little memory.

    Exponentials that would be subnormal, 30 times slower than others, are zero.
    """
    if allowed is not True:
        shape = np.broadcast_shapes(logits.shape, allowed.shape)
        if shape != logits.shape:
            logits, out = np.array(np.broadcast_to(logits, shape)), None
        np.copyto(logits, -np.inf, where=~allowed)
    peak = row_maximum(logits)
    shift = np.where(peak == -np.inf, 0, peak)
    logits -= shift
    least = math.log(np.finfo(logits.dtype).tiny)
    gone = logits < least
    if not gone.any():
        return shift, logits, np.exp(logits, out=out)
    np.maximum(logits, least, out=logits)
    out = np.exp(logits, out=out)
    np.copyto(out, 0, where=gone)
    return shift, logits, out


def add_bias(logits: Array, bias: Array | None, allowed: Array | None) -> tuple[Array, Array]:
    """Add a bias minus its row maximum over the allowed keys, to limit rounding; return the maximum too."""
    xp = namespace(logits, bias)
    if bias is None:
        return logits, like(logits, np.zeros((1, 1), np.float32))
    bias = cast(bias, xp.promote_types(bias.dtype, logits.dtype))
    level = without_gradient(row_maximum(xp.where(allowed, bias, -math.inf)))
    level = xp.where(level == -math.inf, 0, level)
    return logits + cast(bias - level, logits.dtype), cast(level, logits.dtype)


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

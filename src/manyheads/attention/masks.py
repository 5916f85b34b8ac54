"""Attention masks: boolean arrays, additive arrays and rules.

A mask is a boolean array that broadcasts to (..., n, m), True where query row r may attend to key j, an additive array
(below), or a rule that is evaluated on indices, so that streaming code never holds n x m booleans. Rules combine with
`&`, also with an array: what both allow, and the sum of what they add.

**Additive arrays** are added to the logits: the masks of transformers, ALiBi, relative positions. An entry of -inf, or
of at most half the lowest number of its dtype (half that of float32 for float64), forbids its key: masks are built of
the lowest number, and some are added to a bias. Every other entry is a number, so that a row of -1e9 alone attends as a
row of 0; a row whose keys are all forbidden attends to nothing, whatever forbids them.

**Where the queries stand.** n queries against m >= n keys are the *last* n of the m positions: row r stands at position
m - n + r. With n = m this is the usual square; with n = 1 it is a decoding step against a cache. (torch's `is_causal`
aligns the first query with the first key instead; the two agree for n = m.)
"""

import abc
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from manyheads._arrays import check_arrays
from manyheads._namespaces import Array, is_jax, is_traced, kind, like, lowest, namespace
from manyheads._trees import Tree, map_leaves, static
from manyheads.errors import ShapeError, check_integer

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Int

    MaskLike: TypeAlias = "Mask | ArrayLike | None"

ALL = slice(None)


class Mask(Tree, abc.ABC):
    """A rule that says which key positions a query may attend to.

    Rules are pytrees, whose arrays may be traced, or tensors, and may carry leading batch axes.
    """

    # NumPy then leaves `array & rule` to the rule.
    __array_ufunc__ = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes that the rule brings along."""
        return ()

    def align(self, depth: int) -> "Mask":
        """Give every array that the rule holds exactly `depth` leading axes, the new ones of size 1."""
        return self

    @abc.abstractmethod
    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        """Evaluate on query rows (r,), None for all, and some keys of an (n, m) pattern: broadcasts to (..., r, m)."""

    def bias(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        """Evaluate what is added to the logits, finite where attending is allowed; None for nothing."""
        return None

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        """Return keys outside of which consecutive query rows of an (n, m) pattern may attend to nothing."""
        return range(shape[1])

    def free(self, rows: range, shape: tuple[int, int]) -> range:
        """Return keys that consecutive query rows of an (n, m) pattern may all attend to, not necessarily every one."""
        return range(0)

    def __and__(self, other: "MaskLike") -> "Mask":
        """Allow what both allow; None allows everything."""
        return self if (rule := as_rule(other)) is None else _Both(self, rule)

    def __rand__(self, other: "MaskLike") -> "Mask":
        return self if (rule := as_rule(other)) is None else _Both(rule, self)


def _positions(rows: Array, shape: tuple[int, int], keys: slice) -> tuple[Array, Array]:
    """Return the positions of queries (r, 1) and of keys on the common axis of length m."""
    n, m = shape
    if n > m:
        remedy = "a rule about positions takes the queries for the last n of the m keys; else give a boolean array"
        raise ShapeError(f"{n} queries and {m} keys: {remedy}")
    rows = np.arange(n, dtype=np.int32) if rows is None else rows
    return rows[:, None] + (m - n), np.arange(m, dtype=np.int32)[keys]


@final
class _Causal(Mask):
    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        query, key = _positions(rows, shape, keys)
        return key <= query

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        return range(rows.stop + shape[1] - shape[0])

    def free(self, rows: range, shape: tuple[int, int]) -> range:
        return range(rows.start + shape[1] - shape[0] + 1)


@final
class _SlidingWindow(Mask):
    width: int = static()

    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        query, key = _positions(rows, shape, keys)
        return abs(query - key) < self.width

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        n, m = shape
        return range(max(0, rows.start + m - n - self.width + 1), min(m, rows.stop + m - n + self.width - 1))

    def free(self, rows: range, shape: tuple[int, int]) -> range:
        n, m = shape
        return range(max(0, rows.stop + m - n - self.width), min(m, rows.start + m - n + self.width))


@final
class _Padding(Mask):
    lengths: Array  # (...)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.lengths.shape)

    def align(self, depth: int) -> Mask:
        return _Padding(_prepend_axes(self.lengths, depth - self.lengths.ndim))

    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        return like(self.lengths, np.arange(shape[1])[keys]) < self.lengths[..., None, None]


class _Table(Mask):
    table: Array  # (..., n or 1, m or 1)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.table.shape[:-2])

    def align(self, depth: int) -> Mask:
        return type(self)(_prepend_axes(self.table, depth - (self.table.ndim - 2)))

    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        table = self.table
        if any(have not in (1, want) for have, want in zip(table.shape[-2:], shape, strict=True)):
            raise ShapeError(f"a mask of shape {(*table.shape,)} does not broadcast to (..., {shape[0]}, {shape[1]})")
        if rows is not None and table.shape[-2] > 1:
            table = like(rows, table)[..., rows, :]
        return table[..., keys] if table.shape[-1] > 1 else table


@final
class _Additive(_Table):
    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        return ~_forbids(super().allowed(rows, shape, keys))

    def bias(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        table = super().allowed(rows, shape, keys)
        return namespace(table).where(_forbids(table), 0, table)


@final
class _Both(Mask):
    first: Mask
    second: Mask

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.first.batch_shape, self.second.batch_shape)

    def align(self, depth: int) -> Mask:
        return _Both(self.first.align(depth), self.second.align(depth))

    def allowed(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        first, second = self.first.allowed(rows, shape, keys), self.second.allowed(rows, shape, keys)
        return like(second, first) & like(first, second)

    def bias(self, rows: Array, shape: tuple[int, int], keys: slice = ALL) -> Array:
        first, second = self.first.bias(rows, shape, keys), self.second.bias(rows, shape, keys)
        if first is None or second is None:
            return second if first is None else first
        return like(second, first) + second

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        return _both_ranges(self.first.reach(rows, shape), self.second.reach(rows, shape))

    def free(self, rows: range, shape: tuple[int, int]) -> range:
        return _both_ranges(self.first.free(rows, shape), self.second.free(rows, shape))


def _both_ranges(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


causal: Mask = _Causal()
"""A query attends to its own position and to earlier ones: key <= query."""


def sliding_window(width: int) -> Mask:
    """Let a query attend to positions nearer than `width`: |query - key| < width.

    `causal & sliding_window(w)` is the window of decoder models: the last w positions, the query's own included.
    `UsageError` if `width` is not an integer, or below 1.

    Examples
    --------
    >>> (causal & sliding_window(2)).allowed(None, (3, 3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    return _SlidingWindow(check_integer("width", width))


def padding(lengths: "Int[ArrayLike, '...']") -> Mask:
    """Let every query attend to the first `lengths` keys of its sequence only.

    The axes of the integers `lengths` are the leading axes of the logits: against logits (batch, heads, n, m) give
    lengths of shape (batch, 1). The layers put in the axis of the heads themselves.

    Raises `ShapeError`: `lengths` does not hold integers.

    Examples
    --------
    >>> import numpy as np
    >>> evaluate(padding(np.array([1, 3])), (1, 3)).astype(int)
    array([[[1, 0, 0]],
    <BLANKLINE>
           [[1, 1, 1]]])
    """
    counts = as_array(lengths, "lengths")
    if kind(counts) not in "iu":
        raise ShapeError(f"lengths of dtype {counts.dtype}: a length is a whole number of keys, so give integers")
    return _Padding(counts)


def as_rule(mask: "MaskLike") -> Mask | None:
    """Turn a boolean or an additive array into a rule; leave rules and None as they are."""
    if mask is None or isinstance(mask, Mask):
        return mask
    given = as_array(mask, "mask")
    additive = kind(given) == "f"
    if kind(given) != "b" and not additive:
        raise ShapeError(
            f"a mask of dtype {given.dtype}: give booleans, True where allowed, or floats to add to logits"
        )
    if given.ndim < 2:
        raise ShapeError(f"a mask of shape {tuple(given.shape)}: give (..., n, m), queries by keys")
    if additive and not is_traced(given) and not getattr(given, "requires_grad", False):
        numbers = np.asarray(given) if is_jax(given) else given
        forbidden = _forbids(numbers)
        if (forbidden | (numbers == 0)).all():
            return _Table(~forbidden)
    return _Additive(given) if additive else _Table(given)


def evaluate(mask: "MaskLike", shape: tuple[int, int], rows: Array = None) -> Array:
    """Evaluate a mask on query rows (r,), None for all, of an (n, m) pattern: booleans that broadcast to (..., r, m).

    None without a mask, which allows everything.
    """
    rule = as_rule(mask)
    return None if rule is None else rule.allowed(rows, shape)


def _forbids(bias: Array) -> Array:
    """Tell which entries of an additive array stand for a key that may not be attended to."""
    return bias <= max(lowest(bias.dtype), float(np.finfo(np.float32).min)) / 2


def as_array(value: object, name: str) -> Array:
    """Make an array of numbers or lists, native if it is one."""
    value = check_arrays(value, name, tensors=True)
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)


def _prepend_axes(array: Array, count: int) -> Array:
    return array.reshape((1,) * count + tuple(array.shape))


def part_of(rule: Mask | None, index: tuple[slice, ...]) -> Mask | None:
    """Return an aligned rule for a part of its leading axes; axes of size 1 stay."""
    return None if rule is None else map_leaves(lambda leaf: cut(leaf, index), rule)


def cut(array: Array, index: tuple[slice, ...]) -> Array:
    """Take slices of the leading axes, but for those of size 1."""
    return array[tuple(part if size > 1 else ALL for part, size in zip(index, array.shape, strict=False))]

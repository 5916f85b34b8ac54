"""Attention masks: boolean arrays and rules, and the softmax over the allowed keys.

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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import check_arrays, follows_caller
from manyheads.errors import ShapeError, check_integer

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Bool, Float, Int

    MaskLike: TypeAlias = "Mask | ArrayLike | None"


class Mask(eqx.Module):
    """A rule that says which key positions a query may attend to.

    Rules are pytrees: they pass through `jax.jit`, and the arrays that they hold may be traced. An array inside a rule
    may carry leading batch axes, which broadcast against those of the logits.
    """

    # NumPy then leaves `array & rule` to the rule.
    __array_ufunc__ = None

    @property
    @abc.abstractmethod
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes that the rule brings along."""

    @abc.abstractmethod
    def align(self, depth: int) -> "Mask":
        """Give every array that the rule holds exactly `depth` leading axes, the new ones of size 1."""

    @abc.abstractmethod
    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        """Evaluate on query rows (r,) of an (n, m) pattern, None for all: booleans that broadcast to (..., r, m)."""

    def bias(self, rows: Any, shape: tuple[int, int]) -> Any:
        """Evaluate what is added to the logits, finite where attending is allowed; None for nothing."""
        return None

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        """Return keys outside of which consecutive query rows of an (n, m) pattern may attend to nothing."""
        return range(shape[1])

    def __and__(self, other: Any) -> "Mask":
        """Allow what both allow."""
        return _Both(self, _rule(other))

    def __rand__(self, other: Any) -> "Mask":
        return _Both(_rule(other), self)


def _positions(rows: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the positions of queries (r, 1) and keys (m,) on the common axis of length m."""
    n, m = shape
    if n > m:
        raise ShapeError(
            f"{n} queries and {m} keys: a rule about positions takes the queries for the last n of the m keys, so it "
            "needs n <= m; for queries and keys on different axes, give a boolean array"
        )
    rows = np.arange(n) if rows is None else rows
    return rows[:, None] + (m - n), np.arange(m)


@final
class _Causal(Mask):
    @property
    def batch_shape(self) -> tuple[int, ...]:
        return ()

    def align(self, depth: int) -> Mask:
        return self

    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        query, key = _positions(rows, shape)
        return key <= query

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        n, m = shape
        return range(rows.stop + m - n)


@final
class _SlidingWindow(Mask):
    width: int = eqx.field(static=True)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return ()

    def align(self, depth: int) -> Mask:
        return self

    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        query, key = _positions(rows, shape)
        return abs(query - key) < self.width

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        n, m = shape
        return range(max(0, rows.start + m - n - self.width + 1), min(m, rows.stop + m - n + self.width - 1))


@final
class _Padding(Mask):
    lengths: Any  # (...)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.lengths.shape

    def align(self, depth: int) -> Mask:
        return _Padding(_prepend_axes(self.lengths, depth - self.lengths.ndim))

    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        return np.arange(shape[1]) < self.lengths[..., None, None]


class _Table(Mask):
    table: Any  # (..., n or 1, m or 1)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.table.shape[:-2]

    def align(self, depth: int) -> Mask:
        return type(self)(_prepend_axes(self.table, depth - (self.table.ndim - 2)))

    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        table = self.table
        if any(have not in (1, want) for have, want in zip(table.shape[-2:], shape, strict=True)):
            raise ShapeError(f"a mask of shape {table.shape} does not broadcast to (..., {shape[0]}, {shape[1]})")
        if rows is not None and table.shape[-2] > 1:
            table = jnp.take(table, rows, axis=-2)
        return table


@final
class _Additive(_Table):
    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        return ~_forbids(super().allowed(rows, shape))

    def bias(self, rows: Any, shape: tuple[int, int]) -> Any:
        table = super().allowed(rows, shape)
        return jnp.where(_forbids(table), 0, table)


@final
class _Both(Mask):
    first: Mask
    second: Mask

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.first.batch_shape, self.second.batch_shape)

    def align(self, depth: int) -> Mask:
        return _Both(self.first.align(depth), self.second.align(depth))

    def allowed(self, rows: Any, shape: tuple[int, int]) -> Any:
        return self.first.allowed(rows, shape) & self.second.allowed(rows, shape)

    def bias(self, rows: Any, shape: tuple[int, int]) -> Any:
        found = [bias for each in (self.first, self.second) if (bias := each.bias(rows, shape)) is not None]
        return sum(found[1:], start=found[0]) if found else None

    def reach(self, rows: range, shape: tuple[int, int]) -> range:
        first, second = self.first.reach(rows, shape), self.second.reach(rows, shape)
        return range(max(first.start, second.start), min(first.stop, second.stop))


causal: Mask = _Causal()
"""A query attends to its own position and to earlier ones: key <= query."""


def sliding_window(width: int) -> Mask:
    """Let a query attend to positions nearer than `width`: |query - key| < width.

    `causal & sliding_window(w)` is the window of decoder models: the last w positions, the query's own included.

    Parameters
    ----------
    width
        At least 1.

    Raises
    ------
    UsageError
        `width` is not an integer, or below 1.

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

    Parameters
    ----------
    lengths
        Integers (...), one per sequence. Its axes are the leading axes of the logits: against logits
        (batch, heads, n, m) give lengths of shape (batch, 1). The layers put in the axis of the heads themselves.

    Raises
    ------
    ShapeError
        `lengths` does not hold integers.

    Examples
    --------
    >>> import numpy as np
    >>> evaluate(padding(np.array([1, 3])), (1, 3)).astype(int)
    array([[[1, 0, 0]],
    <BLANKLINE>
           [[1, 1, 1]]])
    """
    counts = _as_array(lengths, "lengths")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ShapeError(f"lengths of dtype {counts.dtype}: a length is a whole number of keys, so give integers")
    return _Padding(counts)


def as_rule(mask: "MaskLike") -> Mask | None:
    """Turn a boolean or an additive array into a rule; leave rules and None as they are."""
    return None if mask is None else _rule(mask)


def evaluate(mask: "MaskLike", shape: tuple[int, int], rows: Any = None) -> Any:
    """Evaluate a mask on some query rows of an (n, m) pattern.

    Parameters
    ----------
    mask
        A rule, an array that broadcasts to (..., n, m), or None, which allows everything.
    shape
        (n, m): the number of queries and of keys of the whole pattern. Row r stands at position m - n + r.
    rows
        Integers (r,), which may be traced; None means all.

    Returns
    -------
    Booleans that broadcast to (..., r, m), True where attending is allowed, or None without a mask.
    """
    rule = as_rule(mask)
    return None if rule is None else rule.allowed(rows, shape)


@follows_caller
def masked_softmax(
    logits: "Float[ArrayLike, '... m']", allowed: "Bool[ArrayLike, '... m'] | None" = None
) -> "Float[Array, '... m']":
    """Softmax over the allowed keys, exactly zero on the others and on a row that may attend to nothing.

    p_j = exp(s_j) / sum_{l allowed} exp(s_l) for allowed j, else 0. The derivative is finite everywhere; it is zero on
    a row without any key, and a forbidden logit, even an infinite one, does not reach the result.

    Parameters
    ----------
    logits
        Floating array (..., m).
    allowed
        Booleans that broadcast to (..., m); None allows everything.

    Examples
    --------
    >>> import numpy as np
    >>> masked_softmax(np.zeros((2, 2)), np.array([[True, False], [False, False]])).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    if allowed is None:
        return jax.nn.softmax(logits, axis=-1)
    row = shift_rows(logits, allowed)
    return row.exponentials / row.safe_total


class ShiftedRows(NamedTuple):
    """The pieces of a softmax over the allowed keys, as every reduction over a row needs them."""

    shift: Any  # (..., 1) largest allowed logit, or 0 without any; no derivative flows through it
    shifted: Any  # (..., m) logits - shift, 0 on forbidden keys
    exponentials: Any  # (..., m) exp(shifted), 0 on forbidden keys
    empty: Any  # (..., 1) True where nothing may be attended to
    safe_total: Any  # (..., 1) sum of the exponentials, 1 where the row is empty


def shift_rows(logits: Any, allowed: Any = True) -> ShiftedRows:
    """Subtract from each row its largest allowed logit and exponentiate.

    A softmax does not depend on the shift, hence the stopped derivative. Both `where` are needed: without the inner one
    a forbidden logit that overflows turns the derivative into 0 * inf.
    """
    # A logit that overflowed to -inf has no weight; as an allowed key it would make 0 * inf of p log p.
    allowed = allowed & (logits != -jnp.inf)
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    shift = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    shifted = jnp.where(allowed, logits - shift, 0)
    exponentials = jnp.where(allowed, jnp.exp(shifted), 0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    empty = total == 0
    return ShiftedRows(shift, shifted, exponentials, empty, jnp.where(empty, 1, total))


def add_bias(logits: Any, bias: Any, allowed: Any) -> tuple[Any, Any]:
    """Add a bias minus its row maximum over the allowed keys, to limit rounding; return the maximum too."""
    if bias is None:
        return logits, jnp.zeros((1, 1), logits.dtype)
    bias = bias.astype(jnp.promote_types(bias.dtype, logits.dtype))
    level = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, bias, -jnp.inf), axis=-1, keepdims=True))
    level = jnp.where(level == -jnp.inf, 0, level)
    return logits + (bias - level).astype(logits.dtype), level.astype(logits.dtype)


def _rule(mask: Any) -> Mask:
    if isinstance(mask, Mask):
        return mask
    mask = _as_array(mask, "mask")
    additive = jnp.issubdtype(mask.dtype, jnp.floating)
    if mask.dtype != np.bool_ and not additive:
        raise ShapeError(
            f"a mask of dtype {mask.dtype}: give booleans, True where a query may attend to a key, or floats that are "
            "added to the logits"
        )
    if mask.ndim < 2:
        raise ShapeError(f"a mask of shape {mask.shape}: give (..., n, m), queries by keys")
    if additive and not isinstance(mask, jax.core.Tracer):
        forbidden = np.asarray(_forbids(mask))
        if (forbidden | (np.asarray(mask) == 0)).all():
            return _Table(~forbidden)
    return _Additive(mask) if additive else _Table(mask)


def _forbids(bias: Any) -> Any:
    """Tell which entries of an additive array stand for a key that may not be attended to."""
    return bias <= max(float(jnp.finfo(bias.dtype).min), float(jnp.finfo(jnp.float32).min)) / 2


def _as_array(value: Any, name: str) -> Any:
    value = check_arrays(value, name)
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)


def _prepend_axes(array: Any, count: int) -> Any:
    return array.reshape((1,) * count + array.shape)

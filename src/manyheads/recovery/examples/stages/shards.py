"""Shards of examples: additive statistics, ranking of rows, and rows fetched by rank.

The stages see examples only through this file. A shard is a pair of arrays, or a function that loads one, so that the
examples need not fit into memory and a worker can read its own. Sums over shards are those of a single pass up to the
rounding of the additions; order statistics are exact, because the smallest of a union are among the smallest of its
parts; rows are fetched by their position in all shards together, so that where the cuts are makes no difference.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array, Indices
from manyheads.recovery.fit.gauss_newton import as_reals, check_range

Pair: TypeAlias = tuple[ArrayLike, ArrayLike]
Shard: TypeAlias = Pair | Callable[[], Pair]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shards:
    """Examples (x, y) in pieces, and who works on them."""

    shards: tuple[Shard, ...]  # pairs of arrays (N, k, d), or functions of no argument that return such a pair
    counts: tuple[int, ...]  # sequences of each shard that are used; the others, at its end, are left out
    # Tokens k of a sequence, and their dimension d
    length: int
    dim: int
    # Any `concurrent.futures.Executor`, or None for this thread. One of processes needs shards that can be pickled.
    executor: Executor | None = None

    @property
    def count(self) -> int:
        """Number of sequences N."""
        return sum(self.counts)

    @property
    def rows(self) -> int:
        """Number of rows N k: each is a test of its own."""
        return self.count * self.length

    def map(self, function: Callable[..., Result], *constants: Any) -> list[Result]:
        """Return function(x, y, *constants) for every shard, in order."""
        task = functools.partial(_work, function, constants)
        return apply(self.executor, task, self.shards, self.counts)

    def smallest(self, function: Callable[..., Array], count: int, *constants: Any) -> Array:
        """Return the `count` smallest finite values that function(x, y, *constants) has on all shards, sorted."""
        parts = self.map(_smallest, function, count, *constants)
        return np.sort(np.concatenate(parts))[:count]

    def take(self, indices: ArrayLike) -> tuple[Array, Array]:
        """Return the sequences at these places of all shards together, in the order asked for, as (x, y)."""
        wanted = np.asarray(indices, np.intp)
        ends = np.cumsum(self.counts)
        owner = np.searchsorted(ends, wanted, side="right")
        places = [wanted[owner == shard] - (ends[shard] - self.counts[shard]) for shard in range(len(self.shards))]
        parts = apply(self.executor, _fetch, self.shards, self.counts, places)
        back = np.argsort(np.argsort(owner, kind="stable"), kind="stable")
        return (np.concatenate([part[0] for part in parts])[back], np.concatenate([part[1] for part in parts])[back])

    def without_last(self, count: int) -> "Shards":
        """Return all but the last sequences, wherever the cuts are; a shard of which nothing is left is dropped."""
        left, counts = self.count - count, []
        for size in self.counts:
            if left > 0:
                counts.append(min(size, left))
            left -= size
        return replace(self, shards=self.shards[: len(counts)], counts=tuple(counts))


def open_shards(examples: Pair | Iterable[Shard], executor: Executor | None = None) -> Shards:
    """Check examples, one pair or shards of them, and return them as `Shards`."""
    shards = list_shards(examples)
    shapes = apply(executor, _inspect, shards, range(len(shards)))
    if len({shape[1:] for shape in shapes}) > 1:
        raise ShapeError(f"shards of shapes {sorted(set(shapes))}: all need the same tokens per sequence and dimension")
    _, length, dim = shapes[0]
    if length < 2:
        raise UsageError("sequences of one token: attention shows with two or more")
    return Shards(shards, tuple(shape[0] for shape in shapes), length, dim, executor)


def apply(executor: Executor | None, function: Callable[..., Result], *columns: Iterable[Any]) -> list[Result]:
    """Return the results of a function over columns of arguments, in order, computed by an executor if there is one."""
    return list(map(function, *columns) if executor is None else executor.map(function, *columns))


def add_up(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the sum of additive statistics, entry by entry in the order of the shards."""
    return tuple(functools.reduce(operator.add, column) for column in zip(*parts, strict=True))


def list_shards(examples: Any) -> tuple[Shard, ...]:
    """Return the shards of a pair (x, y), of a function that loads one, or of an iterable of either, unloaded."""
    if callable(examples):
        return (examples,)
    if isinstance(examples, tuple) and len(examples) == 2 and all(getattr(one, "ndim", 0) == 3 for one in examples):
        return (examples,)
    if hasattr(examples, "ndim"):
        raise UsageError("x without y: give both, or an iterable of shards (x, y)")
    try:
        pieces = iter(examples)
    except TypeError:
        what = f"examples of type {type(examples).__name__}: give x and y, or an iterable of shards (x, y)"
        raise UsageError(what) from None
    shards = tuple(pieces)
    if not shards:
        raise UsageError("no shard of examples: give x and y, or an iterable of shards (x, y)")
    return shards


def load_shard(shard: Any, place: int = 0) -> Pair:
    """Return the pair (x, y) that a shard is, or that its function returns; `place` names it where that fails."""
    try:
        pair = shard() if callable(shard) else shard
    except Exception as error:
        error.add_note(f"raised by the function of shard {place} of the examples")
        raise
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise UsageError(f"shard {place} is a {type(pair).__name__}{size}: expected a pair (x, y), or a function of it")
    return pair[0], pair[1]


def _load(shard: Shard, count: int | None = None, place: int = 0) -> tuple[Array, Array]:
    """Return the first sequences of a shard in float64."""
    x, y = (as_reals(name, part) for name, part in zip("xy", load_shard(shard, place), strict=True))
    if x.ndim != 3 or x.shape != y.shape or 0 in x.shape:
        raise ShapeError(f"shard {place} of shapes {x.shape} and {y.shape}: expected x and y of one shape (N, k, d)")
    return np.ascontiguousarray(x[:count], np.float64), np.ascontiguousarray(y[:count], np.float64)


def _inspect(shard: Shard, place: int) -> tuple[int, int, int]:
    x, y = _load(shard, place=place)
    for name, values in (("x", x), ("y", y)):
        check_range(f"{name} of shard {place}", values)
    return x.shape


def _work(function: Callable[..., Result], constants: tuple[Any, ...], shard: Shard, count: int) -> Result:
    return function(*_load(shard, count), *constants)


def _fetch(shard: Shard, count: int, places: Indices) -> tuple[Array, Array]:
    x, y = _load(shard, count)
    return x[places], y[places]


def _smallest(x: Array, y: Array, function: Callable[..., Array], count: int, *constants: Any) -> Array:
    values = function(x, y, *constants).ravel()
    values = values[np.isfinite(values)]
    return values if len(values) <= count else np.partition(values, count)[:count]

r"""Query-key circuit of a head from two sketches, stage S4 of every method that reads logits of pairs of tokens.

A form M (p, q) is seen on few sketch tokens, A (n, p) as queries and B (n, q) as keys, with fresh tokens that span on
the other side: C = M B^T and R = A M. With n at least the rank r of M,

.. math:: M = P S Q^\top, \qquad S = (A P)^+ R Q = P^\top C (Q^\top B^\top)^+

with orthonormal bases P and Q of the column space of C and of the row space of R; both estimates of S are averaged.
Both sketches hold A M B^T, and their disagreement measures the noise that decides the rank.

References
----------
Tropp, Yurtsever, Udell and Cevher (2017), Practical sketching algorithms for low-rank matrix approximation, SIAM J.
Matrix Anal. Appl. 38 (two-sided sketches).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.queries.values.ranks import rank_by_gap

SPARE = 2  # sketch tokens beyond the rank that decide it


class SketchedForm(NamedTuple):
    """A form P S Q^T of its rank, None where no gap shows; and the error of an entry of its sketches."""

    left: Array  # P (p, r)
    core: Array  # S (r, r)
    right: Array  # Q (q, r)
    rank: int | None
    error: float

    @property
    def form(self) -> Array:
        """M (p, q)."""
        return self.left @ self.core @ self.right.T


def sketched_form(
    queries: Array, keys: Array, columns: Array, rows: Array, noise: float, most: int | None = None
) -> SketchedForm:
    """Return the form of sketch tokens A (n, p) and B (n, q) with C (p, n) and R (n, q), of rank `most` at most."""
    apart = queries @ columns - rows @ keys.T  # both are A M B^T
    error = float(np.sqrt(np.mean(apart**2) / (np.mean((queries**2).sum(1)) + np.mean((keys**2).sum(1)))))
    left, singular, _ = np.linalg.svd(columns, full_matrices=False)
    _, others, right = np.linalg.svd(rows, full_matrices=False)
    width = np.sqrt(len(queries)) + np.sqrt(len(columns))
    floor = max(error, noise * float(np.abs(columns).max())) * width
    ranks = rank_by_gap(singular, floor), rank_by_gap(others, floor)
    if most is not None and most < min(columns.shape):
        ranks = min(most, ranks[0] or most), min(most, ranks[1] or most)
    rank = None if ranks[0] is None or ranks[1] is None else max(ranks[0], ranks[1])
    p, q = left[:, :rank], right[:rank].T
    from_rows = np.linalg.lstsq(queries @ p, rows @ q, rcond=None)[0]
    from_columns = np.linalg.lstsq(keys @ q, columns.T @ p, rcond=None)[0].T
    return SketchedForm(p, (from_rows + from_columns) / 2, q, rank, error)


# Makes a form of the number of a head, sketch tokens (n, d), and logits (N, n) and (n, N)
Solver = Callable[[int, Array, Array, Array], SketchedForm]


class SketchReader(Protocol):
    """Reader of the logits of pairs of tokens."""

    sketched: int  # sketch tokens that are asked together

    def ask(self, group: Array, fresh: Array) -> tuple[Array, Array, Array]:
        """Return logits (m, N, g) of fresh queries, (m, g, N) of sketch queries, and what a key alone adds (m, N)."""


def read_forms(
    reader: SketchReader, sketch: Array, fresh: Array, wanted: int, solve: Solver
) -> tuple[list[SketchedForm], Array]:
    """Ask sketch tokens against fresh ones until they are enough for the rank of every head, or all were asked.

    Returns the forms, and what keys alone add (m, N), the mean over all that was asked.
    """
    parts: list[tuple[Array, Array, Array]] = []
    first = 0
    while True:
        while first < wanted:
            group = sketch[first : first + reader.sketched]
            parts.append(reader.ask(group, fresh))
            first += len(group)
        columns, rows, alone = zip(*parts, strict=True)
        pairs = zip(np.concatenate(columns, 2), np.concatenate(rows, 1), strict=True)
        found = [solve(head, sketch[:first], *pair) for head, pair in enumerate(pairs)]
        if first >= len(sketch) or all(one.rank is not None and one.rank <= first - SPARE for one in found):
            return found, np.mean(alone, 0)
        wanted = min(len(sketch), first + max(reader.sketched, first // 2))

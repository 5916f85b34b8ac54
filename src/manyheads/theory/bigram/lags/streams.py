r"""Streams of symbols and the symbols some steps before: what is read once, and the sums that a fit needs of it.

A stream is a row of symbols: the characters of a text, the kinds of events in a log. Every place :math:`i` with enough
history is a sample: the query is the symbol there, the context holds the symbols at lags :math:`0,\dots,L-1` (lag 0 is
the query itself), and the target is the next symbol, or whatever the caller wants to predict there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import as_integers, takes_arrays, takes_labels
from manyheads.errors import ShapeError, UsageError, check_integer

SYMBOLS = 4096  # integers below are symbols as they stand; larger ones are labels, such as identifiers
BLOCK = 1 << 15  # places that are read at a time: bounds the memory of a pass, whatever the length of the stream


@dataclass(frozen=True, eq=False)
class Lagged:
    """A stream, read: which places are samples, and what is to be predicted there."""

    symbols: np.ndarray  # (n,) int64: all streams, one behind the other; -1 in a gap, which no sample reads
    places: np.ndarray  # (m,) int64: where the samples are; each has `lags` symbols of its own stream, itself included
    targets: np.ndarray  # (m,) int64
    lags: int  # L
    vocabulary: int  # N
    labels: np.ndarray  # (N,): what the symbols are in the caller's stream

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.places)

    @property
    def queries(self) -> np.ndarray:
        """The symbol at every place, (m,)."""
        return self.symbols[self.places]

    @property
    def occurrences(self) -> np.ndarray:
        """How often each symbol stands in the streams, gaps left out, (N,)."""
        return np.bincount(self.symbols[self.symbols >= 0], minlength=self.vocabulary)

    @property
    def windows(self) -> np.ndarray:
        """The contexts, (m, L): column j is the symbol at lag j."""
        return self.symbols[self.places[:, None] - np.arange(self.lags)]

    def count_pairs(self, lag: int) -> np.ndarray:
        """Count targets and symbols at a lag, (N, N), target before symbol."""
        codes = self.targets * self.vocabulary + self.symbols[self.places - lag]
        return np.bincount(codes, minlength=self.vocabulary**2).reshape(self.vocabulary, self.vocabulary)

    def part(self, start: int, stop: int) -> "Lagged":
        """Return the samples from `start` to `stop`."""
        return replace(self, places=self.places[start:stop], targets=self.targets[start:stop])

    def split(self, share: float) -> "tuple[Lagged, Lagged]":
        """Cut off the last `share` of the samples, without those whose context reaches into the first part."""
        cut = len(self) - round(share * len(self))
        later = cut + np.searchsorted(self.places[cut:], self.places[cut - 1] + self.lags) if cut else 0
        return self.part(0, cut), self.part(int(later), len(self))

    def blocks(self) -> "Iterator[Lagged]":
        """Yield the samples some at a time."""
        for start in range(0, len(self), BLOCK):
            yield self.part(start, start + BLOCK)


def read_streams(
    streams: ArrayLike | Sequence[ArrayLike],
    lags: int,
    targets: ArrayLike | Sequence[ArrayLike] | None = None,
    vocabulary: int | None = None,
) -> Lagged:
    """Read one stream or several as `fit_lags` takes them, and find the places with enough history.

    A place whose target is a gap is no sample. With `vocabulary` all integers are symbols as they stand.
    """
    rows = _rows(streams, "stream")
    wanted = None if targets is None else _rows(targets, "target")
    if wanted is not None and [len(row) for row, _ in rows] != [len(row) for row, _ in wanted]:
        raise ShapeError("targets do not have the shape of the streams: give one target for every symbol")
    lags = check_integer("lags", lags)  # lag 0 is the symbol itself
    gaps = np.concatenate([gap for _, gap in rows])
    ends = np.cumsum([len(row) for row, _ in rows])
    place = np.arange(len(gaps))
    breaks = np.where(gaps, place, -1)  # the last place before each that is not of its session
    breaks[ends[:-1]] = np.where(gaps[ends[:-1]], ends[:-1], ends[:-1] - 1)
    history = place - np.maximum.accumulate(breaks)
    usable = history >= lags
    if wanted is None:
        followed = np.append(~gaps[1:], False)
        followed[ends - 1] = False  # nothing follows
        usable &= followed
    else:
        usable &= ~np.concatenate([gap for _, gap in wanted])
    places = np.flatnonzero(usable)
    if not len(places):
        longest, between = int(history.max()), " between gaps" if gaps.any() else ""
        raise UsageError(
            f"{lags} lags reach beyond the stream: its {longest} symbols{between} leave no place with that much "
            f"history and a target; give fewer than {longest} lags"
        )
    joined = _join([row for row, _ in rows])
    answers = joined[places + 1] if wanted is None else _join([row for row, _ in wanted])[places]
    symbols = np.full(len(gaps), -1, np.int64)
    symbols[~gaps], answers, labels = _number(joined[~gaps], answers, vocabulary)
    _check_change(symbols[~gaps], labels, "symbols", "no lag says anything")
    _check_change(answers, labels, "targets", "nothing is left to predict")
    return Lagged(symbols, places, answers, lags, len(labels), labels)


def _rows(streams: ArrayLike | Sequence[ArrayLike], what: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return one array for every stream that has any symbol, and where its gaps are."""
    if isinstance(streams, str):
        streams = list(streams)
    several = isinstance(streams, list | tuple) and len(streams) > 0 and np.ndim(streams[0]) > 0
    rows = [_row(row, what) for row in (streams if several else [streams])]  # type: ignore[union-attr, arg-type]
    if not any(row.size for row, _ in rows):
        raise UsageError(f"the {what} is empty: give labels, such as integers or text")
    if all(gap.all() for _, gap in rows):
        raise UsageError(f"the {what} has only missing values: give labels, such as integers or text")
    return [row for row in rows if row[0].size]


def _row(labels: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return labels as an array, and where gaps are: the dtype is that of the labels between them.

    Of objects where a list mixes text with others, so that 1 and "1" stay two labels.
    """
    row = np.asarray(labels)
    if row.dtype.kind == "T" or (
        isinstance(labels, list | tuple) and row.dtype.kind in "SU" and len(set(map(type, labels))) > 1
    ):
        row = np.empty(len(row), dtype=object)
        row[:] = list(labels)  # type: ignore[arg-type]
    if row.ndim != 1:
        raise ShapeError(f"a {what} of shape {row.shape}: give a row of labels, or a list of such rows")
    if row.dtype.kind == "f":
        return row, np.isnan(row)
    if row.dtype.kind != "O":
        return row, np.zeros(len(row), bool)
    import pandas as pd

    gap = np.asarray(pd.isna(row))
    known = row[~gap].tolist()
    if known and all(isinstance(label, int | float | np.number) for label in known):
        numbers = np.asarray(known)
        row = np.zeros(len(row), numbers.dtype)
        row[~gap] = numbers
    return row, gap


def _join(rows: list[np.ndarray]) -> np.ndarray:
    """Put rows behind each other; as objects where their types differ, so that no number becomes text."""
    kinds = {"n" if row.dtype.kind in "biuf" else row.dtype.kind for row in rows}
    return np.concatenate(rows if len(kinds) == 1 else [row.astype(object) for row in rows])


def _number(
    symbols: np.ndarray, targets: np.ndarray, vocabulary: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return symbols and targets as numbers from 0 on, and the label of every number."""
    joined = _join([symbols, targets])
    if joined.dtype.kind == "f" and np.isfinite(joined).all() and (joined == np.trunc(joined)).all():
        joined = as_integers(joined, "the stream")
    if joined.dtype.kind in "iu":
        low, high = int(joined.min()), int(joined.max())
        if vocabulary is not None and (low < 0 or high >= vocabulary):
            raise UsageError(
                f"symbols run from {low} to {high}: a vocabulary of {vocabulary} has 0 to {vocabulary - 1}"
            )
        if vocabulary is not None or (low >= 0 and high < SYMBOLS):
            codes = joined.astype(np.int64)
            return codes[: len(symbols)], codes[len(symbols) :], np.arange(vocabulary or high + 1)
    if joined.dtype.kind == "f" and not np.isfinite(joined).all():
        raise UsageError("some labels are infinite: give finite numbers or text, and NaN for a gap")
    try:
        labels, codes = np.unique(joined, return_inverse=True)
    except TypeError:  # labels of several types have no order: as they first occur
        numbers: dict[object, int] = {}
        codes = np.asarray([numbers.setdefault(label, len(numbers)) for label in joined.tolist()])
        labels = np.fromiter(numbers, dtype=object, count=len(numbers))
    if vocabulary is not None and len(labels) != vocabulary:
        raise UsageError(f"{len(labels)} labels occur, and vocabulary={vocabulary}: leave it out for labels")
    return codes[: len(symbols)], codes[len(symbols) :], labels


def _check_change(codes: np.ndarray, labels: np.ndarray, what: str, why: str) -> None:
    if (codes == codes[0]).all():
        only = labels[codes[0]]
        raise UsageError(f"all {len(codes)} {what} are {only}: {why}; give a stream of two symbols or more")


@takes_labels
def lag_information(
    streams: ArrayLike | Sequence[ArrayLike],
    lags: int,
    *,
    targets: ArrayLike | Sequence[ArrayLike] | None = None,
    vocabulary: int | None = None,
) -> np.ndarray:
    r"""Mutual information of the target and the symbol at each lag, in bits.

    .. math:: I_j = \sum_{y,x} \hat p_j(y,x)\log_2\frac{\hat p_j(y,x)}{\hat p(y)\,\hat p_j(x)}
              - \frac{r_j - r_y - r_x + 1}{2 m \ln 2}

    with :math:`r` the numbers of pairs and of symbols that occur: Miller's correction for the upward bias of counting
    :math:`m` samples. What it says of a lag includes all that the symbols between carry on: symbols of a text depend on
    each other, so almost every lag has some. `fit_lags` tells the two apart. Returned are (L,) bits, zero up to the
    error of the correction where a lag says nothing; they may be a little below zero.

    Examples
    --------
    >>> stream = np.random.default_rng(0).integers(0, 2, 4000)
    >>> echo = np.append(stream[:2], stream[:-2])  # the symbol two steps back
    >>> lag_information(stream, 4, targets=echo).round(2) + 0.0
    array([0., 0., 1., 0.])
    """
    return information_of(read_streams(streams, lags, targets, vocabulary))


def information_of(data: Lagged) -> np.ndarray:
    """Return `lag_information` of a stream that was read."""
    samples, found = len(data), []
    for lag in range(data.lags):
        joint = data.count_pairs(lag) / samples  # (target, symbol)
        rows, columns = joint.sum(1), joint.sum(0)
        seen = joint > 0
        bits = float((joint[seen] * np.log2(joint[seen] / np.outer(rows, columns)[seen])).sum())
        spare = seen.sum() - (rows > 0).sum() - (columns > 0).sum() + 1
        found.append(bits - float(spare) / (2 * samples * np.log(2)))
    return np.asarray(found)


@takes_arrays
def plant_lags(
    rng: np.random.Generator, stream: ArrayLike, transition: ArrayLike, lags: ArrayLike, weights: ArrayLike
) -> np.ndarray:
    r"""Draw targets that depend on known lags of a given stream: ground truth on contexts that are real.

    At every place with query :math:`k` a lag is drawn from row :math:`k` of `lags` with the probabilities of row
    :math:`k` of `weights`, and the target from the column of `transition` of the symbol at that lag.

    Parameters
    ----------
    stream
        Symbols (n,), integers below N.
    transition
        (N, N), column-stochastic.
    lags, weights
        (N, Q): integers from 0 on; rows of `weights` sum to one.

    Returns
    -------
    numpy.ndarray
        Targets (n,) int64; -1 at the first places, which have too little history.

    Raises
    ------
    ShapeError
        Tables whose shapes do not fit together.
    UsageError
        Columns or rows that are no probability law, negative lags, or lags beyond the stream.

    Examples
    --------
    >>> stream = np.array([0, 1, 1, 0, 1])
    >>> plant_lags(np.random.default_rng(0), stream, np.eye(2), [[2], [2]], [[1.0], [1.0]]).tolist()
    [-1, -1, 0, 1, 1]
    """
    symbols, table = as_integers(stream, "stream"), np.asarray(transition, float)
    reach, shares = as_integers(lags, "lags"), np.asarray(weights, float)
    size = len(table)
    if table.shape != (size, size) or reach.ndim != 2 or reach.shape != shares.shape or len(reach) != size:
        raise ShapeError(
            f"transition {table.shape}, lags {reach.shape}, weights {shares.shape}: (N, N), (N, Q), (N, Q)"
        )
    for name, sums in (("columns of transition", table.sum(0)), ("rows of weights", shares.sum(1))):
        if np.abs(sums - 1).max() > 1e-9:
            raise UsageError(f"{name} sum to {sums[np.abs(sums - 1).argmax()]:.6g}: each is a law and sums to 1")
    if symbols.ndim != 1 or not symbols.size or symbols.min() < 0 or symbols.max() >= size:
        raise UsageError(f"a stream of shape {symbols.shape}: give (n,) symbols from 0 to {size - 1}")
    if reach.min() < 0 or reach.max() >= len(symbols):
        raise UsageError(f"lags run from {reach.min()} to {reach.max()}: the stream has {len(symbols)} symbols")
    places = np.arange(int(reach.max()), len(symbols))
    queries = symbols[places]
    chosen = (rng.random(len(places))[:, None] >= np.cumsum(shares, 1)[queries, :-1]).sum(1)
    attended = symbols[places - reach[queries, chosen]]
    steps = np.cumsum(table, 0)[:-1].T  # (symbol, N - 1)
    targets = np.full(len(symbols), -1, np.int64)
    for start in range(0, len(places), BLOCK):
        part = slice(start, start + BLOCK)
        targets[places[part]] = (rng.random(len(attended[part]))[:, None] >= steps[attended[part]]).sum(1)
    return targets

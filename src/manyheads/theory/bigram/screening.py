r"""Screening: chi-square tests of independence find the attended positions from samples, without training.

Given the query, the target is independent of the token at every position except the Q attended ones. So every
pair of query and position is a test of independence on the table of targets against tokens,

.. math:: X_{kt} = n_k\Big(\sum_{y,x}\frac{c_{yx}^2}{r_y s_x} - 1\Big),

chi-square with :math:`(N-1)^2` degrees of freedom under independence, and non-central with
:math:`n_k w^2\sum_{ij}\mu_j\tilde P_{ij}^2/\mu_i` at a position of weight :math:`w`. The largest of T null statistics
grows like :math:`2\ln T`, so the samples that find all positions grow with the logarithm of the length, where gradient
training from scratch needs more than T. The test and its number of samples are derived here; the task is that of Ren,
Wang and Lee (NeurIPS 2024, arXiv 2410.23438).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint
from manyheads._extras import Bool, Figure, Float, Int, Integer
from manyheads._overview import Overview, Shown
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.bigram.task import BigramTask

CELLS = 1 << 24  # counters in memory at a time
ENTRIES = 1 << 24  # token copies in memory at a time
FEW_SYMBOLS = 16  # up to here comparing with each symbol is faster than numbering all pairs
SPARSE = 1.0  # mean count of a table's cell below which its statistic is not tested
MOST_DRAWN = 40, 400  # queries and positions in a picture; more positions are drawn by the largest of several
UNEVEN = 0.02  # of the null variance, above that of chi-square, above which it is not tested either


@dataclass(frozen=True, eq=False, repr=False)
class Screening(Shown):
    """Result of `screen`.

    Attributes
    ----------
    scores
        X, (N, T): the chi-square statistic of every query and position.
    dof
        Its degrees of freedom, (N, T): of the targets and tokens that occur.
    thresholds
        (N, T): the largest of all N T statistics stays below with probability `1 - false_alarm` if all are independent.
        Infinite where the chi-square distribution is no valid approximation: a table with less than one sample a cell,
        or with targets and tokens so rare that the null variance is more than 2% above that of chi-square.
    counts
        Samples of every query, (N,).
    false_alarm
        Probability of one or more false positions, over all tests.
    """

    scores: Float[np.ndarray, "query position"]
    dof: Float[np.ndarray, "query position"]
    thresholds: Float[np.ndarray, "query position"]
    counts: Int[np.ndarray, " query"]
    false_alarm: float

    @property
    def found(self) -> Bool[np.ndarray, "query position"]:
        """Positions above their threshold, (N, T) of booleans."""
        return self.scores > self.thresholds

    @property
    def untested(self) -> Int[np.ndarray, " untested"]:
        """Queries with too few samples for the chi-square distribution."""
        return np.flatnonzero(np.isinf(self.thresholds).all(1))

    def plot(self) -> Figure:
        """Draw scores over their thresholds: one row a query, the most frequent on top, one column a position."""
        from manyheads.study.panels import Picture
        from manyheads.study.reporting.charts import draw_titled

        rows, columns = MOST_DRAWN
        order = np.argsort(-self.counts, kind="stable")[:rows]
        width = -(-self.scores.shape[1] // columns)
        starts = np.arange(0, self.scores.shape[1], width)
        ticks = [
            tuple(str(at) if place % (1 + len(every) // 10) == 0 else "" for place, at in enumerate(every.tolist()))
            for every in (starts, order)
        ]
        ratios = np.maximum.reduceat(self.scores[order] / self.thresholds[order], starts, axis=1)
        return draw_titled(
            Picture(
                self._overview().title,
                "position" if width == 1 else f"position, {width} in a column",
                "query",
                tuple(map(tuple, ratios.tolist())),
                value_label="score / threshold",
                x_ticks=ticks[0],
                y_ticks=ticks[1],
                limits=(0.0, max(2.0, float(ratios.max()))),
            )
        )

    def _overview(self) -> Overview:
        queries, positions = np.nonzero(self.found)
        order = np.argsort(-self.scores[queries, positions], kind="stable")
        where = queries[order], positions[order]
        columns = [each.tolist() for each in (*where, *(t[where] for t in (self.scores, self.thresholds, self.dof)))]
        title = f"Screening of {len(self.scores)} queries and {self.scores.shape[1]} positions: {len(order)} found"
        notes = (f"{len(self.untested)} queries not tested; false-alarm probability {self.false_alarm:g}",)
        names = ("query", "position", "score", "threshold", "dof")
        return Overview(title, names, list(zip(*columns, strict=True)), notes)

    def positions(self, query: int) -> Int[np.ndarray, " found"]:
        """Return the positions found for a query, by decreasing statistic."""
        order = np.argsort(-self.scores[query], kind="stable")
        return order[: int(self.found[query].sum())]

    def top(self, count: int) -> Int[np.ndarray, "query count"]:
        """Return the `count` highest positions of every query, significant or not, (N, count), in increasing order."""
        if not 1 <= count <= self.scores.shape[1]:
            raise UsageError(f"count={count}: between 1 and the {self.scores.shape[1]} positions")
        return np.sort(np.argpartition(-self.scores, count - 1, axis=1)[:, :count], axis=1)

    def attention(self) -> Float[np.ndarray, "query position"]:
        """Return attention to initialize training, (N, T) float32: uniform on what was found, else on everything.

        It skips stage one, whose samples grow with the length.
        """
        found = self.found | ~self.found.any(1, keepdims=True)
        return np.asarray(found / found.sum(1, keepdims=True), np.float32)


@takes_arrays
def screen(
    tokens: Integer[ArrayLike, "batch position"],
    queries: Integer[ArrayLike, " batch"],
    targets: Integer[ArrayLike, " batch"],
    *,
    vocabulary: int | None = None,
    false_alarm: float = 0.01,
) -> Screening:
    r"""Find the positions on which the target of every query depends, by one chi-square test each.

    Parameters
    ----------
    tokens
        Contexts (B, T), integers from 0 on.
    queries, targets
        (B,), integers from 0 on.
    vocabulary
        Number of tokens N; by default one more than the largest.
    false_alarm
        Probability of any false position, over all N T tests; the threshold is Bonferroni's.

    Returns
    -------
    Screening

    Raises
    ------
    ShapeError, UsageError
        Arrays that do not fit together, no samples, tokens outside the vocabulary, a constant target.

    Notes
    -----
    The test is marginal: it misses positions that are informative only jointly (an exclusive or). If context tokens
    depend on each other, as in text, it finds positions without a direct effect; use `fit_lags` there. Tables have
    :math:`N^2` cells a position: with a large vocabulary they are sparse until there are :math:`N^3` samples, and such
    queries are not tested. Rare tokens need more: measured here, tables of 200 samples and three tokens, one of which
    has 85%, exceed `false_alarm` sixfold.

    Examples
    --------
    >>> from manyheads.theory.bigram import draw_bigram_task
    >>> task = draw_bigram_task(np.random.default_rng(0), vocabulary=3, length=200, sparsity=2)
    >>> found = screen(*task.draw(np.random.default_rng(1), 4000))
    >>> bool((found.top(2) == task.positions).all()), int(found.found.sum())
    (True, 6)
    """
    context, query_tokens, outcomes, size = check_samples(tokens, queries, targets, vocabulary)
    Constraint(above=0, below=1).kept("false_alarm", false_alarm, "float")
    if outcomes.min() == outcomes.max():
        raise UsageError(
            f"all {len(outcomes)} targets are {outcomes[0]}: give samples with two different targets or more"
        )
    scores, dof, uneven = (np.zeros((size, context.shape[1])) for _ in range(3))
    for part, counts in count_chunks(context, query_tokens, outcomes, size):
        scores[:, part], dof[:, part] = chi_square(counts)
        uneven[:, part] = measure_unevenness(counts)
    samples = np.bincount(query_tokens, minlength=size)
    thresholds = np.full(scores.shape, np.inf)
    levels, where = np.unique(dof, return_inverse=True)
    limit = stats.chi2.isf(false_alarm / scores.size, np.maximum(levels, 1))
    tested = (samples[:, None] >= SPARSE * (dof**0.5 + 1) ** 2) & (dof > 0) & (uneven <= UNEVEN)
    thresholds[tested] = limit[where.reshape(dof.shape)][tested]
    return Screening(scores, dof, thresholds, samples, false_alarm)


def check_samples(
    tokens: ArrayLike, queries: ArrayLike, targets: ArrayLike, vocabulary: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Refuse samples that do not fit together; return tokens, queries, targets and the number of tokens N."""
    context, query_tokens, outcomes = np.asarray(tokens), np.asarray(queries), np.asarray(targets)
    if context.ndim != 2 or query_tokens.shape != outcomes.shape or query_tokens.shape != context.shape[:1]:
        raise ShapeError(
            f"tokens {context.shape}, queries {query_tokens.shape}, targets {outcomes.shape}: (B, T), (B,), (B,)"
        )
    if not context.size:
        raise UsageError(f"tokens of shape {context.shape}: at least one sample of one token")
    if not all(np.issubdtype(array.dtype, np.integer) for array in (context, query_tokens, outcomes)):
        raise ShapeError(
            f"tokens of type {context.dtype}, {query_tokens.dtype}, {outcomes.dtype}: all three are integers"
        )
    low, high = (int(end([end(array) for array in (context, query_tokens, outcomes)])) for end in (np.min, np.max))
    size = high + 1 if vocabulary is None else vocabulary
    if low < 0 or high >= size:
        raise UsageError(f"tokens run from {low} to {high}: a vocabulary of {size} has 0 to {size - 1}")
    return context, query_tokens.astype(np.int64), outcomes.astype(np.int64), size


def count_pairs(tokens: np.ndarray, queries: np.ndarray, targets: np.ndarray, vocabulary: int) -> np.ndarray:
    """Count targets and tokens for every query and position, (N, T, N, N) int32, target before token; counts add up."""
    length = tokens.shape[1]
    counts = np.zeros((vocabulary, length, vocabulary, vocabulary), np.int32)
    order = np.argsort(queries * vocabulary + targets, kind="stable")
    if vocabulary > FEW_SYMBOLS:
        return _count_by_number(tokens[order], queries[order], targets[order], counts)
    groups, starts = np.unique((queries * vocabulary + targets)[order], return_index=True)
    for group, rows in zip(groups, np.split(order, starts[1:]), strict=True):
        query, outcome = divmod(int(group), vocabulary)
        for begin in range(0, len(rows), 255):  # so many ones fit a byte
            part = tokens[rows[begin : begin + 255]]
            left = np.full(length, len(part), np.int32)
            for symbol in range(vocabulary - 1):
                ones = np.add.reduce((part == symbol).view(np.uint8), axis=0, dtype=np.uint8)
                counts[query, :, outcome, symbol] += ones
                left -= ones
            counts[query, :, outcome, -1] += left
    return counts


def _count_by_number(tokens: np.ndarray, queries: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count the numbers of all (position, target, token), some samples at a time."""
    size, length = counts.shape[:2]
    step = max(1, ENTRIES // length)
    for query in np.unique(queries):
        first, last = np.searchsorted(queries, [query, query + 1])
        for begin in range(first, last, step):
            part = slice(begin, min(begin + step, last))
            codes = np.arange(length) * size**2 + targets[part, None] * size + tokens[part]
            counts[query] += np.bincount(codes.ravel(), minlength=length * size**2).reshape(counts.shape[1:])
    return counts


def count_chunks(
    tokens: np.ndarray, queries: np.ndarray, targets: np.ndarray, vocabulary: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield `count_pairs` for some positions at a time, which bounds the memory."""
    width = max(1, CELLS // vocabulary**3)
    for begin in range(0, tokens.shape[1], width):
        part = slice(begin, min(begin + width, tokens.shape[1]))
        yield part, count_pairs(tokens[:, part], queries, targets, vocabulary)


def chi_square(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the statistic and its degrees of freedom for tables (..., N, N): two arrays (...); 0 for empty tables."""
    rows, columns = counts.sum(-1), counts.sum(-2)
    total = rows.sum(-1)
    inverse = [np.divide(1.0, side, out=np.zeros(side.shape), where=side > 0) for side in (rows, columns)]
    ratio = np.einsum("...yx,...yx,...y,...x->...", counts, counts, *inverse, dtype=float, optimize=True)
    dof = np.maximum((rows > 0).sum(-1) - 1, 0) * np.maximum((columns > 0).sum(-1) - 1, 0)
    return np.where(total > 0, total * (ratio - 1), 0.0), dof


def measure_unevenness(counts: np.ndarray) -> np.ndarray:
    r"""Return the share by which the null variance of the statistic exceeds that of chi-square, for tables (..., N, N).

    .. math:: \frac{(n\sum_y 1/r_y - R^2)(n\sum_x 1/s_x - C^2)}{2n(R-1)(C-1)}

    with the sums of R rows and C columns that occur. To leading order in :math:`1/n`, given those sums: Haldane, "The
    mean and variance of chi-squared, when used as a test of homogeneity, when expectations are small", Biometrika
    1940. Zero for even sums and for tables without a degree of freedom.
    """

    def spread(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        occurring = (sums > 0).sum(-1)
        inverse = np.divide(1.0, sums, out=np.zeros(sums.shape), where=sums > 0).sum(-1)
        return sums.sum(-1) * inverse - occurring**2, occurring - 1

    (rows, more_rows), (columns, more_columns) = spread(counts.sum(-1)), spread(counts.sum(-2))
    normal = 2.0 * counts.sum((-1, -2)) * more_rows * more_columns
    return np.divide(rows * columns, normal, out=np.zeros(normal.shape), where=normal > 0)


def predict_screening(task: BigramTask, probability: float = 0.5) -> float:
    r"""Return the samples at which the Q highest statistics of every query are the right ones, with a probability.

    .. math:: \prod_k \int \prod_{m\le Q}\Pr\big[\chi'^2_d(n\mu_k w_{km}^2\,\chi^2(P)) > x\big]\,
              \mathrm d F_d(x)^{T-Q} = \text{probability},\qquad
              \chi^2(P) = \sum_{ij}\frac{\mu_j\tilde P_{ij}^2}{\mu_i},\ d=(N-1)^2,

    with :math:`F_d` the chi-square distribution and :math:`\chi'^2` the non-central one; no constant is fitted. To
    leading order :math:`n` is :math:`2\ln T/(\mu_k w^2\chi^2(P))` for long contexts. Derived here, for tables without
    empty cells.

    Parameters
    ----------
    probability
        That the right positions of all queries come first.

    Examples
    --------
    >>> from manyheads.theory.bigram import draw_bigram_task
    >>> rng = np.random.default_rng
    >>> short, long = (draw_bigram_task(rng(0), 3, length, 2) for length in (250, 64_000))
    >>> bool(1 < predict_screening(long) / predict_screening(short) < 2.5)
    True
    """
    penalty = float((task.centred**2 / task.stationary[:, None]).sum(0) @ task.stationary)
    shift = task.stationary[:, None] * task.weights**2 * penalty  # (N, Q), a sample
    dof, rest = (task.vocabulary - 1) ** 2, task.length - task.sparsity

    def exceed(places: np.ndarray, samples: float) -> np.ndarray:
        return np.asarray(stats.ncx2.sf(places, dof, samples * shift[..., None]))

    return find_least_samples(lambda tail: stats.chi2.isf(tail, dof), exceed, rest, probability)


def find_least_samples(
    null: Callable[[np.ndarray], np.ndarray],
    exceed: Callable[[np.ndarray, float], np.ndarray],
    others: int,
    probability: float,
) -> float:
    r"""Return the samples n at which the right positions of every query come first, with a probability, to 0.03%.

    .. math:: \prod_k\int\prod_m\Pr[X_{km}(n) > x]\,\mathrm d F(x)^R = \text{probability}

    with the statistic :math:`X_{km}` of a right position, and the distribution F of each of the R `others` of a query.
    `null` is the inverse of 1 - F, of probabilities (64,); `exceed` returns :math:`\Pr[X_{km}(n) > x]`, (N, Q, 64), for
    x (64,) and n, and increases with n.
    """
    # Gauss-Legendre on the probability of the null's maximum: u = F(x)^R
    nodes, weights = np.polynomial.legendre.leggauss(64)
    places = null(-np.expm1(np.log((nodes + 1) / 2) / max(others, 1)))  # of 1 - F(x), without losing its digits

    def success(samples: float) -> float:
        above = exceed(places, samples).prod(1)  # (N, 64)
        return float((above @ (weights / 2)).prod())

    low, high = 1.0, 2.0
    while success(high) < probability:
        low, high = high, 2 * high
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if success(middle) < probability else (low, middle)
    return (low * high) ** 0.5

r"""Forward selection of lags by conditional mutual information, with a transition table of its own for every lag.

The generalized mixture transition distribution (MTDg) is linear in the symbols at its lags, with a matrix for each:

.. math:: \mathbb E[e_{y_i}] = m + \sum_{j\in S} M_j\, e_{x_{i-j}} .

A lag outside S is tested by its score: with B the covariance of target and symbol at the lag, V and G those of each,
all less what the lags of S explain, :math:`n\operatorname{tr} V^{-1}BG^{-1}B^\top` is chi-square distributed if the lag
says nothing beyond S; over :math:`2n\ln 2` it is the conditional mutual information in bits, to leading order. The lag
with the least p-value joins S until none is left below a level. Samples fall into groups, such as the present symbols,
each with an S and matrices of its own; a lag is tested in each group, and in all of them together with one matrix.

All are sums of counts of pairs. The variance of the statistic is Haldane's (`screening`), its tail that of Wilson and
Hilferty.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse, stats

from manyheads.theory.bigram.lags.alternating_least_squares import one_hot
from manyheads.theory.bigram.lags.streams import Lagged
from manyheads.theory.bigram.screening import measure_unevenness

LEVELS = 32  # rows and columns of a table, at most; where there are more symbols, some share one
EXPECTED = 1.0  # samples in a cell of the rarest levels, at least
CELLS = 1 << 22  # of all tables, at most
RIDGE = 0.5  # in samples: for levels that never occur, or are explained already
PART = 0.01  # p-value below which a group takes part in a lag that all groups show together
MOST = 16  # lags that are selected with one group, at most, and by each of several
ROTATIONS = 256


@dataclass(frozen=True, eq=False)
class Selection:
    """Lags that were selected."""

    information: np.ndarray  # (groups, L): bits of the selected lags, given those selected before them
    order: tuple[int, ...]  # the lags, in the order of their selection
    pvalue: float  # of independence: the least of all lags before any was selected, corrected for their number
    left: int  # the lag with the least p-value of those that were not selected
    left_pvalue: float  # corrected likewise


class Scores:
    """Scatter matrices of targets, and of symbols at all lags, in groups of samples, and the tests of lags from them.

    `cross` and `within` are n B and n G of every group and lag, (groups, L, K, K), `targets` n V, (groups, K, K),
    `samples` those of every group, (groups,).
    """

    def __init__(self, data: Lagged, groups: np.ndarray, levels: np.ndarray, errors: np.ndarray | None = None) -> None:
        """Count pairs of targets and symbols; or sum errors (m, K) of predictions, in the place of the targets."""
        self.data, self.groups, self.levels = data, groups, levels
        counts = self._count(slice(None), levels[data.targets], int(groups.max()) + 1)
        rows, columns = counts[:, 0].sum(2), counts.sum(2)
        self.samples, self.uneven = rows.sum(1), measure_unevenness(counts)
        self.cross = _centre(counts, rows[:, None], columns)
        self.within, self.targets = _scatter(columns), _scatter(rows)
        self.known: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self.samples]
        self.free = np.ones(self.cross.shape[:2], bool)
        if errors is not None:
            self._replace_targets(errors)

    def _count(self, part: slice | np.ndarray, left: np.ndarray, groups: int) -> np.ndarray:
        """Count levels `left` of some samples with those of the symbols at every lag, (groups, L, K, K)."""
        size = int(self.levels.max()) + 1
        places = self.data.places[part]
        base = ((self.groups[part] if groups > 1 else 0) * size + left) * size
        tables = [
            np.bincount(base + self.levels[self.data.symbols[places - lag]], minlength=groups * size**2)
            for lag in range(self.data.lags)
        ]
        return np.stack(tables).reshape(-1, groups, size, size).swapaxes(0, 1).astype(float)

    def _replace_targets(self, errors: np.ndarray) -> None:
        count, size = self.cross.shape[0], self.cross.shape[-1]
        order, ends = np.argsort(self.groups, kind="stable"), np.cumsum(self.samples.astype(int))[:-1]
        members = one_hot(self.groups, count)
        self.means = (members.T @ errors) / np.maximum(self.samples, 1)[:, None]
        errors = errors - self.means[self.groups]
        self.targets = np.stack([part.T @ part for part in np.split(errors[order], ends)])
        for lag in range(self.data.lags):
            codes = self.groups * size + self.levels[self.data.symbols[self.data.places - lag]]
            sums = one_hot(codes, count * size).T @ errors
            self.cross[:, lag] = sums.reshape(count, size, size).swapaxes(1, 2)

    def residual_dof(self) -> np.ndarray:
        """Return the degrees of freedom of the residuals in every group, (groups,)."""
        return self.samples - 1 - np.array([len(known) for known in self.known]) * (self.cross.shape[-1] - 1)

    def score_groups(
        self, members: slice | np.ndarray = slice(None), direction: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the standard score of every lag in some groups, and its statistic less the expected, (members, L).

        With `direction`, (members, L, K, K), only of what no multiple of it explains. The score is minus infinity where
        samples are too few.
        """
        room = self.residual_dof()[members]
        statistic, dof = _pillai_trace(
            self.cross[members], self.within[members], self.targets[members][:, None], direction
        )
        scores = wilson_hilferty(statistic * room[:, None], dof, self.uneven[members])
        tested = self.free[members] & (room >= self.cross.shape[-1] ** 2)[:, None]
        return np.where(tested, scores, -np.inf), statistic * room[:, None] - dof

    def score_pooled(self, direction: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the same with one matrix for all groups that have samples enough, (L,)."""
        room = self.residual_dof()
        usable = room > 4 * (self.samples - room)
        if not usable.any():
            return np.full(self.cross.shape[1], -np.inf), np.zeros(self.cross.shape[1])
        cross, within, targets = (every[usable].sum(0) for every in (self.cross, self.within, self.targets))
        statistic, dof = _pillai_trace(cross, within, targets, None if direction is None else direction[usable].sum(0))
        statistic *= room[usable].sum()
        scores = wilson_hilferty(statistic, dof, np.average(self.uneven[usable], 0, self.samples[usable]))
        return np.where(self.free[usable].any(0), scores, -np.inf), statistic - dof

    def score_present(self, value: np.ndarray) -> tuple[float, float]:
        """Return the same for the mean error of every group, less its multiple of a column of `value` (K, N)."""
        often = self.samples >= 5 * len(value)
        means, along = self.means[often], value[:, : len(self.samples)].T[often]
        inverse = np.linalg.pinv(self.targets.sum(0) / max(self.samples.sum() - 1, 1), hermitian=True, rcond=1e-9)
        squares = np.einsum("ka,ab,kb->k", means, inverse, means)
        across = np.einsum("ka,ab,kb->k", means, inverse, along) ** 2
        squares -= across / np.maximum(np.einsum("ka,ab,kb->k", along, inverse, along), 1e-300)
        statistic = float(self.samples[often] @ squares)
        dof = float(often.sum() * max(len(value) - (2 if value.any() else 1), 0))
        return float(wilson_hilferty(np.asarray(statistic), np.asarray(dof), 0.0)), statistic - dof

    def condition(self, group: int, lag: int) -> float:
        """Remove what the symbol at a lag explains from all matrices of a group; return its information in bits."""
        part = self.groups == group
        statistic, dof = _pillai_trace(self.cross[group, lag], self.within[group, lag], self.targets[group])
        counts = self._count(part, self.levels[self.data.symbols[self.data.places[part] - lag]], 1)[0]  # (L, K, K)
        beside = _centre(counts, counts[0].sum(1), counts.sum(1))
        for earlier, solved in self.known[group]:
            beside -= earlier[lag].T @ solved
        ridge = RIDGE * np.eye(beside.shape[-1])
        solved = np.linalg.solve(self.within[group, lag] + ridge, beside)
        own = self.cross[group, lag].copy()
        self.targets[group] -= own @ np.linalg.solve(self.within[group, lag] + ridge, own.T)
        self.cross[group] -= own @ solved
        self.within[group] -= beside.swapaxes(1, 2) @ solved
        bits = max(float(self.residual_dof()[group] * statistic - dof), 0.0) / (
            2 * np.log(2) * float(self.samples[group])
        )
        self.known[group].append((beside, solved))
        self.free[group, lag] = False
        return bits


def select_lags(data: Lagged, level: float, groups: np.ndarray | None = None) -> Selection:
    """Select lags; any false one, over all lags and `groups` (m,) of samples, has at most the probability `level`."""
    groups = np.zeros(len(data), np.int64) if groups is None else groups
    tables = Scores(data, groups, merge_levels(data, int(groups.max()) + 1))
    count, lags = tables.cross.shape[:2]
    shares = np.array([level / 2 / (count * lags), level / 2 / lags] if count > 1 else [level / lags] * 2)
    cuts = stats.norm.isf(shares)
    information = np.zeros((count, lags))
    order: list[int] = []
    first = 1.0
    single, together = tables.score_groups()[0], tables.score_pooled()[0]
    while True:
        heights = np.array([single.max(), together.max()])
        ahead = int((heights - cuts).argmax())
        pvalue = min(1.0, float(stats.norm.sf(heights[ahead]) / shares[ahead]) * level)
        lag = int((together if ahead else single.max(0)).argmax())
        first = first if order else pvalue
        if pvalue > level or len(order) >= MOST * count:
            return Selection(information, tuple(dict.fromkeys(order)), first, lag, pvalue)
        members = single[:, lag] >= (stats.norm.isf(PART) if ahead else heights[0])
        if not members.any():
            members = tables.free[:, lag] & (tables.samples > 0)
        for group in np.flatnonzero(members):
            information[group, lag] = tables.condition(int(group), lag)
        order.append(lag)
        single[members], together = tables.score_groups(members)[0], tables.score_pooled()[0]


def present_pvalue(data: Lagged, chosen: np.ndarray) -> float:
    """Return the p-value of no effect of the present symbol beside a table for each lag, of the symbols that chose it.

    `chosen` (N, L) tells which lags beyond 0 belong to which symbol. Where a lag is of one symbol alone, its table
    holds every effect of that symbol.
    """
    levels = merge_levels(data, data.vocabulary)
    size, lags = int(levels.max()) + 1, np.flatnonzero(chosen.any(0))
    seen = levels[data.symbols[data.places[:, None] - lags]] + np.arange(len(lags)) * size
    masks = chosen[data.queries][:, lags]
    starts = np.append(0, np.cumsum(masks.sum(1)))
    inputs = sparse.csr_array((np.ones(starts[-1]), seen[masks], starts), (len(data), size * len(lags)))
    targets = one_hot(levels[data.targets], size).toarray()
    targets -= targets.mean(0)
    solved = np.linalg.solve((inputs.T @ inputs).toarray() + RIDGE * np.eye(size * len(lags)), inputs.T @ targets)
    tables = Scores(data, data.queries, levels, targets - inputs @ solved)
    return float(stats.norm.sf(tables.score_present(np.zeros((size, data.vocabulary)))[0]))


def rotated_pvalue(data: Lagged, rng: np.random.Generator) -> float:
    """Return the p-value of independence by rotations of the targets, which keep their dependence on each other.

    Mean and variance of the statistic over rotations give its chi-square distribution (Satterthwaite's).
    """
    groups, levels = np.zeros(len(data), np.int64), merge_levels(data, 1)

    def measure(data: Lagged) -> np.ndarray:
        tables = Scores(data, groups, levels)
        return _pillai_trace(tables.cross[0], tables.within[0], tables.targets[0])[0]

    shifts = rng.integers(1, len(data), ROTATIONS)
    turned = [measure(replace(data, targets=np.roll(data.targets, shift), lags=1))[0] for shift in shifts]
    if not np.var(turned):  # almost constant targets
        return 1.0
    dof = 2 * np.mean(turned) ** 2 / np.var(turned, ddof=1)
    scores = wilson_hilferty(measure(data) / np.mean(turned) * dof, dof, 0.0)
    return min(1.0, float(stats.norm.sf(scores.max())) * data.lags)


def merge_levels(data: Lagged, groups: int) -> np.ndarray:
    """Return the level of every symbol, (N,): rare symbols share levels, so that a cell of a table expects a sample."""
    share = len(data) / groups
    counts = data.occurrences + np.bincount(data.targets, minlength=data.vocabulary)
    frequencies, levels = counts / counts.sum(), np.zeros(data.vocabulary, np.int64)
    for size in range(int(min(data.vocabulary, LEVELS, share**0.5, (CELLS / (groups * data.lags)) ** 0.5)), 1, -1):
        levels[np.argsort(-counts, kind="stable")] = np.arange(data.vocabulary) % size
        if np.bincount(levels, frequencies, size).min() ** 2 * share >= EXPECTED:
            break
    return levels


def _centre(counts: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    total = np.maximum(rows.sum(-1), 1)[..., None, None]
    return counts - rows[..., :, None] * columns[..., None, :] / total


def _scatter(sums: np.ndarray) -> np.ndarray:
    total = np.maximum(sums.sum(-1), 1)[..., None, None]
    return sums[..., :, None] * np.eye(sums.shape[-1]) - sums[..., :, None] * sums[..., None, :] / total


def _pillai_trace(
    cross: np.ndarray, within: np.ndarray, targets: np.ndarray, direction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return Pillai's trace and the degrees of freedom; without what a multiple of `direction` explains, if given."""
    ridge = RIDGE * np.eye(cross.shape[-1])

    def inner(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        left, right = np.linalg.solve(targets + ridge, one), np.linalg.solve(within + ridge, other.swapaxes(-1, -2))
        return np.einsum("...yx,...xy->...", left, right)

    def rank(scatter: np.ndarray) -> np.ndarray:
        return np.trace(np.linalg.solve(scatter + ridge, scatter), axis1=-2, axis2=-1)

    statistic, dof = inner(cross, cross), rank(targets) * rank(within)
    if direction is not None:
        statistic = statistic - inner(cross, direction) ** 2 / np.maximum(inner(direction, direction), 1e-300)
        dof = dof - 1
    return statistic, dof


def wilson_hilferty(statistic: np.ndarray, dof: np.ndarray, uneven: np.ndarray | float) -> np.ndarray:
    """Return the standard score of a chi-square statistic whose variance is larger by the share `uneven`."""
    spread = 2 * (1 + np.asarray(uneven)) / (9 * np.maximum(dof, 1e-9))
    scores = (np.cbrt(np.maximum(statistic, 0.0) / np.maximum(dof, 1e-9)) - (1 - spread)) / np.sqrt(spread)
    return np.where(dof > 0.5, scores, -np.inf)

r"""Alternating least squares for `fit_lags`: exact minimization in W, exact minimization in A, optimality conditions.

.. math:: F(W, A) = \frac1{2n}\sum_i |e_{y_i} - m - W z_i|^2
                    + r\,|W|_* \sum_k \frac{\sqrt{n_k}}{n}\,|A_k|_1, \qquad
          |W|_*^2 = \sum_x \nu_x\, w_x^\top\Sigma\, w_x,\quad \Sigma = \operatorname{diag} m - m m^\top .

With :math:`z_i = \sum_j A_{k_i j}e_{x_{i-j}}` a round needs of the stream only

.. math:: S = \tfrac1n\sum_i z_i z_i^\top,\quad C = \tfrac1n\sum_i (e_{y_i}-m) z_i^\top \qquad\text{for } W,

.. math:: G^k_{jl} = \sum_{i: k_i=k} K_{x_{i-j},\,x_{i-l}},\quad h^k_j = \sum_{i:k_i=k} R_{y_i,\,x_{i-j}}
          \qquad\text{for } A,\quad K = W^\top W,\ R = W - (W^\top m)^\top .

They come from tables of pairs (`PairCounts`) at the lags that have weight, and at all lags if those tables are small.
Otherwise all lags are summed block by block: :math:`K_{x_p,x_{p-d}}` is looked up once for every place p and distance
d, and serves all pairs of lags at that distance.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, sparse

from manyheads.errors import CertificateError
from manyheads.theory.bigram.lags.pair_counts import PairCounts
from manyheads.theory.bigram.lags.streams import Lagged
from manyheads.theory.bigram.task import sum_by_token

RIDGE = 1e-6  # of the mean eigenvalue: what never occurs would have undefined columns
RIDGE_OF_LAGS = 1e-9  # of the largest sum of squares of a query: lags that say the same would have undefined weights
ALMOST = 1e-9  # slope, as a share of the largest correlation, below which a weight stays zero
PIVOTS = 200  # of an exact solution, at most; its end is checked by `find_violation`, not here
TRIES = 3  # exchanges of all weights at once without progress, before they change one by one
NULL = 1e-10  # of the largest eigenvalue of Sigma: that of the vector of ones, which is zero up to rounding
ROUNDS = 60  # of alternation on the lags that have weight, between two looks at all lags, at most
SETTLED = 3e-5  # fall of the objective, as a share of what is explained, below which those rounds end
ENTRIES = 1 << 23  # of the tables of all pairs of lags, at most: about 100 MB


@dataclass(frozen=True, eq=False)
class LagProblem:
    """The samples, and what of them stays the same from round to round."""

    data: Lagged
    mean: np.ndarray  # m of the targets, (N,)
    frequencies: np.ndarray  # nu of the symbols, (N,)
    counts: np.ndarray  # n_k of the queries, (N,)
    strength: float  # r, in standard deviations of the noise

    @classmethod
    def of(cls, data: Lagged, strength: float | None) -> "LagProblem":
        """Count what is fixed; by default r is the square root of 2 ln L, and at least 2."""
        size, samples = data.vocabulary, len(data)
        counts = np.bincount(data.queries, minlength=size)
        mean = np.bincount(data.targets, minlength=size) / samples
        chosen = max(2.0, (2 * np.log(data.lags)) ** 0.5) if strength is None else strength
        # no symbol has frequency zero: the norm of W must see every column
        return cls(data, mean, (counts + 1 / size) / (samples + 1), counts, float(chosen))

    def without_lags(self) -> "Minimum":
        """Return the state in which no lag has weight."""
        size = self.data.vocabulary
        return Minimum(np.zeros((size, self.data.lags)), np.zeros((size, size)), (self.unexplained,), 0.0)

    @property
    def unexplained(self) -> float:
        """Half the mean squared target: the loss of predicting the frequencies."""
        return 0.5 * (1 - float(self.mean @ self.mean))

    @property
    def shares(self) -> np.ndarray:
        """Frequencies of the queries, (N,)."""
        return self.counts / self.counts.sum()

    @property
    def penalties(self) -> np.ndarray:
        """R deviations of the summed gradient at an empty lag, over the norm of W, (N,)."""
        return self.strength * np.sqrt(self.counts)

    @cached_property
    def covariance(self) -> np.ndarray:
        """Sigma of the targets, (N, N); what is explained is left in."""
        return np.diag(self.mean) - np.outer(self.mean, self.mean)

    @cached_property
    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues and eigenvectors of Sigma."""
        levels, axes = np.linalg.eigh(self.covariance)
        return np.maximum(levels, 0.1 * NULL * float(levels.max())), axes

    @cached_property
    def all_pairs(self) -> PairCounts | None:
        """Tables of all pairs of lags, None where they would be large."""
        size, lags = self.data.vocabulary, self.data.lags
        if len(self.data) * lags * (lags + 1) // 2 > ENTRIES:
            return None
        chosen = np.tile(np.arange(lags), (size, 1))
        return PairCounts.of(self.data, chosen, np.ones(chosen.shape, bool))

    def norm(self, value: np.ndarray) -> float:
        """Return the norm of W: the deviation of the gradient at an empty lag, for one sample."""
        return max(float(self.frequencies @ (value * (self.covariance @ value)).sum(0)), 0.0) ** 0.5


@dataclass(frozen=True, eq=False)
class Minimum:
    """State of the alternation: A (N, L) with mean row sum one, W (N, N), F by round, the certificate.

    `least` is the least F that was reached from any initial value, None if it is this one.
    """

    attention: np.ndarray
    value: np.ndarray
    objective: tuple[float, ...]
    violation: float
    least: float | None = None


def alternate(problem: LagProblem, value: np.ndarray, rounds: int, tolerance: float, most: int = ROUNDS) -> Minimum:
    """Minimize F by turns from W on, until A satisfies its conditions for the W that is best for it, or rounds end."""
    size, lags = problem.data.vocabulary, problem.data.lags
    attention, violation = np.zeros((size, lags)), np.inf
    objective: list[float] = []
    for turn in range(rounds):
        gram, correlation = attention_sums(problem, value)
        scale = problem.penalties * problem.norm(value)
        if turn:
            violation = find_violation(gram, correlation, scale, attention)
            if violation <= tolerance:
                break
        attention = solve_attention(gram, correlation, scale, attention)
        attention, value, level = settle(problem, attention, problem.penalties, most)
        if not value.any():
            return Minimum(np.zeros_like(attention), value, (*objective, problem.unexplained), 0.0)
        objective.append(level)
    return Minimum(attention, value, tuple(objective), violation)


def certified(minimum: Minimum, tolerance: float) -> Minimum:
    """Return a minimum that satisfies the conditions of optimality, or raise."""
    if minimum.violation > tolerance:
        raise CertificateError(
            f"the alternation did not converge in {len(minimum.objective)} rounds: allow more iterations, or raise the "
            "strength",
            measured=minimum.violation,
            threshold=tolerance,
        )
    return minimum


def settle(
    problem: LagProblem, attention: np.ndarray, penalties: np.ndarray, rounds: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Alternate on the lags that have weight, W first: A with mean row sum one, W, and F."""
    size, lags = attention.shape
    tables = tables_of(problem, attention)
    weights = np.take_along_axis(attention, tables.chosen, 1)
    free, best = weights > 0, np.inf
    value, level = np.zeros((size, size)), problem.unexplained
    for turn in range(rounds):
        if turn:
            gram, correlation = tables.attention_sums(value, problem.mean)
            weights = solve_attention(gram, correlation, penalties * problem.norm(value), weights, free)
        total = float(problem.shares @ weights.sum(1))
        if not total:
            return np.zeros_like(attention), np.zeros((size, size)), problem.unexplained
        weights = weights / total  # F depends on the product of the two scales alone
        load = float(penalties @ weights.sum(1)) / len(problem.data)
        second, cross = tables.value_sums(weights, problem.mean)
        value = solve_value(second, cross, problem, load)
        explained = float((value * cross).sum()) - 0.5 * float((value * (value @ second)).sum())
        level = problem.unexplained - explained + load * problem.norm(value)
        if not level < best - SETTLED * explained:
            break
        best = level
    return tables.spread(weights, lags), value, level


def tables_of(problem: LagProblem, attention: np.ndarray) -> PairCounts:
    """Return the tables of the lags that have weight, or of all lags."""
    if problem.all_pairs is not None:
        return problem.all_pairs
    chosen = list_chosen(attention)
    return PairCounts.of(problem.data, chosen, np.take_along_axis(attention, chosen, 1) > 0)


def list_chosen(attention: np.ndarray) -> np.ndarray:
    """Return the lags with weight of every query, (N, M), the strongest first; M is what the richest query needs."""
    most = max(1, int((attention > 0).sum(1).max()))
    return np.argsort(-attention, axis=1, kind="stable")[:, :most]


def attended(block: Lagged, attention: np.ndarray) -> np.ndarray:
    """Return z, (m, N): the weight that every symbol gets at every place of a block."""
    chosen = list_chosen(attention)
    queries = block.queries
    weights = np.take_along_axis(attention, chosen, 1)[queries]  # (m, M)
    seen = block.symbols[block.places[:, None] - chosen[queries]]
    return sum_by_token(seen, weights, block.vocabulary)


def value_sums(problem: LagProblem, attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return S and C of the module's head, both (N, N): from the tables of all pairs, or by one pass."""
    if problem.all_pairs is not None:
        return problem.all_pairs.value_sums(attention, problem.mean)
    size = problem.data.vocabulary
    second, cross, total = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
    for block in problem.data.blocks():
        hidden = attended(block, attention)
        second += hidden.T @ hidden
        cross += one_hot(block.targets, size).T @ hidden
        total += hidden.sum(0)
    return second / len(problem.data), (cross - np.outer(problem.mean, total)) / len(problem.data)


def attention_sums(problem: LagProblem, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return G (N, L, L) and h (N, L) of the module's head: from the tables of all pairs, or by one pass."""
    if problem.all_pairs is not None:
        return problem.all_pairs.attention_sums(value, problem.mean)
    size, lags = problem.data.vocabulary, problem.data.lags
    kernel = value.T @ value  # K
    response = value - problem.mean @ value  # R[y, x]
    gram, correlation = np.zeros((size, lags, lags)), np.zeros((size, lags))
    for block in problem.data.blocks():
        queries = block.queries
        low, high = int(block.places[0]) - lags + 1, int(block.places[-1]) + 1
        part = block.symbols[low:high]
        pairs = np.zeros((len(part), lags))  # pairs[p, d] = K[x_p, x_(p-d)]
        for distance in range(lags):
            pairs[distance:, distance] = kernel[part[distance:], part[: len(part) - distance]]
        members = one_hot(queries, size).T.tocsr()  # (N, m)
        order, places = members.indices, block.places - low
        for lag in range(lags):
            if lag % 16 == 0:  # of no use are distances that reach beyond the last lag
                pairs = np.ascontiguousarray(pairs[:, : lags - lag])
            chosen = sparse.csr_array((members.data, (places - lag)[order], members.indptr), (size, len(part)))
            gram[:, lag, lag:] += (chosen @ pairs)[:, : lags - lag]  # x at `lag` with x at `lag + d`
            products = response[block.targets, block.symbols[block.places - lag]]
            correlation[:, lag] += np.bincount(queries, products, minlength=size)
    upper = np.triu(np.ones((lags, lags)), 1)
    return gram + (gram * upper).transpose(0, 2, 1), correlation


def one_hot(symbols: np.ndarray, size: int) -> sparse.csr_array:
    """Return symbols (m,), or several columns (m, C), as rows with ones, (m, size)."""
    starts = np.arange(len(symbols) + 1) * (symbols.size // max(len(symbols), 1))
    return sparse.csr_array((np.ones(symbols.size), symbols.ravel(), starts), (len(symbols), size))


def solve_value(second: np.ndarray, cross: np.ndarray, problem: LagProblem, load: float) -> np.ndarray:
    r"""Minimize :math:`\tfrac12\operatorname{tr}WSW^\top - \langle W,C\rangle + \alpha|W|_*` over W.

    With :math:`\rho|W|_*=\alpha` the minimum solves :math:`WS + \rho\,\Sigma W\operatorname{diag}\nu = C`. In the
    eigenvectors of :math:`\Sigma`, of levels :math:`\sigma_a`, and of S between square roots of :math:`\nu`, of levels
    :math:`s_b`, its entries are :math:`C_{ab}/(s_b+\rho\sigma_a)`, and :math:`\rho` is the root of a scalar equation.
    W is zero if :math:`\sum_{ab}C_{ab}^2/\sigma_a\le\alpha^2`; a `load` alpha of zero gives least squares with a ridge
    that only rounding notices.
    """
    root = np.sqrt(problem.frequencies)
    levels, axes = np.linalg.eigh(second / np.outer(root, root))
    levels = np.maximum(levels, 0.0)
    sides, frame = problem.axes
    along = frame.T @ (cross / root) @ axes  # (N, N)
    along[sides <= NULL * sides.max()] = 0.0  # the columns of C sum to zero, up to rounding
    shrinkage, ridge = 0.0, RIDGE * float(levels.mean())
    if load:
        squares = along**2
        if load**2 >= float((squares.sum(1) / sides).sum()):
            return np.zeros_like(cross)

        def excess(log: float) -> float:
            factor = np.exp(log)
            return float((sides[:, None] * squares / (levels / factor + sides[:, None]) ** 2).sum()) - load**2

        low = high = np.log(float(levels.max()) / float(sides.max()))
        while excess(high) < 0:
            high += 3.0
        while excess(low) > 0 and low > high - 60:
            low -= 3.0
        if excess(low) < 0:
            shrinkage, ridge = np.exp(optimize.brentq(excess, low, high, xtol=1e-12)), 0.0
    return np.asarray(frame @ (along / (levels + ridge + shrinkage * sides[:, None])) @ axes.T / root)


def solve_attention(
    gram: np.ndarray, correlation: np.ndarray, penalty: np.ndarray, init: np.ndarray, free: np.ndarray | None = None
) -> np.ndarray:
    r"""Minimize :math:`\tfrac12 a^\top G a - h^\top a + p\,1^\top a` over :math:`a\ge0`, for all queries at once.

    Exact, by block principal pivoting (Kim and Park, "Fast nonnegative matrix factorization", SIAM J. Sci. Comput.
    2011): the unconstrained minimum on a guess of the positive weights tells which of them change sides. G (N, L, L)
    and h (N, L) are sums over the samples of each query; of `init` only the places of positive weights count, and
    weights outside `free` stay zero.
    """
    target = correlation - penalty[:, None]
    allowed = np.ones(target.shape, bool) if free is None else free
    diagonal = np.einsum("kll->kl", gram)
    level, slack = RIDGE_OF_LAGS * diagonal.max(1, keepdims=True), ALMOST * np.abs(target).max(1, keepdims=True)
    positive, attention = (init > 0) & allowed, np.zeros(target.shape)
    fewest, tries = np.full(len(target), target.shape[1] + 1), np.full(len(target), TRIES)
    rows = np.arange(len(target))  # which are not at their minimum yet
    for _ in range(PIVOTS):
        on = positive[rows]
        system = np.where(on[:, :, None] & on[:, None, :], gram[rows], 0.0)
        np.einsum("kll->kl", system)[:] = np.where(on, diagonal[rows] + level[rows], 1.0)
        weights = np.linalg.solve(system, np.where(on, target[rows], 0.0)[..., None])[..., 0]
        attention[rows] = np.maximum(weights, 0.0)
        slope = target[rows] - np.einsum("kjl,kl->kj", gram[rows], weights)  # minus the gradient
        wrong = np.where(on, weights < 0, allowed[rows] & (slope > slack[rows]))
        count = wrong.sum(1)
        fewer = count < fewest[rows]
        fewest[rows] = np.minimum(count, fewest[rows])
        tries[rows] = np.where(fewer, TRIES, tries[rows] - 1)
        last = target.shape[1] - 1 - wrong[:, ::-1].argmax(1)  # one alone, if all at once go in circles
        single = np.arange(target.shape[1]) == last[:, None]
        positive[rows] ^= wrong & (single | (tries[rows] >= 0)[:, None])
        rows = rows[count > 0]
        if not len(rows):
            break
    return attention


def find_violation(gram: np.ndarray, correlation: np.ndarray, penalty: np.ndarray, attention: np.ndarray) -> float:
    """Return the largest violation of the conditions of `solve_attention`, as a share of the penalty."""
    slope = correlation - penalty[:, None] - np.einsum("kjl,kl->kj", gram, attention)  # minus the gradient
    violated = np.where(attention > 0, np.abs(slope), np.maximum(slope, 0.0))  # (N, L)
    seen = penalty > 0
    return float((violated[seen] / penalty[seen, None]).max(initial=0.0))

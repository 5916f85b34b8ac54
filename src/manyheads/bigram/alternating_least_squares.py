r"""The alternation behind `fit_lags`: exact minimisation in W, exact minimisation in A, the conditions of optimality.

With :math:`z_i = \sum_j A_{k_i j}e_{x_{i-j}}` a round needs of the stream only

.. math:: S = \tfrac1n\sum_i z_i z_i^\top,\quad C = \tfrac1n\sum_i (e_{y_i}-m) z_i^\top \qquad\text{for } W,

.. math:: G^k_{jl} = \sum_{i: k_i=k} K_{x_{i-j},\,x_{i-l}},\quad h^k_j = \sum_{i:k_i=k} R_{y_i,\,x_{i-j}}
          \qquad\text{for } A,\quad K = W^\top W,\ R = W - (W^\top m)^\top,

which are summed block by block. :math:`K_{x_p,x_{p-d}}` is looked up once for every place p and distance d, and serves
all pairs of lags at that distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from manyheads.bigram.streams import Lagged
from manyheads.errors import CertificateError

RIDGE = 1e-6  # of the mean eigenvalue: what never occurs would have undefined columns
SWEEPS = 500  # of coordinate descent, at most; its end is checked by `violation`, not here
STILL = 1e-6  # largest move of a sweep, as a share of the largest weight, at which it ends
BURN_IN = 3  # rounds in which the penalty's calibration still follows W
SETTLING = 12  # rounds on the lags that have weight between two looks at all lags, at most
REFITS = 30  # rounds without penalty, at most
SETTLED = 3e-5  # fall of the objective, as a share of what is explained, below which those rounds end


@dataclass(frozen=True, eq=False)
class Problem:
    """The samples, and what of them stays the same from round to round.

    Attributes
    ----------
    data
        The stream.
    mean, frequencies, counts
        m of the targets, nu of the symbols, n_k of the queries, each (N,).
    strength
        r, in standard deviations of the noise.
    """

    data: Lagged
    mean: np.ndarray
    frequencies: np.ndarray
    counts: np.ndarray
    strength: float

    @classmethod
    def of(cls, data: Lagged, strength: float | None) -> Problem:
        """Count what is fixed; by default r is the square root of 2 ln L, and at least 2."""
        size, samples = data.vocabulary, len(data)
        counts = np.bincount(data.queries, minlength=size)
        mean = np.bincount(data.targets, minlength=size) / samples
        chosen = max(2.0, (2 * np.log(data.lags)) ** 0.5) if strength is None else strength
        # no symbol has frequency zero: the norm of W must see every column
        return cls(data, mean, (counts + 1 / size) / (samples + 1), counts, float(chosen))

    @property
    def energy(self) -> float:
        """Half the mean squared target: the loss of predicting the frequencies."""
        return 0.5 * (1 - float(self.mean @ self.mean))

    @property
    def shares(self) -> np.ndarray:
        """Frequencies of the queries, (N,)."""
        return self.counts / self.counts.sum()

    def norm(self, value: np.ndarray) -> float:
        """Return the norm of W weighted by the frequencies."""
        return float(self.frequencies @ (value**2).sum(0)) ** 0.5

    def penalties(self, value: np.ndarray) -> np.ndarray:
        """Return n_k lambda_k, (N,): r deviations of the summed gradient at an empty lag, over the norm of W."""
        spread = np.diag(self.mean) - np.outer(self.mean, self.mean)  # of the target; what is explained is left in
        noise = float(self.frequencies @ (value * (spread @ value)).sum(0)) ** 0.5
        return self.strength * noise / self.norm(value) * np.sqrt(self.counts)


@dataclass(frozen=True, eq=False)
class Minimum:
    """Where the alternation ended: A (N, L) with mean row sum one, W (N, N), F by round, and the certificate."""

    attention: np.ndarray
    value: np.ndarray
    objective: tuple[float, ...]
    violation: float


def alternate(problem: Problem, iterations: int, tolerance: float) -> Minimum:
    """Minimise F by turns until A satisfies its conditions for the W that is best for it.

    Raises
    ------
    CertificateError
        Nothing passes the penalty, or the conditions are still violated after the last round.
    """
    size, lags = problem.data.vocabulary, problem.data.lags
    value = solve_value(*value_sums(problem, np.full((size, lags), 1 / lags)), problem, 0.0)
    attention, penalties = np.zeros((size, lags)), problem.penalties(value)
    objective: list[float] = []
    violation = np.inf
    for turn in range(iterations):
        gram, pull = attention_sums(problem, value)
        scale = penalties * problem.norm(value)
        if turn:
            violation = find_violation(gram, pull, scale, attention)
            if turn > BURN_IN and violation <= tolerance:
                return Minimum(attention, value, tuple(objective), violation)
        attention = solve_attention(gram, pull, scale, attention)
        if not attention.any():
            break
        if turn < BURN_IN:
            penalties = problem.penalties(value)
        attention, value, level = settle(problem, attention, penalties, SETTLING if turn >= BURN_IN else 1)
        if not value.any():
            break
        if turn >= BURN_IN:
            objective.append(level)
    else:
        raise CertificateError(
            f"the alternation did not converge in {iterations} rounds: allow more iterations, or raise the strength",
            measured=violation,
            threshold=tolerance,
        )
    seen = problem.counts > 0
    strongest = float((pull[seen] / np.maximum(scale[seen], 1e-300)[:, None]).max())
    raise CertificateError(
        f"no lag stands out from the noise of {len(problem.data)} samples: give more, or a smaller strength than "
        f"{problem.strength:.2f}; the largest pull of a lag, in units of its penalty",
        measured=strongest,
        threshold=1.0,
    )


def settle(
    problem: Problem, attention: np.ndarray, penalties: np.ndarray, rounds: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Alternate on the lags that have weight, which is cheap, W first: A with mean row sum one, W, and F."""
    chosen, lags = list_chosen(attention), attention.shape[1]
    whole = 3 * chosen.shape[1] > lags  # then a look at all lags, which has less to look up, is the cheaper one
    chosen = np.tile(np.arange(lags), (len(attention), 1)) if whole else chosen
    weights = np.take_along_axis(attention, chosen, 1)
    free, best = weights > 0, np.inf
    value, level = np.zeros((len(attention),) * 2), np.inf
    for turn in range(rounds):
        if turn:
            scale = penalties * problem.norm(value)
            sums = attention_sums(problem, value) if whole else chosen_sums(problem, value, chosen)
            weights = solve_attention(*sums, scale, weights, free)
        total = float(problem.shares @ weights.sum(1))
        if not total:
            break
        weights = weights / total  # F depends on the product of the two scales alone
        attention = np.zeros_like(attention)
        np.put_along_axis(attention, chosen, weights, 1)
        load = float(penalties @ weights.sum(1)) / len(problem.data)
        second, cross = value_sums(problem, attention)
        value = solve_value(second, cross, problem, load)
        explained = float((value * cross).sum()) - 0.5 * float((value * (value @ second)).sum())
        level = problem.energy - explained + load * problem.norm(value)
        if not level < best - SETTLED * explained:
            break
        best = level
    return attention, value, level


def refit(problem: Problem, selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit W and the chosen weights once more, by turns and without penalty: (W, A), A with mean row sum one."""
    attention, value, _ = settle(problem, selection, np.zeros(len(selection)), REFITS)
    return value, attention


def list_chosen(attention: np.ndarray) -> np.ndarray:
    """Return the lags with weight of every query, (N, M), the strongest first; M is what the richest query needs."""
    most = max(1, int((attention > 0).sum(1).max()))
    return np.argsort(-attention, axis=1, kind="stable")[:, :most]


def chosen_sums(problem: Problem, value: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return G (N, M, M) and h (N, M) of the module's head for M lags of every query, `chosen` (N, M)."""
    size, most = chosen.shape
    kernel, response = value.T @ value, value - problem.mean @ value
    gram, pull = np.zeros((size, most, most)), np.zeros((size, most))
    for block in problem.data.blocks():
        queries = block.queries
        seen = block.symbols[block.places[:, None] - chosen[queries]]  # (m, M)
        for one in range(most):
            pull[:, one] += np.bincount(queries, response[block.targets, seen[:, one]], minlength=size)
            for other in range(one + 1):
                sums = np.bincount(queries, kernel[seen[:, one], seen[:, other]], minlength=size)
                gram[:, one, other] += sums
                gram[:, other, one] = gram[:, one, other]
    return gram, pull


def attended(block: Lagged, attention: np.ndarray) -> np.ndarray:
    """Return z, (m, N): the weight that every symbol gets at every place of a block."""
    chosen = list_chosen(attention)
    queries = block.queries
    weights = np.take_along_axis(attention, chosen, 1)[queries]  # (m, M)
    seen = block.symbols[block.places[:, None] - chosen[queries]]
    codes = seen + np.arange(len(block))[:, None] * block.vocabulary
    flat = np.bincount(codes.ravel(), weights.ravel(), minlength=len(block) * block.vocabulary)
    return flat.reshape(len(block), block.vocabulary)


def value_sums(problem: Problem, attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return S and C of the module's head, both (N, N)."""
    size = problem.data.vocabulary
    second, cross, total = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
    for block in problem.data.blocks():
        hidden = attended(block, attention)
        second += hidden.T @ hidden
        cross += one_hot(block.targets, size).T @ hidden
        total += hidden.sum(0)
    return second / len(problem.data), (cross - np.outer(problem.mean, total)) / len(problem.data)


def attention_sums(problem: Problem, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return G (N, L, L) and h (N, L) of the module's head."""
    size, lags = problem.data.vocabulary, problem.data.lags
    kernel = value.T @ value  # K
    response = value - problem.mean @ value  # R[y, x]
    gram, pull = np.zeros((size, lags, lags)), np.zeros((size, lags))
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
            pulls = response[block.targets, block.symbols[block.places - lag]]
            pull[:, lag] += np.bincount(queries, pulls, minlength=size)
    upper = np.triu(np.ones((lags, lags)), 1)
    return gram + (gram * upper).transpose(0, 2, 1), pull


def one_hot(symbols: np.ndarray, size: int) -> sparse.csr_array:
    """Return symbols as rows with a single one, (m, N)."""
    count = len(symbols)
    return sparse.csr_array((np.ones(count), symbols, np.arange(count + 1)), (count, size))


def solve_value(second: np.ndarray, cross: np.ndarray, problem: Problem, load: float) -> np.ndarray:
    r"""Minimise :math:`\tfrac12\operatorname{tr}WSW^\top - \langle W,C\rangle + \alpha|W|_\nu` over W.

    The minimum is zero if :math:`\alpha\ge|C\,\mathrm{diag}(\nu)^{-1/2}|`; else it is
    :math:`C(S+\rho\,\mathrm{diag}\,\nu)^{-1}` with the one :math:`\rho` for which :math:`\rho|W|_\nu=\alpha`.

    Parameters
    ----------
    second, cross
        S and C, (N, N).
    problem
        Where the frequencies are.
    load
        alpha; zero gives least squares with a ridge that only rounding notices.
    """
    root = np.sqrt(problem.frequencies)
    levels, axes = np.linalg.eigh(second / np.outer(root, root))
    levels = np.maximum(levels, 0.0)
    along = (cross / root) @ axes  # (N, N)
    energy = (along**2).sum(0)
    ridge = RIDGE * float(levels.mean())
    if load:
        if load >= energy.sum() ** 0.5:
            return np.zeros_like(cross)

        def excess(log: float) -> float:
            return float(energy @ (1 / (1 + levels * np.exp(-log))) ** 2) - load**2

        top = np.log(max(float(levels.max()), 1e-300))
        low, high = top - 30.0, top + 1.0
        while excess(high) < 0:
            high += 2.0
        ridge = max(ridge, np.exp(optimize.brentq(excess, low, high, xtol=1e-13))) if excess(low) < 0 else ridge
    return np.asarray((along / (levels + ridge)) @ axes.T / root)


def solve_attention(
    gram: np.ndarray, pull: np.ndarray, penalty: np.ndarray, start: np.ndarray, free: np.ndarray | None = None
) -> np.ndarray:
    r"""Minimise :math:`\tfrac12 a^\top G a - h^\top a + p\,1^\top a` over :math:`a\ge0`, for all queries at once.

    Coordinate descent, one lag after the other, until nothing moves.

    Parameters
    ----------
    gram, pull
        G (N, L, L) and h (N, L), sums over the samples of each query.
    penalty
        p, (N,).
    start
        (N, L): where to begin.
    free
        (N, L): which weights may differ from zero; by default all.
    """
    attention = start.copy()
    size = np.maximum(np.einsum("kll->kl", gram).max(1), 1e-300)
    diagonal = np.einsum("kll->kl", gram) + 1e-12 * size[:, None]
    slope = pull - penalty[:, None] - np.einsum("kjl,kl->kj", gram, attention)  # minus the gradient
    for _ in range(SWEEPS):
        before = attention.copy()
        for lag in range(attention.shape[1]):
            after = np.maximum(attention[:, lag] + slope[:, lag] / diagonal[:, lag], 0.0)
            if free is not None:
                after *= free[:, lag]
            slope -= gram[:, lag] * (after - attention[:, lag])[:, None]
            attention[:, lag] = after
        if np.abs(attention - before).max() <= STILL * max(float(attention.max()), 1e-300):
            break
    return attention


def find_violation(gram: np.ndarray, pull: np.ndarray, penalty: np.ndarray, attention: np.ndarray) -> float:
    """Return the largest violation of the conditions of `solve_attention`, as a share of the penalty."""
    slope = pull - penalty[:, None] - np.einsum("kjl,kl->kj", gram, attention)  # minus the gradient
    violated = np.where(attention > 0, np.abs(slope), np.maximum(slope, 0.0))  # (N, L)
    seen = penalty > 0
    return float((violated[seen] / penalty[seen, None]).max())

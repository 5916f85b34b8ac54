r"""Initial values of W for `fit_lags`, whose objective is not convex, and the choice among the minima they lead to.

At a single lag j the least squares fit is :math:`W_j = C_j\operatorname{diag}(\nu)^{-1}`. The initial values are those
of the lags with the most mutual information and of the present symbol, the fit to equal weights at all lags, and the
direction that the matrices :math:`M_j \approx a_j W` of an additive model share, their first singular vector.

Several minima may explain a stream equally well: in one of period 8, the next symbol is the one at lag 7, and as well a
permutation of the one at any other lag. The minimum that :math:`W = 1 - m\mathbf 1^\top` leads to, a copy of the symbol
that is looked up, is the simplest of them and wins such ties: where it explains as much up to the error of the samples,
and up to a small share.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from manyheads.errors import CertificateError
from manyheads.theory.bigram.lags import alternating_least_squares as als

FEW, MANY = 4, 32  # single lags to start from: where every look at all lags is a pass over the stream, and where not
COPY = 0.8  # cosine of W and a copy from which on W is one
TIED = 4.0  # standard errors by which the squared errors of a copy and of the best of several minima differ in a tie
EQUIVALENT = 0.05  # of what the best explains, at most, is lost in a tie
RACES = ((4, 1, 2), (2, 2, 8))  # how many go on, and after how many rounds of how many turns


def minimize(
    problem: als.LagProblem,
    matrices: np.ndarray,
    information: np.ndarray,
    rounds: int,
    tolerance: float,
) -> als.Minimum:
    """Return the least of the minima that the initial values lead to.

    Every initial value gets a few rounds, the best of them some more, and the best of those the rest: a race, in which
    one that is slow at first may lose. That the minimum is global is not known. `matrices` is the additive fit, (lags
    that it sees, N, N), answer before token. Raises `CertificateError` if no lag passes the penalty.
    """
    values = inits = [value for value in initial_values(problem, matrices, information) if value.any()]
    for kept, turns, most in RACES:
        reached = [als.alternate(problem, value, turns, tolerance, most) for value in values]
        reached = [minimum for minimum in reached if minimum.attention.any()]
        values = [minimum.value for minimum in sorted(reached, key=lambda minimum: minimum.objective[-1])[:kept]]
    minima = [als.alternate(problem, value, rounds, tolerance) for value in values]
    minima = sorted(
        (minimum for minimum in minima if minimum.attention.any()), key=lambda minimum: minimum.objective[-1]
    )
    if not minima:
        raise CertificateError(
            f"no better than unigram: no lag stands out from the noise of {len(problem.data)} samples; give more, or a "
            f"smaller strength than {problem.strength:.2f}; the largest correlation of a lag, in units of its penalty",
            measured=max((_largest_correlation(problem, value) for value in inits), default=0.0),
            threshold=1.0,
        )
    best = minima[0]
    if (copying := _find_copy(problem, rounds, tolerance)) is not None:
        errors = squared_errors(problem, best)
        gap = squared_errors(problem, copying) - errors
        if gap.mean() <= min(TIED * gap.std() / len(gap) ** 0.5, -EQUIVALENT * errors.mean()):
            best = replace(copying, least=min(best.objective[-1], copying.objective[-1]))
    return best


def squared_errors(problem: als.LagProblem, minimum: als.Minimum) -> np.ndarray:
    """Return half the squared error of every sample, less that of the frequencies, (n,)."""
    errors = []
    for block in problem.data.blocks():
        added = als.attended(block, minimum.attention) @ minimum.value.T  # (m, N)
        right = added[np.arange(len(block)), block.targets] - added @ problem.mean
        errors.append(0.5 * (added**2).sum(1) - right)
    return np.concatenate(errors)


def _largest_correlation(problem: als.LagProblem, value: np.ndarray) -> float:
    """Return the largest correlation of a lag for a value matrix, in units of its penalty."""
    seen = problem.counts > 0
    correlation = als.attention_sums(problem, value)[1][seen].max(1)
    return float((correlation / problem.penalties[seen]).max()) / problem.norm(value)


def _find_copy(problem: als.LagProblem, rounds: int, tolerance: float) -> als.Minimum | None:
    """Return the minimum that a copy leads to, None if it is no copy any more."""
    copy = np.eye(len(problem.mean)) - problem.mean[:, None]
    value = copy
    for turns, most in ((1, 4), (rounds, als.ROUNDS)):
        found = als.alternate(problem, value, turns, tolerance, most)
        value = found.value
        if not _cosine(problem, value, copy) > COPY:
            return None
    return found if found.violation <= tolerance else None


def _cosine(problem: als.LagProblem, one: np.ndarray, other: np.ndarray) -> float:
    product = float(problem.frequencies @ (one * (problem.covariance @ other)).sum(0))
    return product / max(problem.norm(one) * problem.norm(other), 1e-300)


def initial_values(problem: als.LagProblem, matrices: np.ndarray, information: np.ndarray) -> Iterator[np.ndarray]:
    """Yield initial values of W."""
    size, lags = problem.data.vocabulary, problem.data.lags
    yield als.solve_value(*als.value_sums(problem, np.full((size, lags), 1 / lags)), problem, 0.0)
    order = np.argsort(-information, kind="stable")[: FEW if problem.all_pairs is None else MANY].tolist()
    for lag in dict.fromkeys([0, *order]):
        joint = problem.data.count_pairs(lag) / len(problem.data)  # (target, symbol)
        seen = joint.sum(0)
        yield als.solve_value(np.diag(seen), joint - np.outer(problem.mean, seen), problem, 0.0)
    root = np.sqrt(problem.frequencies)
    left, _, right = np.linalg.svd((matrices * root).reshape(len(matrices), -1), full_matrices=False)
    yield np.sign(left[:, 0].sum()) * right[0].reshape(size, size) / root

"""Refit of `fit_lags` without penalty, with backward elimination of the lags that the lasso chose."""

from __future__ import annotations

import numpy as np

from manyheads.theory.bigram.lags.alternating_least_squares import RIDGE_OF_LAGS, ROUNDS, LagProblem, settle, tables_of


def refit(problem: LagProblem, selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit W and the chosen weights once more, without penalty: (W, A), A with mean row sum one.

    All of them by turns, and again those that `eliminate` keeps.
    """
    none = np.zeros(len(selection))
    attention, value, _ = settle(problem, selection, none, ROUNDS // 2)
    kept = eliminate(problem, value, attention)
    if kept.any() and (kept != (attention > 0)).any():
        attention, value, _ = settle(problem, np.where(kept, attention, 0.0), none, ROUNDS // 2)
    return value, attention


def eliminate(problem: LagProblem, value: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """Drop the weight with the least standard score, query by query, until all reach the strength: (N, L) of bools.

    The lasso also chooses lags whose symbols depend on those at the right lags.
    """
    tables = tables_of(problem, attention)
    weights = np.take_along_axis(attention, tables.chosen, 1)
    gram, correlation = tables.attention_sums(value, problem.mean)
    noise = problem.norm(value) ** 2 / max(float(problem.frequencies @ (value**2).sum(0)), 1e-300)  # of one sample
    for query in range(len(weights)):
        while len(rows := np.flatnonzero(weights[query])):
            part = gram[query][np.ix_(rows, rows)]
            inverse = np.linalg.inv(part + RIDGE_OF_LAGS * np.diag(part).max() * np.eye(len(rows)))
            scores = inverse @ correlation[query, rows] / np.sqrt(noise * np.diag(inverse))
            if scores.min() >= problem.strength:
                break
            weights[query, rows[scores.argmin()]] = 0.0
    return tables.spread(weights, attention.shape[1]) > 0

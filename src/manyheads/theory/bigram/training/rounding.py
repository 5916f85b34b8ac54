r"""Rounding and refit: support of the attention, normalized weights, and least squares on fresh samples.

A trained attention row is noisy outside its few attended positions, and training determines attention and values up to
a scale, because only their product enters the loss. A run ends in three steps that use samples only: set small weights
to zero, normalize every row and move the common scale into the values, and fit the scale, the values, or values and
weights jointly, to fresh samples. At known positions the model has a few parameters per query and is linear in the
values and in the weights separately.

Source: rounding is the last step of the algorithm of Ren, Wang and Lee, "Learning and transferring sparse contextual
bigrams with linear transformers", NeurIPS 2024 (arXiv 2410.23438), as read from its abstract; the fits are derived
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from manyheads._arrays import as_integers
from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.bigram.task import Batch, BigramTask, sum_by_token
from manyheads.theory.bigram.training.proximal_sgd import State

SHARE = 0.1  # weights below this share of their row's largest are dropped


class LossEstimate(NamedTuple):
    """Mean of half the squared error over samples, its standard error, and the number of samples."""

    mean: float
    error: float
    samples: int


def round_attention(state: State, stationary: np.ndarray, share: float = SHARE) -> State:
    r"""Set small weights to zero, normalize every row, and move the common scale into the values.

    Weights below `share` of the largest of their row become zero. With :math:`s_k` the sum of the rest, rows are
    divided by :math:`s_k` and the values multiplied by :math:`\sum_k \mu_k s_k^2 / \sum_k \mu_k s_k`, the factor that
    changes the predictions least. A row without a positive weight becomes uniform.
    """
    if not 0 < share < 1:
        raise UsageError(f"share={share}: give a share of a row's largest weight between 0 and 1")
    attention = np.asarray(state.attention, np.float64)
    top = attention.max(1, keepdims=True)  # (N, 1)
    kept = np.where((attention >= share * top) & (top > 0), attention, 0.0)
    sums = kept.sum(1)
    rows = np.where(sums[:, None] > 0, kept / np.where(sums > 0, sums, 1)[:, None], 1 / attention.shape[1])
    scale = float(stationary @ sums**2 / (stationary @ sums)) if sums.any() else 1.0
    return state._replace(value=scale * np.asarray(state.value), attention=rows.astype(np.float32))


def find_support(attention: np.ndarray, sparsity: int | None = None, share: float = SHARE) -> tuple[np.ndarray, ...]:
    """Return the `sparsity` largest positions of each query, increasing; None: all above `share` of the largest."""
    attention = np.asarray(attention)
    if sparsity is None:
        return tuple(np.flatnonzero(row >= share * row.max()) for row in attention)
    return tuple(np.sort(np.argpartition(-row, sparsity - 1)[:sparsity]) for row in attention)


def share_of_support(task: BigramTask, found: Sequence[np.ndarray]) -> float:
    """Return the share of queries whose found positions are the right ones."""
    return float(np.mean([np.array_equal(row, true) for row, true in zip(found, task.positions, strict=True)]))


def attend(attention: np.ndarray, batch: Batch, vocabulary: int) -> np.ndarray:
    """Return the attention that every token of the vocabulary gets in each sample, (B, N) float64."""
    seen = np.zeros((len(batch.queries), vocabulary))
    for query in np.unique(batch.queries):
        rows = np.flatnonzero(batch.queries == query)
        used = np.flatnonzero(attention[query])  # a few percent after the proximal stage
        if used.size == 0:
            continue
        tokens = batch.tokens[rows] if used.size == batch.tokens.shape[1] else batch.tokens[np.ix_(rows, used)]
        weights = np.broadcast_to(np.asarray(attention[query, used], np.float64), tokens.shape)
        seen[rows] = sum_by_token(tokens, weights, vocabulary)
    return seen


def estimate_loss(state: State, stationary: np.ndarray, batch: Batch) -> LossEstimate:
    r"""Return the mean of :math:`\tfrac12|\mu + W X a^{(k)} - e_y|^2` over samples, with its standard error."""
    batch = Batch(*(as_integers(part, name) for name, part in zip(Batch._fields, batch, strict=True)))
    size = len(batch.queries)
    errors = attend(state.attention, batch, len(stationary)) @ np.asarray(state.value).T + stationary  # (B, N)
    errors[np.arange(size), batch.targets] -= 1
    losses = 0.5 * (errors**2).sum(1)
    return LossEstimate(float(losses.mean()), float(losses.std(ddof=1) / size**0.5) if size > 1 else np.inf, size)


@dataclass(frozen=True)
class SupportSamples:
    """Fresh samples, reduced to some positions of each query."""

    places: np.ndarray  # (N, C): the positions kept for each query; -1 in the unused columns of a query with fewer
    tokens: np.ndarray  # (n, C): the tokens there
    queries: np.ndarray  # (n,)
    targets: np.ndarray  # (n,)


def sample_support(
    rng: np.random.Generator, task: BigramTask, support: tuple[np.ndarray, ...], size: int
) -> SupportSamples:
    """Draw fresh samples and keep the tokens at the positions `support` of each query.

    Tokens are independent, so only these and the true positions are drawn: the distribution is that of whole contexts.
    """
    if len(support) != task.vocabulary or not all(len(row) for row in support):
        raise ShapeError(f"support of {[len(row) for row in support]} positions: give one or more for each query")
    everything = np.unique(np.concatenate([task.positions.ravel(), *support]))
    small = replace(task, positions=np.searchsorted(everything, task.positions), length=len(everything))
    batch = small.draw(rng, size)
    places = np.full((task.vocabulary, max(len(row) for row in support)), -1)
    for query, row in enumerate(support):
        places[query, : len(row)] = row
    columns = np.searchsorted(everything, np.maximum(places, 0))[batch.queries]  # (n, C)
    return SupportSamples(places, np.take_along_axis(batch.tokens, columns, 1), batch.queries, batch.targets)


def refit_scale(state: State, stationary: np.ndarray, seen: SupportSamples) -> State:
    r"""Multiply the values by the least-squares factor on fresh samples, :math:`\sum r\cdot f/\sum f\cdot f`.

    Here :math:`f = W X a` and :math:`r = e_y - \mu`.
    """
    weights = at_places(state.attention, seen)[seen.queries]
    effect = sum_by_token(seen.tokens, weights, len(stationary)) @ np.asarray(state.value).T  # (n, N)
    size = float((effect**2).sum())
    if size == 0:
        raise CertificateError(
            "nothing to scale: the predictions do not depend on the context; train longer",
            measured=0.0,
            threshold=np.finfo(float).tiny,
        )
    along = float(effect[np.arange(len(effect)), seen.targets].sum() - (effect @ stationary).sum())
    return state._replace(value=np.asarray(state.value) * (along / size))


def check_support(
    state: State, stationary: np.ndarray, seen: SupportSamples, sparsity: int, *, passes: int = 6
) -> tuple[np.ndarray, ...]:
    r"""Return the `sparsity` positions of each query that fresh samples confirm, among those that they contain.

    Tokens are independent, so given the values each weight is estimated alone, by
    :math:`\hat a_c = \sum r\cdot W e_{x_c} / \sum |W e_{x_c}|^2`; values and weights alternate. The error of a weight
    is :math:`1/\sqrt{K_V n}` at every length. Positions below `SHARE` of the largest are dropped as well.
    """
    weights = np.maximum(at_places(state.attention, seen), 0.0)
    weights /= np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
    for _ in range(passes):
        value = _solve_values(weights, stationary, seen)
        scores = value - stationary @ value  # [y, x] is (e_y - mu) . W e_x
        matched = scores[seen.targets[:, None], seen.tokens]  # (n, C)
        power = (value**2).sum(0)[seen.tokens]
        for query in range(len(weights)):
            rows = seen.queries == query
            weights[query] = matched[rows].sum(0) / np.maximum(power[rows].sum(0), np.finfo(float).tiny)
        weights = np.where(seen.places >= 0, np.maximum(weights, 0.0), 0.0)
        weights /= np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
    found = []
    for row, places in zip(weights, seen.places, strict=True):
        kept = np.argsort(-row, kind="stable")[:sparsity]
        found.append(np.sort(places[kept[row[kept] >= SHARE * row.max()]]))
    return tuple(found)


def refit_jointly(
    state: State, stationary: np.ndarray, seen: SupportSamples, *, passes: int = 200, tolerance: float = 1e-7
) -> State:
    """Fit values and weights at given positions to fresh samples, by alternating least squares.

    Stops when no weight moves by more than `tolerance`. Every half step lowers the same loss. Rows are normalized,
    since only the product matters. Raises `CertificateError` if the weights have not converged after `passes`.
    """
    vocabulary = len(stationary)
    weights = at_places(state.attention, seen)
    valid = seen.places >= 0
    moved = np.inf
    for _ in range(passes):
        value = _solve_values(weights, stationary, seen)
        fitted = np.zeros_like(weights)
        gram = value.T @ value  # (N, N)
        scores = value - stationary @ value  # [y, x] is (e_y - mu) . W e_x
        for query in range(vocabulary):
            tokens = seen.tokens[seen.queries == query][:, valid[query]]  # (n_k, C_k)
            targets = seen.targets[seen.queries == query]
            left = gram[tokens[:, :, None], tokens[:, None, :]].sum(0)  # (C_k, C_k)
            right = scores[targets[:, None], tokens].sum(0)
            fitted[query, valid[query]] = np.linalg.lstsq(left, right, rcond=None)[0]
        sums = fitted.sum(1, keepdims=True)
        if (sums <= 0).any():
            break
        fitted /= sums
        moved, weights = float(np.abs(fitted - weights).max()), fitted
        if moved <= tolerance:
            break
    if moved > tolerance:
        raise CertificateError(
            f"the weights of {len(seen.queries)} samples do not converge: give more samples, or fit the scale only",
            measured=moved,
            threshold=tolerance,
        )
    attention = np.zeros(np.shape(state.attention), np.float32)
    rows = np.broadcast_to(np.arange(vocabulary)[:, None], weights.shape)
    attention[rows[valid], seen.places[valid]] = weights[valid]
    return state._replace(value=_solve_values(weights, stationary, seen), attention=attention)


def at_places(attention: np.ndarray, seen: SupportSamples) -> np.ndarray:
    """Return the attention at the positions of the samples, (N, C), zero in unused columns."""
    chosen = np.take_along_axis(np.asarray(attention, np.float64), np.maximum(seen.places, 0), 1)
    return np.where(seen.places >= 0, chosen, 0.0)


def _solve_values(weights: np.ndarray, stationary: np.ndarray, seen: SupportSamples) -> np.ndarray:
    """Return the least-squares values given the weights, (N, N)."""
    vocabulary = len(stationary)
    features = sum_by_token(seen.tokens, weights[seen.queries], vocabulary)
    features -= weights.sum(1)[seen.queries][:, None] * stationary
    sums = np.zeros((vocabulary, vocabulary))
    np.add.at(sums, seen.targets, features)
    sums -= np.outer(stationary, features.sum(0))
    value = np.linalg.lstsq(features.T @ features, sums.T, rcond=None)[0].T
    return value - np.outer(value @ stationary, np.ones(vocabulary))  # mu predicts the mean already

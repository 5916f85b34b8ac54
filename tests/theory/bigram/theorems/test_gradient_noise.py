"""Scatter of the gradients of a batch, against gradients of single samples drawn from the task."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.gradient_noise import RowCoefficients, ValueNoise, attention_noise


def state_at(task, value_signal, attention_signal):
    uniform = 1 / task.length
    return value_signal * task.centred, uniform + attention_signal * (task.attention - uniform)


def row_coefficients(task, attention):
    """Measure the rows of an attention (N, T)."""
    return RowCoefficients((attention**2).sum(1), (attention * task.attention).sum(1))


def total_variance(task, value, rows):
    """Return the summed variance of all entries of the value noise of one sample, tr R (sum 1/mu - N)."""
    mu = task.stationary
    mean, cross, square = (
        float(part @ mu) for part in (rows.squared_norms, rows.squared_norms * rows.overlaps, rows.squared_norms**2)
    )
    trace = mean * (1 - mu @ mu) + square * mu @ (value**2).sum(0) - 2 * cross * mu @ (value * task.centred).sum(0)
    return trace * ((1 / mu).sum() - len(mu))


def sample_gradients(task, value, attention, batch):
    """Return of every sample W^T r at each token's place (B, T) and r (z - s mu)^T / mu (B, N, N)."""
    tokens, queries, targets = batch
    rows = attention[queries]  # (B, T)
    histogram = np.stack([(rows * (tokens == token)).sum(1) for token in range(task.vocabulary)], 1)  # (B, N)
    residual = task.stationary + histogram @ value.T - np.eye(task.vocabulary)[targets]
    pulled = residual @ value  # (B, N)
    centred = histogram - rows.sum(1, keepdims=True) * task.stationary
    return np.take_along_axis(pulled, tokens.astype(int), 1), residual[:, :, None] * (centred / task.stationary)[
        :, None
    ]


@pytest.mark.parametrize("signal", [0.1, 0.5, 1.0])
def test_attention_scatter_is_that_of_single_samples(rng, signal):
    task = draw_bigram_task(rng, 4, 40, 2, uniform=False)
    value, attention = state_at(task, signal, signal)
    batch = task.draw(rng, 60_000)
    pulled, _ = sample_gradients(task, value, attention, batch)
    found = attention_noise(task, value, row_coefficients(task, attention), batch=1)
    outside = task.attention[batch.queries] == 0
    # with B = 1 the gradient of query k is pulled / mu_k when k is drawn, else zero
    squares = np.where(outside, pulled**2, 0).sum(1) / outside.sum(
        1
    )  # a residual is shared by the positions of a sample
    for query, expected in enumerate(found**2 * task.stationary):
        own = squares[batch.queries == query]
        assert abs(own.mean() - expected) < 4.5 * own.std() / np.sqrt(len(own))
        assert own.std() / np.sqrt(len(own)) < 0.1 * expected  # a factor of 1.5 would be seen


def test_value_scatter_is_that_of_single_samples(rng):
    task = draw_bigram_task(rng, 4, 40, 2)
    for signal, tolerance in ((0.0, 0.03), (0.7, 0.08)):  # to leading order in the weights: exact at the start
        value, attention = state_at(task, signal, signal)
        _, scattered = sample_gradients(task, value, attention, task.draw(rng, 60_000))
        total = scattered.var(0).sum()
        rows = row_coefficients(task, attention)
        assert total_variance(task, value, rows) == pytest.approx(total, rel=tolerance)


def test_draws_have_the_covariance_they_state(rng):
    task = draw_bigram_task(rng, 3, 30, 2, uniform=False)
    value, attention = state_at(task, 0.8, 0.6)
    value = value + 0.2 * (rng.standard_normal((3, 3)) @ (np.eye(3) - task.stationary[:, None]))
    rows = row_coefficients(task, attention)
    shared = type(rows)(*(np.broadcast_to(part, (40_000, 3)) for part in rows))
    drawn = ValueNoise(task, 5).draw(rng, np.broadcast_to(value, (40_000, 3, 3)), shared)
    found = np.einsum("sij,skl->ikjl", drawn, drawn) / len(drawn)
    mu = task.stationary
    spread, diagonal = np.diag(mu) - np.outer(mu, mu), np.diag(mu)
    mixed, left = task.centred @ diagonal @ value.T, np.zeros((3, 3))
    for query in range(3):
        a, overlap = rows.squared_norms[query], rows.overlaps[query]
        left += mu[query] * a * (spread - overlap * (mixed + mixed.T) + a * value @ diagonal @ value.T)
    expected = np.einsum("ik,jl->ikjl", left, np.diag(1 / mu) - 1) / 5
    assert np.abs(found - expected).max() < 0.05 * expected.max()  # seven sigma of 40,000 draws
    assert total_variance(task, value, rows) / 5 == pytest.approx(np.einsum("iijj->", expected), rel=1e-12)


def test_without_attention_there_is_no_noise(rng):
    task = draw_bigram_task(rng, 3, 30, 2)
    value, attention = state_at(task, 0.8, 0.6)
    rows = row_coefficients(task, attention)
    some = type(rows)(*(np.stack([part, 0 * part]) for part in rows))  # two runs, the second without attention
    drawn = ValueNoise(task, 5).draw(rng, np.stack([value, value]), some)
    assert np.abs(drawn[0]).max() > 1e-3
    assert not drawn[1].any()


def test_an_empty_batch_is_refused(rng):
    task = draw_bigram_task(rng, 3, 30, 2)
    with pytest.raises(UsageError, match="batch=0"):
        ValueNoise(task, 0)

"""Batches, probe and figures of transformer training, against the definition of the task."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.training.transformer_training import divergence, draw_probe, measure, source_of


@pytest.fixture(scope="module")
def task():
    return draw_bigram_task(np.random.default_rng(0), 3, 6, 2)


def test_batches_are_samples_of_the_task(task):
    tokens, targets = map(np.asarray, source_of(task, 30_000)(jax.random.key(0)))
    query = tokens[:, -1]
    there = np.take_along_axis(tokens, task.positions[query], 1)  # (B, Q)
    law = np.einsum("bq,ibq->bi", task.weights[query], task.transition[:, there])
    gap = (np.eye(3)[targets] - law)[:, :, None] * np.eye(3)[there[:, 0]][:, None, :]
    assert np.abs(gap.sum(0)).max() < 5 * 30_000**0.5 * 0.5
    assert np.abs(np.bincount(query) / 30_000 - 1 / 3).max() < 5 * 0.5 / 30_000**0.5


def test_the_probe_knows_the_truth_and_what_one_position_leaves(task, monkeypatch):
    probe = draw_probe(task, 256, jax.random.key(1))
    assert 0 < probe.first_alone < 1
    entropy = -(probe.truth * np.log(probe.truth)).sum(1).mean()
    assert probe.information == pytest.approx(np.log(3) - entropy, abs=1e-12)
    assert divergence(probe.truth, probe.truth) == 0

    def with_truth(model, tokens):
        patterns = np.zeros((1, 256, 1, 7, 7))
        patterns[:, :, :, -1, :-1] = task.attention[np.asarray(tokens[:, -1])][None, :, None]
        return jnp.log(probe.truth), patterns

    monkeypatch.setattr("manyheads.theory.bigram.training.transformer_training._forward", with_truth)
    excess, ranked = measure(task, SimpleNamespace(), probe)
    assert abs(excess) < 1e-6
    assert ranked == 1

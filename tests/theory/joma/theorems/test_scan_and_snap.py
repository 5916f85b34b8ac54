"""The path of Scan and Snap against the whole flow, against its own first orders, and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.joma.systems import recording
from manyheads.theory.joma.systems.one_layer_attention import _slopes, make_cooccurrence, scan_and_snap_flow
from manyheads.theory.joma.theorems.scan_and_snap import (
    reduced_trajectory,
    relative_gain,
    relative_gain_law,
    training_time,
)

PROGRESS = np.array([0.0, 0.05, 0.1, 0.2, 1.0, 4.0, 10.0])


@pytest.fixture(scope="module")
def profile(seed):
    rng = np.random.default_rng([seed, 5])
    return -np.sort(-rng.uniform(0.2, 1, 3)), rng.uniform(0.5, 1.5, 4), 3


@pytest.fixture(scope="module")
def path(profile):
    return reduced_trajectory(*profile, PROGRESS)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_the_whole_flow_follows_the_path_and_its_clock(profile, path, ratio):
    own, common, classes = profile
    rates = {"decoder_learning_rate": 0.7, "attention_learning_rate": 0.7 * ratio}
    times = training_time(*profile, PROGRESS, **rates)
    flow = scan_and_snap_flow(make_cooccurrence(np.tile(own, (classes, 1)), common), times, **rates)
    expected = np.concatenate([np.tile(path.distinct, (1, classes)), path.common], 1)
    np.testing.assert_allclose(flow.logits, expected, atol=1e-7)
    assert flow.losses[0] == pytest.approx(np.log(classes))
    assert (np.diff(flow.losses) < 0).all()
    assert np.abs(flow.decoder[:, :, classes * len(own) :]).max() < 1e-9  # common tokens teach the decoder nothing


@pytest.mark.slow
def test_the_start_of_the_path(profile, path):
    """z_d = kappa f_d^2 F^2 tau^2 / 2 and z_c = -kappa K f_c^2 (1 - F^2) tau^2 / 2, F^2 the common tokens' share."""
    own, common, classes = profile
    norm = (own**2).sum() + (common**2).sum()
    share, kappa = (common**2).sum() / norm, classes / (classes - 1)
    distinct = kappa * own**2 / norm * share / 2
    np.testing.assert_allclose(path.distinct[1] / PROGRESS[1] ** 2, distinct, rtol=0.01)
    other = -kappa * classes * common**2 / norm * (1 - share) / 2
    np.testing.assert_allclose(path.common[1] / PROGRESS[1] ** 2, other, rtol=0.01)


@pytest.mark.slow
def test_the_gain_law_is_exact_for_an_aligned_decoder_and_of_first_order_in_truth(profile, path):
    own = profile[0]
    aligned = reduced_trajectory(*profile, PROGRESS, aligned=True)
    np.testing.assert_allclose(
        relative_gain(own, aligned.distinct, 0, 2), relative_gain_law(own, aligned.distinct, 0, 2), rtol=1e-9
    )
    assert relative_gain([0.4, 0.2], [0.0, np.log(2.0)], 0, 1) == pytest.approx(0)  # 4 / 4 - 1
    error = relative_gain_law(own, path.distinct, 0, 2) - relative_gain(own, path.distinct, 0, 2)
    growth = relative_gain(own, path.distinct, 0, 2) - relative_gain(own, path.distinct[0], 0, 2)
    relative = error[1:] / growth[1:]
    assert relative[2] / relative[1] == pytest.approx(4, rel=0.05)  # order two
    assert relative[-1] > 0.1


@pytest.mark.slow
def test_the_gap_stops_and_under_the_law_it_does_not(profile):
    late = np.array([0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0])  # as many as above: compiled once
    gaps = [(run.distinct[3:, 0] - run.distinct[3:, -1]) for run in _both(profile, late)]
    steps, law = np.abs(np.diff(gaps[0])), np.diff(gaps[1])
    assert (steps[1:] < 0.5 * steps[:-1]).all()
    assert steps[-1] < 0.05 * law[-1]
    assert law[-1] > 0.7 * law[-2] > 0


def _both(profile, progress):
    return [reduced_trajectory(*profile, progress, aligned=aligned) for aligned in (False, True)]


def test_slopes_are_the_gradient_of_the_loss(rng):
    """Against automatic differentiation of the written formula, with profiles that differ."""
    table = make_cooccurrence(rng.uniform(0.2, 1, (3, 2)), rng.uniform(0.2, 1, 2)).probabilities
    decoder, logits = rng.normal(size=(3, 8)), rng.normal(size=8)

    def likelihood(decoder, logits):
        mixed = table * jnp.exp(logits)
        scores = (mixed / jnp.linalg.norm(mixed, axis=1, keepdims=True)) @ decoder.T
        return jnp.diagonal(jax.nn.log_softmax(scores, axis=1)).mean()

    with jax.enable_x64(True):
        arguments = jnp.asarray(decoder), jnp.asarray(logits)
        expected = jax.jit(jax.grad(likelihood, (0, 1)))(*arguments)
        found = jax.jit(_slopes)(jnp.asarray(table), *arguments)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_times_beyond_the_largest_double_are_refused(profile):
    with pytest.raises(UsageError, match="largest double"):
        training_time(*profile, PROGRESS, attention_learning_rate=1e-6)


def test_what_cannot_be_meant_is_refused(profile):
    own, common, classes = profile
    for arguments, says in (
        ((own, common, 1, [1.0]), "two next tokens"),
        ((-own, common, classes, [1.0]), "positive numbers"),
        ((own, common, classes, [1.0, 1.0]), "rising"),
        ((own, common, classes, [-1.0]), "nonnegative"),
    ):
        with pytest.raises(UsageError, match=says):
            reduced_trajectory(*arguments)
    with pytest.raises(ShapeError, match="expected"):
        reduced_trajectory(own[None], common, classes, [1.0])
    with pytest.raises(UsageError, match="expected a positive number"):
        training_time(own, common, classes, [1.0], attention_learning_rate=0.0)
    table = make_cooccurrence([[1.0, 0.5], [1.0, 0.5]], [1.0])
    for times in ([-1.0], [2.0, 1.0], []):
        with pytest.raises(UsageError, match="times"):
            scan_and_snap_flow(table, times)
    with pytest.raises(UsageError, match="sum to one"):
        scan_and_snap_flow(table._replace(probabilities=table.probabilities * 2), [1.0])
    with pytest.raises(UsageError, match="expected a positive number"):
        scan_and_snap_flow(table, [1.0], decoder_learning_rate=-1.0)
    with pytest.raises(UsageError, match="two or more"):
        make_cooccurrence([[1.0]], [1.0])
    with pytest.raises(ShapeError, match="K, D"):
        make_cooccurrence([1.0], [1.0])


@pytest.mark.slow
def test_a_path_that_does_not_end_is_no_result(profile, monkeypatch):
    monkeypatch.setattr(recording, "STEPS", 16)
    with pytest.raises(CertificateError, match="16 steps"):
        reduced_trajectory(*profile, [0.0, 5.0, 50.0])  # another number of moments: traced anew

"""Trajectories against a training written out by hand; exponents of the size against laws that are put in."""

import jax
import numpy as np
import pytest
from tests.scaling.adam import adam_steps

from manyheads.errors import ShapeError, UsageError
from manyheads.scaling import Parametrization
from manyheads.scaling.task import digits_task
from manyheads.scaling.trained.trajectories import SEQUENCES, TOKENS, draw_network, follow_networks
from manyheads.scaling.trained.transformers import Recipe, factors_of
from manyheads.studies.scaling.approach import (
    distances_to_largest,
    effective_sizes,
    fall_of_mean,
    fall_of_scatter,
    power_of_drift,
)
from manyheads.transformer import Shape
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import with_weights

SIZES = (4, 8, 16, 32)
BASE = Shape(2, 2, 1)


@pytest.fixture(scope="module")
def task():
    return digits_task(batch=4)


@pytest.mark.slow
def test_a_trajectory_is_a_training_by_hand(task, seed):
    """Kernels, patterns and logits from their definitions, Adam in NumPy; each network is the one of its number."""
    p, key, learning_rate, steps = Parametrization(base=BASE), jax.random.key(seed), 0.01, 2
    shape = Shape(4, 2, 1)
    found = follow_networks(task, p, shape, Recipe(steps), learning_rate, (0, steps), 2, key)
    assert found.losses.shape == (2, steps)
    assert found.kernels.shape == (2, 2, SEQUENCES * TOKENS, SEQUENCES * TOKENS)
    config = task.config(shape)
    for_models, for_batches, for_probe = jax.random.split(key, 3)
    start = draw_network(config, factors_of(p, shape, task, Recipe()), jax.random.fold_in(for_models, 1))
    numbers = {row.role: (learning_rate * row.learning_rate, 1e-8 * row.epsilon) for row in p.table(shape).rows}
    slopes = jax.jit(jax.value_and_grad(lambda weights, batch: cross_entropy(with_weights(start, weights), batch)))
    batches = [task.batches(jax.random.fold_in(for_batches, step)) for step in range(steps)]
    weights, losses = adam_steps(start.weights, slopes, batches, numbers)
    np.testing.assert_allclose(found.losses[1], losses, rtol=1e-4)
    record = with_weights(start, weights).record(task.batches(for_probe)[0], patterns=True)
    stream = np.asarray(record.layers.stream[-1], np.float64)[:, 3::4].reshape(16, shape.width)
    np.testing.assert_allclose(found.kernels[1, 1], stream @ stream.T / shape.width, rtol=2e-3, atol=1e-3)
    patterns = np.asarray(record.layers.patterns)[0][:, :, 3::4].mean(1).reshape(16, 16)
    np.testing.assert_allclose(found.patterns[1, 1], patterns, rtol=2e-3, atol=1e-5)
    logits = 2**0.5 / 4 * np.einsum("bhqn,bhkn->bhqk", record.layers.queries[0], record.layers.keys[0])
    assert found.logits[1, 1] == pytest.approx(np.sqrt(np.mean(logits**2)), rel=1e-3)
    assert not np.allclose(found.kernels[0, 0], found.kernels[1, 0])


@pytest.mark.slow
def test_depths_share_their_ends_and_nothing_else(task, seed):
    p, key = Parametrization(base=BASE), jax.random.key(seed)
    shapes = [Shape(2, 2, 1), Shape(2, 2, 2), Shape(4, 2, 1)]

    def draw(shape):  # compiled as a whole: array by array takes three times as long
        return jax.jit(lambda key: draw_network(task.config(shape), factors_of(p, shape, task, Recipe()), key).weights)

    drawn = [jax.tree.map(np.asarray, draw(shape)(key)) for shape in shapes]
    for name in ("embedding", "positional", "unembedding"):
        np.testing.assert_array_equal(getattr(drawn[0], name), getattr(drawn[1], name))
        short, wide = (np.ravel(getattr(weights, name)) for weights in (drawn[0], drawn[2]))
        ratio = wide[: len(short)] / short
        assert ratio.std() > 0.1  # not the beginning of the wider one, scaled
    first, second = (np.ravel(weights.blocks.mlp_in) for weights in drawn[:2])
    assert abs(np.corrcoef(first, second[: len(first)])[0, 1]) < 0.6


def draw(rng, replicates, bias=1.0, spread=0.25, mean_power=-1.0, power=-0.5):
    """Networks whose mean is bias n^mean_power and whose scatter is spread n^power, along the same direction."""
    direction, networks = np.linspace(0.5, 1.5, 6), 32
    columns = [
        (bias * n**mean_power + spread * n**power * rng.normal(size=(replicates, networks, 1))) * direction
        for n in SIZES
    ]
    return distances_to_largest(np.stack(columns, 1))


def test_powers_that_are_put_in_come_out(rng):
    found = draw(rng, 64)
    mean, scatter = fall_of_mean(SIZES, found.mean), fall_of_scatter(SIZES, found.scatter)
    assert mean.interval.low - 0.1 < -1 < mean.interval.high + 0.1
    assert mean.interval.high - mean.interval.low < 0.3
    assert mean.samples.mean() == pytest.approx(mean.power)
    # A variance of 32 networks is known to (2/31)^(1/2): over 64 replicates and these sizes the power to 0.016.
    assert scatter.power == pytest.approx(-0.5, abs=0.09)
    flat = fall_of_scatter(SIZES, draw(rng, 64, power=0.0).scatter)
    assert flat.power == pytest.approx(0.0, abs=0.09)


def test_exact_laws_and_drifts():
    near, far = 1 / np.array(SIZES[:-1]), 1 / SIZES[-1]
    exact = fall_of_mean(SIZES, np.stack([(near - far) ** 2] * 2) * [[1.0], [1.1]])
    assert exact.power == pytest.approx(-1.0, abs=1e-9)
    assert fall_of_scatter(SIZES, np.stack([near + far] * 2)).power == pytest.approx(-0.5, abs=1e-9)
    sizes = np.array(SIZES, float)
    growing = fall_of_mean(SIZES, np.stack([(sizes[-1] ** 0.5 - sizes[:-1] ** 0.5) ** 2] * 2))
    slow = fall_of_mean(SIZES, np.stack([(sizes[:-1] ** -0.5 - sizes[-1] ** -0.5) ** 2] * 2))
    assert slow.power < power_of_drift(SIZES) < growing.power
    assert slow.power > -1


def test_distances_are_free_of_noise_and_noise_decides_nothing(rng):
    found = draw(rng, 400, bias=0.0)
    error = found.mean.std(0, ddof=1) / 20
    assert (np.abs(found.mean.mean(0)) < 7 * error).all()  # a square has heavy tails
    np.testing.assert_allclose(found.scatter.mean(0), 0.25**2 * (1 / effective_sizes(SIZES, True)) * 1.1167, rtol=0.1)
    nothing = fall_of_mean(SIZES, found.mean - found.mean.mean(0) + 0.1 * error * (1, 2, 1))  # positive, and noise
    assert nothing.samples is None
    assert np.isinf(nothing.interval.high)
    diverged = fall_of_scatter(SIZES, np.full((2, 3), np.nan))
    assert diverged.samples is None


def test_distances_of_two_networks_by_hand():
    values = np.zeros((1, 2, 2, 1))
    values[0, 0, :, 0] = 1.0, 4.0  # differences 1 and 4: mean 2.5, variance 4.5
    found = distances_to_largest(values)
    assert found.scatter.item() == 4.5
    assert found.mean.item() == 2.5**2 - 4.5 / 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: distances_to_largest(np.zeros((2, 3, 1, 4))), ShapeError),
        (lambda: distances_to_largest(np.zeros((2, 1, 3, 4))), ShapeError),
        (lambda: effective_sizes((4, 4)), UsageError),
        (lambda: follow_networks(None, None, BASE, Recipe(4), 0.1, (0,), 0, None), UsageError),
        (lambda: follow_networks(None, None, BASE, Recipe(4), 0.1, (0, 5), 1, None), UsageError),
        (lambda: follow_networks(None, None, BASE, Recipe(4), 0.1, (), 1, None), UsageError),
    ],
)
def test_wrong_use_is_refused(call, error):
    with pytest.raises(error):
        call()

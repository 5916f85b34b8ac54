"""Hard layers keep their guarantees: weights by enumeration, orthogonality, conditions, coverage."""

import itertools
import math

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.hard_instances import (
    attention_signal,
    guarantees,
    parity_layer,
    parity_system,
    wave_layer,
)
from manyheads.recovery.planted.task import sequences
from manyheads.recovery.refusals import IllConditioned


def enumerated_weights(layer, hidden):
    """Fourier weight by degree, from every setting of the signs and a fast Walsh-Hadamard transform."""
    size = len(hidden)
    z = np.array(list(itertools.product([1.0, -1.0], repeat=2 * size)))  # (2^n, n)
    x = np.ones((len(z), 2, layer.dim))
    x[:, 1, 0] = -1
    x[:, 0, list(hidden)], x[:, 1, list(hidden)] = z[:, :size], -z[:, size:]
    values = attention_signal(layer, x)[:, 0, 0].reshape((2,) * 2 * size)
    for axis in range(2 * size):
        plus, minus = np.take(values, 0, axis), np.take(values, 1, axis)
        values = np.stack([(plus + minus) / 2, (plus - minus) / 2], axis)
    degrees = np.indices(values.shape).sum(axis=0)
    return np.bincount(degrees.ravel(), (values**2).ravel(), 2 * size + 1)


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_all_fourier_weight_of_a_parity_layer_lies_at_one_degree(rng, heads):
    hidden = tuple(1 + rng.permutation(heads + 2)[:heads])
    layer = parity_layer(heads + 3, heads, hidden)
    weights = enumerated_weights(layer, hidden)
    assert weights[2 * heads - 1] == pytest.approx(2 / heads)
    assert np.delete(weights, 2 * heads - 1).sum() < 1e-20 * 2 / heads
    found = guarantees(layer, hidden)
    np.testing.assert_allclose(found.fourier_weights, weights, atol=1e-20)
    assert found.share_up_to(2 * heads - 2) < 1e-20
    assert found.family == math.comb(heads + 2, heads)


def test_six_heads_still_keep_the_guarantee_and_seven_are_refused():
    assert guarantees(parity_layer(7, 6, range(1, 7)), range(1, 7)).share_up_to(10) < 1e-20
    with pytest.raises(IllConditioned, match="fewer heads") as refused:
        parity_layer(9, 7, range(1, 8))
    assert refused.value.measured > refused.value.threshold


def test_signals_of_different_hidden_sets_are_orthogonal():
    dim, heads = 5, 2
    x = np.array(list(itertools.product([1.0, -1.0], repeat=2 * dim))).reshape(-1, 2, dim)  # all sequences
    sets = list(itertools.combinations(range(1, dim), heads))
    signals = np.stack([attention_signal(parity_layer(dim, heads, hidden), x).ravel() for hidden in sets])
    gram = signals @ signals.T / len(x)
    # two rows, switch on in half of the sequences, Fourier weight 2/m there
    np.testing.assert_allclose(gram, np.eye(len(sets)) * 2 / heads, atol=1e-12)
    found = guarantees(parity_layer(dim, heads, sets[0]), sets[0])
    assert found.family == len(sets)
    assert found.queries(0.5) == len(sets) / 4


def test_conditions_grow_with_the_heads_and_slopes_may_be_chosen():
    conditions = [parity_system(heads).condition for heads in range(1, 7)]
    assert conditions[0] == 1
    assert all(later > earlier for earlier, later in itertools.pairwise(conditions))
    assert conditions[-1] < 1e4
    # slopes leave the function as it is
    hidden, x = (2, 3, 5), np.sign(np.sin(np.arange(40 * 2 * 6) ** 2 + 0.5)).reshape(40, 2, 6)
    one, other = parity_layer(6, 3, hidden), parity_layer(6, 3, hidden, slopes=(0.6, 1.3, 3.0))
    np.testing.assert_allclose(attention_signal(one, x), attention_signal(other, x), atol=1e-11)


@pytest.mark.parametrize(("heads", "size", "period"), [(6, 4, 4), (4, 3, 8)])
def test_fourier_weights_of_a_wave_agree_with_enumeration(heads, size, period):
    hidden = tuple(range(1, size + 1))
    layer = wave_layer(size + 2, heads, hidden, period=period)
    np.testing.assert_allclose(guarantees(layer, hidden).fourier_weights, enumerated_weights(layer, hidden), atol=1e-12)


@pytest.mark.parametrize("period", [4, 8, 12])
def test_a_wave_is_square_as_far_as_its_teeth_reach(period):
    hidden, heads = tuple(range(1, 13)), 16
    layer = wave_layer(13, heads, hidden, period=period)
    x = np.zeros((25, 2, 13))
    x[:, 0, 0], x[:, 1, 0] = 1, -1
    for negative in range(25):
        signs = np.where(np.arange(24) < negative, -1.0, 1.0)
        x[negative, 0, 1:], x[negative, 1, 1:] = signs[:12], -signs[12:]
    v = 24 - 2 * np.arange(25)
    values = attention_signal(layer, x)[:, 0, 0]
    shift = 1 if period % 8 == 0 else 0
    covered = np.abs(v - shift) <= heads * period / 4
    # below the first threshold the wave is at 0; it changes its height at each threshold
    teeth = np.floor((v - shift + (heads - 1) * period / 4) / (period / 2)) + 1
    np.testing.assert_allclose(values[covered], np.where(teeth % 2 == 0, 0, 2)[covered], atol=2 * heads * 1.3e-5)
    if period == 4:
        parity = (-1.0) ** (v / 2)
        centred = values[covered] - 1
        assert abs(np.corrcoef(centred, parity[covered])[0, 1]) == pytest.approx(1, abs=1e-6)


def test_single_coordinates_do_not_correlate_with_a_wave(rng):
    hidden = tuple(1 + rng.permutation(11)[:4])
    layer = wave_layer(12, 6, hidden)
    count = 20_000
    x = sequences(rng, count, 2, 12)
    assert np.abs(layer.projection.sum(axis=0)).max() == 0
    y = attention_signal(layer, x)[:, 0, 0] - (x[:, 0, 0] - x[:, 1, 0]) / 2  # without its linear part
    table = np.concatenate([x[:, 0], x[:, 1]], axis=1)  # (n, 2d)
    table = np.concatenate([table, x[:, :1, 0] * table], axis=1)
    # at most one on average per entry, so a standard error is at most count^-1/2; 48 entries, 5.5 errors: 2e-6
    correlations = y @ table / count
    assert np.abs(correlations).max() < 5.5 / math.sqrt(count)
    # and the whole wave is there: the variance is that of its weights beyond degree 0, half of the time
    expected = guarantees(layer, hidden).fourier_weights[1:].sum() / 2
    assert np.mean(y**2) == pytest.approx(expected, abs=6 / math.sqrt(count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parity_layer(8, 2, (1, 2, 3)), "hides 2"),
        (lambda: parity_layer(8, 2, (0, 1)), "switch"),
        (lambda: parity_layer(8, 2, (1, 1)), "different"),
        (lambda: parity_layer(8, 2, (1, 8)), "among"),
        (lambda: parity_system(0), "at least one"),
        (lambda: parity_system(2, (1.0, 1.0)), "distinct"),
        (lambda: wave_layer(12, 5, (1, 2)), "even number"),
        (lambda: wave_layer(12, 4, range(1, 9)), "give 8 heads"),
        (lambda: wave_layer(12, 6, (1, 2), period=6), "multiple of 4"),
        (lambda: wave_layer(12, 6, (1, 2), slope=3.0), "sharp"),
    ],
)
def test_what_makes_no_hard_layer_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()

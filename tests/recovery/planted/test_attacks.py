"""What is hard for correlations falls to squares and to linear algebra, and refuses where it must."""

import itertools

import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.attacks import _solve_binary, unmask_parity, unmask_wave
from manyheads.recovery.planted.hard_instances import parity_layer, wave_layer
from manyheads.recovery.planted.task import sequences


def test_squared_labels_give_a_parity_away(rng):
    hidden = tuple(sorted(int(one) for one in 1 + rng.permutation(15)[:4]))
    x = sequences(rng, 6000, 2, 16)
    # scores of 1/4 and of 0, each with standard error 8 / (4 sqrt(6000)) = .026: wrong at 6.8 of them, below 1e-10
    assert unmask_parity(x, evaluate_layer(parity_layer(16, 4, hidden), x), 4) == hidden


def test_the_shift_of_the_squares_is_that_of_all_sequences():
    heads, dim = 2, 4
    x = np.array(list(itertools.product([1.0, -1.0], repeat=2 * dim))).reshape(-1, 2, dim)
    x = x[x[:, 0, 0] != x[:, 1, 0]]
    squares = evaluate_layer(parity_layer(dim, heads, (1, 3)), x)[:, 0, 0] ** 2
    shifts = [
        squares[x[:, 0, j] != x[:, 1, j]].mean() - squares[x[:, 0, j] == x[:, 1, j]].mean() for j in range(1, dim)
    ]
    np.testing.assert_allclose(shifts, [4 / heads**2, 0, 4 / heads**2], atol=1e-12)


def test_elimination_finds_the_wave_of_period_four_and_no_other(rng):
    hidden = tuple(sorted(int(one) for one in 1 + rng.permutation(23)[:12]))
    x = sequences(rng, 600, 2, 24)
    layer = wave_layer(24, 16, hidden)
    assert unmask_wave(x, evaluate_layer(layer, x), rng=rng) == hidden
    longer = wave_layer(24, 8, hidden, period=12)
    with pytest.raises(UsageError, match="period 4"):
        unmask_wave(x, evaluate_layer(longer, x), rng=rng, tries=3)


def test_equations_over_two_elements_are_solved_or_refused(rng):
    unknown = rng.integers(0, 2, 7).astype(bool)
    equations = np.concatenate([np.tril(np.ones((7, 7), bool)), rng.integers(0, 2, (4, 7)).astype(bool)])
    right = (equations @ unknown.astype(int)) % 2 == 1
    order = rng.permutation(11)
    np.testing.assert_array_equal(_solve_binary(equations[order], right[order]), unknown)
    right[0] ^= True
    wrong = _solve_binary(equations, right)
    assert wrong is None or np.any(wrong != unknown)
    assert _solve_binary(np.zeros((8, 7), bool), np.zeros(8, bool)) is None


def test_other_data_is_refused(rng):
    x = sequences(rng, 30, 3, 6)
    with pytest.raises(ShapeError, match="pairs"):
        unmask_parity(x, x, 2)
    with pytest.raises(UsageError, match="hides"):
        unmask_parity(x[:, :2], x[:, :2], 6)
    with pytest.raises(UsageError, match="more"):
        unmask_parity(x[:4, :2], x[:4, :2], 2)
    with pytest.raises(UsageError, match="or more"):
        unmask_wave(x[:, :2], x[:, :2], rng=rng)

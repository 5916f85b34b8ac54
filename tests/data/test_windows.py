import jax
import numpy as np
import pytest

from manyheads.data.windows import TextWindows
from manyheads.errors import ShapeError


def test_windows_lie_in_the_text_and_reach_both_ends(seed):
    # 9 starts, 1000 draws: one is missed with probability below 9 (8/9)^1000 < 1e-50.
    inputs, targets = TextWindows(np.arange(12), length=3, size=1000)(jax.random.key(seed))
    assert np.array_equal(np.asarray(targets), np.asarray(inputs) + 1)
    assert np.array_equal(np.asarray(inputs), np.asarray(inputs)[:, :1] + np.arange(3))
    assert sorted(set(np.asarray(inputs)[:, 0].tolist())) == list(range(9))


def test_same_key_same_batch_and_texts_of_one_length_share_a_compilation(seed, rng):
    traces = []

    @jax.jit
    def draw(windows, key):
        traces.append(1)
        return windows(key)

    key = jax.random.key(seed)
    first = TextWindows(rng.integers(0, 9, 50), 8, 4)
    again = draw(first, key)
    assert np.array_equal(again[0], draw(first, key)[0])
    draw(TextWindows(rng.integers(0, 9, 50), 8, 4), key)
    assert len(traces) == 1


def test_texts_that_are_too_short_or_no_text_are_refused():
    with pytest.raises(ShapeError, match="hold no"):
        TextWindows(np.arange(8), length=8, size=1)
    with pytest.raises(ShapeError, match="integers"):
        TextWindows(np.ones(9), length=2, size=1)
    with pytest.raises(ShapeError, match="integers"):
        TextWindows(np.ones((9, 2), int), length=2, size=1)

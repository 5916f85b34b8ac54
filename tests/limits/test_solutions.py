"""The three front doors: what they refuse, what they announce, and that they stop when they know enough."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.limits import Problem, Sampling, infinite_depth, infinite_heads, infinite_key_dim


@pytest.fixture
def lesson(rng):
    drawn = rng.standard_normal((2, 2, 6))
    inputs = drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))
    return Problem(inputs, np.array([1.0, -1.0]), steps=4, rate=0.3)


def test_what_is_no_limit_is_refused_with_the_way_round(lesson):
    with pytest.raises(UsageError, match="infinite_heads"):
        infinite_key_dim(lesson, logit_exponent=0.5)
    with pytest.raises(UsageError, match="GB"):
        infinite_key_dim(lesson, sampling=Sampling(memory=1e4))


def test_sampling_goes_on_until_the_error_is_small_enough(lesson):
    few = infinite_heads(lesson, 2, sampling=Sampling(samples=256))
    reached = float(np.sqrt((few.output_error**2).mean()))
    better = infinite_heads(lesson, 2, sampling=Sampling(samples=256, tolerance=reached / 3))
    assert float(np.sqrt((better.output_error**2).mean())) <= reached / 3
    with pytest.raises(CertificateError, match="most"):
        infinite_heads(lesson, 2, sampling=Sampling(samples=256, tolerance=1e-9, most=512))


def test_the_error_of_two_halves_is_the_error(lesson):
    exact = infinite_heads(lesson, 2, sampling=Sampling(seed=99, samples=16_384)).output
    solved = [infinite_heads(lesson, 2, sampling=Sampling(seed=seed, samples=256)) for seed in range(24)]
    measured = np.sqrt(np.mean([((one.output - exact) ** 2).values for one in solved]))
    claimed = np.sqrt(np.mean([(one.output_error**2).values for one in solved]))
    assert 0.4 < measured / claimed < 2.5


def test_depth_goes_to_its_limit_at_every_exponent(lesson):
    for exponent, cells in ((1.0, 8), (0.5, 16)):
        there = replace(lesson, depth_exponent=exponent)
        limit = infinite_depth(there, cells=cells).output
        gaps = [
            float(np.sqrt(((infinite_key_dim(replace(there, depth=depth)).output - limit) ** 2).mean()))
            for depth in (8, 16)
        ]
        assert gaps[1] < gaps[0] / 1.4
    with pytest.raises(UsageError, match="1/2 and 1 only"):
        infinite_depth(replace(lesson, depth_exponent=0.75), key_dim=2)

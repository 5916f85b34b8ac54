"""Conditional expectation of a softmax pattern given Hamming weights, against enumeration."""

import itertools

import jax
import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.task import equal_spectrum_layer
from manyheads.studies.recovery.steps.concentration import Concentration
from manyheads.study import generator
from manyheads.study.execution.units import train


def enumerated(theta, length):
    """Variances over all sequences of signs: of the pattern, and of its expectation given the sum of the tokens."""
    dim = len(theta)
    x = np.array(list(itertools.product([-1.0, 1.0], repeat=length * dim))).reshape(-1, length, dim)
    logits = np.exp((x @ theta) @ x.transpose(0, 2, 1))
    pattern = logits / logits.sum(-1, keepdims=True)
    groups = np.unique(x.sum(1), axis=0, return_inverse=True)[1].ravel()
    sizes = np.bincount(groups)
    flat = pattern.reshape(len(x), -1)
    given = np.stack([np.bincount(groups, column) / sizes for column in flat.T], axis=1)
    return flat.var(0).sum(), given[groups].var(0).sum()


@pytest.mark.parametrize("length", [2, 3])
def test_both_variances_are_those_of_all_sequences(length, seed):
    study = Concentration(tokens=(length, 4), dims=(3, 4), scale=1.0, layers=1, count=40_000)
    key = jax.random.key(seed)
    found = train(study, key, study.cells()[0])
    theta = equal_spectrum_layer(generator(key).spawn(1)[0].spawn(2)[0], 3, 1, 3, scale=1.0).theta[0]
    pattern, given = enumerated(np.asarray(theta), length)
    assert float(found["pattern"]) == pytest.approx(pattern, rel=0.02)
    # The trace has a variance below one; eight copies of 40,000 leave an error of its between-variance of .001
    assert float(found["given"]) == pytest.approx(given, abs=0.004 / (length - 1))


def test_the_closed_forms_are_the_leading_order_in_the_size_of_the_logits(rng):
    theta = rng.normal(size=(3, 3))
    theta *= 1e-3 / np.linalg.norm(theta)
    for length in (2, 3, 4):
        pattern, given = enumerated(theta, length)
        # The logit of a token with itself has another variance, by twice the diagonal: of order 1/k
        assert given == pytest.approx(2 * np.sum(np.diag(theta) ** 2) / length**3, rel=1e-2)
        assert pattern == pytest.approx(1e-6 * (1 - 1 / length), rel=0.5)


@pytest.mark.parametrize("fields", [{"tokens": (4,)}, {"tokens": (1, 2)}, {"dims": (8, 4)}, {"count": 1}])
def test_sizes_without_a_power_are_refused(fields):
    with pytest.raises(UsageError):
        Concentration(**fields)

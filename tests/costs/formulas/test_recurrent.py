"""Recurrent networks and pooled MLPs against the counter."""

import functools

import pytest

from manyheads.costs import ModelShape, count, sequential_depth
from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.errors import UsageError

FIGURES = ("flops", "elementwise", "transcendental", "bytes")


def figures(cost, *names):
    return [getattr(cost, name) for name in names or FIGURES]


@pytest.mark.slow
def test_every_small_recurrent_network(reference):
    for n, b, d, h, cells, classes in reference.half((1, 3), (1, 2), (1, 3), (2, 4), (1, 3), (1, 2)):
        shape = RecurrentShape(d, h, cells, classes)
        w, xs = reference.rnn_weights(d, h, cells, classes), reference.array(n, b, d)
        assert count(reference.rnn, w, xs).flops == rnn_cost(shape, n, b).flops
        assert count(reference.train(reference.rnn), w, xs).flops == rnn_cost(shape, n, b, training=True).flops
        unrolled = count(reference.train(functools.partial(reference.rnn, unrolled=True)), w, xs)
        assert unrolled.flops == rnn_cost(shape, n, b, training=True, scanned=False).flops


def test_elementwise_work_of_a_recurrent_network(reference):
    """Biases of the cell are added, those of the head are in the formula only; bytes without biases."""
    shape = RecurrentShape(5, 8, 2, 3)
    counted = count(reference.rnn, reference.rnn_weights(5, 8, 2, 3), reference.array(7, 2, 5))
    formula = rnn_cost(shape, 7, 2)
    assert counted.elementwise == formula.elementwise - 2 * 3
    assert counted.transcendental == formula.transcendental
    assert counted.bytes == formula.bytes + 2 * 8 * 4


def test_every_small_pooled_network(reference):
    for n, b, d, h, layers, classes in reference.half((1, 3), (1, 2), (1, 3), (2, 4), (1, 3), (1, 2)):
        shape = PooledShape(d, h, layers, classes)
        w, x = reference.pooled_weights(d, h, layers, classes), reference.array(b, n, d)
        counted, formula = count(reference.pooled, w, x), pooled_cost(shape, n, b)
        assert figures(counted, "flops", "transcendental") == figures(formula, "flops", "transcendental")
        assert counted.elementwise == formula.elementwise - b * classes  # the head of the reference has no bias
        assert count(reference.train(reference.pooled), w, x).flops == pooled_cost(shape, n, b, training=True).flops


def test_published_figures():
    """nn.RNN of width 48 on 64 inputs of width 48, two sequences, with a head of 5 classes and without."""
    shape = RecurrentShape(48, 48)
    training = rnn_cost(shape, 64, 2, training=True, scanned=False).flops
    forward = 2 * 2 * 64 * 48 * (48 + 48)
    assert rnn_cost(shape, 64, 2).flops == forward
    assert training == 3 * forward - 2 * 2 * 64 * 48 * 48 - 2 * 2 * 48**2


def test_sequential_depth():
    assert sequential_depth(RecurrentShape(3, 4, cell_layers=2), 100) == 200
    assert [sequential_depth(PooledShape(3, 4, layers=2), n) for n in (1, 2, 3, 4, 5)] == [2, 3, 4, 4, 5]
    assert sequential_depth(ModelShape(6, 12, 3), 10**6) == 6


def test_refusals():
    with pytest.raises(UsageError, match="hidden=0"):
        RecurrentShape(3, 0)
    with pytest.raises(UsageError, match="layers"):
        PooledShape(3, 4, layers=0)
    with pytest.raises(UsageError, match="at least 1"):
        sequential_depth(PooledShape(3, 4), 0)

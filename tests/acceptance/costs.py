"""Exact costs: the closed forms against the counter on programs that are written out, as integers."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.costs import conftest
from tests.costs.formulas.test_attention import assert_forward_equal, assert_training_equal
from tests.costs.formulas.test_transformer import assert_block_equal
from tests.models.test_counts import (
    COMPUTE,
    PUBLISHED,
    test_published_flops,
    test_published_parameters,
)
from tests.models.test_traced import test_what_is_multiplied_is_what_the_table_says

from manyheads.costs import ModelShape, count
from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import AttentionShape, PooledShape, RecurrentShape
from manyheads.models.families import FAMILIES

REFERENCE = SimpleNamespace(**{name: value for name, value in vars(conftest).items() if callable(value)})


def core_grid(folder: Path, batch: list[int], heads: list[int], lengths: list[int], dims: list[int]) -> Measured:
    """Compare the attention core over a full grid."""
    shapes = [
        AttentionShape(n, groups * each, dk, m, dv, groups, b, causal)
        for b, groups, each in itertools.product(batch, heads, heads)
        for n, m, dk, dv, causal in itertools.product(lengths, lengths, dims, dims, (False, True))
        if n <= m or not causal
    ]
    return _agree(shapes, _core, "all small shapes, forward and training", "none: exhaustive")


def core_random(folder: Path, number: int, seed: int) -> Measured:
    """Compare the attention core at random large shapes."""
    rng, shapes = np.random.default_rng(seed), []
    for _ in range(number):
        n, m = sorted(map(int, np.exp(rng.uniform(0, np.log(1e5), 2)).astype(int)))
        dk, dv = map(int, rng.integers(1, 257, 2))
        groups, each, batch = map(int, rng.integers(1, 33, 3))
        shapes.append(AttentionShape(n, groups * each, dk, m, dv, groups, batch, bool(rng.integers(2))))
    return _agree(shapes, _core, "random shapes up to 100,000 tokens, forward and training", str(seed))


def _core(shape: AttentionShape) -> None:
    assert_forward_equal(REFERENCE, shape)
    assert_training_equal(REFERENCE, shape)


def blocks(folder: Path, number: int, seed: int) -> Measured:
    """Compare transformer blocks over a grid of small shapes and at random large ones."""
    grid = itertools.product((1, 4), (1, 2), (1, 2), (1, 3), (False, True), (False, True), (1, 3))
    cases = [
        (ModelShape(1, width, groups * each, 5, groups, dim, gated, causal=causal), length, 2)
        for width, groups, each, dim, gated, causal, length in grid
    ]
    rng = np.random.default_rng(seed)
    for _ in range(number):
        width, hidden, length = map(int, np.exp(rng.uniform(0, np.log(16384), 3)).astype(int))
        groups, each, dim = map(int, rng.integers(1, 17, 3))
        shape = ModelShape(1, width, groups * each, hidden, groups, 8 * dim, bool(rng.integers(2)))
        cases.append((shape, length, int(rng.integers(1, 9))))
    return _agree(cases, _block, f"a small grid and {number} random large shapes, forward and training", str(seed))


def _block(case: tuple[ModelShape, int, int]) -> None:
    assert_block_equal(REFERENCE, *case)


def baselines(folder: Path, number: int, seed: int) -> Measured:
    """Compare recurrent and pooled networks over a grid of small shapes and at random large ones."""
    cases = list(itertools.product((1, 2, 5), (1, 3), (1, 2, 3), (2, 4), (1, 2, 3), (1, 3)))
    rng = np.random.default_rng(seed)
    cases += [tuple(map(int, rng.integers(1, (60, 9, 512, 512, 5, 99)))) for _ in range(number)]
    return _agree(cases, _baseline, f"a small grid and {number} random large shapes, forward and training", str(seed))


def _baseline(case: tuple[int, ...]) -> None:
    n, b, d, h, layers, classes = case
    recurrent, pooled = RecurrentShape(d, h, layers, classes), PooledShape(d, h, layers, classes)
    w, xs = REFERENCE.rnn_weights(d, h, layers, classes), REFERENCE.array(n, b, d)
    assert count(REFERENCE.rnn, w, xs).flops == rnn_cost(recurrent, n, b).flops
    assert count(REFERENCE.train(REFERENCE.rnn), w, xs).flops == rnn_cost(recurrent, n, b, training=True).flops
    w, x = REFERENCE.pooled_weights(d, h, layers, classes), REFERENCE.array(b, n, d)
    assert count(REFERENCE.pooled, w, x).flops == pooled_cost(pooled, n, b).flops
    assert count(REFERENCE.train(REFERENCE.pooled), w, x).flops == pooled_cost(pooled, n, b, training=True).flops


def published(folder: Path) -> Measured:
    """Compare parameters and matrix FLOPs of well-known models with what their authors published."""
    missed = []
    for test, names in ((test_published_parameters, PUBLISHED), (test_published_flops, COMPUTE)):
        for name in names:
            try:
                test(name)
            except AssertionError:
                missed.append(name)
    number = len(PUBLISHED) + len(COMPUTE)
    extent = f"parameters of {len(PUBLISHED)} models, FLOPs of {len(COMPUTE)}: {', '.join({**PUBLISHED, **COMPUTE})}"
    return Measured(f"{number - len(missed)} of {number} figures within what is printed", extent, "none", not missed)


def families(folder: Path) -> Measured:
    """Compare parameters and products of every family with those of a forward pass of transformers."""
    differing = []
    for family in FAMILIES:
        try:
            test_what_is_multiplied_is_what_the_table_says(family)
        except AssertionError:
            differing.append(family)
    found = f"{len(FAMILIES) - len(differing)} of {len(FAMILIES)} families equal"
    return Measured(found, "tiny models with grouped queries, experts and windows", "none", not differing)


def _agree(cases: Iterable[object], compare: Callable[..., None], extent: str, seeds: str) -> Measured:
    cases, differing = list(cases), []
    for case in cases:
        try:
            compare(case)
        except AssertionError:
            differing.append(case)
    print(*differing[:10], sep="\n")
    return Measured(f"{len(cases) - len(differing)} of {len(cases)} shapes equal", extent, seeds, not differing)


SMALL = {"batch": [1, 2], "heads": [1, 2, 3], "lengths": [1, 2, 3, 5], "dims": [1, 2, 5]}

FIGURES = (
    Figure("core-grid", "the attention core costs what its closed form says", "equal as integers", core_grid, SMALL),
    Figure(
        "core-random",
        "so it does at every size",
        "equal as integers",
        core_random,
        {"number": 1500, "seed": 0},
    ),
    Figure(
        "blocks",
        "transformer blocks cost what their closed form says",
        "equal as integers",
        blocks,
        {"number": 300, "seed": 0},
    ),
    Figure(
        "baselines",
        "recurrent and pooled networks cost what their closed forms say",
        "equal as integers",
        baselines,
        {"number": 200, "seed": 0},
    ),
    Figure(
        "published",
        "parameters and matrix FLOPs from configurations are those published",
        "all of at least twelve models within the last digit that is printed, FLOPs within 2%",
        published,
        {},
    ),
    Figure(
        "families",
        "parameters from configurations are those of transformers, in every family of the table",
        "equal as integers",
        families,
        {},
    ),
)

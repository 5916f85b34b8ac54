"""What a solution costs is known before it starts: its memory as measured, its time in words, and what would fit."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.theory.dmft import Problem, Sampling, infinite_depth, infinite_heads, infinite_key_dim, solver
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.grids.depth import continuum_step, finite_depth_step
from manyheads.theory.dmft.options import Request
from manyheads.theory.dmft.recursion import solve_recursion
from manyheads.theory.dmft.solver import CostEstimate


def task(rng, **fields):
    return Problem(
        rng.standard_normal((2, 4, 8)), np.array([1.0, -1.0]), learning_rate=0.02, **({"steps": 12} | fields)
    )


COMPOSITIONS = {
    "deep": ([InfiniteKeyDimAttention()], 3, None),
    "heads": ([InfiniteHeadsAttention(4, 1024)], 1, None),
    "mlp": ([InfiniteKeyDimAttention(), InfiniteWidthMLP("gelu", 1024)], 1, None),
    "cells": ([InfiniteKeyDimAttention()], 1, 4),
    "rows in hand": ([InfiniteKeyDimAttention()], 1, None),  # of few moments they are a fifth
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_memory_is_planned_as_it_is_measured(name, rng):
    branches, depth, cells = COMPOSITIONS[name]
    problem = task(rng, depth=depth)
    if name == "rows in hand":
        problem = Problem(rng.standard_normal((8, 4, 8)), np.ones(8), steps=2, learning_rate=0.02)
    layers = [[branch] for branch in branches] * depth if cells is None else [branches] * cells
    depth_step = finite_depth_step(problem) if cells is None else continuum_step(problem, cells)
    tracemalloc.start()
    try:
        solve_recursion(problem, [[branch.start(problem, rng) for branch in layer] for layer in layers], depth_step)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.97 < CostEstimate.of(problem, layers, 1, depth_step).memory / peak < 1.2


@pytest.mark.parametrize("every", [1, 9])
def test_every_march_is_in_the_time_that_is_planned(every, rng, monkeypatch):
    problem, done = task(rng, steps=14), []

    def counted(moments, layers, depth_step, **fields):
        done.append(CostEstimate.of(moments, [[InfiniteHeadsAttention(4, 1024)]], 1, depth_step).multiplications)
        return solve_recursion(moments, layers, depth_step, **fields)

    monkeypatch.setattr(solver, "solve_recursion", counted)
    solved = infinite_heads(problem, 4, every=every, sampling=Sampling(samples=1024))
    assert solved.attrs["planned_seconds"] * solver.SPEED == pytest.approx(sum(done))


def test_two_halves_take_no_more_memory_than_one(rng):
    problem = task(rng, steps=8)
    tracemalloc.start()
    try:
        solved = infinite_heads(problem, 4, sampling=Sampling(samples=1024))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * solved.attrs["planned_bytes"]


def test_long_work_is_announced_where_somebody_reads_it(rng, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    infinite_key_dim(task(rng))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(solver, "WORTH_SAYING", 0.0)
    infinite_key_dim(task(rng))
    assert "GB and about 1 s of one core" in capsys.readouterr().err


@pytest.mark.parametrize("bounded", ["memory", "seconds"])
@pytest.mark.parametrize("cells", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_offered_instead_fits(bounded, cells, rng):
    problem = task(rng, steps=60)
    whole = solver.estimate_cost(Request((problem,), InfiniteKeyDimAttention(), None, Sampling(), cells=cells))
    sampling = Sampling(**{bounded: getattr(whole, bounded) / 2})

    def solve(problem, **fields):
        if cells is None:
            return infinite_key_dim(problem, sampling=sampling, **fields)
        return infinite_depth(problem, cells=cells, sampling=sampling, **fields)

    with pytest.raises(UsageError, match=r"`every=\d+` solves \d+ moments for 60 steps") as caught:
        solve(problem)
    every = int(str(caught.value).split("every=")[1].split("`")[0])
    planned = solve(problem, every=every).attrs
    assert planned["planned_bytes" if bounded == "memory" else "planned_seconds"] <= getattr(sampling, bounded)
    with pytest.raises(UsageError, match="allowed: take fewer steps"):
        solve(replace(problem, momentum=0.5))


def test_infinity_is_no_limit(rng):
    problem = Problem(rng.standard_normal((2, 2, 3)), np.array([1.0, -1.0]), steps=2)
    free = Sampling(tolerance=np.inf, memory=np.inf, seconds=np.inf)
    xr.testing.assert_identical(infinite_key_dim(problem, sampling=free), infinite_key_dim(problem))
    with pytest.raises(UsageError, match="memory=nan"):
        Sampling(memory=np.nan)

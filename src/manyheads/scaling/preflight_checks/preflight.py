"""Preflight of a user's own training: updates by module along N, H, L and D, factors, settings, transfer of rates.

The training is built at several shapes from several seeds and run for a few steps on its own batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from manyheads.errors import UsageError, check_integer, check_rising
from manyheads.scaling.axes import (
    AXES,
    TRAINING_AXES,
    Axis,
    TrainingAxis,
    check_seeds,
    find_axis,
    shapes_along,
    size_along,
)
from manyheads.scaling.checks.transfer_check import LAST
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.preflight_checks.judge import Judge
from manyheads.scaling.preflight_checks.result import Preflight
from manyheads.scaling.preflight_checks.runs import Runs
from manyheads.scaling.preflight_checks.training import Make
from manyheads.transformer.shape import Shape

GROWN = (1, 2, 4)  # sizes along an axis over the base's, where none are given


def preflight(
    make: Make,
    base: Shape | Sequence[int],
    *,
    axes: Sequence[Axis | TrainingAxis] | Mapping[Axis | TrainingAxis, Sequence[int]] = ("key_dim", "heads", "depth"),
    parametrization: Parametrization | None = None,
    hyperparameters: BaseHyperparameters | None = None,
    steps: int = 8,
    seeds: Sequence[int] = tuple(range(4)),
    rate_factors: Sequence[float] = (),
    train: int = 32,
    limit: float = 1800.0,
    announce: Callable[[str], None] = lambda text: None,
) -> Preflight:
    """Train your own model at several shapes for a few steps and say what grows, what is forgotten and what transfers.

    Parameters
    ----------
    make
        `make(shape, seed)` builds your training at a shape as you would train it there, and returns (model, optimizer,
        batches), then a loss(model, batch) and roles where needed: the fields of
        `manyheads.scaling.preflight_checks.training.Training`. Python, NumPy and PyTorch draw from the seed already.
    base
        Shape at which hyperparameters were tuned.
    axes
        Axes to grow along from the base, to twice and four times its size; or axis → sizes. Along `"batch"`, multiples
        of your own, and `"steps"` the model stays, and the exponent of the best learning rate is measured.
    parametrization, hyperparameters
        To judge by, with a model whose parameters have known names, or with roles; without both updates are measured
        and held against flat ones. Settings are audited if hyperparameters are given.
    steps
        Steps of a training whose updates are measured.
    seeds
        At least two.
    rate_factors
        Factors of all learning rates to search for the best one, equally spaced in the logarithm, such as
        `np.geomspace(1/8, 8, 7)`, which is taken along batch and steps; none for no search along the others.
    train
        Steps of a training of that search; along batch and steps of the shortest one.
    limit
        CPU seconds that are allowed by the estimate, which is made from one step at every shape before the rest.
    announce
        Is given the estimate.

    Raises
    ------
    UsageError
        A function that returns no training, or the same model twice, or one that does not grow with the shape; an
        estimate beyond the limit; a model that cannot be read though a parametrization was given.
    """
    base = Shape.of(base, "base")
    if parametrization is not None and parametrization.base != base:
        raise UsageError(f"base={base}, and the parametrization has {parametrization.base}: give the same one")
    check_seeds(seeds)
    if steps < 1 or train < LAST:
        raise UsageError(f"steps={steps}, train={train}: give at least 1 and {LAST} steps")
    given: Mapping[Any, Sequence[int]] = (
        axes if isinstance(axes, Mapping) else {axis: _grown(axis, base, train) for axis in axes}
    )
    beside = {axis: sorted(check_integer(axis, n) for n in given[axis]) for axis in TRAINING_AXES if axis in given}
    along = {axis: shapes_along(axis, base, sorted(sizes)) for axis, sizes in given.items() if axis not in beside}
    for each in along.values():
        find_axis(each)
    for axis, numbers in beside.items():
        check_rising(axis, numbers, LAST if axis == "steps" else 1)
    if not given:
        raise UsageError(f"axes={axes!r}: give at least one of {', '.join((*AXES, *TRAINING_AXES))}")
    run = Runs(make, list(seeds), steps)
    shapes = list(dict.fromkeys([base, *(shape for each in along.values() for shape in each)]))
    grid = rate_factors if len(rate_factors) or not beside else np.geomspace(1 / 8, 8, 7).tolist()
    run.estimate(shapes, along, (len(rate_factors), len(grid)), train, limit, announce, beside)
    judge = Judge(None if run.unknown_roles or not along else parametrization, hyperparameters, run)
    if parametrization is not None and run.unknown_roles and along:
        run.notes.append(f"not judged: {run.unknown_roles}")
    if hyperparameters is not None and not along:
        run.notes.append("settings: not audited without an axis of the model")
    if judge.p is not None:
        judge.read_all(shapes, along)  # before training: what cannot be read is refused early
    rows = {shape: [run.measure(shape, seed) for seed in seeds] for shape in (shapes if along else ())}
    if along and all(
        each.losses == row[0].losses and math.isfinite(each.losses[-1]) for row in rows.values() for each in row
    ):
        raise UsageError("make returned the same training for all seeds: draw weights or batches from the seed")
    growths = [growth for axis, each in along.items() for growth in judge.growths(axis, each, rows)]
    searched = along.values() if len(rate_factors) else ()
    transfers = [found for each in searched for found in run.transfer(each, rate_factors, train)]
    transfers += [found for axis, each in beside.items() for found in run.exponent(base, axis, each, grid, train)]
    return Preflight(
        tuple(growths),
        judge.p is not None,
        run.membership,
        tuple(judge.uses),
        judge.audits,
        tuple(transfers),
        tuple(dict.fromkeys([*run.notes, *judge.notes])),
        run.cost(),
    )


def _grown(axis: Axis | TrainingAxis, base: Shape, train: int) -> list[int]:
    if axis not in (*AXES, *TRAINING_AXES):
        raise UsageError(f"axis={axis!r}: choose one of {', '.join((*AXES, *TRAINING_AXES))}")
    first = 1 if axis == "batch" else train if axis == "steps" else size_along(axis, base)
    return [factor * first for factor in GROWN]

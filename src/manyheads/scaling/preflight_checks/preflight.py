"""Preflight of a user's own training: updates by module along N, H, L and D, factors, settings, transfer of rates.

The training is built at several shapes from several seeds and run for a few steps on its own batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from manyheads.errors import UsageError
from manyheads.scaling.axes import AXES, Axis, check_seeds, find_axis, shapes_along, size_along
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
    axes: Sequence[Axis] | Mapping[Axis, Sequence[int]] = ("key_dim", "heads", "depth"),
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
        Axes to grow along from the base, to twice and four times its size; or axis → sizes.
    parametrization, hyperparameters
        To judge by, with a model whose parameters have known names, or with roles; without both updates are measured
        and held against flat ones. Settings are audited if hyperparameters are given.
    steps
        Steps of a training whose updates are measured.
    seeds
        At least two.
    rate_factors
        Factors of all learning rates to search for the best one, equally spaced in the logarithm, such as
        `np.geomspace(1/8, 8, 7)`; none for no search.
    train
        Steps of a training of that search.
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
    given = axes if isinstance(axes, Mapping) else {axis: _grown(axis, base) for axis in axes}
    along = {axis: shapes_along(axis, base, sorted(sizes)) for axis, sizes in given.items()}
    for each in along.values():
        find_axis(each)
    if not along:
        raise UsageError(f"axes={axes!r}: give at least one of {', '.join(AXES)}")
    run = Runs(make, list(seeds), steps)
    shapes = list(dict.fromkeys([base, *(shape for each in along.values() for shape in each)]))
    run.estimate(shapes, along, len(rate_factors), train, limit, announce)
    judge = Judge(None if run.unknown_roles else parametrization, hyperparameters, run)
    if parametrization is not None and run.unknown_roles:
        run.notes.append(f"not judged: {run.unknown_roles}")
    if judge.p is not None:
        judge.read_all(shapes, along)  # before training: what cannot be read is refused early
    rows = {shape: [run.measure(shape, seed) for seed in seeds] for shape in shapes}
    if all(each.losses == row[0].losses and math.isfinite(each.losses[-1]) for row in rows.values() for each in row):
        raise UsageError("make returned the same training for all seeds: draw weights or batches from the seed")
    growths = [growth for axis, each in along.items() for growth in judge.growths(axis, each, rows)]
    searched = along.values() if len(rate_factors) else ()
    transfers = [found for each in searched for found in run.transfer(each, rate_factors, train)]
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


def _grown(axis: Axis, base: Shape) -> list[int]:
    if axis not in AXES:
        raise UsageError(f"axis={axis!r}: choose one of {', '.join(AXES)}")
    return [factor * size_along(axis, base) for factor in GROWN]

"""`coordinate_check`: whether everything in a network moves by as much at every size, and which module breaks.

Networks of several shapes are trained from several seeds. Of every quantity a power of the size is fitted to each seed,
and its interval is held against the power that a consistent scaling prescribes. A few steps are not enough: some
failures show after training of order one only, and some apparent failures are start-up transients (both measured here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.attention.scaling import Shape
from manyheads.errors import UsageError
from manyheads.limits.axes import LETTERS, Axis, find_axis
from manyheads.limits.finite import QUANTITIES, Recipe, measure_motion
from manyheads.limits.parametrization import Parametrization
from manyheads.limits.powers import ONE, Power
from manyheads.limits.task import Lesson
from manyheads.statistics import ExponentFit, Outcome, decide, fit_exponent, replicates_to_decide

TOLERANCE: dict[Axis, float] = {"key_dim": 0.35, "heads": 0.2, "depth": 0.35}
"""Allowed deviation of an exponent along each axis over sizes x 8: finite-size corrections measured here reach 0.3 in N
and L (the logits start to align at small N, deep networks approach their limit slowly), and 0.16 in H."""

OWN_TOLERANCE = 0.15
"""The same for motions by a module's own weights, whose corrections are smaller."""


@dataclass(frozen=True)
class Growth:
    """How one quantity grows along one axis, after some steps.

    Attributes
    ----------
    quantity, module
        What is followed, and where it stands.
    axis
        ``"key_dim"``, ``"heads"`` or ``"depth"``.
    step
        After how many updates.
    fit
        The fitted power; None where training diverged, and then the outcome is "refuted".
    required
        The exponent that a consistent scaling prescribes.
    tolerance
        Allowed deviation.
    outcome
        "holds", "refuted" or "inconclusive".
    seeds_needed
        Seeds that would decide an inconclusive one; None if that cannot be said.
    """

    quantity: str
    module: str
    axis: Axis
    step: int
    fit: ExponentFit | None
    required: float
    tolerance: float
    outcome: Outcome
    seeds_needed: int | None

    def sentence(self) -> str:
        """Say it for people."""
        letter = LETTERS[self.axis]
        if self.fit is None:
            return f"training diverges along {letter}: {self.module}"
        low, high = self.fit.interval.low, self.fit.interval.high
        found = f"{self.module}: {letter}^{self.fit.exponent:.2f} [{low:.2f}, {high:.2f}] after {self.step} steps"
        wanted = f"{letter}^{self.required:g} ± {self.tolerance:g}"
        if self.outcome == "holds":
            return f"{found}, as it should ({wanted})"
        if self.outcome == "refuted":
            direction = "grows" if self.fit.exponent > self.required else "shrinks"
            return f"{found}: {direction} against {wanted}"
        more = f"{self.seeds_needed} seeds would decide" if self.seeds_needed else "more seeds are needed"
        return f"{found}: not decided against {wanted}, {more}"


@dataclass(frozen=True)
class CoordinateCheck:
    """All growths of a check, and what was measured.

    Attributes
    ----------
    growths
        One for every quantity and checkpoint.
    motions
        Quantity -> (seeds, shapes, checkpoints).
    """

    growths: tuple[Growth, ...]
    motions: Mapping[str, np.ndarray]

    @property
    def broken(self) -> tuple[Growth, ...]:
        """What certainly does not scale as it should."""
        return tuple(growth for growth in self.growths if growth.outcome == "refuted")

    @property
    def outcome(self) -> Outcome:
        """All of it: refuted when something breaks, inconclusive when something is open."""
        outcomes = {growth.outcome for growth in self.growths}
        return "refuted" if "refuted" in outcomes else "inconclusive" if "inconclusive" in outcomes else "holds"


def required_growth(parametrization: Parametrization) -> dict[str, Power]:
    """Return the power of every quantity that a consistent scaling with these exponents prescribes.

    Outputs, stream and logits move by as much at every size. Queries move by N^(alpha_A - 1), so that a logit, N
    products of moved queries with keys over N^alpha_A, moves by one; and in each of L blocks weights move what they
    compute by L^(alpha_L - 1), which together move the stream by one.

    Examples
    --------
    >>> required = required_growth(Parametrization(0.5, 1.0))
    >>> print(required["query_by_weights"], required["residual"])
    N^-1/2 1
    """
    consistent = parametrization.scheme == "limits"
    moves = Power(depth=parametrization.depth_exponent - 1) if consistent else ONE
    queries = Power(key_dim=parametrization.logit_exponent - 1) if consistent else ONE
    found = dict.fromkeys(QUANTITIES, ONE)
    return found | {"query_by_weights": moves * queries, "value_by_weights": moves}


def check_growth(
    quantity: str, axis: Axis, sizes: Sequence[int], values: Any, required: float, tolerance: float, step: int = 0
) -> Growth:
    """Fit a power of the size to one quantity and hold it against the required one.

    Parameters
    ----------
    quantity
        Name; of `QUANTITIES`, or one of your own.
    axis, sizes
        Along which axis, (shapes,) sizes.
    values
        (seeds, shapes), positive; not finite where training diverged.
    required, tolerance
        Exponent and allowed deviation.
    step
        After how many updates.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> values = np.array([4, 8, 32]) ** 0.5 * np.exp(0.05 * rng.normal(size=(8, 3)))
    >>> check_growth("residual", "key_dim", (4, 8, 32), values, required=0.0, tolerance=0.2).outcome
    'refuted'
    """
    values = np.asarray(values, np.float64)
    module = QUANTITIES.get(quantity, quantity)
    if not np.isfinite(values).all():
        return Growth(quantity, module, axis, step, None, required, tolerance, "refuted", None)
    fit = fit_exponent(sizes, values)
    outcome = decide(fit.exponent, fit.interval, required, tolerance)
    needed = None
    if outcome == "inconclusive" and len(fit.replicate_exponents) > 1:
        needed = replicates_to_decide(fit.replicate_exponents, required, tolerance)
    return Growth(quantity, module, axis, step, fit, required, tolerance, outcome, needed)


Measure = Callable[[Shape, int], Mapping[str, Any]]  # (shape, seed) -> quantity -> (checkpoints,)


def coordinate_check(
    parametrization: Parametrization,
    shapes: Sequence[Shape],
    measure: Measure,
    *,
    checkpoints: Sequence[int],
    seeds: Sequence[int] = tuple(range(8)),
    tolerance: Mapping[Axis, float] = TOLERANCE,
) -> CoordinateCheck:
    """Train networks along one axis from several seeds and check how everything grows.

    Parameters
    ----------
    parametrization
        Prescribes the exponents.
    shapes
        At least two, different along one axis only.
    measure
        Trains one network and returns how far each quantity of `QUANTITIES` has moved at each checkpoint:
        `measure_lesson` for the house's transformer, or a function of your own model.
    checkpoints
        Numbers of updates: a few, and order-one many.
    seeds
        At least two.
    tolerance
        Allowed deviation of the exponents along each axis.

    Raises
    ------
    UsageError
        Shapes that differ along none or several axes; fewer than two seeds; a measurement without a quantity.

    Examples
    --------
    >>> def measure(shape, seed):
    ...     noise = np.random.default_rng(seed).normal(size=len(QUANTITIES))
    ...     return {name: [np.exp(0.02 * z)] for name, z in zip(QUANTITIES, noise)}
    >>> p = Parametrization(base=Shape(8, 4, 2))
    >>> coordinate_check(p, [Shape(4, 4, 2), Shape(32, 4, 2)], measure, checkpoints=(4,)).outcome
    'holds'
    """
    axis, sizes = find_axis(shapes)
    if len(seeds) < 2:
        raise UsageError(f"{len(seeds)} seeds: a check needs at least two, and eight to be sharp")
    rows = [[measure(shape, seed) for shape in shapes] for seed in seeds]
    if missing := set(QUANTITIES) - set(rows[0][0]):
        raise UsageError(f"measure returned no {', '.join(sorted(missing))}")
    motions = {name: np.array([[cell[name] for cell in row] for row in rows], np.float64) for name in QUANTITIES}
    required = required_growth(parametrization)
    growths = []
    for name, values in motions.items():
        own = OWN_TOLERANCE if name.endswith("by_weights") and parametrization.scheme == "limits" else tolerance[axis]
        for place, step in enumerate(checkpoints):
            exponent = getattr(required[name], axis)
            growths.append(check_growth(name, axis, sizes, values[..., place], exponent, own, step))
    return CoordinateCheck(tuple(growths), motions)


def measure_lesson(
    lesson: Lesson, parametrization: Parametrization, recipe: Recipe, rate: float, checkpoints: Sequence[int]
) -> Measure:
    """Return the `measure` of `coordinate_check` that trains the house's transformer on a lesson.

    Parameters
    ----------
    lesson, parametrization, recipe
        What is trained, and how.
    rate
        Learning rate of the base shape.
    checkpoints
        Numbers of updates.
    """
    import jax

    def measure(shape: Shape, seed: int) -> Mapping[str, Any]:
        key = jax.random.key(seed)
        found = measure_motion(lesson, parametrization, shape, recipe, rate, tuple(checkpoints), key)
        return found._asdict()

    return measure

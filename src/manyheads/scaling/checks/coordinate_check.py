"""Coordinate check: the RMS update of every quantity as a power of N, H or L, against its prescribed exponent.

Networks of several shapes are trained from several seeds. The power of the size is fitted
to each seed, and its interval compared with the power that a consistent scaling prescribes.

Three effects mislead a naive check. A wrong parametrization may look flat for a few steps: the last checkpoint is to
lie where the outputs have moved by order one. A consistent one may look too slow: a sum that is random at first is
aligned later (`least_growth`). And at the edge of stability everything grows: repeat at half the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads._arrays import takes_arrays
from manyheads._overview import Overview, Shown
from manyheads._settings import default_rules
from manyheads.errors import UsageError, check_call, check_rising
from manyheads.scaling.axes import AXES, LETTERS, Axis, check_seeds, find_axis
from manyheads.scaling.checks.growth_powers import QUANTITIES, least_growth, required_growth
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.statistics import decide, fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.statistics.verdicts import Outcome, replicates_to_decide
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from manyheads.scaling.task import Task
    from manyheads.scaling.trained.transformers import Recipe

TOLERANCE: dict[Axis, float] = dict.fromkeys(AXES, 0.25)
"""Allowed deviation of an exponent along each axis: half of the half that separates right powers from usual mistakes.
Finite size moves a right one by less if corrections are 1 + c n^(-1/2) with c of one (`finite_size_bias`): .11 over
n = 4, 8, 32. Larger c exist (docs/scaling.md, "Which sizes suffice?"); check larger sizes then."""


def finite_size_bias(sizes: Sequence[int]) -> float:
    r"""Return how far a correction :math:`1 + n^{-1/2}` moves the exponent that is fitted over these sizes.

    Examples
    --------
    >>> round(finite_size_bias((4, 8, 32)), 3), round(finite_size_bias((2, 4, 16)), 3)
    (-0.114, -0.147)
    """
    x = np.log(np.asarray(sizes, np.float64))
    x -= x.mean()
    return float(x @ np.log1p(np.asarray(sizes, np.float64) ** -0.5) / (x @ x))


@dataclass(frozen=True)
class Growth:
    """Growth of one quantity along one axis, after some steps."""

    quantity: str
    module: str  # where it stands
    axis: Axis
    step: int  # after how many updates
    fit: ExponentFit | None  # the fitted power; None where training diverged, and then the outcome is "refuted"
    required: float  # the exponent that a consistent scaling prescribes
    tolerance: float  # allowed deviation, above `required` and below `least`
    outcome: Outcome  # "holds", "refuted" or "inconclusive"
    # Lowest exponent of a consistent scaling here: less than `required` if a random sum dominates at first
    least: float

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """Exponent and interval, None where training diverged, and the lowest and the required exponent."""
        interval = self.fit and self.fit.interval
        found = (self.fit.exponent, interval.low, interval.high) if self.fit and interval else (None,) * 3
        return *found, self.least, self.required

    @property
    def severity(self) -> tuple[int, str]:
        """Key to sort by: refuted ones first."""
        return ("refuted", "inconclusive", "holds").index(self.outcome), self.axis

    @property
    def seeds_needed(self) -> int | None:
        """Seeds that would decide an inconclusive one; None if that cannot be said, or where nothing is open."""
        if self.outcome != "inconclusive" or self.fit is None or len(self.fit.replicate_exponents) < 2:
            return None
        region = (self.required - self.least + self.tolerance, self.tolerance)
        return replicates_to_decide(self.fit.replicate_exponents, self.required, region)

    def sentence(self) -> str:
        """Say it for people."""
        letter = LETTERS[self.axis]
        if self.fit is None:
            return f"training diverges along {letter}: {self.module}"
        low, high = self.fit.interval.low, self.fit.interval.high
        after = f"after {self.step} step{'' if self.step == 1 else 's'}"
        found = f"{self.module}: {letter}^{self.fit.exponent:.2f} [{low:.2f}, {high:.2f}] {after}"
        power = f"{letter}^{self.required:g}"
        span = power if self.least == self.required else f"between {letter}^{self.least:.2g} and {power},"
        wanted = f"{span} ± {self.tolerance:g}"
        if self.outcome == "holds":
            return f"{found}, as it should ({wanted})"
        if self.outcome == "refuted":
            direction = "grows" if self.fit.exponent > self.required else "shrinks"
            return f"{found}: {direction} against {wanted}"
        needed = self.seeds_needed
        more = f"{needed} seeds would decide" if needed else "more seeds are needed"
        return f"{found}: should be {wanted}; {more}"


@dataclass(frozen=True, repr=False)
class CoordinateCheck(Shown):
    """All growths of a check, and what was measured."""

    growths: tuple[Growth, ...]  # one for every quantity and checkpoint
    updates: Mapping[str, NDArray[np.float64]]  # quantity -> (seeds, shapes, checkpoints)

    @property
    def broken(self) -> tuple[Growth, ...]:
        """Growths that certainly differ from the prescribed ones."""
        return tuple(growth for growth in self.growths if growth.outcome == "refuted")

    @property
    def outcome(self) -> Outcome:
        """All of it: refuted when something breaks, inconclusive when something is open."""
        outcomes = {growth.outcome for growth in self.growths}
        return "refuted" if "refuted" in outcomes else "inconclusive" if "inconclusive" in outcomes else "holds"

    def plot(self) -> Figure:
        """Draw the fitted exponents with their intervals over the range of a consistent scaling."""
        named = [(f"{growth.module}, step {growth.step}", growth) for growth in self.growths]
        return draw_growths(f"Coordinate check: {self.outcome}", LETTERS[self.growths[0].axis], named)

    def _overview(self) -> Overview:
        growths = sorted(self.growths, key=lambda each: each.severity)
        rows = [(each.module, each.step, each.outcome, *each.numbers) for each in growths]
        columns = ("update_of", "step", "outcome", "exponent", "low", "high", "least", "required")
        axis = self.growths[0].axis
        title = f"Coordinate check along {LETTERS[axis]}: {self.outcome}, {len(self.broken)} of {len(rows)} break"
        return Overview(title, columns, rows)


def draw_growths(title: str, size: str, named: Iterable[tuple[str, Growth]]) -> Figure:
    """Draw exponents of a size with their intervals over the range of a consistent scaling."""
    from manyheads.study.reporting.charts import Estimate, draw_intervals

    fitted = []
    for name, growth in named:
        if fit := growth.fit:
            right = (growth.least - growth.tolerance, growth.required + growth.tolerance)
            fitted.append(Estimate(name, fit.exponent, (fit.interval.low, fit.interval.high), right))
    return draw_intervals(title, f"exponent of {size} in the update", fitted)


@takes_arrays
def check_growth(
    quantity: str,
    axis: Axis,
    sizes: Sequence[int],
    values: Float[ArrayLike, "seeds shapes"],
    required: float,
    tolerance: float,
    step: int = 0,
    *,
    least: float | None = None,
) -> Growth:
    """Fit an exponent of the size to one quantity and compare it with the required one.

    Values are positive, and not finite where training diverged; `least` is the lowest exponent that is right as well.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> values = np.array([4, 8, 32]) ** 0.5 * np.exp(0.05 * rng.normal(size=(8, 3)))
    >>> check_growth("residual", "key_dim", (4, 8, 32), values, required=0.0, tolerance=0.2).outcome
    'refuted'
    """
    values = np.asarray(values, np.float64)
    module = QUANTITIES.get(quantity, quantity)
    low = required if least is None else least
    if low > required:
        raise UsageError(f"least={least} is above required={required}: it is the lowest exponent that is right")
    if not np.isfinite(values).all():
        return Growth(quantity, module, axis, step, None, required, tolerance, "refuted", low)
    fit = fit_exponent(sizes, values)
    outcome = decide(fit.exponent, fit.interval, required, (required - low + tolerance, tolerance))
    return Growth(quantity, module, axis, step, fit, required, tolerance, outcome, low)


Measure = Callable[[Shape, int], Mapping[str, Any]]  # (shape, seed) -> quantity -> (checkpoints,)


def coordinate_check(
    parametrization: Parametrization,
    shapes: Sequence[Shape | Sequence[int]],
    measure: Measure,
    *,
    checkpoints: Sequence[int],
    seeds: Sequence[int] = tuple(range(8)),
    tolerance: Mapping[Axis, float] = TOLERANCE,
) -> CoordinateCheck:
    """Train networks along one axis from several seeds and check how everything grows.

    Raises `UsageError`: shapes along none or several axes; fewer than two seeds, or one twice; checkpoints that do not
    rise; a measurement without a quantity, of something that does not move, or the same for all seeds.

    Parameters
    ----------
    parametrization
        Prescribes the exponents.
    shapes
        At least two, different along one axis only.
    measure
        Trains one network and returns how far each quantity of `QUANTITIES` has moved at each checkpoint:
        `measure_task` for the library's transformer, or a function of your own model.
    checkpoints
        Numbers of updates: a few, and order-one many. Only at the last one are start-up transients called failures.
    seeds
        At least two.
    tolerance
        Allowed deviation of the exponents along each axis.

    Examples
    --------
    >>> def measure(shape, seed):
    ...     noise = np.random.default_rng(seed).normal(size=len(QUANTITIES))
    ...     return {name: [np.exp(0.02 * z)] for name, z in zip(QUANTITIES, noise)}
    >>> p = Parametrization(base=Shape(8, 4, 2))
    >>> coordinate_check(p, [Shape(4, 4, 2), Shape(32, 4, 2)], measure, checkpoints=(4,)).outcome
    'holds'
    """
    grown = [Shape.of(shape) for shape in shapes]
    axis, sizes = find_axis(grown)
    check_seeds(seeds)
    check_rising("checkpoints", checkpoints, count=1)
    if not isinstance(tolerance, Mapping) or axis not in tolerance:
        raise UsageError(f"tolerance={tolerance!r}: give one for each axis, such as {{{axis!r}: {TOLERANCE[axis]}}}")
    check_call("measure", measure, "shape", "seed")
    rows = [[measure(shape, seed) for shape in grown] for seed in seeds]
    for seed, row in zip(seeds, rows, strict=True):
        for shape, cell in zip(grown, row, strict=True):
            where = f"(N, H, L) = ({shape.key_dim}, {shape.heads}, {shape.depth}), seed {seed}"
            _check_measured(cell, where, len(checkpoints))
    updates = {name: np.array([[cell[name] for cell in row] for row in rows], np.float64) for name in QUANTITIES}
    if all((np.isfinite(values) & (values == values[:1])).all() for values in updates.values()):
        raise UsageError(f"measure returned the same numbers for all {len(rows)} seeds: draw weights from the seed")
    growths = decide_growths(parametrization, axis, sizes, updates, checkpoints, tolerance[axis])
    return CoordinateCheck(growths, updates)


def _check_measured(cell: Mapping[str, Any], where: str, checkpoints: int) -> None:
    """Refuse a measurement to which no power can be fitted; not finite is one of a training that diverged."""
    if missing := set(QUANTITIES) - set(cell):
        raise UsageError(f"measure returned no {', '.join(sorted(missing))} ({where})")
    found = {name: np.asarray(cell[name], np.float64) for name in QUANTITIES}
    for name, values in found.items():
        if values.shape != (checkpoints,):
            shape = f"{name} of shape {values.shape}"
            raise UsageError(f"measure returned {shape}: give one number a checkpoint, ({checkpoints},)")
    lost = np.any([~np.isfinite(values) for values in found.values()], 0)  # diverged: see decide_growths
    for name, values in found.items():
        if (still := values[(values < 0) | ((values == 0) & ~lost)]).size:
            raise UsageError(f"measure returned {name} = {still[0]:g} ({where}), no update: train for more steps")


def decide_growths(
    parametrization: Parametrization,
    axis: Axis,
    sizes: Sequence[int],
    updates: Mapping[str, NDArray[np.float64]],
    checkpoints: Sequence[int],
    tolerance: float,
) -> tuple[Growth, ...]:
    """Decide on measured updates: quantity -> (seeds, shapes, checkpoints); all but the last are early ones.

    What is random at finite size adds in square: right exponents come out lower, by up to `finite_size_bias`.
    """
    required, found, bias = required_growth(parametrization), [], finite_size_bias(sizes)
    # What diverged moves nothing where a norm has divided by infinity: that is no update of size zero.
    lost = np.any([~np.isfinite(values) for values in updates.values()], 0)
    for name, values in updates.items():
        values = np.where(lost & (values == 0), np.nan, values)
        for place, step in enumerate(checkpoints):
            least = least_growth(parametrization, early=place < len(checkpoints) - 1)
            wanted, low = (getattr(powers[name], axis) for powers in (required, least))
            found.append(check_growth(name, axis, sizes, values[..., place], wanted, tolerance, step, least=low + bias))
    return tuple(found)


def measure_task(
    task: Task, parametrization: Parametrization, recipe: Recipe, learning_rate: float, checkpoints: Sequence[int]
) -> Measure:
    """Return the `measure` of `coordinate_check` that trains the library's transformer on a task.

    The learning rate is that of the base shape; checkpoints are numbers of updates.
    """
    import jax

    from manyheads.scaling.trained.transformers import measure_updates

    def measure(shape: Shape, seed: int) -> Mapping[str, Any]:
        with default_rules():
            numbers = (learning_rate, tuple(checkpoints), jax.random.key(seed))
            found = measure_updates(task, parametrization, shape, recipe, *numbers, fields=tuple(QUANTITIES))
            return found._asdict()

    return measure

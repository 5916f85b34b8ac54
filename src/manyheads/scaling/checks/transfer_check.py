"""Learning-rate transfer check: the optimal learning rate as a power of the size.

For every shape and seed networks are trained over a grid of rates, which is widened where the least loss stands at its
end; the optimum is the vertex of a parabola through the lowest loss and its neighbours, in the logarithm of the rate.
A power of the size is fitted to it seed by seed. A training that diverges is data: it has the worst of all losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._namespaces import Floats
from manyheads._overview import Overview, Shown
from manyheads._settings import default_rules
from manyheads.errors import CertificateError, UsageError, check_call
from manyheads.scaling.axes import LETTERS, WORDS, Axis, TrainingAxis, check_seeds, find_axis
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.statistics.exponents import DriftTest, drift_test
from manyheads.statistics.verdicts import Outcome
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from manyheads.scaling.task import Task
    from manyheads.scaling.trained.transformers import Recipe

ALLOWED_DECADES = 0.25
"""Drift of the optimal learning rate, in decades over a factor of eight in size, that still counts as transfer.
The least power by which a parametrization goes wrong, the root of a size, makes 0.45; a factor 1.8 costs little."""

WIDENINGS = 2  # how often a grid is widened before a search gives up

UNBOUNDED = 1e4
"""An interval of factors whose ends are so far from each other says nothing, and its ends are not printed."""

PIECE = 3  # rates by which a grid is widened, and that are trained by one call: one compiled program serves all grids
LAST = 8  # the final loss is the mean over the last eighth of the steps


@dataclass(frozen=True, repr=False)
class TransferCheck(Shown):
    """Whether the best learning rate moves along one axis."""

    axis: Axis | TrainingAxis
    sizes: tuple[int, ...]
    learning_rates: Floats  # (seeds, sizes) best learning rates
    drift: DriftTest  # the fitted power, its interval, the verdict and the seeds that would decide it

    @property
    def outcome(self) -> Outcome:
        """The verdict on transfer of the optimal learning rate."""
        return self.drift.outcome

    @property
    def decades(self) -> tuple[float, float, float]:
        """Drift over a factor of eight in size, in decades: fitted, lowest, highest."""
        fit, decade = self.drift.fit, math.log10(8)
        return fit.exponent * decade, fit.interval.low * decade, fit.interval.high * decade

    def sentence(self) -> str:
        """Say it for people."""
        doubling, factor = f"per doubling of {LETTERS[self.axis]}", self.drift.factor_per_doubling
        fitted = _times(2**self.drift.fit.exponent)
        found = f"{fitted} [{_times(factor.low)}, {_times(factor.high)}] {doubling}"
        if self.outcome == "inconclusive" and not factor.high < UNBOUNDED * factor.low:
            found = f"{fitted} {doubling}, to which {len(self.learning_rates)} seeds set no bounds"
        if self.outcome == "holds":
            return f"transfers: the optimal learning rate changes by a factor {found}"
        if self.outcome == "refuted":
            return f"drifts by a factor {found}"
        more = self.drift.replicates_needed
        return f"undecided ({found}), needs " + (f"about {more} seeds" if more else "more seeds or a finer grid")

    def plot(self) -> Figure:
        """Draw the best learning rate against the size: the mean over seeds, and the range of the seeds."""
        from manyheads.study.panels import Curve, Lines
        from manyheads.study.reporting.charts import draw_titled

        rows = self._overview().rows
        mean, low, high = (tuple(float(row[column]) for row in rows) for column in (1, 2, 3))
        sizes = tuple(map(float, self.sizes))
        fit = self.drift.fit
        fitted = Curve(sizes, tuple(map(fit.predict, sizes)), f"{LETTERS[self.axis]}^{fit.exponent:.2f}", "reference")
        measured = Curve(sizes, mean, "best, over seeds", low=low, high=high)
        return draw_titled(
            Lines(self._title, WORDS[self.axis], "learning rate", (measured, fitted), log_x=True, log_y=True)
        )

    def _overview(self) -> Overview:
        best = np.asarray(self.learning_rates, np.float64)
        middle = np.exp(np.log(best).mean(0))
        rows = list(zip(self.sizes, *(each.tolist() for each in (middle, best.min(0), best.max(0))), strict=True))
        columns = (LETTERS[self.axis], "best_learning_rate", "lowest_of_seeds", "highest_of_seeds")
        return Overview(f"{self._title}, {len(best)} seeds", columns, rows, (self.sentence(),))

    @property
    def figures(self) -> dict[str, float]:
        """The fitted exponent and its interval."""
        fit = self.drift.fit
        return {"exponent": fit.exponent, "low": fit.interval.low, "high": fit.interval.high}

    @property
    def _title(self) -> str:
        return f"Learning-rate transfer: {self.outcome}"


def _times(factor: float) -> str:
    """Return a factor for people: two decimals, or its power of ten where those say nothing."""
    return f"{factor:.2f}" if 0.01 <= factor < 1000 else f"{factor:.0e}"


@takes_arrays
def find_optimum(learning_rates: Float[ArrayLike, " rates"], losses: Float[ArrayLike, " rates"]) -> float:
    """Return the learning rate of least loss, refined between the points of a geometric grid of three or more.

    A loss that is not finite, of a training that diverged, counts as the worst. Refused are rates that are no geometric
    grid, and a least loss at an end of the grid (`CertificateError`).

    Examples
    --------
    >>> rates = np.logspace(-3, -1, 5)
    >>> round(float(np.log10(find_optimum(rates, (np.log10(rates) + 2.1) ** 2))), 6)
    -2.1
    """
    learning_rates, losses = _checked_grid(learning_rates), np.asarray(losses, np.float64)
    if learning_rates.shape != losses.shape:
        raise UsageError(f"rates {learning_rates.shape} and losses {losses.shape}: give one loss for each")
    reached = np.where(np.isfinite(losses), losses, np.inf)
    best = int(reached.argmin())
    if not np.isfinite(reached[best]):
        lowest = float(learning_rates[0])
        raise CertificateError(
            "training diverged at every learning rate: lower them", measured=lowest, threshold=math.inf
        )
    if best in (0, len(learning_rates) - 1):
        end, inner, side = (best, 1, "below") if best == 0 else (best, -2, "above")
        at, found = float(learning_rates[end]), "an end of the grid: the optimum may lie"
        message = f"the least loss is at {at:.3g}, {found} {side} it, widen them"
        raise CertificateError(message, measured=at, threshold=float(learning_rates[inner]))
    left, middle, right = reached[best - 1 : best + 2]
    bend = left - 2 * middle + right
    # Beside a diverged neighbour, or on a flat floor, the point itself is all that is known.
    shift = 0.5 * (left - right) / bend if np.isfinite(bend) and bend > 0 else 0.0
    return float(np.exp(np.log(learning_rates[best]) + shift * np.log(learning_rates[1] / learning_rates[0])))


def _checked_grid(learning_rates: Any) -> Floats:
    learning_rates = np.asarray(learning_rates, np.float64)
    if learning_rates.ndim != 1 or len(learning_rates) < 3 or not (learning_rates > 0).all():
        raise UsageError(f"rates of shape {learning_rates.shape}: give at least three, all positive")
    steps = np.diff(np.log(learning_rates))
    if (steps <= 0).any() or np.ptp(steps) > 1e-6 * steps.max():
        raise UsageError("learning rates must increase by one factor, as numpy.geomspace makes them")
    return learning_rates


class Search(NamedTuple):
    """Search for the optimal learning rate: what was tried, and the optimum."""

    learning_rates: Floats  # (R,) in rising order
    losses: Floats  # (R,), not finite where training diverged
    best: float  # the optimum, or the end of the widened grid beyond which it lies
    outcome: Literal["inside", "below", "above"]  # of all rates that were tried


@takes_arrays
def search_optimum(
    learning_rates: Float[ArrayLike, " rates"], losses: Callable[[Floats], Any], widenings: int = WIDENINGS
) -> Search:
    """Find the rate of least loss, and widen the grid by three rates on the side where the least loss is at its end.

    Examples
    --------
    >>> found = search_optimum(np.geomspace(1e-3, 1e-1, 5), lambda rates: (np.log10(rates) + 3.6) ** 2)
    >>> found.outcome, len(found.learning_rates), round(float(np.log10(found.best)), 6)
    ('inside', 8, -3.6)
    """
    if widenings < 0:
        raise UsageError(f"widenings={widenings}: widen the grid so many times at most, or 0 times")
    check_call("losses", losses, "learning_rates")
    grid = _checked_grid(learning_rates)
    ratio = grid[1] / grid[0]

    def train(learning_rates: Floats) -> Floats:
        found = np.asarray(losses(learning_rates), np.float64)
        if found.shape != learning_rates.shape:
            raise UsageError(f"losses of shape {found.shape} for {len(learning_rates)} rates: return one for each rate")
        return found

    reached = train(grid)
    for left in range(widenings, -1, -1):
        place = int(np.where(np.isfinite(reached), reached, np.inf).argmin())
        if 0 < place < len(grid) - 1:
            return Search(grid, reached, find_optimum(grid, reached), "inside")
        if not left:
            break
        steps = ratio ** np.arange(1, PIECE + 1)
        new = grid[0] / steps[::-1] if place == 0 else grid[-1] * steps
        further = train(new)
        pairs = ((new, grid), (further, reached))
        grid, reached = (np.concatenate(pair if place == 0 else pair[::-1]) for pair in pairs)
    return Search(grid, reached, float(grid[place]), "below" if place == 0 else "above")


def optimum_inside(learning_rates: Any, losses: Callable[[Floats], Any], widenings: int, where: str) -> float:
    """Return the rate of least loss, and refuse one at an end of the widest grid (`CertificateError`)."""
    found = search_optimum(learning_rates, losses, widenings)
    if found.outcome == "inside":
        return found.best
    try:  # at the end of the widest grid this says what to do
        return find_optimum(found.learning_rates, found.losses)
    except CertificateError as error:
        message = f"{where}: {error.message}"
        raise CertificateError(message, measured=error.measured, threshold=error.threshold) from None


Losses = Callable[[Shape, Floats, int], Any]  # (shape, rates, seed) -> (R,) final losses


def final_losses(
    task: Task, parametrization: Parametrization, shape: Shape, recipe: Recipe, learning_rates: Any, key: Any
) -> Floats:
    """Train one network a rate and return the mean loss over the last eighth of the steps, (R,) in nats."""
    from manyheads.scaling.trained.transformers import sweep_losses

    learning_rates = np.asarray(learning_rates, np.float64)
    missing = -len(learning_rates) % PIECE
    pieces = np.concatenate([learning_rates, learning_rates[-1:].repeat(missing)]).reshape(-1, PIECE)
    found = [sweep_losses(task, parametrization, shape, recipe, piece, key) for piece in pieces]
    last = max(1, recipe.steps // LAST)
    return np.concatenate(found)[: len(learning_rates), -last:].mean(1)


def task_losses(task: Task, parametrization: Parametrization, recipe: Recipe) -> Losses:
    """Return the `losses` of `transfer_check` that train the library's transformer on a task."""
    import jax

    def losses(shape: Shape, learning_rates: Floats, seed: int) -> Floats:
        with default_rules():
            return final_losses(task, parametrization, shape, recipe, learning_rates, jax.random.key(seed))

    return losses


@takes_arrays
def transfer_check(
    shapes: Sequence[Shape | Sequence[int]],
    learning_rates: Float[ArrayLike, " rates"],
    losses: Losses,
    *,
    seeds: Sequence[int] = tuple(range(8)),
    allowed: float = ALLOWED_DECADES,
    widenings: int = WIDENINGS,
) -> TransferCheck:
    """Find the best learning rate of every shape and seed, and test whether it drifts.

    Parameters
    ----------
    shapes
        At least two, different along one axis only.
    learning_rates
        (R,) learning rates of the base shape, equally spaced in the logarithm.
    losses
        Trains at all rates from one seed and returns the final losses: `task_losses`, or a function of your own.
    seeds
        At least two.
    allowed
        Drift in decades over a factor of eight in size that still counts as transfer.
    widenings
        How often a grid may be widened by three rates, where the optimum is at an end.

    Raises
    ------
    UsageError
        Shapes along none or several axes, fewer than two seeds or one twice, rates that are no grid.
    CertificateError
        An optimum at an end of the widest grid.

    Examples
    --------
    >>> def losses(shape, rates, seed):
    ...     best = -2 - np.log10(shape.key_dim) + 0.01 * np.random.default_rng(seed).normal()
    ...     return (np.log10(rates) - best) ** 2
    >>> shapes = [Shape(4, 4, 2), Shape(8, 4, 2), Shape(32, 4, 2)]
    >>> print(transfer_check(shapes, np.geomspace(1e-5, 1e-1, 17), losses).sentence())
    drifts by a factor 0.50 [0.50, 0.50] per doubling of N
    """
    grown = [Shape.of(shape) for shape in shapes]
    axis, sizes = find_axis(grown)
    check_seeds(seeds)
    check_call("losses", losses, "shape", "learning_rates", "seed")

    def best(shape: Shape, seed: int) -> float:
        where = f"(N, H, L) = ({shape.key_dim}, {shape.heads}, {shape.depth}), seed {seed}"
        return optimum_inside(learning_rates, lambda grid: losses(shape, grid, seed), widenings, where)

    optima = np.array([[best(shape, seed) for shape in grown] for seed in seeds])
    return decide_drift(axis, sizes, optima, allowed)


def decide_drift(axis: Axis, sizes: Sequence[int], optima: Floats, allowed: float = ALLOWED_DECADES) -> TransferCheck:
    """Test optimal learning rates (seeds, sizes), found already, for a drift along an axis."""
    drift = drift_test(sizes, optima, tolerance=allowed / math.log10(8))
    return TransferCheck(axis, tuple(sizes), optima, drift)

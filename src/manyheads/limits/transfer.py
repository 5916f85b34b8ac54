"""`transfer_check`: whether the best learning rate stays where it is when the network grows.

For every shape and seed networks are trained over a grid of rates; the best rate is the vertex of a parabola through
the lowest loss and its neighbours, in the logarithm of the rate. A power of the size is fitted to it seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.attention.scaling import Shape
from manyheads.errors import CertificateError, UsageError
from manyheads.limits.axes import LETTERS, Axis, find_axis
from manyheads.statistics import DriftTest, Outcome, drift_test

ALLOWED_DECADES = 0.25
"""Drift of the best rate, in decades over a factor of eight in size, that still counts as transfer: a rate that is off
by a factor 1.8 costs little, because the loss is flat around its optimum."""


@dataclass(frozen=True)
class TransferCheck:
    """Whether the best learning rate moves along one axis.

    Attributes
    ----------
    axis, sizes
        Along which axis, and where.
    rates
        (seeds, sizes) best learning rates.
    drift
        The fitted power, its interval, the verdict and the seeds that would decide it.
    """

    axis: Axis
    sizes: tuple[int, ...]
    rates: np.ndarray
    drift: DriftTest

    @property
    def outcome(self) -> Outcome:
        """The verdict on "the best rate stays"."""
        return self.drift.outcome

    @property
    def decades(self) -> tuple[float, float, float]:
        """Drift over a factor of eight in size, in decades: fitted, lowest, highest."""
        interval = self.drift.fit.interval
        return tuple(value * math.log10(8) for value in (self.drift.fit.exponent, interval.low, interval.high))  # type: ignore[return-value]

    def sentence(self) -> str:
        """Say it for people."""
        letter = LETTERS[self.axis]
        factor = self.drift.factor_per_doubling
        fitted = 2**self.drift.fit.exponent
        found = f"{fitted:.2f} [{factor.low:.2f}, {factor.high:.2f}] per doubling of {letter}"
        if self.outcome == "holds":
            return f"transfers: the best rate changes by a factor {found}"
        if self.outcome == "refuted":
            return f"drifts by a factor {found}"
        more = self.drift.replicates_needed
        return f"undecided ({found}), needs " + (f"about {more} seeds" if more else "more seeds or a finer grid")


def find_optimum(rates: Any, losses: Any) -> float:
    """Return the learning rate of least loss, refined between the points of the grid.

    Parameters
    ----------
    rates
        (R,) increasing, R >= 3, equally spaced in the logarithm.
    losses
        (R,) final losses; not finite where training diverged, which counts as the worst.

    Raises
    ------
    UsageError
        Rates that are too few, do not increase, or are not equally spaced.
    CertificateError
        The least loss stands at an end of the grid: the optimum may lie outside, widen the grid on that side.

    Examples
    --------
    >>> rates = np.logspace(-3, -1, 5)
    >>> round(float(np.log10(find_optimum(rates, (np.log10(rates) + 2.1) ** 2))), 6)
    -2.1
    """
    rates, losses = np.asarray(rates, np.float64), np.asarray(losses, np.float64)
    if rates.ndim != 1 or rates.shape != losses.shape or len(rates) < 3 or (rates <= 0).any():
        raise UsageError(f"rates {rates.shape} and losses {losses.shape}: give at least three of each, rates positive")
    steps = np.diff(np.log(rates))
    if (steps <= 0).any() or np.ptp(steps) > 1e-6 * steps.max():
        raise UsageError("rates must increase by one factor, as numpy.geomspace makes them")
    reached = np.where(np.isfinite(losses), losses, np.inf)
    best = int(reached.argmin())
    if not np.isfinite(reached[best]):
        raise CertificateError(
            "training diverged at every rate: lower the rates", measured=float(rates[0]), threshold=math.inf
        )
    if best in (0, len(rates) - 1):
        side = "below" if best == 0 else "above"
        raise CertificateError(
            f"the least loss is at {rates[best]:.3g}, an end of the rates: the best one may lie {side} it, widen them",
            measured=float(rates[best]),
            threshold=float(rates[1 if best == 0 else -2]),
        )
    left, middle, right = reached[best - 1 : best + 2]
    bend = left - 2 * middle + right
    # Beside a diverged neighbour, or on a flat floor, the point itself is all that is known.
    shift = 0.5 * (left - right) / bend if np.isfinite(bend) and bend > 0 else 0.0
    return float(np.exp(np.log(rates[best]) + shift * steps[0]))


Losses = Callable[[Shape, np.ndarray, int], Any]  # (shape, rates, seed) -> (R,) final losses


def transfer_check(
    shapes: Sequence[Shape],
    rates: Any,
    losses: Losses,
    *,
    seeds: Sequence[int] = tuple(range(8)),
    allowed: float = ALLOWED_DECADES,
) -> TransferCheck:
    """Find the best learning rate of every shape and seed, and test whether it drifts.

    Parameters
    ----------
    shapes
        At least two, different along one axis only.
    rates
        (R,) learning rates of the base shape, equally spaced in the logarithm.
    losses
        Trains at all rates from one seed and returns the final losses: `lesson_losses`, or a function of your own.
    seeds
        At least two.
    allowed
        Drift in decades over a factor of eight in size that still counts as transfer.

    Raises
    ------
    UsageError
        Shapes along none or several axes, fewer than two seeds, rates that are no grid.
    CertificateError
        A best rate at an end of the grid.

    Examples
    --------
    >>> def losses(shape, rates, seed):
    ...     best = -2 - np.log10(shape.key_dim) + 0.01 * np.random.default_rng(seed).normal()
    ...     return (np.log10(rates) - best) ** 2
    >>> shapes = [Shape(4, 4, 2), Shape(8, 4, 2), Shape(32, 4, 2)]
    >>> print(transfer_check(shapes, np.geomspace(1e-5, 1e-1, 17), losses).sentence())
    drifts by a factor 0.50 [0.50, 0.50] per doubling of N
    """
    axis, sizes = find_axis(shapes)
    if len(seeds) < 2:
        raise UsageError(f"{len(seeds)} seeds: a check needs at least two, and eight to be sharp")
    grid = np.asarray(rates, np.float64)
    optima = np.array([[find_optimum(grid, losses(shape, grid, seed)) for shape in shapes] for seed in seeds])
    return judge_drift(axis, sizes, optima, allowed)


def judge_drift(
    axis: Axis, sizes: Sequence[int], optima: np.ndarray, allowed: float = ALLOWED_DECADES
) -> TransferCheck:
    """Test best rates (seeds, sizes), found already, for a drift along an axis."""
    drift = drift_test(sizes, optima, tolerance=allowed / math.log10(8))
    return TransferCheck(axis, tuple(sizes), optima, drift)

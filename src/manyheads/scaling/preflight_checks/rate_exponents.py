"""Exponent of the best learning rate in the batch size or the number of steps, measured on a user's training.

A batch size is a multiple of the user's: gradients of so many batches are averaged, and the number of samples stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from manyheads._namespaces import Floats
from manyheads.scaling.axes import TrainingAxis
from manyheads.scaling.checks.transfer_check import LAST, TransferCheck, optimum_inside
from manyheads.scaling.parametrization.training_rules import RATE, RULES
from manyheads.statistics.exponents import drift_test
from manyheads.statistics.verdicts import Outcome

KEPT = {"batch": "at a fixed number of samples", "steps": "at a fixed batch size"}
Train = Callable[[int, int, int, float], Sequence[float]]  # (seed, steps, batches of a step, factor) -> losses of steps


class RateExponent(TransferCheck):
    """The best learning rate as a power of the batch size or the number of steps: measured, neither right nor wrong.

    The interval is of the power law over these sizes; at other sizes the exponent may be another one.
    """

    @property
    def outcome(self) -> Outcome:
        """A measurement refutes nothing."""
        return "holds"

    def sentence(self) -> str:
        """Say it for people, with the rules whose exponents lie within the interval."""
        fit = self.drift.fit
        found = f"{self.axis}^{fit.exponent:.2f} [{fit.interval.low:.2f}, {fit.interval.high:.2f}]"
        size = "tokens" if self.axis == "steps" else "batch"
        ruled = {n: getattr(r, size) for n, r in RULES.items() if r.changes == RATE and not r.batch_of_tokens}
        powers = {"none": 0.0} | {name: power for name, power in ruled.items() if power}
        inside = [f"{name} ({power:g})" for name, power in powers.items() if fit.interval.contains(power)]
        bent = "; not one power over these sizes" if fit.p_fit is not None and fit.p_fit < 0.01 else ""
        return (
            f"measured: it goes as {found} {KEPT[self.axis]}, {len(self.learning_rates)} seeds{bent}; "
            f"rules within the interval: {', '.join(inside) or 'none of them'}"
        )

    @property
    def _title(self) -> str:
        return f"Best learning rate {KEPT[self.axis]}"


def search_exponent(
    axis: TrainingAxis, sizes: Sequence[int], factors: Floats, train: Train, seeds: Sequence[int], shortest: int
) -> RateExponent:
    """Find the best factor of the learning rates at every size and seed, and fit its power of the size.

    `shortest` is the least number of steps of a training. An optimum at an end of the widened grid is refused
    (`CertificateError`). One beside trainings that diverged is known as a point of the grid alone, and the interval
    then holds a step of the grid at every size.
    """

    def best(size: int, seed: int) -> float:
        steps, parts = (size, 1) if axis == "steps" else (shortest * max(sizes) // size, size)
        last = max(1, steps // LAST)

        def losses(grid: Floats) -> list[float]:
            return [float(np.mean(train(seed, steps, parts, float(factor))[-last:])) for factor in grid]

        return optimum_inside(factors, losses, 1, f"{axis} {size}, seed {seed}")

    optima = np.array([[best(size, seed) for size in sizes] for seed in seeds])
    ratio = factors[1] / factors[0]
    places = np.log(optima / factors[0]) / np.log(ratio)
    resolution = ratio**2 if np.isclose(places, np.round(places), atol=1e-9).any() else 1.0
    return RateExponent(axis, tuple(sizes), optima, drift_test(sizes, optima, tolerance=1.0, resolution=resolution))

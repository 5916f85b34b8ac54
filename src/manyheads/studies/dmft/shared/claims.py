"""Claims that several studies make: exponents of a size, distances of means, the caption of a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import xarray as xr

from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.statistics import Interval, replicates_to_decide
from manyheads.statistics.distances import SquaredDistance
from manyheads.study import Claim
from manyheads.study.claims import Measure
from manyheads.study.verdicts import LEVEL, Expected


def single_network_claim(text: str, measure: Measure, letter: str, sizes: Sequence[int]) -> Claim:
    """Claim that single networks approach a limit like the inverse root of a size."""
    bias = -finite_size_bias(sizes)
    return Claim(
        text,
        measure,
        quantity=f"exponent of {letter}",
        target=-0.5,
        tolerance=bias,
        basis=f"a correction 1 + {letter}^(-1/2) moves the exponent by {bias:.2f} over these sizes",
    )


def nearer_claim(text: str, measure: Measure) -> Claim:
    """Claim that one distance is smaller than another; measured is the logarithm of their ratio."""
    return Claim(
        text,
        measure,
        quantity="first over second distance (ln)",
        target=0.0,
        tolerance=(math.inf, 0.0),
        basis="the logarithm of a ratio of distances is negative where the first is the smaller one",
    )


def distance_claim(
    text: str,
    measure: Callable[[xr.Dataset, xr.Dataset], SquaredDistance],
    most: float,
    networks: int,
    *,
    basis: str,
    expected: Expected = "holds",
) -> Claim:
    """Claim that a distance of means is at most so large; `networks` are one replicate."""

    def measured(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
        found = measure(predicted, trained)
        needed = replicates_to_decide(found.first, 0.0, (math.inf, most**2), level=LEVEL, prediction_error=found.drawn)
        return found.distance, found.interval(), None if needed is None else -(-needed // networks)

    return Claim(
        text,
        measured,
        quantity="distance of the means",
        target=0.0,
        tolerance=(math.inf, most),
        basis=basis,
        expected=expected,
    )


def caption_claim(measure: Measure) -> Claim:
    """Claim what the caption of figure 2 says of the variance over heads; the exponent derived here is -1."""
    return Claim(
        "The variance of attention logits over heads scales as N^-2 after training (caption of figure 2)",
        measure,
        quantity="exponent of N",
        target=CAPTION,
        tolerance=0.5,
        basis="half way to N^-1, which is derived here",
        expected="refuted",
    )


CAPTION = -2.0
"""Exponent of N in the caption of figure 2b."""

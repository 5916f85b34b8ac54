"""Shapes of curves with autocorrelated noise: false rebounds of curves that level off, and what is found."""

from collections import Counter
from pathlib import Path

import numpy as np
from scipy.signal import lfilter
from tests.acceptance._lane import Figure, Measured

from manyheads.joma.curve_shapes import curve_shape

AUTOCORRELATIONS = (0.0, 0.5, 0.8)
NOISE, POINTS = 0.03, 59
LIMIT = 2 / 60  # false rebounds
# Shape → at least so many of 60 series, by autocorrelation: the power that the specification's prototype had.
POWER = {"rebounded": (60, 50, 21), "flat": (57, 57, 52), "falling": (27, 25, 16)}


def curves(t):
    return {
        "levelled off": 2.5 - (1 - np.exp(-t / 8)),
        "rebounded": 2.5 - (1 - np.exp(-t / 6)) + 0.2 * (1 - np.exp(-np.maximum(t - 15, 0) / 20)),
        "flat": np.full_like(t, 2.5),
        "falling": 2.5 - 0.6 * (1 - np.exp(-t / 4)) - 0.006 * t,
    }


def count_labels(series, autocorrelation, points, seed):
    """Return how often each label is given to each curve."""
    rng = np.random.default_rng([seed, points, round(100 * autocorrelation)])
    t = np.arange(points) * (POINTS / points)
    found = {name: Counter() for name in curves(t)}
    for _ in range(series):
        for name, curve in curves(t).items():
            innovations = NOISE * rng.standard_normal(points)
            innovations[0] /= np.sqrt(1 - autocorrelation**2)
            noisy = curve + lfilter([1.0], [1.0, -autocorrelation], innovations)
            found[name][curve_shape(noisy).label] += 1
    return found


def shapes(folder: Path, series: int, few: int, seed: int) -> Measured:
    """Classify series of known shape; counts are stated of 60."""
    counts = [count_labels(series, each, POINTS, seed) for each in AUTOCORRELATIONS]
    short = [count_labels(series, each, few, seed) for each in AUTOCORRELATIONS]
    false = [_share(each, "levelled off", "rebounded") for each in counts]
    power = {name: [_share(each, name, name) for each in counts] for name in POWER}
    false_short = [_share(each, "levelled off", "rebounded") for each in short]
    from_flat = [_share(each, "flat", "rebounded") for each in counts]
    enough = [
        found + 2 * np.sqrt(found * (1 - found) / series) >= least / 60
        for name, all_least in POWER.items()
        for found, least in zip(power[name], all_least, strict=True)
    ]
    extent = "; ".join(f"{name} {_of_60(found)} (at least {_plain(POWER[name])})" for name, found in power.items())
    extent += f"; false rebounds of flat curves {_of_60(from_flat)}, with {few} points {_of_60(false_short)}"
    extent += f"; {series} series of {POINTS} points each, counts of 60"
    passed = max(*false, *from_flat) <= LIMIT and all(enough)
    return Measured(f"false rebounds {_of_60(false)} of 60 at rho 0, .5, .8", extent, str(seed), bool(passed))


def _share(counts, curve, label):
    return counts[curve][label] / counts[curve].total()


def _of_60(shares):
    return ", ".join(f"{60 * share:.1f}" for share in shares)


def _plain(numbers):
    return ", ".join(map(str, numbers))


FIGURES = [
    Figure(
        "shapes",
        "the shape of a curve is told beyond its autocorrelated noise",
        "at most 2 of 60 false rebounds at autocorrelation 0, .5 and .8; power within two standard errors of the "
        "prototype's or more",
        shapes,
        {"series": 600, "few": 30, "seed": 0},
    ),
]

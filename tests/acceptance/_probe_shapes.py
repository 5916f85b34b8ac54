"""Shapes of curves: wrong answers over shapes, time scales, spacing, lengths and noise; power on four curves."""

from collections import Counter
from pathlib import Path

import numpy as np
from scipy.signal import lfilter
from tests.acceptance._lane import Figure, Measured

from manyheads.curves.curve_shapes import curve_shape

AUTOCORRELATIONS = (0.0, 0.5, 0.8)
NOISE, POINTS = 0.03, 59
LIMIT = 2 / 60  # false rebounds
TRUE = {"flat": "", "falling": "-", "levelled off": "-", "rising": "+", "rebounded": "-+", "rose and fell": "+-"}
KINDS = ("", "-", "+", "-+", "+-", "?")
AMPLITUDES = (10, 1000)  # of a move of one over the standard deviation of the noise, log-uniform


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


def draw_curve(kind, u, rng):
    """Return a curve of some moves over times u, of exponentials, sigmoids or lines of random time scales.

    A first move of one takes from .3 of an interval to all of the time.
    """
    last, interval = u[-1], u[-1] / (len(u) - 1)

    def between(low, high):
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    def relax(time):
        return 1 - np.exp(-u / time)

    def step(center, time):
        return 1 / (1 + np.exp(-np.clip((u - center) / time, -500, 500)))

    form = rng.integers(3)
    if kind == "?":
        return rng.choice([-1, 1]) * np.cos(np.pi * rng.integers(3, 5) * u / last * 0.999)
    if kind in ("-", "+"):
        if form == 0:
            found = relax(between(0.3 * interval, 3 * last))
        elif form == 1:
            found = step(rng.uniform(0.1, 0.9) * last, between(0.3 * interval, last / 6))
        else:
            found = np.minimum(u / last / between(0.05, 1), 1)
        return (found if kind == "+" else -found) / np.ptp(found)
    back = between(0.15, 2)
    if form == 0:
        quick = between(0.3 * interval, last / 10)
        found = relax(quick) - back * relax(between(4 * quick, last))
    elif form == 1:
        first = rng.uniform(0.1, 0.5)
        second = rng.uniform(first + 0.2, 0.9)
        found = step(first * last, between(0.3 * interval, last / 15))
        found = found - back * step(second * last, between(0.3 * interval, last / 15))
    else:
        turn = rng.uniform(0.02, 0.8) * last
        found = np.where(u < turn, u / turn, 1 - back * (u - turn) / (last - turn))
    return (found if kind == "+-" else -found) if kind else 0 * u


def moves_of(curve, size):
    """Return the alternating moves beyond a size of a curve without noise."""
    low = high = curve[0]
    found = ""
    for value in curve:
        low, high = min(low, value), max(high, value)
        if found[-1:] != "+" and value - low > size:
            found, high = found + "+", value
        elif found[-1:] != "-" and high - value > size:
            found, low = found + "-", value
    return found


def draw_noise(t, even, rho, rng):
    """Draw noise of unit variance: AR(1) over samples, or at unequal intervals an Ornstein-Uhlenbeck process."""
    found = rng.standard_normal(len(t))
    if rho:
        gaps = np.ones(len(t) - 1) if even else np.diff(t) / np.median(np.diff(t))
        for place, kept in enumerate(rho**gaps):
            found[place + 1] = kept * found[place] + np.sqrt(1 - kept**2) * found[place + 1]
    return found


def confuse(series, lengths, spacings, autocorrelations, seed):
    """Return how often which moves are called which, of curves whose moves are all beyond 8 standard deviations.

    Moves between half of one and 8 are drawn anew: there a shape is a matter of what is asked.
    """
    counts = Counter()
    for n in lengths:
        for spacing in spacings:
            for rho in autocorrelations:
                rng = np.random.default_rng([seed, n, spacing == "linear", round(100 * rho)])
                for kind in KINDS:
                    done = 0
                    while done < series:
                        even = spacing == "linear"
                        t = np.arange(n) * 1.0 if even else np.r_[0, np.geomspace(1, 10 ** rng.uniform(3, 5), n - 1)]
                        curve = draw_curve(kind, t if even else np.log1p(t), rng)
                        std = float(np.exp(-rng.uniform(*np.log(AMPLITUDES))))
                        true = moves_of(curve, 8 * std)
                        if true != moves_of(curve, std / 2):
                            continue
                        done += 1
                        label = curve_shape(curve + std * draw_noise(t, even, rho, rng), even=even).label
                        large = moves_of(curve, np.ptp(curve) / 4) if len(true) > 2 else true
                        counts[true if len(true) < 3 else "?", outcome(label, {true, large})] += 1
    return counts


def outcome(label, true):
    """Return "right", "undecided" or the wrong label; three moves and more are of no single shape."""
    if label == "undecided":
        return label
    named = {"?" if len(moves) > 2 else moves for moves in true}
    return "right" if TRUE.get(label, "?") in named else label


def shapes(folder: Path, series: int, few: int, seed: int, grid: int, lengths: list[int]) -> Measured:
    """Classify series of known shape; counts are stated of 60."""
    counts = [count_labels(series, each, POINTS, seed) for each in AUTOCORRELATIONS]
    short = [count_labels(series, each, few, seed) for each in AUTOCORRELATIONS]
    false = [_share(each, "levelled off", "rebounded") for each in counts]
    from_flat = [_share(each, "flat", "rebounded") for each in counts]
    power = {name: _of_60([_share(each, name, name) for each in counts]) for name in ("rebounded", "flat", "falling")}
    false_short = [_share(each, "levelled off", "rebounded") for each in short]
    table = confuse(grid, lengths, ("linear", "logarithmic"), AUTOCORRELATIONS, seed)
    wrong = {pair: count for pair, count in table.items() if pair[1] not in ("right", "undecided")}
    undecided = sum(count for (_, found), count in table.items() if found == "undecided")
    extent = f"{undecided} undecided; wrong: {wrong or 'none'}; n = {lengths}, linear and logarithmic spacing; of 60: "
    extent += "; ".join(f"{name} {found}" for name, found in power.items())
    extent += f"; false rebounds {_of_60(false)}, of flat curves {_of_60(from_flat)}, with {few} points "
    extent += f"{_of_60(false_short)}; rho 0, .5, .8"
    passed = sum(wrong.values()) <= sum(table.values()) / 500 and max(*false, *from_flat) <= LIMIT
    return Measured(f"{sum(wrong.values())} of {sum(table.values())} curves wrong", extent, str(seed), bool(passed))


def _share(counts, curve, label):
    return counts[curve][label] / counts[curve].total()


def _of_60(shares):
    return ", ".join(f"{60 * share:.1f}" for share in shares)


FIGURES = [
    Figure(
        "shapes",
        "the shape of a curve is told beyond its autocorrelated noise, or undecided",
        "at most one of 500 curves wrong, over every shape, time scales from .3 intervals, spacing and noise; at most "
        "2 of 60 false rebounds of curves that level off",
        shapes,
        {"series": 300, "few": 30, "seed": 0, "grid": 40, "lengths": [20, 30, 60, 150, 400]},
    ),
]

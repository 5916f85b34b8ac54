r"""Shape of a recorded curve: flat, falling, levelled off, rebounded, rising, rose and fell, beyond its own noise.

No form is assumed of the curve: it moves between two blocks of samples if their means differ by more than noise does,

.. math:: |\bar y_J - \bar y_I| > s \sqrt{q + 2\ln(n/|I|) + 2\ln(n/|J|)}\; \sqrt{v_{|I|} + v_{|J|}}, \qquad I < J,

where v are the variances of means of AR(1) noise of the estimated autocorrelation and unit variance. Blocks are the
first sample, the last one, and any of two and more: a drop between the first two samples is a drop, an outlier is none.
The shape is the longest alternating sequence of falls and rises, each from where the one before it ended. The level q
is a quantile of pure noise whose autocorrelation and standard deviation s are estimated as those of the curve. A shape
is stated if a strict and a lenient level agree on it; otherwise it is "undecided". Wrong answers are counted in
`python -m tests.acceptance probe shapes`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.signal import lfilter

from manyheads._arrays import takes_arrays
from manyheads._extras import ArrayLike, Float
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError

Label = Literal[
    "flat", "falling", "levelled off", "rebounded", "rising", "rose and fell", "no single shape", "undecided"
]

LEAST = 20  # points of a curve
RHOS = np.arange(0, 0.951, 0.05)  # estimates of the autocorrelation rho are rounded
DEGREE, QUICK = 6, (0.4, 1.5, 4.0)  # the trend: of polynomials, and time constants of exponentials in samples
# Differences of these orders bound the noise if rho is at most RHOS[BOUND], whatever the trend.
ORDERS, BOUND = (2, 3, 4, 5, 6), 16
# Chance that pure noise moves: for a move to count, for one to be ruled out beside a single one, and otherwise. Rho may
# be larger than estimated by MARGIN / n (1 + 10 / n).
STRICT, LENIENT, STILL, MARGIN = 0.003, 0.15, 0.05, 8.0
# At unequal intervals: chance that white noise makes a move that contradicts a single one, or another shape.
RIVAL, PLAIN = 0.5, 1e-3
# At unequal intervals the autocorrelation is not known: moves of fewer standard deviations are not stated, but leave a
# shape without them undecided. Of three moves or more those that are less than this and LEAST_PART of the range go.
LARGE, LEAST_PART = 4.5, 0.25
RESTING = 0.05  # of the range: the most by which the last third of a curve that levelled off may fall
OUTLIER = 3.0  # standard deviations by which a sample may lie beyond both neighbours
ROUNDING = 1e-14
NAMES: dict[str, Label] = {"": "flat", "-": "falling", "+": "rising", "-+": "rebounded", "+-": "rose and fell"}


class CurveShape(NamedTuple):
    """Shape of one curve.

    "levelled off": fell, and in its last third by less than a twentieth of its range; "rebounded": down and up again;
    "no single shape": three moves or more; "undecided": the samples do not determine it.
    """

    label: Label
    drop: float  # first value above the minimum, of the best fit that falls and then rises (isotonic regression)
    rise: float  # and last value above it
    lowest: int  # index of that minimum
    autocorrelation: float  # estimated rho between samples
    noise: float  # its standard deviation


@takes_arrays
def curve_shape(curve: Float[ArrayLike, " time"], *, even: bool = True) -> CurveShape:
    """Tell the shape of a curve as it is sampled: at least 20 finite values, in the order of time.

    Unless they lie at `even` intervals, only moves of 4.5 standard deviations count, and smaller ones beyond noise
    leave the shape undecided.

    Raises `ShapeError` or `UsageError`: fewer values, or values that are not finite.

    Examples
    --------
    >>> t = np.arange(60)
    >>> noise = 0.02 * np.random.default_rng(0).standard_normal(60)
    >>> curve_shape(1.5 + np.exp(-t / 6) + noise).label
    'levelled off'
    >>> curve_shape(1.5 + np.exp(-t / 1.5) + 0.6 * (1 - np.exp(-t / 30)) + noise).label
    'rebounded'
    """
    values = np.asarray(curve, np.float64)
    if values.ndim != 1 or len(values) < LEAST:
        raise ShapeError(f"curve of shape {values.shape}: expected at least {LEAST} values along time")
    if not np.isfinite(values).all():
        broken = int(np.argmin(np.isfinite(values)))
        raise UsageError(f"value {broken} of the curve is not finite: cut the curve before it")
    scale = float(np.abs(values).max()) or 1.0
    y = values / scale  # neither squares nor sums overflow
    y = y - y.mean()
    estimated = _estimate_noise(y)
    place, noise = int(estimated[0]), float(estimated[1])
    moves = _Moves(y, place, max(noise, ROUNDING), even)
    return CurveShape(moves.label(), *_drop_and_rise(y, scale), float(RHOS[place]), noise * scale)


def shape_at(values: Floats, steps: NDArray[np.number]) -> CurveShape | None:
    """Return the shape of a curve at some steps; None if they are fewer than `LEAST`, or not all values finite."""
    if len(values) < LEAST or not np.isfinite(values).all():
        return None
    return curve_shape(values, even=most_frequent_interval(steps) >= len(steps) - 3)  # the ends may be odd


def most_frequent_interval(steps: NDArray[np.number]) -> int:
    """Return how many intervals between steps are as long as most are."""
    return max(Counter(np.diff(steps).tolist()).values(), default=0)


class _Moves:
    """Alternating falls and rises of a curve beyond its noise."""

    def __init__(self, y: Floats, place: int, noise: float, even: bool) -> None:
        self.y, self.noise, self.even = y, noise, even
        self.means = _block_means(_clip_outliers(y, OUTLIER * noise))
        self.variances = {length: each[place] for length, each in _variances(len(y)).items()}
        margin = round(MARGIN / len(y) * (1 + 10 / len(y)) / RHOS[1])
        self.null = max(place, min(place + margin, BOUND + 1))

    def label(self) -> Label:
        """Return the shape on which both levels agree, and white noise at unequal intervals as well."""
        found = self._moves_at(STRICT)
        if found != self._moves_at(LENIENT if len(found) == 1 else STILL):
            return "undecided"
        if not self.even and found != "?":  # autocorrelation may hide moves, though it is not known
            plain = _Moves(self.y, 0, self._white_noise(), True)._moves_at(RIVAL if len(found) == 1 else PLAIN)
            if plain not in found:
                return "undecided"
        if self._exceeds_ends(found) if found in ("-", "+") else not found and not self._is_flat():
            return "undecided"
        if found == "-" and self._has_levelled_off():
            return "levelled off"
        return NAMES.get(found, "no single shape")

    def _exceeds_ends(self, move: str) -> bool:
        """Return whether single samples of a curve that only falls ("-") or rises lie beyond its ends."""
        y, n = (-self.y if move == "-" else self.y), len(self.y)
        extreme = (math.sqrt(2 * math.log(n)) + 2) * self._white_noise()
        return bool(max(y[0] - y.min(), y.max() - y[-1]) > extreme)

    def _white_noise(self) -> float:
        """Return the standard deviation of the noise if it is not autocorrelated."""
        plain = float(np.median(np.abs(np.diff(self.y, 2)))) / 0.6745 / math.sqrt(6)
        return max(min(plain, self.noise), ROUNDING)

    def _is_flat(self) -> bool:
        """Return whether the range is that of noise, and the samples neither a smooth curve nor a random walk."""
        y, n, spread = self.y, len(self.y), float(np.ptp(self.y))
        if spread <= 10 * ROUNDING or spread > (2 * math.sqrt(2 * math.log(n)) + 0.3) * self.noise:
            return spread <= 10 * ROUNDING
        one, two = (float(np.mean((y[lag:] - y[:-lag]) ** 2)) for lag in (1, 2))
        rho = y[1:] @ y[:-1] / (y @ y)
        return bool(two <= 2.2 * one and rho + (1 + 3 * rho) / n <= 0.9)

    def _has_levelled_off(self) -> bool:
        """Return whether the last third does not fall beyond noise, nor, at two standard errors, by much."""
        third = len(self.y) // 3
        half = 2 ** ((third // 2).bit_length() - 1)
        means, error = self.means[half], self.noise * math.sqrt(2 * self.variances[half])
        small = means[-2 * half] - means[-1] + 2 * error <= RESTING * np.ptp(self.y)
        return bool(small) and self._first_move(self._level(LENIENT), 0.0, -1, len(self.y) - third) is None

    def _moves_at(self, chance: float) -> str:
        """Return the moves, "-" or "+" each; of three or more, the two that are left without the small ones."""
        large = LARGE * self.noise
        size = 0.0 if self.even or chance != STRICT else large
        found = self._sequence(chance, size)
        if len(found) < 3:
            return found
        found = self._sequence(chance, max(size, min(large, LEAST_PART * float(np.ptp(self.y)))))
        return found if len(found) == 2 else "?"

    def _sequence(self, chance: float, size: float) -> str:
        """Return the longest alternating sequence of moves; "?" where two are."""
        level, found = self._level(chance), []
        for sign in (-1, 1):
            moves, start = "", 0
            while (begin := self._first_move(level, size, sign, start)) is not None:
                moves, start, sign = moves + "-+"[sign > 0], begin, -sign
            found.append(moves)
        falls, rises = found
        return max(found, key=len) if len(falls) != len(rises) else "???" if falls else ""

    def _first_move(self, level: float, size: float, sign: int, start: int) -> int | None:
        """Return where the block begins in which the first move that starts at a sample or later has ended."""
        n, first = len(self.y), None
        for before, lows in self.means.items():
            if before == 1 and start:
                continue
            lowest = _running_minimum(sign * lows[start:], before)
            for after, means in self.means.items():
                rises = sign * means[start + before :]
                standard = math.sqrt(self.variances[before] + self.variances[after])
                least = math.sqrt(max(level + _penalty(n, before, after), 1.0)) * standard * self.noise
                above = rises - lowest[: len(rises)] > max(least, size)
                if after == 1:
                    above[:-1] = False
                if above.any():
                    begin = start + before + int(above.argmax())
                    first = min(first or (n + 1, 0), (begin + after, begin))
        return None if first is None else first[1]

    def _level(self, chance: float) -> float:
        """Return the level that pure noise exceeds with a chance, by an exponential tail beyond its upper tenth."""
        tenth, slope = _tail_of_moves(len(self.y), self.null)
        return tenth + slope * math.log(0.1 / chance)


def _clip_outliers(y: Floats, most: float) -> Floats:
    """Clip samples that lie beyond both neighbours by more than a size."""
    neighbours = np.stack([y[:-2], y[2:]])
    clipped = np.clip(y[1:-1], neighbours.min(0) - most, neighbours.max(0) + most)
    return np.concatenate([y[:1], clipped, y[-1:]])


def _drop_and_rise(y: Floats, scale: float) -> tuple[float, float, int]:
    """Return drop, rise and place of the minimum of the best fit that falls and then rises."""
    best = (math.inf, 0.0, 0.0, 0)
    for place in np.argsort(y, kind="stable")[:32].tolist():  # the minimum of the best fit is one of the least values
        left, right = isotonic_regression(y[: place + 1], increasing=False).x, isotonic_regression(y[place:]).x
        loss = float(((y[: place + 1] - left) ** 2).sum() + ((y[place:] - right) ** 2).sum())
        best = min(best, (loss, float(left[0] - left[-1]), float(right[-1] - right[0]), place))
    return best[1] * scale, best[2] * scale, best[3]


def _estimate_noise(curves: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Estimate place of rho and standard deviation of noise, (...), of curves (..., n).

    From the residuals of a trend, by moments; or a bound from differences where that is less, as for a trend of another
    form. Jumps do not move the medians of differences.
    """
    basis, moments = _trend(curves.shape[-1])
    residual = curves - (curves @ basis) @ basis.T
    square = (residual**2).sum(-1)
    lag = (residual[..., 1:] * residual[..., :-1]).sum(-1) / np.maximum(square, 1e-300)
    place = np.abs(moments[:, 1] / moments[:, 0] - lag[..., None]).argmin(-1)
    std = np.sqrt(square / moments[place, 0])
    bounds = [np.median(np.abs(np.diff(curves, p)), -1) / 0.6745 / _difference_std(p) for p in ORDERS]
    bound = np.min(bounds, axis=0)
    return np.where(bound < std, BOUND, place), np.minimum(bound, std)


@functools.cache
def _difference_std(order: int) -> float:
    """Return the standard deviation of differences of AR(1) noise of unit variance with the largest rho."""
    weights = np.diff(np.eye(order + 1), order)[:, 0]
    lags = np.abs(np.subtract.outer(np.arange(order + 1), np.arange(order + 1)))
    return math.sqrt(weights @ RHOS[BOUND] ** lags @ weights)


@functools.lru_cache(16)
def _trend(n: int) -> tuple[Floats, Floats]:
    """Return an orthonormal basis of trends (n, m), and what is expected of residuals of unit noise, (rhos, 2).

    The sum of squares of M y and that of products of neighbours, M = 1 - Q Q^T, for AR(1) noise y.
    """
    polynomials = np.polynomial.legendre.legvander(np.linspace(-1, 1, n), min(DEGREE, n // 10 + 1))
    quick = np.exp(-np.arange(n)[:, None] / np.array(QUICK))
    basis = np.linalg.qr(np.hstack([polynomials, quick]))[0]
    shifted = np.zeros_like(basis)
    shifted[:-1] += basis[1:] / 2
    shifted[1:] += basis[:-1] / 2
    moments = []
    for rho in RHOS:
        forward = lfilter([1.0], [1.0, -rho], basis, axis=0)
        covariance = forward + lfilter([1.0], [1.0, -rho], basis[::-1], axis=0)[::-1] - basis  # times the basis
        inner = basis.T @ covariance
        products = (n - 1) * rho - 2 * np.sum(shifted * covariance) + np.sum((basis.T @ shifted) * inner)
        moments.append((n - np.trace(inner), products))
    return basis, np.array(moments)


def _lengths(n: int) -> list[int]:
    """Return the lengths of blocks: powers of two up to half of the curve."""
    return [2**power for power in range((n // 2).bit_length())]


def _penalty(n: int, before: int, after: int) -> float:
    return 2 * math.log(n / before) + 2 * math.log(n / after)


def _block_means(curves: Floats) -> dict[int, Floats]:
    """Return the means of all blocks of each length, along the last axis."""
    n = curves.shape[-1]
    sums = np.concatenate([np.zeros((*curves.shape[:-1], 1)), np.cumsum(curves, -1)], -1)
    return {length: (sums[..., length:] - sums[..., :-length]) / length for length in _lengths(n)}


def _running_minimum(means: Floats, length: int) -> Floats:
    """Return the least mean of the blocks up to each; of single samples the first alone, as others may be outliers."""
    return np.minimum.accumulate(means, -1) if length > 1 else np.broadcast_to(means[..., :1], means.shape)


@functools.lru_cache(16)
def _variances(n: int) -> dict[int, Floats]:
    """Return the variance of the mean of a block of AR(1) noise of unit variance, by length, for every rho."""
    found = {}
    for length in _lengths(n):
        lags = np.arange(1, length)
        found[length] = (1 + 2 * ((1 - lags / length) * RHOS[:, None] ** lags).sum(1)) / length
    return found


@functools.lru_cache(256)
def _tail_of_moves(n: int, place: int) -> tuple[float, float]:
    """Return upper tenth and exponential slope of the largest move of pure noise, less the penalty of its lengths."""
    rho, draws = RHOS[place], int(np.clip(200_000 / n, 200, 1000))
    innovations = np.random.default_rng([n, place]).standard_normal((draws, n))
    innovations[:, 0] /= np.sqrt(1 - rho**2)
    curves = lfilter([1.0], [1.0, -rho], innovations, axis=-1)
    estimated, noise = _estimate_noise(curves)
    means, variances = _block_means(curves), _variances(n)
    largest = np.full(draws, -np.inf)
    for sign in (1, -1):
        for before in means:
            lowest = _running_minimum(sign * means[before], before)
            for after in means:
                rises = sign * means[after][:, before:]
                rises = (rises - lowest[:, : rises.shape[1]])[:, 0 if after > 1 else -1 :]
                rise = rises.max(1, initial=0) / noise
                standard = rise / np.sqrt(variances[before] + variances[after])[estimated]
                largest = np.maximum(largest, standard**2 - _penalty(n, before, after))
    tenth, less = np.quantile(largest, [0.9, 0.975])
    return float(tenth), float(less - tenth) / math.log(4)

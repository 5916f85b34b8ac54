r"""Shape of a recorded curve: flat, falling, levelled off, rebounded or rising, beyond its own autocorrelated noise.

Every coordinate of the theory relaxes exponentially, so that a curve is modelled as

.. math:: y_t = c + \sum_k a_k e^{-t/\tau_k} + \epsilon_t, \qquad \epsilon_t = \rho\,\epsilon_{t-1} + \text{noise},

with time constants from 1.5 intervals to three times the length of the curve. A curve that only falls has all
:math:`a_k \ge 0`; one that falls and then rises has :math:`a_k \ge 0` for the quick exponentials and :math:`a_k \le 0`
for the slow ones. "It only falls" is tested against "it falls and then rises" by the relative difference of their
squared residuals after whitening, "it only rises" by the same test of -y. Quantiles are those of pure noise of the
estimated :math:`\rho`, in which :math:`\rho` is estimated anew; false rebounds and power were measured on curves of
known shape (`ACCEPTANCE.md`, row shapes). Derived here; the paper shows curves.
"""

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float
from numpy.typing import NDArray
from scipy.signal import lfilter

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Label = Literal["flat", "falling", "levelled off", "rebounded", "rising", "no single shape", "undecided"]

LEAST = 20  # points of a curve
ATOMS, SLOWEST = 7, 3.0  # exponentials, and the largest time constant over the length of the curve
ACTIVE = 3  # exponentials in one fit: more never pay, because their shapes are close
RHO_STEP, RHO_MOST = 0.05, 0.95  # estimates of rho are rounded
# Nominal levels. Where noise is strongly autocorrelated, rho is estimated too low: with this level 2 of 60 curves that
# level off are called rebounded at rho = 0.8, and fewer below.
LEVEL, TREND_LEVEL = 0.0015, 0.05
DRAWS = 1999
ROUNDING = 1e-14  # relative error of sums of squares
WANDERING = 4.0  # standard deviations of the noise between the ends and the minimum of a flat curve, at most


class CurveShape(NamedTuple):
    """Shape of one curve.

    Attributes
    ----------
    label
        "flat"; "falling" to the end; "levelled off" after a fall; "rebounded": down and up again; "rising"; "no single
        shape": it moves otherwise, such as up and down; "undecided": it moves, and may be a random walk.
    drop, rise
        First and last value above the minimum, of the best fit that falls and then rises.
    lowest
        Index of that minimum.
    p_falls, p_rises
        Nominal p-values of "it only falls" and "it only rises".
    autocorrelation, noise
        Estimated rho, and standard deviation of the innovations.
    """

    label: Label
    drop: float
    rise: float
    lowest: int
    p_falls: float
    p_rises: float
    autocorrelation: float
    noise: float


@takes_arrays
def curve_shape(curve: Float[ArrayLike, " time"]) -> CurveShape:
    """Tell the shape of a curve at equal intervals of time.

    Parameters
    ----------
    curve
        At least 20 finite values.

    Raises
    ------
    ShapeError, UsageError
        Fewer values, or values that are not finite.

    Examples
    --------
    >>> t = np.arange(60)
    >>> noise = 0.02 * np.random.default_rng(0).standard_normal(60)
    >>> curve_shape(1.5 + np.exp(-t / 6) + noise).label
    'levelled off'
    >>> curve_shape(1.5 + np.exp(-t / 6) + 0.3 * (1 - np.exp(-t / 20)) + noise).label
    'rebounded'
    """
    values = np.asarray(curve, np.float64)
    if values.ndim != 1 or len(values) < LEAST:
        raise ShapeError(f"curve of shape {values.shape}: expected at least {LEAST} values along time")
    if not np.isfinite(values).all():
        raise UsageError("the curve holds values that are not finite: cut it before the first of them")
    if np.ptp(values) == 0:
        return CurveShape("flat", 0.0, 0.0, 0, 1.0, 1.0, 0.0, 0.0)
    fits = _fits(len(values))
    both = fits.fit(np.stack([values, -values]))
    p_falls, p_rises = map(float, fits.tail(both.statistic, both.place))
    fitted, noise = both.fitted[0], float(both.noise[0])
    lowest = int(fitted.argmin())
    drop, rise = (float(fitted[end] - fitted[lowest]) for end in (0, -1))
    rho = float(fits.rhos[both.place[0]])
    # A curve whose values nowhere rise falls, whatever a fit with few exponentials makes of it, and the other way.
    rises = p_falls <= LEVEL and (values - np.minimum.accumulate(values)).max() > noise
    falls = p_rises <= LEVEL and (np.maximum.accumulate(values) - values).max() > both.noise[1]
    label: Label = "flat" if max(drop, rise) <= WANDERING * noise / np.sqrt(1 - rho**2) else "undecided"
    if rises and falls:
        label = "rebounded" if both.loss[0] <= both.loss[1] and min(drop, rise) > noise else "no single shape"
    elif falls:
        label = "falling" if _p_rests(values[-max(8, len(values) // 3) :]) <= TREND_LEVEL else "levelled off"
    elif rises:
        label = "rising"
    return CurveShape(label, drop, rise, lowest, p_falls, p_rises, rho, noise)


def equal_intervals(steps: NDArray[Any]) -> list[int]:
    """Return the places of the longest chain of steps at equal intervals that ends at one of the last two.

    Examples
    --------
    >>> equal_intervals(np.array([0, 1, 2, 4, 8, 10, 20, 30, 40, 43]))
    [0, 5, 6, 7, 8]
    """
    places = {int(step): place for place, step in enumerate(steps)}
    best: list[int] = list(range(len(steps)))[-1:]
    for interval in np.unique(np.diff(steps)):
        for end in map(int, steps[-2:]):
            chain = []
            while end in places:
                chain.append(places[end])
                end -= int(interval)
            best = max(best, chain[::-1], key=len)
    return best


def shape_at(values: Array, places: list[int]) -> CurveShape | None:
    """Return the shape of the values at some places; None if they are fewer than `LEAST`, or not all finite."""
    chosen = values[places]
    if len(chosen) < LEAST or not np.isfinite(chosen).all():
        return None
    found = curve_shape(chosen)
    return found._replace(lowest=places[found.lowest])


class _Fitted(NamedTuple):
    """Fits of curves (B, n) that fall and then rise.

    Attributes
    ----------
    statistic
        Squared residual of the best fit that only falls over that of the best one, minus 1, (B,).
    place
        Index of the estimated rho, (B,).
    fitted, loss, noise
        The best fit (B, n), its squared residual and the standard deviation of its innovations, (B,).
    """

    statistic: Array
    place: Indices
    fitted: Array
    loss: Array
    noise: Array


class _Fits:
    """Least-squares fits of curves of n points by a constant and exponentials, or a straight line, for every rho.

    With the whitened design QR, the squared residual of coefficients (c, a) exceeds that of the free fit by
    |z - R (c, a)|^2, z = Q^T y. The free c removes the first row. What remains is small: the best coefficients of given
    signs are those of the subset whose own least-squares fit has these signs and explains most.
    """

    def __init__(self, n: int, atoms: int) -> None:
        t = np.linspace(0, 1, n)[:, None]
        shapes = -t if atoms == 1 else np.exp(-t / np.geomspace(1.5 / n, SLOWEST, atoms))
        shapes = shapes - shapes.mean(axis=0)
        self.design = np.hstack([np.ones((n, 1)), shapes / shapes.std(axis=0)])
        self.basis = np.linalg.qr(self.design)[0]
        self.rhos = np.arange(0, RHO_MOST + RHO_STEP / 2, RHO_STEP)
        self.q, self.r = np.linalg.qr(_whiten(self.design.T, self.rhos[:, None, None]).swapaxes(1, 2))
        subsets = (np.arange(2**atoms)[:, None] >> np.arange(atoms)) & 1
        subsets = subsets[subsets.sum(axis=1) <= ACTIVE]
        inner = self.r[:, None, 1:, 1:] * subsets[:, None]
        self.solve = np.linalg.pinv(inner) * subsets[:, :, None]  # (rhos, subsets, atoms, atoms), zeros exactly
        self.project = inner @ self.solve
        # The first row: all fall. The others: the quick ones fall, the slow ones rise; of a single one either.
        falls = [[1] * quick + [-1] * (atoms - quick) for quick in range(atoms, 0, -1)]
        self.signs = np.array(falls if atoms > 1 else [[-1], [1]])
        self._null: dict[int, Array] = {}

    def fit(self, curves: Array) -> _Fitted:
        """Fit curves (B, n)."""
        n, count = self.design.shape
        place, rows = self._estimate_rho(curves), np.arange(len(curves))
        white = _whiten(curves, self.rhos[place][:, None])
        z = np.einsum("bnm,bn->bm", self.q[place], white)
        inner = z[:, 1:]
        square = (white**2).sum(-1)
        free = np.maximum(square - (z**2).sum(-1), ROUNDING * square + 1e-300)
        a = np.einsum("bsij,bj->bsi", self.solve[place], inner)
        explained = np.einsum("bsij,bi,bj->bs", self.project[place], inner, inner)
        allowed = (a[:, None] * self.signs[:, None] >= 0).all(-1)  # (B, signs, subsets)
        most = np.where(allowed, explained[:, None], -np.inf)
        loss = np.maximum(free + (inner**2).sum(-1) - most.max(axis=(1, 2)), free)
        a = a[rows, most.max(axis=1).argmax(axis=1)]
        r = self.r[place]
        c = (z[:, 0] - (r[:, 0, 1:] * a).sum(-1)) / r[:, 0, 0]
        only = np.maximum(free + (inner**2).sum(-1) - most[:, 0].max(axis=1), free)
        fitted = np.hstack([c[:, None], a]) @ self.design.T
        return _Fitted(only / loss - 1, place, fitted, loss, np.sqrt(loss / max(n - count, 1)))

    def tail(self, statistic: Array, place: Indices) -> Array:
        """Return the chance that pure noise of the estimated rho gives as large a statistic, (B,)."""
        found = zip(statistic, place.tolist(), strict=True)
        above = np.array([DRAWS - np.searchsorted(self._quantiles(rho), value) for value, rho in found])
        return (1 + above) / (DRAWS + 1)

    def _quantiles(self, place: int) -> Array:
        """Return sorted statistics of pure noise; they depend on nothing but n and rho."""
        if place not in self._null:
            rho = self.rhos[place]
            noise = np.random.default_rng([len(self.design), place]).standard_normal((DRAWS, len(self.design)))
            noise[:, 0] /= np.sqrt(1 - rho**2)
            self._null[place] = np.sort(self.fit(lfilter([1.0], [1.0, -rho], noise, axis=-1)).statistic)
        return self._null[place]

    def _estimate_rho(self, curves: Array) -> Indices:
        """Estimate rho of each curve from the residuals of ordinary least squares, corrected for their number."""
        n, count = self.design.shape
        residual = curves - (curves @ self.basis) @ self.basis.T
        lag = (residual[:, 1:] * residual[:, :-1]).sum(-1) / np.maximum((residual**2).sum(-1), 1e-300)
        corrected = lag + (1 + count / 2 + 3 * lag) / n
        return np.rint(np.clip(corrected, 0, RHO_MOST) / RHO_STEP).astype(int)


@functools.lru_cache(8)
def _fits(n: int, atoms: int = ATOMS) -> _Fits:
    return _Fits(n, atoms)


def _whiten(curves: Array, rho: Array) -> Array:
    """Remove autocorrelation along the last axis: y_t - rho y_{t-1}, and sqrt(1 - rho^2) y_0."""
    first = np.sqrt(1 - rho**2) * curves[..., :1]
    return np.concatenate([first, curves[..., 1:] - rho * curves[..., :-1]], axis=-1)


def _p_rests(values: Array) -> float:
    """Return the p-value of "it rests or rises" against a line that falls."""
    fits = _fits(len(values), 1)
    found = fits.fit(values[None])
    return float(fits.tail(found.statistic, found.place)[0])

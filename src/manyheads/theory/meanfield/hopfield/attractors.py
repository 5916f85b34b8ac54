"""Classification of attractors: fixed point, locked period, quasi-periodic, chaotic.

The positional bits drive the map with period L, so the period of an orbit that locks to it is a multiple of L. At
eps = 0 nothing drives the map, and an orbit has any period.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from manyheads._extras import Int, Shaped
from manyheads.theory.meanfield.hopfield.lyapunov import LyapunovSpectrum

TOLERANCE = 1e-8  # largest difference of overlaps that recur
KINDS = ("fixed point", "locked", "quasi-periodic", "chaotic", "unresolved")


class Attractors(NamedTuple):
    """Kind of each system's attractor, and its period in steps: 1 for a fixed point, 0 where there is none."""

    kind: Shaped[np.ndarray, "*systems"]
    period: Int[np.ndarray, "*systems"]


def classify_attractors(spectrum: LyapunovSpectrum) -> Attractors:
    """Classify attractors of a spectrum or scan by the largest exponent and the recurrence of the recorded overlaps.

    ==============  ===================================================================================
    fixed point     the overlaps stay the same at every step, and the largest exponent is not positive
    locked          they recur within half the record, after a multiple of L (eps = 0: any lag), and it is not positive
    chaotic         it is positive: above 10 / steps and three standard errors
    quasi-periodic  it is zero within that, and the overlaps do not recur
    unresolved      negative without recurrence (a longer period or transient), or a recurring unstable orbit
    ==============  ===================================================================================

    Examples
    --------
    >>> from manyheads.theory.meanfield import OneBitNetwork, lyapunov_spectrum
    >>> spectrum = lyapunov_spectrum(OneBitNetwork.published(), [0.8, 1.0], transient=2000, steps=2000)
    >>> classify_attractors(spectrum)
    Attractors(kind=array(['locked', 'locked'], dtype='<U14'), period=array([4, 4]))
    """
    shape, drive = spectrum.errors.shape, spectrum.drive
    overlaps = spectrum.overlaps.reshape(-1, *spectrum.overlaps.shape[-2:])  # (B, recorded, M)
    half = overlaps.shape[1] // 2
    period = np.zeros(len(overlaps), int)
    for lag in range(half // drive * drive, 0, -drive):  # the shortest period is found last, and stays
        period[_recur(overlaps, lag, half)] = lag
    period[_recur(overlaps, 1, half)] = 1
    largest = spectrum.exponents[..., 0].ravel()
    margin = np.maximum(10 / spectrum.steps, 3 * spectrum.errors.ravel())
    stable, recurs = largest <= margin, period > 0
    conditions = [stable & (period == 1), stable & recurs, np.abs(largest) <= margin, ~stable & ~recurs]
    kind = np.select(conditions, KINDS[:4], KINDS[4])
    period[~np.isin(kind, KINDS[:2])] = 0
    return Attractors(kind.reshape(shape), period.reshape(shape))


def _recur(overlaps: np.ndarray, lag: int, last: int) -> np.ndarray:
    """Return which systems have the same overlaps `lag` steps earlier, throughout the last steps, (B,)."""
    before = overlaps[:, overlaps.shape[1] - last - lag : overlaps.shape[1] - lag]
    return np.abs(overlaps[:, -last:] - before).max((1, 2)) < TOLERANCE

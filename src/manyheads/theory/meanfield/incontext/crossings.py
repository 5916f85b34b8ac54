"""Crossings of levels by a recorded curve: escape times, half times, and the drops and plateaus of a loss."""

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.signal import find_peaks

from manyheads._arrays import as_floats
from manyheads.errors import ShapeError

SMALLEST_FALL = 0.02  # of the initial loss: below it nothing has been learned


def first_crossing(times: Float[ArrayLike, " time"], values: Float[ArrayLike, " time"], level: float) -> float:
    """Return when a falling curve first reaches a level, by linear interpolation; infinity if it does not."""
    times, values = as_floats(times, "times"), as_floats(values, "values")
    if times.ndim != 1 or times.shape != values.shape:
        raise ShapeError(f"times of shape {times.shape}, values of {values.shape}: expected two vectors of one length")
    below = np.flatnonzero(values <= level)
    if not below.size:
        return float("inf")
    place = int(below[0])
    if place == 0:
        return float(times[0])
    share = (values[place - 1] - level) / (values[place - 1] - values[place])
    return float(times[place - 1] + share * (times[place] - times[place - 1]))


def half_times(times: Float[np.ndarray, " time"], shares: Float[np.ndarray, "time dim"]) -> Float[np.ndarray, " dim"]:
    """Return when half of each feature is learned, (D,); infinity for those that are not."""
    return np.asarray([first_crossing(times, -share, -0.5) for share in shares.T])


def plateau_level(times: Float[np.ndarray, " time"], losses: Float[np.ndarray, " time"], drops: list[float]) -> float:
    """Return the loss where it falls least in relative terms, between the times of two drops; the last one if never."""
    inside = np.flatnonzero((times >= drops[0]) & (times <= drops[1]))
    slopes = np.gradient(np.log(losses), times)
    return float(losses[inside[np.argmax(slopes[inside])]] if inside.size else losses[-1])


def count_drops(times: Float[np.ndarray, " time"], losses: Float[np.ndarray, " time"]) -> int:
    """Count the drops of a loss curve: one more than its plateaus, none if nothing is learned.

    The time that the loss takes for each of 60 equal parts of its fall is read off; a plateau is a part between the
    first 2% and the last 5% of the fall that takes three times as long as the fastest parts on either side of it, up to
    the next longer plateau (prominence of the logarithm).
    """
    fall = losses[0] - losses[-len(losses) // 10 :].mean()
    if not fall > SMALLEST_FALL * losses[0]:
        return 0
    levels = losses[0] - fall * np.linspace(0.02, 0.95, 61)
    taken = np.diff([first_crossing(times, losses, level) for level in levels])
    return 1 + len(find_peaks(np.log(taken + times[-1] * 1e-6), prominence=np.log(3))[0])

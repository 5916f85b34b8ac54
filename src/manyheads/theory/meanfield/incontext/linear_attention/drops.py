"""Drops and plateaus of a loss curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.signal import find_peaks

from manyheads.theory.meanfield.incontext.crossings import first_crossing

if TYPE_CHECKING:
    from jaxtyping import Float

SMALLEST_FALL = 0.02  # of the initial loss: below it nothing has been learned


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

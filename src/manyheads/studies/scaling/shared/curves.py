"""Curves of panels: geometric means with their ranges, and powers of the size as guides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyheads.study import Curve
from manyheads.study.panels import Role, spread_curve


def geometric_curve(sizes: Sequence[int], values: np.ndarray, label: str, group: int, role: Role = "trained") -> Curve:
    """Return the geometric mean over replicates or draws (rows) at every size, with their range as a band."""
    logs = np.log(values)
    middle, low, high = (tuple(np.exp(v).tolist()) for v in (logs.mean(0), logs.min(0), logs.max(0)))
    return Curve(tuple(map(float, sizes)), middle, label, role, group, low, high)


def power_curve(sizes: Sequence[float], start: float, power: float, label: str, group: int = 0) -> Curve:
    """Return a guide that follows a power of the size from the first point."""
    places = np.asarray(sizes, float)
    return spread_curve(places, start * (places / places[0]) ** power, label, "reference", group)

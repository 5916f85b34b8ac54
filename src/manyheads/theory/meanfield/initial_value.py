"""Initial value problems, and the refusal of solutions and trainings that do not reach the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from manyheads._extras import Float
from manyheads.errors import CertificateError

SHORTEST = 1e-9  # duration: the integrators need one that is positive


def solve_initial_value(
    derivative: Callable[[float, np.ndarray], np.ndarray],
    start: Float[np.ndarray, " state"],
    times: Float[np.ndarray, " times"],
    remedy: str,
    **settings: Any,
) -> Float[np.ndarray, "times state"]:
    """Integrate ``derivative(time, state)`` from time 0 and return the states at increasing times.

    Settings are those of `scipy.integrate.solve_ivp`. If it stops before the last time, or if states are not finite,
    the error is a `CertificateError` with `remedy` as its message.
    """
    end = max(float(times[-1]), SHORTEST)
    found = solve_ivp(derivative, (0.0, end), start, t_eval=times, **settings)
    if not (found.success and np.isfinite(found.y).all()):
        raise CertificateError(remedy, measured=float(found.t[-1]) if found.t.size else 0.0, threshold=end)
    return found.y.T


def refuse_divergence(values: Float[np.ndarray, ...], remedy: str) -> None:
    """Refuse a training whose recorded values are not all finite."""
    share = float(np.isfinite(values).mean())
    if share < 1:
        raise CertificateError(f"training diverged: {remedy}", measured=share, threshold=1.0)

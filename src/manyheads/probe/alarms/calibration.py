"""Alarm levels from clean runs of the same recipe: how far the worst head may go before it is further than in any."""

import numpy as np

from manyheads._namespaces import Floats

LEAST_RUNS = 4  # clean runs of which a spread is taken


def score(run: Floats, others: Floats) -> Floats:
    """Return by how many standard deviations of other runs the worst figure of a run has been above their mean.

    From the largest value over the heads of every figure at each probe (T, F), large ones unwelcome, and those of other
    runs (m, T, F), the running maximum over probes of the largest of the figures, (T,).
    """
    return np.maximum.accumulate(((run - others.mean(axis=0)) / floored_std(others)).max(axis=1))


def floored_std(runs: Floats) -> Floats:
    """Return the standard deviation over runs (m, T, F) at every probe, floored at its median over probes, (T, F)."""
    spread = runs.std(axis=0, ddof=1)
    return np.maximum(spread, np.median(spread, axis=0)) + 1e-12


def calibrated_level(clean: Floats) -> float:
    """Return the largest final score that a clean run has against the others, from clean runs (m, T, F).

    A further clean run exceeds it with a chance of about 1 / (m + 1), because runs are exchangeable; about, because
    each clean run is compared with m - 1 others, the new one with m.
    """
    return max(float(score(run, np.delete(clean, i, axis=0))[-1]) for i, run in enumerate(clean))

r"""E-detector: sequential detection of sudden changes in many series with one false-alarm rate.

The increments of every series are predicted by an autoregression of order 1 with a mean, fitted to the last `window`
increments, whose outliers are clipped. The residual is divided by the largest of three scales: that of the window, the
largest that the series had before, and a high quantile of these over the heads of the same figure; a head that moves as
fast as others have moved before is no surprise. With the one-sided p-value of Student's t distribution,

.. math:: e_t = \kappa\, p_t^{\kappa - 1}, \qquad R_t = (1 + R_{t-1})\, e_t,

e has a mean of at most 1 if p is uniform or larger, so that :math:`\sum_k R_{t,k} - K t` over K series is a
supermartingale, whatever the dependence of the series, and by Doob's inequality

.. math:: P\Big(\max_{t \le T} \sum_k R_{t,k} \ge T K / \alpha\Big) \le \alpha.

This is the Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, arXiv 2203.03532). That p is uniform or larger is a
model of the run's own past: what the rate is worth is measured on trainings without a fault.
"""

import numpy as np
from scipy import stats

from manyheads._namespaces import Floats

KAPPA = 0.1  # exponent of the e-value: small for few large surprises
DEGREES = 8  # degrees of freedom of Student's t distribution for residuals
OUTLIER = 4.0  # clipping of the increments of a window, in median absolute deviations
QUANTILE = 0.9  # of the scales over the heads of a figure, below which no scale is taken
LARGEST_CORRELATION = 0.9
TINY = 1e-9


def standardized_residuals(series: Floats, family: Floats, *, window: int, ignored: int, silent: int) -> Floats:
    """Predict every increment from those before it and divide what is left by its scale.

    Scales of the finite series (T, K) are compared within a family, the label of the figure (K,). The first `ignored`
    probes enter neither means nor scales; for the first `silent`, more than `ignored` + 6, residuals (T, K) are NaN.
    """
    increments = np.diff(series, axis=0, prepend=series[:1])
    residuals = np.full(series.shape, np.nan)
    largest = np.zeros(series.shape[1])
    members = [np.flatnonzero(family == label) for label in np.unique(family)]
    for t in range(ignored + 7, len(series)):
        mean, correlation, scale, low, high = _autoregression(increments[max(ignored + 1, t - window) : t])
        if t >= silent:
            predicted = mean + correlation * (np.clip(increments[t - 1], low, high) - mean)
            usual = np.maximum(scale, largest)
            for group in members:
                usual[group] = np.maximum(usual[group], np.quantile(usual[group], QUANTILE))
            residuals[t] = (increments[t] - predicted) / usual
        largest = np.maximum(largest, scale)
    return residuals


def _autoregression(past: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return mean, lag-1 correlation and residual scale of increments (n, K), and the bounds of their clipping."""
    n = len(past)
    median = np.median(past, axis=0)
    spread = OUTLIER * (1.4826 * np.median(np.abs(past - median), axis=0) + TINY)
    low, high = median - spread, median + spread
    past = np.clip(past, low, high)
    mean = past.mean(axis=0)
    centred = past - mean
    variance = (centred**2).sum(axis=0) + np.finfo(float).tiny
    correlation = (centred[1:] * centred[:-1]).sum(axis=0) / variance
    correlation = (correlation + 1 / n) * n / (n - 3)  # its bias in small samples
    correlation = np.clip(correlation, -LARGEST_CORRELATION, LARGEST_CORRELATION)
    rest = centred[1:] - correlation * centred[:-1]
    scale = np.sqrt((rest**2).sum(axis=0) / (n - 3) * (1 + 2 / n)) + TINY
    return mean, correlation, scale, low, high


def detection_statistics(residuals: Floats) -> Floats:
    """Return the logarithm of R_t for each series, (T, K), from residuals whose large values are unwelcome."""
    log_p = np.maximum(stats.t.logsf(np.nan_to_num(residuals), DEGREES), -500.0)
    log_e = np.log(KAPPA) + (KAPPA - 1) * log_p
    found = np.full(residuals.shape, -np.inf)
    current = np.full(residuals.shape[1], -np.inf)
    for t, row in enumerate(residuals):
        if np.isfinite(row).all():
            current = np.logaddexp(0.0, current) + log_e[t]
        found[t] = current
    return found


def alarm_level(probes: int, series: int, false_alarm: float) -> float:
    """Return the logarithm of T K / alpha, which the sum of R over the series exceeds with a chance of alpha."""
    return float(np.log(probes) + np.log(series) - np.log(false_alarm))

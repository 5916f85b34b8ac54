r"""Alarms over the curves of a training, by an e-detector: which head, at which step, at which false-alarm rate.

Levels of "clean runs" come from clean runs of the same recipe: how far the worst head may go before it is further than
in any.

E-detector: sequential detection of sudden changes in many series with one false-alarm rate.

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from manyheads._extras import xarray as xr
from manyheads._namespaces import Floats
from manyheads._overview import distinct_texts
from manyheads.errors import UsageError, check_integer
from manyheads.probe.alarms.figures import WATCHED, Alarm, Places, carry_forward, first_true
from manyheads.probe.alarms.update_alarms import find_rounding, find_vanishing

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


LAG = 16  # probes over which a change must have its smallest size to be worth an alarm


def find_alarms(
    curves: "xr.Dataset",
    *,
    updates: "xr.Dataset | None" = None,
    probes: int | None = None,
    false_alarm: float = 0.05,
    clean: "Sequence[xr.Dataset]" = (),
    max_logit: float = 50.0,
    ignored: int = 24,
    silent: int = 48,
    window: int = 24,
) -> list[Alarm]:
    """Find the first alarm of each detector in the curves of a training.

    Detectors are reported by name, never as one score. "change" finds sudden changes against the run's own past,
    at a stated chance of any alarm in a clean run; it is blind to slow drift. "clean runs" compares with clean runs of
    the same recipe. "level" is a bound on the largest logit. "updates" finds gradients and updates that vanish,
    "precision" weights that are rounded. Where the loss itself moves, none is much earlier than the loss: they find
    faults that the loss does not show, and name the head. None says anything about the final loss.

    Raises `UsageError`: curves without the dimensions or any of the figures, steps that do not rise by equal intervals,
    options out of range, clean runs of other steps or heads.

    Parameters
    ----------
    curves
        Figures of one training over (step, layer, head), on the same batch at every probe, at equal intervals: those of
        `AttentionRecord.dataset` and, for query-key, `head_spectra` that are among entropy (with entropy_uniform),
        max_logit, first_mass, stable_rank and frobenius.
    updates
        Result of `UpdateRecorder.dataset` in the same training, for "updates" and "precision".
    probes
        Planned number of probes of the training, on which the rate depends; None: those of `curves`.
    false_alarm
        Chance of any alarm of "change" in a clean run, between 0 and 1.
    clean
        Curves of at least 4 clean runs of the same recipe, at the same steps; their rate is about 1 / (runs + 1).
    max_logit
        Bound of "level".
    ignored, silent
        Probes at the start that "change" does not learn from, as "clean runs" neither, and in which it gives no alarm:
        at least those of the warm-up, because attention leaves uniformity while the learning rate rises.
    window
        Probes of the past that "change" predicts from, at least 8.

    Returns
    -------
    list of Alarm
        At most one of each detector, by step. Empty: none.

    The rate of "change" holds if residuals of the run's own past follow Student's t distribution or a narrower one:
    the figures `alarms-adamw` and `alarms-muon` of the results have each detector in trainings with and without faults.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from manyheads.probe import find_alarms
    >>> rng = np.random.default_rng(0)
    >>> entropy = 3 + 0.02 * rng.standard_normal((200, 2, 4))
    >>> entropy[150:, 1, 2] -= 1.5
    >>> curves = xr.Dataset({"entropy": (("step", "layer", "head"), entropy), "entropy_uniform": ("layer", [4.0, 4.0])})
    >>> print(*find_alarms(curves.assign_coords(step=10 * np.arange(200))))
    step 1500, layer 1 head 2: entropy falls, 3.06 -> 1.49 (change, false-alarm rate 0.05 a run)
    """
    check_integer("ignored", ignored, 0)
    check_integer("window", window, 8)
    check_integer("silent", silent, ignored + 7)
    if not 0 < false_alarm < 1:
        raise UsageError(f"false_alarm={false_alarm}: expected a chance between 0 and 1")
    if not max_logit > 0:
        raise UsageError(f"max_logit={max_logit}: expected a positive bound")
    if hasattr(clean, "data_vars"):
        raise UsageError("clean is one data set: expected a sequence of the curves of several clean runs")
    series = _gather(curves)
    planned = len(series.steps) if probes is None else check_integer("probes", probes, len(series.steps))
    found = [
        _find_not_finite(series),
        _find_level(series, max_logit),
        _find_change(series, planned, false_alarm, window=window, ignored=ignored, silent=silent),
        _find_beyond_clean(series, [_gather(run) for run in clean], ignored) if clean else None,
    ]
    if updates is not None:
        interval = series.steps[1] - series.steps[0] if len(series.steps) > 1 else 1  # beyond the last one, too
        found += find_vanishing(updates, int(series.steps[0] + silent * interval)), find_rounding(updates)
    return sorted((alarm for alarm in found if alarm is not None), key=lambda alarm: alarm.step)


@dataclass(frozen=True)
class _Series:
    """Curves side by side."""

    steps: Floats  # (T,)
    raw: Floats  # the figures, (T, K)
    values: Floats  # on the scale of their noise, upwards unwelcome, without gaps
    sizes: Floats  # on the scale of changes worth an alarm
    figure: Floats  # number of the figure in WATCHED, (K,)
    layer: Floats
    head: Floats

    def alarm(
        self, detector: str, t: int, who: Places, reference: float, words: str, false_alarm: float | None = None
    ) -> Alarm:
        """Return the alarm of a detector at probe t, of series in falling order of their part in it."""
        k = who[0]
        named = {(self.layer[each], self.head[each]) for each in who}
        place = int(self.steps[t]), int(self.layer[k]), int(self.head[k])
        figure, value = WATCHED[self.figure[k]], float(self.raw[t, k])
        texts = dict(zip(("value", "reference"), distinct_texts(value, reference), strict=True))
        words = words.format(subject=figure.subject, direction=figure.direction, **texts)
        return Alarm(detector, figure.name, *place, value, reference, len(named) - 1, false_alarm, words)


def _gather(curves: "xr.Dataset") -> _Series:
    """Check curves and lay them side by side, heads that a layer lacks left out."""
    if not hasattr(curves, "data_vars"):
        raise UsageError(f"curves of type {type(curves).__name__}: expected an xarray.Dataset")
    order = ("step", "layer", "head")
    if not set(order) <= set(curves.dims):
        raise UsageError(f"curves over {tuple(curves.dims)}: expected dimensions step, layer and head")
    steps, layers, heads = (
        np.asarray(curves[name].values if name in curves.coords else np.arange(curves.sizes[name])) for name in order
    )
    intervals = np.diff(steps)
    if (intervals <= 0).any():
        raise UsageError("the steps of the curves do not rise: sort them, and leave repeated ones out")
    if (intervals[:-1] != intervals[:1]).any() or (intervals[-1:] > intervals[:1]).any():
        raise UsageError(
            "the steps of the curves are at unequal intervals, over which changes cannot be compared: record with "
            "share=None and every=..., or choose some of the steps; the last interval may be shorter"
        )
    columns, places = [], []
    for number, figure in enumerate(WATCHED):
        if figure.name not in curves:
            continue
        table = curves[figure.name].transpose(*order)
        figures = scaled = np.asarray(table.values, float)
        if figure.name == "entropy":
            if "entropy_uniform" not in curves:
                raise UsageError("entropy without entropy_uniform, which sets its scale: keep both of the record")
            scaled = scaled / curves["entropy_uniform"].broadcast_like(table).transpose(*order).values
        with np.errstate(divide="ignore", invalid="ignore"):
            values, sizes = figure.transform(scaled), (figure.size or figure.transform)(scaled)
        for row, column in np.argwhere(np.isfinite(figures).any(axis=0)):
            raw, value, size = (each[:, row, column] for each in (figures, values, sizes))
            columns.append((raw, _fill(value), _fill(size)))
            places.append((number, layers[row], heads[column]))
    if not columns:
        names = ", ".join(figure.name for figure in WATCHED)
        raise UsageError(
            f"curves of {', '.join(map(str, curves.data_vars))}: expected one of {names}, with finite values"
        )
    return _Series(steps, *(np.stack(each, 1) for each in zip(*columns, strict=True)), *np.array(places).T)


def _fill(values: Floats) -> Floats:
    """Replace what is not finite by the last finite value before it, or the first one after it."""
    finite, held = np.isfinite(values), carry_forward(values)
    return np.where(np.isfinite(held), held, values[np.argmax(finite)] if finite.any() else 0.0)


def _find_not_finite(series: _Series) -> Alarm | None:
    finite = np.isfinite(series.raw)
    t, who = first_true(~finite & np.logical_or.accumulate(finite, axis=0))
    if not len(who):
        return None
    before = series.raw[:t, who[0]]
    last = float(before[np.isfinite(before)][-1])
    name = WATCHED[series.figure[who[0]]].name
    return series.alarm("not finite", t, who, last, name + " is not finite, it was {reference}")


def _find_level(series: _Series, max_logit: float) -> Alarm | None:
    logits = [figure.name for figure in WATCHED].index("max_logit")
    t, who = first_true((series.raw > max_logit) & (series.figure == logits))
    if not len(who):
        return None
    words = "{subject} is {value}, above the bound of {reference}"
    return series.alarm("level", t, who[np.argsort(-series.raw[t, who])], max_logit, words)


def _find_change(series: _Series, planned: int, false_alarm: float, **options: int) -> Alarm | None:
    """Apply the e-detector; heads that carry the sum and whose change is large enough are named."""
    statistics = detection_statistics(standardized_residuals(series.values, series.figure, **options))
    K = statistics.shape[1]
    level = alarm_level(planned, K, false_alarm)
    smallest = np.array([WATCHED[number].change for number in series.figure])
    for t in np.flatnonzero(np.logaddexp.reduce(statistics, axis=1) >= level):
        carries = statistics[t] >= max(level - np.log(K), statistics[t].max() - np.log(1e3))
        past = slice(max(t - LAG, 0), t)
        change = series.sizes[t] - series.sizes[past].min(axis=0)
        who = np.flatnonzero(carries & (change >= smallest))
        if len(who):
            who = who[np.argsort(-statistics[t, who])]
            start = float(series.raw[past, who[0]][np.argmin(series.sizes[past, who[0]])])
            words = "{subject} {direction}, {reference} -> {value}"
            return series.alarm("change", int(t), who, start, words, false_alarm)
    return None


def _find_beyond_clean(series: _Series, clean: list[_Series], ignored: int) -> Alarm | None:
    """Compare with clean runs; the head that goes furthest in the figure that crosses the level is named."""
    if len(clean) < LEAST_RUNS:
        raise UsageError(f"{len(clean)} clean runs: expected at least {LEAST_RUNS}, of which a spread can be taken")
    for run in clean:
        same = all(np.array_equal(getattr(run, name), getattr(series, name)) for name in ("figure", "layer", "head"))
        steps = np.array_equal(run.steps[: len(series.steps)], series.steps) and len(run.steps) == len(clean[0].steps)
        if not (same and steps):
            raise UsageError("a clean run has other steps, heads or figures than the curves: give runs of one recipe")
    if len(series.steps) <= ignored:
        return None
    present = np.unique(series.figure)

    def worst(run: _Series) -> Floats:
        return np.stack([run.values[ignored:, run.figure == number].max(axis=1) for number in present], axis=1)

    reference = np.stack([worst(run) for run in clean])
    level = calibrated_level(reference)
    own, length = worst(series), len(series.steps) - ignored
    if not (above := score(own, reference[:, :length]) > level).any():
        return None
    t = int(np.argmax(above))
    place = int(np.argmax((own[t] - reference[:, t].mean(axis=0)) / floored_std(reference[:, :length])[t]))
    members = series.figure == present[place]
    beyond = clean[int(np.argmax(reference[:, t, place]))]  # the clean run that goes furthest
    furthest = np.flatnonzero(members)[np.argmax(beyond.values[t + ignored, members])]
    who = np.flatnonzero(members & (series.values[t + ignored] > beyond.values[t + ignored, furthest]))
    who = who if len(who) else np.flatnonzero(members)
    who = who[np.argsort(-series.values[t + ignored, who])]
    bound = "at most" if WATCHED[present[place]].direction == "grows" else "at least"
    words = f"{{subject}} is {{value}}, in clean runs {bound} {{reference}}"
    furthest_raw = float(beyond.raw[t + ignored, furthest])
    return series.alarm("clean runs", t + ignored, who, furthest_raw, words, 1 / (len(clean) + 1))


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

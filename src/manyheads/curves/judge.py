"""Verdict on curves of any trainings: drop and rebound by layer, and the relation of the rebound to the loss.

JoMA reads a rebound of attention entropy and of the stable rank of the lower MLP matrix as a sign of learning, and its
authors find that it goes with a low loss. Over runs of several learning rates this correlation is one of the learning
rate: ranks within each rate, and the loss early in training, are what to compare it with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from manyheads._extras import Figure
from manyheads._namespaces import Floats
from manyheads._overview import Overview, Shown
from manyheads.curves.curve_files import RunCurves
from manyheads.curves.curve_shapes import LEAST, CurveShape, shape_at
from manyheads.curves.drop_and_rise import drop_and_rise, forward_fill
from manyheads.curves.summaries import EARLY, within_group_spearman
from manyheads.errors import UsageError
from manyheads.statistics import Interval, intervals, rank_correlation

FEWEST = 8  # runs with a loss from which a rank correlation is given
PART = EARLY[len(EARLY) // 2]  # part of a run after which its final loss is predicted
WORDS = {"entropy": "attention entropy", "stable_rank": "stable rank of the lower MLP matrix"}


@dataclass(frozen=True)
class LayerVerdict:
    """One curve: of a run, a figure and a layer, the lowest being 0."""

    run: str
    figure: str
    layer: int
    # First and last value above the minimum; both are about the range of the noise where there is nothing else
    drop: float
    rise: float
    level: float | None  # that of uniform attention, or of a random matrix; None if not known
    shape: CurveShape | None  # beyond the curve's own noise; None for fewer than 20 values, or if some are not finite


@dataclass(frozen=True)
class Relation:
    """Rank correlation over runs with its 99% interval."""

    text: str  # what is correlated with what
    value: float
    interval: Interval
    runs: int


@dataclass(frozen=True, repr=False)
class CurveJudgement(Shown):
    """What the curves of one or several runs say."""

    runs: tuple[RunCurves, ...]
    layers: tuple[LayerVerdict, ...]  # a verdict for every run, figure and layer
    # By figure and "bottom" or "top" layer: how many runs rebound, of how many whose shape is known
    rebounds: dict[tuple[str, str], tuple[int, int]]
    relations: tuple[Relation, ...]  # of rebound, early loss and final loss; none for fewer than eight runs with a loss

    def sentences(self) -> list[str]:
        """Say it for people."""
        found = []
        for (figure, where), (count, known) in self.rebounds.items():
            if known:
                share = intervals.proportion_interval(count, known)
                text = f"{WORDS[figure]}, {where} layer: drops and rebounds in {count} of {known} runs"
                found.append(f"{text} ({count / known:.2f} [{share.low:.2f}, {share.high:.2f}])")
        found = found or [f"no shapes: they take {LEAST} steps with finite values"]
        for each in self.relations:
            interval = f"[{each.interval.low:+.2f}, {each.interval.high:+.2f}]"
            found.append(f"{each.text}: rank correlation {each.value:+.2f} {interval} over {each.runs} runs")
        if not self.relations:
            with_loss = sum(run.loss is not None for run in self.runs)
            found.append(f"relation to the loss: {with_loss} runs with a loss, of {FEWEST} that it takes")
        return found

    def plot(self) -> Figure:
        """Draw the curves of every run, layer by layer in colour, with their level."""
        from manyheads.study.panels import Curve, Multiples
        from manyheads.study.reporting.charts import draw_titled

        figures = [name for name in WORDS if any(name in run.figures for run in self.runs)]

        def curves(run: RunCurves, figure: str) -> Iterator[Curve]:
            steps = tuple(map(float, run.steps))
            for layer, column in enumerate(run.figures[figure].T if figure in run.figures else ()):
                yield Curve(steps, tuple(column.tolist()), f"layer {layer}", group=layer)
            if figure in run.figures and figure in run.levels:
                yield Curve(steps, (run.levels[figure],) * len(steps), "level", "reference")

        shown = self.runs[:6]
        title = f"Curves of {len(shown)} of {len(self.runs)} runs"
        plots = tuple(tuple(tuple(curves(run, figure)) for figure in figures) for run in shown)
        labels = tuple(run.name for run in shown), tuple(WORDS[figure] for figure in figures)
        return draw_titled(Multiples(title, "step", "entropy [nat], stable rank", plots, *labels))

    def _overview(self) -> Overview:
        labels = [v.shape.label if v.shape else None for v in self.layers]
        named = zip(self.layers, labels, strict=True)
        rows = [(v.run, WORDS[v.figure], v.layer, label, v.drop, v.rise, v.level) for v, label in named]
        columns = ("run", "figure", "layer", "shape", "drop", "rise", "level")
        return Overview(f"Curves of {len(self.runs)} runs", columns, rows, tuple(self.sentences()))


def judge_curves(runs: Sequence[RunCurves]) -> CurveJudgement:
    """Judge the curves of trainings: shape of every layer's curve, and the relation of rebounds to the loss.

    Raises `UsageError`: no run, two of one name, or something else than runs.

    Parameters
    ----------
    runs
        Of `read_curves`, or made of arrays; at least one. Names differ.

    Returns
    -------
    CurveJudgement
        The rise that is related to the loss is that of the top layer's entropy, or stable rank where entropies are
        absent; the final loss is the least of a run. A run that diverged counts with its last finite values.

    Examples
    --------
    >>> t = np.arange(40)
    >>> curve = 2 + np.exp(-t / 3) + 0.5 * (1 - np.exp(-t / 12)) + 0.01 * np.random.default_rng(0).normal(size=40)
    >>> judge_curves([RunCurves("a", t, {"entropy": curve[:, None]}, {})]).rebounds["entropy", "top"]
    (1, 1)
    """
    if not isinstance(runs, Sequence) or not all(isinstance(run, RunCurves) for run in runs):
        raise UsageError(f"runs: {type(runs).__name__}: expected a list of RunCurves, such as those of read_runs")
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{len(runs)} runs, {len(set(names))} names: give at least one, each by a name of its own")
    layers = tuple(verdict for run in runs for verdict in _layers(run))
    rebounds = {}
    for figure in (name for name in WORDS if any(name in run.figures for run in runs)):
        ends = {"bottom": dict.fromkeys(names, 0), "top": {v.run: v.layer for v in layers if v.figure == figure}}
        for where, layer in ends.items():
            chosen = [v.shape for v in layers if v.figure == figure and v.layer == layer[v.run]]
            labels = Counter(shape.label for shape in chosen if shape)
            rebounds[figure, where] = labels["rebounded"], labels.total()
    return CurveJudgement(tuple(runs), layers, rebounds, tuple(_relations(runs)))


def _layers(run: RunCurves) -> Iterator[LayerVerdict]:
    for figure, values in run.figures.items():
        measured = drop_and_rise(forward_fill(values.T))
        for layer, (curve, drop, rise) in enumerate(zip(values.T, measured.drop, measured.rise, strict=True)):
            shape = shape_at(curve, run.steps)
            yield LayerVerdict(run.name, figure, layer, float(drop), float(rise), run.levels.get(figure), shape)


def _relations(runs: Sequence[RunCurves]) -> list[Relation]:
    """Correlate over the runs with a loss, if there are enough."""
    chosen = [run for run in runs if run.loss is not None and np.isfinite(run.loss).sum() > 1]
    figure = next((name for name in WORDS if chosen and all(name in run.figures for run in chosen)), None)
    if len(chosen) < FEWEST or figure is None:
        return []
    final = np.array([np.min(run.loss[np.isfinite(run.loss)]) for run in chosen if run.loss is not None])
    rise = np.array([_rise(run.figures[figure][:, -1]) for run in chosen])
    early = np.array([_at(run, PART) for run in chosen])
    early_rise = np.array([_rise(run.figures[figure][: max(2, round(PART * len(run.steps))), -1]) for run in chosen])
    name = f"rebound of the top layer's {WORDS[figure]}"
    rates = np.array([np.nan if run.learning_rate is None else run.learning_rate for run in chosen])
    found = [_over_runs(f"{name} and final loss", rise, final)]
    counts = Counter(rates.tolist())
    if np.isfinite(rates).all() and 1 < len(counts) < len(rates):
        found.append(_over_runs(f"the same within each of {len(counts)} learning rates", rise, final, rates))
    found.append(_over_runs(f"loss after {PART:.0%} of the steps and final loss", early, final))
    found.append(_over_runs(f"{name} within {PART:.0%} of the steps and final loss", early_rise, final))
    return [each for each in found if each is not None]


def _over_runs(text: str, x: Floats, y: Floats, groups: Floats | None = None) -> Relation | None:
    """Return a rank correlation; within groups one degree of freedom is lost for each group beyond the first."""
    seen = np.isfinite(x) & np.isfinite(y)
    x, y = x[seen], y[seen]
    if len(x) < FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    if groups is None:
        found = rank_correlation.spearman(x, y)
        return Relation(text, found.value, found.interval, len(x))
    groups = groups[seen]
    value, free = within_group_spearman(x, y, groups), len(x) - len(set(groups.tolist())) - 2
    if free < 1:
        return None
    half = float(stats.norm.isf(0.005)) * math.sqrt((1 + value**2 / 2) / free)
    centre = math.atanh(min(0.999, max(-0.999, value)))
    return Relation(text, value, Interval(math.tanh(centre - half), math.tanh(centre + half), 0.99), len(x))


def _rise(curve: Floats) -> float:
    return float(drop_and_rise(forward_fill(curve)).rise)


def _at(run: RunCurves, part: float) -> float:
    """Return the last finite loss within a part of the run."""
    stop = run.steps[0] + part * (run.steps[-1] - run.steps[0])
    seen = np.asarray(run.loss)[run.steps <= stop]
    seen = seen[np.isfinite(seen)]
    return float(seen[-1]) if len(seen) else math.nan

"""State of the six stages: examples for fitting and for holdout, a log, what was estimated so far."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.head_count import eliminate_heads, note_count
from manyheads.recovery.examples.stages.agreement import RowCertificates
from manyheads.recovery.examples.stages.crude_sum import estimate_crude_sum
from manyheads.recovery.examples.stages.fit import fit_in_span
from manyheads.recovery.examples.stages.hull import Hull, choose_rows, fit_hull
from manyheads.recovery.examples.stages.refined_sum import refine_sum
from manyheads.recovery.examples.stages.settings import StageSettings
from manyheads.recovery.examples.stages.shards import Pair, Shard, Shards, open_shards
from manyheads.recovery.examples.stages.span import count_by_gap
from manyheads.recovery.fit.gauss_newton import fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.refusals import EffectiveSumError, HullGapError, NoFit, RecoveryRefused
from manyheads.recovery.result.results import Recovery, StageLog

LEAST_GAP = 2.5  # between the eigenvalues above and in a hull: a smaller one is named as the reason of a failure
LEAST_SUM = 0.35  # effective size of the sum of projections: likewise; a fifth of the projections' joint norm, or less


@dataclass(frozen=True)
class Candidate:
    """A layer, and its relative squared error on held-out sequences."""

    layer: AttentionLayer
    error: float


@dataclass
class SixStageRun:
    """One run of the six stages: each method is a stage, logged with its figures and CPU seconds."""

    # Examples to learn from, and the last sequences, which nothing is fitted to
    train: Shards
    held: Examples
    # As given
    settings: StageSettings
    rng: Generator
    noise_share: float  # expected squared noise in the labels relative to their variance
    log: StageLog = field(default_factory=StageLog)
    fitted: list[Candidate] = field(default_factory=list)
    joint_fits: dict[int, Candidate] = field(default_factory=dict)
    sample: Examples | None = None  # of the last joint fit
    gaps: list[float] = field(default_factory=list)
    effective: float = 1.0
    _rows: dict[bytes, tuple[list[RowCertificates], float]] = field(default_factory=dict)
    _trimmed: Array | None = None

    @classmethod
    def open(
        cls,
        examples: Pair | Iterable[Shard] | Shards,
        settings: StageSettings,
        rng: Generator,
        executor: Executor | None,
    ) -> SixStageRun:
        """Check the examples, and put the last ones aside."""
        data = examples if isinstance(examples, Shards) else open_shards(examples, executor)
        count = min(settings.held_out, data.count // 10)
        if not count:
            raise UsageError(f"{data.count} sequences: ten or more are needed to hold some out")
        held = Examples(*data.take(np.arange(data.count - count, data.count)))
        if held.power == 0:
            raise UsageError("the labels do not depend on the tokens: there is nothing to learn")
        return cls(data.without_last(count), held, settings, rng, settings.noise**2 * held.y.size / held.power)

    def crude_sum(self) -> Array:
        """Stage one."""
        with self.log.stage("crude sum") as figures:
            crude, self.effective = estimate_crude_sum(self.train, self.settings.crude)
            figures["effective_size"] = self.effective
        return crude

    def hull(self, name: str, total: Array, heads: int) -> Hull:
        """Stages two and four; the rows are chosen once for each sum."""
        with self.log.stage(f"{name}, heads: {heads}") as figures:
            key = total.tobytes()
            if key not in self._rows:
                self._rows[key] = choose_rows(self.train, total, self.settings.hull)
            hull = fit_hull(self.train, *self._rows[key], heads, self.settings.hull)
            counted = float(count_by_gap(hull.eigenvalues))
            figures |= {"gap": hull.gap, "kept": hull.kept, "threshold": hull.threshold, "heads_by_gap": counted}
        self.gaps.append(hull.gap)
        return hull

    def refined_sum(self, hull: Hull | None) -> Array:
        """Stage three: from a hull, or from none; then the number of heads does not matter, and it is done once."""
        if hull is None and self._trimmed is not None:
            return self._trimmed
        with self.log.stage("refined sum"):
            refined = refine_sum(self.train, None if hull is None else hull.nearest, self.settings.refinement)
        self._trimmed = refined if hull is None else None
        return refined

    def fit(self, span: Array, heads: int) -> None:
        """Stage six without the joint fit."""
        with self.log.stage(f"fit in the span, heads: {heads}") as figures:
            some = self._draw(self.settings.fit.sequences)
            fit = fit_in_span(span, *some, heads, self.rng, self.settings.fit)
            attempt = Candidate(fit.layer, relative_error(fit.layer, self.held))
            figures |= {"tried": fit.tried, "error": fit.error, "held_out_error": attempt.error}
        self.fitted.append(attempt)

    def is_enough(self) -> bool:
        """Whether the best fit so far is worth the joint one: it is good, or the last head did not improve it."""
        best = self.without_joint_fit()
        before = min((attempt.error for attempt in self.fitted[:-1]), default=np.inf)
        stalled = self.fitted[-1].error > self.settings.gain * before
        return bool(best) and (best[0].error < self.threshold(self.settings.enough) or stalled)

    def without_joint_fit(self) -> list[Candidate]:
        """Return the fits whose number of heads has had no joint fit, best first."""
        open_ = [attempt for attempt in self.fitted if attempt.layer.heads not in self.joint_fits]
        return sorted(open_, key=lambda attempt: attempt.error)

    def has_better(self) -> bool:
        """Whether a number of heads that had no joint fit was, before it, better than all that had one."""
        tried = [attempt.error for attempt in self.fitted if attempt.layer.heads in self.joint_fits]
        best = self.without_joint_fit()
        return bool(best) and best[0].error < min(tried, default=np.inf)

    def joint_fit(self) -> Candidate:
        """Fit all matrices of the best fit at once."""
        attempt = self.without_joint_fit()[0]
        with self.log.stage(f"joint fit, heads: {attempt.layer.heads}") as figures:
            self.sample = Examples(*self._draw(self.settings.joint_fit_sequences))
            done = fit_gauss_newton(attempt.layer, self.sample.x, self.sample.y, settings=self.settings.joint_fit)
            better = Candidate(done.layer, relative_error(done.layer, self.held))
            figures |= {"steps": len(done.errors) - 1, "error": done.error, "held_out_error": better.error}
        self.joint_fits[attempt.layer.heads] = better
        return better

    def threshold(self, least: float) -> float:
        """Return an error that counts as reached: with noise, half as much again as noise alone leaves."""
        return least + 1.5 * self.noise_share

    def best(self) -> Candidate | None:
        """Return the layer with the smallest held-out error."""
        return min([*self.fitted, *self.joint_fits.values()], key=lambda attempt: attempt.error, default=None)

    def reduce(self, attempt: Candidate) -> Recovery:
        """Return what a joint fit found, without heads that held-out sequences do not ask for."""
        assert self.sample is not None
        found = eliminate_heads(attempt.layer, self.sample, self.held, self.log, self.settings.joint_fit)
        result = self.recovery(Candidate(found.layer, found.error))
        return replace(result, notes=note_count(found, attempt.layer.heads))

    def recovery(self, attempt: Candidate) -> Recovery:
        """Return what an attempt found, with the statement that was checked."""
        threshold = self.threshold(self.settings.tolerance)
        figures = {"held_out_error": attempt.error, "threshold": threshold, "sequences": len(self.held)}
        certificate = {"statement": "relative squared error on sequences that were held out of every fit"} | figures
        return Recovery(attempt.layer, certificate, tuple(self.log.stages), "six-stage")

    def refusal(self) -> RecoveryRefused:
        """Return the error that names why no attempt was good enough."""
        best = self.best()
        result = self.recovery(best) if best else None
        gap = max(self.gaps, default=0.0)
        if self.effective < LEAST_SUM:
            return EffectiveSumError("the projections cancel: use method='student'", self.effective, LEAST_SUM, result)
        if gap < LEAST_GAP or best is None:
            what = "no hull stands out: give more examples, or use method='student'"
            return HullGapError(what, gap, LEAST_GAP, result)
        what = f"no number of heads up to {max(one.layer.heads for one in self.fitted)} explains held-out examples"
        remedy = "give more examples or heads, method='student', or a tolerance that allows for noise"
        return NoFit(f"{what}: {remedy}", best.error, self.threshold(self.settings.tolerance), result)

    def _draw(self, count: int) -> tuple[Array, Array]:
        size = self.train.count
        return self.train.take(np.sort(self.rng.choice(size, min(count, size), replace=False)))

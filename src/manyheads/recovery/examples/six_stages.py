"""Six-stage learner of a multi-head attention layer (Chen and Li).

======  ======================================================  =========================================
stage   what it finds                                           where
======  ======================================================  =========================================
1       the sum of projections, crudely                         `manyheads.recovery.examples.stages.crude_sum`
2       the affine hull of the attention matrices               `manyheads.recovery.examples.stages.hull`
3       the sum of projections, from rows where heads agree     `manyheads.recovery.examples.stages.refined_sum`
4       the hull again, with the better sum                     `manyheads.recovery.examples.stages.hull`
5       the span of the attention matrices                      `manyheads.recovery.examples.stages.hull`
6       heads in the span and projections by least squares,     `manyheads.recovery.examples.stages.fit`,
        then all matrices at once                               `manyheads.recovery.fit.gauss_newton`
======  ======================================================  =========================================

The number of heads is not given: stages two to six run for 1, 2, ... heads, until examples that were held out are
explained. Whatever the stages say, the error on the held-out examples decides; what they say names the reason of a
refusal. At the end heads that held-out examples do not ask for are eliminated
(`manyheads.recovery.examples.head_count`): with exact labels a number that is too large explains them as well.

Everything up to stage five is a sum or a rank over examples, and works on shards
(`manyheads.recovery.examples.stages.shards`).
Biases and causal masks are outside the theory and outside this learner: such layers end as a refusal, and
`manyheads.recovery.learn_layer` refuses options that ask for them.

References
----------
S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084 (STOC 2025). What is published there
is selectable stage by stage (`LITERAL`); the default forms are worked out
here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.head_count import eliminate_heads, note_count
from manyheads.recovery.examples.stages.agreement import RowCertificates
from manyheads.recovery.examples.stages.crude_sum import CrudeForm, estimate_crude_sum
from manyheads.recovery.examples.stages.fit import FitSettings, fit_in_span
from manyheads.recovery.examples.stages.hull import Hull, HullSettings, choose_rows, count_by_gap, fit_hull, span_of
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import Pair, Shard, Shards, open_shards
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.refusals import EffectiveSumError, HullGapError, NoFit, RecoveryRefused, check_positive
from manyheads.recovery.result.results import Recovery, StageLog

LEAST_GAP = 2.5  # between the eigenvalues above and in a hull: a smaller one is named as the reason of a failure
LEAST_SUM = 0.35  # effective size of the sum of projections: likewise; a fifth of the projections' joint norm, or less


@dataclass(frozen=True)
class StageSettings:
    """Forms, sizes and thresholds of the six stages."""

    crude: CrudeForm = "regression"  # stage one: "regression", or "correlation" as published
    hull: HullSettings = field(default_factory=HullSettings)  # stages two and four
    # Stage three: form "trimmed", or "margin" as published
    refinement: RefinementSettings = field(default_factory=RefinementSettings)
    fit: FitSettings = field(default_factory=FitSettings)  # stage six: form "projection", or "net" as published
    joint_fit: GaussNewtonSettings = field(default_factory=GaussNewtonSettings)  # the joint fit at the end
    most_heads: int = constrained(6, Constraint(least=1))  # largest number of heads that is tried
    # Sequences, from the end, that decide the number of heads and whether the answer is right; a tenth of all, at most
    held_out: int = constrained(2000, Constraint(least=1))
    joint_fit_sequences: int = constrained(4000, Constraint(least=1))  # sequences of the joint fit, at most
    # Relative squared error on held-out sequences, before the joint fit, at which a number of heads is taken
    enough: float = 1e-2
    # A further head is expected to reduce that error at least by this factor; where it does not, the best number so far
    # is taken
    gain: float = 0.7
    # Relative squared error on held-out sequences that the answer must reach
    tolerance: float = 1e-12
    # Standard deviation of independent noise in the labels; what it leaves is allowed for in `enough` and `tolerance`
    noise: float = constrained(0.0, Constraint(least=0))

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "tolerance")


# The stages as they are published; the net is left with an error that the joint fit has to remove
LITERAL = StageSettings(
    crude="correlation", refinement=RefinementSettings(form="margin"), fit=FitSettings(form="net"), enough=0.1
)


def learn_in_six_stages(
    examples: Pair | Iterable[Shard] | Shards,
    heads: int | None = None,
    *,
    settings: StageSettings | None = None,
    rng: Generator,
) -> Recovery:
    """Learn a multi-head attention layer, and its number of heads, from examples.

    `examples` are (x, y), each (N, k, d); an iterable of such pairs, or of functions that load one; or what
    `open_shards` returned, with its executor. `heads` is at most d^2: more attention matrices have no hull of their
    own. `rng` draws the starts of stage six, and the sequences of its fits. Seconds of the stages of the recovery are
    CPU seconds of this process.

    Raises
    ------
    DesignError
        Inputs that do not span the space.
    CertificateShortage
        Too few rows in which heads can agree.
    EffectiveSumError, HullGapError, NoFit
        The held-out error stayed above the tolerance: because projections nearly cancel, because no hull stands out, or
        for neither reason. The error carries the best layer as `result`.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery.planted.task import planted_layer, sequences
    >>> rng = np.random.default_rng(0)
    >>> layer, x = planted_layer(rng, dim=4, heads=2), sequences(rng, 4000, 2, 4, distribution="gaussian")
    >>> found = learn_in_six_stages((x, layer(x)), rng=rng)
    >>> found.heads, found.certificate["held_out_error"] < 1e-24
    (2, True)
    """
    settings = settings or StageSettings()
    heads = None if heads is None else check_integer("heads", heads)
    data = examples if isinstance(examples, Shards) else open_shards(examples)
    count, most = min(settings.held_out, data.count // 10), data.dim**2
    if not count:
        raise UsageError(f"{data.count} sequences: ten or more are needed to hold some out")
    held = Examples(*data.take(np.arange(data.count - count, data.count)))
    if held.power == 0:
        raise UsageError("the labels do not depend on the tokens: there is nothing to learn")
    if heads is not None and heads > most:
        raise UsageError(f"heads={heads}: {most} at most in {data.dim} dimensions")
    run = SixStageRun(data.without_last(count), held, settings, rng)
    try:
        return run.run((heads,) if heads else range(1, min(most, settings.most_heads) + 1))
    except RecoveryRefused:  # itself an ArithmeticError
        raise
    except (np.linalg.LinAlgError, ArithmeticError) as error:
        stage = run.log.stages[-1].name if run.log.stages else 1
        what = f"the equations of stage {stage!r}, or of the next one, have no solution ({error})"
        raise NoFit(f"{what}: give more examples, or use method='student'", np.nan, np.nan) from error


class Candidate(NamedTuple):
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
    log: StageLog = field(default_factory=StageLog)
    fitted: list[Candidate] = field(default_factory=list)
    joint_fits: dict[int, Candidate] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    effective: float = 1.0
    _rows: dict[bytes, tuple[list[RowCertificates], float]] = field(default_factory=dict)
    _refined: Array | None = None

    def run(self, counts: Iterable[int]) -> Recovery:
        """Run all stages for numbers of heads in turn, until one explains the held-out sequences."""
        crude = self.crude_sum()  # stage 1
        for count in counts:
            try:
                needed = self.settings.refinement.needs_hull
                hull = self.hull("crude hull", crude, count) if needed else None  # stage 2
                hull = self.hull("hull", self.refined_sum(hull), count)  # stages 3 and 4
            except HullGapError:
                continue  # another number of heads may have a hull that stands out
            self.fit(span_of(hull), count)  # stages 5 and 6, for this number of heads
            if self.is_enough() and (found := self.joint_fit()):  # stage 6, for the best number so far
                return found
        if self.has_better() and (found := self.joint_fit()):
            return found
        raise self.refusal()

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
        if hull is not None or self._refined is None:
            with self.log.stage("refined sum"):
                nearest = None if hull is None else hull.nearest
                self._refined = refine_sum(self.train, nearest, self.settings.refinement)
        return self._refined

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

    def joint_fit(self) -> Recovery | None:
        """Fit all matrices of the best fit at once; if it is right, drop heads that held-out sequences do not need."""
        layer, settings = self.without_joint_fit()[0].layer, self.settings.joint_fit
        with self.log.stage(f"joint fit, heads: {layer.heads}") as figures:
            sample = Examples(*self._draw(self.settings.joint_fit_sequences))
            done = fit_gauss_newton(layer, sample.x, sample.y, settings=settings)
            better = Candidate(done.layer, relative_error(done.layer, self.held))
            figures |= {"steps": len(done.errors) - 1, "error": done.error, "held_out_error": better.error}
        self.joint_fits[layer.heads] = better
        if not better.error < self.threshold(self.settings.tolerance):
            return None
        found = eliminate_heads(better.layer, sample, self.held, self.log, settings)
        result = self.recovery(Candidate(found.layer, found.error))
        return replace(result, notes=note_count(found, layer.heads))

    def threshold(self, least: float) -> float:
        """Return an error that counts as reached: with noise, half as much again as noise alone leaves."""
        return least + 1.5 * (self.settings.noise**2 * self.held.y.size / self.held.power)

    def recovery(self, attempt: Candidate) -> Recovery:
        """Return what an attempt found, with the statement that was checked."""
        threshold = self.threshold(self.settings.tolerance)
        figures = {"held_out_error": attempt.error, "threshold": threshold, "sequences": len(self.held)}
        certificate = {"statement": "relative squared error on sequences that were held out of every fit"} | figures
        return Recovery(attempt.layer, certificate, tuple(self.log.stages), "six-stage")

    def refusal(self) -> RecoveryRefused:
        """Return the error that names why no attempt was good enough."""
        tried = [*self.fitted, *self.joint_fits.values()]
        best = min(tried, key=lambda attempt: attempt.error, default=None)
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

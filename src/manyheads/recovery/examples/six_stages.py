"""Six-stage learner of a multi-head attention layer (Chen and Li).

======  ======================================================  =========================================
stage   what it finds                                           where
======  ======================================================  =========================================
1       the sum of projections, crudely                         `manyheads.recovery.examples.stages.crude_sum`
2       the affine hull of the attention matrices               `manyheads.recovery.examples.stages.hull`
3       the sum of projections, from rows where heads agree     `manyheads.recovery.examples.stages.refined_sum`
4       the hull again, with the better sum                     `manyheads.recovery.examples.stages.hull`
5       the span of the attention matrices                      `manyheads.recovery.examples.stages.span`
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
is selectable stage by stage (`manyheads.recovery.examples.stages.settings.LITERAL`); the default forms are worked out
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor

import numpy as np

from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Generator
from manyheads.recovery.examples.stages.pipeline import SixStageRun
from manyheads.recovery.examples.stages.settings import StageSettings
from manyheads.recovery.examples.stages.shards import Pair, Shard, Shards
from manyheads.recovery.examples.stages.span import span_of
from manyheads.recovery.refusals import HullGapError, NoFit, RecoveryRefused
from manyheads.recovery.result.results import Recovery


def learn_in_six_stages(
    examples: Pair | Iterable[Shard] | Shards,
    heads: int | None = None,
    *,
    settings: StageSettings | None = None,
    rng: Generator,
    executor: Executor | None = None,
) -> Recovery:
    """Learn a multi-head attention layer, and its number of heads, from examples.

    Parameters
    ----------
    examples
        (x, y), each (N, k, d); or an iterable of such pairs, or of functions that load one; or what `open_shards`
        returned, with its executor.
    heads
        Number of heads, at most; None to find it. At most d^2: more attention matrices have no hull of their own.
    settings
        Forms, sizes and thresholds.
    rng
        Starts of stage six, and the sequences of its fits.
    executor
        Works on the shards: any `concurrent.futures.Executor`; None for this thread.

    Returns
    -------
    The recovery, with method "six-stage"; seconds of its stages are CPU seconds of this process.

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
    run = SixStageRun.open(examples, settings, rng, executor)
    most = run.train.dim**2
    if heads is not None and heads > most:
        raise UsageError(f"heads={heads}: {most} at most in {run.train.dim} dimensions")

    try:
        return _run_stages(run, (heads,) if heads else range(1, min(most, settings.most_heads) + 1))
    except RecoveryRefused:  # itself an ArithmeticError
        raise
    except (np.linalg.LinAlgError, ArithmeticError) as error:
        stage = run.log.stages[-1].name if run.log.stages else 1
        what = f"the equations of stage {stage!r}, or of the next one, have no solution ({error})"
        raise NoFit(f"{what}: give more examples, or use method='student'", np.nan, np.nan) from error


def _run_stages(run: SixStageRun, counts: Iterable[int]) -> Recovery:
    """Run all stages for numbers of heads in turn, until one explains the held-out sequences."""
    settings, crude = run.settings, run.crude_sum()  # stage 1
    for count in counts:
        try:
            hull = run.hull("crude hull", crude, count) if settings.refinement.needs_hull else None  # stage 2
            refined = run.refined_sum(hull)  # stage 3
            hull = run.hull("hull", refined, count)  # stage 4
        except HullGapError:
            continue  # another number of heads may have a hull that stands out
        span = span_of(hull)  # stage 5
        run.fit(span, count)  # stage 6, for this number of heads
        if run.is_enough():
            attempt = run.joint_fit()  # stage 6, for the best number so far
            if attempt.error < run.threshold(settings.tolerance):
                return run.reduce(attempt)
    if run.has_better():
        attempt = run.joint_fit()
        if attempt.error < run.threshold(settings.tolerance):
            return run.reduce(attempt)
    raise run.refusal()

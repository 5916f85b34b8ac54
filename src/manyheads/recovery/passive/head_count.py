"""Number of heads: fits with 1, 2, … heads, compared on held-out examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from manyheads.errors import check_integer
from manyheads.recovery.layers.evaluation import sequence_errors
from manyheads.recovery.passive.student import Fit, StudentSettings, fit_student

if TYPE_CHECKING:
    from manyheads.recovery.variable_projection import Examples

REACH = 20.0  # multiple of its target at which a first search may end and still be refined
GLANCE = 60  # evaluations of a first look at a number of heads: benign layers of 12 heads took 30, measured here
HARDLY = 0.02  # a further head that lowers the error by a smaller share, or by less than chance does, is none


def check_heads(heads: int | None) -> int | None:
    """Refuse what is no number of heads; None is to find it."""
    return None if heads is None else check_integer("heads", heads)


def fit_wanted(
    examples: Examples,
    held_out: Examples,
    counts: Iterable[int],
    rng: np.random.Generator,
    *,
    wanted: float,
    settings: StudentSettings,
) -> list[Fit]:
    """Try numbers of heads until one reaches the error that is wanted; the last fit is the answer.

    First a glance at each, in rising order: one short search. Where one succeeds, the next smaller number is tried in
    earnest, since it may only have had a bad start; where none does, all are tried in earnest.

    Returns all fits in the order in which they were made; if none reached `wanted`, the best is the last.
    """
    counts, fits = list(counts), []
    steps = replace(
        settings.refinement, steps=min(12, settings.refinement.steps), inner=min(100, settings.refinement.inner)
    )
    glance = replace(settings, restarts=1, evaluations=min(GLANCE, settings.evaluations), reach=REACH)
    doubt = replace(settings, restarts=min(2, settings.restarts), reach=REACH, refinement=steps)
    for place, heads in enumerate(counts):
        fits.append(fit_student(examples, held_out, heads, rng, wanted=wanted, settings=glance))
        if fits[-1].held_out_error > wanted:
            continue
        while place > 0:  # fewer, if they can
            place -= 1
            again = fit_student(examples, held_out, counts[place], rng, wanted=wanted, settings=doubt)
            if again.held_out_error > wanted:
                return [*fits[:-1], again, fits[-1]]
            fits.append(again)
        return fits
    for heads in counts:
        fits.append(fit_student(examples, held_out, heads, rng, wanted=wanted, settings=settings))
        if fits[-1].held_out_error <= wanted:
            return fits
    return sorted(fits, key=lambda fit: -fit.held_out_error)


def fit_until_flat(
    examples: Examples,
    held_out: Examples,
    counts: Iterable[int],
    rng: np.random.Generator,
    *,
    settings: StudentSettings,
) -> list[Fit]:
    """Add heads as long as the held-out error falls by more than chance; the last fit is the answer.

    For noisy labels whose noise is not known. A further head counts when the mean decrease of a sequence's squared
    error is more than three of its standard errors, and more than 2% of the mean.
    """
    fits: list[Fit] = []
    before = None
    for heads in counts:
        fit = fit_student(examples, held_out, heads, rng, wanted=0.0, settings=settings)
        errors = sequence_errors(fit.layer, held_out)
        if before is not None:
            gains = before - errors
            chance = 3 * gains.std(ddof=1) / len(gains) ** 0.5
            if gains.mean() < max(chance, HARDLY * before.mean()):
                return [*fits[:-1], fit, fits[-1]]
        fits.append(fit)
        before = errors
    return fits

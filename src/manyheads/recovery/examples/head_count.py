"""Number of heads: fits with 1, 2, … heads, compared on held-out examples, and backward elimination at the end.

Exact labels are fitted as well by m + 1 heads as by m, with W = 0 of one head or with two heads of one Theta whose W
add up to the true one, so that no error tells a number that is too large. Elimination does: drop a head, solve for
all projections again, refine all matrices, and compare the errors of held-out sequences in pairs. Dropping covers
merging, because the W of a dropped twin moves to the other one by least squares.

Derived here.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.holdout import EXACT
from manyheads.recovery.examples.student import Fit, StudentSettings, fit_student
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, descend
from manyheads.recovery.fit.variable_projection import Examples, Tangent, stack_theta
from manyheads.recovery.layers.evaluation import sequence_errors
from manyheads.recovery.result.results import StageLog

REACH = 20.0  # multiple of its target at which a first search may end and still be refined
GLANCE = 60  # evaluations of a first look at a number of heads: benign layers of 12 heads took 30, measured here
CHANCE = 3.0  # standard errors of a paired difference of sequences' errors that are put down to chance
UNSEEN = 1e-18  # share of exact labels that a head must explain: rounding of refinements ends below 1e-20
HOPELESS = 0.3  # share of the labels that a dropped head explained, beyond which no second candidate is tried
HARDLY = 0.02  # a further head that lowers the error by a smaller share, or by less than chance does, is none


class Elimination(NamedTuple):
    """Result of a backward elimination: the layer and its held-out errors."""

    layer: AttentionLayer
    error: float  # relative squared error on held-out sequences
    unseen: float  # share of the labels that a further head may have and not show


def eliminate_heads(
    layer: AttentionLayer, examples: Examples, held_out: Examples, log: StageLog, settings: GaussNewtonSettings
) -> Elimination:
    """Drop heads one by one while the held-out error does not grow.

    It grows if the mean paired difference of the sequences' errors exceeds three standard errors, unless the smaller
    layer leaves less than 1e-18 of the labels, which is rounding. `examples` are those that the layer was
    fitted to.
    """
    settings = replace(settings, steps=min(30, settings.steps), inner=min(200, settings.inner))
    errors = sequence_errors(layer, held_out)
    while layer.heads > 1:
        with log.stage(f"elimination, heads: {layer.heads - 1}") as figures:
            theta = stack_theta(layer)
            losses = np.array([Tangent.at(examples, np.delete(theta, head, 0)).loss for head in range(layer.heads)])
            smaller, fewer = None, np.inf
            for head in np.argsort(losses)[:2]:
                fit = descend(Tangent.at(examples, np.delete(theta, head, 0)), settings)
                after = sequence_errors(fit.layer, held_out)
                fewer = min(fewer, float(after.sum()) / held_out.power)
                if after.sum() <= UNSEEN * held_out.power or (after - errors).mean() <= _chance(after - errors):
                    smaller = fit.layer, after
                    break
                if losses[head] > HOPELESS:
                    break
            figures |= {"dropped": float(losses.min()), "held_out_error": fewer, "told_apart": smaller is None}
        if smaller is None:
            break
        layer, errors = smaller
    error = float(errors.sum()) / held_out.power
    # What is left of exact labels may be a head; what is left of noisy ones is noise, known to three standard errors.
    unseen = error if error <= EXACT else _chance(errors) * len(errors) / held_out.power
    return Elimination(layer, error, max(UNSEEN, unseen))


def note_count(found: Elimination, started: int) -> tuple[str, ...]:
    """Return notes on dropped heads and on the size of a head that would not show."""
    heads, notes = found.layer.heads, []
    if heads < started:
        why = "held-out sequences do not distinguish the others from zero, or from copies of these"
        notes.append(f"{started} heads were reduced to {heads}: {why}")
    if found.unseen > UNSEEN:
        notes.append(f"a further head with less than {found.unseen:.1g} of the labels' variance would not show")
    return tuple(notes)


def _chance(differences: Array) -> float:
    return CHANCE * float(differences.std(ddof=1)) / len(differences) ** 0.5 if len(differences) > 1 else 0.0


def fit_wanted(
    examples: Examples, held_out: Examples, counts: range, rng: Generator, *, wanted: float, settings: StudentSettings
) -> list[Fit]:
    """Try numbers of heads until one reaches the error that is wanted; the last fit is the answer."""
    fits: list[Fit] = []
    glance = replace(settings, restarts=1, evaluations=min(GLANCE, settings.evaluations), reach=REACH)
    for effort in (glance, settings):
        for heads in counts:
            fits.append(fit_student(examples, held_out, heads, rng, wanted=wanted, settings=effort))
            if fits[-1].held_out_error <= wanted:
                return fits
    return sorted(fits, key=lambda fit: -fit.held_out_error)


def fit_until_flat(
    examples: Examples, held_out: Examples, counts: range, rng: Generator, *, settings: StudentSettings
) -> list[Fit]:
    """Add heads as long as the held-out error falls by more than chance; the last fit is the answer."""
    fits: list[Fit] = []
    before = None
    for heads in counts:
        fit = fit_student(examples, held_out, heads, rng, wanted=0.0, settings=settings)
        errors = sequence_errors(fit.layer, held_out)
        if before is not None:
            gains = before - errors
            if gains.mean() < max(_chance(gains), HARDLY * before.mean()):
                return [*fits[:-1], fit, fits[-1]]
        fits.append(fit)
        before = errors
    return fits

r"""The two-stage algorithm, from observables only: gradient steps, a switch, a proximal stage, rounding, a refit.

Stage one takes projected, preconditioned stochastic gradient steps without any penalty: at the start values and
attention carry next to no signal, and soft-thresholding would set the attention to zero for ever. It ends when in every
row of the attention one entry stands out of the noise. Stage two adds an :math:`\ell_1` penalty on the attention whose
strength follows the noise of the gradient, and stops at the smallest loss on samples held out. What is found is then
rounded and refitted (`manyheads.bigram.training.rounding`).

Nothing here reads the task's transition, positions or weights except to draw samples: the rates follow from a guess of
the two energies, which enters through its square root.

**The mirror.** The loss has a second, almost equally deep minimum at :math:`W = -\tilde P`, :math:`a = 2/T - q`: with
two signs wrong the product is right. Training lands there in a good part of all runs, and it shows: the entries that
stand out are then negative. Both signs are turned at the switch.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), abstract: two stages, the second proximal. The switch, the turning of the mirror, the strength, the
early stop and the refit are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.bigram.engines.generator import Seed
from manyheads.bigram.task import BigramTask, draw_batch
from manyheads.bigram.training import rounding
from manyheads.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, observe, start
from manyheads.bigram.training.rounding import Loss, estimate_loss, find_support
from manyheads.bigram.training.settings import FirstStage, TrainingSettings
from manyheads.errors import CertificateError

CANDIDATES = 32  # positions looked at again for each that is wanted: those above 2.2 standard deviations in 5,000


class SwitchNotReached(CertificateError):
    """In the whole budget no entry stood out of the noise in every row: more samples, or other rates."""


class Salience(NamedTuple):
    """By how many robust standard deviations the largest and the smallest entry of each row stand out, (N,) each."""

    high: np.ndarray
    low: np.ndarray


@dataclass(frozen=True)
class Boosted:
    """What stage one ended with.

    Attributes
    ----------
    state
        Values and attention, with the mirror turned.
    steps, samples
        How much it took.
    salience
        By how much the weakest row's largest entry stands out.
    flipped
        Whether it had landed in the mirror.
    """

    state: State
    steps: int
    samples: int
    salience: float
    flipped: bool


@dataclass(frozen=True)
class Refined:
    """What stage two ended with.

    Attributes
    ----------
    state
        Values and attention where the loss on held-out samples was smallest: the raw iterate, not rounded.
    last
        The raw iterate at the end of the budget.
    samples
        Drawn in all, those after the smallest loss included.
    best
        Drawn up to the smallest loss.
    curve
        (points, 2): samples drawn and loss on the samples held out.
    stopped
        "held-out": the smallest loss lies before the last look; "budget": it was still falling.
    """

    state: State
    last: State
    samples: int
    best: int
    curve: np.ndarray
    stopped: Literal["held-out", "budget"]


@dataclass(frozen=True)
class Trained:
    """The result of a run, with its certificate.

    Attributes
    ----------
    state
        The final values and attention, after `finish`.
    raw
        Values and attention before rounding.
    support
        The positions found, one array a query.
    loss
        Of `state` on fresh samples that nothing else has seen, with its standard error.
    samples
        How many were drawn, by what for: first, second, held-out, fit, certificate.
    flipped, salience
        Whether the mirror was turned, and the switch's figure.
    stopped
        "held-out", "budget", or "switch" when there was no stage two.
    curve
        Loss on held-out samples over stage two, (points, 2).
    """

    state: State
    raw: State
    support: tuple[np.ndarray, ...]
    loss: Loss
    samples: dict[str, int]
    flipped: bool
    salience: float
    stopped: Literal["held-out", "budget", "switch"]
    curve: np.ndarray


@takes_arrays
def measure_salience(attention: np.ndarray) -> Salience:
    r"""Return how far the largest and the smallest entry of each row are from 1/T, in robust standard deviations.

    The standard deviation is the median of :math:`|a_t - 1/T|` over .6745, which a few large entries do not move.

    Examples
    --------
    >>> row = np.full((1, 1000), 1e-3)
    >>> row[0, ::2] += 1e-4
    >>> row[0, 1::2] -= 1e-4
    >>> row[0, 0] += 0.01
    >>> [float(part.round(1)[0]) for part in measure_salience(row)]
    [68.1, 0.7]
    """
    attention = np.asarray(attention, np.float64)
    away = attention - 1 / attention.shape[1]
    spread = np.median(np.abs(away), axis=1) / 0.6745
    spread = np.maximum(spread, np.finfo(np.float32).eps / attention.shape[1])  # rounding of a row that has not moved
    return Salience(away.max(1) / spread, -away.min(1) / spread)


def is_mirrored(attention: np.ndarray) -> bool:
    """Return whether in most rows the entry that stands out most is negative."""
    high, low = measure_salience(attention)
    return bool((low > high).mean() > 0.5)


@takes_arrays
def mirror(state: State) -> State:
    r"""Turn both signs: :math:`W \to -W`, :math:`a \to 2/T - a`. Predictions change by terms of order 1/T only."""
    attention = np.asarray(state.attention)
    return state._replace(value=-np.asarray(state.value), attention=np.float32(2 / attention.shape[1]) - attention)


@takes_arrays
def boost(task: BigramTask, settings: FirstStage, *, seed: Seed, engine: str | None = None) -> Boosted:
    """Run stage one until in every row one entry stands out of the noise, and turn the mirror.

    Raises
    ------
    SwitchNotReached
        The budget is spent: `settings.patience` times the steps that the law promises.
    manyheads.bigram.training.proximal_sgd.Diverged
        The values grew without bound.
    """
    steps = settings.steps(task.length)
    rate = settings.rate(task.length)
    every = max(10, math.ceil(0.25 / rate))  # a look each time the signal has grown by a quarter
    budget = math.ceil(settings.patience * (math.log(task.length) + 1.3) / rate)
    state, taken, reached = start(task), 0, 0.0
    remedy = (
        f"stage one: lower growth (now {settings.growth:g}) or the guess transition_energy "
        f"(now {settings.transition_energy:g})"
    )
    while taken < budget:
        with _remedied(remedy):
            state = descend(task, state, steps, every, seed=seed, first_step=taken, engine=engine)
        taken += every
        high, low = measure_salience(state.attention)
        flipped = is_mirrored(state.attention)
        reached = float((low if flipped else high).min())
        if reached > settings.switch:
            more = math.ceil(settings.settle / rate)
            with _remedied(remedy):
                state = descend(task, state, steps, more, seed=seed, first_step=taken, engine=engine)
            taken += more
            flipped = is_mirrored(state.attention)
            state = mirror(state) if flipped else state
            return Boosted(state, taken, taken * settings.batch, reached, flipped)
    raise SwitchNotReached(
        f"after {taken * settings.batch} samples no entry stands out in every row: raise patience (now "
        f"{settings.patience:g}) if the guess transition_energy (now {settings.transition_energy:g}) may be too small; "
        f"lower growth (now {settings.growth:g}) if it may be too large or if tokens are rare, for then noise wins",
        measured=reached,
        threshold=settings.switch,
    )


@takes_arrays
def refine(
    task: BigramTask,
    boosted: Boosted,
    settings: TrainingSettings,
    rng: np.random.Generator,
    *,
    seed: Seed,
    engine: str | None = None,
) -> Refined:
    """Run stage two and return where the loss on held-out samples was smallest.

    The penalty is set anew after every look, to `ratio` standard deviations of the gradient's noise.

    Raises
    ------
    manyheads.bigram.training.proximal_sgd.Diverged
        The values grew without bound.
    """
    second, first = settings.second, settings.first
    held_out = draw_batch(rng, task, settings.held_out)
    state, taken = boosted.state, 0
    best, curve = (math.inf, state, 0), []
    rates = (second.rate / first.energy(task.length), second.rate / first.transition_energy)
    looks = 1 + second.samples // (second.batch * second.every)
    for look in range(looks):
        loss = estimate_loss(state, task.stationary, held_out).mean
        curve.append((taken * second.batch, loss))
        if loss < best[0]:
            best = (loss, state, taken * second.batch)
        if look == looks - 1:
            break
        number, strength = boosted.steps + taken, 0.0
        if second.penalised:  # from the samples of the step to come: none is drawn for this alone
            seen = observe(task, state, second.batch, seed=seed, step=number, engine=engine)
            strength = second.ratio * estimate_noise(seen.attention, task.stationary)
        step = StepSettings(second.batch, *rates, strength=strength, constrained=second.kind != "proximal")
        with _remedied(f"stage two: lower its rate (now {second.rate:g}) or raise its batch (now {second.batch})"):
            state = descend(task, state, step, second.every, seed=seed, first_step=number, engine=engine)
        taken += second.every
    stopped: Literal["held-out", "budget"] = "budget" if best[2] == taken * second.batch else "held-out"
    return Refined(best[1], state, taken * second.batch, best[2], np.array(curve), stopped)


@contextmanager
def _remedied(remedy: str) -> Iterator[None]:
    """Say in the words of the settings what a descent that diverges needs."""
    try:
        yield
    except Diverged as error:
        raise Diverged(f"{remedy}; {error.message}", measured=error.measured, threshold=error.threshold) from None


def estimate_noise(attention_gradient: np.ndarray, stationary: np.ndarray) -> float:
    r"""Return the standard deviation of a gradient over positions, from its median size: rows weighted by frequency.

    It is near :math:`\sqrt{K_V/B}`, :math:`K_V = \sum_j\mu_j|W_j|^2`, when all tokens are equally frequent. The few
    positions that carry signal do not move a median.

    Parameters
    ----------
    attention_gradient
        (N, T), of `manyheads.bigram.training.proximal_sgd.observe`.
    stationary
        (N,).

    Examples
    --------
    >>> noise = 3 * np.random.default_rng(0).standard_normal((2, 4000))
    >>> bool(abs(estimate_noise(noise, np.full(2, 0.5)) - 3) < 0.3)
    True
    """
    return float(stationary @ np.median(np.abs(attention_gradient), axis=1)) / 0.6745


def train_bigram(task: BigramTask, settings: TrainingSettings, *, seed: int, engine: str | None = None) -> Trained:
    """Train from nothing: stage one, the switch, stage two, rounding, the fit, and a certificate on fresh samples.

    Parameters
    ----------
    task
        What samples are drawn from; nothing else of it is used.
    settings
        The run; see `TrainingSettings`.
    seed
        All draws follow from it.
    engine
        None: the fastest that is installed; see `manyheads.bigram.training.proximal_sgd.descend`.

    Raises
    ------
    SwitchNotReached, manyheads.bigram.training.proximal_sgd.Diverged
        See `boost` and `refine`.
    CertificateError
        The fit does not settle.

    Examples
    --------
    >>> from manyheads.bigram.training.settings import SecondStage
    >>> from manyheads.bigram.task import draw_task, typical_energy
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=60, sparsity=2)
    >>> settings = TrainingSettings(FirstStage(typical_energy(3), 2, batch=32, growth=2.0), SecondStage("none"))
    >>> done = train_bigram(task, settings, seed=1)
    >>> [row.tolist() for row in done.support] == task.positions.tolist(), done.stopped
    (True, 'switch')
    """
    for_steps, for_held_out, for_fit, for_certificate = np.random.SeedSequence(seed).spawn(4)
    step_seed = int(for_steps.generate_state(1)[0])
    stationary = task.stationary
    boosted = boost(task, settings.first, seed=step_seed, engine=engine)
    counts = {"first": boosted.samples, "second": 0, "held-out": 0, "fit": 0, "certificate": settings.held_out}
    raw, curve = boosted.state, np.zeros((0, 2))
    stopped: Literal["held-out", "budget", "switch"] = "switch"
    if settings.second.kind != "none":
        refined = refine(task, boosted, settings, np.random.default_rng(for_held_out), seed=step_seed, engine=engine)
        raw, stopped, curve = refined.state, refined.stopped, refined.curve
        counts |= {"second": refined.samples, "held-out": settings.held_out}
    state = finish(task, raw, settings, np.random.default_rng(for_fit))
    counts["fit"] = settings.fresh if settings.finish in ("scale", "values", "joint") else 0
    certificate = draw_batch(np.random.default_rng(for_certificate), task, settings.held_out)
    return Trained(
        state=state,
        raw=raw,
        support=find_support(state.attention, None if settings.finish == "joint" else settings.first.sparsity),
        loss=estimate_loss(state, stationary, certificate),
        samples=counts,
        flipped=boosted.flipped,
        salience=boosted.salience,
        stopped=stopped,
        curve=curve,
    )


def finish(task: BigramTask, raw: State, settings: TrainingSettings, rng: np.random.Generator) -> State:
    """Round a raw state and fit it to fresh samples, as `settings.finish` says."""
    if settings.finish == "none":
        return raw
    if settings.finish == "joint":
        return fit_support(task, raw, settings.first.sparsity, rng, samples=settings.fresh)
    rounded = rounding.round_attention(raw, task.stationary)
    if settings.finish == "round":
        return rounded
    seen = rounding.glimpse(rng, task, find_support(rounded.attention), settings.fresh)
    refit = rounding.refit_scale if settings.finish == "scale" else rounding.refit_values
    return refit(rounded, task.stationary, seen)


def fit_support(task: BigramTask, raw: State, sparsity: int, rng: np.random.Generator, *, samples: int) -> State:
    """Find the positions among the largest of a raw state, and fit values and weights there, on fresh samples.

    At the switch the second weight of a row may still be among the noise: `CANDIDATES` positions for each that is
    wanted are looked at again, on a quarter of the samples, and the fit has the rest.
    """
    wide = find_support(raw.attention, min(CANDIDATES * sparsity, task.length))
    seen = rounding.glimpse(rng, task, wide, max(1, samples // 4))
    support = rounding.sift_support(raw, task.stationary, seen, sparsity)
    even = np.zeros(np.shape(raw.attention), np.float32)
    for query, row in enumerate(support):
        even[query, row] = 1 / len(row)
    rest = rounding.glimpse(rng, task, support, max(1, samples - samples // 4))
    return rounding.refit_jointly(raw._replace(attention=even), task.stationary, rest)

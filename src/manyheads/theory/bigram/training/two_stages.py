r"""Two-stage algorithm: preconditioned gradient steps, then proximal steps, rounding and a refit, from samples only.

Stage one takes projected, preconditioned stochastic gradient steps without a penalty: at initialization values and
attention carry almost no signal, and a soft threshold would keep the attention at zero. It ends at the switch, when the
largest weight of every attention row has a large z-score. Stage two adds an :math:`\ell_1` penalty on the attention,
calibrated to the noise of the gradient, and stops early on held-out samples. The result is rounded and refitted
(`manyheads.theory.bigram.training.rounding`).

The task's transition, positions and weights are used for drawing samples only: learning rates follow from a guess of
the two squared norms, which enters through its square root.

**Sign-flipped solution.** The loss has a second, almost equally low region at :math:`W = -\tilde P`,
:math:`a = 2/T - q`: the product of the two wrong signs is right. A predictable share of all runs reaches it
(`manyheads.theory.bigram.theorems.signal`). The weights of largest z-score are then negative, and both signs are
flipped at the switch.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), abstract: two stages, the second proximal. The criterion of the switch, the sign flip, the size of
the penalty, early stopping and the refit are derived here.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from manyheads.errors import CertificateError
from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.training import rounding
from manyheads.theory.bigram.training.proximal_sgd import (
    Diverged,
    State,
    StepSettings,
    batch_gradients,
    descend,
    initial_state,
)
from manyheads.theory.bigram.training.record import trajectory
from manyheads.theory.bigram.training.rounding import LossEstimate, estimate_loss, find_support
from manyheads.theory.bigram.training.settings import FirstStage, TrainingSettings

CANDIDATES = 32  # positions checked again for each attended one: those above 2.2 standard deviations in 5,000

Stopped = Literal["held-out", "budget", "switch"]


class SwitchNotReached(CertificateError):
    """No weight of large z-score in every row within the budget: use more samples, or other rates."""


class ZScores(NamedTuple):
    """Robust z-scores of the largest and of the smallest weight of each row, (N,) each, counted from 1/T."""

    high: np.ndarray
    low: np.ndarray


@dataclass(frozen=True)
class StageOneResult:
    """State after stage one with corrected signs, steps, samples, smallest z-score, whether signs were flipped."""

    state: State
    steps: int
    samples: int
    z_score: float
    flipped: bool


@dataclass(frozen=True)
class StageTwoResult:
    """Result of stage two."""

    state: State  # raw iterate of smallest held-out loss
    last: State  # at the end of the budget
    samples: int  # drawn in all, those after the smallest loss included
    curve: np.ndarray  # (points, 2): samples drawn and held-out loss
    stopped: Stopped  # "held-out": the smallest loss precedes the last evaluation; "budget": it was still falling


@dataclass(frozen=True)
class TwoStageResult:
    """Result of `train_bigram`."""

    state: State  # final values and attention, after the refit
    raw: State  # values and attention before rounding
    support: tuple[np.ndarray, ...]  # the positions found, one array per query
    loss: LossEstimate  # of `state` on fresh samples, with its standard error
    samples: dict[str, int]  # number drawn for each purpose: first, second, held-out, fit, certificate
    flipped: bool  # whether the signs were flipped
    z_score: float  # at the switch
    stopped: Stopped  # "held-out", "budget", or "switch" without a stage two
    curve: np.ndarray  # held-out loss over stage two, (points, 2)


def robust_z_scores(attention: np.ndarray) -> ZScores:
    r"""Return z-scores of attention rows (N, T), with the standard deviation median :math:`|a_t - 1/T|` / .6745."""
    attention = np.asarray(attention, np.float64)
    away = attention - 1 / attention.shape[1]
    std = np.median(np.abs(away), axis=1) / 0.6745
    std = np.maximum(std, np.finfo(np.float32).eps / attention.shape[1])  # rounding of a row that has not moved
    return ZScores(away.max(1) / std, -away.min(1) / std)


def is_sign_flipped(attention: np.ndarray) -> bool:
    """Return whether the weight of largest z-score is negative in most rows."""
    high, low = robust_z_scores(attention)
    return bool((low > high).mean() > 0.5)


def flip_signs(state: State) -> State:
    r"""Flip both signs, :math:`W \to -W`, :math:`a \to 2/T - a`: predictions change by terms of order 1/T."""
    attention = np.asarray(state.attention)
    return state._replace(value=-np.asarray(state.value), attention=np.float32(2 / attention.shape[1]) - attention)


def run_stage_one(task: BigramTask, settings: FirstStage, *, seed: Seed, engine: str | None = None) -> StageOneResult:
    """Run stage one to the switch and beyond it for the extra time, and correct the signs."""
    steps, growth = settings.steps(task.length), settings.growth(task.length)
    every = max(10, math.ceil(0.25 / growth))  # check each time the signal has grown by a quarter
    budget = math.ceil(settings.patience * (math.log(task.length) + 1.3) / growth)
    z_score = 0.0
    remedy = (
        f"stage one: lower noise_ratio (now {settings.noise_ratio:g}) or the guess transition_squared_norm "
        f"(now {settings.transition_squared_norm:g})"
    )

    def train(state: State, first_step: int, more: int = every) -> State:
        with _remedy(remedy):
            return descend(task, state, steps, more, seed=seed, first_step=first_step, engine=engine)

    for done, state in trajectory(train, initial_state(task), every):
        if done:
            high, low = robust_z_scores(state.attention)
            z_score = float((low if is_sign_flipped(state.attention) else high).min())
        if z_score > settings.switch:
            extra = math.ceil(settings.extra / growth)
            state, done = train(state, done, extra), done + extra
            if flipped := is_sign_flipped(state.attention):
                state = flip_signs(state)
            return StageOneResult(state, done, done * settings.batch, z_score, flipped)
        if done >= budget:
            break
    raise SwitchNotReached(
        f"no weight is significant in every row after {done * settings.batch} samples: raise patience (now "
        f"{settings.patience:g}) if the guess transition_squared_norm (now {settings.transition_squared_norm:g}) may "
        f"be too small; lower noise_ratio (now {settings.noise_ratio:g}) if it may be too large or if tokens are rare",
        measured=z_score,
        threshold=settings.switch,
    )


def run_stage_two(
    task: BigramTask,
    stage_one: StageOneResult,
    settings: TrainingSettings,
    rng: np.random.Generator,
    *,
    seed: Seed,
    engine: str | None = None,
) -> StageTwoResult:
    """Run stage two with early stopping; after every evaluation the penalty is set to `ratio` standard deviations."""
    second, first = settings.second, settings.first
    held_out = task.draw(rng, settings.held_out)
    rates = (second.growth / first.squared_norm(task.length), second.growth / first.transition_squared_norm)

    def train(state: State, first_step: int) -> State:
        number, penalty = stage_one.steps + first_step, 0.0
        if second.penalized:  # estimated on the samples of the next step: no extra ones are drawn
            seen = batch_gradients(task, state, second.batch, seed=seed, step=number, engine=engine)
            penalty = second.ratio * estimate_noise(seen.attention, task.stationary)
        step = StepSettings(second.batch, *rates, penalty=penalty)
        with _remedy(
            f"stage two: lower its growth per step (now {second.growth:g}) or raise its batch (now {second.batch})"
        ):
            return descend(task, state, step, second.every, seed=seed, first_step=number, engine=engine)

    budget = second.every * (second.samples // (second.batch * second.every))
    best, least, curve = stage_one.state, math.inf, []
    stopped: Stopped = "budget"
    for done, state in trajectory(train, stage_one.state, second.every):
        loss = estimate_loss(state, task.stationary, held_out).mean
        curve.append((done * second.batch, loss))
        stopped = "held-out"
        if loss < least:
            best, least, stopped = state, loss, "budget"
        if done >= budget:
            break
    return StageTwoResult(best, state, done * second.batch, np.array(curve), stopped)


@contextmanager
def _remedy(remedy: str) -> Iterator[None]:
    """Prefix the error of a diverging descent with the settings to change."""
    try:
        yield
    except Diverged as error:
        raise Diverged(f"{remedy}; {error.message}", measured=error.measured, threshold=error.threshold) from None


def estimate_noise(attention_gradient: np.ndarray, stationary: np.ndarray) -> float:
    r"""Return the noise of an attention gradient (N, T) over positions, from its median absolute value.

    It is close to :math:`\sqrt{K_V/B}`, :math:`K_V = \sum_j\mu_j|W_j|^2`, when all tokens are equally frequent. The few
    positions that carry signal do not change a median.
    """
    return float(stationary @ np.median(np.abs(attention_gradient), axis=1)) / 0.6745


def train_bigram(
    task: BigramTask, settings: TrainingSettings | None = None, *, seed: int = 0, engine: str | None = None
) -> TwoStageResult:
    """Train on a task by the two-stage algorithm: stage one, switch, stage two, rounding, refit, loss on fresh samples.

    Parameters
    ----------
    task
        Task that samples are drawn from; its transition, positions and weights are not used otherwise.
    settings
        Learning rates, penalty and budgets; by default those of `TrainingSettings.for_task`.
    seed
        Determines all draws.
    engine
        ``"numba"`` (the extra `fast`), ``"jax"``, or None for numba where it is installed.

    Returns
    -------
    Trained
        Values, attention, positions found, samples drawn for each purpose, and the loss on fresh samples.

    Raises
    ------
    manyheads.errors.CertificateError
        The switch is not reached within the budget, the training diverges, or the refit does not converge.

    Examples
    --------
    >>> from manyheads.theory.bigram import draw_bigram_task
    >>> from manyheads.theory.bigram.training.settings import SecondStage
    >>> task = draw_bigram_task(np.random.default_rng(0), vocabulary=3, length=60, sparsity=2)
    >>> settings = TrainingSettings(FirstStage(0.2, 2, batch=32, noise_ratio=2.0), SecondStage("none"))
    >>> done = train_bigram(task, settings, seed=1)
    >>> [row.tolist() for row in done.support] == task.positions.tolist(), done.stopped
    (True, 'switch')
    """
    settings = TrainingSettings.for_task(task) if settings is None else settings
    for_steps, for_held_out, for_fit, for_certificate = np.random.SeedSequence(seed).spawn(4)
    step_seed = int(for_steps.generate_state(1)[0])
    stage_one = run_stage_one(task, settings.first, seed=step_seed, engine=engine)
    counts = {"first": stage_one.samples, "second": 0, "held-out": 0, "fit": settings.fresh}
    counts["certificate"] = settings.held_out
    raw, curve = stage_one.state, np.zeros((0, 2))
    stopped: Stopped = "switch"
    if settings.second.kind != "none":
        rng = np.random.default_rng(for_held_out)
        second = run_stage_two(task, stage_one, settings, rng, seed=step_seed, engine=engine)
        raw, stopped, curve = second.state, second.stopped, second.curve
        counts |= {"second": second.samples, "held-out": settings.held_out}
    state = fit_support(task, raw, settings.first.sparsity, np.random.default_rng(for_fit), samples=settings.fresh)
    certificate = task.draw(np.random.default_rng(for_certificate), settings.held_out)
    return TwoStageResult(
        state=state,
        raw=raw,
        support=find_support(state.attention),
        loss=estimate_loss(state, task.stationary, certificate),
        samples=counts,
        flipped=stage_one.flipped,
        z_score=stage_one.z_score,
        stopped=stopped,
        curve=curve,
    )


def fit_support(task: BigramTask, raw: State, sparsity: int, rng: np.random.Generator, *, samples: int) -> State:
    """Find the positions among the largest of a raw state, and fit values and weights there, on fresh samples.

    At the switch the second weight of a row may be below the noise: `CANDIDATES` positions for each attended one are
    checked on a quarter of the samples, and the fit uses the rest.
    """
    wide = find_support(raw.attention, min(CANDIDATES * sparsity, task.length))
    seen = rounding.sample_support(rng, task, wide, max(1, samples // 4))
    support = rounding.check_support(raw, task.stationary, seen, sparsity)
    even = np.zeros(np.shape(raw.attention), np.float32)
    for query, row in enumerate(support):
        even[query, row] = 1 / len(row)
    rest = rounding.sample_support(rng, task, support, max(1, samples - samples // 4))
    return rounding.refit_jointly(raw._replace(attention=even), task.stationary, rest)

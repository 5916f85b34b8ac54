"""Training with records: states every few steps, with exact excess loss and overlaps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import NamedTuple, TypeVar

import numpy as np

from manyheads.errors import UsageError
from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.population import excess, measure_overlaps
from manyheads.theory.bigram.training import rounding
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings, descend, initial_state

S = TypeVar("S")


@dataclass(frozen=True)
class TrainingRecord:
    """Records of a run, the initial state included: arrays of one length."""

    steps: np.ndarray
    excess: np.ndarray  # over that of the initial state: 1 without knowledge, 0 at the solution
    value_signal: np.ndarray  # overlap with the task's transition, 1 at the solution
    attention_signal: np.ndarray  # overlap with its weights
    nonzero: np.ndarray  # share of nonzero attention weights
    state: State  # the last one


class TaskDistances(NamedTuple):
    r"""Distance of a state from the task: :math:`|W - \tilde P|_\mu` and :math:`|A - Q|_\mu`."""

    value: float
    attention: float
    support: float  # share of the queries whose Q largest positions are the right ones
    excess: float  # loss over that of the initial state


def trajectory(train: Callable[..., S], state: S, every: int) -> Iterator[tuple[int, S]]:
    """Yield steps done and state, initial one first; `train(state, first_step=n)` makes the next `every` steps."""
    for done in count(0, every):
        yield done, state
        state = train(state, first_step=done)


def record(
    task: BigramTask, init: State, settings: StepSettings, steps: int, records: int, *, seed: Seed
) -> TrainingRecord:
    """Train and record at equal distances; `steps` is rounded up to a multiple of `records`."""
    if records < 1 or steps < 1:
        raise UsageError(f"steps={steps}, records={records}: give at least one of each")
    every, rows = -(-steps // records), []
    zero = excess(task, *initial_state(task))

    train = partial(descend, task, settings=settings, steps=every, seed=seed)
    for done, state in islice(trajectory(train, init, every), records + 1):
        found, nonzero = measure_overlaps(task, *state), np.count_nonzero(state.attention) / state.attention.size
        rows.append((done, excess(task, *state) / zero, found.value_signal, found.attention_signal, nonzero))
    steps_done, losses, values, weights, shares = np.array(rows).T
    return TrainingRecord(steps_done.astype(int), losses, values, weights, shares, state)


def crossing(steps: np.ndarray, rising: np.ndarray, level: float) -> float:
    """Return the steps at which a positive curve first exceeds a level, by geometric interpolation."""
    above = np.flatnonzero(rising >= level)
    if not above.size:
        return float(steps[-1])
    right = max(int(above[0]), 1)
    low, high = np.log(np.maximum(rising[right - 1 : right + 1], 1e-12))
    share = (np.log(level) - low) / (high - low) if high > low else 1.0
    return float(steps[right - 1] + np.clip(share, 0, 1) * (steps[right] - steps[right - 1]))


def measure_distances(task: BigramTask, state: State) -> TaskDistances:
    """Measure the distance of a state from its task."""
    mu = task.stationary
    away = ((np.asarray(state.attention, float) - task.attention) ** 2).sum(1)
    return TaskDistances(
        float(mu @ ((state.value - task.centred) ** 2).sum(0)) ** 0.5,
        float(mu @ away) ** 0.5,
        rounding.share_of_support(task, rounding.find_support(state.attention, task.sparsity)),
        excess(task, state.value, state.attention) / excess(task, *initial_state(task)),
    )


def measure_refitted(
    task: BigramTask, raw: State, samples: int, rng: np.random.Generator
) -> tuple[TaskDistances, TaskDistances, TaskDistances]:
    """Measure a state: raw, rounded, and rounded with its scale refitted to fresh samples."""
    rounded = rounding.round_attention(raw, task.stationary)
    seen = rounding.sample_support(rng, task, rounding.find_support(rounded.attention), samples)
    fitted = rounding.refit_scale(rounded, task.stationary, seen)
    return measure_distances(task, raw), measure_distances(task, rounded), measure_distances(task, fitted)


def measure_rounded(task: BigramTask, state: State) -> TaskDistances:
    """Measure the distance of a state from its task after rounding."""
    return measure_distances(task, rounding.round_attention(state, task.stationary))

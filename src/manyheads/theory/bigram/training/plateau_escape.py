"""Plateau escape of SGD: the step at which the product of the two signals exceeds .3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from manyheads._trees import PyTree
from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.population import measure_overlaps
from manyheads.theory.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, initial_state
from manyheads.theory.bigram.training.record import trajectory
from manyheads.theory.bigram.training.reduced_model import ESCAPED


class SgdEscape(NamedTuple):
    """Step of the escape, infinite without one; whether the signs are flipped; the state of the record after it."""

    steps: float
    flipped: bool
    state: PyTree


def train_to_escape(
    task: BigramTask,
    train: Callable[[Any, int], PyTree],
    init: PyTree,
    every: int,
    most_steps: int,
    linear: Callable[[Any], State] = lambda state: state,
) -> SgdEscape:
    """Train by `train(state, first_step)`, `every` steps a call, until the plateau escape of `linear(state)`."""
    before, state = 0.0, init
    with suppress(Diverged):
        for done, state in trajectory(train, init, every):
            overlaps = measure_overlaps(task, *linear(state))
            product = overlaps.value_signal * overlaps.attention_signal
            if product > ESCAPED:
                share = np.log(ESCAPED / before) / np.log(product / before) if before > 0 else 1.0
                return SgdEscape(done - every + share * every, overlaps.value_signal < 0, state)
            if done >= most_steps:
                break
            before = product
    return SgdEscape(float("inf"), False, state)


def sgd_escape(
    task: BigramTask, settings: StepSettings, every: int, most_steps: int, *, seed: Seed, init: State | None = None
) -> SgdEscape:
    """Train by SGD until the plateau escape, from zero values and uniform attention or from `init`."""
    train = partial(descend, task, settings=settings, steps=every, seed=seed)
    start = init or initial_state(task)
    return train_to_escape(task, lambda state, at: train(state, first_step=at), start, every, most_steps)


def median_escape(steps: np.ndarray, flipped: np.ndarray, most_steps: int) -> float:
    """Return the median step of the escape of runs with the right signs, of all runs if none has them.

    A run without escape, at infinity, counts with its budget: a lower bound.
    """
    right = steps[flipped == 0] if (flipped == 0).any() else steps
    return float(np.median(np.minimum(right, most_steps)))

"""Plateau escape of SGD: the step at which the product of the two signals exceeds .3."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from manyheads.bigram.engines.generator import Seed
from manyheads.bigram.task import BigramTask
from manyheads.bigram.theory.population import measure_overlaps
from manyheads.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, initial_state
from manyheads.bigram.training.record import trajectory
from manyheads.bigram.training.reduced_model import ESCAPED


def sgd_escape(
    task: BigramTask, settings: StepSettings, every: int, most_steps: int, *, seed: Seed
) -> tuple[float, bool]:
    """Return the step of the escape, infinite without one, and whether the signs are flipped."""
    before = 0.0

    def train(state: State, first_step: int) -> State:
        return descend(task, state, settings, every, seed=seed, first_step=first_step)

    with suppress(Diverged):
        for done, state in trajectory(train, initial_state(task), every):
            overlaps = measure_overlaps(task, *state)
            product = overlaps.value_signal * overlaps.attention_signal
            if product > ESCAPED:
                share = np.log(ESCAPED / before) / np.log(product / before) if before > 0 else 1.0
                return done - every + share * every, overlaps.value_signal < 0
            if done >= most_steps:
                break
            before = product
    return float("inf"), False

"""Divergence of SGD from scratch: the smallest growth per step at which one run diverges."""

import math

from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.setups import steps_of
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.training.proximal_sgd import Diverged, descend, initial_state


def divergence_threshold(task: BigramTask, batch: int, duration: float, grain: float, *, seed: Seed) -> float:
    """Bisect the growth per step between one that trains for `duration` e-foldings and one that diverges.

    `grain` is the factor to which the threshold is found.
    """
    scale = (batch * task.transition_squared_norm * task.attention_squared_norm / task.length) ** 0.5
    low, high = scale / 8, 8 * scale
    while high > grain * low:
        middle = (low * high) ** 0.5
        try:
            descend(task, initial_state(task), steps_of(task, middle, batch), math.ceil(duration / middle), seed=seed)
            low = middle
        except Diverged:
            high = middle
    return (low * high) ** 0.5

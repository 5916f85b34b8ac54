"""A descent that is looked at: the exact loss and overlaps of every few steps, for studies that know their task.

What is recorded needs the task's transition and positions, so it belongs to studies and not to training, which sees
samples only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.bigram.engines.generator import Seed
from manyheads.bigram.task import BigramTask
from manyheads.bigram.theory.population import excess, measure_overlaps
from manyheads.bigram.training.proximal_sgd import State, StepSettings, descend, start
from manyheads.bigram.training.rounding import find_support, round_attention
from manyheads.errors import UsageError


@dataclass(frozen=True)
class Record:
    """What was seen at every look, the start included: arrays of one length.

    Attributes
    ----------
    steps
        Steps done.
    excess
        Loss above the best one over that of the start: 1 knows nothing, 0 is perfect.
    value_signal, attention_signal
        Overlaps with the task's transition and weights: 1 at the solution.
    attention_energy
        Mean square norm of the rows.
    nonzero
        Share of the attention that is not zero.
    state
        The last state.
    """

    steps: np.ndarray
    excess: np.ndarray
    value_signal: np.ndarray
    attention_signal: np.ndarray
    attention_energy: np.ndarray
    nonzero: np.ndarray
    state: State


class Distances(NamedTuple):
    r"""How far an answer is from the task.

    Attributes
    ----------
    value
        :math:`|W - \tilde P|_\mu`.
    attention
        :math:`|A - Q|_\mu`.
    support
        Share of the queries whose largest Q positions are the right ones.
    excess
        Loss above the best over that of the start.
    """

    value: float
    attention: float
    support: float
    excess: float


def record(
    task: BigramTask,
    state: State,
    settings: StepSettings,
    steps: int,
    looks: int,
    *,
    seed: Seed,
    first_step: int = 0,
) -> Record:
    """Descend and look at equal distances.

    Parameters
    ----------
    task, state, settings, steps, seed, first_step
        As in `manyheads.bigram.training.proximal_sgd.descend`.
    looks
        How often, the start not counted; steps are rounded up to a multiple.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=20, sparsity=2)
    >>> seen = record(task, start(task), StepSettings(64, 0.2, 0.2), 100, 2, seed=0)
    >>> seen.steps.tolist(), round(float(seen.excess[0]), 6), bool(seen.excess[-1] < 0.5)
    ([0, 50, 100], 1.0, True)
    """
    if looks < 1 or steps < 1:
        raise UsageError(f"steps={steps}, looks={looks}: at least one of each")
    every, rows = -(-steps // looks), []
    zero = excess(task, *start(task))
    for look in range(looks + 1):
        if look:
            state = descend(task, state, settings, every, seed=seed, first_step=first_step + (look - 1) * every)
        found = measure_overlaps(task, state.value, state.attention)
        rows.append(
            (
                look * every,
                excess(task, state.value, state.attention) / zero,
                found.value_signal,
                found.attention_signal,
                found.attention_energy,
                np.count_nonzero(state.attention) / state.attention.size,
            )
        )
    steps_done, losses, values, weights, energies, shares = np.array(rows).T
    return Record(steps_done.astype(int), losses, values, weights, energies, shares, state)


@takes_arrays
def measure_distances(task: BigramTask, state: State) -> Distances:
    """Measure how far a state is from its task.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=20, sparsity=2)
    >>> [round(part, 6) for part in measure_distances(task, State(task.centred, task.attention))]
    [0.0, 0.0, 1.0, 0.0]
    """
    law = task.stationary
    away = ((np.asarray(state.attention, float) - task.attention) ** 2).sum(1)
    found = find_support(state.attention, task.sparsity)
    right = [np.array_equal(row, true) for row, true in zip(found, task.positions, strict=True)]
    return Distances(
        float(law @ ((state.value - task.centred) ** 2).sum(0)) ** 0.5,
        float(law @ away) ** 0.5,
        float(np.mean(right)),
        excess(task, state.value, state.attention) / excess(task, *start(task)),
    )


@takes_arrays
def measure_rounded(task: BigramTask, state: State) -> Distances:
    """Measure how far a state is from its task after rounding."""
    return measure_distances(task, round_attention(state, task.stationary))

"""Shared parts of the bigram studies: source, seed and task of a replicate, predictions of training."""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess, excess_of_signals, gradients, measure_overlaps
from manyheads.theory.bigram.theorems.signal import SignalSystem, SignalTrajectory, solve_signals
from manyheads.theory.bigram.training import plateau_escape, rounding, two_stages
from manyheads.theory.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, initial_state

EXCESS = "excess loss"
SUPPORT = "share of queries with the right positions"
VALUES, WEIGHTS = "signal of the values", "signal of the attention"
EXCESS_AXIS = "excess loss / initial one"
ROUNDING = 1e-6  # of a ratio of losses: the attention is float32


def replicate_seed(key: jax.Array) -> list[int]:
    """Return the seed of a replicate's samples: the same in every cell."""
    return [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]


def redraw(task: BigramTask, key: jax.Array) -> BigramTask:
    """Return the task of a replicate: its own transition and positions, the same in every cell, and the given weights.

    All tokens are equally frequent and both squared norms are those of `task`. The signal system and training without
    noise depend on nothing else, so all replicates have one prediction.
    """
    rng = np.random.default_rng([*replicate_seed(key), 3])
    norm = task.transition_squared_norm
    drawn = draw_bigram_task(rng, task.vocabulary, task.length, task.sparsity, squared_norm=norm)
    return replace(drawn, weights=task.weights)


def lengthen(task: BigramTask, length: int) -> BigramTask:
    """Return the task in a longer context: the same transition and weights, the positions spread in proportion.

    A task drawn anew for every length has other weights, and with them another bias of a penalty.
    """
    return replace(task, positions=task.positions * (length // task.length), length=length)


def redraw_positions(task: BigramTask, length: int, rng: np.random.Generator) -> BigramTask:
    """Return the task with the same transition and weights and positions drawn anew for another length."""
    places = [np.sort(rng.choice(length, task.sparsity, replace=False)) for _ in range(task.vocabulary)]
    return replace(task, positions=np.stack(places), length=length)


class NoiselessPath(NamedTuple):
    """Excess loss over its initial value, and the signal of the values, both (steps + 1,)."""

    excess: np.ndarray
    value_signal: np.ndarray


def noiseless_descent(task: BigramTask, state: State, settings: StepSettings, steps: int) -> NoiselessPath:
    """Make exact gradient steps with the soft threshold."""
    value, attention = np.array(state.value, float), np.array(state.attention, float)
    zero, losses, signals = excess(task, *initial_state(task)), [], []
    for _ in range(steps + 1):
        losses.append(excess(task, value, attention) / zero)
        signals.append(measure_overlaps(task, value, attention).value_signal)
        by_value, by_attention = gradients(task, value, attention)
        value = value - settings.value_learning_rate * by_value
        attention = attention - settings.attention_learning_rate * by_attention
        attention -= np.clip(attention, -settings.threshold, settings.threshold)
    return NoiselessPath(np.array(losses), np.array(signals))


def predict_signals(
    task: BigramTask, settings: StepSettings, steps: np.ndarray, init: tuple[float, float] = (0.0, 0.0)
) -> SignalTrajectory:
    """Solve the signal system with its noise for training without a penalty, at given numbers of steps."""
    return solve_signals(signal_system(task, settings), steps, init)


def signal_system(task: BigramTask, settings: StepSettings) -> SignalSystem:
    """Return the signal system of a task under the rates and the batch of a step."""
    return SignalSystem.of(task, settings.value_learning_rate, settings.attention_learning_rate, settings.batch)


def balanced_steps(task: BigramTask, growth: float, noise: float) -> StepSettings:
    """Return learning rates that multiply both signals by one and the growth per step, with the batch of a noise ratio.

    `noise` is the noise-to-signal ratio that `SignalSystem` calls kappa_2: the batch is growth T / (noise K_P K_Q).
    """
    norms = task.transition_squared_norm * task.attention_squared_norm
    return steps_of(task, growth, max(1, round(growth * task.length / (noise * norms))))


def steps_of(task: BigramTask, growth: float, batch: int) -> StepSettings:
    """Return learning rates that multiply both signals by one and the growth per step, with a batch."""
    return StepSettings(batch, growth / task.attention_squared_norm, growth / task.transition_squared_norm)


def partial_solution(task: BigramTask, share: float) -> State:
    """Return an initial state without noise whose signals are both `share` of the solution's."""
    uniform = 1 / task.length
    return State(share * task.centred, (uniform + share * (task.attention - uniform)).astype(np.float32))


def with_equal_weights(task: BigramTask) -> BigramTask:
    """Return the task with equal weights at the positions of every query."""
    return replace(task, weights=np.full(task.weights.shape, 1 / task.sparsity))


def share_of_right_positions(task: BigramTask, run: plateau_escape.SgdEscape) -> float:
    """Return the share of queries whose largest weights are at the right positions at the escape, signs corrected."""
    state = two_stages.flip_signs(run.state) if run.flipped else run.state
    return rounding.share_of_support(task, rounding.find_support(state.attention, task.sparsity))


def excess_with_noise(task: BigramTask, path: SignalTrajectory) -> np.ndarray:
    r"""Return the excess loss of signals and noise together, over its initial value.

    The squared norms hold those of the noise: :math:`|A|^2 = \alpha_A^2K_Q + 1/T + E`, :math:`K_V = \alpha_V^2K_P + F`.
    """
    attention = path.attention_signal**2 * task.attention_squared_norm + 1 / task.length + path.attention_noise
    values = path.value_signal**2 * task.transition_squared_norm + path.value_noise
    return excess_of_signals(task, values, attention, path.value_signal, path.attention_signal)


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

"""What the studies of this wing share: their source, the seed of a replicate, descent without noise."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr

from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.theory.population import excess, gradients, measure_overlaps
from manyheads.bigram.theory.signal import SignalPath, SignalSystem, solve_signals
from manyheads.bigram.training.proximal_sgd import State, StepSettings, start
from manyheads.study import Source

SOURCE = Source(
    "ren2024",
    "Learning and Transferring Sparse Contextual Bigrams with Linear Transformers",
    "Yunwei Ren and Zixuan Wang and Jason D. Lee",
    2024,
    kind="inproceedings",
    venue="Advances in Neural Information Processing Systems",
    volume="37",
    identifier="2410.23438",
    locus="abstract; what is compared with it is derived here",
)
EXCESS = {"long_name": "excess loss", "units": "1"}
SUPPORT = {"long_name": "share of queries with the right positions", "units": "1"}


def seed_of(key: jax.Array) -> list[int]:
    """Return the seed of a replicate's samples: the same in every cell."""
    return [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]


def redraw(task: BigramTask, key: jax.Array) -> BigramTask:
    """Return the task of a replicate: its own transition and positions, the same in every cell, and the given weights.

    All tokens are equally frequent and both energies are those of `task`. The signal system and descent without noise
    depend on nothing else, so one prediction belongs to all replicates.
    """
    rng = np.random.default_rng([*seed_of(key), 3])
    drawn = draw_task(rng, task.vocabulary, task.length, task.sparsity, energy=task.transition_energy)
    return replace(drawn, weights=task.weights)


def lengthen(task: BigramTask, length: int) -> BigramTask:
    """Return the task in a longer context: the same transition and weights, the positions moved apart.

    A task drawn anew for every length would differ in its weights, and with them in the bias of a penalty.
    """
    return replace(task, positions=task.positions * (length // task.length), length=length)


def scatter(task: BigramTask, length: int, rng: np.random.Generator) -> BigramTask:
    """Return the task with the same transition and weights and positions drawn anew for another length."""
    places = [np.sort(rng.choice(length, task.sparsity, replace=False)) for _ in range(task.vocabulary)]
    return replace(task, positions=np.stack(places), length=length)


def unstack(trained: xr.Dataset, name: str) -> xr.DataArray:
    """Return a variable over the grid's coordinates instead of over cells, in the order of the cells."""
    axes = [str(n) for n, c in trained.coords.items() if c.dims == ("cell",) and n != "cell"]
    table = trained[name].set_index(cell=axes).unstack("cell")
    order = {axis: list(dict.fromkeys(trained[axis].values.tolist())) for axis in axes}
    rest = [dim for dim in table.dims if dim not in (*axes, "replicate")]
    return table.sel(order).transpose(*axes, "replicate", *rest)


class Noiseless(NamedTuple):
    """Excess loss, of that of no knowledge, and the signal of the values, both (steps + 1,)."""

    excess: np.ndarray
    value_signal: np.ndarray


def descend_noiselessly(task: BigramTask, state: State, settings: StepSettings, steps: int) -> Noiseless:
    """Make exact gradient steps with the soft threshold."""
    value, attention = np.array(state.value, float), np.array(state.attention, float)
    zero, losses, signals = excess(task, *start(task)), [], []
    for _ in range(steps + 1):
        losses.append(excess(task, value, attention) / zero)
        signals.append(measure_overlaps(task, value, attention).value_signal)
        by_value, by_attention = gradients(task, value, attention)
        value = value - settings.value_rate * by_value
        attention = attention - settings.attention_rate * by_attention
        attention -= np.clip(attention, -settings.threshold, settings.threshold)
    return Noiseless(np.array(losses), np.array(signals))


def predict_signals(
    task: BigramTask, settings: StepSettings, steps: np.ndarray, start: tuple[float, float] = (0.0, 0.0)
) -> SignalPath:
    """Solve the signal system with its noise for descent without penalty, at given numbers of steps."""
    return solve_signals(signal_system(task, settings), steps, start)


def signal_system(task: BigramTask, settings: StepSettings) -> SignalSystem:
    """Return the signal system of a task under the rates and the batch of a step."""
    return SignalSystem.of(task, settings.value_rate, settings.attention_rate, settings.batch)


def dressed_excess(task: BigramTask, path: SignalPath) -> np.ndarray:
    r"""Return the excess loss of signals and noise together, of that of no knowledge.

    :math:`(|A|^2K_V - 2\langle Q,A\rangle\alpha_VK_P + |Q|^2K_P) / |Q|^2K_P` with the energies of the noise in
    :math:`|A|^2 = \alpha_A^2K_Q + 1/T + E` and :math:`K_V = \alpha_V^2K_P + F`.
    """
    energy, spread, uniform = task.transition_energy, task.attention_energy, 1 / task.length
    attention = path.attention_signal**2 * spread + uniform + path.attention_noise
    values = path.value_signal**2 * energy + path.value_noise
    overlap = (path.attention_signal * spread + uniform) * path.value_signal * energy
    return (attention * values - 2 * overlap) / (task.weight_energy * energy) + 1

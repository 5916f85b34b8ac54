r"""Stage two with a strong penalty, keeping only what is not zero: no work for positions that a threshold clears.

A soft threshold of :math:`r` noise standard deviations leaves few entries of the attention that are not zero, and all
positions besides the true ones are exchangeable. So a row is simulated as the values of its non-zero entries, without
their places. In a step each of them moves and is thresholded; of the entries that were zero, a binomial number is born
on either side, with values from the tail of a normal,

.. math:: \Pr(\text{birth above}) = \Phi(-r_+), \qquad
          z = -\Phi^{-1}\big(U\,\Phi(-r_+)\big), \quad U \sim \text{uniform}(0, 1),

and likewise below, with :math:`r_\pm = (\theta \pm h)/s` for the threshold :math:`\theta = \eta_A\lambda`, the noise
:math:`s = \eta_A\sigma_k` and the common drift :math:`-h` of order :math:`1/T`. The inverse is evaluated in the
lower tail, where it is accurate, for all births at once.

It follows the law of `manyheads.bigram.training.gaussian_sgd.simulate` but for the mean of the noise over positions,
which is of
size :math:`s/\sqrt T` and is left out. It pays from about :math:`r = 3`; at :math:`r = 2` a tenth of all entries is
alive and a compiled dense pass is faster. Derived here.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from manyheads._arrays import takes_arrays
from manyheads.bigram.task import BigramTask
from manyheads.bigram.theory.noise import RowCoefficients, ValueNoise, attention_noise
from manyheads.bigram.theory.population import check_weights
from manyheads.bigram.training.proximal_sgd import State, StepSettings, check_size
from manyheads.errors import UsageError


class LazyState(NamedTuple):
    """A network without the places of what is not on the true positions.

    Attributes
    ----------
    value
        Centred value matrix, (N, N).
    on_support
        Attention at the true positions, (N, Q), in the order of the task's positions.
    entries
        The other entries of the attention that are not zero, of all queries, (E,).
    queries
        Which query each belongs to, (E,).
    """

    value: np.ndarray
    on_support: np.ndarray
    entries: np.ndarray
    queries: np.ndarray


class LazyOverlaps(NamedTuple):
    """Signals, square norm of the attention, share of entries that are not zero, and the exact excess loss."""

    value_signal: float
    attention_signal: float
    attention_energy: float
    share: float
    excess: float


@takes_arrays
def forget_places(task: BigramTask, state: State) -> LazyState:
    """Return a dense network without the places of the entries that are not on the true positions.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 100, 2)
    >>> lazy = forget_places(task, State(task.centred, task.attention.astype(np.float32)))
    >>> lazy.entries.size, measure_lazy(task, lazy).attention_signal.__round__(5)
    (0, 1.0)
    """
    check_weights(task, state.value, state.attention)
    others = np.array(state.attention, float)
    on_support = np.take_along_axis(others, task.positions, axis=1)
    np.put_along_axis(others, task.positions, 0.0, axis=1)
    queries, places = np.nonzero(others)
    return LazyState(np.array(state.value, float), on_support, others[queries, places], queries)


@takes_arrays
def draw_places(task: BigramTask, state: LazyState, rng: np.random.Generator) -> State:
    """Return a dense network: the places of the entries are drawn, as all are equally likely.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 100, 2)
    >>> lazy = LazyState(task.centred, task.weights, np.array([0.25, -0.5]), np.array([0, 0]))
    >>> np.sort(draw_places(task, lazy, np.random.default_rng(1)).attention.sum(1)).round(3).tolist()
    [0.75, 1.0, 1.0]
    """
    attention = np.zeros((task.vocabulary, task.length), np.float32)
    for query in range(task.vocabulary):
        entries = state.entries[state.queries == query]
        free = np.setdiff1d(np.arange(task.length), task.positions[query])
        attention[query, rng.choice(free, entries.size, replace=False)] = entries
    np.put_along_axis(attention, task.positions, state.on_support.astype(np.float32), axis=1)
    return State(state.value.copy(), attention)


@takes_arrays
def descend_lazily(
    task: BigramTask, state: LazyState, settings: StepSettings, steps: int, rng: np.random.Generator
) -> LazyState:
    """Make steps with a soft threshold.

    Parameters
    ----------
    task
        The task.
    state
        Where to begin.
    settings
        Batch, rates and a positive strength with ``constrained=False``.
    steps
        How many.
    rng
        Where the noise comes from.

    Raises
    ------
    UsageError
        No threshold, or one that keeps the sum, which this simulation does not know.
    Diverged
        The value left every useful range.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10_000, 2)
    >>> state = forget_places(task, State(0.5 * task.centred, (0.5 * task.attention).astype(np.float32)))
    >>> settings = StepSettings(4096, 0.2, 0.5, strength=0.03, constrained=False)
    >>> done = descend_lazily(task, state, settings, 40, np.random.default_rng(1))
    >>> measure_lazy(task, done).share < 0.01
    True
    """
    if not settings.threshold > 0 or settings.constrained:
        raise UsageError(
            f"strength={settings.strength:g}, constrained={settings.constrained}: this simulation lives on a threshold "
            "that clears most entries and keeps no sum; manyheads.bigram.training.gaussian_sgd knows the others"
        )
    noise = ValueNoise(task, settings.batch)
    for step in range(steps):
        state = _step(task, state, settings, noise, rng)
        check_size(float(np.abs(state.value).max()), settings, f"the descent diverged in step {step}")
    return state


@takes_arrays
def measure_lazy(task: BigramTask, state: LazyState) -> LazyOverlaps:
    """Measure signals, energy, the share of entries that are not zero, and the exact excess loss."""
    law, rows = task.stationary, _rows(task, state)
    value_energy = float(law @ (state.value**2).sum(0))
    inner = float(law @ (state.value * task.centred).sum(0))
    energy, overlap = float(law @ rows.energies), float(law @ rows.overlaps)
    alive = state.entries.size + np.count_nonzero(state.on_support)
    signal = overlap - float(law @ _sums(task, state)) / task.length
    constant = task.weight_energy * task.transition_energy
    return LazyOverlaps(
        inner / task.transition_energy,
        signal / task.attention_energy,
        energy,
        float(alive / (task.vocabulary * task.length)),
        0.5 * (energy * value_energy - 2 * overlap * inner + constant),
    )


def _step(
    task: BigramTask, state: LazyState, settings: StepSettings, noise: ValueNoise, rng: np.random.Generator
) -> LazyState:
    law, rate, threshold = task.stationary, settings.attention_rate, settings.threshold
    rows = _rows(task, state)
    value_energy = float(law @ (state.value**2).sum(0))
    inner = float(law @ (state.value * task.centred).sum(0))
    spread = rate * attention_noise(task, state.value, rows, settings.batch)  # (N,)
    drift = rate * (value_energy * _sums(task, state) - inner) / task.length  # (N,), of order 1/T
    keep = 1 - rate * value_energy
    on_support = keep * state.on_support + rate * inner * task.weights + drift[:, None]
    on_support += spread[:, None] * rng.standard_normal(on_support.shape)
    moved = keep * state.entries + drift[state.queries]
    moved += spread[state.queries] * rng.standard_normal(moved.size)
    moved = _shrink(moved, threshold)
    alive = moved != 0
    empty = task.length - task.sparsity - np.bincount(state.queries, minlength=task.vocabulary)
    born, owners = _draw_births(rng, empty, spread, drift, threshold)
    value = state.value - settings.value_rate * (
        float(law @ rows.energies) * state.value
        - float(law @ rows.overlaps) * task.centred
        - noise.draw(rng, state.value, rows)
    )
    return LazyState(
        value,
        _shrink(on_support, threshold),
        np.concatenate([moved[alive], born]),
        np.concatenate([state.queries[alive], owners]),
    )


def _draw_births(
    rng: np.random.Generator, empty: np.ndarray, spread: np.ndarray, drift: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the entries that leave zero, and their queries."""
    safe = np.maximum(spread, np.finfo(float).tiny)
    above, below = ndtr((drift - threshold) / safe), ndtr((-drift - threshold) / safe)  # chances, (N,)
    rising = rng.binomial(empty, above)
    falling = rng.binomial(empty - rising, below / (1 - above))
    queries = np.arange(len(empty))
    up, down = np.repeat(queries, rising), np.repeat(queries, falling)
    high = -ndtri((1 - rng.random(up.size)) * above[up]) * spread[up] + drift[up] - threshold
    low = ndtri((1 - rng.random(down.size)) * below[down]) * spread[down] + drift[down] + threshold
    return np.concatenate([high, low]), np.concatenate([up, down])


def _shrink(entries: np.ndarray, threshold: float) -> np.ndarray:
    return entries - np.clip(entries, -threshold, threshold)


def _rows(task: BigramTask, state: LazyState) -> RowCoefficients:
    """Return square norm and overlap of every row, (N,)."""
    energies = np.bincount(state.queries, state.entries**2, task.vocabulary) + (state.on_support**2).sum(1)
    return RowCoefficients(energies, (state.on_support * task.weights).sum(1))


def _sums(task: BigramTask, state: LazyState) -> np.ndarray:
    return np.bincount(state.queries, state.entries, task.vocabulary) + state.on_support.sum(1)

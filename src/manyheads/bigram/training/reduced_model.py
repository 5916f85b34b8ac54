r"""Stage one without its T coordinates: training by the exact mean gradient plus Gaussian noise, at a cost free of T.

Without a penalty the attention enters its own step linearly, and away from the true positions the noise is
isotropic and the mean gradient is a multiple of the vector itself. So a row of the attention is known by its
:math:`Q` entries at the true positions, by the mean of the others (the sum is one) and by the norm :math:`u` of what is
left of those, a vector :math:`v` of :math:`M = T - Q` entries without mean. With :math:`c = 1 - \eta_AK_V` and the
noise :math:`s = \eta_A\sigma_k`,

.. math:: v \leftarrow c\,v + s\,\xi_\perp \quad\Longrightarrow\quad
          u^2 \leftarrow (c\,u + s\,z)^2 + s^2\chi^2_{M-2},

because the part of :math:`\xi_\perp` along :math:`v` is one normal number :math:`z` and the rest has :math:`M - 2`
dimensions. The chain of :math:`(W, a_S, u^2)` has exactly the law of the dense simulation: :math:`O(N^3 + NQ)` a step,
or :math:`O(N^2 + NQ)` with the noise of an untrained model, for ten positions or a hundred million. A dense attention
can be drawn at any time, since the direction of :math:`v` is uniform.

What it is *not* exact about is the Gaussian model itself: real batches at few samples per token are not Gaussian, and
`manyheads.bigram.theory.noise` says where its covariance is exact. All of this is derived here.
"""

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.bigram.task import BigramTask
from manyheads.bigram.theory.noise import RowCoefficients, ValueNoise, attention_noise, attention_noise_at_start
from manyheads.bigram.training.proximal_sgd import LIMIT, State, StepSettings, check_size
from manyheads.errors import UsageError

BOOSTED = 0.3  # of the product of both signals: half way through the sudden part, and insensitive to its exact value


class ReducedState(NamedTuple):
    """Several runs of one task.

    Attributes
    ----------
    value
        Centred value matrices, (R, N, N).
    on_support
        Attention at the true positions, (R, N, Q), in the order of the task's positions.
    scatter
        Squared norm of the rest of a row after its mean is taken off, (R, N).
    """

    value: np.ndarray
    on_support: np.ndarray
    scatter: np.ndarray


class ReducedOverlaps(NamedTuple):
    """What `manyheads.bigram.theory.population.Overlaps` holds, of every run (R,), and the excess loss."""

    value_energy: np.ndarray
    value_overlap: np.ndarray
    attention_energy: np.ndarray
    attention_overlap: np.ndarray
    value_signal: np.ndarray
    attention_signal: np.ndarray
    excess: np.ndarray


class Boost(NamedTuple):
    """When runs left the plateau, (R,) each.

    Attributes
    ----------
    steps
        First step at which the product of the signals has passed the limit; 0 for a run that did not get there.
    mirrored
        Whether both signals were negative then.
    outcome
        "boosted", "budget" (not within the steps allowed) or "diverged".
    """

    steps: np.ndarray
    mirrored: np.ndarray
    outcome: np.ndarray


def start_reduced(task: BigramTask, runs: int) -> ReducedState:
    """Return so many untrained runs.

    Raises
    ------
    UsageError
        No run, or fewer than three positions besides the true ones: there the dense simulation costs nothing.
    """
    _check(task)
    if runs < 1:
        raise UsageError(f"runs={runs}: at least one")
    tokens = task.vocabulary
    return ReducedState(
        np.zeros((runs, tokens, tokens)),
        np.full((runs, tokens, task.sparsity), 1 / task.length),
        np.zeros((runs, tokens)),
    )


@takes_arrays
def descend_reduced(
    task: BigramTask,
    state: ReducedState,
    settings: StepSettings,
    steps: int,
    rng: np.random.Generator,
    *,
    at_start: bool = False,
) -> ReducedState:
    """Make steps of stage one in all runs.

    Parameters
    ----------
    task, state, settings, steps
        As in `manyheads.bigram.training.proximal_sgd.descend`, without a penalty.
    rng
        Where the noise comes from; runs are independent.
    at_start
        Whether the noise is that of an untrained model, which is cheaper and right until the boost.

    Returns
    -------
    ReducedState
        All runs after the steps.

    Raises
    ------
    UsageError
        A penalty, which this chain cannot follow: `manyheads.bigram.training.sparse_sgd` can.
    Diverged
        A run left every useful range.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 1_000_000, 2)
    >>> settings = StepSettings(batch=100_000, value_rate=0.05, attention_rate=0.05)
    >>> state = descend_reduced(task, start_reduced(task, 4), settings, 100, np.random.default_rng(1))
    >>> measure_reduced(task, state).value_signal.shape
    (4,)
    """
    chain = _Chain(task, settings, at_start)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(steps):
            state = chain.step(rng, state)
            if number % 16 == 15 or number == steps - 1:
                check_size(float(np.abs(state.value).max()), settings, "a run diverged")
    return state


def find_boost(
    task: BigramTask,
    settings: StepSettings,
    runs: int,
    rng: np.random.Generator,
    *,
    most_steps: int,
    at_start: bool = False,
) -> Boost:
    """Train untrained runs until the product of the two signals passes .3, each at its own time.

    Parameters
    ----------
    task, settings, rng, at_start
        As in `descend_reduced`.
    runs
        How many.
    most_steps
        Where to give up.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 100_000, 2)
    >>> settings = StepSettings(batch=1_000_000, value_rate=0.1, attention_rate=0.2)
    >>> find_boost(task, settings, 3, np.random.default_rng(1), most_steps=500).outcome.tolist()
    ['boosted', 'boosted', 'boosted']
    """
    chain, state = _Chain(task, settings, at_start), start_reduced(task, runs)
    steps, mirrored = np.zeros(runs, int), np.zeros(runs, bool)
    outcome = np.full(runs, "budget", dtype="<U8")
    running = np.arange(runs)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(1, most_steps + 1):
            state = chain.step(rng, state)
            overlaps = measure_reduced(task, state)
            product = overlaps.value_signal * overlaps.attention_signal
            wild = ~(overlaps.value_energy + overlaps.attention_energy < LIMIT)
            done = (product > BOOSTED) | wild
            if not done.any():
                continue
            ended = running[done]
            outcome[ended] = np.where(wild[done], "diverged", "boosted")
            steps[ended] = np.where(wild[done], 0, number)
            mirrored[ended] = ~wild[done] & (overlaps.value_signal[done] < 0)
            running, state = running[~done], ReducedState(*(part[~done] for part in state))
            if not running.size:
                break
    return Boost(steps, mirrored, outcome)


@takes_arrays
def measure_reduced(task: BigramTask, state: ReducedState) -> ReducedOverlaps:
    """Measure signals, energies and exact excess loss of every run."""
    law, rows = task.stationary, _rows(task, state)
    value_energy = (state.value**2).sum(-2) @ law
    inner = (state.value * task.centred).sum(-2) @ law
    energy, overlap = rows.energies @ law, rows.overlaps @ law
    constant = task.weight_energy * task.transition_energy
    return ReducedOverlaps(
        value_energy,
        inner,
        energy,
        overlap,
        inner / task.transition_energy,
        (overlap - 1 / task.length) / task.attention_energy,
        0.5 * (energy * value_energy - 2 * overlap * inner + constant),
    )


@takes_arrays
def flip_reduced(task: BigramTask, state: ReducedState) -> ReducedState:
    r"""Reflect the runs that went to the wrong side: :math:`W \to -W`, :math:`a \to 2/T - a`.

    The product of both stays what it is, and so does the sum of every row. A run is reflected where its attention
    signal is negative.
    """
    wrong = measure_reduced(task, state).attention_signal < 0
    sign = np.where(wrong, -1.0, 1.0)[:, None, None]
    on_support = np.where(wrong[:, None, None], 2 / task.length - state.on_support, state.on_support)
    return ReducedState(sign * state.value, on_support, state.scatter)


@takes_arrays
def materialise(task: BigramTask, state: ReducedState, run: int, rng: np.random.Generator) -> State:
    """Draw a dense network that one of the runs stands for: the direction of what it does not keep is uniform.

    Parameters
    ----------
    task, state
        The runs.
    run
        Which of them.
    rng
        Where the direction comes from.

    Returns
    -------
    State
        `value` (N, N) float64 and `attention` (N, T) float32: 4 N T bytes.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 100, 2)
    >>> state = ReducedState(task.centred[None], np.full((1, 3, 2), 0.3), np.full((1, 3), 0.04))
    >>> dense = materialise(task, state, 0, np.random.default_rng(1))
    >>> dense.attention.sum(1).round(4).tolist()
    [1.0, 1.0, 1.0]
    """
    if not 0 <= run < len(state.value):
        raise UsageError(f"run={run}: there are runs 0 to {len(state.value) - 1}")
    attention = np.empty((task.vocabulary, task.length), np.float32)
    for query in range(task.vocabulary):
        drawn = rng.standard_normal(task.length)
        drawn[task.positions[query]] = 0
        others = task.length - task.sparsity
        drawn -= drawn.sum() / others
        drawn[task.positions[query]] = 0
        drawn *= (state.scatter[run, query] / (drawn @ drawn)) ** 0.5
        drawn += (1 - state.on_support[run, query].sum()) / others
        drawn[task.positions[query]] = state.on_support[run, query]
        attention[query] = drawn
    return State(state.value[run].copy(), attention)


class _Chain:
    """One step of the chain, with everything that does not change computed once."""

    def __init__(self, task: BigramTask, settings: StepSettings, at_start: bool):
        _check(task)
        if settings.strength:
            raise UsageError(
                f"strength={settings.strength:g}: with a penalty the attention is no longer isotropic; go on with "
                "manyheads.bigram.training.sparse_sgd or with a dense simulation"
            )
        self.task, self.settings, self.at_start = task, settings, at_start
        self.others = task.length - task.sparsity
        self.centred = task.centred
        self.weights = task.weights - 1 / task.length
        self.noise = ValueNoise(task, settings.batch, at_start=at_start)

    def step(self, rng: np.random.Generator, state: ReducedState) -> ReducedState:
        """Return all runs one step further."""
        task, settings, law = self.task, self.settings, self.task.stationary
        rows = _rows(task, state)
        value_energy = ((state.value**2).sum(-2) @ law)[:, None, None]
        inner = ((state.value * self.centred).sum(-2) @ law)[:, None, None]
        energy, overlap = (rows.energies @ law)[:, None, None], (rows.overlaps @ law)[:, None, None]
        if self.at_start:
            sigma = attention_noise_at_start(task, state.value, settings.batch)
        else:
            sigma = attention_noise(task, state.value, rows, settings.batch)
        spread = settings.attention_rate * np.broadcast_to(sigma, state.scatter.shape)  # (R, N)
        gradient = value_energy * (state.on_support - 1 / task.length) - inner * self.weights
        white = rng.standard_normal(state.on_support.shape)
        outside = self.others**0.5 * rng.standard_normal(spread.shape)
        white -= ((white.sum(-1) + outside) / task.length)[..., None]  # the mean over all positions goes
        on_support = state.on_support - settings.attention_rate * gradient + spread[..., None] * white
        along = (1 - settings.attention_rate * value_energy[..., 0]) * np.sqrt(state.scatter)
        along += spread * rng.standard_normal(spread.shape)
        scatter = along**2 + spread**2 * rng.chisquare(self.others - 2, spread.shape)
        value = state.value - settings.value_rate * (energy * state.value - overlap * self.centred)
        value += settings.value_rate * self.noise.draw(rng, state.value, rows)
        return ReducedState(value, on_support, scatter)


def _rows(task: BigramTask, state: ReducedState) -> RowCoefficients:
    """Return square norm and overlap of every row, (R, N)."""
    mean_part = (1 - state.on_support.sum(-1)) ** 2 / (task.length - task.sparsity)
    energies = (state.on_support**2).sum(-1) + mean_part + state.scatter
    return RowCoefficients(energies, (state.on_support * task.weights).sum(-1))


def _check(task: BigramTask) -> None:
    if task.length - task.sparsity < 3:
        raise UsageError(
            f"length {task.length} with {task.sparsity} true positions: this chain needs three others or more; "
            "simulate all positions"
        )

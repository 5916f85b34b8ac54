r"""Reduced model of stage one: exact mean gradient plus Gaussian noise, at a cost independent of T.

Without a penalty the attention enters its own step linearly, and away from the true positions the noise is
isotropic and the mean gradient is a multiple of the vector itself. So a row of the attention is known by its
:math:`Q` entries at the true positions, by the mean of the others (the sum is one) and by the norm :math:`u` of the
residual, a vector :math:`v` of :math:`M = T - Q` entries without mean. With :math:`c = 1 - \eta_AK_V` and the
noise :math:`s = \eta_A\sigma_k`,

.. math:: v \leftarrow c\,v + s\,\xi_\perp \quad\Longrightarrow\quad
          u^2 \leftarrow (c\,u + s\,z)^2 + s^2\chi^2_{M-2},

because the part of :math:`\xi_\perp` along :math:`v` is one normal number :math:`z` and the rest has :math:`M - 2`
dimensions. The chain of :math:`(W, a_S, u^2)` has exactly the distribution of dense training with Gaussian noise:
:math:`O(N^3 + NQ)` a step for any number of positions.

Gaussian noise is an approximation at few samples per token; `manyheads.theory.bigram.theorems.gradient_noise` states
where its covariance is exact. Derived here.
"""

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.gradient_noise import RowCoefficients, ValueNoise, attention_noise
from manyheads.theory.bigram.theorems.population import Overlaps, excess_of_signals
from manyheads.theory.bigram.training.proximal_sgd import LIMIT, StepSettings

ESCAPED = 0.3  # product of both signals at the plateau escape; its time is insensitive to the exact value


class ReducedState(NamedTuple):
    """Several runs of one task."""

    value: np.ndarray  # (R, N, N), centred
    on_support: np.ndarray  # (R, N, Q): attention at the true positions, in the order of the task's
    residual: np.ndarray  # (R, N): squared norm of the other weights of a row after their mean is removed


class Escape(NamedTuple):
    """Plateau escape of runs, (R,) each."""

    steps: np.ndarray  # first step at which the product of the signals exceeds the limit; 0 without an escape
    flipped: np.ndarray  # whether both signals were negative then
    outcome: np.ndarray  # "escaped", "budget" (not within the steps allowed) or "diverged"


def initial_runs(task: BigramTask, runs: int) -> ReducedState:
    """Return untrained runs."""
    _check(task)
    if runs < 1:
        raise UsageError(f"runs={runs}: give at least one")
    tokens = task.vocabulary
    return ReducedState(
        np.zeros((runs, tokens, tokens)),
        np.full((runs, tokens, task.sparsity), 1 / task.length),
        np.zeros((runs, tokens)),
    )


def find_escape(
    task: BigramTask,
    settings: StepSettings,
    runs: int,
    rng: np.random.Generator,
    *,
    most_steps: int,
    init: ReducedState | None = None,
) -> Escape:
    """Train runs, untrained or from `init`, until the product of the two signals exceeds .3, each at its own time."""
    chain, state = ReducedChain(task, settings), init or initial_runs(task, runs)
    steps, flipped = np.zeros(runs, int), np.zeros(runs, bool)
    outcome = np.full(runs, "budget", dtype="<U8")
    running = np.arange(runs)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(1, most_steps + 1):
            state = chain.step(rng, state)
            overlaps = measure_reduced(task, state)
            product = overlaps.value_signal * overlaps.attention_signal
            wild = ~(overlaps.value_squared_norm + overlaps.attention_squared_norm < LIMIT)
            done = (product > ESCAPED) | wild
            if not done.any():
                continue
            ended = running[done]
            outcome[ended] = np.where(wild[done], "diverged", "escaped")
            steps[ended] = np.where(wild[done], 0, number)
            flipped[ended] = ~wild[done] & (overlaps.value_signal[done] < 0)
            running, state = running[~done], ReducedState(*(part[~done] for part in state))
            if not running.size:
                break
    return Escape(steps, flipped, outcome)


def record_reduced(
    task: BigramTask, settings: StepSettings, steps: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, ReducedState]:
    """Train one run; return the signals of values and attention and the excess loss before every step, and its end."""
    chain, state, rows = ReducedChain(task, settings), initial_runs(task, 1), []
    for _ in range(steps):
        rows.append([float(part[0]) for part in measure_reduced(task, state)])
        state = chain.step(rng, state)
    values, attention, value_signal, weight_signal = np.array(rows).T
    return value_signal, weight_signal, excess_of_signals(task, values, attention, value_signal, weight_signal), state


@takes_arrays
def measure_reduced(task: BigramTask, state: ReducedState) -> Overlaps[np.ndarray]:
    """Measure signals and squared norms of every run."""
    mu, rows = task.stationary, _rows(task, state)
    inner = (state.value * task.centred).sum(-2) @ mu
    return Overlaps(
        (state.value**2).sum(-2) @ mu,
        rows.squared_norms @ mu,
        inner / task.transition_squared_norm,
        (rows.overlaps @ mu - 1 / task.length) / task.attention_squared_norm,
    )


class ReducedChain:
    """One step of the chain, with everything that does not change computed once."""

    def __init__(self, task: BigramTask, settings: StepSettings):
        _check(task)
        if settings.penalty:
            raise UsageError(
                f"penalty={settings.penalty:g}: use penalty=0; with a penalty the attention is not isotropic"
            )
        self.task, self.settings = task, settings
        self.others = task.length - task.sparsity
        self.centred = task.centred
        self.weights = task.weights - 1 / task.length
        self.noise = ValueNoise(task, settings.batch)

    def step(self, rng: np.random.Generator, state: ReducedState) -> ReducedState:
        """Return all runs one step further."""
        task, settings, mu = self.task, self.settings, self.task.stationary
        rows = _rows(task, state)
        value_squared_norm = ((state.value**2).sum(-2) @ mu)[:, None, None]
        inner = ((state.value * self.centred).sum(-2) @ mu)[:, None, None]
        norm, overlap = (rows.squared_norms @ mu)[:, None, None], (rows.overlaps @ mu)[:, None, None]
        sigma = attention_noise(task, state.value, rows, settings.batch)
        std = settings.attention_learning_rate * np.broadcast_to(sigma, state.residual.shape)  # (R, N)
        gradient = value_squared_norm * (state.on_support - 1 / task.length) - inner * self.weights
        white = rng.standard_normal(state.on_support.shape)
        outside = self.others**0.5 * rng.standard_normal(std.shape)
        white -= ((white.sum(-1) + outside) / task.length)[..., None]  # the mean over all positions goes
        on_support = state.on_support - settings.attention_learning_rate * gradient + std[..., None] * white
        along = (1 - settings.attention_learning_rate * value_squared_norm[..., 0]) * np.sqrt(state.residual)
        along += std * rng.standard_normal(std.shape)
        residual = along**2 + std**2 * rng.chisquare(self.others - 2, std.shape)
        value = state.value - settings.value_learning_rate * (norm * state.value - overlap * self.centred)
        value += settings.value_learning_rate * self.noise.draw(rng, state.value, rows)
        return ReducedState(value, on_support, residual)


def _rows(task: BigramTask, state: ReducedState) -> RowCoefficients:
    """Return squared norm and overlap of every row, (R, N)."""
    mean_part = (1 - state.on_support.sum(-1)) ** 2 / (task.length - task.sparsity)
    squared_norms = (state.on_support**2).sum(-1) + mean_part + state.residual
    return RowCoefficients(squared_norms, (state.on_support * task.weights).sum(-1))


def _check(task: BigramTask) -> None:
    if task.length - task.sparsity < 3:
        raise UsageError(
            f"length {task.length} with {task.sparsity} true positions: this model needs three others or more; "
            "train with a longer context"
        )

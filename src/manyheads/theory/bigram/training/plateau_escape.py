r"""Plateau escape of SGD and of softmax attention: the step at which the product of the two signals exceeds .3.

Initial states are perturbed by signals of given size in units of the drift :math:`\delta = 1/(TK_Q)`, of which
`manyheads.theory.bigram.theorems.initialization` has the formulas.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from manyheads._trees import PyTree
from manyheads.theory.bigram.engines.generator import Seed
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.population import gradients, measure_overlaps
from manyheads.theory.bigram.training import record, softmax_training
from manyheads.theory.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, initial_state
from manyheads.theory.bigram.training.reduced_model import ESCAPED, ReducedState


class SgdEscape(NamedTuple):
    """Step of the escape, infinite without one; whether the signs are flipped; the state of the record after it."""

    steps: float
    flipped: bool
    state: PyTree


def train_to_escape(
    task: BigramTask,
    train: Callable[..., PyTree],
    init: PyTree,
    every: int,
    most_steps: int,
    linear: Callable[[Any], State] = lambda state: state,
) -> SgdEscape:
    """Train by `train(state, first_step=n)`, `every` steps a call, until the plateau escape of `linear(state)`."""
    before, state = 0.0, init
    with suppress(Diverged):
        for done, state in record.trajectory(train, init, every):
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
    return train_to_escape(task, train, init or initial_state(task), every, most_steps)


def median_escape(steps: np.ndarray, flipped: np.ndarray, most_steps: int) -> float:
    """Return the median step of the escape of runs with the right signs, of all runs if none has them.

    A run without escape, at infinity, counts with its budget: a lower bound.
    """
    right = steps[flipped == 0] if (flipped == 0).any() else steps
    return float(np.median(np.minimum(right, most_steps)))


def perturbed_state(rng: np.random.Generator, task: BigramTask, value_std: float, relative_std: float) -> State:
    """Draw values and attention with independent deviations, centred as the gradients are; the latter in 1/T."""
    length, tokens = task.length, task.vocabulary
    away = rng.standard_normal((tokens, length))
    away -= away.mean(1, keepdims=True)
    values = _perturb_values(rng, task, value_std, ())
    return State(values, ((1 + relative_std * away) / length).astype(np.float32))


def uniform_values(task: BigramTask) -> State:
    """Return the values of V = 1/N and uniform attention."""
    away = 1 / task.vocabulary - task.stationary
    return initial_state(task)._replace(value=np.tile(away[:, None], task.vocabulary))


def perturbed_runs(
    rng: np.random.Generator, task: BigramTask, value_std: float, relative_std: float, runs: int
) -> ReducedState:
    """Draw the same for several runs of the reduced model, exact in distribution."""
    length, others = task.length, task.length - task.sparsity
    support = rng.standard_normal((runs, task.vocabulary, task.sparsity))
    rest = others**0.5 * rng.standard_normal(support.shape[:2])  # sum of the others
    support -= ((support.sum(-1) + rest) / length)[..., None]
    residual = rng.chisquare(others - 1, support.shape[:2])
    values = _perturb_values(rng, task, value_std, (runs,))
    return ReducedState(values, (1 + relative_std * support) / length, residual * (relative_std / length) ** 2)


def _perturb_values(rng: np.random.Generator, task: BigramTask, std: float, runs: tuple[int, ...]) -> np.ndarray:
    drawn = std * rng.standard_normal((*runs, task.vocabulary, task.vocabulary))
    drawn -= (drawn @ task.stationary)[..., None]
    return drawn - drawn.mean(-2, keepdims=True)


def exact_softmax_escape(task: BigramTask, value: np.ndarray, settings: StepSettings, most_steps: int) -> float:
    r"""Return the steps to the plateau escape of softmax attention under exact gradients; infinite without one.

    Logits of zero, and steps of :math:`\eta_A/\max_ta_t^2` along the gradient in the logits, as in
    `manyheads.theory.bigram.training.softmax_training`.
    """
    logits = np.zeros((task.vocabulary, task.length))
    for step in range(most_steps):
        attention = np.exp(logits - logits.max(1, keepdims=True))
        attention /= attention.sum(1, keepdims=True)
        overlaps = measure_overlaps(task, value, attention)
        if overlaps.value_signal * overlaps.attention_signal > ESCAPED:
            return float(step)
        by_value, by_attention = gradients(task, value, attention)
        by_logits = attention * (by_attention - (attention * by_attention).sum(1, keepdims=True))
        logits = logits - settings.attention_learning_rate / attention.max(1, keepdims=True) ** 2 * by_logits
        value = value - settings.value_learning_rate * by_value
    return float("inf")


def softmax_escape(
    task: BigramTask, value: np.ndarray, settings: StepSettings, every: int, most_steps: int, *, seed: Seed
) -> SgdEscape:
    """Train a softmax head by SGD from given values and zero logits to the escape; the state has linear weights."""
    rates = softmax_training.SoftmaxSettings(
        settings.batch, settings.value_learning_rate, settings.attention_learning_rate
    )
    train = partial(softmax_training.descend_softmax, task, settings=rates, steps=every, seed=seed)
    init = softmax_training.initial_softmax_state(task)._replace(value=value)
    found = train_to_escape(task, train, init, every, most_steps, linear=softmax_training.as_linear)
    return found._replace(state=softmax_training.as_linear(found.state))

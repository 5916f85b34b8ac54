"""Searches for the number of samples at which a score ranks the positions of every query first."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from manyheads._namespaces import Array
from manyheads.errors import UsageError
from manyheads.theory.bigram.screening import count_pairs
from manyheads.theory.bigram.task import Batch, BigramTask
from manyheads.theory.bigram.training.proximal_sgd import Diverged, StepSettings, descend, initial_state

GROWTH = 1.12  # of the samples from one evaluation to the next
GRAIN = float(np.log(GROWTH))  # of the logarithm of a number of samples
FIRST = 32  # samples at the first evaluation
MOST = 1_000_000  # samples of the longest search
ENTRIES = 1 << 23  # tokens drawn at a time

Scores = Callable[[np.ndarray], np.ndarray]


def geometric_mean(samples: Array) -> float:
    """Return the geometric mean of numbers of samples."""
    return float(np.exp(np.log(samples).mean()))


def search(rng: np.random.Generator, task: BigramTask, score: Scores) -> np.ndarray:
    """Return, for every score, the samples at which it ranks the right positions of every query first, (R,).

    `score` maps the counts of `count_pairs` to (R, N, T). The result is the geometric mean of the last evaluation
    without and the first with success. Tasks that differ in length and positions alone get the same queries and targets
    from the same generator. Tokens must be equally frequent.
    """
    counts = np.zeros((task.vocabulary, task.length, task.vocabulary, task.vocabulary), np.int32)
    for_answers, for_contexts = rng.spawn(2)
    drawn, before, wanted = 0, 0, float(FIRST)
    result: np.ndarray | None = None
    while drawn < MOST:
        answers = _draw_answers(for_answers, task, int(wanted) - drawn)
        drawn = int(wanted)
        size = max(1, ENTRIES // task.length)
        for begin in range(0, len(answers[0]), size):
            queries, own, targets = (part[begin : begin + size] for part in answers)
            counts += count_pairs(_fill_contexts(for_contexts, task, queries, own), queries, targets, task.vocabulary)
        right = ranks_first(task, score(counts))
        result = np.full(len(right), np.nan) if result is None else result
        result[np.isnan(result) & right] = (max(before, FIRST / GROWTH) * drawn) ** 0.5
        if not np.isnan(result).any():
            return result
        before, wanted = drawn, wanted * GROWTH
    raise UsageError(f"the positions are not found in {MOST} samples: choose a task with fewer or stronger positions")


def search_by_training(task: BigramTask, steps: StepSettings, most_steps: int, seed: int) -> float:
    """Return the samples until SGD from scratch ranks all positions first, with any sign; its budget if it does not."""
    state, done = initial_state(task), 0
    with suppress(Diverged):  # counted with the budget, like a run that does not end
        while done < most_steps:
            every = min(most_steps - done, max(1, round((GROWTH - 1) * done)))
            state = descend(task, state, steps, every, seed=seed, first_step=done)
            done += every
            if ranks_first(task, np.abs(state.attention - 1 / task.length)[None])[0]:
                return float(done * steps.batch)
    return float(most_steps * steps.batch)


def ranks_first(task: BigramTask, scores: np.ndarray) -> np.ndarray:
    """Return whether the positions of every query have its highest scores, for scores (R, N, T): (R,)."""
    places = np.broadcast_to(task.positions, (len(scores), *task.positions.shape))
    weakest = np.take_along_axis(scores, places, 2).min(2)  # (R, N)
    others = scores.copy()
    np.put_along_axis(others, places, -np.inf, 2)
    return (weakest > others.max(2)).all(1)


def draw_uniform_batch(rng: np.random.Generator, task: BigramTask, size: int) -> Batch:
    """Draw samples of a task of equally frequent tokens, ten times as fast as `BigramTask.draw`."""
    queries, own, targets = _draw_answers(rng, task, size)
    return Batch(_fill_contexts(rng, task, queries, own), queries, targets)


def _draw_answers(rng: np.random.Generator, task: BigramTask, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw queries (B,), their attended tokens (B, Q) and targets (B,), independent of the length."""
    if np.ptp(task.stationary) > 1e-9:
        raise UsageError("the tokens of this task are not equally frequent: use BigramTask.draw")
    queries = rng.integers(0, task.vocabulary, size)
    own = rng.integers(0, task.vocabulary, (size, task.sparsity), dtype=np.uint8)
    chosen = (rng.random((size, 1)) >= np.cumsum(task.weights, 1)[queries, :-1]).sum(1)
    attended = own[np.arange(size), chosen]
    targets = (rng.random((size, 1)) >= np.cumsum(task.transition, 0)[:-1, attended].T).sum(1)
    return queries, own, targets


def _fill_contexts(rng: np.random.Generator, task: BigramTask, queries: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Draw contexts (B, T) around the attended tokens."""
    tokens = rng.integers(0, task.vocabulary, (len(queries), task.length), dtype=np.uint8)
    np.put_along_axis(tokens, task.positions[queries], own, 1)
    return tokens

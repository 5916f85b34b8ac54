r"""Training simulated without samples: exact expected gradients, and Gaussian noise of the covariance of a batch.

With :math:`W\mu = 0`, the expected gradients of the attention and of the values are

.. math:: G^{(k)} = K_W\,(a^{(k)} - s_k/T) - K_{WP}\,(q^{(k)} - 1/T), \qquad
          G_W = |A|_\mu^2\,W - \langle Q, A\rangle_\mu\,\tilde P,

with :math:`K_W = |W|_\mu^2`, :math:`K_{WP} = \langle W, \tilde P\rangle_\mu` and :math:`s_k = 1^\top a^{(k)}`. A step
adds what `manyheads.bigram.theory.noise` derives: independent noise of standard deviation :math:`\sigma_k` at every
position, without its mean, and a draw of the values' noise. The cost of a step does not depend on the batch; it is one
pass over the N T numbers of the attention.

The noise is that of positions off the support: terms of the size of one entry of the attention are left out, and so is
the dependence between the noise of attention and values. Formulas derived here.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._settings import double_precision
from manyheads.bigram.engines.gaussian import BLOCK, compiled_pass
from manyheads.bigram.engines.generator import Seed, mix, sample_keys, scramble, to_normal
from manyheads.bigram.task import BigramTask
from manyheads.bigram.theory.noise import RowCoefficients, ValueNoise, attention_noise, attention_noise_at_start
from manyheads.bigram.training.proximal_sgd import (
    Diverged,
    State,
    StepSettings,
    check_size,
    check_state,
    check_steps,
    check_threshold,
    choose_engine,
)
from manyheads.errors import UsageError

NOISES = ("none", "start", "full")
LAST = np.uint32(0xFFFFFFFF)  # means of blocks take their words from the end of the counters


@takes_arrays
def simulate(
    task: BigramTask,
    state: State,
    settings: StepSettings,
    steps: int,
    *,
    seed: Seed,
    first_step: int = 0,
    noise: str = "full",
    engine: str | None = None,
    workers: int = 1,
) -> State:
    """Make `steps` steps of the Gaussian simulation of `manyheads.bigram.training.proximal_sgd.descend`.

    Parameters
    ----------
    task, state, settings, steps, seed, first_step
        As in `descend`; the noise is that of batches of ``settings.batch`` samples. A soft threshold needs
        ``constrained=False``.
    noise
        ``"full"``; ``"start"``, the covariance of an untrained model, which saves products of N by N matrices and is
        about right while the model has learned little; or ``"none"``, the expected gradients alone.
    engine
        ``"numba"`` (the extra `fast`), ``"jax"``, or None for numba where it is installed. Both see the same noise
        and agree to rounding.
    workers
        Threads that share the rows of the attention (numba only).

    Returns
    -------
    State
        The network after the steps.

    Raises
    ------
    UsageError, ShapeError, ExtraMissing
        As in `descend`; also a value with a mean, which these gradients do not hold for.
    Diverged
        The value passed a million, or the attention's rate times :math:`K_W` reached one.

    Examples
    --------
    >>> from manyheads.bigram.training.proximal_sgd import start
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=1000, sparsity=2)
    >>> settings = StepSettings(batch=1000, value_rate=0.2, attention_rate=0.5)
    >>> state = simulate(task, start(task), settings, 200, seed=0, engine="jax")
    >>> bool((state.attention * task.attention).sum(1).min() > 0.1)
    True
    """
    engine = choose_engine(engine)
    if noise not in NOISES or workers < 1:
        raise UsageError(f"noise={noise!r}, workers={workers}: noise is one of {', '.join(NOISES)}, workers 1 or more")
    if settings.threshold > 0 and settings.constrained:
        raise UsageError("this simulation has no soft threshold that keeps the sum: give constrained=False")
    value, attention = check_state(task, state)
    check_steps(steps, first_step)
    check_threshold(state, settings)
    drift = float(np.abs(value @ task.stationary).max())
    if drift > 1e-9 * max(1.0, float(np.abs(value).max())):
        raise UsageError(f"value times the law of the tokens is {drift:.3g}: take its mean off, it must be zero")
    move = partial(_move_in_numba, workers=workers) if engine == "numba" else _move_in_jax
    roots = scramble(seed)
    values = ValueNoise(task, settings.batch, at_start=noise == "start")
    sums = np.stack([attention.sum(1, dtype=float), np.einsum("kt,kt->k", attention, attention, dtype=float)], axis=1)
    for step in range(first_step, first_step + steps):
        on_support = np.take_along_axis(attention, task.positions, axis=1).astype(float)
        rows = RowCoefficients(sums[:, 1], (on_support * task.weights).sum(1))
        by_value = float(task.stationary @ rows.energies) * value
        by_value -= float(task.stationary @ rows.overlaps) * task.centred
        if noise != "none":
            by_value += values.draw(np.random.default_rng([step, *roots.tolist()]), value, rows)
        sigma = _attention_noise(task, value, rows, settings.batch, noise)
        attention, sums = _step_attention(task, (value, attention), settings, (sums[:, 0], sigma, roots, step), move)
        value = value - settings.value_rate * by_value
        check_size(float(np.abs(value).max()), settings, f"the simulated descent diverged in step {step}")
    return State(value, attention)


def _attention_noise(task: BigramTask, value: np.ndarray, rows: RowCoefficients, batch: int, noise: str) -> np.ndarray:
    """Return the standard deviation of every row's gradient."""
    if noise == "none":
        return np.zeros(task.vocabulary)
    if noise == "start":
        return attention_noise_at_start(task, value, batch)
    return attention_noise(task, value, rows, batch)


def _step_attention(
    task: BigramTask, state: tuple[np.ndarray, np.ndarray], settings: StepSettings, draws: tuple[Any, ...], move: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Move the attention; return it with the sum and the square norm of every row."""
    value, attention = state
    totals, sigma, roots, step = draws
    rate, length = settings.attention_rate, task.length
    energy = float(task.stationary @ (value**2).sum(0))
    product = float(task.stationary @ (value * task.centred).sum(0))
    keep = 1 - rate * energy
    if keep <= 0:
        raise Diverged(
            f"the descent diverged in step {step}: attention_rate={rate:g} times the value's energy",
            measured=1 - keep,
            threshold=1.0,
        )
    shifts = rate * (energy * totals - product) / length
    # added before the pass, which multiplies it by `keep`
    lifts = (rate * product / keep * task.weights).astype(np.float32)
    np.put_along_axis(attention, task.positions, np.take_along_axis(attention, task.positions, axis=1) + lifts, axis=1)
    rows = np.arange(task.vocabulary, dtype=np.uint32)
    first, second = sample_keys(roots, np.array([step], np.uint32), rows)
    means = _block_means(first, second, length)
    scales = (rate * sigma).astype(np.float32)
    numbers = np.float32(keep), shifts.astype(np.float32), np.float32(settings.threshold), scales
    return move(attention, numbers, np.stack([first, second], axis=1), means)


def _block_means(first: np.ndarray, second: np.ndarray, length: int) -> np.ndarray:
    """Draw the means of all blocks of normals, less their mean: (N, blocks) float32."""
    sizes = np.diff(np.append(np.arange(0, length, BLOCK), length))
    counters = LAST - np.arange(len(sizes), dtype=np.uint32)
    means = to_normal(mix(counters, first[:, None], second[:, None])) / np.sqrt(sizes, dtype=np.float32)
    return (means - (means @ (sizes / length))[:, None]).astype(np.float32)


def _move_in_numba(
    attention: np.ndarray, numbers: tuple[Any, ...], keys: np.ndarray, means: np.ndarray, *, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pass over the rows in place, in as many threads as there are workers."""
    run = compiled_pass()
    keep, shifts, threshold, scales = numbers
    sums = np.empty((len(attention), 2))

    def part(rows: slice) -> None:
        chosen = attention[rows], keep, shifts[rows], threshold, scales[rows], keys[rows], means[rows], sums[rows]
        run(*chosen)

    ends = np.linspace(0, len(attention), workers + 1).astype(int).tolist()
    parts = [slice(*ends[i : i + 2]) for i in range(workers)]
    if workers == 1:
        part(parts[0])
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(part, parts))
    return attention, sums


def _move_in_jax(
    attention: np.ndarray, numbers: tuple[Any, ...], keys: np.ndarray, means: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Do the same row by row in JAX."""
    with double_precision():
        moved, sums = _move_rows(attention, *numbers, keys, means)
        return np.array(moved), np.array(sums)


@jax.jit
def _move_rows(attention: Any, keep: Any, shifts: Any, threshold: Any, scales: Any, keys: Any, means: Any) -> Any:
    """Move, shrink and sum every row; one at a time, so that no second array of that size is needed for the noise."""
    length, blocks = attention.shape[1], means.shape[1]
    inside = (jnp.arange(blocks * BLOCK) < length).reshape(blocks, BLOCK)

    def one(row: tuple[Any, ...]) -> tuple[Any, Any]:
        weights, shift, scale, key, mean = row
        counters = jnp.arange(blocks * BLOCK, dtype=jnp.uint32)
        normals = jnp.where(inside, to_normal(mix(counters, key[0], key[1])).reshape(blocks, BLOCK), 0)
        normals = normals - (normals.sum(1) / inside.sum(1).astype(jnp.float32) - mean)[:, None]
        moved = keep * weights + shift + scale * normals.reshape(-1)[:length]
        moved = moved - jnp.clip(moved, -threshold, threshold)
        exact = moved.astype(jnp.float64)
        return moved, jnp.stack([exact.sum(), (exact**2).sum()])

    return jax.lax.map(one, (attention, shifts, scales, keys, means))

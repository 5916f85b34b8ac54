r"""Stochastic gradient descent on fresh samples: projected, preconditioned, with an optional soft threshold.

With the gradients of `manyheads.bigram.engines.reference`, rates :math:`\eta_W, \eta_A` and strength :math:`\lambda`:

.. math:: W \leftarrow W - \eta_W G_W, \qquad
          a^{(k)} \leftarrow \mathrm{prox}_{\eta_A\lambda}\bigl(a^{(k)} - \eta_A G^{(k)}\bigr).

The gradients are divided by the frequencies (the preconditioning) and projected, so :math:`W\mu = 0`,
:math:`1^\top W = 0` and :math:`1^\top a^{(k)}` stay what they are while :math:`\lambda = 0`. With :math:`\lambda > 0`
prox is the soft threshold (`constrained=False`), or the soft threshold of :math:`a + \nu` with the :math:`\nu` that
keeps the sum at one. All samples are drawn anew in every step and are a pure function of (seed, step, sample).

Two engines make the same steps: compiled kernels of the extra `fast` and JAX. They see the same tokens bit for bit and
agree to rounding as long as the descent does not amplify rounding.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), abstract: preconditioned projected gradient steps, then proximal ones. The centred parametrisation,
the projections and their order are our own.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import require
from manyheads._settings import double_precision
from manyheads.bigram.engines.generator import LAST_STEP, LONGEST, Seed, scramble, thresholds
from manyheads.bigram.engines.kernels import descend_in_numba, gradients_in_numba
from manyheads.bigram.engines.reference import Rates, Tables, as_jax, descend_in_jax, mean_gradients
from manyheads.bigram.task import BigramTask
from manyheads.errors import CertificateError, ShapeError, UsageError

LIMIT = 1e6  # of an entry of the value; useful ones stay below the square root of the length
ENGINES = ("jax", "numba")


class State(NamedTuple):
    r"""The network: `value`, :math:`W = V - \mu 1^\top`, (N, N) float64; `attention`, (N, T) float32, a row a query.

    Stored centred because the signal of early steps, of size 1/T, would drown in the rounding of :math:`V`.
    """

    value: np.ndarray
    attention: np.ndarray


class Gradients(NamedTuple):
    """What one batch says: preconditioned gradients, (N, N) float64 and (N, T) float32, and `spread` (N,) float64.

    `spread` is the standard deviation of each row of `attention` over its positions: what a soft threshold has to beat,
    known without the task. A query that the batch lacks has zero.
    """

    value: np.ndarray
    attention: np.ndarray
    spread: np.ndarray


class Diverged(CertificateError):
    """The descent left every useful range; the message names the step, `measured` the largest entry of the value."""


@dataclass(frozen=True)
class StepSettings:
    r"""How a step is made.

    Attributes
    ----------
    batch
        Samples B of a step.
    value_rate, attention_rate
        :math:`\eta_W` and :math:`\eta_A`.
    strength
        :math:`\lambda`: the soft threshold of a step is :math:`\eta_A\lambda`.
    constrained
        Whether the rows of the attention keep the sum one when `strength` is positive.

    Raises
    ------
    UsageError
        A batch without samples, or rates or a strength that are negative or not finite.

    Examples
    --------
    >>> StepSettings(batch=64, value_rate=0.01, attention_rate=0.01).threshold
    0.0
    """

    batch: int
    value_rate: float
    attention_rate: float
    strength: float = 0.0
    constrained: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch < LONGEST:
            raise UsageError(f"batch={self.batch}: between 1 sample and {LONGEST - 1}")
        for name in ("value_rate", "attention_rate", "strength"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"{name}={getattr(self, name)}: give a finite number, zero or more")

    @property
    def threshold(self) -> float:
        r"""What a step takes off every entry of the attention, :math:`\eta_A\lambda`."""
        return self.attention_rate * self.strength


def start(task: BigramTask) -> State:
    """Return the network that knows nothing: no value, uniform attention.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> state = start(draw_task(np.random.default_rng(0), vocabulary=3, length=4, sparsity=1))
    >>> state.attention.tolist()[0], state.value.any()
    ([0.25, 0.25, 0.25, 0.25], np.False_)
    """
    tokens = task.vocabulary
    return State(np.zeros((tokens, tokens)), np.full((tokens, task.length), 1 / task.length, np.float32))


@takes_arrays
def descend(
    task: BigramTask,
    state: State,
    settings: StepSettings,
    steps: int,
    *,
    seed: Seed,
    first_step: int = 0,
    engine: str | None = None,
) -> State:
    """Make `steps` steps on fresh samples.

    Parameters
    ----------
    task
        What the samples are drawn from.
    state
        Where to begin; it is not changed.
    settings
        Batch, rates and soft threshold.
    steps
        Number of steps. Two calls of 50 steps, the second with ``first_step=50``, are one of 100.
    seed
        A non-negative integer, or several; different seeds are independent.
    first_step
        Number of the first step; with the seed it fixes the samples.
    engine
        ``"numba"`` (the extra `fast`), ``"jax"``, or None for numba where it is installed.

    Returns
    -------
    State
        The network after the steps, NumPy arrays.

    Raises
    ------
    UsageError
        An engine, a seed, a step or settings that make no sense: a soft threshold that would clear all attention in
        its first step, rows that do not sum to one where the sum is to be kept.
    ShapeError
        A state that does not belong to the task.
    Diverged
        An entry of the value passed a million or is no number: the rates are too large for the batch.
    ExtraMissing
        ``engine="numba"`` without the extra.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=20, sparsity=2)
    >>> state = descend(task, start(task), StepSettings(64, 0.1, 0.1), steps=150, seed=0, engine="jax")
    >>> bool((state.attention * task.attention).sum(1).min() > 0.1)
    True
    """
    engine = choose_engine(engine)
    state, tables, roots = _prepare(task, state, seed)
    check_steps(steps, first_step)
    check_threshold(state, settings)
    rates = Rates(settings.value_rate, settings.attention_rate, settings.threshold, LIMIT)
    span = first_step, first_step + steps
    rule = "none"
    if settings.threshold > 0:
        rule = "shrink_to_sum_one" if settings.constrained else "shrink"
    if engine == "numba":
        value, attention, reached, peak = descend_in_numba(
            (state.value, state.attention), tables, roots, span, rates, batch=settings.batch, rule=rule
        )
    else:
        with double_precision():
            given = as_jax((tuple(state), tables, roots, span, rates))
            done = descend_in_jax(*given, batch=settings.batch, rule=rule)
        value, attention = np.array(done[0]), np.array(done[1])
        reached, peak = int(done[2]), float(done[3])
    if steps:
        check_size(peak, settings, f"the descent diverged in step {reached - 1}")
    return State(value, attention)


@takes_arrays
def observe(
    task: BigramTask, state: State, batch: int, *, seed: Seed, step: int = 0, engine: str | None = None
) -> Gradients:
    """Return the gradients that `descend` would use in step `step`, and the noise in them.

    Parameters
    ----------
    task, state, seed, engine
        As in `descend`.
    batch
        Number of samples.
    step
        Which step's samples.

    Raises
    ------
    UsageError, ShapeError, ExtraMissing
        As in `descend`.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=200, sparsity=2)
    >>> state = State(task.centred, start(task).attention)
    >>> spread = observe(task, state, 256, seed=0, engine="jax").spread
    >>> bool(abs((task.stationary @ spread**2 * 256 / task.transition_energy) - 1) < 0.3)
    True
    """
    engine = choose_engine(engine)
    StepSettings(batch, 0.0, 0.0)
    state, tables, roots = _prepare(task, state, seed)
    check_steps(1, step)
    if engine == "numba":
        value, attention = gradients_in_numba(state, tables, roots, step, batch=batch)
    else:
        with double_precision():
            done = mean_gradients(*as_jax((*state, tables, roots, np.uint32(step))), batch=batch)
        value, attention = (np.array(part) for part in done)
    return Gradients(value, attention, np.sqrt(np.mean(attention.astype(float) ** 2, axis=1)))


def choose_engine(engine: str | None) -> str:
    """Return the engine that is asked for, numba where none is and it is installed.

    Raises
    ------
    UsageError
        No such engine.
    ExtraMissing
        ``"numba"`` without the extra `fast`.

    Examples
    --------
    >>> choose_engine("jax")
    'jax'
    """
    if engine is None:
        return "numba" if importlib.util.find_spec("numba") else "jax"
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r}: one of {', '.join(ENGINES)}, or None for what is installed")
    if engine == "numba":
        require("numba")
    return engine


def _prepare(task: BigramTask, state: State, seed: Seed) -> tuple[State, Tables, np.ndarray]:
    """Check a state against its task, and make the tables of the draws."""
    state, length = check_state(task, state), task.length
    if length >= LONGEST or task.stationary.min() < 2.0**-32:
        raise UsageError(
            f"length {length}, rarest token {task.stationary.min():.3g}: the generator draws contexts below {LONGEST} "
            "tokens and frequencies from 2^-32"
        )
    return state, make_tables(task), scramble(seed)


def make_tables(task: BigramTask) -> Tables:
    """Return the tables that samples of a task are drawn from, NumPy arrays."""
    return Tables(
        thresholds(task.stationary),
        thresholds(task.weights),
        thresholds(task.transition.T),  # row j: the answer after token j
        np.array(task.positions),
        np.array(task.stationary),
    )


def check_state(task: BigramTask, state: State) -> State:
    """Return a copy of a state in the precision of this room, or refuse one that does not belong to the task."""
    tokens, length = task.vocabulary, task.length
    value, attention = np.array(state.value, float), np.array(state.attention, np.float32)
    if value.shape != (tokens, tokens) or attention.shape != (tokens, length):
        raise ShapeError(
            f"value {value.shape}, attention {attention.shape}: this task needs {(tokens, tokens)}, {(tokens, length)}"
        )
    if not (np.isfinite(value).all() and np.isfinite(attention).all()):
        raise UsageError("the state has entries that are no numbers")
    return State(value, attention)


def check_steps(steps: int, first_step: int) -> None:
    """Refuse steps that the generator cannot number."""
    if steps < 0 or first_step < 0 or first_step + steps > LAST_STEP:
        raise UsageError(f"steps={steps} from first_step={first_step}: both from zero, and below 2^32 together")


def check_size(largest: float, settings: StepSettings, told: str) -> None:
    """Raise `Diverged` when the largest entry of the value passed a million or is no number.

    Parameters
    ----------
    largest
        Size of that entry.
    settings
        The rates and the batch that the remedy names.
    told
        What diverged and where: the message begins with it.
    """
    if not largest <= LIMIT:
        raise Diverged(
            f"{told}: the largest entry of the value; take smaller rates than {settings.value_rate:g} and "
            f"{settings.attention_rate:g}, or, against noise, a larger batch than {settings.batch}",
            measured=largest,
            threshold=LIMIT,
        )


def check_threshold(state: State, settings: StepSettings) -> None:
    """Refuse what can only fail: a threshold above all attention, a sum to keep that is not there."""
    if settings.threshold == 0:
        return
    largest = float(np.abs(state.attention).max())
    if not settings.constrained and settings.threshold >= largest:
        raise UsageError(
            f"soft threshold {settings.threshold:.3g} (attention_rate x strength) is above the largest attention "
            f"{largest:.3g} and would clear all of it: begin without strength, or keep the sum (constrained=True)"
        )
    sums = state.attention.sum(1, dtype=float)
    worst = int(np.abs(sums - 1).argmax())
    if settings.constrained and abs(sums[worst] - 1) > 1e-3:
        raise UsageError(
            f"the attention of query {worst} sums to {sums[worst]:.4g}: keeping the sum at one would move it at once; "
            "divide the rows by their sums or give constrained=False"
        )

r"""Proximal SGD on fresh samples: projected, preconditioned steps with an optional soft threshold.

With the gradients of `manyheads.theory.bigram.engines.reference`, learning rates :math:`\eta_W, \eta_A` and penalty
:math:`\lambda`:

.. math:: W \leftarrow W - \eta_W G_W, \qquad
          a^{(k)} \leftarrow \mathrm{prox}_{\eta_A\lambda}\bigl(a^{(k)} - \eta_A G^{(k)}\bigr).

The gradients are divided by the frequencies (the preconditioning) and projected, so :math:`W\mu = 0`,
:math:`1^\top W = 0` and :math:`1^\top a^{(k)}` are constant while :math:`\lambda = 0`. prox is the soft
threshold. Samples are drawn anew in every step and are a pure function of (seed, step, sample).

Two engines make the same steps: compiled kernels of the extra `fast` and JAX. They draw the same tokens bit for bit and
agree to rounding as long as the training does not amplify it.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), abstract: preconditioned projected gradient steps, then proximal ones. The centred parametrization,
the projections and their order are choices of this library.
"""

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyheads._constraints import Constrained, Constraint, constrained
from manyheads._extras import require
from manyheads._overview import distinct_texts
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, UsageError
from manyheads.theory.bigram.engines.generator import LAST_STEP, LONGEST, Seed, scramble, thresholds
from manyheads.theory.bigram.engines.kernels import descend_in_numba, gradients_in_numba
from manyheads.theory.bigram.engines.reference import Rates, Tables, as_jax, descend_in_jax, mean_gradients
from manyheads.theory.bigram.task import BigramTask
from manyheads.theory.bigram.theorems.population import check_weights

LIMIT = 1e6  # of an entry of the value; useful ones stay below the square root of the length
ENGINES = ("jax", "numba")


class State(NamedTuple):
    r"""Network state: `value`, :math:`W = V - \mu 1^\top`, (N, N) float64; `attention`, (N, T) float32.

    Stored centred, because early signals, of size 1/T, would be lost in the rounding of :math:`V`.
    """

    value: np.ndarray
    attention: np.ndarray


class BatchGradients(NamedTuple):
    """Preconditioned gradients of one batch, (N, N) float64 and (N, T) float32, and `std` (N,) float64.

    `std` is the standard deviation of each row of `attention` over its positions, the noise that a soft threshold must
    exceed. It is zero for a query without samples.
    """

    value: np.ndarray
    attention: np.ndarray
    std: np.ndarray


class Diverged(CertificateError):
    """The training diverged; the message names the step, `measured` is the largest entry of the value."""


@dataclass(frozen=True)
class StepSettings(Constrained):
    r"""Settings of a step."""

    batch: int = constrained(rule=Constraint(least=1, below=LONGEST))  # samples B of a step
    value_learning_rate: float = constrained(rule=Constraint(least=0))  # eta_W
    attention_learning_rate: float = constrained(rule=Constraint(least=0))  # eta_A
    penalty: float = constrained(0.0, Constraint(least=0))  # lambda: soft threshold eta_A lambda, sums of rows are free

    @property
    def threshold(self) -> float:
        r"""Soft threshold of a step, :math:`\eta_A\lambda`."""
        return self.attention_learning_rate * self.penalty


def initial_state(task: BigramTask) -> State:
    """Return the state without knowledge: zero values, uniform attention."""
    tokens = task.vocabulary
    return State(np.zeros((tokens, tokens)), np.full((tokens, task.length), 1 / task.length, np.float32))


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
    """Make `steps` steps on fresh samples; `state` is not changed.

    The seed (one integer or several) and the number of a step determine its samples: two calls of 50 steps, the second
    with ``first_step=50``, are one of 100. `engine` is ``"numba"`` (the extra `fast`), ``"jax"``, or None for numba
    where it is installed. Raises `Diverged` if an entry of the value passes a million or is NaN.
    """
    engine = choose_engine(engine)
    state, tables, roots = _prepare(task, state, seed)
    check_steps(steps, first_step)
    check_threshold(state, settings)
    rates = Rates(settings.value_learning_rate, settings.attention_learning_rate, settings.threshold, LIMIT)
    span = first_step, first_step + steps
    if engine == "numba":
        value, attention, reached, peak = descend_in_numba(
            (state.value, state.attention), tables, roots, span, rates, batch=settings.batch
        )
    else:
        with double_precision():
            given = as_jax((tuple(state), tables, roots, span, rates))
            done = descend_in_jax(*given, batch=settings.batch, shrinking=settings.threshold > 0)
        value, attention = np.array(done[0]), np.array(done[1])
        reached, peak = int(done[2]), float(done[3])
    if steps:
        check_size(peak, settings, f"the training diverged in step {reached - 1}")
    return State(value, attention)


def batch_gradients(
    task: BigramTask, state: State, batch: int, *, seed: Seed, step: int = 0, engine: str | None = None
) -> BatchGradients:
    """Return the gradients that `descend` uses in step `step`, and their noise."""
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
    return BatchGradients(value, attention, np.sqrt(np.mean(attention.astype(float) ** 2, axis=1)))


def choose_engine(engine: str | None) -> str:
    """Return the engine asked for; by default numba where it is installed."""
    if engine is None:
        return "numba" if importlib.util.find_spec("numba") else "jax"
    if engine not in ENGINES:
        raise UsageError(
            f"engine={engine!r}: use one of {', '.join(ENGINES)}, or None for the fastest that is installed"
        )
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
        thresholds(task.transition.T),  # row j: the distribution of the target after token j
        np.array(task.positions),
        np.array(task.stationary),
    )


def check_state(task: BigramTask, state: State) -> State:
    """Return a copy of a state in the precision of this module, or refuse one that does not fit the task."""
    value, attention = np.array(state.value, float), np.array(state.attention, np.float32)
    check_weights(task, value, attention)
    if not (np.isfinite(value).all() and np.isfinite(attention).all()):
        raise UsageError("the state has entries that are not finite: give finite values and attention")
    return State(value, attention)


def check_steps(steps: int, first_step: int) -> None:
    """Refuse step numbers beyond those of the generator."""
    if steps < 0 or first_step < 0 or first_step + steps > LAST_STEP:
        raise UsageError(f"steps={steps} from first_step={first_step}: give both from zero, and below 2^32 together")


def check_size(largest: float, settings: StepSettings, message: str) -> None:
    """Raise `Diverged`, starting with `message`, if the largest entry of the value is not below the limit."""
    if not largest <= LIMIT:
        raise Diverged(
            f"{message}: the largest entry of the value; use smaller learning rates than "
            f"{settings.value_learning_rate:g} and {settings.attention_learning_rate:g}, or a larger batch than "
            f"{settings.batch}",
            measured=largest,
            threshold=LIMIT,
        )


def check_threshold(state: State, settings: StepSettings) -> None:
    """Refuse a threshold above all attention weights."""
    if settings.threshold == 0:
        return
    largest = float(np.abs(state.attention).max())
    if settings.threshold >= largest:
        threshold, most = distinct_texts(settings.threshold, largest)
        raise UsageError(
            f"soft threshold {threshold} (attention_learning_rate x penalty) is not below the largest "
            f"attention {most} and would set all of it to zero: train without a penalty first"
        )

r"""The softmax counterpart: weights are a softmax of logits over positions, or over tokens and positions.

The linear model trains the weights :math:`a^{(k)}` themselves. Here they are

.. math:: a^{(k)}_t = \frac{e^{\ell^{(k)}_t + m^{(k)}_{x_t}}}{\sum_s e^{\ell^{(k)}_s + m^{(k)}_{x_s}}},

with logits :math:`\ell` of positions and, optionally, :math:`m` of tokens. With :math:`G` the gradient in :math:`a`,
the gradient in a logit is :math:`a_t (G_t - \sum_s a_s G_s)`, so a step of size :math:`\eta_\ell` moves the weight by
:math:`\eta_\ell a_t^2 G_t`. At the start all :math:`a_t = 1/T` and a constant rate is slower than the linear model by
:math:`T^2`; the rate :math:`\eta_A/\max_t a_t^2` moves the largest weight exactly as the linear model does.

All other weights move by :math:`a_t^2/\max a^2` of that. On its way up a weight obeys :math:`\dot a \propto a^2 q`,
whose solution :math:`1/a = T - c\,q` blows up in finite time, first for the largest :math:`q`; the weight of a second
position, of :math:`q_2 < q_1`, has then reached only

.. math:: a_2 = \frac{1}{T\,(1 - q_2/q_1)}.

Logits of tokens are scaled alike, by the largest share :math:`\pi_j \propto \mu_j e^{m_j}` that a token has: a share is
1/N at the start and not 1/T, and the rate of the positions would be :math:`(T/N)^2` times too large for them.

So where a row's weights are equal both grow together, and where they differ the largest takes all for a time that
grows with :math:`T`. This is derived here; it limits what can be said of softmax and linear attention training alike.

Samples are those of `manyheads.bigram.training.proximal_sgd.descend`: the same seed and step give the same tokens.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), compare both by experiment. The scaled rate and the blow-up are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manyheads._arrays import takes_arrays
from manyheads._settings import double_precision
from manyheads.bigram.engines.generator import Seed, sample_keys, scramble
from manyheads.bigram.engines.reference import Tables, as_jax, draw_block, histogram
from manyheads.bigram.task import BigramTask
from manyheads.bigram.training.proximal_sgd import State, StepSettings, check_size, check_steps, make_tables
from manyheads.errors import UsageError

Rule = Literal["scaled", "constant", "adam"]


class SoftmaxState(NamedTuple):
    r"""The network: `value`, :math:`W = V - \mu 1^\top`, (N, N) float64; logits float32; the optimizer's memory.

    `positions` are :math:`\ell`, (N, T); `tokens` are :math:`m`, (N, N): row k belongs to query k.
    """

    value: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    memory: Any = ()


@dataclass(frozen=True)
class SoftmaxSettings:
    r"""How a step is made.

    Attributes
    ----------
    batch
        Samples of a step.
    value_rate
        :math:`\eta_W`.
    attention_rate
        :math:`\eta_A` of the linear model for "scaled"; the logits' own rate for "constant" and "adam".
    rule
        "scaled": gradient steps of :math:`\eta_A/\max_t a_t^2`, the maximum of each row's softmax over positions, and
        of :math:`\eta_A/\max_j \pi_j^2` for the logits of tokens;
        "constant": gradient steps; "adam": Adam's steps, which move every logit by about its rate.
    token_logits
        Whether :math:`m` is trained as well.
    """

    batch: int
    value_rate: float
    attention_rate: float
    rule: Rule = "scaled"
    token_logits: bool = False

    def __post_init__(self) -> None:
        if self.rule not in ("scaled", "constant", "adam"):
            raise UsageError(f"rule={self.rule!r}: scaled, constant or adam")
        self.linear()  # refuses a batch and rates that make no sense

    def linear(self) -> StepSettings:
        """Return the linear model's step of the same batch and rates."""
        return StepSettings(self.batch, self.value_rate, self.attention_rate)


def start_softmax(task: BigramTask) -> SoftmaxState:
    """Return the network that knows nothing: no value, all logits zero.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> state = start_softmax(draw_task(np.random.default_rng(0), vocabulary=3, length=4, sparsity=1))
    >>> state.positions.shape, state.tokens.shape
    ((3, 4), (3, 3))
    """
    size = task.vocabulary
    return SoftmaxState(
        np.zeros((size, size)), np.zeros((size, task.length), np.float32), np.zeros((size, size), np.float32)
    )


@takes_arrays
def as_linear(state: SoftmaxState) -> State:
    """Return values and weights as the linear model has them; the logits of tokens are left out.

    Examples
    --------
    >>> logits = np.log(np.array([[0.5, 0.25, 0.25]] * 2, np.float32))
    >>> as_linear(SoftmaxState(np.zeros((2, 2)), logits, np.zeros((2, 2)))).attention[0].round(3).tolist()
    [0.5, 0.25, 0.25]
    """
    grown = np.exp(state.positions - state.positions.max(1, keepdims=True))
    return State(np.asarray(state.value), (grown / grown.sum(1, keepdims=True)).astype(np.float32))


def predict_runner_up(length: int, larger: float, smaller: float) -> float:
    r"""Return the weight of a second position when the first has taken over: :math:`1/(T(1-q_2/q_1))`, at most a half.

    Examples
    --------
    >>> round(predict_runner_up(1000, 0.62, 0.38), 6)
    0.002583
    >>> predict_runner_up(1000, 0.5, 0.5)
    0.5
    """
    if not 0 < smaller <= larger <= 1 or length < 2:
        raise UsageError(f"length={length}, larger={larger}, smaller={smaller}: 0 < smaller <= larger <= 1")
    rest = 1 - smaller / larger
    return min(0.5, 1 / (length * rest)) if rest > 0 else 0.5


@takes_arrays
def descend_softmax(
    task: BigramTask,
    state: SoftmaxState,
    settings: SoftmaxSettings,
    steps: int,
    *,
    seed: Seed,
    first_step: int = 0,
) -> SoftmaxState:
    """Make `steps` steps on fresh samples.

    Parameters
    ----------
    task
        What the samples are drawn from.
    state
        Where to begin; it is not changed.
    settings
        Batch, rates and rule.
    steps
        Number of steps. Two calls of 50 steps, the second with ``first_step=50``, are one of 100.
    seed, first_step
        They fix the samples, which are those of `manyheads.bigram.training.proximal_sgd.descend`.

    Raises
    ------
    Diverged
        An entry of the value passed a million or is no number.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=20, sparsity=1)
    >>> state = descend_softmax(task, start_softmax(task), SoftmaxSettings(64, 0.1, 0.1), steps=200, seed=0)
    >>> as_linear(state).attention.argmax(1).tolist() == task.positions[:, 0].tolist()
    True
    """
    check_steps(steps, first_step)
    static = {"batch": settings.batch, "rule": settings.rule, "token_logits": settings.token_logits}
    rates = (settings.value_rate, settings.attention_rate)
    with double_precision():
        logits = tuple(jnp.asarray(part, np.float32) for part in (state.positions, state.tokens))
        memory = state.memory or (_adam().init(logits) if settings.rule == "adam" else ())
        carry = as_jax((np.asarray(state.value, float), logits, memory))
        span = first_step, first_step + steps
        done = _descend(*as_jax((make_tables(task), scramble(seed), span, rates)), carry, **static)
        value, logits, memory = jax.tree.map(np.array, done)
    check_size(float(np.abs(value).max()), settings.linear(), f"the descent diverged within {steps} steps")
    return SoftmaxState(value, logits[0], logits[1], memory)


@lru_cache(maxsize=1)
def _adam() -> optax.GradientTransformation:
    return optax.scale_by_adam()


def _gradients(value: Any, logits: Any, samples: Any, law: Any, token_logits: bool) -> tuple[Any, Any]:
    """Return the preconditioned gradients in the value and in both kinds of logits."""
    positions, by_token = logits
    tokens, queries, targets = samples
    if token_logits:
        rows = positions[queries] + jnp.take_along_axis(by_token[queries], tokens, axis=1)  # (B, T)
        weights = jax.nn.softmax(rows, axis=1)
    else:
        weights = jax.nn.softmax(positions, axis=1)[queries]
    seen = histogram(tokens, weights, len(law)).astype(jnp.float64)  # (B, N)
    residual = (law + seen @ value.T).at[jnp.arange(len(queries)), targets].add(-1.0)
    by_value = residual.T @ (seen - law) / (len(queries) * law)
    pull = jnp.take_along_axis((residual @ value).astype(jnp.float32), tokens, axis=1)  # (B, T)
    pull = weights * (pull - (weights * pull).sum(1, keepdims=True))
    scale = (1 / (len(queries) * law)).astype(jnp.float32)[:, None]
    by_position = scale * jnp.zeros_like(positions).at[queries].add(pull)
    if not token_logits:
        return by_value, (by_position, jnp.zeros_like(by_token))
    return by_value, (by_position, scale * jnp.zeros_like(by_token).at[queries].add(histogram(tokens, pull, len(law))))


@partial(jax.jit, static_argnames=("batch", "rule", "token_logits"))
def _descend(
    tables: Tables, roots: Any, span: Any, rates: Any, carry: Any, *, batch: int, rule: str, token_logits: bool
) -> Any:
    def step(number: Any, carry: Any) -> Any:
        value, logits, memory = carry
        keys = sample_keys(roots, number.astype(jnp.uint32)[None], jnp.arange(batch, dtype=jnp.uint32))
        samples = draw_block(tables, keys, logits[0].shape[1])
        by_value, by_logits = _gradients(value, logits, samples, tables.law, token_logits)
        if rule == "adam":
            by_logits, memory = _adam().update(by_logits, memory)
        rate = rates[1].astype(jnp.float32)
        speeds = [rate, rate]
        if rule == "scaled":  # by the largest weight of a position and the largest share of a token, (N, 1) each
            shares = logits[0], logits[1] + jnp.log(tables.law).astype(jnp.float32)
            speeds = [rate / jax.nn.softmax(part, axis=1).max(1, keepdims=True) ** 2 for part in shares]
        logits = tuple(part - by * move for part, by, move in zip(logits, speeds, by_logits, strict=True))
        return value - rates[0] * by_value, logits, memory

    return jax.lax.fori_loop(span[0], span[1], step, carry)

r"""Softmax attention: weights are a softmax of logits over positions, or over tokens and positions.

The linear model trains the weights :math:`a^{(k)}` themselves. Here they are

.. math:: a^{(k)}_t = \frac{e^{\ell^{(k)}_t + m^{(k)}_{x_t}}}{\sum_s e^{\ell^{(k)}_s + m^{(k)}_{x_s}}},

with logits :math:`\ell` of positions and, optionally, :math:`m` of tokens. With :math:`G` the gradient in :math:`a`,
the gradient in a logit is :math:`a_t (G_t - \sum_s a_s G_s)`, so a step of size :math:`\eta_\ell` moves the weight by
:math:`\eta_\ell a_t^2 G_t`. At initialization all :math:`a_t = 1/T` and a constant learning rate is slower than the
linear model by :math:`T^2`; the learning rate :math:`\eta_A/\max_t a_t^2` moves the largest weight exactly as the
linear model does.

All other weights move by :math:`a_t^2/\max a^2` of that. A growing weight obeys :math:`\dot a \propto a^2 q`,
whose solution :math:`1/a = T - c\,q` blows up in finite time, first for the largest :math:`q`; the weight of a second
position, of :math:`q_2 < q_1`, has then reached only

.. math:: a_2 = \frac{1}{T\,(1 - q_2/q_1)}.

Logits of tokens are scaled alike, by the largest share :math:`\pi_j \propto \mu_j e^{m_j}` that a token has: a share is
1/N at initialization and not 1/T, and the learning rate of the positions would be :math:`(T/N)^2` times too large for
them.

So equal weights of a row grow together, and of unequal ones only the largest, for a time that grows with :math:`T`.
Softmax and linear attention therefore train alike only for equal weights.

Samples are those of `manyheads.theory.bigram.training.proximal_sgd.descend`: the same seed and step give the same
tokens.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS 2024
(arXiv 2410.23438), compare both by experiment. The scaled learning rate and the blow-up are derived here.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from manyheads._constraints import check_fields, constrained
from manyheads._settings import double_precision
from manyheads._trees import PyTree
from manyheads.errors import UsageError
from manyheads.theory.bigram.engines.generator import Seed, draw_step_batch, sample_keys, scramble
from manyheads.theory.bigram.engines.reference import Tables, as_jax, draw_block, histogram
from manyheads.theory.bigram.task import Batch, BigramTask
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings, check_size, check_steps, make_tables
from manyheads.theory.bigram.training.record import trajectory

Logits: TypeAlias = tuple[jax.Array, jax.Array]  # of positions and of tokens
Samples: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # tokens, queries, targets

PROBE = 2048  # contexts on which the excess loss is estimated


class SoftmaxState(NamedTuple):
    r"""Network state: `value`, :math:`W = V - \mu 1^\top`, (N, N) float64; logits float32; the optimizer's state.

    `positions` are :math:`\ell`, (N, T); `tokens` are :math:`m`, (N, N): row k belongs to query k.
    """

    value: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    memory: PyTree = ()


@dataclass(frozen=True)
class SoftmaxSettings:
    r"""Settings of a step.

    The rule is "scaled": gradient steps of :math:`\eta_A/\max_t a_t^2`, the maximum of a row's softmax over positions,
    and of :math:`\eta_A/\max_j \pi_j^2` for the logits of tokens; "constant": gradient steps; "adam": Adam.
    """

    batch: int  # samples of a step
    value_learning_rate: float  # eta_W
    attention_learning_rate: float  # eta_A of the linear model for "scaled"; that of the logits for the other rules
    rule: Literal["scaled", "constant", "adam"] = constrained("scaled")
    token_logits: bool = False  # whether m is trained as well

    def __post_init__(self) -> None:
        check_fields(self)
        self.linear()  # refuses an invalid batch or learning rate

    def linear(self) -> StepSettings:
        """Return the linear model's step of the same batch and rates."""
        return StepSettings(self.batch, self.value_learning_rate, self.attention_learning_rate)


def initial_softmax_state(task: BigramTask) -> SoftmaxState:
    """Return the state without knowledge: zero values and logits."""
    size = task.vocabulary
    return SoftmaxState(
        np.zeros((size, size)), np.zeros((size, task.length), np.float32), np.zeros((size, size), np.float32)
    )


def as_linear(state: SoftmaxState) -> State:
    """Return values and attention weights as the linear model has them; the logits of tokens are ignored."""
    grown = np.exp(state.positions - state.positions.max(1, keepdims=True))
    return State(np.asarray(state.value), (grown / grown.sum(1, keepdims=True)).astype(np.float32))


def record_softmax(
    task: BigramTask, settings: SoftmaxSettings, every: int, records: int, *, seed: list[int]
) -> tuple[np.ndarray, SoftmaxState]:
    """Train from the initial state; return the excess loss of all records over the initial one, and the last state."""
    train = partial(descend_softmax, task, settings=settings, steps=every, seed=seed)
    init, losses = initial_softmax_state(task), []
    probe = draw_step_batch(task, PROBE, seed=[*seed, 1])  # independent of the samples of the steps
    for _, state in islice(trajectory(train, init, every), records + 1):
        losses.append(estimate_excess(task, state, probe))
    return np.array(losses) / losses[0], state


def estimate_excess(task: BigramTask, state: SoftmaxState, probe: Batch) -> float:
    r"""Return the mean of :math:`\tfrac12|f - \mathbb E[e_y|x,k]|^2` over contexts: there is no closed form."""
    logits = state.positions[probe.queries] + state.tokens[probe.queries[:, None], probe.tokens]
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)  # (B, T)
    seen = np.stack([(weights * (probe.tokens == token)).sum(1) for token in range(task.vocabulary)], axis=1)
    there = np.take_along_axis(probe.tokens, task.positions[probe.queries], axis=1)  # (B, Q)
    true = np.einsum("bqn,bq->bn", task.centred.T[there], task.weights[probe.queries])
    return 0.5 * float(((seen @ state.value.T - true) ** 2).sum(1).mean())


def predict_second_weight(length: int, larger: float, smaller: float) -> float:
    """Return the second weight at the blow-up of the first: :math:`1/(T(1-q_2/q_1))`, at most a half."""
    if not 0 < smaller <= larger <= 1 or length < 2:
        raise UsageError(
            f"length={length}, larger={larger}, smaller={smaller}: give 0 < smaller <= larger <= 1 and length >= 2"
        )
    rest = 1 - smaller / larger
    return min(0.5, 1 / (length * rest)) if rest > 0 else 0.5


def descend_softmax(
    task: BigramTask, state: SoftmaxState, settings: SoftmaxSettings, steps: int, *, seed: Seed, first_step: int = 0
) -> SoftmaxState:
    """Make `steps` steps on fresh samples, those of `manyheads.theory.bigram.training.proximal_sgd.descend`.

    The seed and the number of a step determine its samples: two calls of 50 steps, the second with ``first_step=50``,
    are one of 100. Raises `Diverged` if an entry of the value passes a million or is NaN.
    """
    check_steps(steps, first_step)
    static = {"batch": settings.batch, "rule": settings.rule, "token_logits": settings.token_logits}
    rates = (settings.value_learning_rate, settings.attention_learning_rate)
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


def _gradients(
    value: jax.Array, logits: Logits, samples: Samples, mu: jax.Array, token_logits: bool
) -> tuple[jax.Array, Logits]:
    """Return the preconditioned gradients in the value and in both kinds of logits."""
    positions, by_token = logits
    tokens, queries, targets = samples
    if token_logits:
        rows = positions[queries] + jnp.take_along_axis(by_token[queries], tokens, axis=1)  # (B, T)
        weights = jax.nn.softmax(rows, axis=1)
    else:
        weights = jax.nn.softmax(positions, axis=1)[queries]
    seen = histogram(tokens, weights, len(mu)).astype(jnp.float64)  # (B, N)
    residual = (mu + seen @ value.T).at[jnp.arange(len(queries)), targets].add(-1.0)
    by_value = residual.T @ (seen - mu) / (len(queries) * mu)
    at_token = jnp.take_along_axis((residual @ value).astype(jnp.float32), tokens, axis=1)  # (B, T)
    at_token = weights * (at_token - (weights * at_token).sum(1, keepdims=True))
    scale = (1 / (len(queries) * mu)).astype(jnp.float32)[:, None]
    by_position = scale * jnp.zeros_like(positions).at[queries].add(at_token)
    if not token_logits:
        return by_value, (by_position, jnp.zeros_like(by_token))
    counted = histogram(tokens, at_token, len(mu))
    return by_value, (by_position, scale * jnp.zeros_like(by_token).at[queries].add(counted))


@partial(jax.jit, static_argnames=("batch", "rule", "token_logits"))
def _descend(
    tables: Tables, roots: Array, span: Array, rates: Array, carry: PyTree, *, batch: int, rule: str, token_logits: bool
) -> PyTree:
    def step(number: Array, carry: PyTree) -> PyTree:
        value, logits, memory = carry
        keys = sample_keys(roots, number.astype(jnp.uint32)[None], jnp.arange(batch, dtype=jnp.uint32))
        samples = draw_block(tables, keys, logits[0].shape[1])
        by_value, by_logits = _gradients(value, logits, samples, tables.stationary, token_logits)
        if rule == "adam":
            by_logits, memory = _adam().update(by_logits, memory)
        rate = rates[1].astype(jnp.float32)
        speeds = [rate, rate]
        if rule == "scaled":  # by the largest weight of a position and the largest share of a token, (N, 1) each
            shares = logits[0], logits[1] + jnp.log(tables.stationary).astype(jnp.float32)
            speeds = [rate / jax.nn.softmax(part, axis=1).max(1, keepdims=True) ** 2 for part in shares]
        logits = tuple(part - by * move for part, by, move in zip(logits, speeds, by_logits, strict=True))
        return value - rates[0] * by_value, logits, memory

    return jax.lax.fori_loop(span[0], span[1], step, carry)

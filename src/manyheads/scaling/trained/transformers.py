"""Transformers of finite size under a parametrization: losses over learning rates and seeds, and RMS updates.

Parametrization and learning rate are traced numbers: one compiled program a shape serves all of them, and every seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError, check_rising
from manyheads.scaling.parametrization.muon import WHOLE, Muon
from manyheads.scaling.parametrization.optax_scaling import rescale
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.scaling_exponents import Optimizer
from manyheads.scaling.task import Task
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import Number, Scaling, standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import Batches, fit, member_bytes, update
from manyheads.transformer.transformer import Record, Transformer, initialize, normalize
from manyheads.transformer.weights import Weights, roles

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike


BUDGET = 16 * 2**20  # bytes trained side by side: beyond the cache it costs memory and saves no time


@dataclass(frozen=True)
class Recipe:
    """Settings of a training, beside the learning rate, which is the base's, and its parametrization's optimizer."""

    steps: int = constrained(100, Constraint(least=1))  # updates
    epsilon: float = constrained(1e-8, Constraint(least=0))  # adam's at the base
    adam_learning_rate: float = 3e-3  # beside Muon, whose rate is the one that is given and swept

    def __post_init__(self) -> None:
        check_fields(self)


class Setting(NamedTuple):
    """Static settings of a compiled training."""

    config: TransformerConfig
    optimizer: Optimizer
    muon: Muon = WHOLE


class NetworkFactors(NamedTuple):
    """Numbers of a parametrization that a network of one shape consumes, as traced float32."""

    scaling: Scaling
    learning_rates: Mapping[str, Number]
    epsilons: Mapping[str, Number]
    epsilon: Number  # Adam's at the base
    adam_learning_rate: Number  # Adam's beside Muon


def prepare(
    task: Task, parametrization: Parametrization, shape: Shape, recipe: Recipe, members: int
) -> tuple[Setting, NetworkFactors, int]:
    """Return the settings of a network, its numbers, and how many of its members are trained at once.

    Muon's shape factor is a number, and so is not among the settings. The members at once divide their number, so that
    there is one program, and fit into the budget of bytes.
    """
    muon = replace(parametrization.muon, factor="original") if parametrization.optimizer == "muon" else WHOLE
    setting = Setting(task.config(shape), parametrization.optimizer, muon)
    most = int(max(1, min(members, BUDGET // training_bytes(setting.config, setting.optimizer, task.batches))))
    together = next(count for count in range(most, 0, -1) if members % count == 0)
    return setting, factors_of(parametrization, shape, task, recipe), together


def factors_of(parametrization: Parametrization, shape: Shape, task: Task, recipe: Recipe) -> NetworkFactors:
    """Return a parametrization's numbers at one shape."""
    config, table = task.config(shape), parametrization.table(shape)
    scaling = parametrization.scaling(shape, config.inputs, config.mlp_ratio)
    learning_rates = table.column("learning_rate")
    for row in table.rows:
        if row.rule == "muon":  # optax applies a shape factor of its own, whatever the recipe's
            own = replace(parametrization.muon, factor="original")
            growth = own.rate_factor(row.role, shape) / own.rate_factor(row.role, parametrization.base)
            learning_rates[row.role] *= row.rate_factor / growth
    numbers = (learning_rates, table.column("epsilon"), recipe.epsilon, recipe.adam_learning_rate)
    return jax.tree.map(jnp.float32, NetworkFactors(scaling, *numbers))


@takes_arrays
def sweep_losses(
    task: Task,
    parametrization: Parametrization,
    shape: Shape,
    recipe: Recipe,
    learning_rates: Float[ArrayLike, " rates"],
    key: Array,
) -> Float[np.ndarray, "rates steps"]:
    """Train one network for each learning rate of the base, from the same weights on the same batches.

    Losses are those of every step before its update, in nats; not finite where training diverged.
    """
    traced = jnp.asarray(learning_rates, jnp.float32)
    setting, factors, together = prepare(task, parametrization, shape, recipe, len(traced))
    losses = _sweep(setting, (recipe.steps, together), task.batches, factors, traced, key)
    return np.asarray(losses, np.float64)


@partial(jax.jit, static_argnums=(0, 1))
def _sweep(
    setting: Setting, counts: tuple[int, int], batches: Batches, factors: NetworkFactors, rates: Array, key: Array
) -> Array:
    steps, together = counts
    for_model, for_batches = jax.random.split(key)
    model = initialize(setting.config, factors.scaling, for_model, jnp.float32)

    def member(learning_rate: Array) -> Array:
        tx = optimizer_of(setting, factors, model, learning_rate)
        return fit(model, cross_entropy, batches, tx, steps, for_batches)[1]

    return jax.lax.map(member, rates, batch_size=together if together > 1 else None)


def optimizer_of(
    setting: Setting, factors: NetworkFactors, model: Transformer, learning_rate: Array
) -> optax.GradientTransformation:
    """Return the optimizer with the parametrization's learning rate and epsilon for every class of weights."""
    if setting.optimizer == "muon":
        base = optax.contrib.muon(
            learning_rate,
            eps=factors.epsilon,
            adam_learning_rate=factors.adam_learning_rate,
            muon_weight_dimension_numbers=setting.muon.dimensions(model.weights),
        )
    else:
        adam = setting.optimizer == "adam"
        base = optax.adam(learning_rate, eps=factors.epsilon) if adam else optax.sgd(learning_rate)
    return rescale(base, roles(model.weights), factors.learning_rates, factors.epsilons)


State = tuple[Weights, optax.OptState]


def training_bytes(config: TransformerConfig, optimizer: Optimizer, batches: Batches) -> int:
    """Count the bytes of one training; traced, so that nothing of that size is allocated."""
    scaling = standard_scaling(config.shape, config.inputs, config.mlp_ratio)
    return member_bytes(
        lambda key: initialize(config, scaling, key, jnp.float32),
        cross_entropy,
        batches,
        optax.sgd(1.0) if optimizer == "sgd" else optax.adam(1.0),
        jax.random.key(0),
    )


class Updates(NamedTuple):
    """Root mean squares over a probe batch, one number a checkpoint unless said otherwise; None if not asked for."""

    outputs: Any = None  # change of the outputs
    residual: Any = None  # change of the stream after the last block
    logits: Any = None  # change of the attention logits, all layers
    query_by_weights: Any = None  # (W_t - W_0) z_t of the queries, all layers
    value_by_weights: Any = None  # the same of the values
    logits_start: Any = None  # () attention logits before training
    head_variance_start: Any = None  # () variance of the logits over heads before training, mean over layers and pairs
    kernel_std: Any = None  # () before training, of the stream's kernel h.h/d, between independent networks
    head_variance: Any = None  # variance of the logits over heads, all layers
    loss: Any = None  # on the probe batch
    key_by_weights: Any = None  # (W_t - W_0) z_t, as for queries
    output_by_weights: Any = None
    mlp_in_by_weights: Any = None
    mlp_out_by_weights: Any = None


TWINS = 6  # networks drawn beside each other to see how much they differ before training


Probe = tuple[Array, Array]  # inputs, answers
Asked = tuple[Setting, frozenset[str]]  # settings, and names of updates


class _Start(NamedTuple):
    outputs: Array  # (..., outputs)
    stream: Array  # (..., T, d) after the last block
    logits: Array  # (L, ..., H, T, T)


BY_WEIGHTS = tuple(f"{role}_by_weights" for role in ("query", "key", "value", "output", "mlp_in", "mlp_out"))
"""What every matrix of the blocks moves by itself."""
USUAL = tuple(name for name in Updates._fields if name not in BY_WEIGHTS or name.startswith(("query", "value")))


def measure_updates(
    task: Task,
    parametrization: Parametrization,
    shape: Shape,
    recipe: Recipe,
    learning_rate: float,
    checkpoints: tuple[int, ...],
    key: Array,
    *,
    fields: tuple[str, ...] = USUAL,
) -> Updates:
    """Train one network and measure at some steps how far everything has moved from its start."""
    if unknown := set(fields) - set(Updates._fields):
        raise UsageError(f"fields: {', '.join(sorted(unknown))}: choose from {', '.join(Updates._fields)}")
    check_rising("checkpoints", checkpoints, count=1)
    setting, factors, _ = prepare(task, parametrization, shape, recipe, 1)
    # Bounds as data: one compiled loop body serves all stretches, and one program all checkpoints of this number.
    bounds = jnp.asarray([0, *checkpoints], jnp.int32)
    found = _updates((setting, frozenset(fields)), task.batches, factors, jnp.float32(learning_rate), bounds, key)
    return jax.tree.map(lambda value: np.asarray(value, np.float64), found)


@partial(jax.jit, static_argnums=0)
def _updates(
    asked: Asked, batches: Batches, factors: NetworkFactors, rate: Array, bounds: Array, key: Array
) -> Updates:
    setting, fields = asked
    config = setting.config
    twins = TWINS if fields & {"head_variance_start", "kernel_std"} else 1
    for_model, for_batches, for_probe = jax.random.split(key, 3)
    probe = batches(for_probe)
    others = jax.vmap(lambda number: jax.random.fold_in(for_model, number))(jnp.arange(1, twins))
    keys = jnp.concatenate([for_model[None], others])

    def begin(key: Array) -> tuple[_Start, Weights]:
        model = initialize(config, factors.scaling, key, jnp.float32)
        record = model.record(probe[0])
        return _Start(record.outputs, record.layers.stream[-1], attention_logits(record)), model.weights

    starts, drawn = jax.lax.map(begin, keys)  # one compiled body for all, that draws what is trained as well
    before, weights = jax.tree.map(lambda value: value[0], (starts, drawn))
    start = Transformer(weights, factors.scaling, config)
    tx = optimizer_of(setting, factors, start, rate)

    def advance(number: Array, state: State) -> State:
        change, inner, _ = update(start, cross_entropy, batches, tx, for_batches, number, *state)
        return optax.apply_updates(state[0], change), inner

    def stretch(state: State, span: tuple[Array, Array]) -> tuple[State, Updates]:
        state = jax.lax.fori_loop(span[0], span[1], advance, state)
        model = Transformer(state[0], factors.scaling, config)
        return state, _only(fields, _moved(start, before, model, probe, fields))

    _, moved = jax.lax.scan(stretch, (start.weights, tx.init(start.weights)), (bounds[:-1], bounds[1:]))
    spread = jnp.sqrt(jnp.var(jax.vmap(_kernel)(starts.stream), axis=0, ddof=1).mean()) if twins > 1 else None
    whole = moved._replace(
        logits_start=_rms(before.logits), head_variance_start=jnp.var(starts.logits, axis=-3).mean(), kernel_std=spread
    )
    return _only(fields, whole)


def _only(fields: frozenset[str], updates: Updates) -> Updates:
    """Leave out what was not asked for, so that it is not compiled."""
    return Updates(**{name: value if name in fields else None for name, value in updates._asdict().items()})


def _kernel(stream: Array) -> Array:
    """Return h.h/d between all tokens of a probe: stream (..., T, d) -> (tokens, tokens)."""
    rows = stream.reshape(-1, stream.shape[-1])
    return rows @ rows.T / rows.shape[-1]


def _moved(start: Transformer, before: _Start, model: Transformer, probe: Probe, fields: frozenset[str]) -> Updates:
    now = model.record(probe[0], patterns="output_by_weights" in fields)
    logits, layers = attention_logits(now), now.layers
    moved = {}
    for name in (name for name in BY_WEIGHTS if name in fields):
        role = name.removesuffix("_by_weights")
        change = getattr(model.weights.blocks, role) - getattr(start.weights.blocks, role)
        product, given = inputs_of(role, model, now)
        moved[name] = _rms(model.scaling.multiplier[role] * jnp.einsum(product, given, change))
    return Updates(
        outputs=_rms(now.outputs - before.outputs),
        residual=_rms(layers.stream[-1] - before.stream),
        logits=_rms(logits - before.logits),
        head_variance=jnp.var(logits, axis=-3).mean(),  # over heads, at every pair of tokens
        loss=cross_entropy(lambda _: now.outputs, probe),
        **moved,
    )


def inputs_of(role: str, model: Transformer, record: Record) -> tuple[str, Array]:
    """Return what a matrix of all blocks acts on, and the product of the two as `einsum` writes it."""
    layers = record.layers
    below = jnp.concatenate([record.start[None], layers.stream[:-1]])
    if role in ("query", "key", "value"):
        return "l...td,lhdn->l...htn", _normalized(model, below, "attention")  # (L, ..., T, d)
    if role == "output":
        return "l...htn,lhnd->l...td", jnp.einsum("...qk,...kn->...qn", layers.patterns, layers.values)
    if role == "mlp_in":
        middle = below + model.scaling.branch * layers.attention
        return "l...td,ldf->l...tf", _normalized(model, middle, "mlp")
    assert layers.hidden is not None  # a network without an MLP has no such weights
    return "l...tf,lfd->l...td", layers.hidden


def attention_logits(record: Record) -> Array:
    """Return the logits of all blocks and heads, masked ones included."""
    layers = record.layers
    return record.logit * jnp.einsum("l...qn,l...kn->l...qk", layers.queries, layers.keys)  # (L, ..., H, T, T)


def _normalized(model: Transformer, stream: Array, branch: str) -> Array:
    """Normalize the stream before the branches of all blocks, as a pre-norm transformer does."""
    if model.config.norm != "pre":
        return stream
    factor = model.scaling.multiplier["norm"]

    def layer(stream: Array, *parts: Array | None) -> Array:
        gain, shift = (None if part is None else factor * part for part in parts)
        return normalize(stream, gain, shift, model.config)

    return jax.vmap(layer)(stream, *(getattr(model.weights.blocks, f"{branch}_{part}") for part in ("gain", "shift")))


def _rms(array: Array) -> Array:
    return jnp.sqrt(jnp.square(array).mean())

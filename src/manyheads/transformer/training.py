"""Training loop for any model with `weights`, any loss, any source of batches, any optax transformation.

A step is a pure function of the weights, the optimizer's state and the key folded with the number of the step. So the
result does not depend on how the steps are cut into chunks, and training can be looked at between chunks for free.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from manyheads._namespaces import Array
from manyheads._trees import PyTree
from manyheads.errors import check_call, check_integer


class Model(Protocol):
    """A pytree that is called on inputs and whose field `weights` is trained."""

    weights: PyTree

    def __call__(self, x: Array) -> Array:
        """Compute the outputs."""
        ...


M = TypeVar("M", bound=Model)
Batch: TypeAlias = Any  # what `Batches` draws
Loss = Callable[[Any, Batch], jax.Array]  # (model, batch) -> scalar
Batches = Callable[[jax.Array], Batch]  # key -> batch


class TrainState(NamedTuple):
    """What a step changes."""

    weights: PyTree
    optimizer_state: optax.OptState
    losses: jax.Array  # (steps,), zero for the steps to come


def update(
    model: Model,
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    number: jax.Array,
    weights: PyTree,
    state: optax.OptState,
) -> tuple[PyTree, optax.OptState, jax.Array]:
    """Draw the batch of a step, differentiate the loss; return the update, the optimizer's next state and the loss."""
    batch = batches(jax.random.fold_in(key, number))
    value, gradient = jax.value_and_grad(lambda trained: loss(with_weights(model, trained), batch))(weights)
    return *optimizer.update(gradient, state, weights), value


Update = Callable[..., tuple[PyTree, optax.OptState, jax.Array]]  # `update` of a training: (number, weights, state)


def step(update: Update, number: jax.Array, state: TrainState) -> TrainState:
    """Take the step of a number and keep its loss."""
    change, inner, value = update(number, state.weights, state.optimizer_state)
    losses = state.losses.at[number].set(value.astype(state.losses.dtype))
    return TrainState(optax.apply_updates(state.weights, change), inner, losses)


class Snapshot(NamedTuple):
    """State between two chunks, on the host, for a measurement."""

    step: int  # steps done
    model: Any
    losses: np.ndarray  # one for each step done so far


class Trained(NamedTuple):
    """The end of a run."""

    model: Any  # with its final weights
    losses: np.ndarray  # (steps,), the loss of every step on its batch before the update
    measured: list[tuple[int, Any]]  # (step, what the measurement returned), from step 0 to the last


def print_loss(snapshot: Snapshot) -> None:
    """Print the number of steps done and the loss of the last: a `measure` of `train`."""
    print(f"step {snapshot.step:6d}  loss {snapshot.losses[-1] if snapshot.step else math.nan:.4f}", flush=True)


def fit(
    model: M, loss: Loss, batches: Batches, optimizer: optax.GradientTransformation, steps: int, key: jax.Array
) -> tuple[M, jax.Array]:
    """Train as `train` does and return (model, losses (steps,)): traceable, to be mapped over keys, scalings, rates."""
    state = TrainState(model.weights, optimizer.init(model.weights), jnp.zeros(steps))
    change = partial(update, model, loss, batches, optimizer, key)
    state = jax.lax.fori_loop(0, steps, partial(step, change), state)
    return with_weights(model, state.weights), state.losses


def train(
    model: M,
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    steps: int,
    key: jax.Array,
    *,
    every: int | None = None,
    measure: Callable[[Snapshot], object] | None = None,
) -> Trained:
    """Train in compiled chunks and measure between them.

    The chunks share one compiled program, whatever their length, so the result is the same bit for bit for every
    value of `every`. A later call with equal `loss`, `batches` and `optimizer` objects and equal shapes compiles
    nothing: make the optimizer once.

    Raises `UsageError`: `steps` or `every` is not positive.

    Parameters
    ----------
    model
        A pytree with a field `weights`; nothing else in it is trained.
    loss
        (model, batch) -> scalar; see `losses`.
    batches
        key -> batch, a pure function. Step t draws from the key folded with t.
    optimizer
        An optax transformation with its learning rate.
    steps, key
        Number of updates; a JAX random key, used for the batches only.
    every
        Steps of a chunk; `None` takes one chunk.
    measure
        Called on the host with a `Snapshot` before the first step and after each chunk. `print_loss` shows progress.

    Examples
    --------
    >>> from manyheads.transformer.baselines import BaselineConfig, initialize_pooled
    >>> from manyheads.transformer.inputs import TokenInput
    >>> from manyheads.transformer.losses import cross_entropy
    >>> from manyheads.data.recall import Recall, RecallSource
    >>> model = initialize_pooled(BaselineConfig(TokenInput(3), outputs=2, width=8, hidden=8), jax.random.key(0))
    >>> source = RecallSource(Recall(length=2, symbols=2), 16)
    >>> done = train(model, cross_entropy, source, optax.adam(0.01), steps=60, key=jax.random.key(1))
    >>> bool(done.losses[-1] < 0.5 * done.losses[0])
    True
    """
    steps = check_integer("steps", steps)
    every = None if every is None else check_integer("every", every)
    check_call("loss", loss, "model", "batch")
    check_call("batches", batches, "key")
    measured: list[tuple[int, Any]] = []

    def look(done: int, state: TrainState) -> None:
        if measure is not None:
            losses = np.asarray(state.losses)[:done]
            measured.append((done, measure(Snapshot(done, with_weights(model, state.weights), losses))))

    run = Partial(step, Partial(update, model, loss, batches, optimizer, key))
    state = _begin(optimizer, model.weights, steps)
    look(0, state)
    for done in range(0, steps, every or steps):
        until = min(steps, done + (every or steps))
        # Bounds as arrays: they are traced, and all chunks run the same program.
        state = _advance(run, state, jnp.int32(done), jnp.int32(until))
        look(until, state)
    return Trained(with_weights(model, state.weights), np.asarray(state.losses), measured)


def with_weights(model: M, weights: PyTree) -> M:
    """Put other weights into a model."""
    return eqx.tree_at(lambda tree: tree.weights, model, weights, is_leaf=lambda node: node is None)


def count_weights(model: Model) -> int:
    """Count the trained numbers of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.weights))


def member_bytes(
    build: Callable[[jax.Array], Model],
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
) -> int:
    """Count the bytes of one member, traced, not run: weights, gradients, optimizer state, residuals backward."""

    def held(key: jax.Array) -> tuple[PyTree, optax.OptState, Callable[[jax.Array], tuple[PyTree]]]:
        model = build(key)
        batch = batches(key)
        backward = jax.vjp(lambda weights: loss(with_weights(model, weights), batch), model.weights)[1]
        return model.weights, optimizer.init(model.weights), backward

    weights, state, backward = jax.eval_shape(held, key)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((weights, weights, state, backward)))


@eqx.filter_jit
def _advance(run: Callable[..., TrainState], state: TrainState, first: jax.Array, last: jax.Array) -> TrainState:
    return jax.lax.fori_loop(first, last, run, state)


@eqx.filter_jit  # one program instead of one for each shape of an array
def _begin(optimizer: optax.GradientTransformation, weights: PyTree, steps: int) -> TrainState:
    return TrainState(weights, optimizer.init(weights), jnp.zeros(steps))

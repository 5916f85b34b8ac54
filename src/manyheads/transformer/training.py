"""Training loop for any model with `weights`, any loss, any source of batches, any optax transformation.

A step is a pure function of the weights, the optimizer's state and the key folded with the number of the step. So the
result does not depend on how the steps are cut into chunks, and training can be looked at between chunks for free.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manyheads.errors import check_call, check_integer


class Model(Protocol):
    """A pytree that is called on inputs and whose field `weights` is trained."""

    weights: Any

    def __call__(self, x: Any) -> Any:
        """Compute the outputs."""
        ...


M = TypeVar("M", bound=Model)
Loss = Callable[[Any, Any], jax.Array]  # (model, batch) -> scalar
Batches = Callable[[jax.Array], Any]  # key -> batch


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


def with_weights(model: M, weights: Any) -> M:
    """Put other weights into a model."""
    return eqx.tree_at(lambda tree: tree.weights, model, weights, is_leaf=lambda node: node is None)


def count_weights(model: Any) -> int:
    """Count the trained numbers of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.weights))


def fit(
    model: M, loss: Loss, batches: Batches, optimizer: optax.GradientTransformation, steps: int, key: jax.Array
) -> tuple[M, jax.Array]:
    """Train and return (model, losses (steps,)): traceable, to be mapped over keys, scalings and rates.

    The arguments are those of `train`, which computes the same and shows what happens on the way.
    """
    state = (model.weights, optimizer.init(model.weights), jnp.zeros(steps))
    weights, _, losses = _advance(model, loss, batches, optimizer, (state, 0, steps), key)
    return with_weights(model, weights), losses


def train(
    model: M,
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    steps: int,
    key: jax.Array,
    *,
    every: int | None = None,
    measure: Callable[[Snapshot], Any] | None = None,
) -> Trained:
    """Train in compiled chunks and measure between them.

    The chunks share one compiled program, whatever their length, so the result is the same bit for bit for every
    value of `every`. A later call with equal `loss`, `batches` and `optimizer` objects and equal shapes compiles
    nothing: make the optimizer once.

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
    steps
        Number of updates.
    key
        A JAX random key, used for the batches only.
    every
        Steps of a chunk; `None` takes one chunk.
    measure
        Called on the host with a `Snapshot` before the first step and after each chunk. To show progress, print here.

    Raises
    ------
    UsageError
        `steps` or `every` is not positive.

    Examples
    --------
    >>> from manyheads.transformer.baselines import BaselineConfig, initialize_pooled
    >>> from manyheads.transformer.inputs import TokenInput
    >>> from manyheads.transformer.losses import cross_entropy
    >>> from manyheads.data.recall import Recall, RecallSource
    >>> task = Recall(length=2, symbols=2)
    >>> model = initialize_pooled(BaselineConfig(TokenInput(3), outputs=2, width=8, hidden=8), jax.random.key(0))
    >>> done = train(model, cross_entropy, RecallSource(task, 16), optax.adam(0.01), steps=60, key=jax.random.key(1))
    >>> bool(done.losses[-1] < 0.5 * done.losses[0])
    True
    """
    steps = check_integer("steps", steps)
    every = None if every is None else check_integer("every", every)
    check_call("loss", loss, "model", "batch")
    check_call("batches", batches, "key")
    measured: list[tuple[int, Any]] = []

    def look(done: int, state: tuple[Any, Any, jax.Array]) -> None:
        if measure is not None:
            losses = np.asarray(state[2])[:done]
            measured.append((done, measure(Snapshot(done, with_weights(model, state[0]), losses))))

    state = (model.weights, *_begin(optimizer, model.weights, steps))
    look(0, state)
    done = 0
    while done < steps:
        until = min(steps, done + (every or steps))
        # Bounds as arrays: they are traced, and all chunks run the same program.
        state = _advance_compiled(model, loss, batches, optimizer, (state, jnp.int32(done), jnp.int32(until)), key)
        done = until
        look(done, state)
    return Trained(with_weights(model, state[0]), np.asarray(state[2]), measured)


def train_ensemble(
    build: Callable[[jax.Array], Any],
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    steps: int,
    keys: jax.Array,
    *,
    budget: int = 16 * 2**20,
) -> tuple[Any, jax.Array]:
    """Train one model a key, as many side by side as fit a budget of bytes and the others after them.

    Each key is split into one for `build`, a pure function key -> model, and one for the batches. Side by side pays for
    small models only: beyond the cache it multiplies memory and saves no time. The budget is that of the weights, the
    optimizer's state and what the backward pass keeps.

    Returns
    -------
    tuple
        The models as one pytree with the members in front, and the losses (members, steps).
    """
    side_by_side = max(1, min(len(keys), budget // member_bytes(build, loss, batches, optimizer, keys[0])))

    @jax.jit
    def run(keys: jax.Array) -> tuple[Any, jax.Array]:
        def member(key: jax.Array) -> tuple[Any, jax.Array]:
            for_model, for_batches = jax.random.split(key)
            model, losses = fit(build(for_model), loss, batches, optimizer, steps, for_batches)
            return model.weights, losses

        return jax.lax.map(member, keys, batch_size=side_by_side if side_by_side > 1 else None)

    weights, losses = run(keys)
    return with_weights(build(keys[0]), weights), losses


def member_bytes(
    build: Callable[[jax.Array], Any],
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
) -> int:
    """Count the bytes of one member: weights, gradients, optimizer state and residuals of the backward pass.

    Traced, not run: nothing of that size is allocated.
    """

    def held(key: jax.Array) -> tuple[Any, Any, Any]:
        model = build(key)
        batch = batches(key)
        _, backward = jax.vjp(lambda weights: loss(with_weights(model, weights), batch), model.weights)
        return model.weights, optimizer.init(model.weights), backward

    weights, state, backward = jax.eval_shape(held, key)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((weights, weights, state, backward)))


def _advance(
    model: Any,
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    span: tuple[tuple[Any, Any, jax.Array], Any, Any],
    key: jax.Array,
) -> tuple[Any, Any, jax.Array]:
    """Take the steps from `span[1]` up to `span[2]` from the state (weights, optimizer state, losses)."""

    def step(number: jax.Array, state: tuple[Any, Any, jax.Array]) -> tuple[Any, Any, jax.Array]:
        weights, memory, losses = state
        batch = batches(jax.random.fold_in(key, number))
        value, gradient = jax.value_and_grad(lambda trained: loss(with_weights(model, trained), batch))(weights)
        updates, memory = optimizer.update(gradient, memory, weights)
        return optax.apply_updates(weights, updates), memory, losses.at[number].set(value.astype(losses.dtype))

    state, first, last = span
    return jax.lax.fori_loop(first, last, step, state)


_advance_compiled = eqx.filter_jit(_advance)


@eqx.filter_jit  # one program instead of one for each shape of an array
def _begin(optimizer: optax.GradientTransformation, weights: Any, steps: int) -> tuple[Any, jax.Array]:
    return optimizer.init(weights), jnp.zeros(steps)

r"""Multi-head linear attention with merged or separate key-query weights, trained on prompts.

Head i has a value weight :math:`v_i` and key-query weights: either one matrix :math:`U_i` (merged), or keys and queries
:math:`k_{ir}, q_{ir}\in\mathbb R^D`, r = 1 … R (separate, rank R). The layer reads the label at the query's position:

.. math:: \hat y = \sum_i v_i\frac1N\sum_n y_n\,x_n^\top U_ix_q, \qquad U_i = \sum_r k_{ir}q_{ir}^\top .

The entries of the value and key-query matrices that mix inputs with labels are zero, as in the paper: by the symmetry
w → -w zero is where the population gradient leaves them if they start there.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manyheads._constraints import Constraint
from manyheads._settings import double_precision
from manyheads.errors import UsageError, check_integer
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression, Prompts
from manyheads.theory.meanfield.initial_value import refuse_divergence


class MergedHeads(NamedTuple):
    """Value weights and merged key-query weights."""

    value: Float[Array, " head"]
    matrix: Float[Array, "head dim dim"]

    def circuit(self) -> Float[Array, "dim dim"]:
        """Return U, the sum over heads of value times key-query weights."""
        return jnp.einsum("h,hde->de", self.value, self.matrix)


class SeparateHeads(NamedTuple):
    """Value weights, keys and queries of rank R."""

    value: Float[Array, " head"]
    key: Float[Array, "head rank dim"]
    query: Float[Array, "head rank dim"]

    def circuit(self) -> Float[Array, "dim dim"]:
        """Return U, the sum over heads of value times key times query."""
        return jnp.einsum("h,hrd,hre->de", self.value, self.key, self.query)


Heads = MergedHeads | SeparateHeads


@dataclass(frozen=True)
class HeadTraining:
    """Circuit and loss during training."""

    times: Float[np.ndarray, " time"]  # step times learning rate, (S,), initialization included
    circuits: Float[np.ndarray, "time dim dim"]  # U, (S, D, D)
    losses: Float[np.ndarray, " time"]  # population loss of the circuits, (S,)
    heads: Heads  # weights after the last step

    def __repr__(self) -> str:
        steps = f"{len(self.times)} records to time {self.times[-1]:.4g}"
        return f"HeadTraining({steps}, loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g})"


def draw_heads(key: jax.Array, dim: int, heads: int, std: float, rank: int | None = 1) -> Heads:
    """Draw all weights from a normal distribution; `rank` R of separate keys and queries, None for merged weights."""
    dim, heads = check_integer("dim", dim), check_integer("heads", heads)
    Constraint(above=0).kept("std", std, "float")
    first, second, third = jax.random.split(key, 3)
    shape = (heads, dim, dim) if rank is None else (heads, check_integer("rank", rank), dim)
    with double_precision():
        value = jax.random.normal(first, (heads,), jnp.float64)
        drawn = (jax.random.normal(part, shape, jnp.float64) for part in (second, third))
        weights: list[Any] = [std * np.asarray(weight) for weight in (value, *drawn)]  # double precision in any setting
    return MergedHeads(*weights[:2]) if rank is None else SeparateHeads(*weights)


def check_heads(task: InContextRegression, heads: Heads) -> None:
    """Refuse weights of another dimension than the task's, or that are not finite."""
    shapes = [np.shape(weight) for weight in heads]
    if any(shape[-1:] != (task.dim,) for shape in shapes[1:]):
        raise UsageError(f"weights of shapes {shapes}: expected last dimensions of {task.dim}, as in the task")
    if not all(np.isfinite(weight).all() for weight in heads):
        raise UsageError("weights that are not finite: give finite numbers")


def sampled_loss(heads: Heads, prompts: Prompts) -> Float[Array, ""]:
    """Compute half the mean squared error of the layer on prompts."""
    correlation = jnp.einsum("bn,bnd->bd", prompts.outputs, prompts.inputs) / prompts.outputs.shape[1]
    predicted = jnp.einsum("bd,de,be->b", correlation, heads.circuit().astype(correlation.dtype), prompts.query)
    return ((prompts.answer - predicted) ** 2).mean() / 2


def train_heads(
    task: InContextRegression,
    heads: Heads,
    key: jax.Array,
    *,
    duration: float,
    learning_rate: float = 0.03,
    batch: int | None = 128,
    records: int = 400,
) -> HeadTraining:
    """Train by stochastic gradient descent, with new prompts in every step.

    Parameters
    ----------
    duration
        Number of steps times learning rate, rounded up to whole records.
    batch
        Prompts in a step; None for gradient descent on the population loss.
    records
        Number of recorded circuits after initialization.

    Raises
    ------
    UsageError
        A size below 1, a duration or learning rate that is not positive, or weights of another dimension.
    CertificateError
        The weights diverge.
    """
    check_heads(task, heads)
    records = check_integer("records", records)
    batch = None if batch is None else check_integer("batch", batch)
    for name, value in (("duration", duration), ("learning_rate", learning_rate)):
        Constraint(above=0).kept(name, value, "float")
    every = int(np.ceil(duration / (learning_rate * records)))
    with double_precision():
        final, circuits = _descend(task, heads, key, learning_rate, every, batch, records)
        circuits = jnp.concatenate([heads.circuit()[None], circuits])
        losses = np.asarray(task.loss(circuits))
    refuse_divergence(losses, f"decrease learning_rate={learning_rate:g}")
    times = learning_rate * every * np.arange(records + 1)
    return HeadTraining(times, np.asarray(circuits), losses, jax.tree.map(np.asarray, final))


@functools.partial(jax.jit, static_argnames=("task", "batch", "records"))
def _descend(
    task: InContextRegression,
    heads: Heads,
    key: jax.Array,
    learning_rate: float,
    every: int,
    batch: int | None,
    records: int,
) -> tuple[Heads, Float[Array, "time dim dim"]]:
    """Return the weights after training, and the circuit after each record."""

    def objective(heads: Heads, step: jax.Array) -> jax.Array:
        if batch is None:
            return task.loss(heads.circuit())
        return sampled_loss(heads, task.sample(jax.random.fold_in(key, step), batch))

    def update(step: jax.Array, heads: Heads) -> Heads:
        gradient = jax.grad(objective)(heads, step)
        return jax.tree.map(lambda weight, slope: weight - learning_rate * slope, heads, gradient)

    def record(heads: Heads, number: jax.Array) -> tuple[Heads, jax.Array]:
        heads = jax.lax.fori_loop(number * every, (number + 1) * every, update, heads)
        return heads, heads.circuit()

    return jax.lax.scan(record, heads, jnp.arange(records))

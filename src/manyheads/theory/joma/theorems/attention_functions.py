r"""Attention functions with conserved quantities: which relations theorem 1 has beyond linear and exp attention.

Notation of `manyheads.theory.joma.theorems.invariants`: b = f(z) o x / A with orthonormal frozen embeddings.

* **A constant.** :math:`\dot v_k = f(z) \circ E[g_k \phi_k' x]` and :math:`\dot z = f'(z) \circ \sum_k E[g_k \phi_k' x]
  \circ v_k`. Hence every function f whose derivative does not vanish has one quantity per token,

  .. math:: F(z_m) - \tfrac12 \sum_k v_{mk}^2, \qquad F(z) = \int \frac{f}{f'} dz.

  Where f' is zero the logit stays.
* **A homogeneous in f(z)**, such that b has the degree p in it: by Euler's identity :math:`\sum_m F(z_m) - \tfrac p2
  \sum_{mk} v_{mk}^2`. Attention that is normalized, by the sum or by another norm, has p = 0, so that the weights drop
  out, and no other quantity: `count_invariants`.

=========== ===================== =======================
f           F                     at T = 1
=========== ===================== =======================
z           :math:`z^2/2`         linear, the paper's
exp z       z                     exp, the paper's
1/(1+e^-z)  :math:`z + e^z`       sigmoid
z^2         :math:`z^2/4`         square
=========== ===================== =======================

Derived here. The count is that of conservation laws by the Lie algebra of the gradients' vector fields: Marcotte,
Gribonval, Peyré, "Abide by the Law and Follow the Flow", NeurIPS 2023 (arXiv 2307.00144).
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.layer import attend
from manyheads.theory.joma.task import UpdateRule

Fields = Callable[[jax.Array], jax.Array]  # from a state to the values of several vector fields, one a row
LARGEST = 24  # logits and weights: Jacobians of all brackets are held at once
RESOLUTION = 1e-8  # of a unit vector outside a span, far above rounding


def count_invariants(rule: UpdateRule, tokens: int, contexts: int, neurons: int, rng: np.random.Generator) -> int:
    """Count the functions of logits and token weights that gradient flow conserves whatever the loss, one query.

    Each context and neuron has a vector field, which the loss multiplies by an arbitrary factor. The rank of the Lie
    algebra that they generate, at a random point and with random contexts, is the number of directions in which the
    flow can be steered; the others are conserved. Brackets are taken until the rank stays.

    Raises `UsageError`: weight decay, one weight matrix per query, or more than 24 logits and weights.
    """
    size = tokens * (1 + neurons)
    if rule.weight_decay or rule.per_query_weights or size > LARGEST:
        raise UsageError(
            f"{size} logits and weights, weight_decay={rule.weight_decay}, per_query_weights={rule.per_query_weights}: "
            f"expected {LARGEST} or fewer, no weight decay, and shared weights"
        )
    with jax.enable_x64(True):
        frequencies = jnp.asarray(rng.dirichlet(np.ones(tokens), contexts))
        point = np.concatenate([1 + 0.2 * rng.normal(size=tokens), rng.normal(size=tokens * neurons)])
        # The rank of the Lie algebra at the point; of each order only brackets that raise the rank are kept.
        frame: list[np.ndarray] = []
        kept: tuple[jax.Array, ...] = ()
        while rows := _independent_rows(_fields(rule.traced(), frequencies, kept, jnp.asarray(point)), frame):
            kept = (*kept, jnp.asarray(rows))
        return size - len(frame)


def _velocities(rule: UpdateRule, contexts: jax.Array, state: jax.Array) -> jax.Array:
    """Compute the velocity of (z, v) for a unit gradient at each neuron in each context, (N K, M + M K)."""
    tokens = contexts.shape[1]
    weights = state[tokens:].reshape(tokens, -1)  # (M, K)

    def velocity(context: jax.Array, unit: jax.Array) -> jax.Array:
        b, pull = jax.vjp(lambda z: attend(rule, z, context), state[:tokens])
        (logits,) = pull(weights @ unit)
        return jnp.concatenate([rule.learning_rate_ratio * logits, jnp.outer(b, unit).ravel()])

    units = jnp.eye(weights.shape[1])
    return jax.vmap(lambda x: jax.vmap(lambda unit: velocity(x, unit))(units))(contexts).reshape(-1, state.size)


@eqx.filter_jit
def _fields(rule: UpdateRule, contexts: jax.Array, kept: tuple[jax.Array, ...], point: jax.Array) -> jax.Array:
    """Evaluate the brackets of the order after those kept; all are arguments, so that draws share one program."""

    def first(state: jax.Array) -> jax.Array:
        return _velocities(rule, contexts, state)

    level: Fields = first
    for rows in kept:
        level = _brackets(first, level, rows)
    return level(point)


def _brackets(first: Fields, level: Fields, rows: jax.Array) -> Fields:
    """Return the Lie brackets of every field of the first with chosen ones of a level."""

    def second(state: jax.Array) -> jax.Array:
        return level(state)[rows]

    def commutators(state: jax.Array) -> jax.Array:
        along = jnp.einsum("jde,ie->ijd", jax.jacfwd(second)(state), first(state))
        back = jnp.einsum("ide,je->ijd", jax.jacfwd(first)(state), second(state))
        return (along - back).reshape(-1, state.size)

    return commutators


def _independent_rows(vectors: jax.Array, frame: list[np.ndarray]) -> list[int]:
    """Find the rows outside the span of an orthonormal frame, and extend the frame by them."""
    rows = []
    for number, vector in enumerate(np.asarray(vectors)):
        rest = vector / max(float(np.linalg.norm(vector)), 1.0)
        for _ in range(2):  # orthogonalized twice, against rounding
            for known in frame:
                rest = rest - known * (known @ rest)
        if np.linalg.norm(rest) > RESOLUTION:
            rows.append(number)
            frame.append(rest / np.linalg.norm(rest))
    return rows

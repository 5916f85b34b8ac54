"""McKean-Vlasov particles: one coordinate of the weights and of the features each, coupled through Q and q.

In the limit of high dimension a coordinate w of the weights, whose coordinates of the features are u_1, ..., u_p,
follows [derived here]

    dw = -tau [ sum_k u_k A_k + (B + lambda) w + phi(w) ] dt + tau sqrt(D) dW,

with A, B, D of `quadrature` at Q_k = E[u_k w] and q = E[w^2], expectations over all coordinates. For phi = 0 the first
two moments close, which is the ODE of the overlaps; for another penalty, such as lambda_1 sign(w), they do not, and the
distribution of (u, w) is simulated here by N particles and Euler-Maruyama steps.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from manyheads._arrays import as_floats, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, UsageError, check_integer
from manyheads.theory.meanfield.contrastive.ode import SMALLEST, vector_field
from manyheads.theory.meanfield.contrastive.quadrature import Nodes, expectations
from manyheads.theory.meanfield.contrastive.sgd import Penalty, check_features
from manyheads.theory.meanfield.contrastive.task import ContrastiveLoss, ContrastiveTask, TaskParameters


class ParticlePath(NamedTuple):
    """Overlaps and squared norm of particles at equal distances of time, and the particles at the end."""

    times: Float[np.ndarray, " times"]  # from 0 on
    states: Float[np.ndarray, "times features_and_norm"]  # Q_1, ..., Q_p, q
    weights: Float[np.ndarray, " particles"]  # w at the end
    discrepancy: float  # largest change of a state when the steps are twice as long


@takes_arrays
def simulate_particles(
    task: ContrastiveTask,
    weights: Float[ArrayLike, " particles"],
    features: Float[ArrayLike, "features particles"],
    horizon: float,
    key: jax.Array,
    penalty: Penalty | None = None,
    steps: int = 512,
    records: int = 32,
    nodes: Nodes | None = None,
    tolerance: float = 0.05,
) -> ParticlePath:
    """Simulate the McKean-Vlasov limit with particles, verified with steps of twice the length.

    Parameters
    ----------
    weights, features
        Initial w of every particle, and its u_1, ..., u_p; orthogonal over the particles, (1/N) sum u_k^2 = 1.
    horizon
        End time.
    key
        Of the Brownian motions. The run with longer steps has the same ones.
    penalty
        phi, besides weight decay; none by default.
    steps, records
        Number of steps, and of states returned after the first one; `steps` is a multiple of 2 `records`.
    tolerance
        Largest change of an overlap or of the squared norm that longer steps may make.

    Raises
    ------
    CertificateError
        The steps are too long.
    QuadratureError
        The noise is narrower than the grid.
    UsageError
        Numbers of steps and records that do not fit together, or a horizon that is not positive.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> features = np.kron([[1, 1], [1, -1]], np.ones(500))
    >>> start = 0.3 * features[0] + 0.5 * np.random.default_rng(0).standard_normal(1000)
    >>> path = simulate_particles(ContrastiveTask(), start, features, 1.0, jax.random.key(0), steps=16, records=4)
    >>> path.states.shape, path.weights.shape
    ((5, 3), (1000,))
    """
    start, basis = as_floats(weights, "weights"), as_floats(features, "features")
    check_features(task, start, basis)
    steps, records = check_integer("steps", steps, least=2), check_integer("records", records)
    if steps % (2 * records) or not horizon > 0:
        raise UsageError(
            f"steps={steps}, records={records}, horizon={horizon}: give a multiple of {2 * records} steps and a "
            "positive horizon"
        )
    with double_precision():
        first = np.append(basis @ start, start @ start)[None] / start.size
        vector_field(task.loss, nodes or Nodes(), task.parameters(), first)  # refuses a grid wider than the noise
        run = partial(_simulate, task.loss, nodes or Nodes(), penalty, steps, records)
        (states, end), (longer, _) = (
            run(stride, task.parameters(), basis, start, horizon, jax.random.key_data(key)) for stride in (1, 2)
        )
        states, longer = np.asarray(states), np.asarray(longer)
    discrepancy = float(np.abs(states - longer).max())
    if not discrepancy <= tolerance:
        raise CertificateError(
            f"{steps} steps and half as many disagree: give more steps", measured=discrepancy, threshold=tolerance
        )
    return ParticlePath(np.linspace(0, horizon, records + 1), states, np.asarray(end), discrepancy)


@partial(jax.jit, static_argnames=("loss", "nodes", "penalty", "steps", "records", "stride"))
def _simulate(
    loss: ContrastiveLoss,
    nodes: Nodes,
    penalty: Penalty | None,
    steps: int,
    records: int,
    stride: int,
    parameters: TaskParameters,
    features: Float[Array, "features particles"],
    weights: Float[Array, " particles"],
    horizon: float,
    key_data: Array,
) -> tuple[Array, Array]:
    """Return states at the records and the particles at the end; a step sums `stride` increments of 1/steps each."""
    keys = jax.random.split(jax.random.wrap_key_data(key_data), steps).reshape(records, -1, stride)
    short = horizon / steps

    def measure(weights: Array) -> tuple[Array, Array]:
        return features @ weights / weights.size, jnp.maximum(weights @ weights / weights.size, SMALLEST)

    def step(weights: Array, keys: Array) -> tuple[Array, None]:
        found = expectations(loss, nodes, parameters, *measure(weights))
        decay = (found.restoring + parameters.weight_decay) * weights
        decay = decay if penalty is None else decay + penalty(weights)
        drift = -parameters.learning_rate * (found.signal @ features + decay)
        moved = sum(jax.random.normal(keys[i], weights.shape, weights.dtype) for i in range(stride))
        noise = parameters.learning_rate * jnp.sqrt(found.diffusion * short) * moved
        return weights + stride * short * drift + noise, None

    def record(weights: Array, keys: Array) -> tuple[Array, Array]:
        weights, _ = jax.lax.scan(step, weights, keys)
        return weights, jnp.append(*measure(weights))

    end, states = jax.lax.scan(record, weights, keys)
    return jnp.concatenate([jnp.append(*measure(weights))[None], states]), end

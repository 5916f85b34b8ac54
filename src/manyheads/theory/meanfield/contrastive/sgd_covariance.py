"""Covariance of SGD about its ODE: linear response of overlaps and squared norm to the noise of the samples.

A step changes x = (Q_1, ..., Q_p, q) by f(x)/n in the mean, f the ODE, and by noise of covariance Sigma(x)/n^2. To
first order in 1/n the covariance of the deviations from the ODE is V/n with [derived here]

    V' = J V + V J^T + Sigma(x),     J = df/dx,     V = 0 at an exact start.

With c the features of the first two views, c^(2) those of the negative, G = sum_s g_s y_s, H = g^T R g and
P = 1 - Q Q^T/q, Sigma is the covariance over samples of the changes n (Q' - Q) and n (q' - q),

    -tau ( (g_0 + g_1) P c + g_2 P c^(2) + Q G/q + xi + lambda Q ),     -2 tau (G + lambda q) + tau^2 H,

where xi, the noise along the features that the outputs do not determine, has mean 0 and covariance P H given them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from manyheads._arrays import check_times, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import ShapeError
from manyheads.theory.meanfield.contrastive.ode import check_finite, check_state, slope_at
from manyheads.theory.meanfield.contrastive.quadrature import Nodes, noise_power, sample_points
from manyheads.theory.meanfield.contrastive.task import ContrastiveLoss, ContrastiveTask, TaskParameters
from manyheads.theory.meanfield.initial_value import solve_initial_value


@takes_arrays
def sgd_covariance(
    task: ContrastiveTask,
    state: Float[ArrayLike, " features_and_norm"],
    times: Float[ArrayLike, " times"],
    nodes: Nodes | None = None,
) -> Float[np.ndarray, "times features_and_norm features_and_norm"]:
    """Return V, n times the covariance of (Q_1, ..., Q_p, q) under SGD from an exact start, to first order in 1/n."""
    start, times = check_state(task, state), check_times(times)
    if start.ndim != 1:
        raise ShapeError(f"state of shape {start.shape}: expected one initial state")
    with double_precision():
        parameters, given = task.parameters(), nodes or Nodes()

        def derivative(_: float, joined: np.ndarray) -> np.ndarray:
            found = np.asarray(_derivative(task.loss, given, parameters, joined))
            return check_finite(found, given, parameters, joined[None, : start.size])

        remedy = "fluctuations could not be followed to the last time: lower learning_rate or weight_decay"
        joined = np.concatenate([start, np.zeros(start.size**2)])
        path = solve_initial_value(derivative, joined, times, remedy, method="RK45", rtol=1e-5, atol=1e-7)
    return path[:, start.size :].reshape(-1, start.size, start.size)


@partial(jax.jit, static_argnames=("loss", "nodes"))
def _derivative(loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, joined: Array) -> Array:
    """Return the derivatives of the state and of V, one after the other in one vector."""
    size = parameters.values.shape[1] + 1
    state, covariance = joined[:size], joined[size:].reshape(size, size)
    slope = partial(slope_at, loss, nodes, parameters)
    carried = jax.jacfwd(slope)(state) @ covariance
    change = carried + carried.T + step_covariance(loss, nodes, parameters, state)
    return jnp.concatenate([slope(state), change.ravel()])


def step_covariance(
    loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, state: Float[Array, " features_and_norm"]
) -> Float[Array, "features_and_norm features_and_norm"]:
    """Return Sigma at a state; a function to be traced, `loss` and `nodes` static."""
    overlaps, squared_norm, rate = state[:-1], state[-1], parameters.learning_rate
    mean, half, chances, negative, gradient = sample_points(loss, nodes, parameters, overlaps, squared_norm)
    views, last = gradient[0] + gradient[1], gradient[2]
    average = partial(jnp.einsum, optimize=True)
    total = views * mean.nodes[:, None, None] + last * negative.nodes  # G, less the part of the difference
    total += (gradient[0] - gradient[1]) * half[:, None]
    power = noise_power(parameters, gradient)  # H
    norm_change = rate**2 * power - 2 * rate * total

    def expect(values: Array) -> Array:
        return average("ijl,i,j,l->", values, mean.weights, chances, negative.weights)

    def features(values: Array) -> Array:
        """Return E[values ((g_0 + g_1) c + g_2 c^(2))]."""
        of_views = average("ijl,ik,j,l->k", values * views, mean.features, chances, negative.weights)
        return of_views + average("ijl,i,j,lk->k", values * last, mean.weights, chances, negative.features)

    crossed = average("ijl,ik,j,lm->km", views * last, mean.features, chances, negative.features)
    squares = average("ijl,ikm,j,l->km", views**2, mean.squares, chances, negative.weights) + crossed + crossed.T
    squares += average("ijl,i,j,lkm->km", last**2, mean.weights, chances, negative.squares)
    projector = jnp.eye(overlaps.size) - jnp.outer(overlaps, overlaps) / squared_norm  # P

    def changes(values: Array) -> Array:
        """Return E[values v], v the change of Q over -tau, without its decay."""
        return projector @ features(values) + overlaps * expect(values * total) / squared_norm

    mixed = jnp.outer(projector @ features(total), overlaps) / squared_norm
    second = projector @ squares @ projector.T + mixed + mixed.T + projector * expect(power)
    second += jnp.outer(overlaps, overlaps) * expect(total**2) / squared_norm**2
    first, norm_mean = changes(jnp.ones_like(total)), expect(norm_change)
    of_overlaps = rate**2 * (second - jnp.outer(first, first))
    of_both = -rate * (changes(norm_change) - first * norm_mean)
    of_norm = expect(norm_change**2) - norm_mean**2
    return jnp.block([[of_overlaps, of_both[:, None]], [of_both[None], of_norm[None, None]]])

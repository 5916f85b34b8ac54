"""Overlap dynamics: the ODE of the overlaps Q_k and of the squared norm q in the limit of high dimension.

With Q_k = u_k.w/n, q = |w|^2/n, time t = step/n, and A, B, D of `quadrature` [derived here; Stein's identity turns
E[l_s z_s] into second derivatives]:

    Q_k' = -tau (A_k + (B + lambda) Q_k)
    q'   = -2 tau (sum_k Q_k A_k + (B + lambda) q) + tau^2 D

A coordinate of x_s contributes to u_k.w through its feature (A) and through its noise (B); D is the variance of the
noise that a step leaves in the weights. The squared norm outside the features, q - sum_k Q_k^2, has the derivative
-2 tau (B + lambda) (q - sum_k Q_k^2) + tau^2 D with D >= 0, so it never becomes negative.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from manyheads._arrays import as_floats, check_times, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.contrastive.quadrature import (
    MISSING,
    Nodes,
    QuadratureError,
    expectations,
    missing_probability,
)
from manyheads.theory.meanfield.contrastive.task import ContrastiveLoss, ContrastiveTask, TaskParameters
from manyheads.theory.meanfield.initial_value import solve_initial_value

States = Float[np.ndarray, "states features_and_norm"]
State = Float[Array, " features_and_norm"]

TOLERANCE = 1e-5  # of a trajectory: largest change of an overlap or squared norm between two node counts
SMALLEST = 1e-12  # squared norm at which the expectations are taken when a trajectory has collapsed


@takes_arrays
def overlap_trajectory(
    task: ContrastiveTask,
    state: Float[ArrayLike, "... features_and_norm"],
    times: Float[ArrayLike, " times"],
    nodes: Nodes | None = None,
    tolerance: float = TOLERANCE,
) -> Float[np.ndarray, "times ... features_and_norm"]:
    """Return overlaps and squared norm (Q_1, ..., Q_p, q) over time, verified with a second node count.

    Parameters
    ----------
    state
        Q_1, ..., Q_p, q at time 0; several at once in leading dimensions.
    times
        Increasing times, in samples per dimension, from 0 on.
    tolerance
        Largest change of any number when there are one and a half times as many nodes.

    Returns
    -------
    ndarray
        (times, ..., p + 1), of the larger node count.

    Raises
    ------
    UsageError
        An initial state whose squared overlaps exceed the squared norm, or times that do not increase.
    QuadratureError
        Two node counts disagree, or the noise is narrower than the grid.

    Examples
    --------
    >>> import numpy as np
    >>> path = overlap_trajectory(ContrastiveTask(), [0.15, 0.1, 0.5], [0.0, 30.0])
    >>> path[-1].round(3).tolist()
    [0.904, 0.086, 0.917]
    """
    nodes = nodes or Nodes()
    start, times = check_state(task, state), check_times(times)
    path = integrate_overlaps(task, start, times, nodes)
    finer = integrate_overlaps(task, start, times, nodes.finer())
    check_agreement(np.abs(path - finer).max(), tolerance, nodes)
    check_norm(finer)
    return finer


def integrate_overlaps(task: ContrastiveTask, state: np.ndarray, times: np.ndarray, nodes: Nodes) -> np.ndarray:
    """Solve the ODE from states (..., p + 1) with one node count, unverified: (times, ..., p + 1)."""
    with double_precision():
        parameters, shape = task.parameters(), state.shape

        def slope(_: float, flat: np.ndarray) -> np.ndarray:
            states = flat.reshape(-1, shape[-1])
            return vector_field(task.loss, nodes, parameters, states).ravel()

        remedy = "the ODE could not be solved to the last time: lower learning_rate or weight_decay"
        path = solve_initial_value(slope, state.ravel(), times, remedy, method="RK45", rtol=1e-7, atol=1e-9)
    return path.reshape(len(times), *shape)


def vector_field(loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, states: States) -> States:
    """Return (Q', q') at several states, one after the other: one program serves any number of them."""
    slopes = np.stack([np.asarray(slope_at(loss, nodes, parameters, state)) for state in states])
    return check_finite(slopes, nodes, parameters, states)


def jacobians(
    loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, states: States
) -> Float[np.ndarray, "states features_and_norm features_and_norm"]:
    """Return the Jacobian of the vector field at several states."""
    matrices = np.stack([np.asarray(_jacobian_at(loss, nodes, parameters, state)) for state in states])
    return check_finite(matrices, nodes, parameters, states)


@partial(jax.jit, static_argnames=("loss", "nodes"))
def slope_at(loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, state: State) -> State:
    """Return (Q', q') at one state."""
    overlaps, squared_norm = state[:-1], jnp.maximum(state[-1], SMALLEST)
    found = expectations(loss, nodes, parameters, overlaps, squared_norm)
    decay, learning_rate = found.restoring + parameters.weight_decay, parameters.learning_rate
    slopes = -learning_rate * (found.signal + decay * overlaps)
    contraction = -2 * learning_rate * (overlaps @ found.signal + decay * squared_norm)
    growth = contraction + learning_rate**2 * found.diffusion
    return jnp.append(slopes, growth)


@partial(jax.jit, static_argnames=("loss", "nodes"))
def _jacobian_at(loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, state: Array) -> Array:
    return jax.jacfwd(partial(slope_at, loss, nodes, parameters))(state)


def check_state(task: ContrastiveTask, state: ArrayLike) -> np.ndarray:
    """Return initial states as an array (..., p + 1) whose squared overlaps do not exceed the squared norm."""
    array, size = as_floats(state, "state"), len(task.features) + 1
    if array.ndim < 1 or array.shape[-1] != size:
        raise ShapeError(f"state of shape {array.shape}: expected (..., {size}), the overlaps and the squared norm")
    if not array.size or not np.isfinite(array).all():
        raise UsageError(f"state={array}: expected one state or more of finite numbers")
    excess = (array[..., :-1] ** 2).sum(-1) - array[..., -1]
    if not (excess <= 1e-12).all():
        raise UsageError(
            f"the squared overlaps exceed the squared norm by {np.max(excess):.3g}: no weights have these overlaps; "
            "raise the last number of the state"
        )
    return array


def check_finite(derivatives: np.ndarray, nodes: Nodes, parameters: TaskParameters, states: States) -> np.ndarray:
    """Refuse derivatives at states that are not finite: an adaptive solver would shorten its step for ever."""
    if np.isfinite(derivatives).all():
        return derivatives
    missing = max(missing_probability(nodes, parameters, q[:-1], max(q[-1], SMALLEST)) for q in states)
    if not missing <= MISSING:
        raise QuadratureError(
            f"noise is narrower than the spacing of {nodes}: give more nodes, of the mean and the negative, or noise "
            "that is stronger beside the features",
            measured=missing,
            threshold=MISSING,
        )
    raise CertificateError(
        "derivatives of the overlaps are not finite: give a loss with finite derivatives, or lower learning_rate",
        measured=float(np.isfinite(derivatives).mean()),
        threshold=1.0,
    )


def check_agreement(difference: float, tolerance: float, nodes: Nodes) -> None:
    """Refuse a result that a second node count does not confirm."""
    if not difference <= tolerance:
        raise QuadratureError(
            f"{nodes} and one and a half times as many nodes disagree: give more nodes, of the mean and the negative "
            "if features are rare or strong or noise is weak, of the difference if the noise of the views is strong "
            "and uncorrelated",
            measured=float(difference),
            threshold=tolerance,
        )


def check_norm(states: np.ndarray, slack: float = 1e-6) -> None:
    """Refuse states whose squared overlaps exceed the squared norm."""
    excess = float(((states[..., :-1] ** 2).sum(-1) - states[..., -1]).max())
    if not excess <= slack:
        raise QuadratureError(
            "the squared overlaps exceed the squared norm: give more nodes", measured=excess, threshold=slack
        )

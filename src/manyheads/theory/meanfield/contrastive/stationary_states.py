"""Stationary states of the overlap dynamics, their stability, growth rates of features, and basins of attraction.

At Q = 0 the linearized ODE is diagonal in the features [derived here]: feature k grows at the rate

    -tau ( E c_k^2 sum_ss' K_ss' E l_ss' + sum_ss' R_ss' E l_ss' + lambda ),    K = 1 where s, s' are both or neither 2,

with the noise alone in the expectations. Of the distribution of a feature only E c_k^2 enters, for every smooth loss.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from manyheads._arrays import check_times, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.contrastive import ode
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask

RESIDUAL = 1e-10  # largest derivative at a stationary state
STEP = 0.25  # longest Newton step
ITERATIONS = 40
LARGEST_NORM = 6.0  # of the first search for squared norms at Q = 0
WIDENINGS = 8  # of the search, by a factor of LARGEST_NORM each, while the norm still grows at its end
SMALLEST_NORM = 1e-4  # below it the weights have vanished
AGREEMENT = 1e-4  # of a stationary state at two node counts


@dataclass(frozen=True)
class StationaryState:
    """A stationary state of the overlap dynamics."""

    overlaps: tuple[float, ...]  # Q_1, ..., Q_p
    squared_norm: float  # q
    eigenvalues: tuple[complex, ...]  # of the Jacobian of (Q', q'), the largest real part first

    @property
    def stable(self) -> bool:
        """Whether all eigenvalues have a negative real part."""
        return self.eigenvalues[0].real < 0

    @property
    def cosines(self) -> tuple[float, ...]:
        """Q_k / sqrt q, the cosine of the angle between weights and feature."""
        return tuple(overlap / self.squared_norm**0.5 for overlap in self.overlaps)

    @property
    def state(self) -> tuple[float, ...]:
        """(Q_1, ..., Q_p, q)."""
        return (*self.overlaps, self.squared_norm)


@takes_arrays
def stationary_states(
    task: ContrastiveTask,
    starts: Float[ArrayLike, "starts features_and_norm"] | None = None,
    nodes: Nodes | None = None,
) -> tuple[StationaryState, ...]:
    """Find stationary states with non-zero weights by Newton's method from many starts, the most stable ones first.

    States with Q = 0 are found by bisection in the squared norm; a task without one (its norm decays to zero before a
    feature can grow) simply has none in the answer. Of states that differ by the signs of features, all that were
    reached are returned. There is no guarantee that all states are found.

    Parameters
    ----------
    starts
        Starts (Q_1, ..., Q_p, q); by default one feature alone and all features, in two sizes.
    nodes
        Nodes of the quadrature; every state is refined, and its eigenvalues are computed, with one and a half times as
        many.

    Raises
    ------
    QuadratureError
        A state moves by more than 1e-4 between two node counts.

    Examples
    --------
    >>> states = stationary_states(ContrastiveTask())
    >>> [(state.stable, [abs(round(c, 2)) for c in state.overlaps]) for state in states]
    [(True, [0.94, 0.0]), (False, [0.0, 0.71]), (False, [0.0, 0.0])]
    """
    nodes = nodes or Nodes()
    count = len(task.features)
    if starts is None:
        sized = [(axis, size) for axis in (*np.eye(count), np.ones(count)) for size in (0.5, 0.9)]
        given = np.array([(*(size * axis), size**2 * (axis @ axis) + 0.1) for axis, size in sized])
    else:
        given = ode.check_state(task, starts)
    zero = [(*([0.0] * count), norm) for norm in norms_without_features(task, nodes)]
    coarse = _unique_states(_newton(task, np.concatenate([given, np.array(zero).reshape(-1, given.shape[-1])]), nodes))
    if not len(coarse):
        return ()
    found = _newton(task, coarse, nodes.finer())
    ode.check_agreement(np.abs(found - coarse).max(), AGREEMENT, nodes)
    ode.check_norm(found)
    values = eigenvalues(task, found, nodes.finer())
    states = [
        StationaryState(tuple(row[:-1].tolist()), float(row[-1]), tuple(spectrum.tolist()))
        for row, spectrum in zip(found, values, strict=True)
    ]
    return tuple(sorted(states, key=lambda state: state.eigenvalues[0].real))


def norms_without_features(task: ContrastiveTask, nodes: Nodes | None = None) -> tuple[float, ...]:
    """Return the positive squared norms q that are stationary at Q = 0, increasing; empty if there is none.

    Without one the weights vanish unless a feature is found first. Raises `CertificateError` if the norm grows at the
    end of the search, so that a larger stationary one may exist.
    """
    nodes, size = nodes or Nodes(), len(task.features)
    grid = np.geomspace(SMALLEST_NORM, LARGEST_NORM, 60)

    def growth(norms: np.ndarray) -> np.ndarray:
        states = np.concatenate([np.zeros((len(norms), size)), norms[:, None]], 1)
        return ode.vector_field(task.loss, nodes, parameters, states)[:, -1]

    with double_precision():
        parameters = task.parameters()
        values = growth(grid)
        for _ in range(WIDENINGS):
            if values[-1] <= 0:
                break
            wider = grid[-1] * np.geomspace(1, LARGEST_NORM, 10)[1:]
            grid, values = np.append(grid, wider), np.append(values, growth(wider))
        else:
            raise CertificateError(
                "the squared norm grows without bound at Q = 0: raise weight_decay or lower learning_rate",
                measured=float(values[-1]),
                threshold=0.0,
            )
        places = np.flatnonzero(np.sign(values[:-1]) != np.sign(values[1:]))
        return tuple(
            float(brentq(lambda q: growth(np.array([q]))[0], grid[i], grid[i + 1], xtol=1e-12)) for i in places
        )


@takes_arrays
def eigenvalues(
    task: ContrastiveTask, states: Float[ArrayLike, "states features_and_norm"], nodes: Nodes | None = None
) -> np.ndarray:
    """Return the eigenvalues of the Jacobian at several states, largest real part first: complex (states, p + 1)."""
    with double_precision():
        matrices = ode.jacobians(task.loss, nodes or Nodes(), task.parameters(), ode.check_state(task, states))
    values = np.linalg.eigvals(matrices).astype(complex)
    return np.take_along_axis(values, np.argsort(-values.real, axis=-1, kind="stable"), -1)


@takes_arrays
def growth_rates(
    task: ContrastiveTask, state: Float[ArrayLike, " features_and_norm"], nodes: Nodes | None = None
) -> np.ndarray:
    """Return d Q_k' / d Q_k at a state, (p,): the growth rate of a feature that is not learned there, Q_k = 0.

    A feature with Q_k = 0 is decoupled to first order from the others and from the norm, by its sign symmetry.
    """
    with double_precision():
        found = ode.jacobians(task.loss, nodes or Nodes(), task.parameters(), ode.check_state(task, state)[None])
    return np.diagonal(found[0])[:-1].copy()


@takes_arrays
def find_basins(
    task: ContrastiveTask,
    states: Float[ArrayLike, "... features_and_norm"],
    horizon: float = 200.0,
    nodes: Nodes | None = None,
) -> np.ndarray:
    """Return, for every initial state, the feature that is learned: the index of the largest |Q_k|, -1 for none.

    Of states (..., p + 1) it is read off after the time `horizon`; -1 also where the largest overlap is below a tenth
    of the norm. The quadrature is checked at the end by a second node count of the vector field.

    Raises `UsageError`: states that are impossible, or a horizon that is negative or not finite. `QuadratureError`: two
    node counts disagree about the derivatives of the final states.
    """
    nodes = nodes or Nodes()
    start = ode.check_state(task, states)
    end = ode.integrate_overlaps(task, start, check_times([horizon], "horizon"), nodes)[0]
    ode.check_norm(end)
    with double_precision():
        flat, parameters = end.reshape(-1, end.shape[-1]), task.parameters()
        slopes, finer = (ode.vector_field(task.loss, one, parameters, flat) for one in (nodes, nodes.finer()))
    ode.check_agreement(np.abs(slopes - finer).max(), AGREEMENT, nodes)
    sizes = np.abs(end[..., :-1])
    learned = sizes.max(-1) > 0.1 * np.sqrt(np.maximum(end[..., -1], 0)) + 1e-6
    return np.where(learned, sizes.argmax(-1), -1)


def basin_boundary(
    task: ContrastiveTask,
    radius: float = 0.1,
    horizon: float = 200.0,
    rounds: int = 3,
    nodes: Nodes | None = None,
    *,
    added_norm: float = 0.0,
) -> float:
    """Return the angle, in degrees, below which the first of two features is learned.

    Starts are Q = radius (cos, sin) with the largest stationary squared norm at Q = 0, to which `added_norm` is added.
    The angle is bracketed by nine starts at a time; the answer is the middle of the last bracket, 90 / 10^rounds
    degrees wide. It is 90 where feature one is learned from every start that contains it.
    """
    norms = norms_without_features(task, nodes)
    if not norms or norms[-1] + added_norm < radius**2:
        raise CertificateError(
            "no stationary norm at Q = 0 to start from: lower weight_decay or raise the noise or the learning rate",
            measured=norms[-1] + added_norm if norms else 0.0,
            threshold=radius**2,
        )
    low, high = 0.0, 90.0
    for _ in range(rounds):
        angles = np.linspace(low, high, 11)[1:-1]
        turned = np.deg2rad(angles)
        starts = np.stack([radius * np.cos(turned), radius * np.sin(turned), np.full(9, norms[-1] + added_norm)], 1)
        first = find_basins(task, starts, horizon, nodes) == 0
        edges = np.concatenate([[low], angles, [high]])
        count = int(np.argmin(np.append(first, False)))  # starts of the first feature, from below
        low, high = edges[count], edges[count + 1]
    return float(90.0 if high == 90.0 else (low + high) / 2)


def _newton(task: ContrastiveTask, states: np.ndarray, nodes: Nodes) -> np.ndarray:
    """Return the states in which Newton's method ends; NaN where it does not converge."""
    states, moving = states.copy(), np.ones(len(states), bool)
    with double_precision():
        parameters = task.parameters()
        for _ in range(ITERATIONS):
            slopes = ode.vector_field(task.loss, nodes, parameters, states[moving])
            going = ~(np.abs(slopes).max(-1) <= RESIDUAL)
            moving[moving] = going
            if not going.any():
                break
            matrices = ode.jacobians(task.loss, nodes, parameters, states[moving])
            steps = -(np.linalg.pinv(matrices) @ slopes[going, :, None])[..., 0]
            lengths = np.linalg.norm(steps, axis=-1, keepdims=True)
            states[moving] += steps * np.minimum(1.0, STEP / np.maximum(lengths, 1e-300))
            least = 1.001 * (states[moving, :-1] ** 2).sum(-1)
            states[moving, -1] = np.clip(states[moving, -1], np.maximum(least, 1e-8), 100.0)
    states[moving | (states[:, -1] < SMALLEST_NORM)] = np.nan
    return states


def _unique_states(states: np.ndarray) -> np.ndarray:
    """Return the states that are finite, each once."""
    kept: list[np.ndarray] = []
    for state in states[np.isfinite(states).all(-1)]:
        if all(np.abs(state - other).max() > 1e-5 for other in kept):
            kept.append(state)
    return np.array(kept).reshape(-1, states.shape[-1])

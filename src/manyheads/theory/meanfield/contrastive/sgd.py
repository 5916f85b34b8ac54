"""Online SGD of the contrastive model in n dimensions, reduced exactly to overlaps and squared norm.

The noise of a sample is isotropic, so (Q, r), with n r^2 the squared norm of the weights outside the span of the
features, is a Markov chain of its own [derived here]. Let e_k = u_k / sqrt n, let e_perp be the direction of the
weights outside the features, alpha_sk = e_k.a_s and beta_s = e_perp.a_s. These are Gaussian with covariance R over the
views s, independent for different directions. With g_s = d_s l(y), a step is

    y_s   = sum_k Q_k (c_k^(s) + alpha_sk) + r beta_s
    Q_k  <- (1 - tau lambda / n) Q_k - (tau / n) sum_s g_s (c_k^(s) + alpha_sk)
    r^2  <- ((1 - tau lambda / n) r - (tau / n) sum_s g_s beta_s)^2 + (tau / n)^2 (g^T R g) chi^2_(n - p - 1),

because the noise in the other n - p - 1 directions is independent of y, and there sum_s g_s a_s has independent
coordinates of variance g^T R g. Nothing is approximated, and a step costs the same at every n. `train_weights` keeps
the weights, for penalties other than weight decay; given y, a step needs one Gaussian vector, not three.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from manyheads._arrays import as_floats, check_generator, check_times, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import ShapeError, UsageError, check_integer
from manyheads.theory.meanfield.contrastive.ode import check_state
from manyheads.theory.meanfield.contrastive.quadrature import noise_power
from manyheads.theory.meanfield.contrastive.task import ContrastiveLoss, ContrastiveTask, TaskParameters
from manyheads.theory.meanfield.initial_value import refuse_divergence

CHUNK = 1024  # steps whose random numbers are drawn at a time
CHUNK_OF_WEIGHTS, SHORTEST_CHUNK = 128, 8  # the same of all runs together, and at least
Penalty = Callable[[Array], Array]


@takes_arrays
def train_overlaps(
    task: ContrastiveTask,
    state: Float[ArrayLike, "runs features_and_norm"],
    dimension: int,
    times: Float[ArrayLike, " times"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "times runs features_and_norm"]:
    """Train by SGD in `dimension` dimensions and return overlaps and squared norm (Q_1, ..., Q_p, q) over time.

    Parameters
    ----------
    state
        Exact initial Q_1, ..., Q_p, q of every run.
    dimension
        n, at least p + 2.
    times
        Increasing times t = step/n at which the state is returned, from 0 on, rounded to whole steps.

    Raises
    ------
    UsageError
        An impossible initial state, a dimension that is too small, or times that do not increase.
    CertificateError
        Overlaps or norm diverge.

    Examples
    --------
    >>> import numpy as np
    >>> path = train_overlaps(ContrastiveTask(), [[0.15, 0.1, 0.5]] * 4, 200, [0.0, 1.0], np.random.default_rng(0))
    >>> path.shape, path[0, 0].round(3).tolist()
    ((2, 4, 3), [0.15, 0.1, 0.5])
    """
    start, rng = np.atleast_2d(check_state(task, state)), check_generator(rng)
    runs, size = start.shape
    dimension = check_integer("dimension", dimension, least=size + 1)
    steps = _whole_steps(times, dimension)
    outside = start[:, -1] - (start[:, :-1] ** 2).sum(-1)
    chain = np.concatenate([start[:, :-1], np.sqrt(np.maximum(outside, 0))[:, None]], 1)
    parameters = task.parameters()
    length = min(CHUNK, int(steps[-1]))

    def advance(chain: np.ndarray) -> np.ndarray:
        coefficients = _draw_coefficients(parameters, rng, (length, runs))
        normal = rng.standard_normal((length, runs, 3, size))
        remainder = rng.chisquare(dimension - size, (length, runs))
        draws = coefficients, normal, remainder
        return np.asarray(_run_overlaps(task.loss, parameters, float(dimension), chain, *draws))

    with double_precision():
        path = _record(chain, steps, advance)
    return np.concatenate([path[..., :-1], (path**2).sum(-1, keepdims=True)], -1)


@takes_arrays
def train_weights(
    task: ContrastiveTask,
    weights: Float[ArrayLike, "*runs n"],
    features: Float[ArrayLike, "features n"],
    times: Float[ArrayLike, " times"],
    rng: np.random.Generator,
    penalty: Penalty | None = None,
) -> Float[np.ndarray, "times *runs n"]:
    """Train the weights themselves by SGD, with any penalty besides weight decay, and return them over time.

    Parameters
    ----------
    weights
        Initial weights w, of order one each: of one run, or of several at once.
    features
        u_1, ..., u_p, orthogonal, each with |u_k|^2 = n.
    times
        Increasing times t = step/n, from 0 on, rounded to whole steps.
    penalty
        phi of the step -(tau/n) phi(w), for instance ``lambda w: 0.1 * jax.numpy.sign(w)``; none by default.

    Raises
    ------
    ShapeError
        Features that are not orthogonal with squared norm n, or of another dimension than the weights; weights of more
        than two axes, or of no run.
    CertificateError
        The weights diverge.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.kron([[1, 1], [1, -1]], np.ones(50))
    >>> rng = np.random.default_rng(0)
    >>> path = train_weights(ContrastiveTask(), rng.standard_normal(100), features, [0.0, 2.0], rng)
    >>> path.shape
    (2, 100)
    """
    given, basis = as_floats(weights, "weights"), as_floats(features, "features")
    start = np.atleast_2d(given)
    if start.ndim != 2 or not start.size:
        raise ShapeError(f"weights {given.shape}: expected (n,), or (runs, n) for several runs")
    check_features(task, start[0], basis)
    rng = check_generator(rng)
    runs, size = start.shape
    steps = _whole_steps(times, size)
    parameters = task.parameters()
    length = max(CHUNK_OF_WEIGHTS // runs, SHORTEST_CHUNK)

    def advance(weights: np.ndarray) -> np.ndarray:
        coefficients = _draw_coefficients(parameters, rng, (length, runs))
        normal = rng.standard_normal((length, runs, 3))
        vectors = rng.standard_normal((length, runs, size))
        return np.asarray(_run_weights(task.loss, penalty, parameters, basis, weights, coefficients, normal, vectors))

    with double_precision():
        return _record(start, steps, advance).reshape(len(steps), *given.shape)


def overlap_step(
    loss: ContrastiveLoss,
    parameters: TaskParameters,
    dimension: Float[Array, ""] | float,
    chain: Float[Array, " features_and_outside"],
    coefficients: Float[Array, "view features"],
    noise: Float[Array, "view features_and_outside"],
    remainder: Float[Array, ""],
) -> Float[Array, " features_and_outside"]:
    """Return (Q, r) after one step, given c, (alpha, beta) and the chi^2 of the module's first lines."""
    inputs = jnp.asarray(noise).at[:, :-1].add(coefficients)  # c + alpha, and beta: (3, p + 1)
    gradient = jnp.stack(jax.grad(loss, argnums=(0, 1, 2))(*(inputs @ chain)))
    step = parameters.learning_rate / dimension
    moved = (1 - step * parameters.weight_decay) * chain - step * (gradient @ inputs)
    added = step**2 * noise_power(parameters, gradient) * remainder
    return moved.at[-1].set(jnp.sqrt(moved[-1] ** 2 + added))


def weight_step(
    loss: ContrastiveLoss,
    penalty: Penalty | None,
    parameters: TaskParameters,
    features: Float[Array, "features n"],
    weights: Float[Array, "runs n"],
    coefficients: Float[Array, "runs view features"],
    noise: Float[Array, "runs view"],
    vector: Float[Array, "runs n"],
) -> Float[Array, "runs n"]:
    """Return the weights of all runs after one step; `noise` is a_s along the weights, `vector` standard normal."""
    size = weights.shape[1]
    length = jnp.sqrt((weights**2).sum(1))
    overlaps = weights @ features.T / size
    outputs = jnp.einsum("rsk,rk->rs", coefficients, overlaps) + (length / jnp.sqrt(size))[:, None] * noise
    gradient = jnp.stack(jnp.vectorize(jax.grad(loss, argnums=(0, 1, 2)))(*outputs.T), 1)
    across = jnp.sqrt(noise_power(parameters, gradient.T))
    along = ((gradient * noise).sum(1) - across * (vector * weights).sum(1) / length) / length
    blurred = along[:, None] * weights + across[:, None] * vector  # sum_s g_s a_s
    signal = jnp.einsum("rs,rsk->rk", gradient, coefficients) @ features / jnp.sqrt(size)
    decay = parameters.weight_decay * weights + (0.0 if penalty is None else penalty(weights))
    return weights - parameters.learning_rate * ((signal + blurred) / jnp.sqrt(size) + decay / size)


def correlate(parameters: TaskParameters, normal: Float[Array, "view ..."]) -> Float[Array, "view ..."]:
    """Turn independent normal numbers of three views into noise with covariance R, which may be singular."""
    common = jnp.sqrt((parameters.variance + parameters.covariance) / 2) * normal[0]
    opposed = jnp.sqrt(jnp.maximum(parameters.variance - parameters.covariance, 0) / 2) * normal[1]
    return jnp.stack([common + opposed, common - opposed, jnp.sqrt(parameters.variance) * normal[2]])


def check_features(task: ContrastiveTask, weights: np.ndarray, features: np.ndarray) -> None:
    """Refuse weights that are all zero, and features that are not orthogonal with squared norm n."""
    shape = (len(task.features), weights.size)
    if weights.ndim != 1 or features.shape != shape:
        raise ShapeError(f"weights {weights.shape}, features {features.shape}: expected (n,) and {shape}")
    if not weights.any():
        raise UsageError("the weights are all zero, so that no output depends on the samples: give others")
    error = np.abs(features @ features.T / weights.size - np.eye(shape[0])).max()
    if not error <= 1e-9:
        raise ShapeError(
            f"u_k.u_l / n differs from the identity by {error:.2g}: give orthogonal features with |u_k|^2 = n, for "
            "instance sqrt n times the rows of an orthogonal matrix"
        )


@partial(jax.jit, static_argnames=("loss",))
def _run_overlaps(
    loss: ContrastiveLoss, parameters: TaskParameters, dimension: float, chain: Array, *draws: Array
) -> Float[Array, "steps runs features_and_outside"]:
    """Return (Q, r) of all runs after every step of a chunk."""

    def step(chain: Array, coefficients: Array, normal: Array, remainder: Array) -> Array:
        return overlap_step(loss, parameters, dimension, chain, coefficients, correlate(parameters, normal), remainder)

    def body(chain: Array, drawn: tuple[Array, ...]) -> tuple[Array, Array]:
        after = jax.vmap(step)(chain, *drawn)
        return after, after

    return jax.lax.scan(body, chain, draws)[1]


@partial(jax.jit, static_argnames=("loss", "penalty"))
def _run_weights(
    loss: ContrastiveLoss,
    penalty: Penalty | None,
    parameters: TaskParameters,
    features: Array,
    weights: Array,
    *draws: Array,
) -> Float[Array, "steps runs n"]:
    """Return the weights of all runs after every step of a chunk."""

    def body(weights: Array, drawn: tuple[Array, ...]) -> tuple[Array, Array]:
        coefficients, normal, vector = drawn
        noise = correlate(parameters, normal.T).T
        after = weight_step(loss, penalty, parameters, features, weights, coefficients, noise, vector)
        return after, after

    return jax.lax.scan(body, weights, draws)[1]


def _record(state: np.ndarray, steps: np.ndarray, advance: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the state after the given numbers of steps; `advance` returns the states after each step of a chunk."""
    kept, done = np.empty((len(steps), *state.shape)), 0
    kept[steps == 0] = state
    while done < steps[-1]:
        path = advance(state)
        inside = (steps > done) & (steps <= done + len(path))
        kept[inside] = path[steps[inside] - done - 1]
        state, done = path[-1], done + len(path)
        refuse_divergence(path, "lower learning_rate or weight_decay")
    return kept


def _whole_steps(times: ArrayLike, dimension: int) -> np.ndarray:
    return np.rint(check_times(times) * dimension).astype(np.int64)


def _draw_coefficients(parameters: TaskParameters, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw c of the three views, (*shape, 3, p): the first two are the same, the third is independent."""
    levels = np.cumsum(parameters.probabilities)[:-1]
    drawn = np.searchsorted(levels, rng.random((*shape, 2)), side="right")
    return np.asarray(parameters.values)[drawn[..., [0, 0, 1]]]

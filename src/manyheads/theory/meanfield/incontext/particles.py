r"""Wasserstein gradient flow of particles: an MLP of finite width under attention that is instantaneous.

N particles :math:`(a_i, w_i)` form :math:`h(x) = \frac1N\sum_i a_i \sigma(w_i^\top x)`. With W the best attention,
:math:`B = C S^{-1}` and the residual :math:`z = f° - B h`, the flow in mean-field time (the gradient of a particle
times N) at infinite prompts is

.. math:: a_i' = B^\top E[z\,\sigma(w_i^\top x)], \qquad w_i' = E[(a_i^\top B^\top z)\,\sigma'(w_i^\top x)\,x];

the dependence of W on h drops out by the envelope theorem. At prompts of n pairs the loss is the minimum of the exact
:math:`L_n(\mu, W)` over W, and is differentiated as it stands.

With w frozen everything happens on the nodes: :math:`h' = K_N q'`, with the kernel :math:`K_N(x, y) = \frac1N
\sum_i\sigma(w_i^\top x)\sigma(w_i^\top y)`, at a cost that does not depend on N.

The two-timescale flow is that of Kim and Suzuki (arXiv 2402.01258); its form on nodes is derived here.
"""

from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from manyheads._arrays import as_floats, check_generator, check_times
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, ShapeError, UsageError, check_integer
from manyheads.theory.meanfield.incontext.circle import FOREIGN, TARGET, activation_of, circle_coefficient
from manyheads.theory.meanfield.incontext.gradient_flow import integrate, integrate_in_steps
from manyheads.theory.meanfield.incontext.prompt_length import LARGEST_CONDITION, Moments, check_condition, reduced_loss
from manyheads.theory.meanfield.incontext.task import FeatureTask, as_matrix, harmonics

CHUNK = 4096  # particles whose activations are held at once
Layers = Literal["outer", "both"]


class Particles(NamedTuple):
    """Second- and first-layer weights of an MLP of width N."""

    outer: Float[np.ndarray, "width k"]  # a
    inner: Float[np.ndarray, "width input_dim"]  # w


class ParticleTrajectory(NamedTuple):
    """Loss and condition number at the recorded times, and the particles at the last one."""

    times: Float[np.ndarray, " times"]
    loss: Float[np.ndarray, " times"]
    condition: Float[np.ndarray, " times"]  # of S
    particles: Particles


def circle_particles(
    signal: Float[ArrayLike, "2 2"],
    foreign: Float[ArrayLike, "2 2"],
    width: int,
    rng: np.random.Generator | None = None,
    activation: str = "relu",
) -> Particles:
    """Place first-layer weights on the circle, with the second layer whose limit is h = H f + G g.

    `signal` and `foreign` are H and G. Angles are independent and uniform with a generator; without one they are
    equidistant, a quadrature of the infinite width. An activation without a harmonic (sigmoid) is refused.
    """
    width, amplitudes = check_integer("width", width), {"signal": (TARGET, signal), "foreign": (FOREIGN, foreign)}
    share = np.arange(width) / width if rng is None else check_generator(rng).random(width)
    angles = 2 * np.pi * share
    outer = sum(
        harmonics(degree, angles) @ as_matrix(each, name, (2, 2)).T / circle_coefficient(degree, activation)
        for name, (degree, each) in amplitudes.items()
    )
    return Particles(np.asarray(outer), np.stack([np.cos(angles), np.sin(angles)], 1))


def represent(
    particles: Particles, inputs: Float[ArrayLike, "nodes input_dim"], activation: str = "relu"
) -> Float[np.ndarray, "nodes k"]:
    """Return h at inputs."""
    with double_precision():
        shares = [
            _activate(np.asarray(inputs), inner, activation) @ outer
            for inner, outer in zip(_blocks(particles.inner), _blocks(particles.outer), strict=True)
        ]
    return np.asarray(sum(shares)) / len(particles.outer)


def particle_flow(
    task: FeatureTask,
    particles: Particles | tuple[ArrayLike, ArrayLike],
    times: Float[ArrayLike, " times"],
    *,
    activation: str = "relu",
    layers: Layers = "outer",
    length: int | None = None,
    tolerance: float = 1e-6,
    step: float | None = None,
) -> ParticleTrajectory:
    """Integrate the two-timescale flow of an MLP of finite width.

    Parameters
    ----------
    particles
        Second- and first-layer weights at time 0, shapes (N, k) and (N, input_dim).
    times
        Recorded times, rising, in mean-field time.
    activation
        "relu", "softplus" (with slope four, ``softplus(4 z) / 4``) or "sigmoid".
    layers
        "outer", with the first layer frozen, or "both".
    length
        Pairs n of a prompt; None for infinitely many.
    tolerance
        Relative error of a step; the absolute one is a thousandth.
    step
        Size of Runge-Kutta steps in the place of adaptive ones, for both layers. Needed for both layers with ReLU: the
        flow has a kink whenever a neuron crosses a node, and adaptive steps vanish.

    Raises
    ------
    UsageError
        Another activation or choice of layers, times that do not rise, a step that is not positive or not for both
        layers, or none for both layers with ReLU.
    CertificateError
        A singular representation (condition number above 1e12) anywhere, or an integration that failed.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.meanfield.incontext.task import circle_task
    >>> start = circle_particles(np.diag([0.3, 0.03]), 0.6 * np.eye(2), 512)
    >>> found = particle_flow(circle_task(nodes=64), start, [0.0, 50.0, 400.0], layers="outer")
    >>> found.loss.round(2).tolist()
    [0.9, 0.45, 0.0]
    """
    if layers not in get_args(Layers):
        raise UsageError(f"layers={layers!r}: choose one of {', '.join(get_args(Layers))}")
    activation_of(activation)
    if step is not None and layers != "both":
        raise UsageError(f"step={step}, layers={layers!r}: steps of one size are for both layers; leave step out")
    outer, inner = check_particles(task, particles)
    times = check_times(times)
    if step is None and (layers, activation) == ("both", "relu"):
        raise UsageError(
            "step=None with both layers and ReLU: adaptive steps vanish where a neuron crosses a node; give a step, or "
            'choose activation="softplus" or layers="outer"'
        )
    pairs = None if length is None else float(check_integer("length", length))
    start = represent(Particles(outer, inner), task.inputs, activation)
    check_condition(start.T @ start / len(start), "the representation at time 0")
    with double_precision():
        given = jnp.asarray(task.inputs), jnp.asarray(task.targets), task.label_noise, pairs, activation
        if layers == "outer":
            kernel = jnp.asarray(_kernel(inner, task.inputs, activation))
            frozen = _Frozen(*given, kernel, jnp.asarray(start))
            zero = jnp.zeros(start.shape)
            (loss, condition), q = integrate(_frozen_derivative, _observe, zero, frozen, times, tolerance)
            moved = [_activate(task.inputs, block, activation).T @ q for block in _blocks(inner)]
            outer = outer + np.concatenate(moved)
        else:
            problem, state = FlowProblem(*given), (jnp.asarray(outer), jnp.asarray(inner))
            (loss, condition), (outer, inner) = (
                integrate(_derivative, _observe, state, problem, times, tolerance)
                if step is None
                else integrate_in_steps(_derivative, _observe, state, problem, times, step)
            )
    if not condition.max() <= LARGEST_CONDITION:
        raise CertificateError(
            "the second moments of the representation become singular on the way: start from particles whose mean "
            "map has full rank",
            measured=float(condition.max()),
            threshold=LARGEST_CONDITION,
        )
    return ParticleTrajectory(times, loss, condition, Particles(outer, inner))


def check_particles(task: FeatureTask, particles: Any) -> Particles:
    """Return particles as float64, of the task's numbers of features and inputs."""
    outer, inner = (as_floats(each, name) for each, name in zip(particles, ("outer", "inner"), strict=True))
    fits = outer.ndim == inner.ndim == 2 and len(outer) == len(inner) > 0
    if not fits or (outer.shape[1], inner.shape[1]) != (task.features, task.inputs.shape[1]):
        raise ShapeError(
            f"particles: shapes {outer.shape} and {inner.shape}, expected (N, {task.features}) and "
            f"(N, {task.inputs.shape[1]})"
        )
    return Particles(outer, inner)


class FlowProblem(eqx.Module):
    """Constants of the flow of both layers."""

    inputs: jax.Array
    targets: jax.Array
    label_noise: Float[ArrayLike, ""]
    length: Float[ArrayLike, ""] | None
    activation: str = eqx.field(static=True)

    def loss(self, h: jax.Array) -> jax.Array:
        """Return the two-timescale loss of a representation."""
        return reduced_loss(Moments.of(h, self.targets, self.label_noise), self.length)

    def measure(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the loss and the condition number of the second moments."""
        levels = jnp.linalg.eigvalsh(h.T @ h / len(h))
        return self.loss(h), levels[-1] / jnp.maximum(levels[0], jnp.finfo(levels.dtype).tiny)

    def represent(self, state: Any) -> jax.Array:
        """Return h of second- and first-layer weights."""
        outer, inner = state
        return activation_of(self.activation)(self.inputs @ inner.T) @ outer / len(outer)


def _derivative(state: tuple[jax.Array, jax.Array], problem: FlowProblem) -> Any:
    slopes = jax.grad(lambda particles: problem.loss(problem.represent(particles)))(state)
    return jax.tree.map(lambda slope: -len(state[0]) * slope, slopes)


def _observe(state: Any, problem: FlowProblem) -> tuple[jax.Array, jax.Array]:
    return problem.measure(problem.represent(state))


class _Frozen(FlowProblem):
    """Constants of the flow of the second layer alone; its state q on nodes is a sum of gradients."""

    kernel: jax.Array
    start: jax.Array

    def represent(self, state: jax.Array) -> jax.Array:
        """Return h of q."""
        return self.start + self.kernel @ state


def _frozen_derivative(q: jax.Array, frozen: _Frozen) -> jax.Array:
    return -jax.grad(frozen.loss)(frozen.represent(q))


def _blocks(inner: np.ndarray) -> list[np.ndarray]:
    return [inner[at : at + CHUNK] for at in range(0, len(inner), CHUNK)]


def _activate(inputs: np.ndarray, inner: np.ndarray, activation: str) -> np.ndarray:
    return np.asarray(activation_of(activation)(jnp.asarray(inputs @ inner.T)))


def _kernel(inner: np.ndarray, inputs: np.ndarray, activation: str) -> np.ndarray:
    """Return K_N on pairs of nodes, from chunks of particles."""
    kernel = np.zeros((len(inputs), len(inputs)))
    for block in _blocks(inner):
        active = _activate(inputs, block, activation)  # (nodes, chunk)
        kernel += active @ active.T
    return kernel / len(inner)

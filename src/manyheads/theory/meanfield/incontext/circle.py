r"""Closed equations on the circle: two target harmonics, two foreign ones, infinitely many frozen neurons.

Inputs x and first-layer weights w are uniform on the circle, targets are :math:`f = \sqrt2(\cos\ell\theta,
\sin\ell\theta)`, foreign features :math:`g` the same of another degree. An activation has the coefficients
:math:`c_\ell = \frac1{2\pi}\int \sigma(\cos\theta)\cos\ell\theta\,d\theta`, and the kernel :math:`E_w \sigma\sigma` the
eigenvalues :math:`\kappa_\ell = c_\ell^2`. From second-layer weights
:math:`a(w) = H_0 f(w)/c_f + G_0 g(w)/c_g` the representation stays :math:`h = H f + G g`, and gradient flow of a
loss of h is

.. math:: H' = -\kappa_f\, \partial L/\partial H, \qquad G' = -\kappa_g\, \partial L/\partial G.

With instantaneous attention, :math:`B = H^\top (H H^\top + G G^\top)^{-1}` and :math:`L = \frac12 \operatorname{tr}
(I - BH)`, this is :math:`H' = \kappa_f B^\top (I - BH)`, :math:`G' = -\kappa_g B^\top B G`, and
:math:`\kappa_g H H^\top + \kappa_f G G^\top` is constant. A target that is missed has a small H; it grows at the rate
:math:`\kappa_f / g^2`, with g² the foreign mass in its slot, so that the escape takes
:math:`(g^2/\kappa_f) \ln(1/\varepsilon)`.

With prompts of n pairs the same holds with the loss at n; there :math:`A = 2S` exactly. Near a saddle the loss then
falls as :math:`h^4` for :math:`h^2 \ll g^2/n`: the negative curvature is gone at every finite n, within a radius
that falls as :math:`n^{-1/2}`.

Derived here; the paper (Kim and Suzuki, arXiv 2402.01258) has no such example.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from manyheads._arrays import check_times
from manyheads._constraints import Constraint
from manyheads._settings import double_precision
from manyheads.errors import UsageError, check_integer
from manyheads.theory.meanfield.incontext import gradient_flow, prompt_length, task

TARGET, FOREIGN = 2, 1  # degrees
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "softplus": lambda z: jax.nn.softplus(4 * z) / 4,
    "sigmoid": jax.nn.sigmoid,
}


class CircleState(NamedTuple):
    """Amplitudes of target and foreign harmonics in the representation, and the attention matrix where it is slow."""

    signal: Float[Array, "2 2"]  # H
    foreign: Float[Array, "2 2"]  # G
    attention: Float[Array, "2 2"] | None = None  # W


class CircleTrajectory(NamedTuple):
    """Loss and state at the recorded times."""

    times: Float[np.ndarray, " times"]
    loss: Float[np.ndarray, " times"]
    signal: Float[np.ndarray, "times 2 2"]
    foreign: Float[np.ndarray, "times 2 2"]
    attention: Float[np.ndarray, "times 2 2"] | None


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return an activation by name."""
    if name not in ACTIVATIONS:
        raise UsageError(f"activation={name!r}: choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def harmonic_coefficient(degree: int, activation: str = "relu", nodes: int = 1 << 16) -> float:
    r"""Return :math:`c_\ell` of an activation by the trapezoidal rule."""
    angles = 2 * np.pi * np.arange(nodes) / nodes
    with double_precision():
        values = np.asarray(activation_of(activation)(jnp.asarray(np.cos(angles))))
    return float((values * np.cos(degree * angles)).mean())


def circle_coefficient(degree: int, activation: str) -> float:
    """Return the coefficient of a harmonic of the circle, or refuse an activation without it (sigmoid: degree 2)."""
    found = harmonic_coefficient(degree, activation)
    if abs(found) < 1e-9:
        raise UsageError(f"activation={activation!r}: has no harmonic of degree {degree}; take relu or softplus")
    return found


def circle_moments(state: CircleState) -> prompt_length.Moments:
    """Return the second moments of h = H f + G g; the targets have a constant norm, so A = 2 S."""
    square = state.signal @ state.signal.T + state.foreign @ state.foreign.T
    return prompt_length.Moments(square, state.signal.T, 2.0 * square, jnp.asarray(2.0))


def circle_loss(state: CircleState, length: Float[ArrayLike, ""] | None = None) -> Float[Array, ""]:
    """Return the loss of a state in `jax.numpy`: at its own attention, or at the best where it has none."""
    if state.attention is None:
        return prompt_length.reduced_loss(circle_moments(state), length)
    return prompt_length.joint_loss(circle_moments(state), state.attention, length)


def _derivative(state: CircleState, args: tuple[CircleState, Array]) -> CircleState:
    """Return the velocity for the learning rates of the parts of a state and the length of prompts."""
    return jax.tree.map(lambda rate, slope: -rate * slope, args[0], jax.grad(circle_loss)(state, args[1]))


def _observe(state: CircleState, args: tuple[CircleState, Array]) -> tuple[jax.Array, CircleState]:
    return circle_loss(state, args[1]), state


def circle_flow(
    signal: Float[ArrayLike, "2 2"],
    foreign: Float[ArrayLike, "2 2"],
    times: Float[ArrayLike, " times"],
    *,
    attention_speed: float | None = None,
    length: int | None = None,
    activation: str = "relu",
    tolerance: float = 1e-9,
) -> CircleTrajectory:
    r"""Integrate the exact flow of infinitely many frozen neurons on the circle.

    It starts at `signal` H and `foreign` G, where :math:`H H^\top + G G^\top` is positive definite, and is recorded at
    rising mean-field times. The attention matrix starts at :math:`S^{-1}`; its learning rate over that of the particles
    is `attention_speed`, None for instantaneous attention. Prompts have `length` pairs, None for infinitely many.
    `tolerance` is the relative error of a step; the absolute one is a thousandth of it.
    """
    start = task.as_matrix(signal, "signal", (2, 2)), task.as_matrix(foreign, "foreign", (2, 2))
    Constraint(above=0).kept("attention_speed", attention_speed, "float | None")
    times = check_times(times)
    length = None if length is None else check_integer("length", length)
    kappa = [circle_coefficient(degree, activation) ** 2 for degree in (TARGET, FOREIGN)]
    square = start[0] @ start[0].T + start[1] @ start[1].T
    prompt_length.check_condition(square, "the representation")
    with double_precision():
        slow = attention_speed is not None
        attention = jnp.linalg.inv(jnp.asarray(square)) if slow else None
        state = CircleState(*jax.tree.map(jnp.asarray, (*start, attention)))
        rates = CircleState(*jax.tree.map(jnp.asarray, (*kappa, attention_speed)))
        args = rates, None if length is None else jnp.asarray(float(length))
        (loss, states), _ = gradient_flow.integrate(_derivative, _observe, state, args, times, tolerance, stiff=slow)
    return CircleTrajectory(times, loss, *states)


def conserved_quantity(trajectory: CircleTrajectory, activation: str = "relu") -> Float[np.ndarray, "times 2 2"]:
    r"""Return :math:`\kappa_g H H^\top + \kappa_f G G^\top`, constant for infinite prompts and fast attention."""
    signal, foreign = (each @ np.swapaxes(each, 1, 2) for each in (trajectory.signal, trajectory.foreign))
    kappa = [circle_coefficient(degree, activation) ** 2 for degree in (TARGET, FOREIGN)]
    return kappa[1] * signal + kappa[0] * foreign


def escape_rate(foreign_mass: float, activation: str = "relu") -> float:
    r"""Return the rate :math:`\kappa_f / g^2` at which a missed target grows, from the foreign mass g² in its slot."""
    Constraint(above=0).kept("foreign_mass", foreign_mass, "float")
    return circle_coefficient(TARGET, activation) ** 2 / foreign_mass

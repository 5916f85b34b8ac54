"""Isotropic mixtures of inputs, activations with their kinks, and one neuron trained on samples by SGD."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manyheads._arrays import check_arrays, takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.recording import SGDOptions, record_states
from manyheads.theory.joma.task import ACTIVATIONS

Distribution = Literal["gaussian", "sphere"]


@dataclass(frozen=True)
class Nonlinearity:
    """Elementwise activation, with the arguments at which its derivative jumps, in rising order.

    Examples
    --------
    >>> NONLINEARITIES["relu"].derivative(jnp.array([-1.0, 2.0])).tolist(), NONLINEARITIES["relu"].kinks
    ([0.0, 1.0], (0.0,))
    """

    name: str  # identity: activations of equal names and kinks are equal
    value: Callable[[Float[Array, "..."]], Float[Array, "..."]] = field(compare=False, repr=False)
    kinks: tuple[float, ...] = ()

    def derivative(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Differentiate the activation elementwise."""
        x = jnp.asarray(x)
        return jax.jvp(self.value, (x,), (jnp.ones_like(x),))[1]


NONLINEARITIES = {
    name: Nonlinearity(name, value, (0.0,) if name == "relu" else ()) for name, value in ACTIVATIONS.items()
}
"""The activations of `manyheads.theory.joma.task`, by name; square is x²/2."""


def find_nonlinearity(name: str) -> Nonlinearity:
    """Look up one of `NONLINEARITIES` by name; UsageError if there is none."""
    if name not in NONLINEARITIES:
        raise UsageError(f"activation {name!r}: expected one of {', '.join(NONLINEARITIES)}")
    return NONLINEARITIES[name]


class Mixture(eqx.Module):
    r"""Mixture of isotropic inputs :math:`x = \bar x_j + s\,\xi`, with a gradient :math:`a_j` per component.

    The noise is Gaussian or, for "sphere", lies on the sphere of radius :math:`s \sqrt d`, with the same covariance.

    Examples
    --------
    >>> mixture = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.3)
    >>> mixture.draw(jax.random.key(0), 3)[0].shape
    (3, 2)
    """

    means: Float[Any, "components d"] = eqx.field(converter=check_arrays)  # d >= 2
    probabilities: Float[Any, " components"] = eqx.field(converter=check_arrays)  # p_j: positive, adding up to one
    gradients: Float[Any, " components"] = eqx.field(converter=check_arrays)  # a_j = -dloss/d(output of the neuron)
    std: Float[Any, ""] = eqx.field(converter=check_arrays)  # s > 0, of every coordinate about the mean
    offset: Float[Any, ""] = eqx.field(default=0.0, converter=check_arrays)  # c, what the query adds before activation
    distribution: Distribution = eqx.field(default="gaussian", static=True)

    def __check_init__(self) -> None:
        means, probabilities = np.shape(self.means), np.shape(self.probabilities)
        gradients = np.shape(self.gradients)
        if len(means) != 2 or means[1] < 2 or probabilities != means[:1] or gradients != probabilities:
            raise ShapeError(
                f"means {means}, probabilities {probabilities}, gradients {gradients}: expected (C, d) with d of two "
                "or more, (C,) and (C,)"
            )
        if self.distribution not in ("gaussian", "sphere"):
            raise UsageError(f"distribution={self.distribution!r}: expected an isotropic one, 'gaussian' or 'sphere'")
        if isinstance(self.probabilities, jax.core.Tracer):
            return
        total = float(np.sum(self.probabilities))
        if not (np.all(np.asarray(self.probabilities) > 0) and abs(total - 1) < 1e-6):
            raise UsageError(
                f"probabilities={self.probabilities}: expected positive numbers that add up to 1, not to {total:g}"
            )
        if not self.std > 0:
            raise UsageError(f"std={self.std}: expected a positive standard deviation")

    @property
    def dim(self) -> int:
        """Number of coordinates d."""
        return int(np.shape(self.means)[1])

    def draw(self, key: jax.Array, count: int) -> tuple[Float[Array, "count d"], Float[Array, " count"]]:
        """Draw inputs and the gradients of their components, in the dtype of the means."""
        for_component, for_noise = jax.random.split(key)
        means = jnp.asarray(self.means)
        component = jax.random.choice(for_component, means.shape[0], (count,), p=jnp.asarray(self.probabilities))
        xi = jax.random.normal(for_noise, (count, self.dim), means.dtype)
        if self.distribution == "sphere":
            xi = xi * (self.dim / (xi**2).sum(-1, keepdims=True)) ** 0.5
        return means[component] + self.std * xi, jnp.asarray(self.gradients)[component]


@takes_arrays
@partial(jax.jit, static_argnames=("activation", "training", "weight_decay"))
def train_neuron(
    mixture: Mixture,
    activation: Nonlinearity,
    init: Float[Array, " d"],
    training: SGDOptions,
    weight_decay: float,
    key: jax.Array,
) -> Float[Array, "snapshots d"]:
    r"""Train one neuron by SGD on fresh samples, one a step; return its weights, initialization first.

    .. math:: \mathcal L(v) = -\mathbb E\,[a\,\phi(v \cdot x + c)] + \frac{\lambda}{2} |v|^2,

    the neuron of theorem 3 with its stationary backpropagated gradient a; the weight decay is added here, so that the
    weights converge. Traceable; gradients are those of the loss, not of the theorem.
    """

    def loss(v: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
        return -(a * activation.value(x @ v + mixture.offset)).mean() + weight_decay / 2 * (v**2).sum()

    def step(v: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return (v - training.learning_rate * jax.grad(loss)(v, *batch)).astype(v.dtype), None

    def block(v: jax.Array, part: jax.Array) -> jax.Array:
        x, a = mixture.draw(part, training.block())  # drawn together: one draw a step costs more than the step
        return jax.lax.scan(step, v, (x[:, None], a[:, None]))[0]

    return record_states(block, init, jax.random.split(key, training.snapshots))

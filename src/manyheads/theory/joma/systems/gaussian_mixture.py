"""Isotropic mixtures of inputs, and one neuron trained on their samples by SGD."""

from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manyheads._arrays import check_arrays, takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.activations import Nonlinearity
from manyheads.theory.joma.systems.recording import SGDOptions, record_states

Distribution = Literal["gaussian", "sphere"]


class Mixture(eqx.Module):
    r"""Mixture of isotropic inputs :math:`x = \bar x_j + s\,\xi`, with a gradient :math:`a_j` per component.

    Attributes
    ----------
    means
        :math:`\bar x_j`, shape (C, d), d >= 2.
    probabilities
        :math:`p_j`, shape (C,): positive, adding up to one.
    gradients
        :math:`a_j`, shape (C,): minus the derivative of the loss with respect to the output of the neuron.
    std
        s > 0: standard deviation of every coordinate about the mean.
    offset
        c: contribution of the query token to the pre-activation.
    distribution
        "gaussian", or "sphere": the noise lies on the sphere of radius :math:`s \sqrt d`, with the same covariance.

    Examples
    --------
    >>> mixture = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.3)
    >>> mixture.draw(jax.random.key(0), 3)[0].shape
    (3, 2)
    """

    means: Float[Any, "components d"] = eqx.field(converter=check_arrays)
    probabilities: Float[Any, " components"] = eqx.field(converter=check_arrays)
    gradients: Float[Any, " components"] = eqx.field(converter=check_arrays)
    std: Float[Any, ""] = eqx.field(converter=check_arrays)
    offset: Float[Any, ""] = eqx.field(default=0.0, converter=check_arrays)
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

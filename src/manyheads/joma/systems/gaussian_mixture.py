"""Isotropic mixtures of inputs, and one neuron trained on their samples by SGD."""

from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import check_arrays, takes_arrays, to_numpy
from manyheads._settings import double_precision
from manyheads.errors import ShapeError, UsageError
from manyheads.joma.systems.activations import Nonlinearity
from manyheads.joma.systems.recording import record_states

CHUNK = 1 << 16  # samples that `sampled_gradient` holds at a time

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

    Raises
    ------
    ShapeError, UsageError
        Arrays that do not fit together, probabilities that do not sum to one, or a std that is not positive.

    Examples
    --------
    >>> mixture = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.3)
    >>> mixture.draw(jax.random.key(0), 3)[0].shape
    (3, 2)
    """

    means: Any = eqx.field(converter=check_arrays)
    probabilities: Any = eqx.field(converter=check_arrays)
    gradients: Any = eqx.field(converter=check_arrays)
    std: Any = eqx.field(converter=check_arrays)
    offset: Any = eqx.field(default=0.0, converter=check_arrays)
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

    def draw(self, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Draw inputs (count, d) and the gradients (count,) of their components, in the dtype of the means."""
        for_component, for_noise = jax.random.split(key)
        means = jnp.asarray(self.means)
        component = jax.random.choice(for_component, means.shape[0], (count,), p=jnp.asarray(self.probabilities))
        xi = jax.random.normal(for_noise, (count, self.dim), means.dtype)
        if self.distribution == "sphere":
            xi = xi * (self.dim / (xi**2).sum(-1, keepdims=True)) ** 0.5
        return means[component] + self.std * xi, jnp.asarray(self.gradients)[component]


class SampledGradient(NamedTuple):
    """Mean gradient over samples and the standard error of each coordinate, both (d,)."""

    mean: np.ndarray
    error: np.ndarray


@takes_arrays
def sampled_gradient(
    mixture: Mixture, weights: Any, activation: Nonlinearity, samples: int, key: jax.Array
) -> SampledGradient:
    r"""Estimate the mean of :math:`a\,\phi'(v \cdot x + c)\,x`, the gradient of theorem 3, from fresh samples.

    Parameters
    ----------
    weights
        v, shape (d,).
    samples
        Number of samples; rounded up to whole chunks of 65536 if there are several.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> mixture = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.3)
    >>> sampled_gradient(mixture, np.ones(2), NONLINEARITIES["identity"], 1000, jax.random.key(0)).mean.shape
    (2,)
    """
    if samples < 2:
        raise UsageError(f"samples={samples}: expected two or more for a standard error")
    size = min(samples, CHUNK)
    chunks = -(-samples // size)
    with double_precision():
        host = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), mixture)
        sums, squares = to_numpy(_sums(host, jnp.asarray(weights, jnp.float64), key, activation, size, chunks))
    count = size * chunks
    mean = sums / count
    return SampledGradient(mean, np.sqrt(np.maximum(squares / count - mean**2, 0) / (count - 1)))


@partial(jax.jit, static_argnames=("activation", "size", "chunks"))
def _sums(mixture: Mixture, v: Any, key: jax.Array, activation: Nonlinearity, size: int, chunks: int) -> Any:
    def add(carry: Any, part: jax.Array) -> tuple[Any, None]:
        x, a = mixture.draw(part, size)
        terms = (a * activation.derivative(x @ v + mixture.offset))[:, None] * x  # (size, d)
        return (carry[0] + terms.sum(0), carry[1] + (terms**2).sum(0)), None

    zeros = (jnp.zeros_like(v), jnp.zeros_like(v))
    return jax.lax.scan(add, zeros, jax.random.split(key, chunks))[0]


class SGDOptions(NamedTuple):
    r"""Plain SGD on fresh samples.

    Attributes
    ----------
    learning_rate
        `steps * learning_rate` is the time of the gradient flow.
    steps
        Updates, a multiple of `snapshots`.
    batch
        Samples of one update.
    weight_decay
        :math:`\lambda`, in the loss as :math:`\lambda/2\, |v|^2`.
    snapshots
        Number of states kept, initialization not counted.
    """

    learning_rate: float
    steps: int
    batch: int = 1
    weight_decay: float = 0.0
    snapshots: int = 16


@takes_arrays
def train_neuron(
    mixture: Mixture, activation: Nonlinearity, init: Any, training: SGDOptions, key: jax.Array
) -> jax.Array:
    r"""Train one neuron by SGD and return its weights, shape (snapshots + 1, d).

    .. math:: \mathcal L(v) = -\mathbb E\,[a\,\phi(v \cdot x + c)] + \frac{\lambda}{2} |v|^2,

    the neuron of theorem 3 with its stationary backpropagated gradient a; the weight decay is added here, so that the
    weights converge. Traceable; gradients are those of the loss, not of the theorem.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> mixture = Mixture(np.eye(2, dtype=np.float32), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.3)
    >>> init = np.ones(2, np.float32)
    >>> train_neuron(mixture, NONLINEARITIES["relu"], init, SGDOptions(0.01, 32), jax.random.key(0)).shape
    (17, 2)
    """
    if training.steps % training.snapshots or training.steps < 1:
        raise UsageError(f"steps={training.steps}: expected a positive multiple of snapshots={training.snapshots}")
    if not training.learning_rate > 0 or training.batch < 1:
        raise UsageError(f"learning_rate={training.learning_rate}, batch={training.batch}: expected positive numbers")
    return _train(mixture, jnp.asarray(init), key, activation, training)


@partial(jax.jit, static_argnames=("activation", "training"))
def _train(
    mixture: Mixture, init: jax.Array, key: jax.Array, activation: Nonlinearity, training: SGDOptions
) -> jax.Array:
    def loss(v: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
        return -(a * activation.value(x @ v + mixture.offset)).mean() + training.weight_decay / 2 * (v**2).sum()

    def step(v: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return (v - training.learning_rate * jax.grad(loss)(v, *batch)).astype(v.dtype), None

    each = training.steps // training.snapshots

    def block(v: jax.Array, part: jax.Array) -> jax.Array:
        x, a = mixture.draw(part, each * training.batch)  # drawn together: one draw a step costs more than the step
        batches = x.reshape(each, training.batch, -1), a.reshape(each, training.batch)
        return jax.lax.scan(step, v, batches)[0]

    return record_states(block, init, jax.random.split(key, training.snapshots))

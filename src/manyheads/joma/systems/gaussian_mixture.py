"""Isotropic clouds of inputs, and one neuron that is really trained on samples of them."""

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

CHUNK = 1 << 16  # samples that `sampled_field` holds at a time

Shape = Literal["gaussian", "sphere"]


class Mixture(eqx.Module):
    r"""Clouds of inputs :math:`x = \bar x_j + s\,\xi` with a backpropagated gradient :math:`a_j` on each.

    Attributes
    ----------
    centres
        :math:`\bar x_j`, shape (C, d), d >= 2.
    shares
        :math:`p_j`, shape (C,): positive, adding up to one.
    gradients
        :math:`a_j`, shape (C,): minus the derivative of the loss with respect to the neuron's output.
    spread
        s > 0: the standard deviation of every coordinate about the centre.
    offset
        c: what the query token adds to the pre-activation.
    shape
        "gaussian", or "sphere": the noise lies on the sphere of radius :math:`s \sqrt d`, with the same covariance.

    Raises
    ------
    ShapeError, UsageError
        Arrays that do not fit together, shares that are no probabilities, a spread that is not positive.

    Examples
    --------
    >>> clouds = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.3)
    >>> clouds.draw(jax.random.key(0), 3)[0].shape
    (3, 2)
    """

    centres: Any = eqx.field(converter=check_arrays)
    shares: Any = eqx.field(converter=check_arrays)
    gradients: Any = eqx.field(converter=check_arrays)
    spread: Any = eqx.field(converter=check_arrays)
    offset: Any = eqx.field(default=0.0, converter=check_arrays)
    shape: Shape = eqx.field(default="gaussian", static=True)

    def __check_init__(self) -> None:
        centres, shares = np.shape(self.centres), np.shape(self.shares)
        if len(centres) != 2 or centres[1] < 2 or shares != centres[:1] or np.shape(self.gradients) != shares:
            raise ShapeError(
                f"centres {centres}, shares {shares}, gradients {np.shape(self.gradients)}: expected (C, d) with d of "
                "two or more, (C,) and (C,)"
            )
        if self.shape not in ("gaussian", "sphere"):
            raise UsageError(f"shape={self.shape!r}: the clouds are isotropic, 'gaussian' or 'sphere'")
        if isinstance(self.shares, jax.core.Tracer):
            return
        total = float(np.sum(self.shares))
        if not (np.all(np.asarray(self.shares) > 0) and abs(total - 1) < 1e-6):
            raise UsageError(f"shares={self.shares}: expected positive shares that add up to 1, not to {total:g}")
        if not self.spread > 0:
            raise UsageError(f"spread={self.spread}: expected a positive standard deviation")

    @property
    def dim(self) -> int:
        """Return d, the number of coordinates."""
        return int(np.shape(self.centres)[1])

    def draw(self, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Draw inputs (count, d) and the gradients (count,) that belong to their clouds, in the centres' dtype."""
        which, noise = jax.random.split(key)
        centres = jnp.asarray(self.centres)
        cloud = jax.random.choice(which, centres.shape[0], (count,), p=jnp.asarray(self.shares))
        xi = jax.random.normal(noise, (count, self.dim), centres.dtype)
        if self.shape == "sphere":
            xi = xi * (self.dim / (xi**2).sum(-1, keepdims=True)) ** 0.5
        return centres[cloud] + self.spread * xi, jnp.asarray(self.gradients)[cloud]


class SampledField(NamedTuple):
    """A mean gradient over samples and the standard error of each coordinate, both of shape (d,)."""

    mean: np.ndarray
    error: np.ndarray


@takes_arrays
def sampled_field(
    mixture: Mixture, weights: Any, activation: Nonlinearity, samples: int, key: jax.Array
) -> SampledField:
    r"""Mean of :math:`a\,\phi'(v \cdot x + c)\,x` over fresh samples: what theorem 3 says in closed form.

    Parameters
    ----------
    weights
        v, shape (d,).
    samples
        How many; rounded up to whole chunks of 65536 where it is more than one chunk.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> clouds = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.3)
    >>> sampled_field(clouds, np.ones(2), NONLINEARITIES["identity"], 1000, jax.random.key(0)).mean.shape
    (2,)
    """
    if samples < 2:
        raise UsageError(f"samples={samples}: expected two or more, a standard error needs them")
    size = min(samples, CHUNK)
    chunks = -(-samples // size)
    with double_precision():
        host = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), mixture)
        sums, squares = to_numpy(_sums(host, jnp.asarray(weights, jnp.float64), key, activation, size, chunks))
    count = size * chunks
    mean = sums / count
    return SampledField(mean, np.sqrt(np.maximum(squares / count - mean**2, 0) / (count - 1)))


@partial(jax.jit, static_argnames=("activation", "size", "chunks"))
def _sums(mixture: Mixture, v: Any, key: jax.Array, activation: Nonlinearity, size: int, chunks: int) -> Any:
    def add(carry: Any, part: jax.Array) -> tuple[Any, None]:
        x, a = mixture.draw(part, size)
        terms = (a * activation.derivative(x @ v + mixture.offset))[:, None] * x  # (size, d)
        return (carry[0] + terms.sum(0), carry[1] + (terms**2).sum(0)), None

    start = (jnp.zeros_like(v), jnp.zeros_like(v))
    return jax.lax.scan(add, start, jax.random.split(key, chunks))[0]


class Training(NamedTuple):
    """How the neuron is trained: plain SGD on fresh samples.

    Attributes
    ----------
    rate
        Step size; `steps * rate` is the time of the gradient flow.
    steps
        Updates, a multiple of `snapshots`.
    batch
        Samples of one update.
    decay
        Weight decay, part of the loss as decay/2 |v|².
    snapshots
        How often the weights are kept, the start not counted.
    """

    rate: float
    steps: int
    batch: int = 1
    decay: float = 0.0
    snapshots: int = 16


@takes_arrays
def train_neuron(
    mixture: Mixture, activation: Nonlinearity, start: Any, training: Training, key: jax.Array
) -> jax.Array:
    r"""Train one neuron by SGD and return its path, shape (snapshots + 1, d).

    .. math:: \mathcal L(v) = -\mathbb E\,[a\,\phi(v \cdot x + c)] + \frac{\lambda}{2} |v|^2,

    which is the neuron of theorem 3 with its stationary backpropagated gradient a; the decay, an addition of ours,
    gives it somewhere to end. Can be traced; gradients are taken by JAX from the loss, not from the theorem.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> clouds = Mixture(np.eye(2, dtype=np.float32), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.3)
    >>> start = np.ones(2, np.float32)
    >>> train_neuron(clouds, NONLINEARITIES["relu"], start, Training(0.01, 32), jax.random.key(0)).shape
    (17, 2)
    """
    if training.steps % training.snapshots or training.steps < 1:
        raise UsageError(f"steps={training.steps}: expected a positive multiple of snapshots={training.snapshots}")
    if not training.rate > 0 or training.batch < 1:
        raise UsageError(f"rate={training.rate}, batch={training.batch}: expected positive numbers")
    return _train(mixture, jnp.asarray(start), key, activation, training)


@partial(jax.jit, static_argnames=("activation", "training"))
def _train(
    mixture: Mixture, start: jax.Array, key: jax.Array, activation: Nonlinearity, training: Training
) -> jax.Array:
    def loss(v: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
        return -(a * activation.value(x @ v + mixture.offset)).mean() + training.decay / 2 * (v**2).sum()

    def step(v: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return (v - training.rate * jax.grad(loss)(v, *batch)).astype(v.dtype), None

    each = training.steps // training.snapshots

    def block(v: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, a = mixture.draw(part, each * training.batch)  # drawn together: one draw a step costs more than the step
        batches = x.reshape(each, training.batch, -1), a.reshape(each, training.batch)
        v, _ = jax.lax.scan(step, v, batches)
        return v, v

    _, path = jax.lax.scan(block, start, jax.random.split(key, training.snapshots))
    return jnp.concatenate([start[None], path])

"""Task and update rule of one attention layer under an MLP: contexts, queries, labels and frozen embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from manyheads._arrays import as_integers, check_arrays, takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import ShapeError, UsageError

Attention: TypeAlias = Literal["linear", "exp", "sigmoid", "square", "softmax", "normalized-sigmoid"]
Activation: TypeAlias = Callable[[jax.Array], jax.Array]

ATTENTIONS: tuple[Attention, ...] = ("linear", "exp", "sigmoid", "square", "softmax", "normalized-sigmoid")
ACTIVATIONS: dict[str, Activation] = {
    "identity": lambda a: a,
    "relu": jax.nn.relu,
    "gelu": lambda a: jax.nn.gelu(a, approximate=False),
    "square": lambda a: jnp.square(a) / 2,
    "tanh": jnp.tanh,
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a random task and of the layer that learns it.

    Examples
    --------
    >>> Sizes(tokens=30, width=12)
    Traceback (most recent call last):
        ...
    manyheads.errors.UsageError: width=12: 30 tokens and 1 queries need as many orthogonal directions, give 31 or more
    """

    tokens: int = constrained(12, Constraint(least=1))  # M
    queries: int = constrained(1, Constraint(least=1))  # Q
    contexts: int = constrained(40, Constraint(least=1))  # N
    classes: int = constrained(5, Constraint(least=1))  # number of labels
    neurons: int = constrained(24, Constraint(least=1))  # K
    width: int = 24  # d, at least M + Q

    def __post_init__(self) -> None:
        check_fields(self)
        directions = self.tokens + self.queries
        if self.width < directions:
            raise UsageError(
                f"width={self.width}: {self.tokens} tokens and {self.queries} queries need as many orthogonal "
                f"directions, give {directions} or more"
            )


class UpdateRule(eqx.Module):
    r"""Attention, activation and gradient flow of the layer.

    A sample with token frequencies x and query q gives the attention b, the features f and the hidden values h,

    .. math:: b = \sigma(z_q) \circ x / A, \quad f = U_C b + u_q, \quad h = \phi(W^\top f),

    with :math:`\sigma(s) = s/T, A = 1` (linear), :math:`\sigma(s) = e^{s/T}, A = 1` (exp; another constant only
    rescales x), the logistic function or the square of s/T, A = 1 (sigmoid, square), and
    :math:`A = 1^\top(\sigma(z) \circ x)` over exp (softmax) or the logistic function (normalized-sigmoid). Then, in
    continuous time,

    .. math:: \dot W = -\partial_W L - \lambda W, \qquad \dot z = r (-\partial_z L - \lambda z).

    Attributes
    ----------
    attention
        A name of `ATTENTIONS`.
    activation
        A name of `ACTIVATIONS`, or an elementwise JAX function. Events at kinks are known for "relu" alone.
    temperature
        T.
    learning_rate_ratio
        r, the learning rate of the logits over that of the weights.
    weight_decay
        :math:`\lambda`, of both, multiplied by the learning rate of each as in plain SGD.
    per_query_weights
        Whether every query has a matrix W of its own; otherwise they share one.

    Raises
    ------
    UsageError
        No such attention or activation; a temperature or ratio that is not positive; a negative decay.
    """

    attention: Attention = eqx.field(default="softmax", static=True)
    activation: str | Activation = eqx.field(default="relu", static=True)
    temperature: Float[Any, ""] = 1.0
    learning_rate_ratio: Float[Any, ""] = 1.0
    weight_decay: Float[Any, ""] = 0.0
    per_query_weights: bool = eqx.field(default=False, static=True)

    def __check_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UsageError(f"attention={self.attention!r}: give one of {', '.join(ATTENTIONS)}")
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise UsageError(f"activation={self.activation!r}: give one of {names}, or a function")
        if not (self.temperature > 0 and self.learning_rate_ratio > 0 and self.weight_decay >= 0):
            given = f"temperature={self.temperature}, learning_rate_ratio={self.learning_rate_ratio}"
            given += f", weight_decay={self.weight_decay}"
            raise UsageError(f"{given}: the first two must be positive, the third must not be negative")

    def traced(self) -> "UpdateRule":
        """Convert the numbers to arrays, so that one compiled program serves all temperatures and rates."""
        return jax.tree.map(lambda number: jnp.asarray(number, float), self)

    @property
    def function(self) -> Activation:
        """Activation as a function."""
        return ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation


class JomaTask(eqx.Module):
    """N samples and the frozen embeddings.

    Attributes
    ----------
    contexts
        Frequencies x of the tokens in each sample, (N, M): not negative, every row sums to one.
    queries, labels
        The query token and the class of each sample, (N,), integers.
    token_embeddings, query_embeddings
        :math:`U_C` (d, M) and the :math:`u_q` (d, Q): jointly orthonormal columns.

    Raises
    ------
    ShapeError
        Arrays that do not fit together.
    UsageError
        Embeddings that are not orthonormal, or contexts that are not frequencies. Within a traced function only shapes
        are checked.

    Examples
    --------
    >>> task = draw_joma_task(Sizes(), np.random.default_rng(0))
    >>> task.contexts.shape, task.token_embeddings.shape
    ((40, 12), (24, 12))
    >>> eqx.tree_at(lambda s: s.token_embeddings, task, 2 * task.token_embeddings).checked()
    Traceback (most recent call last):
        ...
    manyheads.errors.UsageError: embeddings are not orthonormal: [U_C, u]^T [U_C, u] is 3 from the identity. ...
    """

    contexts: Float[Any, "samples tokens"] = eqx.field(converter=check_arrays)
    queries: Int[Any, " samples"] = eqx.field(converter=check_arrays)
    labels: Int[Any, " samples"] = eqx.field(converter=check_arrays)
    token_embeddings: Float[Any, "width tokens"] = eqx.field(converter=check_arrays)
    query_embeddings: Float[Any, "width queries"] = eqx.field(converter=check_arrays)

    def __check_init__(self) -> None:
        self.checked()

    def checked(self) -> "JomaTask":
        """Check the assumptions and return the task; call it after replacing an array."""
        samples, tokens = _shape(self.contexts, 2, "contexts (N, M)")
        width, embedded = _shape(self.token_embeddings, 2, "token_embeddings (d, M)")
        if embedded != tokens or _shape(self.query_embeddings, 2, "query_embeddings (d, Q)")[0] != width:
            raise ShapeError(
                f"contexts {(samples, tokens)}, token_embeddings {(width, embedded)}, query_embeddings "
                f"{self.query_embeddings.shape}: expected (N, M), (d, M), (d, Q)"
            )
        for name in ("queries", "labels"):
            if getattr(self, name).shape != (samples,):
                raise ShapeError(f"{name} {getattr(self, name).shape}: expected one for each of {samples} contexts")
        try:
            arrays = tuple(np.asarray(leaf) for leaf in jax.tree.leaves(self))
        except jax.errors.TracerArrayConversionError:
            return self
        _check_values(*arrays)
        return self

    @takes_arrays
    def take(self, rows: Int[ArrayLike, " batch"]) -> "JomaTask":
        """Select samples by row; the embeddings stay."""
        parts = (self.contexts[rows], self.queries[rows], self.labels[rows])
        return JomaTask(*parts, self.token_embeddings, self.query_embeddings)


def _shape(array: Any, dimensions: int, name: str) -> tuple[int, ...]:
    if np.ndim(array) != dimensions:
        raise ShapeError(f"{name}: got shape {np.shape(array)}")
    return tuple(np.shape(array))


def _check_values(
    contexts: np.ndarray, queries: np.ndarray, labels: np.ndarray, tokens: np.ndarray, query_tokens: np.ndarray
) -> None:
    frame = np.concatenate([tokens, query_tokens], axis=1).astype(np.float64)  # (d, M + Q)
    error = float(np.abs(frame.T @ frame - np.eye(frame.shape[1])).max())
    if not error <= 64 * len(frame) * np.finfo(tokens.dtype).eps:
        raise UsageError(
            f"embeddings are not orthonormal: [U_C, u]^T [U_C, u] is {error:.3g} from the identity. The theory of "
            "joint dynamics assumes frozen orthonormal embeddings: orthonormalize them (numpy.linalg.qr)"
        )
    if not (contexts.min() >= 0 and np.abs(contexts.sum(1) - 1).max() <= 1e-5):  # NaN is refused too
        raise UsageError("contexts must be frequencies: nonnegative, with rows that sum to one")
    queries, labels = as_integers(queries, "queries"), as_integers(labels, "labels")
    if queries.min() < 0 or queries.max() >= query_tokens.shape[1] or labels.min() < 0:
        raise UsageError(f"queries must lie in 0..{query_tokens.shape[1] - 1} and labels must not be negative")


def draw_joma_task(sizes: Sizes, rng: np.random.Generator) -> JomaTask:
    """Draw contexts, queries and labels, each uniform, and a random orthonormal frame of embeddings, in float64."""
    frame = np.linalg.qr(rng.normal(size=(sizes.width, sizes.tokens + sizes.queries)))[0]
    return JomaTask(
        rng.dirichlet(np.ones(sizes.tokens), sizes.contexts),
        rng.integers(sizes.queries, size=sizes.contexts),
        rng.integers(sizes.classes, size=sizes.contexts),
        frame[:, : sizes.tokens],
        frame[:, sizes.tokens :],
    )

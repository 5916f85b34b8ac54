"""Softmax cross-entropy and accuracy on a batch, for pooled outputs and for every token."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from manyheads._namespaces import Array
from manyheads.errors import ShapeError


def cross_entropy(model: "Callable[[Array], jax.Array]", batch: "Sequence[Array]") -> jax.Array:
    r"""Average the softmax cross-entropy :math:`-\log \mathrm{softmax}(f(x))_y` in nats over all answers of a batch.

    The model returns logits (..., classes); a batch is a sequence that begins with inputs and integer answers (...).

    Raises `ShapeError`: the answers do not match the outputs: a per-token answer needs the read-out `"token"`.

    Examples
    --------
    >>> round(float(cross_entropy(lambda x: jnp.zeros((2, 4)), (None, jnp.array([0, 3])))), 6)
    1.386294
    """
    logits, answers = model(batch[0]), jnp.asarray(batch[1])
    if logits.shape[:-1] != answers.shape:
        raise ShapeError(f"outputs of shape {logits.shape} and answers of shape {answers.shape}: give one an output")
    chosen = jnp.take_along_axis(logits, answers[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def accuracy(model: "Callable[[Array], jax.Array]", batch: "Sequence[Array]") -> jax.Array:
    """Give the share of answers whose logit is the largest."""
    return (model(batch[0]).argmax(-1) == batch[1]).mean()

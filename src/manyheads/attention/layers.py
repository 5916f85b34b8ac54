"""Base class of attention layers: application to sequences, attention patterns, checks of weights.

A row that may attend to nothing has output exactly zero; the output bias is not added to it. With this one rule the two
forms of a layer (`manyheads.attention.multihead`) are the same function, biases and masks included.
"""

import abc
import math
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import check_arrays, follows_caller
from manyheads.attention.masks import Mask, as_rule, causal, evaluate, masked_softmax
from manyheads.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float, Num

    from manyheads.attention.masks import MaskLike


class Layer(eqx.Module):
    """Self-attention on sequences (..., k, d): logits, a softmax over the allowed keys, and what is read with it.

    Called on NumPy arrays with NumPy weights, a layer computes in their precision (float64 stays float64) whatever
    JAX's configuration, and returns NumPy; with a JAX array on either side, and under `jit`, `grad` or `vmap`, it
    follows the caller. It compiles once per shape. The patterns of all heads, (..., heads, k, k), are held at once.
    """

    bias: eqx.AbstractVar[Any]
    causal: eqx.AbstractVar[bool]

    @property
    @abc.abstractmethod
    def heads(self) -> int:
        """Number of heads."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Token dimension d."""

    @abc.abstractmethod
    def logits(self, x: "Float[Array, '... k d']") -> "Float[Array, '... heads k k']":
        """Logits (..., heads, k, k) before any mask, traced."""

    @abc.abstractmethod
    def read(self, pattern: "Float[Array, '... heads k k']", x: "Float[Array, '... k d']") -> "Float[Array, '... k d']":
        """Sum over heads of what a pattern (..., heads, k, k) reads from x, without the output bias, traced."""

    @follows_caller
    def __call__(self, x: "Num[ArrayLike, '... k d']", mask: "MaskLike" = None) -> "Float[Array, '... k d']":
        """Apply the layer.

        Parameters
        ----------
        x
            Tokens (..., k, d), real numbers of any dtype.
        mask
            Booleans that broadcast to (..., k, k), True where row r may attend to row j, or a rule of
            `manyheads.attention.masks`; the same for all heads. It joins `causal`.

        Returns
        -------
        (..., k, d). A row that may attend to nothing is exactly zero, and so are the derivatives through it.

        Raises
        ------
        ShapeError
            Tokens or mask of another shape.
        """
        return _apply(self, *self._operands(x, mask))

    @follows_caller
    def weights(self, x: "Num[ArrayLike, '... k d']", mask: "MaskLike" = None) -> "Float[Array, '... heads k k']":
        """Attention pattern (..., heads, k, k); its rows sum to one, or are zero where nothing may be attended to.

        Arguments and errors are those of the call.
        """
        return _pattern(self, *self._operands(x, mask))[0]

    def _operands(self, x: Any, mask: Any) -> tuple[Any, Mask | None]:
        x = as_array(x)
        if x.ndim < 2 or x.shape[-1] != self.dim or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ShapeError(
                f"tokens of shape {x.shape} and dtype {x.dtype}: this layer takes real sequences (..., k, {self.dim})"
            )
        rule = as_rule(mask)
        if rule is not None:
            evaluate(rule, (x.shape[-2], x.shape[-2]), np.arange(1))  # refuses a mask that does not fit
            try:
                np.broadcast_shapes(x.shape[:-2], rule.batch_shape)
            except ValueError as error:
                raise ShapeError(
                    f"leading axes {rule.batch_shape} of the mask do not broadcast with {x.shape[:-2]} of the tokens; "
                    "a layer's mask has no axis for the heads"
                ) from error
        if not self.causal:
            return x, rule
        return x, causal if rule is None else causal & rule


@jax.jit
def _apply(layer: Layer, x: Any, rule: Mask | None) -> Any:
    pattern, allowed = _pattern(layer, x, rule)
    y = layer.read(pattern, x)
    if layer.bias is not None:
        y = y + layer.bias
    return y if allowed is None else jnp.where(jnp.any(allowed, axis=-1, keepdims=True), y, 0)


@jax.jit
def _pattern(layer: Layer, x: Any, rule: Mask | None) -> tuple[Any, Any]:
    k = x.shape[-2]
    allowed = evaluate(rule, (k, k))  # (..., k, k)
    return masked_softmax(layer.logits(x), None if allowed is None else allowed[..., None, :, :]), allowed


def as_array(value: Any, name: str = "a weight") -> Any:
    """Keep None and make an array native; lists and numbers become float64."""
    value = check_arrays(value, name)
    return value if value is None or hasattr(value, "dtype") else np.asarray(value, dtype=np.float64)


def logit_scale(scale: float | None, key_dim: int) -> float:
    """Return the scale of the logits, N**-0.5 unless given, and refuse one that is not a positive number."""
    scale = key_dim**-0.5 if scale is None else float(scale)
    if not (0 < scale < math.inf):
        raise UsageError(f"scale={scale}: the logits need a positive, finite factor")
    return scale


def check_weights(layer: Layer, expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights whose shape is not the expected one, or which are not real floating-point numbers."""
    for name, shape in expected.items():
        weight = getattr(layer, name)
        if weight is None:
            continue
        if weight.shape != shape:
            raise ShapeError(f"{name} of shape {weight.shape}: {shape} would fit the other weights")
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            raise ShapeError(f"{name} of dtype {weight.dtype}: give real floating-point weights")


def check_axes(name: str, weight: Any, axes: str) -> tuple[int, ...]:
    """Return the shape of a weight that must have the axes named, e.g. "(H, d, N)", none of them empty."""
    if weight is None or weight.ndim != axes.count(",") + 1 or 0 in weight.shape:
        found = "missing" if weight is None else f"of shape {weight.shape}"
        raise ShapeError(f"{name} {found}: expected {axes}, every axis at least 1")
    return weight.shape

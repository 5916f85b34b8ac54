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
from manyheads.attention.masks import Mask, add_bias, as_rule, causal, evaluate, masked_softmax
from manyheads.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float, Num

    from manyheads.attention.masks import MaskLike


class Layer(eqx.Module):
    """Attention on sequences (..., k, d): logits, a softmax over the allowed keys, and what is read with it.

    Self-attention unless keys are given: then queries, keys and values come from sequences of their own
    (cross-attention).

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
    def logits(
        self, x: "Float[Array, '... k d']", keys: "Float[Array, '... m d'] | None" = None
    ) -> "Float[Array, '... heads k m']":
        """Logits (..., heads, k, m) before any mask, traced; keys are those of x if None."""

    @abc.abstractmethod
    def read(self, pattern: "Float[Array, '... heads k m']", x: "Float[Array, '... m d']") -> "Float[Array, '... k d']":
        """Sum over heads of what a pattern (..., heads, k, m) reads from x, without the output bias, traced."""

    @follows_caller
    def __call__(
        self,
        x: "Num[ArrayLike, '... k d']",
        mask: "MaskLike" = None,
        *,
        keys: "Num[ArrayLike, '... m d'] | None" = None,
        values: "Num[ArrayLike, '... m d'] | None" = None,
    ) -> "Float[Array, '... k d']":
        """Apply the layer.

        Parameters
        ----------
        x
            Tokens (..., k, d), real numbers of any dtype.
        mask
            Booleans that broadcast to (..., k, m), True where row r may attend to row j, floats of that shape that are
            added to the logits, -inf where it may not, or a rule of `manyheads.attention.masks`; the same for all
            heads. It joins `causal`.
        keys
            Cross-attention: tokens (..., m, d) that keys are made of, with the leading axes of `x`; `None` means `x`.
            Under a causal mask the k rows of `x` are the last of the m.
        values
            Tokens (..., m, d) that values are made of; `None` means those of the keys.

        Returns
        -------
        (..., k, d). A row that may attend to nothing is exactly zero, and so are the derivatives through it.

        Raises
        ------
        ShapeError
            Tokens or mask of another shape.

        Examples
        --------
        >>> from manyheads.attention import AttentionLayer
        >>> average = AttentionLayer(theta=np.zeros((1, 2, 2)), projection=np.eye(2)[None])
        >>> average(np.ones((1, 2)), keys=np.zeros((3, 2)), values=np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 6.0]]))
        array([[1., 2.]])
        """
        return _apply(self, *self._operands(x, mask, keys, values))

    @follows_caller
    def weights(
        self,
        x: "Num[ArrayLike, '... k d']",
        mask: "MaskLike" = None,
        *,
        keys: "Num[ArrayLike, '... m d'] | None" = None,
    ) -> "Float[Array, '... heads k m']":
        """Attention pattern (..., heads, k, m); its rows sum to one, or are zero where nothing may be attended to.

        Arguments and errors are those of the call.
        """
        x, keys, _, rule = self._operands(x, mask, keys, None)
        return _pattern(self, x, keys, rule)[0]

    def _operands(self, x: Any, mask: Any, keys: Any, values: Any) -> tuple[Any, Any, Any, Mask | None]:
        x, keys, values = (as_array(tokens, "tokens") for tokens in (x, keys, values))
        for tokens in (x, keys, values):
            if tokens is not None and (
                tokens.ndim < 2 or tokens.shape[-1] != self.dim or jnp.issubdtype(tokens.dtype, jnp.complexfloating)
            ):
                raise ShapeError(
                    f"tokens of shape {tokens.shape} and dtype {tokens.dtype}: this layer takes real sequences "
                    f"(..., k, {self.dim})"
                )
        of_keys = x if keys is None else keys
        for name, tokens, shape in (("keys", keys, x.shape[:-2]), ("values", values, of_keys.shape[:-1])):
            if tokens is not None and tokens.shape[: len(shape)] != shape:
                raise ShapeError(
                    f"{name} of shape {tokens.shape} with queries {x.shape} and keys {of_keys.shape}: give equal "
                    "leading axes, and a value for every key"
                )
        rule = as_rule(mask)
        if rule is not None:
            evaluate(rule, (x.shape[-2], of_keys.shape[-2]), np.arange(1))  # refuses a mask that does not fit
            try:
                np.broadcast_shapes(x.shape[:-2], rule.batch_shape)
            except ValueError as error:
                raise ShapeError(
                    f"leading axes {rule.batch_shape} of the mask do not broadcast with {x.shape[:-2]} of the tokens; "
                    "a layer's mask has no axis for the heads"
                ) from error
        if self.causal:
            rule = causal if rule is None else causal & rule
        return x, keys, values, rule


@jax.jit
def _apply(layer: Layer, x: Any, keys: Any, values: Any, rule: Mask | None) -> Any:
    pattern, allowed = _pattern(layer, x, keys, rule)
    read_from = next(tokens for tokens in (values, keys, x) if tokens is not None)
    y = layer.read(pattern, read_from)
    if layer.bias is not None:
        y = y + layer.bias
    return y if allowed is None else jnp.where(jnp.any(allowed, axis=-1, keepdims=True), y, 0)


@jax.jit
def _pattern(layer: Layer, x: Any, keys: Any, rule: Mask | None) -> tuple[Any, Any]:
    shape = x.shape[-2], (x if keys is None else keys).shape[-2]
    allowed, logits = evaluate(rule, shape), layer.logits(x, keys)  # (..., k, m), (..., heads, k, m)
    if rule is None:
        return masked_softmax(logits), None
    bias, by_head = rule.bias(None, shape), allowed[..., None, :, :]
    logits, _ = add_bias(logits, None if bias is None else bias[..., None, :, :], by_head)
    return masked_softmax(logits, by_head), allowed


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

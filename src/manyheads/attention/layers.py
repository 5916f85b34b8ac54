"""Base class of attention layers: application to sequences, attention patterns, checks of weights.

A row that may attend to nothing has output exactly zero; the output bias is not added to it. With this one rule the two
forms of a layer (`manyheads.attention.multihead`) are the same function, biases and masks included.
"""

import abc
import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads._arrays import check_arrays, follows_arrays
from manyheads._namespaces import Array, cast, in_common_dtype, kind, like, namespace
from manyheads._trees import Tree, leaf_names
from manyheads.attention.masks import Mask, as_rule, causal, cut, evaluate, part_of
from manyheads.attention.softmax import add_bias, softmax
from manyheads.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Float, Num

    from manyheads.attention.masks import MaskLike

AT_ONCE = 2**16  # entries of patterns that NumPy computes at once: they stay in a processor's cache


class Layer(Tree, abc.ABC):
    """Attention on sequences (..., k, d): logits, a softmax over the allowed keys, and what is read with it.

    NumPy in, NumPy out, in the precision of the arrays, a few sequences at a time. With a tensor of PyTorch among
    tokens and weights the result is a tensor on its device, with derivatives. With a JAX array on either side, and
    under `jit`, `grad` or `vmap`, a layer follows the caller and compiles once per shape. For tensors and JAX arrays
    the patterns of all heads, (..., heads, k, k), are held at once.

    Subclasses are frozen dataclasses with the fields `bias`, (d,) or None, and `causal`, a bool. They are pytrees once
    JAX is imported; if a layer was made before, call or make any layer first.
    """

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

    @follows_arrays
    def __call__(
        self,
        x: "Num[ArrayLike, '... k d']",
        mask: "MaskLike" = None,
        *,
        keys: "Num[ArrayLike, '... m d'] | None" = None,
        values: "Num[ArrayLike, '... m d'] | None" = None,
    ) -> "Float[Array, '... k d']":
        """Apply the layer.

        Raises `ShapeError`: tokens or mask of another shape.

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

        Examples
        --------
        >>> from manyheads.attention import AttentionLayer
        >>> average = AttentionLayer(theta=np.zeros((1, 2, 2)), projection=np.eye(2)[None])
        >>> average(np.ones((1, 2)), keys=np.zeros((3, 2)), values=np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 6.0]]))
        array([[1., 2.]])
        """
        return _run(_apply, self, *self._operands(x, mask, keys, values))

    @follows_arrays
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
        return _run(_weights, self, *self._operands(x, mask, keys, None))

    def _operands(self, x: Array, mask: Any, keys: Array, values: Array) -> tuple[Array, Array, Array, Mask | None]:
        x, keys, values = (as_array(tokens, "tokens") for tokens in (x, keys, values))
        for tokens in (x, keys, values):
            if tokens is not None and (tokens.ndim < 2 or tokens.shape[-1] != self.dim or kind(tokens) == "c"):
                given = f"tokens of shape {tuple(tokens.shape)} and dtype {tokens.dtype}"
                raise ShapeError(f"{given}: this layer takes real sequences (..., k, {self.dim})")
        of_keys = x if keys is None else keys
        for name, tokens, shape in (("keys", keys, x.shape[:-2]), ("values", values, of_keys.shape[:-1])):
            if tokens is not None and tokens.shape[: len(shape)] != shape:
                given = f"{name} {tuple(tokens.shape)} with queries {tuple(x.shape)} and keys {tuple(of_keys.shape)}"
                raise ShapeError(f"{given}: give equal leading axes, and a value for every key")
        rule = as_rule(mask)
        if rule is not None:
            evaluate(rule, (x.shape[-2], of_keys.shape[-2]), np.arange(1))  # refuses a mask that does not fit
            try:
                np.broadcast_shapes(x.shape[:-2], rule.batch_shape)
            except ValueError as error:
                given = f"leading axes {rule.batch_shape} of the mask and {tuple(x.shape[:-2])} of the tokens"
                raise ShapeError(f"{given} do not broadcast; a layer's mask has no axis for the heads") from error
        return x, keys, values, causal & rule if getattr(self, "causal", False) else rule


def _run(
    function: Callable[..., Array], layer: Layer, x: Array, keys: Array, values: Array, rule: Mask | None
) -> Array:
    """Compile in JAX; in NumPy and PyTorch cast to one dtype, and in NumPy take a few sequences at a time."""
    if (xp := namespace(layer, x, keys, values, rule)).__name__ == "jax.numpy":
        return _compiled(function)(layer, x, keys, values, rule)
    (layer, x, keys, values), dtype = in_common_dtype(layer, x, keys, values)
    depth = 0 if rule is None else len(rule.batch_shape)
    pairs = layer.heads * x.shape[-2] * (x if keys is None else keys).shape[-2]
    together = max(1, AT_ONCE // max(1, pairs * math.prod(x.shape[1:-2])))
    if xp is not np or x.ndim < 3 or depth > x.ndim - 2 or together >= len(x):
        return cast(function(layer, x, keys, values, rule), dtype)
    rule = None if rule is None else rule.align(x.ndim - 2)
    parts = [(slice(first, first + together),) for first in range(0, len(x), together)]
    operands = ([None if each is None else cut(each, part) for each in (x, keys, values)] for part in parts)
    rules = (part_of(rule, part) for part in parts)
    return np.concat([cast(function(layer, *each, own), dtype) for each, own in zip(operands, rules, strict=True)])


@functools.cache
def _compiled(function: Callable[..., Array]) -> Callable[..., Array]:
    return sys.modules["jax"].jit(function)


def _apply(layer: Any, x: Array, keys: Array, values: Array, rule: Mask | None) -> Array:
    pattern, allowed = _pattern(layer, x, keys, rule)
    y = layer.read(pattern, next(tokens for tokens in (values, keys, x) if tokens is not None))
    y = y if layer.bias is None else y + layer.bias
    xp = namespace(y)
    return y if allowed is None else xp.where(xp.any(allowed, axis=-1, keepdims=True), y, 0)


def _weights(layer: Layer, x: Array, keys: Array, _: object, rule: Mask | None) -> Array:
    return _pattern(layer, x, keys, rule)[0]


def _pattern(layer: Layer, x: Array, keys: Array, rule: Mask | None) -> tuple[Array, Array]:
    shape = x.shape[-2], (x if keys is None else keys).shape[-2]
    logits = layer.logits(x, keys)  # (..., heads, k, m)
    if rule is None:
        return softmax(logits), None
    allowed, bias = (like(logits, mask) for mask in (evaluate(rule, shape), rule.bias(None, shape)))  # (..., k, m)
    by_head = allowed[..., None, :, :]
    logits, _ = add_bias(logits, None if bias is None else bias[..., None, :, :], by_head)
    return softmax(logits, by_head), allowed


def as_array(value: object, name: str = "a weight") -> Array:
    """Keep None and make an array native; lists and numbers become float64."""
    value = check_arrays(value, name, tensors=True)
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
        if weight is not None and tuple(weight.shape) != shape:
            raise ShapeError(f"{name} of shape {tuple(weight.shape)}: {shape} would fit the other weights")
        if weight is not None and kind(weight) != "f":
            raise ShapeError(f"{name} of dtype {weight.dtype}: give real floating-point weights")


def check_axes(name: str, weight: Array, axes: str) -> tuple[int, ...]:
    """Return the shape of a weight that must have the axes named, e.g. "(H, d, N)", none of them empty."""
    if weight is None or weight.ndim != axes.count(",") + 1 or 0 in weight.shape:
        found = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
        raise ShapeError(f"{name} {found}: expected {axes}, every axis at least 1")
    return tuple(weight.shape)


def keep_arrays(layer: Layer) -> None:
    """Make the weights of a new layer native arrays."""
    for name in leaf_names(layer):
        object.__setattr__(layer, name, as_array(getattr(layer, name)))


def per_head(x: Array, weight: Array, bias: Array | None) -> Array:
    """Multiply tokens (..., k, d) by (H, d, n), all in one product, and add (H, n) or nothing: (..., H, k, n)."""
    heads, dim, size = weight.shape
    flat = x.reshape(-1, dim) @ weight.swapaxes(0, 1).reshape(dim, heads * size)
    y = flat.reshape(*x.shape[:-1], heads, size).swapaxes(-2, -3)
    return y if bias is None else y + bias[:, None, :]


def over_heads(x: Array, weight: Array) -> Array:
    """Sum over heads of x (..., H, k, n) times weight (H, n, d), all tokens in one product: (..., k, d)."""
    flat = weight.reshape(-1, weight.shape[-1])
    product = x.swapaxes(-2, -3).reshape(-1, len(flat)) @ flat
    return product.reshape(*x.shape[:-3], x.shape[-2], weight.shape[-1])

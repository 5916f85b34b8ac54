"""The finite transformer: heads and key dimension as axes of their own, scales as data."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Num
from numpy.typing import DTypeLike

from manyheads._arrays import follows_caller
from manyheads.attention import causal, masked_softmax
from manyheads.errors import ShapeError
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import TokenInput, embed
from manyheads.transformer.scaling import Number, Scaling
from manyheads.transformer.weights import Blocks, Weights, draw_weights

ACTIVATIONS = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "relu": jax.nn.relu,
    "erf": jax.scipy.special.erf,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "identity": lambda z: z,
}


class LayerRecord(NamedTuple):
    """Activations of one block; in `Record.layers` every array has the depth L in front."""

    stream: jax.Array  # (..., T, d) after the block
    queries: jax.Array  # (..., H, T, N)
    keys: jax.Array  # (..., H, T, N)
    values: jax.Array  # (..., H, T, N)
    attention: jax.Array  # (..., T, d) the branch, before the branch multiplier
    hidden: jax.Array | None  # (..., T, r d) after the activation
    mlp: jax.Array | None  # (..., T, d) the branch, before the branch multiplier
    patterns: jax.Array | None  # (..., H, T, T) rows sum to one


class Record(NamedTuple):
    """A forward pass with its internals: logits are `logit` times query dot key."""

    outputs: jax.Array  # as the transformer returns them
    start: jax.Array  # (..., T, d) the stream below the first block
    layers: LayerRecord
    logit: jax.Array  # ()


class Transformer(eqx.Module):
    """A transformer: trained weights, scales, and the configuration that gives them meaning.

    `transformer(x)` computes the formula of `TransformerConfig` in the precision of its weights; NumPy weights and
    input run in double precision and return NumPy. The blocks run by `lax.scan`, so compile time does not grow with
    depth. Only `weights` are trained: gradients are taken with respect to them, never to `scaling`.

    Examples
    --------
    >>> from manyheads.transformer.inputs import TokenInput
    >>> from manyheads.transformer.scaling import Shape, standard_scaling
    >>> config = TransformerConfig(Shape(4, 2, 2), TokenInput(10), length=6, outputs=10, causal=True, read_out="token")
    >>> model = initialize(config, standard_scaling(config.shape, config.inputs), jax.random.key(0))
    >>> model(jnp.zeros((3, 6), int)).shape, model.record(jnp.zeros((3, 6), int)).layers.queries.shape
    ((3, 6, 10), (2, 3, 2, 6, 4))
    """

    weights: Weights  # the trained arrays
    scaling: Scaling  # standard deviations at init and forward multipliers, numbers or traced scalars
    config: TransformerConfig = eqx.field(static=True)

    @follows_caller
    def __call__(
        self, x: "Num[ArrayLike, '... tokens *dim']", padding_mask: "Bool[ArrayLike, '... tokens'] | None" = None
    ) -> "Float[Array, '... outputs']":
        """Compute the outputs.

        Raises `ShapeError`: `x` does not fit the configuration, or `padding_mask` does not fit `x` or is not boolean.

        Parameters
        ----------
        x
            (..., T) integers for tokens, (..., T, dim) for patches and vectors; T at most the configured length.
        padding_mask
            (..., T) booleans, True where there is a token and False on padding, on either side; `None` for no padding.
            No token attends to padding, `"mean"` pools the tokens and `"last"` takes the last one. A token
            keeps the place at which it stands: learned positions count from the left, padding included.

        Returns
        -------
        Array
            (..., outputs), or (..., T, outputs) with the read-out `"token"`.
        """
        return _run(self, x, padding_mask)

    @follows_caller
    def record(
        self,
        x: "Num[ArrayLike, '... tokens *dim']",
        patterns: bool = False,
        padding_mask: "Bool[ArrayLike, '... tokens'] | None" = None,
    ) -> Record:
        """Compute the outputs and keep what every block computed, with `patterns` L H T^2 numbers a sequence too.

        What is recorded at padding means nothing.
        """
        return _run(self, x, padding_mask, "patterns" if patterns else "layers")

    def _start(self, x: jax.Array, scaling: Scaling) -> jax.Array:
        table, positional = self.weights.embedding, self.weights.positional
        if not isinstance(self.config.inputs, TokenInput):
            x = x.astype(self.weights.unembedding.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        stream = embed(x, self.config.inputs, table)
        stream = stream if table is None else scaling.multiplier["embedding"] * stream
        if positional is None:
            return stream
        tokens = stream.shape[-2]
        if tokens > self.config.length:
            raise ShapeError(f"{tokens} tokens: learned positions end at length={self.config.length}")
        return stream + scaling.multiplier["positional"] * positional[:tokens]

    def _block(
        self, stream: jax.Array, block: Blocks, scaling: Scaling, padding_mask: jax.Array | None
    ) -> tuple[LayerRecord, jax.Array]:
        config, multiplier = self.config, scaling.multiplier

        def norm(place: str, stream: jax.Array, part: str) -> jax.Array:
            if config.norm != place:
                return stream
            gain, shift = (_scale(getattr(block, f"{part}_{what}"), multiplier["norm"]) for what in ("gain", "shift"))
            return normalize(stream, gain, shift, config)

        layer, pattern = _attend(norm("pre", stream, "attention"), block, scaling, config, padding_mask)
        stream = norm("post", stream + scaling.branch * layer.attention, "attention")
        if block.mlp_in is None:
            return layer._replace(stream=stream), pattern
        hidden = multiplier["mlp_in"] * (norm("pre", stream, "mlp") @ block.mlp_in)  # (..., T, r d)
        hidden = ACTIVATIONS[config.activation](_shift(hidden, block.mlp_in_bias, multiplier["bias"]))
        mlp = _shift(multiplier["mlp_out"] * (hidden @ block.mlp_out), block.mlp_out_bias, multiplier["bias"])
        stream = norm("post", stream + scaling.branch * mlp, "mlp")
        return layer._replace(stream=stream, hidden=hidden, mlp=mlp), pattern

    def _read_out(self, stream: jax.Array, scaling: Scaling, padding_mask: jax.Array | None) -> jax.Array:
        weights, config = self.weights, self.config
        if config.norm == "pre":
            factor = scaling.multiplier["final_norm"]
            stream = normalize(stream, _scale(weights.final_gain, factor), _scale(weights.final_shift, factor), config)
        if config.read_out == "mean":
            stream = stream.mean(-2) if padding_mask is None else _mean_of_tokens(stream, padding_mask)  # (..., d)
        elif config.read_out == "last":
            stream = stream[..., -1, :] if padding_mask is None else _last_token(stream, padding_mask)
        outputs = scaling.multiplier["unembedding"] * (stream @ weights.unembedding)
        outputs = _shift(outputs, weights.unembedding_bias, scaling.multiplier["unembedding_bias"])
        return scaling.output * outputs


def initialize(
    config: TransformerConfig, scaling: Scaling, key: jax.Array, dtype: "DTypeLike" = jnp.float32
) -> Transformer:
    """Make a transformer with fresh weights; a pure function, so that it can be mapped over keys and scalings.

    `UsageError` if `dtype` is float64 and JAX has it switched off.
    """
    return Transformer(draw_weights(config, scaling, key, dtype), scaling, config)


def normalize(
    stream: jax.Array, gain: jax.Array | None, shift: jax.Array | None, config: TransformerConfig
) -> jax.Array:
    r"""Normalize over the width: :math:`(x-\bar x)/\sqrt{\mathrm{var}(x)+\epsilon}`, or without the mean (RMS)."""
    if config.centred:
        stream = stream - stream.mean(-1, keepdims=True)
    stream = stream * jax.lax.rsqrt(jnp.square(stream).mean(-1, keepdims=True) + config.epsilon)
    stream = stream if gain is None else stream * gain
    return stream if shift is None else stream + shift


# Compiled where they are called eagerly, so that a second call costs no compilation (an eager scan is compiled anew at
# each call); inlined under a caller's trace.
@functools.partial(jax.jit, inline=True, static_argnums=3)
def _run(model: Transformer, x: jax.Array, padding_mask: jax.Array | None, kept: str = "outputs") -> Any:
    """Return the outputs, or a `Record` with "layers" or their "patterns" too."""
    dtype = model.weights.unembedding.dtype  # cast once: a float64 scalar must not lift float32 weights
    scaling = jax.tree.map(lambda number: jnp.asarray(number, dtype), model.scaling)
    padding_mask = _check_padding(padding_mask, x, model.config)
    start = model._start(x, scaling)

    def step(stream: jax.Array, block: Blocks) -> tuple[jax.Array, Any]:
        layer, pattern = model._block(stream, block, scaling, padding_mask)
        record = layer._replace(patterns=pattern if kept == "patterns" else None)
        return layer.stream, None if kept == "outputs" else record

    stream, layers = jax.lax.scan(step, start, model.weights.blocks)
    outputs = model._read_out(stream, scaling, padding_mask)
    if kept == "outputs":
        return outputs
    return Record(outputs, start, layers, jnp.asarray(scaling.logit(model.config.shape.key_dim)))


def _attend(
    z: jax.Array, block: Blocks, scaling: Scaling, config: TransformerConfig, padding_mask: jax.Array | None
) -> tuple[LayerRecord, jax.Array]:
    multiplier = scaling.multiplier

    def project(role: str, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        projected = multiplier[role] * jnp.einsum("...td,hdn->...htn", z, weight)
        factor = multiplier["bias" if role == "value" else "logit_bias"]
        return projected if bias is None else projected + factor * bias[:, None, :]

    queries = project("query", block.query, block.query_bias)  # (..., H, T, N)
    keys = project("key", block.key, block.key_bias)
    values = project("value", block.value, block.value_bias)
    scale = scaling.logit(config.shape.key_dim)
    logits = jnp.einsum("...qn,...kn->...qk", scale * queries, keys)  # (..., H, T, T)
    earlier = causal.allowed(None, (logits.shape[-2], logits.shape[-1])) if config.causal else True
    if padding_mask is not None:
        # Padding in front of a causal sequence sees nothing: a row without any key, which attends to nothing.
        pattern = masked_softmax(logits, earlier & padding_mask[..., None, None, :])
    else:
        # Every row keeps its own position, so the plain softmax never meets an empty row.
        logits = jnp.where(earlier, logits, -jnp.inf) if config.causal else logits
        pattern = jax.nn.softmax(logits, axis=-1)
    mixed = jnp.einsum("...qk,...kn->...qn", pattern, values)  # (..., H, T, N)
    attention = multiplier["output"] * jnp.einsum("...htn,hnd->...td", mixed, block.output)
    attention = _shift(attention, block.output_bias, multiplier["bias"])
    return LayerRecord(z, queries, keys, values, attention, None, None, None), pattern


def _check_padding(padding_mask: jax.Array | None, x: jax.Array, config: TransformerConfig) -> jax.Array | None:
    if padding_mask is None:
        return None
    padding_mask = jnp.asarray(padding_mask)
    tokens = x.shape if isinstance(config.inputs, TokenInput) else x.shape[:-1]
    if padding_mask.dtype != jnp.bool_ or padding_mask.shape != tokens:
        given = f"padding_mask of shape {padding_mask.shape} and type {padding_mask.dtype}"
        raise ShapeError(f"{given}: give booleans of shape {tokens}, True where there is a token")
    return padding_mask


def _mean_of_tokens(stream: jax.Array, padding_mask: jax.Array) -> jax.Array:
    count = jnp.maximum(padding_mask.sum(-1, keepdims=True), 1).astype(stream.dtype)
    return jnp.where(padding_mask[..., None], stream, 0).sum(-2) / count


def _last_token(stream: jax.Array, padding_mask: jax.Array) -> jax.Array:
    last = padding_mask.shape[-1] - 1 - jnp.argmax(padding_mask[..., ::-1], axis=-1)  # (...)
    return jnp.take_along_axis(stream, last[..., None, None], axis=-2)[..., 0, :]


def _scale(array: jax.Array | None, factor: Number) -> jax.Array | None:
    return None if array is None else factor * array


def _shift(array: jax.Array, bias: jax.Array | None, factor: Number) -> jax.Array:
    return array if bias is None else array + factor * bias

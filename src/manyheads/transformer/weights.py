"""Weights of a transformer, their roles and their initialization."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from manyheads._trees import PyTree
from manyheads.data.draws import draw_vectors
from manyheads.errors import UsageError
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import VectorInput
from manyheads.transformer.scaling import ROLE_OF, Scaling

Optional = jax.Array | None


class Blocks(NamedTuple):
    """Weights of all blocks, stacked along depth L; `None` where the configuration leaves a part out."""

    query: jax.Array  # (L, H, d, N)
    key: jax.Array  # (L, H, d, N)
    value: jax.Array  # (L, H, d, N)
    output: jax.Array  # (L, H, N, d)
    mlp_in: Optional = None  # (L, d, r d)
    mlp_out: Optional = None  # (L, r d, d)
    attention_gain: Optional = None  # (L, d)
    attention_shift: Optional = None  # (L, d)
    mlp_gain: Optional = None  # (L, d)
    mlp_shift: Optional = None  # (L, d)
    query_bias: Optional = None  # (L, H, N)
    key_bias: Optional = None  # (L, H, N)
    value_bias: Optional = None  # (L, H, N)
    output_bias: Optional = None  # (L, d)
    mlp_in_bias: Optional = None  # (L, r d)
    mlp_out_bias: Optional = None  # (L, d)


class Weights(NamedTuple):
    """All trained arrays of a transformer."""

    blocks: Blocks
    unembedding: jax.Array  # (d, outputs)
    embedding: Optional = None  # (vocabulary, d) or (dim, d)
    positional: Optional = None  # (length, d)
    final_gain: Optional = None  # (d,)
    final_shift: Optional = None  # (d,)
    unembedding_bias: Optional = None  # (outputs,)


CONSTANT = ("gain", "shift", "bias")  # endings of the names of arrays that do not start at random


def roles(weights: Weights) -> PyTree:
    """Replace every array by the name of its role, as `optax.partition` wants its labels."""
    return jax.tree_util.tree_map_with_path(lambda path, _: ROLE_OF[path[-1].name], weights)


def shapes(config: TransformerConfig) -> PyTree:
    """Give the shape of every array of a configuration, a tuple in its place in `Weights`, without making one."""
    n, h, depth, d = config.shape.key_dim, config.shape.heads, config.shape.depth, config.shape.width
    hidden, gains = config.hidden, config.gains and config.norm != "none"
    sizes = {
        **dict.fromkeys(("query", "key", "value"), (depth, h, d, n)),
        "output": (depth, h, n, d),
        "mlp_in": (depth, d, hidden),
        "mlp_out": (depth, hidden, d),
        "mlp_in_bias": (depth, hidden),
        **dict.fromkeys(("attention_gain", "attention_shift", "mlp_gain", "mlp_shift"), (depth, d)),
        **dict.fromkeys(("query_bias", "key_bias", "value_bias"), (depth, h, n)),
        **dict.fromkeys(("output_bias", "mlp_out_bias"), (depth, d)),
        "embedding": (config.inputs.rows, d),
        "positional": (config.length, d),
        "unembedding": (d, config.outputs),
        "final_gain": (d,),
        "final_shift": (d,),
        "unembedding_bias": (config.outputs,),
    }
    absent = {"mlp": not hidden, "final": config.norm != "pre", "positional": config.positions != "learned"}
    absent |= {"embedding": isinstance(config.inputs, VectorInput)}
    beginnings = tuple(name for name, holds in absent.items() if holds)
    endings = (*(() if config.biases else ("bias", "shift")), *(() if gains else ("gain", "shift")))
    kept: PyTree = {
        name: None if name.startswith(beginnings) or name.endswith(endings) else shape for name, shape in sizes.items()
    }
    blocks = Blocks(**{name: kept.pop(name) for name in Blocks._fields})
    return Weights(blocks, **kept)


def draw_weights(
    config: TransformerConfig, scaling: Scaling, key: jax.Array, dtype: "DTypeLike" = jnp.float32
) -> Weights:
    """Draw all weights: Gaussian with the role's standard deviation, gains at the role's number, shifts at zero.

    Every array has a stream of its own (the key folded with its place in `Weights`), so that two configurations that
    differ in one part agree in the others.
    """
    dtype = np.dtype(dtype)
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise UsageError(f"weights in {dtype} while JAX computes in 32 bits: enter `jax.enable_x64(True)` first")
    return _draw(config, scaling, key, dtype)


# Compiled as a whole: one program a configuration instead of one for each shape of an array.
@functools.partial(jax.jit, inline=True, static_argnums=(0, 3))
def _draw(config: TransformerConfig, scaling: Scaling, key: jax.Array, dtype: np.dtype) -> Weights:
    places = {name: place for place, name in enumerate(ROLE_OF)}
    wanted = shapes(config)
    random = {
        path[-1].name: math.prod(shape)
        for path, shape in jax.tree_util.tree_leaves_with_path(wanted, is_leaf=_is_shape)
        if not path[-1].name.endswith(CONSTANT)
    }
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array([places[name] for name in random]))
    drawn = dict(zip(random, draw_vectors(jax.random.normal, keys, tuple(random.values()), dtype), strict=True))

    def start(path: jax.tree_util.KeyPath, shape: tuple[int, ...]) -> jax.Array:
        name = path[-1].name
        level = jnp.asarray(scaling.initial[ROLE_OF[name]], dtype)
        if name.endswith("gain"):
            return jnp.full(shape, level, dtype)
        return jnp.zeros(shape, dtype) if name.endswith(CONSTANT) else level * drawn[name].reshape(shape)

    return jax.tree_util.tree_map_with_path(start, wanted, is_leaf=_is_shape)


def _is_shape(node: object) -> bool:
    return type(node) is tuple

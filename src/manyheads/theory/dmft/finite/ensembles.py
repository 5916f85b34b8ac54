"""Networks of finite size in the setting of the limits: many seeds at once, in the same normalization as the theory.

All weights are of order one and every sum carries its 1/sqrt(width): stream d = N H, logits q . k / N^alpha_A, branches
times beta0 L^-alpha_L, outputs divided by gamma0 d and centred at the start. Learning rates are eta gamma0^2 d for the
embedding and the read-out, times L^(2 alpha_L - 1) inside branches and N^(2 alpha_A - 2) for queries and keys. All
seeds are trained in one program (Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712, in the form derived here).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array

from manyheads._constraints import Constrained, Constraint, constrained
from manyheads._settings import double_precision
from manyheads._trees import PyTree
from manyheads.data.draws import draw_vectors
from manyheads.errors import UsageError, check_integer
from manyheads.theory.dmft.branches.attention_infinite_heads import LOGIT_EXPONENT
from manyheads.theory.dmft.dataset import VARIABLES
from manyheads.theory.dmft.problem import Problem
from manyheads.transformer.transformer import ACTIVATIONS


@dataclass(frozen=True)
class Network(Constrained):
    """The size of a network: key dimension N, heads H, and what its blocks are made of.

    Attributes
    ----------
    key_dim, heads
        N and H; the width is their product.
    logit_exponent
        alpha_A.
    activation
        Of an MLP of hidden width d after every attention; None for none.
    """

    key_dim: int = constrained(rule=Constraint(least=1))
    heads: int = constrained(rule=Constraint(least=1))
    logit_exponent: float = constrained(1.0, LOGIT_EXPONENT)
    activation: str | None = constrained(None, Constraint(choices=tuple(ACTIVATIONS)))

    @property
    def width(self) -> int:
        """Width d = N H of the stream."""
        return self.key_dim * self.heads


def train_networks(
    problem: Problem,
    network: Network,
    seeds: Sequence[int],
    *,
    chunk: int = 16,
    every_head: bool = False,
    movement: bool = False,
) -> xr.Dataset:
    """Train one network a seed on a problem, from independent weights, and keep what the limits predict.

    Parameters
    ----------
    chunk
        Seeds that are trained at once.
    every_head
        Whether the logits of single heads are kept, too: `head_logits` (layer, sample, head, token, key).
    movement
        Whether the relative distances of the attention matrices from their init are kept, too: `movement` (matrix),
        ratios of Frobenius norms of all blocks together.

    Returns
    -------
    Dataset over (seed, step, ...): `output` (read_out, class), `loss`, `logits` and `attention` (layer, sample, token,
    key) averaged over heads, `logit_variance` (layer) over heads, averaged over pairs of tokens, `stream` and
    `backward` (level, row, row_too), kernels at equal times of the stream and of the backward variable
    -gamma0 d dloss/dh, level 0 below the first branch, and `pooled` (read_out, read_out_too) of the read-outs. Networks
    that diverge are in it, with what is not finite.

    Raises
    ------
    UsageError
        No seeds, or seeds or a chunk that are no integers.
    """
    seeds = list(seeds)
    if not seeds:
        raise UsageError("no seeds: give one or more")
    seeds, chunk = [check_integer("seed", seed, 0) for seed in seeds], check_integer("chunk", chunk)
    with double_precision():
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        frame = _Frame(*(getattr(problem, name) for name in _Frame._fields))
        run = _trainer(frame, network, every_head, movement)
        data = tuple(jnp.asarray(part) for part in (problem.inputs, problem.flat_targets, problem.loss_weights))
        numbers = {name: jnp.asarray(value) for name, value in _numbers(problem, network).items()}
        pieces = [run(keys[start : start + chunk], *data, numbers) for start in range(0, len(seeds), chunk)]
    joined = [np.concatenate([np.asarray(piece[place]) for piece in pieces]) for place in range(len(pieces[0]))]
    same = ("output", "loss", "logits", "logit_variance", "attention", "stream", "pooled", "head_logits", "backward")
    own = {"logit_variance": ("layer",), "head_logits": ("layer", "sample", "head", "token", "key")}
    dims = {name: own.get(name) or VARIABLES[name][0] for name in same if every_head or name != "head_logits"}
    if movement:
        dims["movement"] = ("matrix",)
    variables = {
        name: (("seed", "step", *rest), value) for (name, rest), value in zip(dims.items(), joined, strict=True)
    }
    coords: dict[str, Any] = {"seed": list(seeds), "step": np.arange(problem.steps)}
    return xr.Dataset(variables, coords=coords | ({"matrix": list(MATRICES)} if movement else {}))


class _Frame(NamedTuple):
    """Static part of a problem, compiled in; its arrays and `_numbers` are not."""

    steps: int
    depth: int
    loss: str
    read_out: str
    causal: bool
    norm: bool


def _numbers(problem: Problem, network: Network) -> dict[str, float]:
    """Return what richness, rates and exponents come to at this size."""
    depth = float(problem.depth)
    outside = problem.learning_rate * problem.richness**2 * network.width
    inside = outside * depth ** (2 * problem.depth_exponent - 1)
    return {
        "outside": outside,
        "embedding": outside if problem.embedding else 0.0,
        "inside": inside,
        "attended": inside * network.key_dim ** (2 * network.logit_exponent - 2),  # queries and keys
        "branch": problem.branch * depth**-problem.depth_exponent,
        "richness": problem.richness,
        "momentum": problem.momentum,
    }


_RATES = {"readout": "outside", "embedding": "embedding", "query": "attended", "key": "attended"}  # others: inside


@lru_cache(maxsize=32)
def _trainer(frame: _Frame, network: Network, every_head: bool, movement: bool) -> Callable[..., tuple[Array, ...]]:
    """Return a compiled function of keys, inputs, targets, weights in the loss, and numbers."""

    def train(key: Array, inputs: Array, targets: Array, shares: Array, numbers: dict[str, Array]) -> tuple[Array, ...]:
        weights = _draw(key, inputs.shape[-1], targets.shape[-1], frame, network)
        count = frame.depth * (1 if network.activation is None else 2) + 1
        levels = jnp.zeros((count, *inputs.shape[:2], network.width), inputs.dtype)
        start = _apply(weights, levels, inputs, numbers, frame, network)[0]
        learning_rates = {name: numbers[_RATES.get(name, "inside")] for name in weights}

        def loss(weights: dict[str, Array], levels: Array, share: Array) -> tuple[Array, tuple[Array, ...]]:
            output, seen = _apply(weights, levels, inputs, numbers, frame, network)
            output = output - start
            total = jnp.sum(share * _LOSSES[frame.loss](targets, output))
            return total, (output, total, *seen)

        def step(state: PyTree, share: Array) -> tuple[PyTree, tuple[Array, ...]]:
            weights, velocity = state
            (gradient, slopes), seen = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, levels, share)
            velocity = jax.tree.map(lambda old, new: numbers["momentum"] * old + new, velocity, gradient)
            moved = {name: weight - learning_rates[name] * velocity[name] for name, weight in weights.items()}
            back = -numbers["richness"] * network.width * slopes  # (level, P, T, d)
            seen = seen if every_head else seen[:-1]
            return (moved, velocity), (*seen, jax.vmap(_kernel)(back), *_distances(weights, first))

        first = {name: weights[name] for name in MATRICES} if movement else {}
        still = jax.tree.map(jnp.zeros_like, weights)
        return jax.lax.scan(step, (weights, still), shares)[1]

    return jax.jit(jax.vmap(train, in_axes=(0, None, None, None, None)))


MATRICES = ("query", "key", "value", "output")
"""Matrices of attention."""


def _distances(weights: dict[str, Array], first: dict[str, Array]) -> tuple[Array, ...]:
    """Relative distances |W - W_0| / |W_0| in Frobenius norms, (matrix,); nothing where no init is given."""
    ratios = [
        jnp.linalg.norm((weights[name] - old).ravel()) / jnp.linalg.norm(old.ravel()) for name, old in first.items()
    ]
    return (jnp.stack(ratios),) if ratios else ()


_LOSSES = {
    "squared": lambda target, output: jnp.sum((target - output) ** 2, -1) / 2,
    "cross-entropy": lambda target, output: jax.nn.logsumexp(output, axis=-1) - jnp.sum(target * output, -1),
}


def _draw(key: Array, features: int, classes: int, frame: _Frame, network: Network) -> dict[str, Array]:
    depth, heads, key_dim, width = frame.depth, network.heads, network.key_dim, network.width
    shapes: dict[str, tuple[int, ...]] = {"embedding": (width, features), "readout": (classes, width)}
    shapes |= dict.fromkeys(("query", "key", "value"), (depth, heads, key_dim, width))
    shapes["output"] = (depth, width, heads, key_dim)
    if network.activation is not None:
        shapes |= {"mlp_in": (depth, width, width), "mlp_out": (depth, width, width)}
    keys = jax.random.split(key, 8)
    drawn = draw_vectors(jax.random.normal, keys[: len(shapes)], [math.prod(shape) for shape in shapes.values()])
    return {name: vector.reshape(shape) for (name, shape), vector in zip(shapes.items(), drawn, strict=True)}


def _kernel(stream: Array) -> Array:
    """Products of all tokens (PT, PT) of a stream (P, T, d), over its width."""
    flat = stream.reshape(-1, stream.shape[-1])
    return flat @ flat.T / flat.shape[1]


def _apply(
    weights: dict[str, Array], levels: Array, inputs: Array, numbers: dict[str, Array], frame: _Frame, network: Network
) -> tuple[Array, tuple[Array, ...]]:
    """Return outputs (O, C), not centred, and what is recorded.

    `levels` (1 + branches of all blocks, P, T, d) are added to the stream, below the first branch and after each.
    """
    width, branch = network.width, numbers["branch"]
    rows, tokens = inputs.shape[0] * inputs.shape[1], inputs.shape[1]
    allowed = jnp.tril(jnp.ones((tokens, tokens), bool)) if frame.causal else jnp.ones((tokens, tokens), bool)

    def normalize(stream: Array) -> Array:
        return stream / jnp.sqrt(jnp.mean(stream**2, -1, keepdims=True)) if frame.norm else stream

    def block(stream: Array, layer: PyTree) -> PyTree:
        weight, added = layer
        seen = normalize(stream) / np.sqrt(width)
        query, key, value = (jnp.einsum("hnd,ptd->phtn", weight[name], seen) for name in ("query", "key", "value"))
        logits = jnp.einsum("phan,phbn->phab", query, key) / network.key_dim**network.logit_exponent
        pattern = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), -1)
        read = jnp.einsum("phab,phbn->phan", pattern, value)
        after = stream + branch / np.sqrt(width) * jnp.einsum("dhn,phan->pad", weight["output"], read) + added[0]
        kernels = [_kernel(stream)]
        if network.activation is not None:
            kernels.append(_kernel(after))
            hidden = ACTIVATIONS[network.activation](
                jnp.einsum("ed,ptd->pte", weight["mlp_in"], normalize(after) / np.sqrt(width))
            )
            after = after + branch / np.sqrt(width) * jnp.einsum("de,pte->ptd", weight["mlp_out"], hidden) + added[1]
        return after, (logits.mean(1), logits.var(1).mean(), pattern.mean(1), jnp.stack(kernels), logits)

    stream = jnp.einsum("dx,ptx->ptd", weights["embedding"], inputs) / np.sqrt(inputs.shape[-1]) + levels[0]
    inside = {name: weight for name, weight in weights.items() if name not in ("embedding", "readout")}
    added = levels[1:].reshape(frame.depth, -1, *levels.shape[1:])  # (L, branches of a block, P, T, d)
    stream, (logits, variance, pattern, kernels, heads) = jax.lax.scan(block, stream, (inside, added))
    final = normalize(stream)
    read = final.reshape(rows, width) if frame.read_out == "token" else final.mean(1)
    output = read @ weights["readout"].T / (numbers["richness"] * width)
    levels = jnp.concatenate([kernels.reshape(-1, rows, rows), _kernel(stream)[None]])
    return output, (logits, variance, pattern, levels, read @ read.T / width, heads)

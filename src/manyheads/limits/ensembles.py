"""Networks of finite size in the setting of the limits: many seeds at once, in the same normalisation as the theory.

All weights are of order one and every sum carries its 1/sqrt(width): stream d = N H, logits q . k / N^alpha_A, branches
times beta0 L^-alpha_L, outputs divided by gamma0 d and centred at the start. Learning rates are eta gamma0^2 d for the
embedding and the read-out, times L^(2 alpha_L - 1) inside branches and N^(2 alpha_A - 2) for queries and keys. All
seeds are trained in one program (Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712, in the form derived here).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.attention.transformer import ACTIVATIONS
from manyheads.errors import UsageError
from manyheads.limits.theory.problem import Problem


@dataclass(frozen=True)
class Network:
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

    key_dim: int
    heads: int
    logit_exponent: float = 1.0
    activation: str | None = None

    def __post_init__(self) -> None:
        if min(self.key_dim, self.heads) < 1:
            raise UsageError(f"key_dim={self.key_dim}, heads={self.heads}: at least 1")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise UsageError(f"activation={self.activation!r}: choose from {', '.join(map(repr, ACTIVATIONS))}")

    @property
    def width(self) -> int:
        """Width d = N H of the stream."""
        return self.key_dim * self.heads


def train_networks(problem: Problem, network: Network, seeds: Sequence[int], *, chunk: int = 16) -> xr.Dataset:
    """Train one network a seed on a problem, from independent weights, and keep what the limits predict.

    Parameters
    ----------
    problem
        What is trained, and how.
    network
        The size.
    seeds
        Seeds of the initial weights.
    chunk
        Seeds that are trained at once.

    Returns
    -------
    Dataset over (seed, step, ...): `output` (read_out, class), `loss`, `logits` (layer, sample, token, key) averaged
    over heads, `logit_variance` (layer) over heads, `stream` (level, row, row_too) kernels of the stream at equal
    times, and `pooled` (read_out, read_out_too) of the read-outs.
    """
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    with jax.enable_x64(True):
        run = _trainer(_Frame.of(problem), network)
        data = tuple(jnp.asarray(part) for part in (problem.inputs, problem.wanted, problem.shares))
        pieces = [run(keys[start : start + chunk], *data) for start in range(0, len(seeds), chunk)]
    joined = [np.concatenate([np.asarray(piece[place]) for piece in pieces]) for place in range(len(pieces[0]))]
    dims = {
        "output": ("read_out", "class"),
        "loss": (),
        "logits": ("layer", "sample", "token", "key"),
        "logit_variance": ("layer",),
        "stream": ("level", "row", "row_too"),
        "pooled": ("read_out", "read_out_too"),
    }
    variables = {
        name: (("seed", "step", *rest), value) for (name, rest), value in zip(dims.items(), joined, strict=True)
    }
    return xr.Dataset(variables, coords={"seed": list(seeds), "step": np.arange(problem.steps)})


@dataclass(frozen=True)
class _Frame:
    """What of a problem is compiled in; the numbers of its arrays are not."""

    steps: int
    rate: float
    richness: float
    depth: int
    branch: float
    depth_exponent: float
    loss: str
    read_out: str
    causal: bool
    norm: bool
    embedding: bool
    momentum: float

    @staticmethod
    def of(problem: Problem) -> "_Frame":
        return _Frame(**{name: getattr(problem, name) for name in _Frame.__dataclass_fields__})


@lru_cache(maxsize=32)
def _trainer(frame: _Frame, network: Network) -> Any:
    """Return a compiled function of keys, inputs, targets and weights in the loss."""

    def train(key: Any, inputs: Any, targets: Any, shares: Any) -> Any:
        weights = _draw(key, inputs.shape[-1], targets.shape[-1], frame, network)
        start = _apply(weights, inputs, frame, network)[0]
        rates = _rates(frame, network, weights)

        def loss(weights: Any, share: Any) -> Any:
            output, seen = _apply(weights, inputs, frame, network)
            output = output - start
            total = jnp.sum(share * _LOSSES[frame.loss](targets, output))
            return total, (output, total, *seen)

        def step(state: Any, share: Any) -> Any:
            weights, velocity = state
            gradient, seen = jax.grad(loss, has_aux=True)(weights, share)
            velocity = jax.tree.map(lambda old, new: frame.momentum * old + new, velocity, gradient)
            moved = jax.tree.map(lambda weight, rate, change: weight - rate * change, weights, rates, velocity)
            return (moved, velocity), seen

        still = jax.tree.map(jnp.zeros_like, weights)
        return jax.lax.scan(step, (weights, still), shares)[1]

    return jax.jit(jax.vmap(train, in_axes=(0, None, None, None)))


_LOSSES = {
    "squared": lambda target, output: jnp.sum((target - output) ** 2, -1) / 2,
    "cross-entropy": lambda target, output: jax.nn.logsumexp(output, axis=-1) - jnp.sum(target * output, -1),
}


def _draw(key: Any, features: int, classes: int, frame: _Frame, network: Network) -> dict[str, Any]:
    depth, heads, key_dim, width = frame.depth, network.heads, network.key_dim, network.width
    shapes = {
        "embedding": (width, features),
        "readout": (classes, width),
        "query": (depth, heads, key_dim, width),
        "key": (depth, heads, key_dim, width),
        "value": (depth, heads, key_dim, width),
        "output": (depth, width, heads, key_dim),
    }
    if network.activation is not None:
        shapes |= {"mlp_in": (depth, width, width), "mlp_out": (depth, width, width)}
    keys = jax.random.split(key, 8)
    return {name: jax.random.normal(keys[place], shape) for place, (name, shape) in enumerate(shapes.items())}


def _rates(frame: _Frame, network: Network, weights: dict[str, Any]) -> dict[str, float]:
    outside = frame.rate * frame.richness**2 * network.width
    inside = outside * frame.depth ** (2 * frame.depth_exponent - 1)
    rates = dict.fromkeys(weights, inside)
    for name in ("query", "key"):
        rates[name] = inside * network.key_dim ** (2 * network.logit_exponent - 2)
    return rates | {"readout": outside, "embedding": outside if frame.embedding else 0.0}


def _apply(weights: dict[str, Any], inputs: Any, frame: _Frame, network: Network) -> Any:
    """Return outputs (O, C), not centred, and what is looked at."""
    width, branch = network.width, frame.branch * float(frame.depth) ** -frame.depth_exponent
    rows = inputs.shape[0] * inputs.shape[1]
    tokens = inputs.shape[1]
    allowed = jnp.tril(jnp.ones((tokens, tokens), bool)) if frame.causal else jnp.ones((tokens, tokens), bool)

    def normalise(stream: Any) -> Any:
        return stream / jnp.sqrt(jnp.mean(stream**2, -1, keepdims=True)) if frame.norm else stream

    def kernel(stream: Any) -> Any:
        flat = stream.reshape(rows, width)
        return flat @ flat.T / width

    def block(stream: Any, weight: Any) -> Any:
        seen = normalise(stream) / np.sqrt(width)
        query, key, value = (jnp.einsum("hnd,ptd->phtn", weight[name], seen) for name in ("query", "key", "value"))
        logits = jnp.einsum("phan,phbn->phab", query, key) / network.key_dim**network.logit_exponent
        pattern = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), -1)
        read = jnp.einsum("phab,phbn->phan", pattern, value)
        after = stream + branch / np.sqrt(width) * jnp.einsum("dhn,phan->pad", weight["output"], read)
        if network.activation is not None:
            hidden = ACTIVATIONS[network.activation](
                jnp.einsum("ed,ptd->pte", weight["mlp_in"], normalise(after) / np.sqrt(width))
            )
            after = after + branch / np.sqrt(width) * jnp.einsum("de,pte->ptd", weight["mlp_out"], hidden)
        return after, (logits.mean(1), logits.var(1).mean(), kernel(stream))

    stream = jnp.einsum("dx,ptx->ptd", weights["embedding"], inputs) / np.sqrt(inputs.shape[-1])
    inside = {name: weight for name, weight in weights.items() if name not in ("embedding", "readout")}
    stream, (logits, variance, kernels) = jax.lax.scan(block, stream, inside)
    final = normalise(stream)
    read = final.reshape(rows, width) if frame.read_out == "token" else final.mean(1)
    output = read @ weights["readout"].T / (frame.richness * width)
    levels = jnp.concatenate([kernels, kernel(stream)[None]])
    return output, (logits, variance, levels, read @ read.T / width)

"""Networks written out with einsum, independently of the package: what the closed forms must agree with."""

import itertools
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

FLOAT = jnp.float32


def array(*shape):
    return jax.ShapeDtypeStruct(shape, FLOAT)


def softmax(scores):
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def core(q, k, v, causal=False):
    """(b, h, n, dk), (b, g, m, dk), (b, g, m, dv) -> (b, h, n, dv), where g divides h."""
    batch, heads, queries, dim = q.shape
    groups, keys = k.shape[1], k.shape[2]
    q = q.reshape(batch, groups, heads // groups, queries, dim)
    scores = jnp.einsum("bgrnd,bgmd->bgrnm", q, k) * dim**-0.5
    if causal:
        scores = jnp.where(jnp.tri(queries, keys, keys - queries, dtype=bool), scores, -1e30)
    mixed = jnp.einsum("bgrnm,bgme->bgrne", softmax(scores), v)
    return mixed.reshape(batch, heads, queries, v.shape[-1])


def core_by_rows(q, k, v, window=0):
    """The same, causal, computing only the pairs that are not masked."""
    queries, keys = q.shape[2], k.shape[2]
    rows = []
    for i in range(queries):
        stop = keys - queries + i + 1
        start = max(0, stop - window) if window else 0
        seen, values = k[:, :, start:stop], v[:, :, start:stop]
        weights = softmax(jnp.einsum("bhd,bhmd->bhm", q[:, :, i], seen))
        rows.append(jnp.einsum("bhm,bhme->bhe", weights, values))
    return jnp.stack(rows, 2)


def block_weights(width, heads, kv_heads, head_dim, hidden, gated=False):
    weights = {
        "q": array(width, heads * head_dim),
        "k": array(width, kv_heads * head_dim),
        "v": array(width, kv_heads * head_dim),
        "o": array(heads * head_dim, width),
        "in": array(width, hidden),
        "out": array(hidden, width),
    }
    return {**weights, "gate": array(width, hidden)} if gated else weights


def stacked(weights, layers):
    return jax.tree.map(lambda leaf: array(layers, *leaf.shape), weights)


def split(x, heads):
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def joined(x):
    batch, heads, length, dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def mha(w, x, heads, kv_heads, causal):
    q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
    return joined(core(split(q, heads), split(k, kv_heads), split(v, kv_heads), causal)) @ w["o"]


def mlp(w, x):
    inner = jax.nn.silu(x @ w["gate"]) * (x @ w["in"]) if "gate" in w else jax.nn.gelu(x @ w["in"])
    return inner @ w["out"]


def block(w, x, heads, kv_heads, causal):
    x = x + mha(w, norm(x), heads, kv_heads, causal)
    return x + mlp(w, norm(x))


def decode_step(w, x, k_cache, v_cache, heads, kv_heads):
    """One token (b, 1, d) against a cache of T - 1 keys and values (b, g, T - 1, dk)."""
    z = norm(x)
    k = jnp.concatenate([k_cache, split(z @ w["k"], kv_heads)], 2)
    v = jnp.concatenate([v_cache, split(z @ w["v"], kv_heads)], 2)
    x = x + joined(core(split(z @ w["q"], heads), k, v)) @ w["o"]
    return x + mlp(w, norm(x)), k[:, :, -1], v[:, :, -1]


def rnn_weights(inputs, hidden, cell_layers, classes):
    return {
        "x": array(inputs, hidden),
        "h": array(hidden, hidden),
        "deep": [array(hidden, hidden) for _ in range(cell_layers - 1)],
        "bias": [array(hidden) for _ in range(cell_layers)],
        "head": array(hidden, classes),
    }


def rnn(w, xs, unrolled=False):
    """(n, b, d_in) -> (b, C)."""

    def step(h, x):
        h = jnp.tanh(x @ w["x"] + h @ w["h"] + w["bias"][0])
        for deep, bias in zip(w["deep"], w["bias"][1:], strict=True):
            h = jnp.tanh(h @ deep + bias)
        return h, None

    h = jnp.zeros((xs.shape[1], w["h"].shape[0]), xs.dtype)
    if unrolled:
        for x in xs:
            h, _ = step(h, x)
    else:
        h, _ = jax.lax.scan(step, h, xs)
    return h @ w["head"]


def pooled_weights(inputs, hidden, layers, classes):
    widths = [inputs] + [hidden] * layers
    return {
        "layers": [array(a, b) for a, b in pairwise(widths)],
        "bias": [array(hidden) for _ in range(layers)],
        "head": array(hidden, classes),
    }


def pooled(w, x):
    """(b, n, d) -> (b, C)."""
    for weight, bias in zip(w["layers"], w["bias"], strict=True):
        x = jnp.tanh(x @ weight + bias)
    return (x.sum(1) / x.shape[1]) @ w["head"]


def train(fn):
    """Loss (a sum, which costs no product) and its gradient for the first argument."""
    return jax.value_and_grad(lambda w, *rest: fn(w, *rest).sum())


def train_all(fn):
    """The same with gradients for the first two arguments."""
    return jax.value_and_grad(lambda w, x: fn(w, x).sum(), argnums=(0, 1))


def half(*axes):
    """Yield every second row of a full design of two-valued axes: any two axes still meet in all their values.

    Formulas are products of sizes, whose terms the random shapes tell apart; small designs are there for the ones.
    """
    for places in itertools.product((0, 1), repeat=len(axes)):
        if sum(places) % 2 == 0:
            yield tuple(axis[place] for axis, place in zip(axes, places, strict=True))


@pytest.fixture(scope="session")
def reference():
    public = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
    return SimpleNamespace(**public)

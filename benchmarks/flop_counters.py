"""Where PyTorch's FlopCounterMode and XLA's cost_analysis count right, and where they do not: a table in Markdown.

Each row is one computation, counted four ways: the closed form, `manyheads.count` on its JAX program, XLA's
`cost_analysis` of the compiled program, and FlopCounterMode on the same computation in PyTorch. The ratio to the closed
form stands beside each, or "equal" for equal integers. XLA adds elementwise work by design; it goes wrong on loops.

    make bench NAME=flop_counters
"""

import functools
import platform
import time

import jax
import jax.numpy as jnp

from manyheads._extras import require
from manyheads.costs import ModelShape, attention_cost, count, transformer_cost
from manyheads.costs.conventions import Convention
from manyheads.costs.formulas.recurrent import rnn_cost
from manyheads.costs.shapes import AttentionShape, RecurrentShape

B, N, D, H, LAYERS = 2, 64, 48, 4, 12
BLOCK = ModelShape(1, D, H, causal=False)
DEEP = ModelShape(LAYERS, D, H, causal=False)
DENSE = Convention(causal="dense")
FULL_NEEDED = Convention(recompute="block-needed")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def core(q, k, v, causal=False):
    scores = jnp.einsum("bhnd,bhmd->bhnm", q, k) / (q.shape[-1] ** 0.5)
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhnm,bhmd->bhnd", jax.nn.softmax(scores), v)


def split(x):
    return x.reshape(B, -1, H, D // H).swapaxes(1, 2)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(x, w):
    q, k, v = (split(norm(x) @ matrix) for matrix in w["qkv"])
    x = x + core(q, k, v).swapaxes(1, 2).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def weights(*lead):
    return {
        "qkv": [array(*lead, D, D)] * 3,
        "out": array(*lead, D, D),
        "up": array(*lead, D, 4 * D),
        "down": array(*lead, 4 * D, D),
    }


def deep(w, x, remat=False):
    body = jax.checkpoint(block) if remat else block
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0]


def trained(fn):
    return jax.value_and_grad(lambda *args: fn(*args).sum(), argnums=(0, 1))


def rnn(w, u, xs):
    step = lambda h, x: (jnp.tanh(x @ w + h @ u), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros((B, D)), xs)[0]


def matmuls(x):
    return jax.lax.fori_loop(0, 10, lambda _, y: y @ y, x)


def jax_rows():
    """(name, closed form, function, arguments)."""
    qkv = [array(B, H, N, D // H)] * 3
    shape = AttentionShape(N, H, D // H, batch=B)
    causal = AttentionShape(N, H, D // H, batch=B, causal=True)
    x, deep_training = array(B, N, D), transformer_cost(DEEP, N, B, training=True)
    return [
        ("attention core", attention_cost(shape).flops, core, qkv),
        ("attention core, fused", attention_cost(shape).flops, fused_jax, [array(B, N, H, D // H)] * 3),
        (
            "causal core, mask ignored",
            attention_cost(causal, convention=DENSE).flops,
            functools.partial(core, causal=True),
            qkv,
        ),
        ("causal core, exact", attention_cost(causal).flops, functools.partial(core, causal=True), qkv),
        ("block", transformer_cost(BLOCK, N, B).flops, block, [x, weights()]),
        ("block, training", transformer_cost(BLOCK, N, B, training=True).flops, trained(block), [x, weights()]),
        ("12 layers", transformer_cost(DEEP, N, B).flops, deep, [weights(LAYERS), x]),
        ("12 layers, training", deep_training.flops, trained(deep), [weights(LAYERS), x]),
        (
            "12 layers, training, recomputed blocks",
            deep_training.to(FULL_NEEDED).flops,
            trained(functools.partial(deep, remat=True)),
            [weights(LAYERS), x],
        ),
        (
            "recurrent network",
            rnn_cost(RecurrentShape(D, D), N, B).flops,
            rnn,
            [array(D, D), array(D, D), array(N, B, D)],
        ),
        ("10 products in a loop", 10 * 2 * D**3, matmuls, [array(D, D)]),
    ]


def fused_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def torch_rows(torch):
    """Return what PyTorch runs for each row."""
    from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention
    from torch.utils.checkpoint import checkpoint

    def draw(*shape, grad=False):
        return torch.randn(*shape, requires_grad=grad)

    def make(grad):
        return {
            k: draw(*s, grad=grad)
            for k, s in (
                ("q", (D, D)),
                ("k", (D, D)),
                ("v", (D, D)),
                ("out", (D, D)),
                ("up", (D, 4 * D)),
                ("down", (4 * D, D)),
            )
        }

    def plain(q, k, v, mask=None):
        scores = q @ k.mT / (D // H) ** 0.5
        return (scores if mask is None else scores + mask).softmax(-1) @ v

    def torch_block(x, w):
        z = layer_norm(x, (D,))
        q, k, v = ((z @ w[name]).view(B, -1, H, D // H).transpose(1, 2) for name in "qkv")
        x = x + plain(q, k, v).transpose(1, 2).reshape(x.shape) @ w["out"]
        return x + gelu(layer_norm(x, (D,)) @ w["up"]) @ w["down"]

    def stack(x, layers, remat=False):
        for w in layers:
            x = checkpoint(torch_block, x, w, use_reentrant=False) if remat else torch_block(x, w)
        return x

    q, k, v = (draw(B, H, N, D // H) for _ in range(3))
    mask = torch.full((N, N), -torch.inf).triu(1)
    x, xg = draw(B, N, D), draw(B, N, D, grad=True)
    w, wg = make(False), make(True)
    layers, layers_g = [make(False) for _ in range(LAYERS)], [make(True) for _ in range(LAYERS)]
    cell, square = torch.nn.RNN(D, D, bias=False), draw(D, D)
    return {
        "attention core": lambda: plain(q, k, v),
        "attention core, fused": lambda: scaled_dot_product_attention(q, k, v),
        "causal core, mask ignored": lambda: plain(q, k, v, mask),
        "causal core, exact": lambda: plain(q, k, v, mask),
        "block": lambda: torch_block(x, w),
        "block, training": lambda: torch_block(xg, wg).sum().backward(),
        "12 layers": lambda: stack(x, layers),
        "12 layers, training": lambda: stack(xg, layers_g).sum().backward(),
        "12 layers, training, recomputed blocks": lambda: stack(xg, layers_g, remat=True).sum().backward(),
        "recurrent network": lambda: cell(draw(N, B, D)),
        "10 products in a loop": lambda: functools.reduce(lambda y, _: y @ y, range(10), square),
    }


def torch_only_rows(torch):
    """Return modules of PyTorch that choose their own kernels."""
    x = torch.randn(B, N, D)
    mha = torch.nn.MultiheadAttention(D, H, batch_first=True)
    encoder = torch.nn.TransformerEncoderLayer(D, H, 4 * D, dropout=0.0, batch_first=True)
    quick = torch.nn.TransformerEncoderLayer(D, H, 4 * D, dropout=0.0, batch_first=True).eval()
    attention = transformer_cost(ModelShape(1, D, H, 0, causal=False), N, B).flops
    whole = transformer_cost(BLOCK, N, B).flops

    def without_gradient():
        with torch.no_grad():
            quick(x)

    return [
        ("nn.MultiheadAttention, weights returned", attention, lambda: mha(x, x, x, need_weights=True)),
        ("nn.MultiheadAttention, weights not returned", attention, lambda: mha(x, x, x, need_weights=False)),
        ("nn.TransformerEncoderLayer, training", whole, lambda: encoder(x)),
        ("nn.TransformerEncoderLayer, eval and no_grad", whole, without_gradient),
    ]


def measure_torch(run):
    counter = require("torch.utils.flop_counter").FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def measure_xla(fn, args):
    analysis = jax.jit(fn).lower(*args).compile().cost_analysis()
    return int(analysis["flops"])


def cell(figure, truth):
    if figure is None:
        return "-"
    return f"{figure:,} (equal)" if figure == truth else f"{figure:,} ({figure / truth:.3f})"


def main():
    start = time.perf_counter()
    torch = require("torch")
    torch.set_num_threads(1)
    runs = torch_rows(torch)
    print(
        f"JAX {jax.__version__} on {jax.default_backend()}, PyTorch {torch.__version__},"
        f" Python {platform.python_version()}"
    )
    print(f"batch {B}, length {N}, width {D}, heads {H}, MLP {4 * D}; ratio to the closed form in brackets\n")
    print("| computation | closed form | manyheads.count | XLA cost_analysis | FlopCounterMode |")
    print("|---|---:|---:|---:|---:|")
    for name, truth, fn, args in jax_rows():
        figures = (count(fn, *args).flops, measure_xla(fn, args), measure_torch(runs[name]))
        print(f"| {name} | {truth:,} | {' | '.join(cell(figure, truth) for figure in figures)} |")
    for name, truth, run in torch_only_rows(torch):
        print(f"| {name} | {truth:,} | - | - | {cell(measure_torch(run), truth)} |")
    print(f"\n{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()

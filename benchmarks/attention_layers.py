"""Attention layers and entropy on NumPy arrays and on tensors, beside the same formulas compiled by JAX.

    make bench NAME=attention_layers

Float64, one thread, causal. The first call of a shape includes compilation in JAX; later calls are medians of CPU time,
one kind after the other, for each fills the caches with its own. NumPy arrays are moved into JAX at every call, as they
were before layers had namespaces. A ratio above 1 says that JAX takes longer.
"""

import os
import statistics

from _shared import ONE_THREAD, ratio_of, timed, versions_of

os.environ.update(ONE_THREAD)

import jax
import numpy as np
import torch

from manyheads.attention import AttentionLayer, MultiHeadAttention, attention_entropy, causal

jax.config.update("jax_enable_x64", True)
torch.set_num_threads(1)
KINDS = {"JAX": jax.numpy.asarray, "NumPy": np.asarray, "PyTorch": torch.from_numpy}
SHAPES = ((1, 8), (64, 8), (16, 64), (4, 256))  # sequences, tokens
WIDTHS = {64: 4, 256: 12}  # heads
BUDGET, MOST = 0.5, 200  # CPU seconds of JAX, and calls, of a row


def merged(rng, d, heads, array):
    theta, projection = (array(rng.normal(size=(heads, d, d)) * scale) for scale in (1 / d, d**-0.5))
    return AttentionLayer(theta, projection, causal=True)


def four_matrices(rng, d, heads, array):
    n = d // heads
    query, key, value = (array(rng.normal(size=(heads, d, n)) * d**-0.5) for _ in range(3))
    return MultiHeadAttention(query, key, value, array(rng.normal(size=(heads, n, d)) * d**-0.5), causal=True)


def rows():
    """Yield a name, and a function of a kind of array that returns a call."""
    for d, heads in WIDTHS.items():
        for make in (merged, four_matrices):
            for shape in SHAPES:

                def prepare(array, d=d, heads=heads, make=make, shape=shape):
                    rng = np.random.default_rng(0)
                    layer, x = make(rng, d, heads, array), rng.normal(size=(*shape, d))
                    return lambda: layer(array(x))

                name = make.__name__.replace("_", " ")
                yield f"{name}, d = {d}, {heads} heads, {shape[0]} x {shape[1]}", prepare
    for heads, n in ((1, 512), (4, 2048)):

        def prepare(array, heads=heads, n=n):
            q, k = np.random.default_rng(0).normal(size=(2, heads, n, 64))
            return lambda: attention_entropy(array(q), array(k), mask=causal)[0]

        yield f"entropy, {heads} x {n} x 64", prepare


def seconds(call):
    return timed(lambda: np.asarray(call()))[0]


def main():
    print(f"{versions_of('manyheads', 'jax', 'numpy', 'torch')}\n")
    print("| call | JAX, ms: first, later | NumPy | PyTorch | JAX over NumPy, later (range) | over PyTorch |")
    print("|---|---|---|---|---|---|")
    for name, prepare in rows():
        calls = {kind: prepare(array) for kind, array in KINDS.items()}
        first = {kind: seconds(call) for kind, call in calls.items()}
        repeats = min(MOST, max(5, int(BUDGET / seconds(calls["JAX"]))))
        taken = {kind: [seconds(call) for _ in range(repeats + 2)][2:] for kind, call in calls.items()}
        cells = [f"{1e3 * first[kind]:.1f}, {1e3 * statistics.median(taken[kind]):.2f}" for kind in KINDS]
        ratios = [ratio_of(taken["JAX"], taken[kind], 2) for kind in ("NumPy", "PyTorch")]
        print(f"| {' | '.join([name, *cells, *ratios])} |", flush=True)


if __name__ == "__main__":
    main()

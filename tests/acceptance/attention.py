"""The layer and its two studies: verdicts over eight seeds, entropy in roundings and megabytes, exact conversion."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of
from tests.attention.test_conversion import FORMS, MASKS, draw_layer

from manyheads.attention import attention_entropy
from manyheads.attention.masks import evaluate


def entropy_error(folder: Path, lengths: list[int], logits: list[float], seeds: int) -> Measured:
    """Compare float32 with the formula in float64, in units of 4 eps max(1, max |s|)."""
    worst: dict[tuple[float, int], float] = {}
    count = 0
    for seed in range(seeds):
        for length in lengths:
            for largest in logits:
                rng = np.random.default_rng([seed, length])
                q, k = rng.normal(size=(2, length, 64)).astype(np.float32)
                q *= np.float32(largest / np.abs(q @ k.T * 0.125).max())
                found = np.asarray(attention_entropy(q, k)[0], np.float64)
                exact, reached = _entropy(q, k)
                error = float(np.abs(found - exact).max() / (4 * np.finfo(np.float32).eps * max(1, reached)))
                worst[largest, length] = max(worst.get((largest, length), 0.0), error)
                count += length
    (largest, length), error = max(worst.items(), key=lambda item: item[1])
    parts = ", ".join(f"{max(e for (s, _), e in worst.items() if s == size):.2f} at {size:g}" for size in logits)
    extent = f"worst of {count:,} rows, {length} keys, logits up to {largest:g}; by largest logit: {parts}"
    return Measured(f"{error:.3f} of the bound", extent, f"0-{seeds - 1}", error <= 1)


def _entropy(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the entropies in double precision, some rows at a time, and the largest logit in size."""
    rows, reached = [], 0.0
    for piece in np.array_split(q.astype(np.float64), max(1, len(q) // 512)):
        s = piece @ k.T.astype(np.float64) * 0.125
        reached = max(reached, float(np.abs(s).max()))
        s -= s.max(1, keepdims=True)
        e = np.exp(s)
        total = e.sum(1)
        rows.append(np.log(total) - (e * s).sum(1) / total)
    return np.concatenate(rows), reached


MEMORY = """
import sys, jax, jax.numpy as jnp, numpy as np
from manyheads.attention import attention_entropy, causal

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

size, heads, seed = map(int, sys.argv[1:])
draw = lambda n: jnp.asarray(np.random.default_rng(seed).normal(size=(heads, n, 64)), jnp.float32)
gradient = jax.grad(lambda q: attention_entropy(q, q, mask=causal)[0].sum())
small, large = draw(256), draw(size)
jax.block_until_ready((attention_entropy(small, small, mask=causal), gradient(small)))
before = kilobytes("VmRSS")
jax.block_until_ready(attention_entropy(large, large, mask=causal))
forward = kilobytes("VmHWM") - before
jax.block_until_ready(gradient(large))
print(forward, kilobytes("VmHWM") - before)
"""


def entropy_memory(folder: Path, length: int, heads: int, seeds: int) -> Measured:
    """Measure how far the peak of a process rises, forward and then with the gradient."""
    peaks = []
    for seed in range(seeds):
        words = [sys.executable, "-c", MEMORY, str(length), str(heads), str(seed)]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        peaks.append([int(word) / 1000 for word in done.stdout.split()])
    forward, both = np.max(peaks, axis=0)
    figure = f"{forward:.0f} MB forward, {both:.0f} MB with the gradient"
    extent = f"largest growth of {seeds} processes; {heads} heads, n = {length:,}, causal: a pattern of "
    return Measured(figure, f"{extent}{4 * length**2 / 1e9:.2f} GB a head", f"0-{seeds - 1}", bool(both < 200))


def conversion(folder: Path, count: int, seed: int) -> Measured:
    """Go from (W_Q, W_K, W_V, W_O) to (Theta, W) and back on random layers; outputs and weights must agree."""
    rng, worst = np.random.default_rng(seed), 0.0
    names = sorted(MASKS)
    for number in range(count):
        layer = draw_layer(FORMS[number % len(FORMS)], rng)
        x = rng.normal(size=(2, 5, layer.dim))
        mask = evaluate(MASKS[names[number % len(names)]](rng), (5, 5))
        y, merged = layer(x, mask), layer.merged()
        again = merged.factored(max(layer.query.shape[-1], layer.value.shape[-1]))
        weights = merged.weights(x, mask) - layer.weights(x, mask)
        worst = max(worst, *(float(np.abs(part).max()) for part in (merged(x, mask) - y, again(x, mask) - y, weights)))
    extent = f"worst of {count} layers: with and without biases, grouped keys, {len(names)} kinds of masks, empty rows"
    return Measured(f"{worst:.1e}", extent, str(seed), worst <= 1e-12)


FIGURES = (
    Figure(
        "entropy-error",
        "streamed entropy in single precision is within four roundings, up to 2,048 keys",
        "error <= 4 eps max(1, max abs s)",
        entropy_error,
        {"lengths": [1, 2, 16, 128, 300, 1024, 2048], "logits": [0.1, 1.0, 5.0, 48.0, 296.0, 3000.0], "seeds": 4},
    ),
    Figure(
        "entropy-error-long-rows",
        "and at 4,096 keys, where rounding the exact entropy of a nearly uniform row to float32 alone costs four",
        "error <= 4 eps max(1, max abs s)",
        entropy_error,
        {"lengths": [4096], "logits": [0.1, 1.0, 5.0, 48.0, 296.0, 3000.0], "seeds": 4},
    ),
    Figure(
        "entropy-memory",
        "streamed entropy holds a few rows of the pattern",
        "< 200 MB at n = 16,384",
        entropy_memory,
        {"length": 16384, "heads": 2, "seeds": 2},
    ),
    Figure(
        "conversion",
        "both forms of a layer are one function",
        "equal to 1e-12 in double precision",
        conversion,
        {"count": 3000, "seed": 0},
    ),
    Figure(
        "costs",
        "attention's exact costs, depth and crossover length",
        "every verdict as expected",
        study,
        {"name": "attention/costs", "replicates": 8},
        command=words_of("attention/costs", 8),
    ),
    Figure(
        "order-blindness",
        "pooling cannot see order, recurrence forgets with distance, attention does neither",
        "every verdict as expected",
        study,
        {"name": "attention/order-blindness", "replicates": 8},
        command=words_of("attention/order-blindness", 8),
    ),
    Figure(
        "vanishing-gradients",
        "exponents of the gradients of a recurrent network by depth and gain, those of attention by length",
        "every verdict as expected",
        study,
        {"name": "attention/vanishing-gradients", "replicates": 8},
        command=words_of("attention/vanishing-gradients", 8),
    ),
)

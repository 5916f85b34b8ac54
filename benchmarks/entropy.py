"""Entropy of attention rows: streaming over query rows against the formula on the whole pattern.

    python benchmarks/entropy.py

One head, key dimension 64, float32, one thread. Every variant runs in a child process of its own, on the same draws;
the children of one length run one after the other. Time is CPU time of the process, compilation excluded, the median of
repeated calls; its ratio to ours comes with the smallest and the largest ratio that pairs of repeats give. Memory is
the growth of the resident set over its value before the first call, compilation included. The error is the largest over
all rows against double precision, in units of eps max(1, max |logit|), for logits that reach 5, 48 and 296.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}
KEY_DIM = 64
LENGTHS = {512: 101, 2048: 15, 8192: 5, 16384: 3}  # repeats
OURS_ONLY = 16384
PEAKS = (5, 48, 296)
NAMES = {
    "ours": "manyheads, streaming",
    "causal": "manyheads, streaming, causal",
    "jax": "JAX, -sum p log p",
    "torch": "torch, -sum p log p",
    "torch-eps": "torch, -sum p log(p + 1e-8)",
}


def ours(mask=None):
    import jax
    import jax.numpy as jnp

    from manyheads.attention import attention_entropy

    return jnp.asarray, lambda q, k: jax.block_until_ready(attention_entropy(q, k, mask=mask)[0])


def causal():
    from manyheads.attention import causal as rule

    return ours(rule)


def materialized_jax():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def entropy(q, k):
        p = jax.nn.softmax(q @ k.T * KEY_DIM**-0.5, axis=-1)
        return -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)

    return jnp.asarray, lambda q, k: entropy(q, k).block_until_ready()


def materialized_torch(guard=None):
    import torch

    torch.set_num_threads(1)

    def entropy(q, k):
        with torch.no_grad():
            p = torch.softmax(q @ k.T * KEY_DIM**-0.5, dim=-1)
            return -(torch.special.xlogy(p, p) if guard is None else p * torch.log(p + guard)).sum(-1)

    return torch.from_numpy, entropy


VARIANTS = {
    "ours": ours,
    "causal": causal,
    "jax": materialized_jax,
    "torch": materialized_torch,
    "torch-eps": lambda: materialized_torch(1e-8),
}


def draw(length, peak=None):
    import numpy as np

    q, k = np.random.default_rng(0).normal(size=(2, length, KEY_DIM)).astype(np.float32)
    if peak is not None:
        q = (q * (peak / np.abs(q.astype(np.float64) @ k.T * KEY_DIM**-0.5).max())).astype(np.float32)
    return q, k


def exact(q, k):
    import numpy as np

    logits = q.astype(np.float64) @ k.T.astype(np.float64) * KEY_DIM**-0.5
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=1)
    return np.log(total) - (exponentials * logits).sum(axis=1) / total


def resident(field):
    """Kilobytes of a line of /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def measure(variant, length, repeats):
    """Run in the child: CPU seconds of each repeat, memory growth in MB, error in roundings by largest logit."""
    import numpy as np

    move, entropy = VARIANTS[variant]()
    entropy(*(move(array) for array in draw(8)))  # whatever is loaded on first use
    q, k = (move(array) for array in draw(length))
    before = resident("VmRSS")
    entropy(q, k)
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        entropy(q, k)
        seconds.append(time.process_time() - start)
    growth = (resident("VmHWM") - before) / 1000
    errors = {}
    if length == 2048 and variant != "causal":
        for peak in PEAKS:
            q, k = draw(length, peak)
            error = np.abs(np.asarray(entropy(move(q), move(k))) - exact(q, k)).max()
            errors[peak] = float(error / (np.finfo(np.float32).eps * max(1, peak)))
    return {"seconds": seconds, "growth": growth, "errors": errors}


def in_child(variant, length, repeats):
    command = [sys.executable, __file__, variant, str(length), str(repeats)]
    answer = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def table_of_costs(results):
    yield "| n | variant | CPU time | times ours (spread) | peak memory growth |"
    yield "|---|---|---|---|---|"
    for (length, variant), result in results.items():
        base = results[length, "ours"]["seconds"]
        ratios = [slow / fast for slow, fast in zip(result["seconds"], base, strict=True)]
        middle = statistics.median(result["seconds"]) / statistics.median(base)
        against = "" if variant == "ours" else f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        spent = f"{1e3 * statistics.median(result['seconds']):.1f} ms"
        yield f"| {length} | {NAMES[variant]} | {spent} | {against} | {result['growth']:.0f} MB |"


def table_of_errors(results):
    yield "| error in eps max(1, max logit), n = 2048 | " + " | ".join(f"max logit {peak}" for peak in PEAKS) + " |"
    yield "|---|" + "---|" * len(PEAKS)
    for (_, variant), result in results.items():
        if result["errors"]:
            yield f"| {NAMES[variant]} | " + " | ".join(f"{error:.2f}" for error in result["errors"].values()) + " |"


def main():
    variants = [name for name in VARIANTS if not name.startswith("torch") or importlib.util.find_spec("torch")]
    results = {}
    for length, repeats in LENGTHS.items():
        for variant in variants if length < OURS_ONLY else ["ours", "causal"]:
            results[length, variant] = in_child(variant, length, repeats)
    packages = ["manyheads", "jax", *(["torch"] if "torch" in variants else [])]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), end=", ")
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread\n")
    print(*table_of_costs(results), "", *table_of_errors(results), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()

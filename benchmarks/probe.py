"""Attention statistics of all rows while a model runs, against the pattern of plain attention.

    python benchmarks/probe.py

GPT-NeoX of the Pythia-70M shape without its unembedding, random, one sequence, float32, one thread of a CPU. Every
variant runs in a child process of its own, on the same tokens. Time is CPU time of the process, the median of repeated
forward passes after a first one; ratios are to the plain forward pass, with the smallest and the largest that pairs of
repeats give. Memory is the growth of the peak resident set over that before the first pass.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
REPEATS = {512: 7, 2048: 3, 4096: 3}
VARIANTS = {
    "plain": "plain forward pass",
    "rows": "manyheads, 64 rows",
    "entropy": "manyheads, all rows: entropy, first mass, relative output",
    "all": "manyheads, all rows, every figure, exact largest logit",
    "pattern": "output_attentions, -sum p log p, sum p^2",
}


def build(variant):
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    implementation = "eager" if variant == "pattern" else "sdpa"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = GPTNeoXConfig(**sizes, max_position_embeddings=max(REPEATS), attn_implementation=implementation)
    return GPTNeoXModel(config).eval()


def measure(variant, model, tokens):
    """Run one forward pass with what the variant measures."""
    import torch

    from manyheads.probe import record_attention

    with torch.no_grad():
        if variant == "plain":
            model(tokens, use_cache=False)
        elif variant == "pattern":
            for p in model(tokens, use_cache=False, output_attentions=True).attentions:
                entropy = -(p * (p + 1e-8).log()).sum(-1).mean((0, 2))
                collision = (p * p).sum(-1).mean((0, 2))
                assert len(entropy) == len(collision) == 8
        else:
            rows = 64 if variant == "rows" else None
            figures = ("entropy", "logsumexp", "first_mass", "relative_output") if variant == "entropy" else None
            with record_attention(model, rows, figures=figures) as record:
                model(tokens, use_cache=False)
            record.dataset()


def peak():
    """Return the peak of the resident set in MB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(variant, length):
    import torch

    model = build(variant)
    measure(variant, model, torch.zeros(1, 16, dtype=torch.long))  # imports and first calls
    tokens = torch.randint(0, 50000, (1, length), generator=torch.Generator().manual_seed(0))
    before, times = peak(), []
    for _ in range(REPEATS[length]):
        start = time.process_time()
        measure(variant, model, tokens)
        times.append(time.process_time() - start)
    print(json.dumps({"times": times, "memory": peak() - before}))


def main():
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(f"Python {platform.python_version()}, {versions}, {os.cpu_count()} {platform.machine()} cores\n")
    print("| n | variant | CPU s | times the plain pass | MB |\n|---|---|---|---|---|")
    for length in map(int, sys.argv[1:] or REPEATS):
        found = {}
        for variant, title in VARIANTS.items():
            command = [sys.executable, __file__, "--child", variant, str(length)]
            done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=True)
            found[variant] = json.loads(done.stdout.splitlines()[-1])
            times, plain = found[variant]["times"], found["plain"]["times"]
            ratio = statistics.median(times) / statistics.median(plain)
            ratios = [ours / theirs for ours in times for theirs in plain]
            cells = [f"{statistics.median(times):.2f}", f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            print(f"| {length} | {title} | {' | '.join(cells)} | {found[variant]['memory']:.0f} |", flush=True)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main()

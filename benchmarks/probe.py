"""Attention statistics of all rows while a model runs, and weights of checkpoints, each against its alternatives.

    python benchmarks/probe.py                     # everything, some 40 CPU minutes
    python benchmarks/probe.py 512 4096 160M-512   # attention at these lengths, of the 70M and of the 160M shape
    python benchmarks/probe.py ranks 70M           # stable ranks, checkpoints of the shape

**Attention**, against the pattern of plain attention: by `output_attentions`, by a hook on every attention module that
keeps one pattern at a time, and by TransformerLens where it is installed, which computes the logits of the vocabulary
as well.
GPT-NeoX of the Pythia-70M and 160M shapes without its unembedding, random, one sequence, float32, one thread of a CPU.
Every variant runs in child processes of its own, in turn with the others, on the same tokens. Time is CPU time of a
forward pass after one of 16 tokens, the median over the passes; ratios are to the plain forward pass, with the smallest
and the largest that passes of the same turn give. Memory is the growth of the peak resident set over that before the
first long pass.

**Weights**, against singular values by PyTorch and against weightwatcher where it is installed: the stable rank of
three Gaussian matrices of 2048 x 512 in float32, with the error against float64; and all matrices of a random
checkpoint of the Pythia-70M and 410M shapes, ours with coherence and heads, tensor by tensor, the alternative of the
checkpoint loaded whole. CPU time on one thread, the median of repeats in processes of their own.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TURNS = 2
PASSES = {512: 4, 2048: 2, 4096: 1}  # of a child process
VARIANTS = {
    "plain": "plain forward pass",
    "rows": "manyheads, 64 rows",
    "entropy": "manyheads, all rows: entropy, first mass, relative output",
    "all": "manyheads, all rows, every figure, exact largest logit",
    "hooks": "plain attention, a hook on every layer: -sum p log p, sum p^2",
    "pattern": "output_attentions, -sum p log p, sum p^2",
    "lens": "TransformerLens, run_with_cache of the patterns, -sum p log p, sum p^2",
}
SHAPES = {
    "70M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8},
    "160M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "410M": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
ATTENTION = {f"{prefix}{length}": (shape, length)
             for shape, prefix in (("70M", ""), ("160M", "160M-")) for length in PASSES}  # fmt: skip


def build(variant, shape):
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    implementation = "eager" if variant in ("hooks", "pattern", "lens") else "sdpa"
    config = GPTNeoXConfig(**SHAPES[shape], max_position_embeddings=max(PASSES), attn_implementation=implementation)
    if variant == "lens":
        return lens_model(GPTNeoXForCausalLM(config).eval())
    model = GPTNeoXModel(config).eval()
    if variant == "hooks":
        for layer in model.layers:
            layer.attention.register_forward_hook(lambda _, __, output: summarize(output[1]))
    return model


def lens_model(model):
    """Return TransformerLens' form of a model; it asks for a folder and a tokenizer, of which nothing is used."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model.config.architectures = ["GPTNeoXForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
        special = dict.fromkeys(("eos_token", "pad_token", "bos_token"), "<eos>")
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer)


def summarize(p):
    """Compute what the pattern of one layer gives."""
    entropy = -(p * (p + 1e-8).log()).sum(-1).mean((0, 2))
    collision = (p * p).sum(-1).mean((0, 2))
    assert len(entropy) == len(collision) == p.shape[1]


def measure(variant, model, tokens):
    """Run one forward pass with what the variant measures."""
    import torch

    from manyheads.probe import record_attention

    with torch.no_grad():
        if variant in ("plain", "hooks"):
            model(tokens, use_cache=False)
        elif variant == "pattern":
            for p in model(tokens, use_cache=False, output_attentions=True).attentions:
                summarize(p)
        elif variant == "lens":
            _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))
            for p in cache.values():
                summarize(p)
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


def child(variant, shape, length):
    import torch

    model = build(variant, shape)
    measure(variant, model, torch.zeros(1, 16, dtype=torch.long))  # imports and first calls
    tokens = torch.randint(0, 50000, (1, length), generator=torch.Generator().manual_seed(0))
    before, times = peak(), []
    for _ in range(PASSES[length]):
        start = time.process_time()
        measure(variant, model, tokens)
        times.append(time.process_time() - start)
    print(json.dumps({"times": times, "memory": peak() - before}))


# Weights

WEIGHED = ("70M", "410M")
MATRICES = {"ours": "manyheads, exact, with bounds", "svdvals": "torch.linalg.svdvals", "ww": "weightwatcher.analyze"}
CHECKPOINTS = {"ours": "manyheads.weight_spectra", "svdvals": "load_file, torch.linalg.svdvals"}


def gaussian_matrices():
    import torch

    return [torch.randn(2048, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def matrix_ranks(variant):
    """Return the stable ranks of three matrices, and the CPU time that they take."""
    import torch

    matrices = gaussian_matrices()
    if variant == "ours":
        from manyheads.spectra import stable_rank

        stable_rank(matrices[0][:64, :64].numpy())  # first call
        start = time.process_time()
        ranks = [stable_rank(matrix.numpy()).value for matrix in matrices]
    elif variant == "svdvals":
        torch.linalg.svdvals(matrices[0][:64, :64])
        start = time.process_time()
        ranks = [float((values**2).sum() / values[0] ** 2) for values in map(torch.linalg.svdvals, matrices)]
    else:
        import weightwatcher

        model = torch.nn.Sequential(*(torch.nn.Linear(512, 2048, bias=False) for _ in matrices))
        for layer, matrix in zip(model, matrices, strict=True):
            layer.weight.data = matrix
        start = time.process_time()
        ranks = weightwatcher.WeightWatcher(model=model).analyze().stable_rank.tolist()
    return ranks, time.process_time() - start


def weigh(variant, folder):
    """Measure all matrices of a checkpoint; return their number."""
    if variant == "ours":
        from manyheads.probe import weight_spectra

        return weight_spectra(folder).sizes["matrix"]
    import torch
    from safetensors.torch import load_file

    weights = load_file(f"{folder}/model.safetensors")
    return len([torch.linalg.svdvals(weight) for weight in weights.values() if weight.dim() == 2])


def weights_child(variant, folder):
    import torch

    torch.set_num_threads(1)
    if folder == "matrices":
        ranks, cpu = matrix_ranks(variant)
        squares = [torch.linalg.svdvals(matrix.double()) ** 2 for matrix in gaussian_matrices()]
        errors = [abs(rank / float(each.sum() / each[0]) - 1) for rank, each in zip(ranks, squares, strict=True)]
        print(json.dumps({"cpu": cpu, "error": max(errors), "memory": 0}))
        return
    import xarray  # noqa: F401

    import manyheads.probe

    manyheads.probe.weight_spectra  # noqa: B018 - loads on first use
    before, start = peak(), time.process_time()
    count = weigh(variant, folder)
    print(json.dumps({"cpu": time.process_time() - start, "error": count, "memory": peak() - before}))


def run_child(arguments):
    """Run this file in a process of its own; return what it prints."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_weights(variants, folder, repeats):
    """Run variants in turn; return variant -> results of the repeats."""
    found = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            found[variant].append(run_child(["--weights", variant, folder]))
    return found


def print_rows(what, titles, found, last):
    for variant, runs in found.items():
        ratios = [run["cpu"] / ours["cpu"] for run, ours in zip(runs, found["ours"], strict=True)]
        cpu = statistics.median(run["cpu"] for run in runs)
        ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"| {what} | {titles[variant]} | {cpu:.3g} | {ratio} | {last(runs[0])} |", flush=True)


def weights(parts):
    print("| weights | variant | CPU s | times ours | error or MB |\n|---|---|---|---|---|")
    if "ranks" in parts:
        found = [name for name in MATRICES if name != "ww" or importlib.util.find_spec("weightwatcher")]
        ranks = run_weights(found, "matrices", 5)
        print_rows("3 of 2048 x 512", MATRICES, ranks, lambda run: f"{run['error']:.1e}")
    for name in [name for name in WEIGHED if name in parts]:
        with tempfile.TemporaryDirectory() as folder:
            save = "import json, sys, transformers as t; c = t.GPTNeoXConfig(**json.loads(sys.argv[1])); "
            save += "t.GPTNeoXForCausalLM(c).save_pretrained(sys.argv[2])"
            config = json.dumps({**SHAPES[name], "vocab_size": 50304})
            subprocess.run([sys.executable, "-c", save, config, folder], capture_output=True, check=True)
            ran = run_weights(CHECKPOINTS, folder, 2 if name == "70M" else 1)
        print_rows(f"{name} shape", CHECKPOINTS, ran, lambda run: f"{run['memory']:.0f} MB")


def main():
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(f"Python {platform.python_version()}, {versions}, {os.cpu_count()} {platform.machine()} cores\n")
    parts = [*ATTENTION, "ranks", *WEIGHED]
    chosen = sys.argv[1:] or parts
    if unknown := [part for part in chosen if part not in parts]:
        sys.exit(f"no part {unknown[0]}: choose from {', '.join(parts)}")
    if lengths := [part for part in ATTENTION if part in chosen]:
        attention(lengths)
    if {"ranks", *WEIGHED} & set(chosen):
        weights(chosen)


def attention(parts):
    variants = [name for name in VARIANTS if name != "lens" or importlib.util.find_spec("transformer_lens")]
    print("| shape | n | variant | CPU s | times the plain pass | MB |\n|---|---|---|---|---|---|")
    for shape, length in (ATTENTION[part] for part in parts):
        found = {variant: [] for variant in variants}
        for _ in range(TURNS):
            for variant in variants:
                found[variant].append(run_child(["--child", variant, shape, str(length)]))
        plain = statistics.median(time for turn in found["plain"] for time in turn["times"])
        for variant, turns in found.items():
            median = statistics.median(time for turn in turns for time in turn["times"])
            pairs = zip(turns, found["plain"], strict=True)
            ratios = [ours / theirs for one, base in pairs for ours in one["times"] for theirs in base["times"]]
            cells = [f"{median:.2f}", f"{median / plain:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            memory = max(turn["memory"] for turn in turns)
            print(f"| {shape} | {length} | {VARIANTS[variant]} | {' | '.join(cells)} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif "--weights" in sys.argv:
        weights_child(sys.argv[2], sys.argv[3])
    else:
        main()

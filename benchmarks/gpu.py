"""Kernel, recorders and entropies on one GPU: correctness first, then times against the same work without them.

    python benchmarks/gpu.py --out gpu.json                     # a GPU, within --budget
    python benchmarks/gpu.py --section proof --text FOLDER      # learning rates of a GPT from a quarter of its heads
    python benchmarks/gpu.py --device cpu --tiny --out dry.json # every line of it on a CPU, by Triton's interpreter

Results are written after every part. Times are medians of CUDA events or of the wall clock around synchronized calls;
variants take turns, and ratios are medians over the turns with the least and the largest. On a CPU half precision is
float16, which Triton's interpreter knows, and times mean nothing.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
ARGUMENTS: argparse.Namespace
TITLES = {
    "device": "device and versions",
    "correctness": "kernel against float64",
    "kernel": "kernel with statistics against the same kernel without",
    "forward": "record_attention on a Llama-like model",
    "entropy": "attention_entropy, PyTorch, against the materialized formula",
    "recorder": "AttentionRecorder while a GPT trains, share 0.01",
    "entropy_jax": "attention_entropy, JAX, against the materialized formula",
    "bigram": "bigram step by gathers in JAX, GPU against CPU",
    "extract": "extraction from a layer on the GPU",
    "proof": "learning rates of a GPT from a base of a quarter of its heads",
}


def interpret_triton():
    """Let Triton's interpreter read loop bounds under NumPy 2.4 and later, where arrays of one entry are no numbers."""
    import numpy as np
    import triton.runtime.interpreter as interpreter

    class Kind(type):
        def __call__(cls, value=0, *rest):
            return int(np.asarray(value).item()) if hasattr(value, "item") else int(value, *rest)

        def __instancecheck__(cls, value):
            return isinstance(value, int)

    interpreter.int = Kind("int", (), {})


def half():
    import torch

    return torch.float16 if ARGUMENTS.device == "cpu" else torch.bfloat16


def synchronize():
    import torch

    if ARGUMENTS.device == "cuda":
        torch.cuda.synchronize()


def peak_of(call):
    """Return the growth of the peak of the GPU's memory in a call, in MB."""
    import torch

    if ARGUMENTS.device == "cpu":
        call()
        return 0.0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def event_time(call, rep=60):
    """Return the median time of a call in ms."""
    if ARGUMENTS.device == "cpu":
        return wall_time(call, 1)
    import triton

    return triton.testing.do_bench(call, warmup=20, rep=rep, return_mode="median")


def wall_time(call, repeats):
    """Return the median wall time of synchronized calls in ms."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def turns(calls, timer, rounds=3):
    """Time calls in turn; return the median of each in ms, and the ratios to the first with their range."""
    if not ARGUMENTS.tiny:
        for call in calls.values():
            call()  # compiles
    rounds = 1 if ARGUMENTS.tiny else rounds
    times = [{name: timer(call) for name, call in calls.items()} for _ in range(rounds)]
    base = next(iter(calls))
    found = {}
    for name in calls:
        ratios = [turn[name] / turn[base] for turn in times]
        found[name] = {
            "ms": statistics.median(turn[name] for turn in times),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return found


# Sections


def device():
    import torch

    names = ("torch", "triton", "transformers", "jax", "numpy", "xarray")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = {"device": ARGUMENTS.device, "tiny": ARGUMENTS.tiny, "versions": versions, "cores": os.cpu_count()}
    if ARGUMENTS.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        found["name"] = torch.cuda.get_device_name()
    return found


def reference(query, key, value, scale, causal, window=None, mask=None, softcap=None, sink=None, bias=None):
    """Return output (B, H, n, d), statistics and first keys in float64."""
    import torch

    shared, (n, m) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    s = query.double() @ key.double().repeat_interleave(shared, 1).mT * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias.double()
    row, column = torch.arange(n, device=s.device)[:, None] + m - n, torch.arange(m, device=s.device)[None]
    allowed = torch.ones(n, m, dtype=torch.bool, device=s.device)
    allowed = allowed & (column <= row) if causal else allowed
    allowed = allowed & (column > row - window) if window else allowed
    allowed = allowed if mask is None else allowed & mask
    s = s.masked_fill(~allowed, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.where(lse[..., None] == -torch.inf, 0.0, (s - lse[..., None]).exp())
    first = allowed.int().argmax(-1).expand(s.shape[:-1])
    found = {
        "entropy": -torch.xlogy(p, p).sum(-1),
        "logsumexp": lse,
        "mean_logit": (p * torch.where(p > 0, s, 0.0)).sum(-1),
        "max_logit": s.amax(-1),
        "collision": (p * p).sum(-1),
        "first_mass": torch.gather(p, -1, first[..., None])[..., 0],
        "column": p @ torch.arange(m, dtype=torch.double, device=s.device),
    }
    share = p if sink is None else p * torch.sigmoid(lse - sink.double().view(1, -1, 1))[..., None]
    output = share @ value.double().repeat_interleave(shared, 1)
    return output, found | {"output_square": (output * output).mean(-1)}, first


# Width of heads, dtype (half or float32) and parts of the score: each is compiled once on a GPU.
KINDS = (
    (64, "half", ("causal",)),
    (128, "half", ("causal",)),
    (64, "half", ("causal", "window", "sink")),
    (80, "half", ("mask",)),
    (64, "half", ("causal", "mask", "sink")),
    (32, "half", ("causal", "bias", "softcap")),
    (256, "half", ()),
    (64, "float32", ("causal", "window")),
    (128, "float32", ("mask", "sink")),
)


def random_case(rng, kind):
    """Draw a shape of a kind."""
    import torch

    small, (d, dtype, parts) = ARGUMENTS.device == "cpu", kind
    place, seed = ARGUMENTS.device, int(rng.integers(2**31))
    draw = torch.Generator(place).manual_seed(seed)
    heads, shared = (int(each) for each in rng.integers(1, 3 if small else 4, 2))
    dtype, d = half() if dtype == "half" else torch.float32, min(d, 24) if small else d
    n, causal = int(rng.integers(1, 40 if small else 700)), "causal" in parts
    m = n if rng.random() < 0.4 else n + int(rng.integers(0, 20 if small else 300))
    shapes = [(2, heads * shared, n, d), (2, heads, m, d), (2, heads, m, d)]
    query, key, value = (torch.randn(*shape, generator=draw, device=place).to(dtype) for shape in shapes)
    score = {"scale": float(d**-0.5 * rng.choice([0.3, 1.0, 5.0, -1.0])), "causal": causal}
    if "window" in parts:
        score["window"] = int(rng.integers(1, n + 1))
    if "mask" in parts:
        score["mask"] = torch.rand(2, 1, n if rng.random() < 0.5 else 1, m, generator=draw, device=place) > 0.3
        score["mask"][0, :, -1] = False  # a row without keys, or all of a sequence
    if "sink" in parts:
        score["sink"] = torch.randn(heads * shared, generator=draw, device=place)
    if "softcap" in parts:
        score["softcap"] = 5.0
    if "bias" in parts:
        score["bias"] = torch.randn(1, heads * shared, n, m, generator=draw, device=place)
    return query, key, value, score, seed


def errors_of_case(query, key, value, score, cut=None):
    """Return errors of the kernel in units of its bound, and of the output relative to the largest value."""
    import torch

    from manyheads.attention.flash_kernel import STATISTICS, attend

    expected, exact, first = reference(query, key, value, **score)
    mask = score.get("mask")
    given = None if mask is None else first
    made, found = attend(query, key, value, STATISTICS, first=given, cut=cut, **score)
    norm = abs(score["scale"]) * float(query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max())
    unit = 2.0**-23 * max(1.0, norm + float(score["bias"].abs().max() if "bias" in score else 0.0))
    scales = {"column": key.shape[2] * unit, "collision": 2 * unit * exact["collision"].clamp_min(1e-30)}
    scales["output_square"] = float(value.abs().max()) ** 2 * max(unit, torch.finfo(value.dtype).eps)
    errors = {}
    for name, value_of in exact.items():
        off = (found[name].double() - value_of).abs() / scales.get(name, unit)
        same = found[name].double() == value_of  # -inf too, in rows without keys
        errors[name] = float(torch.where(same, 0.0, off).max())
    off = (made.transpose(1, 2).double() - expected).abs().max() / value.abs().max()
    return errors, float(off) / torch.finfo(query.dtype).eps / (1 if query.dtype != torch.float32 else norm + 1)


def correctness():
    import numpy as np
    import torch

    from manyheads.attention.flash_kernel import BOUND, Tiles

    rng = np.random.default_rng(ARGUMENTS.seed)
    worst, output, cases, failures = {}, 0.0, (1 if ARGUMENTS.tiny else 3) * len(KINDS), []
    for number in range(cases):
        case = random_case(rng, KINDS[number % len(KINDS)])
        cut = None if ARGUMENTS.device == "cuda" else Tiles(16, 16, 4, 1, number % 2 == 1, number % 4 > 1)
        try:
            errors, off = errors_of_case(*case[:4], cut=cut)
        except Exception as error:
            failures.append(f"{tuple(case[0].shape)} {case[0].dtype} {sorted(case[3])}: {error!r}"[:400])
            continue
        output = float(np.maximum(output, off))
        by_kind = "float32" if case[0].dtype == torch.float32 else "half"
        before = worst.get(by_kind, {})
        worst[by_kind] = {name: float(np.maximum(before.get(name, 0.0), error)) for name, error in errors.items()}
        if not (all(error <= BOUND for error in errors.values()) and off <= 8):  # NaN too
            shape = f"{tuple(case[0].shape)} of {case[1].shape[2]} keys, {case[0].dtype}, {sorted(case[3])}"
            failures.append(f"{shape}, seed {case[4]}: {errors}, output {off:.2f}")
    return {"cases": cases, "bound": BOUND, "worst": worst, "output": output, "failures": failures[:6],
            "right": not failures}  # fmt: skip


SIZES = ((32, 8, 128), (16, 16, 64))
LENGTHS = (2048, 8192, 32768)


def inputs(heads, key_heads, d, n, dtype=None):
    import torch

    batch = 1 if ARGUMENTS.tiny else max(1, 8192 // n)
    draw = torch.Generator(ARGUMENTS.device).manual_seed(n)
    shapes = [(batch, heads, n, d), (batch, key_heads, n, d), (batch, key_heads, n, d)]
    return [torch.randn(*each, generator=draw, device=ARGUMENTS.device).to(dtype or half()) for each in shapes]


def candidates(d):
    from manyheads.attention.flash_kernel import Tiles

    if ARGUMENTS.device == "cpu":
        return [Tiles(16, 16, 4, 1)]
    if d > 64:
        return [Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3)]
    return [Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3)]


def kernel():
    import torch

    from manyheads.attention.flash_kernel import STATISTICS, attend, tiles

    found, mean = {"sweep": [], "times": []}, ("entropy", "logsumexp")
    sizes, lengths = (((2, 1, 16),), (24,)) if ARGUMENTS.tiny else (SIZES, LENGTHS)
    for heads, key_heads, d in sizes:
        q, k, v = inputs(heads, key_heads, d, lengths[min(1, len(lengths) - 1)])
        best = None
        for cut in candidates(d):
            lazy = cut._replace(lazy=True)
            variants = {"plain": (cut, ()), "mean": (cut, mean), "plain, lazy": (lazy, ()), "lazy": (lazy, mean)}
            calls = {
                name: lambda t=(q, k, v), asked=asked, o={"scale": d**-0.5, "causal": True, "cut": one}: attend(
                    *t, asked, **o
                )
                for name, (one, asked) in variants.items()
            }
            try:
                timed = turns(calls, lambda call: event_time(call, 30), 2)
            except Exception as error:
                found["sweep"].append({"d": d, "tiles": tuple(cut), "error": repr(error)[:200]})
                continue
            found["sweep"].append({"d": d, "tiles": tuple(cut), "times": timed})
            for name, each in (("plain", cut), ("plain, lazy", lazy)):
                if best is None or timed[name]["ms"] < best[0]:
                    best = timed[name]["ms"], each
        save("kernel", found)
        cut = best[1] if best else tiles(d, False)
        for n in lengths:
            q, k, v = inputs(heads, key_heads, d, n)
            call = {"scale": d**-0.5, "causal": True, "cut": cut}
            late = call | {"cut": cut._replace(late=True)}
            calls = {
                "plain": lambda t=(q, k, v), o=call: attend(*t, (), **o),
                "max, lse, E[s]": lambda t=(q, k, v), o=call: attend(*t, mean, **o),
                "max, lse, E[s], late": lambda t=(q, k, v), o=late: attend(*t, mean, **o),
                "and collision": lambda t=(q, k, v), o=call: attend(*t, (*mean, "collision"), **o),
                "every figure": lambda t=(q, k, v), o=call: attend(*t, STATISTICS, **o),
                "statistics alone": lambda t=(q, k), o=call: attend(*t, None, mean, **o),
                "torch sdpa": lambda t=(q, k, v): torch.nn.functional.scaled_dot_product_attention(
                    *t, is_causal=True, enable_gqa=True),
            }  # fmt: skip
            timed = turns(calls, event_time)
            made, figures = attend(q, k, v, STATISTICS, **call)
            operations = 2.0 * q.shape[0] * heads * n * n * d  # of both products of the causal half
            found["times"].append({
                "heads": heads, "key_heads": key_heads, "d": d, "n": n, "batch": q.shape[0], "tiles": tuple(cut),
                "times": timed, "tflops": operations / timed["plain"]["ms"] / 1e9,
                "peak": {"plain": peak_of(calls["plain"]), "every figure": peak_of(calls["every figure"])},
                "rows": sampled_errors(q, k, v, made, figures),
            })  # fmt: skip
            save(f"kernel d={d}", found)
    return found


def sampled_errors(q, k, v, made, figures):
    """Return errors of eight rows of the last head against float64: statistics absolute, the output in its eps."""
    import torch

    n, d = q.shape[2:]
    rows = torch.linspace(0, n - 1, 8, device=q.device).long()
    keys, values = k[-1, -1].double(), v[-1, -1].double()
    s = (q[-1, -1, rows].double() @ keys.T * d**-0.5).masked_fill(
        torch.arange(n, device=q.device)[None] > rows[:, None], -torch.inf
    )
    p = s.softmax(-1)
    exact = {"logsumexp": s.logsumexp(-1), "max_logit": s.amax(-1), "entropy": -torch.xlogy(p, p).sum(-1)}
    exact |= {"mean_logit": (p * torch.where(p > 0, s, 0.0)).sum(-1), "collision": (p * p).sum(-1)}
    found = {name: float((figures[name][-1, -1, rows].double() - value).abs().max()) for name, value in exact.items()}
    off = (made[-1, rows, -1].double() - p @ values).abs().max() / values.abs().max()
    return found | {"output": float(off) / torch.finfo(q.dtype).eps}


def llama(n):
    import torch
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8}
    if ARGUMENTS.tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=n, attn_implementation="sdpa", **sizes)
    with torch.device(ARGUMENTS.device):
        torch.set_default_dtype(half())
        try:
            return LlamaModel(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def forward():
    import torch

    from manyheads.probe import record_attention
    from manyheads.probe.attention.interface import AttentionObserver
    from manyheads.probe.attention.recording import empty_record

    lengths = (32,) if ARGUMENTS.tiny else LENGTHS
    model, found = llama(max(lengths)), {"times": []}
    few = ("entropy", "logsumexp", "mean_logit", "max_logit", "first_mass", "relative_output")

    def recorded(tokens, **options):
        with record_attention(model, rows=None, **options) as record:
            model(tokens, use_cache=False)
        return record

    plain = empty_record(model, None, None, None, 0)
    plain._names.clear()  # no layer is measured

    def bare(tokens):
        with AttentionObserver(model, plain.observe, plain.attend).observing():
            model(tokens, use_cache=False)

    with torch.no_grad():
        for n in lengths:
            batch = max(1, 8192 // n) if ARGUMENTS.device == "cuda" else 1
            tokens = torch.randint(0, 512, (batch, n), device=ARGUMENTS.device)
            calls = {
                "kernel, no statistics": lambda t=tokens: bare(t),
                "kernel, every figure": lambda t=tokens: recorded(t, kernel=True),
                "kernel, few figures": lambda t=tokens: recorded(t, kernel=True, figures=few),
                "sdpa": lambda t=tokens: model(t, use_cache=False),
                "sdpa, every figure beside it": lambda t=tokens: recorded(t),
                "sdpa, 64 rows": lambda t=tokens: sampled(t),
            }

            def sampled(tokens):
                with record_attention(model, rows=64) as record:
                    model(tokens, use_cache=False)
                record.settle()

            timed = turns(calls, functools.partial(wall_time, repeats=5 if n < 20000 else 2))
            peaks = {name: peak_of(call) for name, call in calls.items()}
            if n <= 2048:
                model.set_attn_implementation("eager")
                pattern = lambda t=tokens: patterns(model, t)  # noqa: E731
                base = timed["kernel, no statistics"]["ms"]
                try:
                    pattern()
                    spent = wall_time(pattern, 2)
                    timed["output_attentions, entropy"] = {"ms": spent, "ratio": spent / base}
                    peaks["output_attentions, entropy"] = peak_of(pattern)
                finally:
                    model.set_attn_implementation("sdpa")
            mine, theirs = (recorded(tokens, kernel=each).dataset() for each in (True, False))
            apart = {
                name: float(abs(mine[name] - theirs[name]).max()) for name in ("entropy", "logsumexp", "max_logit")
            }
            found["times"].append({"n": n, "batch": batch, "times": timed, "peak": peaks, "apart": apart})
            save("forward", found)
    return found


def patterns(model, tokens):
    for p in model(tokens, use_cache=False, output_attentions=True).attentions:
        p = p.float()
        (p * (p + 1e-8).log()).sum(-1).mean((0, 2))


def entropy():
    import torch

    from manyheads.attention import attention_entropy, causal
    from manyheads.attention.flash_kernel import Tiles, attend

    n, heads, found = (40, 1, []) if ARGUMENTS.tiny else (16384, 4, [])
    for dtype in (torch.float32, half()):
        draw = torch.Generator(ARGUMENTS.device).manual_seed(0)
        q, k = (torch.randn(heads, n, 64, generator=draw, device=ARGUMENTS.device).to(dtype) for _ in range(2))
        hidden = torch.ones(n, n, dtype=torch.bool, device=ARGUMENTS.device).triu(1)

        def materialized(q=q, k=k, hidden=hidden):
            s = (q.float() @ k.float().mT * 64**-0.5).masked_fill(hidden, -torch.inf)
            p = s.softmax(-1)
            return -torch.xlogy(p, p).sum(-1), s.logsumexp(-1)

        calls = {"ours": lambda q=q, k=k: attention_entropy(q, k, mask=causal), "materialized": materialized}
        if dtype == torch.float32:
            cut = Tiles(64, 32, 4, 2, precision="tf32x3")
            calls["kernel, tf32x3"] = lambda q=q, k=k, cut=cut: attend(
                q[None], k[None], None, ("entropy",), scale=0.125, causal=True, cut=cut)  # fmt: skip
        timed = turns(calls, lambda call: event_time(call, 100))
        peaks = {name: peak_of(call) for name, call in calls.items()}
        rows = torch.linspace(0, n - 1, 16, device=q.device).long()
        s = (q[:, rows].double() @ k.double().mT / 8).masked_fill(hidden[rows], -torch.inf)
        p = s.softmax(-1)
        off = attention_entropy(q, k, mask=causal)[0][:, rows].double() + torch.xlogy(p, p).sum(-1)
        found.append({"dtype": str(dtype), "n": n, "heads": heads, "times": timed, "peak": peaks,
                      "error in eps": float(off.abs().max()) * 2**23})  # fmt: skip
    return {"cases": found}


def gpt(size=None, seed=0):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    size = size or ({"n_embd": 32, "n_layer": 2, "n_head": 2} if ARGUMENTS.tiny else {})
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    vocabulary, positions = (64, 32) if ARGUMENTS.tiny else (50304, 1024)
    config = GPT2Config(vocab_size=vocabulary, n_positions=positions, use_cache=False, **drop, **size)
    with torch.device(ARGUMENTS.device):
        return GPT2LMHeadModel(config).train()


def recorder():
    import torch

    from manyheads.probe import AttentionRecorder

    fused = {"fused": True} if ARGUMENTS.device == "cuda" else {}
    draw = torch.Generator(ARGUMENTS.device).manual_seed(1)
    shape, words = ((2, 16), 64) if ARGUMENTS.tiny else ((8, 1024), 50257)
    data = torch.randint(0, words, (4, *shape), generator=draw, device=ARGUMENTS.device)
    count = 4 if ARGUMENTS.tiny else 60
    found = {}

    def stepper(model, optimizer):
        def step(number):
            batch = data[number % len(data)]
            with torch.autocast(ARGUMENTS.device, dtype=torch.bfloat16):
                loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def build():
        model = gpt()
        return model, stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4, **fused))

    # Losses are equal to the last bit, with deterministic kernels in both trainings.
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses = []
    for recorded in (False, True):
        model, step = build()
        record = AttentionRecorder(model, share=None, every=2) if recorded else None
        mine = []
        for number in range(6):
            with record.step(number) if record else contextlib.nullcontext():
                mine.append(step(number))
        losses.append(torch.stack(mine).cpu())
        del model, step
    torch.use_deterministic_algorithms(False)
    found["losses equal to the bit"] = bool(torch.equal(*losses))
    found["recorded steps"] = record.dataset().sizes["step"]
    save("recorder", found)

    # No wait for the device outside of recorded steps.
    model, step = build()
    quiet = AttentionRecorder(model, share=None, every=10**6)
    with quiet.step(0):
        step(0)
    for name, each in (("training alone", None), ("with the recorder", quiet)):
        try:
            if ARGUMENTS.device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            for number in range(1, 4):
                with each.step(number) if each else contextlib.nullcontext():
                    step(number)
            found[f"waits, {name}"] = "none"
        except RuntimeError as error:
            found[f"waits, {name}"] = str(error)[:200]
        finally:
            if ARGUMENTS.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    save("recorder", found)

    for mode in ("eager", "compiled"):
        if mode == "compiled":
            if ARGUMENTS.tiny or left() < 100:
                found["compiled"] = "left out: no time" if not ARGUMENTS.tiny else "left out: tiny"
                continue
            model.compile()
        for number in range(3):
            step(number)
        live = AttentionRecorder(model, share=0.01)
        for number in range(count):
            with live.step(number):
                step(number)
        found[mode] = step_times(step, live, count)
        save("recorder", found)
    return found


def step_times(step, live, count):
    """Return ms of a step in stretches of training with the recorder and without, in turn."""
    times, number = {"without": [], "with": []}, 10**4
    for _ in range(1 if ARGUMENTS.tiny else 3):
        for name, each in times.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                number += 1
                with live.step(number) if name == "with" else contextlib.nullcontext():
                    step(number)
            synchronize()
            each.append(1e3 * (time.perf_counter() - start) / count)
    medians = {name: statistics.median(each) for name, each in times.items()}
    recorded = live.dataset().sizes["step"]
    return medians | {"ratio": medians["with"] / medians["without"], "all": times, "recorded": recorded,
                      "spent": repr(live)}  # fmt: skip


# JAX, in processes of their own


def in_child(part, platform, seconds):
    """Run a part in JAX on a platform in a process of its own, for so many seconds at most."""
    command = [sys.executable, __file__, "--child", part, "--device", ARGUMENTS.device]
    command += ["--tiny"] if ARGUMENTS.tiny else []
    environment = os.environ | {"JAX_PLATFORMS": platform}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-600:])
    return json.loads(ran.stdout.splitlines()[-1])


def accelerator():
    return "cuda" if ARGUMENTS.device == "cuda" else "cpu"


def entropy_jax():
    return in_child("entropy_jax", accelerator(), min(80, left()))


def child_entropy_jax():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from manyheads.attention import attention_entropy, causal

    n, heads = (64, 2) if ARGUMENTS.tiny else (16384, 4)
    q, k = (jnp.asarray(np.random.default_rng(i).normal(size=(heads, n, 64)), jnp.float32) for i in range(2))

    @jax.jit
    def materialized(q, k):
        s = jnp.einsum("hnd,hmd->hnm", q, k, precision="highest") / 8
        s = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(n), s, -jnp.inf)
        lse = jax.nn.logsumexp(s, -1)
        p = jnp.exp(s - lse[..., None])
        return -jnp.sum(jax.scipy.special.xlogy(p, p), -1), lse

    programs = {"materialized": materialized}
    for block in (128, 1024):
        programs[f"ours, block {block}"] = jax.jit(
            lambda q, k, block=block: attention_entropy(q, k, mask=causal, block=block))  # fmt: skip
    found = {}
    for name, program in programs.items():
        compiled = program.lower(q, k).compile()
        memory = compiled.memory_analysis()
        compiled(q, k)[0].block_until_ready()
        times = []
        for _ in range(2 if ARGUMENTS.tiny else 10):
            start = time.perf_counter()
            value = compiled(q, k)[0].block_until_ready()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = {"ms": statistics.median(times), "MB": memory.temp_size_in_bytes / 2**20,
                       "mean entropy": float(jnp.mean(value))}  # fmt: skip
    return found | {"n": n, "heads": heads, "platform": jax.default_backend()}


def bigram():
    found = {}
    for platform in dict.fromkeys((accelerator(), "cpu")):
        found[platform] = in_child("bigram", platform, min(60, left()))
        save("bigram", found)
    return found


def child_bigram():
    from benchmarks import bigram as steps

    found = {}
    for tokens in (3,) if ARGUMENTS.tiny else (3, 100):
        for kind in ("rbg",) if ARGUMENTS.tiny else ("threefry2x32", "rbg"):
            call, count = steps.gathering_jax(tokens, kind)
            call()
            start, calls = time.perf_counter(), 0
            while calls < 2 or (time.perf_counter() - start < 2 and not ARGUMENTS.tiny):
                call()
                calls += 1
            found[f"N = {tokens}, {kind}"] = 1e3 * (time.perf_counter() - start) / calls / count
    return found


def extract():
    import numpy as np
    import torch

    from manyheads.recovery import compare_layers, extract_layer, gpt_layer

    dim, heads = (16, 2) if ARGUMENTS.tiny else (256, 12)
    layer = gpt_layer(np.random.default_rng(0), dim, heads)
    seconds, calls = 0.0, 0
    on_device = torch_layer(layer)

    def oracle(x):
        nonlocal seconds, calls
        start = time.perf_counter()
        answer = on_device(torch.as_tensor(np.asarray(x), device=ARGUMENTS.device)).cpu().numpy()
        seconds, calls = seconds + time.perf_counter() - start, calls + 1
        return answer

    oracle(np.zeros((1, 2, dim)))
    seconds, calls, start = 0.0, 0, time.perf_counter()
    found = extract_layer(oracle, dim)
    total = time.perf_counter() - start
    errors = compare_layers(layer, found.layer)
    return {"dim": dim, "heads": heads, "seconds": total, "oracle": seconds, "calls": calls,
            "solver share": 1 - seconds / total, "theta": float(errors.theta),
            "projection": float(errors.projection)}  # fmt: skip


def torch_layer(layer):
    """Return a layer as a function of float64 tensors on the device, by the formula of `evaluate_layer`."""
    import numpy as np
    import torch

    def moved(array):
        return None if array is None else torch.as_tensor(np.asarray(array, np.float64), device=ARGUMENTS.device)

    theta, projection, beta, bias = map(moved, (layer.theta, layer.projection, layer.key_bias, layer.bias))

    def apply(x):
        y = torch.zeros_like(x)
        for head in range(len(theta)):
            s = x @ theta[head] @ x.mT
            s = s if beta is None else s + (x @ beta[head])[:, None]
            if layer.causal:
                s = s.masked_fill(torch.ones_like(s[0]).triu(1).bool(), -torch.inf)
            y += s.softmax(-1) @ x @ projection[head]
        return y if bias is None else y + bias

    return apply


# Learning rates of a GPT that were tuned at a quarter of its heads


RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def text(count, length, draw):
    """Return random windows of bytes of the training text, and fixed ones of the held-out text."""
    import numpy as np
    import torch

    folder = ARGUMENTS.text or Path("/nowhere")
    if folder.is_dir():
        parts = [(folder / name).read_bytes() for name in ("test.txt", "valid.txt")]
    else:
        parts = [bytes(range(32, 96)) * 200] * 2  # a dry run
    data, held = (torch.from_numpy(np.frombuffer(each, np.uint8).astype(np.int64)) for each in parts)
    data, held = data.to(ARGUMENTS.device), held.to(ARGUMENTS.device)
    offsets = torch.arange(length, device=ARGUMENTS.device)
    spread = torch.linspace(0, len(held) - length - 1, 4 * count, device=ARGUMENTS.device).long()

    def batch():
        start = torch.randint(0, len(data) - length, (count, 1), generator=draw, device=ARGUMENTS.device)
        return data[start + offsets]

    return batch, held[spread[:, None] + offsets]


def train(heads, rate, scaled, seconds, steps, base_heads, seed=0):
    """Return the held-out loss after so many steps, or after so many seconds, warm-up and cosine decay included."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.scaling import BaseHyperparameters, Parametrization, initialize_model, torch_groups

    key_dim, depth, length, count = (8, 2, 32, 4) if ARGUMENTS.tiny else (64, 12, 256, 32)
    torch.manual_seed(seed)
    draw = torch.Generator(ARGUMENTS.device).manual_seed(seed)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=key_dim * heads, n_layer=depth, n_head=heads,
                        use_cache=False, bos_token_id=0, eos_token_id=0, **drop)  # fmt: skip
    with torch.device(ARGUMENTS.device):
        model = GPT2LMHeadModel(config).train()
    groups = model.parameters()
    if scaled:
        p = Parametrization(base=(key_dim, base_heads, depth))
        tuned = BaseHyperparameters(learning_rate=rate)
        initialize_model(p, model, tuned, generator=draw)
        groups = torch_groups(p, model, tuned)
        groups = [{key: group[key] for key in ("params", "lr", "eps", "weight_decay")} for group in groups]
    fused = {"fused": True} if ARGUMENTS.device == "cuda" else {}
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, **fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / (0.1 * steps)) * max(0.0, 1 - s / steps)
    )
    batch, held = text(count, length, draw)

    def loss_of(tokens):
        with torch.autocast(ARGUMENTS.device, dtype=torch.bfloat16):
            return model(tokens, labels=tokens).loss

    start, number = time.perf_counter(), 0
    for number in range(1, steps + 1):
        loss_of(batch()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if number % 20 == 0:
            synchronize()
            if time.perf_counter() - start > seconds:
                break
    with torch.no_grad():
        losses = [float(loss_of(part)) for part in held.split(count)]
    return {"heads": heads, "rate": rate, "scaled": scaled, "steps": number, "of": steps,
            "loss": statistics.mean(losses), "seconds": time.perf_counter() - start,
            "parameters": sum(each.numel() for each in model.parameters())}  # fmt: skip


def proof():
    heads, base = (4, 1) if ARGUMENTS.tiny else (12, 3)
    steps, seconds = (3, 5) if ARGUMENTS.tiny else (ARGUMENTS.steps, 25)
    rates, found = RATES[:2] if ARGUMENTS.tiny else RATES, {"runs": [], "tokens": "bytes", "base heads": base}
    plan = [(base, True, rate) for rate in rates]
    plan += [(heads, scaled, rate) for rate in rates for scaled in (True, False)]
    for count, scaled, rate in plan:
        if left() < 12:
            found["left out"] = f"from {count} heads at {rate} on"
            break
        run = train(count, rate, scaled, seconds, steps, base)
        found["runs"].append(run)
        save("proof", found)
        print(json.dumps(run), flush=True)
    draw_proof(found["runs"], base)
    return found


def draw_proof(runs, base):
    """Draw final losses against the base's learning rate."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    kinds = {
        f"{base} heads, the base": lambda one: one["heads"] == base,
        "all heads, scaled from the base": lambda one: one["heads"] > base and one["scaled"],
        "all heads, one rate, usual init": lambda one: one["heads"] > base and not one["scaled"],
    }
    for name, belongs in kinds.items():
        chosen = [one for one in runs if belongs(one)]
        axes.plot([one["rate"] for one in chosen], [one["loss"] for one in chosen], "o-", label=name)
    axes.set(xscale="log", xlabel="learning rate at the base", ylabel="held-out loss (nat per byte)")
    axes.legend()
    figure.savefig(ARGUMENTS.out.with_suffix(".svg"))
    plt.close(figure)


SECTIONS = {
    "device": device, "correctness": correctness, "kernel": kernel, "forward": forward, "entropy": entropy,
    "recorder": recorder, "entropy_jax": entropy_jax, "bigram": bigram, "extract": extract,
    "proof": proof,
}  # fmt: skip
CHILDREN = {"entropy_jax": child_entropy_jax, "bigram": child_bigram}
NEEDS = {"recorder": 50, "entropy_jax": 40, "bigram": 40, "extract": 30}  # seconds, or it is left out
RESULTS: dict = {}
BEGUN = time.perf_counter()


def left():
    """Return the seconds that are left."""
    return ARGUMENTS.budget - (time.perf_counter() - BEGUN)


def save(name, found):
    """Write all results so far."""
    RESULTS[name.split()[0]] = found
    ARGUMENTS.out.parent.mkdir(parents=True, exist_ok=True)
    ARGUMENTS.out.write_text(json.dumps(RESULTS, indent=1))


def run(names):
    for name in names:
        start = time.perf_counter()
        if left() < NEEDS.get(name, 5) and not ARGUMENTS.tiny:
            save(name, {"left out": f"{left():.0f} s left"})
            continue
        try:
            found = SECTIONS[name]() or {}
        except Exception:
            found = {**RESULTS.get(name, {}), "error": traceback.format_exc()[-1200:]}
        save(name, found | {"seconds spent": time.perf_counter() - start})
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def table(results):
    """Yield the lines of a readable table of results."""
    for name, found in results.items():
        yield f"\n## {TITLES.get(name, name)}"
        if "error" in found:
            yield found["error"]
        yield from rows_of(name, found)


def rows_of(name, found):
    if name == "kernel":
        for one in found.get("sweep", []):
            said = one.get("error") or ", ".join(f"{k} {v['ms']:.3f} ms" for k, v in one["times"].items())
            yield f"d = {one['d']}, tiles {list(one['tiles'])}: {said}"
    if name in ("kernel", "forward"):
        for one in found.get("times", []):
            yield "" + ", ".join(f"{k} = {v}" for k, v in one.items() if k not in ("times", "peak", "rows", "apart"))
            for variant, timed in one["times"].items():
                span = f" ({timed['least']:.3f} to {timed['most']:.3f})" if "least" in timed else ""
                memory = one["peak"].get(variant)
                memory = "" if memory is None else f", {memory:.0f} MB"
                yield f"  {variant}: {timed['ms']:.3f} ms, ratio {timed['ratio']:.3f}{span}{memory}"
            yield f"  errors: {json.dumps(one.get('rows') or one.get('apart'))}"
        return
    for key, value in found.items():
        if key not in ("error",):
            yield f"{key}: {json.dumps(value, default=str)}"[:700]


def main():
    global ARGUMENTS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp")) / "gpu.json")
    parser.add_argument("--section", action="append", choices=SECTIONS)
    parser.add_argument("--budget", type=float, default=345.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="folder with test.txt and valid.txt")
    parser.add_argument("--steps", type=int, default=300, help="of a training of the proof")
    parser.add_argument("--child", choices=CHILDREN)
    ARGUMENTS = parser.parse_args()
    if ARGUMENTS.child:
        print(json.dumps(CHILDREN[ARGUMENTS.child]()))
        return
    if ARGUMENTS.device == "cpu":
        import torch

        torch.set_num_threads(1)
        interpret_triton()
    run(ARGUMENTS.section or [name for name in SECTIONS if name != "proof"])
    print(*table(RESULTS), sep="\n")


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
if __name__ == "__main__":
    main()

"""Attention statistics of PyTorch models, beside plain attention in float64 and beside the model without a record."""

import itertools
from pathlib import Path

import numpy as np
from tests.acceptance import _probe_alarms, _probe_alterations, _probe_live, _probe_shapes, _probe_weights
from tests.acceptance._lane import Figure, Measured
from tests.probe.families import FAMILIES, NOT_FUSED, OUTSIDE, batch, build, double, eager_patterns, run
from tests.probe.test_families import compare
from tests.probe.test_qk_clip import RULES, clip_copy
from tests.probe.test_recording import gradients
from tests.probe.test_statistics import LIMITS, measure_errors

from manyheads.errors import UsageError
from manyheads.probe import record_attention

PADDED = ("gpt2", "gpt_neox", "opt", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "olmo2")
PADDED += ("olmo3", "bert", "modernbert", "deepseek_v3")


def family(folder: Path, name: str, seeds: int) -> Measured:
    """Compare a family with plain attention in float64, and its output with and without a record."""
    import torch

    ways = (64,) if name in NOT_FUSED else (64, None)
    worst, same, single, peak = {}, True, 0.0, 0.0
    paddings = (None, "right") if name in PADDED else (None,)
    for seed, padding, rows in itertools.product(range(seeds), paddings, ways):
        model, inputs = build(name, seed), batch(name, seed, padding)
        before = run(model, inputs)
        with record_attention(model, rows=rows) as record:
            same &= torch.equal(before, run(model, inputs))
        same &= torch.equal(before, run(model, inputs))
        rounded = record.dataset()
        model, inputs = double(model, inputs)
        with record_attention(model, rows=rows) as record:
            run(model, inputs)
        found = record.dataset()
        patterns = eager_patterns(model, inputs, set(found.module.values))
        for figure, off in compare(found, patterns, inputs).items():
            worst[figure] = max(worst.get(figure, 0.0), off)
        single = max(single, float(np.nanmax(np.abs(rounded.entropy - found.entropy))))
        peak = max(peak, float(found.max_logit.max()))
    extent = f"entropy {worst['entropy']:.1e}; the model in float32 {single:.1e}; largest logit {peak:.0f}; "
    extent += f"padding {', '.join(map(str, paddings))}; output {'identical' if same else 'DIFFERENT'}"
    error = max(worst.values())
    return Measured(f"{error:.1e} at most over {len(worst)} figures", extent, f"0-{seeds - 1}", same and error <= 1e-5)


def refusals(folder: Path) -> Measured:
    """Ask for a record of models outside the interface."""
    named = 0
    for name in OUTSIDE:
        try:
            with record_attention(build(name)):
                pass
        except UsageError as error:
            named += f"({name})" in str(error)
    return Measured(f"{named} of {len(OUTSIDE)} refused by name", ", ".join(OUTSIDE), "none", named == len(OUTSIDE))


def law(folder: Path, seeds: int, length: int) -> Measured:
    """Measure the errors of both ways in float32 against float64 on the same queries and keys."""
    worst: dict[str, float] = {}
    for seed, sharp, masked, sunk in itertools.product(range(seeds), (0.3, 1, 3, 10, 50), (0, 1), (0, 1)):
        for name, error in measure_errors(length, sharp, bool(masked), bool(sunk), seed).items():
            worst[name] = max(worst.get(name, 0.0), error)
    peak = worst.pop("peak")
    shown = ", ".join(f"{name} {worst[name]:.2g} (limit {limit:g})" for name, limit in LIMITS.items())
    passed = all(worst[name] <= limit for name, limit in LIMITS.items())
    figure = f"entropy {worst['rows entropy']:.2f} and {worst['fused entropy']:.2f} eps max(1, max |s|, |beta|)"
    return Measured(figure, f"n = {length}, logits up to {peak:.0f}; {shown}", f"0-{seeds - 1}", passed)


def modes(folder: Path) -> Measured:
    """Compare outputs and gradients with and without a record, in every mode in which a model runs."""
    import torch

    plain = build("llama", max_position_embeddings=64, attention_dropout=0.1)
    ids = batch("llama")["input_ids"]
    same = {}
    for name, kind in (("training", None), ("reentrant checkpoints", True), ("checkpoints", False)):
        (expected, state, _), (found, after, calls) = (gradients(plain, recorded, kind) for recorded in (False, True))
        same[name] = all(map(torch.equal, expected, found)) and torch.equal(state, after) and calls == 2

    def compared(function, model):
        before = function()
        with record_attention(model, rows=8) as record:
            on = function()
        off = function()
        with record_attention(model, rows=8) as again:
            on_again = function()
        counts = [layer.calls for each in (record, again) for layer in each.layers.values()]
        return all(torch.equal(before, each) for each in (on, off, on_again)) and min(counts) > 0

    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):

        def generate(options=cache):
            return plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **options)

        same["static cache" if cache else "dynamic cache"] = compared(generate, plain)
    flexible = build("llama", max_position_embeddings=64, attn_implementation="flex_attention")
    same["flex_attention"] = compared(lambda: run(flexible, {"input_ids": ids}), flexible)
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(plain, backend=backend)
        same[f"compiled, {backend}"] = compared(lambda: run(compiled, {"input_ids": ids}), plain)  # noqa: B023
    with torch.autocast("cpu", torch.bfloat16):
        same["autocast"] = compared(lambda: run(plain, {"input_ids": ids}), plain)
    shown = ", ".join(f"{name}: {'identical' if value else 'DIFFERENT'}" for name, value in same.items())
    return Measured(f"{sum(same.values())} of {len(same)} modes identical", shown, "0", all(same.values()))


def coverage(folder: Path, steps: int, draws: int) -> Measured:
    """Train a small model on text and count how often intervals of 64 sampled rows hold the mean over all rows."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.data import load_text

    torch.manual_seed(0)
    length = 256
    text = torch.tensor(list(load_text().content.encode()), dtype=torch.long)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - length, (4,))
        windows = torch.stack([text[start : start + length] for start in starts])
        optimizer.zero_grad()
        loss = model(windows, labels=windows).loss
        loss.backward()
        optimizer.step()
    model.eval()
    inputs = {"input_ids": text[: 4 * length].view(4, length)}
    with record_attention(model, rows=None) as record:
        run(model, inputs)
    exact = record.dataset()
    shares: dict[str, list[float]] = {}
    for seed in range(draws):
        with record_attention(model, rows=64, seed=seed) as record:
            run(model, inputs)
        found = record.dataset()
        for name in ("entropy", "logsumexp", "mean_logit", "collision", "first_mass", "distance"):
            inside = (found[f"{name}_low"] <= exact[name]) & (exact[name] <= found[f"{name}_high"])
            shares.setdefault(name, []).append(float(inside.mean()))
    means = {name: float(np.mean(values)) for name, values in shares.items()}
    shown = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    extent = f"{shown}; {draws} draws, 16 heads, loss {float(loss.detach()):.2f} after {steps} steps"
    passed = min(means.values()) >= 0.9
    return Measured(f"{min(means.values()):.3f} to {max(means.values()):.3f} covered", extent, f"0-{draws - 1}", passed)


def clipping(folder: Path, seeds: int) -> Measured:
    """Apply the factors to copies of models and measure their largest logits again."""
    worst = dict.fromkeys(RULES, 0.0)
    for name, seed in itertools.product(RULES, range(seeds)):
        found, before, after = clip_copy(name, seed)
        assert set(found.rule.values) == {RULES[name]}
        expected = found.applied.values[0] * before
        worst[name] = max(worst[name], float(np.max(np.abs(after / expected - 1))))
    shown = ", ".join(f"{name} ({RULES[name]}) {error:.1e}" for name, error in worst.items())
    return Measured(f"{max(worst.values()):.1e}", shown, f"0-{seeds - 1}", max(worst.values()) <= 1e-5)


FIGURES = [
    *(
        Figure(
            f"family-{name}",
            f"statistics of {name} are those of plain attention, and its output is untouched",
            "each figure within 1e-5 of plain attention in float64; output identical to the bit",
            family,
            {"name": name, "seeds": 3},
        )
        for name in FAMILIES
    ),
    Figure("refusals", "models outside the attention interface are refused by name", "4 of 4", refusals),
    Figure(
        "error-law",
        "errors in float32 grow as the rounding of the largest logit",
        "entropy within 4 (rows) and 6 (fused) eps max(1, max |s|, |beta|), sinks 2e-6, collision 5e-5 relative, "
        "exact largest logit",
        law,
        {"seeds": 3, "length": 512},
    ),
    Figure("modes", "outputs, gradients and generators are untouched in every mode", "identical to the bit", modes),
    Figure(
        "row-intervals",
        "intervals of 64 sampled rows hold the mean over all rows of a trained model",
        "at least 0.90 for every figure",
        coverage,
        {"steps": 150, "draws": 60},
    ),
    Figure(
        "qk-clip",
        "factors applied to a copy bring the largest logits to where they are predicted",
        "1e-5 relative",
        clipping,
        {"seeds": 5},
    ),
    *_probe_alarms.FIGURES,
    *_probe_alterations.FIGURES,
    *_probe_live.FIGURES,
    *_probe_shapes.FIGURES,
    *_probe_weights.FIGURES,
]

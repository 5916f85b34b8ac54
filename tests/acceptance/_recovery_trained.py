"""Extraction of a trained GPT-2: every attention sub-module, every block through its LayerNorm, float32 evaluation."""

import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import ROOT, Figure, Measured
from tests.acceptance._recovery_model import WIKITEXT, trained_checkpoints

LAYERS = range(4)
OWN = ("noise", "selection", "verification")  # stages that measure and verify; what is left is the extraction itself


@lru_cache(maxsize=16)
def hidden_states(path: Path) -> tuple[np.ndarray, ...]:
    """Return what enters every block on 16 windows of held-out text, (16, 64, d) float64 each."""
    import torch
    from transformers import AutoModel

    from manyheads.data.characters import read_characters

    _, (_, validation) = read_characters(ROOT / WIKITEXT)
    tokens = torch.from_numpy(validation[: 16 * 64].reshape(16, 64)).long()
    model = AutoModel.from_pretrained(path, local_files_only=True, output_hidden_states=True).eval()
    with torch.no_grad():
        states = model(input_ids=tokens).hidden_states
    return tuple(state.double().numpy() for state in states[:-1])


@lru_cache(maxsize=16)
def normed_states(path: Path, layer: int) -> np.ndarray:
    """Return what enters the attention of a block: the stream behind its LayerNorm."""
    from safetensors.numpy import load_file

    weights = load_file(path / "model.safetensors")
    x = hidden_states(path)[layer]
    u = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    gain, shift = (weights[f"transformer.h.{layer}.ln_1.{kind}"].astype(float) for kind in ("weight", "bias"))
    return gain * u + shift


def extract_one(case: dict[str, Any]) -> dict[str, Any]:
    """Extract one layer of one checkpoint; return what it cost and how far it is off, on random and on real input."""
    from manyheads.recovery import ExtractionOptions, RecoveryRefused, extract_layer
    from manyheads.recovery.layers.matching import function_error
    from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

    path, layer, through = Path(case["path"]), case["layer"], case["through"]
    oracle = checkpoint_oracle(path, layer, through=through, dtype=case["dtype"])
    in_double = checkpoint_oracle(path, layer, through=through)  # in float64, whatever was asked
    options = ExtractionOptions(
        causal=True,
        residual=oracle.residual,
        accurate=case["accurate"],
        dtype=oracle.dtype,
        tolerance=case.get("tolerance", 1e-6),
    )
    start = time.process_time()
    try:
        found = extract_layer(oracle, oracle.dim, seed=case["seed"], options=options)
    except RecoveryRefused as refusal:
        return {"refused": type(refusal).__name__, "said": str(refusal)}
    seconds = time.process_time() - start
    rng = np.random.default_rng([case["seed"], layer])
    real = hidden_states(path)[layer] if through == "block" else normed_states(path, layer)
    errors = {}
    for name, x in (("Gaussian", rng.standard_normal((100, 12, oracle.dim))), ("real", real)):
        answers = in_double(x) - (x if oracle.residual else 0)
        errors[name] = function_error(lambda _, y=answers: y, found.extracted.attention, x)
    calls = sum(counts.calls for name, counts in found.counts.items() if name not in OWN)
    return {
        "heads": found.heads,
        "errors": errors,
        "calls": calls,
        "seconds": seconds,
        "certified": found.certificate.largest_error,
        "method": found.method,
    }


def cases(folder: Path, seeds: int, **fixed: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Extract every layer of both checkpoints with every seed; each outcome is kept at once, and not measured again."""
    kept = folder / "outcomes.jsonl"
    known = {}
    if kept.exists():
        known = {json.dumps(case): outcome for case, outcome in map(json.loads, kept.read_text().splitlines())}
    for path in trained_checkpoints().values():
        for layer in LAYERS:
            for seed in range(seeds):
                case = {"path": str(path), "layer": layer, "seed": seed, **fixed}
                if json.dumps(case) not in known:
                    outcome = extract_one(case)
                    with kept.open("a") as file:
                        file.write(json.dumps([case, outcome]) + "\n")
                    known[json.dumps(case)] = outcome
                yield case, known[json.dumps(case)]


def extraction(folder: Path, seeds: int, error: float, calls: float, cpu: float, **fixed: Any) -> Measured:
    """Extract all layers; met when none is refused, all heads are found, and errors, calls and seconds are within."""
    outcomes = [outcome for _, outcome in cases(folder, seeds, **fixed)]
    found = [outcome for outcome in outcomes if "refused" not in outcome]
    if not found:
        return Measured("everything was refused", outcomes[0]["said"], f"0-{seeds - 1}", False)
    worst = {name: max(outcome["errors"][name] for outcome in found) for name in ("Gaussian", "real")}
    middle = float(np.median([outcome["errors"]["Gaussian"] for outcome in found]))
    right = sum(outcome["heads"] == 8 for outcome in found)
    # A failure is silent when the certificate accepts what is wrong on the sequences that it speaks of.
    silent = sum(outcome["errors"]["Gaussian"] > fixed.get("tolerance", 1e-6) for outcome in found)
    most, slowest = max(outcome["calls"] for outcome in found), max(outcome["seconds"] for outcome in found)
    refused = len(outcomes) - len(found)
    figure = (
        f"{right} of {len(outcomes)} with 8 heads; function error median {middle:.1g}, worst {worst['Gaussian']:.1g} "
        f"(Gaussian), {worst['real']:.1g} (hidden states of real text); {refused} refused, {silent} silent failures"
    )
    fewest = min(outcome["calls"] for outcome in found)
    middle = float(np.median([outcome["calls"] for outcome in found]))
    methods = ", ".join(sorted({outcome["method"] for outcome in found}))
    extent = (
        f"{fewest:,}-{most:,} calls, median {middle:,.0f}, by {methods}; at most {slowest:.1f} CPU s each, "
        "verification with 400 more calls included"
    )
    passed = right == len(outcomes) and max(worst.values()) < error and most < calls and slowest < cpu and not silent
    return Measured(figure, extent, f"0-{seeds - 1}, both checkpoints, four layers", bool(passed))


def _figure(name: str, claim: str, bounds: dict[str, float], seeds: int = 5, **fixed: Any) -> Figure:
    usual = {"through": "attention", "accurate": False, "dtype": "float64"}
    measure: Callable[..., Measured] = extraction
    said = f"all heads; function error < {bounds['error']:g}, < {bounds['calls']:,g} calls, < {bounds['cpu']:g} CPU s"
    return Figure(name, claim, said, measure, {"seeds": seeds, **bounds, **usual, **fixed})


FIGURES = (
    _figure(
        "trained-attention",
        "every attention sub-module of a trained GPT-2, in float64",
        {"error": 1e-7, "calls": 1500, "cpu": 2},
    ),
    _figure(
        "trained-attention-accurate",
        "the same with accurate=True",
        {"error": 1e-10, "calls": 5000, "cpu": 10},
        accurate=True,
    ),
    _figure(
        "trained-blocks",
        "every block x + attn(LN(x)) of a trained GPT-2",
        {"error": 1e-9, "calls": 5000, "cpu": 10},
        seeds=2,
        through="block",
    ),
    _figure(
        "trained-float32",
        "every attention sub-module of a trained GPT-2, evaluated in float32",
        {"error": 1e-8, "calls": 45_000, "cpu": 90},
        seeds=1,
        dtype="float32",
    ),
    _figure(
        "trained-probes",
        "the same where a largest squared error of 1e-2 is accepted: heads followed from probe to probe",
        {"error": 1e-2, "calls": 45_000, "cpu": 90},
        seeds=3,
        dtype="float32",
        tolerance=1e-2,
    ),
)

"""Extraction of tiny models of transformers through their front doors, and of blocks through the residual stream."""

from collections import Counter
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.recovery.oracle.test_front_doors import ENCODERS, IMAGES, PLAIN, TURNED, tiny
from tests.recovery.score_checkpoints import BEHIND_NORMS, tiny_model

from manyheads.recovery import RecoveryRefused, extract_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

SEEDS = [0, 1, 2]
BLOCKS = ("gpt2", "gpt_bigcode", "opt", "biogpt", "roberta-prelayernorm")
BLOCKS += ("llama", "mistral", "phi3", "arcee", "mixtral", "stablelm", "falcon")
SCORED = ("Qwen2", "Pythia", "Qwen3", "Mistral, window", "BLOOM", "MPT", *BEHIND_NORMS)


def _extract(families: tuple[str, ...], through: str, seeds: list[int]) -> Measured:
    """Extract a layer of random models, 2 heads in 16 dimensions or 4 in 32, and compare on fresh sequences."""
    refused: Counter[str] = Counter()
    errors, calls, wrong = [], [], 0
    for family in families:
        for seed in seeds:
            scored = family in SCORED
            model, layer = tiny_model(family, seed) if scored else (tiny(family, seed), 1)
            oracle = checkpoint_oracle(model, layer, through=through)
            try:
                found = extract_layer(oracle, seed=seed)
            except RecoveryRefused as refusal:
                refused[f"{family}: {type(refusal).__name__}"] += 1
                continue
            assert found.extracted is not None
            wrong += found.heads != (4 if scored else 2)
            calls.append(found.total.calls)
            x = np.random.default_rng([seed, 1]).standard_normal((20, 16, oracle.dim))
            rest = x if oracle.residual else 0.0
            errors.append(function_error(lambda x, ask=oracle, rest=rest: ask(x) - rest, found.extracted.attention, x))
    runs, names = len(families) * len(seeds), ", ".join(f"{name} ({n})" for name, n in refused.items()) or "none"
    return Measured(
        f"{len(calls)} of {runs} extracted, {wrong} with a wrong number of heads; function {max(errors):.1e}, "
        f"median {np.median(errors):.1e}",
        f"{min(calls)} to {max(calls)} calls; {len(families)} families; refused: {names}",
        ", ".join(map(str, seeds)),
        wrong == 0 and len(calls) >= 0.9 * runs and max(errors) < 1e-6,
    )


def doors(folder: Path, seeds: list[int]) -> Measured:
    """Attention sub-modules of all families in the class."""
    return _extract((*PLAIN, *ENCODERS, *IMAGES, *TURNED), "attention", seeds)


def blocks(folder: Path, seeds: list[int]) -> Measured:
    """x + attn(norm(x)): causal, full, rotary, and with other scores."""
    return _extract((*BLOCKS, *SCORED, "vit", "deit", "vit_mae", "ijepa"), "block", seeds)


FIGURES = [
    Figure(
        "front-doors",
        "attention of layer 1 of random models of transformers, found by the table of families (2 heads, d = 16)",
        "no wrong number of heads; 9 of 10 extracted; squared error of the function below 1e-6",
        doors,
        {"seeds": SEEDS},
    ),
    Figure(
        "blocks",
        "x + attn(norm(x)) of a layer of random models: LayerNorm and RMSNorm, causal, full, rotary, other scores",
        "no wrong number of heads; 9 of 10 extracted; squared error of the function below 1e-6",
        blocks,
        {"seeds": SEEDS},
    ),
]

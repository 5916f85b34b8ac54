"""Certificates of extraction over a thousand layers and other functions: none of their statements is false."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom
from tests.acceptance._lane import Figure, Measured
from tests.recovery.mixed_layers import IMPOSSIBLE, KINDS, build, run_case, surprise

from manyheads.attention import AttentionLayer, MultiHeadAttention

DIM = 32
TRAINED = ("GPT-like", "GPT-like", "GPT-like", "float32", "dead head", "LayerNorm", "residual", "capped logits")
"""What trained layers are made into, the plain one thrice."""

PARTS = ("theta", "projection", "key_bias", "bias")


def trained_layers(seeds: int, steps: int, snapshots: int) -> list[AttentionLayer]:
    """Train transformers of two layers and four heads on Python's documentation; return their layers on the way."""
    import jax
    import optax

    from manyheads.data import TextWindows
    from manyheads.data.characters import read_characters
    from manyheads.transformer import Shape, TransformerConfig, initialize, standard_scaling, train
    from manyheads.transformer.inputs import TokenInput
    from manyheads.transformer.losses import cross_entropy

    vocabulary, (training, _) = read_characters(None)
    size = len(vocabulary)
    config = TransformerConfig(
        Shape(8, 4, 2), TokenInput(size), length=32, outputs=size, causal=True, read_out="token", biases=True
    )
    scaling = standard_scaling(config.shape, config.inputs)
    optimizer = optax.adam(3e-3, b2=0.99)
    found: list[AttentionLayer] = []
    for seed in range(seeds):
        for_model, for_batches = jax.random.split(jax.random.key(seed))
        done = train(
            initialize(config, scaling, for_model),
            cross_entropy,
            TextWindows(training, 32, 32),
            optimizer,
            steps,
            for_batches,
            every=steps // snapshots,
            measure=lambda snapshot: jax.device_get(snapshot.model.weights.blocks),
        )
        print(f"seed {seed}: loss {float(done.losses[-1]):.2f} nat", flush=True)
        found += [layer for step, blocks in done.measured if step for layer in _layers(blocks)]
    return found


def _layers(blocks: Any) -> Iterator[AttentionLayer]:
    """Cut the stacked weights of a transformer into layers; its multipliers are all one in the standard scaling."""
    for depth in range(len(blocks.query)):
        weights = {name: np.asarray(array[depth], np.float64) for name, array in blocks._asdict().items()}
        factors = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
        heads = MultiHeadAttention(
            **{name: weights[name] for name in factors}, bias=weights["output_bias"], causal=True
        )
        merged = heads.merged()
        yield AttentionLayer(
            *map(np.asarray, (merged.theta, merged.projection, merged.key_bias, merged.bias)), causal=True
        )


def honest_certificates(folder: Path, layers: int, trained: int, steps: int, new: int, seed: int) -> Measured:
    """Extract every layer, and compare its certificate with new sequences; goes on where it was killed."""
    record = folder / "outcomes.jsonl"
    outcomes = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    stock = _kept_layers(folder / "trained.npz", trained, steps)
    kinds = [(kind, False) for kind in KINDS] + [(kind, True) for kind in TRAINED]
    with record.open("a") as file:
        for index in range(len(outcomes), layers):
            kind, is_trained = kinds[index % len(kinds)]
            rng = np.random.default_rng([seed, index])
            case = build(kind, rng, DIM, stock[rng.integers(len(stock))] if is_trained else None)
            outcome = run_case(case, index, new)
            row = {
                "kind": f"trained, {kind}" if is_trained else kind,
                "possible": kind not in IMPOSSIBLE,
                "end": outcome.end,
                "word": outcome.word,
                "error": outcome.certificate.largest_error if outcome.certificate else None,
                "beyond": outcome.beyond,
                "surprise": surprise(outcome),
                "bad": outcome.bad_accept,
            }
            outcomes.append(row)
            print(json.dumps(row), file=file, flush=True)
    return _summarize(outcomes, new, seed)


def _kept_layers(path: Path, seeds: int, steps: int) -> list[AttentionLayer]:
    """Train once, and keep the layers beside the outcomes."""
    if not path.exists():
        layers = trained_layers(seeds, steps, 5)
        stacks = {name: np.stack([getattr(layer, name) for layer in layers]) for name in PARTS}
        part = path.with_suffix(".part.npz")
        np.savez(part, **stacks)
        part.replace(path)
    with np.load(path) as kept:
        stacks = [kept[name] for name in PARTS]
    return [AttentionLayer(*weights, causal=True) for weights in zip(*stacks, strict=True)]


def _summarize(outcomes: list[dict[str, Any]], new: int, seed: int) -> Measured:
    stated = [row for row in outcomes if row["error"] is not None]
    # A statement is called false where chance, which the order statistic states exactly, would show so many new
    # sequences beyond the largest error once in 1e7; and every share above eps is counted as it stands.
    false = [row for row in stated if row["surprise"] < 1e-7]
    above = [row for row in stated if row["beyond"] > 1]
    unnamed = [row for row in outcomes if row["end"] == "unnamed"]
    bad = [row for row in outcomes if row["bad"]]
    impossible = [row for row in outcomes if not row["possible"] and row["end"] == "accepted"]
    ends = Counter(row["end"] for row in outcomes)
    figure = (
        f"{len(false)} false of {len(stated)} statements ({len(above)} with a larger share, none certain), "
        f"{len(bad)} bad acceptances, {len(impossible)} impossible ones, {len(unnamed)} unnamed errors; "
        f"{ends['accepted']} accepted, {ends['rejected']} rejected, {ends['refused']} refused"
    )
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in outcomes:
        counts[row["kind"]][row["end"]] += 1
    kinds = "; ".join(
        f"{kind} " + "/".join(str(count[end]) for end in ("accepted", "rejected", "refused"))
        for kind, count in counts.items()
    )
    words = Counter(row["word"] for row in outcomes if row["end"] in ("refused", "unnamed"))
    beyond = np.array([row["beyond"] for row in stated])
    extent = (
        f"{len(outcomes)} functions, d = {DIM}, {new} new sequences each; accepted/rejected/refused: {kinds}. "
        "Refusals: "
        f"{', '.join(f'{word} {count}' for word, count in words.items())}. Largest share beyond, in units of what is "
        f"allowed, {beyond.max():.2f}, median {np.median(beyond):.2f}"
    )
    # More than eps of the new ones lie beyond in about 1.5e-4 of all cases (the same order statistic).
    passed = not (false or bad or impossible or unnamed) and len(above) <= binom.isf(1e-3, len(stated), 3e-4)
    return Measured(figure, extent, f"{seed}", passed)


FIGURES = [
    Figure(
        "certificates",
        "no certificate's statement is false beyond its confidence, and every failure is a named error",
        "over 1,000 random and trained layers and other functions: 0 false statements, bad acceptances, impossible "
        "acceptances, unnamed errors",
        honest_certificates,
        {"layers": 1054, "trained": 3, "steps": 1000, "new": 3000, "seed": 0},
    )
]

"""Extraction of every attention layer of tiny checkpoints of many families, untrained and trained."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import ROOT, Figure, Measured
from tests.acceptance._recovery_model import WIKITEXT
from tests.recovery.trained_families import FAMILIES, HEADS, LAYERS, attention_pairs, batch, family_model, train

from manyheads.errors import ManyheadsError
from manyheads.recovery import compare_layers, extract_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.checkpoint_layers import is_stored, true_layer
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

STEPS = 300
REFUSED = {
    "deepseek_v3": "keys and values have a common low-rank factor",
    "mpnet": "terms of position",
}
"""Families outside the class -> the words of the reason, which hold: a norm stands between the factors of DeepSeek's
values, and MPNet's terms of the offset are those of an encoder, whose tokens see all others."""


def measure(folder: Path, seeds: list[int]) -> Measured:
    """Extract all layers; what is known of a model is kept at once, and not measured again."""
    kept = folder / "outcomes.jsonl"
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(row["family"], row["seed"], row["trained"]) for row in known}
    for family in FAMILIES:
        for seed in seeds:
            for trained in (False, True):
                if (family, seed, trained) not in done:
                    rows = list(_of_model(family, seed, trained, folder / "checkpoint"))
                    known += rows
                    with kept.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
    return _summarize(known, seeds)


def _of_model(family: str, seed: int, trained: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Save a model, and extract its layers from the folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, text = family_model(family, seed).eval(), ROOT / WIKITEXT
    losses = train(model, family, text, seed, STEPS) if trained else None
    model.save_pretrained(folder)
    given, _ = batch(family, text, np.random.default_rng([seed, 3]), held=True)
    for layer in range(LAYERS):
        row: dict[str, Any] = {"family": family, "seed": seed, "trained": trained, "layer": layer, "losses": losses}
        try:
            found = extract_layer(folder, layer=layer, seed=seed)
        except ManyheadsError as refusal:
            yield row | {"refused": type(refusal).__name__, "said": str(refusal)}
            continue
        predict = found.extracted
        assert predict is not None
        x, y = (part[:, : predict.longest] for part in attention_pairs(model, family, layer, given))
        errors = {"text": function_error(lambda _, y=y: y, predict, x)}
        drawn = np.random.default_rng([seed, layer]).standard_normal((20, 16, x.shape[-1]))
        errors["Gaussian"] = function_error(checkpoint_oracle(folder, layer), predict, drawn)
        if is_stored(folder) and found.heads == HEADS:
            weights = compare_layers(true_layer(folder, layer), found.layer)
            errors |= {"theta": weights.theta, "projection": weights.projection}
        row |= {"heads": found.heads, "calls": found.total.calls, "method": found.method, "longest": predict.longest}
        yield row | {"errors": errors}


def _summarize(rows: list[dict[str, Any]], seeds: list[int]) -> Measured:
    outside = [row for row in rows if row["family"] in REFUSED]
    inside = [row for row in rows if row["family"] not in REFUSED]
    found = [row for row in inside if "heads" in row]
    wrong = sum(row["heads"] != HEADS for row in found)
    untrue = sum(REFUSED[row["family"]] not in row.get("said", "") for row in outside)
    refused = Counter(f"{row['family']}: {row['refused']}" for row in inside if "refused" in row)

    def worst(name: str, *trained: bool) -> float:
        return max(row["errors"].get(name, 0.0) for row in found if row["trained"] in trained)

    said = []
    for when, trained in (("untrained", False), ("trained", True)):
        count = sum(row["trained"] == trained for row in found)
        runs = sum(row["trained"] == trained for row in inside)
        gaussian, real = worst("Gaussian", trained), worst("text", trained)
        said.append(f"{when}: {count} of {runs} layers, function {gaussian:.1e} (Gaussian), {real:.1e} (in the model)")
    middle = np.median([row["errors"]["Gaussian"] for row in found])
    weights = ", ".join(f"{name} {worst(name, True, False):.1e}" for name in ("theta", "projection"))
    names = ", ".join(f"{name} ({count})" for name, count in refused.items()) or "none"
    calls, short = [row["calls"] for row in found], [row["longest"] for row in found if row["longest"]]
    limited = f"; {len(short)} known for sequences up to {min(short)} tokens alone" if short else ""
    figure = f"{wrong} with a wrong number of heads; {'; '.join(said)}; median {middle:.1e}; {untrue} untrue reasons"
    extent = (
        f"{len(FAMILIES) - len(REFUSED)} families ({', '.join(name for name in FAMILIES if name not in REFUSED)}), two "
        f"layers of {HEADS} heads in 32 dimensions; {STEPS} steps of the family's own objective; {min(calls)} to "
        f"{max(calls)} calls{limited}; weights, where the files say them: {weights}; refused: {names}; outside, "
        f"refused with their reason: {', '.join(REFUSED)}"
    )
    enough = len(found) >= 0.95 * len(inside) and max(row["errors"]["Gaussian"] for row in found) < 1e-6
    return Measured(figure, extent, ", ".join(map(str, seeds)), bool(wrong == untrue == 0 and enough))


FIGURES = [
    Figure(
        "families-trained",
        "every attention layer of tiny checkpoints, as initialized and trained on text or digits, from their folders",
        "no wrong number of heads, 95% extracted, squared error of the function below 1e-6; others refused with the "
        "reason that is true",
        measure,
        {"seeds": [0, 1]},
    ),
]

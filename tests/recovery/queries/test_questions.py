"""Questions of every method: the tokens that are asked, in order, and the layer that is found, are those recorded.

A change that moves code without changing what is asked leaves the record as it is, to the bit. After a change of the
questions, `python -m tests.recovery.queries.test_questions` records them anew and prints what has changed.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tests.recovery.planted_blocks import PlantedBlock
from tests.recovery.rotary_layers import planted_rotary_layer
from tests.recovery.score_layers import planted_score_layer

from manyheads.recovery import ExtractionOptions, ServerLimits, evaluate_layer, gpt_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.block.method import open_block
from manyheads.recovery.queries.methods import METHODS, Attempt, run_method
from manyheads.recovery.refusals import RecoveryRefused

RECORD = Path(__file__).with_name("questions.json")
DIM = 12
NORM = Normalization(centred=False, epsilon=1e-4)
KINDS = {  # layers beside those of two heads of rank 6: which part of a method they need
    "subspaces": ("thin", "rank one", "one head", "three heads", "full"),
    "bounded": ("full",),
    "sphere": ("one head", "three heads", "block"),
    "rotary": ("one head", "three heads"),
    "rotary-sphere": ("block",),
    "scores": ("cap", "window and norms", "buckets of later tokens", "ALiBi and biases", "sinks, biases and window"),
    "vocabulary": ("one head", "three heads"),
}
CASES = [f"{method} {dtype} {seed}" for method in METHODS for dtype in ("float64", "float32") for seed in (0, 1)]
CASES += [f"{method} float64 0 accurate" for method in METHODS]
CASES += [f"{method} float64 2 {kind}" for method, kinds in KINDS.items() for kind in kinds]


def planted(method, seed, kind):
    """Return a function of the class of a method, and whether it is causal."""
    rng, causal = np.random.default_rng([seed, 77]), seed != 1
    heads = {"one head": 1, "three heads": 3}.get(kind, 2)
    if method.startswith("scores"):
        layer = planted_score_layer(rng, DIM, heads, kind or ("ALiBi", "head norms")[seed])
        return layer, layer.causal
    if method.startswith("rotary"):
        return planted_rotary_layer(rng, DIM, heads), True
    rank = {"thin": 2, "rank one": 1, "full": DIM}.get(kind)
    layer = gpt_layer(rng, DIM, heads, causal=causal, rank=rank)
    return lambda x: evaluate_layer(layer, x), causal


def answer(case):
    """Return figures of all that a method asks, in order, and of what it finds."""
    method, dtype, seed, *words = case.split(" ")
    kind, seed = " ".join(words), int(seed)
    inside, causal = planted(method, seed, "" if kind in ("block", "accurate") else kind)
    function = (lambda x: inside(NORM(x))) if method.endswith("sphere") else inside
    if kind == "block":
        function = PlantedBlock(np.random.default_rng([seed, 77]), DIM, 2, rotary=method.startswith("rotary"))
    settings = {"causal": causal}
    if method == "vocabulary":
        settings["limits"] = ServerLimits(vocabulary=0.7 * np.random.default_rng(seed).standard_normal((60, DIM)))
    bits, sums = hashlib.sha256(), []

    def asked(x):
        bits.update(x.tobytes())
        sums.append(float(x.ravel() @ np.cos(np.arange(x.size) + len(sums))))
        return np.asarray(function(x)).astype(dtype)

    oracle, rng = Oracle(asked, DIM, OracleSettings(**settings)), np.random.default_rng(seed)
    noise = 1e-15 if dtype == "float64" else 1e-7
    found = {}
    try:
        block = None
        if kind == "block":
            options = ExtractionOptions(causal=True, rotary=method.startswith("rotary"), mlp=True)
            block = open_block(oracle, options, method, rng)
            noise = block.level
        attempt = Attempt(method, kind == "accurate", "")
        extracted = run_method(attempt, oracle if block is None else block.attention, noise, rng)
        extracted = extracted if block is None else block.compose(extracted)
        x = np.random.default_rng(5).standard_normal((20, 5, DIM))
        found = {"heads": extracted.layer.heads, "error": function_error(function, extracted, x)}
    except RecoveryRefused as refusal:
        found = {"refused": type(refusal).__name__, "message": str(refusal)}
    total = oracle.total
    found |= {"calls": total.calls, "tokens": total.tokens, "numbers": total.numbers}
    return found | {"sum": float(np.cos(np.arange(len(sums))) @ sums), "sha256": bits.hexdigest()[:16]}


@pytest.mark.parametrize("case", CASES)
def test_a_method_asks_what_was_recorded(case):
    recorded, found = json.loads(RECORD.read_text())[case], answer(case)
    if found["sha256"] != recorded["sha256"]:  # of other libraries, which round otherwise: answers lead to questions
        assert found["sum"] == pytest.approx(recorded["sum"], rel=1e-5, abs=1e-5)
    for name in ("calls", "tokens", "numbers", "heads", "refused"):
        assert found.get(name) == recorded.get(name), name
    if "error" in recorded:
        assert found["error"] < 10 * max(recorded["error"], 1e-20)


if __name__ == "__main__":
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    after = {case: answer(case) for case in CASES}
    for case, found in after.items():
        if (known := before.get(case, {})) != found:
            print(
                case, *(f"{name}: {known.get(name)} -> {now}" for name, now in found.items() if known.get(name) != now)
            )
    RECORD.write_text(json.dumps(after, indent=1) + "\n")

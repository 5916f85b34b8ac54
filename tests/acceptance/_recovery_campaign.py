"""Extraction from random functions of sixteen kinds in three precisions: no accepted layer is worse than it states."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.recovery.random_functions import BIASES, DTYPES, FRESH, KINDS, Row, attempt, is_wrong


def random_functions(folder: Path, functions: int, seed: int) -> Measured:
    """Extract every function; a run that was stopped goes on behind the last one that is recorded."""
    record = folder / "rows.jsonl"
    rows = [Row(**json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []
    with record.open("a") as file:
        for index in range(len(rows), functions):
            kind = KINDS[index % len(KINDS)]
            turn = index // len(KINDS)
            row = attempt(kind, DTYPES[turn % len(DTYPES)], BIASES[turn % len(BIASES)], [seed, index])
            rows.append(row)
            print(json.dumps(dataclasses.asdict(row)), file=file, flush=True)
    return _summarize(rows, seed)


def _summarize(rows: list[Row], seed: int) -> Measured:
    accepted = [row for row in rows if row.end == "accepted"]
    wrong = [row for row in rows if is_wrong(row)]
    unnamed = [row for row in rows if row.end == "unnamed"]
    above = [row for row in accepted if row.share > row.allowed]
    counts = {kind: Counter(row.end for row in rows if row.kind == kind) for kind in KINDS}
    said = "; ".join(f"{kind} {count['accepted']}/{count['refused']}" for kind, count in counts.items())
    ratio = np.array([row.error / row.stated for row in accepted])
    unresolved = sum(row.unresolved > 0 for row in accepted)
    figure = (
        f"{len(wrong)} of {len(accepted)} accepted layers are wrong by more than they state; the largest error is "
        f"{ratio.max():.2g} of the stated one (median {np.median(ratio):.2g}); {len(rows) - len(accepted)} refused, "
        f"{len(unnamed)} unnamed errors; {len(above)} with more sequences beyond than stated; {unresolved} with heads "
        "named as below the error"
    )
    extent = (
        f"{len(rows)} functions of {len(KINDS)} kinds, float64, float32 and float16, output biases 0 to 1e6, d 4 to 16"
        f", {FRESH} fresh sequences each against float64; accepted/refused: {said}"
    )
    return Measured(figure, extent, f"{seed}", not (wrong or unnamed))


FIGURES = [
    Figure(
        "random-functions",
        "no accepted layer's token-dependent part is wrong by more than its certificate states",
        "0 of >= 400 functions of 16 kinds, float64/32/16, output biases to 1e6; 0 unnamed errors",
        random_functions,
        {"functions": 480, "seed": 0},
    )
]

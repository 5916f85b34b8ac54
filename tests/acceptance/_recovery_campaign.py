"""Extraction from random functions, layers and others, in four precisions: no certificate states what is false."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.recovery.random_functions import (
    BIASES,
    DTYPES,
    FRESH,
    KINDS,
    LAYERS,
    NEAR,
    OTHERS,
    UNLIKELY,
    Row,
    attempt,
    is_wrong,
)


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
    stated = [row for row in rows if row.stated is not None]
    wrong = [row for row in rows if is_wrong(row)]
    unnamed = [row for row in rows if row.end == "unnamed"]
    false = [row for row in stated if row.chance < UNLIKELY]
    foreign = [row for row in accepted if row.kind not in LAYERS]
    ratio = np.array([row.error / row.stated for row in accepted])
    unresolved = sum(row.unresolved > 0 for row in accepted)
    figure = (
        f"{len(false)} false of {len(stated)} statements; {len(wrong)} of {len(accepted)} accepted layers are wrong by "
        f"more than they state; the largest error is {ratio.max():.2g} of the stated one (median {np.median(ratio):.2g}"
        f"); {len(rows) - len(stated) - len(unnamed)} refused, {len(stated) - len(accepted)} rejected, {len(unnamed)} "
        f"unnamed errors; {len(foreign)} functions outside the class accepted; {unresolved} with heads named as below "
        "the error"
    )
    groups = (("layers", LAYERS), ("near misses", NEAR), ("others", OTHERS))
    said = ". ".join(f"{name}: {'; '.join(_outcomes(rows, kind) for kind in kinds)}" for name, kinds in groups)
    precisions = "; ".join(
        f"{dtype} {_ends([row for row in rows if row.dtype == dtype and row.kind in LAYERS])}" for dtype in DTYPES
    )
    extent = (
        f"{len(rows)} functions of {len(KINDS)} kinds, float64, float32, bfloat16 and float16, output biases 0 to 1e6, "
        f"d 6 to 12, {FRESH} fresh sequences each. Accepted/rejected/refused. {said}. Layers by precision: {precisions}"
    )
    return Measured(figure, extent, f"{seed}", not (false or wrong or unnamed))


def _outcomes(rows: list[Row], kind: str) -> str:
    return f"{kind} {_ends([row for row in rows if row.kind == kind])}"


def _ends(rows: list[Row]) -> str:
    count = Counter(row.end for row in rows)
    return "/".join(str(count[end]) for end in ("accepted", "rejected", "refused"))


FIGURES = [
    Figure(
        "random-functions",
        "no certificate of a random function states what is false",
        "0 false of >= 2,000 functions: layers of the class, near misses and others, float64, float32, bfloat16 and "
        "float16, output biases to 1e6; no accepted layer wrong by more than it states; 0 unnamed errors",
        random_functions,
        {"functions": 2240, "seed": 20},
    ),
]

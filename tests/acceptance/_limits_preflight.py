"""Preflight of three training scripts, and planted mistakes of Muon runs in the audit."""

import time
from pathlib import Path
from typing import Any

from tests.acceptance._lane import Figure, Measured

from manyheads.limits import preflight

AXES = {"key_dim": (8, 16, 32), "heads": (4, 8, 16), "depth": (2, 4, 8)}


def preflights(folder: Path, seeds: int, first: int) -> Measured:
    """Run right scripts, usual practice and planted mistakes; count false alarms, misses and CPU minutes."""
    from tests.limits.preflight import scripts
    from tests.limits.preflight.test_preflight import CASES

    start = time.process_time()
    chosen = range(first, first + seeds)
    alarms, growths, missed = [], 0, []

    def judged(make: Any, p: Any, axes: Any) -> Any:
        given: dict[str, Any] = {"seeds": chosen, "parametrization": p, "hyperparameters": scripts.TUNED}
        return preflight(make, scripts.BASE, axes=axes, **given)

    for optimizer in ("adam", "muon"):
        p = scripts.parametrization(optimizer)
        for name in scripts.SCRIPTS:
            found = judged(scripts.script(name, p), p, AXES)
            alarms += [f"{name}, {optimizer}: {each}" for each in found.faults()]
            growths += len(found.growths)
    for name in scripts.SCRIPTS:
        found = preflight(scripts.standard(name), scripts.BASE, axes={"heads": AXES["heads"]}, seeds=chosen)
        grown = {each.module.rpartition(".")[2] for each in found.broken if each.fit and each.fit.exponent > 0}
        if not grown & {"c_attn", "wq", "wk"} or not grown & {"c_proj", "w2"}:
            missed.append(f"usual practice, {name}: {sorted(grown)}")
    for name, optimizer, mistake, axes, said in CASES:
        p = scripts.parametrization(optimizer)
        found = judged(scripts.script(name, p, mistake), p, axes)
        missed += [f"{name}: {mistake}"] if not any(said in each for each in found.faults()) else []
    minutes = (time.process_time() - start) / 60
    figure = f"{len(alarms)} false alarms, {len(missed)} missed, {minutes:.1f} CPU minutes"
    extent = f"{growths} updates of 6 right scripts, {len(CASES) + 3} mistakes"
    return Measured(
        figure,
        "; ".join([extent, *alarms, *missed]),
        f"{first}-{first + seeds - 1}",
        not alarms and not missed and minutes < 10,
    )


FIGURES = [
    Figure(
        "limits-preflight",
        "A preflight of nanoGPT-, Llama- and ViT-like scripts, under AdamW and Muon, passes the right ones along N, H "
        "and L and names usual practice and every planted mistake",
        "0 false alarms, none missed, at most 10 CPU minutes",
        preflights,
        {"seeds": 4, "first": 100},
    ),
]

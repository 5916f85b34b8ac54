"""Alarms on really trained networks: how often clean runs alarm, which faults are found, after how many steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xarray as xr
from scipy import stats
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._probe_trainings import EVERY, FAULT, Recipe, train

from manyheads.probe import Alarm, find_alarms

OTHERS: tuple[dict[str, Any], ...] = (
    {"schedule": "cosine"},
    {"schedule": "wsd"},
    {"warmup": 20},
    {"warmup": 80},
    {"learning_rate": 1e-3},
    {"text": "test"},
    {"width": 32},
    {"schedule": "cosine", "warmup": 80},
)
# Fault -> detectors of which one is to find it, and the head (or layer, -1 for any head) that it is to name.
NAMED: dict[str, tuple[tuple[str, ...], int, int]] = {
    "head8": (("change",), 1, 0),
    "zeroed": (("change", "not finite"), 1, 0),
    "frozen": (("updates",), 1, 0),
    "dropped": (("updates",), 1, -1),
    "rounded": (("precision",), -1, -1),
}
FAULTS = (*NAMED, "rate10", "drift2", "shuffled", "repeated")
DETECTORS = ("change", "clean runs", "level", "updates", "precision", "not finite")


def found_in(training: tuple[xr.Dataset, xr.Dataset], recipe: Recipe, clean: Sequence[Any] = ()) -> dict[str, Alarm]:
    """Return detector -> its alarm; "change" is silent until the learning rate has risen."""
    silent = max(48, recipe.warmup // EVERY + 10)
    probes, updates = training
    found = find_alarms(probes, updates=updates, silent=silent, clean=[each for each, _ in clean])
    return {alarm.detector: alarm for alarm in found}


def interval(count: int, of: int) -> str:
    low, high = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count}/{of} [{low:.2f}, {high:.2f}]"


def alarms(folder: Path, optimizer: str, seeds: int, faulty: int, further: int) -> Measured:
    """Train clean and faulty networks with seeds that no choice of the detectors has seen, and look for alarms.

    Clean runs: `seeds` of the recipe, of which each is judged by the others, and one of each other recipe. Faulty ones
    are judged by the clean runs of the recipe: `faulty` of each fault of heads and weights, `further` of the others.
    """
    recipe = Recipe(optimizer=optimizer)
    same = [train(folder, 1000 + seed, recipe) for seed in range(seeds)]
    clean = [found_in(run, recipe, [each for each in same if each is not run]) for run in same]
    for number, change in enumerate(OTHERS):
        other = replace(recipe, **change)
        clean.append(found_in(train(folder, 1100 + number, other), other))
    false = {name: sum(name in found for found in clean) for name in DETECTORS}
    shown = [
        "clean runs that alarm: "
        + ", ".join(
            f"{name} {interval(count, seeds if name == 'clean runs' else len(clean))}" for name, count in false.items()
        )
    ]
    named = {}
    for fault in FAULTS:
        runs = faulty if fault in NAMED or fault == "repeated" else further
        found = [found_in(train(folder, 1200 + seed, recipe, fault), recipe, same) for seed in range(runs)]
        named[fault] = sum(is_named(fault, each) for each in found), runs
        shown.append(f"{fault}: " + "; ".join(delays(name, found) for name in DETECTORS if delays(name, found)))
    total = false["change"] + false["updates"] + false["precision"] + false["not finite"]
    low = stats.binomtest(false["change"], len(clean)).proportion_ci(method="exact").low
    right = ", ".join(f"{fault} {named[fault][0]} of {named[fault][1]}" for fault in NAMED)
    figure = (
        f"{interval(total, len(clean))} clean runs alarmed without those for comparison; named within 50 steps: {right}"
    )
    passed = (
        low <= 0.05 and total == false["change"] and all(5 * named[fault][0] >= 4 * named[fault][1] for fault in NAMED)
    )
    drawn = f"1000-{999 + seeds}, 1100-{1099 + len(OTHERS)}, 1200-{1199 + faulty}"
    return Measured(figure, "; ".join(shown), drawn, passed)


def is_named(fault: str, found: dict[str, Alarm]) -> bool:
    """Whether a detector that is to find a fault names its place within 50 steps."""
    detectors, layer, head = NAMED.get(fault, ((), -1, -1))
    alarms = [found[name] for name in detectors if name in found]
    return any(
        FAULT <= each.step < FAULT + 50 and layer in (-1, each.layer) and head in (-1, each.head) for each in alarms
    )


def delays(name: str, found: Sequence[dict[str, Alarm]]) -> str:
    """Return the steps from a fault to the alarms of a detector, "early" for those before it; empty without any."""
    steps = [run[name].step - FAULT + 1 if name in run else None for run in found]
    if not any(steps):
        return ""
    return f"{name} after " + " ".join("none" if each is None else "early" if each < 1 else str(each) for each in steps)


FIGURES = [
    Figure(
        f"alarms-{optimizer}",
        f"clean trainings by {title} keep the stated rate of false alarms; faults of heads and of weights are named",
        "change: the stated 0.05 lies in the 95% interval of the clean runs that alarm, or above it; no false alarm of "
        "updates and precision; each of five faults of heads and weights named within 50 steps in 4 of 5",
        alarms,
        {"optimizer": optimizer, "seeds": 12, "faulty": 5, "further": 2},
        revision=2,
    )
    for optimizer, title in (("adamw", "AdamW"), ("muon", "Muon"))
]

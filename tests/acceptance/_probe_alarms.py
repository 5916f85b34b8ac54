"""Alarms on really trained networks: how often clean runs alarm, and how late faults are named."""

from collections.abc import Sequence
from pathlib import Path

import xarray as xr
from scipy import stats
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._probe_trainings import EVERY, FAULT, WIDTH, Recipe, train

from manyheads.probe import find_alarms

RECIPE = Recipe()
OTHERS = {
    "cosine": Recipe(cosine=True),
    "rate 1e-3": Recipe(learning_rate=1e-3),
    "other text": Recipe(text="test"),
    "Muon": Recipe(optimizer="muon"),
    "warm-up 120": Recipe(warmup=120),
    "width 32": Recipe(width=32),
    "width 80": Recipe(width=80),
}
FAULTS = ("rate10", "head8", "drift2", "shuffled")
DETECTORS = ("change", "clean runs", "level")


def alarmed(run: xr.Dataset, recipe: Recipe, detector: str = "change", clean: Sequence[xr.Dataset] = ()) -> bool:
    """Say whether a detector alarms, silent until the learning rate has risen."""
    silent = max(48, recipe.warmup // EVERY + 10)
    return any(alarm.detector == detector for alarm in find_alarms(run, silent=silent, clean=clean))


def interval(count: int, of: int) -> str:
    low, high = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count}/{of} [{low:.2f}, {high:.2f}]"


def alarms(folder: Path, seeds: int, faulty: int) -> Measured:
    """Train clean and faulty networks and look for alarms.

    A clean run of the recipe is judged by the other clean runs of the recipe, a faulty one by the first 12.
    """
    same = [train(folder, 10 * s + i, RECIPE) for s in range(seeds) for i in range(3)]
    counts = {"the recipe": (sum(alarmed(run, RECIPE) for run in same), len(same))}
    levels = sum(alarmed(run, RECIPE, "level") for run in same)
    for number, (name, recipe) in enumerate(OTHERS.items()):
        runs = [train(folder, 10 * s + 3 + number, recipe) for s in range(seeds)]
        counts[name] = sum(alarmed(run, recipe) for run in runs), seeds
        levels += sum(alarmed(run, recipe, "level") for run in runs)
    count, of = map(sum, zip(*counts.values(), strict=True))
    rest = [[run for run in same if run is not judged] for judged in same]
    beyond = sum(alarmed(run, RECIPE, "clean runs", others) for run, others in zip(same, rest, strict=True))
    by_recipe = ", ".join(f"{name} {found}/{number}" for name, (found, number) in counts.items())
    stated = f"{interval(beyond, len(same))}, stated {1 / len(same):.2f}"
    shown = [f"change {interval(count, of)}: {by_recipe}", f"clean runs of the recipe {stated}", f"level {levels}/{of}"]
    power, named = faults(folder, RECIPE, same[:12], faulty)
    shown += power
    figure = f"{interval(count, of)} clean runs alarmed; the head named at the next probe in {named} of {faulty}"
    passed = count <= of * 2 / 24 and named >= 0.75 * faulty
    return Measured(figure, "; ".join(shown), f"0-{10 * seeds - 1}, 100-{99 + faulty}", passed)


def faults(folder: Path, recipe: Recipe, clean: Sequence[xr.Dataset], faulty: int) -> tuple[list[str], int]:
    """Train with each fault; return the delays of each detector, and how often the damaged head is named at once."""
    shown, named = [], 0
    found_by: dict[str, int] = dict.fromkeys(DETECTORS, 0)
    for fault in FAULTS:
        delays: dict[str, list[str]] = {detector: [] for detector in DETECTORS}
        for s in range(faulty):
            run = train(folder, 100 + s, recipe, fault)
            found = {alarm.detector: alarm for alarm in find_alarms(run, clean=clean)}
            for detector in DETECTORS:
                after = found[detector].step - FAULT + 1 if detector in found else None
                delays[detector].append("none" if after is None else str(after))
                found_by[detector] += after is not None and after > 0
            first = found.get("change")
            if fault == "head8" and first is not None and FAULT <= first.step < FAULT + EVERY:
                named += (first.layer, first.head) == (1, 0)
        shown.append(
            f"{fault} after " + ", ".join(f"{' '.join(times)} steps ({name})" for name, times in delays.items())
        )
    total = faulty * len(FAULTS)
    shown.append("faults found " + ", ".join(f"{interval(each, total)} ({name})" for name, each in found_by.items()))
    return shown, named


def alarms_of_recipe(folder: Path, optimizer: str, width: int, first: int, seeds: int, faulty: int) -> Measured:
    """Train clean and faulty networks of one recipe.

    A clean run is judged by the other clean ones, a faulty one by the first 12.
    """
    recipe = Recipe(optimizer=optimizer, width=width)
    clean = [train(folder, 10 * s + first, recipe) for s in range(seeds)]
    count = sum(alarmed(run, recipe) for run in clean)
    levels = sum(alarmed(run, recipe, "level") for run in clean)
    rest = [[run for run in clean if run is not judged] for judged in clean]
    beyond = sum(alarmed(run, recipe, "clean runs", others) for run, others in zip(clean, rest, strict=True))
    power, named = faults(folder, recipe, clean[:12], faulty)
    stated = f"clean runs {interval(beyond, seeds)}, stated {1 / seeds:.2f}"
    extent = "; ".join((f"change {interval(count, seeds)}, stated 0.05", stated, f"level {levels}/{seeds}", *power))
    figure = f"{interval(count, seeds)} clean runs alarmed; the head named at the next probe in {named} of {faulty}"
    low = stats.binomtest(count, seeds).proportion_ci(method="exact").low
    drawn = f"{first} to {10 * (seeds - 1) + first} by 10, 100-{99 + faulty}"
    return Measured(figure, extent, drawn, low <= 0.05)


FIGURES = [
    Figure(
        "alarms",
        "the e-detector keeps its rate in clean trainings of 8 recipes and names a head whose W_Q is multiplied by 8",
        "at most 2 of 24 clean runs alarmed; the head named at the next probe in at least 3 of 4",
        alarms,
        {"seeds": 6, "faulty": 4},
    ),
    *(
        Figure(
            f"alarms-{name}",
            f"false alarms, power and delay in trainings {title}",
            "the stated 0.05 lies in the 95% interval of the clean runs that alarm, or above it",
            alarms_of_recipe,
            {"optimizer": optimizer, "width": width, "first": first, "seeds": 20, "faulty": 2},
        )
        for name, title, optimizer, width, first in (
            ("muon", "by Muon", "muon", WIDTH, 6),
            ("width-80", "of width 80", "adamw", 80, 9),
        )
    ),
]

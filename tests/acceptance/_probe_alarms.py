"""Alarms on really trained networks: how often clean runs alarm, and how late faults are named."""

from pathlib import Path

import numpy as np
from scipy import stats
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._probe_trainings import EVERY, FAULT, Recipe, train

from manyheads.probe import find_alarms

RECIPE = Recipe()
OTHERS = (
    Recipe(cosine=True),
    Recipe(learning_rate=1e-3),
    Recipe(text="test"),
    Recipe(optimizer="muon"),
    Recipe(warmup=120),
    Recipe(width=32),
    Recipe(width=80),
)
FAULTS = ("rate10", "head8", "drift2", "shuffled")
DETECTORS = ("change", "clean runs", "level")


def interval(count: int, of: int) -> str:
    low, high = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count}/{of} [{low:.2f}, {high:.2f}]"


def alarms(folder: Path, seeds: int, faulty: int) -> Measured:
    """Train clean and faulty networks and look for alarms.

    A clean run of the recipe is judged by the other clean runs of the recipe, a faulty one by the first 12.
    """
    same = [train(folder, 10 * s + i, RECIPE) for s in range(seeds) for i in range(3)]
    clean = [find_alarms(run) for run in same]
    by_recipe = {"recipe": sum(any(a.detector == "change" for a in found) for found in clean)}
    other = 0
    for number, recipe in enumerate(OTHERS):
        found = [find_alarms(train(folder, 10 * s + 3 + number, recipe)) for s in range(seeds)]
        clean += found
        other += sum(any(a.detector == "change" for a in each) for each in found)
    changed = by_recipe["recipe"] + other
    levels = sum(any(a.detector == "level" for a in found) for found in clean)
    beyond = 0
    for i, run in enumerate(same):
        found = find_alarms(run, clean=[each for j, each in enumerate(same) if j != i])
        beyond += any(a.detector == "clean runs" for a in found)
    shown = [
        f"clean: change {interval(changed, len(clean))} ({by_recipe['recipe']} of {len(same)} of the recipe), level "
        f"{levels}/{len(clean)}, clean runs {interval(beyond, len(same))} of the recipe (stated {1 / len(same):.2f})"
    ]
    named = 0
    for fault in FAULTS:
        delays: dict[str, list[str]] = {detector: [] for detector in DETECTORS}
        for s in range(faulty):
            run = train(folder, 100 + s, RECIPE, fault)
            found = {alarm.detector: alarm for alarm in find_alarms(run, clean=same[:12])}
            for detector in DETECTORS:
                alarm = found.get(detector)
                delays[detector].append("-" if alarm is None else str(alarm.step - FAULT + 1))
            alarm = found.get("change")
            first = alarm is not None and FAULT <= alarm.step < FAULT + EVERY
            named += fault == "head8" and first and (alarm.layer, alarm.head) == (1, 0)
        shown.append(f"{fault}: " + ", ".join(f"{name} {' '.join(times)}" for name, times in delays.items()))
    rate = changed / len(clean)
    passed = rate <= 2 / 24 and named >= 0.75 * faulty
    figure = f"{changed} of {len(clean)} clean runs alarmed; the head named at the next probe in {named} of {faulty}"
    extent = "; ".join(shown) + " (delays in steps)"
    return Measured(figure, extent, f"0-{10 * seeds - 1}, 100-{99 + faulty}", passed)


FIGURES = [
    Figure(
        "alarms",
        "the e-detector keeps its rate on clean trainings of eight recipes and names a head whose queries are multiplied",
        "at most 2 of 24 clean runs alarmed; the head named at the next probe in at least 3 of 4",
        alarms,
        {"seeds": 6, "faulty": 4},
    )
]

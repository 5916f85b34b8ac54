"""Collect the gallery's data from a store: claim, verdicts and pictures of every registered study, as JSON.

``python docs/_ext/collect_gallery.py STORE [STUDY ...]`` takes, for each study or those named, the finished run of its
default configuration with the most replicates; where the store has none, it runs the study in its smallest
configuration (``small()``) into the store. The site draws the pictures when it is built, so the files hold numbers
alone; those of the front pages are drawn here.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from gallery_pages import standalone

from manyheads.errors import FileRefused
from manyheads.study import run
from manyheads.study.panels import panel_from_json
from manyheads.study.registry import STUDIES, load
from manyheads.study.reporting.svg import svg
from manyheads.study.store.identity import fingerprint
from manyheads.study.store.run_store import RunStore, find_runs

FOLDER = Path(__file__).parents[1] / "gallery"
MOST_BYTES = 120_000  # of the pictures of a study: the first ones that fit
FRONT = {"meanfield/saddle-to-saddle": (0, "saddle-to-saddle.svg"), "demo/text": (1, "head-entropy.svg")}
SEEDS = range(3)  # root seeds under which a run of the default configuration is looked for


def main():
    """Write one JSON file for each study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path, help="folder of stored runs; missing runs are computed into it")
    parser.add_argument("studies", nargs="*", metavar="study", help="all if absent")
    asked = parser.parse_args()
    store, runs = asked.store, stored(asked.store)
    for name in asked.studies or STUDIES:
        kind = load(name)
        default = best(runs, name, [fingerprint(kind(), seed) for seed in SEEDS])
        found = default or best(runs, name, [fingerprint(kind.small(), 0)])
        if found is None:
            print(f"{name}: no run of this configuration in {store}; the smallest is run", flush=True)
            found = RunStore(run(kind.small(), 2, store=store, progress=False).attrs["path"])
        text = json.dumps(entry(found, default is not None), ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{name.replace('/', '-')}.json").write_text(text + "\n", encoding="utf-8")
        if name in FRONT:
            place, file = FRONT[name]
            draw(found.summary().panels[place], file)
        print(f"{name}: {'default' if default else 'small'}, {len(text) // 1000} kB", flush=True)
    draw(transfer(), "learning-rate-transfer.svg")


def draw(panel, file):
    """Draw a picture of the front pages."""
    (FOLDER.parent / "_static" / file).write_text(standalone(svg(panel, "front-")), encoding="utf-8")


def transfer():
    """Return loss against learning rate by size: under one rate for all weights, and under the table."""
    data = json.loads((FOLDER / "limits-learning-rate-transfer.json").read_text(encoding="utf-8"))["panels"][0]
    panel = panel_from_json(data)
    along = dict(zip(panel.row_labels, panel.curves, strict=True))
    shown = {"one rate for all weights": along["standard"][0], "the table's rate for each": along["limits (1, 1)"][0]}
    title, label = "Final loss against the learning rate, three key dimensions N", "learning rate at the base, log10"
    curves, columns = (tuple(shown.values()),), tuple(shown)
    return replace(panel, title=title, x_label=label, curves=curves, row_labels=("",), column_labels=columns, note="")


def stored(store):
    """Return the finished runs of a store by study and hash."""
    try:
        return {(run.header["study"], run.path.name): run for run in find_runs(store) if run.summary() is not None}
    except FileRefused:
        return {}


def best(runs, name, prints):
    """Return the run of one of these fingerprints with the most replicates, None if there is none."""
    known = [
        found for (study, place), found in runs.items() if study == name and any(p.startswith(place) for p in prints)
    ]
    return max(known, key=lambda found: found.summary().replicates, default=None)


def entry(found, default):
    """Return what the gallery shows of a run."""
    found.verify()
    header, summary = found.header, found.summary()
    panels, size = [], 0
    for panel in summary.panels:
        data = rounded(panel.to_json())
        size += len(json.dumps(data))
        if panels and size > MOST_BYTES:
            break
        panels.append(data)
    return {
        "study": header["study"],
        "claim": header["claim"],
        "default": default,
        "command": f"{header['command']} --replicates {summary.replicates} --seed {header['seed']}",
        "revision": header["revision"],
        "versions": header["versions"],
        "source": header.get("source"),
        "verdicts": [verdict.to_json() for verdict in summary.verdicts],
        "panels": panels,
    }


def rounded(data):
    """Return a panel with numbers of six digits, more than a picture shows."""
    if isinstance(data, dict):
        return {name: rounded(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    return float(f"{data:.6g}") if isinstance(data, float) else data


if __name__ == "__main__":
    main()

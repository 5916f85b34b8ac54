"""The acceptance lane: figures as data, each measured once and kept in results.json.

A wing is a module of this folder with a list `FIGURES`; adding a wing is adding a module, adding a figure adding an
entry. A finished figure is kept under the hash of its settings, so a lane that was killed goes on with the figure in
which it stopped, and one whose settings changed is measured again. The page of results is made of the same file.
"""

import datetime
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Measured:
    """Outcome: the figure, its interval or the extent of the search, the seeds, and whether it is enough."""

    figure: str
    extent: str
    seeds: str
    passed: bool


@dataclass(frozen=True)
class Figure:
    """One figure of the specification.

    `measure(folder, **settings)` returns a `Measured`; `folder` is its own, kept between the attempts of a lane that is
    killed and removed when the figure is finished. `settings` are its seeds and sizes. `revision` is raised whenever a
    change of the code makes the kept figure obsolete.
    """

    name: str
    claim: str
    required: str
    measure: Callable[..., Measured]
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    revision: int = 1

    def key(self) -> str:
        text = json.dumps([self.name, self.required, self.revision, dict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Lane:
    """The wings, the folder of figures at work, and the file of results."""

    wings: Mapping[str, tuple[Figure, ...]]
    work: Path = ROOT / ".acceptance"
    results: Path = RESULTS

    def run(self, wings: Iterable[str], names: Iterable[str] = (), again: bool = False) -> bool:
        """Measure what is missing or was not met, keep it, and return whether all chosen figures are met."""
        met, names = True, set(names)
        for wing in wings:
            for figure in self.wings[wing]:
                if names and figure.name not in names:
                    continue
                record = self.record(wing, figure)
                if again or record is None or not record["met"]:
                    print(f"{wing}/{figure.name}: {figure.claim} ...", flush=True)
                    record = self._measure(wing, figure)
                met &= bool(record and record["met"])
                said = "not finished" if record is None else "met" if record["met"] else "not met"
                print(f"{wing}/{figure.name}: {said}: {record and record['measured']}", flush=True)
        return met

    def record(self, wing: str, figure: Figure) -> dict[str, Any] | None:
        """Return the result of a figure, None if it was not measured with these settings."""
        return self.records().get((wing, figure.name, figure.key()))

    def records(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """Return all results by wing, figure and the hash of its settings."""
        found = json.loads(self.results.read_text(encoding="utf-8")) if self.results.exists() else []
        return {(row["wing"], row["figure"], row["key"]): row for row in found}

    def _measure(self, wing: str, figure: Figure) -> dict[str, Any] | None:
        folder = self.work / wing / figure.name
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            measured = figure.measure(folder, **figure.settings)
        except Exception:  # the other figures are still wanted; this one is measured again next time
            traceback.print_exc()
            return None
        pairs = itertools.zip_longest(measured.figure.split("<br>"), measured.extent.split("<br>"), fillvalue="")
        record = {
            "wing": wing,
            "figure": figure.name,
            "key": figure.key(),
            "claim": figure.claim,
            "measured": [list(pair) for pair in pairs],
            "required": figure.required,
            "met": bool(measured.passed),  # NumPy's booleans are no JSON
            "seeds": measured.seeds,
            "command": figure.command or f"python -m tests.acceptance {wing} {figure.name}",
            "seconds": round(time.monotonic() - start),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions(),
        }
        self._keep(record)
        shutil.rmtree(folder)
        return record

    def _keep(self, record: dict[str, Any]) -> None:
        """Write a result in the place of that of the same figure; figures that are no longer in a wing go."""
        found = {key[:2]: row for key, row in self.records().items()} | {(record["wing"], record["figure"]): record}
        order = [(wing, figure.name) for wing, figures in self.wings.items() for figure in figures]
        rows = [found[name] for name in order if name in found]
        temporary = self.results.with_suffix(".tmp")
        temporary.write_text(f"{json.dumps(rows, indent=1, ensure_ascii=False)}\n", encoding="utf-8")
        os.replace(temporary, self.results)


def find_wings() -> dict[str, tuple[Figure, ...]]:
    """Return the figures of every module of this folder, by the module's name."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    wings = [name for name in names if not name.startswith("_")]
    return {wing: tuple(importlib.import_module(f"tests.acceptance.{wing}").FIGURES) for wing in wings}


def versions() -> str:
    """Return what a figure was measured with."""
    from importlib.metadata import version

    parts = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in ("jax", "numpy", "zarr"))]
    return ", ".join([*parts, f"{os.cpu_count()} {platform.machine()} cores"])

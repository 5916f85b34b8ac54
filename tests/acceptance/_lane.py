"""The acceptance lane: figures as data, each measured once and kept, all gathered in ACCEPTANCE.md.

A wing is a module of this folder with a list `FIGURES`; adding a wing is adding a module, adding a figure adding an
entry. A finished figure is kept as ``.acceptance/<wing>/<figure>.json`` under the hash of its settings, so a lane that
was killed goes on with the figure in which it stopped, and one whose settings changed is measured again.
"""

import datetime
import hashlib
import importlib
import json
import os
import pkgutil
import platform
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS = ("figure", "claim", "measured", "interval or extent", "required", "seeds", "command", "date", "verdict")

HEAD = """# Acceptance

The full figures of the project, measured by `make acceptance` (all) or `make acceptance WING=study` (one wing), and
written by that command: edit the modules of `tests/acceptance`, not this file. Quick versions of most of them run in
`make test`. *met* means that the measured figure satisfies what is required of it.
"""


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
    """The wings, where finished figures are kept, and the page that shows them."""

    wings: Mapping[str, tuple[Figure, ...]]
    kept: Path = ROOT / ".acceptance"
    page: Path = ROOT / "ACCEPTANCE.md"

    def run(self, wings: Iterable[str], names: Iterable[str] = (), again: bool = False) -> bool:
        """Measure what is missing or was not met, write the page, and return whether all chosen figures are met."""
        met, names = True, set(names)
        for wing in wings:
            for figure in self.wings[wing]:
                if names and figure.name not in names:
                    continue
                record = self.record(wing, figure)
                if again or record is None or not record["passed"]:
                    print(f"{wing}/{figure.name}: {figure.claim} ...", flush=True)
                    record = self._measure(wing, figure)
                    self.write_page()
                met &= bool(record and record["passed"])
                print(f"{wing}/{figure.name}: {_verdict(record)}: {record and record['figure']}", flush=True)
        self.write_page()
        return met

    def record(self, wing: str, figure: Figure) -> dict[str, Any] | None:
        """Return what is kept of a figure, None if it was not measured with these settings."""
        try:
            record = json.loads((self.kept / wing / f"{figure.name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return record if record["key"] == figure.key() else None

    def _measure(self, wing: str, figure: Figure) -> dict[str, Any] | None:
        folder = self.kept / wing / figure.name
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            measured = figure.measure(folder, **figure.settings)
        except Exception:  # the other figures are still wanted; this one is measured again next time
            traceback.print_exc()
            return None
        about = {
            "key": figure.key(),
            "settings": dict(figure.settings),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seconds": round(time.monotonic() - start),
            "versions": versions(),
        }
        target = self.kept / wing / f"{figure.name}.json"
        temporary = target.with_suffix(".tmp")
        record = asdict(measured) | {"passed": bool(measured.passed)} | about  # NumPy's booleans are no JSON
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, target)
        shutil.rmtree(folder)
        return json.loads(target.read_text())

    def write_page(self) -> None:
        """Write the page from what is kept; a row of the same settings that was measured elsewhere stays."""
        before = self.page.read_text().splitlines() if self.page.exists() else []
        old = {match[1]: line for line in before if (match := re.search(r"<!-- (\w+) -->", line))}
        parts = [HEAD]
        for wing, figures in self.wings.items():
            parts += [f"## {wing}\n", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
            for figure in figures:
                record = self.record(wing, figure)
                known = old.get(figure.key()) if record is None else None
                parts.append(known or _row(_cells(wing, figure, record)))
            parts.append("")
        self.page.write_text("\n".join(parts))


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


def _cells(wing: str, figure: Figure, record: dict[str, Any] | None) -> list[str]:
    command = f"`{figure.command or f'python -m tests.acceptance {wing} {figure.name}'}`"
    if record is None:
        return [figure.name, figure.claim, "", "", figure.required, "", command, "", "not measured"]
    measured = f"{record['figure']} ({record['seconds']} s)"
    dated = f"{record['date']}, {record['versions']}"
    shown = [figure.name, figure.claim, measured, record["extent"], figure.required, record["seeds"], command, dated]
    return [*shown, f"{_verdict(record)} <!-- {record['key']} -->"]


def _verdict(record: dict[str, Any] | None) -> str:
    if record is None:
        return "**not finished**"
    return "met" if record["passed"] else "**not met**"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

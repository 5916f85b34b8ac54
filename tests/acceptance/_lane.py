"""The acceptance lane: figures as data, each measured once and kept, all gathered in ACCEPTANCE.md.

A wing is a module of this folder with a list `FIGURES`; adding a wing is adding a module, adding a figure adding an
entry. A finished figure is kept as ``.acceptance/<wing>/<figure>.json`` under the hash of its settings, so a lane that
was killed goes on with the figure in which it stopped, and one whose settings changed is measured again.
"""

import datetime
import hashlib
import importlib
import itertools
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
OVERVIEW = ("figure", "claim", "measured", "required", "verdict")
LONGEST = 120  # characters of a measured figure in the overview; the details have all of it

HEAD = """# Acceptance

The full figures of the project, measured by `make acceptance` (all) or `make acceptance WING=study` (one wing), and
written by that command: edit the modules of `tests/acceptance`, not this file. Quick versions of most of them run in
`make test`. *met* means that the measured figure satisfies what is required of it. Each wing has a table of one line a
figure; intervals, seeds, commands and dates are in the details below it.
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
        """Write the page from what is kept; a figure of the same settings that was measured elsewhere stays."""
        old = read_page(self.page.read_text()) if self.page.exists() else {}
        parts = [HEAD]
        for wing, figures in self.wings.items():
            shown = []
            for figure in figures:
                record = self.record(wing, figure)
                cells = _cells(wing, figure, record)
                known = old.get(figure.key()) if record is None else None
                shown.append(known or (overview_row(cells), details(cells)))
            met = sum(" | met <!--" in row for row, _ in shown)
            parts += [f"## {wing}\n", f"{met} of {len(shown)} figures are met.\n"]
            parts += [_row(OVERVIEW), _row(["---"] * len(OVERVIEW)), *(row for row, _ in shown), ""]
            parts += [f"<details><summary>Details of {wing}</summary>\n", *(text for _, text in shown), "</details>\n"]
        self.page.write_text("\n".join(parts))


def read_page(text: str) -> dict[str, tuple[str, str]]:
    """Return the row and the details of every measured figure of a page, by the hash of its settings."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| .* <!-- (\w+) --> \|$", text, re.MULTILINE)}
    blocks = re.finditer(r"^\*\*.*<!-- (\w+) -->\n(?:(?!\*\*|</details>).*\n)*", text, re.MULTILINE)
    return {match[1]: (rows[match[1]], f"{match[0].rstrip()}\n") for match in blocks if match[1] in rows}


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


def _cells(wing: str, figure: Figure, record: dict[str, Any] | None) -> dict[str, str]:
    """Return what is shown of a figure; `key` is empty if it was not measured."""
    cells = {"figure": figure.name, "claim": figure.claim, "required": figure.required}
    cells["command"] = f"`{figure.command or f'python -m tests.acceptance {wing} {figure.name}'}`"
    if record is None:
        return cells | {"measured": "", "extent": "", "seeds": "", "date": "", "verdict": "not measured", "key": ""}
    return cells | {
        "measured": f"{record['figure']} ({record['seconds']} s)",
        "extent": record["extent"],
        "seeds": record["seeds"],
        "date": f"{record['date']}, {record['versions']}",
        "verdict": _verdict(record),
        "key": record["key"],
    }


def overview_row(cells: Mapping[str, str]) -> str:
    """Return the line of a figure; many verdicts are counted, a long text is cut."""
    parts = cells["measured"].split("<br>")
    found = re.findall(r": (holds|refuted|inconclusive), ", cells["measured"])
    short = parts[0]
    if len(parts) > 1 and found:
        words = ("holds", "refuted", "inconclusive")
        short = ", ".join(f"{found.count(word)} {word.replace('holds', 'hold')}" for word in words if word in found)
    elif len(parts) > 1 or len(short) > LONGEST:
        short = f"{short[:LONGEST].rstrip()} …"
    verdict = f"{cells['verdict']} <!-- {cells['key']} -->" if cells["key"] else cells["verdict"]
    return _row([cells["figure"], cells["claim"], short, cells["required"], verdict])


def details(cells: Mapping[str, str]) -> str:
    """Return the details of a figure as a block of Markdown."""
    if not cells["key"]:
        return f"**{cells['figure']}** is not measured; {cells['command']} measures it.\n"
    pairs = itertools.zip_longest(cells["measured"].split("<br>"), cells["extent"].split("<br>"), fillvalue="")
    lines = [f"**{cells['figure']}**, {cells['verdict'].strip('*')}: {cells['claim']} <!-- {cells['key']} -->", ""]
    lines += [_row(["measured", "interval or extent"]), _row(["---"] * 2), *map(_row, pairs), ""]
    facts = ("required", "seeds", "command", "date")
    return "\n".join([*lines, *(f"* {name}: {cells[name]}" for name in facts), ""])


def _verdict(record: dict[str, Any] | None) -> str:
    if record is None:
        return "**not finished**"
    return "met" if record["passed"] else "**not met**"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

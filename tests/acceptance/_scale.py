"""A store of many small units: what it costs to write, to look through, to open and to compact."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from tests.acceptance._lane import Measured
from tests.study.bits import unequal_bits
from tests.study.toys import Still

from manyheads.study.cells import grid
from manyheads.study.execution.assembly import assemble
from manyheads.study.store.records.schema import pack
from manyheads.study.store.records.segments import Frame, SegmentWriter
from manyheads.study.store.run_store import RunStore

SHAPES = 7  # of units in a ragged run, each in every cell


class Many(Still):
    """A study of many cells; its units are made here, so that nothing but the store is measured."""

    name = "toy/many"
    count: int = 25

    def cells(self):
        return grid(place=tuple(range(self.count)))


def unit(rng: np.random.Generator, steps: int = 200) -> xr.Dataset:
    """Return a unit of 7 variables and 3 coordinates, 1.9 kB."""
    times = {"units": "s", "deterministic": False}
    return xr.Dataset(
        {
            "loss": ("step", rng.normal(size=steps), {"long_name": "loss", "units": "nat"}),
            "entropy": (("layer", "head"), rng.normal(size=(4, 8)), {"long_name": "entropy", "units": "nat"}),
            "rank": ((), rng.normal(), {"long_name": "stable rank", "units": "1"}),
            "norm": ((), rng.normal(), {"long_name": "norm", "units": "1"}),
            "wall_seconds": ((), rng.uniform(), times),
            "cpu_seconds": ((), rng.uniform(), times),
            "outcome": ((), str(rng.choice(["trained", "diverged"])), {"long_name": "outcome"}),
        },
        coords={"step": np.arange(steps), "layer": np.arange(4), "head": np.arange(8)},
    )


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of an action, and what it returns."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def inodes(path: Path) -> int:
    """Return the number of files and folders at and below a folder."""
    return 1 + sum(1 for _ in path.rglob("*"))


def fill(runs: RunStore, replicates: int, rng: np.random.Generator, shapes: int = 1) -> float:
    """Write all units, of so many shapes, and return CPU seconds; making them does not count."""
    writer, spent = SegmentWriter(runs.path, runs.run, "launch-scale"), 0.0
    environment = {"manyheads": "scale"}

    def write(number: int, dataset: xr.Dataset) -> None:
        writer.append(Frame(number, environment, *pack(dataset)))

    for number in range(runs.layout.count(replicates)):
        dataset = unit(rng, 200 - number % shapes)
        spent += seconds(lambda n=number, d=dataset: write(n, d))[0]
    return spent + seconds(writer.close)[0]


def scale(folder: Path, cells: int, replicates: int, seed: int) -> Measured:
    """Measure a store of cells x replicates units."""
    rng, study = np.random.default_rng(seed), Many(count=cells)
    runs = RunStore.create(folder / "new", study, seed)
    shutil.rmtree(runs.path)
    runs = RunStore.create(folder / "new", study, seed)
    count = runs.layout.count(replicates)
    written = fill(runs, replicates, rng) / count
    at_work = seconds(lambda: RunStore(runs.path).missing(replicates))[0]
    opened, before = seconds(lambda: assemble(RunStore(runs.path), replicates))
    compacted = seconds(lambda: RunStore(runs.path).compact())[0]
    nothing, missing = seconds(lambda: RunStore(runs.path).missing(replicates))
    again, after = seconds(lambda: assemble(RunStore(runs.path), replicates))
    faults = missing + [name for pair in zip(before, after, strict=True) for name in unequal_bits(*pair)]
    size = sum(path.stat().st_size for path in runs.path.glob("table-*")) / count

    ragged = RunStore.create(folder / "ragged", study, seed)
    shutil.rmtree(ragged.path)
    ragged = RunStore.create(folder / "ragged", study, seed)
    fill(ragged, replicates, rng, SHAPES)
    RunStore(ragged.path).compact()
    uneven = seconds(lambda: assemble(RunStore(ragged.path), replicates))[0]

    print(*faults, sep="\n")
    figure = (
        f"{1e3 * written:.2f} ms a unit to write; nothing to do: {nothing:.2f} s ({at_work:.2f} s at work); open "
        f"{again:.2f} s ({opened:.2f}; {uneven:.2f} of {SHAPES} shapes); compact {compacted:.2f} s; "
        f"{inodes(runs.path)} inodes"
    )
    extent = f"{count:,} units, CPU seconds, {size:,.0f} bytes a unit"
    met = (
        written <= 3e-4
        and nothing <= 0.2
        and max(again, uneven) <= 1.2
        and compacted <= 2.4
        and inodes(runs.path) <= 10
    )
    return Measured(figure, extent, str(seed), met and not faults and os.name == "posix")

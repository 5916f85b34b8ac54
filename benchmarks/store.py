"""Forms of a run at work, as a Markdown table: JSON lines, and one SQLite file a writer in two journal modes.

Each form is given the same packed units, one durable step a unit as far as kill -9 goes, and is asked for CPU time, for
the files it leaves, and for what a reader finds while a writer works and after the writer was killed. Repeats are
interleaved.

    make bench NAME=store
"""

import inspect
import itertools
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr

from _shared import ONE_THREAD, ratio_of, versions_of
from manyheads.study.store.records import segments
from manyheads.study.store.records.schema import digest_of, identify, pack
from manyheads.study.store.records.segments import Frame, SegmentReader, SegmentWriter

REPEATS, UNITS, KILLS = 5, 4000, 12
RUN, ENVIRONMENT = "0" * 16, {"manyheads": "benchmark"}
TABLE = (
    "CREATE TABLE IF NOT EXISTS units (unit INTEGER PRIMARY KEY, frame TEXT, environment TEXT, digest TEXT, data BLOB)"
)


class Lines:
    """The segment of the store."""

    def __init__(self, folder):
        self.folder, self.writer = folder, SegmentWriter(folder, RUN, "launch-benchmark")

    def append(self, frame):
        """Store a unit."""
        self.writer.append(frame)

    def close(self):
        """End writing."""
        self.writer.close()

    def numbers(self):
        """Return the numbers of all stored units."""
        found = [SegmentReader(path, RUN).scan() for path in (self.folder / "segments").glob("*.jsonl")]
        return {unit for scanned in found for unit, _ in scanned}


class Database:
    """One SQLite file, a commit a unit; a process that is killed leaves its journal behind."""

    mode = "WAL"

    def __init__(self, folder):
        self.path = folder / "units.sqlite"
        self.known = {}

    def _open(self):
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=30)
        connection.execute(f"PRAGMA journal_mode={self.mode}")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(TABLE)
        return connection

    def append(self, frame):
        """Store a unit."""
        if "connection" not in vars(self):
            self.connection = self._open()
        schema, environment = identify(frame.schema), identify(frame.environment)
        digest = digest_of(RUN, frame.unit, schema, environment, frame.block)
        described = schema if schema in self.known else self.known.setdefault(schema, json.dumps(frame.schema))
        row = (frame.unit, described, environment, digest, frame.block)
        self.connection.execute("INSERT INTO units VALUES (?, ?, ?, ?, ?)", row)

    def close(self):
        """End writing."""
        self.connection.close()

    def numbers(self):
        """Return the numbers of all stored units."""
        connection = self._open()
        try:
            return {unit for (unit,) in connection.execute("SELECT unit FROM units")}
        finally:
            connection.close()


class Rollback(Database):
    """The same with a rollback journal, the mode that a network file system may allow."""

    mode = "DELETE"


FORMS = {"JSON lines": Lines, "SQLite, write-ahead log": Database, "SQLite, rollback journal": Rollback}


def frames(count):
    """Yield packed units of 7 variables and 3 coordinates, 1.9 kB."""
    rng = np.random.default_rng(0)
    for number in range(count):
        values = {
            "loss": ("step", rng.normal(size=200)),
            "entropy": (("layer", "head"), rng.normal(size=(4, 8))),
            **{name: ((), rng.normal()) for name in ("rank", "norm", "wall_seconds", "cpu_seconds")},
            "outcome": ((), str(rng.choice(["trained", "diverged"]))),
        }
        labels = {"step": np.arange(200), "layer": np.arange(4), "head": np.arange(8)}
        yield Frame(number, ENVIRONMENT, *pack(xr.Dataset(values, coords=labels)))


def measure(form, ready):
    """Return CPU milliseconds a unit to write and to look through, and the number of files."""
    with tempfile.TemporaryDirectory() as folder:
        store, begun = form(Path(folder)), time.process_time()
        for frame in ready:
            store.append(frame)
        files = sum(path.is_file() for path in Path(folder).rglob("*"))
        store.close()
        written = time.process_time() - begun
        begun = time.process_time()
        assert len(store.numbers()) == len(ready)
        return 1e3 * written / len(ready), 1e3 * (time.process_time() - begun) / len(ready), files


def write_until_killed(name, folder):
    """Write units for ever and tell the number of each that is stored."""
    store = FORMS[name](Path(folder))
    ready = list(frames(200))
    for number in itertools.count():
        store.append(ready[number % len(ready)]._replace(unit=number))
        os.write(1, f"{number}\n".encode())


def kill(name, rng):
    """Kill a writer; return units told and lost, and whether a reader beside it saw units while it worked."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, name, folder]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | ONE_THREAD)
        process.stdout.readline()
        time.sleep(rng.uniform(0.02, 0.3))
        seen = len(FORMS[name](Path(folder)).numbers()) > 0
        process.send_signal(signal.SIGKILL)
        told = {int(line) for line in process.stdout.read().splitlines() if line}
        process.wait()
        return len(told), len(told - FORMS[name](Path(folder)).numbers()), seen


def main():
    ready = list(frames(UNITS))
    rounds = [{name: measure(form, ready) for name, form in FORMS.items()} for _ in range(REPEATS)]
    rng = np.random.default_rng(1)
    print(f"{versions_of('manyheads', 'numpy')}, SQLite {sqlite3.sqlite_version}; {UNITS:,} units, {REPEATS} repeats\n")
    print("| form | write, CPU ms a unit | to JSON lines | look through | files | told and lost, kills | read beside |")
    print("|---|---|---|---|---|---|---|")
    base = [each["JSON lines"][0] for each in rounds]
    for name in FORMS:
        written, looked, files = zip(*(each[name] for each in rounds), strict=True)
        killed = [kill(name, rng) for _ in range(KILLS)]
        print(
            f"| {name} | {statistics.median(written):.3f} ({min(written):.3f} to {max(written):.3f}) "
            f"| {ratio_of(written, base)} | {statistics.median(looked):.3f} | {max(files)} "
            f"| {sum(lost for _, lost, _ in killed)} of {sum(told for told, _, _ in killed):,}, {KILLS} "
            f"| {sum(seen for *_, seen in killed)} of {KILLS} |"
        )
    code = len(inspect.getsource(segments).splitlines())
    print(
        f"\nLines of code: segments {code}, with refusals and documentation; the SQLite form here "
        f"{len(inspect.getsource(Database).splitlines())}, without them."
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write_until_killed(*sys.argv[1:])
    main()

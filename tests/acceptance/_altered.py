"""Bytes of a stored run that are altered, cut, doubled or missing."""

from pathlib import Path
from unittest import mock

import numpy as np
from tests.acceptance._lane import Measured
from tests.study.toys import Averages

from manyheads.errors import FileRefused
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import RunStore


def altered_bytes(folder: Path, count: int, seed: int) -> Measured:
    """Flip, cut, drop or double bytes of every file of a run: refused, or the result is the same to the last bit.

    Half of them are done to a finished run, half to one that was killed between its comparison and its compaction.
    """
    rng, study = np.random.default_rng(seed), Averages(repeats=4)
    stores = {folder / "table": run(study, 1, store=folder / "table", progress=False)}
    with mock.patch.object(RunStore, "compact"):
        stores[folder / "segments"] = run(study, 1, store=folder / "segments", progress=False)
    of = {store: sorted(Path(tree.attrs["path"]).rglob("*")) for store, tree in stores.items()}
    of = {store: [path for path in paths if path.is_file()] for store, paths in of.items()}
    refused, faults = 0, []
    for number in range(count):
        store, whole = list(stores.items())[number % 2]
        path = Path(whole.attrs["path"])
        file = of[store][int(rng.integers(len(of[store])))]
        original = file.read_bytes()
        what = _damage(file, original, rng)
        again = file.name == "run.json" and store.name == "table" and number % 4 == 0
        try:
            tree = run(study, 1, store=store, progress=False) if again else open_run(path)
            if differences(whole, tree) or dict(tree.attrs) != dict(whole.attrs):
                faults.append(f"{file.relative_to(path)}: {what}: read as {differences(whole, tree)}")
        except FileRefused:
            refused += 1
        except Exception as error:
            faults.append(f"{file.relative_to(path)}: {what}: {type(error).__name__}: {error}")
        file.write_bytes(original)
    print(*faults[:20], sep="\n")
    extent = (
        f"{refused} refused by name, {count - refused - len(faults)} read to the same bits; format 2, half in a table, "
        "half in a segment"
    )
    return Measured(f"{len(faults)} read as something else", extent, str(seed), not faults)


def _damage(file: Path, content: bytes, rng: np.random.Generator) -> str:
    kind = rng.choice(["flip", "flip", "flip", "cut", "missing", "doubled", "zeros"])
    at = int(rng.integers(len(content)))
    if kind == "missing":
        file.unlink()
    elif kind == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ int(rng.integers(1, 256))]) + content[at + 1 :])
    elif kind == "cut":
        file.write_bytes(content[:at])
    elif kind == "doubled":
        file.write_bytes(content[:at] + content[at : at + 8] + content[at:])
    else:
        file.write_bytes(content[:at] + bytes(len(content) - at))
    return f"{kind} at {at}"

"""Persistent query cache of an oracle: an interrupted extraction asks no sequence twice.

Layout of a cache, one folder a batch, complete or absent::

    oracle.json                     whose answers these are: dimension, dtypes, answers to the probes; signed
    batches/<name>/answers.safetensors   keys (n, 32) and answers (n, d) or (n, k, d), in the dtype they came in
                   manifest.json         the sha256 of the file beside it; signed

The key of an answer is the sha256 of its question: the tokens, the rows read, and how many times the same question was
asked before, so that an oracle that is asked twice to average its noise is asked twice. A batch is written beside its
place and renamed: a killed process leaves nothing half-written, and of two that ask the same the first one wins and
the other goes on with what the first one stored.
"""

import hashlib
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.errors import FileRefused
from manyheads.recovery._types import ArrayFunction
from manyheads.study.store import disk

FORMAT = 1
HEADER, MANIFEST, DATA = "oracle.json", "manifest.json", "answers.safetensors"
REMEDY = "it is left as it is: delete it, or give another folder, to ask again"
PROBES = (1, 2, 5)  # lengths of the sequences that tell one oracle from another
CACHED = 16  # batches that are held in memory


class QueryCache:
    """Folder of stored answers of one oracle."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.attached = False
        self._index: dict[bytes, tuple[str, int]] = {}
        self._asked: Counter[bytes] = Counter()
        self._held: OrderedDict[str, np.ndarray] = OrderedDict()
        if self.path.exists() and not self.path.is_dir():
            raise FileRefused(f"{self.path} is a file: answers are kept in a folder; give an empty one")
        inside = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        if HEADER not in inside and any(not name.startswith(".") and name != "batches" for name in inside):
            raise FileRefused(f"{self.path} holds files, but no stored answers ({HEADER}): give an empty folder")
        if self._batches.is_dir():
            self._sweep()
            for folder in sorted(self._batches.iterdir()):
                if not folder.name.startswith("."):
                    self._index_batch(folder.name)
        if self._index and HEADER not in inside:
            raise disk.StoreDamaged(f"{self.path / HEADER} is missing: it names the oracle of these answers; {REMEDY}")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def _batches(self) -> Path:
        return self.path / "batches"

    def attach(self, dim: int, dtype: str, ask: ArrayFunction, fit: ArrayFunction = np.asarray) -> None:
        """Check that the stored answers are of this oracle, by asking the probes; the first oracle signs the cache."""
        if self.attached:
            return
        usual = _probes(dim)
        probes = [fit(probe) for probe in usual]
        first = [ask(probe) for probe in probes]
        about: dict[str, Any] = {"format": FORMAT, "dim": dim, "tokens": dtype, "dtype": str(first[0].dtype)}
        if not all(np.array_equal(*both) for both in zip(probes, usual, strict=True)):
            about["probed"] = hashlib.sha256(b"".join(probe.tobytes() for probe in probes)).hexdigest()
        if (self.path / HEADER).exists():
            self._compare(about, first)
        else:
            repeat, _ = _difference(first, [ask(probe) for probe in probes])
            answers = [y.astype(np.float64).ravel().tolist() for y in first]
            with disk.room_on_disk(self.path):
                self._batches.mkdir(parents=True, exist_ok=True)
                disk.write_signed(self.path / HEADER, about | {"repeat": repeat, "probes": answers})
        self.attached = True

    def _compare(self, about: dict[str, Any], answers: list[np.ndarray]) -> None:
        stored = disk.read_signed(self.path / HEADER, "no answers are stored here", REMEDY)
        for name, value in about.items():
            if stored.get(name) != value:
                what = f"{name} is {stored.get(name)!r} there and {value!r} here"
                raise FileRefused(f"{self.path} holds answers of another oracle: {what}; {REMEDY}")
        before = [np.reshape(probe, y.shape) for probe, y in zip(stored["probes"], answers, strict=True)]
        difference, size = _difference(before, answers)
        allowed = max(64 * float(np.finfo(about["dtype"]).eps) * size, 10 * stored["repeat"])
        if not difference <= allowed:
            apart = f"answers are {difference:.2g} apart, relative; {allowed:.2g} is rounding"
            raise FileRefused(f"{self.path} holds answers of another oracle, or another state of it: {apart}; {REMEDY}")

    def keys(self, x: np.ndarray, read: str) -> list[bytes]:
        """Return the keys of questions (n, k, d), counting how often each was asked."""
        start = f"{read} {x.shape[1]} {x.shape[2]} ".encode()
        keys = []
        for sequence in x:
            question = hashlib.sha256(start + sequence.tobytes()).digest()
            keys.append(hashlib.sha256(question + self._asked[question].to_bytes(8)).digest())
            self._asked[question] += 1
        return keys

    def find(self, keys: Sequence[bytes]) -> list[np.ndarray | None]:
        """Return the stored answers of some keys, None where there is none."""
        return [self._load(*self._index[key]) if key in self._index else None for key in keys]

    def keep(self, keys: Sequence[bytes], y: np.ndarray) -> np.ndarray:
        """Store the answers y of some keys; return what the store holds, which another process may have put there."""
        from safetensors.numpy import save

        name = hashlib.sha256(b"".join(keys)).hexdigest()[:32]
        final = self._batches / name
        temporary = disk.temporary_beside(final)
        with disk.room_on_disk(final):
            try:
                temporary.mkdir(parents=True)
                table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 32)
                with (temporary / DATA).open("wb") as file:
                    file.write(save({"answers": np.ascontiguousarray(y), "keys": table}))
                    file.flush()
                    os.fsync(file.fileno())
                disk.write_signed(
                    temporary / MANIFEST, {"count": len(keys), "files": disk.hash_files(temporary, MANIFEST)}
                )
                os.rename(temporary, final)
            except OSError:
                if not final.is_dir():
                    raise
                self._index_batch(name)
                return np.stack([self._load(*self._index[key]) for key in keys])
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        self._index |= {key: (name, row) for row, key in enumerate(keys)}
        return y

    def _index_batch(self, name: str) -> None:
        folder = self._batches / name
        manifest = disk.read_signed(folder / MANIFEST, f"a batch of stored answers is incomplete; {REMEDY}", REMEDY)
        if manifest.get("files") != disk.hash_files(folder, MANIFEST):
            raise disk.StoreDamaged(f"{folder}: the stored answers have been altered (their sha256 differs); {REMEDY}")
        table = self._read(name)["keys"]
        for row, key in enumerate(table):
            self._index.setdefault(key.tobytes(), (name, row))

    def _load(self, name: str, row: int) -> np.ndarray:
        if name not in self._held:
            self._held[name] = self._read(name)["answers"]
            while len(self._held) > CACHED:
                self._held.popitem(last=False)
        self._held.move_to_end(name)
        return self._held[name][row]

    def _read(self, name: str) -> dict[str, np.ndarray]:
        from safetensors.numpy import load

        path = self._batches / name / DATA
        try:
            return load(path.read_bytes())
        except Exception as error:  # the library raises its own kinds
            raise disk.StoreDamaged(f"{path} cannot be read: {error}; {REMEDY}") from error

    def _sweep(self) -> None:
        """Remove what killed processes of this machine have left half-written."""
        for folder in self._batches.iterdir():
            if folder.name.startswith(".") and disk.is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _probes(dim: int) -> list[np.ndarray]:
    """Return the fixed sequences that identify an oracle of a dimension."""
    rng = np.random.default_rng([1733, dim])
    return [rng.standard_normal((1, length, dim)) for length in PROBES]


def _difference(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[float, float]:
    """Return the root mean square of a - b, and that of a, relative to what of a depends on the tokens."""
    one, other = (np.concatenate([y.astype(np.float64).reshape(-1, y.shape[-1]) for y in part]) for part in (a, b))
    moved = one - one[0]
    size = float(np.linalg.norm(moved - moved.mean(0)))
    apart, whole = float(np.linalg.norm(one - other)), float(np.linalg.norm(one))
    if size == 0:
        return (np.inf, 0.0) if apart else (0.0, 0.0)
    return apart / size, whole / size

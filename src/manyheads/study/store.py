"""The store: one folder a run, one Zarr group a unit, complete or absent, with the sha256 of every file beside it.

Layout (Zarr v3)::

    runs/<study>/<hash>/run.json                      identity, layout, source, versions
                        predicted/<draw>/data.zarr    one prediction
                        units/<cell>/<replicate>/     one unit of work:
                            data.zarr                   what was measured
                            manifest.json               the sha256 of every file of it
                        summary.json                  verdicts and panels of the last completed comparison

A unit is written to a temporary sibling and renamed: a killed process leaves nothing half-written under a final
name, and of two processes that finish the same unit the first one wins. A missing, altered or added file is found
when the run is opened; a damaged run is named and left untouched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shlex
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import FileRefused, ManyheadsError
from manyheads.study.base import Study
from manyheads.study.fingerprint import fingerprint, identity
from manyheads.study.registry import FILES, STUDIES
from manyheads.study.units import Layout, Unit

if TYPE_CHECKING:
    import xarray as xr

DATA, MANIFEST = "data.zarr", "manifest.json"
LABELS = "labels"  # attribute that holds the texts behind an integer-coded variable


class StoreDamaged(FileRefused):
    """A stored file is missing, altered, added or unreadable."""


class StoreFull(ManyheadsError, OSError):
    """The disk or a quota is full; what was finished before is kept."""


class RunStore:
    """One run on disk: the units of one study with one configuration and one seed.

    Parameters
    ----------
    path
        The run's folder, ``<root>/<study>/<hash>``.

    Raises
    ------
    FileRefused
        `path` holds no run.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.header: dict[str, Any] = _read_json(self.path / "run.json", "no run is stored here")
        try:
            self.layout = Layout.from_json(self.header["layout"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreDamaged(f"{self.path / 'run.json'} does not describe a run ({error!r})") from error

    @classmethod
    def create(cls, root: str | os.PathLike[str], study: Study, seed: int) -> RunStore:
        """Open the run of `study` and `seed` below `root`, and make it if it is not there."""
        path = Path(root) / study.name / fingerprint(study, seed)
        if not (path / "run.json").exists():
            with _room_on_disk(path):
                path.mkdir(parents=True, exist_ok=True)
                about = {
                    "class": class_path(type(study)),
                    "command": command_of(study),
                    "claim": study.claim,
                    "source": dataclasses.asdict(study.source),
                    "layout": Layout.of(study).to_json(),
                    "versions": versions(),
                }
                write_json(path / "run.json", identity(study, seed) | about)
        run = cls(path)
        run.sweep()
        return run

    def unit_path(self, unit: Unit) -> Path:
        """Return where a unit is stored."""
        folder = self.path / "predicted" if unit.cell is None else self.path / "units" / unit.cell.slug
        return folder / unit.slug

    def __contains__(self, unit: Unit) -> bool:
        return self.unit_path(unit).is_dir()

    def write(self, unit: Unit, dataset: xr.Dataset) -> bool:
        """Store a unit; return False when another process stored it first.

        Raises
        ------
        StoreFull
            The disk is full. Nothing under a final name has changed.
        """
        final = self.unit_path(unit)
        temporary = final.with_name(f".{final.name}.{_owner()}.{uuid.uuid4().hex[:8]}.tmp")
        with _room_on_disk(final):
            try:
                temporary.mkdir(parents=True)
                _encode(dataset).to_zarr(temporary / DATA, mode="w-", zarr_format=3, consolidated=False)
                write_json(temporary / MANIFEST, _hash_files(temporary))
                os.rename(temporary, final)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.is_dir():
                    return False
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return True

    def read(self, unit: Unit) -> xr.Dataset:
        """Return a stored unit after checking every one of its files.

        Raises
        ------
        StoreDamaged
            A file is missing, altered, added or unreadable; nothing is changed.
        """
        import xarray as xr

        path = self.unit_path(unit)
        self.check(path)
        try:
            # Units are words for people: "days" is no reason to turn a number into a date.
            with xr.open_zarr(path / DATA, consolidated=False, chunks=None, decode_times=False) as dataset:
                return _decode(dataset.load())
        except (OSError, ValueError, KeyError) as error:
            raise StoreDamaged(f"{path} cannot be read ({error}); delete this folder to compute it again") from error

    def check(self, path: Path) -> None:
        """Compare a unit's files with its manifest.

        Raises
        ------
        StoreDamaged
            They differ.
        """
        remedy = f"the run is left untouched; delete {path} to compute this unit again"
        try:
            recorded = json.loads((path / MANIFEST).read_text())
            if not isinstance(recorded, dict):
                raise ValueError("it is no table of files")
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"{path / MANIFEST} cannot be read ({error}); {remedy}") from error
        found = _hash_files(path)
        for name in sorted({*recorded, *found}):
            if name not in found:
                raise StoreDamaged(f"{path / name} is missing; {remedy}")
            if name not in recorded:
                raise StoreDamaged(f"{path / name} does not belong to the unit; {remedy}")
            if recorded[name] != found[name]:
                raise StoreDamaged(f"{path / name} has been altered (its sha256 differs); {remedy}")

    def finished(self) -> list[Path]:
        """Return the folders of all stored units, predictions included."""
        return sorted([*self.path.glob("predicted/[0-9]*"), *self.path.glob("units/*/[0-9]*")])

    def verify(self) -> int:
        """Check every stored unit and return how many there are.

        Raises
        ------
        StoreDamaged
            One of them is damaged.
        """
        for path in self.finished():
            self.check(path)
        return len(self.finished())

    def leftovers(self) -> list[Path]:
        """Return temporary folders of processes that are gone from this machine."""
        return [path for path in self.path.rglob(".*.tmp") if _is_abandoned(path)]

    def sweep(self) -> int:
        """Remove the leftovers of killed processes and return how many there were."""
        abandoned = self.leftovers()
        for path in abandoned:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(abandoned)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store what the comparison gave, with its sha256, in one atomic step."""
        write_json(self.path / "summary.json", summary | {"sha256": _json_sha256(summary)})

    def summary(self) -> dict[str, Any] | None:
        """Return what the last comparison gave, None before there was one.

        Raises
        ------
        StoreDamaged
            It has been altered.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        summary = _read_json(path, "the summary cannot be read")
        if not isinstance(summary, dict) or summary.pop("sha256", None) != _json_sha256(summary):
            raise StoreDamaged(f"{path} has been altered (its sha256 differs); run the same command again to renew it")
        return summary


def find_runs(root: str | os.PathLike[str]) -> list[RunStore]:
    """Return all runs at or below a folder, by path.

    Raises
    ------
    FileRefused
        The folder does not exist or holds no run.
    """
    paths = sorted(path.parent for path in Path(root).rglob("run.json"))
    if not paths:
        raise FileRefused(f"{root} holds no run: give the folder that was passed as --store, or one run's own folder")
    return [RunStore(path) for path in paths]


def class_path(cls: type) -> str:
    """Return ``module:Class``, from which a class is imported again; a script's class is named by the script's file."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if cls.__module__ == "__main__" and script:
        return f"{script}:{cls.__qualname__}"
    if cls.__module__ in FILES:
        return f"{FILES[cls.__module__]}:{cls.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def command_of(study: Study) -> str:
    """Return the command that runs a study with this configuration: its name and every flag that is not the default."""
    name = study.name if study.name in STUDIES else class_path(type(study))
    words = ["manyheads", "study", "run", name]
    for field in dataclasses.fields(study):  # type: ignore[arg-type]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(study, field.name)
        if value != default:
            words += _flag(field.name.replace("_", "-"), value)
    return shlex.join(words)


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if dataclasses.is_dataclass(value):
        inner = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [word for field, part in inner for word in _flag(f"{name}.{field.replace('_', '-')}", part)]
    if isinstance(value, tuple | list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    import platform

    import jax
    import numpy
    import scipy

    import manyheads

    return {
        "manyheads": manyheads.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }


def write_json(path: Path, data: object) -> None:
    """Write JSON in one atomic step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a text to a temporary sibling and move it into place: readers see the old file or the new one.

    Raises
    ------
    StoreFull
        The disk is full; the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{_owner()}.{uuid.uuid4().hex[:8]}.tmp")
    with _room_on_disk(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileRefused(f"{path.parent}: {what} ({path.name} is missing)") from None
    except (OSError, ValueError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}") from error


def _json_sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _hash_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _owner() -> str:
    return f"{socket.gethostname().replace('.', '-')}.{os.getpid()}"


def _is_abandoned(temporary: Path) -> bool:
    host, process = temporary.name.split(".")[-4:-2] if temporary.name.count(".") >= 5 else ("", "")
    if not process.isdigit() or host != socket.gethostname().replace(".", "-") or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@contextlib.contextmanager
def _room_on_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message = f"no room left for {path}: what is finished is kept; free some space and run the same command again"
        raise StoreFull(error.errno, message) from error


def _encode(dataset: xr.Dataset) -> xr.Dataset:
    """Store texts as integer codes with the texts as an attribute: Zarr v3 has no stable type for text."""
    import numpy as np

    coded = {}
    for name, variable in dataset.variables.items():
        if variable.dtype.kind in "OUT":
            texts, codes = np.unique(np.asarray(variable.values, dtype=str), return_inverse=True)
            attributes = variable.attrs | {LABELS: texts.tolist()}
            coded[name] = (variable.dims, codes.reshape(variable.shape).astype(np.int32), attributes)
    return dataset.assign_coords({name: value for name, value in coded.items() if name in dataset.coords}).assign(
        {name: value for name, value in coded.items() if name not in dataset.coords}
    )


def _decode(dataset: xr.Dataset) -> xr.Dataset:
    import numpy as np

    texts = {}
    for name, variable in dataset.variables.items():
        if LABELS in variable.attrs:
            attributes = {key: value for key, value in variable.attrs.items() if key != LABELS}
            texts[name] = (variable.dims, np.asarray(variable.attrs[LABELS], dtype=str)[variable.values], attributes)
    return dataset.assign_coords({name: value for name, value in texts.items() if name in dataset.coords}).assign(
        {name: value for name, value in texts.items() if name not in dataset.coords}
    )

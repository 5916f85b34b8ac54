"""The identity of a run: a hash over everything its numbers depend on, and nothing else."""

import dataclasses
import enum
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from manyheads._json import Json
from manyheads.errors import ManyheadsError, UsageError
from manyheads.study.base import Study

IDENTITY = ("study", "revision", "configuration", "inputs", "seed")


def plain(value: object, where: str = "field", real: bool = False) -> Json:
    """Return `value` as JSON can hold it; a path becomes the sha256 of the file's content.

    `where` names its place in errors; 1 and 1.0 are the same number where the field is `real`.
    """
    if real and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{where} is {value}: the configuration of a study must be finite")
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return {"sha256": file_sha256(value)}
    if isinstance(value, tuple | list):
        return [plain(item, f"{where}[{index}]", real) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {str(name): plain(item, f"{where}[{name!r}]") for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {each.name: plain(getattr(value, each.name), f"{where}.{each.name}", _is_real(each)) for each in fields}
    kind = type(value).__name__
    raise UsageError(f"{where} is a {kind}: a study's fields are numbers, text, tuples, paths, dataclasses")


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content, read in pieces."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file: expected a file whose content can be read to its end")
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


class InputChanged(ManyheadsError, RuntimeError):
    """A file that the study reads changed while it was read; the unit is not stored."""


class Inputs:
    """Files that a study's fields name, with the sha256 of each, watched while units are computed from them.

    A file whose size, time and inode stay the same is taken to be the same; otherwise its content is hashed again.
    """

    def __init__(self, expected: dict[Path, str]):
        self.expected = expected
        self.seen: dict[Path, tuple[int, int, int]] = {}

    @staticmethod
    def of(study: Study) -> dict[Path, str]:
        """Return the sha256 of every file that a study's fields name."""
        return {path: file_sha256(path) for path in _paths_in(study)}

    def check(self) -> None:
        """Refuse files whose content is not what it was at the beginning, by `InputChanged`."""
        for path, content in self.expected.items():
            if (now := _look(path)) is None or now != self.seen.get(path):
                if now is None or file_sha256(path) != content:
                    remedy = "put the old content back, or run the study again with the new one"
                    what = f"{path} changed while the study ran, and its run belongs to what it was"
                    raise InputChanged(f"{what}: {remedy}")
                self.seen[path] = now


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns, about.st_ino


def _paths_in(value: object) -> set[Path]:
    """Return the paths in a study's fields."""
    if isinstance(value, Path):
        return {value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(_paths_in, value)) if isinstance(value, tuple | list) else set()


def identity(study: Study, seed: int) -> dict[str, Json]:
    """Return all that a run's numbers depend on, ready for JSON: name, revision, configuration, inputs, seed."""
    fields = dataclasses.fields(study)
    settings = {each.name: plain(getattr(study, each.name), each.name, _is_real(each)) for each in fields}
    stated = {"study": study.name, "revision": study.revision, "configuration": settings}
    return stated | {"inputs": dict(sorted(study.inputs().items())), "seed": seed}


def fingerprint(study: Study, seed: int) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of `identity`, the name of the run's folder."""
    return fingerprint_of(identity(study, seed))


def fingerprint_of(data: dict[str, Json]) -> str:
    """Return the fingerprint of an `identity`, or of a stored header that holds one."""
    text = json.dumps({name: data[name] for name in IDENTITY}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_real(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field holds floating-point numbers and no integers: ``float``, ``tuple[float, ...]``."""
    annotation = field.type if isinstance(field.type, str) else repr(field.type)
    return "float" in annotation and not re.search(r"\bint\b", annotation)

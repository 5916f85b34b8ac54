"""Provenance of a run: the command that runs it again, its class, versions, and the environment of every unit."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from manyheads.study.base import Study
from manyheads.study.registry import FILES, STUDIES


def class_path(cls: type) -> str:
    """Return ``module:Class``, from which a class is imported again; a script's class is named by the script's file."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    place = script if cls.__module__ == "__main__" and script else FILES.get(cls.__module__, cls.__module__)
    return f"{place}:{cls.__qualname__}"


def command_of(study: Study) -> str:
    """Return the command that runs a study with this configuration: its name and every flag that is not the default."""
    name = study.name if study.name in STUDIES else class_path(type(study))
    words = ["manyheads", "study", "run", name]
    for field in dataclasses.fields(study):
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

    named = {each.__name__: each.__version__ for each in (manyheads, jax, numpy, scipy)}
    return {"manyheads": named.pop("manyheads"), "python": platform.python_version()} | named


def environment_of(study: Study) -> dict[str, str]:
    """Return what a unit is computed under: versions, device, flags of XLA, machine, hash of the study's file."""
    return _environment(type(study)) | {"xla_flags": os.environ.get("XLA_FLAGS", "")}


@functools.lru_cache(maxsize=64)
def _environment(kind: type[Study]) -> dict[str, str]:
    import platform

    import jax
    import xarray

    more = {"jaxlib": version("jaxlib"), "xarray": xarray.__version__, "device": jax.default_backend()}
    return versions() | more | {"machine": platform.machine(), "code": code_of(kind)}


def code_of(kind: type[Study]) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of the file that defines a study; empty if there is none."""
    with contextlib.suppress(OSError, TypeError):
        return hashlib.sha256(Path(inspect.getsourcefile(kind) or "").read_bytes()).hexdigest()[:16]
    return ""

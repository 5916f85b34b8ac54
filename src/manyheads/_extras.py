"""Optional dependencies: imported where they are needed, and named when they are absent."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import lazy_loader

from manyheads._moved import find_address
from manyheads.errors import ExtraMissing

if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
    import matplotlib as mpl
    import numpy as np
    import pandas as pd
    import xarray as xarray
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, Num, Shaped
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

EXTRA_OF = {
    **dict.fromkeys(("jax", "jaxlib", "jaxtyping", "equinox", "optax", "diffrax", "optimistix"), "jax"),
    "zarr": "store",
    "numba": "fast",
    "torch": "torch",
    "transformers": "torch",
    "distributed": "cluster",
    "lightning": "training",
}


def require(module: str) -> ModuleType:
    """Import an optional module, or raise `ExtraMissing`, which says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise name_extra(error, module) from error


class LazyModule:
    """A module that is imported at the first use of one of its attributes."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by whoever inspects the module that holds it
            raise AttributeError(attribute)
        return getattr(require(self._name), attribute)


if not TYPE_CHECKING:
    jax, jnp, mpl, np, pd, xarray = map(LazyModule, ("jax", "jax.numpy", "matplotlib", "numpy", "pandas", "xarray"))
    Array = ArrayLike = Axes = Figure = NDArray = Any
    Bool = Float = Int = Integer = Num = Shaped = Annotated  # an array and its axes, as of jaxtyping


def attach_stub(package: str, filename: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose stub lists what is imported on first use."""
    load, names, exported = lazy_loader.attach_stub(package, filename)

    def load_or_name_extra(name: str) -> object:
        try:
            return load(name)
        except ModuleNotFoundError as error:
            raise name_extra(error, f"{package}.{name}") from error
        except AttributeError:
            if (Path(filename).parent / name / "__init__.py").exists():
                return importlib.import_module(f"{package}.{name}")
            if address := find_address(package, filename, name):
                raise ImportError(f"{package} lists no {name}: from {address} import {name}", name=package) from None
            raise

    return load_or_name_extra, names, exported


def name_extra(error: Exception, user: str) -> Exception:
    """Return the error that says which extra `user` needs, or the same error if no extra brings what is missing."""
    if not isinstance(error, ModuleNotFoundError) or (module := (error.name or "").partition(".")[0]) not in EXTRA_OF:
        return error
    subject = user if user.partition(".")[0] == module else f"{user} needs {module}, which"
    message = f"{subject} is not installed: pip install 'manyheads[{EXTRA_OF[module]}]' brings it"
    return ExtraMissing(message, name=error.name)

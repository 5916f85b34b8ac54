"""Optional dependencies: imported where they are needed, and named when they are absent."""

import importlib
from types import ModuleType

from manyheads.errors import ExtraMissing

EXTRA_OF = {
    "numba": "fast",
    "torch": "torch",
    "transformers": "torch",
    "distributed": "cluster",
    "lightning": "training",
}


def require(module: str) -> ModuleType:
    """Import an optional module, or raise an error that says which extra brings it.

    Raises
    ------
    ExtraMissing
        `module` is not installed.
    """
    extra = EXTRA_OF[module.partition(".")[0]]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ExtraMissing(
            f"{module} is not installed: pip install 'manyheads[{extra}]' brings it", name=module
        ) from error

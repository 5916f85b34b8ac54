"""`cite`: BibTeX entries of the publications behind a result."""

from __future__ import annotations

import json
import os

from manyheads._extras import xarray as xr
from manyheads.errors import UsageError
from manyheads.study.base import Study
from manyheads.study.store.run_store import find_runs, stored_source


def cite(result: xr.DataTree | Study | type[Study] | str | os.PathLike[str]) -> str:
    """Return the BibTeX entries behind a result, a study, or all runs below a folder, each once.

    Parameters
    ----------
    result
        What `run` or `open_run` returned, a study or its class, or the path of a store or run.

    Raises
    ------
    UsageError
        Something that carries no source.
    FileRefused
        A folder without a run.
    """
    if isinstance(result, xr.DataTree):
        if "source" not in result.attrs:
            raise UsageError("this tree was not made by manyheads.run: it carries no source")
        sources = [stored_source({"source": json.loads(result.attrs["source"])})]
    elif isinstance(result, Study) or (isinstance(result, type) and issubclass(result, Study)):
        return result.source.bibtex()
    elif isinstance(result, str | os.PathLike):
        sources = [stored_source(run.header) for run in find_runs(result)]
    else:
        raise UsageError(f"expected a result, a study or a path, got a {type(result).__name__}")
    # Runs of one publication differ in the place they name, and older ones in what was known of it: one entry each.
    return "\n\n".join({(source.key, source.title): source.bibtex() for source in sources}.values())

"""Tree of a run or of several runs: xarray's, with verdicts first, pictures, and the grid of cells."""

from __future__ import annotations

import json
from typing import Any

import xarray as xr

from manyheads._extras import Figure, pd
from manyheads._overview import Overview
from manyheads.errors import UsageError
from manyheads.study.store.run_store import RunStore
from manyheads.study.verdicts import tally

SHOWN = ("claim", "outcome", "expected", "figure", "low", "high")  # columns of a table for people
COLUMNS = (*SHOWN, "target", "tolerance_below", "tolerance_above", "basis")


class RunTree(xr.DataTree):
    """What `run` and `open_run` return: ``/predicted``, ``/trained`` and ``/verdicts`` of a run, or a tree of runs.

    It shows its verdicts. Everything else is that of `xarray.DataTree`, in parts of it as well.
    """

    __slots__ = ()

    @property
    def runs(self) -> dict[str, RunTree]:
        """The runs in the tree by path: itself under its study's name, or those below."""
        if "study" in self.attrs:
            return {str(self.attrs["study"]): self}
        nodes = {node.relative_to(self): node for node in self.descendants if "study" in node.attrs}
        return {path: node for path, node in nodes.items() if isinstance(node, RunTree)}

    def grid(self) -> xr.Dataset:
        """Return the trained systems over the coordinates of the cells, one dimension each, instead of `cell`.

        Cells that the study does not have are NaN.
        """
        from manyheads.study.tables import on_grid

        found = on_grid(*(self._one()[node].to_dataset() for node in ("trained", "predicted")))
        return found.transpose(*found.attrs.pop("axes").split(), ...)

    def plot(self, picture: int = 0) -> Figure:
        """Draw a picture of the report, numbered as in `pictures`."""
        from manyheads.study.reporting.charts import draw_titled

        drawn = self._pictures()
        if not 0 <= picture < len(drawn):
            raise UsageError(f"picture={picture}: this run has {len(drawn)}, numbered from 0")
        return draw_titled(drawn[picture])

    @property
    def pictures(self) -> tuple[str, ...]:
        """Titles of the pictures that `plot` draws."""
        return tuple(panel.title for panel in self._pictures())

    def to_dataframe(self) -> pd.DataFrame:
        """Return the verdicts of all runs as a pandas data frame."""
        if not self.runs:
            return self.to_dataset().to_dataframe()
        return Overview("", ("run", *COLUMNS), [(name, *row) for name, row in self._rows()]).frame()

    def __repr__(self) -> str:  # type: ignore[override]  # xarray passes no level to it
        """Return the verdicts of a run, or one line a run."""
        return self._overview().text() if self.runs else str(super().__repr__())

    def _repr_html_(self) -> str:
        if "study" not in self.attrs:
            return self._overview().html() if self.runs else str(super()._repr_html_())
        return f"{self._overview().html()}<details><summary>data</summary>{super()._repr_html_()}</details>"

    def _overview(self) -> Overview:
        runs = self.runs
        if "study" in self.attrs:
            settings = ", ".join(f"{name}={value}" for name, value in json.loads(self.attrs["configuration"]).items())
            cells = ", ".join(f"{name} {size}" for name, size in list(self["trained"].sizes.items())[:2])
            about = (f"trained: {cells}; {settings}", f"stored in {self.attrs['path']}")
            return Overview(_title(self), SHOWN, [row[: len(SHOWN)] for _, row in self._rows()], about)
        rows = [(path, len(run["verdicts"]["claim"]), _tally(run)) for path, run in runs.items()]
        left = self.attrs.get("unfinished", ())
        notes = (f"unfinished, left out: {', '.join(left)}",) if len(left) else ()
        return Overview("1 run" if len(rows) == 1 else f"{len(rows)} runs", ("run", "claims", "outcomes"), rows, notes)

    def _rows(self) -> list[tuple[str, tuple[object, ...]]]:
        tables = {path: run["verdicts"].to_dataset() for path, run in self.runs.items()}
        columns = {path: [table[name].values.tolist() for name in COLUMNS] for path, table in tables.items()}
        return [(path, row) for path in columns for row in zip(*columns[path], strict=True)]

    def _one(self) -> RunTree:
        """Return the run of a tree that holds one."""
        if len(self.runs) != 1:
            known = f"it holds {len(self.runs)}: {', '.join(self.runs)}" if self.runs else "this is a part of one"
            raise UsageError(f"expected one run, but {known}; choose it by its path, as in tree[path]")
        return next(iter(self.runs.values()))

    def _pictures(self) -> list[Any]:
        from manyheads.study.panels import Drawn

        summary = RunStore(self._one().attrs["path"]).summary()
        return [panel for panel in summary.panels if isinstance(panel, Drawn)] if summary else []


def _tally(run: xr.DataTree) -> str:
    return tally(run["verdicts"].to_dataset()["outcome"].values.tolist())


def _title(run: xr.DataTree) -> str:
    replicates = run["trained"].sizes.get("replicate", 0)
    return f"Run of {run.attrs['study']}, {replicates} replicates, seed {run.attrs['seed']}: {_tally(run)}"

"""Summary of a finished run: its verdicts and panels, to and from `summary.json`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads._json import Json
from manyheads.study.panels import Panel, panel_from_json
from manyheads.study.verdicts import Verdict


@dataclass(frozen=True)
class Summary:
    """Result of the last comparison: systems compared in each cell, verdicts, and pictures of the report."""

    replicates: int
    verdicts: tuple[Verdict, ...]
    panels: tuple[Panel, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the summary as JSON can hold it."""
        parts = {name: [each.to_json() for each in getattr(self, name)] for name in ("verdicts", "panels")}
        return {"replicates": self.replicates} | parts

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> Summary:
        """Rebuild a summary from `to_json`."""
        replicates = data["replicates"]
        if type(replicates) is not int or replicates < 1:
            raise ValueError(f"{replicates!r} replicates")
        verdicts, panels = map(Verdict.from_json, data["verdicts"]), map(panel_from_json, data["panels"])
        return cls(replicates, tuple(verdicts), tuple(panels))

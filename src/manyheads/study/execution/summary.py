"""Summary of a finished run: its verdicts and panels, to and from `summary.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyheads.study.panels import Panel, panel_from_json
from manyheads.study.verdicts import Verdict


@dataclass(frozen=True)
class Summary:
    """Result of the last comparison: systems compared in each cell, verdicts, and pictures of the report."""

    replicates: int
    verdicts: tuple[Verdict, ...]
    panels: tuple[Panel, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON can hold it."""
        return {
            "replicates": self.replicates,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "panels": [panel.to_json() for panel in self.panels],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Summary:
        """Rebuild a summary from `to_json`."""
        replicates = data["replicates"]
        if type(replicates) is not int or replicates < 1:
            raise ValueError(f"{replicates!r} replicates")
        return cls(
            replicates,
            tuple(Verdict.from_json(verdict) for verdict in data["verdicts"]),
            tuple(panel_from_json(panel) for panel in data["panels"]),
        )

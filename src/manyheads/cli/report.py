"""`manyheads report`: one HTML file over the runs in a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from manyheads.cli.parsing import ABSENT, existing


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file: claims, pictures, verdicts, citations. It fetches nothing."""

    store: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Root folder of a store, or the folder of one run."""
    out: Annotated[Optional[Path], ABSENT] = None
    """The file to write; by default report.html in the store."""

    def run(self) -> int:
        """Write the report and print where it is."""
        from manyheads.study.reporting.html import report

        print(report(existing(self.store), self.out))
        return 0

"""`manyheads report`: one HTML file over the runs in a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.parsing import OptionalPath, Store, Switch, existing


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file with claims, figures, verdicts and citations."""

    store: Store = Path("runs")  # Root folder of a store, or the folder of one run.
    out: OptionalPath = None  # File to write; report.html in the store if absent.
    open: Switch = False  # Open the report in the browser.

    def run(self) -> int:
        """Write the report and print its path."""
        from manyheads.study.reporting.html import report

        print(written := report(existing(self.store), self.out))
        if self.open:
            import webbrowser

            webbrowser.open(written.resolve().as_uri())
        return 0

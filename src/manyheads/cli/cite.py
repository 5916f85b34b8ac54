"""`manyheads cite`: BibTeX for the sources of studies and runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.errors import UsageError


@dataclass(frozen=True)
class Cite:
    """Print BibTeX for a study, a run or all runs in a store, each source once."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "runs"
    """A study, or a folder with runs."""

    def run(self) -> int:
        """Print the entries."""
        from manyheads.study.registry import STUDIES, load
        from manyheads.study.reporting.citations import cite

        if self.what and Path(self.what).is_dir():
            print(cite(self.what))
        elif self.what in STUDIES or ":" in self.what:
            print(cite(load(self.what)))
        else:
            hint = "'manyheads study list' lists the studies"
            raise UsageError(f"{self.what!r} is neither a folder with runs nor a study; {hint}")
        return 0

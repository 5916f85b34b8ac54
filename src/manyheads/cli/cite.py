"""`manyheads cite`: BibTeX for what a result rests on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Cite:
    """Print BibTeX for a study, a run or all runs in a store, each source once."""

    what: Annotated[str, tyro.conf.Positional] = "runs"
    """Name of a study, or a folder that holds runs."""

    def run(self) -> int:
        """Print the entries."""
        from manyheads.study.citations import cite
        from manyheads.study.registry import find_study

        print(cite(self.what if Path(self.what).is_dir() else find_study(self.what)))
        return 0

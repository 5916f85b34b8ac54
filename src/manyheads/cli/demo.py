"""`manyheads demo`: the first minute with manyheads."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

from manyheads.cli.parsing import ABSENT


@dataclass(frozen=True)
class Demo:
    """Train a small transformer on real text, watch its heads, and write a report that explains what was seen."""

    text: Annotated[Optional[Path], ABSENT] = None
    """A UTF-8 text file to learn; by default Python's own documentation."""
    out: Path = Path("demo")
    """Folder for the store and the report; an unfinished demo goes on from there."""
    seed: int = 0
    """Root of all randomness."""
    workers: Annotated[Optional[int], ABSENT] = None
    """Processes; 1 computes in this one; by default one for each processor."""

    def run(self) -> int:
        """Run the chapters one after the other, and write the report."""
        from manyheads.cli.study import print_verdicts
        from manyheads.data import load_text
        from manyheads.demo.chapters import CHAPTERS, Scene
        from manyheads.study.executors import open_executor
        from manyheads.study.reporting.html import section_of, write_report
        from manyheads.study.runner import run
        from manyheads.study.store.run_store import RunStore

        start = time.monotonic()
        text = load_text(self.text)  # refused here if it cannot be read, before any work
        scene = Scene(self.text, {})
        sections = []
        with open_executor(None, self.workers) as executor:
            for number, chapter in enumerate(CHAPTERS, start=1):
                print(f"\n{number} of {len(CHAPTERS)}  {chapter.title}", file=sys.stderr, flush=True)
                study = chapter.study(scene)
                tree = run(study, chapter.replicates, self.seed, executor, self.out / "runs", progress=True)
                store = RunStore(tree.attrs["path"])
                scene.finished[study.name] = store.path
                section = section_of(store, chapter.title, chapter.lead)
                sections.append(section)
                print_verdicts(section.verdicts)
        introduction = (
            f"The text is {text.name}, {len(text.content):,} characters. Every claim below stands beside a network "
            "that was trained for it a moment ago. The verdict follows from a 99% interval by one rule: holds when the "
            "interval lies inside the range given on the right, refuted when it lies outside, inconclusive otherwise."
        )
        report = write_report(sections, self.out / "report.html", "manyheads: the demo", introduction)
        print(f"\nreport   {report.resolve()}\nstore    {(self.out / 'runs').resolve()}")
        print(f"took     {time.monotonic() - start:.0f} s\n\nThree things to try next:")
        print("  manyheads demo --text YOUR.txt --out demo-mine     the same on a text of yours")
        print("  manyheads study run attention/order-blindness      the second chapter at its full size, more seeds")
        print("  manyheads count --layers 12 --width 768 --heads 12 --vocabulary 50257 --length 1024 --compare")
        return 0

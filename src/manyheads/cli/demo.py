"""`manyheads demo`: every theory on one small transformer, with a report."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.parsing import OptionalInt, OptionalPath

INTRODUCTION = (
    "Every claim below is tested on networks trained in this run. A claim holds if the 99% interval of its figure lies "
    "inside the range on the right, is refuted if it lies outside, and is inconclusive otherwise."
)
NEXT = """Next:
  manyheads demo --text YOUR.txt --out demo-mine   the demo on another text
  manyheads study run attention/order-blindness    recall of order, larger and with more seeds
  manyheads count --layers 12 --width 768 --heads 12 --vocabulary 50257 --compare"""


@dataclass(frozen=True)
class Demo:
    """Train a small transformer on text, compare it with every theory, and write a report."""

    text: OptionalPath = None  # UTF-8 file to train on; Python's documentation if absent.
    out: Path = Path("demo")  # Folder for the store and the report; an unfinished demo is resumed.
    seed: int = 0  # Root of all randomness.
    replicates: OptionalInt = None  # Trained networks of every chapter; those of the chapter, 3 to 8, if absent.
    workers: OptionalInt = None  # Processes; 1 computes in this one; one for each processor if absent.

    def run(self) -> int:
        """Run the chapters in order and write the report."""
        from manyheads.cli.study import print_verdicts
        from manyheads.data import load_text
        from manyheads.demo.chapters import CHAPTERS, Scene
        from manyheads.study.execution.executors import open_executor
        from manyheads.study.execution.runner import finish
        from manyheads.study.reporting.html import section_of, write_report

        start = time.monotonic()
        text = load_text(self.text)  # refused here if it cannot be read, before any work
        scene = Scene(self.text, {})
        sections = []
        with open_executor(None, self.workers) as executor:
            for number, chapter in enumerate(CHAPTERS, start=1):
                print(f"\n{number} of {len(CHAPTERS)}  {chapter.title}", file=sys.stderr, flush=True)
                study = chapter.study(scene)
                replicates = chapter.replicates if self.replicates is None else self.replicates
                done = finish(study, replicates, self.seed, executor, self.out / "runs", progress=True)
                scene.finished[study.name] = done.store.path
                sections.append(section_of(done.store, chapter.title, chapter.lead))
                print_verdicts(done.verdicts)
        introduction = f"The text is {text.name}, {len(text.content):,} characters. {INTRODUCTION}"
        report = write_report(sections, self.out / "report.html", "manyheads: the demo", introduction)
        print(f"\nreport   {report.resolve()}\nstore    {(self.out / 'runs').resolve()}")
        print(f"took     {time.monotonic() - start:.0f} s\n\n{NEXT}")
        return 0

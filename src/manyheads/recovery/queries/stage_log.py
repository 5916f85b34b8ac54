"""What the stages of an extraction write down: their names, their figures, the time they took."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from manyheads.recovery.results import Stage


class StageLog:
    """Times the stages, counts what they ask under their names, and keeps their figures.

    Parameters
    ----------
    oracle
        An `Oracle`, whose counts are kept by stage, or any callable, which is not counted.

    Examples
    --------
    >>> from manyheads.recovery.queries.stage_log import StageLog
    >>> log = StageLog(lambda x, read: x)
    >>> with log.stage("sums"):
    ...     log.note({"condition": 2})
    >>> log.stages[0].name, dict(log.stages[0].figures)
    ('sums', {'condition': 2.0})
    """

    def __init__(self, oracle: Any):
        self.oracle = oracle
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run one stage."""
        started = time.process_time()
        self.stages.append(Stage(name))
        with self.oracle.stage(name) if hasattr(self.oracle, "stage") else nullcontext():
            yield
        self.stages[-1] = replace(self.stages[-1], seconds=time.process_time() - started)

    def run(self, name: str, work: Callable[[dict[str, float]], Any]) -> Any:
        """Run `work` as one stage and return its result; it writes its figures into what it is called with."""
        figures: dict[str, float] = {}
        with self.stage(name):
            result = work(figures)
        self.note(figures)
        return result

    def note(self, figures: Mapping[str, float]) -> None:
        """Add figures to the stage that runs, or ran last."""
        known = dict(self.stages[-1].figures) | {name: float(value) for name, value in figures.items()}
        self.stages[-1] = replace(self.stages[-1], figures=known)

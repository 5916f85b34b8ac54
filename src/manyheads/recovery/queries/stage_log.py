"""Log of the stages of an extraction: names, figures and CPU seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from manyheads.recovery.results import Stage


class StageLog:
    """Times the stages, counts their queries under their names, and keeps their figures.

    Parameters
    ----------
    oracle
        An `Oracle`, whose counts are kept by stage, or any callable, which is not counted.
    """

    def __init__(self, oracle: Any):
        self.oracle = oracle
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        """Run one stage, which writes its figures into the dictionary it is given."""
        started, figures = time.process_time(), dict[str, float]()
        with self.oracle.stage(name) if hasattr(self.oracle, "stage") else nullcontext():
            yield figures
        plain = {name: float(value) for name, value in figures.items()}
        self.stages.append(Stage(name, plain, time.process_time() - started))

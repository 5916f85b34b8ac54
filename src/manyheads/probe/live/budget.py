"""Time budget: which steps of a training are measured, so that measuring takes a given share of its time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manyheads.errors import UsageError, check_integer
from manyheads.probe.lazy_torch import torch


class TimeBudget:
    """Admit a measurement when (cost so far + expected cost) <= share x (time so far).

    The first measurement is admitted always, the expected cost of a later one is that of the one before it.

    Parameters
    ----------
    share
        Share of the time of the training, between 0 and 1; None: no limit.
    every
        Only steps whose number is a multiple of it are admitted.
    device
        Where the measured tensors are; if that is no CPU, work in its queue is awaited before a cost is taken.

    Attributes
    ----------
    cost
        Seconds spent so far.
    """

    def __init__(self, share: float | None, every: int, device: Any) -> None:
        if share is not None and not 0 < share <= 1:
            raise UsageError(f"share={share!r}: expected a number above 0 and up to 1, or None for no limit")
        self._share, self._every = share, check_integer("every", every)
        self._asynchronous = getattr(device, "type", "cpu") != "cpu"
        self._began: float | None = None
        self.cost = 0.0
        self._before: float | None = None  # cost before the last measurement

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @property
    def unlimited(self) -> bool:
        """Whether admission depends on the number of the step alone, and is the same in every process."""
        return self._share is None

    def admits(self, step: int) -> bool:
        """Decide whether a step is measured, and count it as measured if so."""
        self._began = time.perf_counter() if self._began is None else self._began
        if step % self._every:
            return False
        if self._share is not None and self._before is not None:
            expected = self.cost - self._before
            if self.cost + expected > self._share * self.elapsed:
                return False
        self._before = self.cost
        return True

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Add the time within the block to the cost."""
        start = self._clock()
        try:
            yield
        finally:
            self.cost += self._clock() - start

    def _clock(self) -> float:
        if self._asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()

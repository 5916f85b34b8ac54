"""Time budget: which steps of a training are measured, so that measuring takes a given share of its time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manyheads.errors import UsageError, check_integer
from manyheads.models.torch.lazy_torch import torch
from manyheads.probe.live.output import count_processes


class TimeBudget:
    """Admit a measurement when (cost so far + expected cost) <= share x (time so far).

    The first measurement is admitted always, the expected cost of a later one is that of the one before it. Only steps
    whose number is a multiple of `every` are admitted; without a share there is no other limit. If the device is no
    CPU, work in its queue is awaited before a cost is taken.
    """

    def __init__(self, share: float | None, every: int, device: Any) -> None:
        if share is not None and not 0 < share <= 1:
            raise UsageError(f"share={share!r}: expected a number above 0 and up to 1, or None for no limit")
        self._share, self._every = share, check_integer("every", every)
        self._asynchronous = getattr(device, "type", "cpu") != "cpu"
        self._began: float | None = None
        self.cost = 0.0  # seconds spent so far
        self._before: float | None = None  # cost before the last measurement

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def admits(self, step: int, together: str = "") -> bool:
        """Decide whether a step is measured, and count it as measured if so; `together` names what all processes do."""
        if together and self._share is not None and count_processes() > 1:
            raise UsageError(
                f"{together} in all processes at the same steps, which a share of the time does not give: "
                "set share=None and every=..."
            )
        self._began = time.perf_counter() if self._began is None else self._began
        if step % self._every:
            return False
        expected = None if self._before is None else self.cost - self._before
        if self._share is not None and expected is not None and self.cost + expected > self._share * self.elapsed:
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

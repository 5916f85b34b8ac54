"""Output of live recordings: the log of measured steps and the tracker, neither of which may end a training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manyheads._json import Json
from manyheads.models.torch.lazy_torch import torch
from manyheads.probe.live.step_log import StepLog
from manyheads.probe.live.trackers import Row, Tracker

LOGGER = logging.getLogger("manyheads.probe")


class Output:
    """Where measured steps go.

    A disk that is full or a service that fails is reported once to the logger "manyheads.probe", and not used again:
    the training goes on.

    The header's entry `group` names the file within the store; without a store the steps are kept in memory.
    """

    def __init__(self, store: Path | str | None, header: Mapping[str, Json], tracker: Tracker | None) -> None:
        path = None if store is None else Path(store) / f"{header['group']}.jsonl"
        self.log = StepLog(path, header)
        self.failed: dict[str, str] = {}  # "the store" or "the tracker" → why it failed
        self._targets: dict[str, Callable[..., object]] = {"the store": lambda line, _: self.log.append(line)}
        if tracker is not None:
            self._targets["the tracker"] = lambda _, rows: tracker(rows())

    def write(self, line: Mapping[str, Json], rows: Callable[[], Sequence[Row]]) -> None:
        """Write one measured step: its line in the log, and its rows, made only if there is a tracker."""
        if not is_first_process():
            return
        for name, send in list(self._targets.items()):
            try:
                send(line, rows)
            except Exception as error:
                del self._targets[name]
                self.failed[name] = repr(error)
                LOGGER.error("%s failed at step %s and is not used again: %r", name, line["step"], error)


def count_processes() -> int:
    """Return the number of processes that train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_first_process() -> bool:
    """Whether this process is the one of rank 0, or trains alone."""
    return count_processes() == 1 or torch.distributed.get_rank() == 0

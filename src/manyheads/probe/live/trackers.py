"""Output of live recordings: the log, trackers such as TensorBoard, W&B, trackio or MLflow, and the budget of time.

A tracker is any function that takes the rows of one measured step.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyheads._json import Json
from manyheads.errors import UsageError, check_integer
from manyheads.models.torch.lazy_torch import torch
from manyheads.probe.live.step_log import StepLog


class Row(NamedTuple):
    """One figure of one step."""

    step: int  # optimizer updates so far
    layer: int | None  # as in `record.dataset()`; None if the figure belongs to no single one
    head: int | None
    name: str  # of the figure, such as "entropy"; for a matrix with its name, such as "update_ratio/h.0.attn.c_proj"
    value: float
    se: float | None  # its standard error from the sampling of rows; None if exact or not known
    level: float | None  # its null level; None if there is none


# Called with all rows of a measured step.
Tracker = Callable[[Sequence[Row]], Any]


def scalars(rows: Iterable[Row], heads: bool = False) -> dict[str, float]:
    """Return scalars by tag: figures of layers, means over their heads, and null levels.

    With `heads` for every head as well. The largest logit of a layer is that of all its heads.

    Examples
    --------
    >>> rows = [Row(0, 3, head, "entropy", value, None, 4.6) for head, value in enumerate((1.0, 2.0))]
    >>> scalars(rows)
    {'entropy/layer_3': 1.5, 'entropy_null/layer_3': 4.6}
    """
    found: dict[str, float] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        tag = row.name if row.layer is None else f"{row.name}/layer_{row.layer}"
        groups.setdefault(tag, []).append(row)
        if heads and row.head is not None:
            found[f"{tag}/head_{row.head}"] = row.value
    for tag, group in groups.items():
        pooled = np.max if group[0].name == "max_logit" else np.mean
        found[tag] = float(pooled([row.value for row in group]))
        if group[0].level is not None:
            name, *rest = tag.split("/")
            found["/".join([f"{name}_null", *rest])] = group[0].level
    return found


def tensorboard_tracker(writer: Any, heads: bool = False) -> Tracker:
    """Send scalars, with `heads` of every head too, to a `SummaryWriter`, or to its `add_scalar(tag, value, step)`."""
    return lambda rows: [writer.add_scalar(tag, value, rows[0].step) for tag, value in _tags(rows, heads).items()]


def wandb_tracker(run: Any, heads: bool = False, step_name: str = "train/global_step") -> Tracker:
    """Send scalars to a run of W&B, the module `trackio`, or any object with `log(scalars)`.

    The scalar `step_name` holds the step, as the Hugging Face Trainer logs it. The services' own step is left alone,
    because they refuse one that is smaller than the last.
    """
    return lambda rows: run.log({**_tags(rows, heads), step_name: rows[0].step})


def mlflow_tracker(client: Any, heads: bool = False) -> Tracker:
    """Send scalars to the module `mlflow` with an active run, or any object with `log_metrics(scalars, step=step)`."""
    return lambda rows: client.log_metrics(_tags(rows, heads), step=rows[0].step)


def _tags(rows: Sequence[Row], heads: bool) -> dict[str, float]:
    return {f"probe/{tag}": value for tag, value in scalars(rows, heads).items()}


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

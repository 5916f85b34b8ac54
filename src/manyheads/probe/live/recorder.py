"""Attention recorder: attention statistics of a model while it trains, within a share of the time of the training."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads.models.torch.lazy_torch import Module, torch
from manyheads.models.torch.model import unwrap
from manyheads.models.torch.modules import evaluation
from manyheads.probe.attention.datasets import Snapshot, take_snapshot
from manyheads.probe.attention.interface import AttentionObserver
from manyheads.probe.attention.recording import AttentionRecord, empty_record
from manyheads.probe.live.reading import as_series, encode_snapshot
from manyheads.probe.live.step_log import Line
from manyheads.probe.live.trackers import LOGGER, Output, Row, TimeBudget, Tracker, is_first_process

_ON_FIXED_BATCH: ContextVar[bool] = ContextVar("whether a fixed batch runs through a model", default=False)


class AttentionRecorder:
    """Record attention statistics of a model while it trains, within a share of the time of the training.

    Losses, gradients and random numbers of the training are the same to the last bit, but for steps of a compiled model
    that are measured within the training (Notes). A step is measured if (cost so far + expected cost) <= `share` x
    (time so far); the first one always. Without a fixed batch its first micro-batch is recorded in the forward pass of
    the training itself.

    Parameters
    ----------
    model
        The model that is trained, as in `record_attention`, compiled or copied to other devices or not.
    rows, figures, layers
        As in `record_attention`.
    share
        Share of the time of the training; None: every admissible step is measured.
    every
        Only steps whose number is a multiple of it are measured.
    batch
        Keyword arguments of the model. If given, they are run through the model, in evaluation and without gradients,
        before each measured step, in the place of the training's own batches, with which figures move.
    store
        Folder that the figures are appended to, for `open_recording`; None: they are kept in memory.
    tracker
        Where scalars are sent as well, such as `tensorboard_tracker(writer)`.

    Raises
    ------
    ExtraMissing
        PyTorch is not installed.
    UsageError
        The model cannot be recorded (see `record_attention`), or the store holds another recording.

    Notes
    -----
    The figures of step s are those of the weights after s updates, in the checkpoint of step s as well. If several
    processes train together, each is slowed by the first, which alone records its own batches; a fixed batch runs in
    all of them and needs `share=None`. In a model that `torch.compile` compiles, the first measured step compiles a
    second form of it, which does not count as a cost. In that form other kernels are fused, and its backend Inductor
    draws dropout by generators of each compiled part: without a fixed batch, gradients of a measured step differ by
    rounding, and with dropout its masks and its loss differ. With a fixed batch they are equal to the last bit.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from manyheads.probe import AttentionRecorder
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> tokens = torch.arange(8)[None]
    >>> recorder = AttentionRecorder(model, share=None, every=2)
    >>> for step in range(4):
    ...     with recorder.step(step):
    ...         model(tokens, labels=tokens).loss.backward()
    ...     optimizer.step()
    >>> recorder.dataset().entropy.sizes
    Frozen({'step': 2, 'layer': 1, 'head': 2})
    """

    def __init__(
        self,
        model: Module,
        rows: int | None = 64,
        *,
        share: float | None = 0.01,
        every: int = 1,
        batch: Mapping[str, Any] | None = None,
        store: Path | str | None = None,
        tracker: Tracker | None = None,
        figures: Collection[str] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        self._model, self._batch = unwrap(model), batch
        self._empty = empty_record(self._model, rows, figures, layers, seed=0)
        self._observer = AttentionObserver(self._model, self._observe)
        self._budget = TimeBudget(share, every, next(self._model.parameters()).device)
        group = "attention" if batch is None else "attention_fixed"
        header = {"group": group, "model": type(self._model).__name__, "rows": self._empty.rows}
        self._output = Output(store, header, tracker)
        self._record: AttentionRecord | None = None
        self._observing = ExitStack()
        self._step: int | None = None
        self._warned, self._written, self._layers = False, -1, Line()  # the last two as in the last line

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure the forward pass within the block, if the budget admits it.

        Steps are updates of the weights so far. Further blocks of a step, its other micro-batches, are not measured.
        """
        self.begin(step)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, step: int) -> None:
        """Begin a step; the same as entering `step(step)`."""
        self.abandon()
        if step == self._step:
            return
        self._step = step
        if self._batch is None and not is_first_process():
            return
        if not self._budget.admits(step, "" if self._batch is None else "a fixed batch runs"):
            return
        with self._budget.spending():
            self._record = replace(self._empty, layers={}, _rng=np.random.default_rng(step))
            self._observing.enter_context(self._observer.observing())
        if self._batch is not None:
            self._run(self._batch)
            self.end()

    def end(self) -> None:
        """End a step or its first micro-batch, and write its figures; the same as leaving `step(step)`."""
        record = self._record
        if record is None:
            return
        with self._budget.spending():
            self.abandon()
            record.settle()
            if any(layer.weight for layer in record.layers.values()):
                self._write(take_snapshot(record.layers, record.figures), record.unmeasured())
            elif not self._warned:
                LOGGER.warning("step %s: no attention call of the model was seen", self._step)
                self._warned = True

    def finish(self, step: int) -> None:
        """End the training after so many updates: measure a fixed batch once more, if the budget admits it."""
        if self._batch is None:
            self.abandon()
        else:
            self.begin(step)
        self._output.log.close()

    def dataset(self) -> "xr.Dataset":
        """Return what was recorded, over (step, layer, head), as `open_recording` does; UsageError if it is nothing."""
        return as_series(*self._output.log.read())

    def __repr__(self) -> str:
        mode = "training batches" if self._batch is None else "a fixed batch"
        spent, elapsed = self._budget.cost, self._budget.elapsed
        return f"AttentionRecorder({mode}, {spent:.2f} of {elapsed:.2f} s spent)"

    def abandon(self) -> None:
        """Forget a step that failed, and stop observing the model."""
        self._record = None
        self._observing.close()

    def _observe(self, *call: Any) -> None:
        """Measure one attention call, of the fixed batch if there is one."""
        if self._record is None or _ON_FIXED_BATCH.get() != (self._batch is not None):
            return
        with nullcontext() if self._batch is not None else self._budget.spending():  # or the whole run is a cost
            self._record.observe(*call)

    def _run(self, batch: Mapping[str, Any]) -> None:
        """Run the fixed batch through the model, its cost counted."""
        token = _ON_FIXED_BATCH.set(True)
        try:
            with self._budget.spending():
                run_in_evaluation(self._model, batch)
        except BaseException:
            self.abandon()
            raise
        finally:
            _ON_FIXED_BATCH.reset(token)

    def _write(self, snapshot: Snapshot, unmeasured: list[str]) -> None:
        line: Line = {"step": self._step, "cost": self._budget.cost, "elapsed": self._budget.elapsed}
        layers = {"layers": snapshot.layers, "not_measured": unmeasured}
        if layers != self._layers or line["step"] <= self._written:  # the training started again
            line, self._layers = line | layers, layers
        self._written = line["step"]
        line |= encode_snapshot(snapshot, self._empty.rows)
        self._output.write(line, lambda: list(_rows(self._step or 0, snapshot, line["errors"])))


def run_in_evaluation(model: Module, batch: Mapping[str, Any]) -> None:
    """Run a batch through a model in evaluation, without gradients; leave its modes and PyTorch's generators alone."""
    device = next(model.parameters()).device
    generators = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    batch = {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
    if "labels" not in batch and "logits_to_keep" in inspect.signature(model.forward).parameters:
        batch.setdefault("logits_to_keep", 1)  # the others would be computed for nothing
    with torch.random.fork_rng(**generators), torch.no_grad(), evaluation(model):
        model(**batch)


def _rows(step: int, snapshot: Snapshot, errors: Mapping[str, NDArray[np.float64]]) -> Iterator[Row]:
    """Yield the figures of a snapshot one by one."""
    for name, table in snapshot.values.items():
        for (layer, head), value in np.ndenumerate(table):
            if not np.isnan(value):
                error = float(errors[name][layer, head]) if name in errors else None
                yield Row(step, layer, head, name, float(value), error, float(snapshot.levels[name][layer]))

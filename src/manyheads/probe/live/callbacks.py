"""Callbacks that drive recorders from the Hugging Face Trainer and from Lightning."""

import importlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from manyheads._extras import require
from manyheads.errors import ExtraMissing
from manyheads.models.torch.lazy_torch import Module
from manyheads.probe.live.recorder import AttentionRecorder
from manyheads.probe.live.updates import UpdateRecorder

Recorder = AttentionRecorder | UpdateRecorder


def trainer_callback(*recorders: Recorder) -> Any:
    """Return a callback for the Trainer of transformers that drives recorders.

    Steps are the Trainer's `global_step` before the update. With gradient accumulation the first micro-batch is
    measured.

    The Trainer tells its callbacks of no exception: used in a `with` block around `trainer.train()`, the callback takes
    its wrappers off the model after one as well. Without the block they stay until the next recording of the model; the
    store is readable either way.
    """
    require("transformers")
    from transformers import TrainerCallback

    class RecorderCallback(TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            _watch(recorders, [optimizer])

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            _tell(recorders, "begin", state.global_step)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _tell(recorders, "end")

        on_substep_end = on_step_end

        def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            _tell(recorders, "finish", state.global_step)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            _tell(recorders, "abandon")

    return RecorderCallback()


def lightning_callback(*recorders: Recorder) -> Any:
    """Return a callback for Lightning's Trainer that drives recorders of the `LightningModule` or a model within it.

    Steps are the Trainer's `global_step`. With gradient accumulation the first micro-batch is measured.
    """
    base: Any = _lightning_callback_class()

    class RecorderCallback(base):
        def on_train_start(self, trainer: Any, module: Module) -> None:
            _watch(recorders, trainer.optimizers)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            _tell(recorders, "begin", trainer.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            _tell(recorders, "end")

        def on_train_end(self, trainer: Any, module: Module) -> None:
            _tell(recorders, "finish", trainer.global_step)

        def on_exception(self, *_: Any) -> None:
            _tell(recorders, "abandon")

    return RecorderCallback()


def _lightning_callback_class() -> Any:
    try:
        return require("lightning.pytorch").Callback
    except ExtraMissing:
        with suppress(ModuleNotFoundError):
            return importlib.import_module("pytorch_lightning").Callback
        raise


def _watch(recorders: Iterable[Recorder], optimizers: Iterable[Any]) -> None:
    for recorder in recorders:
        if isinstance(recorder, UpdateRecorder):
            for optimizer in optimizers:
                recorder.watch(optimizer)


def _tell(recorders: Iterable[Recorder], event: str, *step: int) -> None:
    for recorder in recorders:
        getattr(recorder, event)(*step)

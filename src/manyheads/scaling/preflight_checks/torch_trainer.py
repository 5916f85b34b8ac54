r"""Runs of a PyTorch training: how far weights and modules have moved what they compute on the first batch.

*By weights* is the RMS of :math:`f_{W_t}(x_t) - f_{W_0}(x_t)` of a module with weights at its present input, for a
matrix :math:`(W_t - W_0)\,x`. The *stream* is the output of the last block of a list of blocks, the *outputs* those of
the model; of both it is the change since the start that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.names import join_layers
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import find_unknown, unwrap
from manyheads.models.torch.modules import first_tensor, inference, whole
from manyheads.scaling.preflight_checks.training import (
    OUTPUTS,
    STREAM,
    Measured,
    Membership,
    Training,
    Update,
)
from manyheads.scaling.torch.optimizer_groups import find_optimizer

RATE_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")


class TorchTrainer:
    """A PyTorch training."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.model = unwrap(training.model)
        given = training.optimizer
        self.optimizers, self.schedules = [], []
        for part in given if isinstance(given, list | tuple) else [given]:
            optimizer, schedules = find_optimizer(part)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(f"{type(part).__name__} is no torch optimizer: give one, a schedule, or a list")
            self.optimizers.append(optimizer)
            self.schedules += [(part, schedules)] if schedules else []
        self.example: Any = None

    def weights(self) -> int:
        """Count the trained numbers."""
        return sum(tensor.numel() for tensor in self.model.parameters() if tensor.requires_grad)

    def measure(self, steps: int) -> Measured:
        """Train, and measure how far modules and weights have moved on the first batch."""
        start = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters(remove_duplicate=False)}
        batch = self.training.batch(0)
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        self._forward(batch, self._watch_outputs(before))
        losses = self.losses(steps, 1.0)
        rows: dict[str, list[Update]] = {}
        self._forward(batch, [*self._watch_weights(start, rows), *self._watch_outputs(after)])
        rows |= {name: [Update(_rms(tensor - before[name]))] for name, tensor in after.items()}
        own = {id(t) for module in self._computing() for t in module.parameters(recurse=False)}
        for name, tensor in self.model.named_parameters():
            if id(tensor) not in own and tensor.requires_grad:
                rows.setdefault(join_layers(name), []).append(Update(_rms(whole(tensor) - start[name])))
        return Measured.of(rows, losses)

    def losses(self, steps: int, factor: float, parts: int = 1) -> list[float]:
        """Train at all learning rates times a factor, on several batches a step; end where a loss is not finite."""
        self._scale_rates(factor)
        self.model.train()
        found = []
        for step in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            found.append(0.0)
            for part in range(parts):
                loss = self._loss(self.training.batch(step * parts + part)) / parts
                found[-1] += float(loss.detach())
                if not math.isfinite(found[-1]):
                    return found + [math.inf] * (steps - len(found))
                loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for schedule, _ in self.schedules:
                schedule.step(*([found[-1]] if type(schedule).__name__ == "ReduceLROnPlateau" else []))
        return found

    def unknown_roles(self) -> str:
        """Return why parts of parameters are not known; empty where they are given, or can be read."""
        return "" if self.training.roles is not None else find_unknown(self.model)

    def membership(self) -> Membership:
        """Return the trained parameters that are in no group, or in two."""
        held = [id(t) for optimizer in self.optimizers for group in optimizer.param_groups for t in group["params"]]
        trained = {name: id(tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        missing = dict.fromkeys(join_layers(name) for name, key in trained.items() if key not in held)
        doubled = dict.fromkeys(join_layers(name) for name, key in trained.items() if held.count(key) > 1)
        return Membership(tuple(missing), tuple(doubled))

    def look(self) -> None:
        """Run the first batch once, to see how the model is called."""
        self._forward(self.training.batch(0))

    # Losses

    def _loss(self, batch: Any) -> Any:
        if self.training.loss is not None:
            loss = self.training.loss(self.training.model, batch)
        else:
            model = self.training.model
            if isinstance(batch, Mapping):
                result = model(**batch)
            else:
                result = model(*batch) if isinstance(batch, tuple | list) else model(batch)
            loss = _find_loss(result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"the loss is {type(loss).__name__}: expected one number, or give loss(model, batch)")
        return loss.reshape(())

    def _forward(self, batch: Any, hooks: Iterable[tuple[Any, Any]] = ()) -> None:
        """Run the first batch with hooks, without dropout and gradients, and remember how the model was called."""

        def see(module: Module, arguments: Any, named: Any) -> None:
            self.example = dict(named) if named and not arguments else tuple(arguments)

        with inference(self.training.model) as stack:
            stack.callback(self.model.register_forward_pre_hook(see, with_kwargs=True).remove)
            for module, hook in list(hooks):
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            self._loss(batch)

    def _scale_rates(self, factor: float) -> None:
        """Multiply all learning rates, and those that schedules start from."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group |= {key: group[key] * factor for key in RATE_KEYS if key in group}
        for _, parts in self.schedules:
            for part in parts:
                if hasattr(part, "base_lrs"):
                    part.base_lrs = [rate * factor for rate in part.base_lrs]

    # Modules

    def _computing(self) -> Iterator[Any]:
        """Yield the modules that compute with weights of their own alone, and whole attention layers of torch."""
        attention = torch.nn.MultiheadAttention
        for module in self.model.modules():
            own = list(module.parameters(recurse=False))
            if own and (isinstance(module, attention) or not any(True for _ in module.children())):
                yield module

    def _watch_outputs(self, kept: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Keep the outputs of the last block of every list, and those of the model."""

        def keep(name: str) -> Any:
            def hook(module: Module, arguments: Any, named: Any, output: Any) -> None:
                if (tensor := first_tensor(output)) is not None:
                    kept[name] = tensor.detach().clone()

            return hook

        for name, module in self.model.named_modules():
            listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(module)
            if listed and "*" not in join_layers(name) and any(True for _ in module[-1].children()):
                yield module[-1], keep(f"{STREAM} after {name}.*")
        yield self.model, keep(OUTPUTS)

    def _watch_weights(self, start: Mapping[str, Any], rows: dict[str, list[Update]]) -> Iterator[tuple[Any, Any]]:
        """Compare what modules compute with their weights and with those of the start, at the same input."""
        busy: list[Any] = []
        names = {module: name for name, module in self.model.named_modules()}

        def compare(name: str) -> Any:
            prefix = f"{name}." if name else ""

            def hook(module: Module, arguments: Any, named: Any, output: Any) -> None:
                if busy:
                    return
                own = {key: start[prefix + key] for key, _ in module.named_parameters(recurse=False)}
                busy.append(module)
                try:
                    old = torch.func.functional_call(module, own, arguments, named)
                finally:
                    busy.pop()
                new, old = (first_tensor(each) for each in (output, old))
                if new is None or old is None:
                    return
                random = _random_part(module, arguments)
                rows.setdefault(join_layers(name), []).append(Update(_rms(new.detach() - old), random))

            return hook

        trained = (m for m in self._computing() if any(t.requires_grad for t in m.parameters(recurse=False)))
        for module in trained:
            yield module, compare(names[module])


def _find_loss(result: Any) -> Any:
    """Return the loss among the results of a model."""
    if (loss := getattr(result, "loss", None)) is not None:
        return loss
    if isinstance(result, Mapping):
        return result.get("loss")
    entries = result if isinstance(result, tuple | list) else [result]
    return next((each for each in entries if isinstance(each, torch.Tensor) and each.numel() == 1), None)


def _random_part(module: Module, arguments: Any) -> float:
    """Return n0 / n of a matrix's input: pi/2 times the number of directions of its tokens over its width."""
    x = arguments[0] if arguments else None
    matrix = any(t.dim() == 2 for t in module.parameters(recurse=False))
    if not matrix or not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
        return 0.0
    x = x.detach().double().flatten(0, -2)
    kernel = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
    squares = float(kernel.square().sum())
    directions = float(x.square().sum()) ** 2 / squares if squares > 0 else 0.0
    return math.pi / 2 * directions / x.shape[-1]


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())

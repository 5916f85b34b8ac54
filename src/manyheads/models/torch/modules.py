"""Evaluation of a PyTorch model: modes, fast paths, the tensors of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from manyheads.models.torch.lazy_torch import Module, Tensor, torch


@contextmanager
def evaluation(model: Module) -> Iterator[None]:
    """Evaluate a model, and leave the modes of its modules alone."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def inference(model: Module) -> Iterator[ExitStack]:
    """Leave out dropout, gradients, compiled graphs and fast paths around hooks; yield what is undone at the end."""
    attention = torch.backends.mha
    with ExitStack() as stack:
        stack.callback(attention.set_fastpath_enabled, attention.get_fastpath_enabled())
        attention.set_fastpath_enabled(False)
        if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in (evaluation(model), torch.no_grad()):
            stack.enter_context(context)
        part: Any
        for part in model.modules():
            if hasattr(part, "reshard"):  # of FSDP2, whose outermost module keeps its parameters gathered
                stack.callback(part.reshard)
        yield stack


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter's numbers, gathered from all ranks where they are sharded (DTensor)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def first_tensor(found: Any) -> Any:
    """Return the first tensor of floating numbers in nested results, no single number."""
    if isinstance(found, torch.Tensor):
        return found if found.is_floating_point() and found.dim() else None
    if isinstance(found, Mapping):
        found = list(found.values())
    for each in found if isinstance(found, list | tuple) else ():
        if (tensor := first_tensor(each)) is not None:
            return tensor
    return None

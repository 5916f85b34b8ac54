"""Counter of the products of a PyTorch module or function: one run, on the meta device without memory."""

import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from manyheads._extras import require
from manyheads.costs.conventions import find_convention
from manyheads.costs.cost import Cost, Item
from manyheads.costs.torch.trace import Trace
from manyheads.errors import UsageError

PRODUCTS_ALONE = "elementwise work and bytes are not counted"


def count_run(function: Any, args: tuple[Any, ...], training: Any, loss: Any, device: Any, formulas: Any) -> Cost:
    """Run a module or function of PyTorch once and count its products; see `manyheads.count`."""
    torch = require("torch")
    if device not in (None, "meta"):
        raise UsageError(f"device={device!r}: expected 'meta', or None for where the tensors are")
    if loss and not training:
        raise UsageError("loss= is for the backward pass, which is not counted: give training=True too")
    owners = (function, getattr(function, "__self__", None))
    module = next((each for each in owners if isinstance(each, torch.nn.Module)), torch.nn.Module())
    meta = device == "meta" or any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    trace, tree, stands = Trace(formulas or {}), torch.utils._pytree, {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in stands:
            stands[id(value)] = _stand_in(torch, trace, value, meta)
        return stands.get(id(value), value)  # tied tensors stay tied

    named: Mapping[str, Any] = {}
    if function is module and len(args) == 1:  # a batch
        args, named = ((), args[0]) if isinstance(args[0], Mapping) else (args, {})
        args = tuple(args[0]) if args and isinstance(args[0], (tuple, list)) else args
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - of the module
        stack.enter_context(torch.inference_mode(False))
        args, named = tree.tree_map(stand_in, (args, dict(named)))
        for part in module.modules():
            scripted = isinstance(part, torch.jit.ScriptModule)  # has its tensors elsewhere
            for holder in (vars(part), part._parameters, part._buffers) if scripted else (vars(part),):
                kept = dict(holder.items())
                stack.callback(_restore, holder, kept)
                for name, value in kept.items():
                    if isinstance(value, (torch.Tensor, dict, list, tuple)) and "_hooks" not in name:
                        holder[name] = tree.tree_map(stand_in, value)
        with trace.watch(module), torch.set_grad_enabled(training):
            out = function(*args, **named)
            if training:
                _loss(torch, out, loss).backward()
    items = [Item(name, stage, macs, module=path) for (name, stage, path), macs in trace.tallies.items()]  # type: ignore[arg-type]
    notes = (*trace.notes(), PRODUCTS_ALONE)
    return Cost(tuple(items), find_convention("exact"), notes, tuple(trace.unknown), traced=True)


def _stand_in(torch: Any, trace: Trace, tensor: Any, meta: bool) -> Any:
    """Return a tensor in the place of one of the caller, whose numbers are copied when they are overwritten."""
    if meta and not tensor.is_meta:
        made = torch.empty_like(tensor, device="meta", requires_grad=False)
        if not (isinstance(tensor, torch.nn.Parameter) or tensor.is_floating_point()):
            trace.numbers.put(made, tensor.detach().cpu().clone())
    else:
        lazy = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        made = (torch._lazy_clone if lazy and not tensor.is_meta else torch.clone)(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def _restore(holder: Any, kept: Mapping[str, Any]) -> None:
    """Give a module its attributes back, and take those that the run added."""
    for name in set(holder.keys()) - set(kept):
        del holder[name]
    for name, value in kept.items():
        holder[name] = value


def _loss(torch: Any, out: Any, loss: Any) -> Any:
    """Return the number whose gradient is taken: the loss of the outputs, or else their sum."""
    value = loss(out) if loss else getattr(out, "loss", None)
    if value is None:
        leaves = torch.utils._pytree.tree_leaves(dict(out) if isinstance(out, Mapping) else out)
        value = sum(each.sum() for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad)
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.numel() != 1:
        raise UsageError("training: no result depends on a tensor that requires a gradient; give loss=, one number")
    return value.real if value.is_complex() else value

"""Counter of the products of a PyTorch module or function: one run, on the meta device without memory."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from manyheads._extras import require
from manyheads.costs.conventions import find_convention
from manyheads.costs.cost import Cost, Item
from manyheads.costs.torch.products import Formula
from manyheads.costs.torch.trace import Trace
from manyheads.errors import UsageError

NO_ELEMENTWISE = "elementwise work is not counted"


def count_run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    training: bool = False,
    loss: Callable[[Any], Any] | None = None,
    device: str | None = None,
    formulas: Mapping[Any, Formula] | None = None,
) -> Cost:
    """Run a module or function of PyTorch once and count its products; see `manyheads.count`."""
    torch = require("torch")
    if device not in (None, "meta"):
        raise UsageError(f"device={device!r}: expected 'meta', or None for where the tensors are")
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    module = module if isinstance(module, torch.nn.Module) else torch.nn.Module()
    state = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    meta = device == "meta" or any(each.is_meta for each in state.values())
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
        args, named = tree.tree_map(stand_in, (args, dict(named)))
        replaced = {name: stand_in(each) for name, each in state.items()}
        # Until the end of the backward pass, in which a checkpoint runs the module again
        stack.enter_context(torch.nn.utils.stateless._reparametrize_module(module, replaced))
        stack.enter_context(_watch(torch, trace, module))
        with torch.set_grad_enabled(training):
            out = function(*args, **named)
        if training:
            _loss(torch, out, loss).backward()
        results = [each for each in tree.tree_leaves(out) if isinstance(each, torch.Tensor)]
        gradients = [leaf.grad for leaf, _ in trace.gradients.values() if leaf.grad is not None]
        moved = {id(each): each.numel() * each.element_size() for each in (*stands.values(), *results, *gradients)}
    items = [Item(name, stage, macs, module=path) for (name, stage, path), macs in trace.tallies.items()]  # type: ignore[arg-type]
    items.append(Item("inputs and outputs", bytes=sum(moved.values())))
    notes = (*trace.notes(), NO_ELEMENTWISE)
    return Cost(tuple(items), find_convention("exact"), notes, tuple(trace.unknown), traced=True)


def _stand_in(torch: Any, trace: Trace, tensor: Any, meta: bool) -> Any:
    """Return a tensor in the place of one of the caller: a parameter shares its numbers, others are copied."""
    trained = isinstance(tensor, torch.nn.Parameter)
    made = tensor.detach() if trained else tensor.detach().clone()
    if meta and not tensor.is_meta:
        numbers, made = made, made.to("meta")
        if not (trained or made.is_floating_point()):
            trace.numbers.put(made, numbers.cpu())
    return made.requires_grad_(tensor.requires_grad)


def _loss(torch: Any, out: Any, loss: Callable[[Any], Any] | None) -> Any:
    """Return the number whose gradient is taken: the loss of the outputs, or else their sum."""
    value = loss(out) if loss else getattr(out, "loss", None)
    if value is None:
        leaves = torch.utils._pytree.tree_leaves(out)
        value = sum(each.sum() for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad)
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.numel() != 1:
        raise UsageError("training: no result depends on a tensor that requires a gradient; give loss=, one number")
    return value


@contextmanager
def _watch(torch: Any, trace: Trace, module: Any) -> Iterator[None]:
    """Let a trace see every operation, function and module that runs; put gradients back afterwards."""

    class Operations(torch.utils._python_dispatch.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return trace.operate(self, func, args, kwargs or {})

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return trace.call(func, args, kwargs or {})

    paths = {id(each): name for name, each in module.named_modules()}

    def enter(each: Any, _: Any) -> None:
        trace.modules.append((paths.get(id(each), type(each).__name__), torch._C._current_graph_task_id()))

    with ExitStack() as stack:
        hooks = torch.nn.modules.module
        stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
        leave = hooks.register_module_forward_hook(lambda *_: trace.modules.pop() and None, always_call=True)
        stack.callback(leave.remove)
        # Fused attention that is called by name, below the mode of functions
        rules = {"scaled_dot_product_attention": (torch.nn.functional, trace.attend)}
        if "torch.nn.attention.flex_attention" in sys.modules:
            rules["flex_attention"] = sys.modules["torch.nn.attention.flex_attention"], trace.flex
        for name, (place, rule) in rules.items():
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, functools.partial(rule, getattr(place, name)))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using .torch.compile")  # of the hooks here
        try:
            with Functions(), Operations():
                yield
        finally:
            for leaf, gradient in trace.gradients.values():
                leaf.grad = gradient

"""Trace of a PyTorch program: the products that it runs, by stage and module."""

import functools
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from manyheads.costs.cost import UnknownCost
from manyheads.costs.tally import NOTHING, Tally
from manyheads.costs.torch import attention_products, products
from manyheads.costs.torch.known_numbers import KnownNumbers

Place = tuple[str, str, str]
"""Name, stage and module of a product."""
ALL_PAIRS = "{} attention layers compute all pairs: masked ones are counted"
AGAIN = "checkpoints run {:,} multiply-adds again: to('executed') counts them"
SIZED_BY_DATA = "the data decide some sizes ({}): the count holds for this batch"


class Trace:
    """Record of one run: its matrix products, with stand-ins for fused attention and known numbers of meta tensors."""

    def __init__(self, formulas: Mapping[Any, products.Formula]) -> None:
        import torch.utils.weak

        self.torch, self.formulas, self.numbers = torch, formulas, KnownNumbers()
        self.tallies: dict[Place, Tally] = {}
        self.found: dict[str, None] = {}  # notes
        self.unknown: dict[str, None] = {}
        self.gradients: dict[int, tuple[Any, Any]] = {}  # leaves, and their gradients before the count
        self.tasks: list[bool] = []  # backward passes that run now: whether their results are differentiated again
        self.modules: list[tuple[str, int]] = []  # that run now, each with the number of backward passes around it
        self.forward: dict[int, Place] = {}  # products by the number of their autograd node
        self.scores: Any = torch.utils.weak.WeakTensorKeyDictionary()  # products of queries and keys, their softmaxes
        self.explicit, self.paused, self.attention = 0, False, attention_products.attention_rule()

    def notes(self) -> tuple[str, ...]:
        """Return the notes of the count."""
        again = sum(tally.exact for (_, stage, _), tally in self.tallies.items() if stage == "block-again")
        counted = {ALL_PAIRS.format(self.explicit): self.explicit, AGAIN.format(again): again}
        return (*(note for note, number in counted.items() if number), *filter(None, self.found))

    def stage(self) -> str:
        """Return forward, backward, or block-again where a checkpoint runs again within the backward pass.

        There a module is called, or autograd is on although nobody differentiates the gradients.
        """
        if not self.tasks:
            return "forward"
        called = self.modules and self.modules[-1][1] == len(self.tasks)
        again = called or (self.torch.is_grad_enabled() and not self.tasks[-1])
        return "block-again" if again else "backward"

    def place(self, name: str) -> Place:
        """Return the place of a product; in the backward pass, name and module are those of the forward product."""
        stage = self.stage()
        if stage == "backward" and (node := self.torch._C._current_autograd_node()) is not None:
            name, _, path = self.forward.get(node._sequence_nr(), (name, "", ""))
            return name, stage, path
        return name, stage, self.modules[-1][0] if self.modules else ""

    def add(self, place: Place, macs: Tally) -> None:
        """Add multiply-adds."""
        if macs:
            self.tallies[place] = self.tallies.get(place, NOTHING) + macs

    @contextmanager
    def watch(self, module: Any) -> Iterator[None]:
        """Intercept every operation, function and module call; restore PyTorch and all gradients at the end."""
        torch, trace = self.torch, self

        class Operations(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[name-defined]
            supports_higher_order_operators = True

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
                    return NotImplemented  # a subclass, such as nested tensors, says first what its operations are
                return trace.operate(self, func, args, kwargs or {})

        class Functions(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return trace.call(func, args, kwargs or {})

        def backward(engine: Any, outputs: Any, gradients: Any, keep: Any, again: Any, *rest: Any, **more: Any) -> Any:
            self.tasks.append(bool(again))
            try:
                with Functions():
                    return engine(outputs, gradients, keep, again, *rest, **more)
            finally:
                self.tasks.pop()

        paths = {id(each): name for name, each in module.named_modules()}
        enter = lambda each, _: self.modules.append((paths.get(id(each)) or type(each).__name__, len(self.tasks)))  # noqa: E731
        hooks, names = torch.nn.modules.module, torch.nn.functional
        changed: list[tuple[Any, str, Any]] = [  # for calls below the mode of functions
            (names, "scaled_dot_product_attention", functools.partial(self.attend, names.scaled_dot_product_attention)),
            (torch.autograd, "_engine_run_backward", functools.partial(backward, torch.autograd._engine_run_backward)),
        ]
        if "torch.nn.attention.flex_attention" in sys.modules:  # under whatever name it was imported
            flex = sys.modules["torch.nn.attention.flex_attention"].flex_attention
            kernel = types.FunctionType(flex.__code__, flex.__globals__, argdefs=flex.__defaults__)
            kernel.__kwdefaults__ = flex.__kwdefaults__
            rule = lambda *args, rule, **kwargs: rule(*args, **kwargs)  # noqa: E731
            changed += [(flex, "__code__", rule.__code__), (flex, "__defaults__", None)]
            changed += [(flex, "__kwdefaults__", {"rule": functools.partial(self.flex, kernel)})]
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
            leave = hooks.register_module_forward_hook(lambda *_: self.modules.pop() and None, always_call=True)
            stack.callback(leave.remove)
            for owner, name, value in changed:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Using .torch.compile|flex_attention called without")
            try:
                with Functions(), Operations():
                    yield
            finally:
                for leaf, gradient in self.gradients.values():
                    leaf.grad = gradient

    # Operations, below autograd

    def operate(self, mode: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and add its products."""
        if self.paused:
            return operation(*args, **kwargs)
        torch, plain = self.torch, isinstance(operation, self.torch._ops.OpOverload)
        if plain and operation.namespace == "aten":
            with mode:  # in inference mode composite operations arrive whole
                if (whole := operation.decompose(*args, **kwargs)) is not NotImplemented:
                    return whole
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if (stage := self.stage()) == "forward":
            for each in tensors:
                if each.requires_grad and each.is_leaf and id(each) not in self.gradients:
                    self.gradients[id(each)], each.grad = (each, each.grad), None
        if plain and any(each.is_meta for each in tensors):
            out, args, kwargs = self._on_meta(operation, args, kwargs, tensors)
        else:
            out = operation(*args, **kwargs)
        if plain and stage != "backward":
            self.numbers.follow(operation, args, kwargs, out)
            self._follow_scores(products.base_name(operation), tensors, out)
            if products.sized_by_numbers(operation, args):
                self.found[SIZED_BY_DATA.format(products.base_name(operation))] = None
        if product := products.find_product(operation, self.formulas, out, args, kwargs):
            name, macs, note = product
            place = self.place(name)
            if stage != "backward":  # its autograd node was made just before
                self.forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
            self.add(place, macs)
            self.found[note] = None
        elif products.is_opaque(operation):
            sparse = any(each.layout != torch.strided for each in tensors)
            name = f"{getattr(operation, 'overloadpacket', operation)}{' of sparse tensors' if sparse else ''}"
            self.unknown[products.OPAQUE.format(name)] = None
        return out

    def _on_meta(self, operation: Any, args: Any, kwargs: Any, tensors: list[Any]) -> tuple[Any, Any, Any]:
        """Run an operation with meta tensors; constants that the model made elsewhere join them."""
        name, numbers = products.base_name(operation), self.numbers
        to_host = name == "_to_copy" and "meta" not in str(kwargs.get("device") or "meta")
        valued = self.torch.Tag.data_dependent_output in operation.tags
        if to_host or valued or products.sized_by_numbers(operation, args):
            return numbers.decide(operation, args, kwargs, keep=to_host), args, kwargs
        if name not in ("_to_copy", "copy") and any(not each.is_meta and each.dim() for each in tensors):
            args, kwargs = self.torch.utils._pytree.tree_map(numbers.stand_in, (args, kwargs))
        if name == "_grouped_mm":  # its meta kernel wants bfloat16
            return products.grouped_result(*args, **kwargs), args, kwargs
        return operation(*args, **kwargs), args, kwargs

    def _follow_scores(self, name: str, tensors: list[Any], out: Any) -> None:
        """Count softmaxes between two batched products: attention without a fused kernel."""
        seen = {self.scores[each]: each.numel() for each in tensors if each in self.scores}
        if name in ("bmm", "baddbmm"):
            self.explicit += "softmax" in seen and self.stage() == "forward"
            self.scores[out] = "product"
        elif seen and name not in products.FACTORS:
            kind = "softmax" if "softmax" in seen or name in ("_softmax", "_safe_softmax") else "product"
            for each in self.torch.utils._pytree.tree_leaves(out):
                if isinstance(each, self.torch.Tensor) and 2 * each.numel() >= max(seen.values()):
                    self.scores[each] = kind

    # Functions, above autograd

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function: replace fused attention, and remember the numbers of tensors that are made from lists."""
        torch = self.torch
        if getattr(function, "__name__", "") == "scaled_dot_product_attention" and not self.paused:
            return self.attend(function, *args, **kwargs)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[1], tuple):
            index = tuple(torch.tensor(each) if isinstance(each, list) else each for each in args[1])
            args = (args[0], index, *args[2:])
        out = function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and out.is_meta and not isinstance(args[0], torch.Tensor):
            self.numbers.put(out, function(*args, **{**kwargs, "device": "cpu"}))
        return out

    def attend(
        self, kernel: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        """Stand in for `scaled_dot_product_attention`."""
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if query.is_nested:
            raise UnknownCost(attention_products.NESTED)
        if self.torch._C._functorch.peek_interpreter_stack() is not None:  # vmap, grad and others need all products
            with self.torch.nn.attention.sdpa_kernel(self.torch.nn.attention.SDPBackend.MATH):
                return kernel(query, key, value, attn_mask, **options)
        if hasattr(attn_mask, "_materialize"):  # a causal bias holds no numbers
            attn_mask = attn_mask._materialize(query.device)
        if not enable_gqa:
            lead = self.torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
            query = query.expand(*lead, *query.shape[-2:])
        run = lambda q, k, v: kernel(q, k, v, attn_mask, **options)  # noqa: E731
        return self._attention(run, query, key, value, attn_mask, is_causal)

    def flex(
        self, kernel: Any, query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
        scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
        *, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        """Stand in for `flex_attention`; its mask is evaluated on positions."""
        torch, mask = self.torch, None
        if block_mask is not None:
            extents = torch.Size((*block_mask.shape[:-2], query.shape[-2], key.shape[-2]))
            mask = query.new_empty((), device="meta")  # without numbers
            if extents.numel() <= attention_products.LARGEST:
                mask = block_mask.mask_mod(*torch.meshgrid(*map(torch.arange, extents), indexing="ij"))
        run = lambda q, k, v: kernel(q, k, v, score_mod, block_mask, scale, enable_gqa, False, kernel_options)  # noqa: E731
        out = self._attention(run, query, key, value, mask)
        sums = query.new_zeros(query.shape[:-1])  # of exponentials, which decide nothing
        if return_aux:
            return out, torch.nn.attention.flex_attention.AuxOutput(lse=sums, max_scores=sums)
        return (out, sums) if return_lse else out

    def _attention(self, run: Any, query: Any, key: Any, value: Any, mask: Any, is_causal: bool = False) -> Any:
        """Count the pairs of a kernel, and run it if there are numbers."""
        queries, keys, lead = query.shape[-2], key.shape[-2], query.shape[:-2].numel()
        pairs = lead * (attention_products.causal_pairs(queries, keys) if is_causal else Tally.of(queries * keys))
        if mask is not None:
            numbers = self.numbers.find(mask)
            self.found[attention_products.UNKNOWN_MASK if numbers is None else attention_products.MASKED] = None
            pairs = pairs if numbers is None else attention_products.masked_pairs(numbers.detach(), queries, keys, lead)
        name, stage, path = self.place(products.describe_product("attention", query, key))
        self.add((name, stage, path), (query.shape[-1] + value.shape[-1]) * pairs)

        def kernel(*factors: Any) -> Any:
            if query.is_meta:
                return query.new_empty((*query.shape[:-1], value.shape[-1]))
            self.paused = True
            try:
                return run(*factors)
            finally:
                self.paused = False

        macs = functools.partial(attention_products.backward_macs, pairs, query, value)
        gradients = lambda needed: self.add((name, "backward", path), macs(needed))  # noqa: E731
        return self.attention(kernel, gradients, query, key, value, mask)

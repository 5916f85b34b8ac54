"""Trace of a PyTorch program: the products that it runs, by stage and module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from manyheads.costs.tally import NOTHING, Tally
from manyheads.costs.torch import fused_attention as fused
from manyheads.costs.torch import products
from manyheads.costs.torch.known_numbers import KnownNumbers

Place = tuple[str, str, str]
"""Name, stage and module of a product."""
ALL_PAIRS = "{} attention layers compute all pairs: masked ones are counted"
AGAIN = "checkpoints run {:,} multiply-adds again: to('executed') counts them"
SIZED_BY_DATA = "the data decide some sizes ({}): the count holds for this batch"


class Trace:
    """What one run multiplied; stand-ins for fused attention; numbers on the meta device."""

    def __init__(self, formulas: Mapping[Any, products.Formula]) -> None:
        import torch.utils.weak

        self.torch, self.formulas, self.numbers = torch, formulas, KnownNumbers()
        self.tallies: dict[Place, Tally] = {}
        self.found: dict[str, None] = {}  # notes
        self.unknown: dict[str, None] = {}
        self.gradients: dict[int, tuple[Any, Any]] = {}  # leaves, and their gradients before the count
        self.modules: list[tuple[str, int]] = []  # that run now, each with the graph task that called it
        self.forward: dict[int, Place] = {}  # products by the number of their autograd node
        self.scores: Any = torch.utils.weak.WeakTensorKeyDictionary()  # products of queries and keys, their softmaxes
        self.explicit, self.paused = 0, False
        self.attention = fused.attention_rule(self._add, self._pause)

    def notes(self) -> tuple[str, ...]:
        """Return what a reader must know."""
        again = sum(tally.exact for (_, stage, _), tally in self.tallies.items() if stage == "block-again")
        counted = {ALL_PAIRS.format(self.explicit): self.explicit, AGAIN.format(again): again}
        return (*(note for note, number in counted.items() if number), *filter(None, self.found))

    def stage(self) -> str:
        """Return forward, backward, or block-again where a checkpoint runs again within the backward pass.

        There a module is called within the graph task; a checkpoint without modules has autograd on.
        """
        if (task := self.torch._C._current_graph_task_id()) == -1:
            return "forward"
        again = self.modules[-1][1] == task if self.modules else self.torch.is_grad_enabled()
        return "block-again" if again else "backward"

    def place(self, name: str) -> Place:
        """Return the place of a product; in the backward pass, name and module are those of the forward product."""
        stage = self.stage()
        if stage == "backward" and (node := self.torch._C._current_autograd_node()) is not None:
            name, _, path = self.forward.get(node._sequence_nr(), (name, "", ""))
            return name, stage, path
        return name, stage, self.modules[-1][0] if self.modules else ""

    def _add(self, place: Place, macs: Tally, stage: str = "") -> None:
        if macs:
            key = (place[0], stage or place[1], place[2])
            self.tallies[key] = self.tallies.get(key, NOTHING) + macs

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

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
            self._add(place, macs)
            self.found[note] = None
        elif products.is_opaque(operation):
            self.unknown[products.OPAQUE.format(getattr(operation, "overloadpacket", operation))] = None
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
            kind = "softmax" if "softmax" in seen or name == "_softmax" else "product"
            for each in self.torch.utils._pytree.tree_leaves(out):
                if isinstance(each, self.torch.Tensor) and 2 * each.numel() >= max(seen.values()):
                    self.scores[each] = kind

    # Functions, above autograd

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function; fused attention is replaced, and what it makes of lists keeps its numbers."""
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
        if not enable_gqa:
            lead = self.torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
            query = query.expand(*lead, *query.shape[-2:])
        queries, keys, lead = query.shape[-2], key.shape[-2], query.shape[:-2].numel()
        pairs = lead * (fused.causal_pairs(queries, keys) if is_causal else Tally.of(queries * keys))
        if attn_mask is not None:
            numbers = self.numbers.find(attn_mask)
            self.found[fused.UNKNOWN_MASK if numbers is None else fused.MASKED] = None
            if numbers is not None:
                with self._pause(), self.torch.no_grad():
                    pairs = fused.masked_pairs(numbers, queries, keys, lead)
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        run = lambda q, k, v: kernel(q, k, v, attn_mask, **options)  # noqa: E731
        place = self.place(products.describe_product("attention", query, key))
        return self.attention(query, key, value, attn_mask, pairs, place, run)

    def flex(self, kernel: Callable[..., Any], query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `flex_attention`."""
        block_mask = kwargs.get("block_mask", args[1] if len(args) > 1 else None)
        with self._pause():
            pairs, note = fused.flex_pairs(block_mask, query.shape[-2], key.shape[-2], query.shape[:-2].numel())
        self.found[note] = None
        run = lambda q, k, v: kernel(q, k, v, *args, **kwargs)  # noqa: E731
        place = self.place(products.describe_product("attention", query, key))
        return self.attention(query, key, value, None, pairs, place, run)

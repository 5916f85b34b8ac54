"""Trace of a PyTorch model: every operation of one forward pass as a method of `Trace`.

The model runs as it is; loops, checkpoints and experts that the data choose need no rule.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.infer.constants import find_number, find_picked, find_turned, is_alike, is_fixed
from manyheads.models.infer.trace import Trace
from manyheads.models.infer.values import INPUT, UNKNOWN, Source, Value
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import INNER
from manyheads.models.torch.modules import inference

OPERATIONS = """
    view _unsafe_view reshape _reshape_alias transpose t permute expand unsqueeze squeeze clone contiguous _to_copy to
    alias detach index_select gather index repeat repeat_interleave roll flip constant_pad_nd unfold masked_fill dropout
    native_dropout view_as_complex view_as_real lift_fresh im2col diagonal tril triu movedim view_as expand_as neg
    flatten unflatten _conj conj as_strided;
    slice select split split_with_sizes chunk unbind narrow unsafe_split unsafe_chunk;
    cat stack where scatter index_put _index_put_impl index_add index_copy scatter_add slice_scatter select_scatter
    masked_scatter index_reduce scatter_reduce;
    mean sum var var_mean amax amin norm linalg_vector_norm std logsumexp prod
"""
VIEWS, CUTS, JOINS, SUMS = (each.split() for each in OPERATIONS.split(";"))
CONSTANT = ("zeros", "ones", "empty", "full", "new_", "rand", "bernoulli")  # beginnings of what has no values of inputs
POWERS = {"rsqrt": -0.5, "sqrt": 0.5, "reciprocal": -1.0, "square": 2.0}
MASKS = ("mul", "where", "masked_fill", "index_put", "_index_put_impl", "masked_scatter")
MOST_INDICES = 100  # by which slices are told apart


def name_parameters(model: Module) -> dict[str, Tensor]:
    """Return the parameters of a model by name, wrappers left out."""
    names = ((name.split("."), tensor) for name, tensor in model.named_parameters())
    return {".".join(piece for piece in pieces if piece not in INNER): tensor for pieces, tensor in names}


def trace_module(model: Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Trace:
    """Run one forward pass and return its trace."""
    operations = _Operations(model)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            if any(hasattr(each, "full_tensor") for each in _tensors((args, kwargs, out))):
                raise UsageError("its products are sharded (tensor parallel): measure the model before it is")
            try:
                operations.see(name, args, kwargs or {}, out)
            except Exception as error:  # of a rule, for arguments that it does not expect
                operations.trace.refuse(f"the operation {name} is not understood ({type(error).__name__}: {error})")
            return out

    with inference(model), torch.compiler.set_stance("force_eager"):
        for tensor in _tensors((arguments, named)):
            if tensor.is_floating_point():
                operations.keep(tensor, INPUT)
        with Mode():
            result = model(*arguments, **named)
    for tensor in _outputs(result):
        operations.trace.output(operations.value(tensor))
    trace = operations.trace
    vars(operations).clear()  # which a class refers to, and so a cycle of references
    return trace


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _outputs(result: Any) -> list[Tensor]:
    """Return the logits, or all floating tensors but the cache of keys and values."""
    if getattr(result, "logits", None) is not None:
        return [result.logits]
    if isinstance(result, Mapping):
        result = [each for key, each in result.items() if "past" not in key and "cache" not in key]
    return [each for each in _tensors(result) if each.is_floating_point()]


def _address(tensor: Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())  # of a DTensor, its share


def _numeric(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _place(before: list[int], axis: int, after: list[int]) -> int:
    """Return the axis, from the end, that holds the same entries of memory in another shape."""
    behind, inner = math.prod(before[axis:][1:]), 1
    for place in range(1, len(after) + 1):
        if inner == behind and after[-place] == before[axis]:
            return -place
        inner *= after[-place]
    return axis


class _Operations:
    """Operations of PyTorch, in the terms of a `Trace`."""

    def __init__(self, model: Module) -> None:
        self.trace, self.model = Trace(), model
        self.values: dict[int, Value | None] = {}
        self.alive: list[Tensor] = []  # so that no id is used twice
        self.stored: dict[int, list[Tensor]] = defaultdict(list)  # address of a storage → its tensors
        self.picked: dict[int, frozenset[Source]] = {}  # id of integers and masks → activations that choose them
        self.parted: set[int] = set()  # ids of buffers to whose parts different products were written
        self.uneven: dict[int, tuple[Tensor, Value]] = {}  # id of a product → squares of its constants, other factor
        self.find_parameters()

    def find_parameters(self) -> None:
        """Find parameters that are new: those of a sharded model are gathered as its modules run."""
        for name, tensor in name_parameters(self.model).items():
            if id(tensor) not in self.values:
                self.keep(tensor, Value(parameters=frozenset([name])))

    def value(self, x: Any) -> Value | None:
        """Return the value of a tensor; None for constants."""
        if isinstance(x, torch.nn.Parameter) and id(x) not in self.values:
            self.find_parameters()
        return self.values.get(id(x)) if isinstance(x, torch.Tensor) else None

    def keep(self, tensor: Tensor, value: Value | None) -> None:
        """Set the value of a tensor."""
        self.alive.append(tensor)
        self.values[id(tensor)] = value
        self.stored[_address(tensor)].append(tensor)

    def see(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """See one operation and its result."""
        in_place = name.endswith("_") and not name.startswith("__")
        name = name.removesuffix("_") if in_place else name
        name = name.removesuffix("_copy") if name.removesuffix("_copy") in (*VIEWS, *CUTS) else name
        tensors = _tensors(out)
        if not any(map(_numeric, tensors)) or name.startswith(CONSTANT):
            made: Any = None
        else:
            made = self.apply(name, args, kwargs, tensors)
            made = self.masked(args, made) if name in MASKS else made
        for number, tensor in enumerate(tensors):
            own = (made[number] if isinstance(made, list) else made) if _numeric(tensor) else None
            if in_place and own is not None and tensor.numel():
                for other in self.stored[_address(tensor)]:
                    self.write(other, tensor, own)
            self.keep(tensor, own)
            if own is None and not name.startswith(CONSTANT) and (sources := self.choosers(args)):
                self.picked[id(tensor)] = sources

    def choosers(self, tree: Any) -> frozenset[Source]:
        """Return the activations of which tensors are made, or that choose them."""
        found = frozenset[Source]().union(*(self.picked.get(id(each), ()) for each in _tensors(tree)))
        return found.union(*(value.plain() for value in map(self.value, _tensors(tree)) if value))

    def masked(self, args: Any, made: Value | None) -> Value | None:
        """Apply a nonlinearity to what a comparison of itself masks, as ReLU does; routers may choose experts."""
        masks = [each for each in _tensors(args) if not self.value(each)]
        own = {each.name for each in self.choosers(masks) & made.plain()} - self.trace.routers if made else ()
        return self.trace.bend(made) if made and own else made

    def write(self, other: Tensor, tensor: Tensor, own: Value) -> None:
        """See what writing a tensor leaves in another one of the same storage."""
        old, place = self.values[id(other)], other.storage_offset() - tensor.storage_offset()
        if old is not None and old.parameters:
            self.trace.refuse(f"{self.trace.one(old)} is written to in the forward pass")
        if place == 0 and other.numel() == tensor.numel():
            self.values[id(other)] = own
        elif place <= 0 and other.numel() > tensor.numel():  # which holds more
            self.values[id(other)] = self.trace.add(old, own, joined="cat")
            if old is not None and old.whole() != own.whole():
                self.parted.add(id(other))
        elif place >= 0 and other.numel() < tensor.numel():
            self.values[id(other)] = own

    def apply(self, name: str, args: Any, kwargs: Any, out: list[Tensor]) -> Any:
        """Return the value of the results, or a list of values."""
        trace = self.trace
        v = [*map(self.value, args), None, None, None, None]
        first = v[0]
        if "scaled_dot_product" in name:
            return self.attention(args, kwargs)
        if name in ("add", "sub", "rsub"):
            return self.add(args, first, v[1], kwargs.get("alpha", 1))
        if name in ("mul", "div", "true_divide"):
            return self.multiply(name, args, first, v[1], out[0])
        if name in ("mm", "bmm", "matmul", "mv", "dot", "_grouped_mm"):
            return self.product(*args[:2])
        if name in ("addmm", "baddbmm", "addbmm"):
            made = self.product(*args[1:3])
            return trace.add(made and trace.scaled(made, kwargs.get("alpha", 1)), first)
        if name == "linear":
            self.keep(turned := args[1].mT, v[1])
            return trace.add(self.product(args[0], turned), v[2])
        if name == "convolution":
            if first and v[1] and v[1].parameters and trace.level(first):
                trace.refuse(f"{trace.one(v[1])} is a convolution inside the blocks")
            if (first is None) != (v[1] is None):
                trace.refuse("a convolution with constants has no role")
            return trace.add(trace.product(first, v[1], 0), v[2])
        if name == "addcmul":
            factors, more = args[1:3], kwargs.get("value", 1)
            self.keep(made := factors[0] * factors[1] * more, None)
            self.values[id(made)] = self.multiply("mul", factors, v[1], v[2], made)
            return self.add((args[0], made), first, self.value(made), 1)
        if name == "copy":
            return v[1] or first
        if name in JOINS:
            values = map(self.value, [each for each in _tensors(args) if _numeric(each)])
            joined = "stack" if name == "stack" else "cat"
            return functools.reduce(lambda a, b: trace.add(a, b, joined=joined), values)
        if first is None:
            return self.other(name, args, kwargs)
        if name == "embedding":
            table = bool(first.parameters)
            return trace.begin(first, "positional" if is_alike(args[1]) else "embedding") if table else first
        if name in ("native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm"):
            where = 2 if name != "native_group_norm" else 1
            return trace.norm(first, v[where], v[where + 1])
        if name in ("topk", "sort", "argsort", "kthvalue") or (name in ("max", "min") and len(args) > 1):
            return trace.choose(first)
        if name == "tanh":  # a cap: one at small values
            return trace.bend(first, keep=True)
        if name in ("_softmax", "_safe_softmax", "_masked_softmax", "exp"):
            axis = 0 if name == "exp" else args[1 + (name == "_masked_softmax")]
            return trace.exponential(first, 0 if name == "exp" else axis % args[0].dim() - args[0].dim())
        if name in SUMS:
            return self.sum(name, args, kwargs, first)
        if name in VIEWS or name in CUTS:
            return self.view(name, args, out, first)
        if name in POWERS or (name == "pow" and isinstance(args[1], int | float)):
            return trace.power(first, POWERS.get(name) or args[1])
        if name in ("cumsum", "cumprod"):
            trace.refuse(f"the operation {name} on activations has no derivation")
        return self.other(name, args, kwargs)

    def product(self, a: Tensor, b: Tensor) -> Value | None:
        """Multiply matrices."""
        first, second = self.value(a), self.value(b)
        constant = b if second is None else a
        made = self.trace.product(first, second, a.shape[-1], b.shape[-1], is_fixed(constant))
        if made is None or (first is None) == (second is None):
            return made
        number = find_picked(constant) if made.stream and made.last else find_turned(b.mT if second is None else a)
        if number is None:
            self.trace.refuse("a product with a constant matrix that neither turns nor picks entries has no derivation")
        return self.trace.scaled(made, UNKNOWN if number is None else number)

    def attention(self, args: Any, kwargs: Any) -> Value | None:
        """Compute fused attention: the products and the softmax of which it is made."""
        query, key, value = map(self.value, args[:3])
        scores = self.trace.product(query, key, size := args[0].shape[-1])
        scale = size**-0.5 if kwargs.get("scale") is None else kwargs["scale"]
        scores = scores and self.trace.scaled(scores, scale)
        for bias in (*args[3:], kwargs.get("attn_mask"), kwargs.get("attn_bias")):
            scores = self.trace.add(scores, self.value(bias))
        scores = scores and self.trace.exponential(scores, -1)
        return self.trace.product(scores, value, 0, args[2].shape[-1])

    def sum(self, name: str, args: Any, kwargs: Any, first: Value) -> Value:
        """Sum: over the last axis, features, it is a statistic."""
        if first.parameters:
            return replace(first, computed=True)
        where = 2 if name in ("norm", "linalg_vector_norm") else 1
        axes = args[where] if len(args) > where else kwargs.get("dim")
        count, degree, scale = args[0].dim(), first.degree, UNKNOWN
        axes = range(count) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
        size, shares = math.prod(args[0].shape[each] for each in axes), False
        if first.scores:
            over = axes[0] % count - count if len(axes) == 1 and name == "sum" else 0
            return replace(first, statistic=True, over=over, degree=degree)
        if not count or all(each % count != count - 1 for each in axes):
            self.trace.scales["terms"] |= dict.fromkeys(first.weights or ["the stream"], float(size))
            whole = name in ("mean", "amax", "amin") or first.weighted or first.stream or first.statistic
            return first if whole else replace(first, own=UNKNOWN)
        if name in ("var", "var_mean", "std"):
            degree = 1 if name == "std" else 2
            scale = abs(first.scale) ** degree
        elif where == 2 and (len(args) < 2 or args[1] == 2):
            scale = first.scale * size**0.5
        elif name == "mean" or (name == "sum" and degree == 2):
            scale = first.scale * (size if name == "sum" else 1)
        elif shares := name == "sum" and (first.chosen or all(each.bent for each in first.sources)):
            scale = first.scale
        return replace(first, statistic=True, stream=False, own=scale, taken=1.0, degree=degree, shares=shares)

    def add(self, args: Any, a: Value | None, b: Value | None, alpha: float) -> Value | None:
        """Add or subtract; a constant that is added to a parameter is its offset."""
        b = b and self.trace.scaled(b, alpha)
        for x, constant in ((a, args[1]), (b, args[0])):
            if x is not None and x.stream and not x.wrote and self.value(constant) is None:
                self.see_fixed(constant)
        for p, constant in ((a, args[1]), (b, args[0])):
            if p is not None and p.parameters and self.value(constant) is None:
                number = find_number(constant)
                return replace(p, computed=True) if number is None else replace(p, offset=p.offset + number)
        if a is not None and b is not None and a.parameters:
            args, a, b = (args[1], args[0]), b, a
        if a is not None and b is not None and a.last and a.last[0] == "gain" and b.parameters:
            a = replace(a, last=None) if args[1].numel() > args[1].shape[-1] else a  # of several positions: no shift
        if (one := self.uneven.get(id(args[0]))) and (other := self.uneven.get(id(args[1]))):  # as RoPE turns pairs
            number = find_number((one[0] + other[0] * alpha**2).sqrt(), 1e-4 + 8 * torch.finfo(args[0].dtype).eps)
            return self.trace.scaled(self.trace.join(one[1], other[1]), number or UNKNOWN)
        if a is None or b is None or (a.whole(), a.starts, a.wrote) != (b.whole(), b.starts, b.wrote):
            return self.trace.add(a, b)
        if not (a.parameters or a.scores or a.statistic or b.statistic):
            same = args[0].shape == args[1].shape and torch.allclose(args[0] * (b.scale / alpha), args[1] * a.scale)
            return replace(a, own=a.own + b.own if same and a.taken == b.taken else UNKNOWN)
        return self.trace.add(a, b)

    def see_fixed(self, x: Any) -> None:
        """See positions that no parameter holds: successive rows of a buffer, times a number."""
        rows = x[0] if isinstance(x, torch.Tensor) and x.dim() > 2 else x
        if not isinstance(x, torch.Tensor) or rows.dim() < 2 or bool((rows == rows[:1]).all()):
            return
        found, rows = {"a fixed table": UNKNOWN}, rows.double()
        for name, buffer in self.model.named_buffers():
            table = buffer.double().flatten(0, -2) if buffer.is_floating_point() and buffer.dim() > 1 else rows[:0]
            for some in (table[first : first + len(rows)] for first in range(3)):  # as OPT, or behind a class token
                if some.shape == rows.shape:
                    number = float((some * rows).sum() / some.square().sum())
                    near = 1e-4 + 8 * torch.finfo(x.dtype).eps
                    if bool((rows - number * some).abs().max() <= near * rows.abs().max()):
                        found = {name: number}
        self.trace.scales["position"] |= found

    def multiply(self, name: str, args: Any, a: Value | None, b: Value | None, out: Tensor) -> Value | None:
        """Multiply or divide elementwise; a constant number is a multiplier."""
        for x, tensor, other, divides in ((a, args[0], b, False), (b, args[1], a, name != "mul")):
            if x is None and other is not None:
                if (number := find_number(tensor)) is None:
                    if isinstance(tensor, torch.Tensor) and not divides and not tensor.is_complex():
                        self.uneven[id(out)] = tensor.double().square(), other
                    return replace(other, computed=True) if other.parameters else self.trace.scaled(other, UNKNOWN)
                return self.trace.scaled(other, 1 / number if divides else number)
            whole = x is not None and x.parameters and (tensor.dim() == 0 or tensor.shape[-1] == 1)
            if x is not None and whole and other is not None and not other.parameters:
                self.trace.refuse(f"{self.trace.one(x)} multiplies by one trained number; scalars have no role")
            if divides and x is not None and (x.statistic or not x.scores):
                b = self.trace.power(x, -1) if x.statistic else self.trace.bend(x)
        return self.trace.multiply(a, b)

    def view(self, name: str, args: Any, out: list[Tensor], first: Value) -> Any:
        """Follow a change of view: the axis of keys in logits, slices of weights and of their products."""
        x = args[0]
        if name in CUTS and id(x) in self.parted:
            self.trace.refuse("a buffer holds different products in its parts: pass them on by themselves")
        if first.scores:
            axes = (first.axis, first.over)
            axis, over = (each and self.follow(name, args, list(out[0].shape), each) for each in axes)
            return replace(first, axis=axis, over=over)
        if name not in (*CUTS, "index", "index_select") or first.stream:
            return first
        index = args[-1] if name not in CUTS else ()
        rows = args[1] == 0 if name == "index_select" else index and index[0] is not None
        if first.parameters and x.dim() == 2 and rows and not is_fixed((ids := _tensors(index)[0])[..., None]):
            if id(ids) in self.picked:  # a bias of experts
                return first
            return self.trace.begin(first, "embedding")
        index = tuple(each.flatten().tolist() for each in _tensors(index) if each.numel() < MOST_INDICES)

        def cut(tensor: Tensor) -> Value:
            if tensor.numel() == x.numel():
                return first
            where = (str(index), tensor.storage_offset(), tensor.shape[-1] if tensor.dim() else 0)
            if first.parameters:
                return replace(first, part=(*first.part, where))
            return replace(first, sources=frozenset(replace(s, cut=(*s.cut, where)) for s in first.sources))

        return [cut(each) for each in out]

    def follow(self, name: str, args: Any, after: list[int], axis: int) -> int:
        """Return where an axis, counted from the end, goes."""
        x = args[0]
        count = x.dim()
        if name in ("transpose", "t"):
            pair = [each % count - count for each in args[1:3]] if name == "transpose" else [-1, -2]
            return pair[1 - pair.index(axis)] if axis in pair else axis
        if name == "permute":
            return [each % count for each in args[1]].index(axis + count) - count
        if name in ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"):
            return _place(list(x.shape), axis, after)
        return axis

    def other(self, name: str, args: Any, kwargs: Any) -> Value | None:
        """Take an operation without a rule for a nonlinearity."""
        found = [each for each in map(self.value, _tensors((args, kwargs))) if each is not None]
        names = frozenset[str]().union(*(each.parameters for each in found))
        activations = [each for each in found if not each.parameters]
        if names and activations:
            self.trace.refuse(f"{', '.join(sorted(names))}: enters the operation {name}, which has no rule here")
        if not activations:
            return Value(parameters=names, computed=True) if names else None
        return self.trace.bend(functools.reduce(self.trace.join, activations))

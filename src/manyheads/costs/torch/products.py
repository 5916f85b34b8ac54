"""Multiply-adds of PyTorch operations and of fused attention (SDPA, flex) from shapes and masks."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from manyheads.costs.cost import UnknownCost
from manyheads.costs.tally import Tally
from manyheads.errors import check_integer

Formula = Callable[..., int | Tally]
"""Multiply-adds of an operation, from its result and its arguments."""
# Products of two factors, and the position of the first.
FACTORS = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_grouped_mm"), 0)
FACTORS |= dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"), 1)
ROUTED = "rows of grouped products are counted once each, whatever the router chooses: no token is dropped"
PADDED = "convolutions count products with padding"
COMPLEX = "a multiply-add of complex numbers is counted as one"
OPAQUE = "{} is opaque: its products are not in the program"
HIDDEN = re.compile(  # operations of PyTorch that multiply matrices, unless a formula here counts them
    r"mm(_|$)|mv$|dot|matmul|conv(?!ert)|(?<!upsample_)(?<!bi)(?<!tri)linear|^_trilinear|attention|multi_head"
    r"|transformer_encoder|rnn|lstm|gru|^_fft|[cp]dist_|euclidean|solve|chol|geqrf|ormqr"
    r"|linalg_(?!vector_norm|cross|diagonal|check_errors|_powsum)"
)
OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor", "rngprims")  # of PyTorch itself


def base_name(operation: Any) -> str:
    """Return the name of an operation without overload and without the mark of in-place work."""
    return str(getattr(operation, "overloadpacket", operation).__name__).rstrip("_")


def is_opaque(operation: Any) -> bool:
    """Tell whether an operation without a formula may multiply: foreign, of higher order, or hidden by its name."""
    return getattr(operation, "namespace", "") not in OWN or bool(HIDDEN.search(base_name(operation)))


def describe_product(name: str, *factors: Any) -> str:
    """Name a product by its operation and the shapes of its factors."""
    return " ".join((name, *(str(tuple(each.shape)).replace(" ", "") for each in factors)))


def find_product(
    operation: Any, formulas: Mapping[Any, Formula], out: Any, args: Any, kwargs: Any
) -> tuple[str, Tally, str] | None:
    """Return name, multiply-adds and note of a product, None for other operations; `formulas` come first."""
    packet, name = getattr(operation, "overloadpacket", operation), base_name(operation)
    for key in (operation, packet, str(packet)):
        if key in formulas:
            macs = formulas[key](out, *args, **kwargs)
            checked = macs if isinstance(macs, Tally) else Tally.of(check_integer("formulas: multiply-adds", macs, 0))
            return str(packet), checked, ""
    if getattr(operation, "namespace", "") != "aten":
        return None
    if name in FACTORS:
        left, right = args[FACTORS[name] :][:2]
        if {str(left.layout), str(right.layout)} != {"torch.strided"}:
            return None  # stored elements of sparse factors
        macs, note = left.numel() * (right.shape[-1] if right.dim() > 1 else 1), COMPLEX if left.is_complex() else ""
        if name == "_grouped_mm":  # a row meets one matrix, unless all rows meet the columns of their group
            macs, note = (macs if left.dim() == 2 else out.numel() * left.shape[-1]), ROUTED
        return describe_product(name, left, right), Tally.of(macs), note
    if name in ("convolution", "convolution_backward"):  # the mask says which of the gradients are needed
        back = name == "convolution_backward"
        out, args, times = (args[0], args[1:-1], bool(args[-1][0]) + bool(args[-1][1])) if back else (out, args, 1)
        (x, weight), padding, transposed = args[:2], args[4], args[6]
        macs = times * (x if transposed else out).numel() * weight.numel() // max(weight.shape[0], 1)
        note = COMPLEX if x.is_complex() else PADDED if any(padding) else ""
        return describe_product("convolution", x, weight), Tally.of(macs), note
    return None


def grouped_result(left: Any, right: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
    """Return a meta tensor of the shape of a grouped product."""
    rows = offs.shape if left.dim() == right.dim() == 2 else left.shape[:-2] if right.dim() == 3 else ()
    return left.new_empty((*rows, left.shape[-2], right.shape[-1]))


def sized_by_numbers(operation: Any, args: Any) -> bool:
    """Tell whether numbers decide the size of the result, as a Boolean index does."""
    if base_name(operation) == "index":
        return any(str(getattr(each, "dtype", "")) in ("torch.bool", "torch.uint8") for each in args[1])
    return "dynamic_output_shape" in {tag.name for tag in operation.tags}


LARGEST = 1 << 24  # pairs of positions on which the mask of flex attention is evaluated
UNKNOWN_MASK = "a mask without numbers: all its pairs are counted"
NESTED = "attention of nested tensors is not counted; pad the sequences and give a mask"
TWICE = "gradients of gradients of fused attention are not counted; write out softmax(q @ k.mT) @ v"
MASKED = "masked pairs are those of this batch; a number masks at -1e8, or at half the least of its dtype, and below"


def causal_pairs(queries: int, keys: int) -> Tally:
    """Count the pairs of PyTorch's `is_causal`: query i sees the keys 0..i."""
    square, more = min(queries, keys), max(queries - keys, 0) * keys
    return Tally(queries * keys, square * (square + 1) // 2 + more, square * square + 2 * more)


def masked_pairs(mask: Any, queries: int, keys: int, lead: int) -> Tally:
    """Count the pairs that a mask leaves in `lead` matrices; the halved count knows causal masks alone."""
    import torch

    if mask.is_floating_point():  # added to scores
        mask = mask > max(-1e8, torch.finfo(mask.dtype).min / 2)
    seen = mask.expand(*mask.shape[:-2], queries, keys)
    copies = lead // max(math.prod(seen.shape[:-2]), 1)
    causal = queries <= keys and not seen.triu(1 + keys - queries).any()
    dense = lead * queries * keys
    return Tally(dense, copies * int(seen.sum()), 2 * dense - (lead * queries * queries if causal else 0))


def backward_macs(pairs: Tally, query: Any, value: Any, needed: tuple[bool, ...]) -> Tally:
    """Count the multiply-adds of the gradients of query, key, value and mask that are needed."""
    q, k, v, mask = needed
    return (value.shape[-1] * (v + (q or k or mask)) + query.shape[-1] * (q + k)) * pairs


def attention_rule() -> Callable[..., Any]:
    """Return a function (kernel, on_backward, query, key, value, mask) with the result of a kernel.

    In the backward pass `on_backward` learns which of the four need a gradient; the gradients are zeros.
    """
    import torch

    class Zeros(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, like: Any) -> Any:
            return torch.zeros_like(like)

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            raise UnknownCost(TWICE)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kernel: Any, on_backward: Any, *factors: Any) -> Any:
            ctx.save_for_backward(*factors)
            ctx.on_backward = on_backward
            return kernel(*(each.detach() for each in factors[:3]))

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            needed = ctx.needs_input_grad[2:]
            ctx.on_backward(needed)
            factors = zip(ctx.saved_tensors, needed, strict=True)
            return None, None, *(Zeros.apply(each) if need else None for each, need in factors)

    return Attention.apply

"""Multiply-adds of PyTorch operations from the shapes of their arguments, and operations that hide theirs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

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

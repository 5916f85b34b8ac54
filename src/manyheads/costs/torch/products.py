"""Multiply-adds of PyTorch operations from the shapes of their arguments, and operations that hide theirs."""

from collections.abc import Callable, Mapping
from typing import Any

from manyheads.costs.tally import Tally

Formula = Callable[..., int | Tally]
"""Multiply-adds of an operation, from its result and its arguments."""
# Products of two factors, and the position of the first. A row of a grouped product meets one expert.
FACTORS = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_grouped_mm"), 0)
FACTORS |= dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"), 1)
ROUTED = "rows of grouped products are counted once each, whatever the router chooses: no token is dropped"
PADDED = "convolutions count products with padding"
OPAQUE = "{} is opaque: its products are not in the program; take lower_bound(), or give formulas={{op: function}}"
OPAQUE_STARTS = (
    "_cdist", "_cudnn_rnn", "_efficient_attention", "_fft_", "_flash_attention", "_linalg_", "_native_multi_head",
    "_scaled_dot_product", "_thnn_fused", "_transformer_encoder", "_trilinear", "cholesky", "geqrf", "linalg_",
    "lu_solve", "miopen_", "mkldnn_", "ormqr", "triangular_solve",
)  # fmt: skip
OPAQUE_ENDS = ("mm", "mv", "convolution")
PLAIN = ("linalg_vector_norm", "linalg_cross", "linalg_diagonal")
OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor", "rngprims")  # of PyTorch itself


def base_name(operation: Any) -> str:
    """Return the name of an operation without overload and without the mark of in-place work."""
    return str(getattr(operation, "overloadpacket", operation).__name__).rstrip("_")


def is_opaque(operation: Any) -> bool:
    """Tell whether an operation without a formula may multiply: foreign, of higher order, or of the table above."""
    name = base_name(operation)
    hidden = name.startswith(OPAQUE_STARTS) or name.endswith(OPAQUE_ENDS)
    return getattr(operation, "namespace", "") not in OWN or (hidden and name not in PLAIN)


def describe_product(name: str, *factors: Any) -> str:
    """Name a product by its operation and the shapes of its factors."""
    return " ".join((name, *(str(tuple(each.shape)).replace(" ", "") for each in factors)))


def find_product(
    operation: Any, formulas: Mapping[Any, Formula], out: Any, args: Any, kwargs: Any
) -> tuple[str, Tally, str] | None:
    """Return name, multiply-adds and note of a product, None for other operations; `formulas` come first."""
    packet, name = getattr(operation, "overloadpacket", operation), base_name(operation)
    for key in (operation, packet, str(operation), str(packet)):
        if key in formulas:
            macs = formulas[key](out, *args, **kwargs)
            return str(packet), macs if isinstance(macs, Tally) else Tally.of(macs), ""
    if getattr(operation, "namespace", "") != "aten":
        return None
    if name in FACTORS:
        left, right = args[FACTORS[name] :][:2]
        columns = right.shape[-1] if right.dim() > 1 else 1
        note = ROUTED if "grouped" in name else ""
        return describe_product(name, left, right), Tally.of(left.numel() * columns), note
    if name == "convolution":
        return _convolution(out, args, 1)
    if name == "convolution_backward":  # the mask says which of the gradients are needed
        return _convolution(args[0], args[1:-1], bool(args[-1][0]) + bool(args[-1][1]))
    return None


def _convolution(out: Any, args: Any, times: int) -> tuple[str, Tally, str]:
    (x, weight), (padding, transposed) = args[:2], (args[4], args[6])
    macs = (x if transposed else out).numel() * weight.numel() // max(weight.shape[0], 1)
    return describe_product("convolution", x, weight), Tally.of(times * macs), PADDED if any(padding) else ""


def grouped_result(left: Any, right: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
    """Return a meta tensor of the shape of a grouped product."""
    shape = (*left.shape[:-1], right.shape[-1])
    return left.new_empty((offs.shape[0], *shape) if left.dim() == right.dim() == 2 else shape)


def sized_by_numbers(operation: Any, args: Any) -> bool:
    """Tell whether numbers decide the size of the result, as a Boolean index does."""
    if base_name(operation) == "index":
        return any(str(getattr(each, "dtype", "")) in ("torch.bool", "torch.uint8") for each in args[1])
    return "dynamic_output_shape" in {tag.name for tag in operation.tags}

"""Multiply-adds of fused attention (SDPA, flex) from shapes and mask, and a stand-in with its gradients."""

import math
from collections.abc import Callable
from typing import Any

from manyheads.costs.cost import UnknownCost
from manyheads.costs.tally import Tally

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

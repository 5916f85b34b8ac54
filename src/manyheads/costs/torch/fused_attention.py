"""Fused attention by shapes and mask: pairs of a query and a key, and a stand-in with the gradients of the kernel."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from manyheads.costs.tally import Tally

LARGEST = 1 << 24  # pairs of positions on which the mask of flex attention is evaluated
UNKNOWN_MASK = "a mask without numbers: all its pairs are counted"
MASKED = "pairs of a mask are those that it leaves in this batch"


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


def flex_pairs(block_mask: Any, queries: int, keys: int, lead: int) -> tuple[Tally, str]:
    """Count the pairs of flex attention by its mask on positions; all, with a note, if these are too many."""
    import torch

    if block_mask is None:
        return Tally.of(lead * queries * keys), ""
    extents = (*block_mask.shape[:-2], queries, keys)
    if math.prod(extents) > LARGEST:
        return Tally.of(lead * queries * keys), UNKNOWN_MASK
    positions = torch.meshgrid(*map(torch.arange, extents), indexing="ij")
    return masked_pairs(block_mask.mask_mod(*positions), queries, keys, lead), ""


def attention_rule(add: Callable[..., None], pause: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """Return a function (query, key, value, mask, pairs, place, kernel) with the result and the products of a kernel.

    `add` takes the place of the call, multiply-adds, and their stage if it is another; the kernel runs in a pause.
    """
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, pairs: Tally, *call: Any) -> Any:
            ctx.save_for_backward(query, key, value, mask)
            ctx.pairs, (ctx.place, kernel) = pairs, call
            add(
                ctx.place, (query.shape[-1] + value.shape[-1]) * pairs
            )  # autograd is off: the stage is that of the call
            if query.is_meta:
                return query.new_empty((*query.shape[:-1], value.shape[-1]))
            with pause(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # flex attention is slow without a compiler
                return kernel(query.detach(), key.detach(), value.detach())

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            query, key, value, mask = ctx.saved_tensors
            add(ctx.place, 2 * (query.shape[-1] + value.shape[-1]) * ctx.pairs, "backward")
            add(ctx.place, query.shape[-1] * ctx.pairs, "scores-again")
            needed = zip((query, key, value, mask), ctx.needs_input_grad, strict=False)
            return *(torch.zeros_like(each) if need else None for each, need in needed), None, None, None

    return Attention.apply

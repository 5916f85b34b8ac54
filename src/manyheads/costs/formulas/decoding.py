"""Decoding: one token after the other, with and without a cache of keys and values."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import comb

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost, Item, merge
from manyheads.costs.formulas.memory import stored_matrices
from manyheads.costs.formulas.model import Call, cost_of, model_items, size_note, transformer_cost
from manyheads.costs.shapes import ModelShape, heads_per_device
from manyheads.errors import UsageError, check_integer


def kv_cache_bytes(
    shape: ModelShape, context: int, batch: int = 1, itemsize: int | None = None, devices: int = 1
) -> int:
    """Count the bytes of the cache: `2 b T L h_kv d_k` numbers, a window keeping its last keys only.

    Latent attention keeps its latent vectors, not the keys and values of every head. Of several `devices` that share
    the heads (tensor parallelism) the bytes of one; latent vectors are on each.

    Examples
    --------
    >>> kv_cache_bytes(ModelShape(layers=32, width=4096, heads=32, kv_heads=8), 8192, itemsize=2)
    1073741824
    """
    context, batch = check_integer("context", context, 0), check_integer("batch", batch)
    kept = 0
    for kind in shape.blocks:
        held = kind if kind.latent else replace(kind, kv_heads=heads_per_device(kind.kv_heads or 0, devices))
        kept += kind.layers * held.cached_numbers * (min(context, kind.window) if kind.window else context)
    return batch * kept * (shape.itemsize if itemsize is None else itemsize)


def _refuse_bidirectional(shape: ModelShape) -> None:
    if not shape.causal:
        why = "without a mask every earlier state changes with each token"
        raise UsageError(f"decoding token by token needs causal=True: {why}")


def token_cost(shape: ModelShape, context: int, batch: int = 1, convention: str | Convention = "exact") -> Cost:
    """Count one decoding step with a cache: `b [(8 + 4 r) d^2 + 4 T d]` a block, `T` tokens with the new one.

    Raises `UsageError`: the attention is not causal, or a size is not positive.

    Notes
    -----
    Bytes: weights once, the cache of the earlier tokens read, the new keys and values written, token and logits. Of
    experts as many as the tokens of a step can visit at most.

    Examples
    --------
    >>> [token_cost(ModelShape(layers=1, width=48, heads=4), t, batch=2).flops for t in (1, 64, 512)]
    [110976, 135168, 307200]
    """
    _refuse_bidirectional(shape)
    size = shape.itemsize
    ends = 4 if shape.vocabulary else shape.width * size  # ids are int32
    ends = batch * (ends + (shape.vocabulary if shape.unembedding else shape.width) * size)
    # A window of w keys drops the oldest as it appends: w - 1 are read and one is written.
    moved = stored_matrices(shape, batch) * size + kv_cache_bytes(shape, context, batch) + ends
    items = model_items(shape, Call(1, context, batch, cached=True), False, True)
    return cost_of(items, moved, size, convention, shape.notes)


def generation_cost(
    shape: ModelShape,
    prompt: int,
    generated: int,
    batch: int = 1,
    cache: bool = True,
    convention: str | Convention = "exact",
) -> Cost:
    r"""Count reading a prompt of `P` tokens and `G` further tokens, one after the other.

    With a cache, blocks take

    .. math:: F(P) + G b (8 + 4r) d^2 + 4 b d \left(GP + G(G+1)/2\right)

    and without one `F(P + 1) + ... + F(P + G)`, where every step computes everything anew. The sum is taken in closed
    form: it takes as long for a billion tokens as for one.

    Parameters
    ----------
    shape, prompt, generated, batch
        Model, `P` (0 with a cache: no prompt), `G`, sequences.
    cache
        Whether keys and values are kept.
    convention
        How the result is read.

    Notes
    -----
    The pass over the prompt computes logits for each of its positions, as `transformer_cost` does. Without a cache a
    step sees the prompt again, so that no separate pass over it is counted. Bytes leave out that the pass over the
    prompt writes its keys and values.

    Examples
    --------
    >>> shape = ModelShape(layers=1, width=48, heads=4)
    >>> generation_cost(shape, 8, 4).flops, generation_cost(shape, 8, 4, cache=False).flops
    (678528, 2369280)
    """
    _refuse_bidirectional(shape)
    prompt, generated = check_integer("prompt", prompt, 0), check_integer("generated", generated, 0)

    def step(length: int) -> Cost:
        return token_cost(shape, length, batch) if cache else transformer_cost(shape, length, batch)

    items = list(transformer_cost(shape, prompt, batch).items) if cache and prompt else []
    # A window is a kink: the cost of a step is one polynomial of its length up to there, and another one beyond.
    last = prompt + generated
    kinks = {kind.window for kind in shape.blocks}
    if not cache:  # and so is the number of tokens that visit every expert
        kinks |= {kind.experts.count // (kind.experts.active * batch) for kind in shape.blocks if kind.experts}
    for kink, following in pairwise(sorted({min(max(kink, prompt), last) for kink in kinks} | {prompt, last})):
        items += _sum_quadratic(lambda length: step(length).items, kink + 1, following + 1)
    return Cost(merge(items), notes=(*shape.notes, size_note(shape.itemsize)) if items else ()).to(convention)


def _sum_quadratic(items: Callable[[int], tuple[Item, ...]], start: int, stop: int) -> Iterator[Item]:
    r"""Sum items whose amounts are quadratic in the length, over the lengths from `start` to `stop - 1`.

    .. math:: \sum_{i<n} f(i) = \binom{n}{1} f(0) + \binom{n}{2} \Delta f(0) + \binom{n}{3} \Delta^2 f(0)

    (Newton's series), written in the values `f(0), f(1), f(2)`.
    """
    n = stop - start
    weights = (n - comb(n, 2) + comb(n, 3), comb(n, 2) - 2 * comb(n, 3), comb(n, 3))
    for offset, weight in enumerate(weights[:n]):
        for item in items(start + offset):
            yield item.times(weight)

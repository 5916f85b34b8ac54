"""Decoding: one token after the other, with and without a cache of keys and values."""

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost, merge
from manyheads.costs.formulas.memory import matrix_weights
from manyheads.costs.formulas.parts import traffic
from manyheads.costs.formulas.transformer import Call, model_items, transformer_cost
from manyheads.costs.shapes import ModelShape
from manyheads.errors import UsageError


def kv_cache_bytes(shape: ModelShape, context: int, batch: int = 1, itemsize: int | None = None) -> int:
    """Count the bytes of the cache: `2 b T L h_kv d_k` numbers, a window keeping its last keys only.

    Examples
    --------
    >>> kv_cache_bytes(ModelShape(layers=32, width=4096, heads=32, kv_heads=8), 8192, itemsize=2)
    1073741824
    """
    if context < 0 or batch < 1:
        raise UsageError(f"cache: context={context} and batch={batch} must not be negative")
    kept = min(context, shape.window) if shape.window else context
    numbers = 2 * batch * kept * shape.layers * shape.kv_heads * shape.head_dim  # type: ignore[operator]
    return numbers * (shape.itemsize if itemsize is None else itemsize)


def _refuse_bidirectional(shape: ModelShape) -> None:
    if not shape.causal:
        raise UsageError(
            "decoding token by token needs causal=True: without a mask every earlier state changes with each token"
        )


def token_cost(shape: ModelShape, context: int, batch: int = 1, convention: str | Convention = "exact") -> Cost:
    """Count one decoding step with a cache: `b [(8 + 4 r) d^2 + 4 T d]` a block, `T` tokens with the new one.

    Parameters
    ----------
    shape, context, batch
        Model, tokens that the new token sees (itself included), sequences.
    convention
        How the result is read.

    Notes
    -----
    Bytes: weights once, the cache of the earlier tokens read, the new keys and values written, token and logits.

    Raises
    ------
    UsageError
        The attention is not causal, or a size is not positive.

    Examples
    --------
    >>> [token_cost(ModelShape(layers=1, width=48, heads=4), t, batch=2).flops for t in (1, 64, 512)]
    [110976, 135168, 307200]
    """
    _refuse_bidirectional(shape)
    call = Call(1, context, batch)
    size = shape.itemsize
    ends = batch * (4 + shape.vocabulary * size) if shape.unembedding else 2 * batch * shape.width * size
    # A window of w keys drops the oldest as it appends: w - 1 are read and one is written.
    seen = min(context, shape.window) if shape.window else context
    moved = traffic(matrix_weights(shape) * size + kv_cache_bytes(shape, seen, batch) + ends)
    return Cost(merge((*model_items(shape, call, False, True), moved)), notes=shape.notes).to(convention)


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

    and without one `F(P + 1) + ... + F(P + G)`, where every step computes everything anew.

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
    step sees the prompt again, so that no separate pass over it is counted.

    Examples
    --------
    >>> shape = ModelShape(layers=1, width=48, heads=4)
    >>> generation_cost(shape, 8, 4).flops, generation_cost(shape, 8, 4, cache=False).flops
    (678528, 2369280)
    """
    _refuse_bidirectional(shape)
    if prompt < 0 or generated < 0:
        raise UsageError(f"generation: prompt={prompt} and generated={generated} must not be negative")
    if cache:
        total = transformer_cost(shape, prompt, batch, convention=convention) if prompt else Cost().to(convention)
        steps = (token_cost(shape, prompt + step, batch, convention) for step in range(1, generated + 1))
    else:
        total = Cost().to(convention)
        steps = (
            transformer_cost(shape, prompt + step, batch, convention=convention) for step in range(1, generated + 1)
        )
    for step in steps:
        total = total + step
    return total

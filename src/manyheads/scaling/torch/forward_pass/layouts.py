"""Layouts of queries and keys: the products q_i . k_i of every token, however batch, tokens and heads are ordered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from manyheads.models.torch.lazy_torch import Tensor
from manyheads.transformer.shape import Shape


def find_scale(
    logits: list[Tensor], queries: list[Tensor], keys: list[Tensor], key_dim: int, accuracy: float, normed: bool
) -> float | None:
    """Return s with A_ii = s q_i . k_i for one reading of each, normalized or as they are; None where there is none."""
    alike = len(queries) == len(keys)
    pairs = list(zip(queries, keys, strict=True)) if alike else list(product(queries, keys))
    if normed:
        pairs = [both for pair in pairs for both in zip(*(normalized(each, key_dim) for each in pair), strict=True)]
    for found, (query, key) in product(logits, pairs):
        for expected in token_products(query, key, len(found), key_dim):
            scale = float((found / expected).mean())
            if scale > 0 and float((found / expected / scale - 1).abs().max()) <= accuracy:
                return scale
    return None


def token_products(query: Tensor, key: Tensor, tokens: int, key_dim: int) -> Iterator[Tensor]:
    """Yield q_i . k_i summed over heads and sequences, for every token, in every reading of the axes that fits."""
    query, key = (each.reshape(-1, tokens, each.shape[-1]) if each.dim() == 2 else each for each in (query, key))
    if query.dim() > key.dim():  # (..., groups, heads of a group, ...) beside (..., groups, ...)
        pairs = [(query.flatten(axis, axis + 1), key) for axis in range(query.dim() - 2)]
    else:
        pairs = [(query, key)]
    for one, other in pairs:
        for axis in range(one.dim() - 1):
            if one.dim() == other.dim() and one.shape[axis] == other.shape[axis] == tokens:
                yield from _sums(one.double().movedim(axis, 0), other.double().movedim(axis, 0), key_dim)


def _sums(query: Tensor, key: Tensor, key_dim: int) -> Iterator[Tensor]:
    """Yield the sums for arrays whose tokens come first; a key may serve several queries, in either order."""
    if query.shape != key.shape and query.shape[-1] % key_dim == key.shape[-1] % key_dim == 0:
        query, key = (each.unflatten(-1, (-1, key_dim)) for each in (query, key))
    differing = [axis for axis in range(1, query.dim()) if query.shape[axis] != key.shape[axis]]
    if not differing:
        yield (query * key).flatten(1).sum(1)
    elif len(differing) == 1 and query.shape[differing[0]] % key.shape[differing[0]] == 0:
        (axis,) = differing
        times = query.shape[axis] // key.shape[axis]
        repeats = [times if i == axis else 1 for i in range(key.dim())]
        for repeated in (key.repeat_interleave(times, axis), key.repeat(repeats)):
            yield (query * repeated).flatten(1).sum(1)


def split_fused(found: Tensor, kind: str, shape: Shape) -> list[tuple[Tensor, ...]]:
    """Return the queries and keys that the outputs of one projection may hold, in the orders that are in use.

    `kind` names what it makes, such as `"query+key+value"`; one alone, or values apart, is returned as it is.
    """
    kinds, n, width = kind.split("+"), shape.key_dim, shape.key_dim * shape.heads
    if len(kinds) == 1:
        return [(found,)]
    wanted, count, last = range(len(kinds) - ("value" in kinds)), len(kinds), found.shape[-1]
    own = [axis for axis in range(found.dim()) if found.shape[axis] == count]
    pairs: list[tuple[Tensor, ...]] = [tuple(found.select(axis, place) for place in wanted) for axis in own]
    if count == 3 and last > width:  # all queries, all keys, all values
        pairs.append((found[..., :width], found[..., width:].chunk(2, -1)[0]))
        groups, left = divmod(last - width, 2 * n)
        if groups and not left:  # group after group, each with its queries, its key and its value
            rows = found.unflatten(-1, (groups, -1, n))
            pairs.append((rows[..., :-2, :].flatten(-3), rows[..., -2, :].flatten(-2)))
    if last % count == 0:  # one after the other, or number after number
        pairs.append(tuple(found.chunk(count, -1)[place] for place in wanted))
        pairs.append(tuple(found[..., place::count] for place in wanted))
    if last % (count * n) == 0:  # head after head
        rows = found.unflatten(-1, (-1, count, n))
        pairs.append(tuple(rows[..., place, :].flatten(-2) for place in wanted))
    return pairs


def normalized(array: Tensor, key_dim: int) -> Iterator[Tensor]:
    """Yield an array as norms without gains leave it, of mean square one: of each head, of all heads together."""
    heads = array.double().unflatten(-1, (-1, key_dim)) if array.shape[-1] % key_dim == 0 else array.double()
    yield (heads / heads.square().mean(-1, keepdim=True).sqrt()).reshape(array.shape)
    centred = heads - heads.mean(-1, keepdim=True)
    yield (centred / centred.square().mean(-1, keepdim=True).sqrt()).reshape(array.shape)
    yield array.double() / array.double().square().mean(-1, keepdim=True).sqrt()

"""Truncated factorizations of merged weights into query, key, value and output matrices, with a certificate.

Both directions are derived here from the definition of the layer; the merged form is that of Chen and Li, "Provably
learning a multi-head attention layer" (arXiv 2402.04084), with the query bias kept as a bias on the keys.
"""

import functools
from collections.abc import Sequence

import numpy as np

from manyheads._namespaces import Array
from manyheads.errors import CertificateError, UsageError, check_integer


class RankTooSmall(CertificateError):
    """A matrix cannot be factored exactly at the rank that was asked for.

    `measured` is the largest discarded singular value over the largest one of its matrix, `threshold` what it may be at
    most, and `smallest_rank` the least rank that works.
    """

    def __init__(self, rank: int, *, measured: float, threshold: float, smallest_rank: int):
        message = f"rank {rank} does not hold the layer's matrices: factor at rank {smallest_rank} or more"
        super().__init__(message, measured=measured, threshold=threshold)
        self.rank, self.smallest_rank = rank, smallest_rank

    def __reduce__(self) -> tuple[object, tuple[int]]:
        build = functools.partial(RankTooSmall, measured=self.measured, threshold=self.threshold)
        return functools.partial(build, smallest_rank=self.smallest_rank), (self.rank,)


def factor_weights(
    theta: Array, projection: Array, key_bias: Array, rank: int, scale: float, tolerance: float | None
) -> dict[str, Array]:
    """Return query, key, value and output matrices of merged weights, and the query bias where there is a key bias.

    [Theta_i; beta_i^T] = scale [W_Q,i; b_Q,i^T] W_K,i^T are factored together, so that a query bias comes out.
    """
    dim = theta.shape[-1]
    augmented = np.asarray(theta)  # (m, d, d), or (m, d + 1, d) with the bias
    if key_bias is not None:
        augmented = np.concatenate([augmented, np.asarray(key_bias)[:, None, :]], axis=1)
    (query, key), (value, output) = factor_stacks((augmented, np.asarray(projection)), rank, tolerance)
    query, key = query * scale**-0.5, key * scale**-0.5
    weights = {"query": query[:, :dim], "key": key, "value": value, "output": np.swapaxes(output, -1, -2)}
    return weights if key_bias is None else {**weights, "query_bias": query[:, dim]}


def factor_stacks(stacks: tuple[Array, ...], rank: int, tolerance: float | None) -> list[tuple[Array, Array]]:
    """Write every matrix of every stack as left @ right.T with `rank` columns, exactly up to `tolerance`.

    The singular values of stacks (m, a, b) go half to the left and half to the right factor, (m, a, rank) and
    (m, b, rank), in the dtype of the stack, at least float32; columns beyond the size of a matrix are zero. The
    tolerance is relative to the largest singular value of a matrix; None means 16 max(a, b) eps.
    """
    rank = check_integer("rank", rank)
    # LAPACK knows no other types: half precision is widened, extended precision narrowed.
    stacks = tuple(np.asarray(stack, np.float64 if stack.dtype.itemsize > 4 else np.float32) for stack in stacks)
    if not all(np.isfinite(stack).all() for stack in stacks):
        raise UsageError("the layer holds NaN or infinite weights: it has no factors")
    decomposed = [np.linalg.svd(stack, full_matrices=False) for stack in stacks]
    _certify(decomposed, rank, tolerance)
    return [_split(*parts, rank) for parts in decomposed]


def _certify(decomposed: Sequence[tuple[Array, ...]], rank: int, tolerance: float | None) -> None:
    measured, threshold, smallest = 0.0, 0.0, 1
    for left, values, right in decomposed:
        largest = np.where(values[:, :1] > 0, values[:, :1], 1)
        relative = values / largest  # (m, min(a, b))
        size = max(left.shape[-2], right.shape[-1])
        allowed = 16 * size * float(np.finfo(values.dtype).eps) if tolerance is None else tolerance
        smallest = max(smallest, int((relative > allowed).sum(axis=1).max()))
        discarded = float(relative[:, rank:].max(initial=0.0))
        if discarded > allowed and discarded >= measured:
            measured, threshold = discarded, allowed
    if measured > threshold:
        raise RankTooSmall(rank, measured=measured, threshold=threshold, smallest_rank=smallest)


def _split(left: Array, values: Array, right: Array, rank: int) -> tuple[Array, Array]:
    root = np.sqrt(values[:, None, :rank])
    factors = left[..., :rank] * root, np.swapaxes(right, -1, -2)[..., :rank] * root
    padding = (0, 0), (0, 0), (0, max(0, rank - values.shape[-1]))
    return np.pad(factors[0], padding), np.pad(factors[1], padding)

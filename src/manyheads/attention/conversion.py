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
        super().__init__(
            f"rank {rank} does not hold the layer's matrices: factor at rank {smallest_rank} or more",
            measured=measured,
            threshold=threshold,
        )
        self.rank = rank
        self.smallest_rank = smallest_rank

    def __reduce__(self) -> tuple[object, tuple[int]]:
        # Python rebuilds an exception from its positional arguments alone, on the way back from a worker process too.
        rebuild = functools.partial(
            RankTooSmall, measured=self.measured, threshold=self.threshold, smallest_rank=self.smallest_rank
        )
        return rebuild, (self.rank,)


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
    tolerance is relative to the largest singular value of a matrix; None means 16 max(a, b) eps, a few times the
    rounding error of the product of two such factors.
    """
    rank = check_integer("rank", rank)
    stacks = tuple(_for_lapack(stack) for stack in stacks)
    if not all(np.isfinite(stack).all() for stack in stacks):
        raise UsageError("the layer holds NaN or infinite weights: it has no factors")
    decomposed = [np.linalg.svd(stack, full_matrices=False) for stack in stacks]
    _certify(decomposed, rank, tolerance)
    return [_split(*parts, rank) for parts in decomposed]


def _for_lapack(stack: Array) -> Array:
    """Widen half precision, which LAPACK does not know, to float32."""
    stack = np.asarray(stack)
    return stack if stack.dtype in (np.float32, np.float64) else stack.astype(np.float32)


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
    missing = max(0, rank - values.shape[-1])
    padded = [np.pad(factor, ((0, 0), (0, 0), (0, missing))) for factor in factors]
    return padded[0], padded[1]

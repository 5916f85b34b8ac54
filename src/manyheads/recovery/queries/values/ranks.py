"""Rank rule: the number of singular values above the widest gap that ends in the noise."""

import numpy as np

from manyheads.recovery._types import Array, Indices
from manyheads.recovery.queries.nets.sigmoid_network import EPS

# A singular value may be noise up to this multiple of the predicted level; which ones are is decided by the gap
CLEAR = 1e3
SEEN = 8.0  # neighbouring singular values of noise are nearer to each other than this factor


def rank_by_gap(singular: Array, noise: float) -> int | None:
    """Return the number of singular values above the largest gap that ends in the noise, None if none does."""
    noise = max(noise, EPS * float(singular[0]))
    if singular[0] <= SEEN * noise:
        return 0
    floored = np.maximum(singular, noise / CLEAR)
    ratios = np.where(singular[1:] <= CLEAR * noise, floored[:-1] / floored[1:], 0.0)
    if not len(ratios) or ratios.max() < SEEN:
        return None
    return int(np.argmax(ratios)) + 1


def gap_rank(singular: Array, cut: float) -> int:
    """Return the rank at the widest gap that ends below the share `cut` of the largest value; all if there is none.

    Examples
    --------
    >>> gap_rank(np.array([1.0, 0.1, 1e-9, 1e-10]), 1e-6)
    2
    """
    rank = rank_by_gap(singular, cut / CLEAR * float(singular[0]))
    return len(singular) if rank is None else rank


def find_ranks(stacks: Array, levels: Array) -> Indices | None:
    """Return the rank of every stack (m, b, d) whose rows err by `levels` (m,), None if one has no gap to its noise."""
    singular = np.linalg.svd(stacks, compute_uv=False)  # (m, min(b, d))
    ranks = [rank_by_gap(s, level * np.sqrt(stacks.shape[1])) for s, level in zip(singular, levels, strict=True)]
    hidden = any(rank is None or rank > singular.shape[1] - 2 for rank in ranks)
    return None if hidden else np.array(ranks, np.intp)

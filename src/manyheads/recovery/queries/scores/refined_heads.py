r"""Output spaces of heads, refined by the answers to sequences of two random tokens.

At one repeated token the weights of two heads may be close, and then errors of the Jacobians mix their spaces. Random
tokens x_1, x_2 tell all heads apart. Since the weights of a row add up to one,

.. math:: u = y_2 - c - x_2 W_S = \sum_i a_i\, v\, \Pi_i, \qquad v = (x_1 - x_2)\, W_S,

with the projectors Pi_i = T_i O_i onto the output spaces O_i of the heads, whatever the scores are: u T_i and v T_i are
parallel for every head. Where T_i is a little wrong, what they leave, u T_i - a_i v T_i, is removed by adding to T_i
columns of the other heads, which is one linear problem for each head (Gauss-Newton). Derived here.
"""

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.values.projection_sum import Sums

ROUNDS = 12  # of linear problems
STEPS = 40  # of conjugate gradients in each
ENOUGH = 1e-8  # of the squared residual of a linear problem
BLIND = 1e-3  # curvature below which rows do not tell: heads that share their values are not told apart by any weights
SLOW = 0.5  # of what was left, from which another round does not help
EXCESS = 6  # sequences, relative to the dimension


def refine_spaces(
    oracle: Oracle, sums: Sums, spaces: list[Array], length: float, rng: Generator, sphere: Array | None = None
) -> tuple[list[Array], float]:
    """Return output spaces (r_i, d) that explain random rows better, and what they leave of them, relative.

    `length` is that of tokens that do not attend nearly evenly, relative to sqrt(d). With a norm in front all tokens
    have it, in the space of the orthonormal rows `sphere` (b, d).
    """
    whole = np.concatenate(spaces)
    count = EXCESS * oracle.dim + 32
    if sphere is None:
        x: Array = rng.standard_normal((count, 2, oracle.dim))
        x = oracle.limits.shortened(x * (length * np.exp(rng.uniform(np.log(0.3), np.log(1.5), (count, 1, 1)))))
    else:
        x = rng.standard_normal((count, 2, len(sphere))) @ sphere
        x *= length * oracle.dim**0.5 / np.linalg.norm(x, axis=2, keepdims=True)
    y = oracle(x, read="last")
    columns = np.linalg.pinv(whole)  # T, block by block
    cuts = np.cumsum([len(space) for space in spaces])[:-1]
    moved, along = y - sums.read(x[:, 1]), (x[:, 0] - x[:, 1]) @ sums.projection
    size = np.linalg.norm(along, axis=1, keepdims=True)
    moved, along = moved / size, along / size
    best, rest = columns, np.inf
    for _ in range(ROUNDS):
        blocks = np.split(columns, cuts, axis=1)
        left = []
        for block in blocks:
            mine, own = moved @ block, along @ block
            left.append(mine - own * ((mine * own).sum(1) / (own**2).sum(1))[:, None])
        before, now = rest, float(np.linalg.norm(np.concatenate(left, axis=1)) / np.linalg.norm(moved @ columns))
        if now < rest:
            best, rest = columns, now
        if now > SLOW * before or len(blocks) == 1:
            break
        others = (np.concatenate(blocks[:head] + blocks[head + 1 :], axis=1) for head in range(len(blocks)))
        mixtures = (_mixture(blocks, head, moved, along, rest_) for head, rest_ in enumerate(left))
        moves = (other @ mixture for other, mixture in zip(others, mixtures, strict=True))
        columns = np.concatenate([block - move for block, move in zip(blocks, moves, strict=True)], axis=1)
    return np.split(np.linalg.pinv(best), cuts), rest


def _mixture(blocks: list[Array], head: int, moved: Array, along: Array, left: Array) -> Array:
    """Return the columns of other heads (R - r, r) that a head has too much, from what it leaves (N, r)."""
    own = along @ blocks[head]
    share = ((moved @ blocks[head]) * own).sum(1) / (own**2).sum(1)
    own = own / np.linalg.norm(own, axis=1, keepdims=True)
    features = (moved - share[:, None] * along) @ np.concatenate(blocks[:head] + blocks[head + 1 :], axis=1)
    basis, triangle = np.linalg.qr(features)

    def apply(x: Array) -> Array:
        y = basis @ x
        return basis.T @ (y - own * (own * y).sum(1, keepdims=True))

    residual = basis.T @ left
    found, direction, size = np.zeros_like(residual), residual, float((residual**2).sum())
    first = size
    for _ in range(STEPS):
        if size <= ENOUGH * first:
            break
        turned = apply(direction)
        curvature = float((direction * turned).sum())
        if curvature < BLIND * float((direction**2).sum()):
            break
        step = size / curvature
        found, residual = found + step * direction, residual - step * turned
        size, before = float((residual**2).sum()), size
        direction = residual + (size / before) * direction
    return np.linalg.lstsq(triangle, found, rcond=1e-12)[0]

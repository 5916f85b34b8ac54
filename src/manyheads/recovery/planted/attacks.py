r"""Attacks on hard instances: learners that find the hidden set of one family at once.

A correlation of the labels of `manyheads.recovery.planted.hard_instances.parity_layer` with any function of few
coordinates is zero; one of their *squares* is not. Where the switch is on, the entry of the label is :math:`\pm u/m`,
and :math:`u^2` depends on whether a hidden coordinate differs between the tokens. The labels of `wave_layer` with
period 4 take two values, so that their squares say nothing new; but they are a parity, and parities without noise are
linear equations.

Both are derived here. They say what the hardness of these layers is worth: it binds learners that descend a squared
loss, or ask for correlations with labels.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array, Generator


@takes_arrays
def unmask_parity(x: ArrayLike, y: ArrayLike, heads: int) -> tuple[int, ...]:
    r"""Find the hidden set of a parity layer from the squares of its labels.

    With :math:`\delta_j = x_{1j} - x_{2j}` and the signal h = ±u/m,
    :math:`E[h^2 \mid \delta_j \ne 0] - E[h^2 \mid \delta_j = 0] = 4/m^2` for hidden coordinates, and 0 for the others.
    The m coordinates with the largest difference are returned; the differences are estimated with standard errors of
    about :math:`8 / (m \sqrt N)`, so a few times :math:`m^2 \ln d` sequences are enough.

    Sequences and labels are (N, 2, d), without noise; `heads` is the size of the hidden set.
    """
    tokens, labels = _select_on(x, y)
    dim = tokens.shape[-1]
    if not 1 <= heads < dim:
        raise UsageError(f"heads={heads}: a parity layer hides 1 to {dim - 1} coordinates here")
    differs = tokens[:, 0, 1:] != tokens[:, 1, 1:]  # (n, d - 1)
    counts = differs.sum(axis=0)
    if min(counts.min(), (len(tokens) - counts).min()) < 4:
        raise UsageError(f"{len(tokens)} sequences with the switch on: give more")
    squares = labels[:, 0, 0] ** 2  # there the mean token has no part in coordinate 0
    shifts = squares @ differs / counts - squares @ ~differs / (len(tokens) - counts)
    return tuple(sorted(int(coordinate) + 1 for coordinate in np.argsort(shifts)[-heads:]))


@takes_arrays
def unmask_wave(x: ArrayLike, y: ArrayLike, *, rng: Generator, tries: int = 64) -> tuple[int, ...]:
    r"""Find the hidden set of a wave layer of period 4 by Gaussian elimination over the field of two elements.

    Where the switch is on, the entry of the label is nearly 0 or ±2, and which of the two is a parity of the products
    :math:`x_{1j} x_{2j}` over the hidden coordinates. Sequences beyond the reach of the teeth break the rule; so d
    equations are drawn at random, solved, and the solution is checked on all others, until one explains nine in ten.

    Sequences and labels are (N, 2, d), without noise; equations are drawn `tries` times at most.
    """
    tokens, labels = _select_on(x, y)
    dim, drawn = tokens.shape[-1], tokens.shape[-1] + 8
    if len(tokens) < 2 * drawn:
        raise UsageError(f"{len(tokens)} sequences with the switch on: give {2 * drawn} or more")
    equations = np.ones((len(tokens), dim), bool)  # the unknown of column 0 is the parity of the wave itself
    equations[:, 1:] = tokens[:, 0, 1:] != tokens[:, 1, 1:]
    high = np.abs(labels[:, 0, 0]) > 1
    for _ in range(tries):
        chosen = rng.choice(len(tokens), drawn, replace=False)
        solution = _solve_binary(equations[chosen], high[chosen])
        if solution is not None and np.mean((equations @ solution.astype(int)) % 2 == high) > 0.9:
            return tuple(int(coordinate) for coordinate in np.flatnonzero(solution[1:]) + 1)
    raise UsageError(f"no parity explains nine in ten labels after {tries} tries: is the period 4, and is there noise?")


def _select_on(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Return the sequences whose tokens differ in coordinate 0, and their labels."""
    tokens, labels = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if tokens.ndim != 3 or tokens.shape[1] != 2 or labels.shape != tokens.shape:
        raise ShapeError(f"shapes {tokens.shape} and {labels.shape}: expected pairs of tokens (N, 2, d), and labels")
    on = tokens[:, 0, 0] != tokens[:, 1, 0]
    return tokens[on], labels[on]


def _solve_binary(equations: NDArray[np.bool_], right: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Solve equations over the field of two elements; None where they contradict or do not determine the unknowns."""
    table = np.column_stack([equations, right])
    rows, unknowns = equations.shape
    for column in range(unknowns):
        pivots = np.flatnonzero(table[column:, column])
        if not pivots.size:
            return None
        table[[column, column + pivots[0]]] = table[[column + pivots[0], column]]
        others = table[:, column].copy()
        others[column] = False
        table[others] ^= table[column]
    assert rows >= unknowns
    return None if table[unknowns:, -1].any() else table[:unknowns, -1]

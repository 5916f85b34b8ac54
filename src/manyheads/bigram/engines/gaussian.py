r"""The compiled pass of the Gaussian population simulation: one read and one write of the attention, noise included.

A row :math:`a` becomes :math:`\mathrm{shrink}_\theta(c\,a + d + e\,(z - \bar z))`. Noise without its mean needs no
second pass: split into blocks of L positions, it is the sum of two independent parts,

.. math:: z_t - \bar z = (n_t - \bar n_j) + (m_j - \bar m), \qquad m_j \sim \mathcal N(0, 1/L_j),
          \quad \bar m = \sum_j L_j m_j / T,

normals without the mean of their block, which is in the cache, and means of blocks, drawn beforehand. The sum has
exactly the law of the left side. The decomposition is elementary; its use here is ours.
"""

from typing import Any

import numpy as np

from manyheads.bigram.engines.compiling import compile_kernel
from manyheads.bigram.engines.generator import LOGARITHM, OF_ROOT, QUANTILE, WEYL
from manyheads.bigram.engines.kernels import finish

BLOCK = 2048  # normals at a time: 8 kB, beside as much of the row
L0, L1, L2, L3, L4, L5, L6 = (np.float32(number) for number in LOGARITHM)
Q0, Q1, Q2, Q3, Q4, Q5, Q6, Q7, Q8, Q9, Q10, Q11, Q12 = (np.float32(number) for number in QUANTILE)
ONE, HALF, LOG2, SCALE = np.float32(1), np.float32(0.5), np.float32(np.log(2)), np.float32(2.0**-31)
EXPONENT, MANTISSA, ONE_BITS = np.int32(23), np.int32(0x7FFFFF), np.int32(0x3F800000)


def normal_of(word: Any) -> Any:
    """Return what `generator.to_normal` returns; the logarithm comes from exponent and mantissa."""
    tail = (np.float32(np.int32(word >> np.uint32(1))) + HALF) * SCALE
    bits = np.float32(tail).view(np.int32)
    t = np.int32((bits & MANTISSA) | ONE_BITS).view(np.float32) - ONE
    halvings = np.float32(np.int32(np.int32(127) - np.int32(bits >> EXPONENT)))
    w = halvings * LOG2 - t * (((((((L0 * t + L1) * t + L2) * t + L3) * t + L4) * t + L5) * t) + L6)
    w = max(w, np.float32(0))
    x = np.sqrt(w) * OF_ROOT - ONE
    p = ((((((Q0 * x + Q1) * x + Q2) * x + Q3) * x + Q4) * x + Q5) * x + Q6) * x
    z = w * ((((((p + Q7) * x + Q8) * x + Q9) * x + Q10) * x + Q11) * x + Q12)
    return np.int32(np.float32(z).view(np.int32) ^ np.int32(np.uint32(word << np.uint32(31)))).view(np.float32)


def fill_normals(normals: Any, counter: Any, first: Any, second: Any) -> Any:
    """Fill with the normals of the counters from `counter` on, and return their sum."""
    h = np.uint32(np.uint32(np.uint32(counter) * WEYL) + first)
    total = np.float32(0)
    for t in range(normals.shape[0]):
        z = normal_of(finish(h, second))
        normals[t] = z
        total += z
        h = np.uint32(h + WEYL)
    return total


def pass_quiet(row: Any, keep: Any, shift: Any, threshold: Any) -> Any:
    """Move and shrink a row; return its sum and its square norm."""
    total, square = np.float32(0), np.float32(0)
    for t in range(row.shape[0]):
        moved = keep * row[t] + shift
        moved -= min(max(moved, -threshold), threshold)
        row[t] = moved
        total += moved
        square += moved * moved
    return total, square


def pass_noisy(row: Any, keep: Any, shift: Any, threshold: Any, scale: Any, normals: Any) -> Any:
    """Move by noise as well."""
    total, square = np.float32(0), np.float32(0)
    for t in range(row.shape[0]):
        moved = keep * row[t] + shift + scale * normals[t]
        moved -= min(max(moved, -threshold), threshold)
        row[t] = moved
        total += moved
        square += moved * moved
    return total, square


def run_normals(normals: Any, first: Any, second: Any) -> Any:
    """Fill an array with normals: what a benchmark times and a test draws."""
    return fill_normals(normals, np.uint32(0), first, second)


def run_pass(rows: Any, keep: Any, shifts: Any, threshold: Any, scales: Any, keys: Any, means: Any, sums: Any) -> None:
    """Pass over rows in place; `means` (rows, blocks) are those of the blocks, `sums` (rows, 2) takes the results.

    A row whose `scales` is zero is moved without noise.
    """
    normals = np.empty(BLOCK, np.float32)
    for k in range(rows.shape[0]):
        sums[k, 0], sums[k, 1] = 0.0, 0.0
        scale = scales[k]
        for block in range(means.shape[1]):
            begin = block * BLOCK
            part = rows[k, begin : min(begin + BLOCK, rows.shape[1])]
            if scale == 0:
                total, square = pass_quiet(part, keep, shifts[k], threshold)
            else:
                drawn = normals[: part.shape[0]]
                mean = fill_normals(drawn, np.uint32(begin), keys[k, 0], keys[k, 1]) / np.float32(part.shape[0])
                shift = np.float32(shifts[k] + scale * (means[k, block] - mean))
                total, square = pass_noisy(part, keep, shift, threshold, scale, drawn)
            sums[k, 0] += total
            sums[k, 1] += square


FAST_FUNCTIONS = (finish, normal_of, fill_normals, pass_quiet, pass_noisy)


def compiled_pass() -> Any:
    """Return `run_pass` compiled."""
    return compile_kernel(run_pass, FAST_FUNCTIONS)


def draw_normals(count: int, first: int, second: int) -> np.ndarray:
    """Return the normals of counters 0, 1, … under a key, float32: those of `to_normal(mix(...))` to rounding.

    Raises
    ------
    ExtraMissing
        The extra `fast` is not installed.
    """
    normals = np.empty(count, np.float32)
    compile_kernel(run_normals, FAST_FUNCTIONS)(normals, np.uint32(first), np.uint32(second))
    return normals

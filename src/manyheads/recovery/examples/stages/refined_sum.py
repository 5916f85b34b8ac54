r"""Stage three: refined estimate of the sum of the projections W_S, from rows with nearly one-hot attention.

As published: the point of the hull nearest to zero, Theta*, has the same inner product with every head (differences of
heads are orthogonal to it), so the rows that Theta* separates most clearly are rows that all heads separate. In the one
row in a hundred whose softmax under Theta* is most nearly on one token j, y_r = x_j W_S up to what the others still
take, and W_S is a regression.

In practice heads fluctuate about Theta* and few rows are so clear. The second form asks for less: *one* head is fitted
to all rows by weighted least squares, again and again, with the weights of rows that it misses cut down each time. Rows
in which the heads agree, saturated or not, are explained by one head with projection W_S; the trimming finds them.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: the stage, in its first form. The trimmed head is worked out here.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from manyheads._constraints import Constrained, constrained
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.examples.stages.shards import Shards, add_up
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, fit_gauss_newton
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.refusals import CertificateShortage

TIED = 1e-9  # relative difference of doubts that are equal but for rounding


@dataclass(frozen=True)
class RefinementSettings(Constrained):
    """Settings of the refined sum of projections."""

    # "trimmed": one head, fitted to ever fewer rows. "margin": the clearest rows under the nearest point of the hull.
    form: Literal["trimmed", "margin"] = constrained("trimmed")
    sequences: int = 3000  # sequences that the head is fitted to, at most
    # After each fit, the share of the rows that sets the scale of the next weights
    shares: tuple[float, ...] = (0.6, 0.35, 0.2, 0.1)
    # Gauss-Newton steps of a fit, and conjugate-gradient iterations of a step
    steps: int = 6
    inner: int = 25
    margin: float = 0.01  # share of the rows that count as clear; at least 8 d rows are taken

    @property
    def needs_hull(self) -> bool:
        """Whether this form starts from a hull; the trimmed head starts from nothing and needs no stage two."""
        return self.form == "margin"


def refine_sum(data: Shards, nearest: Array | None, settings: RefinementSettings) -> Array:
    """Estimate the sum of projections (d, d) from rows in which the heads agree."""
    if not settings.needs_hull:
        return trim_one_head(data, settings)
    if nearest is None:
        raise UsageError(f"form {settings.form!r} starts from the point of the hull nearest to zero: give it")
    return regress_clear_rows(data, nearest, settings)


def measure_doubt(x: Array, y: Array, theta: Array) -> Array:
    """Return what the softmax of x theta x^T leaves to all tokens but the first choice, (N, k)."""
    del y
    logits = (x @ theta) @ x.transpose(0, 2, 1)
    logits = np.sort(logits - logits.max(-1, keepdims=True), axis=-1)
    others = np.exp(logits[..., :-1]).sum(-1)
    return others / (1 + others)


def _regress(x: Array, y: Array, theta: Array, threshold: float) -> tuple[Array, Array]:
    doubt = measure_doubt(x, y, theta)
    first = ((x @ theta) @ x.transpose(0, 2, 1)).argmax(-1)
    sequence, row = np.nonzero(doubt < threshold)
    trust = 1 - (doubt[sequence, row] / threshold) ** 2  # ends at zero: rows that tie at the threshold do not matter
    tokens = x[sequence, first[sequence, row]]
    weighed = tokens * trust[:, None]
    return tokens.T @ weighed, weighed.T @ y[sequence, row]


def regress_clear_rows(data: Shards, theta: Array, settings: RefinementSettings) -> Array:
    """Regress the labels of the clearest rows on the token that each of them chooses."""
    inputs, cross = add_up(data.map(_regress, theta, _largest_doubt(data, theta, settings)))
    ridge = 1e-12 * np.trace(inputs) / data.dim
    return np.linalg.solve(inputs + ridge * np.eye(data.dim), cross)


def _largest_doubt(data: Shards, theta: Array, settings: RefinementSettings) -> float:
    """Return the doubt below which rows are clear: that of a share of them, or the next larger one where rows tie."""
    count, needed = max(round(settings.margin * data.rows), 8 * data.dim), 2 * data.dim
    ranked = data.smallest(measure_doubt, count, theta)
    threshold = max(float(ranked[-1]), np.finfo(float).tiny)
    level, asked = threshold * (1 + TIED), count
    if np.count_nonzero(ranked < threshold * (1 - TIED)) >= needed:
        return threshold
    while ranked[-1] <= level and len(ranked) == asked:
        asked *= 2
        ranked = data.smallest(measure_doubt, asked, theta)
    clear = int(np.count_nonzero(ranked <= level))
    what = f"{clear} of {data.rows} rows attend clearly to one token, expected at least {needed}: give more examples"
    CertificateShortage.if_below(clear, needed, what)
    return float(ranked[ranked > level].min(initial=2 * level))


def trim_one_head(data: Shards, settings: RefinementSettings) -> Array:
    """Fit one head to ever fewer rows, and return its projection (d, d)."""
    x, y = data.take(np.arange(min(settings.sequences, data.count)))
    zero = np.zeros((1, data.dim, data.dim))
    head, weights = AttentionLayer(zero, zero), np.ones(x.shape[:2])
    for share in (*settings.shares, None):
        limits = GaussNewtonSettings(steps=settings.steps, inner=settings.inner, flat=1e-4)
        head = fit_gauss_newton(head, x, y, weights=weights, settings=limits).layer
        if share is not None:
            z = x @ head.projection[0]
            spread = np.sqrt(np.square(z - z.mean(1, keepdims=True)).sum((1, 2)))
            left = np.sqrt(np.square(y - evaluate_layer(head, x)).sum(-1))
            miss = left / np.maximum(spread, 1e-6 * spread.mean())[:, None]  # tokens may coincide
            weights = 1 / (1 + (miss / max(np.quantile(miss, share), 1e-14)) ** 4)
    return head.projection[0]

r"""Stage six: variable projection in the span, then Gauss-Newton on all weights.

In the span a head is a short vector, Theta_i = sum_s alpha_is B_s, and for fixed alpha the projections solve a linear
least-squares problem. As published, alpha runs over a net of the span, (1/eps)^(m^2) points, and the best one is kept.
In practice a few random starts of a descent in alpha do the same: Levenberg-Marquardt on what is left after the
projections are solved for (variable projection), some hundred sequences, m^2 unknowns.

The joint Gauss-Newton that follows, on all matrices, is `manyheads.recovery.fit.gauss_newton`; it removes what the
span's error left.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: net over the span and linear regression.
G. Golub, V. Pereyra, SIAM J. Numer. Anal. 10 (1973), and L. Kaufman, BIT 15 (1975): variable projection.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from manyheads._constraints import Constrained, constrained
from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.fit.variable_projection import Examples, Tangent

STARTING_SCALES = (1.0, 2.0, 4.0)  # standard deviation of the logits at the starts, in turn


@dataclass(frozen=True)
class FitSettings(Constrained):
    """Settings of the fit in the span."""

    # "projection": descents from random starts. "net": random points alone.
    form: Literal["projection", "net"] = constrained("projection")
    starts: int = 24  # random starts, at most
    points: int = 2000  # points of the net
    sequences: int = 600  # sequences that are fitted
    steps: int = 40  # steps of a descent, at most
    good: float = 1e-3  # relative squared error at which no further start is tried


@dataclass(frozen=True)
class SpanFit:
    """A layer whose attention matrices lie in the span, its relative squared error, and the starts or points tried."""

    layer: AttentionLayer
    error: float
    tried: int


def fit_in_span(span: Array, x: Array, y: Array, heads: int, rng: Generator, settings: FitSettings) -> SpanFit:
    """Find heads in a span."""
    examples = Examples(x, y)
    deviations = [np.std((x @ part) @ x.transpose(0, 2, 1)) for part in span]
    units = span / np.maximum(deviations, np.finfo(float).tiny)[:, None, None]  # each part gives logits of variance one
    best: Tangent | None = None
    count = settings.starts if settings.form == "projection" else settings.points
    for tried in range(1, count + 1):
        scale = STARTING_SCALES[(tried - 1) % len(STARTING_SCALES)] / len(span) ** 0.5
        here = Tangent.at(examples, np.tensordot(scale * rng.standard_normal((heads, len(span))), units, 1))
        if settings.form == "projection":
            here = descend_in_span(here, units, settings)
        best = here if best is None or here.loss < best.loss else best
        if best.loss < settings.good:
            break
    assert best is not None
    return SpanFit(best.layer, best.loss, tried)


def descend_in_span(here: Tangent, span: Array, settings: FitSettings) -> Tangent:
    """Descend from a layer whose attention matrices lie in the span, by Levenberg-Marquardt steps within it."""
    heads, damping = len(here.theta), 1e-2
    for _ in range(settings.steps):
        columns = differentiate(here, span)
        normal, gradient = columns.T @ columns, columns.T @ here.residual.ravel()
        scale = np.diag(normal) + 1e-12 * np.trace(normal) + np.finfo(float).tiny
        there = None
        for _ in range(5):
            step = np.linalg.solve(normal + damping * np.diag(scale), gradient).reshape(heads, len(span))
            there = Tangent.at(here.examples, here.theta + np.tensordot(step, span, 1))
            if there.loss < here.loss:
                break
            damping, there = damping * 6, None
        if there is None:
            return here
        gain = (here.loss - there.loss) / here.loss
        here, damping = there, max(damping / 8, 1e-10)
        if gain < 1e-3 or here.loss < 1e-26:
            break
    return here


def differentiate(here: Tangent, span: Array) -> Array:
    """Return the derivative of the rows by the m s coordinates in the span, projections following, (n k d, m s)."""
    columns = []
    for head in range(len(here.theta)):
        for part in span:
            change = np.zeros_like(here.theta)
            change[head] = part
            columns.append(here.forward(change).ravel())
    return np.stack(columns, axis=1)

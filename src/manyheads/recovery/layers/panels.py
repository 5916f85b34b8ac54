"""Panels of a layer: heads, spectra, share of the residual stream.

Description of a layer in figures: ranks and norms of its heads, and how many numbers determine it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import dense_weights
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.study import Curve, Lines, Listing
from manyheads.study.panels import Panel, Picture
from manyheads.study.reporting.html import format_figure

RANK_TOLERANCE = 1e-6  # a singular value below this share of the largest one does not count towards a rank


@dataclass(frozen=True)
class Head:
    """One head in figures."""

    # Numbers of singular values above a share of the largest one
    theta_rank: int
    projection_rank: int
    # Frobenius norms
    theta_norm: float
    projection_norm: float
    key_bias_norm: float


def describe_heads(layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> tuple[Head, ...]:
    """Return ranks and norms of every head, heads in the order of the layer."""
    theta, projection, key_bias, _ = dense_weights(layer)
    spectra = [np.linalg.svd(stack, compute_uv=False) for stack in (theta, projection)]  # (m, d) each
    ranks = [np.sum(values > tolerance * values[:, :1], axis=1) for values in spectra]
    norms = [np.sqrt((values**2).sum(1)) for values in spectra]
    rows = zip(*ranks, *norms, np.linalg.norm(key_bias, axis=1), strict=True)
    return tuple(Head(int(a), int(b), float(c), float(d), float(e)) for a, b, c, d, e in rows)


def say_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words."""
    low, high = min(found := list(ranks)), max(found)
    return str(low) if low == high else f"{low} to {high}"


def at_offset_one(layer: AttentionLayer | RotaryLayer) -> AttentionLayer:
    """Return a layer with merged weights: itself, or what a layer with rotary positions does one token back."""
    return layer.at_offset(1) if isinstance(layer, RotaryLayer) else layer


def rank_tolerance(error: float) -> float:
    """Return the share of the largest singular value that counts: well above a squared error of the recovery."""
    return float(min(max(RANK_TOLERANCE, 10 * math.sqrt(error)), 0.1)) if math.isfinite(error) else 0.1


def free_parameters(dim: int, heads: Iterable[Head]) -> int:
    """Return how many numbers determine a layer of matrices of given ranks.

    A matrix of rank r has r (rows + columns - r): [Theta; beta^T] with d + 1 rows, W with d; and d for the bias.

    Examples
    --------
    >>> free_parameters(8, [Head(2, 2, 1.0, 1.0, 1.0)])
    66
    """
    pairs = [(head.theta_rank, head.projection_rank) for head in heads]
    return dim + sum(a * (2 * dim + 1 - a) + b * (2 * dim - b) for a, b in pairs)


POOLED = 40  # cells to a side of the picture of one matrix
COLUMNS = 6  # heads beside each other in the picture


def layer_panels(layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> tuple[Panel, ...]:
    """Return the pictures of a layer: its heads, their spectra, what they share, and a table."""
    return (heads_picture(layer), *_spectra(layer), _overlaps(layer, tolerance), _table(layer, tolerance))


def heads_picture(layer: AttentionLayer) -> Picture:
    """Lay out |Theta| and below it |W| of every head, each relative to its own largest cell."""
    rows = -(-layer.heads // COLUMNS)
    columns = -(-layer.heads // rows)
    side = min(layer.dim, POOLED)
    gap = max(1, side // 12)
    values = np.full((rows * 2 * (side + gap) - gap, columns * (side + gap) - gap), np.nan)
    marks = [""] * values.shape[0]
    for head in range(layer.heads):
        for lower, (name, weights) in enumerate(zip(("Θ", "W"), dense_weights(layer)[:2], strict=True)):
            top, left = (2 * (head // columns) + lower) * (side + gap), head % columns * (side + gap)
            values[top : top + side, left : left + side] = _pool(weights[head])
            first = head - head % columns
            last = min(first + columns, layer.heads) - 1
            marks[top + side // 2] = f"{name} {first}" if first == last else f"{name} {first}-{last}"
    pooled = f", root mean square over blocks of up to {-(-layer.dim // POOLED)} rows" if layer.dim > POOLED else ""
    values_ = tuple(tuple(map(float, row)) for row in values)
    note = (
        f"What a head compares (Θ) and what it passes on (W), entry by entry{pooled}; each matrix relative to its own "
        "largest cell. Heads from left to right, those of a row of Θ above the same heads' W."
    )
    axes = ("entry of the key token (Θ), of the output (W)", "heads; entry of the query token, of the input")
    ticks: dict[str, Any] = {"x_ticks": ("",) * values.shape[1], "y_ticks": tuple(marks)}
    label = "size, relative to the largest"
    return Picture("The recovered heads", *axes, values_, value_label=label, note=note, limits=(0.0, 1.0), **ticks)


def _pool(matrix: Array) -> Array:
    """Return the sizes of the entries, as root mean squares over blocks where there are many."""
    edges = np.unique(np.linspace(0, len(matrix), min(len(matrix), POOLED) + 1).astype(int))
    squares = np.add.reduceat(np.add.reduceat(matrix**2, edges[:-1], 0), edges[:-1], 1)
    sizes = np.sqrt(squares / np.outer(np.diff(edges), np.diff(edges)))
    return sizes / (sizes.max() or 1.0)


def _spectra(layer: AttentionLayer) -> tuple[Lines, ...]:
    panels = []
    for name, weights in zip(("Θ", "W"), dense_weights(layer)[:2], strict=True):
        values = np.linalg.svd(weights, compute_uv=False)  # (m, d)
        floor = 1e-14 * max(values.max(), np.finfo(float).tiny)
        numbers = tuple(map(float, range(1, layer.dim + 1)))
        labels = [f"head {head}" if layer.heads <= 12 else "" for head in range(layer.heads)]
        lines = (tuple(map(float, np.maximum(one, floor))) for one in values)
        curves = tuple(
            Curve(numbers, line, label, group=g) for g, (line, label) in enumerate(zip(lines, labels, strict=True))
        )
        note = "One line a head. Where a line falls off a cliff the head ends: its rank is the number before."
        panels.append(Lines(f"Singular values of {name}", "number", "singular value", curves, log_y=True, note=note))
    return tuple(panels)


def _overlaps(layer: AttentionLayer, tolerance: float) -> Picture:
    """Compare where heads write: squared cosines between the row spaces of W_i and W_j, averaged."""
    bases = []
    for matrix in dense_weights(layer)[1]:
        _, values, rows = np.linalg.svd(matrix)
        bases.append(rows[: int(np.sum(values > tolerance * values[0]))])  # (rank, d)
    shared = [[float(np.sum((a @ b.T) ** 2) / max(min(len(a), len(b)), 1)) for b in bases] for a in bases]
    names = tuple(str(head) for head in range(layer.heads))
    note = (
        "Average squared cosine between what two heads can write into the stream: 1 for the same directions, 0 for "
        f"disjoint ones; unrelated heads of rank r share r/{layer.dim}."
    )
    labels: dict[str, Any] = {"value_label": "share of the smaller space", "x_ticks": names, "y_ticks": names}
    labels |= {"note": note, "limits": (0.0, 1.0)}
    title = "Do heads write into the same directions?"
    return Picture(title, "head", "head", tuple(map(tuple, shared)), **labels)


def _table(layer: AttentionLayer, tolerance: float) -> Listing:
    rows = []
    for number, head in enumerate(describe_heads(layer, tolerance)):
        theta, projection, beta = map(format_figure, (head.theta_norm, head.projection_norm, head.key_bias_norm))
        rows.append((str(number), str(head.theta_rank), theta, str(head.projection_rank), projection, beta))
    columns = ("head", "rank of Θ", "‖Θ‖", "rank of W", "‖W‖", "‖β‖")
    note = f"Frobenius norms. Ranks count singular values above {tolerance:.2g} of the largest one."
    return Listing("Heads in figures", columns, tuple(rows), note=note)

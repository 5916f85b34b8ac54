"""Panels of a recovered layer: heads, spectra, share of the residual stream."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.results import Recovery
from manyheads.recovery.summaries import RANK_TOLERANCE, at_offset_one, describe_heads
from manyheads.study import Curve, Lines, Listing
from manyheads.study.reporting.html import Section, format_figure
from manyheads.study.reporting.panels import Panel, Picture

POOLED = 40  # cells to a side of the picture of one matrix
COLUMNS = 6  # heads beside each other in the picture


def layer_panels(layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> tuple[Panel, ...]:
    """Return the pictures of a layer: its heads, their spectra, what they share, and a table."""
    return (_mosaic(layer), *_spectra(layer), _overlaps(layer, tolerance), _table(layer, tolerance))


def stages_panel(found: Recovery) -> Listing:
    """Return what every stage asked, found and took, as a table."""
    figures = {stage.name: stage for stage in found.stages}
    rows = []
    for name in dict.fromkeys([*found.counts, *figures]):
        asked, stage = found.counts.get(name), figures.get(name)
        said = (
            "" if stage is None else ", ".join(f"{key} {format_figure(value)}" for key, value in stage.figures.items())
        )
        cost = ("", "", "") if asked is None else (f"{asked.calls:,}", f"{asked.tokens:,}", f"{asked.numbers:,}")
        rows.append((name, *cost, "" if stage is None else format_figure(round(stage.seconds, 3)), said))
    return Listing(
        "Stage by stage",
        ("stage", "calls", "tokens", "numbers read", "CPU s", "what it found"),
        tuple(rows),
        note="A call is one sequence. Noise is measured before, and the result is selected and verified afterwards.",
    )


def _weights(layer: AttentionLayer) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(layer.theta, np.float64), np.asarray(layer.projection, np.float64)


def _mosaic(layer: AttentionLayer) -> Picture:
    """Lay out |Theta| and below it |W| of every head, each relative to its own largest cell."""
    rows = -(-layer.heads // COLUMNS)
    columns = -(-layer.heads // rows)
    side = min(layer.dim, POOLED)
    gap = max(1, side // 12)
    values = np.full((rows * 2 * (side + gap) - gap, columns * (side + gap) - gap), np.nan)
    marks = [""] * values.shape[0]
    for head in range(layer.heads):
        for lower, (name, weights) in enumerate(zip(("Θ", "W"), _weights(layer), strict=True)):
            top, left = (2 * (head // columns) + lower) * (side + gap), head % columns * (side + gap)
            values[top : top + side, left : left + side] = _pooled(weights[head])
            first = head - head % columns
            last = min(first + columns, layer.heads) - 1
            marks[top + side // 2] = f"{name} {first}" if first == last else f"{name} {first}-{last}"
    pooled = f", root mean square over blocks of up to {-(-layer.dim // POOLED)} rows" if layer.dim > POOLED else ""
    return Picture(
        "The recovered heads",
        "what it is compared with, what it becomes",
        "head",
        tuple(tuple(map(float, row)) for row in values),
        value_label="size, relative to the largest",
        x_ticks=("",) * values.shape[1],
        y_ticks=tuple(marks),
        note=f"What a head compares (Θ) and what it passes on (W), entry by entry{pooled}; each matrix relative to its "
        "own largest cell. Heads from left to right, those of a row of Θ above the same heads' W.",
        limits=(0.0, 1.0),
    )


def _pooled(matrix: np.ndarray) -> np.ndarray:
    """Return the sizes of the entries, as root mean squares over blocks where there are many."""
    edges = np.unique(np.linspace(0, len(matrix), min(len(matrix), POOLED) + 1).astype(int))
    squares = np.add.reduceat(np.add.reduceat(matrix**2, edges[:-1], 0), edges[:-1], 1)
    sizes = np.sqrt(squares / np.outer(np.diff(edges), np.diff(edges)))
    return sizes / (sizes.max() or 1.0)


def _spectra(layer: AttentionLayer) -> tuple[Lines, ...]:
    panels = []
    for name, weights in zip(("Θ", "W"), _weights(layer), strict=True):
        values = np.linalg.svd(weights, compute_uv=False)  # (m, d)
        floor = 1e-14 * max(values.max(), np.finfo(float).tiny)
        curves = tuple(
            Curve(
                tuple(map(float, range(1, layer.dim + 1))),
                tuple(map(float, np.maximum(one, floor))),
                f"head {head}" if layer.heads <= 12 else "",
                group=head,
            )
            for head, one in enumerate(values)
        )
        panels.append(
            Lines(
                f"Singular values of {name}",
                "number",
                "singular value",
                curves,
                log_y=True,
                note="One line a head. Where a line falls off a cliff the head ends: its rank is the number before.",
            )
        )
    return tuple(panels)


def _overlaps(layer: AttentionLayer, tolerance: float) -> Picture:
    """Compare where heads write: squared cosines between the row spaces of W_i and W_j, averaged."""
    bases = []
    for matrix in _weights(layer)[1]:
        _, values, rows = np.linalg.svd(matrix)
        bases.append(rows[: int(np.sum(values > tolerance * values[0]))])  # (rank, d)
    shared = [[float(np.sum((a @ b.T) ** 2) / max(min(len(a), len(b)), 1)) for b in bases] for a in bases]
    names = tuple(str(head) for head in range(layer.heads))
    return Picture(
        "Do heads write into the same directions?",
        "head",
        "head",
        tuple(map(tuple, shared)),
        value_label="share of the smaller space",
        x_ticks=names,
        y_ticks=names,
        note="Average squared cosine between what two heads can write into the stream: 1 for the same directions, 0 "
        f"for disjoint ones; unrelated heads of rank r share r/{layer.dim}.",
        limits=(0.0, 1.0),
    )


def _table(layer: AttentionLayer, tolerance: float) -> Listing:
    rows = tuple(
        (
            str(number),
            str(head.theta_rank),
            format_figure(head.theta_norm),
            str(head.projection_rank),
            format_figure(head.projection_norm),
            format_figure(head.key_bias_norm),
        )
        for number, head in enumerate(describe_heads(layer, tolerance))
    )
    return Listing(
        "Heads in figures",
        ("head", "rank of Θ", "‖Θ‖", "rank of W", "‖W‖", "‖β‖"),
        rows,
        note=f"Frobenius norms. Ranks count singular values above {tolerance:.2g} of the largest one.",
    )


def recovery_section(found: Recovery, summary: Mapping[str, Any]) -> Section:
    """Return the chapter of a report on one recovery, from it and its `summarize_recovery`."""
    asked = summary["asked"]
    facts = {
        "oracle": summary.get("oracle", ""),
        "method": f"{summary['method']}: {summary['reason']}",
        "acts on": summary["acts_on"],
        "pictures": "of the heads one token back" if isinstance(found.layer, RotaryLayer) else "",
        "asked": f"{asked['calls']:,} calls, {asked['tokens']:,} tokens, {asked['numbers']:,} numbers read",
        "free parameters": f"{summary['parameters']:,}" if summary["parameters"] else "",
        "largest token": format_figure(asked["largest_norm"]),
        "against the weights": ", ".join(
            f"{name.replace('_', ' ')} {format_figure(value)}" for name, value in summary["against_weights"].items()
        ),
        "tried": "; ".join(summary["tried"]),
    }
    layer = at_offset_one(found.layer)
    return Section(
        f"{summary['heads']} heads in {summary['dim']} dimensions, from answers alone",
        summary["certificate"]["statement"],
        (*layer_panels(layer, summary["rank_tolerance"]), stages_panel(found)),
        facts=tuple((name, value) for name, value in facts.items() if value),
        command=summary.get("command", ""),
    )

"""Report of a recording of a fixed batch: curves by layer and head, heat maps over steps, the theory beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manyheads._extras import xarray as xr
from manyheads._namespaces import Floats
from manyheads.curves.curve_shapes import most_frequent_interval
from manyheads.errors import UsageError
from manyheads.models.modules import Role
from manyheads.probe.reports.shapes import Reading, read_shapes, summarize_shapes
from manyheads.study.panels import Curve, Lines, Listing, Multiples, Panel, Picture
from manyheads.study.reporting.html import Section, format_figure, write_report
from manyheads.theory.papers import TIAN

CURVES = 8  # layers whose curves are drawn in one plot: as many as there are colours
PLOTS, ROW = 24, 6  # layers whose heads are drawn, and plots in a row
COLUMNS = 60  # steps of a heat map
# Figure → title, label of its axis, and how heads are gathered in the heat map.
SHOWN = {
    "entropy": ("Attention entropy", "entropy [nat]", "mean"),
    "max_logit": ("Largest logit", "logit", "max"),
    "first_mass": ("Attention to the first token", "attention", "max"),
    "distance": ("Distance back to the attended token", "tokens", "mean"),
    "relative_output": ("Output of a head over that of its layer", "", "min"),
}
CAVEAT = (
    "A rebound locates: which layer, at which step. It does not predict the final loss: over 141 trainings by the "
    "authors of the theory its correlation with the best loss changes sign from one learning rate to the next, and the "
    "loss at the same moment predicts better. The test asks whether a shape lies beyond the curve's own wobble; only "
    "further seeds tell whether it recurs."
)


def write_recording_report(tree: "xr.DataTree", out: Path | str, command: str = "") -> Path:
    """Write the report of a recording as one HTML file and return its path.

    The tree is that of `measure_checkpoints`, or of `open_recording` of a live recording of a fixed batch; the command
    says what measures it again.
    """
    sections = []
    if "attention_fixed" in tree.children:
        sections.append(_attention_section(tree["attention_fixed"].to_dataset(), tree.attrs, command))
    if "weights" in tree.children and (panels := _weight_panels(tree["weights"].to_dataset())):
        lead = "Of the matrices that the theory speaks of, without the model, beside Gaussian ones of the same shape."
        sections.append(Section("Rank of the weights", lead, panels))
    if readings := read_shapes(tree):
        lead = "\n".join([*(f"{each[0].upper()}{each[1:]}." for each in summarize_shapes(readings)), CAVEAT])
        sections.append(Section("Drop and rebound", lead, _listings(readings), source=TIAN))
    if not sections:
        raise UsageError("no figures of a fixed batch and no weights: record with AttentionRecorder(batch=...)")
    return write_report(sections, Path(out), "manyheads: attention and rank over a training")


# Attention


def _attention_section(found: "xr.Dataset", attributes: Mapping[Any, Any], command: str) -> Section:
    facts = {
        "model": found.attrs.get("model"),
        "rows": found.attrs["rows"],
        "layers that were not measured": found.attrs.get("not_measured"),
        "verification": attributes.get("verification"),
    }
    steps = f"{found.sizes['step']} steps, {found.sizes['layer']} layers of {found.sizes['head']} heads"
    panels: list[Panel] = []
    for name, (title, label, how) in SHOWN.items():
        if name in found and label:  # the mean over heads of a relative figure says nothing
            panels.append(_by_layer(found[name], found.get(f"{name}_uniform"), (title, label), "uniform"))
        if name in found and found.sizes["step"] > 1:
            panels.append(_heat_map(found, name, title, how))
    panels += _by_head(found)
    return Section(
        "Attention on the same tokens",
        f"{steps}, each measured on the same tokens. Lines are means over the heads of a layer, bands reach from the "
        "smallest to the largest head. Dotted: uniform attention under the same mask.",
        tuple(panels),
        facts=tuple((name, str(text)) for name, text in facts.items() if text),
        command=command,
    )


def _by_layer(values: "xr.DataArray", level: "xr.DataArray | None", words: tuple[str, str], null: str) -> Lines:
    """Draw the mean over heads of some layers, with the range of the heads as a band; words: title and label."""
    steps, curves = values.step.values, []
    for group, place in enumerate(_spread(values.sizes["layer"], CURVES)):
        heads = values.isel(layer=place).transpose("head", "step").values
        heads = heads[~np.isnan(heads).all(axis=1)]  # heads that the layer lacks
        low, high = (tuple(map(float, edge)) for edge in (heads.min(axis=0), heads.max(axis=0)))
        curve = _curve(steps, heads.mean(axis=0), f"layer {values.layer.values[place]}", group)
        curves.append(replace(curve, low=low, high=high))
    return _lines(*words, steps, curves, level, null, values.sizes["layer"])


def _lines(
    title: str, label: str, steps: Floats, curves: list[Curve], level: "xr.DataArray | None", null: str, count: int
) -> Lines:
    """Draw the curves of some of so many layers, with their null level where there is one."""
    note = f"{len(curves)} of {count} layers." if len(curves) < count else ""
    positive = steps[steps > 0]  # spaced so unevenly that only a logarithmic axis shows them all:
    uneven = len(positive) > 4 and most_frequent_interval(steps) < len(steps) / 2 and positive[-1] > 100 * positive[0]
    if level is not None and np.isfinite(level.values).any():
        curves.append(_reference(steps, float(np.nanmean(level.values)), null))
    return Lines(title, "step", label, tuple(curves), log_x=bool(uneven), note=note)


def _by_head(found: "xr.Dataset") -> list[Panel]:
    """Draw the entropy of every head, a plot for each layer."""
    if "entropy" not in found:
        return []
    places = _spread(found.sizes["layer"], PLOTS)
    steps, columns = found.step.values, min(ROW, len(places))
    plots, names = [], []
    for place in places:
        heads = found.entropy.isel(layer=place).dropna("head", how="all").transpose("head", "step").values
        level = float(found.entropy_uniform.values[-1, place])
        curves = (_curve(steps, head, "", group) for group, head in enumerate(heads))
        plots.append((*curves, _reference(steps, level, "uniform")))
        names.append(f"layer {found.layer.values[place]}")
    missing, starts = -len(plots) % columns, range(0, len(plots), columns)
    plots, names = plots + [()] * missing, names + [""] * missing
    some = f" {len(places)} of {found.sizes['layer']} layers." if len(places) < found.sizes["layer"] else ""
    return [
        Multiples(
            "Attention entropy of every head, by layer",
            "step",
            "entropy [nat]",
            tuple(tuple(plots[start : start + columns]) for start in starts),
            row_labels=("",) * len(starts),
            column_labels=("",) * columns,
            captions=tuple(tuple(names[start : start + columns]) for start in starts),
            note=f"One line a head.{some}",
        )
    ]


def _heat_map(found: "xr.Dataset", name: str, title: str, how: str) -> Picture:
    """Draw a figure over steps and layers; entropy as a share of that of uniform attention."""
    values, words = found[name], {"mean": "mean over heads", "max": "largest head", "min": "smallest head"}[how]
    if name == "entropy":
        values, words = values / found.entropy_uniform, f"entropy / uniform, {words}"
    table = getattr(values, how)("head").transpose("layer", "step")
    places = _spread(table.sizes["step"], COLUMNS)
    return _picture(f"{title}, over steps and layers", table.isel(step=places), found.layer.values, words)


def _picture(title: str, table: "xr.DataArray", rows: Sequence[object], words: str) -> Picture:
    values = table.values[::-1]  # the first layer at the bottom
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    shown, labels = set(_spread(values.shape[1], 6)), set(_spread(len(values), 16))
    return Picture(
        title,
        "step",
        "layer",
        tuple(tuple(map(float, row)) for row in values),
        value_label=words,
        x_ticks=tuple(str(step) if k in shown else "" for k, step in enumerate(table.step.values)),
        y_ticks=tuple(str(row) if k in labels else "" for k, row in enumerate(list(rows)[::-1])),
        limits=(low, high) if low < high else None,
    )


# Weights


def _weight_panels(found: "xr.Dataset") -> tuple[Panel, ...]:
    """Draw stable ranks of the lower MLP matrix and of the query-key circuits, by layer."""
    panels: list[Panel] = []
    lower = found.isel(matrix=found.role.values == Role.MLP_IN)
    steps, count = found.step.values, lower.sizes["matrix"]
    if count:
        ranks, layers = lower.stable_rank, lower.matrix_layer.values.tolist()
        title = "Stable rank of the lower MLP matrix"
        curves = [
            _curve(steps, ranks.values[:, place], f"layer {layers[place]}", group)
            for group, place in enumerate(_spread(count, CURVES))
        ]
        level = lower.stable_rank_random.isel(step=-1)
        panels.append(_lines(title, "stable rank", steps, curves, level, "Gaussian", count))
        if len(steps) > 1:
            share = (ranks / lower.stable_rank_random).transpose("matrix", "step")
            share = share.isel(step=_spread(len(steps), COLUMNS))
            panels.append(_picture(f"{title}, over steps and layers", share, layers, "stable rank / Gaussian"))
    if "head_stable_rank" in found:
        circuits = found.sel(head_matrix="query-key")
        for name, title in (("stable_rank", "stable rank"), ("spectral", "largest singular value")):
            words = f"{title.capitalize()} of the query-key circuits of heads", title
            level = circuits.get(f"head_{name}_random")
            level = None if level is None else level.isel(step=-1)
            panels.append(_by_layer(circuits[f"head_{name}"], level, words, "Gaussian"))
    return tuple(panels)


# Theory


def _listings(readings: list[Reading]) -> tuple[Listing, ...]:
    """Return tables of the shapes of entropies and of stable ranks."""
    columns = ("first", "lowest", "at step", "last", "null level", "shape", "drop", "rise")
    entropies, ranks = [], []
    for each in readings:
        if each.figure == "entropy":
            heads = ", ".join(f"{count} {label}" for label, count in each.heads.most_common())
            entropies.append((str(each.layer), *_row(each), heads))
        else:
            ranks.append((str(each.layer), each.name, *_row(each)))
    note = "Mean over the heads of a layer, in nat; drop and rise are those of a fit that falls and then rises."
    titles = "Attention entropy, layer by layer", "Stable rank of the lower MLP matrix, layer by layer"
    tables = (
        Listing(titles[0], ("layer", *columns, "heads"), tuple(entropies), note=note),
        Listing(titles[1], ("layer", "matrix", *columns), tuple(ranks)),
    )
    return tuple(table for table in tables if table.rows)


def _row(each: Reading) -> tuple[str, ...]:
    """Return the cells of a curve: its ends, minimum, level and shape."""
    lowest = int(np.nanargmin(each.values))
    values = [format_figure(float(each.values[place])) for place in (0, lowest, -1)]
    label, *sizes = (
        (each.shape.label, f"{each.shape.drop:.3g}", f"{each.shape.rise:.3g}") if each.shape else ("-", "", "")
    )
    label += "" if each.collapsed is None else f"; collapsed from step {each.collapsed} on"
    return (values[0], values[1], str(each.steps[lowest]), values[2], format_figure(each.level), label, *sizes)


# Parts


def _curve(steps: Floats, values: Floats, label: str, group: int) -> Curve:
    return Curve(tuple(map(float, steps)), tuple(map(float, values)), label, group=group)


def _reference(steps: Floats, level: float, label: str) -> Curve:
    return Curve((float(steps[0]), float(steps[-1])), (level, level), label, "reference")


def _spread(count: int, most: int) -> list[int]:
    """Return at most so many places out of so many, evenly chosen, the first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()

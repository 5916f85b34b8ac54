"""Pictures that follow from a study: series of its claims, predicted and trained variables, and a table of the rest.

`lines`, `trajectories` and `table` make a study's own pictures from arrays with names.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from manyheads.study.claims import Claim, Figure
from manyheads.study.panels import BAND_NOTE, Curve, Lines, Listing, Panel, Role, spans_decades, spread_curve

SETTLED = 0.02  # of its whole way, from which a trajectory counts as at its end


def standard_panels(
    claims: Iterable[Claim], theory: xr.Dataset, trained: xr.Dataset, own: Sequence[Panel] = ()
) -> tuple[Panel, ...]:
    """Return the pictures of claims, those of variables both predicted and trained, and the table of single figures.

    A picture of the study's own with the same labels of its axes takes the place of a derived one.
    """
    drawn = {(one.x_label, one.y_label) for one in own if isinstance(one, Lines)}
    derived = [one for one in (*_series(claims), *_pairs(theory, trained)) if (one.x_label, one.y_label) not in drawn]
    titles = [one.title for one in derived]
    axes = [f", over {one.x_label}" if titles.count(one.title) > 1 else "" for one in derived]
    named = (replace(one, title=one.title + axis) for one, axis in zip(derived, axes, strict=True))
    return (*named, *_medians(theory, trained))


def lines(
    title: str,
    x: str,
    y_label: str,
    trained: Mapping[str, xr.DataArray],
    predicted: Mapping[str, xr.DataArray] = {},
    reference: Mapping[str, xr.DataArray] = {},
    *,
    over: tuple[str, ...] = ("replicate", "prediction"),
    log: str = "",
    x_label: str = "",
    **options: Any,
) -> Lines:
    """Return curves along one dimension, named by their keys: bands over replicates and draws, references grey.

    A prediction that is named as a trained curve has no entry of its own in the legend.

    Parameters
    ----------
    x, y_label
        The dimension; the label of the vertical axis.
    trained, predicted, reference
        Arrays over `x`. One further dimension makes a curve of each of its values. A trained curve and the prediction
        at the same place share a colour.
    over
        Dimensions whose mean is drawn, with a band over the full range.
    log
        Logarithmic axes: "x", "y" or "xy".
    x_label
        By default the long name of the coordinate.
    **options
        Of `Lines`: note, shows, x_ticks.
    """
    curves: list[Curve] = []
    roles: dict[Role, Mapping[str, xr.DataArray]] = {"trained": trained, "predicted": predicted, "reference": reference}
    for role, arrays in roles.items():
        parts = [(f"{where}{name}", one) for name, array in arrays.items() for where, one in _parts(array, {x, *over})]
        for place, (name, values) in enumerate(parts):
            group = 0 if role == "reference" else place
            if not (values := values.dropna(x, how="all")).size:
                continue
            rows = values.transpose(..., x).values.reshape(-1, values.sizes[x])
            label = "" if role == "predicted" and any(curve.label == name for curve in curves) else name
            curves.append(spread_curve(np.asarray(values[x], float), rows, label, role, group))
    label = x_label or label_of(next(iter((*trained.values(), *predicted.values())))[x])
    return Lines(title, label, y_label, tuple(curves), "x" in log, "y" in log, **options)


def trajectories(
    title: str,
    part: xr.Dataset,
    x: str,
    y: str,
    predicted: str = "",
    levels: xr.DataArray | None = None,
    first: int = 3,
    **options: Any,
) -> Lines:
    """Return single replicates with their own predictions, each over its own `x`, until all have settled.

    Parameters
    ----------
    part
        Variables over (replicate, one dimension).
    x, y, predicted
        Names of the variables; the last one may be absent.
    levels
        Heights of horizontal lines.
    first
        Number of replicates that are drawn.
    **options
        Of `Lines`: log_x, log_y, note, shows.
    """
    curves, end = [], 0.0
    for row in range(min(first, part.sizes["replicate"])):
        for name in filter(None, (y, predicted)):
            at, values = (part[each].isel(replicate=row).values for each in (x, name))
            if np.isfinite(values).all():
                moving = np.abs(values - values[-1]) > SETTLED * abs(values[0] - values[-1])
                end = max(end, 1.25 * float(at[moving].max(initial=0.0)))
                role: Role = "trained" if name == y else "predicted"
                label = f"replicate {row}" if name == y else "" if row else "predicted"
                curves.append(Curve(tuple(at.tolist()), tuple(values.tolist()), label, role, row))
    curves = [_until(curve, end) for curve in curves]
    if levels is not None:
        for number, level in enumerate(np.ravel(levels.values).tolist()):
            curves.append(Curve((0.0, end), (level, level), "" if number else label_of(levels), "reference"))
    return Lines(title, label_of(part[x]), label_of(part[y]), tuple(filter(lambda one: one.x, curves)), **options)


def table(title: str, rows: Iterable[Mapping[str, str]], note: str = "", shows: tuple[str, ...] = ()) -> Listing:
    """Return a table of rows that name their columns."""
    rows = list(rows)
    return Listing(title, tuple(rows[0]), tuple(tuple(row.values()) for row in rows), note, shows)


def label_of(values: xr.DataArray) -> str:
    """Return the long name of a variable with its unit, or its name."""
    name, unit = str(values.attrs.get("long_name") or values.name), values.attrs.get("units", "1")
    return name.replace("_", " ") + ("" if unit in ("", "1") else f" [{unit}]")


def _series(claims: Iterable[Claim]) -> Iterator[Lines]:
    """Yield one picture for all claims on series of the same quantity along the same axis."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        if isinstance(claim.figure, Figure) and (series := claim.figure.series) is not None:
            groups.setdefault((series.along, label_of(series.measured)), []).append(claim)
    for (along, label), same in groups.items():
        yield _series_panel(along, label, same)


def _series_panel(along: str, label: str, claims: Sequence[Claim]) -> Lines:
    """Draw every series once, with its prediction or, without any, the power that the first claim states."""
    series = [claim.figure.series for claim in claims]
    curves: list[Curve] = []
    all_places = [_place(each.measured) for each in series]
    for group, place in enumerate(dict.fromkeys(all_places)):
        # The name of a curve is what tells it from others; a series may be there in parts of different ranges.
        name = ", ".join(text for text in place if not all(text in other for other in all_places))
        same_place = [one for one, other in zip(series, all_places, strict=True) if other == place]
        parts = [each.measured for each in same_place]
        rows = functools.reduce(xr.DataArray.combine_first, parts).transpose(..., along)
        x = np.asarray(rows[along], float)
        curves.append(spread_curve(x, np.atleast_2d(rows.values), name or "trained", "trained", group))
        same = [each.predicted for each in same_place if each.predicted is not None]
        if same:
            law = same[0].transpose(..., along)
            places, values = np.asarray(law[along], float), law.values.reshape(-1, law.sizes[along])
            curves.append(spread_curve(places, values, "" if group else "predicted", "predicted", group))
        elif not group:
            power, first = claims[0].region.target, parts[0].transpose(..., along)
            claimed = np.asarray(first[along], float)
            guide = np.atleast_2d(first.values).mean(0)[0] * (claimed / claimed[0]) ** power
            curves.append(spread_curve(claimed, guide[None], f"slope {power:g}", "reference"))
    heights = np.concatenate([curve.y for curve in curves])
    power = all(claim.figure.quantity.startswith("exponent") for claim in claims)  # a straight line on logarithmic axes
    drawn = (x, heights[np.isfinite(heights)])
    log_x, log_y = (spans_decades(values) or (power and bool((values > 0).all())) for values in drawn)
    shows = tuple(claim.text for claim in claims)
    return Lines(_title(label), label_of(rows[along]), label, tuple(curves), log_x, log_y, BAND_NOTE, shows)


def _pairs(theory: xr.Dataset, trained: xr.Dataset) -> Iterator[Lines]:
    """Yield curves of what was predicted and trained along an own dimension, at the end of every numeric axis.

    A prediction with a single value of an axis is for that value alone.
    """
    axes = _axes(trained)
    last = {axis: -1 for axis in axes if trained[axis].dtype.kind in "iuf"}
    alone = {axis: theory[axis].item() for axis in axes if axis in theory and theory[axis].ndim == 0}
    for name in (str(name) for name in trained.data_vars if name in theory):
        there = {axis: value for axis, value in alone.items() if axis in trained[name].dims}
        measured = trained[name].sel(there).isel(last, drop=True, missing_dims="ignore")
        end = {axis: trained[axis].values[-1] for axis in last if axis in theory[name].dims}
        own = [str(dim) for dim in measured.dims if dim not in ("replicate", *axes)]
        more = [axis for axis in axes if axis in measured.dims]
        numeric = measured.dtype.kind in "iuf" and measured.attrs.get("deterministic", True)
        numeric = numeric and bool(np.isfinite(measured).any())  # where the grid has such a cell
        if len(own) == 1 and len(more) < 2 and own[0] in theory[name].dims and numeric:
            law = theory[name].sel(end, drop=True)
            if set(law.dims) <= {own[0], "prediction", *more}:
                label, moved = label_of(measured), measured.isel({own[0]: slice(1, None)})
                log = "y" if spans_decades(moved.values[np.isfinite(moved.values)]) else ""
                if log and not (measured.isel({own[0]: 0}) > 0).any():  # an initial state at zero
                    measured, law = moved, law.isel({own[0]: slice(1, None)})
                shown = {"trained": measured}, {"predicted": law}
                yield lines(_title(label), own[0], label, *shown, log=log, note=BAND_NOTE)


def _medians(theory: xr.Dataset, trained: xr.Dataset) -> Iterator[Listing]:
    """Yield a table of all single figures by cell: medians over replicates, predictions in brackets."""
    axes = _axes(trained)
    figures = (values for values in trained.data_vars.values() if values.dtype.kind in "biuf")
    figures = (values for values in figures if values.attrs.get("deterministic", True))
    names = [str(values.name) for values in figures if set(values.dims) <= {"replicate", *axes}]

    def entry(name: str, cell: dict[str, Any]) -> str:
        values = trained[name].sel({axis: cell[axis] for axis in axes if axis in trained[name].dims})
        if not np.isfinite(values).any():
            return ""
        law = theory[name] if name in theory and set(theory[name].dims) <= {*axes, "prediction"} else None
        law = None if law is None or law.attrs.get("units") != trained[name].attrs.get("units") else law
        at = {} if law is None else {axis: cell[axis] for axis in law.dims if axis in cell}
        known = law is not None and all((law[axis] == value).any() for axis, value in at.items())
        stated = float(law.sel(at).mean()) if law is not None and known else math.nan
        return f"{float(values.median()):.4g}" + (f" ({stated:.4g})" if math.isfinite(stated) else "")

    places = itertools.product(*(trained[axis].values for axis in axes))
    cells = [dict(zip(axes, place, strict=True)) for place in places]
    rows = [[*map(str, cell.values()), *(entry(name, cell) for name in names)] for cell in cells]
    kept = tuple(tuple(row) for row in rows if any(row[len(axes) :]))
    if kept and names:
        columns = (*axes, *(label_of(trained[name]) for name in names))
        yield Listing("Medians over replicates", columns, kept, "In brackets: predicted.")


def _parts(array: xr.DataArray, drawn: set[str]) -> list[tuple[str, xr.DataArray]]:
    """Return an array by the values of the dimension that is not drawn, each with its name."""
    more = [str(dim) for dim in array.dims if dim not in drawn]
    if not more:
        return [("", array)]
    return [(f"{value}, ", array.sel({more[0]: value})) for value in array[more[0]].values]


def _title(label: str) -> str:
    return label[:1].upper() + label[1:]


def _until(curve: Curve, end: float) -> Curve:
    """Cut a curve at an end of its horizontal axis."""
    kept = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if a <= end]
    return replace(curve, x=tuple(a for a, _ in kept), y=tuple(b for _, b in kept))


def _place(values: xr.DataArray) -> tuple[str, ...]:
    """Return what may tell a series from others of its picture: its place on the grid, and its name if it has one."""
    places = {str(name): found for name, found in values.coords.items() if found.ndim == 0}
    texts = [
        f"{name.replace('_', ' ')}={found.item():g}" if found.dtype.kind in "iuf" else str(found.values)
        for name, found in places.items()
    ]
    return (*texts, str(values.name or ""))


def _axes(trained: xr.Dataset) -> list[str]:
    """Return the axes of the grid."""
    return str(trained.attrs.get("axes", "")).split()

"""Figures and tables of `joma/invariants`, and the selections of its cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from manyheads.study import Curve, Lines, Listing
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import select_cell, select_cells
from manyheads.theory.joma.task import UpdateRule
from manyheads.theory.joma.theorems.invariants import SoftmaxRelation, softmax_relation

FORMS = ("moving_mean", "fixed_mean", "squares")
DRIFTING = "gelu"  # activation of the cells with descent and decay


def invariant_panels(trained: xr.Dataset) -> tuple[Panel, ...]:
    """Draw the drift by cell and by learning rate, and theorem 1 for softmax attention."""
    return (_table(trained), _drift_panel(trained), _logit_change(trained), _softmax_table(trained))


def drifting_cell(trained: xr.Dataset, attention: str) -> xr.Dataset:
    """Select the cell with gradient descent and weight decay under one kind of attention."""
    return select_cell(trained, attention=attention, activation=DRIFTING, queries=1)


def softmax_relations(trained: xr.Dataset, contexts: int) -> np.ndarray:
    """Return the softmax form of every activation and replicate, objects (activations, replicates)."""
    chosen = select_cells(trained, attention="softmax", contexts=contexts)
    return np.array(
        [
            [_form(chosen.isel(cell=cell, replicate=replicate)) for replicate in range(chosen.sizes["replicate"])]
            for cell in range(chosen.sizes["cell"])
        ],
        dtype=object,
    )


def _form(cell: xr.Dataset) -> SoftmaxRelation:
    """Compute theorem 1 along one trajectory; only sums over neurons enter, so one neuron with their root suffices."""
    rule = UpdateRule("softmax", str(cell["activation"].item()))
    logits, weights = cell["state_logits"].values[:, None], np.sqrt(np.abs(cell["state_squares"].values))[..., None]
    return softmax_relation(rule, cell["time"].values, logits, weights, cell["state_attention"].values)


def _table(trained: xr.Dataset) -> Panel:
    rows = []
    for number in range(trained.sizes["cell"]):
        cell = trained.isel(cell=number)
        several = int(cell["queries"]) > 1
        alone = _extent((cell["per_query_drift"] / cell["square_change"]).values) if several else ""
        rows.append(
            (
                *(str(cell[name].item()) for name in ("attention", "activation", "queries", "contexts")),
                f"{float(cell['drift'].max()):.1e}",
                _extent(cell["logit_change"].values),
                alone,
            )
        )
    return Listing(
        "Drift of the conserved quantity",
        ("attention", "activation", "queries", "contexts", "drift", "change of the logits", "one query alone"),
        tuple(rows),
        note="Largest drift over replicates, tokens and times (softmax: of the sum of the logits). One query alone: "
        "its drift over the change of the squared weights, median and range.",
    )


def _drift_panel(trained: xr.Dataset) -> Panel:
    curves, learning_rates = [], tuple(map(float, trained["learning_rate"].values))
    for group, attention in enumerate(("linear", "exp")):
        drifts = drifting_cell(trained, attention)["descent_drift"].values
        curves.append(spread_curve(learning_rates, drifts, f"{attention} attention", group=group))
        line = tuple(float(drifts[:, 0].mean() * rate / learning_rates[0]) for rate in learning_rates)
        curves.append(Curve(learning_rates, line, "" if group else "order one", "predicted", group))
    return Lines(
        "Drift of the conserved quantity under gradient descent",
        "learning rate",
        f"drift at time {float(trained['time'][-1]):g}",
        tuple(curves),
        log_x=True,
        log_y=True,
        note="Bands range over replicates. Dashed: proportional to the learning rate, through the largest.",
        shows=("The drift under gradient descent",),
    )


def _logit_change(trained: xr.Dataset) -> Panel:
    """Draw the logit that changes most, first replicate, one context and many, beside theorem 1."""
    curves = []
    for group, contexts in enumerate(_context_counts(trained)):
        form = softmax_relations(trained, contexts)[_activations(trained).index(DRIFTING), 0]
        token = int(np.abs(form.change[-1]).argmax())
        step = max(1, trained.sizes["time"] // 20)
        times, name = tuple(map(float, trained["time"].values[::step])), f"{contexts} context{'s' * (contexts > 1)}"
        for array, label, role in ((form.change, "logit", "trained"), (form.fixed_mean, "theorem", "predicted")):
            line = tuple(map(float, array[::step, token]))
            curves.append(Curve(times, line, f"{name}, {label}", role, group))  # type: ignore[arg-type]
    return Lines(
        f"Softmax attention, {DRIFTING}: change of one logit",
        "time",
        "change since the start",
        tuple(curves),
        note="Token of the largest change, first replicate. Dashed: theorem 1 with the initial mean attention.",
    )


def _softmax_table(trained: xr.Dataset) -> Panel:
    rows = []
    for contexts in _context_counts(trained):
        for activation, forms in zip(_activations(trained), softmax_relations(trained, contexts), strict=True):
            errors = {name: [form.relative_error(name) for form in forms] for name in FORMS}
            shapes = {name: [form.correlation(name) for form in forms] for name in ("fixed_mean", "squares")}
            cells = [f"{max(errors['moving_mean']):.1g}", _extent(errors["fixed_mean"])]
            rows.append((f"{contexts}", activation, *cells, _extent(shapes["fixed_mean"]), _extent(shapes["squares"])))
    columns = (
        "contexts",
        "activation",
        "moving mean: error",
        "fixed mean: error",
        "its correlation",
        "squares alone",
    )
    return Listing(
        "Theorem 1 for softmax attention",
        columns,
        tuple(rows),
        note="Relative errors, and correlations over tokens; median and range over replicates, in the first column "
        "the largest. Squares alone: correlation without the mean-attention term.",
    )


def _extent(values: Any) -> str:
    low, middle, high = np.quantile(np.asarray(values, float), [0, 0.5, 1])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _context_counts(trained: xr.Dataset) -> list[int]:
    return np.unique(select_cells(trained, attention="softmax")["contexts"].values).tolist()


def _activations(trained: xr.Dataset) -> list[str]:
    """Return the activations in the order of `softmax_relations`."""
    return select_cells(trained, attention="softmax", contexts=1)["activation"].values.tolist()

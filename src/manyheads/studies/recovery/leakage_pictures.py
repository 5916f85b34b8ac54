"""Pictures of `recovery/leakage`: calls by noise, rounding and limits, and what a defence costs an honest user."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from manyheads.recovery.queries.leak_meter import ROUNDED
from manyheads.studies.recovery.noisy_extraction import NORMS, SHAPES
from manyheads.study import Lines, Listing
from manyheads.study.panels import Curve, Panel, spread_curve


def leakage_panels(study: Any, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
    """Return what `Leakage` shows: calls by noise, an honest user's loss, rounding, repeated questions, limits."""
    band = "Bands: full range of the replicates."
    calls = {family: study.over_sizes(trained, "calls", family, "noise") for family in study.families}
    tokens = {family: study.over_sizes(trained, "tokens", family, "noise") for family in study.families}
    limit = spread_curve(study.noises, predicted["limit"].values, "bound of these queries", "reference")
    over = {family: study.over_limit_by_heads(predicted, trained, family) for family in study.families}
    loss = np.square(study.noises)
    rounded = [ROUNDED * 2.0**-b for b in study.bits]
    target = f"a squared error of {study.target:g}"

    def lines(title: str, x: str, y: str, curves: list[Curve], note: str, *shows: str) -> Lines:
        return Lines(title, x, y, tuple(curves), log_x=True, log_y=True, note=note, shows=shows)

    def of(values: dict[str, np.ndarray], x: Iterable[float]) -> list[Curve]:
        return [spread_curve(x, v, SHAPES[f], group=g) for g, (f, v) in enumerate(values.items())]

    dear = {family: values / values.min(1, keepdims=True) for family, values in calls.items()}
    ten = spread_curve(loss, np.full((1, len(loss)), 10.0), "ten times as much", "reference")
    by_norm = [study.over_sizes(trained, "calls", "gpt2", name) for name in NORMS]
    by_length = [study.over_sizes(trained, name, "gpt2", "length") for name in ("calls", "tokens")]
    return (
        lines(
            f"Calls of least squares to {target}",
            "noise of the answers",
            "calls",
            [*of(calls, study.noises), limit],
            band,
            "grow as the square of the noise",
        ),
        lines(
            "Cost of extraction by what an honest user loses",
            "squared error of the answers",
            "calls over the fewest",
            [*of(dear, loss), ten],
            f"{band} The copy's squared error is {study.target:g}.",
            "costs an honest",
        ),
        lines(
            "Rounding beside noise",
            "error of the answers",
            "calls",
            [
                spread_curve(study.noises, calls["gpt2"], "noise", group=0),
                spread_curve(
                    rounded[::-1], study.over_sizes(trained, "calls", "gpt2", "bits")[:, ::-1], "bits", group=1
                ),
            ],
            f"{band} GPT-2-shaped. {study.bits[0]} to {study.bits[-1]} bits.",
            "rounding costs what",
        ),
        lines(
            "Rounded answers, asked for again",
            "answers to each question",
            "squared error of what is found",
            [
                spread_curve(study.repeats, study.over_sizes(trained, "error", "gpt2", name), words, group=g)
                for g, (name, words) in enumerate((("same", "the same question"), ("nearby", "questions near by")))
            ],
            f"{band} GPT-2-shaped, {study.bits[-1]} bits.",
            "Asking the same",
            "Asking rounded questions",
        ),
        lines(
            "Limit of the norm",
            "standard deviation of the tokens",
            "calls [s^2 / e]",
            [
                spread_curve(study.norms, values, words, group=g)
                for g, (values, words) in enumerate(zip(by_norm, ("with biases", "without"), strict=True))
            ],
            f"{band} Cramer-Rao bound of {study.heads} heads, GPT-2-shaped.",
            "sixth power",
            "sixth power, too",
        ),
        lines(
            "Limit of the length",
            "tokens of a call",
            "calls or tokens [s^2 / e]",
            [
                spread_curve(study.lengths, values, words, group=g)
                for g, (values, words) in enumerate(zip(by_length, ("calls", "tokens"), strict=True))
            ],
            f"{band} Cramer-Rao bound, GPT-2-shaped.",
            "Longer calls",
        ),
        lines(
            "Number of heads",
            "heads",
            "bound of the calls over the information limit",
            of(over, study.numbers),
            f"{band} Cramer-Rao bound. Ranks are {study.dim} over the heads.",
            "With every number of heads",
        ),
        lines(f"Tokens to {target}", "noise of the answers", "tokens", of(tokens, study.noises), band),
        _defences(study, trained),
    )


def _defences(study: Any, trained: xr.Dataset) -> Listing:
    """List the noise, and the bits, that make extraction ten times as dear."""
    rows = []
    for family in study.families:
        noise = float(np.exp(np.log(study.tenfold(trained, family)).mean()))
        fewest = study.over_sizes(trained, "calls", family, "noise").min(1).mean()
        bits = math.log2(ROUNDED / noise)
        figures = (
            f"{fewest:,.0f}",
            f"{noise:.2g}",
            f"{bits:.1f}",
            f"{noise**2:.2g}",
            f"{noise**2 / study.target:.2g}",
        )
        rows.append((SHAPES[family], *figures))
    return Listing(
        "What makes least squares ten times as dear",
        ("layer", "fewest calls", "noise", "as bits", "squared error of answers", "over the copy's"),
        tuple(rows),
        note="Means of replicates, in logarithms. Least squares on tokens of standard deviation one.",
    )

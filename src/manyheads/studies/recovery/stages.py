"""`recovery/stages`: the error after each of the six stages, in their published and in their practical forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.crude_sum import CrudeForm, estimate_crude_sum
from manyheads.recovery.examples.stages.fit import FitSettings, fit_in_span
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.examples.stages.span import count_by_gap, measure_span_error, span_of
from manyheads.recovery.fit.gauss_newton import fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import evaluate_layer, relative_error
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

FORMS = {"published": "as published", "practical": "practical"}
FIGURES = {
    "few": "crude sum, a quarter of the examples",
    "crude": "crude sum of projections",
    "crude_span": "span from the crude sum",
    "refined": "refined sum of projections",
    "span": "span from the refined sum",
    "fit": "function, fitted in the span",
    "joint": "function, all matrices fitted",
    "counted": "heads by the largest gap",
}
PATH = ("crude", "crude_span", "refined", "span")
EXACT = 1e-24  # relative squared error: float64's rounding with a factor of a million to spare


@dataclass(frozen=True)
class Stages(Study):
    """Each stage improves on the one before, and the last one is exact.

    Attributes
    ----------
    heads
        Numbers of heads.
    dim, tokens
        Token dimension d and length k.
    count
        Sequences.
    joint_fit_sequences
        Sequences of the joint fit.
    points
        Points of the published form's net.
    """

    name: ClassVar[str] = "recovery/stages"
    claim: ClassVar[str] = "The refined sum and its span lower the error; the joint fit reaches rounding"
    revision: ClassVar[int] = 3
    source: ClassVar = CHEN_LI
    unread_prediction: ClassVar[str] = "stages are compared with each other, and the last one with rounding"

    heads: tuple[int, ...] = (2, 3)
    dim: int = 12
    tokens: int = 2
    count: int = 24_000
    joint_fit_sequences: int = 2000
    points: int = 500

    def __post_init__(self) -> None:
        if not self.heads or min(self.heads) < 2 or list(self.heads) != sorted(set(self.heads)):
            raise UsageError(f"heads={self.heads}: give one or more numbers from 2 on, rising")

    @classmethod
    def full(cls) -> Stages:
        """Return the study in 16 dimensions with up to four heads."""
        return cls(heads=(2, 3, 4), dim=16, count=200_000, joint_fit_sequences=4000, points=4000)

    @classmethod
    def small(cls) -> Stages:
        """Return the smallest configuration in which every claim can change."""
        return cls((2,), dim=4, count=1200, joint_fit_sequences=60, points=5)

    def cells(self) -> tuple[Cell, ...]:
        """Return both forms for every number of heads; they see the same layers and examples."""
        return grid(form=tuple(FORMS), heads=self.heads)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what is expected of the last stage: nothing is left."""
        nothing = ("heads", np.zeros(len(self.heads)), label("relative squared error"))
        return xr.Dataset({"joint": nothing}, coords={"heads": list(self.heads)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Plant a layer, run the stages with its number of heads, and measure each against it."""
        rng, heads, published = generator(key), int(cell["heads"]), cell["form"] == "published"
        layer = planted_layer(rng, self.dim, heads)
        x = sequences(rng, self.count + 1000, self.tokens, self.dim)
        y = evaluate_layer(layer, x)
        data, quarter = (open_shards((x[:size], y[:size])) for size in (self.count, self.count // 4))
        crude_form: CrudeForm = "correlation" if published else "regression"
        crude, few = (estimate_crude_sum(part, crude_form)[0] for part in (data, quarter))
        first = find_hull(data, crude, heads, HullSettings())
        refined = refine_sum(data, first.nearest, RefinementSettings("margin" if published else "trimmed"))
        hull = find_hull(data, refined, heads, HullSettings())
        form = FitSettings("net" if published else "projection", points=self.points, good=0.0 if published else 1e-3)
        fit = fit_in_span(span_of(hull), x[:600], y[:600], heads, rng, form)
        done = fit_gauss_newton(fit.layer, x[: self.joint_fit_sequences], y[: self.joint_fit_sequences])
        held, total = Examples(x[self.count :], y[self.count :]), layer.projection.sum(0)
        values: dict[str, float | np.floating] = {
            "few": np.linalg.norm(few - total) / np.linalg.norm(total),
            "crude": np.linalg.norm(crude - total) / np.linalg.norm(total),
            "crude_span": measure_span_error(span_of(first), layer.theta),
            "refined": np.linalg.norm(refined - total) / np.linalg.norm(total),
            "span": measure_span_error(span_of(hull), layer.theta),
            "fit": relative_error(fit.layer, held),
            "joint": relative_error(done.layer, held),
            "counted": float(count_by_gap(hull.eigenvalues)),
        }
        return xr.Dataset({name: ((), float(value), label(FIGURES[name])) for name, value in values.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Compare stages with each other, and the last one with rounding."""

        def logs(trained: xr.Dataset, name: str, form: str, heads: int) -> np.ndarray:
            return np.log(np.maximum(of_cell(trained, name, form=form, heads=heads), 1e-40))

        def fall(before: tuple[str, str], after: tuple[str, str]) -> Measure:
            return lambda predicted, trained: np.mean(
                [logs(trained, *before, heads) - logs(trained, *after, heads) for heads in self.heads], 0
            )

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return np.exp(-fall(("few", "practical"), ("crude", "practical"))(predicted, trained))

        def worst(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            return max(logs(trained, "joint", "practical", heads).max() for heads in self.heads) / np.log(10)

        above = (0.0, float("inf"))
        inequality = "an inequality: the logarithm of the ratio of errors, mean over numbers of heads"
        return (
            Claim(
                "The error of the crude sum is a bias: four times the examples do not lower it",
                ratio,
                quantity="error with four times the examples over that without",
                target=1.0,
                tolerance=0.25,
                basis="ratio of errors; noise alone would halve it, and this is half of the way there",
            ),
            Claim(
                "The published refinement has a smaller error than the crude sum",
                fall(("crude", "published"), ("refined", "published")),
                quantity="fall of the error (ln)",
                target=0.0,
                tolerance=above,
                basis=f"{inequality}, is positive",
            ),
            Claim(
                "The span from the published refinement has a smaller error than that from the crude sum",
                fall(("crude_span", "published"), ("span", "published")),
                quantity="fall of the error (ln)",
                target=0.0,
                tolerance=above,
                basis=f"{inequality}, is positive",
            ),
            Claim(
                "A single trimmed head estimates the sum with at most half the error of the published refinement",
                fall(("refined", "published"), ("refined", "practical")),
                quantity="fall of the error (ln)",
                target=np.log(2),
                tolerance=above,
                basis=f"{inequality}, is above ln 2",
            ),
            Claim(
                "After the joint fit the practical learner is exact to rounding in every replicate",
                worst,
                quantity="relative squared error (log10), worst replicate",
                target=np.log10(EXACT),
                tolerance=(float("inf"), 0.0),
                basis="decimal logarithm of the largest relative squared error on fresh examples; float64's rounding "
                "is 1e-30, a millionfold is allowed for the condition of the fit",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the errors along the stages, and all figures."""
        curves: list[Curve] = []
        for group, heads in enumerate(self.heads):
            for place, (form, words) in enumerate(FORMS.items()):
                path = np.stack([of_cell(trained, name, form=form, heads=heads) for name in PATH], axis=1)
                curves.append(spread_curve((1, 2, 3, 4), path, f"{heads} heads, {words}", group=2 * group + place))
        rows = []
        for name, words in FIGURES.items():
            medians = [
                float(np.median(of_cell(trained, name, form=form, heads=heads)))
                for heads in self.heads
                for form in FORMS
            ]
            rows.append((words, *(f"{value:.2g}" for value in medians)))
        return (
            Lines(
                "Relative error after stages one to four",
                "stage",
                "relative error",
                tuple(curves),
                log_y=True,
                note="Stages 1 and 3: sum of projections. 2 and 4: worst part of an attention matrix outside the span. "
                "The practical form does without stage 2; it is shown for comparison. Bands reach over replicates.",
                shows=("smaller error than",),
            ),
            Listing(
                "Medians",
                ("", *(f"{heads} heads, {words}" for heads in self.heads for words in FORMS.values())),
                tuple(rows),
                note="Errors of functions are squared and relative.",
            ),
        )

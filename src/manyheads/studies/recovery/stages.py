"""`recovery/stages`: the error after each of the six stages, in their published and in their practical forms."""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery.examples.stages.crude_sum import CrudeForm, estimate_crude_sum
from manyheads.recovery.examples.stages.fit import FitSettings, fit_in_span
from manyheads.recovery.examples.stages.hull import HullSettings, count_by_gap, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.fit.gauss_newton import fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import evaluate_layer, relative_error
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.theory.papers import CHEN_LI

FORMS = ("published", "practical")
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
PATH = ["crude", "crude_span", "refined", "span"]
EXACT = 1e-24  # relative squared error: float64's rounding with a factor of a million to spare


class Stages(st.Study):
    """Each stage improves on the one before, and the last one is exact."""

    name = "recovery/stages"
    claim = "The refined sum and its span lower the error; the joint fit reaches rounding"
    revision = 3
    source = CHEN_LI
    unread_prediction = "stages are compared with each other, and the last one with rounding"
    grid = {"form": FORMS, "heads": "heads"}  # both forms see the same layers and examples

    heads: tuple[int, ...] = st.sweep((2, 3), "numbers of heads", least=2, count=1, small=(2,), full=(2, 3, 4))
    dim: int = st.setting(12, "token dimension d", small=4, full=16)
    tokens: int = st.setting(2, "length k")
    count: int = st.setting(24_000, "sequences", small=1200, full=200_000)
    joint_fit_sequences: int = st.setting(2000, "sequences of the joint fit", small=60, full=4000)
    points: int = st.setting(500, "points of the published form's net", small=5, full=4000)

    def predict(self, key: st.Key) -> st.Record:
        return {"joint": ("heads", np.zeros(len(self.heads)), "relative squared error")}

    def train(self, key: st.Key, form: str, heads: int) -> st.Record:
        rng, published = st.generator(key), form == "published"
        layer = planted_layer(rng, self.dim, heads)
        x = sequences(rng, self.count + 1000, self.tokens, self.dim)
        y = evaluate_layer(layer, x)
        data, quarter = (open_shards((x[:size], y[:size])) for size in (self.count, self.count // 4))
        crude_form: CrudeForm = "correlation" if published else "regression"
        crude, few = (estimate_crude_sum(part, crude_form)[0] for part in (data, quarter))
        first = find_hull(data, crude, heads, HullSettings())
        refined = refine_sum(data, first.nearest, RefinementSettings("margin" if published else "trimmed"))
        hull = find_hull(data, refined, heads, HullSettings())
        kind = FitSettings("net" if published else "projection", points=self.points, good=0.0 if published else 1e-3)
        fit = fit_in_span(span_of(hull), x[:600], y[:600], heads, rng, kind)
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
        return {name: ((), float(value), FIGURES[name]) for name, value in values.items()}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        published, practical = (
            {name: st.log(trained[name].sel(form=form).clip(1e-40)) for name in FIGURES} for form in FORMS
        )
        inequality = "an inequality: the logarithm of the ratio of errors, mean over numbers of heads"
        yield st.Claim(
            "The error of the crude sum is a bias: four times the examples do not lower it",
            xr.DataArray(np.exp(-(practical["few"] - practical["crude"]).mean("heads"))),
            st.near(1, 0.25),
            "ratio of errors; noise alone would halve it, and this is half of the way there",
            "error with four times the examples over that without",
        )
        positive = st.above(0.0), f"{inequality}, is positive", "fall of the error (ln)"
        halved = st.above(np.log(2)), f"{inequality}, is above ln 2", "fall of the error (ln)"
        text = "The published refinement has a smaller error than the crude sum"
        yield st.Claim(text, (published["crude"] - published["refined"]).mean("heads"), *positive)
        text = "The span from the published refinement has a smaller error than that from the crude sum"
        yield st.Claim(text, (published["crude_span"] - published["span"]).mean("heads"), *positive)
        text = "A single trimmed head estimates the sum with at most half the error of the published refinement"
        yield st.Claim(text, (published["refined"] - practical["refined"]).mean("heads"), *halved)
        yield st.Claim(
            "After the joint fit the practical learner is exact to rounding in every replicate",
            practical["joint"].max(skipna=False) / np.log(10),
            st.below(np.log10(EXACT)),
            "decimal logarithm of the largest relative squared error on fresh examples; float64's rounding is 1e-30, a "
            "millionfold is allowed for the condition of the fit",
            "relative squared error (log10), worst replicate",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        path = trained[PATH].to_array("stage").assign_coords(stage=range(len(PATH)))
        yield st.lines(
            "Relative error after stages one to four",
            "stage",
            "relative error",
            {f"{m} heads, {form}": path.sel(form=form, heads=m) for m in self.heads for form in FORMS},
            log="y",
            note="Stages 1 and 3: sum of projections. 2 and 4: worst part of an attention matrix outside the span. "
            "The practical form does without stage 2; it is shown for comparison. Bands reach over replicates.",
            shows=("smaller error than",),
            x_ticks=tuple(FIGURES[name] for name in PATH),
        )

"""`recovery/crude-hull`: span of the attention matrices from the crude and from the refined sum of projections.

The crude sum is off by a matrix whose Frobenius norm does not know the stable rank, and so are the tokens that it
projects: below that size a misfit says nothing of a row, and examples, more of which only lower the misfit of the best
rows, do not help. The hull is fitted with the crude sum, with the sum from the rows of the largest margin under the
hull's point nearest to zero, with that from all rows, and with the true sum.
"""

import math

import numpy as np

import manyheads.study as st
from manyheads.recovery.examples.stages.crude_sum import estimate_crude_sum
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.theory.papers import CHEN_LI

SUMS = {
    "crude": "crude sum",
    "margin": "refined by the rows of the largest margin",
    "all": "refined by all rows",
    "true": "true sum",
}
HEADS = 2
OUTSIDE = "share of an attention matrix outside the span"


class CrudeHull(st.Study):
    """The crude hull's span has an error that neither examples nor stable rank remove; high-margin rows do."""

    name = "recovery/crude-hull"
    claim = "The crude hull does not give the span at any stable rank; high-margin rows do"
    source = CHEN_LI.at("crude hull, and its refinement, as told in the talk")
    grid = {"rank": "ranks", "count": "counts"}

    ranks: tuple[int, ...] = st.sweep(
        (3, 6, 12), "stable ranks of the attention matrices", most="dim", small=(3, 6), full=(4, 8, 16)
    )
    counts: tuple[int, ...] = st.sweep(
        (4000, 16_000, 64_000), "sequences of two tokens", small=(1500, 6000), full=(8000, 32_000, 128_000, 256_000)
    )
    dim: int = st.setting(12, "token dimension d", small=6, full=16)
    scale: float = st.setting(2.0, "standard deviation of the logits", above=0)

    def predict(self, key: st.Key) -> st.Record:
        """Return the powers of the number of examples, where a fixed number of the best rows is kept.

        Two heads agree to a misfit epsilon in a share of order epsilon of the rows of two tokens, so that the worst of
        the best rows has a misfit of order 1/N, and so has the span, if the sum is right.
        """
        return {
            "sum": ("sum", ["crude", "true"], "sum of projections", None),
            "power": ("sum", [0.0, -1.0], "power of the examples"),
        }

    def train(self, key: st.Key, rank: int, count: int) -> st.Record:
        for_layer, for_data = st.generator(key).spawn(2)
        layer = equal_spectrum_layer(for_layer, self.dim, HEADS, rank, scale=self.scale)
        x = sequences(for_data, count, 2, self.dim)
        data = open_shards((x, evaluate_layer(layer, x)))
        settings = HullSettings(kept=16 * self.dim**2)
        total = np.asarray(layer.projection).sum(0)
        crude = estimate_crude_sum(data, "correlation")[0]
        hulls = {"crude": find_hull(data, crude, HEADS, settings)}
        sums = {"crude": crude, "true": total}
        for name, share in (("margin", 0.01), ("all", 1.0)):
            sums[name] = refine_sum(data, hulls["crude"].nearest, RefinementSettings("margin", margin=share))
        found = {}
        for name, one in sums.items():
            hull = hulls.get(name) or find_hull(data, one, HEADS, settings)
            lost = measure_span_error(span_of(hull), np.asarray(layer.theta))
            error = float(np.linalg.norm(one - total) / np.linalg.norm(total))
            found[f"span_{name}"] = ((), lost, f"{OUTSIDE}, {SUMS[name]}")
            found[f"sum_{name}"] = ((), error, f"relative error of the {SUMS[name]}")
        return found

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        full, most = trained.isel(rank=-1, drop=True), trained.isel(count=-1, drop=True)
        apart = "a quarter: the two laws' powers, 0 and -1, are four of them apart"
        falls = "The sum from the rows of the largest margin halves the error of the crude hull's span"
        power = theory["power"]

        def with_examples(name: str) -> st.Figure:
            return st.exponent(full[f"span_{name}"].rename(SUMS[name]), "count", what=OUTSIDE)

        def gain(name: str) -> st.Figure:
            last = most.isel(rank=-1)
            return st.log_ratio(last["span_crude"], last[f"span_{name}"], quantity="fall of the error (ln)")

        text = "At full stable rank the error of the crude hull's span does not fall with the number of examples"
        quantity = "power of the number of examples"
        yield st.Claim(text, with_examples("crude"), st.near(power.sel(sum="crude"), (0.25, math.inf)), apart, quantity)
        yield st.Claim(
            "With the most examples the error of the crude hull's span does not fall with the stable rank",
            st.exponent(most["span_crude"], "rank").value,
            st.near(0, (0.25, math.inf)),
            "half of the power 1/2 of the crude sum's error in operator norm",
            "power of the stable rank",
        )
        text = f"{falls}, at full stable rank"
        basis = "an inequality: the logarithm of the ratio of errors is above ln 2"
        yield st.Claim(text, gain("margin"), st.above(math.log(2)), basis)
        region, quantity = st.near(power.sel(sum="true"), 0.25), "power of the number of examples"
        text = "With the rows of the largest margin the error falls with the number of examples"
        yield st.Claim(text, with_examples("margin"), st.below(-0.25), apart, quantity)
        text = "With the true sum the error falls as the inverse of the number of examples"
        yield st.Claim(text, with_examples("true"), region, apart, quantity)
        text = "Control: the same regression on all rows does not halve the error"
        basis = "an inequality: the logarithm of the ratio of errors is below ln 2"
        yield st.Claim(text, gain("all"), st.below(math.log(2)), basis)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        most = trained.isel(count=-1, drop=True)
        spans = {words: most[f"span_{name}"] for name, words in SUMS.items()}
        title = "Error of the span against stable rank, most examples"
        shows = ("With the most examples",)
        yield st.lines(title, "rank", OUTSIDE, spans, x_label="stable rank", log="xy", shows=shows)

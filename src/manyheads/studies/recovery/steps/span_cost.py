"""`recovery/span-cost`: examples and operations that the span takes, against dimension, length and heads.

Stages four and five are run on ever more examples, with the true sum of projections, so that nothing but the number of
rows in which the heads agree limits them. Operations are counted from the shapes of what is computed. Tokens are
normal: short Boolean ones repeat, and ties among the best rows are another matter.
"""

import math
from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery import evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.theory.papers import CHEN_LI

KEPT = 16  # rows that are kept, for each of the d^2 entries
REWEIGHINGS = 2
OUTSIDE = "share of an attention matrix outside the span"


class SpanCost(st.Study):
    """Examples for the span grow as d^2, and as a power of the inverse error that rises with length and heads."""

    name = "recovery/span-cost"
    claim = "Examples for the span grow as d^2, and faster with length and heads"
    source = CHEN_LI.at("time (dk)^O(m^3) of the main theorem; powers derived here")

    dims: tuple[int, ...] = st.sweep(
        (6, 8, 12, 16), "token dimensions d, for two tokens and two heads", least=2, small=(3, 4), full=(8, 12, 16, 24)
    )
    shapes: tuple[tuple[int, int], ...] = st.setting(
        ((2, 2), (3, 2), (4, 2), (2, 3)),
        "lengths and heads (k, m) in the least dimension but one",
        small=((2, 2), (3, 2)),
    )
    counts: tuple[int, ...] = st.sweep(
        (2000, 4000, 8000, 16_000, 32_000),
        "sequences",
        least=2,
        small=(800, 1600),
        full=(4000, 16_000, 64_000, 256_000),
    )
    wanted: float = st.setting(
        0.05, "error of the span whose examples are compared between dimensions", above=0, below=1, small=0.2
    )

    def check(self) -> None:
        if self.shapes[:1] != ((2, 2),) or any(min(shape) < 2 for shape in self.shapes):
            raise st.UsageError(f"shapes={self.shapes}: give (2, 2) first, then lengths and heads from 2 on")

    def cells(self) -> tuple[st.Cell, ...]:
        """Return every dimension for two tokens and heads, every other shape, and the control."""
        shapes = [(dim, 2, 2) for dim in self.dims] + [(self.dims[1], *shape) for shape in self.shapes[1:]]
        planted = [st.Cell(labels="planted", dim=dim, tokens=length, heads=heads) for dim, length, heads in shapes]
        return (*planted, st.Cell(labels="shuffled", dim=self.dims[1], tokens=2, heads=2))

    def predict(self, key: st.Key) -> st.Record:
        """Return the powers of error and dimension.

        m heads agree in the k - 1 free weights of a row to epsilon with a probability of order epsilon^((k-1)(m-1)), so
        that the worst of a fixed number of the best of N rows is off by N^(-1/((k-1)(m-1))). The rows that are kept are
        proportional to the d^2 entries of a matrix, and the probability does not depend on d.
        """
        powers = [-1 / ((length - 1) * (heads - 1)) for length, heads in self.shapes]
        return {
            "error_power": ("shape", powers, "power of the examples in the span's error"),
            "dim_power": ((), 2.0, "power of the dimension in the examples"),
        }

    def train(self, key: st.Key, labels: str, dim: int, tokens: int, heads: int) -> st.Record:
        rng = st.generator(key)
        layer = planted_layer(rng, dim, heads)
        x = sequences(rng, self.counts[-1], tokens, dim, distribution="gaussian")
        y = evaluate_layer(layer, x)
        if labels == "shuffled":
            y = rng.permutation(y)
        total, theta = np.asarray(layer.projection).sum(0), np.asarray(layer.theta)
        settings = HullSettings(kept=max(KEPT * dim**2 // (tokens - 1), 1), reweighings=REWEIGHINGS)
        errors = [
            measure_span_error(span_of(find_hull(open_shards((x[:count], y[:count])), total, heads, settings)), theta)
            for count in self.counts
        ]
        return {"error": ("count", errors, OUTSIDE), "count": ("count", list(self.counts), "examples")}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        error = trained["error"]
        needed = examples_for(self.wanted, _pairs(trained))
        yield st.Claim(
            f"The examples that bring the span within {self.wanted:g} grow as d^2",
            st.exponent(needed, "dim", what=f"examples for an error of {self.wanted:g}"),
            st.near(theory["dim_power"], 0.5),
            "neither d nor d^3: half of the distance to them",
            "power of the dimension d",
        )
        yield st.Claim(
            "The operations on so many examples grow as d^6 at most: normal equations of d^2 unknowns",
            st.exponent(count_operations(needed, needed["dim"], 2), "dim", what="multiply-adds on so many examples"),
            st.below(6),
            "rows are kept in proportion to d^2, and each costs d^4; an eigenproblem of d^2 costs d^6",
            "power of the dimension d",
        )
        at_base = error.sel(dim=self.dims[1], drop=True)
        for place, (length, heads) in enumerate(self.shapes):
            one = at_base.sel(labels="planted", tokens=length, heads=heads, drop=True)
            yield st.Claim(
                f"For {length} tokens and {heads} heads the examples grow no faster than the power "
                f"{(length - 1) * (heads - 1)} of the inverse error",
                st.exponent(one.rename(f"k = {length}, m = {heads}"), "count", what=OUTSIDE),
                st.near(theory["error_power"][place], (math.inf, 0.1)),
                "saturated rows agree more cheaply than the limit says, which makes the error fall faster; a tenth for "
                "the scatter of the best rows",
                "power of the number of examples in the error",
            )
        yield st.Claim(
            "Control: from shuffled labels no number of examples gives the span",
            at_base.sel(labels="shuffled", tokens=2, heads=2).isel(count=-1),
            st.near(1, (0.5, math.inf)),
            "two random directions of d^2 leave nearly all outside; half of it",
            "share of an attention matrix outside the span, most examples",
            bounds=(0.0, 1.0),
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        curves = {f"d = {dim}": _pairs(trained).sel(dim=dim) for dim in self.dims}
        title = "Error of the span by examples and dimension, two tokens and heads"
        yield st.lines(title, "count", OUTSIDE, curves, log="xy", shows=("grow as d^2",))


def _pairs(trained: st.Data) -> xr.DataArray:
    return trained["error"].sel(labels="planted", tokens=2, heads=2, drop=True)


def examples_for(wanted: float, errors: xr.DataArray) -> xr.DataArray:
    """Return the examples at which the power law fitted to errors along `count` reaches the wanted one."""
    logs, place = st.log(errors), st.log(errors["count"])
    centred = place - place.mean()
    slopes = (logs * centred).sum("count") / (centred**2).sum()
    return xr.DataArray(np.exp(place.mean() + (math.log(wanted) - logs.mean("count")) / slopes))


def count_operations(count: Any, dim: Any, length: int) -> Any:
    """Return the multiply-adds of stages four and five on so many sequences, to leading order in d.

    Certificates project every token, k d^2 a sequence. Every weighing forms the Gram matrix of (k-1) equations for each
    kept row, of d^2 + 1 unknowns, and solves its eigenproblem, 4/3 of the cube.
    """
    unknowns = dim**2 + 1
    equations = KEPT * dim**2 // (length - 1) * (length - 1)
    return count * length * dim**2 + (REWEIGHINGS + 1) * (equations * unknowns**2 + 4 / 3 * unknowns**3)

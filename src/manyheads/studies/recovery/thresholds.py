"""`recovery/thresholds`: each assumption weakened until the span is lost, beside the stated bound of its diagnostic.

Seven families of layers give up one assumption each. The stages up to the span run along each of them; the span counts
as lost where more than half of an attention matrix lies outside. There the diagnostic of the assumption is read, and
held against the bound at which `manyheads.recovery.assumptions` warns.
"""

import math

import numpy as np
from numpy.typing import NDArray

import manyheads.study as st
from manyheads.attention import AttentionLayer
from manyheads.recovery import RecoveryRefused, assumptions, evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.planted.violations import WEAKENINGS, weakened_layer
from manyheads.study.verdicts import Expected
from manyheads.theory.papers import CHEN_LI

LOST = 0.5  # share of an attention matrix outside the span at which it counts as lost
REFINEMENT = RefinementSettings(sequences=1000, steps=3, inner=12)
KEPT = ("coherence", "rank", "lattice")
"""Assumptions whose violation does not lose the span: close heads, rank one and lattices. Other stages need them."""

STATED: dict[str, Expected] = {"cancellation": "holds", "diagonal": "holds", "column": "holds", "norms": "refuted"}
"""Whether the bound at which the diagnostic warns is the threshold, within a factor of two, of those that have one."""


class Thresholds(st.Study):
    """The span of the attention matrices is lost at a measured threshold of four assumptions and kept without three."""

    name = "recovery/thresholds"
    claim = "Each assumption weakened until the span is lost, beside its stated bound"
    source = CHEN_LI.at("assumptions of the main theorem; how they are weakened is ours")
    grid = {"assumption": WEAKENINGS}  # all start from the same layers and see the same sequences

    strengths: tuple[float, ...] = st.sweep(
        (0.0, 0.3, 0.5, 0.7, 0.9, 0.97, 0.995), "strengths of the violation", least=0, below=1, small=(0.0, 0.9)
    )
    dim: int = st.setting(8, "token dimension d", least=2, small=4, full=16)
    count: int = st.setting(5000, "sequences of two tokens", least=100, small=1500, full=100_000)
    scale: float = st.setting(2.0, "standard deviation of the logits before anything is weakened", above=0)

    def check(self) -> None:
        if self.strengths[0] != 0:
            raise st.UsageError(f"strengths={self.strengths}: the first must be zero")

    def predict(self, key: st.Key) -> st.Record:
        found = assumptions(planted_layer(np.random.default_rng(0), self.dim, 2, scale=self.scale))
        ranges = [found[one.diagnostic] for one in WEAKENINGS.values()]
        upper = [math.isfinite(one.high) for one in ranges]
        bounds = [one.high if above else one.low for one, above in zip(ranges, upper, strict=True)]
        return {
            "bound": ("assumption", bounds, "bound of the diagnostic"),
            "upper": ("assumption", upper, "whether the bound is an upper one", None),
        }

    def train(self, key: st.Key, assumption: str) -> st.Record:
        rng, errors, figures = st.generator(key), [], []
        layer = planted_layer(rng, self.dim, 2, scale=self.scale)
        x = sequences(rng, self.count, 2, self.dim)
        for strength in self.strengths:
            weak = weakened_layer(layer, assumption, strength)
            errors.append(lose_span(weak, x))
            figures.append(assumptions(weak)[WEAKENINGS[assumption].diagnostic].value)
        return {
            "strength": ("strength", list(self.strengths), "strength of the violation"),
            "error": ("strength", errors, "share of an attention matrix outside the span"),
            "figure": ("strength", figures, "diagnostic of the assumption"),
            "threshold": ((), find_threshold(errors, figures), "diagnostic where the span is lost"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        yield st.Claim(
            "Where no assumption is weakened the span is kept in every replicate",
            trained["error"].sel(assumption="rank").isel(strength=0).max(),
            st.near(0, (0, LOST)),
            "a span that is lost has an error of one half",
            "largest share outside the span",
        )
        for name, one in WEAKENINGS.items():
            yield st.Claim(
                f"The span is lost in the end: {one.title}",
                trained["error"].sel(assumption=name).isel(strength=-1),
                st.above(LOST),
                "an inequality: more than half of an attention matrix lies outside",
                "share of an attention matrix outside the span, strongest violation",
                "refuted" if name in KEPT else "holds",
                bounds=(0.0, 1.0),
            )
        for name, expected in STATED.items():
            yield st.Claim(
                f"The span is lost where the {WEAKENINGS[name].diagnostic} warns, within a factor of two",
                st.log(trained["threshold"].clip(1e-9) / theory["bound"]).sel(assumption=name),
                st.near(0, math.log(2)),
                "the bounds are stated to one digit, from layers that violate one assumption each",
                "diagnostic where the span is lost, over its bound (ln)",
                expected,
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        errors = {one.title: trained["error"].sel(assumption=name) for name, one in WEAKENINGS.items()}
        labels = "Error of the span as each assumption is weakened", "strength", "share outside the span"
        yield st.lines(*labels, errors, note="Bands reach over replicates.", shows=("The span is lost",))

        def row(name: str) -> dict[str, str]:
            bound, found = theory.sel(assumption=name), trained.sel(assumption=name)
            lost = found["error"].max("strength") >= LOST
            threshold = float(found["threshold"].where(lost).median())
            last = found.isel(strength=-1).mean("replicate")
            return {
                "diagnostic": WEAKENINGS[name].diagnostic,
                "violation": WEAKENINGS[name].title,
                "stated": f"{'at most' if bool(bound['upper']) else 'at least'} {float(bound['bound']):.3g}",
                "span lost at": "none" if math.isnan(threshold) else f"{threshold:.3g}",
                "figure in the end": f"{float(last['figure']):.3g}",
                "error in the end": f"{float(last['error']):.2g}",
                "lost": f"{int(lost.sum())} of {lost.size}",
            }

        yield st.table("Thresholds", map(row, WEAKENINGS), "Medians over the replicates in which the span is lost.")


def lose_span(layer: AttentionLayer, x: NDArray[np.float64]) -> float:
    """Return the error of the span after the practical stages; one where they refuse."""
    data = open_shards((x, evaluate_layer(layer, x)))
    try:
        total = refine_sum(data, None, REFINEMENT)
        return measure_span_error(span_of(find_hull(data, total, 2, HullSettings())), np.asarray(layer.theta))
    except RecoveryRefused:
        return 1.0


def find_threshold(errors: list[float], figures: list[float]) -> float:
    """Return the diagnostic where the span is first lost, interpolated; its last figure where it is kept."""
    lost = [place for place, error in enumerate(errors) if error >= LOST]
    if lost and lost[0]:
        before, after = lost[0] - 1, lost[0]
        share = (LOST - errors[before]) / (errors[after] - errors[before])
        return float(figures[before] + share * (figures[after] - figures[before]))
    return float(figures[0 if lost else -1])

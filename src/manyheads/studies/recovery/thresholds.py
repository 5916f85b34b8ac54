"""`recovery/thresholds`: each assumption weakened until the span is lost, beside the stated bound of its diagnostic.

Seven families of layers give up one assumption each. The stages up to the span run along each of them; the span counts
as lost where more than half of an attention matrix lies outside. There the diagnostic of the assumption is read, and
held against the bound at which `manyheads.recovery.assumptions` warns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.examples.stages.span import measure_span_error, span_of
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.diagnostics import assumptions
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.recovery.planted.weakened import WEAKENINGS, weakened_layer
from manyheads.recovery.refusals import RecoveryRefused
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.verdicts import Expected
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

LOST = 0.5  # share of an attention matrix outside the span at which it counts as lost
REFINEMENT = RefinementSettings(sequences=1000, steps=3, inner=12)
BREAKS: dict[str, Expected] = {
    "coherence": "refuted",
    "cancellation": "holds",
    "rank": "refuted",
    "diagonal": "holds",
    "column": "holds",
    "norms": "holds",
    "lattice": "refuted",
}
"""Whether the span is lost in the end. Close heads, rank one and lattices do not lose it: other stages need those."""

STATED: dict[str, Expected] = {"cancellation": "holds", "diagonal": "holds", "column": "holds", "norms": "refuted"}
"""Whether the bound at which the diagnostic warns is the threshold, within a factor of two, of those that have one."""


@dataclass(frozen=True)
class Thresholds(Study):
    """The span of the attention matrices is lost at a measured threshold of four assumptions, and kept without three.

    Attributes
    ----------
    strengths
        Strengths of the violation, from zero, rising, below one.
    dim
        Token dimension d.
    count
        Sequences of two tokens.
    scale
        Standard deviation of the logits before anything is weakened.
    """

    name: ClassVar[str] = "recovery/thresholds"
    claim: ClassVar[str] = "Each assumption weakened until the span is lost, beside its stated bound"
    source: ClassVar[Source] = replace(CHEN_LI, locus="assumptions of the main theorem; how they are weakened is ours")

    strengths: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.9, 0.97, 0.995)
    dim: int = 8
    count: int = 5000
    scale: float = 2.0

    def __post_init__(self) -> None:
        rising = list(self.strengths) == sorted(set(self.strengths))
        if len(self.strengths) < 2 or not rising or self.strengths[0] != 0 or self.strengths[-1] >= 1:
            raise UsageError(f"strengths={self.strengths}: give zero and more, rising, below one")
        if self.dim < 2 or self.count < 100 or not self.scale > 0:
            raise UsageError(f"dim={self.dim}, count={self.count}, scale={self.scale}: from 2, from 100, positive")

    @classmethod
    def full(cls) -> Thresholds:
        """Return the study in 16 dimensions, with 100,000 sequences."""
        return cls(dim=16, count=100_000)

    @classmethod
    def small(cls) -> Thresholds:
        """Return the smallest configuration in which every claim can change."""
        return cls(strengths=(0.0, 0.9), dim=4, count=1500)

    def cells(self) -> tuple[Cell, ...]:
        """Return every assumption; they start from the same layers and see the same sequences."""
        return grid(assumption=tuple(WEAKENINGS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the bound of every diagnostic, and whether it is an upper one."""
        rng = np.random.default_rng(0)
        found = assumptions(planted_layer(rng, self.dim, 2, scale=self.scale))
        ranges = [found[one.diagnostic] for one in WEAKENINGS.values()]
        upper = [math.isfinite(one.high) for one in ranges]
        bounds = [one.high if above else one.low for one, above in zip(ranges, upper, strict=True)]
        return xr.Dataset(
            {
                "bound": ("assumption", bounds, label("bound of the diagnostic")),
                "upper": ("assumption", upper, {"long_name": "whether the bound is an upper one"}),
            },
            coords={"assumption": list(WEAKENINGS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Weaken one assumption step by step, and measure the span's error and the diagnostic."""
        rng, name = generator(key), str(cell["assumption"])
        layer = planted_layer(rng, self.dim, 2, scale=self.scale)
        x = sequences(rng, self.count, 2, self.dim)
        errors, figures = [], []
        for strength in self.strengths:
            weak = weakened_layer(layer, name, strength)
            errors.append(self._lose(weak, x))
            figures.append(assumptions(weak)[WEAKENINGS[name].diagnostic].value)
        return xr.Dataset(
            {
                "error": ("strength", errors, label("share of an attention matrix outside the span")),
                "figure": ("strength", figures, label("diagnostic of the assumption")),
                "threshold": ((), self._cross(errors, figures), label("diagnostic where the span is lost")),
            },
            coords={"strength": list(self.strengths)},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Say which assumptions the span needs, and whether it is lost at the bounds of their diagnostics."""

        def last(name: str) -> Measure:
            return lambda predicted, trained: of_cell(trained, "error", assumption=name)[:, -1]

        def ratio(name: str) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Array:
                bound = float(predicted["bound"].sel(assumption=name))
                return np.log(np.maximum(of_cell(trained, "threshold", assumption=name), 1e-9) / bound)

            return measure

        infinite = math.inf
        kept = Claim(
            "Where no assumption is weakened the span is kept in every replicate",
            lambda predicted, trained: float(of_cell(trained, "error", assumption="rank")[:, 0].max()),
            quantity="largest share outside the span",
            target=0.0,
            tolerance=(0.0, LOST),
            basis="a span that is lost has an error of one half",
        )
        lost = [
            Claim(
                f"The span is lost in the end: {one.title}",
                last(name),
                quantity="share of an attention matrix outside the span, strongest violation",
                bounds=(0.0, 1.0),
                target=LOST,
                tolerance=(0.0, infinite),
                expected=BREAKS[name],
                basis="an inequality: more than half of an attention matrix lies outside",
            )
            for name, one in WEAKENINGS.items()
        ]
        stated = [
            Claim(
                f"The span is lost where the {WEAKENINGS[name].diagnostic} warns, within a factor of two",
                ratio(name),
                quantity="diagnostic where the span is lost, over its bound (ln)",
                target=0.0,
                tolerance=math.log(2),
                expected=STATED[name],
                basis="the bounds are stated to one digit, from layers that violate one assumption each",
            )
            for name in STATED
        ]
        return (kept, *lost, *stated)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss of the span along each family, and the thresholds beside the bounds."""
        curves = tuple(
            spread_curve(self.strengths, of_cell(trained, "error", assumption=name), one.title, group=group)
            for group, (name, one) in enumerate(WEAKENINGS.items())
        )
        rows = []
        for name, one in WEAKENINGS.items():
            errors, found = (of_cell(trained, what, assumption=name) for what in ("error", "threshold"))
            crossed = errors.max(1) >= LOST
            bound = predicted.sel(assumption=name)
            stated = f"{'at most' if bool(bound['upper']) else 'at least'} {float(bound['bound']):.3g}"
            measured = f"{np.median(found[crossed]):.3g}" if crossed.any() else "none"
            ends = of_cell(trained, "figure", assumption=name)[:, -1].mean()
            shown = (f"{ends:.3g}", f"{errors[:, -1].mean():.2g}", f"{crossed.sum()} of {crossed.size}")
            rows.append((one.diagnostic, one.title, stated, measured, *shown))
        columns = ("diagnostic", "violation", "stated", "span lost at", "figure in the end", "error in the end", "lost")
        return (
            Lines(
                "Error of the span as each assumption is weakened",
                "strength of the violation",
                "share outside the span",
                curves,
                note="Bands reach over replicates.",
                shows=("The span is lost",),
            ),
            Listing("Thresholds", columns, tuple(rows), "Medians over the replicates in which the span is lost."),
        )

    def _lose(self, layer: AttentionLayer, x: Array) -> float:
        """Return the error of the span after the practical stages; one where they refuse."""
        data = open_shards((x, evaluate_layer(layer, x)))
        try:
            total = refine_sum(data, None, REFINEMENT)
            return measure_span_error(span_of(find_hull(data, total, 2, HullSettings())), np.asarray(layer.theta))
        except RecoveryRefused:
            return 1.0

    def _cross(self, errors: list[float], figures: list[float]) -> float:
        """Return the diagnostic where the span is first lost, interpolated; its last figure where it is kept."""
        lost = [place for place, error in enumerate(errors) if error >= LOST]
        if lost and lost[0]:
            before, after = lost[0] - 1, lost[0]
            share = (LOST - errors[before]) / (errors[after] - errors[before])
            return float(figures[before] + share * (figures[after] - figures[before]))
        if lost:
            return float(figures[0])
        return float(figures[-1])

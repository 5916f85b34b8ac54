"""`joma/rebound`: drop and rebound of attention entropy and stable rank (figures 4 and 7).

In the flows components saturate at different rates, at one rate, or not at all. The networks are one layer of attention
under an MLP, trained by SGD: on a regression, whose targets are finite, and by cross-entropy, whose targets are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.curves.drop_and_rise import drop_and_rise
from manyheads.errors import UsageError
from manyheads.spectra import traced_stable_rank
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.systems.components import DYNAMICS, relax_layer
from manyheads.theory.joma.systems.rebound_networks import (
    COMPONENTS,
    HORIZONS,
    RANDOM_HORIZONS,
    RECORDS,
    SALIENCES,
    blowup_fractions,
    draw_layer,
    record_times,
    straight_layers,
    target_entropies,
    train_classification,
    train_regression,
)
from manyheads.theory.joma.theorems.rebound import (
    REBOUND,
    entropy_curve,
    entropy_of,
    linear_entropy_curve,
    predict_approach,
)
from manyheads.theory.joma.theorems.salient_first import EXP, REGRESSION, UNIFORM
from manyheads.theory.papers import TIAN

SYSTEMS = {
    **{name: f"flow: {label}" for name, label in DYNAMICS.items()},
    "regression": "trained: regression",
    "classification": "trained: classification",
}
RISE = 0.05  # smallest change of the stable rank that counts


@dataclass(frozen=True)
class Rebound(Study):
    """Drop and rise of entropy and stable rank in flows with and without attention, and in trained networks.

    Attributes
    ----------
    vectors
        Random vectors of targets in each replicate: 2 to 19 components, uniform in [0.5, 3].
    resolution
        Learning rate of the regression times the final rate of its fastest component.
    steps
        Updates of the classification.
    """

    name: ClassVar[str] = "joma/rebound"
    claim: ClassVar[str] = "Attention entropy and stable rank drop, then rebound, as components saturate"
    source: ClassVar[Source] = replace(TIAN, locus="section 4, figures 4 and 7; the conditions are derived here")
    revision: ClassVar[int] = 3
    # Not vectorized: its flows and networks are compiled once for all cells and replicates.
    vectors: int = 240
    resolution: float = 0.25
    steps: int = 6000

    def __post_init__(self) -> None:
        if self.vectors < 2 or not 0 < self.resolution <= 0.5 or self.steps < RECORDS:
            raise UsageError(
                f"vectors={self.vectors}, resolution={self.resolution}, steps={self.steps}: expected 2 or more, a "
                f"number in (0, 0.5], and {RECORDS} or more"
            )

    @classmethod
    def full(cls) -> Rebound:
        """Return the study with four times the vectors, and a regression at a quarter of the learning rate."""
        return cls(vectors=960, resolution=0.0625, steps=24000)

    @classmethod
    def small(cls) -> Rebound:
        """Return the smallest configuration in which every claim can change."""
        return cls(vectors=2, resolution=0.5, steps=96)

    def cells(self) -> tuple[Cell, ...]:
        """Return the systems."""
        return grid(system=tuple(SYSTEMS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the side from which the entropy of each system approaches its limit (-1: it rebounds), and curves.

        The curves are exact, for one vector of targets at equal distances; of the trained networks, the regression has
        finite targets and its own rate law, and the cross-entropy has none, as a linear activation has none.
        """
        targets = np.linspace(*SALIENCES, COMPONENTS)
        linear = linear_entropy_curve(targets, blowup_fractions())
        above = int(np.sign(linear[-2] - linear[-1]))  # decreasing to the end
        laws = {"exp": EXP, "softmax": EXP, "uniform": UNIFORM, "regression": REGRESSION}
        sides = [predict_approach(targets, laws[name]) if name in laws else above for name in SYSTEMS]
        curves = [entropy_curve(targets, record_times(RANDOM_HORIZONS["exp"]), law) for law in (EXP, UNIFORM)]
        path, label = np.stack([*curves, linear]), "attention entropy of one vector of targets"
        return dataset(
            {
                "side": ("system", sides, "side from which entropy approaches its limit"),
                "reference_entropy": (("dynamics", "record"), path, label, "nat"),
            },
            coords={
                "system": list(SYSTEMS),
                "dynamics": ["exp", "uniform", "linear"],
                "record": (np.arange(RECORDS + 1), "record"),
            },
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Run one system; measure its entropy, stable rank, and the share of entropies that rebound."""
        system, rng = str(cell["system"]), np.random.default_rng(np.asarray(jax.random.key_data(key)))
        entropies, line_error, rising, agreement = np.zeros((0, RECORDS + 1)), np.nan, np.nan, np.nan
        if system in DYNAMICS:
            entropies = target_entropies(system, self.vectors, rng)
            target, init = draw_layer(rng)
            weights = relax_layer(target, init, record_times(HORIZONS[system]), system)  # type: ignore[arg-type]
            logits = (weights**2).sum(1) / 2
            if system == "uniform":
                passed = -np.expm1(-record_times(HORIZONS[system]))[:, None, None]
                line_error = np.abs(weights - init - passed * (target - init)).max()
                rising, agreement = straight_layers(rng, self.vectors)
        else:
            logits, weights = (
                train_regression(self.resolution, rng)
                if system == "regression"
                else train_classification(self.steps, rng)
            )
        entropy, rank = (np.asarray(curve) for curve in _curves(logits, weights))
        measured = drop_and_rise(entropies if len(entropies) else entropy)
        (drop, rise, _), (rank_drop, rank_rise, _) = (drop_and_rise(curve) for curve in (entropy, rank))
        share, size = (measured.rise > REBOUND).mean(), measured.rise.mean()
        return dataset(
            {
                "entropy": ("record", entropy, "attention entropy", "nat"),
                "stable_rank": ("record", rank, "stable rank of the lower layer"),
                "rebounded": ((), share, f"share of entropies that rebound by {REBOUND:g} nat"),
                "mean_rise": ((), size, "mean rise of the entropy", "nat"),
                "drop": ((), drop, "drop of the layer's entropy", "nat"),
                "rise": ((), rise, "rise of the layer's entropy", "nat"),
                "rank_drop": ((), rank_drop, "drop of the stable rank"),
                "rank_rise": ((), rank_rise, "rise of the stable rank"),
                "line_error": ((), line_error, "distance of the weights from a straight line"),
                "rising": ((), rising, "share of layers without attention whose stable rank rises"),
                "agreement": ((), agreement, "share of layers whose final slope has the predicted sign"),
            },
            coords={"record": (np.arange(RECORDS + 1), "record")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test shares of rebounds, the sign pattern of the stable rank, and the two networks."""

        def figure(system: str, name: str) -> Measure:
            return lambda predicted, trained: select_cell(trained, system=system)[name].values

        def expected_below(system: str) -> Callable[[xr.Dataset], Expected]:
            return lambda predicted: "holds" if system in _systems(predicted, -1) else "refuted"

        def largest_share(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            flows = [name for name in _systems(predicted, 1) if name in DYNAMICS]
            return float(
                np.abs(np.concatenate([select_cell(trained, system=name)["rebounded"].values for name in flows])).max()
            )

        def difference(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            shares = (select_cell(trained, system=name)["rebounded"].values for name in ("exp", "softmax"))
            return float(np.abs(np.subtract(*shares)).max())

        def smallest(systems: Callable[[xr.Dataset], list[str]], *names: str) -> Measure:
            return lambda predicted, trained: float(
                min(
                    select_cell(trained, system=system)[name].values.min()
                    for system in systems(predicted)
                    for name in names
                )
            )

        def attended(predicted: xr.Dataset) -> list[str]:
            return [name for name in _systems(predicted, -1) if name in DYNAMICS]

        def relative_rise(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = select_cell(trained, system="classification")
            return found["rise"].values / found["drop"].values

        infinite = float("inf")
        return (
            Claim(
                f"Under exp attention the entropy rebounds by {REBOUND:g} nat for 97% of random targets",
                figure("exp", "rebounded"),
                quantity="share of targets that rebound",
                bounds=(0.0, 1.0),
                target=0.97,
                tolerance=(0.03, infinite),
                expected=expected_below("exp"),
                resolution=1e-9,
                basis="97% +- 3%: at least 94%, as no share exceeds one; all rebound unless their targets are equal, "
                "and the share below this size was measured once",
            ),
            Claim(
                "Without attention, and under a linear activation, no entropy rebounds",
                largest_share,
                quantity="largest share of targets that rebound",
                target=0.0,
                tolerance=1e-12,
                basis="entropy decreases while larger logits grow faster: proved for both",
            ),
            Claim(
                "Entropy rebounds for the same targets under softmax and exp attention",
                difference,
                quantity="difference of the shares that rebound",
                target=0.0,
                tolerance=2.5 / self.vectors,
                basis="the minimum may lie between records: two vectors at the edge of the level",
            ),
            Claim(
                "With attention the stable rank of the lower layer drops and rebounds",
                smallest(attended, "rank_rise", "rank_drop"),
                quantity="smallest drop or rise of the stable rank",
                target=RISE,
                tolerance=(0.0, infinite),
                basis="a sign: the smallest drop and rise over all replicates are far from zero",
            ),
            Claim(
                "Without attention the lower layer moves on a straight line",
                lambda predicted, trained: float(select_cell(trained, system="uniform")["line_error"].max()),
                quantity="relative distance from the line",
                target=0.0,
                tolerance=1e-6,
                basis="one rate for all weights; the integrator has errors of 1e-8 per step",
            ),
            Claim(
                "Without attention the stable rank never rises",
                figure("uniform", "rising"),
                quantity="share of targets with a rising stable rank",
                bounds=(0.0, 1.0),
                target=0.0,
                tolerance=0.1,
                resolution=1e-9,
                expected="refuted",
                basis="in theory half of the layers rise at the end, as the initialization is symmetric; a tenth is "
                "far from half",
            ),
            Claim(
                "Without attention the final slope of the stable rank has the sign of u^T W v/sigma_1 - <B, W>/|B|^2 "
                "at the initialization W",
                lambda predicted, trained: float(select_cell(trained, system="uniform")["agreement"].min()),
                quantity="share of targets with the predicted sign",
                target=1.0,
                tolerance=1.5 / self.vectors,
                basis="the sign of the slope at the end of a straight line; one layer of a replicate may be too close",
            ),
            Claim(
                "In a network trained on a regression entropy and stable rank drop and rebound",
                smallest(lambda predicted: ["regression"], "drop", "rise", "rank_drop", "rank_rise"),
                quantity="smallest drop or rise",
                target=0.02,
                tolerance=(0.0, infinite),
                expected=expected_below("regression"),
                basis="a sign, beyond the noise of the batches",
            ),
            Claim(
                "In a network trained by cross-entropy the entropy rebounds by a tenth of its drop",
                relative_rise,
                quantity="rise over drop of the entropy",
                target=0.1,
                tolerance=(0.0, infinite),
                basis="the noise of the batches is some hundredths; rebounds of the flows are a third or more",
                expected=expected_below("classification"),
            ),
            Claim(
                "In a network trained by cross-entropy the entropy drops by a quarter of a nat",
                figure("classification", "drop"),
                quantity="drop of the attention entropy (nat)",
                target=0.25,
                tolerance=(0.0, infinite),
                basis="a sign: the missing rebound is not that of attention that does not change",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropies and stable ranks, the predicted entropy, and a table of drops and rises."""
        steps = np.arange(RECORDS + 1) / RECORDS
        shown: list[Panel] = []
        for title, name, label, claims in (
            ("Attention entropy", "entropy", "entropy [nat]", ("Entropy rebounds for the same", "by a tenth of its")),
            (
                "Stable rank of the lower layer",
                "stable_rank",
                "stable rank",
                ("the lower layer drops and rebounds", "on a regression"),
            ),
        ):
            for part, systems in (("flows", tuple(DYNAMICS)), ("trained networks", ("regression", "classification"))):
                curves = tuple(
                    spread_curve(steps, select_cell(trained, system=system)[name].values, SYSTEMS[system], group=group)
                    for group, system in enumerate(systems)
                )
                axis = "share of the records, logarithmic in time" if part == "flows" else "share of the records"
                note = "Bands range over replicates. Records are fractions of the time of each system."
                shows = claims[part == "trained networks" :][:1]
                shown.append(Lines(f"{title}: {part}", axis, label, curves, note=note, shows=shows))
        rows = tuple(
            (label, *(f"{float(select_cell(trained, system=system)[name].mean()):.3g}" for name in COLUMNS))
            for system, label in SYSTEMS.items()
        )
        note = "Share and rise of random target vectors, if any; then entropy and stable rank of the layer."
        curves = tuple(
            spread_curve(steps, values[None], SYSTEMS[name], "predicted", group)
            for group, (name, values) in enumerate(
                zip(predicted["dynamics"].values.tolist(), predicted["reference_entropy"].values, strict=True)
            )
        )
        level = "Exact theory for targets at equal distances; the linear activation in fractions of its blow-up time."
        shown.append(Lines("Predicted attention entropy", "share of the records", "entropy [nat]", curves, note=level))
        return (
            *shown,
            Listing("Drops and rises, means over replicates", ("system", *COLUMNS.values()), rows, note=note),
        )


COLUMNS = {
    "rebounded": "share with rebound",
    "mean_rise": "mean rise",
    "drop": "entropy drop",
    "rise": "entropy rise",
    "rank_drop": "rank drop",
    "rank_rise": "rank rise",
}


@jax.jit
def _curves(logits: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return entropy and stable rank in time, of logits (T, M) and weights (T, K, M)."""
    return entropy_of(logits), traced_stable_rank(weights)


def _systems(predicted: xr.Dataset, side: int) -> list[str]:
    """Return the systems whose entropy theory has approach its limit from this side."""
    return predicted["system"].values[predicted["side"].values == side].tolist()

"""`joma/scan-and-snap`: attention logits of Scan and Snap, beside their reduced trajectory and the gain law.

The gradient flow of all attention logits and the whole decoder is integrated for random co-occurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.joma.systems.one_layer_attention import Cooccurrence, make_cooccurrence, scan_and_snap_flow
from manyheads.theory.joma.theorems.scan_and_snap import (
    reduced_trajectory,
    relative_gain,
    relative_gain_law,
    training_time,
)

EARLY = (0.2, 0.4, 0.8)  # progress at which the order of the error of the gain law is fitted
ROUNDING = 1e-9  # error of a logit at local errors of 1e-11 of the integrator


@dataclass(frozen=True)
class ScanAndSnap(Study):
    """Logits of common and distinct tokens under gradient flow at several ratios of the learning rates.

    Attributes
    ----------
    learning_rate_ratios
        Learning rates of the attention over that of the decoder.
    classes
        Next tokens.
    distinct, common
        Distinct tokens of each next token, and tokens that all of them share.
    reach
        Final progress, at least 8.
    """

    name: ClassVar[str] = "joma/scan-and-snap"
    claim: ClassVar[str] = "Attention logits of exchangeable next tokens follow one trajectory, then stop"
    source: ClassVar[Source] = Source(
        "tian2023scan",
        "Scan and Snap: Understanding Training Dynamics and Token Composition in 1-layer Transformer",
        "Yuandong Tian and Yiping Wang and Beidi Chen and Simon Du",
        2023,
        kind="inproceedings",
        venue="Advances in Neural Information Processing Systems",
        volume="36",
        identifier="2305.16380",
        locus="theorems 2 to 4; the reduced trajectory, its time and the error of the gain law are derived here",
    )

    unread_prediction: ClassVar[str] = (
        "each replicate is compared with the reduced trajectory of its own co-occurrence, in `train`; the prediction "
        "is of a fixed one"
    )

    learning_rate_ratios: tuple[float, ...] = (0.1, 1.0, 10.0)
    classes: int = 4
    distinct: int = 4
    common: int = 6
    reach: float = 24.0

    def __post_init__(self) -> None:
        if len(self.learning_rate_ratios) < 2 or min(self.learning_rate_ratios) <= 0:
            raise UsageError(f"learning_rate_ratios={self.learning_rate_ratios}: expected two or more, all positive")
        if self.classes < 2 or self.distinct < 2 or self.common < 1 or self.reach < 8:
            raise UsageError(
                f"classes={self.classes}, distinct={self.distinct}, common={self.common}, reach={self.reach}: "
                "expected two or more next tokens with two or more distinct tokens, a common token, and a reach of 8 "
                "or more"
            )

    @classmethod
    def full(cls) -> ScanAndSnap:
        """Return the study with more tokens and ratios."""
        return cls(learning_rate_ratios=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0), classes=10, distinct=6, common=10)

    @classmethod
    def small(cls) -> ScanAndSnap:
        """Return the smallest configuration in which every claim can change."""
        return cls(learning_rate_ratios=(0.3, 3.0), classes=2, distinct=2, common=1, reach=8.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return next tokens with a shared profile of co-occurrence and with their own, at every ratio."""
        return grid(profile=("shared", "own"), ratio=self.learning_rate_ratios)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the gap of strongest and weakest distinct token of a fixed profile, and the same by the gain law."""
        progress = self._progress()
        # A fixed profile: two fifths of the mass fall linearly over the distinct tokens.
        own = np.linspace(4, 1, self.distinct)
        profile = 0.4 * own / own.sum(), np.full(self.common, 0.6 / self.common)
        paths = [reduced_trajectory(*profile, self.classes, progress, aligned=aligned) for aligned in (False, True)]
        gaps = [path.distinct[:, 0] - path.distinct[:, -1] for path in paths]
        return dataset(
            {
                "reference_gap": ("progress", gaps[0], "gap of the reference profile"),
                "aligned_gap": ("progress", gaps[1], "the same under the gain law's assumption"),
            },
            coords={"progress": (progress, "progress", "1")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Integrate the flow for one draw of co-occurrence."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        shared = cell["profile"] == "shared"
        table, own, common = self._draw(rng, shared)
        progress, ratio = self._progress(), float(cell["ratio"])
        # Without exchangeable next tokens the time of the mean profile is used, for comparison.
        times = training_time(own.mean(0), common, self.classes, progress, attention_learning_rate=ratio)
        flow = scan_and_snap_flow(table, times, attention_learning_rate=ratio)
        logits = flow.logits[:, : self.classes * self.distinct].reshape(len(progress), self.classes, self.distinct)
        first, gap = logits[:, 0], logits[:, 0, 0] - logits[:, 0, -1]
        path = reduced_trajectory(own[0], common, self.classes, progress)
        theory = np.concatenate([np.tile(path.distinct, (1, self.classes)), path.common], 1)
        raised = np.exp(first) * own[0]
        theory_gap = path.distinct[:, 0] - path.distinct[:, -1]
        growth, law = (
            of(own[0], first, 0, -1) - relative_gain(own[0], first[0], 0, -1)
            for of in (relative_gain, relative_gain_law)
        )
        highest, disorder = flow.logits[1:, table.common].max(), -np.diff(logits[1:], axis=-1).max()
        winner = raised[:, 0] / raised.sum(1)
        snap = self._snap_time(times, gap)
        return dataset(
            {
                "gap": ("progress", gap, "logit of the strongest over the weakest distinct token"),
                "theory_gap": ("progress", theory_gap, "the same on the reduced trajectory"),
                "deviation": (
                    (),
                    np.abs(flow.logits - theory).max(),
                    "largest distance of a logit from the reduced trajectory",
                ),
                "common": ((), highest, "largest logit of a common token after the start"),
                "disorder": ((), disorder, "smallest logit of a token over the next weaker one"),
                "winner": ("progress", winner, "attention of the strongest over that of all distinct tokens"),
                "growth": ("progress", growth, "growth of the relative gain"),
                "law": ("progress", law, "growth by the gain law"),
                "snap": ((), snap, "time at which the gap reaches nine tenths of its maximum"),
                "loss": ((), flow.losses[-1], "loss at the end", "nat"),
            },
            coords={"progress": (progress, "progress", "1")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare logits with the reduced trajectory, and relative gains with the gain law."""
        kappa = self.classes / (self.classes - 1)
        drive = self.common * np.log(2) / (kappa * self.classes * (self.reach / 2) ** 2)

        def late_growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            gap = _shared(trained)["gap"]
            half = gap.sel(progress=self.reach / 2, method="nearest")
            return (gap.isel(progress=-1) - half).mean("cell").values

        def winning(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            start = trained["winner"].isel(progress=0)
            return ((trained["winner"].isel(progress=-1) - start) / (1 - start)).mean("cell").values

        def kept(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            end = _shared(trained).isel(progress=-1)
            return (end["growth"] / end["law"]).mean("cell").values

        def order(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            early = _shared(trained).sel(progress=list(EARLY), method="nearest")
            errors = _law_error(early).mean("cell").transpose("replicate", "progress").values
            fit = fit_exponent(np.asarray(early["progress"]), errors)
            return fit.exponent, fit.interval

        def by_ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            middle = _shared(trained).sel(progress=3.0, method="nearest")
            fit = fit_exponent(
                np.asarray(self.learning_rate_ratios), _law_error(middle).transpose("replicate", "cell").values
            )
            return fit.exponent, fit.interval.widened(ROUNDING)

        return (
            Claim(
                "Logits of exchangeable next tokens follow the reduced trajectory at every ratio of the learning rates",
                lambda predicted, trained: float(_shared(trained)["deviation"].max()),
                quantity="largest distance of logits",
                target=0.0,
                tolerance=1e-6,
                basis="an equality; local errors of 1e-11 over some ten thousand steps",
            ),
            Claim(
                "The attention logits of common tokens never become positive",
                lambda predicted, trained: float(trained["common"].max()),
                quantity="largest logit of a common token",
                target=0.0,
                tolerance=(float("inf"), ROUNDING),
                basis="an inequality, up to the error of the integrator; the largest logit of all cells and replicates",
            ),
            Claim(
                "The attention logits of distinct tokens are ordered by co-occurrence at all times",
                lambda predicted, trained: float(trained["disorder"].min()),
                quantity="smallest difference of ordered logits",
                target=0.0,
                tolerance=(ROUNDING, float("inf")),
                basis="an inequality, up to the error of the integrator; the worst pair, time, cell and replicate",
            ),
            Claim(
                "The gap between distinct tokens stops growing",
                late_growth,
                quantity="growth of the gap over the last doubling",
                target=0.0,
                tolerance=(float("inf"), float(drive)),
                basis="over the last doubling of progress common tokens drive it by C ln 2/(kappa K tau^2) at most",
            ),
            Claim(
                "No winner takes all: the strongest distinct token gains less than half of the attention of the others",
                winning,
                quantity="attention of the strongest over that of the others",
                target=0.0,
                tolerance=(float("inf"), 0.5),
                basis="winner-take-all is one; half of it leaves room for the overshoot of the gap",
            ),
            Claim(
                "The relative gain follows r(t) = r(0) exp(2 z) at all times",
                kept,
                quantity="final gain over that of the law",
                target=1.0,
                tolerance=0.01,
                expected="refuted",
                basis="an equality: final growth over that of the law; a hundredth is far above the integrator error",
            ),
            Claim(
                "The relative error of the gain law scales as the square of the progress tau",
                order,
                quantity="exponent of tau",
                target=2.0,
                tolerance=0.15,
                basis=f"the next order is of relative size tau^2/10 and less up to tau = {EARLY[-1]}",
            ),
            Claim(
                "The error of the gain law decreases as the decoder learns faster than the attention",
                by_ratio,
                quantity="exponent of the ratio of learning rates",
                target=0.1,
                tolerance=(0.0, float("inf")),
                expected="refuted",
                basis="exponent of the error in the ratio of the learning rates, at equal progress; a tenth would show",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the gap by progress, the growth over that of the law, and snap times."""
        progress = tuple(trained["progress"].values[1:].tolist())
        curves, laws, rows = [], [], []
        for position, ratio in enumerate(self.learning_rate_ratios):
            shared, own = (select_cell(trained, profile=kind, ratio=ratio) for kind in ("shared", "own"))
            label = f"ratio of learning rates {ratio:g}"
            curves.append(spread_curve(progress, shared["gap"].values[0, 1:], label, group=position))
            laws.append(spread_curve(progress, (shared["growth"] / shared["law"]).values[:, 1:], label, group=position))
            rows.append(
                (f"{ratio:g}", *(f"{float(np.exp(np.log(cell['snap']).mean())):.3g}" for cell in (shared, own)))
            )
        theory = trained.isel(cell=0, replicate=0)["theory_gap"].values[1:]
        curves.append(spread_curve(progress, theory, "reduced trajectory", "predicted"))
        named = {"reference_gap": "decoder by the flow", "aligned_gap": "decoder in the direction of f"}
        reference = (
            spread_curve(progress, predicted[name].values[1:], label, "predicted", group)
            for group, (name, label) in enumerate(named.items())
        )
        return (
            Lines(
                "Logit gap between distinct tokens",
                "progress",
                "gap between distinct tokens",
                tuple(curves),
                log_x=True,
                note="One draw of co-occurrence, exchangeable next tokens. Final gap over its maximum: "
                f"{theory[-1] / theory.max():.2f} on the reduced trajectory.",
                shows=("stops growing",),
            ),
            Lines(
                "Reduced trajectory with and without the assumption of the gain law",
                "progress",
                "gap between distinct tokens",
                tuple(reference),
                log_x=True,
                note="A fixed profile; the gain law assumes a decoder in the direction of f.",
            ),
            Lines(
                "Growth of the relative gain over the gain law",
                "progress",
                "growth of the gain over that of the law",
                tuple(laws),
                log_x=True,
                note="Bands range over replicates; the law is at one.",
                shows=("The relative gain follows",),
            ),
            Listing(
                "Snap time",
                ("ratio of learning rates", "shared profile", "own profiles"),
                tuple(rows),
                note="Time at which the gap reaches nine tenths of its maximum, geometric mean over replicates.",
            ),
        )

    def _progress(self) -> np.ndarray:
        fixed = np.array([0.0, *EARLY, 3.0, self.reach / 2, self.reach])
        return np.unique(np.concatenate([fixed, np.geomspace(0.1, self.reach, 40)[:-1]]))

    def _draw(self, rng: np.random.Generator, shared: bool) -> tuple[Cooccurrence, np.ndarray, np.ndarray]:
        """Draw co-occurrence: distinct tokens sorted from the strongest, two fifths of a context's mass."""
        own = -np.sort(-rng.uniform(0.2, 1.0, (self.classes, self.distinct)), axis=1)
        common = rng.uniform(0.5, 1.5, self.common)
        own = np.tile(own[:1], (self.classes, 1)) if shared else own
        own, common = 0.4 * own / own[0].sum(), 0.6 * common / common.sum()
        return make_cooccurrence(own, common), own, common

    @staticmethod
    def _snap_time(times: np.ndarray, gap: np.ndarray) -> float:
        """Return when the gap first reaches nine tenths of its largest value, straight in the logarithm of time."""
        reached = int(np.argmax(gap >= 0.9 * gap.max()))
        part = (0.9 * gap.max() - gap[reached - 1]) / (gap[reached] - gap[reached - 1])
        return float(np.expm1(np.interp(part, [0, 1], np.log1p(times[reached - 1 : reached + 1]))))


def _shared(trained: xr.Dataset) -> xr.Dataset:
    """Select the cells with exchangeable next tokens."""
    return select_cells(trained, profile="shared")


def _law_error(measured: xr.Dataset) -> xr.DataArray:
    """Return the relative error of the growth that the gain law gives."""
    return (measured["law"] - measured["growth"]) / measured["growth"]

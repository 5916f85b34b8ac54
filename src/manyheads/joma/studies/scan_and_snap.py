"""`joma/scan-and-snap`: distinct tokens gain in the order of their co-occurrence, until attention snaps.

The gradient flow of all attention logits and the whole decoder, for co-occurrence drawn at random, beside the path that
it should follow whatever the learning rates, and beside the closed gain law of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.joma.systems.scan_and_snap import Cooccurrence, follow_snapping, make_cooccurrence
from manyheads.joma.theory.scan_and_snap import gain, gain_law, snap_clock, snap_path
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Source, Study, Verdict, grid, spread_curve

EARLY = (0.2, 0.4, 0.8)  # progress at which the error of the gain law is fitted
ROUNDING = 1e-9  # what an integrator with local errors of 1e-11 may err in a logit and its order
PROGRESS = {"long_name": "progress", "units": "1"}


@dataclass(frozen=True)
class ScanAndSnap(Study):
    """Common tokens only lose, distinct ones gain by co-occurrence, and the gap stops growing at a known progress.

    Attributes
    ----------
    ratios
        Learning rate of the attention over that of the decoder.
    classes
        Next tokens.
    distinct, common
        Distinct tokens of each next token, and tokens that all of them share.
    reach
        Progress at the end, at least 8.
    """

    name: ClassVar[str] = "joma/scan-and-snap"
    claim: ClassVar[str] = (
        "attention scans distinct tokens by co-occurrence and snaps: one path for all learning rates, and no gain law"
    )
    source: ClassVar[Source] = Source(
        "tian2023scan",
        "Scan and Snap: Understanding Training Dynamics and Token Composition in 1-layer Transformer",
        "Yuandong Tian and Yiping Wang and Beidi Chen and Simon Du",
        2023,
        kind="inproceedings",
        venue="Advances in Neural Information Processing Systems",
        volume="36",
        identifier="2305.16380",
        locus="theorems 2 to 4; the path, its clock and the order of the law's error are derived here",
    )
    unread_prediction: ClassVar[str] = (
        "each replicate is compared with the path of its own profile, inside `train`; the prediction shows a fixed one"
    )

    ratios: tuple[float, ...] = (0.1, 1.0, 10.0)
    classes: int = 4
    distinct: int = 4
    common: int = 6
    reach: float = 24.0

    def __post_init__(self) -> None:
        if len(self.ratios) < 2 or min(self.ratios) <= 0:
            raise UsageError(f"ratios={self.ratios}: give two or more, all positive")
        if self.classes < 2 or self.distinct < 2 or self.common < 1 or self.reach < 8:
            raise UsageError(
                f"classes={self.classes}, distinct={self.distinct}, common={self.common}, reach={self.reach}: give two "
                "or more next tokens with two or more distinct tokens, a common token, and a progress of 8 or more"
            )

    @classmethod
    def full(cls) -> ScanAndSnap:
        """Return the study with more tokens and ratios."""
        return cls(ratios=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0), classes=10, distinct=6, common=10)

    def cells(self) -> tuple[Cell, ...]:
        """Return next tokens with one profile of co-occurrence and with one each, at every ratio."""
        return grid(profile=("shared", "own"), ratio=self.ratios)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the gap between the strongest and the weakest distinct token of a fixed profile, and by the law."""
        progress = self._progress()
        # A fixed profile: two fifths of the mass fall linearly over the distinct tokens.
        own = np.linspace(4, 1, self.distinct)
        profile = 0.4 * own / own.sum(), np.full(self.common, 0.6 / self.common)
        paths = [snap_path(*profile, self.classes, progress, aligned=aligned) for aligned in (False, True)]
        gaps = [path.distinct[:, 0] - path.distinct[:, -1] for path in paths]
        about = {"units": "1"}
        return xr.Dataset(
            {
                "reference_gap": ("progress", gaps[0], about | {"long_name": "gap of the reference profile"}),
                "aligned_gap": ("progress", gaps[1], about | {"long_name": "the same under the gain law's assumption"}),
            },
            coords={"progress": ("progress", progress, PROGRESS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Follow the flow of one draw of co-occurrence, and measure what the claims are about."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        shared = cell["profile"] == "shared"
        table, own, common = self._draw(rng, shared)
        progress, ratio = self._progress(), float(cell["ratio"])
        # Without exchangeable next tokens there is no such clock; that of the mean profile sets comparable times.
        times = snap_clock(own.mean(0), common, self.classes, progress, attention_rate=ratio)
        flow = follow_snapping(table, times, attention_rate=ratio)
        logits = flow.logits[:, : self.classes * self.distinct].reshape(len(progress), self.classes, self.distinct)
        first, gap = logits[:, 0], logits[:, 0, 0] - logits[:, 0, -1]
        path = snap_path(own[0], common, self.classes, progress)
        theory = np.concatenate([np.tile(path.distinct, (1, self.classes)), path.common], 1)
        raised = np.exp(first) * own[0]
        values: dict[str, tuple[Any, Any, str, str]] = {
            "gap": ("progress", gap, "logit of the strongest over the weakest distinct token", "1"),
            "theory_gap": ("progress", path.distinct[:, 0] - path.distinct[:, -1], "the same on the path", "1"),
            "deviation": ((), np.abs(flow.logits - theory).max(), "largest distance of a logit from the path", "1"),
            "common": ((), flow.logits[1:, table.common].max(), "largest logit of a common token after the start", "1"),
            "disorder": (
                (),
                -np.diff(logits[1:], axis=-1).max(),
                "least logit of a token over the next weaker one",
                "1",
            ),
            "winner": ("progress", raised[:, 0] / raised.sum(1), "share of the strongest of the distinct tokens", "1"),
            "growth": ("progress", gain(own[0], first, 0, -1) - gain(own[0], first[0], 0, -1), "gain's growth", "1"),
            "law": ("progress", gain_law(own[0], first, 0, -1) - gain(own[0], first[0], 0, -1), "its law's", "1"),
            "snap": ((), self._snap_time(times, gap), "time at which the gap has made nine tenths of its way", "1"),
            "loss": ((), flow.losses[-1], "loss at the end", "nat"),
        }
        return xr.Dataset(
            {
                name: (dims, value, {"long_name": text, "units": units})
                for name, (dims, value, text, units) in values.items()
            },
            coords={"progress": ("progress", progress, PROGRESS)},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare logits with the path, and gains with the law."""
        shared = trained.isel(cell=np.flatnonzero(trained["profile"].values == "shared"))
        half = shared.sel(progress=self.reach / 2, method="nearest")
        end = shared.isel(progress=-1)
        late = (end["gap"] - half["gap"]).mean("cell").values
        kappa = self.classes / (self.classes - 1)
        drive = self.common * np.log(2) / (kappa * self.classes * (self.reach / 2) ** 2)
        start = trained["winner"].isel(progress=0)
        rise = ((trained["winner"].isel(progress=-1) - start) / (1 - start)).mean("cell").values
        kept = (end["growth"] / end["law"]).mean("cell").values
        early = shared.sel(progress=list(EARLY), method="nearest")
        errors = ((early["law"] - early["growth"]) / early["growth"]).mean("cell")
        order = fit_exponent(np.asarray(early["progress"]), errors.transpose("replicate", "progress").values)
        middle = shared.sel(progress=3.0, method="nearest")
        off = ((middle["law"] - middle["growth"]) / middle["growth"]).transpose("replicate", "cell").values
        rescue = fit_exponent(np.asarray(self.ratios), off)
        return (
            Verdict.exact(
                "with exchangeable next tokens all logits follow one path and its clock, whatever the learning rates",
                float(shared["deviation"].max()),
                target=0.0,
                tolerance=1e-6,
                basis="an equality; local errors of 1e-11 over some ten thousand steps",
            ),
            Verdict.exact(
                "common tokens never gain attention",
                float(trained["common"].max()),
                target=0.0,
                tolerance=(float("inf"), ROUNDING),
                basis="an inequality, up to the integrator's error; the largest logit of all cells and replicates",
            ),
            Verdict.exact(
                "distinct tokens are ordered by co-occurrence at all times",
                float(trained["disorder"].min()),
                target=0.0,
                tolerance=(ROUNDING, float("inf")),
                basis="an inequality, up to the integrator's error; the worst pair, time, cell and replicate",
            ),
            Verdict.from_samples(
                "the gap between distinct tokens stops growing",
                late,
                target=0.0,
                tolerance=(float("inf"), float(drive)),
                basis="over the last doubling of progress common tokens drive it by C ln 2/(kappa K tau^2) at most",
            ),
            Verdict.from_samples(
                "no winner takes all: the strongest distinct token ends less than half-way to all of their attention",
                rise,
                target=0.0,
                tolerance=(float("inf"), 0.5),
                basis="winner-takes-all is one; half of it leaves room for the gap's overshoot",
            ),
            Verdict.from_samples(
                "the relative gain follows its closed law r(t) = r(0) exp(2 z) all along",
                kept,
                target=1.0,
                tolerance=0.01,
                expected="refuted",
                basis="an equality: growth at the end over the law's; a hundredth is far above the integrator's error",
            ),
            Verdict.from_interval(
                "the closed gain law is right to first order: its relative error grows like progress squared",
                order.interval,
                figure=order.exponent,
                target=2.0,
                tolerance=0.15,
                basis=f"the next order is of relative size tau^2/10 and less up to tau = {EARLY[-1]}",
            ),
            Verdict.from_interval(
                "a decoder that learns faster than attention brings the gain law nearer at equal logits",
                rescue.interval.widened(ROUNDING),
                figure=rescue.exponent,
                target=0.1,
                tolerance=(0.0, float("inf")),
                expected="refuted",
                basis="an exponent of the error in the ratio of the rates: positive if it helps; a tenth would show",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the gap by progress, the law's failure, and snap times."""
        progress = tuple(trained["progress"].values[1:].tolist())
        curves, laws, rows = [], [], []
        for position, ratio in enumerate(self.ratios):
            cells = {
                kind: trained.isel(
                    cell=int(np.flatnonzero((trained["profile"] == kind) & (trained["ratio"] == ratio))[0])
                )
                for kind in ("shared", "own")
            }
            one = cells["shared"].isel(replicate=0)
            label = f"trained, ratio of rates {ratio:g}"
            curves.append(spread_curve(progress, one["gap"].values[None, 1:], label, group=position))
            kept = (cells["shared"]["growth"] / cells["shared"]["law"]).transpose("replicate", "progress")
            laws.append(spread_curve(progress, kept.values[:, 1:], f"ratio of rates {ratio:g}", group=position))
            rows.append(
                (f"{ratio:g}", *(f"{float(np.exp(np.log(cell['snap']).mean())):.3g}" for cell in cells.values()))
            )
        theory = trained.isel(cell=0, replicate=0)["theory_gap"].values[1:]
        curves.append(Curve(progress, tuple(theory.tolist()), "the path", "predicted", 0))
        reference = [tuple(predicted[name].values[1:].tolist()) for name in ("reference_gap", "aligned_gap")]
        return (
            Lines(
                "One path for all learning rates",
                "progress",
                "gap between distinct tokens",
                tuple(curves),
                log_x=True,
                note="One draw of co-occurrence, exchangeable next tokens. The gap rises, may overshoot, and stops.",
            ),
            Lines(
                "What the gain law assumes",
                "progress",
                "gap between distinct tokens",
                (
                    Curve(progress, reference[0], "with the decoder's memory", "predicted", 0),
                    Curve(progress, reference[1], "with a decoder in the direction of f", "predicted", 1),
                ),
                log_x=True,
                note="A fixed profile. Under the law's assumption the gap would grow like the logarithm of progress.",
            ),
            Lines(
                "How much of the law's growth is there",
                "progress",
                "growth of the gain, share of the law's",
                tuple(laws),
                log_x=True,
                note="Bands reach over replicates; one is the law. The ratio of the learning rates does not matter.",
            ),
            Listing(
                "Time to snap",
                ("attention rate / decoder rate", "shared profile", "own profiles"),
                tuple(rows),
                note="Geometric mean over replicates of the time at which the gap has made nine tenths of its way.",
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

"""`joma/scan-and-snap`: attention logits of Scan and Snap, beside their reduced trajectory and the gain law.

The gradient flow of all attention logits and the whole decoder is integrated for random co-occurrence.
"""

import numpy as np

import manyheads.study as st
from manyheads.statistics import fit_exponent
from manyheads.theory.joma.systems.one_layer_attention import Cooccurrence, make_cooccurrence, scan_and_snap_flow
from manyheads.theory.joma.theorems import scan_and_snap as theorem

EARLY = (0.2, 0.4, 0.8)  # progress at which the order of the error of the gain law is fitted
ROUNDING = 1e-9  # error of a logit at local errors of 1e-11 of the integrator


class ScanAndSnap(st.Study):
    """Logits of common and distinct tokens under gradient flow at several ratios of the learning rates."""

    name = "joma/scan-and-snap"
    claim = "Attention logits of exchangeable next tokens follow one trajectory, then stop"
    source = st.Source(
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
    unread_prediction = (
        "each replicate is compared with the reduced trajectory of its own co-occurrence, in `train`; the prediction "
        "is of a fixed one"
    )
    grid = {"profile": ("shared", "own"), "ratio": "learning_rate_ratios"}

    learning_rate_ratios: tuple[float, ...] = st.setting(
        (0.1, 1.0, 10.0), "attention over decoder", above=0, count=2, small=(0.3, 3.0), full=(0.03, 0.1, 0.3, 1, 3, 10)
    )
    classes: int = st.setting(4, "next tokens", least=2, small=2, full=10)
    distinct: int = st.setting(4, "distinct tokens of each next token", least=2, small=2, full=6)
    common: int = st.setting(6, "tokens that all next tokens share", least=1, small=1, full=10)
    reach: float = st.setting(24.0, "final progress", least=8, small=8.0)

    def predict(self, key: st.Key) -> st.Record:
        """Return the gap of strongest and weakest distinct token of a fixed profile, and the same by the gain law."""
        progress = self._progress()
        # A fixed profile: two fifths of the mass fall linearly over the distinct tokens.
        own = np.linspace(4, 1, self.distinct)
        profile = 0.4 * own / own.sum(), np.full(self.common, 0.6 / self.common)
        paths = [theorem.reduced_trajectory(*profile, self.classes, progress, aligned=at) for at in (False, True)]
        gaps = [path.distinct[:, 0] - path.distinct[:, -1] for path in paths]
        return {
            "progress": ("progress", progress, "progress"),
            "reference_gap": ("progress", gaps[0], "gap of the reference profile"),
            "aligned_gap": ("progress", gaps[1], "the same under the gain law's assumption"),
        }

    def train(self, key: st.Key, profile: str, ratio: float) -> st.Record:
        table, own, common = self._draw(st.generator(key), profile == "shared")
        progress = self._progress()
        # Without exchangeable next tokens the time of the mean profile is used, for comparison.
        times = theorem.training_time(own.mean(0), common, self.classes, progress, attention_learning_rate=ratio)
        flow = scan_and_snap_flow(table, times, attention_learning_rate=ratio)
        logits = flow.logits[:, : self.classes * self.distinct].reshape(len(progress), self.classes, self.distinct)
        first, gap = logits[:, 0], logits[:, 0, 0] - logits[:, 0, -1]
        path = theorem.reduced_trajectory(own[0], common, self.classes, progress)
        theory = np.concatenate([np.tile(path.distinct, (1, self.classes)), path.common], 1)
        raised = np.exp(first) * own[0]
        theory_gap = path.distinct[:, 0] - path.distinct[:, -1]
        growth, law = (
            of(own[0], first, 0, -1) - theorem.relative_gain(own[0], first[0], 0, -1)
            for of in (theorem.relative_gain, theorem.relative_gain_law)
        )
        highest, disorder = flow.logits[1:, table.common].max(), -np.diff(logits[1:], axis=-1).max()
        winner = raised[:, 0] / raised.sum(1)
        snap = self._snap_time(times, gap)
        deviation = np.abs(flow.logits - theory).max()
        return {
            "progress": ("progress", progress, "progress"),
            "gap": ("progress", gap, "logit of the strongest over the weakest distinct token"),
            "theory_gap": ("progress", theory_gap, "the same on the reduced trajectory"),
            "deviation": ((), deviation, "largest distance of a logit from the reduced trajectory"),
            "common": ((), highest, "largest logit of a common token after the start"),
            "disorder": ((), disorder, "smallest logit of a token over the next weaker one"),
            "winner": ("progress", winner, "attention of the strongest over that of all distinct tokens"),
            "growth": ("progress", growth, "growth of the relative gain"),
            "law": ("progress", law, "growth by the gain law"),
            "snap": ((), snap, "time at which the gap reaches nine tenths of its maximum"),
            "loss": ((), flow.losses[-1], "loss at the end", "nat"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        shared, winner = trained.sel(profile="shared"), trained["winner"]
        end, start = shared.isel(progress=-1), winner.isel(progress=0)
        error = (shared["law"] - shared["growth"]) / shared["growth"]
        text = "Logits of exchangeable next tokens follow the reduced trajectory at every ratio of the learning rates"
        basis = "an equality; local errors of 1e-11 over some ten thousand steps"
        yield st.Claim(text, shared["deviation"].max(), st.near(0, 1e-6), basis, "largest distance of logits")
        text = "The attention logits of common tokens never become positive"
        basis = "an inequality, up to the error of the integrator; the largest logit of all cells and replicates"
        quantity = "largest logit of a common token"
        yield st.Claim(text, trained["common"].max(), st.near(0, (np.inf, ROUNDING)), basis, quantity)
        text = "The attention logits of distinct tokens are ordered by co-occurrence at all times"
        basis = "an inequality, up to the error of the integrator; the worst pair, time, cell and replicate"
        quantity = "smallest difference of ordered logits"
        yield st.Claim(text, trained["disorder"].min(), st.near(0, (ROUNDING, np.inf)), basis, quantity)
        kappa = self.classes / (self.classes - 1)
        yield st.Claim(
            "The gap between distinct tokens stops growing",
            (end["gap"] - shared["gap"].sel(progress=self.reach / 2, method="nearest")).mean("ratio"),
            st.near(0, (np.inf, self.common * np.log(2) / (kappa * self.classes * (self.reach / 2) ** 2))),
            "over the last doubling of progress common tokens drive it by C ln 2/(kappa K tau^2) at most",
            "growth of the gap over the last doubling",
        )
        yield st.Claim(
            "No winner takes all: the strongest distinct token gains less than half of the attention of the others",
            ((winner.isel(progress=-1) - start) / (1 - start)).mean(("profile", "ratio")),
            st.near(0, (np.inf, 0.5)),
            "winner-take-all is one; half of it leaves room for the overshoot of the gap",
            "attention of the strongest over that of the others",
        )
        text = "The relative gain follows r(t) = r(0) exp(2 z) at all times"
        basis = "an equality: final growth over that of the law; a hundredth is far above the integrator error"
        quantity = "final gain over that of the law"
        yield st.Claim(text, (end["growth"] / end["law"]).mean("ratio"), st.near(1, 0.01), basis, quantity, "refuted")
        early = error.sel(progress=list(EARLY), method="nearest").mean("ratio")
        yield st.Claim(
            "The relative error of the gain law scales as the square of the progress tau",
            st.exponent(early, "progress", "tau", "relative error of the gain law"),
            st.near(2, 0.15),
            f"the next order is of relative size tau^2/10 and less up to tau = {EARLY[-1]}",
        )
        by_ratio = fit_exponent(np.asarray(self.learning_rate_ratios), error.sel(progress=3.0, method="nearest").values)
        yield st.Claim(
            "The error of the gain law decreases as the decoder learns faster than the attention",
            (by_ratio.exponent, by_ratio.interval.widened(ROUNDING)),
            st.above(0.1),
            "exponent of the error in the ratio of the learning rates, at equal progress; a tenth would show",
            "exponent of the ratio of learning rates",
            "refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        theory, shared = (data.isel(progress=slice(1, None)) for data in (theory, trained.sel(profile="shared")))
        path = shared["theory_gap"].isel(ratio=0, replicate=0)
        by_ratio = {f"ratio of learning rates {ratio:g}": shared.sel(ratio=ratio) for ratio in shared["ratio"].values}
        yield st.lines(
            "Logit gap between distinct tokens",
            "progress",
            "gap between distinct tokens",
            {label: part["gap"].isel(replicate=0) for label, part in by_ratio.items()},
            {"reduced trajectory": path},
            log="x",
            note="One draw of co-occurrence, exchangeable next tokens. Final gap over its maximum: "
            f"{float(path[-1] / path.max()):.2f} on the reduced trajectory.",
            shows=("stops growing",),
        )
        title, gap = "Reduced trajectory with and without the assumption of the gain law", "gap between distinct tokens"
        gaps = {"decoder by the flow": theory["reference_gap"], "decoder in the direction of f": theory["aligned_gap"]}
        note = "A fixed profile; the gain law assumes a decoder in the direction of f."
        yield st.lines(title, "progress", gap, {}, gaps, log="x", note=note)
        title, what = "Growth of the relative gain over the gain law", "growth of the gain over that of the law"
        gains = {label: part["growth"] / part["law"] for label, part in by_ratio.items()}
        note, shows = "Bands range over replicates; the law is at one.", ("The relative gain follows",)
        yield st.lines(title, "progress", what, gains, log="x", note=note, shows=shows)

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

"""`recovery/violations`: errors, refusals and diagnostics of both learners where one assumption is violated.

Layers that break one assumption of the proofs each are learned in six stages and by a restarted student. The stages say
how far they came before the joint fit, which rescues much; a refusal carries its name; what is returned is tested on
fresh sequences; and the diagnostics of the true layer say beforehand what is wrong with it.
"""

import math

import numpy as np

import manyheads.study as st
from manyheads.attention import AttentionLayer
from manyheads.recovery import Recovery, RecoveryRefused, assumptions, compare_layers, evaluate_layer, sequences
from manyheads.recovery._types import Array
from manyheads.recovery.examples.six_stages import StageSettings, learn_in_six_stages
from manyheads.recovery.examples.student import StudentSettings, fit_student
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.planted.violations import DEFORMATIONS, deformed_layer
from manyheads.theory.papers import CHEN_LI

FRESH = 2000  # sequences on which everything is tested
TAUGHT = 2000  # sequences of the student
RIGHT = -10.0  # log10 of the relative squared error of a layer that is right
LEAST = 1e-32  # errors below it are rounding, and are drawn there
SETTINGS = StageSettings(joint_fit=GaussNewtonSettings(steps=30, inner=100), tolerance=1e-12)
BROKEN = ("closer-heads", "cancelled", "equal-projections", "heavy-diagonal", "parity")
"""Violations said to break the stages. Close heads do not: the span that the stages need is found as well as before."""


class Violations(st.Study):
    """A broken assumption breaks the stages that need it; the joint fit rescues most; nothing wrong is returned."""

    name = "recovery/violations"
    claim = "A violated assumption breaks the stages that need it and is refused by name"
    revision = 3
    source = CHEN_LI.at("assumptions of the main theorem; how they are broken is ours")
    unread_prediction = "whether the warnings are right is measured inside `train`, against the same table"
    grid = {"violation": "violations"}

    violations: tuple[str, ...] = st.setting(
        ("benign", "closer-heads", "cancelled", "equal-projections", "rank-one", "heavy-diagonal", "flat"),
        "violations, benign layers among them",
        choices=DEFORMATIONS,
        order="distinct",
        small=("benign",),
        full=tuple(DEFORMATIONS),
    )
    dim: int = st.setting(8, "token dimension", above="heads", small=3, full=16)
    heads: int = st.setting(2, "heads of the layers", least=2)
    samples: int = st.setting(
        10_000,
        f"sequences of two tokens for the six stages; the student sees {TAUGHT} of them at most",
        least=100,
        small=200,
        full=100_000,
    )
    restarts: int = st.setting(6, "random starts of the student, at most", least=1, small=1)

    def check(self) -> None:
        if "benign" not in self.violations:
            raise st.UsageError(f"violations={self.violations}: expected benign among them")

    def predict(self, key: st.Key) -> st.Record:
        named = [float(bool(DEFORMATIONS[name].violates)) for name in self.violations]
        return {"warned": ("violation", named, "a diagnostic of the true layer warns")}

    def train(self, key: st.Key, violation: str) -> st.Record:
        for_layer, for_data, for_stages, for_student = st.generator(key).spawn(4)
        broken = DEFORMATIONS[violation]
        layer = deformed_layer(for_layer, violation, self.dim, self.heads)
        x, fresh = (sequences(for_data, n, 2, self.dim, distribution=broken.inputs) for n in (self.samples, FRESH))
        y = evaluate_layer(layer, x)
        done, outcome = self._learn(x, y, for_stages)
        seen, judged = slice(0, min(TAUGHT, self.samples * 4 // 5)), slice(self.samples * 4 // 5, self.samples)
        settings = StudentSettings(restarts=self.restarts, refinement=SETTINGS.joint_fit)
        taught, held, wanted = Examples(x[seen], y[seen]), Examples(x[judged], y[judged]), SETTINGS.tolerance
        student = fit_student(taught, held, self.heads, for_student, wanted=wanted, settings=settings).layer
        warned = {one.name for one in assumptions(layer, broken.inputs).warnings}
        right = broken.violates in warned if broken.violates else violation != "benign" or not warned
        returned = done.layer if done is not None and outcome == "recovered" else None
        stages = () if done is None else done.stages
        gaps = [stage.figures["gap"] for stage in stages if "gap" in stage.figures]
        before = [stage.figures["held_out_error"] for stage in stages if "tried" in stage.figures]
        return {
            "outcome": ((), outcome, "how the six stages end", None),
            "refused": ((), float(returned is None), "the six stages refuse"),
            "error": ((), _log_error(layer, returned, fresh), "log10 of the error that is returned"),
            "before": ((), _log(min(before, default=1.0)), "log10 of the error before the joint fit"),
            "gap": ((), gaps[-1] if gaps else math.nan, "gap of the hull's spectrum"),
            "student": ((), _log_error(layer, student, fresh), "log10 of the student's error"),
            "heads_error": ((), compare_layers(layer, student).theta, "error of the student's heads"),
            "signless_error": ((), _signless(layer, student), "the same, signs of all heads aside"),
            "warned": ((), float(right), "the diagnostic that is named warns, and none for a benign layer"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        text = "No wrong layer is returned, whatever assumption is violated"
        basis = "log10 of the worst error on fresh sequences; the tolerance on held-out ones is 1e-12"
        quantity = "relative squared error (log10), worst layer"
        yield st.Claim(text, trained["error"].fillna(math.log10(LEAST)).max(), st.below(RIGHT), basis, quantity)
        text = "Layers that satisfy all assumptions are recovered in every replicate"
        basis, quantity = "a refusal counts one", "share of layers refused"
        yield st.Claim(text, trained["refused"].sel(violation="benign").max(), st.near(0, 0), basis, quantity)
        text = "The diagnostic of every violated assumption warns, and none warns where no assumption is violated"
        basis = "thresholds of the diagnostics: none of 3,000 benign layers warned (measured here, d = 8)"
        yield st.Claim(text, trained["warned"].min(), st.near(1, 0), basis, "share of right warnings")
        yield st.Claim(
            "The student learns the function of every layer except the parity layer",
            trained["student"].sel(violation=[name for name in self.violations if name != "parity"]).max(skipna=False),
            st.below(RIGHT),
            "log10 of the worst error on fresh sequences",
            "relative squared error (log10), worst layer",
        )
        for name in (name for name in BROKEN if name in self.violations):
            yield st.Claim(
                f"Before the joint fit the six stages do not recover the layer: {DEFORMATIONS[name].title}",
                trained["before"].sel(violation=name),
                st.above(math.log10(SETTINGS.enough)),
                "log10 of the error at which the learner takes a number of heads, one of its settings",
                "relative squared error (log10)",
                "refuted" if name == "closer-heads" else "holds",
            )
        if "cancelled" in self.violations:
            yield st.Claim(
                "Where the projections sum to zero, the student finds the heads up to a common sign",
                trained["signless_error"].sel(violation="cancelled").max(),
                st.near(0, (0, 1e-4)),
                "two tokens leave that sign open, and nothing else; the square root of the function's error",
                "relative error of the attention matrices",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        placed = trained.assign_coords(violation=range(len(self.violations))).median("replicate")
        names = {"before": "six stages, before the joint fit", "error": "six stages, returned", "student": "student"}
        errors = {title: placed[name] for name, title in names.items()}
        labels = "Errors by violation", "violation", "log10 of the relative squared error"
        note, ticks = "Medians over replicates; without a point, all are refusals.", self.violations
        yield st.lines(*labels, errors, note=note, shows=("No wrong layer",), x_ticks=ticks)

        def row(name: str) -> dict[str, str]:
            cell, broken = trained.sel(violation=name), DEFORMATIONS[name]
            ends, counts = np.unique(cell["outcome"].values.astype(str), return_counts=True)
            wrong = f"{int((cell['heads_error'] > 1e-3).sum())}"
            stages = ", ".join(f"{count} {end}" for end, count in zip(ends, counts, strict=True))
            found = {"student's heads wrong": wrong, "six stages": stages}
            return {"violation": broken.title, "warning": broken.violates or "none"} | found

        note = "Replicates in which heads are wrong, and how the six stages end."
        yield st.table("What breaks what", map(row, self.violations), note)

    def _learn(self, x: Array, y: Array, rng: np.random.Generator) -> tuple[Recovery | None, str]:
        """Return what the six stages found, right or refused, and how they ended."""
        try:
            return learn_in_six_stages((x, y), self.heads, settings=SETTINGS, rng=rng), "recovered"
        except RecoveryRefused as refusal:
            return refusal.result, type(refusal).__name__


def _log(error: float) -> float:
    return math.log10(max(error, LEAST)) if not math.isnan(error) else math.nan


def _log_error(truth: AttentionLayer, found: AttentionLayer | None, x: Array) -> float:
    """Return log10 of the relative squared error on fresh sequences; NaN where nothing was returned."""
    if found is None:
        return math.nan
    expected = evaluate_layer(truth, x)
    return _log(float(np.sum((expected - evaluate_layer(found, x)) ** 2) / np.sum(expected**2)))


def _signless(truth: AttentionLayer, found: AttentionLayer) -> float:
    """Return the error of the attention matrices when all heads may change their signs together."""
    flipped = AttentionLayer(-found.theta, -found.projection)
    return min(compare_layers(truth, found).theta, compare_layers(truth, flipped).theta)

"""`recovery/violations`: errors, refusals and diagnostics of both learners where one assumption is violated.

Layers that break one assumption of the proofs each are learned in six stages and by a restarted student. The stages say
how far they came before the joint fit, which rescues much; a refusal carries its name; what is returned is tested on
fresh sequences; and the diagnostics of the true layer say beforehand what is wrong with it.
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
from manyheads.recovery.examples.six_stages import learn_in_six_stages
from manyheads.recovery.examples.stages.settings import StageSettings
from manyheads.recovery.examples.student import StudentSettings, fit_student
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.planted.diagnostics import assumptions
from manyheads.recovery.planted.task import sequences
from manyheads.recovery.planted.violations import DEFORMATIONS, deformed_layer
from manyheads.recovery.refusals import RecoveryRefused
from manyheads.recovery.result.results import Recovery
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel
from manyheads.study.verdicts import Expected
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

FRESH = 2000  # sequences on which everything is tested
TAUGHT = 2000  # sequences of the student
RIGHT = -10.0  # log10 of the relative squared error of a layer that is right
LEAST = 1e-32  # errors below it are rounding, and are drawn there
SETTINGS = StageSettings(joint_fit=GaussNewtonSettings(steps=30, inner=100), tolerance=1e-12)
BROKEN: dict[str, Expected] = {
    "closer-heads": "refuted",
    "cancelled": "holds",
    "equal-projections": "holds",
    "heavy-diagonal": "holds",
    "parity": "holds",
}
"""Violations said to break the stages. Close heads do not: the span that the stages need is found as well as before."""


@dataclass(frozen=True)
class Violations(Study):
    """A broken assumption breaks the stages that need it; the joint fit rescues most; nothing wrong is returned.

    Attributes
    ----------
    violations
        Names of `manyheads.recovery.planted.violations.DEFORMATIONS`, "benign" among them.
    dim, heads
        Of the layers.
    samples
        Sequences of two tokens for the six stages; the student sees 2000 of them at most.
    restarts
        Random starts of the student, at most.
    """

    name: ClassVar[str] = "recovery/violations"
    claim: ClassVar[str] = "A violated assumption breaks the stages that need it and is refused by name"
    revision: ClassVar[int] = 3
    source: ClassVar[Source] = replace(CHEN_LI, locus="assumptions of the main theorem; how they are broken is ours")
    unread_prediction: ClassVar[str] = (
        "whether the warnings are right is measured inside `train`, against the same table"
    )

    violations: tuple[str, ...] = (
        "benign",
        "closer-heads",
        "cancelled",
        "equal-projections",
        "rank-one",
        "heavy-diagonal",
        "flat",
    )
    dim: int = 8
    heads: int = 2
    samples: int = 10_000
    restarts: int = 6

    def __post_init__(self) -> None:
        unknown = set(self.violations) - set(DEFORMATIONS)
        if unknown or "benign" not in self.violations or len(set(self.violations)) < len(self.violations):
            raise UsageError(
                f"violations={self.violations}: give names of {', '.join(DEFORMATIONS)}, benign among them"
            )
        if self.heads < 2 or self.dim <= self.heads or self.samples < 100 or self.restarts < 1:
            raise UsageError(
                f"dim={self.dim}, heads={self.heads}, samples={self.samples}, restarts={self.restarts}: give two heads "
                "or more, more dimensions than heads, 100 sequences and one start or more"
            )

    @classmethod
    def full(cls) -> Violations:
        """Return the study of all violations at 16 dimensions, with 100,000 sequences."""
        return cls(violations=tuple(DEFORMATIONS), dim=16, samples=100_000)

    @classmethod
    def small(cls) -> Violations:
        """Return the smallest configuration in which every claim can change."""
        return cls(("benign",), dim=3, samples=200, restarts=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every violation."""
        return grid(violation=self.violations)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return which violations the diagnostics must warn of."""
        named = [float(bool(DEFORMATIONS[name].violates)) for name in self.violations]
        return xr.Dataset(
            {"warned": ("violation", named, label("a diagnostic of the true layer warns"))},
            coords={"violation": list(self.violations)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Break one assumption, learn with both learners, and test what they return."""
        name = str(cell["violation"])
        for_layer, for_data, for_stages, for_student = generator(key).spawn(4)
        layer, inputs = deformed_layer(for_layer, name, self.dim, self.heads), DEFORMATIONS[name].inputs
        x = sequences(for_data, self.samples, 2, self.dim, distribution=inputs)
        fresh = sequences(for_data, FRESH, 2, self.dim, distribution=inputs)
        y = evaluate_layer(layer, x)
        done, outcome = self._learn(x, y, for_stages)
        seen, judged = slice(0, min(TAUGHT, self.samples * 4 // 5)), slice(self.samples * 4 // 5, self.samples)
        student = fit_student(
            Examples(x[seen], y[seen]),
            Examples(x[judged], y[judged]),
            self.heads,
            for_student,
            wanted=SETTINGS.tolerance,
            settings=StudentSettings(restarts=self.restarts, refinement=SETTINGS.joint_fit),
        )
        warned = {one.name for one in assumptions(layer, inputs).warnings}
        returned = done.layer if done is not None and outcome == "recovered" else None
        figures = {} if done is None else {key: value for stage in done.stages for key, value in stage.figures.items()}
        before = [stage.figures["held_out_error"] for stage in done.stages if "tried" in stage.figures] if done else []
        return xr.Dataset(
            {
                "outcome": ((), outcome, {"long_name": "how the six stages end"}),
                "refused": ((), float(returned is None), label("the six stages refuse")),
                "error": ((), _log_error(layer, returned, fresh), label("log10 of the error that is returned")),
                "before": ((), _log(min(before, default=1.0)), label("log10 of the error before the joint fit")),
                "gap": ((), figures.get("gap", math.nan), label("gap of the hull's spectrum")),
                "student": ((), _log_error(layer, student.layer, fresh), label("log10 of the student's error")),
                "heads_error": ((), compare_layers(layer, student.layer).theta, label("error of the student's heads")),
                "signless_error": ((), _signless(layer, student.layer), label("the same, signs of all heads aside")),
                "warned": ((), float(_warns(name, warned)), label("the diagnostic that is named warns")),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare what is returned with the truth, and the stages' own errors with those of benign layers."""
        learnable = [name for name in self.violations if name != "parity"]

        def student(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            return float(max(of_cell(trained, "student", violation=name).max() for name in learnable))

        def before(name: str) -> Measure:
            return lambda predicted, trained: of_cell(trained, "before", violation=name)

        infinite = math.inf
        claims = [
            Claim(
                "No wrong layer is returned, whatever assumption is violated",
                lambda predicted, trained: float(trained["error"].fillna(math.log10(LEAST)).max()),
                quantity="relative squared error (log10), worst layer",
                target=RIGHT,
                tolerance=(infinite, 0.0),
                basis="log10 of the worst error on fresh sequences; the tolerance on held-out ones is 1e-12",
            ),
            Claim(
                "Layers that satisfy all assumptions are recovered in every replicate",
                lambda predicted, trained: float(of_cell(trained, "refused", violation="benign").max()),
                quantity="share of layers refused",
                target=0.0,
                tolerance=0.0,
                basis="a refusal counts one",
            ),
            Claim(
                "The diagnostic of every violated assumption warns, and none warns where no assumption is violated",
                lambda predicted, trained: float(trained["warned"].min()),
                quantity="share of right warnings",
                target=1.0,
                tolerance=0.0,
                basis="thresholds of the diagnostics: none of 3,000 benign layers warned (measured here, d = 8)",
            ),
            Claim(
                "The student learns the function of every layer except the parity layer",
                student,
                quantity="relative squared error (log10), worst layer",
                target=RIGHT,
                tolerance=(infinite, 0.0),
                basis="log10 of the worst error on fresh sequences",
            ),
        ]
        claims += [
            Claim(
                f"Before the joint fit the six stages do not recover the layer: {DEFORMATIONS[name].title}",
                before(name),
                quantity="relative squared error (log10)",
                target=math.log10(SETTINGS.enough),
                tolerance=(0.0, infinite),
                expected=BROKEN[name],
                basis="log10 of the error at which the learner takes a number of heads, one of its settings",
            )
            for name in BROKEN
            if name in self.violations
        ]
        if "cancelled" in self.violations:
            claims.append(
                Claim(
                    "Where the projections sum to zero, the student finds the heads up to a common sign",
                    lambda predicted, trained: float(of_cell(trained, "signless_error", violation="cancelled").max()),
                    quantity="relative error of the attention matrices",
                    target=0.0,
                    tolerance=(0.0, 1e-4),
                    basis="two tokens leave that sign open, and nothing else; the square root of the function's error",
                )
            )
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the errors of both learners by violation, and how the stages end."""
        table = trained.set_index(cell="violation")
        rows = []
        for name in self.violations:
            cell = table.sel(cell=name)
            outcomes, counts = np.unique(cell["outcome"].values.astype(str), return_counts=True)
            ends = ", ".join(f"{count} {outcome}" for outcome, count in zip(outcomes, counts, strict=True))
            wrong = int(np.sum(cell["heads_error"].values > 1e-3))
            medians = [_median(cell[what]) for what in ("before", "error", "student")]
            figures = ["none" if math.isnan(median) else f"{median:.1f}" for median in medians]  # none: all refused
            warning = DEFORMATIONS[name].violates or "none"
            rows.append((DEFORMATIONS[name].title, warning, f"{_median(cell['gap']):.3g}", *figures, str(wrong), ends))
        columns = (
            "violation",
            "warning",
            "gap",
            "log10 before",
            "log10 returned",
            "log10 student",
            "student's heads wrong",
            "six stages",
        )
        note = "Medians over replicates; errors are log10 of relative squared errors; heads wrong: replicates."
        return (self._picture(table), Listing("What breaks what", columns, tuple(rows), note))

    def _picture(self, table: xr.Dataset) -> Panel:
        places = tuple(float(place) for place in range(len(self.violations)))
        names = {"before": "six stages, before the joint fit", "error": "six stages, returned", "student": "student"}
        curves = []
        for group, (what, title) in enumerate(names.items()):
            values = table[what].sel(cell=list(self.violations)).transpose("replicate", "cell").values
            with np.errstate(all="ignore"):
                middle = tuple(_median(column) for column in values.T)
            curves.append(Curve(places, middle, title, "trained", group))
        return Lines(
            "Errors by violation",
            "violation",
            "log10 of the relative squared error",
            tuple(curves),
            note="Medians over replicates; a gap in a line is a refusal.",
            shows=("No wrong layer",),
            x_ticks=tuple(self.violations),
        )

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


def _warns(name: str, warned: set[str]) -> bool:
    """Tell whether the named diagnostic warns; a benign layer must have no warning, others without a name may."""
    violates = DEFORMATIONS[name].violates
    return violates in warned if violates else name != "benign" or not warned


def _median(values: xr.DataArray | Array) -> float:
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if finite.size else math.nan

"""Settings of the six stages: literal or practical form, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.recovery.examples.stages.crude_sum import CrudeForm
from manyheads.recovery.examples.stages.fit import FitSettings
from manyheads.recovery.examples.stages.hull import HullSettings
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.refusals import check_positive


@dataclass(frozen=True)
class StageSettings:
    """Forms, sizes and thresholds of the six stages."""

    crude: CrudeForm = "regression"  # stage one: "regression", or "correlation" as published
    hull: HullSettings = field(default_factory=HullSettings)  # stages two and four
    # Stage three: form "trimmed", or "margin" as published
    refinement: RefinementSettings = field(default_factory=RefinementSettings)
    fit: FitSettings = field(default_factory=FitSettings)  # stage six: form "projection", or "net" as published
    joint_fit: GaussNewtonSettings = field(default_factory=GaussNewtonSettings)  # the joint fit at the end
    most_heads: int = constrained(6, Constraint(least=1))  # largest number of heads that is tried
    # Sequences, from the end, that decide the number of heads and whether the answer is right; a tenth of all, at most
    held_out: int = constrained(2000, Constraint(least=1))
    joint_fit_sequences: int = constrained(4000, Constraint(least=1))  # sequences of the joint fit, at most
    # Relative squared error on held-out sequences, before the joint fit, at which a number of heads is taken
    enough: float = 1e-2
    # A further head is expected to reduce that error at least by this factor; where it does not, the best number so far
    # is taken
    gain: float = 0.7
    # Relative squared error on held-out sequences that the answer must reach
    tolerance: float = 1e-12
    # Standard deviation of independent noise in the labels; what it leaves is allowed for in `enough` and `tolerance`
    noise: float = constrained(0.0, Constraint(least=0))

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "tolerance")


# The stages as they are published; the net is left with an error that the joint fit has to remove
LITERAL = StageSettings(
    crude="correlation", refinement=RefinementSettings(form="margin"), fit=FitSettings(form="net"), enough=0.1
)

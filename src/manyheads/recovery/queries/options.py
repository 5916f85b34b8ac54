"""Options of an extraction: properties of the function, verification, budget and query cache."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.recovery.oracle.layer_oracle import LayerOracle
from manyheads.recovery.oracle.limits import ServerLimits
from manyheads.recovery.oracle.oracle import Budget, OracleSettings
from manyheads.recovery.refusals import check_positive
from manyheads.recovery.result.certificates import Verification
from manyheads.recovery.result.distributions import Draw, FittedSequences, GaussianSequences

CERTIFICATES = 2  # number of certificates that may be drawn; the confidence holds for all of them together
MOST_TRIES = 1000  # largest number of seeds of a method


@dataclass(frozen=True)
class ExtractionOptions:
    """Known properties of the function, and the budget of an extraction.

    Attributes
    ----------
    causal
        Whether a token attends to itself and to earlier ones only; None finds out.
    residual
        Whether the function adds its input to what the layer gives: x + F(x) or x + F(LN(x)).
    normalized
        Whether the function normalizes its tokens first, F(LN(x)); None finds out.
    rotary
        Whether queries and keys are turned by their positions.
    scores
        Whether attention scores are others: RoPE with biases, norms of queries and keys, caps, windows, ALiBi, tables,
        learned sinks.
    mlp
        Whether the function is a whole transformer block: attention and an MLP, behind it or beside it, through the
        residual stream. The attention is extracted, and the MLP stays an oracle.
    stochastic
        Accept a function that answers the same question differently each time, as noise.
    accurate
        Spend more calls on more digits.
    tries
        How many seeds a method is tried with.
    verify, confidence, tolerance
        Fresh sequences of the certificate, its confidence, and the largest relative squared error that is accepted.
    distribution
        Draws the sequences of the verification; the certificate holds for this distribution.
    most_calls, most_tokens, most_seconds
        What may be asked in all, stored answers included, and seconds of the clock; None is no limit.
    limits
        What the server takes and shows: lengths, norms, sequences a request, rows, rate, digits. The sequences of the
        verification are cut to them.
    store
        Folder in which answers are kept; an interrupted extraction goes on where it stopped, to the same bits.
    dtype, batch, progress
        As in `OracleSettings`.
    """

    causal: bool | None = None
    residual: bool = False
    normalized: bool | None = None
    rotary: bool = False
    scores: bool = False
    mlp: bool = False
    stochastic: bool = False
    accurate: bool = False
    tries: int = constrained(3, Constraint(least=1, most=MOST_TRIES))
    verify: int = 400
    confidence: float = 1 - 1e-4
    tolerance: float = 1e-6
    distribution: Draw = field(default_factory=GaussianSequences)
    most_calls: float | None = None
    most_tokens: float | None = None
    most_seconds: float | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    store: str | os.PathLike[str] | None = None
    dtype: str = "float64"
    batch: int = 1 << 14
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "most_calls", "most_tokens", "most_seconds", none="no limit")
        self.verification()
        object.__setattr__(self, "dtype", self.oracle().dtype)

    def knowing(self, target: LayerOracle) -> "ExtractionOptions":
        """Return the options with what a function states of itself, where they are silent."""
        stated: dict[str, Any] = {"dtype": target.dtype if self.dtype == "float64" else self.dtype}
        for name in ("causal", "normalized"):
            stated[name] = getattr(target if getattr(self, name) is None else self, name)
        for name in ("residual", "rotary", "scores", "mlp"):
            stated[name] = getattr(self, name) or getattr(target, name)
        return replace(self, **stated)

    def verification(self) -> Verification:
        """Return how the result is verified."""
        return Verification(self.verify, self.confidence, self.tolerance, self.draw, CERTIFICATES)

    @property
    def draw(self) -> Draw:
        """The distribution of the verification, within the limits of the server."""
        limits = self.limits
        free = limits.min_length == 1 and limits.max_length is None and limits.max_norm is None
        if free and (limits.vocabulary is None or not isinstance(self.distribution, GaussianSequences)):
            return self.distribution
        return FittedSequences(self.distribution, limits)

    def oracle(self) -> OracleSettings:
        """Return how the function is asked."""
        budget = Budget(self.most_calls, self.most_tokens, self.most_seconds)
        pad = bool(self.causal or self.rotary or self.scores) and not self.limits.last_row
        known = (self.causal is not False, self.residual, self.dtype, self.batch)
        return OracleSettings(*known, budget, self.progress, self.limits, pad)

"""Certificate of a recovered layer: an order statistic of its errors on held-out sequences.

Let e be the squared error of a sequence drawn from a distribution D, averaged over its rows and columns, relative to
the variance of the answers: what depends on the tokens, not the output bias, counts. Of n fresh sequences let E* be the
largest error. Then

    with confidence 1 - delta:   P_D(e > E*) <= eps,   eps = 1 - delta^(1/n).

For, if q is the least number with P(e > q) <= eps, then the inequality fails only where E* < q, so that all n errors
are below q, which has probability P(e < q)^n <= (1 - eps)^n = delta. Nothing is assumed about e: this is the order
statistic of S. S. Wilks (Ann. Math. Statist. 12 (1941) 91-96). A bound on the mean of e would need one on its tail,
which no finite number of answers gives; only E[min(e, 1)] <= E* + eps follows. The statement says nothing of events
rarer than eps, nor of sequences that D does not draw, nor of an oracle that answers otherwise later.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Figure
from manyheads._overview import Overview, Shown
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, ArrayFunction, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.refusals import check_positive
from manyheads.recovery.result.distributions import Draw, GaussianSequences, describe_draw

COARSE = 1e-3  # mean squared rounding of the answers, relative to their variance, from which it counts as an error
OBSERVED = 50  # fresh sequences on which a model itself is compared


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    """The statement about a recovered layer, and whether its error is small enough.

    Attributes
    ----------
    largest_error
        E*: the largest of the errors, squared and relative to the variance of the answers.
    median_error
        The median of the errors; an observation, no bound.
    exceeding
        eps: at most this share of the sequences of D has a larger error, with the confidence.
    confidence
        1 - delta.
    sequences
        n, how many fresh sequences were asked.
    tolerance
        The error that was allowed.
    variance
        The variance of the answers over sequences, rows and columns about the mean of each column: the unit of the
        errors. A constant, such as an output bias, does not count.
    distribution
        D, in words.
    itself, type_itself
        Largest error against a model in its own floating-point type, and that type, if a copy of it was asked; None if
        a function was. Observed on `OBSERVED` fresh sequences; not a bound.
    """

    largest_error: float
    median_error: float
    exceeding: float
    confidence: float
    sequences: int
    tolerance: float
    variance: float
    distribution: str
    itself: float | None = None
    type_itself: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the largest error is within the tolerance."""
        return bool(self.largest_error <= self.tolerance)

    def to_json(self) -> Mapping[str, Any]:
        """Return the figures, whether they suffice, and the sentence, as JSON can hold them."""
        figures = {
            name: str(v) if isinstance(v, float) and not np.isfinite(v) else v for name, v in asdict(self).items()
        }
        return figures | {"accepted": self.accepted, "statement": str(self)}

    def __str__(self) -> str:
        itself = f" This is about a copy of the model. Against the model itself, which computes in {self.type_itself}, "
        itself += f"errors are up to {self.itself or 0.0:.2g} ({OBSERVED} fresh sequences)."
        return (
            f"With confidence 1 - {1 - self.confidence:.2g}, at most {100 * self.exceeding:.2g}% of the sequences have "
            f"a relative squared error above {self.largest_error:.2g} ({self.sequences} fresh ones, median "
            f"{self.median_error:.2g}; {self.distribution}).{'' if self.itself is None else itself}"
        )

    def plot(self) -> "Figure":
        """Draw the median and the largest error on a logarithmic axis, over the errors that are allowed."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        errors = (self.median_error, self.largest_error)
        row = Estimate("median to largest", self.largest_error, errors, (0.0, self.tolerance))
        return draw_intervals(self._overview().title, "relative squared error", [row], log=True)

    def _overview(self) -> Overview:
        names = ("largest_error", "tolerance", "median_error", "exceeding", "confidence", "sequences", "variance")
        title = f"Certificate: {'accepted' if self.accepted else 'not accepted'}"
        return Overview(title, names, [tuple(getattr(self, name) for name in names)], (str(self),))


@dataclass(frozen=True)
class Verification:
    """Settings of the verification of a recovered layer."""

    sequences: int = constrained(400, Constraint(least=1))  # n, fresh sequences
    confidence: float = constrained(1 - 1e-4, Constraint(above=0, below=1))  # 1 - delta
    tolerance: float = 1e-6  # largest relative squared error that is accepted
    # D: draws the sequences. Its text says in the certificate what it draws.
    distribution: Draw = field(default_factory=GaussianSequences)
    # How many certificates may be drawn until one is accepted. Each has the share delta/rounds of the doubt, so that
    # the confidence holds for whichever is shown.
    rounds: int = constrained(1, Constraint(least=1))

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "tolerance")  # infinite accepts any


def certify(
    oracle: Oracle, predict: ArrayFunction, rng: Generator, settings: Verification | None = None
) -> Certificate:
    """Compare a recovered layer with its oracle on fresh sequences, and state what that proves."""
    settings = settings or Verification()  # `predict` must not depend on what `rng` draws
    with oracle.stage("verification"):
        errors = oracle_errors(oracle, predict, rng, settings.sequences, settings.distribution)
    drawn = describe_draw(settings.distribution) + (", last rows" if oracle.limits.last_row else "")
    doubt = settings.confidence, settings.rounds
    return state_errors(errors.relative, errors.variance, settings.tolerance, drawn, *doubt)


def state_errors(
    errors: Array, variance: float, tolerance: float, drawn: str, confidence: float, rounds: int = 1
) -> Certificate:
    """Return what relative errors of fresh sequences (n,) prove."""
    share, median = exceeding_share(len(errors), confidence, rounds), float(np.median(errors))
    return Certificate(float(errors.max()), median, share, confidence, len(errors), tolerance, variance, drawn)


def exceeding_share(sequences: int, confidence: float, rounds: int = 1) -> float:
    """Return eps = 1 - (delta/rounds)^(1/n): the share of sequences that may exceed the largest of n errors."""
    # 1 - confidence first: a doubt shared by rounds and taken from 1 again may round to none
    return float(-np.expm1(np.log((1 - confidence) / rounds) / sequences))


class OracleErrors(NamedTuple):
    """Mean squared error of every sequence (n,), variance of the answers, and the mean square of their rounding."""

    squared: Array
    variance: float
    rounding: float

    @property
    def relative(self) -> Array:
        """Errors relative to the variance; at least the rounding of the answers where that is coarse beside it."""
        coarse = self.rounding > COARSE * self.variance
        errors = np.maximum(self.squared, self.rounding) if coarse else self.squared
        return np.divide(errors, self.variance, out=np.where(errors > 0, np.inf, 0.0), where=self.variance > 0)


def oracle_errors(oracle: Oracle, predict: ArrayFunction, rng: Generator, count: int, draw: Draw) -> OracleErrors:
    """Compare predictions with the answers to `count` sequences, or with their last rows where only these are shown."""
    stacks = draw(rng, count, oracle.dim)
    if sum(map(len, stacks)) != count:
        raise UsageError(f"the distribution drew {sum(map(len, stacks))} sequences where {count} were asked for")
    errors, means, squares, whole = [], [], [], []
    last = oracle.limits.last_row
    origin: Array | None = None  # near the mean, so that a large bias does not cancel digits of the variance
    for x in stacks:
        if not np.isfinite(x).all():
            raise UsageError("the distribution drew tokens that are NaN or infinite: nothing can be asked about them")
        y = oracle(x, read="last")[:, None] if last else oracle(x, read="all")
        origin = y[0, 0] if origin is None else origin
        with np.errstate(all="ignore"):
            predicted = np.asarray(predict(x), np.float64)
            left = np.mean((predicted[:, -1:] - y if last else predicted - y) ** 2, axis=(1, 2))
        errors.append(np.where(np.isfinite(left), left, np.inf))
        means.append(np.mean(y - origin, axis=1))
        squares.append(np.mean((y - origin) ** 2, axis=(1, 2)))
        added = (x[:, -1:] if last else x) if oracle.residual else 0.0
        whole.append(np.mean((y + added) ** 2, axis=(1, 2)))
    variance = np.concatenate(squares).mean() - np.mean(np.concatenate(means).mean(0) ** 2)
    spacing = oracle.limits.spacing(float(np.sqrt(np.concatenate(whole).mean())), oracle.answer_dtype or np.float64)
    # a rounded number errs evenly by up to half of its last digit, of mean square spacing^2 / 12
    return OracleErrors(np.concatenate(errors), max(float(variance), 0.0), spacing**2 / 12)

"""Refusals of a recovery, each with the figure that failed, its threshold, and a remedy.

No layer that failed its own checks is returned. Where a fit or a verification ended with a layer that did not
pass, the refusal carries it as `result`, for a reader who wants to look at it.
"""

from typing import Any, SupportsFloat

import numpy as np

from manyheads.errors import CertificateError, ManyheadsError, UsageError


class RecoveryRefused(CertificateError):
    """Base of the refusals of this wing: a certificate of the recovery failed.

    Attributes
    ----------
    result
        What the recovery had when it was refused, None where there is nothing to show.
    """

    def __init__(self, message: str, measured: SupportsFloat = 0.0, threshold: SupportsFloat = 1.0, result: Any = None):
        super().__init__(message, measured=float(measured), threshold=float(threshold))
        self.result = result

    def __reduce__(self) -> tuple[object, ...]:
        """Keep figures, result and notes when the error travels back from another process."""
        return type(self), (self.message, self.measured, self.threshold), vars(self)

    @classmethod
    def if_above(cls, measured: SupportsFloat, threshold: SupportsFloat, message: str) -> None:
        """Refuse a figure above its threshold, and NaN."""
        if not float(measured) <= float(threshold):
            raise cls(message, measured, threshold)

    @classmethod
    def if_below(cls, measured: SupportsFloat, threshold: SupportsFloat, message: str) -> None:
        """Refuse a figure below its threshold, and NaN."""
        if not float(measured) >= float(threshold):
            raise cls(message, measured, threshold)


class DesignError(RecoveryRefused):
    """The inputs do not span the space: some direction of the layer is never seen."""


class CertificateShortage(RecoveryRefused):
    """Too few rows certify an affine relation between the heads: more examples, or fewer heads, are needed."""


class HullGapError(RecoveryRefused):
    """The spectrum of the certificates has no gap: the affine hull of the heads cannot be told from noise."""


class EffectiveSumError(RecoveryRefused):
    """The projections nearly cancel, so that the sum of projections says nothing about the heads."""


class NoFit(RecoveryRefused):
    """No number of heads explains the held-out examples to the error that was asked for."""


class RankBudgetError(RecoveryRefused):
    """The output spaces of the heads are too large to be disjoint: full-rank or collinear heads."""


class FitError(RecoveryRefused):
    """The heads cannot be separated, or a fit to the answers does not reach the accuracy that their noise allows."""


class VerificationError(RecoveryRefused):
    """The recovered layer fails on fresh sequences: the oracle is no such layer, or the recovery went wrong."""


class NotALayer(RecoveryRefused):
    """The answers break a rule that every layer of this form obeys: linear at one token, the same at each call."""


class IllConditioned(RecoveryRefused):
    """The system that defines a layer is so ill-conditioned that its weights would cancel."""


class OracleError(ManyheadsError, RuntimeError):
    """The oracle raised, or answered with another shape, another dtype or NaN; what was answered before is kept."""


class BudgetSpent(ManyheadsError, RuntimeError):
    """The calls, tokens or seconds allowed are spent; stored answers are kept, and a larger budget goes on."""


class LimitError(ManyheadsError, ValueError):
    """The limits of a server leave no room for what has to be asked; nothing beyond them was asked."""


def check_positive(owner: object, *names: str, none: str = "") -> None:
    """Refuse settings that are no positive numbers, of which infinity is one; None may be one that means `none`."""
    for name in names:
        value = getattr(owner, name)
        number = isinstance(value, SupportsFloat) and not isinstance(value, (bool, np.ndarray))
        if not ((value is None and none) or (number and float(value) > 0)):
            raise UsageError(f"{name}={value!r}: expected a positive number{none and f', or None for {none}'}")

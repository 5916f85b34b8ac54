"""Losses of one read-out and their derivatives."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from scipy.special import logsumexp, softmax

from manyheads.errors import UsageError


@dataclass(frozen=True)
class Loss:
    """l(y, f) summed over classes, and Delta = -dl/df, for outputs and targets (O, C)."""

    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    error: Callable[[np.ndarray, np.ndarray], np.ndarray]
    check: Callable[[np.ndarray], None]


def _check_probabilities(targets: np.ndarray) -> None:
    if targets.shape[-1] < 2 or np.any(targets < 0) or not np.allclose(targets.sum(-1), 1):
        raise UsageError("cross-entropy takes probabilities over two classes or more, such as one-hot rows")


LOSSES = MappingProxyType(
    {
        "squared": Loss(
            value=lambda target, output: ((target - output) ** 2).sum(-1) / 2,
            error=lambda target, output: target - output,
            check=lambda targets: None,
        ),
        "cross-entropy": Loss(
            value=lambda target, output: logsumexp(output, axis=-1) - (target * output).sum(-1),
            error=lambda target, output: target - softmax(output, axis=-1),
            check=_check_probabilities,
        ),
    }
)

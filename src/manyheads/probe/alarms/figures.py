"""Monitored figures and the alarm."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyheads._namespaces import Floats

Places = NDArray[np.int64]

FLOOR = 0.03  # share of the largest entropy, added to distances from uniform attention before the logarithm


@dataclass(frozen=True)
class Figure:
    """Monitored figure."""

    name: str  # of the variable over (step, layer, head)
    transform: Callable[[Floats], Floats]  # scale on which its noise is of one size; upwards is unwelcome
    change: float  # smallest change that is worth an alarm, on the scale `size`
    subject: str
    direction: str  # "grows" or "falls", the unwelcome one
    size: Callable[[Floats], Floats] | None = None  # None: that of `transform`


# Entropy is a share of that of uniform attention. Its noise is in proportion to its distance from there: on the scale
# of the entropy itself, a head that leaves uniformity late makes a jump beside the noise that it had before.
WATCHED = (
    Figure("entropy", lambda x: np.log(np.maximum(1 - x, 0) + FLOOR), 0.1, "entropy", "falls", lambda x: -x),
    Figure("max_logit", lambda x: np.log(np.maximum(x, 0.05)), np.log(1.5), "largest logit", "grows"),
    Figure("first_mass", lambda x: np.log((x + 1e-4) / (1 - x + 1e-4)), 0.7, "attention to the first key", "grows"),
    Figure("stable_rank", lambda x: -np.log(x), 0.1, "stable rank of W_Q^T W_K", "falls"),
    Figure("frobenius", np.log, np.log(1.25), "norm of W_Q^T W_K", "grows"),
    Figure("frobenius", lambda x: -np.log(x + 1e-12), np.log(2), "norm of W_Q^T W_K", "falls"),
)


def carry_forward(values: Floats) -> Floats:
    """Replace what is not finite by the last finite value before it along the first axis; leave what has none."""
    places = np.arange(len(values)).reshape(-1, *(1,) * (values.ndim - 1))
    last = np.maximum.accumulate(np.where(np.isfinite(values), places, 0), axis=0)
    return np.take_along_axis(values, last, axis=0)


def first_true(table: NDArray[np.bool_]) -> tuple[int, Places]:
    """Return the first row of a table (T, K) with a true entry, and the columns of these, empty if there is none."""
    rows, columns = np.nonzero(table)
    return int(rows[0]) if len(rows) else 0, columns[rows == rows[:1]]


@dataclass(frozen=True)
class Alarm:
    """Alarm of a detector.

    Attributes
    ----------
    detector
        "change" (sudden, against the run's own past), "clean runs" (above what clean runs of the recipe reach), "level"
        (a fixed bound), "not finite", "updates" (a gradient or an update that vanishes, weights that do not change), or
        "precision" (weights that hold fewer bits than their type).
    figure
        Name of the variable.
    step, layer, head
        Where; `layer` and `head` are coordinates of the curves, -1 where a matrix belongs to none.
    value, reference
        The figure at that step, and its reference: the start of the change, within the last 16 probes; the most extreme
        figure of clean runs; the bound; the last finite figure; the median before; the bits of the type.
    others
        Further heads, or matrices, that the same detector names at that step.
    false_alarm
        Chance of any alarm of this detector in a clean run, as far as its assumptions hold; None for a bound.
    words
        Description with value and reference.
    matrix
        Name of the matrix, for "updates" and "precision".
    """

    detector: str
    figure: str
    step: int
    layer: int
    head: int
    value: float
    reference: float
    others: int
    false_alarm: float | None
    words: str
    matrix: str = ""

    def __str__(self) -> str:
        rate = "" if self.false_alarm is None else f", false-alarm rate {self.false_alarm:.2g} a run"
        where = f"layer {self.layer} head {self.head}" if self.head >= 0 else self.matrix
        kind = "heads" if self.head >= 0 else "matrices"
        others = f" and {self.others} further {kind}" if self.others else ""
        return f"step {self.step}, {where}{others}: {self.words} ({self.detector}{rate})"

r"""Stage one: crude estimate of the sum of the projections W_S, from uniform attention.

Since rows of attention sum to one, y_r = x_r W_S + sum_i sum_j a_irj (x_j - x_r) W_i with :math:`W_S = \sum_i W_i`
(vectors are rows). Summed over the rows r, and with attention taken for uniform, only W_S is left:
:math:`\sum_r y_r \approx \sum_j x_j W_S`. What is neglected is a bias, not noise: more examples do not remove it.

Both forms need two sums over the examples, S^T S and S^T R with S = sum_j x_j and R = sum_r y_r, (N, d) each: 2 d^2
numbers that are added over shards.

References
----------
S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: the first stage, one gradient step.
The form as a regression, and the two sums, are worked out here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.recovery.passive.stages.shards import Shards, add_up
from manyheads.recovery.refusals import DesignError

Array: TypeAlias = NDArray[np.float64]
CrudeForm: TypeAlias = Literal["regression", "correlation"]

WORST_CONDITION = 1e8
"""Condition of S^T S above which the inputs count as not spanning the space."""


@dataclass(frozen=True)
class Moments:
    """Sums over sequences that stage one needs; moments of two shards add up.

    Attributes
    ----------
    inputs
        S^T S, (d, d), with S the sum of a sequence's tokens.
    cross
        S^T R, (d, d), with R the sum of its labels.
    rows
        Number of rows N k.
    power
        Sum of squares of all labels.
    """

    inputs: Array
    cross: Array
    rows: int
    power: float

    def __add__(self, other: Moments) -> Moments:
        """Add the moments of other examples."""
        return Moments(
            self.inputs + other.inputs, self.cross + other.cross, self.rows + other.rows, self.power + other.power
        )


def measure_moments(x: Array, y: Array) -> Moments:
    """Return the moments of some examples (N, k, d)."""
    tokens, labels = x.sum(1), y.sum(1)  # (N, d)
    return Moments(tokens.T @ tokens, tokens.T @ labels, x.shape[0] * x.shape[1], float(np.vdot(y, y)))


def estimate_crude_sum(data: Shards, form: CrudeForm = "regression") -> tuple[Array, float]:
    r"""Estimate the sum of projections, and how much of the labels' size it accounts for.

    Parameters
    ----------
    data
        The examples.
    form
        "correlation", as published: one gradient step from zero projections under uniform attention,
        :math:`\frac1{kN}\sum_n X_n^\top 1 1^\top Y_n`, which is right for inputs of identity covariance.
        "regression": its least-squares form, right for any covariance.

    Returns
    -------
    The estimate (d, d), and its effective size: ||estimate||_F over the root mean square of the labels' norms. It is
    about one or more where projections do not cancel.

    Raises
    ------
    DesignError
        Inputs that do not span the space.
    UsageError
        Another form.

    Examples
    --------
    A layer that ignores where tokens stand is read off exactly:

    >>> import numpy as np
    >>> from manyheads.recovery.passive.stages.shards import open_shards
    >>> rng = np.random.default_rng(0)
    >>> x, projection = rng.normal(size=(50, 2, 3)), rng.normal(size=(3, 3))
    >>> y = np.repeat(x.mean(1, keepdims=True), 2, axis=1) @ projection
    >>> bool(np.abs(estimate_crude_sum(open_shards((x, y)))[0] - projection).max() < 1e-13)
    True
    """
    if form not in ("regression", "correlation"):
        raise UsageError(f"form={form!r}: expected 'regression' or 'correlation'")
    moments = add_up(data.map(measure_moments))
    values = np.linalg.eigvalsh(moments.inputs)
    condition = float(values[-1] / values[0]) if values[0] > 0 else np.inf
    if not condition <= WORST_CONDITION:
        raise DesignError(
            "the sums of tokens do not span the space: project the tokens onto the directions that occur, "
            "or add examples",
            measured=condition,
            threshold=WORST_CONDITION,
        )
    estimate = moments.cross / moments.rows if form == "correlation" else np.linalg.solve(moments.inputs, moments.cross)
    variance = np.trace(moments.inputs) / (moments.rows * data.dim)
    label = (moments.power / moments.rows) ** 0.5
    return estimate, float(np.linalg.norm(estimate) * variance**0.5 / label) if label else 0.0

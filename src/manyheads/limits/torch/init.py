"""How a parameter starts: the spread of a PyTorch tensor, and whether it is the one that was wanted."""

from __future__ import annotations

import math
from typing import Any

from manyheads._extras import require

FALSE_ALARM = 1e-6
"""Probability that the spread of a rightly drawn parameter is called wrong."""


def starts_right(start: str, expected: float, actual: float, count: int, rounding: float) -> bool:
    """Whether a random parameter has its spread to sampling error, and a gain or a shift its number to rounding.

    Parameters
    ----------
    start
        `"random"`, `"one"` or `"zero"`.
    expected, actual
        Standard deviation, or the number itself.
    count
        How many entries there are.
    rounding
        Relative rounding of their number type.

    Examples
    --------
    >>> [starts_right("random", 1.0, spread, count=400, rounding=1e-7) for spread in (0.9, 1.1, 1.4)]
    [True, True, False]
    """
    from scipy.stats import chi2

    if start == "random" and expected:
        # Sum of squares over the variance: chi-square with as many degrees of freedom as entries, their mean being 0.
        low, high = (math.sqrt(chi2.ppf(q, count) / count) for q in (FALSE_ALARM / 2, 1 - FALSE_ALARM / 2))
        return bool(low - rounding <= actual / expected <= high + rounding)
    return abs(actual - expected) <= 4 * rounding * abs(expected)


def measure_start(tensor: Any, start: str, padding: int | None = None, offset: float = 0.0) -> dict[str, Any]:
    """Return the root mean square of a parameter and its count; of gains, the entry farthest from their mean.

    Nothing is returned for a tensor without numbers: on the device `meta`, or an empty share of a parameter. A module
    makes a gain of its parameter by adding `offset`.
    """
    torch = require("torch")
    if tensor.is_meta or not tensor.numel():
        return {}
    values, count = tensor.detach(), tensor.numel()
    if start == "one":
        flat = values.double().flatten()
        spread = offset + float(flat[(flat - flat.mean()).abs().argmax()])
    else:
        if padding is not None and not bool(values[padding].any()):  # a row that is zero by design
            count -= values[padding].numel()
        # Summed in double precision without a copy of the table in it.
        spread = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(max(count, 1))
    return {"spread": spread, "count": count, "rounding": float(torch.finfo(values.dtype).eps)}

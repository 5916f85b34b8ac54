"""Initial std of a PyTorch tensor, and its test: chi-square for random parameters, rounding for gains and zeros."""

from __future__ import annotations

import math
from typing import Any

from manyheads.models.torch.lazy_torch import Tensor, torch
from manyheads.models.torch.modules import whole

FALSE_ALARM = 1e-6  # probability that the std of a rightly drawn parameter is called wrong


def measure_init(tensor: Tensor, start: str, padding: int | None = None, offset: float = 0.0) -> dict[str, Any]:
    """Return the root mean square of a parameter and its count; of gains, the entry farthest from their mean.

    Nothing is returned for a tensor without numbers: on the device `meta`, or an empty share of a parameter. A module
    makes a gain of its parameter by adding `offset`.
    """
    if tensor.is_meta or not tensor.numel():
        return {}
    values, count = whole(tensor), tensor.numel()
    if start == "one":
        flat = values.double().flatten()
        std = offset + float(flat[(flat - flat.mean()).abs().argmax()])
    else:
        if padding is not None and not bool(values[padding].any()):  # a row that is zero by design
            count -= values[padding].numel()
        # Summed in double precision without a copy of the table in it.
        std = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(max(count, 1))
    return {"std": std, "count": count, "rounding": float(torch.finfo(values.dtype).eps)}


def init_is_right(start: str, expected: float, actual: float, count: int, rounding: float) -> bool:
    """Whether a random parameter has its std to sampling error, and a gain or a shift its number to rounding.

    Examples
    --------
    >>> [init_is_right("random", 1.0, std, count=400, rounding=1e-7) for std in (0.9, 1.1, 1.4)]
    [True, True, False]
    """
    from scipy.special import gammaincinv  # the quantile, without half a second for `scipy.stats`

    if start == "random" and expected:
        # Sum of squares over the variance: chi-square with as many degrees of freedom as entries, their mean being 0.
        low, high = (math.sqrt(2 * gammaincinv(count / 2, q) / count) for q in (FALSE_ALARM / 2, 1 - FALSE_ALARM / 2))
        return bool(low - rounding <= actual / expected <= high + rounding)
    return abs(actual - expected) <= 4 * rounding * abs(expected)

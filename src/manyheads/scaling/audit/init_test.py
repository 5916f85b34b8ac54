"""Test of an initial std: chi-square for random parameters, rounding for gains and zeros."""

import math

FALSE_ALARM = 1e-6
"""Probability that the std of a rightly drawn parameter is called wrong."""


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

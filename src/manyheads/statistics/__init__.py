"""Confidence intervals, fitted exponents, rank correlation and the verdict rule.

Everything is NumPy and SciPy in float64. What `scipy.stats` has is used as it is (`false_discovery_control` for
Benjamini-Hochberg, `chisquare`, `permutation_test` for pairs); here stands what it lacks, and the one promise that a
verdict needs: **for normal data every interval covers at least its level, for any number of replicates from two on.**
"""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub

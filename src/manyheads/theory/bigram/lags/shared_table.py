r"""Test of the assumption of `fit_lags`, one transition table for all lags, on the errors of its predictions.

If the model holds, errors do not depend on the symbol at any lag. If a lag was missed or has a wrong weight, their
covariance with its symbol is a multiple of :math:`W G`, with G the covariance of the symbol itself; so the remainder
beside this multiple contradicts the shared table and nothing else. The tests are those of `forward_selection`. Errors
of the samples that were fitted depend less on the symbols than those of others, so the p-values are conservative.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from manyheads.theory.bigram.lags.alternating_least_squares import attended
from manyheads.theory.bigram.lags.forward_selection import RIDGE, Scores, merge_levels
from manyheads.theory.bigram.lags.streams import Lagged

TOLERATED = 0.05  # share that separate tables may add: minima that explain as much up to it are equivalent
SAMPLES = 1 << 18  # that are tested, at most: bounds the memory of the errors


@dataclass(frozen=True)
class SharedTable:
    """Result of `check_shared_table`; p-values are corrected for the number of tests."""

    pvalue: float  # of one table for all lags
    lag: int  # the lag that contradicts it most
    share: float  # information that separate tables add, as a share of what they explain
    left: int  # the lag beyond those of the fit on which the errors depend most
    left_pvalue: float  # of this lag

    def rejected(self, level: float) -> bool:
        """Tell whether one table is rejected at a level, and separate tables add more than 5% of the information."""
        return self.pvalue <= level and self.share > TOLERATED


def check_shared_table(data: Lagged, value: np.ndarray, attention: np.ndarray, mean: np.ndarray) -> SharedTable:
    """Test whether the errors of a fit depend on the symbols other than by multiples of its table W."""
    data = data.part(0, SAMPLES)
    levels = merge_levels(data, data.vocabulary)
    fold = np.eye(int(levels.max()) + 1)[levels]  # (N, K)
    parts = [fold[part.targets] - mean @ fold - attended(part, attention) @ value.T @ fold for part in data.blocks()]
    errors = np.concatenate(parts)
    tables = Scores(data, data.queries, levels, errors)
    shares = data.occurrences[:, None] * fold
    shared = fold.T @ value  # (K, N)
    along = shared @ (shares / np.maximum(shares.sum(0), 1)) @ tables.within
    single, together = tables.score_groups(direction=along), tables.score_pooled(along)
    present = tables.score_present(shared)
    pvalue, lag = _smallest_pvalue(single[0], together[0], present[0])
    added = max(
        np.where(np.isfinite(single[0]), single[1], 0.0).max(1).clip(0).sum(), together[1].max(), present[1], 0.0
    )
    fitted = _log_determinant(fold[data.targets]) - _log_determinant(errors)
    share = added / (added + max(len(data) * fitted, 1e-300))
    tables.free &= attention[: len(tables.free)] <= 0
    free = tables.free[tables.samples > 0].all(0)
    left = _smallest_pvalue(tables.score_groups()[0], np.where(free, tables.score_pooled()[0], -np.inf))
    return SharedTable(pvalue, lag, float(share), left[1], left[0])


def _log_determinant(rows: np.ndarray) -> float:
    centred = rows - rows.mean(0)
    return float(np.linalg.slogdet(centred[:, 1:].T @ centred[:, 1:] + RIDGE * np.eye(rows.shape[1] - 1))[1])


def _smallest_pvalue(single: np.ndarray, together: np.ndarray, present: float = -np.inf) -> tuple[float, int]:
    """Return the smallest p-value of standard scores, corrected for their number, and its lag."""
    pvalues = [stats.norm.sf(single.max()) * single.size, stats.norm.sf(together.max()) * single.shape[1]]
    pvalues += [stats.norm.sf(present)] if present > -np.inf else []
    lags = [int(single.max(0).argmax()), int(together.argmax()), 0]
    return min(1.0, 3 * float(min(pvalues))), lags[int(np.argmin(pvalues))]

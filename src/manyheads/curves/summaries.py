"""Statistics of many runs on a text: drop and rise by layer, and rank correlations with the validation loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from manyheads._arrays import as_floats, takes_labels
from manyheads.curves.drop_and_rise import DropAndRise, drop_and_rise, forward_fill, replicated_drop_and_rise
from manyheads.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float, Shaped

Array = NDArray[np.float64]

EARLY = (0.1, 0.2, 0.4)  # fractions of a run after which its final loss is predicted


@dataclass(frozen=True, eq=False)
class RunSummary:
    """Statistics of trained runs in cells (depth, learning rate): C cells, R replicates, up to L layers, S steps.

    Each is computed when it is read. A run that diverged counts with its last finite values. Rank correlations are
    computed per seed, so that their standard deviation over seeds gives an interval.

    Attributes
    ----------
    trained
        `validation_loss`, `entropy` and `stable_rank` over `step`.
    random_rank
        Stable rank of a random matrix, in units of which stable ranks are measured.
    """

    trained: xr.Dataset
    random_rank: float

    @cached_property
    def depth(self) -> NDArray[np.int64]:
        """Depth of each cell, (C,)."""
        return self.trained["depth"].values.astype(int)

    @cached_property
    def learning_rate(self) -> Array:
        """Learning rate of each cell, (C,)."""
        return self.trained["learning_rate"].values.astype(float)

    @cached_property
    def entropies(self) -> Array:
        """Attention entropy in nat, mean over heads, which are exchangeable: (C, R, L, S)."""
        entropy = self.trained["entropy"].mean("head").transpose("cell", "replicate", "layer", "step")
        return forward_fill(entropy.values)

    @cached_property
    def ranks(self) -> Array:
        """Stable rank over that of a random matrix, (C, R, L, S)."""
        rank = self.trained["stable_rank"].transpose("cell", "replicate", "layer", "step")
        return forward_fill(rank.values) / self.random_rank

    @cached_property
    def losses(self) -> Array:
        """Validation loss, (C, R, S)."""
        return forward_fill(self.trained["validation_loss"].transpose("cell", "replicate", "step").values)

    @cached_property
    def best(self) -> Array:
        """Lowest validation loss of each run, (C, R)."""
        return self.losses.min(-1)

    @cached_property
    def entropy(self) -> DropAndRise:
        """Drop and rise of the entropy of each run by itself, (C, R, L); NaN for absent layers."""
        return drop_and_rise(self.entropies)

    @cached_property
    def rank(self) -> DropAndRise:
        """Drop and rise of the stable rank of each run by itself, (C, R, L); NaN for absent layers."""
        return drop_and_rise(self.ranks)

    @cached_property
    def rise(self) -> Array:
        """Rise of the entropy, mean over layers, (C, R)."""
        return np.nanmean(self.entropy.rise, -1)

    @cached_property
    def top_rise(self) -> Array:
        """Rise of the entropy of the top layer, (C, R)."""
        return np.take_along_axis(self.entropy.rise, self.depth[:, None, None] - 1, -1)[..., 0]

    @property
    def pooled(self) -> Array:
        """Rank correlation of rise and best loss over all cells, (R,)."""
        return _by_seed(self.rise, self.best)

    @property
    def within(self) -> Array:
        """Rank correlation of rise and best loss within each learning rate, (R,)."""
        return _by_seed(self.rise, self.best, self.learning_rate)

    @property
    def pooled_top(self) -> Array:
        """Rank correlation of the rise of the top layer and best loss over all cells, (R,)."""
        return _by_seed(self.top_rise, self.best)

    @property
    def within_top(self) -> Array:
        """Rank correlation of the rise of the top layer and best loss within each learning rate, (R,)."""
        return _by_seed(self.top_rise, self.best, self.learning_rate)

    @property
    def within_cells(self) -> Array:
        """Rank correlation of rise and best loss over the replicates of each cell, (C,)."""
        return _by_seed(self.rise.T, self.best.T)

    def early_loss(self, fraction: float) -> Array:
        """Correlate the ranks of the best loss and of the loss after a fraction of the run, (R,)."""
        return _by_seed(self.losses[..., self._until(fraction)], self.best)

    def early_rise(self, fraction: float) -> Array:
        """Correlate the ranks of the best loss and of the rise within a fraction of the run, (R,)."""
        measured = drop_and_rise(self.entropies[..., : self._until(fraction) + 1])
        return _by_seed(np.nanmean(measured.rise, -1), self.best)

    def _until(self, fraction: float) -> int:
        return max(1, round(fraction * (self.losses.shape[-1] - 1)))

    @cached_property
    def best_learning_rate(self) -> dict[int, float]:
        """Learning rate of the lowest mean best loss, by depth."""
        mean = self.best.mean(-1)
        cells = {int(depth): np.flatnonzero(self.depth == depth) for depth in np.unique(self.depth)}
        return {depth: float(self.learning_rate[rows[mean[rows].argmin()]]) for depth, rows in cells.items()}

    def position(self, depth: int, learning_rate: float) -> int:
        """Return the number of a cell."""
        return int(np.flatnonzero((self.depth == depth) & (self.learning_rate == learning_rate))[0])

    @cached_property
    def _at_best(self) -> list[int]:
        """Cells at the best learning rate, one per depth."""
        return [self.position(depth, rate) for depth, rate in self.best_learning_rate.items()]

    @property
    def bottom(self) -> DropAndRise:
        """Replicated drop and rise of the entropy of the bottom layer at the best learning rate, depths averaged."""
        return _mean_over_depths([self.entropies[cell, :, 0] for cell in self._at_best])

    @property
    def top(self) -> DropAndRise:
        """Replicated drop and rise of the entropy of the top layer of several, as for `bottom`."""
        deep = [cell for cell in self._at_best if self.depth[cell] > 1]
        return _mean_over_depths([self.entropies[cell, :, self.depth[cell] - 1] for cell in deep])

    @property
    def mean_rank(self) -> DropAndRise:
        """Replicated drop and rise of the stable rank, averaged over layers, as for `bottom`."""
        return _mean_over_depths([self.ranks[cell, :, : self.depth[cell]].mean(1) for cell in self._at_best])

    @property
    def bottom_at_highest(self) -> Array:
        """Last entropy of the bottom layer at the highest learning rate, mean over depths, (R,)."""
        return self.entropies[self.learning_rate == self.learning_rate.max(), :, 0, -1].mean(0)


def _by_seed(x: Array, y: Array, groups: Array | None = None) -> Array:
    """Correlate along the first axis, column by column: (C, R), (C, R) -> (R,)."""
    return np.array([within_group_spearman(a, b, groups) for a, b in zip(x.T, y.T, strict=True)])


def _mean_over_depths(curves: list[Array]) -> DropAndRise:
    """Average the drops and rises of (R, S) curves over depths."""
    parts = [replicated_drop_and_rise(curve) for curve in curves]
    return DropAndRise(
        np.mean([part.drop for part in parts], 0),
        np.mean([part.rise for part in parts], 0),
        np.asarray([part.argmin for part in parts]),
    )


@takes_labels
def within_group_spearman(
    x: Float[ArrayLike, " n"], y: Float[ArrayLike, " n"], groups: Shaped[ArrayLike, " n"] | None = None
) -> float:
    r"""Compute Spearman's rank correlation within groups, with ranks taken and centred inside each group.

    .. math::
        \rho = \frac{\sum_g \sum_{i \in g} (r_i - \bar r_g)(s_i - \bar s_g)}
                    {\sqrt{\sum_g \sum_{i \in g} (r_i - \bar r_g)^2 \, \sum_g \sum_{i \in g} (s_i - \bar s_g)^2}}

    Differences between groups do not contribute. With one group it is the usual coefficient; without ties and with
    groups of one size it is the mean of the coefficients of the groups. Zero where x or y is constant in every group.

    Raises
    ------
    ShapeError, UsageError
        Different lengths; NaN or infinite values.

    Examples
    --------
    Higher with x inside both groups, lower from one to the next:

    >>> x, y, groups = [1, 2, 3, 7, 8, 9], [7, 8, 9, 1, 2, 3], list("aaabbb")
    >>> within_group_spearman(x, y, groups), round(within_group_spearman(x, y), 3)
    (1.0, -0.543)
    """
    first, second = (as_floats(value, name) for name, value in (("x", x), ("y", y)))
    labels = np.zeros(first.shape) if groups is None else np.asarray(groups)
    if first.ndim != 1 or not first.shape == second.shape == labels.shape:
        raise ShapeError(f"pairs of shape {first.shape} and {second.shape} in groups {labels.shape}: give three (n,)")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UsageError("NaN or infinite values have no rank: expected finite pairs, leave the others out")
    r, s = _centred_ranks(first, labels), _centred_ranks(second, labels)
    size = float(np.sqrt((r**2).sum() * (s**2).sum()))
    return float(np.clip((r * s).sum() / size, -1.0, 1.0)) if size > 0 else 0.0


def _centred_ranks(values: Array, labels: NDArray[Any]) -> Array:
    ranks = np.empty(values.shape)
    for label in np.unique(labels):
        inside = labels == label
        ranks[inside] = stats.rankdata(values[inside]) - (inside.sum() + 1) / 2
    return ranks

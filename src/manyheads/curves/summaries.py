"""Statistics of many runs on a text: drop and rise by layer, and rank correlations with the validation loss."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import xarray as xr
from scipy import stats

from manyheads._arrays import as_floats, takes_labels
from manyheads._extras import ArrayLike, Float, Shaped
from manyheads._namespaces import Floats
from manyheads.curves.drop_and_rise import drop_and_rise, forward_fill, replicated_drop_and_rise
from manyheads.errors import ShapeError, UsageError

EARLY = (0.1, 0.2, 0.4)  # fractions of a run after which its final loss is predicted


class RunSummary:
    """Statistics of runs over (replicate, depth, learning_rate), each of them with layers and steps.

    A run that diverged counts with its last finite values. Rank correlations are computed per seed, so that their
    standard deviation over seeds gives an interval.

    Of `validation_loss`, `entropy` and `stable_rank` over these dimensions, `step`, `layer` and `head`; NaN for absent
    layers. Stable ranks are measured in units of `random_rank`, that of a random matrix.
    """

    def __init__(self, trained: xr.Dataset, random_rank: float) -> None:
        self.entropy = _fill(trained["entropy"].mean("head"))  # heads are exchangeable
        self.rank = _fill(trained["stable_rank"]) / random_rank
        self.loss = _fill(trained["validation_loss"])
        self.best = self.loss.min("step")

    @cached_property
    def rise(self) -> xr.DataArray:
        """Rise of the entropy of each run by itself, by layer."""
        return changes(self.entropy)["rise"]

    @property
    def top_rise(self) -> xr.DataArray:
        """The same of the top layer."""
        return self.rise.isel(layer=self.rise["depth"] - 1)

    @property
    def best_rates(self) -> dict[int, float]:
        """Learning rate of the lowest mean best loss, by depth."""
        found = self.best.mean("replicate").idxmin("learning_rate")
        return dict(zip(found["depth"].values.tolist(), found.values.tolist(), strict=True))

    def correlation(self, values: xr.DataArray, *, within: bool = False) -> Floats:
        """Correlate the ranks of values and best losses over all runs of a seed, or within each learning rate, (R,)."""
        x, y = (each.transpose("replicate", "depth", "learning_rate") for each in (values, self.best))
        groups = np.broadcast_to(self.best["learning_rate"].values, x.shape[1:]).ravel() if within else None
        pairs = zip(x.values, y.values, strict=True)
        return np.array([within_group_spearman(a.ravel(), b.ravel(), groups) for a, b in pairs])

    def between_seeds(self, values: xr.DataArray) -> Floats:
        """Correlate the ranks of values and best losses over the seeds of each depth and learning rate, (C,)."""
        x, y = (each.transpose("replicate", "depth", "learning_rate") for each in (values, self.best))
        pairs = zip(x.values.reshape(len(x), -1).T, y.values.reshape(len(y), -1).T, strict=True)
        return np.array([within_group_spearman(*pair) for pair in pairs])

    def early_loss(self, fraction: float) -> Floats:
        """Correlate the ranks of the best loss and of the loss after a fraction of the run, (R,)."""
        return self.correlation(self.loss.isel(step=self._until(fraction)))

    def early_rise(self, fraction: float) -> Floats:
        """Correlate the ranks of the best loss and of the rise within a fraction of the run, (R,)."""
        part = self.entropy.isel(step=slice(self._until(fraction) + 1))
        return self.correlation(changes(part)["rise"].mean("layer"))

    def _until(self, fraction: float) -> int:
        return max(1, round(fraction * (self.loss.sizes["step"] - 1)))

    def at_best(self, curves: xr.DataArray, layer: int | None, least: int = 1) -> dict[str, Floats]:
        """Return replicated drop and rise of a layer, or of the mean over layers, at the best rate of each depth, (R,).

        They are averaged over the depths from `least` on; negative layers count from the top.
        """
        found = []
        for depth, rate in self.best_rates.items():
            if depth >= least:
                present = curves.sel(depth=depth, learning_rate=rate).isel(layer=slice(depth))
                one = present.mean("layer") if layer is None else present.isel(layer=layer)
                found.append(replicated_drop_and_rise(one.transpose("replicate", "step").values))
        return {part: np.mean([getattr(each, part) for each in found], 0) for part in ("drop", "rise")}


def changes(curves: xr.DataArray) -> xr.Dataset:
    """Measure drop and rise of each curve by itself along `step`, its last dimension."""
    found, first = drop_and_rise(curves.values), curves.isel(step=0, drop=True)
    return xr.Dataset({part: first.copy(data=getattr(found, part)) for part in ("drop", "rise")})


def _fill(values: xr.DataArray) -> xr.DataArray:
    ordered = values.transpose(..., "step")
    return ordered.copy(data=forward_fill(ordered.values))


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

    Raises `ShapeError` or `UsageError`: different lengths; NaN or infinite values.

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


def _centred_ranks(values: Floats, labels: np.ndarray) -> Floats:
    ranks = np.empty(values.shape)
    for label in np.unique(labels):
        inside = labels == label
        ranks[inside] = stats.rankdata(values[inside]) - (inside.sum() + 1) / 2
    return ranks

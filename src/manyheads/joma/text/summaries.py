"""What many runs on a text say together: valleys by layer, and how rebounds go along with the validation loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.joma.drop_and_rise import Valley, correlate_within, cross_rises, cross_valleys, find_valley, hold_last

Array = NDArray[np.float64]

EARLY = (0.1, 0.2, 0.4)  # shares of a run after which its end is guessed


@dataclass(frozen=True)
class Summary:
    """Statistics of runs in cells (depth, rate), with C cells, R replicates and up to L layers.

    Attributes
    ----------
    depth, rate
        (C,) of each cell.
    best
        (C, R), the lowest validation loss of a run.
    entropy, rank
        Valleys (C, R, L) of each run by itself: entropy in nat, mean over heads; stable rank as a share of a random
        matrix's. NaN where a network has no such layer.
    final
        (C, R, L), the last entropy.
    pooled, within
        (R,), rank correlation of rebound (mean over layers) and best loss, over all cells and inside each rate.
    pooled_top, within_top
        The same with the rebound of the top layer.
    within_cells
        (C,), the same over the replicates of each cell, where only the seed differs.
    early_loss, early_rebound
        (R,) for each share of `EARLY`: rank correlation of the best loss of the whole run with the loss and with the
        rebound at that moment.
    best_rate
        The rate of the lowest mean best loss, by depth.
    bottom, top, ranks
        At the best rate, each replicate at the places that the others name, mean over depths (R,): entropy of the
        bottom layer; of the top layer where there are several; stable rank, mean over layers. A rebound is the largest
        rise after a drop here, whatever follows: see `cross_rises`.
    bottom_at_highest
        (R,), last entropy of the bottom layer at the highest rate, mean over depths.
    """

    depth: NDArray[np.int64]
    rate: Array
    best: Array
    entropy: Valley
    rank: Valley
    final: Array
    pooled: Array
    within: Array
    pooled_top: Array
    within_top: Array
    within_cells: Array
    early_loss: dict[float, Array]
    early_rebound: dict[float, Array]
    best_rate: dict[int, float]
    bottom: Valley
    top: Valley
    ranks: Valley
    bottom_at_highest: Array


def summarise(trained: xr.Dataset, random_rank: float) -> Summary:
    """Compute the statistics of trained runs: `validation_loss`, `entropy` and `stable_rank` over `step`.

    A run that diverged counts with what it had reached. The rank correlations are computed seed by seed, so that their
    spread over seeds gives an interval; those over the replicates of a cell are computed cell by cell.
    """
    lead = ("cell", "replicate")
    loss = hold_last(trained["validation_loss"].transpose(*lead, "step").values)  # (C, R, S)
    by_layer = trained["entropy"].mean("head").transpose(*lead, "layer", "step")  # heads of a layer are exchangeable
    entropy = hold_last(by_layer.values)  # (C, R, L, S)
    rank = hold_last(trained["stable_rank"].transpose(*lead, "layer", "step").values) / random_rank
    depth, rate = trained["depth"].values.astype(int), trained["rate"].values.astype(float)

    best, valley = loss.min(-1), find_valley(entropy)
    rebound = np.nanmean(valley.rebound, -1)  # (C, R)
    top = np.take_along_axis(valley.rebound, depth[:, None, None] - 1, -1)[..., 0]
    moments = {share: max(1, round(share * (loss.shape[-1] - 1))) for share in EARLY}
    so_far = {share: np.nanmean(find_valley(entropy[..., : until + 1]).rebound, -1) for share, until in moments.items()}
    chosen = choose_rates(depth, rate, best)
    at_best = [int(np.flatnonzero((depth == layers) & (rate == chosen[layers]))[0]) for layers in chosen]
    return Summary(
        depth=depth,
        rate=rate,
        best=best,
        entropy=valley,
        rank=find_valley(rank),
        final=entropy[..., -1],
        pooled=_by_seed(rebound, best),
        within=_by_seed(rebound, best, rate),
        pooled_top=_by_seed(top, best),
        within_top=_by_seed(top, best, rate),
        within_cells=_by_seed(rebound.T, best.T),
        early_loss={share: _by_seed(loss[..., until], best) for share, until in moments.items()},
        early_rebound={share: _by_seed(so_far[share], best) for share in moments},
        best_rate=chosen,
        bottom=_mean_valley([entropy[cell, :, 0] for cell in at_best]),
        top=_mean_valley([entropy[cell, :, depth[cell] - 1] for cell in at_best if depth[cell] > 1]),
        ranks=_mean_valley([rank[cell, :, : depth[cell]].mean(1) for cell in at_best]),
        bottom_at_highest=entropy[rate == rate.max(), :, 0, -1].mean(0),
    )


def choose_rates(depth: NDArray[np.int64], rate: Array, best: Array) -> dict[int, float]:
    """Return the rate whose runs reach the lowest loss on average, for each depth.

    Examples
    --------
    >>> choose_rates(np.array([1, 1, 2, 2]), np.array([0.1, 0.2, 0.1, 0.2]), np.array([[3.0], [2.0], [1.0], [4.0]]))
    {1: 0.2, 2: 0.1}
    """
    mean = best.mean(-1)
    return {int(layers): float(rate[depth == layers][mean[depth == layers].argmin()]) for layers in np.unique(depth)}


def _by_seed(x: Array, y: Array, groups: Array | None = None) -> Array:
    """Correlate along the first axis, column by column: (C, R), (C, R) -> (R,)."""
    return np.array([correlate_within(a, b, groups) for a, b in zip(x.T, y.T, strict=True)])


def _mean_valley(curves: list[Array]) -> Valley:
    """Return the mean over depths of the drops and rises of (R, S) curves, each replicate where the others say."""
    # A single seed has no others. It decides nothing in any case: its interval is infinite.
    if len(curves[0]) == 1:
        parts = [find_valley(curve) for curve in curves]
        rises = [part.rebound for part in parts]
    else:
        parts, rises = [cross_valleys(curve) for curve in curves], [cross_rises(curve) for curve in curves]
    return Valley(
        np.mean([part.drop for part in parts], 0),
        np.mean(rises, 0),
        np.asarray([part.place for part in parts]),
    )

"""Probe-until-complete loop: heads are followed to further probes until their values span their output spaces.

Used by every design with warm starts (`subspaces`, `sphere`, `rotary`). Directions are taken in blocks, the network
known at the reference is fitted along each, and the caller says from the values so far how many more are wanted. Where
the gates of two heads nearly agree, their values are less certain: rows are weighted by their error.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.queries.sigmoid_network import NetDesign, PairNets, net_amplification
from manyheads.recovery.queries.warm_start import Followed

CLEAR = 0.05  # weight below which a probe is left out: its errors are twenty times those of the reference


class Probed(NamedTuple):
    """Nets at the reference and at all probes that were followed."""

    moves: Array  # (b, a) displacements from the reference; the first is zero
    nets: PairNets  # nets of all b probes, heads in the order of the reference
    # (b, m) weight of each row of values: one, or the error at the reference relative to that at the probe
    weights: Array
    # Probes that failed their guards or were too uncertain, and halvings of steps, all together
    dropped: int
    halvings: int

    @property
    def values(self) -> Array:
        """Values of every head at all probes, (m, b, D)."""
        return np.swapaxes(self.nets.values, 0, 1)


def probe_until(
    reference: PairNets,
    directions: Array,
    follow: Callable[[Array], Followed],
    wanted: Callable[[Probed], int],
    *,
    first: int,
    errors: tuple[NetDesign, Array | float] | None = None,
) -> Probed:
    """Follow the heads along one block of directions after the other, until no more are wanted or left.

    Directions (n, a) are taken in order, `first` of them at once, then as many as `wanted` says from all probes so far.
    `errors`, the design of the nets and the amplification of noise at the reference, weights probes by their error and
    leaves out those where it is much larger; None counts all accepted ones alike.
    """
    moves, nets = [np.zeros((1, directions.shape[1]))], [reference.one(np.newaxis)]
    weights = [np.ones((1, len(reference.values)))]
    used = dropped = halvings = 0
    count = first
    while True:
        block = directions[used : used + count]
        used += len(block)
        found = follow(block)
        kept = np.flatnonzero(found.accepted)
        weight = np.ones((len(kept), len(reference.values)))
        if errors is not None:
            design, amplification = errors
            error = np.array([net_amplification(design, found.nets.one(int(probe)))[1] for probe in kept])
            weight = np.minimum(1.0, amplification / error.reshape(weight.shape))
            kept, weight = kept[weight.min(1) > CLEAR], weight[weight.min(1) > CLEAR]
        dropped += len(block) - len(kept)
        halvings += found.halvings
        moves.append(found.steps[kept, None] * block[kept])
        nets.append(found.nets.one(kept))
        weights.append(weight)
        joined = PairNets(*(np.concatenate(parts) for parts in zip(*nets, strict=True)))
        probed = Probed(np.concatenate(moves), joined, np.concatenate(weights), dropped, halvings)
        count = min(wanted(probed), len(directions) - used)
        if count <= 0:
            return probed

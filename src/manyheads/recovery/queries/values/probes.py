"""Values of the heads at as many probes as exhaust their output spaces, from those known at one probe.

Used by every gate with warm starts (`subspaces`, `sphere`, `rotary`). Directions are taken in blocks, and the network
known at the reference is fitted along each; singular values of what each head was seen to read fall from the rank to
the noise, then no further probe is needed. Where the gates of two heads nearly agree, their values are less certain:
with an `amplification` rows are weighted by their error, and without one (pairs) such a probe costs digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, ArrayFunction, Figures, Indices
from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, net_amplification
from manyheads.recovery.queries.nets.warm_start import follow_nets
from manyheads.recovery.queries.values.ranks import find_ranks
from manyheads.recovery.refusals import FitError

CLEAR = 0.05  # weight below which a probe is left out: its errors are twenty times those of the reference


class Stacks(NamedTuple):
    """Input spaces of the heads at all probes."""

    probes: Array  # (b, d), the first is the reference
    values: Array  # (m, b, d); a last stack holds what ignores the tokens, where there is such a head
    levels: Array  # (m,) predicted error of one row of a stack (its norm)
    # (m,) ranks by the gap of the singular values; None where the spaces are not exhausted
    ranks: Indices | None
    dropped: int = 0  # probes at which no step passed the guards, or whose values are too uncertain
    halvings: int = 0  # halvings of steps, all probes together

    def spaces(self) -> list[Array]:
        """Return orthonormal bases O_i (r_i, d) of the output spaces."""
        assert self.ranks is not None
        right = np.linalg.svd(self.values, full_matrices=False)[2]
        return [rows[:rank] for rows, rank in zip(right, self.ranks, strict=True)]

    def figures(self) -> Figures:
        """Return what a report shows of this stage."""
        figures = {"heads": len(self.values), "probes": len(self.probes), "dropped": self.dropped}
        ranks = [-1] if self.ranks is None else self.ranks.tolist()
        return figures | {"halvings": self.halvings, "smallest rank": min(ranks), "largest rank": max(ranks)}


class Gates(NamedTuple):
    """Heads known at one probe, and how their gates are asked about at neighbouring ones."""

    design: NetDesign
    net: PairNets
    ask: ArrayFunction  # answers (b, rows, D) at displacements (b, a) from the reference
    probes: ArrayFunction  # probes v (b, d) at displacements: the values are v W_i
    allowed: float  # relative residual of a right fit, at most
    levels: Array  # (m,) predicted error of one row of values (its norm)
    # Amplification of noise at the reference, against which probes are weighted; None counts all alike
    amplification: Array | float | None = None
    fit: Callable[[Array], PairNets] | None = None  # None is `fit_nets` from the reference
    failing: float = 1.0  # share of a block of probes that may fail their guards
    total: Array | None = None  # W_S, where a last head holds what the others lack of v W_S


def read_stacks(
    gates: Gates, directions: Array, wanted: Callable[[Indices | None, int], int], *, step: float, first: int
) -> Stacks:
    """Follow the heads along one block of directions after the other, until no more are wanted or left.

    Directions (n, a) are taken in order, `first` of them at once, then as many as `wanted` says of the ranks and the
    number of probes so far.
    """
    net, heads = gates.net, len(gates.net.values)
    moves, values, weights = np.zeros((1, directions.shape[1])), net.values[None], np.ones((1, heads))
    used = dropped = halvings = 0
    count = first
    while True:
        block = directions[used : used + count]
        used += len(block)
        found = follow_nets(gates.design, gates.ask, net, block, step=step, allowed=gates.allowed, fit=gates.fit)
        kept = np.flatnonzero(found.accepted)
        if len(block) - len(kept) > gates.failing * len(block):
            failed = f"{len(block) - len(kept)} of {len(block)} probes failed their guards"
            what = f"{failed}: no layer, or noise; try method='bounded'"
            raise FitError(what, np.max(found.nets.residual), gates.allowed)
        weight = np.ones((len(kept), heads))
        if gates.amplification is not None:
            error = np.array([net_amplification(gates.design, found.nets.one(int(probe)))[1] for probe in kept])
            weight = np.minimum(1.0, gates.amplification / error.reshape(weight.shape))
            kept, weight = kept[weight.min(1) > CLEAR], weight[weight.min(1) > CLEAR]
        dropped, halvings = dropped + len(block) - len(kept), halvings + found.halvings
        moves = np.concatenate([moves, found.steps[kept, None] * block[kept]])
        values, weights = np.concatenate([values, found.nets.values[kept]]), np.concatenate([weights, weight])
        least = weights.min(1)[:, None]
        rows, stack = gates.probes(moves) * least, np.swapaxes(values, 0, 1) * least
        if gates.total is not None:
            stack = np.concatenate([stack, (rows @ gates.total - stack.sum(0))[None]])
        stacks = Stacks(rows, stack, gates.levels, find_ranks(stack, gates.levels), dropped, halvings)
        count = min(wanted(stacks.ranks, len(moves)), len(directions) - used)
        if count <= 0:
            return stacks

r"""Subspace method: extraction with O(d) queries, for oracles exact to float64 rounding or nearly so.

A layer of m heads whose output spaces are independent (all layers whose heads have rank d / m: GPT and its kin, with
shared keys and values too) is determined by five readings, one file each:

====  ==========  ==================================================================  =========================
S0    `sums`      one token: W_S = sum_i W_i and c                                    d + 1 calls
S1    `pairs`     pairs at one probe: the number of heads, the share of each          a few m
S2    `values`    pairs at r + extra probes: the output space of every head           (r + extra) (m/2 + 1)
S3    `subspaces` W_i = W_S O^+_i O_i                                                 none
S4    `rows`      all rows of longer sequences: Theta_i and beta_i                    about d / T + nu R / T^2
====  ==========  ==================================================================  =========================

One head is W_S, without S2 and S3. Here r is the rank of a head, there are nu sketch tokens, and T <= r tokens with
values per sequence, for each group of heads of R dimensions together that leave others unseen. Nothing
is fitted in d dimensions.
Derived and measured here; the pencil of S1 is Jennrich's, the elimination of S2 Golub and Pereyra's.
"""

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING, Effort
from manyheads.recovery.queries.gates.pairs import Pairs
from manyheads.recovery.queries.logits.rows import read_rows
from manyheads.recovery.queries.nets.sigmoid_network import EPS
from manyheads.recovery.queries.values.head_values import find_projections
from manyheads.recovery.queries.values.projection_sum import read_sums
from manyheads.recovery.result.results import Extracted, StageLog


def extract_by_subspaces(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a layer from answers exact to rounding, or nearly so (noise below 1e-9), with O(d) calls."""
    noise = max(noise, EPS)
    log = StageLog(oracle)
    with log.stage("sums"):
        sums = read_sums(oracle, oracle.dim, oracle.limits.reach)
    pairs = Pairs.within(oracle, sums, effort.before, effort.after, noise, both=True)
    heads = find_projections(log, pairs, oracle.dim, noise, rng, effort)
    if heads is None:
        zeros = np.zeros((1, *sums.projection.shape))  # W_S with uniform attention, where no pair shows another
        layer = AttentionLayer(zeros, sums.projection[None], zeros[:, 0], sums.bias, causal=oracle.causal)
        return Extracted(layer, tuple(log.stages))
    with log.stage("rows") as figures:
        found = read_rows(oracle, sums.bias, heads, rng, effort, noise=noise)
        figures |= {"noise": found.noise, "scale": found.scale, "smallest weight": found.smallest}
        figures |= {"smallest rank": int(found.ranks.min()), "largest rank": int(found.ranks.max())}
    layer = AttentionLayer(found.theta, heads.projection, found.key_bias, sums.bias, causal=oracle.causal)
    return Extracted(layer, tuple(log.stages))

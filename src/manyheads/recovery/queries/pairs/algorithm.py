r"""Extraction with O(d) queries, for oracles exact to float64 rounding or nearly so.

A layer of m heads whose output spaces are independent (all layers whose heads have rank d / m: GPT and its kin, with
shared keys and values too) is determined by five readings, one file each:

====  ==========  ==================================================================  =========================
S0    `sums`      one token: W_S = sum_i W_i and c                                    d + 1 calls
S1    `pairs`     pairs at one probe: the number of heads, the share of each          a few m
S2    `slices`    pairs at r + extra probes: the output space of every head           (r + extra) (m + 4)
S3    `subspaces` W_i = W_S O^+_i O_i                                                 none
S4    `rows`      all rows of longer sequences: Theta_i and beta_i                    about (nu / K1) (d / K2)
====  ==========  ==================================================================  =========================

with r the rank of a head, nu sketch tokens, and K1 + K2 < r tokens per sequence. Nothing is fitted in d dimensions.
Derived and measured here; the pencil of S1 is Jennrich's, the elimination of S2 Golub and Pereyra's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.queries.pairs.output_spaces import split_projections
from manyheads.recovery.queries.pairs.pairs import Pairs, separate_heads
from manyheads.recovery.queries.pairs.rows import Attentions, RowSettings, read_rows
from manyheads.recovery.queries.pairs.slices import ProbeSettings, Stacks, read_slices
from manyheads.recovery.queries.projection_sum import Sums, read_sums
from manyheads.recovery.queries.sigmoid_network import EPS
from manyheads.recovery.queries.stage_log import StageLog
from manyheads.recovery.results import Extracted

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SliceSettings:
    """What the stages ask; the default spends calls sparingly, `accurate()` about twice as many.

    Measured here on random layers (d 768, 12 heads): errors of Theta and W of 8e-10 and 9e-12 with 2413 calls and 21.6
    thousand tokens, of 6e-11 and 2e-12 with 4292 calls and 60 thousand tokens.
    """

    # Copies of the two tokens of a pair: every call of S1 and S2 has so many tokens, and reads `after` rows
    before: int = 1
    after: int = 4
    oversampling: float = 1.0  # queries per head in S2, beside four
    tries: int = 8  # points at which S1 takes Jacobians, per probe
    # How many probes S2 takes, and how far away; `full=True` for heads of full rank
    probes: ProbeSettings = field(default_factory=ProbeSettings)
    rows: RowSettings = field(default_factory=RowSettings)  # how S4 reads the attention matrices

    def __post_init__(self) -> None:
        if self.before < 1 or self.after < 2:
            raise UsageError(f"before={self.before}, after={self.after}: at least one copy and two shifts are needed")
        if self.oversampling < 1 or self.tries < 1:
            raise UsageError(f"oversampling={self.oversampling}, tries={self.tries}: expected 1 or more")

    @classmethod
    def accurate(cls) -> "SliceSettings":
        """Return settings that spend more calls on better-conditioned readings."""
        probes = ProbeSettings(extra=1.0)
        return cls(before=3, after=9, oversampling=1.5, probes=probes, rows=RowSettings(share=0.4, sketch=2.0))


def extract_by_slices(
    oracle: Callable[..., Array],
    noise: float,
    rng: np.random.Generator,
    settings: SliceSettings | None = None,
    *,
    dim: int | None = None,
    causal: bool | None = None,
) -> Extracted:
    """Extract a layer from an oracle that is exact to rounding, or nearly so, with O(d) calls."""
    settings = settings or SliceSettings()
    dim = oracle.dim if dim is None else dim  # type: ignore[attr-defined]
    causal = bool(getattr(oracle, "causal", True)) if causal is None else causal
    log = StageLog(oracle)
    with log.stage("sums"):
        sums = read_sums(oracle, dim)
    with log.stage("pairs") as figures:
        pairs = Pairs(oracle, sums, settings.before, settings.after, causal, max(noise, EPS))
        start = separate_heads(pairs, dim, rng, oversampling=settings.oversampling, tries=settings.tries)
        figures |= start.figures()
    if not len(start.net.values):
        return _ignoring_tokens(sums, causal, log)
    with log.stage("slices") as figures:
        stacks = read_slices(pairs, start, rng, settings.probes)
        figures |= _slice_figures(stacks)
    with log.stage("subspaces") as figures:
        heads = split_projections(sums, stacks)
        figures |= heads.figures()
    with log.stage("rows") as figures:
        found = read_rows(oracle, sums.bias, heads, rng, settings.rows, causal=causal, noise=max(noise, EPS))
        figures |= _row_figures(found)
    layer = AttentionLayer(found.theta, heads.projection, found.key_bias, sums.bias, causal=causal)
    return Extracted(layer, tuple(log.stages))


def _ignoring_tokens(sums: Sums, causal: bool, log: StageLog) -> Extracted:
    """Return the one head, W_S with uniform attention, of a layer in which no pair shows another."""
    zeros = np.zeros((1, *sums.projection.shape))
    layer = AttentionLayer(zeros, sums.projection[None], zeros[:, 0], sums.bias, causal=causal)
    return Extracted(layer, tuple(log.stages))


def _slice_figures(stacks: Stacks) -> dict[str, float]:
    ranks = np.array([-1]) if stacks.ranks is None else stacks.ranks
    return {
        "heads": len(stacks.values),
        "probes": len(stacks.probes),
        "halvings": stacks.halvings,
        "dropped": stacks.dropped,
        "smallest rank": int(ranks.min()),
        "largest rank": int(ranks.max()),
    }


def _row_figures(found: Attentions) -> dict[str, float]:
    return {
        "smallest rank": int(found.ranks.min()),
        "largest rank": int(found.ranks.max()),
        "noise": found.noise,
        "scale": found.scale,
        "smallest weight": found.smallest,
    }

r"""Extraction of a layer behind a normalisation that cannot be bypassed, with or without a residual connection.

The oracle is F(LN(X)) or, its input taken off, X + F(LN(X)), with LN(x) = gamma u + delta and
u = (x - mean) / sqrt(var + epsilon). Tokens of norm sqrt d and mean zero are u themselves, up to the constant
1 / sqrt(1 + epsilon): everything is asked on this sphere. Linear and bilinear forms there determine their matrices up
to functions of the query alone, so what is found is the layer that acts on u,

.. math:: P G \Theta_i G P,\quad P G (\beta_i + \Theta_i^\top \delta),\quad P G W_i,\quad c + \sum_i \delta W_i

(`projected`), and epsilon. gamma and delta are not determined by themselves. Behind an RMSNorm, P is the identity.

S0  Single tokens of the sphere, and short ones: W_S, c, epsilon, and which normalisation it is. d + 8 calls.
S1  Pairs with a fixed difference, copies of the query: all heads from ten sequences (`sphere_pairs`).
S2  The same queries at other differences, until the output spaces are exhausted. About (r + few) (m + 3) calls.
S3  Projections from W_S and the output spaces (`subspaces`). No calls.
S4  Sketches of the attention matrices from all rows of causal sequences (`sphere_rows`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.oracle.normalization import Normalisation
from manyheads.recovery.queries.pairs.output_spaces import Projections, split_projections
from manyheads.recovery.queries.pairs.slices import Stacks, find_ranks
from manyheads.recovery.queries.projection_sum import Sums
from manyheads.recovery.queries.sigmoid_network import EPS, EXACT, Array, net_amplification
from manyheads.recovery.queries.sphere.pairs import SphereHeads, SpherePairs, find_sphere_heads, read_normalised_sums
from manyheads.recovery.queries.sphere.rows import SphereRows, choose_base, read_sketches, solve_forms
from manyheads.recovery.queries.stage_log import StageLog
from manyheads.recovery.queries.warm_start import follow_nets
from manyheads.recovery.refusals import NotALayer, RankBudgetError
from manyheads.recovery.results import Extracted

CLEAR = 0.05
"""Weight below which a difference is left out: its errors are twenty times those of the first one."""

QUERIES = 12
"""Dimensions in which the w of all pairs lie; the differences have the others."""


@dataclass(frozen=True)
class SphereSettings:
    """How a layer behind a normalisation is asked.

    Attributes
    ----------
    step
        Length of the step to a neighbouring difference, relative to the difference.
    extra
        Differences, and sketch tokens, beyond the rank.
    share
        Distinct tokens of a sequence, relative to the most whose weights can be separated.
    """

    step: float = 0.4
    extra: int = 4
    share: float = 0.6

    def __post_init__(self) -> None:
        if self.extra < 2 or not 0 < self.share <= 1 or not self.step > 0:
            raise UsageError(f"{self}: extra >= 2, 0 < share <= 1 and step > 0 are needed")


def extract_on_sphere(
    oracle: Any, noise: float, rng: np.random.Generator, settings: SphereSettings | None = None
) -> Extracted:
    """Extract a causal layer behind a LayerNorm or RMSNorm that cannot be bypassed.

    Parameters
    ----------
    oracle
        `Oracle` of the whole (its input already taken off where there is a residual connection), or any callable
        (n, k, d), read="last" or "all", with `dim` and `stage`.
    noise
        Relative error of an answer.
    rng
        Source of the tokens.
    settings
        How it is asked.

    Returns
    -------
    Extracted: `layer` acts on what `prepare`, the `Normalisation` found, makes of the tokens.

    Raises
    ------
    RecoveryRefused
        One of its named kinds: what failed, its figure and threshold; `NotALayer` for a function that is not causal.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery import Oracle, evaluate_layer, gpt_layer
    >>> from manyheads.recovery.oracle.normalization import Normalisation, projected
    >>> layer, norm = gpt_layer(np.random.default_rng(0), 12, 2, rank=3), Normalisation()
    >>> block = lambda x: evaluate_layer(layer, 1.1 * norm(x) + 0.1)
    >>> found = extract_on_sphere(Oracle(block, 12), 1e-14, np.random.default_rng(1))
    >>> found.acts_on
    'u = (x - mean) / sqrt(variance + 1.0e-05), what a LayerNorm without weights makes of the tokens'
    >>> x = np.random.default_rng(2).normal(size=(3, 5, 12))
    >>> bool(np.allclose(found(x), block(x), atol=1e-8))
    True
    """
    if not getattr(oracle, "causal", True):
        raise NotALayer(
            "a layer behind a normalisation that cannot be bypassed is extracted where it is causal, and this one is "
            "not: give the function without the normalisation",
            measured=0.0,
            threshold=1.0,
        )
    return _Extraction(oracle, noise, rng, settings or SphereSettings()).run()


@dataclass
class _Extraction:
    """One extraction."""

    oracle: Any
    noise: float
    rng: np.random.Generator
    settings: SphereSettings

    def run(self) -> Extracted:
        log = StageLog(self.oracle)
        sums, norm, basis = log.run("sums", self._sums)
        few = min(max(4, len(basis) // 4), len(basis) // 2, QUERIES)
        pairs = SpherePairs(self.oracle, sums, basis[few:], basis[:few], max(self.noise, EPS))
        heads = log.run("pairs", lambda figures: self._pairs(pairs, figures))
        if len(heads.net.values) == 1:
            projection, ranks = sums.projection[None], [int(np.linalg.matrix_rank(sums.projection, rtol=1e-9))]
        else:
            stacks = log.run("slices", lambda figures: self._slices(pairs, heads, figures))
            split = log.run("subspaces", lambda figures: self._split(sums, stacks, figures))
            projection, ranks = split.projection, split.ranks.tolist()
        theta, beta = log.run("rows", lambda figures: self._rows(sums, projection, ranks, basis, figures))
        size = np.sqrt(1 + norm.epsilon)  # tokens of the sphere are u times this
        layer = AttentionLayer(theta * size**2, projection * size, beta * size, sums.bias, causal=True)
        off = "(x - mean) / sqrt(variance" if norm.centred else "x / sqrt(mean square"
        acts_on = f"u = {off} + {norm.epsilon:.1e}), what a {norm.name} without weights makes of the tokens"
        return Extracted(layer, tuple(log.stages), acts_on, prepare=norm)

    def _sums(self, figures: dict[str, float]) -> tuple[Sums, Normalisation, Array]:
        sums, norm, basis = read_normalised_sums(self.oracle, self.oracle.dim, self.noise, self.rng)
        figures.update(epsilon=norm.epsilon, centred=float(norm.centred))
        return sums, norm, basis

    def _pairs(self, pairs: SpherePairs, figures: dict[str, float]) -> SphereHeads:
        heads = find_sphere_heads(pairs, self.rng)
        figures.update(
            heads=len(heads.net.values),
            residual=float(heads.net.residual),
            amplification=float(heads.amplification.max()),
            queries=len(heads.queries),
            copies=heads.copies,
        )
        return heads

    def _slices(self, pairs: SpherePairs, heads: SphereHeads, figures: dict[str, float]) -> Stacks:
        """Follow the heads to other differences until the spaces of what they read are exhausted."""
        size, design = len(pairs.near), pairs.design(len(heads.queries), heads.copies)
        start = heads.direction / np.linalg.norm(heads.direction)
        turn = np.concatenate([np.linalg.qr(self.rng.standard_normal((size, size)))[0] for _ in range(3)])
        level = pairs.noise * np.sqrt(np.mean((heads.queries @ pairs.sums.projection) ** 2)) * 4
        levels = level * heads.amplification * np.sqrt(len(heads.net.values))
        probes, values = [pairs.probe(start)[None]], [heads.net.values[:, None]]
        dropped, halvings, used, wanted = 0, 0, 0, max(4, self.oracle.dim // len(heads.net.values) // 2)
        while True:
            block = turn[used : used + wanted]
            used += len(block)
            found = follow_nets(
                design,
                lambda moves: pairs.respond(heads.queries, pairs.probe(start + moves), heads.copies).reshape(
                    len(moves), -1, self.oracle.dim
                ),
                heads.net,
                block,
                step=self.settings.step,
                allowed=heads.allowed,
            )
            halvings += found.halvings
            kept = np.flatnonzero(found.accepted)
            # Where gates of two heads nearly agree, their values err more: a row counts by its error.
            error = np.array([net_amplification(design, found.nets.one(int(probe)))[1] for probe in kept])
            weight = np.minimum(1.0, heads.amplification / error.reshape(len(kept), -1)).min(1)
            kept, weight = kept[weight > CLEAR], weight[weight > CLEAR]
            dropped += len(block) - len(kept)
            moved = pairs.probe(start + found.steps[kept, None] * block[: len(found.steps)][kept])
            probes.append(moved * weight[:, None])
            values.append(np.swapaxes(found.nets.values[kept], 0, 1) * weight[:, None])
            stack, rows = np.concatenate(values, axis=1), np.concatenate(probes)
            ranks = find_ranks(stack, levels)
            if ranks is not None and ranks.max() + self.settings.extra <= len(rows) and ranks.max() < size:
                break
            if used >= len(turn) or (ranks is not None and ranks.max() >= size):
                raise RankBudgetError(
                    f"the output spaces of {len(stack)} heads are not exhausted by {len(rows)} differences: heads of "
                    "nearly full rank, or answers too noisy to see the ranks",
                    measured=float(len(rows)),
                    threshold=float(len(turn)),
                )
            wanted = 4 if ranks is None else int(max(ranks.max() + self.settings.extra - len(rows), 1))
        figures.update(differences=len(rows), dropped=dropped, halvings=halvings, rank=int(ranks.max()))
        return Stacks(rows, stack, np.zeros((len(stack), len(rows), 0)), levels, ranks, dropped, halvings)

    def _split(self, sums: Sums, stacks: Stacks, figures: dict[str, float]) -> Projections:
        split = split_projections(sums, stacks)
        figures.update(condition=split.condition, sum_error=split.sum_error, row_error=split.row_error)
        return split

    def _rows(
        self, sums: Sums, projection: Array, ranks: list[int], basis: Array, figures: dict[str, float]
    ) -> tuple[Array, Array]:
        """Read the attention matrices, with more sketch tokens where their rank asks for it."""
        size = max(2, int(self.settings.share * min(self.oracle.dim / len(projection), *ranks)))
        base = np.sqrt(self.oracle.dim) * basis[0]
        rows, spread = choose_base(SphereRows(self.oracle, sums, projection, basis, base), size, self.rng)
        # With noise no gap shows: attention is taken to have no larger rank than the values, and verification decides.
        most = None if self.noise <= EXACT else max(ranks)
        few = max(ranks) + self.settings.extra * (1 if most is None else 3)
        while True:
            seen = read_sketches(rows, min(few, len(basis)), size, spread, self.rng)
            try:
                theta, beta, found = solve_forms(rows, seen, max(1e-6, 100 * self.noise), most)
            except RankBudgetError:
                if few >= len(basis):
                    raise
                few *= 2
                continue
            figures.update(tokens=size, spread=spread, least=seen.least, rank=max(found), sketches=len(seen.few))
            return theta, beta

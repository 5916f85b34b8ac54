r"""Extraction of a layer behind a LayerNorm or RMSNorm, with or without a residual connection.

The oracle is F(LN(X)) or, its input taken off, X + F(LN(X)), with LN(x) = gamma u + delta and
u = (x - mean) / sqrt(var + epsilon). Tokens of norm sqrt d and mean zero are u themselves, up to the constant
1 / sqrt(1 + epsilon): everything is asked on this sphere. Linear and bilinear forms there determine their matrices up
to functions of the query alone, so what is found is the layer that acts on u,

.. math:: P G \Theta_i G P,\quad P G (\beta_i + \Theta_i^\top \delta),\quad P G W_i,\quad c + \sum_i \delta W_i

(`projected`), and epsilon. gamma and delta are not determined by themselves. Behind an RMSNorm, P is the identity.

S0  Single tokens of the sphere, and short ones: W_S, c, epsilon, and which normalization it is. d + 8 calls.
S1  Pairs with a fixed difference, copies of the query: all heads from ten sequences (`sphere.pairs`).
S2  The same queries at other differences, until the output spaces are exhausted. About (r + few) (m + 3) calls, and as
    many times more as there are copies where every token sees all others.
S3  Projections from W_S and the output spaces (`subspaces`). No calls.
S4  Sketches of the attention matrices from all rows of sequences (`sphere.rows`).
"""

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, Figures, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BASED, Effort
from manyheads.recovery.queries.nets.sigmoid_network import EPS, EXACT
from manyheads.recovery.queries.probes import Gates, Stacks, read_stacks
from manyheads.recovery.queries.projection_sum import Projections, Sums
from manyheads.recovery.queries.sphere.pairs import SphereHeads, SpherePairs, find_sphere_heads, read_normalized_sums
from manyheads.recovery.queries.sphere.rows import (
    based_reader,
    choose_base,
    near_tokens,
    read_based_forms,
)
from manyheads.recovery.queries.subspaces.output_spaces import read_projections
from manyheads.recovery.refusals import RankBudgetError
from manyheads.recovery.result.results import Extracted, StageLog

QUERIES = 12  # dimensions in which the w of all pairs lie; the differences have the others
STEP = 0.4  # length of the step to a neighbouring difference, relative to the difference


def extract_on_sphere(oracle: Oracle, noise: float, rng: Generator, effort: Effort = BASED) -> Extracted:
    """Extract a layer behind a LayerNorm or RMSNorm that cannot be bypassed."""
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums, norm, basis = read_normalized_sums(oracle, oracle.dim, noise, rng)
        figures |= {"epsilon": norm.epsilon, "centred": norm.centred}
    few = min(max(4, len(basis) // 4), len(basis) // 2, QUERIES)
    pairs = SpherePairs(oracle, sums, basis[few:], basis[:few], max(noise, EPS), oracle.causal)
    with log.stage("pairs") as figures:
        heads = find_sphere_heads(pairs, rng)
        figures |= heads.figures()

    def read() -> Stacks:
        return _read_stacks(pairs, heads, rng, effort)

    split = read_projections(log, sums, read, noise, alone=len(heads.net.values) == 1)
    with log.stage("rows") as figures:
        theta, beta = _read_forms(oracle, sums, basis, split, noise, rng, effort, figures)
    size = np.sqrt(1 + norm.epsilon)  # tokens of the sphere are u times this
    layer = AttentionLayer(theta * size**2, split.projection * size, beta * size, sums.bias, causal=oracle.causal)
    acts_on = f"u = {norm.formula}, what a {norm.name} without weights makes of the tokens"
    return Extracted(layer, tuple(log.stages), acts_on, prepare=norm)


def _read_stacks(pairs: SpherePairs, heads: SphereHeads, rng: Generator, effort: Effort) -> Stacks:
    """Follow the heads to other differences until the spaces of what they read are exhausted."""
    dim, size = len(pairs.sums.bias), len(pairs.near)
    design = pairs.design(len(heads.queries), heads.copies).with_sum()
    start = heads.direction / np.linalg.norm(heads.direction)
    turn = np.concatenate([np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(3)])
    level = pairs.noise * np.sqrt(np.mean((heads.queries @ pairs.sums.projection) ** 2)) * 4
    levels = level * heads.amplification * np.sqrt(len(heads.net.values))

    def probes(moves: Array) -> Array:
        return pairs.probe(start + moves)

    def ask(moves: Array) -> Array:
        answers = pairs.respond(heads.queries, probes(moves), heads.copies).reshape(len(moves), -1, dim)
        return pairs.sums.append(answers, probes(moves))

    def wanted(ranks: Indices | None, count: int) -> int:
        if ranks is None:
            return 4
        if ranks.max() >= size:
            raise refused
        return int(ranks.max()) + effort.extra - count

    refused = RankBudgetError(f"differences do not exhaust {len(levels)} output spaces", size, len(turn))
    gates = Gates(design, heads.net, ask, probes, heads.allowed, levels, heads.amplification)
    found = read_stacks(gates, turn, wanted, step=STEP, first=max(4, dim // len(levels) // 2))
    if found.ranks is None or found.ranks.max() + effort.extra > len(found.probes):
        raise refused
    return found


def _read_forms(
    oracle: Oracle,
    sums: Sums,
    basis: Array,
    heads: Projections,
    noise: float,
    rng: Generator,
    effort: Effort,
    figures: Figures,
) -> tuple[Array, Array]:
    """Read the attention matrices, with more sketch tokens where their rank asks for it."""
    ranks = heads.ranks.tolist()
    size = max(2, int(effort.share * min(oracle.dim / len(ranks), *ranks)))
    reader = based_reader(oracle, sums, heads, np.sqrt(oracle.dim) * basis[0], size)
    chosen, spread = choose_base(reader, basis, rng)
    wanted = min(max(ranks) + effort.extra * (1 if noise <= EXACT else 3), len(basis))
    sketch = rng.standard_normal((len(basis), len(basis))) / np.sqrt(len(basis))
    few, fresh = (near_tokens(chosen.base, basis, one, spread) for one in (sketch, _axes(len(basis), chosen.fresh)))
    figures["spread"] = spread
    return read_based_forms(chosen, basis, (few, fresh), wanted, noise, figures)


def _axes(count: int, block: int) -> Array:
    """Return the axes, and the negatives of some, more than there are dimensions, in whole blocks."""
    spare = count + 1 + (-(count + 1)) % block
    return np.concatenate([np.eye(count), -np.eye(count)[: spare - count]])

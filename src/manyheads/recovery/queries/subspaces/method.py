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

Behind a LayerNorm or RMSNorm, with or without a residual connection, the oracle is F(LN(X)) or, its input taken off,
X + F(LN(X)), with LN(x) = gamma u + delta and u = (x - mean) / sqrt(var + epsilon). Tokens of norm sqrt d and mean
zero are u themselves, up to the constant 1 / sqrt(1 + epsilon): everything is asked on this sphere. Linear and bilinear
forms there determine their matrices up to functions of the query alone, so what is found is the layer that acts on u,

.. math:: P G \Theta_i G P,\quad P G (\beta_i + \Theta_i^\top \delta),\quad P G W_i,\quad c + \sum_i \delta W_i

(`projected`), and epsilon. gamma and delta are not determined by themselves. Behind an RMSNorm, P is the identity.

S0  Single tokens of the sphere, and short ones: W_S, c, epsilon, and which normalization it is. d + 8 calls.
S1  Pairs with a fixed difference, copies of the query: the heads (`gates.sphere_pairs`), as without a norm.
S2  The same queries at other differences, until the output spaces are exhausted.
S3  Projections from W_S and the output spaces (`values`). No calls.
S4  Sketches of the attention matrices from all rows of sequences (`logits.base_token`).
"""

import dataclasses

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BASED, SPARING, Effort
from manyheads.recovery.queries.gates.pairs import Pairs
from manyheads.recovery.queries.gates.sphere_pairs import SpherePairs, read_normalized_sums
from manyheads.recovery.queries.logits.base_token import based_reader, choose_base, near_tokens, read_based_forms
from manyheads.recovery.queries.logits.rows import read_rows
from manyheads.recovery.queries.nets.sigmoid_network import EPS, EXACT
from manyheads.recovery.queries.values.head_values import find_projections
from manyheads.recovery.queries.values.projection_sum import read_sums
from manyheads.recovery.refusals import FitError
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


def extract_on_sphere(oracle: Oracle, noise: float, rng: Generator, effort: Effort = BASED) -> Extracted:
    """Extract a layer behind a LayerNorm or RMSNorm that cannot be bypassed."""
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums, norm, basis = read_normalized_sums(oracle, oracle.dim, noise, rng)
        figures |= {"epsilon": norm.epsilon, "centred": norm.centred}
    pairs = SpherePairs.of(oracle, sums, basis, noise)
    if noise > EXACT:
        effort = dataclasses.replace(effort, oversampling=3.0, loss=1.0, surplus=1.0)
    split = find_projections(log, pairs, oracle.dim, noise, rng, effort)
    if split is None:
        raise FitError("the answers to pairs are rounding: no head reads the tokens")
    with log.stage("rows") as figures:
        ranks = split.ranks.tolist()
        size = max(2, int(effort.share * min(oracle.dim / len(ranks), *ranks)))
        reader = based_reader(oracle, sums, split, np.sqrt(oracle.dim) * basis[0], size)
        chosen, figures["spread"] = choose_base(reader, basis, rng)
        # more sketch tokens where the rank of attention matrices asks for it
        wanted = min(max(ranks) + effort.extra * (1 if noise <= EXACT else 3), len(basis))
        axes = np.concatenate([np.eye(len(basis)), -np.eye(len(basis))[:1]])
        directions = rng.standard_normal((len(basis), len(basis))) / np.sqrt(len(basis)), axes
        few, fresh = (near_tokens(chosen.base, basis, one, figures["spread"]) for one in directions)
        theta, beta = read_based_forms(chosen, basis, (few, fresh), wanted, noise, figures)
    size = np.sqrt(1 + norm.epsilon)  # tokens of the sphere are u times this
    layer = AttentionLayer(theta * size**2, split.projection * size, beta * size, sums.bias, causal=oracle.causal)
    acts_on = f"u = {norm.formula}, what a {norm.name} without weights makes of the tokens"
    return Extracted(layer, tuple(log.stages), acts_on, prepare=norm)

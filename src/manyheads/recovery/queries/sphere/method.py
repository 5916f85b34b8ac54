r"""Extraction of a layer behind a LayerNorm or RMSNorm, with or without a residual connection.

The oracle is F(LN(X)) or, its input taken off, X + F(LN(X)), with LN(x) = gamma u + delta and
u = (x - mean) / sqrt(var + epsilon). Tokens of norm sqrt d and mean zero are u themselves, up to the constant
1 / sqrt(1 + epsilon): everything is asked on this sphere. Linear and bilinear forms there determine their matrices up
to functions of the query alone, so what is found is the layer that acts on u,

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
from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BASED, Effort
from manyheads.recovery.queries.gates.sphere_pairs import SpherePairs, read_normalized_sums
from manyheads.recovery.queries.logits.base_token import based_reader, choose_base, near_tokens, read_based_forms
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.values.head_values import find_projections
from manyheads.recovery.queries.values.projection_sum import Projections, Sums
from manyheads.recovery.refusals import FitError
from manyheads.recovery.result.results import Extracted, StageLog


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
        theta, beta = _read_forms(oracle, sums, basis, split, noise, rng, effort, figures)
    size = np.sqrt(1 + norm.epsilon)  # tokens of the sphere are u times this
    layer = AttentionLayer(theta * size**2, split.projection * size, beta * size, sums.bias, causal=oracle.causal)
    acts_on = f"u = {norm.formula}, what a {norm.name} without weights makes of the tokens"
    return Extracted(layer, tuple(log.stages), acts_on, prepare=norm)


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
    axes = np.concatenate([np.eye(len(basis)), -np.eye(len(basis))[:1]])
    directions = rng.standard_normal((len(basis), len(basis))) / np.sqrt(len(basis)), axes
    few, fresh = (near_tokens(chosen.base, basis, one, spread) for one in directions)
    figures["spread"] = spread
    return read_based_forms(chosen, basis, (few, fresh), wanted, noise, figures)

r"""Subspace method: extraction with O(d) queries, for oracles exact to float64 rounding or nearly so.

A layer of m heads whose output spaces are independent (all layers whose heads have rank d / m: GPT and its kin, with
shared keys and values too) is determined by five readings:

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

Values of every head at as many probes as the output spaces have dimensions, stage S2.

At the probe v_b = v_0 + tau |v_0| b a few of the queries of v_0 are asked, the fewest with which the predicted error
of the values stays within a factor of that with all of them, and the pair net is fitted from there:
its values are v_b W_i. After r + extra probes the rows of head i span its output space, the row space of W_i, and their
singular values fall from the r-th to the noise: then no further probe is needed. Where no head ignores the tokens,
sum_i v_b W_i = v_b W_S is one more row of the net, which no call is needed for. Directions b are an orthonormal basis
in random rotation; the step tau is halved where the residual or the margin of the heads objects.
"""

import dataclasses
import functools

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BASED, SPARING, Effort
from manyheads.recovery.queries.gates.pairs import Pairs, Separation, separate_heads
from manyheads.recovery.queries.gates.sphere_pairs import SpherePairs, read_normalized_sums
from manyheads.recovery.queries.logits.base_token import based_reader, choose_base, near_tokens, read_based_forms
from manyheads.recovery.queries.logits.rows import read_rows
from manyheads.recovery.queries.nets.sigmoid_network import EPS, EXACT, PairNets, fit_nets, net_amplification
from manyheads.recovery.queries.values.output_spaces import Projections, read_projections, read_sums
from manyheads.recovery.queries.values.probes import Gates, Stacks, read_stacks
from manyheads.recovery.queries.values.ranks import CLEAR
from manyheads.recovery.refusals import FitError, RankBudgetError
from manyheads.recovery.result.results import Extracted, StageLog

SPARE = 2  # rows of answers beyond those that determine a net, in the dimensions of the values
DRAWS = 12  # random sets of queries of one size among which the best is taken
PLANNED = 1000  # unknowns of a net up to which its error is predicted for other sets of queries
MISFIT = 8.0  # a fit is right up to this multiple of the residual that noise, or the fit at the first probe, has


def find_projections(
    log: StageLog, pairs: Pairs, dim: int, noise: float, rng: Generator, effort: Effort
) -> Projections | None:
    """Find the heads by pairs and their projections, stages S1 to S3; None where no pair shows a head."""
    with log.stage("pairs") as figures:
        start = separate_heads(pairs, dim, rng, oversampling=effort.oversampling, tries=effort.tries)
        figures |= start.figures()
    if not len(start.net.values):
        return None
    alone = len(start.net.values) == 1 and not predict_levels(start)[1]  # all of W_S
    read = functools.partial(read_head_values, pairs, start, rng, effort)
    return read_projections(log, pairs.sums, read, noise, alone=alone, whole=effort.whole)


def read_head_values(pairs: Pairs, start: Separation, rng: Generator, effort: Effort) -> Stacks:
    """Ask probe after probe until every head's output space is exhausted, or there are d probes."""
    fewer = with_fewer_queries(pairs, start, rng, effort.loss)
    try:
        return _read_stacks(pairs, fewer, rng, effort)
    except FitError:
        if fewer is start:
            raise
    return _read_stacks(pairs, start, rng, effort)


def _read_stacks(pairs: Pairs, start: Separation, rng: Generator, effort: Effort) -> Stacks:
    """Follow the heads from probe to probe."""
    dim, heads = len(start.probe), len(start.net.values)
    bases = 2 if effort.whole else 1
    directions = pairs.directions(rng, dim, bases)
    levels, uniform = predict_levels(start)
    design = start.design if uniform else start.design.with_sum()
    expected = dim // max(heads + uniform, 1)
    enough = int(np.ceil((1 + effort.surplus) * expected)) + 2
    first = dim if effort.whole else min(dim, max(4, enough // 2))

    def probes(moves: Array) -> Array:
        return pairs.at(start.probe, moves)

    def ask(moves: Array) -> Array:
        answers = pairs.respond(start.queries, probes(moves)).reshape(len(moves), -1, dim)
        return answers if uniform else pairs.sums.append(answers, probes(moves))

    size = np.sqrt(len(design.features) * dim) * start.level
    predicted = float(np.linalg.norm(design.units(start.net.slopes) @ start.net.values))
    allowed = MISFIT * max(float(start.net.residual), size / max(predicted, 1e-300))

    def fit(answers: Array) -> PairNets:
        # a fit that creeps far from the noise is on its way to no solution: its step is halved, its end not awaited.
        found = fit_nets(design, answers, start.net.slopes, iterations=40, tolerance=1e-3)
        near = np.flatnonzero(found.residual <= 1e3 * allowed)
        if len(near):
            ended = fit_nets(design, answers[near], found.slopes[near])
            for part, better in zip(found, ended, strict=True):
                part[near] = better
        return found

    def wanted(ranks: Indices | None, count: int) -> int:
        if effort.whole:
            return dim + 1 - count
        if ranks is not None and ranks.sum() <= dim:
            return int(np.ceil((1 + effort.surplus) * ranks.max())) + 2 - count
        return max(4, enough - count) if count < enough else max(4, count // 4)

    total = pairs.sums.projection if uniform else None
    gates = Gates(design, start.net, ask, probes, allowed, levels, fit=fit, failing=0.5, total=total)
    stacks = read_stacks(gates, directions * np.linalg.norm(start.probe), wanted, step=effort.step, first=first)
    if pairs.room < np.inf and (stacks.ranks is None or stacks.ranks.max() >= pairs.room):
        what = f"probes in {pairs.room:g} dimensions do not exhaust {len(stacks.values)} output spaces"
        raise RankBudgetError(what, pairs.room, dim)
    return stacks


def with_fewer_queries(pairs: Pairs, start: Separation, rng: Generator, loss: float) -> Separation:
    """Choose the fewest queries with which the values err at most `loss` times as much as with all of them."""
    heads, count, shifts = len(start.net.values), len(start.queries), len(pairs.shifts)
    summed = not predict_levels(start)[1]
    least = -(-(heads + SPARE - summed) // ((shifts - 1) * pairs.views))
    if heads * (count * pairs.views + heads) > PLANNED:
        return start
    whole = net_amplification(start.design, start.net)[1]
    for size in range(least, count):
        draws = [start.take(pairs, np.sort(rng.choice(count, size, replace=False))) for _ in range(DRAWS)]
        nets = [(one.design.with_sum() if summed else one.design, one.net) for one in draws]
        errors = [float(np.max(net_amplification(*net)[1] / whole)) for net in nets]
        if min(errors) <= loss:
            return draws[int(np.argmin(errors))]
    return start


def predict_levels(start: Separation) -> tuple[Array, bool]:
    """Predict the norm of the error of a row, per head; say whether the heads lack more than that of v0 W_S."""
    if not len(start.net.values):
        return np.array([start.level * np.sqrt(len(start.probe))]), True
    rows = start.level * net_amplification(start.design, start.net)[1] * np.sqrt(len(start.net.values))
    explained = float(np.linalg.norm(rows))
    uniform = start.lacking > CLEAR * explained
    return (np.append(rows, explained) if uniform else rows), uniform


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

r"""Values of every head at as many probes as the output spaces have dimensions, stage S2.

At the probe v_b = v_0 + tau |v_0| b a few of the queries of v_0 are asked, the fewest with which the predicted error
of the values stays within a factor of that with all of them, and the pair net is fitted from there:
its values are v_b W_i. After r + extra probes the rows of head i span its output space, the row space of W_i, and their
singular values fall from the r-th to the noise: then no further probe is needed. Where no head ignores the tokens,
sum_i v_b W_i = v_b W_S is one more row of the net, which no call is needed for. Directions b are an orthonormal basis
in random rotation; the step tau is halved where the residual or the margin of the heads objects.
"""

import functools

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.gates.pairs import Pairs, Separation, separate_heads
from manyheads.recovery.queries.nets.sigmoid_network import PairNets, fit_nets, net_amplification
from manyheads.recovery.queries.values.output_spaces import read_projections
from manyheads.recovery.queries.values.probes import Gates, Stacks, read_stacks
from manyheads.recovery.queries.values.projection_sum import Projections
from manyheads.recovery.queries.values.ranks import CLEAR
from manyheads.recovery.refusals import FitError, RankBudgetError
from manyheads.recovery.result.results import StageLog

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

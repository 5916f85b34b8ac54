r"""Extraction with O(d^2) queries of bounded norm, for oracles with rounding or noise.

Nothing is saturated and no output spaces are intersected, so that noise is not multiplied by the condition of their
separation, and heads may have full rank:

====  ==============  ==============================================================  ===========================
S0    `sums`          one token: W_S = sum_i W_i and c                                d + 1 calls
S1    `pairs`         pairs at one probe v_0: the number of heads, the share of each  a few m
F2    `bounded`       the net in all d coordinates of the query at v_0                n = 1.2 (d + 1 + m)
F3    `continuation`  the same queries at v_0 + tau |v_0| b, b an orthonormal basis   d n, and n for each halving
F4    `bounded`       Theta_i, beta_i and W_i, linear in the probe, by least squares  none
F5    `refinement`    all weights at once on random sequences, where noise asks for   only then
====  ==============  ==============================================================  ===========================

A refit of F3 is believed after three guards: its residual is that of v_0; its heads are matched to those of v_0 with a
margin; and the mirror probe v_0 - tau |v_0| b, whose net is known by then (everything is linear in the probe), answers
as that net says. The last one decides: two heads exchanged during a refit pass the first guard always and the second
one sometimes, and make the mirror wrong in the first order. It costs a few calls a direction.

One more row comes for nothing: with every gate open the answer would be v W_S.

Derived and measured here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BOUNDED, Effort
from manyheads.recovery.queries.gates.pairs import Pairs, Separation, separate_heads
from manyheads.recovery.queries.logits.row_reader import read_logits
from manyheads.recovery.queries.nets.sigmoid_network import EPS, NetDesign, PairNets, fit_nets
from manyheads.recovery.queries.nets.warm_start import Continuation, Followed, follow_nets
from manyheads.recovery.queries.refinement import refine_layer, refinement_work
from manyheads.recovery.queries.values.output_spaces import read_sums
from manyheads.recovery.refusals import FitError
from manyheads.recovery.result.results import Extracted, StageLog

SPREAD = (0.5, 1.0, 1.5)  # sizes of the queries in units of the scale at which logits are about one
MISFIT = 4.0  # a refit is right up to this multiple of the residual at v_0
# A mirror is right up to this multiple of the residual at v_0; an exchange of heads makes it of order 1 / noise
MIRROR = 30.0
LEAST = 1e-12  # relative residual below which two fits do not differ
WHOLE = 2.0  # the heads are all of W_S if one more row that says so raises the residual less than by this factor
ROOM = 5_000_000  # numbers in the answers of one block of directions
AFTER = 4  # copies of the query: so many shifts of all logits are seen by one call of a causal layer
STEP = 0.5  # first tau: how far the probes are from v_0, against its norm
MIRRORS = 3  # queries of the mirror of every probe
NOISY = 1e-5  # noise from which more queries are asked, and F5 is run
# Floating-point operations that F5 may be expected to take, and its numbers in the answers, against the weights
WORK, EXCESS = 1e12, 12.0


def count_queries(effort: Effort, dim: int, heads: int, noise: float) -> int:
    """Return the number of queries at every probe."""
    share = effort.queries or (1.2 if noise <= NOISY else 2.5)
    return int(np.ceil(share * (dim + 1 + heads))) + 2


def extract_bounded(oracle: Oracle, noise: float, rng: Generator, effort: Effort = BOUNDED) -> Extracted:
    """Extract a layer from an oracle that rounds or adds noise, with O(d^2) calls."""
    noise = max(noise, EPS)
    log = StageLog(oracle)
    with log.stage("sums"):
        sums = read_sums(oracle, oracle.dim, oracle.limits.reach)
    with log.stage("pairs") as figures:
        after = AFTER if oracle.causal else 2
        pairs = Pairs.within(oracle, sums, 1, after, noise, (1.0, 2.0, 1.5))
        start = separate_heads(pairs, oracle.dim, rng, oversampling=2.5, tries=effort.tries)
        figures |= start.figures()
    with log.stage("net") as figures:
        base = read_base(pairs, start, rng, effort)
        figures |= {"queries": len(base.queries), "residual": float(base.net.residual), "whole": base.whole}
    with log.stage("directions") as figures:
        followed, probes = follow_directions(base, rng)
        layer, lacking = assemble_layer(base, followed, probes, oracle.causal)
        steps, residual = followed.steps, float(followed.nets.residual.max())
        figures |= {
            "halvings": followed.halvings,
            "smallest step": float(steps.min()),
            "mean step": float(steps.mean()),
        }
        figures |= {"largest residual": residual, "largest margin": float(followed.margin.max()), "sum error": lacking}
    if noise > NOISY and refinement_work(oracle.dim, layer.heads, EXCESS) <= WORK:
        with log.stage("refinement") as figures:
            refined = refine_layer(oracle, layer, rng, excess=EXCESS)
            layer = refined.layer
            figures |= {name: float(value) for name, value in refined._asdict().items() if name != "layer"}
    return Extracted(layer, tuple(log.stages))


class Base(NamedTuple):
    """The net in all coordinates of the query at v_0."""

    # How pairs are asked, and v_0
    pairs: Pairs
    probe: Array
    # (n, d), and the size that makes their features of order one
    queries: Array
    scale: float
    # Rows (query, shift) and, where the heads are all of W_S, the row of open gates; slopes (m, d + 1) and values
    design: NetDesign
    net: PairNets
    level: float  # root mean square residual of an entry of the answers
    whole: bool  # whether the heads are all of W_S: none ignores the tokens

    def ask(self, displacements: Array) -> Array:
        """Return the answers (b, rows, d) at v_0 + displacements (b, d)."""
        probes = self.probe + displacements
        answers = self.pairs.respond(self.queries, probes).reshape(len(probes), -1, probes.shape[1])
        return self.pairs.sums.append(answers, probes) if self.whole else answers


def read_base(pairs: Pairs, start: Separation, rng: Generator, effort: Effort) -> Base:
    """Fit the net of all queries at v_0, from the values that its few queries gave."""
    probe, values = start.probe, start.net.values
    dim, heads = len(probe), len(values)
    count = count_queries(effort, dim, heads, pairs.noise)
    queries = pairs.shortened(start.scale * np.resize(SPREAD, count)[:, None] * rng.standard_normal((count, dim)))
    answers = pairs.respond(queries, probe)[0]  # (n, K, d)
    features = np.concatenate([queries / start.scale, np.ones((count, 1))], axis=1)
    design = NetDesign.of(np.repeat(features, len(pairs.shifts), axis=0), np.tile(pairs.shifts, count), centred=True)
    flat = answers.reshape(-1, dim)
    if heads == 0:
        net = PairNets(np.zeros((0, dim + 1)), np.zeros((0, dim)), np.zeros(()))
        return Base(pairs, probe, queries, start.scale, design, net, start.level, False)
    slopes = np.linalg.lstsq(features, read_logits(answers, values, pairs.shifts), rcond=None)[0].T
    net = fit_nets(design, flat, slopes, tolerance=1e-9)
    allowed = 10 * pairs.level(queries, probe, answers) * np.sqrt(flat.size) / np.linalg.norm(flat)
    what = f"the net of {heads} heads leaves more than noise: no linear logits, or a missing head"
    FitError.if_above(net.residual, allowed, what)
    level = float(net.residual) * np.linalg.norm(flat) / np.sqrt(flat.size)
    free = Base(pairs, probe, queries, start.scale, design, net, level, False)
    # a row whose gates are open by an infinite shift, and which is not centred.
    opened = design.with_sum()
    more = pairs.sums.append(flat[None], probe[None])[0]
    summed = fit_nets(opened, more, net.slopes, tolerance=1e-9)
    rest = float(summed.residual) * np.linalg.norm(more)
    if rest > WHOLE * max(float(net.residual), LEAST) * np.linalg.norm(flat):
        return free
    return free._replace(design=opened, net=summed, whole=True)


def follow_directions(base: Base, rng: Generator) -> tuple[Followed, Array]:
    """Follow the net of v_0 along an orthonormal basis; return the nets, and their probes (d, d)."""
    dim = len(base.probe)
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0] * np.linalg.norm(base.probe)
    if not len(base.net.values):
        nets = PairNets(np.zeros((dim, 0, dim + 1)), np.zeros((dim, 0, dim)), np.zeros(dim))
        steps = np.full(dim, STEP)
        return Followed(nets, steps, np.ones(dim, bool), 0, np.zeros(dim)), base.probe + STEP * basis
    follow = Continuation(base.design, base.net)
    mirror_check = _mirror(base, rng.choice(len(base.queries), min(MIRRORS, len(base.queries)), replace=False))
    block = int(np.clip(ROOM // (len(base.design.features) * dim), 1, max(1, dim // 4)))
    step, parts = STEP, []
    for first in range(0, dim, block):
        allowed = MISFIT * max(float(base.net.residual), LEAST)
        guards: dict[str, Any] = {"step": step, "allowed": allowed, "fit": follow.refit, "check": mirror_check}
        part = follow_nets(base.design, base.ask, base.net, basis[first : first + block], **guards)
        parts.append(part)
        if np.mean(part.steps < step) > 0.2:  # halvings cost more calls than the longer step saves digits
            step /= 2
    joined = Followed.join(parts)
    if not joined.accepted.all():
        lost = int((~joined.accepted).sum())
        raise FitError(f"in {lost} of {dim} directions the heads cannot be followed: another seed", lost / dim, 0.0)
    return joined, base.probe + joined.steps[:, None] * basis


def assemble_layer(base: Base, followed: Followed, probes: Array, causal: bool) -> tuple[AttentionLayer, float]:
    """Solve for the weights, which are linear in the probe; return the layer and what its projections lack of W_S."""
    dim, heads = len(base.probe), len(base.net.values)
    places = np.concatenate([base.probe[None], probes])  # (d + 1, d)
    slopes = np.concatenate([base.net.slopes[None], followed.nets.slopes])  # (d + 1, m, d + 1)
    values = np.concatenate([base.net.values[None], followed.nets.values])
    slopes[..., :dim] /= base.scale

    def solve(readings: Array) -> Array:  # (d + 1, m, p) -> (d, m, p): linear in the probe
        flat = np.linalg.lstsq(places, readings.reshape(dim + 1, -1), rcond=None)[0]
        return flat.reshape(dim, *readings.shape[1:])

    by_probe = solve(slopes)
    theta, key_bias = by_probe[..., :dim].transpose(1, 2, 0), by_probe[..., dim].T
    projection = solve(values).transpose(1, 0, 2)
    total = base.pairs.sums.projection
    rest = total - projection.sum(0)
    lacking = float(np.linalg.norm(rest) / max(np.linalg.norm(total), np.finfo(float).tiny))
    if base.whole:
        projection = projection + rest / heads  # W_S is known better than the heads are
    else:
        theta = np.concatenate([theta, np.zeros((1, dim, dim))])
        key_bias = np.concatenate([key_bias, np.zeros((1, dim))])
        projection = np.concatenate([projection, rest[None]])
    return AttentionLayer(theta, projection, key_bias, base.pairs.sums.bias, causal=causal), lacking


def _mirror(base: Base, chosen: Indices) -> Callable[[Array, PairNets], Array]:
    """Return the third guard: how far the answers at v_0 - displacement are from what the nets say of them."""
    queries, shifts = base.queries[chosen], len(base.pairs.shifts)
    rows = (chosen[:, None] * shifts + np.arange(shifts)).ravel()
    design = NetDesign(base.design.features[rows], base.design.shifts[rows], base.design.baselines[rows])

    def mirror_check(displacements: Array, nets: PairNets) -> Array:
        answers = base.pairs.respond(queries, base.probe - displacements)
        expected = design.units(2 * base.net.slopes - nets.slopes) @ (2 * base.net.values - nets.values)
        rest = answers.reshape(expected.shape) - expected
        size = np.sqrt(np.mean(answers**2))
        error: Array = np.sqrt(np.mean(rest**2, axis=(1, 2)))
        return error / (MIRROR * base.level + 1e3 * LEAST * size)

    return mirror_check

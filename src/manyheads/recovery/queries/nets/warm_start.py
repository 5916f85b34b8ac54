"""Warm-started fits from probe to probe, with guards against exchanged heads.

A fit that follows another one may end in a solution whose heads are exchanged, with a perfect residual: heads are
therefore matched to those of the reference by the least total cost, and a match is refused unless its worst pair is
clearly better than the best pair that was not made. The margin is ours, and measured here.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from manyheads.recovery._types import Array, ArrayFunction, Indices
from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, fit_nets

# Largest matched cost over smallest unmatched cost at which a match of heads still counts as clear. Measured here on
# trained layers: heads exchanged without any other sign had margins above one; right fits stay below a third.
MARGIN = 0.5
HALVINGS = 6  # halvings of the step of a probe, at most; then it is not accepted


class Match(NamedTuple):
    """Heads of one net matched to another."""

    order: Indices  # order[i] is the head of the found net that continues head i of the reference
    cost: float  # of the worst pair made
    margin: float  # its ratio to the best pair not made


class Followed(NamedTuple):
    """Nets at probes that were followed from a reference: the accepted ones, and what it took."""

    nets: PairNets  # nets of all probes, heads in the order of the reference
    steps: Array  # (b,) step of each probe, `step` halved as often as its guards asked for
    accepted: NDArray[np.bool_]  # (b,) whether all guards passed
    halvings: int  # halvings of all probes together
    margin: Array  # (b,) margin of each match

    @classmethod
    def join(cls, parts: "list[Followed]") -> "Followed":
        """Join what was followed in several blocks."""
        nets, steps, accepted, halvings, margin = zip(*parts, strict=True)
        joined = PairNets(*(np.concatenate(stack) for stack in zip(*nets, strict=True)))
        return cls(joined, np.concatenate(steps), np.concatenate(accepted), sum(halvings), np.concatenate(margin))


def match_net(found: PairNets, reference: PairNets, design: NetDesign | None = None) -> Match:
    """Match the heads of one net to those of a reference by the least total cost of their relative changes.

    The cost of a pair is |C' - C|^2 / (|C|^2 + .2 mean |C|^2) + .3 |t' - t|^2 / (|t|^2 + mean |t|^2), with t the
    slopes, or the units of `design`, where one is given: saturated gates say nothing of their logits. Both terms are
    pooled with the mean over heads: with per-head scales a head of small slopes was exchanged.
    """
    before, after = reference.slopes, found.slopes
    if design is not None:
        before, after = (design.units(slopes).T for slopes in (before, after))
    values, gates = ((part**2).sum(1) for part in (reference.values, before))
    tiny = np.finfo(np.float64).tiny
    apart = ((found.values[None] - reference.values[:, None]) ** 2).sum(-1)
    turned = ((after[None] - before[:, None]) ** 2).sum(-1)
    cost = apart / (values + 0.2 * values.mean() + tiny)[:, None]
    cost += 0.3 * turned / (gates + gates.mean() + tiny)[:, None]
    heads, order = linear_sum_assignment(cost)
    worst = float(cost[heads, order].max())
    cost[heads, order] = np.inf
    return Match(order, worst, worst / max(float(cost.min()), tiny))


def follow_nets(
    design: NetDesign,
    ask: ArrayFunction,
    reference: PairNets,
    probes: Array,
    *,
    step: float,
    allowed: float,
    fit: Callable[[Array], PairNets] | None = None,
    check: Callable[[Array, PairNets], Array] | None = None,
) -> Followed:
    """Fit the nets at `step` times each probe, from the reference at zero; halve the step where a guard objects.

    `probes` (b, a) are displacements of step one, `ask` returns the answers (b, n, D) at displacements, `allowed` is
    the largest relative residual of a right fit. `fit` starts from the reference; None is `fit_nets`. `check` is a
    third guard for nets that passed the other two: above 1 it objects. Returns the best fit of every probe, and which
    are accepted.
    """
    count = len(probes)
    steps, margin, accepted = np.full(count, float(step)), np.full(count, np.inf), np.zeros(count, bool)
    score, kept = np.full(count, np.inf), steps.copy()
    nets: list[PairNets | None] = [None] * count
    spent, pending = 0, np.arange(count)
    for turn in range(HALVINGS + 1):
        answers = ask(steps[pending, None] * probes[pending])
        found = fit_nets(design, answers, reference.slopes) if fit is None else fit(answers)
        matches = [match_net(found.one(row), reference, design) for row in range(len(pending))]
        found = _stack([found.one(row).permute(match.order) for row, match in enumerate(matches)])
        objection = np.maximum(found.residual / allowed, 1.0)
        objection *= np.maximum(np.array([match.margin for match in matches]) / MARGIN, 1.0)
        fine = np.flatnonzero(objection <= 1.0)
        if check is not None and len(fine):
            moves = steps[pending, None] * probes[pending]
            objection[fine] = np.maximum(check(moves[fine], found.one(fine)), 1.0)
        for row, probe in enumerate(pending):
            if objection[row] < score[probe]:
                nets[probe], score[probe] = found.one(row), objection[row]
                margin[probe], kept[probe] = matches[row].margin, steps[probe]
        accepted[pending] = score[pending] <= 1.0
        pending = pending[~accepted[pending]]
        if not len(pending) or turn == HALVINGS:
            break
        steps[pending] /= 2
        spent += len(pending)
    return Followed(_stack(nets), kept, accepted, spent, margin)


def _stack(nets: "list[PairNets] | list[PairNets | None]") -> PairNets:
    return PairNets(*(np.stack(part) for part in zip(*nets, strict=True)))

"""Warm-started fits from probe to probe, with guards against exchanged heads.

A fit that follows another one may end in a solution whose heads are exchanged, with a perfect residual: heads are
therefore matched to those of the reference by the least total cost, and a match is refused unless its worst pair is
clearly better than the best pair that was not made. The margin is ours, and measured here.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve
from scipy.optimize import linear_sum_assignment

from manyheads.recovery._types import Array, ArrayFunction, Indices
from manyheads.recovery.fit.variable_projection import factor_gram
from manyheads.recovery.queries.nets.sigmoid_network import (
    TINY,
    NetDesign,
    NetState,
    PairNets,
    fit_nets,
    kaufman_normal,
)

# Largest matched cost over smallest unmatched cost at which a match of heads still counts as clear. Measured here on
# trained layers: heads exchanged without any other sign had margins above one; right fits stay below a third.
MARGIN = 0.5
HALVINGS = 6  # halvings of the step of a probe, or of a refit, at most; then it is not accepted, or has ended
STEPS = 40  # Gauss-Newton steps of a refit, at most
INNER = 40  # conjugate-gradient iterations of a step, at most: a step cut short is still one of descent
FORCING = 1e-2  # what the inner iterations leave of the gradient, in the norm of the preconditioner
RIDGE = 1e-13  # of the preconditioner, against its own diagonal


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


def match_net(found: PairNets, reference: PairNets, design: NetDesign | None = None) -> tuple[Indices, float]:
    """Match the heads of one net to those of a reference by the least total cost of their relative changes.

    Returns the heads that continue those of the reference, and the ratio of the worst pair made to the best not made.

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
    return order, worst / max(float(cost.min()), tiny)


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
        orders, margins = zip(
            *(match_net(found.one(row), reference, design) for row in range(len(pending))), strict=True
        )
        found = _stack([found.one(row).permute(order) for row, order in enumerate(orders)])
        objection = np.maximum(found.residual / allowed, 1.0)
        objection *= np.maximum(np.array(margins) / MARGIN, 1.0)
        fine = np.flatnonzero(objection <= 1.0)
        if check is not None and len(fine):
            moves = steps[pending, None] * probes[pending]
            objection[fine] = np.maximum(check(moves[fine], found.one(fine)), 1.0)
        for row, probe in enumerate(pending):
            if objection[row] < score[probe]:
                nets[probe], score[probe] = found.one(row), objection[row]
                margin[probe], kept[probe] = margins[row], steps[probe]
        accepted[pending] = score[pending] <= 1.0
        pending = pending[~accepted[pending]]
        if not len(pending) or turn == HALVINGS:
            break
        steps[pending] /= 2
        spent += len(pending)
    return Followed(_stack(nets), kept, accepted, spent, margin)


def _stack(nets: "list[PairNets] | list[PairNets | None]") -> PairNets:
    return PairNets(*(np.stack(part) for part in zip(*nets, strict=True)))


class Continuation:
    r"""A large net known at one probe, refitted at many neighbouring ones by preconditioned Gauss-Newton.

    What the last row of the pair (q + v, q) shows is a net of one hidden layer in q whose slopes, offsets and values
    are all linear in v:

    .. math:: \vartheta_i = (\Theta_i v, \beta_i^\top v), \qquad C_i = W_i^\top v.

    The net that is known at v_0 therefore starts the fit at v_0 + delta for every direction. `fit_nets` forms and
    solves a normal matrix of (heads x features)^2 for every probe, which is right for a few features and too much for
    all d of them. Here the fits share their queries and their normal matrices are near that of v_0, so it is factorized
    once and preconditions conjugate gradients inside Gauss-Newton, for all directions together: the work of a step is
    that of a few matrix products of (rows x features), and the answer is the same least-squares fit. Derived here.
    """

    def __init__(self, design: NetDesign, reference: PairNets, *, tolerance: float = 1e-6):
        self.design, self.reference, self.tolerance = design, reference, tolerance
        gates = design.gates(reference.slopes)
        basis = np.linalg.qr(design.units(reference.slopes))[0]
        normal = kaufman_normal(design.features, (gates * (1 - gates))[None], basis[None], reference.values[None])[0]
        self._scale = np.sqrt(np.diag(normal) + RIDGE * np.trace(normal) / len(normal) + TINY)
        normal /= self._scale[:, None] * self._scale
        self._factor = factor_gram(normal, RIDGE)  # of unit diagonal; the ridge only preconditions

    def refit(self, answers: Array) -> PairNets:
        """Fit a net to the answers (b, n, D) of every probe, starting from the net at v_0."""
        total = np.sum(answers**2, axis=(1, 2)) + TINY
        state = NetState.at(self.design, np.repeat(self.reference.slopes[None], len(answers), axis=0), answers)
        going = np.arange(len(answers))
        for _ in range(STEPS):
            here = state.take(going)
            moved = self._search(here, self._step(here), answers[going])
            state.put(going, moved)
            gain = 1 - moved.loss / np.maximum(here.loss, TINY)
            going = going[(gain >= self.tolerance) & (moved.loss > 1e-32 * total[going])]
            if not len(going):
                break
        return PairNets(state.slopes, state.values, np.sqrt(state.loss / total))

    def _precondition(self, gradient: Array) -> Array:
        """Apply the inverse of the normal matrix of v_0 to (b, m, p)."""
        flat = gradient.reshape(len(gradient), -1) / self._scale
        solved: Array = cho_solve(self._factor, flat.T, check_finite=False).T / self._scale
        return solved.reshape(gradient.shape)

    def _step(self, state: NetState) -> Array:
        """Solve the Gauss-Newton equations of every fit, up to a share of its gradient."""
        derivative = state.derivative
        gram = state.values @ state.values.swapaxes(1, 2)  # (b, m, m)
        features = self.design.features

        def vjp(output: Array) -> Array:  # (b, n, m) -> (b, m, p)
            weighted = (derivative * output).transpose(1, 0, 2).reshape(len(features), -1)
            return (weighted.T @ features).reshape(len(output), -1, features.shape[1])

        def normal(direction: Array) -> Array:
            moved = features @ direction.reshape(-1, features.shape[1]).T  # (n, b m)
            moved = derivative * moved.reshape(len(features), len(direction), -1).swapaxes(0, 1)
            moved -= state.basis @ (state.basis.swapaxes(1, 2) @ moved)
            return vjp(moved @ gram)

        return _conjugate_gradients(normal, self._precondition, vjp(state.rest @ state.values.swapaxes(1, 2)))

    def _search(self, state: NetState, step: Array, answers: Array) -> NetState:
        """Halve the step of every fit until its loss falls; a fit that nothing improves stays."""
        result = state.take(np.arange(len(step)))
        waiting = np.arange(len(step))
        for halving in range(HALVINGS):
            tried = NetState.at(self.design, state.slopes[waiting] + 0.5**halving * step[waiting], answers[waiting])
            better = tried.loss < state.loss[waiting]
            result.put(waiting[better], tried.take(better))
            waiting = waiting[~better]
            if not len(waiting):
                break
        return result


def _dot(left: Array, right: Array) -> Array:
    return np.einsum("bij,bij->b", left, right)


def _conjugate_gradients(apply: ArrayFunction, precondition: ArrayFunction, right: Array) -> Array:
    """Solve many definite systems at once; each stops where its preconditioned residual is small."""
    solution, residual = np.zeros_like(right), right.copy()
    direction = precondition(residual)
    size = _dot(residual, direction)
    enough = FORCING**2 * size
    for _ in range(INNER):
        image = apply(direction)
        curvature = _dot(direction, image)
        going = (size > enough) & (curvature > 0)
        if not going.any():
            break
        length = np.where(going, size / np.maximum(curvature, TINY), 0.0)[:, None, None]
        solution += length * direction
        residual -= length * image
        preconditioned = precondition(residual)
        renewed = _dot(residual, preconditioned)
        ratio = np.where(going, renewed / np.maximum(size, TINY), 0.0)[:, None, None]
        direction = np.where(going[:, None, None], preconditioned + ratio * direction, direction)
        size = np.where(going, renewed, size)
    return solution

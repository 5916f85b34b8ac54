r"""Heads beside learned sinks: logits of a value of zero, which take a share of every row.

With a sink of logit z_i, and with biases of values v_i, which are no constant then, an answer is

.. math:: y_r = c + \sum_i \sum_j a_i(r, j)\, (x_j W_i + v_i), \qquad \sum_j a_i(r, j) = 1 - p_i(r) < 1 .

Repeated tokens. Let all tokens be z. Moving the token j moves the share of the sink too, so that

.. math:: \frac{\partial y_r}{\partial x_j} = \sum_i a_i(r, j)\, W_i + \sum_i g_i(r, j)\, (z W_i + v_i)

with vectors g_i of which nothing is known. But what they multiply are m vectors of the outputs: sequences of multiples
of z have answers in the span of all z W_i and v_i, which is read, and at right angles to it (Q) the Jacobians are sums
of a_i(r, j) W_i Q as they are without sinks (`heads`).

Scale. A head is a_i(r, j) times W_i Q up to a factor f_i. With e_t = a_i(r, r - t) / a_i(r, r) the weights are
a_i(r, r) = 1 / (b_i + e_0 + ... + e_r), b_i = exp(z_i - s_i(z, z, 0)), so that 1 / (f_i a_i(r, r)) is affine in the
sums of e_t that a row sees, and its slope is 1 / f_i.

Everything else. Weights of any row follow from W_i Q, and with them answers are linear in W_i, v_i and c.

Logits of sinks. What the tokens of a row leave of 1 is the weight of the sink, so that scores are known relative to its
logit z_i, what depends on the query alone included:

.. math:: \ln a_i(q, y_0) - \ln\Big(1 - \sum_j a_i(q, x_j)\Big) = s_i(q, y_0, t_0) - z_i .

Of scores that were read relative to those of a token y_0, this is what they lack. With s_i = x~_r^T Theta x~_j and a
column space L of Theta that does not hold e = (0, ..., 0, 1), as it does not where heads are of rank d or less, the
constant -z_i is beside L, and z_i is determined; terms of position are 0 at the offset 0. Derived here.
"""

from dataclasses import replace

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.logits.ledger import log_ratios, solve_weights
from manyheads.recovery.queries.rotary.forms import extend, row_space
from manyheads.recovery.queries.scores.heads import (
    Heads,
    best_token,
    check_room,
    first_length,
    jacobians_at,
    output_spaces,
    step_at,
)
from manyheads.recovery.queries.scores.reading import ScoreReader
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, RankBudgetError

CURVED = 1e-8  # relative distance of answers to one token from affine ones, beyond which there are sinks
WRONG = 10.0  # relative error of derivatives by differences of order 8, times that of the noise
SPAN = 1e-7  # singular values of answers below are rounding
RIGHT = 1e-8  # misfit of the weights of a repeated token beyond which another token is tried
ROUNDS = 3  # of reading weights, and solving for the projections
UNBIASED = 1e-7  # size of biases of values, relative to the values, below which there are none


def find_heads_beside_sinks(oracle: Oracle, sums: Sums, noise: float, rng: Generator) -> Heads:
    """Find the projections of all heads, the biases of their values, and c."""
    length = int(np.clip(oracle.dim // 4, 6, 10))
    first = first_length(oracle, rng)

    def read(z: Array) -> tuple[float, tuple[list[Array], float]]:
        return _visible_parts(oracle, z, length, noise, rng)

    parts, separation = best_token(oracle, first, max(RIGHT, 1e4 * noise), rng, read, None)
    return _solve(oracle, sums, parts, separation, noise, first, rng)


def _visible_parts(
    oracle: Oracle, z: Array, length: int, noise: float, rng: Generator
) -> tuple[float, tuple[list[Array], float]]:
    """Return the misfit, W_i Q (d, d) of all heads at right angles to the answers about multiples of z, separation."""
    dim = len(z)
    factors = rng.standard_normal((dim + 8, 6, 1))
    answers = oracle(oracle.limits.shortened(factors * z), read="last")
    spectrum, rows = np.linalg.svd(answers - answers.mean(0), full_matrices=True)[1:]
    hidden = gap_rank(spectrum, max(SPAN, 1e3 * noise))
    what = "answers about multiples of one token span all outputs: sinks leave nothing to read heads"
    FitError.if_above(hidden, dim - 2, what)
    beside = rows[hidden:].T  # (d, q)
    jacobians = jacobians_at(oracle, z, length, step_at(z, noise)) @ beside
    spaces, separation = output_spaces(jacobians, WRONG * max(noise, 1e-16) ** (8 / 9), rng)
    whole = np.concatenate(spaces)
    RankBudgetError.if_above(len(whole), whole.shape[1], f"output spaces of {len(spaces)} heads and sinks do not fit")
    shares = jacobians @ np.linalg.pinv(whole)
    cuts = np.cumsum([len(space) for space in spaces])[:-1]
    found, worst = [], 0.0
    for share, space in zip(np.split(shares, cuts, axis=-1), spaces, strict=True):
        part, rest = _scale(share)
        found.append(part @ space @ beside.T)
        worst = max(worst, rest)
    return worst, (found, separation)


def _scale(share: Array) -> tuple[Array, float]:
    """Return U (d, r) of shares a(r, j) U (k, k, d, r) of the Jacobians of one head, and the relative misfit."""
    length = len(share)
    row, place = np.tril_indices(length)
    left, size, right = np.linalg.svd(share[row, place].reshape(len(row), -1), full_matrices=False)
    weights = np.zeros((length, length))  # of rows and offsets
    weights[row, row - place] = left[:, 0] * size[0]
    sign = np.sign(weights.sum())
    weights *= sign
    sums, own = np.cumsum(weights[-1] / weights[-1, 0]), weights[:, 0]
    intercept, slope = np.linalg.lstsq(np.stack([own, own * sums], axis=1), np.ones(length), rcond=None)[0]
    misfit = float(np.sqrt(np.mean((own * (intercept + slope * sums) - 1) ** 2)))
    if not (slope > 0 and misfit < 1e-3):
        raise FitError("the weights of a repeated token are of no sink that is the same in all rows", misfit, 1e-3)
    return sign * right[0].reshape(share.shape[2:]) / slope, max(misfit, float(size[1] / size[0]))


def _solve(
    oracle: Oracle, sums: Sums, parts: list[Array], separation: float, noise: float, scale: float, rng: Generator
) -> Heads:
    """Read weights of rows of random tokens, `scale` times as long as usual, and solve for W, v and c, in turns."""
    dim, heads = oracle.dim, len(parts)
    floor = max(1e-9, 1e3 * noise)
    seen = [gap_rank(np.linalg.svd(part, compute_uv=False), max(1e-6, 10 * floor)) for part in parts]
    length = min(3, *seen)
    unknown = heads * (dim + 1) + 1
    x: Array = rng.standard_normal((-(-3 * unknown // (2 * length)) + 8, length, dim))
    x = oracle.limits.shortened(x * (scale * np.exp(rng.uniform(np.log(0.3), 0.2, (len(x), 1, 1)))))
    y = oracle(x, read="all")
    span = np.linalg.svd(np.concatenate(parts), full_matrices=False)[2][: sum(seen)]  # (q, d)
    projection, shift, constant = np.array(parts), np.zeros((heads, dim)), sums.bias
    onto, ranks, rest = span.T @ span, seen, np.inf
    for _ in range(ROUNDS):
        columns, targets = [], []
        values = np.einsum("nkd,mde->nkme", x, projection @ onto) + shift @ onto
        solved = solve_weights(values, (y - constant) @ onto, range(1, length + 1))
        for row, weights in enumerate(solved):  # (n, row + 1, m)
            moved = np.einsum("nkm,nkd->nmd", weights, x[:, : row + 1]).reshape(len(x), -1)
            columns.append(np.concatenate([moved, weights.sum(1), np.ones((len(x), 1))], axis=1))
            targets.append(y[:, row])
        table, target = np.concatenate(columns), np.concatenate(targets)
        found = np.linalg.lstsq(table, target, rcond=None)[0]
        rest = float(np.linalg.norm(target - table @ found) / np.linalg.norm(target - target.mean(0)))
        projection = found[: heads * dim].reshape(heads, dim, dim)
        shift, constant = found[heads * dim : -1], found[-1]
        both = np.concatenate([projection, shift[:, None]], axis=1)
        spectra = [np.linalg.svd(one, full_matrices=False)[1:] for one in both]
        ranks = [gap_rank(size, max(1e-6, 10 * floor)) for size, _ in spectra]
        spaces = [right[:rank] for (_, right), rank in zip(spectra, ranks, strict=True)]
        projection, shift = (
            np.array([one @ space.T @ space for one, space in zip(stack, spaces, strict=True)])
            for stack in (projection, shift)
        )
        onto = np.eye(dim)
    check_room(spaces)
    condition = float(np.linalg.cond(np.concatenate(spaces)))
    biased = np.linalg.norm(shift) > UNBIASED * np.linalg.norm(projection)
    value_bias = shift if biased else None
    return Heads(projection, ranks, separation, rest, condition, value_bias=value_bias, bias=constant)


def complete_sinks(
    layer: ScoreLayer, reader: ScoreReader, queries: Array, noise: float, allowed: float, figures: Figures
) -> ScoreLayer:
    """Return a layer with the logits of its sinks, and with what its forms lack of the query alone."""
    assert reader.reference is not None
    assert layer.turns is not None
    x = np.stack([np.broadcast_to(reader.reference, queries.shape), queries], axis=1)
    weights = reader.weights(x, reader.oracle(x, read="last"))  # (n, 2, m)
    apart = layer.logits(x)[:, :, 1, 0].T - log_ratios(weights)[:, 0]
    trust = np.sqrt(np.clip(weights[:, 0] * (1 - weights.sum(1)), 0.0, 1.0))
    terms, one = layer.position_bias, np.eye(layer.dim + 1)[:, -1:]
    found, shift, worst = [], [], 0.0
    for head, form in enumerate(layer.form(1)):
        space = np.concatenate([row_space(form[:, :-1].T, noise), one], axis=1)  # L, and e
        features, own = extend(queries) @ space, trust[:, head]
        solved = np.linalg.lstsq(features * own[:, None], apart[:, head] * own, rcond=1e-12)[0]
        misfit = np.linalg.norm((features @ solved - apart[:, head]) * own) / np.linalg.norm(own)
        worst = max(worst, float(misfit))
        constant = np.linalg.lstsq(space, form[:, -1], rcond=None)[0][-1]
        found.append(solved[-1] - constant - (0.0 if terms is None else terms[head, 0]))
        more = space[:, :-1] @ solved[:-1] + constant * one[:, 0]  # what the last column has too much
        shift.append(layer.turns.shift[head] + np.linalg.lstsq(layer.turns.left[head], more, rcond=None)[0])
    figures["sinks"] = worst
    FitError.if_above(worst, allowed, "the logits of sinks are no constants: what they depend on is of another kind")
    turns = replace(layer.turns, shift=tuple(shift))
    forms_ = np.array([turns.form(t) for t in range(layer.offsets)])
    terms = None if terms is None else terms - terms[:, :1]
    return replace(layer, forms=forms_, turns=turns, sink=np.array(found), position_bias=terms)

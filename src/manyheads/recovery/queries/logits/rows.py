r"""Query-key circuits Theta_i and key biases from all rows of a sequence, stage S4.

Every row t of the answer to x_0 = 0, x_1, ..., x_T is linear in the attention weights of that row,

.. math:: y_t - c = \sum_i \sum_j a^i_{tj}\, x_j W_i, \qquad
    \ln \frac{a^i_{tj}}{a^i_{t0}} = x_t^\top \Theta_i x_j + \beta_i^\top x_j,

because the zero token reads nothing and has logit zero; its weight is what the others leave of one (`row_reader`, with
sketch tokens and an orthonormal basis). Sequences cover all pairs of groups; with r or more sketch tokens, Theta_i of
rank r is known (`sketches`).

Heads of rank one read one number of a token, so that a row shows no two weights. Their logits are read off pairs
instead, where copies of q + v and q have one gate a head and the values v W_i are known: q^T Theta_i v + beta_i^T v for
q in the basis and v in the sketch and the other way round, and for q = 0 (2 nu d + d calls).

Heads that leave enough tokens without values for them are read with such tokens, in groups: fewer
sequences wherever that is possible.

The weights are solved per head, from the answers in the coordinates O^+ of its output space (at most r unknowns), or
jointly for all heads (at most d unknowns), which is the better conditioned and the dearer way.

Sequences and logits by multiplicities are derived here.

Query-key circuits of a group of heads, from sequences in which most tokens have no values for them.

A token n with n W_i = 0 in all heads of the group takes part in the softmax and adds nothing to what they write, so
that a row with T <= r_i tokens x_1, ..., x_T of linearly independent values and any number of such tokens shows

.. math:: \ln a^i_{tj} - \frac{1}{T} \sum_{k=1}^T \ln a^i_{tk} = (x_t^\top \Theta_i + \beta_i^\top) (x_j - \bar x),

whatever the others weigh. There are d - sum_i r_i dimensions of unseen tokens. Two parts are asked:

1. [0, x_1, ..., x_T, u_1, ..., u_nu, 0] with all queries u unseen: U Theta_i and beta_i from d / (T - 1) sequences. The
   tokens x are orthonormal frames with a direction of mean in common; the last ones supply that direction, and spare
   ones that measure the noise. The row space Q_i of U Theta_i is that of Theta_i = X_i Q_i^T.
2. [0, x_1, ..., x_T, x_1, ..., x_T, n_1, n_2, ...] (the copies only where causal): rows of x and of n are linear
   equations for those of X_i, r_i unknowns each. Tokens x have the dimensions that are seen, n the others, and in every
   round all of them occur once.

That is d / (T - 1) + nu sum_i r_i / T^2 sequences, where rows without unseen tokens need 4 nu d / T^2. Derived here.
"""

import contextlib

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.logits.row_reader import (
    Attentions,
    PairReader,
    RowReader,
    Rows,
    UnseenPlan,
    check_agreement,
    plan_groups,
    sketch_tokens,
)
from manyheads.recovery.queries.logits.sketches import SPARE, SketchedForm, read_forms, sketched_form
from manyheads.recovery.queries.nets.sigmoid_network import TINY
from manyheads.recovery.queries.values.output_spaces import Projections
from manyheads.recovery.queries.values.ranks import rank_by_gap
from manyheads.recovery.refusals import FitError

DRAWS = 12  # tokens are drawn so often, and those whose values are farthest from dependent ones are asked


def read_with_unseen_tokens(
    reader: RowReader, plan: UnseenPlan, scale: float, rng: Generator, noise: float
) -> Attentions:
    """Read Theta and beta of the heads of a group; refuse what the unseen tokens do not show."""
    heads, dim = reader.heads, len(reader.base)
    norm, values = np.sqrt(dim) * scale, np.concatenate(heads.readers, axis=1)
    seen, unseen = np.split(np.linalg.qr(values, mode="complete")[0].T * norm, [plan.space])
    # Rotated: the first vectors of the decomposition alone have values for its first head
    seen, unseen = (np.linalg.qr(rng.standard_normal((len(part),) * 2))[0] @ part for part in (seen, unseen))
    sketch, beta, entry = _read_keys(reader, plan, unseen[: plan.queries], rng)
    floors = np.maximum(entry, noise * np.abs(sketch).max((1, 2)))
    bases = [_row_space(one, float(floor)) for one, floor in zip(sketch, floors, strict=True)]
    products, errors = _read_queries(reader, plan, bases, beta, seen, unseen, rng)
    apart = float(max(entry.max(), errors.max()))
    check_agreement(apart, heads, noise)
    theta = np.stack([part @ basis.T for part, basis in zip(products, bases, strict=True)])
    ranks = np.array([basis.shape[1] for basis in bases], np.intp)
    return Attentions(theta, beta, ranks, apart, scale, reader.smallest)


def _read_keys(reader: RowReader, plan: UnseenPlan, queries: Array, rng: Generator) -> tuple[Array, Array, Array]:
    """Ask the first part: U Theta (m, nu, d), beta (m, d), and the errors of the entries of U Theta (m,)."""
    dim, tokens, norm = queries.shape[1], plan.seen, float(np.linalg.norm(queries[0]))
    frames = min((_frames(dim, plan, rng) for _ in range(DRAWS)), key=lambda one: _condition(reader, one)) * norm
    parts = [np.zeros((1, dim)), None, queries] + ([np.zeros((1, dim))] if reader.oracle.causal else [])
    sequences = np.stack([np.concatenate([frame if part is None else part for part in parts]) for frame in frames])
    rows = [*range(tokens + 1, tokens + 1 + len(queries)), tokens + 1 + len(queries) if reader.oracle.causal else 0]
    read = [Rows(row, tokens, np.ones(tokens), 1) for row in rows]
    logits = np.stack([reader.centred_logits(w, r) for w, r in zip(reader.weights(sequences, read), read, strict=True)])
    design = (frames - frames.mean(1, keepdims=True)).reshape(-1, dim)
    right = np.moveaxis(logits, 0, 2).reshape(len(design), -1)  # (parts T, rows m)
    solved = np.linalg.lstsq(design, right, rcond=None)[0]
    spare = len(frames) * (tokens - 1) - dim
    rest = (right - design @ solved).reshape(len(design), len(rows), -1)
    entry = np.sqrt((rest**2).sum((0, 1)) / (spare * len(rows))) / norm
    found = np.moveaxis(solved.reshape(dim, len(rows), -1), 0, 2)  # (rows, m, d)
    return np.swapaxes(found[:-1] - found[-1], 0, 1), found[-1], entry


def _condition(reader: RowReader, tokens: Array) -> float:
    """Return the largest condition number of the values of the tokens (n, T, d) of a sequence, over the heads."""
    found = [np.linalg.svd(tokens @ part, compute_uv=False) for part in reader.heads.readers]
    return max(float((singular[:, 0] / np.maximum(singular[:, -1], TINY)).max()) for singular in found)


def _frames(dim: int, plan: UnseenPlan, rng: Generator) -> Array:
    """Return orthonormal frames (parts, T, d) whose differences span the space, and a dimension more."""
    share = plan.seen - 1
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    first = -(-(dim - 1) // share)
    # T orthonormal vectors of which the first is the direction of the mean
    columns = np.concatenate([np.ones((plan.seen, 1)), rng.standard_normal((plan.seen, share))], axis=1)
    simplex = np.linalg.qr(columns)[0]
    means = [basis[0]] * first + [basis[1 + place] for place in range(plan.keys - first)]
    others = list(np.resize(np.arange(1, dim), first * share).reshape(first, share))
    others += [np.r_[0, rng.permutation(np.arange(3, dim))[: share - 1]] for _ in means[first:]]
    return np.stack([simplex @ np.concatenate([m[None], basis[o]]) for m, o in zip(means, others, strict=True)])


def _row_space(sketch: Array, error: float) -> Array:
    """Return an orthonormal basis (d, r) of the rows of U Theta, whose entries err by so much."""
    _, singular, right = np.linalg.svd(sketch, full_matrices=False)
    rank = rank_by_gap(singular, error * (np.sqrt(len(sketch)) + np.sqrt(sketch.shape[1])))
    if rank is None or rank > len(sketch) - SPARE:
        what = "the logits of queries without values have too many dimensions, or no gap to the noise"
        raise FitError(what, singular[-1], error)
    return right[:rank].T


def _read_queries(
    reader: RowReader, plan: UnseenPlan, bases: list[Array], beta: Array, seen: Array, unseen: Array, rng: Generator
) -> tuple[list[Array], Array]:
    """Ask the second part: X_i (d, r_i) with Theta_i = X_i Q_i^T, and the errors of their logits over the norm (m,)."""
    dim, tokens, norm = seen.shape[1], plan.seen, float(np.linalg.norm(unseen[0]))

    def draw() -> Indices:
        return np.resize(rng.permutation(plan.space), plan.parts * tokens)

    def condition(order: Indices) -> float:
        return _condition(reader, seen[order].reshape(plan.parts, tokens, dim))

    places = np.stack([min((draw() for _ in range(DRAWS)), key=condition) for _ in range(plan.rounds)])
    # Tokens of every round have the values of the basis, and parts without values that are drawn anew
    mixed = rng.standard_normal((*places.shape, len(unseen)))
    mixed /= np.linalg.norm(mixed, axis=-1, keepdims=True)
    shown = ((seen[places] + mixed @ unseen) / np.sqrt(2)).reshape(-1, tokens, dim)
    chunks = np.array_split(np.arange(len(unseen)), plan.parts)
    most = len(chunks[0])
    hidden = np.tile(unseen[np.stack([np.resize(chunk, most) for chunk in chunks])], (plan.rounds, 1, 1))
    copies = [shown, shown] if reader.oracle.causal else [shown]
    sequences = np.concatenate([np.zeros((len(shown), 1, dim)), *copies, hidden], axis=1)
    start, ones = len(copies) * tokens + 1, np.ones(tokens)
    last = np.tril(np.ones((tokens, tokens))) if reader.oracle.causal else np.zeros((tokens, tokens))
    read = [Rows(start - tokens + row, tokens, ones + last[row], 1) for row in range(tokens)]
    read += [Rows(start + row, tokens, ones, 1) for row in range(most)]
    logits = np.stack([reader.centred_logits(w, r) for w, r in zip(reader.weights(sequences, read), read, strict=True)])
    logits = np.moveaxis(logits, 3, 0).reshape(len(bases), len(read), plan.rounds, plan.parts, tokens)
    centred = (shown - shown.mean(1, keepdims=True)).reshape(plan.rounds, plan.parts, tokens, dim)
    first = np.stack([np.unique(order, return_index=True)[1] for order in places], axis=1)  # (R, rounds)
    turns, count = np.arange(plan.rounds), plan.rounds * tokens
    part, row = np.divmod(first, tokens)
    found, errors = [], []
    for one, basis, bias in zip(logits, bases, beta, strict=True):
        design = centred @ basis  # (rounds, parts, T, r)
        right = one - centred @ bias
        spread = []  # by queries without values
        for number, chunk in enumerate(chunks):
            wanted = right[tokens : tokens + len(chunk), :, number].reshape(len(chunk), -1)
            spread.append(_solve(design[:, number].reshape(1, count, basis.shape[1]), wanted))
        plain, rest = np.concatenate([a for a, _ in spread]), sum(b for _, b in spread)
        used = design[turns, part]  # (R, rounds, T, r)
        known = np.einsum("pgn,nr,pgtr->pgt", mixed[turns, first], plain, used, optimize=True)
        wanted = np.sqrt(2) * right[row, turns, part] - known
        valued, more = _solve(used.reshape(plan.space, count, basis.shape[1]), wanted.reshape(plan.space, -1))
        found.append((unseen.T @ plain + seen.T @ valued) / norm**2)
        errors.append(np.sqrt((rest + more) / (dim * (plan.rounds * (tokens - 1) - basis.shape[1]))) / norm)
    return found, np.array(errors)


def _solve(designs: Array, right: Array) -> tuple[Array, float]:
    """Least squares (n, r) of designs (n or 1, equations, r) and right sides (n, equations), and the squared rest."""
    found = (np.linalg.pinv(designs) @ right[..., None])[..., 0]
    rest = right - (designs @ found[..., None])[..., 0]
    return found, float((rest**2).sum())


SHORTEST = {True: 5, False: 3}  # tokens of the shortest sequence whose rows show both sketches, by causality
HIDDEN = 1e-5  # weights below this are lost in the errors of the others: shorter tokens have larger ones
Reader = RowReader | PairReader
SHORTER = 2  # how often tokens are halved because weights were hidden


def read_rows(
    oracle: Oracle, bias: Array, heads: Projections, rng: Generator, effort: Effort, *, noise: float = 0.0
) -> Attentions:
    """Read Theta and beta of all heads; heads whose logits are noise have Theta = 0 and beta as measured."""
    dim, count = len(bias), len(heads.projection)
    theta, beta, ranks = np.zeros((count, dim, dim)), np.zeros((count, dim)), np.zeros(count, np.intp)
    apart, scale, smallest = 0.0, np.inf, 1.0
    for group in plan_groups(oracle, heads, dim, effort):
        chosen = group.heads
        found = None
        if group.plan is not None:
            with contextlib.suppress(FitError):
                reader = RowReader.of(oracle, bias, heads.take(chosen), effort)
                found = _read_group(reader, rng, effort, noise, group.plan)
        if found is None:
            found = _read_group(_choose_reader(oracle, bias, heads, chosen, effort), rng, effort, noise)
        theta[chosen], beta[chosen], ranks[chosen] = found.theta, found.key_bias, found.ranks
        apart, scale, smallest = max(apart, found.noise), min(scale, found.scale), min(smallest, found.smallest)
    return Attentions(theta, beta, ranks, apart, scale, smallest)


def _read_group(
    reader: Reader, rng: Generator, effort: Effort, noise: float, plan: UnseenPlan | None = None
) -> Attentions:
    """Read the heads of a group, with shorter tokens where weights are hidden."""
    scale = reader.find_scale(rng)
    for remaining in reversed(range(SHORTER + 1)):
        try:
            if plan is not None and isinstance(reader, RowReader):
                return read_with_unseen_tokens(reader, plan, scale, rng, noise)
            return _read_at(scale, reader, rng, effort, noise)
        except FitError:
            # Only where weights too small to be read explain it do shorter tokens help.
            if not remaining or reader.smallest > HIDDEN:
                raise
            scale, reader.smallest = scale / 2, 1.0
    raise AssertionError


def _read_at(scale: float, reader: Reader, rng: Generator, effort: Effort, noise: float) -> Attentions:
    """Ask tokens of one norm, until the sketch is wide enough for every head."""
    heads, dim = reader.heads, len(reader.base)
    norm = np.sqrt(dim) * scale
    basis, sketch = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] * norm for _ in range(2))
    widest = int(heads.ranks.max()) if heads.splits is not None else min(dim, max(4, dim // len(heads.projection)))

    def solve(head: int, tokens: Array, columns: Array, rows: Array) -> SketchedForm:
        sides = basis.T @ columns / norm**2, rows @ basis / norm**2
        return sketched_form(tokens, tokens, *sides, noise, int(heads.ranks[head]) if effort.whole else None)

    found, biases = read_forms(reader.ask, reader.sketched, sketch, basis, sketch_tokens(widest, dim, effort), solve)
    apart = max(one.error for one in found)
    check_agreement(apart, heads, noise)
    ranks = np.array([dim if one.rank is None else one.rank for one in found], np.intp)
    return Attentions(
        np.stack([one.form for one in found]), biases @ basis / norm**2, ranks, apart, scale, reader.smallest
    )


def _choose_reader(oracle: Oracle, bias: Array, heads: Projections, chosen: Indices, effort: Effort) -> Reader:
    """Return the reader of rows, or that of pairs where rows do not show two weights of every head, or are short."""
    count, dim = len(heads.projection), len(bias)
    ranks = heads.ranks[chosen]
    least = int(ranks[ranks > 0].min(initial=dim))
    if least < 2 or (heads.splits is None and dim // count < 2) or oracle.longest < SHORTEST[oracle.causal]:
        return PairReader(oracle, bias, heads, chosen)
    return RowReader.of(oracle, bias, heads.take(chosen), effort)

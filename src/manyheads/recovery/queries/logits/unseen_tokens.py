r"""Query-key circuits of a group of heads, from sequences in which most tokens have no values for them.

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

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.queries.logits.row_plan import UnseenPlan
from manyheads.recovery.queries.logits.row_reader import Attentions, RowReader, Rows, check_agreement
from manyheads.recovery.queries.logits.sketches import SPARE
from manyheads.recovery.queries.nets.sigmoid_network import TINY
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

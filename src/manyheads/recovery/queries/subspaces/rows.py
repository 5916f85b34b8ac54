r"""Query-key circuits Theta_i and key biases from all rows of a sequence, stage S4.

Every row t of the answer to x_0 = 0, x_1, ..., x_T is linear in the attention weights of that row,

.. math:: y_t - c = \sum_i \sum_j a^i_{tj}\, x_j W_i, \qquad
    \ln \frac{a^i_{tj}}{a^i_{t0}} = x_t^\top \Theta_i x_j + \beta_i^\top x_j,

because the zero token reads nothing and has logit zero; its weight is what the others leave of one. Tokens that occur
n times have n times the weight. A causal sequence is [0, U_g, A_p, U_g, 0] with a group U_g of sketch tokens and a
group A_p of an orthonormal basis: rows of A_p show Theta_i U^T, the second copy of U_g shows U Theta_i, the last zero
shows beta_i. Not causal, every row sees all tokens and [0, U_g, A_p] does. Sequences cover all pairs of groups; with
r or more sketch tokens, Theta_i of rank r is known:

.. math:: \Theta_i = P S Q^\top, \qquad S = (U P)^+ (U \Theta_i) Q = P^\top (\Theta_i U^\top) (Q^\top U^\top)^+

with orthonormal bases P and Q of the column space of Theta_i U^T and of the row space of U Theta_i; the two estimates
of S are averaged. Both sketches hold U Theta_i U^T, and their disagreement measures the noise that decides the rank.

Heads of rank one read one number of a token, so that a row shows no two weights. Their logits are read off pairs
instead, where copies of q + v and q have one gate a head and the values v W_i are known: q^T Theta_i v + beta_i^T v for
q in the basis and v in the sketch and the other way round, and for q = 0 (2 nu d + d calls).

The weights are solved per head, from the answers in the coordinates O^+ of its output space (at most r unknowns), or
jointly for all heads (at most d unknowns), which is the better conditioned and the dearer way.

References
----------
Tropp, Yurtsever, Udell and Cevher (2017), Practical sketching algorithms for low-rank matrix approximation, SIAM J.
Matrix Anal. Appl. 38 (two-sided sketches). Sequences and logits by multiplicities are derived here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.sigmoid_network import EPS
from manyheads.recovery.queries.subspaces.head_values import rank_by_gap
from manyheads.recovery.queries.subspaces.output_spaces import Projections
from manyheads.recovery.queries.subspaces.pair_logits import LOGITS, SMALLEST, PairReader
from manyheads.recovery.queries.subspaces.settings import SubspaceSettings
from manyheads.recovery.refusals import FitError

Array = NDArray[np.float64]

FARTHEST = 6.0  # largest logit of the pilot: trained layers have directions of their own, far beyond the quantile

AGREEMENT = 1e4
"""Error of a logit, at most, in units of the error of what the heads read: weights near 1/100 and below divide it."""

ROUGHEST = 0.05  # disagreement of logits of order one that no noise excuses
SHORTEST = {True: 5, False: 3}  # tokens of the shortest sequence whose rows show both sketches, by causality
HIDDEN = 1e-5  # weights below this are lost in the errors of the others: shorter tokens have larger ones
FEWEST = 4  # distinct tokens beside the zero, if the rank allows it: with two or three, calls are many
PILOT = 8  # sequences that the choice of a scale takes, about
SHORTER = 2  # how often tokens are halved because weights were hidden


class Attentions(NamedTuple):
    """Theta (m, d, d), beta (m, d), and the figures of their measurement."""

    theta: Array
    key_bias: Array
    ranks: NDArray[np.intp]
    noise: float
    scale: float
    smallest: float


class _Rows(NamedTuple):
    """One way of reading a sequence: rows to read, the distinct tokens each sees, and how often."""

    row: int
    seen: int
    copies: Array
    zeros: int


def read_rows(
    oracle: Oracle,
    bias: Array,
    heads: Projections,
    rng: np.random.Generator,
    settings: SubspaceSettings,
    *,
    noise: float = 0.0,
) -> Attentions:
    """Read Theta and beta of all heads; heads whose logits are noise have Theta = 0 and beta as measured.

    Heads of uneven ranks are read in groups, each with sequences as long as its smallest rank allows.
    """
    dim, count = len(bias), len(heads.projection)
    theta, beta, ranks = np.zeros((count, dim, dim)), np.zeros((count, dim)), np.zeros(count, np.intp)
    apart, scale, smallest = 0.0, np.inf, 1.0
    for chosen in _groups(heads, dim, settings):
        found = _read_group(_choose_reader(oracle, bias, heads, chosen, settings), rng, settings, noise)
        theta[chosen], beta[chosen], ranks[chosen] = found.theta, found.key_bias, found.ranks
        apart, scale, smallest = max(apart, found.noise), min(scale, found.scale), min(smallest, found.smallest)
    return Attentions(theta, beta, ranks, apart, scale, smallest)


def _groups(heads: Projections, dim: int, settings: SubspaceSettings) -> list[NDArray[np.intp]]:
    """Divide heads by their ranks so that the sequences of all groups together are fewest."""
    order = np.argsort(heads.ranks, kind="stable")
    if heads.readers is None:
        return [order]

    def cost(group: NDArray[np.intp]) -> float:
        ranks = heads.ranks[group]
        least, widest = int(ranks[ranks > 0].min(initial=dim)), int(ranks.max())
        wanted = _sketches(widest, dim, settings)
        if least < 2:
            return 2.0 * wanted * dim + dim + PILOT
        sketched, fresh = _split(least, settings)
        return float(np.ceil(wanted / sketched) * np.ceil(dim / fresh)) + PILOT

    best: list[tuple[float, list[NDArray[np.intp]]]] = [(0.0, [])]  # of the first heads in order
    for end in range(1, len(order) + 1):
        options = [
            (best[start][0] + cost(order[start:end]), [*best[start][1], order[start:end]]) for start in range(end)
        ]
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _sketches(widest: int, dim: int, settings: SubspaceSettings) -> int:
    """Return the number of sketch tokens for heads of this rank."""
    return min(dim, int(np.ceil(settings.sketch * widest)) + 2)


def _split(most: int, settings: SubspaceSettings) -> tuple[int, int]:
    """Return the sketch tokens and the fresh ones of a sequence of which a row shows at most so many weights.

    Calls go as nu / K1 times d / K2, tokens besides as 2 K1 + K2: K1 / (K1 + K2) = sqrt 2 - 1 is least in tokens.
    """
    kept = max(2, min(most, FEWEST), round(settings.share * most))
    sketched = max(1, round((np.sqrt(2) - 1) * kept))
    return sketched, max(1, kept - sketched)


def _read_group(
    reader: "_Reader | PairReader", rng: np.random.Generator, settings: SubspaceSettings, noise: float
) -> Attentions:
    """Read the heads of a group, with shorter tokens where weights are hidden."""
    scale = reader.find_scale(rng)
    for _ in range(SHORTER):
        try:
            return _read_at(scale, reader, rng, settings, noise)
        except FitError:
            # Only where weights too small to be read explain it do shorter tokens help.
            if reader.smallest > HIDDEN:
                raise
            scale, reader.smallest = scale / 2, 1.0
    return _read_at(scale, reader, rng, settings, noise)


def _read_at(
    scale: float, reader: "_Reader | PairReader", rng: np.random.Generator, settings: SubspaceSettings, noise: float
) -> Attentions:
    """Ask tokens of one norm, until the sketch is wide enough for every head."""
    heads, dim = reader.heads, len(reader.bias)
    norm = np.sqrt(dim) * scale
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0] * norm
    sketch = np.linalg.qr(rng.standard_normal((dim, dim)))[0] * norm
    widest = int(heads.ranks.max()) if heads.readers is not None else min(dim, max(4, dim // len(heads.projection)))
    wanted = _sketches(widest, dim, settings)
    columns, rows, biases = [], [], []
    first = 0
    while True:
        while first < wanted:
            group = sketch[first : first + reader.sketched]
            c, r, b = reader.ask(group, basis)
            columns.append(c)
            rows.append(r)
            biases.append(b)
            first += len(group)
        data = _Data(basis, sketch[:first], np.concatenate(columns, 2), np.concatenate(rows, 1), np.mean(biases, 0))
        most = heads.ranks if settings.whole else [None] * len(heads.projection)
        found = [_solve_head(data, head, noise, rank) for head, rank in enumerate(most)]
        if first >= dim or all(rank is not None and rank <= first - 2 for _, rank, _ in found):
            break
        wanted = min(dim, first + max(reader.sketched, first // 2))
    apart = max(n for _, _, n in found)
    _check_agreement(apart, heads, noise)
    theta = np.stack([t for t, _, _ in found])
    ranks = np.array([dim if rank is None else rank for _, rank, _ in found], np.intp)
    beta = data.biases @ basis / norm**2
    return Attentions(theta, beta, ranks, apart, scale, reader.smallest)


def _check_agreement(apart: float, heads: Projections, noise: float) -> None:
    """Refuse logits that two sequences disagree on: they are not bilinear in the tokens."""
    allowed = min(ROUGHEST, AGREEMENT * (max(noise, EPS) * heads.condition + heads.row_error))
    if not apart <= allowed:
        raise FitError(
            "what two sequences say of the same logits differs by more than the noise explains: the logits are not "
            "bilinear in the tokens (a cap on them, positions), or what the heads read is not known well enough",
            measured=apart,
            threshold=allowed,
        )


def _choose_reader(
    oracle: Oracle, bias: Array, heads: Projections, chosen: NDArray[np.intp], settings: SubspaceSettings
) -> "_Reader | PairReader":
    """Return the reader of rows, or that of pairs where rows do not show two weights of every head, or are short."""
    count, dim = len(heads.projection), len(bias)
    ranks = heads.ranks[chosen]
    least = int(ranks[ranks > 0].min(initial=dim))
    if least < 2 or (heads.readers is None and dim // count < 2) or oracle.longest < SHORTEST[oracle.causal]:
        return PairReader(oracle, bias, heads, chosen)
    return _Reader(oracle, bias, heads.taking(chosen), settings)


class _Reader:
    """Asks sequences and turns rows into logits."""

    def __init__(self, oracle: Oracle, bias: Array, heads: Projections, settings: SubspaceSettings):
        self.oracle, self.bias, self.heads, self.causal = oracle, bias, heads, oracle.causal
        count, dim = len(heads.projection), len(bias)
        alive = heads.ranks[heads.ranks > 0]
        least = int(alive.min()) if len(alive) else 0
        self.direct = heads.readers is None  # heads of full rank: the weights of all heads are solved for jointly
        most = dim // count if self.direct else least
        self.sketched, self.fresh = _split(most, settings)
        longest = oracle.longest - (2 if self.causal else 1)  # beside the zeros
        while self.fresh + (2 if self.causal else 1) * self.sketched > longest:
            if self.sketched > 1 and self.sketched >= self.fresh:
                self.sketched -= 1
            else:
                self.fresh -= 1
        self.smallest = 1.0

    def find_scale(self, rng: np.random.Generator) -> float:
        """Return the scale of tokens at which the logits of a pilot are moderate."""
        dim, length = len(self.bias), self.sketched + self.fresh
        pilot = rng.standard_normal((4, length + 1, dim))
        pilot[:, 0] = 0
        most = self.oracle.limits.reach / max(np.sqrt(dim), float(np.linalg.norm(pilot, axis=-1).max()))
        read = [_Rows(length, length, np.ones(length), 1)]
        low, high, scale = 0.0, np.inf, min(1.0, most)
        for _ in range(30):
            weights = self.weights(scale * pilot, read)[0]
            last = 1 - weights.sum(-1, keepdims=True)
            with np.errstate(all="ignore"):
                logits = np.abs(np.log(weights) - np.log(last))
            largest = max(float(np.quantile(logits, 0.98)), float(logits.max()) * LOGITS[1] / FARTHEST)
            if not np.isfinite(largest) or largest > LOGITS[1]:
                high = scale
            elif largest < LOGITS[0]:
                low = scale
            else:
                return scale
            if scale == most and low == most:
                return scale  # logits are as large as the largest norm allows
            if high < np.inf and low > 0:
                scale = np.sqrt(low * high)
            else:
                scale = min(most, scale * (2.0 if high == np.inf else 0.5))
            if (high < np.inf and high < low * 1.01) or scale > 1e4:
                return scale  # no logits at all, or so few heads that the quantile jumps
        raise FitError("no scale of tokens gave moderate logits", measured=scale, threshold=1.0)

    def ask(self, group: Array, basis: Array) -> tuple[Array, Array, Array]:
        """Ask one group of sketch tokens against the whole basis.

        Returns Theta U^T (m, d, g) and U Theta (m, g, d) in the basis, biases taken off, and the biases (m, d).
        """
        heads, dim, many = len(self.heads.projection), len(self.bias), len(group)
        parts = [np.arange(first, first + self.fresh) % dim for first in range(0, dim, self.fresh)]
        zero = np.zeros((1, dim))
        tail = [group, zero] if self.causal else []
        tokens = np.stack([np.concatenate([zero, group, basis[part], *tail]) for part in parts])
        seen = many + self.fresh
        if self.causal:
            read = [_Rows(many + j, many + j, np.ones(many + j), 1) for j in range(1, self.fresh + 1)]
            for j in range(1, many + 1):
                copies = np.concatenate([np.full(j, 2.0), np.ones(many - j), np.ones(self.fresh)])
                read.append(_Rows(seen + j, seen, copies, 1))
            read.append(_Rows(seen + many + 1, seen, np.concatenate([np.full(many, 2.0), np.ones(self.fresh)]), 2))
        else:
            ones = np.ones(seen)
            rows = [*range(many + 1, seen + 1), *range(1, many + 1), 0]
            read = [_Rows(row, seen, ones, 1) for row in rows]
        logits = [self.logits(weights, row) for weights, row in zip(self.weights(tokens, read), read, strict=True)]
        columns, rows_, biases = np.empty((heads, dim, many)), np.empty((heads, many, dim)), np.empty((heads, dim))
        sketched = logits[-1][..., :many].mean(1)  # beta . u, over all sequences
        for index, part in enumerate(parts):
            biases[:, part] = logits[-1][:, index, many:]
            for j in range(self.fresh):
                columns[:, part[j]] = logits[j][:, index, :many] - sketched
            for j in range(many):
                rows_[:, j, part] = logits[self.fresh + j][:, index, many:]
        return columns, rows_ - biases[:, None], biases

    def logits(self, weights: Array, row: _Rows) -> Array:
        """Logarithms of the weights (m, n, tokens), relative to the zero token and to the copies."""
        last = 1 - weights.sum(-1, keepdims=True)
        self.smallest = min(self.smallest, float(weights.min()), float(last.min()))
        if self.smallest < -0.01:
            raise FitError(
                "the rows gave attention weights below zero: what the heads read is not known well enough, or the "
                "function is no attention layer; try another seed or the accurate settings",
                measured=self.smallest,
                threshold=0.0,
            )
        weights, last = np.maximum(weights, SMALLEST), np.maximum(last, SMALLEST)
        found: Array = np.log(weights / row.copies) - np.log(last / row.zeros)
        return found

    def weights(self, tokens: Array, read: Sequence[_Rows]) -> list[Array]:
        """Weights (m, n, tokens) of the distinct tokens after the zero, for every row that is read."""
        answers = self.oracle(tokens, read=tuple(row.row for row in read)) - self.bias
        seen = max(row.seen for row in read)
        distinct = tokens[:, 1 : seen + 1]
        return self._jointly(distinct, answers, read) if self.direct else self._by_head(distinct, answers, read)

    def _by_head(self, distinct: Array, answers: Array, read: Sequence[_Rows]) -> list[Array]:
        readers, splits = self.heads.readers, self.heads.splits
        assert readers is not None
        assert splits is not None
        found = [np.empty((len(readers), len(distinct), row.seen)) for row in read]
        for head, rank in enumerate(self.heads.ranks):
            read_by = np.swapaxes(distinct @ readers[head, :, :rank], 1, 2)  # (n, r, tokens)
            seen_by = np.swapaxes(answers @ splits[head, :, :rank], 1, 2)  # (n, r, rows)
            turn, triangle = np.linalg.qr(read_by)
            right = np.swapaxes(turn, 1, 2) @ seen_by
            _solve_prefixes(triangle, right, [row.seen for row in read], [part[head] for part in found])
        return found

    def _jointly(self, distinct: Array, answers: Array, read: Sequence[_Rows]) -> list[Array]:
        heads = len(self.heads.projection)
        found = [np.empty((heads, len(distinct), row.seen)) for row in read]
        step = max(1, 2**25 // (heads * distinct.shape[1] * distinct.shape[2]))
        for first in range(0, len(distinct), step):
            part = slice(first, first + step)
            # Columns token by token, heads inside: what an earlier row sees is a prefix.
            values = np.einsum("njd,mde->nejm", distinct[part], self.heads.projection, optimize=True)
            turn, triangle = np.linalg.qr(values.reshape(*values.shape[:2], -1))
            right = np.swapaxes(turn, 1, 2) @ np.swapaxes(answers[part], 1, 2)
            widths = [row.seen * heads for row in read]
            solved = [np.empty((len(values), width)) for width in widths]
            _solve_prefixes(triangle, right, widths, solved)
            for target, block, row in zip(found, solved, read, strict=True):
                target[:, part] = np.moveaxis(block.reshape(len(values), row.seen, heads), 2, 0)
        return found


def _solve_prefixes(triangle: Array, right: Array, widths: Sequence[int], out: Sequence[Array]) -> None:
    """Solve R[:w, :w] x = right[:w, row] for every row; rows of equal width together."""
    for width in sorted(set(widths)):
        rows = [row for row, other in enumerate(widths) if other == width]
        solved = np.linalg.solve(triangle[:, :width, :width], right[:, :width][:, :, rows])
        for place, row in enumerate(rows):
            out[row][:] = solved[:, :, place]


class _Data(NamedTuple):
    """Sketches of all heads, in the basis: Theta U^T (m, d, nu), U Theta (m, nu, d), beta (m, d)."""

    basis: Array
    sketch: Array
    columns: Array
    rows: Array
    biases: Array


def _solve_head(data: _Data, head: int, noise: float, most: int | None = None) -> tuple[Array, int | None, float]:
    """Return Theta of a head, its rank (None: no gap), and the noise of an entry of its logits.

    The logits of answers in single precision err by more than the smallest singular values of a trained Theta, so that
    no gap shows: then the rank is taken to be that of W, `most`.
    """
    norm = float((data.basis[0] ** 2).sum())
    columns = data.basis.T @ data.columns[head] / norm  # Theta U^T, (d, nu)
    rows = data.rows[head] @ data.basis / norm  # U Theta, (nu, d)
    apart = data.sketch @ columns - rows @ data.sketch.T  # both are U Theta U^T
    entry = float(np.sqrt(np.mean(apart**2) / 2 / norm))
    left, singular, _ = np.linalg.svd(columns, full_matrices=False)
    _, others, right = np.linalg.svd(rows, full_matrices=False)
    width = np.sqrt(len(data.sketch)) + np.sqrt(len(columns))
    floor = max(entry, noise * float(np.abs(columns).max())) * width
    ranks = rank_by_gap(singular, floor), rank_by_gap(others, floor)
    if most is not None and most < min(columns.shape[1], len(columns)):
        ranks = min(most, ranks[0] or most), min(most, ranks[1] or most)
    if ranks[0] is None or ranks[1] is None:
        if len(data.sketch) < len(data.basis):
            return np.zeros((len(data.basis),) * 2), None, entry
        # The sketch is a whole orthogonal basis: both halves are Theta itself.
        return (columns @ data.sketch + data.sketch.T @ rows) / 2 / norm, None, entry
    rank = max(ranks[0], ranks[1])
    p, q = left[:, :rank], right[:rank].T
    from_rows = np.linalg.lstsq(data.sketch @ p, rows @ q, rcond=None)[0]
    from_columns = np.linalg.lstsq(data.sketch @ q, columns.T @ p, rcond=None)[0].T
    return p @ ((from_rows + from_columns) / 2) @ q.T, rank, entry

r"""Query-key forms from logits: the first offset from two sketches, further ones from small cores and rotations.

At offset 1, with fresh tokens A and sketch tokens U (few), the logits give C = A Theta U^T and R = U Theta A^T, and a
matrix whose rank is below the number of sketch tokens is

.. math:: \Theta = (A^+ C) \, (U \Theta U^\top)^+ \, (R A^{+\top}).

Its column space L and row space K are those of W_Q and W_K, hence of every other offset, where only the core M of
Theta^(t) = L M^(t) K^T is unknown: a linear problem in r² numbers for any set of pairs. At offset 0 only pairs of a
token with itself are visible, which determines the symmetric part of the form, and all of M where L and K are
independent (2 r <= d in general position).

Rotations compose: M^(t+1) = G M^(t), with G = L^+ W_Q R_1 W_Q^+ L similar to a rotation. G from two offsets gives all
forms, at offset 0 and beyond those that were asked about; its eigenvalues are exp(+-i omega_f), so frequencies are
found, not needed. All of this without biases of queries and keys. Derived here.
"""

from dataclasses import dataclass, replace

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.layers.rotary import Turns
from manyheads.recovery.queries.ranks import gap_rank
from manyheads.recovery.queries.rotary.logits import Ledger
from manyheads.recovery.refusals import FitError, RankBudgetError

CUT = 1e-6  # singular values of a core above this share of the largest are never cut
NOTHING = 1e-8  # logits that are all below belong to a head that ignores the tokens
Two = tuple[Array, Array]
SWEEPS = 300  # alternating least squares of planes and cores


@dataclass(frozen=True)
class FormSettings:
    """Settings of the extraction of forms of tokens, offset by offset."""

    offsets: int = 16  # offsets 0 .. offsets - 1 at which forms are listed in the result
    extra: int = 4  # directions, and sketch tokens, beyond the rank
    excess: float = 1.5  # logits or scores asked for, relative to the unknown numbers of a core
    share: float = 0.75  # tokens of a sequence, relative to the most whose weights can be separated

    @classmethod
    def accurate(cls) -> "FormSettings":
        """Return settings that spend more calls on better-conditioned readings."""
        return cls(extra=8, excess=3.0, share=0.4)


def extend(tokens: Array) -> Array:
    """Append a one to tokens (n, d)."""
    return np.concatenate([tokens, np.ones((len(tokens), 1))], axis=1)


@dataclass(frozen=True)
class Spaces:
    """Spaces of the forms of one head: L (d + 1, r), K (d, r), orthonormal columns, and the core M at offset 1."""

    left: Array
    right: Array
    core: Array

    @property
    def rank(self) -> int:
        """Rank r."""
        return len(self.core)


def find_spaces(sketch: Two, back: Two, tokens: Two, noise: float, most: int | None = None) -> Spaces:
    """Find the form of one head at offset 1 from two sketches.

    Logits and their weights, (N, n) of fresh queries on sketch keys, and (n, N) of sketch queries on fresh keys; fresh
    tokens (N, d) span, sketch tokens are (n, d). `most` is the largest rank there can be, for answers so noisy that no
    gap shows.
    """
    fresh, few = tokens
    columns = _solve(fresh, *sketch)  # Theta U^T, (d, n)
    rows = _solve(fresh, back[0].T, back[1].T).T  # U Theta, (n, d)
    silent = bool(np.abs(sketch[0]).max() < max(NOTHING, 1e3 * noise))
    u, s, v = split_core(rows @ few.T, fresh.shape[1], max(CUT, 100 * noise), silent=silent, most=most)
    left, front = np.linalg.qr(columns @ v.T)
    right, rear = np.linalg.qr((u.T @ rows).T)
    left = np.concatenate([left, np.zeros((1, len(s)))])  # no biases: nothing in the last row
    return Spaces(left, right, front / s @ rear.T)


def _solve(tokens: Array, logits: Array, weight: Array) -> Array:
    """Return the weighted least squares solutions (d, n) of tokens (N, d) on logits (N, n)."""
    if (weight == 1).all():
        return np.linalg.lstsq(tokens, logits, rcond=None)[0]
    pairs = zip(logits.T, weight.T, strict=True)
    return np.stack([np.linalg.lstsq(tokens * w[:, None], one * w, rcond=1e-12)[0] for one, w in pairs], axis=1)


def split_core(
    core: Array, dim: int, cut: float, *, silent: bool = False, most: int | None = None
) -> tuple[Array, Array, Array]:
    """Return what is no noise in U Theta U^T (n, n): singular vectors (n, r), values (r,) and vectors (r, n).

    Examples
    --------
    >>> u, s, v = split_core(np.diag([2.0, 1.0, 1e-12]), dim=5, cut=1e-6)
    >>> u.shape, s, v.shape
    ((3, 2), array([2., 1.]), (2, 3))
    """
    u, s, v = np.linalg.svd(core)
    rank = 0 if silent else gap_rank(s, cut)
    if most is not None and most < len(s):  # what lies beyond is noise, and says how much there is
        rank = int((s[:most] > 2 * s[most]).sum())
    if rank >= len(s) and len(s) < dim:
        raise RankBudgetError(
            f"no gap in the singular values of a form among {len(s)} sketch tokens: allow more", s[-1] / s[0], cut
        )
    return u[:, :rank], s[:rank], v[:rank]


def find_core(
    spaces: Spaces, queries: Array, keys: Array, logits: Array, weight: Array | float = 1.0
) -> tuple[Array, float]:
    """Return the core (r, r) that explains the logits (N,) of pairs of tokens (N, d), and the relative residual."""
    left = extend(queries) @ spaces.left
    right = keys @ spaces.right
    features = (left[:, :, None] * right[:, None, :]).reshape(len(logits), -1) * np.reshape(weight, (-1, 1))
    core, rest = solve_scaled(features, logits * weight)
    size = float(np.linalg.norm(logits * weight) + NOTHING * len(logits) ** 0.5)
    return core.reshape(spaces.rank, spaces.rank), rest / size


def solve_scaled(features: Array, targets: Array) -> tuple[Array, float]:
    """Return the least-squares solution of features (N, a), scaled to norm one, on targets (N,); and the misfit."""
    size = np.linalg.norm(features, axis=0) + np.finfo(np.float64).tiny
    found = np.linalg.lstsq(features / size, targets, rcond=1e-12)[0]
    return found / size, float(np.linalg.norm(features / size @ found - targets))


def assemble(spaces: Spaces, core: Array) -> Array:
    """Return the form (d + 1, d + 1) of a core (r, r)."""
    return spaces.left @ _widen(core @ spaces.right.T)


def _widen(rows: Array) -> Array:
    """Append the column of zeros that forms without biases have."""
    return np.concatenate([rows, np.zeros((len(rows), 1))], axis=1)


def find_turn(cores: list[Array], worst: float) -> Array:
    """Return G with M^(t+1) = G M^(t), from the cores M at consecutive offsets."""
    one, two = np.concatenate(cores[:-1], axis=1), np.concatenate(cores[1:], axis=1)
    condition = np.linalg.cond(one) if len(one) else 0.0
    FitError.if_above(condition, worst, "an attention form is singular on its own spaces: its turns are not determined")
    return np.linalg.lstsq(one.T, two.T, rcond=None)[0].T


def find_turns(spaces: list[Spaces], cores: list[dict[int, Array]]) -> Turns:
    """Return how heads turn, from their cores at consecutive offsets from 1 on, at least two of them."""
    left, turn, first = [], [], []
    for space, known in zip(spaces, cores, strict=True):
        step = find_turn([known[t] for t in sorted(known) if t >= 1], 1e12)
        left.append(space.left)
        turn.append(step)
        first.append(_widen(known[1] @ space.right.T))
    return Turns(tuple(left), tuple(turn), tuple(first), tuple(np.zeros(space.rank) for space in spaces))


def refine_turns(spaces: list[Spaces], turns: Turns, cores: list[dict[int, Array]]) -> Turns:
    """Fit C_t = V diag(e^(i (t - 1) omega)) X to the cores at all offsets t >= 1, of heads that rotate planes.

    Frequencies follow from the largest offset t: of those that explain its turn, the one nearest to what the first
    offsets gave, whose error is divided by t - 1. V and X alternate as linear least squares.
    """
    turned, first = [], []
    for space, turn, known in zip(spaces, turns.turn, cores, strict=True):
        offsets = sorted(t for t in known if t >= 1)
        values, v = np.linalg.eig(turn)
        x = np.linalg.solve(v, known[1])
        for _ in range(SWEEPS):
            moved = (np.linalg.solve(v, known[offsets[-1]]) * x.conj()).sum(1)
            steps = offsets[-1] - 1
            rest = np.angle(moved) - steps * np.angle(values)
            values = np.exp(1j * (np.angle(values) + (rest - 2 * np.pi * np.round(rest / (2 * np.pi))) / steps))
            powers = [values[:, None] ** (t - 1) for t in offsets]
            wide = np.concatenate([power * x for power in powers], axis=1)
            v = np.linalg.lstsq(wide.T, np.concatenate([known[t] for t in offsets], axis=1).T, rcond=None)[0].T
            tall = np.concatenate([v * power.T for power in powers])
            x = np.linalg.lstsq(tall, np.concatenate([known[t] for t in offsets]), rcond=None)[0]
        turned.append(np.linalg.solve(v.T, (v * values).T).T.real)
        first.append(_widen((v @ x).real @ space.right.T))
    return replace(turns, turn=tuple(turned), first=tuple(first))


def turned_residual(turns: Turns, ledger: Ledger) -> dict[int, float]:
    """Return, for every offset of a ledger, the worst relative error of a head of the logits that the turns predict."""
    found = {}
    for offset in np.unique(ledger.offset).tolist():
        (queries, keys, logits), weight = ledger.at(offset), ledger.weights(offset)
        predicted = np.einsum("nd,mde,ne->nm", extend(queries), turns.form(offset), extend(keys), optimize=True)
        predicted, logits = predicted * weight, logits * weight
        size = np.linalg.norm(logits, axis=0) + 1e-3 * np.linalg.norm(logits) + np.finfo(np.float64).tiny
        found[offset] = float((np.linalg.norm(predicted - logits, axis=0) / size).max())
    return found

r"""Query-key forms from logits: the first offset from two sketches, further ones from small cores and rotations.

At offset 1 the form follows from fresh tokens and few sketch tokens (`sketches`). Its column space L and row space K
are those of W_Q and W_K, hence of every other offset, where only the core M of Theta^(t) = L M^(t) K^T is unknown: a
linear problem in r² numbers for any set of pairs. At offset 0 only pairs of a token with itself are visible, which
determines the symmetric part of the form, and all of M where L and K are independent (2 r <= d in general position).

Rotations compose: M^(t+1) = G M^(t), with G = L^+ W_Q R_1 W_Q^+ L similar to a rotation. G from two offsets gives all
forms, at offset 0 and beyond those that were asked about; its eigenvalues are exp(+-i omega_f), so frequencies are
found, not needed. All of this without biases of queries and keys. Derived here.
"""

from dataclasses import dataclass, replace

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.layers.rotary import Turns
from manyheads.recovery.queries.logits.ledger import Ledger
from manyheads.recovery.queries.logits.sketches import sketched_form
from manyheads.recovery.refusals import FitError, RankBudgetError

CUT = 1e-6  # singular values of a sketch above this share of the largest are never cut
SINGULAR = 1e12  # condition of the cores beyond which no turn is determined
NOTHING = 1e-8  # logits that are all below belong to a head that ignores the tokens
Two = tuple[Array, Array]
SWEEPS = 300  # alternating least squares of planes and cores


def extend(tokens: Array) -> Array:
    """Append a one to tokens (n, d)."""
    return np.concatenate([tokens, np.ones((len(tokens), 1))], axis=1)


@dataclass(frozen=True)
class Frame:
    """Column space L (d + 1, l) of the forms of one head, and row space (d + 1, k) or, with e, (d + 1, k + 1)."""

    left: Array
    right: Array
    constant: bool = False  # whether the last row vector is e = (0, ..., 0, 1), as biases of queries and keys ask for

    def features(self, queries: Array, keys: Array) -> Array:
        """Return what multiplies the core in the scores of pairs of tokens (N, d), as (N, entries of the core)."""
        left, right = extend(queries) @ self.left, extend(keys) @ self.right
        return (left[:, :, None] * right[:, None, :]).reshape(len(left), -1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the core."""
        return self.left.shape[1], self.right.shape[1]

    def form(self, core: Array) -> Array:
        """Return the form (d + 1, d + 1) of a core."""
        return self.left @ core @ self.right.T


def find_form(sketch: Two, back: Two, tokens: Two, noise: float, most: int | None = None) -> tuple[Frame, Array]:
    """Find the spaces and the core of one head at offset 1 from two sketches.

    Logits and their weights, (N, n) of fresh queries on sketch keys, and (n, N) of sketch queries on fresh keys; fresh
    tokens (N, d) span, sketch tokens are (n, d). `most` is the largest rank there can be, for answers so noisy that no
    gap shows.
    """
    fresh, few = tokens
    columns = _solve(fresh, *sketch)  # Theta U^T, (d, n)
    rows = _solve(fresh, back[0].T, back[1].T).T  # U Theta, (n, d)
    found = sketched_form(few, few, columns, rows, noise, most)
    if found.rank is None and len(few) < fresh.shape[1]:
        why = f"no gap in the singular values of a form among {len(few)} sketch tokens: allow more"
        raise RankBudgetError(why, len(few), fresh.shape[1])
    left, right = (np.pad(side, ((0, 1), (0, 0))) for side in (found.left, found.right))  # no biases
    return Frame(left, right), found.core


def _solve(tokens: Array, logits: Array, weight: Array) -> Array:
    """Return the weighted least squares solutions (d, n) of tokens (N, d) on logits (N, n)."""
    if (weight == 1).all():
        return np.linalg.lstsq(tokens, logits, rcond=None)[0]
    pairs = zip(logits.T, weight.T, strict=True)
    return np.stack([np.linalg.lstsq(tokens * w[:, None], one * w, rcond=1e-12)[0] for one, w in pairs], axis=1)


def find_core(frame: Frame, ledger: Ledger, head: int, offset: int) -> tuple[Array, float]:
    """Return the core of one head that explains its logits at one offset, and the relative residual."""
    queries, keys, logits, weight = ledger.at(offset)
    logits, weight = logits[:, head], weight[:, head]
    core, left = solve_scaled(frame.features(queries, keys) * weight[:, None], logits * weight)
    size = np.linalg.norm((logits - frame.constant * logits.mean()) * weight) + NOTHING * np.sqrt(len(logits))
    return core.reshape(frame.shape), float(np.linalg.norm(left) / size)


def solve_scaled(features: Array, targets: Array) -> tuple[Array, Array]:
    """Return the least-squares solution of features (N, a), scaled to norm one, on targets (N,); and what it leaves."""
    size = np.linalg.norm(features, axis=0) + np.finfo(np.float64).tiny
    found = np.linalg.lstsq(features / size, targets, rcond=1e-12)[0]
    return found / size, features / size @ found - targets


def find_turn(cores: list[Array]) -> Array:
    """Return G with M^(t+1) = G M^(t), from the cores M at consecutive offsets."""
    one, two = np.concatenate(cores[:-1], axis=1), np.concatenate(cores[1:], axis=1)
    condition = np.linalg.cond(one) if len(one) else 0.0
    FitError.if_above(
        condition, SINGULAR, "an attention form is singular on its own spaces: its turns are not determined"
    )
    return np.linalg.lstsq(one.T, two.T, rcond=None)[0].T


def find_turns(frames: list[Frame], cores: list[dict[int, Array]]) -> Turns:
    """Return how heads turn, from their cores at consecutive offsets t >= 1, at least two of them."""
    left, turn, first, shift = [], [], [], []
    for frame, known in zip(frames, cores, strict=True):
        offsets = sorted(t for t in known if t >= 1)
        turning = slice(-1 if frame.constant else None)
        step = find_turn([known[t][:, turning] for t in offsets])
        start, constant = known[offsets[0]].copy(), np.zeros(len(step))
        if frame.constant:  # last columns: g_(t+1) - G g_t = (G - 1) s
            moved = [known[t + 1][:, -1] - step @ known[t][:, -1] for t in offsets[:-1]]
            constant = np.linalg.pinv(step - np.eye(len(step)), rcond=1e-6) @ np.mean(moved, axis=0)
            start[:, -1] += constant
        left.append(frame.left)
        turn.append(step)
        first.append(np.linalg.matrix_power(np.linalg.inv(step), offsets[0] - 1) @ start @ frame.right.T)
        shift.append(constant)
    return Turns(tuple(left), tuple(turn), tuple(first), tuple(shift))


def refine_turns(frames: list[Frame], turns: Turns, cores: list[dict[int, Array]]) -> Turns:
    """Fit C_t = V diag(e^(i (t - 1) omega)) X to the cores at all offsets t >= 1, of heads that rotate planes.

    Frequencies follow from the largest offset t: of those that explain its turn, the one nearest to what the first
    offsets gave, whose error is divided by t - 1. V and X alternate as linear least squares.
    """
    turned, first = [], []
    for frame, turn, known in zip(frames, turns.turn, cores, strict=True):
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
        first.append((v @ x).real @ frame.right.T)
    return replace(turns, turn=tuple(turned), first=tuple(first))


def turned_residual(turns: Turns, ledger: Ledger) -> dict[int, float]:
    """Return, for every offset of a ledger, the worst relative error of a head of the logits that the turns predict."""
    found = {}
    for offset in np.unique(ledger.offset).tolist():
        queries, keys, logits, weight = ledger.at(offset)
        predicted = np.einsum("nd,mde,ne->nm", extend(queries), turns.form(offset), extend(keys), optimize=True)
        predicted, logits = predicted * weight, logits * weight
        size = np.linalg.norm(logits, axis=0) + 1e-3 * np.linalg.norm(logits) + np.finfo(np.float64).tiny
        found[offset] = float((np.linalg.norm(predicted - logits, axis=0) / size).max())
    return found

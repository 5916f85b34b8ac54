"""Attention heads with responses by tangents and plain normals: the estimator that the library's is measured against.

Every sampled quantity is differentiated forward along all sources r_b, of the first heads only, and contracted with
random signs p: <dx_a / dr_b> is the mean over components of p dx_a along p r_b. Without bias, as the library's, and
dear: n directions of n rows a head.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import softmax

from manyheads.theory.dmft.branches.branch import Branch, BranchInput, BranchOutput, BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import factor
from manyheads.theory.dmft.problem import Problem

VALUE, QUERY, KEY, OUTPUT = range(4)


@dataclass(frozen=True)
class TangentHeads(Branch):
    """Heads of key dimension N at logit exponent 1: plain samples, the first of them with tangents."""

    sampled: ClassVar[bool] = True

    key_dim: int
    samples: int
    tangents: int

    def start(self, problem: Problem, rng: np.random.Generator) -> "_TangentProcess":
        return _TangentProcess(self, problem, rng)

    def cost(self, problem: Problem) -> tuple[float, float]:
        return 0.0, 0.0


class _TangentProcess(BranchProcess):
    def __init__(self, branch: TangentHeads, problem: Problem, rng: np.random.Generator):
        self._key_dim, self._allowed = branch.key_dim, problem.attention_mask()
        self._samples, self._tokens, self._rows = problem.samples, problem.tokens, problem.rows
        n, width, some = problem.steps * problem.rows, branch.samples * branch.key_dim, branch.tangents * branch.key_dim
        self._some = some
        self._normals = rng.standard_normal((4, n, width))
        self._signs = rng.choice([-1.0, 1.0], (4, some))
        self._past = [np.zeros((n, width)) for _ in range(4)]  # ebar, mQ, mK, u
        # The same along rO_b, and along rV_b, rQ_b and rK_b at once: (b, n, some).
        self._moved = [[np.zeros((n, n, some)) for _ in range(4)] for _ in range(2)]

    def forward(self, inputs: BranchInput) -> BranchOutput:
        lo = inputs.moment * self._rows
        hi = lo + self._rows
        self._root = factor(inputs.below[:hi, :hi])
        kernel = inputs.kernel()
        value, query, key = (
            self._root[lo:hi] @ self._normals[which, :hi] + kernel @ self._past[which][:lo]
            for which in (VALUE, QUERY, KEY)
        )
        self._now = self._attend(value, query, key)
        written = self._past[OUTPUT][lo:hi] = self._join(self._now[4])
        self._changes = []
        for place in range(2):
            moved = [kernel @ self._moved[place][which][:hi, :lo] for which in (VALUE, QUERY, KEY)]
            if place:
                self._push(moved, lo, (VALUE, QUERY, KEY))
            self._changes.append(self._attend_along(moved))
            self._moved[place][OUTPUT][:hi, lo:hi] = self._join(self._changes[place][4])
        response = (self._moved[0][OUTPUT][:lo, lo:hi] @ self._signs[OUTPUT]).T / self._some
        return BranchOutput(written @ self._past[OUTPUT][:hi].T / written.shape[1], response)

    def backward(self, inputs: BranchInput) -> BranchOutput:
        lo = inputs.moment * self._rows
        hi = lo + self._rows
        root, kernel = factor(inputs.above[:hi, :hi]), inputs.kernel()
        error = self._split(root[lo:hi] @ self._normals[OUTPUT, :hi] + kernel @ self._past[OUTPUT][:hi])
        sent = self._send_through(self._now, error)
        for history, rows in zip(self._past, sent, strict=False):
            history[lo:hi] = rows
        some = [part[..., : self._heads(self._some), :, :] for part in (*self._now, error)]
        for place, changes in enumerate(self._changes):
            moved = [kernel @ self._moved[place][OUTPUT][:hi, :hi]]
            if place == 0:
                self._push(moved, lo, (OUTPUT,))
            sent_along = self._send_along(some, changes, self._split(moved[0]))
            for history, rows in zip(self._moved[place], sent_along, strict=False):
                history[:hi, lo:hi] = rows
        covariance = sum(history[lo:hi] @ history[:hi].T for history in self._past[:3]) / len(self._past[0][0])
        response = sum(self._moved[1][which][:hi, lo:hi] @ self._signs[which] for which in (VALUE, QUERY, KEY))
        return BranchOutput(covariance, response.T / self._some)

    def _push(self, moved: list[np.ndarray], lo: int, sources: tuple[int, ...]) -> None:
        """Add what the sources of this moment themselves change."""
        for row in range(self._rows):
            for place, which in enumerate(sources):
                moved[place][lo + row, row] += self._signs[which]

    def _heads(self, width: int) -> int:
        return width // self._key_dim

    def _split(self, rows: np.ndarray) -> np.ndarray:
        """(..., PT, heads N) as (..., P, heads, T, N)."""
        shape = (*rows.shape[:-2], self._samples, self._tokens, self._heads(rows.shape[-1]), self._key_dim)
        return np.swapaxes(rows.reshape(shape), -3, -2)

    def _join(self, split: np.ndarray) -> np.ndarray:
        swapped = np.swapaxes(split, -3, -2)
        return swapped.reshape(*swapped.shape[:-4], self._rows, -1)

    def _attend(self, value: np.ndarray, query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, ...]:
        value, query, key = self._split(value), self._split(query), self._split(key)
        logits = query @ key.swapaxes(-1, -2) / self._key_dim
        pattern = softmax(np.where(self._allowed, logits, -np.inf), axis=-1)
        return value, query, key, pattern, pattern @ value

    def _attend_along(self, moved: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Change of what `_attend` returns when its arguments change."""
        value, query, key, pattern, _ = (part[:, : self._heads(self._some)] for part in self._now)
        dvalue, dquery, dkey = (self._split(part) for part in moved)
        dlogits = (dquery @ key.swapaxes(-1, -2) + query @ dkey.swapaxes(-1, -2)) / self._key_dim
        dpattern = pattern * (dlogits - (pattern * dlogits).sum(-1, keepdims=True))
        return dvalue, dquery, dkey, dpattern, dpattern @ value + pattern @ dvalue

    def _send_through(self, now: tuple[np.ndarray, ...], error: np.ndarray) -> list[np.ndarray]:
        value, query, key, pattern, written = now
        moves = pattern * (error @ value.swapaxes(-1, -2) - (error * written).sum(-1, keepdims=True)) / self._key_dim
        return [
            self._join(part) for part in (pattern.swapaxes(-1, -2) @ error, moves @ key, moves.swapaxes(-1, -2) @ query)
        ]

    def _send_along(
        self, now: list[np.ndarray], changes: tuple[np.ndarray, ...], derror: np.ndarray
    ) -> list[np.ndarray]:
        """Change of what `_send_through` returns."""
        value, query, key, pattern, written, error = now
        dvalue, dquery, dkey, dpattern, dwritten = changes
        along = error @ value.swapaxes(-1, -2) - (error * written).sum(-1, keepdims=True)
        dalong = derror @ value.swapaxes(-1, -2) + error @ dvalue.swapaxes(-1, -2)
        dalong -= (derror * written + error * dwritten).sum(-1, keepdims=True)
        moves = pattern * along / self._key_dim
        dmoves = (dpattern * along + pattern * dalong) / self._key_dim
        back = np.swapaxes
        return [
            self._join(part)
            for part in (
                back(dpattern, -1, -2) @ error + back(pattern, -1, -2) @ derror,
                dmoves @ key + moves @ dkey,
                back(dmoves, -1, -2) @ query + back(moves, -1, -2) @ dquery,
            )
        ]

"""Attention branch of infinitely many heads of key dimension N: single heads are sampled, averages are deterministic.

Per head, with sources rV, rQ, rK ~ GP(0, H) and rO ~ GP(0, G) in N independent components, and nu = N^(1 - alpha_A):

    v = rV + (Rh + kappa m H) ebar,    q = rQ + (nu Rh + kappa m H / nu) mQ,    k likewise with mK
    A_ab = q_a . k_b / N^alpha_A,   u_a = sum_b sigma_ab v_b,   e = rO + (Rg + kappa m G) u
    M_ab = sigma_ab (e_a . v_b - e_a . u_a) / N,   ebar_b = sum_a sigma_ab e_a,   mQ_a = sum_b M_ab k_b,
    mK_b = sum_a M_ab q_a.

At logit exponent 1 nu is one; at 1/2 what goes through the initial W_Q, W_K is larger by nu and what they learn moves
logits as much at either exponent.

Responses are found by Stein (`sampled`). Their noise is that of the process before anything is learned, which would be
subtracted; here the signs of the normals leave none: with V flipped u, M, mQ and mK change sign there and ebar does
not, so that <u z_O>, <ebar z_V>, <mQ z_Q> and <mK z_K> cancel exactly.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import numpy as np
from scipy.special import softmax

from manyheads._constraints import Constrained, Constraint, constrained
from manyheads.theory.dmft.branches.branch import Branch, BranchInput, BranchOutput, BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import factor, fewest_heads, signed_normals, stein_response
from manyheads.theory.dmft.problem import Problem

VALUE, QUERY, KEY, OUTPUT = range(4)
LOGIT_EXPONENT = Constraint(least=0.5, most=1)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the logits over heads, which are shown


@final
@dataclass(frozen=True)
class InfiniteHeadsAttention(Constrained, Branch):
    """Attention for infinitely many heads of key dimension N, sampled.

    `samples * key_dim` is at least 32 S P T. Time and memory grow like samples N (S P T)^2 and 12 samples N S P T
    numbers.

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limit. The form for both exponents is derived here.
    """

    sampled: ClassVar[bool] = True

    key_dim: int = constrained(rule=Constraint(least=1))  # N
    samples: int = constrained(1024, Constraint(least=4, multiple=4))  # heads
    logit_exponent: float = constrained(1.0, LOGIT_EXPONENT)  # alpha_A

    def sized(self, problem: Problem, samples: int | None, factor: int) -> "InfiniteHeadsAttention":
        """Return the branch with `factor` times the samples."""
        few = max(512, fewest_heads(2 * problem.steps * problem.rows, self.key_dim))
        return replace(self, samples=factor * (samples or few))

    def start(self, problem: Problem, rng: np.random.Generator) -> "_HeadsProcess":
        """Return the process at the first moment."""
        return _HeadsProcess(self, problem, rng)

    def cost(self, problem: Problem) -> tuple[float, float]:
        """Return numbers kept and multiplications: eight (n, heads N) arrays, and twelve products of rows with them."""
        n, width = float(problem.steps * problem.rows), float(self.samples * self.key_dim)
        return 8 * (n + 2 * problem.rows) * width + 3 * n**2, 12 * n**2 * width + (4 * n) ** 2 * width / 4


@final
class _HeadsProcess(BranchProcess):
    def __init__(self, branch: InfiniteHeadsAttention, problem: Problem, rng: np.random.Generator):
        self._branch, self._allowed = branch, problem.attention_mask()
        self._shape = (problem.samples, problem.tokens, branch.samples, branch.key_dim)
        self._rows, n = problem.rows, problem.steps * problem.rows
        self._normals = signed_normals(rng, n, branch.samples, branch.key_dim)  # (4, n, heads N)
        width = self._normals.shape[2]
        self._written, self._sent, self._to_query, self._to_key = (np.zeros((n, width)) for _ in range(4))
        self._strength = branch.key_dim ** (1.0 - branch.logit_exponent)  # nu
        self._above_root = np.zeros((0, 0))

    def forward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        self._below_root = factor(inputs.below[:hi, :hi])
        sources = [self._below_root[lo:hi] @ self._normals[which, :hi] for which in (VALUE, QUERY, KEY)]
        direct = inputs.kernel()
        through = inputs.kernel(learned=1 / self._strength, response=self._strength)
        value = sources[VALUE] + direct @ self._sent[:lo]
        query = sources[QUERY] + through @ self._to_query[:lo]
        key = sources[KEY] + through @ self._to_key[:lo]
        self._now = self._attend(value, query, key)
        written = self._written[lo:hi] = self._flat(self._now.written)
        response = np.zeros((self._rows, lo))
        if lo:
            response = stein_response(written, self._normals[OUTPUT, :lo], self._above_root[:lo, :lo])
        return BranchOutput(written @ self._written[:hi].T / written.shape[1], response)

    def backward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        self._above_root = factor(inputs.above[:hi, :hi])
        source = self._above_root[lo:hi] @ self._normals[OUTPUT, :hi]  # rO
        error = source + inputs.kernel() @ self._written[:hi]
        moved = self._send_through(self._now, error)
        nu, width = self._strength, source.shape[1]
        learned, covariance, response = (np.zeros((self._rows, hi)) for _ in range(3))
        histories = (self._sent, self._to_query, self._to_key)
        for which, (history, rows) in enumerate(zip(histories, moved, strict=True)):
            history[lo:hi] = rows
            strength = 1.0 if which == VALUE else nu
            products = rows @ history[:hi].T / width
            learned += products
            covariance += strength**2 * products
            response += strength * stein_response(rows, self._normals[which, :hi], self._below_root)
        return BranchOutput(covariance, response, learned)

    def observe(self) -> dict[str, np.ndarray]:
        """Logits over heads: mean, variance and quantiles (P, T, T[, quantile]); patterns: mean (P, T, T)."""
        logits = self._now.logits  # (P, heads, T, T)
        quantiles = np.moveaxis(np.quantile(logits, QUANTILES, axis=1), 0, -1)
        return {
            "logits": logits.mean(1),
            "logit_variance": logits.var(1),
            "logit_quantiles": quantiles,
            "attention": self._now.pattern.mean(1),
        }

    def heads(self) -> np.ndarray:
        """Logits of the sampled heads at the last moment, (P, heads, T, T)."""
        return self._now.logits

    def _split(self, rows: np.ndarray) -> np.ndarray:
        """(PT, heads N) as (P, heads, T, N)."""
        return rows.reshape(self._shape).transpose(0, 2, 1, 3)

    def _flat(self, split: np.ndarray) -> np.ndarray:
        return split.transpose(0, 2, 1, 3).reshape(self._rows, -1)

    def _attend(self, value: np.ndarray, query: np.ndarray, key: np.ndarray) -> "_Heads":
        value, query, key = self._split(value), self._split(query), self._split(key)
        logits = query @ key.swapaxes(-1, -2) * self._branch.key_dim**-self._branch.logit_exponent
        pattern = softmax(np.where(self._allowed, logits, -np.inf), axis=-1)
        return _Heads(value, query, key, logits, pattern, written=pattern @ value)

    def _send_through(self, heads: "_Heads", error: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ebar, mQ, mK (PT, heads N)."""
        error = self._split(error)
        along = (error * heads.written).sum(-1, keepdims=True)  # e_a . u_a
        moves = heads.pattern * (error @ heads.value.swapaxes(-1, -2) - along) / self._branch.key_dim  # M
        back = heads.pattern.swapaxes(-1, -2) @ error
        return self._flat(back), self._flat(moves @ heads.key), self._flat(moves.swapaxes(-1, -2) @ heads.query)


class _Heads(NamedTuple):
    """Sampled heads at one moment, (P, heads, T, N) and (P, heads, T, T)."""

    value: np.ndarray
    query: np.ndarray
    key: np.ndarray
    logits: np.ndarray
    pattern: np.ndarray
    written: np.ndarray

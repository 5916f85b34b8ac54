"""Attention branches at infinite key dimension, logit exponent 1: deterministic logits, equal in all heads.

Queries, keys, values and the backward variable are linear in Gaussian sources, q and k in (rQ, rK), v and e in
(rV, rO), with rQ, rK, rV ~ GP(0, H) and rO ~ GP(0, G). Kept as rows of coefficients on these sources (each over
n = S P T), they give

    A_ab = <q_a k_b>,   M_ab = sigma_ab (<e_a v_b> - sum_c sigma_ac <e_a v_c>)

and all four rows of a branch by products of matrices: no sampling, and no dependence on the number of heads.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.special import softmax

from manyheads.theory.dmft.branches.branch import Branch, BranchInput, BranchOutput, BranchProcess, in_samples, mix
from manyheads.theory.dmft.problem import Problem


@final
@dataclass(frozen=True)
class InfiniteKeyDimAttention(Branch):
    """Attention for N to infinity at logit exponent 1; time O(n^3), memory 8 n^2 numbers.

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limit. The causal recursion and its rows are derived here.
    """

    def start(self, problem: Problem, rng: np.random.Generator) -> "_LimitProcess":
        """Return the process at the first moment."""
        return _LimitProcess(problem)

    def cost(self, problem: Problem) -> tuple[float, float]:
        """Return numbers kept and multiplications: four (n, 2n) histories, products of (PT, 2n) rows with them."""
        n = float(problem.steps * problem.rows)
        return 8 * n * (n + 3 * problem.rows), 16 * n**3


@final
class _LimitProcess(BranchProcess):
    def __init__(self, problem: Problem):
        self._samples, self._rows, self._allowed = problem.samples, problem.rows, problem.attention_mask()
        self._n = n = problem.steps * problem.rows
        # What is remembered, as coefficients: written and sent on (rV | rO), the rest on (rQ | rK).
        self._written, self._sent = np.zeros((n, 2 * n)), np.zeros((n, 2 * n))
        self._to_query, self._to_key = np.zeros((n, 2 * n)), np.zeros((n, 2 * n))

    def forward(self, inputs: BranchInput) -> BranchOutput:
        n, (lo, hi) = self._n, inputs.span
        own = np.arange(lo, hi)
        query, key, value = (np.zeros((self._rows, 2 * n)) for _ in range(3))
        for rows, source in ((query, own), (key, n + own), (value, own)):
            rows[np.arange(self._rows), source] = 1
        kernel = inputs.kernel()  # (PT, lo)
        query += kernel @ self._to_query[:lo]
        key += kernel @ self._to_key[:lo]
        value += kernel @ self._sent[:lo]
        below, above = inputs.below[:hi, :hi], inputs.above[:lo, :lo]
        logits = self._covary(query, key, below, below)
        self._logits = in_samples(logits, self._samples)
        self._pattern = softmax(np.where(self._allowed, self._logits, -np.inf), axis=-1)  # (P, T, T)
        self._query, self._key, self._value = query, key, value
        written = self._written[lo:hi] = mix(self._pattern, value)
        covariance = self._covary(written, self._written[:hi], below, above)
        return BranchOutput(covariance, written[:, n : n + lo])

    def backward(self, inputs: BranchInput) -> BranchOutput:
        n, (lo, hi) = self._n, inputs.span
        error = np.zeros((self._rows, 2 * n))  # e, on (rV | rO)
        error[np.arange(self._rows), n + np.arange(lo, hi)] = 1
        error += inputs.kernel() @ self._written[:hi]
        below, above = inputs.below[:hi, :hi], inputs.above[:hi, :hi]
        products = in_samples(self._covary(error, self._value, below, above), self._samples)  # <e_a v_b>
        mean = (self._pattern * products).sum(-1, keepdims=True)
        moves = self._pattern * (products - mean)  # M (P, T, T)
        back = np.swapaxes
        self._sent[lo:hi] = mix(back(self._pattern, 1, 2), error)
        self._to_query[lo:hi] = mix(moves, self._key)
        self._to_key[lo:hi] = mix(back(moves, 1, 2), self._query)
        covariance = self._covary(self._sent[lo:hi], self._sent[:hi], below, above)
        for rows in (self._to_query, self._to_key):
            covariance = covariance + self._covary(rows[lo:hi], rows[:hi], below, below)
        response = self._sent[lo:hi, :hi] + self._to_query[lo:hi, :hi] + self._to_key[lo:hi, n : n + hi]
        return BranchOutput(covariance, response)

    def _covary(self, rows: np.ndarray, others: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Covariance of two linear functionals of two independent sources, known up to the sizes of their kernels."""
        n, total = self._n, 0.0
        for start, kernel in ((0, first), (n, second)):
            size = len(kernel)
            total = total + (rows[:, start : start + size] @ kernel) @ others[:, start : start + size].T
        return np.asarray(total)

    def observe(self) -> dict[str, np.ndarray]:
        """Logits and pattern (P, T, T) of every head."""
        return {"logits": self._logits, "attention": self._pattern}


@final
@dataclass(frozen=True)
class UniformAttention(Branch):
    """Uniform attention, the branch at infinite depth below depth exponent 1: deep, linear, an average of tokens.

    With logit exponent 1 logits are of order 1/L there, queries and keys drop out, and with J the average over the
    allowed tokens of a sample

        U = J H J^T,   RO = J Kh J^T,   B = J^T G J,   RB = J^T Kg J

    to leading order in the kernels Kh, Kg of one block, which are of order L^-1/2.

    References
    ----------
    Derived here for arXiv 2405.15712's limit of depth at exponent 1/2.
    """

    def start(self, problem: Problem, rng: np.random.Generator) -> "_UniformProcess":
        """Return the process at the first moment."""
        return _UniformProcess(problem)

    def cost(self, problem: Problem) -> tuple[float, float]:
        """Return numbers kept and multiplications: none, and two averages of every kernel row."""
        n = float(problem.steps * problem.rows)
        return 0.0, 8 * n**2 * problem.rows


@final
class _UniformProcess(BranchProcess):
    def __init__(self, problem: Problem):
        self._rows = problem.rows
        allowed = problem.attention_mask()
        pattern = allowed / allowed.sum(1, keepdims=True)
        self._pattern = np.broadcast_to(pattern, (problem.samples, *pattern.shape))
        self._mean = np.kron(np.eye(problem.samples), pattern)  # J (PT, PT)

    def forward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        return BranchOutput(
            self._average(self._mean, inputs.below[lo:hi, :hi]), self._average(self._mean, inputs.kernel())
        )

    def backward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        covariance = self._average(self._mean.T, inputs.above[lo:hi, :hi])
        return BranchOutput(covariance, self._average(self._mean.T, inputs.kernel()))

    def observe(self) -> dict[str, np.ndarray]:
        """Logits, which are zero, and the pattern (P, T, T) of every head."""
        return {"logits": np.zeros(self._pattern.shape), "attention": self._pattern}

    def _average(self, left: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return left @ row(t, t') @ left^T for every moment t'."""
        rows = self._rows
        blocks = row.reshape(rows, -1, rows)  # (PT, t', PT)
        return np.einsum("ab,btc,dc->atd", left, blocks, left, optimize=True).reshape(rows, row.shape[1])

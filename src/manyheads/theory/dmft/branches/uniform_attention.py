"""Uniform attention: the attention branch at infinite depth below depth exponent 1.

With logit exponent 1 logits are of order 1/L there, queries and keys drop out, and with J the average over the allowed
tokens of a sample

    U = J H J^T,   RO = J Kh J^T,   B = J^T G J,   RB = J^T Kg J

to leading order in the kernels Kh, Kg of one block, which are of order L^-1/2.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from manyheads.theory.dmft.branches.branch import Branch, BranchInput, BranchOutput, BranchProcess
from manyheads.theory.dmft.problem import Problem


@final
@dataclass(frozen=True)
class UniformAttention(Branch):
    """Uniform attention to leading order in what one block learns: a deep linear network that averages tokens.

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

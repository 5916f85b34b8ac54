"""Residual branch: covariances and response functions of what it writes and sends back, row by row in time.

A branch sees Gaussian sources with the covariance H of the (normalized) stream below it and G of the backward variable
above it, and answers with

    U  = <u u'>             covariance of what it writes
    RO = <du / drO>         response of what it writes to the backward source
    B  = <b b'>             covariance of what it sends back, through the initial weights
    RB = <db / dr>          response of what it sends back to the forward sources

for the moment t against all moments up to t, rows (PT, .) of matrices over n = S P T. Time goes forward: at a
moment U and RO are asked first, for every branch from the bottom up, then, with the error of the outputs known, B and
RB from the top down. What is written never needs the backward variable of its own moment, so one pass is exact.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from manyheads.theory.dmft.problem import Problem


@dataclass(frozen=True)
class BranchInput:
    """Input of a branch at one moment: correlations below and above, what its weights learned, responses."""

    moment: int  # t
    below: np.ndarray  # H over all moments (n, n), known up to t
    above: np.ndarray  # G (n, n), known up to t - 1 on the way up
    learned: np.ndarray  # kappa m(t, t') H on the way up, kappa m G on the way down, (PT, t PT)
    response: np.ndarray  # of the stream to what the branch sent into it, (PT, t PT), on the way down (PT, (t + 1) PT)

    @property
    def span(self) -> tuple[int, int]:
        """The first of the rows of the moment, and their end."""
        rows, low = self.learned.shape
        return low, low + rows

    def kernel(self, learned: float = 1.0, response: float = 1.0) -> np.ndarray:
        """Learned part and response together, each with a factor, on the columns of the response."""
        total = response * self.response
        total[:, : self.learned.shape[1]] += learned * self.learned
        return total


class BranchOutput(NamedTuple):
    """Output of a branch: U and RO on the way up, B and RB on the way down."""

    covariance: np.ndarray  # through initial weights (PT, (t + 1) PT)
    response: np.ndarray  # (PT, t PT) on the way up, (PT, (t + 1) PT) on the way down
    learned: np.ndarray | None = None  # B for what the weights learn, where it is another one than `covariance`

    @property
    def learning(self) -> np.ndarray:
        """The covariance for what the weights learn."""
        return self.covariance if self.learned is None else self.learned


class BranchProcess(abc.ABC):
    """A branch as a process in time; it keeps its own history."""

    @abc.abstractmethod
    def forward(self, inputs: BranchInput) -> BranchOutput:
        """Advance to the moment on the way up; asking twice at one moment replaces the first answer."""

    @abc.abstractmethod
    def backward(self, inputs: BranchInput) -> BranchOutput:
        """Advance to the moment on the way down, after `forward` at the same moment."""

    def observe(self) -> dict[str, np.ndarray]:
        """Return observables of the last moment: named arrays, none by default."""
        return {}


class Branch(abc.ABC):
    """A kind of branch; frozen, so that one description serves many layers."""

    sampled: ClassVar[bool] = False

    @abc.abstractmethod
    def start(self, problem: Problem, rng: np.random.Generator) -> BranchProcess:
        """Return a process at the first moment, with its own random numbers where it samples."""

    def sized(self, problem: Problem, samples: int | None, factor: int) -> "Branch":
        """Return the branch with `factor` times these samples, or of twice the fewest that match moments."""
        return self

    @abc.abstractmethod
    def cost(self, problem: Problem) -> tuple[float, float]:
        """Return how many numbers a process keeps, and how many multiplications it takes, to leading order."""


def in_samples(matrix: np.ndarray, samples: int) -> np.ndarray:
    """Cut the diagonal blocks (P, T, T) out of a matrix (PT, PT) over all tokens."""
    tokens = len(matrix) // samples
    blocks = matrix.reshape(samples, tokens, samples, tokens)
    return np.einsum("papb->pab", blocks)


def mix(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Apply weights (P, T, T) to the tokens of each sample; rows (PT, K)."""
    samples, tokens, _ = weights.shape
    return np.matmul(weights, rows.reshape(samples, tokens, -1)).reshape(rows.shape)

"""Gaussian sources of the residual stream: rows of coefficients on them, their covariance, the responses to them.

A row of K = PT + C + 2 B n coefficients (B layers, n = S P T) is a Gaussian variable, linear in

    chi (PT)                 the embedded tokens, of covariance X
    w0 (C)                   the initial read-out, of unit covariance
    sO^l, s^l (n each)       what layer l writes and sends back through its initial weights, of covariances U^l and B^l

so that kernels are products of rows with the covariance, and the response of a row to a source is a coefficient of it.
"""

from typing import final

import numpy as np

from manyheads.theory.dmft.problem import Problem


@final
class Sources:
    """The covariances of all sources, known up to the moment that was reached last."""

    def __init__(self, problem: Problem, layers: int, of_layers: bool):
        self.rows, self.classes, self.layers = problem.rows, problem.classes, layers
        self.n = problem.rows * problem.steps
        self.gram = problem.gram
        self.of_layers = of_layers  # infinite depth at depth exponent 1 has none
        self.start = problem.rows + problem.classes  # of the sources of the layers
        self.size = self.start + (2 * layers * self.n if of_layers else 0)  # K
        self.covariances = np.zeros((2 * layers if of_layers else 0, self.n, self.n))  # U^l, then B^l

    def tokens(self) -> np.ndarray:
        """Return chi as rows of coefficients (PT, K)."""
        return np.eye(self.rows, self.size)

    def readout(self) -> np.ndarray:
        """Return w0 as rows of coefficients (C, K)."""
        return np.eye(self.classes, self.size, k=self.rows)

    def covary(self, rows: np.ndarray, known: int) -> np.ndarray:
        """Return rows (m, K) times the covariance of the sources, of which `known` columns a layer are known."""
        out = np.zeros_like(rows)
        out[:, : self.rows] = rows[:, : self.rows] @ self.gram
        out[:, self.rows : self.start] = rows[:, self.rows : self.start]
        for number, covariance in enumerate(self.covariances):
            first = self.start + number * self.n
            block = slice(first, first + known)
            out[:, block] = rows[:, block] @ covariance[:known, :known]
        return out

    def response(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Return the responses (PT, n) of rows to one source: l is sO^l, B + l is s^l."""
        if not self.of_layers:
            return np.zeros((len(rows), self.n))
        first = self.start + number * self.n
        return rows[:, first : first + self.n]

    def of_layer(self, number: int, moment: int) -> np.ndarray:
        """Return a source at a moment as rows of coefficients (PT, K); zero where layers have none."""
        if not self.of_layers:
            return np.zeros((self.rows, self.size))
        return np.eye(self.rows, self.size, k=self.start + number * self.n + moment * self.rows)

    def fill(self, number: int, covariance: np.ndarray) -> None:
        """Keep the covariance (PT, known) of the present moment of a source with the past."""
        if self.of_layers:
            known, kept = covariance.shape[1], self.covariances[number]
            low = known - self.rows
            kept[low:known, :known], kept[:known, low:known] = covariance, covariance.T

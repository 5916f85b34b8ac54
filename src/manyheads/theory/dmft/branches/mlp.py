"""MLP branch at infinite width: neurons are independent and identically distributed, so one is sampled many times.

    z = rZ + (Rh + kappa m H) b,   u = phi(z),   e = rE + (Rg + kappa m G) u,   b = phi'(z) e,

rZ ~ GP(0, H), rE ~ GP(0, G). With phi(z) = z every row is linear and nothing need be sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, final

import numpy as np
from scipy.special import erf

from manyheads._constraints import Constrained, Constraint, constrained
from manyheads.theory.dmft.branches.branch import Branch, BranchInput, BranchOutput, BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import factor, fewest_neurons, matched_normals, stein_response
from manyheads.theory.dmft.problem import Problem


def _cdf(z: np.ndarray) -> np.ndarray:
    return (1 + erf(z / np.sqrt(2))) / 2


Function = Callable[[np.ndarray], np.ndarray]

# phi and its derivative, by the names that `TransformerConfig` uses.
ACTIVATIONS: MappingProxyType[str, tuple[Function, Function]] = MappingProxyType(
    {
        "gelu": (lambda z: z * _cdf(z), lambda z: _cdf(z) + z * (np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))),
        "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(z.dtype)),
        "erf": (erf, lambda z: 2 / np.sqrt(np.pi) * np.exp(-(z**2))),
        "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
        "identity": (lambda z: z, np.ones_like),
    }
)


@final
@dataclass(frozen=True)
class InfiniteWidthMLP(Constrained, Branch):
    """An MLP of infinite width, sampled."""

    sampled: ClassVar[bool] = True

    activation: str = constrained("gelu", Constraint(choices=tuple(ACTIVATIONS)))
    samples: int = 4096  # neurons that are sampled, at least 4 S P T

    def sized(self, problem: Problem, samples: int | None, factor: int) -> "InfiniteWidthMLP":
        """Return the branch with `factor` times the samples."""
        few = max(2048, fewest_neurons(2 * problem.steps * problem.rows))
        return replace(self, samples=factor * (samples or few))

    def start(self, problem: Problem, rng: np.random.Generator) -> "_NeuronProcess":
        """Return the process at the first moment."""
        return _NeuronProcess(self, problem, rng)

    def cost(self, problem: Problem) -> tuple[float, float]:
        """Return numbers kept and multiplications: four (n, neurons) arrays, and eight products of rows with them."""
        n = float(problem.steps * problem.rows)
        return 4 * (n + 2 * problem.rows) * self.samples + 3 * n**2, 8 * n**2 * self.samples


@final
class _NeuronProcess(BranchProcess):
    def __init__(self, branch: InfiniteWidthMLP, problem: Problem, rng: np.random.Generator):
        self._value, self._slope = ACTIVATIONS[branch.activation]
        self._rows, n = problem.rows, problem.steps * problem.rows
        self._inner, self._outer = matched_normals(rng, 2, n, branch.samples)  # of rZ and rE, (n, neurons)
        self._written, self._sent = np.zeros((n, branch.samples)), np.zeros((n, branch.samples))
        self._above_root = np.zeros((0, 0))

    def forward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        self._below_root = factor(inputs.below[:hi, :hi])
        self._source = self._below_root[lo:hi] @ self._inner[:hi]  # rZ
        self._before = self._source + inputs.kernel() @ self._sent[:lo]  # z
        written = self._written[lo:hi] = self._value(self._before)
        response = np.zeros((self._rows, lo))
        if lo:
            response = stein_response(written - self._value(self._source), self._outer[:lo], self._above_root[:lo, :lo])
        return BranchOutput(written @ self._written[:hi].T / written.shape[1], response)

    def backward(self, inputs: BranchInput) -> BranchOutput:
        lo, hi = inputs.span
        self._above_root = factor(inputs.above[:hi, :hi])
        source = self._above_root[lo:hi] @ self._outer[:hi]  # rE
        error = source + inputs.kernel() @ self._written[:hi]
        sent = self._sent[lo:hi] = self._slope(self._before) * error
        frozen = self._slope(self._source) * source
        covariance = sent @ self._sent[:hi].T / sent.shape[1]
        return BranchOutput(covariance, stein_response(sent - frozen, self._inner[:hi], self._below_root))

r"""In-context linear regression: the task, its exact population loss and the levels of its saddles.

A prompt has N pairs :math:`(x_n, y_n)` and a query :math:`x_q`, all x from :math:`N(0, \Lambda)`, and
:math:`y = w\cdot x` with a new :math:`w\sim N(0, I)` for every prompt. With
:math:`\beta = \frac1N\sum_n y_nx_n` a layer of linear attention predicts :math:`\hat y = \beta^\top Ux_q`, whatever
the weights whose product is the circuit U. As :math:`\beta = \hat\Lambda w` with
:math:`\hat\Lambda = \frac1N\sum_nx_nx_n^\top`, and by Wick's theorem

.. math:: M = \mathbb E\,\hat\Lambda^2 = \Lambda^2 + \tfrac1N(\Lambda^2 + \operatorname{tr}\Lambda\;\Lambda),

the population loss, its negative gradient and its minimum are

.. math:: L = \tfrac12\operatorname{tr}(\Lambda - 2\Lambda^2U + MU\Lambda U^\top), \qquad
          G = \Lambda^2 - MU\Lambda, \\
          U^* = \Lambda M^{-1} = (\Lambda + \tfrac1N(\Lambda + \operatorname{tr}\Lambda\;I))^{-1}.

Each eigenvector of :math:`\Lambda` that U knows lowers the loss by :math:`\tfrac12\lambda_d^2u^*_d`.

Source: Zhang, Singh, Latham, Saxe, "Training Dynamics of In-Context Learning in Linear Attention" (arXiv 2501.16265);
the formulas are derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manyheads._arrays import as_floats, follows_caller
from manyheads.errors import UsageError, check_integers


class Prompts(NamedTuple):
    """A batch of prompts: pairs, query and answer."""

    inputs: Float[Array, "batch pair dim"]
    outputs: Float[Array, "batch pair"]
    query: Float[Array, "batch dim"]
    answer: Float[Array, " batch"]


@dataclass(frozen=True)
class InContextRegression:
    """In-context linear regression in the eigenbasis of the covariance of the inputs.

    Gaussian initialization is invariant under rotations and gradient descent commutes with them, so that a diagonal
    covariance is no restriction.

    Parameters
    ----------
    eigenvalues
        Eigenvalues of the covariance, decreasing (equal ones allowed) and positive.
    prompt_length
        N, number of pairs in a prompt.

    Raises
    ------
    UsageError
        No eigenvalue, eigenvalues that increase or are not positive, or a prompt without pairs.

    Examples
    --------
    >>> task = InContextRegression((1.0, 0.5), prompt_length=10)
    >>> task.levels.round(4)
    array([0.75  , 0.35  , 0.1714])
    """

    eigenvalues: tuple[float, ...] = (1.0, 0.6, 0.36)
    prompt_length: int = 32

    def __post_init__(self) -> None:
        check_integers(self, "prompt_length")
        found = as_floats(self.eigenvalues, "eigenvalues")
        positive = found.ndim == 1 and found.size and ((found > 0) & (found < np.inf)).all()
        if not positive or (np.diff(found) > 0).any():
            raise UsageError(f"eigenvalues={self.eigenvalues}: give positive numbers in decreasing order")
        object.__setattr__(self, "eigenvalues", tuple(found.tolist()))

    @property
    def dim(self) -> int:
        """D, dimension of the inputs."""
        return len(self.eigenvalues)

    @property
    def spectrum(self) -> Float[np.ndarray, " dim"]:
        """Eigenvalues of the covariance as an array."""
        return np.asarray(self.eigenvalues)

    @property
    def second_moment(self) -> Float[np.ndarray, " dim"]:
        """Eigenvalues of M, the mean of the squared empirical covariance of a prompt."""
        covariance = self.spectrum
        return covariance**2 + (covariance + covariance.sum()) * covariance / self.prompt_length

    @property
    def optimum(self) -> Float[np.ndarray, " dim"]:
        """Eigenvalues of the optimal circuit, the inverse covariance regularized by the length of the prompt."""
        return self.spectrum / self.second_moment

    @property
    def levels(self) -> Float[np.ndarray, " saddle"]:
        """Loss at which the d largest eigenvectors are known, d = 0 … D: the saddles in order, then the minimum."""
        gains = self.spectrum**2 * self.optimum
        return (self.spectrum.sum() - np.concatenate([[0.0], np.cumsum(gains)])) / 2

    @follows_caller
    def loss(self, circuit: Float[Array, "... dim dim"]) -> Float[Array, "..."]:
        """Compute the population loss of circuits U; traceable."""
        covariance, moment = jnp.asarray(self.spectrum), jnp.asarray(self.second_moment)
        known = jnp.einsum("...dd,d->...", circuit, covariance**2)
        squared = jnp.einsum("...de,d,e->...", circuit**2, moment, covariance)
        return (covariance.sum() - 2 * known + squared) / 2

    def sample(self, key: jax.Array, batch: int) -> Prompts:
        """Draw prompts in single precision; traceable."""
        draws = jax.random.normal(key, (batch, self.prompt_length + 2, self.dim), jnp.float32)
        weights = draws[:, 0]  # (B, D)
        points = draws[:, 1:] * jnp.sqrt(jnp.asarray(self.spectrum, jnp.float32))
        outputs = jnp.einsum("bnd,bd->bn", points, weights)
        return Prompts(points[:, 1:], outputs[:, 1:], points[:, 0], outputs[:, 0])

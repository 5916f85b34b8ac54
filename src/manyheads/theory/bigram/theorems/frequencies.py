r"""Token frequencies: the signal system for any distribution of tokens, the transition's stationary one or another.

Let tokens have the distribution :math:`\nu` and targets :math:`P\nu`. With :math:`\tilde P = P - P\nu1^\top`,
:math:`S = \mathrm{diag}\nu - \nu\nu^\top` and :math:`c = P\nu - \nu`, the projected gradients of
:math:`f = \nu + WXa` are those of :math:`P\nu = \nu`: the offset :math:`c` has no mean in them, because
:math:`W\nu = 0`. Both signals follow the system of `manyheads.theory.bigram.theorems.signal` with the squared norms
under :math:`\nu`, and the excess loss keeps :math:`\tfrac12|c|^2`. The offset adds to the noise, which sums to

.. math:: \rho^2 = \frac{\kappa_2K_Q}{2N_{\mathrm{eff}}}, \qquad
          \frac1{N_{\mathrm{eff}}} = \frac{\operatorname{tr}(\tilde PS\tilde P^\top\Sigma)}{K_P}, \quad
          \Sigma = \mathrm{diag}P\nu - P\nu(P\nu)^\top + cc^\top,

:math:`N_{\mathrm{eff}} = N` at equal frequencies. In the same way values :math:`W` with :math:`W\nu\ne0`, among them
uniform ones :math:`V = 11^\top/N`, keep :math:`W\nu` and train as their centred part does, with the offset
:math:`c = P\nu - \nu - W\nu`.

Derived here.
"""

from typing import ClassVar

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError
from manyheads.theory.bigram.task import BigramTask


class ShiftedTask(BigramTask):
    r"""A task whose tokens and queries have a distribution that the transition need not keep, :math:`P\nu\ne\nu`.

    `stationary` is :math:`\nu`, `centred` is :math:`P - P\nu1^\top`. The excess loss of `theory.population` is without
    the offset's part :math:`\tfrac12|P\nu - \nu|^2`.
    """

    _is_stationary: ClassVar[bool] = False

    @property
    def centred(self) -> np.ndarray:
        """Centred transition, (N, N): its columns sum to zero and average to zero."""
        return self.transition - self.target_distribution[:, None]

    @property
    def target_distribution(self) -> np.ndarray:
        r""":math:`P\nu`, (N,)."""
        return self.transition @ self.stationary


@takes_arrays
def effective_vocabulary(task: BigramTask, mean: np.ndarray | None = None) -> float:
    r"""Return :math:`N_{\mathrm{eff}}`, N in the noise of the sign; `mean` (N,) is :math:`W\nu`, or zero."""
    mean = np.zeros(task.vocabulary) if mean is None else np.asarray(mean, float)
    if mean.shape != (task.vocabulary,):
        raise ShapeError(f"mean {mean.shape}: this task needs ({task.vocabulary},), one for each token")
    nu, targets, centred = task.stationary, task.transition @ task.stationary, task.centred
    spread, offset = np.diag(nu) - np.outer(nu, nu), targets - nu - mean
    noise = np.diag(targets) - np.outer(targets, targets) + np.outer(offset, offset)
    return task.transition_squared_norm / float(np.trace(centred @ spread @ centred.T @ noise))


def increasing_frequencies(vocabulary: int) -> np.ndarray:
    """Return frequencies in proportion to 1, 2, ..., N."""
    ranks = np.arange(1.0, vocabulary + 1)
    return ranks / ranks.sum()


def place_equally(
    kind: type[BigramTask], transition: np.ndarray, mu: np.ndarray, length: int, sparsity: int, rng: np.random.Generator
) -> BigramTask:
    """Return a task of a kind with equal weights at positions drawn anew."""
    places = [np.sort(rng.choice(length, sparsity, replace=False)) for _ in mu]
    return kind(transition, mu, np.stack(places), np.full((len(mu), sparsity), 1 / sparsity), length)

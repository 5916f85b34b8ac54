"""Contrastive task: features with symmetric coefficients, correlated noise of two views, and a loss of three outputs.

One sample is an anchor, a positive view of the same object and a negative (s = 0, 1, 2) in n dimensions:

    x_s = n^(-1/2) sum_k c_k^(s) u_k + a_s,        c^(0) = c^(1) = c,  c^(2) an independent copy of c,

with orthogonal features u_k, |u_k|^2 = n, independent symmetric coefficients c_k, and noise a_s whose coordinates are
independent and Gaussian with covariance R between the views:

    R_ss = s0^2 + ea^2,    R_01 = s0^2 + rho ea^2,    R_02 = R_12 = 0.

s0 is the noise that both views share, ea that of the augmentation, rho its correlation. The model is one neuron with
outputs y_s = w.x_s / sqrt n. The loss and its parameters are chosen here: the publication's own were not available.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError

ContrastiveLoss = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class FeatureDistribution:
    """Distribution of the coefficient of one feature: finitely many values, symmetric about zero.

    Examples
    --------
    >>> feature = FeatureDistribution((-2.0, 0.0, 2.0), (0.125, 0.75, 0.125))
    >>> feature.second_moment, feature.kurtosis
    (1.0, 4.0)
    """

    values: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        chances = dict(zip(self.values, self.probabilities, strict=False))
        total = math.fsum(self.probabilities)
        if len(self.values) != len(self.probabilities) or len(chances) != len(self.values):
            raise UsageError(f"{self}: give one probability for each value, and each value once")
        if min(self.probabilities, default=0.0) < 0 or not math.isclose(total, 1.0, rel_tol=1e-9):
            raise UsageError(f"probabilities={self.probabilities} sum to {total:g}: expected 1, and none negative")
        if any(not math.isclose(chances.get(-value, -1.0), chance, rel_tol=1e-9) for value, chance in chances.items()):
            raise UsageError(f"{self}: the theory takes a symmetric distribution; give -c the probability of c")

    def moment(self, order: int) -> float:
        """Return E c^order."""
        return math.fsum(p * value**order for value, p in zip(self.values, self.probabilities, strict=True))

    @property
    def second_moment(self) -> float:
        """E c^2."""
        return self.moment(2)

    @property
    def kurtosis(self) -> float:
        """E c^4 / (E c^2)^2: 1 for a sign, 1/P for a sign that is zero with probability 1 - P."""
        if not self.moment(2) > 0:
            raise UsageError(f"{self} is always zero, without a kurtosis: give a value other than zero")
        return self.moment(4) / self.moment(2) ** 2


def sparse_feature(probability: float = 1.0, second_moment: float = 1.0) -> FeatureDistribution:
    """Return a feature that is present with the given probability, with either sign and the given second moment."""
    Constraint(above=0, most=1).kept("probability", probability, "float")
    Constraint(above=0).kept("second_moment", second_moment, "float")
    size = math.sqrt(second_moment / probability)
    if probability == 1:
        return FeatureDistribution((-size, size), (0.5, 0.5))
    return FeatureDistribution((-size, 0.0, size), (probability / 2, 1 - probability, probability / 2))


def logistic_loss(anchor: Array, positive: Array, negative: Array) -> Array:
    """Return log(1 + exp(f_0 f_2 - f_0 f_1)) with f = tanh of the outputs: the default loss."""
    product = jnp.tanh(anchor) * (jnp.tanh(negative) - jnp.tanh(positive))
    return jax.nn.softplus(product)


@dataclass(frozen=True)
class ContrastiveTask:
    """Features, noise, and training settings of the contrastive model.

    Parameters
    ----------
    features
        Distribution of the coefficient of every feature.
    shared_std
        Standard deviation s0 of the noise that both views share.
    augmentation_std
        Standard deviation ea of the noise of each view.
    correlation
        Correlation rho of the augmentation noise of the two views, from -1 to 1.
    learning_rate
        tau: w <- w - tau/sqrt n sum_s (d_s l) x_s - (tau/n) lambda w.
    weight_decay
        lambda.
    loss
        Smooth function of the three outputs (anchor, positive, negative), written in `jax.numpy`.

    Raises
    ------
    UsageError
        No feature, a negative size, no noise in the mean of the two views, or a correlation outside [-1, 1].

    Examples
    --------
    >>> ContrastiveTask(correlation=-0.5).covariance
    0.125
    """

    features: tuple[FeatureDistribution, ...] = constrained((sparse_feature(), sparse_feature(0.25)))
    shared_std: float = constrained(0.5, Constraint(least=0))
    augmentation_std: float = constrained(0.5, Constraint(least=0))
    correlation: float = constrained(0.0, Constraint(least=-1, most=1))
    learning_rate: float = constrained(0.5, Constraint(above=0))
    weight_decay: float = constrained(0.1, Constraint(least=0))
    loss: ContrastiveLoss = logistic_loss

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.variance + self.covariance > 0:
            raise UsageError(
                f"shared_std={self.shared_std}, augmentation_std={self.augmentation_std}, correlation="
                f"{self.correlation}: the mean of the two views has no noise; raise shared_std or the correlation"
            )

    @property
    def variance(self) -> float:
        """R_ss, the variance of a coordinate of the noise of one view."""
        return self.shared_std**2 + self.augmentation_std**2

    @property
    def covariance(self) -> float:
        """R_01, the covariance of the noise of anchor and positive view."""
        return self.shared_std**2 + self.correlation * self.augmentation_std**2

    def parameters(self) -> "TaskParameters":
        """Return the numbers of the task as arrays, for compiled programs."""
        combinations = list(itertools.product(*(zip(f.values, f.probabilities, strict=True) for f in self.features)))
        values = np.array([[value for value, _ in row] for row in combinations])
        chances = np.array([math.prod(chance for _, chance in row) for row in combinations])
        scalars = (self.variance, self.covariance, self.learning_rate, self.weight_decay)
        return TaskParameters(values, chances, *map(np.float64, scalars))


class TaskParameters(NamedTuple):
    """Parameters of a task: the M joint values of the p features with their probabilities, R, tau and lambda."""

    values: Float[Any, "joint features"]
    probabilities: Float[Any, " joint"]
    variance: Float[Any, ""]
    covariance: Float[Any, ""]
    learning_rate: Float[Any, ""]
    weight_decay: Float[Any, ""]

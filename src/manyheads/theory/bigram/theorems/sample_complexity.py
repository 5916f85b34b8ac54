r"""Sample complexity: samples of stage one from scratch, and the excess loss after a refit on n fresh samples.

None of these is a bound of the paper (Ren, Wang and Lee, arXiv 2410.23438), whose bounds are worst cases: every
docstring states whether it is derived or measured here. All assume that tokens are about equally frequent. The samples
of transfer are `manyheads.theory.bigram.transfer.predict_transfer`, those of screening
`manyheads.theory.bigram.predict_screening`.
"""

import itertools
import math

import numpy as np

from manyheads._overview import distinct_texts
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask

LARGEST_NOISE_RATIO = 8.0  # above it the plateau escape is later than predicted, or absent
STAGE_ONE_OFFSET = 1.3


def stage_one_samples(task: BigramTask, noise_ratio: float) -> float:
    r"""Return the samples of the plateau escape from scratch (product of both signals above .3).

    .. math:: n = \frac{T(\ln T + 1.3)}{\kappa_2K_PK_Q}, \qquad 0 < \kappa_2 \le 8

    The form is derived here: :math:`\ln T` units of time until a drift of :math:`1/T` is of order one, at
    :math:`B/\eta` samples each. The offset depends on the noise and was measured at :math:`\kappa_2\approx 9`, N = 3;
    without noise it is -.2. `manyheads.theory.bigram.theorems.signal.predict_escape` predicts it.
    """
    if not 0 < noise_ratio <= LARGEST_NOISE_RATIO:
        given, largest = distinct_texts(noise_ratio, LARGEST_NOISE_RATIO)
        raise UsageError(
            f"noise_ratio={given}: the scaling law holds up to {largest}; above, use "
            "manyheads.theory.bigram.theorems.signal.predict_escape"
        )
    time = math.log(task.length) + STAGE_ONE_OFFSET
    return task.length * time / (noise_ratio * task.transition_squared_norm * attention_squared_norm(task))


def refit_excess(task: BigramTask, samples: int) -> float:
    r"""Return the expected excess loss of values and weights fitted by least squares at the true positions.

    .. math:: \frac1{2n}\operatorname{tr}H^+G, \qquad H = \mathbb E[J^\top J], \quad
              G = \mathbb E[J^\top\operatorname{Cov}(e_y|x,k)J],

    with the Jacobian :math:`J` of the predictions in the values and in the weights of every query, whose sum is fixed:
    the covariance of least squares under model noise, to leading order in 1/n. Expectations are sums over queries and
    attended tokens, :math:`N^{Q+1}` terms. Derived here.
    """
    mu, tokens, places = task.stationary, task.vocabulary, task.sparsity
    size = tokens**2 + tokens * places
    hessian, noise = np.zeros((size, size)), np.zeros((size, size))
    sum_fixed = np.eye(places) - 1 / places
    for query, weights in enumerate(task.weights):
        for attended in itertools.product(range(tokens), repeat=places):
            columns = np.eye(tokens)[:, attended]  # (N, Q)
            target = task.transition @ columns @ weights
            jacobian = np.zeros((tokens, size))
            jacobian[:, : tokens**2] = np.kron(np.eye(tokens), columns @ weights - mu)
            begin = tokens**2 + query * places
            jacobian[:, begin : begin + places] = task.centred @ columns @ sum_fixed
            chance = mu[query] * mu[list(attended)].prod()
            hessian += chance * jacobian.T @ jacobian
            noise += chance * jacobian.T @ (np.diag(target) - np.outer(target, target)) @ jacobian
    return float(np.trace(np.linalg.pinv(hessian, rcond=1e-10) @ noise)) / (2 * samples)


def attention_squared_norm(task: BigramTask) -> float:
    """Return K_Q; refuse a task whose weights are all equal."""
    squared_norm = task.attention_squared_norm
    if squared_norm <= 1e-12:
        raise UsageError("all positions have equal weight in this task (K_Q = 0): choose a sparser task")
    return squared_norm

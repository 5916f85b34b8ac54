r"""Sample complexity of stage one from scratch and of position ranking, and the excess loss after a refit.

None of these is a bound of the paper (Ren, Wang and Lee, arXiv 2410.23438), whose bounds are worst cases: every
docstring states whether it is derived or measured here. All assume that tokens are about equally frequent. The samples
of transfer are `manyheads.theory.bigram.transfer.predict_transfer`, those of screening
`manyheads.theory.bigram.predict_screening`.

**Position ranking.** Gradient training from scratch ranks the attended positions first before the plateau escape: the
loss stays at its initial value while the attention already has its largest
entries at the right positions. With :math:`\tau` the time in units of :math:`1/\eta`, :math:`\delta = 1/(TK_Q)` and the
noise-to-signal ratio :math:`\kappa_2`, small signals and noise obey the linearized signal system
(`manyheads.theory.bigram.theorems.signal`)

.. math::
    d\alpha_V &= (\alpha_A + \delta)\,d\tau + \delta\sqrt{\kappa_2K_Q/N}\;dB, \qquad d\alpha_A = \alpha_V\,d\tau, \\
    dF &= \kappa_2\frac{K_P\,d}{K_Q\,T^2}\,d\tau, \qquad
    dE = \kappa_2\frac{K_Q}{K_P}\,(K_P\alpha_V^2 + F)\,d\tau,

with :math:`d = (1 - 1/N)(N-1) - 1/N` directions of noise beside the transition. An attended position of weight
:math:`q` has the entry :math:`\alpha_Aq` above uniform, and every entry has noise of variance :math:`E/T`. The
positions rank first once the smallest of these entries exceeds the largest of the :math:`T-Q` others in every query.

**How the samples grow.** Where the drift dominates, :math:`\alpha_A = \delta\tau^2/2` and
:math:`\sqrt{E/T} = \kappa_2\sqrt{d/2}\,\tau T^{-3/2}`, so with the largest of T normal numbers :math:`z \approx
\sqrt{2\ln T}` the samples :math:`\tau T/(\kappa_2K_PK_Q)` are

.. math:: n = \frac{z\sqrt{2dT}}{q\,K_P} ,

of order :math:`\sqrt{T\ln T}` and independent of the learning rate, against :math:`T\ln T` until the plateau escape.
In still longer contexts noise of the values along the transition ranks the positions before the drift does. Derived
here.
"""

import itertools
import math

import numpy as np
from scipy.stats import norm

from manyheads._arrays import takes_arrays
from manyheads._overview import distinct_texts
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask

PATHS = 1600  # of position ranking
TIMES = 500  # steps of a path, in geometric progression
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


def predict_position_ranking(
    task: BigramTask, noise_ratio: float, rng: np.random.Generator, patience: float = 6.0
) -> np.ndarray:
    """Draw the samples until gradient training from scratch ranks all positions first, with any sign: 1600 paths.

    Tokens are about equally frequent, `noise_ratio` is that of `SignalSystem`, and paths that do not end within
    `patience` times ln T + 1.3 units of time have the samples of this budget.
    """
    if not noise_ratio > 0 or not patience > 0:
        raise UsageError(f"noise_ratio={noise_ratio}, patience={patience}: give positive numbers")
    transition, weights = task.transition_squared_norm, attention_squared_norm(task)
    drift = 1 / (task.length * weights)  # delta
    shaking = drift * (noise_ratio * weights / task.vocabulary) ** 0.5
    directions = (1 - 1 / task.vocabulary) * (task.vocabulary - 1) - 1 / task.vocabulary
    horizon = patience * (np.log(task.length) + 1.3)
    times = np.concatenate([[0.0], np.geomspace(1e-5 * horizon, horizon, TIMES)])
    ratios = np.linspace(0, 60, 481)
    required = np.interp(rng.random(PATHS), ranking_probability(task, ratios), ratios)
    value, attention, attention_noise = np.zeros((3, PATHS))
    reached = np.full(PATHS, horizon)
    for time, step in zip(times[1:], np.diff(times), strict=True):
        value_noise = noise_ratio * transition * max(directions, 0.0) * (time - step) / (weights * task.length**2)
        attention_noise = attention_noise + step * noise_ratio * weights / transition * (
            transition * value**2 + value_noise
        )
        noise = shaking * step**0.5 * rng.standard_normal(PATHS)
        value, attention = value + step * (attention + drift) + noise, attention + step * value
        ranked = np.abs(attention) > required * (attention_noise / task.length) ** 0.5
        reached = np.where(ranked, np.minimum(reached, time), reached)
    return reached * task.length / (noise_ratio * transition * weights)


@takes_arrays
def ranking_probability(task: BigramTask, ratios: np.ndarray) -> np.ndarray:
    r"""Return the probability that all positions rank first, (R,), for ratios of signal and noise (R,).

    .. math:: \prod_k \int dG(x) \prod_m \Pr(|r\,q^{(k)}_m + z_m| > x), \qquad G(x) = (2\Phi(x) - 1)^{T-Q} .
    """
    edges = np.linspace(0, 12, 481)
    mass = np.diff((2 * norm.cdf(edges) - 1) ** (task.length - task.sparsity))
    largest = (edges[1:] + edges[:-1]) / 2
    probability = np.ones(len(ratios))
    for row in task.weights:
        shift = np.multiply.outer(ratios, row)[..., None]  # (R, Q, 1)
        above = norm.cdf(shift - largest) + norm.cdf(-shift - largest)
        probability *= above.prod(1) @ mass
    return probability

r"""Sparse contextual bigram task: the query selects earlier positions, one of which determines the next token.

A context of :math:`T` tokens :math:`x_1,\dots,x_T` and a query :math:`x_{T+1}` are independent draws from a
distribution :math:`\mu` over :math:`N` tokens. Given the query :math:`k`, a position :math:`t` is drawn from the sparse
weights :math:`q^{(k)}`, which are zero except at :math:`Q` positions, and the target is drawn from the column of a
transition matrix that belongs to the token at that position:

.. math:: \Pr(y = i \mid x, k) = \sum_t q^{(k)}_t P_{i,\,x_t}, \qquad P\mu = \mu.

Two squared norms measure how much there is to learn, with :math:`\tilde P = P - \mu 1^\top`:

.. math:: K_P = \sum_j \mu_j |\tilde P_j|^2, \qquad K_Q = \sum_k \mu_k |q^{(k)}|^2 - 1/T.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS
2024 (arXiv 2410.23438), abstract. The default :math:`K_P` of a drawn task is a choice of this library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import check_arrays, takes_arrays
from manyheads._constraints import Constraint
from manyheads._extras import Float, Int, Integer
from manyheads._overview import ArraysAsShapes
from manyheads.errors import ShapeError, UsageError

TOLERANCE = 1e-9  # of sums to one; a matrix normalized in double precision is a million times closer
LARGEST_VOCABULARY = 1 << 16  # tokens are stored as uint8 or uint16


class Batch(NamedTuple):
    """Contexts (B, T) as uint8 or uint16, their queries (B,) and targets (B,)."""

    tokens: Integer[np.ndarray, "batch position"]
    queries: Integer[np.ndarray, " batch"]
    targets: Integer[np.ndarray, " batch"]


@dataclass(frozen=True, eq=False, repr=False)
class BigramTask(ArraysAsShapes):
    r"""A sparse contextual bigram: transition matrix, token distribution and attended positions of every query.

    Attributes
    ----------
    transition
        :math:`P`, (N, N) float64: column :math:`j` is the distribution of the target when the attended token is
        :math:`j`.
    stationary
        :math:`\mu`, (N,) float64: the distribution of tokens and queries, with :math:`P\mu = \mu`, all positive.
    positions
        (N, Q) int64: the attended positions of every query, increasing along a row.
    weights
        (N, Q) float64: their probabilities; positive, rows sum to one.
    length
        Number of context tokens :math:`T`.

    Raises
    ------
    ShapeError
        Shapes that do not fit together.
    UsageError
        Columns of `transition` or rows of `weights` that are not probability distributions, a distribution that is
        not stationary, a token of zero probability, or positions that repeat or lie outside the context.

    Examples
    --------
    >>> task = BigramTask(np.eye(2), np.full(2, 0.5), np.array([[0], [2]]), np.ones((2, 1)), length=4)
    >>> task.attention
    array([[1., 0., 0., 0.],
           [0., 0., 1., 0.]])
    >>> task.transition_squared_norm, task.attention_squared_norm
    (0.5, 0.75)
    """

    transition: Float[np.ndarray, "token token"]
    stationary: Float[np.ndarray, " token"]
    positions: Int[np.ndarray, "query attended"]
    weights: Float[np.ndarray, "query attended"]
    length: int

    _is_stationary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, kind in (("transition", float), ("stationary", float), ("weights", float), ("positions", np.int64)):
            array = np.array(check_arrays(getattr(self, name), name))
            if kind is np.int64 and not np.issubdtype(array.dtype, np.integer):
                raise ShapeError(f"{name} of type {array.dtype}: give integers")
            array = array.astype(kind)
            array.flags.writeable = False  # a checked task stays checked
            object.__setattr__(self, name, array)
        _check_distributions(self.transition, self.stationary, self._is_stationary)
        _check_positions(self)

    @property
    def vocabulary(self) -> int:
        """Number of tokens N."""
        return len(self.stationary)

    @property
    def sparsity(self) -> int:
        """Number of attended positions Q of a query."""
        return self.positions.shape[1]

    @property
    def attention(self) -> Float[np.ndarray, "query position"]:
        """Weights of all positions, (N, T) float64; row k belongs to query k."""
        dense = np.zeros((self.vocabulary, self.length))
        np.put_along_axis(dense, self.positions, self.weights, axis=1)
        return dense

    @property
    def centred(self) -> Float[np.ndarray, "token token"]:
        r"""Centred transition :math:`\tilde P = P - \mu 1^\top`, (N, N): its columns sum to zero."""
        return self.transition - self.stationary[:, None]

    @property
    def transition_squared_norm(self) -> float:
        r"""Squared norm of the centred transition, :math:`K_P = \sum_j \mu_j |P_j - \mu|^2`."""
        return float(self.stationary @ (self.centred**2).sum(0))

    @property
    def weight_squared_norm(self) -> float:
        r"""Squared norm of the weights, :math:`\sum_k \mu_k |q^{(k)}|^2`: at least 1/Q."""
        return float(self.stationary @ (self.weights**2).sum(1))

    @property
    def attention_squared_norm(self) -> float:
        r"""Squared distance of the weights from uniform, :math:`K_Q = \sum_k \mu_k |q^{(k)}|^2 - 1/T`."""
        return self.weight_squared_norm - 1 / self.length

    def draw(self, rng: np.random.Generator, size: int) -> Batch:
        """Draw samples: tokens (B, T), uint8 up to 256 tokens and uint16 above, queries and targets (B,), int64."""
        if size < 1:
            raise UsageError(f"size={size}: draw at least one sample")
        kind = np.uint8 if self.vocabulary <= 256 else np.uint16
        bounds = np.cumsum(self.stationary)[:-1]  # N - 1 thresholds
        tokens = np.searchsorted(bounds, rng.random((size, self.length)), side="right").astype(kind)  # (B, T)
        queries = np.searchsorted(bounds, rng.random(size), side="right")  # (B,)
        shares = np.cumsum(self.weights, axis=1)[queries, :-1]  # (B, Q - 1)
        chosen = self.positions[queries, (rng.random((size, 1)) >= shares).sum(1)]  # (B,)
        attended = tokens[np.arange(size), chosen]
        steps = np.cumsum(self.transition, axis=0)[:-1, attended].T  # (B, N - 1)
        targets = (rng.random((size, 1)) >= steps).sum(1)
        return Batch(tokens, queries, targets)


def _check_distributions(transition: np.ndarray, stationary: np.ndarray, stationary_is_known: bool = True) -> None:
    """Refuse a transition or a token distribution that is not one, or a pair that does not satisfy P mu = mu."""
    tokens = len(transition) if transition.ndim else 0
    if transition.shape != (tokens, tokens) or stationary.shape != (tokens,):
        raise ShapeError(
            f"transition {transition.shape}, stationary {stationary.shape}: give (N, N) and (N,) of one vocabulary N"
        )
    if not 2 <= tokens <= LARGEST_VOCABULARY:
        raise UsageError(f"a vocabulary of {tokens} tokens: use between 2 and {LARGEST_VOCABULARY}")
    if not np.isfinite(transition).all() or transition.min() < 0:
        raise UsageError(f"transition has an entry {_worst(transition)}: give finite probabilities, zero or more")
    off = np.abs(transition.sum(0) - 1)
    if off.max() > TOLERANCE:
        column = int(off.argmax())
        raise UsageError(
            f"column {column} of transition sums to {transition[:, column].sum():.9g}: every column is a distribution "
            "over targets and must sum to 1 (transpose a row-stochastic matrix)"
        )
    if not np.isfinite(stationary).all() or stationary.min() <= TOLERANCE / tokens:
        token = int(np.argmin(np.where(np.isfinite(stationary), stationary, -np.inf)))
        raise UsageError(
            f"token {token} is unreachable: its probability is {stationary[token]:.3g}; drop it from the vocabulary"
        )
    if abs(stationary.sum() - 1) > TOLERANCE:
        raise UsageError(f"stationary sums to {stationary.sum():.9g} and must sum to 1")
    drift = np.abs(transition @ stationary - stationary).max()
    if stationary_is_known and drift > 1e3 * TOLERANCE / tokens:
        raise UsageError(
            f"transition moves stationary by {drift:.3g}: the two must satisfy P mu = mu; solve for mu with "
            "manyheads.theory.bigram.task.stationary_distribution"
        )


def _check_positions(task: BigramTask) -> None:
    """Refuse positions outside the context, and weights that are not a distribution."""
    positions, weights = task.positions, task.weights
    if positions.ndim != 2 or positions.shape != weights.shape or len(positions) != task.vocabulary:
        raise ShapeError(
            f"positions {positions.shape}, weights {weights.shape}: give both as (N, Q) with N = {task.vocabulary}"
        )
    if not 1 <= task.sparsity <= task.length:
        raise UsageError(f"{task.sparsity} positions a query in a context of {task.length}: between 1 and the length")
    if positions.min() < 0 or positions.max() >= task.length:
        raise UsageError(f"positions reach from {positions.min()} to {positions.max()} in a context of {task.length}")
    if (np.diff(positions, axis=1) <= 0).any():
        query = int((np.diff(positions, axis=1) <= 0).any(1).argmax())
        raise UsageError(f"positions of query {query} are {positions[query].tolist()}: give them in increasing order")
    if not np.isfinite(weights).all() or weights.min() <= 0:
        raise UsageError(f"weights has an entry {_worst(weights)}: weights are positive; leave out what is zero")
    off = np.abs(weights.sum(1) - 1)
    if off.max() > TOLERANCE:
        raise UsageError(f"weights of query {off.argmax()} sum to {weights[off.argmax()].sum():.9g} and not to 1")


def _worst(array: np.ndarray) -> float:
    """Return an entry that is not finite, else the smallest."""
    bad = array[~np.isfinite(array)]
    return float(bad[0]) if bad.size else float(array.min())


@takes_arrays
def stationary_distribution(transition: ArrayLike) -> Float[np.ndarray, " token"]:
    r"""Solve :math:`P\mu = \mu`, :math:`1^\top\mu = 1` for a column-stochastic matrix (N, N)."""
    matrix = np.asarray(transition, float)
    tokens = len(matrix) if matrix.ndim else 0
    _check_distributions(matrix, np.full(tokens, 1 / max(tokens, 1)), stationary_is_known=False)
    system = np.vstack([matrix - np.eye(tokens), np.ones(tokens)])  # (N + 1, N)
    smallest = np.linalg.svd(system, compute_uv=False)[-1]
    if smallest < 1e-10:
        raise UsageError(
            f"more than one distribution is stationary (smallest singular value {smallest:.1e}): the tokens fall into "
            "classes that never reach each other; keep one class"
        )
    mu = np.linalg.lstsq(system, np.append(np.zeros(tokens), 1.0), rcond=None)[0]
    _check_distributions(matrix, mu)
    return mu


def sum_by_token(tokens: np.ndarray, weights: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the weight that every token gets in each row of tokens and weights (B, C): (B, N)."""
    cells = tokens.astype(np.int64) + vocabulary * np.arange(len(tokens))[:, None]
    return np.bincount(cells.ravel(), weights.ravel(), len(tokens) * vocabulary).reshape(len(tokens), vocabulary)


def typical_squared_norm(vocabulary: int) -> float:
    r"""Return the default :math:`K_P` of a drawn task, :math:`2.4\,(1 - 1/N)/(N + 5)`.

    It is the mean for columns drawn from a Dirichlet distribution of concentration about .4. Fixing it makes the sample
    sizes of two drawn tasks comparable.
    """
    return 2.4 * (1 - 1 / vocabulary) / (vocabulary + 5)


def draw_bigram_task(
    rng: np.random.Generator,
    vocabulary: int,
    length: int,
    sparsity: int,
    *,
    uniform: bool = True,
    squared_norm: float | None = None,
) -> BigramTask:
    r"""Draw a task with random columns and positions, and weights of at least about :math:`1/2Q`.

    The columns are drawn from a Dirichlet distribution and, with `uniform`, balanced so that rows sum to one as well.
    Then the matrix is moved along a line, towards :math:`\mu 1^\top` or towards the identity, which both keep
    :math:`\mu`, until :math:`K_P` is `squared_norm` exactly.

    Parameters
    ----------
    vocabulary, length, sparsity
        Number of tokens N, of context tokens T, and of attended positions Q of a query.
    uniform
        Whether all tokens are equally frequent.
    squared_norm
        :math:`K_P`, between 0 and :math:`1 - |\mu|^2`; by default :math:`2.4/(N+5)` of the latter.

    Raises
    ------
    UsageError
        Sizes that make no task, or a squared norm that no transition has.

    Examples
    --------
    >>> task = draw_bigram_task(np.random.default_rng(0), vocabulary=3, length=100, sparsity=2)
    >>> round(task.transition_squared_norm, 6), task.stationary.round(6).tolist()
    (0.2, [0.333333, 0.333333, 0.333333])
    """
    if vocabulary < 2 or not 1 <= sparsity <= length:
        raise UsageError(
            f"vocabulary={vocabulary}, length={length}, sparsity={sparsity}: give two tokens or more, and between one "
            "position and the whole context"
        )
    columns = rng.dirichlet(np.full(vocabulary, 0.4), size=vocabulary).T + 1e-3  # (N, N)
    if uniform:
        for _ in range(2000):  # Sinkhorn iteration
            columns /= columns.sum(1, keepdims=True)
            columns /= columns.sum(0)
            if np.abs(columns.sum(1) - 1).max() < 1e-14 * vocabulary:
                break
        mu = np.full(vocabulary, 1 / vocabulary)
        columns += (1 - columns.sum(1, keepdims=True)) / vocabulary  # the remainder, spread over the row
    else:
        columns = 0.9 * columns / columns.sum(0) + 0.1 / vocabulary  # no token is rarer than a tenth of its share
        mu = stationary_distribution(columns)
    target = 2.4 / (vocabulary + 5) * (1 - float(mu @ mu)) if squared_norm is None else squared_norm
    transition = _move_to_squared_norm(columns, mu, target)
    positions = np.stack([np.sort(rng.choice(length, sparsity, replace=False)) for _ in range(vocabulary)])
    weights = np.maximum(rng.dirichlet(np.full(sparsity, 5.0), size=vocabulary), 0.5 / sparsity)
    return BigramTask(transition, mu, positions, weights / weights.sum(1, keepdims=True), length)


def _move_to_squared_norm(columns: np.ndarray, mu: np.ndarray, target: float) -> np.ndarray:
    """Mix a transition with its mean or with the identity until K_P is `target`."""
    most = 1 - float(mu @ mu)
    if not 0 < target < most:
        raise UsageError(f"squared_norm={target:.3g}: give a K_P between 0 and {most:.3g} for this distribution")
    centred = columns - mu[:, None]
    now = float(mu @ (centred**2).sum(0))
    if now >= target:
        moved = centred * (target / now) ** 0.5
    else:
        identity = np.eye(len(mu)) - mu[:, None]
        cross, step = float(mu @ (centred * identity).sum(0)), identity - centred
        # K_P along the line is now + 2 b s + a s^2; from below the target to above it: one root in (0, 1)
        a, b = float(mu @ (step**2).sum(0)), cross - now
        moved = centred + step * (-b + (b * b + a * (target - now)) ** 0.5) / a
    mixed = np.maximum(moved + mu[:, None], 0.0)  # rounding may leave -1e-17
    return mixed / mixed.sum(0)


def draw_correlated(rng: np.random.Generator, task: BigramTask, correlation: float) -> Float[np.ndarray, "token token"]:
    r"""Draw a centred value matrix (N, N) of given correlation with a task's transition.

    .. math:: W_0 = \rho \tilde P + \sqrt{1-\rho^2}\,|\tilde P|_\mu E, \qquad
              \langle E, \tilde P\rangle_\mu = 0,\ |E|_\mu = 1,\ E\mu = 0,\ 1^\top E = 0,

    with :math:`E` uniform on that sphere, so :math:`|W_0|_\mu = |\tilde P|_\mu`. :math:`\langle U,U'\rangle_\mu =
    \sum_j \mu_j U_j\cdot U'_j` over columns.
    """
    Constraint(least=-1, most=1).kept("correlation", correlation, "float")
    target, mu = task.centred, task.stationary
    if abs(correlation) == 1:
        return correlation * target
    if task.vocabulary == 2:
        raise UsageError(f"correlation={correlation} with two tokens: only -1 and 1 exist; use three tokens or more")
    # Gaussian in the metric of the product: dividing column j by sqrt(mu_j) makes the direction uniform
    drawn = rng.standard_normal(target.shape) / np.sqrt(mu)
    drawn -= (drawn @ mu)[:, None]
    drawn -= drawn.mean(0)
    drawn -= target * float(mu @ (drawn * target).sum(0)) / task.transition_squared_norm
    drawn *= (task.transition_squared_norm / float(mu @ (drawn**2).sum(0))) ** 0.5
    return correlation * target + (1 - correlation**2) ** 0.5 * drawn

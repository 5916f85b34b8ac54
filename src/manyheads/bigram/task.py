r"""The sparse contextual bigram: a query token says which earlier positions count, one of them says what comes next.

A context of :math:`T` tokens :math:`x_1,\dots,x_T` and a query :math:`x_{T+1}` are independent draws from a law
:math:`\mu` over :math:`N` tokens. Given the query :math:`k`, one position :math:`t` is drawn from the sparse weights
:math:`q^{(k)}`, which are zero but at :math:`Q` positions, and the answer is drawn from the column of a transition
matrix that belongs to the token there:

.. math:: \Pr(y = i \mid x, k) = \sum_t q^{(k)}_t P_{i,\,x_t}, \qquad P\mu = \mu.

Two numbers say how much there is to learn, with :math:`\tilde P = P - \mu 1^\top`:

.. math:: K_P = \sum_j \mu_j |\tilde P_j|^2, \qquad K_Q = \sum_k \mu_k |q^{(k)}|^2 - 1/T.

Source: Ren, Wang and Lee, "Learning and transferring sparse contextual bigrams with linear transformers", NeurIPS
2024 (arXiv 2410.23438), abstract. The energy that a drawn task has by default is our own choice.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyheads._arrays import check_arrays, takes_arrays
from manyheads.errors import ShapeError, UsageError

TOLERANCE = 1e-9  # of sums to one; a matrix normalised in double precision is a million times closer
LARGEST_VOCABULARY = 1 << 16  # tokens are kept as uint8 or uint16


class Batch(NamedTuple):
    """Contexts (B, T) as uint8 or uint16, their queries (B,) and answers (B,)."""

    tokens: np.ndarray
    queries: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, eq=False)
class BigramTask:
    r"""One task: what follows which token, and which positions each query looks at.

    Attributes
    ----------
    transition
        :math:`P`, (N, N) float64: column :math:`j` is the law of the answer when the attended token is :math:`j`.
    stationary
        :math:`\mu`, (N,) float64: the law of the tokens and of the query, with :math:`P\mu = \mu`, all positive.
    positions
        (N, Q) int64: the positions that each query looks at, rising and distinct along a row.
    weights
        (N, Q) float64: how often it looks at each; positive, rows sum to one.
    length
        Number of context tokens :math:`T`.

    Raises
    ------
    ShapeError
        Arrays whose shapes do not fit together.
    UsageError
        A column of `transition` or a row of `weights` that is no probability law, a law that is not stationary, a
        token that never occurs, positions outside the context, repeated or more than it has.

    Examples
    --------
    >>> task = BigramTask(np.eye(2), np.full(2, 0.5), np.array([[0], [2]]), np.ones((2, 1)), length=4)
    >>> task.attention
    array([[1., 0., 0., 0.],
           [0., 0., 1., 0.]])
    >>> task.transition_energy, task.attention_energy
    (0.5, 0.75)
    """

    transition: np.ndarray
    stationary: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    length: int

    def __post_init__(self) -> None:
        for name, kind in (("transition", float), ("stationary", float), ("weights", float), ("positions", np.int64)):
            array = np.array(check_arrays(getattr(self, name), name))
            if kind is np.int64 and not np.issubdtype(array.dtype, np.integer):
                raise ShapeError(f"{name} of type {array.dtype}: give integers")
            array = array.astype(kind)
            array.flags.writeable = False  # a checked task stays checked
            object.__setattr__(self, name, array)
        _check_laws(self.transition, self.stationary)
        _check_positions(self)

    @property
    def vocabulary(self) -> int:
        """Number of tokens N."""
        return len(self.stationary)

    @property
    def sparsity(self) -> int:
        """Number of positions Q that a query looks at."""
        return self.positions.shape[1]

    @property
    def attention(self) -> np.ndarray:
        """The weights of every position, (N, T) float64; row k belongs to query k."""
        dense = np.zeros((self.vocabulary, self.length))
        np.put_along_axis(dense, self.positions, self.weights, axis=1)
        return dense

    @property
    def centred(self) -> np.ndarray:
        r"""Transition without its mean, :math:`P - \mu 1^\top`, (N, N): its columns sum to zero."""
        return self.transition - self.stationary[:, None]

    @property
    def transition_energy(self) -> float:
        r"""How much the attended token says, :math:`K_P = \sum_j \mu_j |P_j - \mu|^2`."""
        return float(self.stationary @ (self.centred**2).sum(0))

    @property
    def weight_energy(self) -> float:
        r"""Mean squared weight, :math:`\sum_k \mu_k |q^{(k)}|^2`: at least 1/Q."""
        return float(self.stationary @ (self.weights**2).sum(1))

    @property
    def attention_energy(self) -> float:
        r"""How far from uniform the weights are, :math:`K_Q = \sum_k \mu_k |q^{(k)}|^2 - 1/T`."""
        return self.weight_energy - 1 / self.length


def _check_laws(transition: np.ndarray, stationary: np.ndarray, stationary_is_known: bool = True) -> None:
    """Refuse a transition or a law of the tokens that is none, or two that do not belong together."""
    tokens = len(transition) if transition.ndim else 0
    if transition.shape != (tokens, tokens) or stationary.shape != (tokens,):
        raise ShapeError(
            f"transition {transition.shape}, stationary {stationary.shape}: give (N, N) and (N,) of one vocabulary N"
        )
    if not 2 <= tokens <= LARGEST_VOCABULARY:
        raise UsageError(f"a vocabulary of {tokens} tokens: between 2 and {LARGEST_VOCABULARY} can be kept")
    if not np.isfinite(transition).all() or transition.min() < 0:
        raise UsageError(f"transition has an entry {_worst(transition)}: probabilities are finite and not negative")
    off = np.abs(transition.sum(0) - 1)
    if off.max() > TOLERANCE:
        column = int(off.argmax())
        raise UsageError(
            f"column {column} of transition sums to {transition[:, column].sum():.9g}: every column is the law of the "
            "answer given one token and must sum to 1 (columns, not rows: transpose a row-stochastic matrix)"
        )
    if not np.isfinite(stationary).all() or stationary.min() <= TOLERANCE / tokens:
        token = int(np.argmin(np.where(np.isfinite(stationary), stationary, -np.inf)))
        raise UsageError(
            f"token {token} is unreachable: its frequency is {stationary[token]:.3g}; drop it from the vocabulary"
        )
    if abs(stationary.sum() - 1) > TOLERANCE:
        raise UsageError(f"stationary sums to {stationary.sum():.9g} and must sum to 1")
    drift = np.abs(transition @ stationary - stationary).max()
    if stationary_is_known and drift > 1e3 * TOLERANCE / tokens:
        raise UsageError(
            f"transition moves stationary by {drift:.3g}: the two must satisfy P mu = mu; find_stationary gives mu"
        )


def _check_positions(task: BigramTask) -> None:
    """Refuse positions that are none, and weights that are no law."""
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
        raise UsageError(f"positions of query {query} are {positions[query].tolist()}: rising and distinct is expected")
    if not np.isfinite(weights).all() or weights.min() <= 0:
        raise UsageError(f"weights has an entry {_worst(weights)}: weights are positive; leave out what is zero")
    off = np.abs(weights.sum(1) - 1)
    if off.max() > TOLERANCE:
        raise UsageError(f"weights of query {off.argmax()} sum to {weights[off.argmax()].sum():.9g} and not to 1")


def _worst(array: np.ndarray) -> float:
    """Return the entry to complain about: one that is not finite, else the smallest."""
    bad = array[~np.isfinite(array)]
    return float(bad[0]) if bad.size else float(array.min())


@takes_arrays
def find_stationary(transition: Any) -> np.ndarray:
    r"""Solve :math:`P\mu = \mu`, :math:`1^\top\mu = 1` for a column-stochastic matrix.

    Parameters
    ----------
    transition
        :math:`P`, (N, N): columns sum to one.

    Raises
    ------
    UsageError
        More than one law is stationary, or a token has no share in it.

    Examples
    --------
    >>> find_stationary([[0.9, 0.2], [0.1, 0.8]]).round(4)
    array([0.6667, 0.3333])
    """
    matrix = np.asarray(transition, float)
    tokens = len(matrix) if matrix.ndim else 0
    _check_laws(matrix, np.full(tokens, 1 / max(tokens, 1)), stationary_is_known=False)
    system = np.vstack([matrix - np.eye(tokens), np.ones(tokens)])  # (N + 1, N)
    smallest = np.linalg.svd(system, compute_uv=False)[-1]
    if smallest < 1e-10:
        raise UsageError(
            f"more than one law is stationary (smallest singular value {smallest:.1e}): the tokens fall into classes "
            "that never reach one another; take one class"
        )
    law = np.linalg.lstsq(system, np.append(np.zeros(tokens), 1.0), rcond=None)[0]
    _check_laws(matrix, law)
    return law


def typical_energy(vocabulary: int) -> float:
    r"""Return the energy :math:`K_P` that a drawn task has by default: :math:`2.4\,(1 - 1/N)/(N + 5)`.

    It is what columns drawn from a Dirichlet law of concentration about .4 have on average: .2 at three tokens and
    proportional to :math:`1/N` at many. Fixing it makes the sample sizes of two drawn tasks comparable. Ours.

    Examples
    --------
    >>> round(typical_energy(3), 4), round(typical_energy(100), 4)
    (0.2, 0.0226)
    """
    return 2.4 * (1 - 1 / vocabulary) / (vocabulary + 5)


def draw_task(
    rng: np.random.Generator,
    vocabulary: int,
    length: int,
    sparsity: int,
    *,
    uniform: bool = True,
    energy: float | None = None,
) -> BigramTask:
    r"""Draw a task: random columns, random positions, weights between half and all of :math:`1/Q` or more.

    The columns are drawn from a Dirichlet law and, with `uniform`, balanced so that rows sum to one as well. Then the
    matrix is moved along a line, towards :math:`\mu 1^\top` or towards the identity, which both keep :math:`\mu`,
    until :math:`K_P` is `energy` exactly.

    Parameters
    ----------
    rng
        Where the draws come from.
    vocabulary, length, sparsity
        Number of tokens N, of context tokens T, of positions Q that a query looks at.
    uniform
        Whether all tokens are equally frequent.
    energy
        :math:`K_P`, above zero and below :math:`1 - |\mu|^2`; by default :math:`2.4/(N+5)` of the latter, which is
        `typical_energy(vocabulary)` when all tokens are equally frequent.

    Raises
    ------
    UsageError
        Sizes that make no task, or an energy that no transition has.

    Examples
    --------
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=100, sparsity=2)
    >>> round(task.transition_energy, 6), task.stationary.round(6).tolist()
    (0.2, [0.333333, 0.333333, 0.333333])
    """
    if vocabulary < 2 or not 1 <= sparsity <= length:
        raise UsageError(
            f"vocabulary={vocabulary}, length={length}, sparsity={sparsity}: two tokens or more, and between one "
            "position and the whole context"
        )
    columns = rng.dirichlet(np.full(vocabulary, 0.4), size=vocabulary).T + 1e-3  # (N, N)
    if uniform:
        for _ in range(2000):  # Sinkhorn's balancing
            columns /= columns.sum(1, keepdims=True)
            columns /= columns.sum(0)
            if np.abs(columns.sum(1) - 1).max() < 1e-14 * vocabulary:
                break
        law = np.full(vocabulary, 1 / vocabulary)
        columns += (1 - columns.sum(1, keepdims=True)) / vocabulary  # what is left, spread over the row
    else:
        columns = 0.9 * columns / columns.sum(0) + 0.1 / vocabulary  # no token is rarer than a tenth of its share
        law = find_stationary(columns)
    target = 2.4 / (vocabulary + 5) * (1 - float(law @ law)) if energy is None else energy
    transition = _move_to_energy(columns, law, target)
    positions = np.stack([np.sort(rng.choice(length, sparsity, replace=False)) for _ in range(vocabulary)])
    weights = np.maximum(rng.dirichlet(np.full(sparsity, 5.0), size=vocabulary), 0.5 / sparsity)
    return BigramTask(transition, law, positions, weights / weights.sum(1, keepdims=True), length)


def _move_to_energy(columns: np.ndarray, law: np.ndarray, target: float) -> np.ndarray:
    """Mix a transition with its mean or with the identity until its energy is `target`."""
    most = 1 - float(law @ law)
    if not 0 < target < most:
        raise UsageError(f"energy={target:.3g}: a transition that keeps this law has between 0 and {most:.3g}")
    centred = columns - law[:, None]
    now = float(law @ (centred**2).sum(0))
    if now >= target:
        moved = centred * (target / now) ** 0.5
    else:
        identity = np.eye(len(law)) - law[:, None]
        cross, step = float(law @ (centred * identity).sum(0)), identity - centred
        # energy along the line is now + 2 b s + a s^2; from below the target to above it: one root in (0, 1)
        a, b = float(law @ (step**2).sum(0)), cross - now
        moved = centred + step * (-b + (b * b + a * (target - now)) ** 0.5) / a
    mixed = np.maximum(moved + law[:, None], 0.0)  # rounding may leave -1e-17
    return mixed / mixed.sum(0)


def draw_correlated(rng: np.random.Generator, task: BigramTask, correlation: float) -> np.ndarray:
    r"""Draw a centred value matrix whose correlation with a task's transition is given.

    .. math:: W_0 = \rho \tilde P + \sqrt{1-\rho^2}\,|\tilde P|_\mu E, \qquad
              \langle E, \tilde P\rangle_\mu = 0,\ |E|_\mu = 1,\ E\mu = 0,\ 1^\top E = 0,

    with :math:`E` uniform on that sphere, so :math:`|W_0|_\mu = |\tilde P|_\mu`. :math:`\langle U,U'\rangle_\mu =
    \sum_j \mu_j U_j\cdot U'_j` over columns.

    Returns
    -------
    numpy.ndarray
        :math:`W_0`, (N, N) float64.

    Raises
    ------
    UsageError
        The correlation is no number between -1 and 1, or the vocabulary has two tokens, where every centred matrix is
        a multiple of the transition, and it is neither.

    Examples
    --------
    >>> task = draw_task(np.random.default_rng(0), 5, 10, 2)
    >>> start = draw_correlated(np.random.default_rng(1), task, 0.5)
    >>> round(float(task.stationary @ (start * task.centred).sum(0)) / task.transition_energy, 6)
    0.5
    """
    if not -1 <= correlation <= 1:
        raise UsageError(f"correlation={correlation}: give a number from -1 to 1")
    target, law = task.centred, task.stationary
    if abs(correlation) == 1:
        return correlation * target
    if task.vocabulary == 2:
        raise UsageError(f"correlation={correlation} with two tokens: only -1 and 1 exist, all centred matrices agree")
    # Gaussian in the metric of the product: dividing column j by sqrt(mu_j) makes the direction uniform
    drawn = rng.standard_normal(target.shape) / np.sqrt(law)
    drawn -= (drawn @ law)[:, None]
    drawn -= drawn.mean(0)
    drawn -= target * float(law @ (drawn * target).sum(0)) / task.transition_energy
    drawn *= (task.transition_energy / float(law @ (drawn**2).sum(0))) ** 0.5
    return correlation * target + (1 - correlation**2) ** 0.5 * drawn


def draw_source_task(rng: np.random.Generator, task: BigramTask, correlation: float) -> BigramTask:
    r"""Draw another task of the same tokens whose transition has a given correlation with that of `task`.

    Its transition is :math:`\mu 1^\top + s W_0` with :math:`W_0` of `draw_correlated` and the largest :math:`s\le 1`
    that leaves no probability below zero; its positions are drawn anew. Length and sparsity are those of `task`.

    Examples
    --------
    >>> task = draw_task(np.random.default_rng(0), 5, 10, 2)
    >>> other = draw_source_task(np.random.default_rng(1), task, 0.5)
    >>> inner = float(task.stationary @ (other.centred * task.centred).sum(0))
    >>> round(inner / (other.transition_energy * task.transition_energy) ** 0.5, 6)
    0.5
    """
    law = task.stationary[:, None]
    direction = draw_correlated(rng, task, correlation)
    downward = np.minimum(direction, 0.0)
    room = np.divide(-law, downward, out=np.full_like(direction, np.inf), where=downward < 0)
    transition = np.maximum(law + min(1.0, float(room.min())) * direction, 0.0)
    positions = np.stack(
        [np.sort(rng.choice(task.length, task.sparsity, replace=False)) for _ in range(task.vocabulary)]
    )
    return BigramTask(transition, task.stationary, positions, task.weights, task.length)


def draw_batch(rng: np.random.Generator, task: BigramTask, size: int) -> Batch:
    """Draw contexts, queries and answers: plain NumPy, the reference for faster samplers.

    Parameters
    ----------
    rng
        Where the draws come from.
    task
        What is drawn from.
    size
        Number of samples B, at least 1.

    Returns
    -------
    Batch
        Tokens (B, T) of type uint8 up to 256 tokens and uint16 above, queries (B,) and answers (B,) int64.

    Examples
    --------
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> batch = draw_batch(np.random.default_rng(1), task, 4)
    >>> batch.tokens.shape, str(batch.tokens.dtype), batch.queries.shape, batch.targets.shape
    ((4, 10), 'uint8', (4,), (4,))
    """
    if size < 1:
        raise UsageError(f"size={size}: at least one sample")
    kind = np.uint8 if task.vocabulary <= 256 else np.uint16
    frequencies = np.cumsum(task.stationary)[:-1]  # N - 1 thresholds
    tokens = np.searchsorted(frequencies, rng.random((size, task.length)), side="right").astype(kind)  # (B, T)
    queries = np.searchsorted(frequencies, rng.random(size), side="right")  # (B,)
    shares = np.cumsum(task.weights, axis=1)[queries, :-1]  # (B, Q - 1)
    chosen = task.positions[queries, (rng.random((size, 1)) >= shares).sum(1)]  # (B,)
    attended = tokens[np.arange(size), chosen]
    steps = np.cumsum(task.transition, axis=0)[:-1, attended].T  # (B, N - 1)
    targets = (rng.random((size, 1)) >= steps).sum(1)
    return Batch(tokens, queries, targets)

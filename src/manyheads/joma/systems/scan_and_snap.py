r"""Scan and Snap's system: one query, K next tokens, contexts so long that frequencies are probabilities.

The next token n is uniform over K. Its contexts hold token l with probability :math:`P_{nl}`; a token that occurs with
one next token only is *distinct*, one that occurs with all of them *common*. Attention reweights by its logits, the
normalised mixture is read by a linear decoder, and both learn the cross-entropy of the next token:

.. math:: f_n = \frac{P_n \circ e^{z}}{\|P_n \circ e^{z}\|}, \qquad
          \mathcal L = -\frac1K \sum_n \log \mathrm{softmax}(Y f_n)_n, \qquad
          \dot Y = -\eta_Y \nabla_Y \mathcal L, \quad \dot z = -\eta_Z \nabla_z \mathcal L, \quad Y(0) = 0, z(0) = 0.

Source: Tian, Wang, Chen, Du, "Scan and Snap: Understanding Training Dynamics and Token Composition in 1-layer
Transformer", sections 3 and 4 (arXiv 2305.16380). What the flow does is in `manyheads.joma.theory.scan_and_snap`.
"""

from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, ShapeError, UsageError

MASS = 1e-9  # how far the probabilities of a context may add up from one
PRECISION = 1e-11  # local errors of the integrator, relative and absolute
STEPS = 100_000  # most steps of the integrator


class Cooccurrence(NamedTuple):
    """How often tokens stand in the contexts of each next token.

    Attributes
    ----------
    probabilities
        (K, M), rows add up to one.
    distinct
        (K, M) booleans: tokens that occur with that next token and with no other.
    """

    probabilities: np.ndarray
    distinct: np.ndarray

    @property
    def common(self) -> np.ndarray:
        """(M,) booleans: tokens that occur with every next token."""
        return np.asarray((self.probabilities > 0).all(0))


@takes_arrays
def make_cooccurrence(distinct: Any, common: Any) -> Cooccurrence:
    """Lay out K next tokens, each with D distinct tokens of its own, and C tokens that they have in common.

    Parameters
    ----------
    distinct
        (K, D) positive weights of the distinct tokens; token n D + i belongs to next token n.
    common
        (C,) positive weights of the common tokens, which come last: the same for every next token before each row is
        divided by its sum. With rows of equal sums the next tokens are exchangeable.

    Raises
    ------
    ShapeError
        Arrays of other shapes.
    UsageError
        Fewer than two next tokens, or weights that are not positive.

    Examples
    --------
    >>> table = make_cooccurrence([[0.4, 0.2], [0.4, 0.2]], [0.4])
    >>> table.probabilities.tolist(), table.common.tolist()
    ([[0.4, 0.2, 0.0, 0.0, 0.4], [0.0, 0.0, 0.4, 0.2, 0.4]], [False, False, False, False, True])
    """
    own, shared = np.asarray(distinct, np.float64), np.asarray(common, np.float64)
    if own.ndim != 2 or shared.ndim != 1:
        raise ShapeError(f"weights of shapes {own.shape} and {shared.shape}: give (K, D) and (C,)")
    classes, count = own.shape
    if classes < 2 or not (own > 0).all() or not (shared > 0).all():
        raise UsageError(f"{classes} next tokens: give two or more, and positive weights for all their tokens")
    table = np.zeros((classes, classes * count + len(shared)))
    for row in range(classes):
        table[row, row * count : (row + 1) * count] = own[row]
    belongs = table > 0
    table[:, classes * count :] = shared
    return Cooccurrence(table / table.sum(1, keepdims=True), belongs)


class Snapping(NamedTuple):
    """The flow at some times.

    Attributes
    ----------
    times
        (n,), in units of 1 over the learning rates.
    logits
        (n, M), of attention.
    decoder
        (n, K, M).
    losses
        (n,), in nats.
    """

    times: np.ndarray
    logits: np.ndarray
    decoder: np.ndarray
    losses: np.ndarray


@takes_arrays
def follow_snapping(
    cooccurrence: Cooccurrence, times: Any, *, decoder_rate: float = 1.0, attention_rate: float = 1.0
) -> Snapping:
    """Follow the flow from zero, in double precision and in the logarithm of time: it slows down exponentially.

    Parameters
    ----------
    cooccurrence
        The data.
    times
        (n,), rising and not negative.
    decoder_rate, attention_rate
        Learning rates of Y and of z.

    Raises
    ------
    UsageError
        Probabilities that are not, times that do not rise, or rates that are not positive.
    CertificateError
        A time that the integrator does not reach.

    Examples
    --------
    >>> table = make_cooccurrence([[0.4, 0.2], [0.4, 0.2]], [0.4])
    >>> path = follow_snapping(table, [0.0, 10.0])
    >>> [bool(step) for step in np.sign(path.logits[-1]) == [1, 1, 1, 1, -1]]
    [True, True, True, True, True]
    """
    table, moments = np.asarray(cooccurrence.probabilities, np.float64), np.asarray(times, np.float64)
    if table.ndim != 2 or not (table >= 0).all() or np.abs(table.sum(1) - 1).max() > MASS:
        raise UsageError(
            f"probabilities of shape {table.shape}: give (K, M), not negative, with rows that add up to one"
        )
    if moments.ndim != 1 or not len(moments) or moments[0] < 0 or (np.diff(moments) <= 0).any():
        raise UsageError("times: give one or more that rise and are not negative")
    if not (decoder_rate > 0 and attention_rate > 0):
        raise UsageError(f"decoder_rate={decoder_rate}, attention_rate={attention_rate}: both must be positive")
    with double_precision():
        rates = jnp.array([decoder_rate, attention_rate], jnp.float64)
        *state, ended = _follow(jnp.asarray(table), jnp.asarray(np.log1p(moments)), rates)
        decoder, logits, losses = (np.asarray(part) for part in state)
    if not bool(ended):
        raise CertificateError(
            f"{STEPS:,} steps do not reach the time {moments[-1]:g}: ask for less", measured=0.0, threshold=1.0
        )
    return Snapping(moments, logits, decoder, losses)


@takes_arrays
def mix_tokens(probabilities: Any, logits: Any) -> Any:
    """Return the attention of each next token's contexts: rows of P e^z, each divided by its sum.

    Examples
    --------
    >>> mix_tokens(np.array([[0.5, 0.5]]), np.array([0.0, np.log(3.0)])).round(12).tolist()
    [[0.25, 0.75]]
    """
    raised = probabilities * np.exp(logits)
    return raised / raised.sum(-1, keepdims=True)


def _residual(scores: jax.Array) -> jax.Array:
    """Identity minus softmax, row by row, without cancellation on the diagonal where the task is all but solved."""
    classes = scores.shape[0]
    own = jnp.eye(classes, dtype=bool)
    others = jnp.where(own, 0, jax.nn.softmax(scores, axis=1))
    return jnp.where(own, others.sum(1, keepdims=True), -others)


def _slopes(table: jax.Array, decoder: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    raised = table * jnp.exp(logits - logits.max())  # (K, M); a common factor does not count
    features = raised / jnp.linalg.norm(raised, axis=1, keepdims=True)
    residual = _residual(features @ decoder.T) / len(table)  # (K contexts, K next tokens)
    pull = residual @ decoder  # (K, M)
    inward = features * (pull - features * (features * pull).sum(1, keepdims=True))
    return residual.T @ features, inward.sum(0)


@eqx.filter_jit
def _follow(table: jax.Array, moments: jax.Array, rates: jax.Array) -> tuple[jax.Array, ...]:
    classes, tokens = table.shape

    def field(moment: Any, state: tuple[jax.Array, jax.Array], _: Any) -> tuple[jax.Array, jax.Array]:
        slopes = _slopes(table, *state)
        return jnp.exp(moment) * rates[0] * slopes[0], jnp.exp(moment) * rates[1] * slopes[1]

    start = (jnp.zeros((classes, tokens), jnp.float64), jnp.zeros(tokens, jnp.float64))
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        0.0,
        moments[-1] + 1e-9,
        1e-3,
        start,
        saveat=diffrax.SaveAt(ts=moments),
        stepsize_controller=diffrax.PIDController(rtol=PRECISION, atol=PRECISION),
        max_steps=STEPS,
        throw=False,
    )
    decoder, logits = found.ys

    def loss(decoder: jax.Array, logits: jax.Array) -> jax.Array:
        raised = table * jnp.exp(logits)
        scores = raised / jnp.linalg.norm(raised, axis=1, keepdims=True) @ decoder.T
        return -jnp.diagonal(jax.nn.log_softmax(scores, axis=1)).mean()

    return decoder, logits, jax.vmap(loss)(decoder, logits), found.result == diffrax.RESULTS.successful

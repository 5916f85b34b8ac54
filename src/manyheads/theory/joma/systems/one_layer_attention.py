r"""One-layer attention of Scan and Snap (Tian et al. 2023): one query, K next tokens, contexts of infinite length.

The next token n is uniform over K. Its contexts hold token l with probability :math:`P_{nl}`; a token that occurs with
a single next token is *distinct*, one that occurs with all of them *common*. Attention reweights by its logits, a
linear decoder reads the normalized mixture, and both are trained on the cross-entropy of the next token:

.. math:: f_n = \frac{P_n \circ e^{z}}{\|P_n \circ e^{z}\|}, \qquad
          \mathcal L = -\frac1K \sum_n \log \mathrm{softmax}(Y f_n)_n, \qquad
          \dot Y = -\eta_Y \nabla_Y \mathcal L, \quad \dot z = -\eta_Z \nabla_z \mathcal L, \quad Y(0) = 0, z(0) = 0.

Source: Tian, Wang, Chen, Du, "Scan and Snap: Understanding Training Dynamics and Token Composition in 1-layer
Transformer", sections 3 and 4 (arXiv 2305.16380). The solution of the flow is in
`manyheads.theory.joma.theorems.scan_and_snap`.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float

from manyheads._arrays import check_times, takes_arrays
from manyheads._constraints import Constraint
from manyheads._settings import double_precision
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.recording import integrate_to_end, refuse_unfinished

ROUNDING = 1e-9  # tolerance of the sum of the probabilities of a context
PRECISION = 1e-11  # local errors of the integrator, relative and absolute


class Cooccurrence(NamedTuple):
    """Probability of each token with each next token, and the tokens that occur with that next token alone."""

    probabilities: Float[np.ndarray, "classes tokens"]
    distinct: Bool[np.ndarray, "classes tokens"]

    @property
    def common(self) -> Bool[np.ndarray, " tokens"]:
        """Tokens that occur with every next token."""
        return np.asarray((self.probabilities > 0).all(0))


@takes_arrays
def make_cooccurrence(
    distinct: Float[ArrayLike, "classes distinct"], common: Float[ArrayLike, " common"]
) -> Cooccurrence:
    """Build the table of K next tokens from positive weights of D distinct tokens each and C common tokens.

    Token n D + i belongs to next token n, common tokens come last; rows are normalized. With rows of equal sums and
    equal weights the next tokens are exchangeable.
    """
    own, shared = np.asarray(distinct, np.float64), np.asarray(common, np.float64)
    if own.ndim != 2 or shared.ndim != 1:
        raise ShapeError(f"weights of shapes {own.shape} and {shared.shape}: expected (K, D) and (C,)")
    classes, count = own.shape
    if classes < 2 or not (own > 0).all() or not (shared > 0).all():
        raise UsageError(f"{classes} next tokens: expected two or more, with positive weights of all tokens")
    table = np.zeros((classes, classes * count + len(shared)))
    for row in range(classes):
        table[row, row * count : (row + 1) * count] = own[row]
    belongs = table > 0
    table[:, classes * count :] = shared
    return Cooccurrence(table / table.sum(1, keepdims=True), belongs)


class ScanAndSnapTrajectory(NamedTuple):
    """Gradient flow at some times: attention logits, decoder, and losses in nats."""

    times: Float[np.ndarray, " times"]
    logits: Float[np.ndarray, "times tokens"]
    decoder: Float[np.ndarray, "times classes tokens"]
    losses: Float[np.ndarray, " times"]


@takes_arrays
def scan_and_snap_flow(
    cooccurrence: Cooccurrence,
    times: Float[ArrayLike, " times"],
    *,
    decoder_learning_rate: float = 1.0,
    attention_learning_rate: float = 1.0,
) -> ScanAndSnapTrajectory:
    """Integrate the flow from zero in double precision and logarithmic time, as it slows down exponentially."""
    table, moments = np.asarray(cooccurrence.probabilities, np.float64), check_times(times)
    if table.ndim != 2 or not (table >= 0).all() or np.abs(table.sum(1) - 1).max() > ROUNDING:
        raise UsageError(
            f"probabilities of shape {table.shape}: expected (K, M), nonnegative, with rows that sum to one"
        )
    check_learning_rates(decoder_learning_rate, attention_learning_rate)
    with double_precision():
        learning_rates = jnp.array([decoder_learning_rate, attention_learning_rate], jnp.float64)
        *state, ended = _follow(jnp.asarray(table), jnp.asarray(np.log1p(moments)), learning_rates)
        decoder, logits, losses = (np.asarray(part) for part in state)
    refuse_unfinished(ended, f"the time {moments[-1]:g}", "ask for a shorter time")
    return ScanAndSnapTrajectory(moments, logits, decoder, losses)


def check_learning_rates(decoder_learning_rate: float, attention_learning_rate: float) -> None:
    """Refuse learning rates that are not positive."""
    rates = {"decoder_learning_rate": decoder_learning_rate, "attention_learning_rate": attention_learning_rate}
    for name, rate in rates.items():
        Constraint(above=0).kept(name, rate, "float")


def _residual(scores: jax.Array) -> jax.Array:
    """Identity minus softmax, row by row, without cancellation on the diagonal late in training."""
    classes = scores.shape[0]
    own = jnp.eye(classes, dtype=bool)
    others = jnp.where(own, 0, jax.nn.softmax(scores, axis=1))
    return jnp.where(own, others.sum(1, keepdims=True), -others)


def _slopes(table: jax.Array, decoder: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    raised = table * jnp.exp(logits - logits.max())  # (K, M); a common factor cancels
    features = raised / jnp.linalg.norm(raised, axis=1, keepdims=True)
    residual = _residual(features @ decoder.T) / len(table)  # (K contexts, K next tokens)
    backward = residual @ decoder  # (K, M)
    tangential = features * (backward - features * (features * backward).sum(1, keepdims=True))
    return residual.T @ features, tangential.sum(0)


@eqx.filter_jit
def _follow(table: jax.Array, moments: jax.Array, learning_rates: jax.Array) -> tuple[jax.Array, ...]:
    classes, tokens = table.shape

    def field(moment: jax.Array, state: tuple[jax.Array, jax.Array], _: object) -> tuple[jax.Array, jax.Array]:
        slopes = _slopes(table, *state)
        return jnp.exp(moment) * learning_rates[0] * slopes[0], jnp.exp(moment) * learning_rates[1] * slopes[1]

    init = (jnp.zeros((classes, tokens), jnp.float64), jnp.zeros(tokens, jnp.float64))
    (decoder, logits), ended = integrate_to_end(field, init, moments, PRECISION, moments[-1] + 1e-9)

    def loss(decoder: jax.Array, logits: jax.Array) -> jax.Array:
        raised = table * jnp.exp(logits)
        scores = raised / jnp.linalg.norm(raised, axis=1, keepdims=True) @ decoder.T
        return -jnp.diagonal(jax.nn.log_softmax(scores, axis=1)).mean()

    return decoder, logits, jax.vmap(loss)(decoder, logits), ended

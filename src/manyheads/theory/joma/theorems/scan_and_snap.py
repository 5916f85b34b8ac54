r"""Scan and Snap, theorems 2 to 4 (Tian et al. 2023), solved for exchangeable next tokens.

Dictionary: K next tokens, :math:`\kappa = K/(K-1)`; learning rates :math:`\eta_Y` of the decoder and :math:`\eta_Z` of
the attention logits z, :math:`\rho = \eta_Z/\eta_Y`; f the normalized mixture of one context, :math:`f_l \propto p_l
e^{z_l}`, with d for a distinct and c for a common token. Apart from the gain law, the following is derived here.

*Reduction.* When the next tokens are exchangeable, the residual of a context is :math:`a\,w` with :math:`a = 1 -
p(\text{right})` and a fixed direction w. Then the decoder stays zero on common tokens and :math:`y_d w` on distinct
ones, with :math:`\dot y_d = (\eta_Y/K)\, a f_d`. All derivatives are proportional to a,
which only sets the time scale. In the progress :math:`\tau = \sqrt\rho \int (\eta_Y/K)\, a\, dt`, with
:math:`Y = \sqrt\rho\, y` and :math:`S = \sum_d Y_d f_d`,

.. math:: Y_d' = f_d, \qquad z_d' = \kappa f_d (Y_d - f_d S), \qquad z_c' = -\kappa K f_c^2 S:

**one trajectory for every ratio of the learning rates.** Logits of common tokens decrease, as S is positive.

*Time.* The logit margin of the right next token is :math:`\kappa S/\sqrt\rho`, so that

.. math:: t(\tau) = \frac{K}{\eta_Y \sqrt\rho} \Big[\tau + \frac1{K-1} \int_0^\tau e^{\kappa S/\sqrt\rho}\, d\tau'\Big].

As S grows like tau, each unit of progress takes about :math:`e^{\kappa/\sqrt\rho}` times as long as the previous one.

*Gain law.* The paper compares distinct tokens by the relative gain :math:`r = f_l^2/f_{l'}^2 - 1` and finds
:math:`r(t) = r(0)\, e^{2 z_l(t)}`. It follows from :math:`Y_d \propto f_d`: then :math:`z_d' e^{-2 z_d}/p_d^2` is the
same for all d, hence :math:`(1 - e^{-2z_d})/p_d^2`, which is the law. But the decoder is
:math:`Y_d = \int f_d\,d\tau`, proportional to :math:`f_d` only while f is constant. So the law holds to first order in
z, with a relative error that grows as :math:`\tau^2` at any ratio of the learning rates.

*Limit.* Under the law the gap between distinct tokens grows as :math:`\ln\tau`. In the flow the memory of the decoder
relaxes f to the direction of Y at rate :math:`\kappa \tau f^2`, while common tokens, which drive the gap, decay as
:math:`f_c^2 < 1/(\kappa K \tau^2)`: f converges as :math:`\tau^{-2}`, without a winner that takes all. The gap may
overshoot its limit.

Source: Tian, Wang, Chen, Du, "Scan and Snap" (arXiv 2305.16380), theorems 2 to 4.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from manyheads._arrays import takes_arrays
from manyheads._namespaces import Array
from manyheads._settings import double_precision
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.one_layer_attention import check_learning_rates
from manyheads.theory.joma.systems.recording import integrate_to_end, refuse_unfinished

Distinct = Float[ArrayLike, " distinct"]
Common = Float[ArrayLike, " common"]
Progress = Float[ArrayLike, " progress"]
Logits = Float[ArrayLike, "... distinct"]
Values = Float[np.ndarray, "..."]

PRECISION = 1e-12  # local errors of the integrator, relative and absolute


class ReducedTrajectory(NamedTuple):
    """Reduced trajectory at some values of progress tau: logits of the tokens of one next token, and the margin S.

    The logit margin of the right next token is kappa S / sqrt(rho).
    """

    progress: Float[np.ndarray, " progress"]
    distinct: Float[np.ndarray, "progress distinct"]
    common: Float[np.ndarray, "progress common"]
    margin: Float[np.ndarray, " progress"]


@takes_arrays
def reduced_trajectory(
    distinct: Distinct, common: Common, classes: int, progress: Progress, *, aligned: bool = False
) -> ReducedTrajectory:
    """Integrate the reduced trajectory of exchangeable next tokens from their co-occurrence, up to a common factor.

    `aligned` assumes a decoder in the direction of f, as the gain law of the paper does, instead of its memory.

    Raises `ShapeError` or `UsageError`: arrays that are not vectors, co-occurrence that is not positive, fewer than two
    next tokens, progress that does not rise. `CertificateError`: the integrator does not reach the last progress.
    """
    own, shared, moments = _check(distinct, common, classes, progress)
    with double_precision():
        z, margin, _ = _arrays_of(
            _follow(own, shared, moments, jnp.array([classes, np.inf, aligned], jnp.float64)), moments
        )
    return ReducedTrajectory(np.asarray(moments), z[:, : len(own)], z[:, len(own) :], margin)


@takes_arrays
def training_time(
    distinct: Distinct,
    common: Common,
    classes: int,
    progress: Progress,
    *,
    decoder_learning_rate: float = 1.0,
    attention_learning_rate: float = 1.0,
) -> Float[np.ndarray, " progress"]:
    r"""Compute the times :math:`t(\tau)` at which training reaches some progress.

    Raises `ShapeError` or `UsageError`: as for `reduced_trajectory`; learning rates that are not positive; a time
    beyond the largest double, because the ratio of the learning rates is too small for this progress.
    """
    own, shared, moments = _check(distinct, common, classes, progress)
    check_learning_rates(decoder_learning_rate, attention_learning_rate)
    root = float(attention_learning_rate / decoder_learning_rate) ** 0.5
    with double_precision():
        logarithm = _arrays_of(_follow(own, shared, moments, jnp.array([classes, root, 0.0], jnp.float64)), moments)[2]
    factor = classes / (decoder_learning_rate * root)
    with np.errstate(over="ignore"):
        times = factor * (np.asarray(moments) + np.expm1(logarithm) / (classes - 1))
    if not np.isfinite(times).all():
        raise UsageError(
            f"a progress of {float(moments[-1])} at a ratio of rates of {root**2:.3g} takes longer than "
            "the largest double: ask for less progress or a larger attention_learning_rate"
        )
    return times


@takes_arrays
def relative_gain(start: Distinct, logits: Logits, first: int, second: int) -> Values:
    r"""Compute the relative gain :math:`r = f_l^2/f_{l'}^2 - 1 = (p_l/p_{l'})^2 e^{2(z_l - z_{l'})} - 1` of two tokens.

    From their co-occurrence p at the start and logits z; first and second are l and l'.
    """
    p, z = np.asarray(start, np.float64), np.asarray(logits, np.float64)
    return (p[first] / p[second]) ** 2 * np.exp(2 * (z[..., first] - z[..., second])) - 1


@takes_arrays
def relative_gain_law(start: Distinct, logits: Logits, first: int, second: int) -> Values:
    r"""Compute the gain law of the paper for `relative_gain`: :math:`r(0)\, e^{2 z_l}`."""
    z = np.asarray(logits, np.float64)
    return relative_gain(start, np.zeros_like(z), first, second) * np.exp(2 * z[..., first])


def _check(distinct: Array, common: Array, classes: int, progress: Array) -> tuple[Array, Array, Array]:
    own, shared, moments = (np.asarray(each, np.float64) for each in (distinct, common, progress))
    if own.ndim != 1 or shared.ndim != 1 or moments.ndim != 1:
        raise ShapeError(f"arrays of shapes {own.shape}, {shared.shape}, {moments.shape}: expected (D,), (C,) and (n,)")
    if not len(own) or not (own > 0).all() or not (shared > 0).all():
        raise UsageError("co-occurrence: expected one distinct token or more, and positive numbers for all tokens")
    if classes < 2:
        raise UsageError(f"classes={classes}: expected two next tokens or more")
    if not len(moments) or moments[0] < 0 or (np.diff(moments) <= 0).any():
        raise UsageError("progress: expected one or more values, rising and nonnegative")
    return own, shared, moments


def _arrays_of(state: tuple[jax.Array, ...], moments: Array) -> tuple[np.ndarray, ...]:
    remedy = "the flow becomes stiff beyond some hundreds, ask for less progress"
    refuse_unfinished(state[-1], f"a progress of {float(moments[-1]):g}", remedy)
    return tuple(np.asarray(part) for part in state[:-1])


@eqx.filter_jit
def _follow(own: jax.Array, shared: jax.Array, moments: jax.Array, numbers: jax.Array) -> tuple[jax.Array, ...]:
    """Integrate logits (n, D + C), margin (n,), ln(1 + integral of e^(kappa S / root)) for the time; and success.

    `numbers` are K, root and 1 for an aligned decoder, traced: one program serves trajectories and times.
    """
    classes, root, aligned = numbers
    count, kappa = len(own), classes / (classes - 1)
    start = jnp.concatenate([jnp.asarray(own), jnp.asarray(shared)])
    moments = jnp.asarray(moments)

    def features(z: jax.Array) -> jax.Array:
        raised = start * jnp.exp(z - z.max())
        return raised / jnp.linalg.norm(raised)

    def memory(y: jax.Array, f: jax.Array, progress: Array) -> jax.Array:
        return jnp.where(aligned > 0, progress * f[:count], y)

    def field(progress: Array, state: tuple[jax.Array, ...], _: object) -> tuple[jax.Array, ...]:
        y, z, logarithm = state
        f = features(z)
        held = memory(y, f, progress)
        margin = (held * f[:count]).sum()
        slopes = jnp.concatenate([f[:count] * (held - f[:count] * margin), -classes * f[count:] ** 2 * margin])
        tick = jnp.exp(kappa * margin / root - logarithm)
        return f[:count], kappa * slopes, tick

    zero = (jnp.zeros(count, jnp.float64), jnp.zeros(len(start), jnp.float64), jnp.zeros((), jnp.float64))
    end = moments[-1] * (1 + 1e-12) + 1e-300
    (y, z, logarithm), ended = integrate_to_end(field, zero, moments, PRECISION, end)

    def margin(y: jax.Array, z: jax.Array, progress: jax.Array) -> jax.Array:
        f = features(z)
        return (memory(y, f, progress) * f[:count]).sum()

    return z, jax.vmap(margin)(y, z, moments), logarithm, ended

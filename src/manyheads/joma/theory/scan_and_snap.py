r"""Scan and Snap solved for exchangeable next tokens: one path for all learning rates, its clock, and the gain law.

Dictionary: K next tokens, :math:`\kappa = K/(K-1)`; learning rates :math:`\eta_Y` of the decoder and :math:`\eta_Z` of
the attention logits z, :math:`\rho = \eta_Z/\eta_Y`; f the normalised mixture of one context, :math:`f_l \propto p_l
e^{z_l}`, with d for a distinct and c for a common token. All of the following is derived here but for the gain law.

*Reduction.* When the next tokens are exchangeable, the residual of a context is :math:`a\,w` with :math:`a = 1 -
p(\text{right})` and a fixed direction w. Then the decoder stays zero on common tokens and :math:`y_d w` on distinct
ones, with :math:`\dot y_d = (\eta_Y/K)\, a f_d`. Everything moves in proportion to a, so a only sets the clock. In the
progress :math:`\tau = \sqrt\rho \int (\eta_Y/K)\, a\, dt` and with :math:`Y = \sqrt\rho\, y,\ S = \sum_d Y_d f_d`,

.. math:: Y_d' = f_d, \qquad z_d' = \kappa f_d (Y_d - f_d S), \qquad z_c' = -\kappa K f_c^2 S:

**one path for every ratio of the learning rates.** Common tokens only lose, as S is positive.

*Clock.* The right next token leads by :math:`\kappa S/\sqrt\rho`, so that

.. math:: t(\tau) = \frac{K}{\eta_Y \sqrt\rho} \Big[\tau + \frac1{K-1} \int_0^\tau e^{\kappa S/\sqrt\rho}\, d\tau'\Big].

As S grows like tau, each unit of progress takes about :math:`e^{\kappa/\sqrt\rho}` times as long as the one before.

*Gain law.* The paper compares distinct tokens by :math:`r = f_l^2/f_{l'}^2 - 1` and finds :math:`r(t) = r(0)\, e^{2
z_l(t)}`. It follows from :math:`Y_d \propto f_d`: then :math:`z_d' e^{-2 z_d}/p_d^2` is the same for all d, so
:math:`(1 - e^{-2z_d})/p_d^2` is, and that is the law. But the decoder is :math:`Y_d = \int f_d\,d\tau`, which is
proportional to :math:`f_d` only as long as f has not moved. So the law is right to first order in z, its relative error
grows like :math:`\tau^2`, and no ratio of learning rates changes that.

*Limit.* Under the law the gap between distinct tokens goes on growing, like :math:`\ln\tau`. In truth the decoder's
memory pulls f back to the direction of Y at the rate :math:`\kappa \tau f^2`, while common tokens, which drive the gap,
die out like :math:`f_c^2 < 1/(\kappa K \tau^2)`: f converges like :math:`\tau^{-2}`, and no winner takes all. The gap
may overshoot its limit on the way.

Source: Tian, Wang, Chen, Du, "Scan and Snap" (arXiv 2305.16380), theorems 2 to 4.
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

PRECISION = 1e-12  # local errors of the integrator, relative and absolute
STEPS = 100_000  # most steps of the integrator


class SnapPath(NamedTuple):
    """The path at some values of progress.

    Attributes
    ----------
    progress
        (n,), tau.
    distinct, common
        (n, D) and (n, C): logits of the distinct tokens of one next token, and of the common tokens.
    lead
        (n,), S; the right next token leads by kappa S / sqrt(rho).
    """

    progress: np.ndarray
    distinct: np.ndarray
    common: np.ndarray
    lead: np.ndarray


@takes_arrays
def snap_path(distinct: Any, common: Any, classes: int, progress: Any, *, aligned: bool = False) -> SnapPath:
    """Follow the one path of exchangeable next tokens.

    Parameters
    ----------
    distinct, common
        (D,) and (C,) positive co-occurrence of the tokens with their next token, up to a common factor.
    classes
        K, at least 2.
    progress
        (n,), rising and not negative.
    aligned
        Assume a decoder in the direction of f, as the paper's gain law does, instead of the decoder's own memory.

    Raises
    ------
    ShapeError, UsageError
        Arrays that are not vectors, co-occurrence that is not positive, fewer than two next tokens, progress that does
        not rise.
    CertificateError
        So much progress that the integrator gives up.

    Examples
    --------
    >>> path = snap_path([0.4, 0.2], [0.4], 2, [0.0, 3.0, 30.0, 300.0])
    >>> gaps = path.distinct[:, 0] - path.distinct[:, 1]
    >>> bool(gaps[1] > 0), bool(abs(gaps[3] - gaps[2]) < 1e-2 * gaps[2]), bool((path.common[1:] < 0).all())
    (True, True, True)
    """
    own, shared, moments = _checked(distinct, common, classes, progress)
    with double_precision():
        z, lead, _ = _certified(
            _follow(own, shared, moments, jnp.array([classes, np.inf, aligned], jnp.float64)), moments
        )
    return SnapPath(np.asarray(moments), z[:, : len(own)], z[:, len(own) :], lead)


@takes_arrays
def snap_clock(
    distinct: Any, common: Any, classes: int, progress: Any, *, decoder_rate: float = 1.0, attention_rate: float = 1.0
) -> np.ndarray:
    r"""Return the times :math:`t(\tau)` at which training has made some progress: (n,), exact up to its quadrature.

    Raises
    ------
    ShapeError, UsageError
        As for `snap_path`; rates that are not positive; a time beyond the largest double, because the ratio of the
        rates is too small for so much progress.

    Examples
    --------
    >>> times = snap_clock([0.4, 0.2], [0.4], 2, [0.0, 1.0, 2.0], attention_rate=0.1)
    >>> bool(times[0] == 0), bool(times[2] > 10 * times[1])
    (True, True)
    """
    own, shared, moments = _checked(distinct, common, classes, progress)
    if not (decoder_rate > 0 and attention_rate > 0):
        raise UsageError(f"decoder_rate={decoder_rate}, attention_rate={attention_rate}: both must be positive")
    root = float(attention_rate / decoder_rate) ** 0.5
    with double_precision():
        logarithm = _certified(_follow(own, shared, moments, jnp.array([classes, root, 0.0], jnp.float64)), moments)[2]
    factor = classes / (decoder_rate * root)
    with np.errstate(over="ignore"):
        times = factor * (np.asarray(moments) + np.expm1(logarithm) / (classes - 1))
    if not np.isfinite(times).all():
        raise UsageError(
            f"a progress of {float(moments[-1])} at a ratio of rates of {root**2:.3g} takes longer than the "
            "largest double can tell: ask for less progress or a larger attention_rate"
        )
    return times


@takes_arrays
def gain(start: Any, logits: Any, first: int, second: int) -> np.ndarray:
    r"""Return the relative gain :math:`r = f_l^2/f_{l'}^2 - 1 = (p_l/p_{l'})^2 e^{2(z_l - z_{l'})} - 1` of two tokens.

    Parameters
    ----------
    start
        (D,) co-occurrence p.
    logits
        (..., D).
    first, second
        The tokens l and l'.

    Examples
    --------
    >>> gain([0.4, 0.2], [[0.0, 0.0]], 0, 1).tolist()
    [3.0]
    """
    p, z = np.asarray(start, np.float64), np.asarray(logits, np.float64)
    return (p[first] / p[second]) ** 2 * np.exp(2 * (z[..., first] - z[..., second])) - 1


@takes_arrays
def gain_law(start: Any, logits: Any, first: int, second: int) -> np.ndarray:
    r"""Return what the paper's gain law predicts for `gain`: :math:`r(0)\, e^{2 z_l}`.

    Examples
    --------
    >>> gain_law([0.4, 0.2], [[0.0, 0.0]], 0, 1).tolist()
    [3.0]
    """
    z = np.asarray(logits, np.float64)
    return gain(start, np.zeros_like(z), first, second) * np.exp(2 * z[..., first])


def _checked(distinct: Any, common: Any, classes: int, progress: Any) -> tuple[Any, Any, Any]:
    own, shared, moments = (np.asarray(each, np.float64) for each in (distinct, common, progress))
    if own.ndim != 1 or shared.ndim != 1 or moments.ndim != 1:
        raise ShapeError(f"arrays of shapes {own.shape}, {shared.shape}, {moments.shape}: give (D,), (C,) and (n,)")
    if not len(own) or not (own > 0).all() or not (shared > 0).all():
        raise UsageError("co-occurrence: give one distinct token or more, and positive numbers for all tokens")
    if classes < 2:
        raise UsageError(f"classes={classes}: with one next token there is nothing to predict")
    if not len(moments) or moments[0] < 0 or (np.diff(moments) <= 0).any():
        raise UsageError("progress: give one or more values that rise and are not negative")
    return own, shared, moments


def _certified(state: tuple[jax.Array, ...], moments: Any) -> tuple[np.ndarray, ...]:
    if not bool(state[-1]):
        raise CertificateError(
            f"{STEPS:,} steps do not reach a progress of {float(moments[-1]):g}: the decoder's pull grows with it, and "
            "an explicit integrator follows to some hundreds; ask for less progress",
            measured=0.0,
            threshold=1.0,
        )
    return tuple(np.asarray(part) for part in state[:-1])


@eqx.filter_jit
def _follow(own: jax.Array, shared: jax.Array, moments: jax.Array, numbers: jax.Array) -> tuple[jax.Array, ...]:
    """Return logits (n, D + C), lead (n,), ln(1 + integral of e^(kappa S / root)) for the clock, success.

    `numbers` are K, root and 1 for an aligned decoder, traced: one program serves paths and clocks.
    """
    classes, root, aligned = numbers
    count, kappa = len(own), classes / (classes - 1)
    start = jnp.concatenate([jnp.asarray(own), jnp.asarray(shared)])
    moments = jnp.asarray(moments)

    def features(z: jax.Array) -> jax.Array:
        raised = start * jnp.exp(z - z.max())
        return raised / jnp.linalg.norm(raised)

    def memory(y: jax.Array, f: jax.Array, progress: Any) -> jax.Array:
        return jnp.where(aligned > 0, progress * f[:count], y)

    def field(progress: Any, state: tuple[jax.Array, ...], _: Any) -> tuple[jax.Array, ...]:
        y, z, logarithm = state
        f = features(z)
        held = memory(y, f, progress)
        lead = (held * f[:count]).sum()
        slopes = jnp.concatenate([f[:count] * (held - f[:count] * lead), -classes * f[count:] ** 2 * lead])
        tick = jnp.exp(kappa * lead / root - logarithm)
        return f[:count], kappa * slopes, tick

    zero = (jnp.zeros(count, jnp.float64), jnp.zeros(len(start), jnp.float64), jnp.zeros((), jnp.float64))
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        0.0,
        moments[-1] * (1 + 1e-12) + 1e-300,
        1e-3,
        zero,
        saveat=diffrax.SaveAt(ts=moments),
        stepsize_controller=diffrax.PIDController(rtol=PRECISION, atol=PRECISION),
        max_steps=STEPS,
        throw=False,
    )
    y, z, logarithm = found.ys

    def lead(y: jax.Array, z: jax.Array, progress: jax.Array) -> jax.Array:
        f = features(z)
        return (memory(y, f, progress) * f[:count]).sum()

    return z, jax.vmap(lead)(y, z, moments), logarithm, found.result == diffrax.RESULTS.successful

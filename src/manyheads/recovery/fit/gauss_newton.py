"""Gauss-Newton refinement of all matrices of a layer, matrix-free, down to rounding or the noise of the labels.

The projections are solved for inside (`manyheads.recovery.fit.variable_projection`). A step solves the linearized
problem with
Levenberg's damping by conjugate gradients, never forming the Jacobian, more accurately the closer it is. With exact
labels the squared error is squared from step to step and ends at rounding, 1e-29 or below; with labels of independent
noise it ends at the parametric rate, (number of parameters) sigma^2 / (numbers in the labels).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads._arrays import check_arrays, takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.fit.rotary_tangent import RotaryTangent
from manyheads.recovery.fit.variable_projection import PLAIN, Examples, Form, Tangent, stack_theta
from manyheads.recovery.refusals import check_positive

LARGE = 1e75  # largest size of inputs, and the inverse of the smallest: sums of fourth powers stay within float64
ROUNDING = 1e-28  # relative squared error of float64: residuals of some dozens of eps
WEAKEST, LIGHT, STRONGEST = 1e-12, 1e-2, 1e6  # damping, in units of the metric's curvature; light hides no gain


@dataclass(frozen=True)
class GaussNewtonSettings:
    """When Gauss-Newton stops."""

    steps: int = constrained(50, Constraint(least=1))  # Gauss-Newton steps, at most
    inner: int = constrained(300, Constraint(least=1))  # conjugate-gradient iterations of a step, at most
    tolerance: float = ROUNDING  # relative squared error at which it stops; the default is rounding
    # It stops, converged, when the cosine between the residual and what any change of the layer could do falls below
    # this: the labels are explained as far as they can be
    flat: float = 1e-7
    gain: float = 1e-9  # it also stops, converged, when a step would lower the error by less than this share of it
    damping: float = 1e-3  # damping of the first step, in units of the metric's curvature

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "tolerance", "flat", "gain", "damping")


@dataclass(frozen=True)
class GaussNewtonFit:
    """A layer that was fitted and how it went."""

    layer: Any  # the layer with the smallest error that was reached, of the start's class
    # Relative squared error ||y - F(x)||^2 / ||y||^2, weighted, at the start (projections solved for) and after each
    # step, shape (steps + 1,)
    errors: tuple[float, ...]
    products: int  # products with the Jacobian and its adjoint, counted together: what the work is proportional to
    cosine: float  # between the residual and the tangent space, in the metric, at the end
    converged: bool  # whether `tolerance` or `flat` was reached; a fit that only ran out of steps is not converged

    @property
    def error(self) -> float:
        """Relative squared error at the end."""
        return self.errors[-1]


@takes_arrays
def fit_gauss_newton(
    layer: AttentionLayer,
    x: ArrayLike,
    y: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    settings: GaussNewtonSettings | None = None,
) -> GaussNewtonFit:
    """Fit a layer to examples by joint least squares, from a start that is near enough.

    Minimizes ||w^(1/2) o (y - F(x))||^2 over Theta and W, and over the key bias and output bias where `layer` has them;
    `causal` is kept. Only the start's Theta and key bias matter, since projections and output bias are solved for.

    References
    ----------
    J. Nocedal, S. Wright, Numerical Optimization, chapters 7 and 10: inexact Gauss-Newton with Levenberg's damping;
    S. Eisenstat, H. Walker, SIAM J. Sci. Comput. 17 (1996): the accuracy of the inner solves.
    """
    examples = as_examples(x, y, Form.of(layer), weights)
    if layer.dim != examples.dim:
        raise ShapeError(f"a layer of dimension {layer.dim} cannot be fitted to tokens of dimension {examples.dim}")
    return descend(Tangent.at(examples, stack_theta(layer)), settings or GaussNewtonSettings())


def as_examples(x: ArrayLike, y: ArrayLike, form: Form = PLAIN, weights: ArrayLike | None = None) -> Examples:
    """Check sequences, labels and weights, and promote them to float64."""
    given = zip(("x", "y", "weights"), (x, y, *(() if weights is None else (weights,))), strict=False)
    tokens, labels, *rest = (np.ascontiguousarray(as_reals(name, value), np.float64) for name, value in given)
    if tokens.ndim != 3 or 0 in tokens.shape or labels.shape != tokens.shape:
        raise ShapeError(f"x {tokens.shape} and y {labels.shape}: expected both of one shape (n, k, d), not empty")
    if rest and rest[0].shape != tokens.shape[:2]:
        raise ShapeError(f"weights {rest[0].shape}: expected one a row, {tokens.shape[:2]}")
    for name, value in zip(("x", "y", "weights"), (tokens, labels, *rest), strict=False):
        check_range(name, value)
    examples = Examples(tokens, labels, form, rest[0] if rest else None)
    if rest and rest[0].min() < 0:
        raise UsageError(f"weights down to {rest[0].min():g}: a weight is zero or positive")
    if examples.power == 0:
        raise UsageError("the labels do not depend on the tokens: there is nothing to fit")
    return examples


def as_reals(name: str, values: ArrayLike) -> NDArray[np.generic]:
    """Return an array of real numbers in its own dtype."""
    try:
        array = np.asarray(check_arrays(values, name))
    except ValueError as error:  # NumPy's word for nested lists that are no array
        raise ShapeError(f"{name} is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise ShapeError(f"{name} of dtype {array.dtype}: expected real numbers")
    return array


def check_range(name: str, values: Array) -> None:
    """Refuse numbers with which products of four of them are not finite, or vanish."""
    size = np.abs(values)
    if not np.isfinite(size).all():
        where = tuple(int(index) for index in np.argwhere(~np.isfinite(size))[0])
        raise UsageError(f"{name} holds NaN or infinity, first at {where}: leave such sequences out")
    largest = float(size.max(initial=0.0))
    if largest > LARGE or 0 < largest < 1 / LARGE:
        raise UsageError(f"{name} holds numbers up to {largest:.2g}: scale it to between {1 / LARGE:g} and {LARGE:g}")


# A point of a least-squares problem: a layer without positions, or a rotary one
Point = Tangent | RotaryTangent


def descend(here: Point, settings: GaussNewtonSettings) -> GaussNewtonFit:
    """Take damped Gauss-Newton steps from a start."""
    damping, products, errors = settings.damping, 0, [here.loss]
    accuracy, before = 0.1, np.inf
    gradient = here.vjp(here.residual)
    while True:
        white = here.whiten(gradient)
        slope = float(np.sqrt(np.vdot(gradient, white)))
        cosine = slope / max(float(np.linalg.norm(here.residual)), np.finfo(float).tiny)
        converged = here.loss <= settings.tolerance or cosine <= settings.flat
        if converged or len(errors) > settings.steps or damping > STRONGEST:
            return GaussNewtonFit(here.layer, tuple(errors), products, cosine, converged)
        accuracy = float(np.clip(0.5 * (slope / before) ** 2, 1e-10, 0.1))
        before = slope
        while damping <= STRONGEST:
            change, expected, used = solve_damped(here, gradient, damping, accuracy, settings.inner)
            products += used
            if expected <= settings.gain * here.loss and damping <= LIGHT:
                return GaussNewtonFit(here.layer, tuple(errors), products, cosine, converged=True)
            there = here.move(change)
            gain = (here.loss - there.loss) / max(expected, np.finfo(float).tiny)
            if not np.isfinite(there.loss) or gain < 1e-3:
                damping *= 8
                if here.loss - there.loss > -1e-3 * here.loss and expected < 1e-12 * here.loss:
                    damping = np.inf  # nothing is left to be gained at this precision
                continue
            factor = 0.01 if gain > 0.95 else 0.2 if gain > 0.7 else 1.0 if gain > 0.3 else 4.0
            damping = float(np.clip(damping * factor, WEAKEST, STRONGEST))
            here = there
            errors.append(here.loss)
            gradient = here.vjp(here.residual)
            break


def solve_damped(here: Point, gradient: Array, damping: float, accuracy: float, limit: int) -> tuple[Array, float, int]:
    """Minimize ||r - J p||^2 + damping p.M p over p by conjugate gradients on the least-squares form.

    Preconditioned by the metric M, of which only the inverse is ever applied.

    Starts at p = 0 with the gradient J^T r, and stops where its norm in the metric is `accuracy` of the first. Returns
    p, the expected decrease of the relative squared error, and the number of products with J and J^T.
    """
    solution, scaled = np.zeros_like(gradient), np.zeros_like(gradient)  # p and M p
    rest, slope = here.residual.copy(), gradient
    white = here.whiten(slope)
    direction, lifted = white, slope  # the direction and M times it
    size = first = float(np.vdot(slope, white))
    used = 0
    for _ in range(limit):
        moved = here.forward(direction)
        curvature = float(np.vdot(moved, moved)) + damping * float(np.vdot(direction, lifted))
        if not curvature > 0:
            break
        length = size / curvature
        solution = solution + length * direction
        scaled = scaled + length * lifted
        rest -= length * moved
        slope = here.vjp(rest) - damping * scaled  # rest stays orthogonal to the readings, so P_perp is left out
        white = here.whiten(slope)
        used += 2
        following = float(np.vdot(slope, white))
        if following <= accuracy**2 * first:
            break
        direction, lifted = white + following / size * direction, slope + following / size * lifted
        size = following
    expected = (float(np.vdot(here.residual, here.residual)) - float(np.vdot(rest, rest))) / here.examples.power
    return solution, expected, used

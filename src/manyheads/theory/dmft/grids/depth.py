"""Infinite depth: midpoint cells of the continuum, and Richardson extrapolation of finite depths.

As L grows at depth exponent 1 the Gaussian sources of the layers and the responses to them vanish like 1/L, and the
stream obeys an ordinary differential equation in tau = l/L,

    dh/dtau = beta0 sum_{t'<t} (RO + kappa m U)(t, t') g(t'),    kappa = eta gamma0 beta0,

solved in cells by the implicit midpoint rule, which is of second order. Below exponent 1 what one block learns goes to
zero, attention stays uniform (at logit exponent 1), and the equation closes; finite depth is then L^(1 - 2 alpha_L)
away, the variance of its noise. At exponent 1/2 that noise survives: the stream is a stochastic process whose kernels
converge like 1/L in steps of Euler, and Richardson's extrapolation 2 f(2L) - f(L) takes the leading error away.
(Derived here.)
"""

from dataclasses import dataclass, replace

from manyheads.errors import UsageError, check_integer
from manyheads.theory.dmft.dataset import Trajectory
from manyheads.theory.dmft.problem import MOST, Problem


@dataclass(frozen=True)
class DepthStep:
    """Integration of a step in depth."""

    step: float  # b, the factor of what a layer writes
    learned: float  # kappa, the factor of what its weights learn
    sources: bool = True  # whether layers have Gaussian sources of their own. Infinite depth at exponent 1 has none.
    sweeps: int = 1  # 2 or more evaluate a layer at the middle of its own step (implicit midpoint)


def finite_depth_step(problem: Problem) -> DepthStep:
    """Return the step in depth of a network of finite depth."""
    scale, depth = problem.learning_rate * problem.richness * problem.branch, float(problem.depth)
    return DepthStep(
        step=problem.branch * depth**-problem.depth_exponent, learned=scale * depth ** (problem.depth_exponent - 1)
    )


def continuum_step(problem: Problem, cells: int) -> DepthStep:
    """Return midpoint steps of the continuum without noise, depth exponents above 1/2."""
    check_integer("cells", cells, most=MOST)
    if problem.depth_exponent == 0.5:
        raise UsageError("depth exponent 1/2: its continuum has noise; extrapolate finite depths instead")
    learned = problem.learning_rate * problem.richness * problem.branch
    return DepthStep(problem.branch / cells, learned, sources=False, sweeps=3)


def extrapolate(coarse: Trajectory, fine: Trajectory) -> Trajectory:
    """Richardson's extrapolation of a trajectory at L and one at 2L whose error falls like 1/L.

    What exists once a layer (kernels of the stream, what branches show) is left as it is at 2L, and so are losses: one
    that is extrapolated can be negative, and that of the outputs (`Problem.losses`) is as near and cannot.
    """
    return replace(fine, outputs=2 * fine.outputs - coarse.outputs, pooled=2 * fine.pooled - coarse.pooled)

r"""Preconditioned Gauss-Newton refits of a large sigmoid network at many neighbouring probes.

What the last row of the pair (q + v, q) shows is a net of one hidden layer in q whose slopes, offsets and values are
all linear in v:

.. math:: \vartheta_i = (\Theta_i v, \beta_i^\top v), \qquad C_i = W_i^\top v.

The net that is known at v_0 therefore starts the fit at v_0 + delta for every direction. `fit_nets` forms and solves a
normal matrix of (heads x features)^2 for every probe, which is right for a few features and too much for all
d of them. Here the fits share their queries and their normal matrices are near that of v_0, so it is factorized once
and preconditions conjugate gradients inside Gauss-Newton, for all directions together: the work of a step is that of a
few matrix products of (rows x features), and the answer is the same least-squares fit. This form is derived here.
"""

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from manyheads.recovery._types import Array, ArrayFunction
from manyheads.recovery.queries.nets.sigmoid_network import TINY, NetDesign, NetState, PairNets, kaufman_normal

STEPS = 40  # Gauss-Newton steps of a refit, at most
INNER = 40  # conjugate-gradient iterations of a step, at most: a step cut short is still one of descent
HALVINGS = 6  # halvings of the length of a step, at most; a fit that no length improves has ended
FORCING = 1e-2  # what the inner iterations leave of the gradient, in the norm of the preconditioner
RIDGE = 1e-13  # of the preconditioner, against its own diagonal


class Continuation:
    """A net known at one probe, ready to be followed to any number of neighbouring ones."""

    def __init__(self, design: NetDesign, reference: PairNets, *, tolerance: float = 1e-6):
        self.design, self.reference, self.tolerance = design, reference, tolerance
        gates = design.gates(reference.slopes)
        basis = np.linalg.qr(design.units(reference.slopes))[0]
        normal = kaufman_normal(design.features, (gates * (1 - gates))[None], basis[None], reference.values[None])[0]
        self._scale = np.sqrt(np.diag(normal) + RIDGE * np.trace(normal) / len(normal) + TINY)
        normal /= self._scale[:, None] * self._scale
        self._factor = _factorize(normal)

    def refit(self, answers: Array) -> PairNets:
        """Fit a net to the answers (b, n, D) of every probe, starting from the net at v_0."""
        total = np.sum(answers**2, axis=(1, 2)) + TINY
        state = NetState.at(self.design, np.repeat(self.reference.slopes[None], len(answers), axis=0), answers)
        going = np.arange(len(answers))
        for _ in range(STEPS):
            here = state.take(going)
            moved = self._search(here, self._step(here), answers[going])
            state.put(going, moved)
            gain = 1 - moved.loss / np.maximum(here.loss, TINY)
            going = going[(gain >= self.tolerance) & (moved.loss > 1e-32 * total[going])]
            if not len(going):
                break
        return PairNets(state.slopes, state.values, np.sqrt(state.loss / total))

    def _precondition(self, gradient: Array) -> Array:
        """Apply the inverse of the normal matrix of v_0 to (b, m, p)."""
        flat = gradient.reshape(len(gradient), -1) / self._scale
        solved: Array = cho_solve(self._factor, flat.T, check_finite=False).T / self._scale
        return solved.reshape(gradient.shape)

    def _step(self, state: NetState) -> Array:
        """Solve the Gauss-Newton equations of every fit, up to a share of its gradient."""
        derivative = state.derivative
        gram = state.values @ state.values.swapaxes(1, 2)  # (b, m, m)
        features = self.design.features

        def vjp(output: Array) -> Array:  # (b, n, m) -> (b, m, p)
            weighted = (derivative * output).transpose(1, 0, 2).reshape(len(features), -1)
            return (weighted.T @ features).reshape(len(output), -1, features.shape[1])

        def normal(direction: Array) -> Array:
            moved = features @ direction.reshape(-1, features.shape[1]).T  # (n, b m)
            moved = derivative * moved.reshape(len(features), len(direction), -1).swapaxes(0, 1)
            moved -= state.basis @ (state.basis.swapaxes(1, 2) @ moved)
            return vjp(moved @ gram)

        return _conjugate_gradients(normal, self._precondition, vjp(state.rest @ state.values.swapaxes(1, 2)))

    def _search(self, state: NetState, step: Array, answers: Array) -> NetState:
        """Halve the step of every fit until its loss falls; a fit that nothing improves stays."""
        result = state.take(np.arange(len(step)))
        waiting = np.arange(len(step))
        for halving in range(HALVINGS):
            tried = NetState.at(self.design, state.slopes[waiting] + 0.5**halving * step[waiting], answers[waiting])
            better = tried.loss < state.loss[waiting]
            result.put(waiting[better], tried.take(better))
            waiting = waiting[~better]
            if not len(waiting):
                break
        return result


def _factorize(normal: Array) -> tuple[Array, bool]:
    """Factorize a matrix with unit diagonal; the ridge grows until it is definite: it only preconditions."""
    ridge = RIDGE
    while True:
        try:
            return cho_factor(normal + ridge * np.eye(len(normal)), lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            ridge *= 100


def _dot(left: Array, right: Array) -> Array:
    return np.einsum("bij,bij->b", left, right)


def _conjugate_gradients(apply: ArrayFunction, precondition: ArrayFunction, right: Array) -> Array:
    """Solve many definite systems at once; each stops where its preconditioned residual is small."""
    solution, residual = np.zeros_like(right), right.copy()
    direction = precondition(residual)
    size = _dot(residual, direction)
    enough = FORCING**2 * size
    for _ in range(INNER):
        image = apply(direction)
        curvature = _dot(direction, image)
        going = (size > enough) & (curvature > 0)
        if not going.any():
            break
        length = np.where(going, size / np.maximum(curvature, TINY), 0.0)[:, None, None]
        solution += length * direction
        residual -= length * image
        preconditioned = precondition(residual)
        renewed = _dot(residual, preconditioned)
        ratio = np.where(going, renewed / np.maximum(size, TINY), 0.0)[:, None, None]
        direction = np.where(going[:, None, None], preconditioned + ratio * direction, direction)
        size = np.where(going, renewed, size)
    return solution

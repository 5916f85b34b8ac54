r"""Joint least-squares refinement of all weights on random sequences, stage F5.

An extraction reads differences of answers, and its errors are a multiple of the noise that grows with the shortness of
its steps. The joint fit of all P weights to N random sequences of k tokens has the least error that is possible,

.. math:: \frac{E \| F - \hat F \|^2}{\mathrm{Var}\, F} \approx \sigma^2 \frac{P}{N k d}

with sigma the relative noise, if it starts near enough. Whether it did is measured on held-out sequences, and the
refined layer is kept only if it explains those better.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.attention import AttentionLayer
from manyheads.recovery.gauss_newton import GaussNewtonSettings, fit_gauss_newton
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.variable_projection import Examples

Array = NDArray[np.float64]

LENGTH = 4  # tokens of a sequence
HELD = 8  # one sequence in so many is held out
PRODUCTS = 200  # products with the Jacobian that a refinement is expected to take, for the estimate of its work


class Refined(NamedTuple):
    """The better layer of the two, and how they compare."""

    layer: AttentionLayer  # the refined layer if it explains held-out sequences better, else the one that was given
    # Relative squared error on held-out sequences, noise included
    before: float
    after: float
    noise: float  # what no layer explains: the residual of the fit, corrected for the weights that were fitted
    predicted: float  # sigma^2 P / (N k d): the error of the function that least squares should leave
    kept: bool  # whether the refined layer was the better one


def refinement_size(dim: int, heads: int, excess: float) -> int:
    """Return the number of sequences whose labels are `excess` times as many as the weights."""
    return int(np.ceil(excess * _weights(dim, heads) / (LENGTH * dim)))


def refinement_work(dim: int, heads: int, excess: float) -> float:
    """Return the floating-point operations that a refinement is expected to take.

    Examples
    --------
    >>> refinement_work(64, 4, excess=12) < 4e11 < refinement_work(128, 8, excess=12)
    True
    """
    return 8.0 * PRODUCTS * refinement_size(dim, heads, excess) * LENGTH * heads * dim**2


def refine_layer(oracle: Oracle, layer: AttentionLayer, rng: np.random.Generator, *, excess: float = 12.0) -> Refined:
    """Fit all weights of a layer to fresh answers of its oracle, from where an extraction left them.

    Asks about `refinement_size` sequences of standard normal tokens, shortened where the server asks for it, and an
    eighth more held out.
    """
    count = refinement_size(layer.dim, layer.heads, excess)
    length = int(min(LENGTH, oracle.longest))
    count = -(-count * LENGTH // length)
    x = rng.standard_normal((count + max(16, count // HELD), length, layer.dim)) * (oracle.unit / np.sqrt(layer.dim))
    x *= np.minimum(1.0, oracle.limits.reach / np.linalg.norm(x, axis=-1, keepdims=True))
    y = oracle(x, read="all")
    fitted = fit_gauss_newton(layer, x[:count], y[:count], settings=GaussNewtonSettings(steps=8, inner=60, flat=1e-4))
    before, after = (relative_error(one, Examples(x[count:], y[count:])) for one in (layer, fitted.layer))
    share = _weights(layer.dim, layer.heads) / (count * length * layer.dim)
    noise = fitted.error / (1 - share)
    kept = after < before
    return Refined(fitted.layer if kept else layer, before, after, noise, noise * share, kept)


def _weights(dim: int, heads: int) -> int:
    return heads * (2 * dim**2 + dim) + dim

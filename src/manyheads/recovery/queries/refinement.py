r"""Joint least-squares refinement of all weights on random sequences, stage F5.

An extraction reads differences of answers, and its errors are a multiple of the noise that grows with the shortness of
its steps. The joint fit of all P weights to N random sequences of k tokens has the least error that is possible,

.. math:: \frac{E \| F - \hat F \|^2}{\mathrm{Var}\, F} \approx \sigma^2 \frac{P}{N k d}

with sigma the relative noise, if it starts near enough. Whether it did is measured on held-out sequences, and the
refined layer is kept only if it explains those better.

Rotary layers are fitted by what their answers determine: Theta of its rank, which turns from one offset to the next,
and W of its rank (`manyheads.recovery.queries.rotary.tangent`). P is then the free parameters, the Jacobian's rank.
"""

from typing import Any, NamedTuple

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Generator
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, descend, fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.rotary.tangent import NEAR, RotaryTangent, RotaryWeights
from manyheads.recovery.result.results import StageLog

LENGTH = 4  # tokens of a sequence
HELD = 8  # one sequence in so many is held out
PLAIN = GaussNewtonSettings(steps=8, inner=60, flat=1e-4)
FEWEST = 12.0  # labels of a part that rotary layers are fitted to first, against their weights
ACCURACY = 0.1  # cosine at which their fit stops, against that of noise with what is fitted, sqrt(p / n)
TURNED = 32  # tokens of a sequence that shows frequencies
LARGEST = 2500  # weights of a rotary layer up to which a joint fit is made: its metric is dense
PRODUCTS = 200  # products with the Jacobian that a refinement is expected to take, for the estimate of its work


class Refined(NamedTuple):
    """The better layer of the two, and how they compare."""

    layer: Any  # the refined layer if it explains held-out sequences better, else the one that was given
    # Relative squared error on held-out sequences, noise included
    before: float
    after: float
    noise: float  # what no layer explains: the residual of the fit, corrected for the weights that were fitted
    predicted: float  # sigma^2 P / (N k d): the error of the function that least squares should leave
    kept: bool  # whether the refined layer was the better one


def refinement_work(dim: int, heads: int, excess: float) -> float:
    """Return the floating-point operations that a refinement is expected to take."""
    count = int(np.ceil(excess * _weights(dim, heads) / (LENGTH * dim)))  # sequences
    return 8.0 * PRODUCTS * count * LENGTH * heads * dim**2


def refine_layer(
    oracle: Oracle, layer: AttentionLayer | RotaryLayer, rng: Generator, *, excess: float = 12.0, length: int = LENGTH
) -> Refined:
    """Fit all weights of a layer to fresh answers of its oracle, from where an extraction left them."""
    weights = fitted_weights(layer)
    length = int(min(length, oracle.longest))
    fresh, held = ask_fresh(oracle, int(np.ceil(excess * weights / (length * layer.dim))), length, rng)
    fitted: AttentionLayer | RotaryLayer
    if isinstance(layer, RotaryLayer):
        fitted, error = _fit_rotary(layer, fresh, weights)
    else:
        plain = fit_gauss_newton(layer, fresh.x, fresh.y, settings=PLAIN)
        fitted, error = plain.layer, plain.error
    before, after = (relative_error(one, held) for one in (layer, fitted))
    share, kept = weights / fresh.x.size, after < before
    noise = error / (1 - share)
    return Refined(fitted if kept else layer, before, after, noise, noise * share, kept)


def _fit_rotary(layer: RotaryLayer, fresh: Examples, free: int) -> tuple[RotaryLayer, float]:
    """Fit to some of the answers, then to more of them, from ever nearer: steps on all of them are few."""
    found = layer
    for share, steps in ((64, 16), (8, 8), (1, 4)):
        count = len(fresh) // share
        part = Examples(fresh.x[:count], fresh.y[:count])
        if share > 1 and part.x.size < FEWEST * free:
            continue
        flat = ACCURACY * float(np.sqrt(free / part.x.size))
        settings = GaussNewtonSettings(steps=16 if found is layer else steps, inner=60, flat=flat)
        fitted = descend(RotaryTangent.at(part, RotaryWeights.of(found), ridge=NEAR), settings)
        found = fitted.layer
    return found, fitted.error


def refine_turned(oracle: Oracle, layer: RotaryLayer, noise: float, rng: Generator, log: StageLog) -> RotaryLayer:
    """Refine a rotary layer where answers are noisy, if it is small enough and its forms go on by turns."""
    if type(layer) is not RotaryLayer or layer.turns is None or noise <= EXACT:
        return layer
    if RotaryWeights.of(layer).flat().size > LARGEST:
        return layer
    with log.stage("refinement") as figures:
        refined = refine_layer(oracle, layer, rng, length=TURNED)
        figures |= {name: float(value) for name, value in refined._asdict().items() if name != "layer"}
    return refined.layer


def fitted_weights(layer: AttentionLayer | RotaryLayer) -> int:
    """Return P: merged weights, and of a rotary layer the free parameters."""
    if isinstance(layer, RotaryLayer):
        return RotaryWeights.of(layer).free(LENGTH)
    return _weights(layer.dim, layer.heads)


def ask_fresh(oracle: Oracle, count: int, length: int, rng: Generator) -> tuple[Examples, Examples]:
    """Ask about `count` sequences of standard normal tokens, and an eighth more, held out."""
    x = rng.standard_normal((count + max(16, count // HELD), length, oracle.dim)) * (oracle.unit / np.sqrt(oracle.dim))
    x *= np.minimum(1.0, oracle.limits.reach / np.linalg.norm(x, axis=-1, keepdims=True))
    y = oracle(x, read="all")
    return Examples(x[:count], y[:count]), Examples(x[count:], y[count:])


def _weights(dim: int, heads: int) -> int:
    return heads * (2 * dim**2 + dim) + dim

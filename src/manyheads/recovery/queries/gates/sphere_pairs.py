r"""Pairs of normalized tokens with a fixed difference, and copies of the query.

Behind a normalization only tokens of norm sqrt d are seen (of mean zero, for a LayerNorm). Two of them have the
difference v if and only if they are

.. math:: w + v/2, \quad w - v/2, \qquad w \perp v,\ |w|^2 = d - |v|^2/4 .

With w in a subspace and v in its complement, and all v of one norm, the same w serve every v. What pairs show of
the heads is as without a norm (`gates.pairs`), but the size of w is given, and only Jacobians at one point share
their factors. Derived here.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from manyheads.recovery._types import Array, Ask, Generator
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.gates.pairs import Pairs
from manyheads.recovery.queries.nets.sigmoid_network import EPS, EXACT
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.refusals import FitError, NotALayer

QUERIES = 12  # dimensions in which the w of all pairs lie; the differences have the others
COPIES = (6, 12)  # copies of the query, for exact answers and for noisy ones
SMALL = (1e-2, 3e-3)  # root mean squares of the tokens that show epsilon


@dataclass(frozen=True)
class SpherePairs(Pairs):
    """Asks about pairs on the sphere, whose queries are the w."""

    # Orthonormal rows (a, d) and (b, d) that span the subspaces of the differences v and of the w
    near: Array = field(default_factory=lambda: np.zeros((0, 0)))
    far: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @classmethod
    def of(cls, oracle: Oracle, sums: Sums, basis: Array, noise: float) -> "SpherePairs":
        """Return pairs whose w have a few dimensions of an orthonormal basis (b, d), and the differences the others."""
        few = min(max(4, len(basis) // 4), len(basis) // 2, QUERIES)
        after = int(min(COPIES[noise > EXACT], oracle.longest - 1))
        known = cls(oracle, sums, 1, after, oracle.causal, max(noise, EPS), both=True, scaled=False, middle=True)
        return replace(known, room=len(basis) - few, near=basis[few:], far=basis[:few])

    @property
    def radius(self) -> float:
        """Norm of tokens and differences, sqrt d."""
        return float(np.sqrt(self.near.shape[1]))

    def probe(self, rng: Generator, dim: int) -> Array:
        """Draw a difference of norm sqrt d in its subspace."""
        return _of_norm(rng.standard_normal(len(self.near)) @ self.near, self.radius)

    def at(self, probe: Array, moves: Array) -> Array:
        """Return differences (b, d) beside one, of the same norm."""
        return _of_norm(probe + moves, self.radius)

    def directions(self, rng: Generator, dim: int, bases: int) -> Array:
        """Draw three orthonormal bases of the subspace of differences: probes that fail have others in their place."""
        drawn = [super(SpherePairs, self).directions(rng, len(self.near), 1) for _ in range(3)]
        return np.concatenate([basis @ self.near for basis in drawn])

    def pair(self, queries: Array, probes: Array) -> tuple[Array, Array]:
        """Return the tokens w + v/2 and w - v/2 (b, n, d)."""
        return queries + probes[:, None] / 2, queries - probes[:, None] / 2

    def beside(self, point: Array, steps: Array, probe: Array) -> Array:
        """Return the w on both sides of one, at right angles to v."""
        axes = np.stack([point / np.linalg.norm(point), probe / np.linalg.norm(probe)])
        steps = steps - steps @ axes.T @ axes
        return _of_norm(np.concatenate([point + steps, point - steps]), np.sqrt(0.75) * self.radius)

    def shortened(self, queries: Array) -> Array:
        """Return the w (n, d) of norm sqrt(3 d / 4) in their subspace along vectors."""
        return _of_norm(queries @ self.far.T @ self.far, np.sqrt(0.75) * self.radius)


def _of_norm(x: Array, norm: float) -> Array:
    return x * (norm / np.linalg.norm(x, axis=-1, keepdims=True))


def read_norm(ask: Ask, dim: int, noise: float, rng: Generator) -> tuple[Normalization, Array]:
    r"""Read which normalization stands in front.

    A LayerNorm does not see x + 1: then tokens have mean zero, otherwise the answers to x and 2 x must agree but for
    epsilon. With a token of mean square one scaled by a small s the answer is smaller by

    .. math:: f^2 = s^2 (1 + \epsilon) / (s^2 + \epsilon), \qquad \epsilon = s^2 (1 - f^2) / (f^2 - s^2).

    s is small at first, and s^2 = epsilon the second time, where epsilon shows; where not, it is returned as zero.
    Returns the normalization, and a token of the sphere.
    """
    radius = np.sqrt(dim)
    centre = np.eye(dim) - np.full((dim, dim), 1 / dim)
    token = rng.standard_normal(dim) @ centre
    token *= radius / np.linalg.norm(token)
    y = ask(np.stack([token, token + 1.0, 2 * token, -token, SMALL[0] * token])[:, None], read="last")
    loose = max(1e-8, 1e3 * noise)
    bias, size = (y[0] + y[3]) / 2, np.linalg.norm(y[0] - y[3]) / 2
    if size <= 8 * EPS * np.linalg.norm(bias):
        raise FitError("the projections cancel: single tokens do not show the norm in front", size, EPS)
    centred = bool(np.linalg.norm(y[1] - y[0]) < loose * size)
    NotALayer.if_above(np.linalg.norm(y[2] - y[0]) / size, 0.01, "twice a token gives another answer: no normalization")

    def epsilon_at(s: float, answer: Array) -> float:
        shrunk = float((answer - bias) @ (y[0] - bias) / size**2)
        return float(s**2 * (1 - shrunk**2) / max(shrunk**2 - s**2, np.finfo(float).tiny))

    first = epsilon_at(SMALL[0], y[4])
    doubt = max(1e-3 * first, 1e3 * max(noise, EPS) * SMALL[0] ** 2)
    s = float(np.sqrt(first)) if doubt < first < 1 else SMALL[1]
    second = epsilon_at(s, ask(s * token[None, None], read="last")[0])
    if abs(second - first) > doubt or min(first, second) < -doubt:
        what = "answers to short tokens are those of no LayerNorm or RMSNorm of any epsilon"
        raise NotALayer(what, abs(second - first), doubt)
    return Normalization(centred, second if second > doubt else 0.0), token


def read_normalized_sums(ask: Ask, dim: int, noise: float, rng: Generator) -> tuple[Sums, Normalization, Array]:
    """Read W_S and c from single tokens of the sphere, and which normalization stands in front."""
    radius, loose = np.sqrt(dim), max(1e-8, 1e3 * noise)
    norm, token = read_norm(ask, dim, noise, rng)
    centre = np.eye(dim) - np.full((dim, dim), 1 / dim)
    basis = np.linalg.svd(rng.standard_normal((dim, dim)) @ centre)[2][: dim - 1]
    if not norm.centred:
        basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    y = ask(radius * np.concatenate([basis, -basis[:2]])[:, None], read="last")
    bias = (y[:2] + y[-2:]).mean(0) / 2
    projection = basis.T @ (y[: len(basis)] - bias) / radius
    rest = np.linalg.norm(token @ projection + bias - (asked_answer := ask(token[None, None], read="last")[0]))
    what = "the answer to a token on the sphere is not affine in it"
    NotALayer.if_above(rest / np.linalg.norm(asked_answer - bias), loose, what)
    return Sums(projection, bias), norm, basis

"""Variable projection: attention matrices as parameters, projections eliminated by linear least squares.

For fixed attention matrices a layer is linear in its projections and its output bias, which are therefore solved for
(variable projection): what is left is a function of the attention matrices alone,

    f(Theta) = min over W, c of || w o (y - P(Theta) [W; c]) ||^2,      P = [A_1 x, ..., A_m x, 1],  (n k, m d + 1).

Biases enter by a coordinate that is always one: the key bias is one more row of Theta, the output bias one more of W.
With a_r the weights of row r and D_r = diag(a_r) - a_r a_r^T, a change dTheta_i moves row r by

    x_r^T dTheta_i x^T D_r x W_i,

which is applied to all rows at once as five matrix products; so is its adjoint. The curvature of Theta_i is the sum
over rows of x_r x_r^T (x) x^T D_r x W_i W_i^T x^T D_r x; the product of the two sums, divided by the number of rows, is
a metric that is inverted by two small solves and in which the problem is well scaled.

References
----------
G. Golub, V. Pereyra, SIAM J. Numer. Anal. 10 (1973), and L. Kaufman, BIT 15 (1975): variable projection and the
Jacobian used here, P_perp dP W. The derivatives of the layer and the metric are worked out here.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy.linalg

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array

BLOCK = 1 << 18  # numbers of one block's readings: what fits the cache while all products of the block are done
RIDGE = 1e-14  # share of the mean diagonal added to a Gram matrix, so that equal heads have a projection each
FLOOR = 1e-7  # of the same kind, for the metric: directions that nothing measures move as little as others


class Form(NamedTuple):
    """Parts of a layer besides Theta and W."""

    key_bias: bool = False
    bias: bool = False
    causal: bool = False

    @classmethod
    def of(cls, layer: AttentionLayer) -> "Form":
        """Return the form of a layer."""
        return cls(layer.key_bias is not None, layer.bias is not None, layer.causal)


PLAIN = Form()


@dataclass(frozen=True)
class Examples:
    """Sequences and labels to fit: x and y (n, k, d) float64, one weight a row (n, k) or None, and the layer's form."""

    x: Array
    y: Array
    form: Form = PLAIN
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        """Token dimension d."""
        return self.x.shape[2]

    @cached_property
    def queries(self) -> Array:
        """Tokens that ask, with a coordinate of ones where there is a key bias, (n k, d or d + 1)."""
        flat = self.x.reshape(-1, self.dim)
        return np.hstack([flat, np.ones((len(flat), 1))]) if self.form.key_bias else flat

    @cached_property
    def scales(self) -> Array | None:
        """Square roots of the weights, (n k, 1)."""
        return None if self.weights is None else np.sqrt(self.weights).reshape(-1, 1)

    @cached_property
    def labels(self) -> Array:
        """Labels of the rows, weighted, (n k, d)."""
        return self.weigh(self.y.reshape(-1, self.dim))

    @cached_property
    def power(self) -> float:
        """Weighted sum of squared deviations of the labels from their mean: the unit of squared errors."""
        rows = self.y.reshape(-1, self.dim)
        rows = rows - rows[0]  # exactly zero where labels are constant
        weights = None if self.weights is None else self.weights.reshape(-1)
        mean = np.average(rows, axis=0, weights=weights) if weights is None or weights.any() else 0.0
        moved = self.weigh(rows - mean)
        return float(np.vdot(moved, moved))

    @cached_property
    def token_gram(self) -> tuple[Array, bool]:
        """Cholesky factor of the sum of x_r x_r^T over rows: one side of the metric."""
        return factor_gram(self.queries.T @ self.queries, FLOOR)

    def weigh(self, rows: Array) -> Array:
        """Multiply rows (n k, ...) by the square roots of their weights."""
        return rows if self.scales is None else rows * self.scales

    def blocks(self, heads: int) -> list[slice]:
        """Cut the sequences into blocks whose readings stay in the cache."""
        _, length, dim = self.x.shape
        size = max(1, BLOCK // (length * heads * dim))
        return [slice(start, start + size) for start in range(0, len(self), size)]

    def take(self, indices: Array) -> "Examples":
        """Return some of the sequences."""
        weights = None if self.weights is None else self.weights[indices]
        return Examples(self.x[indices], self.y[indices], self.form, weights)


@dataclass(frozen=True)
class Tangent:
    """The layer at fixed attention matrices: readings, the best projections, residuals and derivatives."""

    examples: Examples  # what is fitted
    theta: Array  # attention matrices (m, d or d + 1, d); the last row of d + 1 is the key bias
    pattern: Array  # attention weights (n, k, m, k)
    readings: Array  # P (n k, m d or m d + 1), weighted
    factor: tuple[Array, bool]  # cholesky factor of P^T P
    projection: Array  # the best [W; c] (m d or m d + 1, d)
    residual: Array  # w o (y - P [W; c]) (n k, d)

    @classmethod
    def at(cls, examples: Examples, theta: Array) -> "Tangent":
        """Read with these attention matrices and solve for the projections."""
        pattern, readings = read(examples, theta)
        factor = factor_gram(readings.T @ readings, RIDGE)
        projection = scipy.linalg.cho_solve(factor, readings.T @ examples.labels)
        residual = examples.labels - readings @ projection
        projection += scipy.linalg.cho_solve(factor, readings.T @ residual)  # what the squared condition had cost
        residual = examples.labels - readings @ projection
        return cls(examples, theta, pattern, readings, factor, projection, residual)

    def move(self, change: Array) -> "Tangent":
        """Return the same at attention matrices that were changed."""
        return Tangent.at(self.examples, self.theta + change)

    @property
    def loss(self) -> float:
        """Squared residual relative to the variance of the labels."""
        return float(np.vdot(self.residual, self.residual)) / self.examples.power

    @property
    def layer(self) -> AttentionLayer:
        """The fitted layer."""
        heads, dim, form = len(self.theta), self.examples.dim, self.examples.form
        projection = self.projection[: heads * dim].reshape(heads, dim, dim).copy()
        key_bias = self.theta[:, dim].copy() if form.key_bias else None
        bias = self.projection[heads * dim].copy() if form.bias else None
        return AttentionLayer(self.theta[:, :dim].copy(), projection, key_bias, bias, form.causal)

    def forward(self, change: Array) -> Array:
        """Return the first-order change of the rows when the projections follow: P_perp J dTheta, (n k, d)."""
        return self._remove_readings(self.jvp(change))

    def jvp(self, change: Array) -> Array:
        """Return J dTheta at fixed projections, (n k, d)."""
        n, length, dim = self.examples.x.shape
        moved = np.empty((n * length, dim))
        across = np.moveaxis(change, 0, 1).reshape(change.shape[1], len(self.theta) * dim)
        for part, rows in self._parts:
            moved[rows] = self._pass(part, self.examples.queries[rows] @ across) @ self._stack
        return self.examples.weigh(moved)

    def vjp(self, rows_: Array) -> Array:
        """Return J^T rows at fixed projections, of theta's shape."""
        heads, dim = len(self.theta), self.examples.dim
        gathered = np.zeros((self.theta.shape[1], heads * dim))
        weighed = self.examples.weigh(rows_)
        for part, rows in self._parts:
            gathered += self.examples.queries[rows].T @ self._pass(part, weighed[rows] @ self._stack.T)
        return np.moveaxis(gathered.reshape(-1, heads, dim), 1, 0).copy()

    def _pass(self, part: slice, rows: Array) -> Array:
        """Multiply rows (r, m d) of some sequences by their tokens, by D_r, and by their tokens again."""
        keys, heads = self.examples.x[part], len(self.theta)
        seen, length, dim = keys.shape
        asked = np.matmul(rows.reshape(seen, length * heads, dim), keys.transpose(0, 2, 1))
        through = softmax_derivative(self.pattern[part], asked.reshape(seen, length, heads, length))
        return np.matmul(through.reshape(seen, length * heads, length), keys).reshape(-1, heads * dim)

    def whiten(self, gradient: Array) -> Array:
        """Apply the inverse of the metric to a gradient, of theta's shape."""
        rows = self.examples.queries.shape[0]
        outer, sides = self.examples.token_gram, zip(self._curvatures, gradient, strict=True)
        solved = [scipy.linalg.cho_solve(side, scipy.linalg.cho_solve(outer, part).T).T for side, part in sides]
        return rows * np.stack(solved)

    @cached_property
    def _curvatures(self) -> list[tuple[Array, bool]]:
        """Cholesky factors of the sums over rows of x^T D_r x W_i W_i^T x^T D_r x: the other side of the metric."""
        x, heads = self.examples.x, len(self.theta)
        _, length, dim = x.shape
        sums = np.zeros((heads, dim, dim))
        scales = None if self.examples.weights is None else self.examples.weights[:, :, None, None, None]
        for part, _ in self._parts:
            keys, pattern, seen = x[part], self.pattern[part], len(x[part])
            values = np.matmul(keys[:, None], self.projection[: heads * dim].reshape(heads, dim, dim))  # (n, m, k, d)
            inner = np.matmul(values, values.transpose(0, 1, 3, 2))[:, None]  # (n, 1, m, k, k)
            once = softmax_derivative(pattern[..., None, :], inner)  # (n, k, m, k, k): D_r on the right side
            both = softmax_derivative(pattern[..., None, :], once.swapaxes(-1, -2))
            kernel = (both if scales is None else both * scales[part]).sum(1)  # (n, m, k, k)
            read_ = np.matmul(kernel.reshape(seen, heads * length, length), keys).reshape(seen, heads, length, dim)
            for head in range(heads):
                sums[head] += keys.reshape(-1, dim).T @ read_[:, head].reshape(-1, dim)
        smallest = 1e-12 * max(np.trace(side) for side in sums) / dim + np.finfo(float).tiny
        return [factor_gram(side + smallest * np.eye(dim), FLOOR) for side in sums]

    @cached_property
    def _stack(self) -> Array:
        """The projections one under the other, (m d, d)."""
        return self.projection[: len(self.theta) * self.examples.dim]

    @cached_property
    def _parts(self) -> list[tuple[slice, slice]]:
        """Blocks of sequences, and of their rows."""
        length = self.examples.x.shape[1]
        return [
            (part, slice(part.start * length, part.stop * length)) for part in self.examples.blocks(len(self.theta))
        ]

    def _remove_readings(self, rows: Array) -> Array:
        return rows - self.readings @ scipy.linalg.cho_solve(self.factor, self.readings.T @ rows)


def read(examples: Examples, theta: Array) -> tuple[Array, Array]:
    """Return the attention weights (n, k, m, k) and the readings P (n k, m d or m d + 1), weighted."""
    x, form, heads = examples.x, examples.form, len(theta)
    n, length, dim = x.shape
    pattern = np.empty((n, length, heads, length))
    readings = np.empty((n * length, heads * dim + form.bias))
    readings[:, heads * dim :] = 1.0
    across = np.moveaxis(theta, 0, 1).reshape(theta.shape[1], heads * dim)
    forbidden = np.triu(np.full((length, length), -np.inf), 1)[:, None] if form.causal else 0.0
    for part in examples.blocks(heads):
        keys, seen = x[part], len(x[part])
        rows = slice(part.start * length, part.start * length + seen * length)
        asked = (examples.queries[rows] @ across).reshape(seen, length * heads, dim)
        logits = np.matmul(asked, keys.transpose(0, 2, 1)).reshape(seen, length, heads, length) + forbidden
        logits -= logits.max(-1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(-1, keepdims=True)
        pattern[part] = logits
        readings[rows, : heads * dim] = np.matmul(logits.reshape(seen, length * heads, length), keys).reshape(
            seen * length, heads * dim
        )
    return pattern, examples.weigh(readings)


def stack_theta(layer: AttentionLayer) -> Array:
    """Return Theta with the key bias as its last row, (m, d or d + 1, d), float64."""
    theta = np.asarray(layer.theta, np.float64)
    if layer.key_bias is None:
        return theta
    return np.concatenate([theta, np.asarray(layer.key_bias, np.float64)[:, None]], axis=1)


def softmax_derivative(pattern: Array, change: Array) -> Array:
    """Return D_r change along the last axis: a o (change - a . change)."""
    weighed = pattern * change
    return weighed - pattern * weighed.sum(-1, keepdims=True)


def factor_gram(gram: Array, share: float) -> tuple[Array, bool]:
    """Factor a Gram matrix with a ridge of `share` of its mean diagonal, raised until it is positive definite."""
    mean = float(np.trace(gram)) / len(gram)
    while share < 1:
        try:
            return scipy.linalg.cho_factor(gram + share * (mean or 1.0) * np.eye(len(gram)), lower=True)
        except np.linalg.LinAlgError:
            share *= 100
    return scipy.linalg.cho_factor(np.eye(len(gram)) * (mean or 1.0), lower=True)

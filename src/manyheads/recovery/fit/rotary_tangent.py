r"""Least squares over layers that turn queries and keys (RoPE): residual, products with its Jacobian, and metric.

Parametrized by what the answers determine, up to invertible factors: with x~ = x, or (x, 1) where there are biases,

.. math:: l_i(r, j) = \tilde x_r^\top Q_i e^{(r-j) X_i} K_i^\top \tilde x_j, \qquad
          y_r = c + \sum_i \sum_j a_i(r, j)\, x_j^\top V_i O_i,

so that Theta has its rank and its turns at every offset, and W = V O its rank. X_i is made of planes, each a matrix of
two rows without trace, of determinant omega^2: X^2 = -omega^2, hence

.. math:: e^{tX} = \cos(\omega t) + \frac{\sin(\omega t)}{\omega} X.

Where all X are zero the layer has no positions, and they stay zero. Rotations are those with omega^2 > 0. Answers to
short sequences behind noise do not tell a slow rotation from omega^2 < 0, and a fit that is confined to rotations is
caught in a valley that leads to infinite weights.

The metric is J^T J of some of the sequences: with it conjugate gradients take few steps.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy.linalg

from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.fit.variable_projection import Examples, softmax_derivative
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.layers.rotary import RotaryLayer, Turns

SKETCHED = 3.0  # rows of the sketched metric, against the weights
FAR, NEAR = 1e-2, 1e-5  # share of the mean diagonal that is added to the metric: far from a layer damping shortens weak
# directions first; near it they are what is left, and count
RANK = 1e-9  # singular value of W, against its norm, below which it counts as zero
SEEN = 1e-10  # share of the largest eigenvalue of J^T J from which a direction counts as seen


class RotaryWeights(NamedTuple):
    """Weights of a rotary layer whose heads have one rank."""

    query: Array  # Q (m, d or d + 1, r)
    key: Array  # K (m, d or d + 1, r)
    generator: Array  # (m, r / 2, 3): (a, b, c) of X = [[a, b], [c, -a]] on the planes (f, f + r / 2)
    value: Array  # V (m, d, v)
    output: Array  # O (m, v, d)
    bias: Array  # c (d,)

    @classmethod
    def of(cls, layer: RotaryLayer) -> "RotaryWeights":
        """Return weights of a layer whose forms go on by turns, each turn brought to the nearest rotation of planes."""
        turns = layer.turns
        if turns is None:
            raise UsageError("the forms of this layer are listed offset by offset: a joint fit needs how they turn")
        planes = max((len(turn) + 1) // 2 for turn in turns.turn)
        rank = int(max(np.linalg.matrix_rank(one, tol=RANK * np.linalg.norm(one)) for one in layer.projection))
        heads = []
        for left, turn, first in zip(turns.left, turns.turn, turns.first, strict=True):
            basis, generator = _planes(turn, planes)
            heads.append((left @ basis, (np.linalg.pinv(basis) @ first).T, generator))
        query, key, generator = (np.array(part) for part in zip(*heads, strict=True))
        key = _evolve(key[:, None], _transpose(generator), np.full(key.shape[1], -1.0))[:, 0]
        if not (query[:, -1].any() or key[:, -1].any()):
            query, key = query[:, :-1], key[:, :-1]
        bias = np.zeros(layer.dim) if layer.bias is None else layer.bias
        return cls(query, key, generator, *cut_projection(layer.projection, rank), bias)

    def flat(self) -> Array:
        """Return all weights as one vector."""
        return np.concatenate([part.ravel() for part in self])

    def like(self, flat: Array) -> "RotaryWeights":
        """Return weights of the same shapes from one vector."""
        ends = np.cumsum([part.size for part in self])[:-1]
        return RotaryWeights(*(part.reshape(own.shape) for own, part in zip(self, np.split(flat, ends), strict=True)))

    def free(self, length: int) -> int:
        """Return the free parameters: the rank of the Jacobian on Gaussian sequences of `length` tokens."""
        dim = len(self.bias)
        count = int(np.ceil(1.5 * self.flat().size / (length * dim))) + 2
        x = np.random.default_rng(0).standard_normal((count, length, dim))
        spectrum = np.linalg.svd(RotaryTangent.at(Examples(x, x), self).jacobian(), compute_uv=False) ** 2
        return int((spectrum > SEEN * spectrum[0]).sum())

    def layer(self, offsets: int = 16) -> RotaryLayer:
        """Return the layer with merged weights."""
        heads, rows, rank = self.query.shape
        dim = len(self.bias)
        query, key = (np.pad(side, ((0, 0), (0, dim + 1 - rows), (0, 0))) for side in (self.query, self.key))
        identity = np.broadcast_to(np.eye(rank), (heads, 1, rank, rank))
        step = _evolve(identity, self.generator, np.ones(rank))[:, 0]
        first = step @ key.swapaxes(1, 2)
        turns = Turns(tuple(query), tuple(step), tuple(first), (np.zeros(rank),) * heads)
        forms = np.array([turns.form(offset) for offset in range(offsets)])
        return RotaryLayer(forms, self.value @ self.output, self.bias, turns)


@dataclass(frozen=True)
class RotaryTangent:
    """The layer at fixed weights: its residual on examples, and derivatives."""

    examples: Examples
    weights: RotaryWeights
    tokens: Array  # x~ (n, k, d or d + 1)
    sides: tuple[Array, Array]  # x~ Q and x~ K (m, n, k, r)
    turned: tuple[Array, Array]  # the same, brought to their positions
    pattern: Array  # attention weights (m, n, k, k)
    mean: Array  # (m, n, k, d): tokens under these weights
    residual: Array  # y - F(x) (n k, d)
    frozen: bool = False  # whether turns stay as they are
    ridge: float = FAR

    @classmethod
    def at(
        cls, examples: Examples, weights: RotaryWeights, frozen: bool = False, ridge: float = FAR
    ) -> "RotaryTangent":
        """Evaluate the layer on the examples."""
        x, frozen = examples.x, frozen or not weights.generator.any()
        count, length, dim = x.shape
        tokens = x if weights.query.shape[1] == dim else np.concatenate([x, np.ones((count, length, 1))], axis=2)
        places = np.arange(length, dtype=float)
        sides = tokens @ weights.query[:, None], tokens @ weights.key[:, None]
        query = _evolve(sides[0], weights.generator, places)
        key = _evolve(sides[1], _transpose(weights.generator), -places)
        logits = query @ key.swapaxes(2, 3) + np.triu(np.full((length, length), -np.inf), 1)
        pattern = softmax(logits)
        mean = pattern @ x
        answers = sum(mean[h] @ weights.value[h] @ weights.output[h] for h in range(len(query))) + weights.bias
        residual = (examples.y - answers).reshape(-1, dim)
        return cls(examples, weights, tokens, sides, (query, key), pattern, mean, residual, frozen, ridge)

    def move(self, change: Array) -> "RotaryTangent":
        """Return the same at weights that were changed."""
        return RotaryTangent.at(self.examples, self.weights.like(self.weights.flat() + change), self.frozen, self.ridge)

    @property
    def loss(self) -> float:
        """Squared residual relative to the variance of the labels."""
        return float(np.vdot(self.residual, self.residual)) / self.examples.power

    @property
    def layer(self) -> RotaryLayer:
        """The layer with merged weights."""
        return self.weights.layer()

    def forward(self, change: Array) -> Array:
        """Return the first-order change of the answers, (n k, d)."""
        own, by = self.weights, self.weights.like(change)
        x, (query, key) = self.examples.x, self.turned
        places = np.arange(x.shape[1], dtype=float)
        turn, back = own.generator, _transpose(own.generator)
        query_moved = _evolve(self.tokens @ by.query[:, None], turn, places)
        query_moved = query_moved + _sweep(self.sides[0], turn, places, by.generator)
        key_moved = _evolve(self.tokens @ by.key[:, None], back, -places)
        key_moved = key_moved + _sweep(self.sides[1], back, -places, _transpose(by.generator))
        logits = query_moved @ key.swapaxes(2, 3) + query @ key_moved.swapaxes(2, 3)
        through = softmax_derivative(self.pattern, logits) @ x
        inner = through @ own.value[:, None] + self.mean @ by.value[:, None]
        outer = inner @ own.output[:, None] + self.mean @ own.value[:, None] @ by.output[:, None]
        return (outer.sum(0) + by.bias).reshape(-1, x.shape[2])

    def vjp(self, rows: Array) -> Array:
        """Return J^T rows as one vector."""
        own, x = self.weights, self.examples.x
        heads = len(own.query)
        back = rows.reshape(x.shape)
        inner = back @ own.output[:, None].swapaxes(2, 3)  # (m, n, k, v)
        output = _gram(self.mean @ own.value[:, None], np.broadcast_to(back, (heads, *back.shape)))
        value = _gram(self.mean, inner)
        logits = softmax_derivative(self.pattern, inner @ own.value[:, None].swapaxes(2, 3) @ x.swapaxes(1, 2))
        query, key = self.turned
        rows_query, rows_key = logits @ key, logits.swapaxes(2, 3) @ query
        places = np.arange(x.shape[1], dtype=float)
        turn, back = own.generator, _transpose(own.generator)
        generator = _sweep_adjoint(self.sides[0], turn, places, rows_query)
        generator = generator + _transpose(_sweep_adjoint(self.sides[1], back, -places, rows_key))
        tokens = np.broadcast_to(self.tokens, (heads, *self.tokens.shape))
        by_query = _gram(tokens, _evolve(rows_query, back, places))  # the adjoint of e^{tX} is that of its transpose
        by_key = _gram(tokens, _evolve(rows_key, turn, -places))
        return RotaryWeights(by_query, by_key, (not self.frozen) * generator, value, output, rows.sum(0)).flat()

    def whiten(self, gradient: Array) -> Array:
        """Apply the inverse of the metric to a gradient."""
        solved: Array = scipy.linalg.cho_solve(self._metric, gradient)
        if self.frozen:
            self.weights.like(solved).generator[:] = 0.0  # a view
        return solved

    def jacobian(self) -> Array:
        """Return the Jacobian (n k d, weights)."""
        own, x = self.weights, self.examples.x
        count, length, dim = x.shape
        places = np.arange(length, dtype=float)
        turn, back = own.generator, _transpose(own.generator)
        rank = own.query.shape[2]
        units = np.eye(3)
        swept = [
            [
                _sweep(side, form, where, np.broadcast_to(direction, form.shape))
                for direction in (units if form is turn else _transpose(units))
            ]
            for side, form, where in zip(self.sides, (turn, back), (places, -places), strict=True)
        ]
        heads = []
        for head in range(len(own.query)):
            query, key = (side[head] for side in self.turned)  # (n, k, r)
            weights = self.pattern[head]
            centred = x[:, None] - self.mean[head][:, :, None]  # (n, r, j, d)
            by_logit = weights[..., None] * (centred @ (own.value[head] @ own.output[head]))  # (n, r, j, o)
            flat = np.broadcast_to(key[:, None], (count, length, length, rank)).swapaxes(1, 2)
            keys = _evolve(flat.reshape(1, -1, length, rank), back[head][None], places)
            keys = keys.reshape(count, length, length, rank).swapaxes(1, 2)  # seen from row r: (n, r, j, f)
            flat = np.broadcast_to(query[:, :, None], (count, length, length, rank))
            queries = _evolve(flat.reshape(1, -1, length, rank), turn[head][None], -places)
            queries = queries.reshape(count, length, length, rank)  # seen from key j
            inner = np.einsum("nrjo,nrjf->nrof", by_logit, keys)
            by_query = np.einsum("nra,nrof->nroaf", self.tokens, inner)
            by_key = np.einsum("nrjo,njb,nrjf->nrobf", by_logit, self.tokens, queries, optimize=True)
            half = rank // 2
            logits = []
            for by_query_side, by_key_side in zip(*swept, strict=True):
                both = by_query_side[head][:, :, None] * key[:, None] + query[:, :, None] * by_key_side[head][:, None]
                logits.append(both[..., :half] + both[..., half:])
            by_generator = np.einsum("nrjo,nrjfe->nrofe", by_logit, (not self.frozen) * np.stack(logits, axis=-1))
            by_value = np.einsum("nra,vo->nroav", self.mean[head], own.output[head])
            by_output = np.einsum("nrv,op->nrovp", self.mean[head] @ own.value[head], np.eye(dim))
            shape = (count * length * dim, -1)
            heads.append([one.reshape(shape) for one in (by_query, by_key, by_generator, by_value, by_output)])
        kinds = [np.concatenate(kind, axis=1) for kind in zip(*heads, strict=True)]
        return np.concatenate([*kinds, np.tile(np.eye(dim), (count * length, 1))], axis=1)

    @cached_property
    def _metric(self) -> tuple[Array, bool]:
        """Cholesky factor of J^T J, scaled up from some of the sequences."""
        count, length, dim = self.examples.x.shape
        some = min(count, int(np.ceil(SKETCHED * self.weights.flat().size / (length * dim))))
        jacobian = RotaryTangent.at(self.examples.take(np.arange(some)), self.weights).jacobian()
        gram = jacobian.T @ jacobian * (count / some)
        gram[np.diag_indices_from(gram)] += self.ridge * np.trace(gram) / len(gram)
        return scipy.linalg.cho_factor(gram, lower=True)


def cut_projection(projection: Array, rank: int) -> tuple[Array, Array]:
    """Return V (m, d, rank) and O (m, rank, d) whose products are nearest to W (m, d, d)."""
    u, sizes, v = np.linalg.svd(projection)
    root = np.sqrt(sizes[:, :rank])
    return u[:, :, :rank] * root[:, None], root[:, :, None] * v[:, :rank]


def _planes(turn: Array, planes: int) -> tuple[Array, Array]:
    """Return B (r, 2 planes) and generators (planes, 3) with B e^X B^+ near `turn`."""
    values, vectors = np.linalg.eig(turn)
    turning = [i for i in np.argsort(-values.imag) if values[i].imag > 0]
    still = [i for i in np.argsort(-values.real) if values[i].imag == 0]
    basis, generator = np.zeros((len(turn), 2 * planes)), np.zeros((planes, 3))
    for plane, i in enumerate(turning):
        basis[:, plane], basis[:, planes + plane] = vectors[:, i].real, vectors[:, i].imag
        generator[plane, 1:] = np.angle(values[i]), -np.angle(values[i])
    for plane in range(len(turning), planes):
        pair, still = still[:2], still[2:]
        for side, i in enumerate(pair):
            basis[:, side * planes + plane] = vectors[:, i].real
        if len(pair) == 2 and values[pair[1]].real > 0:
            generator[plane, 0] = np.log(values[pair[0]].real / values[pair[1]].real) / 2
    return basis, generator


def _transpose(generator: Array) -> Array:
    """Return X^T."""
    return generator[..., [0, 2, 1]]


def _apply(rows: Array, generator: Array) -> Array:
    """Return rows times X, plane by plane, rows (m, n, k, r)."""
    half = rows.shape[-1] // 2
    one, two = rows[..., :half], rows[..., half:]
    a, b, c = (generator[:, None, None, :, place] for place in range(3))
    return np.concatenate([a * one + c * two, b * one - a * two], axis=-1)


def _cosine_and_sine(generator: Array, places: Array) -> tuple[Array, Array, Array, Array]:
    """Return cos(omega t), sin(omega t) / omega and their derivatives by omega^2, each (m, 1, k, r / 2)."""
    square = -(generator[..., 0] ** 2) - generator[..., 1] * generator[..., 2]
    square, t = square[:, None, None, :], places[:, None]
    small = np.abs(square) < 1e-12
    safe = np.where(small, 1e-12, square)
    root = np.sqrt(safe.astype(complex))
    cosine, sine = np.cos(root * t).real, (np.sin(root * t) / root).real
    series = np.abs(safe) * t**2 < 1e-4
    bent = np.where(series, -(t**3) / 6 + safe * t**5 / 60, (t * cosine - sine) / (2 * safe))
    return cosine, sine, -t * sine / 2, bent


def _repeat(values: Array) -> Array:
    return np.concatenate([values, values], axis=-1)


def _evolve(rows: Array, generator: Array, places: Array) -> Array:
    """Return rows (m, n, k, r) times e^{tX}, t the places (k,)."""
    cosine, sine, _, _ = _cosine_and_sine(generator, places)
    return _repeat(cosine) * rows + _repeat(sine) * _apply(rows, generator)


def _sweep(rows: Array, generator: Array, places: Array, change: Array) -> Array:
    """Return by how much rows times e^{tX} move with X."""
    _, sine, cosine_by, sine_by = _cosine_and_sine(generator, places)
    square = -2 * generator[..., 0] * change[..., 0]
    square = square - generator[..., 1] * change[..., 2] - generator[..., 2] * change[..., 1]
    moved = _repeat(square[:, None, None, :] * cosine_by) * rows
    moved = moved + _repeat(square[:, None, None, :] * sine_by) * _apply(rows, generator)
    return moved + _repeat(sine) * _apply(rows, change)


def _sweep_adjoint(rows: Array, generator: Array, places: Array, by_rows: Array) -> Array:
    """Return the adjoint of `_sweep`: derivatives (m, r / 2, 3) by X, from those by the rows."""
    found = []
    half = rows.shape[-1] // 2
    for direction in np.eye(3):
        moved = _sweep(rows, generator, places, np.broadcast_to(direction, generator.shape))
        both = np.einsum("mnkr,mnkr->mr", moved, by_rows)
        found.append(both[:, :half] + both[:, half:])
    return np.stack(found, axis=-1)


def _gram(left: Array, right: Array) -> Array:
    """Return the sums over rows of left^T right, (m, a, b)."""
    heads = len(left)
    return left.reshape(heads, -1, left.shape[-1]).swapaxes(1, 2) @ right.reshape(heads, -1, right.shape[-1])

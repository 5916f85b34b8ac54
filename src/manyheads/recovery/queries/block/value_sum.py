r"""Sum of the projections of a block, from sequences of one repeated token.

Where all tokens of a sequence are z, all values are equal, and what moving one of them changes in the weights changes
no answer. With D_r = A_r - N(u_r) W of `token_wise`, the derivative of row r with respect to the first token, along e
at right angles to z, is

.. math:: dD_r = \sum_i a_i(r)\, e W_i - P du_r W, \qquad du_r = dD_r \text{ (one after the other) or } 0
          \text{ (parallel)},

a_i(r) the weight of head i on a token r places back, P the derivative of the norm. With w such that
sum_r w_r a_i(r) = 1 for every head, p = sum_r w_r dD_r gives (e - P p) W = p, or e W = p: linear equations for W.

Without positions a = 1/2 in the second row. With positions, the table of dD_r over rows r and places r - t has rank one
for each head, a_i(r, t) = u_i(r) b_i(t), whatever the score is, and (I + P W)^-1 on its right: two rows are a pencil
with the heads as its eigenvectors. The place of a row's own token is left out, because its value moves too; the scale
follows from 1/u_i(r) - 1/u_i(r - 1) = b_i(r). Derived here.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.queries.block.token_wise import TokenWise
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, NotALayer, RankBudgetError

EIGHTH = np.array([4 / 5, -1 / 5, 4 / 105, -1 / 280])  # central differences of order 8
SIXTH = np.array([3 / 4, -3 / 20, 1 / 60, 0.0])
STEPS = (0.1, 0.05, 0.02, 0.01, 0.005)  # radians
EXTRA = 4  # equations beyond the unknowns, of a second token
LEFT = 1e-5  # of the equations, relative
OFFSETS, MOST = 8, 32  # offsets of the table, at first and at most; heads must be fewer by two
ROUGH = 1e-4  # relative error of rank-one tables, and of their scale
TRIES = 5  # tokens z that are tried
SHORT = np.logspace(1, -7, 17)  # sizes of the token that shows epsilon
SHRUNK = 1e-3  # how much shorter than others a token is chosen to be behind the norm
STEEPER = np.sqrt(2.0) ** np.arange(4)  # sizes from which its epsilon is extrapolated


@dataclass(frozen=True)
class MovedToken:
    """Asks about sequences of one token z in which one place is moved."""

    block: TokenWise
    axis: Array  # z, of norm one (d,)
    step: float

    @property
    def size(self) -> float:
        """Norm of the tokens."""
        return float(self.block.scale * len(self.axis) ** 0.5)

    def tangents(self, drawn: Array) -> Array:
        """Return an orthonormal basis at right angles to z of what vectors (a, d) span."""
        return np.linalg.qr((drawn - np.outer(drawn @ self.axis, self.axis)).T)[0].T

    def derivatives(self, directions: Array, place: int, length: int, rows: tuple[int, ...]) -> tuple[Array, Array]:
        """Return dD (a, rows, d) along unit vectors (a, d), and those of two orders less."""
        dim = len(self.axis)
        angles = self.step * np.arange(1, 5)
        angles = np.concatenate([angles, -angles])
        x = np.tile(self.size * self.axis, (len(angles), len(directions), length, 1))
        turned = np.cos(angles)[:, None, None] * self.axis + np.sin(angles)[:, None, None] * directions
        x[:, :, place] = self.size * turned
        answers = self.block.differences(x.reshape(-1, length, dim), rows)[0]
        answers = answers.reshape(2, 4, len(directions), len(rows), dim)
        odd = (answers[0] - answers[1]) / (self.step * dim**0.5)
        fine, coarse = (np.tensordot(weights, odd, 1) for weights in (EIGHTH, SIXTH))
        return fine, coarse


def read_value_sum(block: TokenWise, positions: bool, rng: Generator, figures: Figures) -> tuple[Array, Normalization]:
    """Return W and the norm; `figures` takes what is left of the equations."""
    dim = block.block.dim
    centre = np.eye(dim) - np.full((dim, dim), block.centred / dim)
    space = np.linalg.svd(rng.standard_normal((dim, dim)) @ centre)[2][: dim - block.centred]
    readings: list[_Reading] = []
    for _ in range(TRIES):
        axis = rng.standard_normal(len(space)) @ space
        token = _tune(MovedToken(block, axis / np.linalg.norm(axis), STEPS[0]), space, rng)
        reading = _read_weights(token, space, rng) if positions else _Reading(token, (1,), np.array([2.0]))
        readings += [] if reading is None else [reading]
        if len(readings) == 2:
            break
    else:
        what = f"{TRIES} repeated tokens show no weights of heads: no scores of offsets, or coarse answers"
        raise FitError(what, len(readings), 2.0)
    first, second = readings
    extra = rng.standard_normal((min(EXTRA, len(space) - 2), len(space))) @ space
    along = np.concatenate([first.token.axis[None], extra])
    drawn = rng.standard_normal((len(space) - 1, len(space))) @ space
    parts = [
        first.equations(first.token.tangents(drawn), centre),
        second.equations(second.token.tangents(along), centre),
    ]
    equations, changes = (np.concatenate(part) for part in zip(*parts, strict=True))
    coordinates, *_ = np.linalg.lstsq(equations @ space.T, changes, rcond=None)
    rest = float(np.linalg.norm(equations @ space.T @ coordinates - changes) / np.linalg.norm(changes))
    figures |= {"equations": len(equations), "left": rest, "step": readings[0].token.step}
    why = "answers to a repeated token contradict each other: say rotary=True or scores=True, or no attention"
    NotALayer.if_above(rest, LEFT, why)
    projection: Array = space.T @ coordinates
    epsilon = _read_epsilon(readings[0], projection)
    figures["epsilon"] = epsilon
    projection *= np.sqrt(1 + epsilon / block.scale**2)  # tokens were taken to have no epsilon
    return projection, Normalization(block.centred, epsilon)


def _read_epsilon(reading: "_Reading", projection: Array) -> float:
    r"""Return the epsilon of the norm from a repeated token whose first copy is short.

    Behind the norm it is shorter by the factor q = 1 + phi, and sum_r w_r (A_r - N(z) W) = phi N(z) W + O(phi^2). With
    tokens of size t and s, epsilon = s^2 t^2 (1 - q^2) / (q^2 s^2 - t^2); the rest is a series in 1/t^2.
    """
    token, block = reading.token, reading.token.block
    norm, scale = Normalization(block.centred, np.finfo(float).tiny), block.scale
    value = len(token.axis) ** 0.5 * token.axis @ projection

    def shrinkage(sizes: Array) -> Array:
        x = np.tile(token.size * token.axis, (len(sizes), reading.rows[-1] + 1, 1))
        x[:, 0] *= sizes[:, None] / scale
        moved, base = block.differences(x, reading.rows)
        moved += (norm(base) - norm(x[:, reading.rows])) @ projection
        return np.einsum("r,nrd,d->n", reading.weights, moved, value) / (value @ value)

    phi = shrinkage(SHORT)
    if np.abs(phi).max() < 1e-2 * SHRUNK:
        return 0.0
    size = SHORT[int(np.argmin(np.abs(np.log(np.abs(phi) / SHRUNK + np.finfo(float).tiny))))]
    sizes = size * STEEPER
    q = 1 + shrinkage(sizes)
    found = (scale * sizes) ** 2 * (1 - q**2) / ((q * scale) ** 2 - sizes**2)
    series = np.linalg.solve((1 / STEEPER[:, None] ** 2) ** np.arange(len(STEEPER)), found)
    return max(float(series[0]), 0.0)


def _tune(token: MovedToken, space: Array, rng: Generator) -> MovedToken:
    """Return the token with the step at which differences of two orders agree best."""
    direction = token.tangents(rng.standard_normal((1, len(space))) @ space)
    tried = []
    for step in STEPS:
        one = MovedToken(token.block, token.axis, step)
        fine, coarse = one.derivatives(direction, 0, 2, (1,))
        tried.append((float(np.linalg.norm(fine - coarse)), one))
    return min(tried, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class _Reading:
    """Weights w_r of rows with sum_r w_r a_i(r) = 1 for every head."""

    token: MovedToken
    rows: tuple[int, ...]
    weights: Array

    def equations(self, directions: Array, centre: Array) -> tuple[Array, Array]:
        """Return e - P p and p (a, d) along directions e."""
        found = self.token.derivatives(directions, 0, self.rows[-1] + 1, self.rows)[0]
        change = np.einsum("r,ard->ad", self.weights, found)
        if self.token.block.parallel:
            return directions, change
        own = change @ centre / self.token.block.scale
        return directions - own + np.outer(own @ self.token.axis, self.token.axis), change


def _read_weights(token: MovedToken, space: Array, rng: Generator) -> _Reading | None:
    """Return w at a token where the weights depend on positions; None where its heads do not split."""
    offsets = OFFSETS
    while True:
        table, error = _read_table(token, offsets, space, rng)
        flat = table.reshape(-1, table.shape[-1])
        spectrum, frame = np.linalg.svd(flat, full_matrices=False)[1:]
        heads = gap_rank(spectrum, max(1e-7, 10 * error * len(flat) ** 0.5 / spectrum[0]))
        FitError.if_below(heads, 1, "moved tokens change no answer: no head reads the tokens")
        if heads <= offsets - 2:
            break
        offsets *= 2
        if offsets > MOST:
            what = f"a moved token shows {heads} dimensions, more heads than {MOST} offsets show"
            raise RankBudgetError(what, heads, MOST - 2)
    small = table @ frame[:heads].T  # (r, t, direction, m)
    one, two = (small[row].reshape(-1, heads) for row in (-1, offsets))
    values, vectors = np.linalg.eig(np.linalg.lstsq(one, two, rcond=None)[0])
    if np.abs(values.imag).max() > 1e-6 * np.abs(values).max():
        return None
    shares = [_share(each, offsets) for each in np.moveaxis(small @ vectors.real, -1, 0)]
    found = [share for share in shares if share is not None]
    if len(found) < heads:
        return None
    few = min(offsets, heads + 3)
    weights = np.linalg.lstsq(np.array(found)[:, :few], np.ones(heads), rcond=None)[0]
    return _Reading(token, tuple(range(1, few + 1)), weights)


def _read_table(token: MovedToken, offsets: int, space: Array, rng: Generator) -> tuple[Array, float]:
    """Return dD_r (rows, t, 2, d) for a token moved t = 1 .. offsets places back, zero where t > r, and its error."""
    length = 2 * offsets
    directions = token.tangents(rng.standard_normal((2, len(space))) @ space)
    table, error = np.zeros((length, offsets, 2, len(token.axis))), 0.0
    for place in range(length - 1):
        rows = tuple(range(place + 1, min(place + offsets + 1, length)))
        fine, coarse = token.derivatives(directions, place, length, rows)
        error = max(error, float(np.abs(fine - coarse).max()))
        for column, row in enumerate(rows):
            table[row, row - place - 1] = fine[:, column]
    return table, error


def _share(table: Array, offsets: int) -> Array | None:
    """Return a(r) = u(r) b(r) of a head in rows 1 .. offsets, from its table u(r) b(t) v (rows, t, 2); None if none."""
    size, right = np.linalg.svd(np.moveaxis(table[offsets:], 2, 1).reshape(-1, offsets))[1:]
    b = right[0] * np.sign(right[0].sum())
    seen = np.arange(1, offsets + 1) <= np.arange(1, len(table))[:, None]
    rise = np.einsum("rta,t,rt->ra", table[1:], b, seen) / (seen * b**2).sum(1)[:, None]  # u(r) v
    u = (rise @ np.linalg.svd(rise, full_matrices=False)[2][0])[:offsets]
    u *= np.sign(u.sum())
    if size[1] > ROUGH * size[0] or (b <= 0).any() or (u <= 0).any():
        return None
    gain = np.diff(1 / u)  # of rows 2 .. offsets: b(r), but for one factor
    factor = float(gain @ b[1:] / (b[1:] @ b[1:]))
    if np.linalg.norm(gain - factor * b[1:]) > ROUGH * (np.linalg.norm(gain) + 1 / u[0]):
        return None
    return factor * u * b

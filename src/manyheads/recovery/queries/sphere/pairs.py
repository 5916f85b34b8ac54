r"""Pairs of normalized tokens with a fixed difference, and copies of the query.

Behind a normalization only tokens of norm sqrt d are seen (of mean zero, for a LayerNorm). Two of them have the
difference v if and only if they are

.. math:: w + v/2, \quad w - v/2, \qquad w \perp v,\ |w|^2 = d - |v|^2/4 .

With v in one half of the space and w in the other, and all v of one norm, the same w serve every v. After the token
w + v/2 come copies of the query w - v/2. Row k of this one sequence sees k of them, and

.. math:: y_k = (w - v/2) W_S + c + \sum_i \frac{a_i}{a_i + k} v W_i, \qquad
          \ln a_i = (w - v/2)^\top \Theta_i v + \beta_i^\top v

so the number of copies shifts the gates of all heads by ln k. As a function of k this is rational: with
z_k = y_k - (w - v/2) W_S - c and z_0 = v W_S,

.. math:: k z_k = (z_0 - z_k) M, \qquad M = \sum_i a_i w_i^+ w_i,\quad w_i = v W_i

is linear in M, whose eigenvalues are the a_i and whose left eigenvectors are the w_i: one sequence of m + 1 tokens
shows m heads. Without a causal mask every number of copies is a sequence of its own. Several queries share the w_i; the
net of all of them has one free logit per head and query. A head that ignores the tokens is one with a_i = 1. Derived
here.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Ask, Figures, Generator
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.queries.nets.sigmoid_network import (
    EPS,
    EXACT,
    NetDesign,
    PairNets,
    fit_nets,
    net_amplification,
    read_gates,
)
from manyheads.recovery.queries.projection_sum import Sums
from manyheads.recovery.refusals import FitError, NotALayer, RankBudgetError

FIRST = 10  # queries at the first probe
STARTS = 12  # queries whose pencils are tried
LOSS = 8.0  # error of the values, beside that with all queries and copies, up to which these are left out
SPARE = 2  # rows beyond those that determine a net, in the dimensions of the values
SMALL = (1e-2, 3e-3)  # root mean squares of the tokens that show epsilon
WELL_SEPARATED = 100.0  # amplification of noise by a net below which no other difference is tried


@dataclass(frozen=True)
class SpherePairs:
    """Asks about pairs on the sphere."""

    ask: Ask  # the oracle
    sums: Sums  # W_S (d, d), acting on tokens of the sphere, and c
    # Orthonormal rows (a, d) and (b, d) that span the halves of the differences v and of the w
    near: Array
    far: Array
    noise: float = EPS  # relative error of an answer
    causal: bool = True

    @property
    def radius(self) -> float:
        """Norm of tokens and differences, sqrt d."""
        return float(np.sqrt(self.near.shape[1]))

    @property
    def repeats(self) -> int:
        """Factor of queries and copies for answers with noise, relative to exact ones."""
        return 1 if self.noise <= EXACT else 3

    def probe(self, direction: Array) -> Array:
        """Return differences (..., d) along directions (..., a) of the first half."""
        v = direction @ self.near
        return v * (self.radius / np.linalg.norm(v, axis=-1, keepdims=True))

    def queries(self, count: int, rng: Generator) -> Array:
        """Draw w (n, d), of norm sqrt(3 d / 4)."""
        w = rng.standard_normal((count, len(self.far))) @ self.far
        return w * (np.sqrt(0.75) * self.radius / np.linalg.norm(w, axis=1, keepdims=True))

    def respond(self, w: Array, v: Array, copies: int) -> Array:
        """Return z (b, n, copies, d) at differences v (b, d) and w (n, d)."""
        own, other = w - v[:, None] / 2, w + v[:, None] / 2  # (b, n, d)
        shape = (len(v) * len(w), 1, w.shape[1])
        x = np.concatenate([other.reshape(shape), np.repeat(own.reshape(shape), copies, axis=1)], axis=1)
        if self.causal:
            rows = self.ask(x, read="all")[:, 1:]
        else:  # every row sees all copies: one sequence for each number of them
            rows = np.stack([self.ask(x[:, : k + 1], read="last") for k in range(1, copies + 1)], axis=1)
        answers = rows.reshape(len(v), len(w), copies, -1)
        return answers - self.sums.read(own)[:, :, None]

    @staticmethod
    def design(queries: int, copies: int) -> NetDesign:
        """Return the net of (query, copies) rows: one free logit per query."""
        features = np.repeat(np.eye(queries), copies, axis=0)
        return NetDesign.of(features, np.tile(np.log(np.arange(1, copies + 1)), queries))


@dataclass(frozen=True)
class SphereHeads:
    """The heads at the first difference: direction (a,), w (n, d), copies, net, error of its values per noise."""

    direction: Array
    queries: Array
    copies: int
    net: PairNets
    amplification: Array
    allowed: float

    @property
    def worst(self) -> float:
        """Largest amplification of noise of a head."""
        return float(self.amplification.max())

    def figures(self) -> Figures:
        """Return what a report shows of this stage."""
        figures = {"heads": len(self.net.values), "residual": float(self.net.residual), "amplification": self.worst}
        return figures | {"queries": len(self.queries), "copies": self.copies}


def find_sphere_heads(pairs: SpherePairs, rng: Generator, tries: int = 3) -> SphereHeads:
    """Find the heads at a random difference, from the pencils of its queries; at the best of a few."""
    residual, best = np.inf, None
    for _ in range(tries):
        direction = rng.standard_normal(len(pairs.near))
        v, w, copies = pairs.probe(direction), pairs.queries(FIRST * pairs.repeats, rng), 6 + 2 * pairs.repeats
        while True:
            answers = pairs.respond(w, v[None], copies)[0]  # (n, copies, d)
            flat = answers.reshape(-1, answers.shape[2])
            _, spectrum, axes = np.linalg.svd(flat, full_matrices=False)
            level = max(pairs.noise, 2 * EPS) * np.sqrt(np.mean((w @ pairs.sums.projection) ** 2)) * 4
            heads = int((spectrum > max(8 * level * (len(flat) ** 0.5 + len(v) ** 0.5), 1e-11 * spectrum[0])).sum())
            RankBudgetError.if_above(
                heads, max(4, len(v) // 2), f"the answers to pairs have {heads} dimensions of {len(v)}: too many"
            )
            FitError.if_below(heads, 1, "the answers to pairs are rounding: no head reads the tokens")
            if copies >= heads + 2 and len(w) >= heads + 2:
                break
            copies = heads + 2
            w = np.concatenate([w, pairs.queries(max(heads + 2 - len(w), 0), rng)])
        allowed = max(10 * level * np.sqrt(flat.size) / np.linalg.norm(flat), 1e-11)
        starts = _starts(answers @ axes[:heads].T, v @ pairs.sums.projection @ axes[:heads].T)
        if not len(starts):
            continue
        design = pairs.design(len(w), copies)
        nets = fit_nets(design, np.repeat(flat[None], len(starts), axis=0), starts, iterations=100)
        net = nets.one(int(np.argmin(nets.residual)))
        residual = min(residual, float(net.residual))
        if net.residual > allowed:
            continue
        found = _thin_out(pairs, direction, w, answers, net, allowed)
        if best is None or (heads, -found.worst) > (len(best.net.values), -best.worst):
            best = found
        if best.worst < WELL_SEPARATED:
            break
    if best is not None:
        return best
    raise FitError("no pencil of copies of a query fits: no attention behind a norm, or noise", residual, allowed)


def _thin_out(
    pairs: SpherePairs, direction: Array, w: Array, answers: Array, net: PairNets, allowed: float
) -> SphereHeads:
    """Keep as few queries and copies as the net needs at the next differences, where the sum of its values is known."""
    heads = len(net.values)
    copies = min(answers.shape[1], max(4, heads // 2 + 2) * pairs.repeats)
    kept = min(len(w), (heads + 3) * pairs.repeats)
    if pairs.repeats == 1:
        whole = net_amplification(pairs.design(len(w), answers.shape[1]), net)[1]
        counts = [answers.shape[1]] if pairs.causal else range(2, answers.shape[1] + 1)  # rows of one call are free
        ways = [(n * (1 if pairs.causal else c), n, c) for n in range(1, len(w) + 1) for c in counts]
        for _, queries, shown in sorted(ways):
            if queries * (shown - 1) < heads + SPARE - 1:
                continue
            slopes = PairNets(net.slopes[:, :queries], net.values, net.residual)
            if (net_amplification(pairs.design(queries, shown).with_sum(), slopes)[1] <= LOSS * whole).all():
                kept, copies = queries, shown
                break
    total = pairs.probe(direction) @ pairs.sums.projection
    part = np.concatenate([answers[:kept, :copies].reshape(-1, answers.shape[2]), total[None]])
    design = pairs.design(kept, copies).with_sum()
    fewer = fit_nets(design, part, net.slopes[:, :kept])
    gain = net_amplification(design, fewer)[1]
    return SphereHeads(direction, w[:kept], copies, fewer, gain, max(allowed, 5 * float(fewer.residual)))


def _starts(answers: Array, whole: Array) -> Array:
    """Return starting logits (b, m, n) from the pencils of answers (n, copies, m), one per query, that are real."""
    count, copies, _ = answers.shape
    number, starts = np.arange(1, copies + 1), []
    weight = (1 / (1 + number))[:, None]
    for z in answers[: min(count, STARTS)]:
        pencil = np.linalg.lstsq(weight * (whole - z), weight * number[:, None] * z, rcond=None)[0]
        odds, frame = np.linalg.eig(pencil.T)
        if np.abs(odds.imag).max() > 1e-3 * np.abs(odds).max() or np.linalg.cond(frame) > 1e10:
            continue
        shares = np.linalg.solve(frame.real, whole)  # whole = sum of the w_i
        values = (frame.real * shares).T  # (m, m)
        if np.linalg.cond(values) > 1e12:
            continue
        starts.append(read_gates(answers @ np.linalg.inv(values), np.log(number), 1e-4).T)
    return np.array(starts)


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
        raise NotALayer(
            "answers to short tokens are those of no LayerNorm or RMSNorm of any epsilon", abs(second - first), doubt
        )
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
    NotALayer.if_above(
        rest / np.linalg.norm(asked_answer - bias), loose, "the answer to a token on the sphere is not affine in it"
    )
    return Sums(projection, bias), norm, basis

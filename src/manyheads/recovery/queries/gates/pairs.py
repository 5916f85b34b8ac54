r"""Pairs of tokens at one probe, stage S1: the number of heads, and the gates and values of each.

A query q sees some copies of the token q + v, its neighbour by the probe v, and of itself. Softmax then has one number
per head, and copies move it:

.. math:: F(\underbrace{q + v, \dots}_{j}, \underbrace{q, \dots}_{k})_{last} = q W_S + c
    + \sum_i \sigma(l_i - \ln(k/j))\, v W_i, \qquad l_i = q^\top \Theta_i v + \beta_i^\top v

The last row of every prefix of a causal sequence is such an answer, so one sequence with `after` copies of q shows the
same logits at `after` shifts s = ln(k/j). Taken off what a head without logits would give, sigma(-s) v W_S, the answers
are a net of centred units u(l, s) = sigma(l - s) - sigma(-s) with values C_i = v W_i: heads that ignore the tokens
leave it, their values being what the others lack in sum_i C_i = v W_S. Unlike a single shift, two shifts determine the
signs of all heads.

Where all tokens see each other the rows at q + v are read too: the same values at the logits
(q + v)^T Theta_i v + beta_i^T v.

Nothing is assumed of the logits at different queries: each is a parameter of its own. With K shifts and m heads, n
queries give n K m equations for n m logits and m^2 coordinates of values, so that n of the order of m is enough,
whatever the dimension.

Jacobians in q at two points, or at one point with two shifts, share their factors: J = E diag(du_i/dl) T. Their pencil
has the columns of E, the directions of the values, as eigenvectors (Jennrich's method). Amplitudes follow in closed
form, because the ratio of the answers at two shifts determines the logit.

References
----------
Harshman (1970), Foundations of the PARAFAC procedure, UCLA Working Papers in Phonetics 16 (Jennrich's method). The
pairs, the shifts by copies and the centred net are derived and measured here.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from manyheads.recovery._types import Array, Ask, Figures, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.gates.pencils import Pencils, start_net
from manyheads.recovery.queries.nets.sigmoid_network import EPS, NetDesign, PairNets, fit_nets
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.refusals import FitError

# Scales of the queries, in units of the scale at which logits are about one: spread, so that uneven heads show
SCALES = (1.0, 2.0, 1.5, 3.0)
QUERY = 0.55  # norm of a query, at most, in units of the largest norm: probes have up to 0.4 of it
PROBES = 2  # probes at which heads are looked for; what is no layer at one is none at another
FIRST = 6  # rows at which heads are counted first; there are more where as many show
MOST = 3300  # unknown logits of one fit, heads times queries: a second or two for each step of the fit
PROMISING = 0.03  # relative residual after fifteen steps below which a fit is finished; right starts are far below it
SEEN = 8.0  # a singular value counts as a head from this multiple of the largest one that noise alone would have
Sizes = tuple[float, ...]


def repeat_pair(first: Array, second: Array, j: int, k: int) -> Array:
    """Return sequences (n, j + k, d) of j copies of the one token (n, d) and k of the other."""
    return np.repeat(np.stack([first, second], axis=1), (j, k), axis=1)


@dataclass(frozen=True)
class Pairs:
    """Asks about pairs and takes off what needs no heads."""

    oracle: Ask  # called as ``oracle(x, read=...)``
    sums: Sums  # W_S and c
    # Copies of q + v, and of q. Not causal: two or three sequences of before + after tokens take the place of prefixes.
    before: int = 1
    after: int = 4
    causal: bool = True  # whether every prefix of a sequence is a sequence
    noise: float = EPS  # error of the oracle's answers relative to their token-dependent part
    # Sizes of the queries that count the heads, in units of the scale at which logits are about one
    scales: Sizes = SCALES
    reach: float = np.inf  # largest norm of a token
    # Whether the rows at q + v are read too, where every row sees all tokens: the same heads at other logits
    both: bool = False
    # Whether queries of every size may be asked; else Jacobians at two of them do not share their factors
    scaled: bool = True
    room: float = np.inf  # dimensions in which probes may be moved, where these are not all
    middle: bool = False  # whether the shift zero is asked too, where only last rows of two sequences would be

    @classmethod
    def within(
        cls,
        oracle: Oracle,
        sums: Sums,
        before: int,
        after: int,
        noise: float,
        scales: Sizes = SCALES,
        both: bool = False,
    ) -> "Pairs":
        """Return pairs of an oracle, with so many copies as the server's longest sequence has room for."""
        room = oracle.longest
        if before + after > room:
            before, after = 1, int(min(after, room - 1))
        reach = oracle.limits.reach
        return cls(oracle, sums, before, after, oracle.causal, noise, scales, reach, both, middle=both)

    def probe(self, rng: Generator, dim: int) -> Array:
        """Draw a probe of norm sqrt(d), or of a third of the largest norm."""
        probe = rng.standard_normal(dim)
        return probe * (min(np.sqrt(dim), self.reach / 3) / np.linalg.norm(probe))

    def at(self, probe: Array, moves: Array) -> Array:
        """Return probes (b, d) at displacements from one."""
        return probe + moves

    def directions(self, rng: Generator, dim: int, bases: int) -> Array:
        """Draw orthonormal bases of directions in which probes may be moved, one after the other."""
        return np.concatenate([np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(bases)])

    def pair(self, queries: Array, probes: Array) -> tuple[Array, Array]:
        """Return the tokens q + v and q (b, n, d) of queries (b, n, d) and probes (b, d)."""
        return queries + probes[:, None], queries

    def beside(self, point: Array, steps: Array, probe: Array) -> Array:
        """Return the queries on both sides of one (d,), at steps (n, d)."""
        return np.concatenate([point + steps, point - steps])

    def shortened(self, queries: Array) -> Array:
        """Return queries (n, d) that leave room for a probe below the largest norm."""
        norms = np.maximum(np.linalg.norm(queries, axis=-1, keepdims=True), np.finfo(float).tiny)
        return queries * np.minimum(1.0, QUERY * self.reach / norms)

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Copies (j, k) of q + v and of q that the last rows see."""
        if self.causal:
            return tuple((self.before, k) for k in range(1, self.after + 1))
        length = max(3, self.before + self.after)  # two shifts of opposite signs
        if not self.middle or length < 4:
            return (length - 1, 1), (1, length - 1)
        half = length // 2
        return (2 * half - 1, 1), (half, half), (1, 2 * half - 1)

    @property
    def views(self) -> int:
        """Rows of a sequence with logits of their own."""
        return 2 if self.both and not self.causal else 1

    @property
    def shifts(self) -> Array:
        """Shifts s = ln(k / j) of all logits, ascending."""
        return np.array([np.log(k / j) for j, k in self.copies])

    def design(self, queries: int) -> NetDesign:
        """Return the design of the net: one free logit per query, all shifts; rows (query, shift)."""
        features = np.repeat(np.eye(queries), len(self.copies), axis=0)
        return NetDesign.of(features, np.tile(self.shifts, queries), centred=True)

    def respond(self, queries: Array, probes: Array) -> Array:
        """Return the centred answers (b, n, K, d) of queries (n, d), or (b, n, d), at probes (b, d)."""
        probes = np.atleast_2d(probes)
        queries = np.broadcast_to(queries, (len(probes), *queries.shape[-2:]))
        count, dim = queries.shape[0] * queries.shape[1], queries.shape[2]
        near, own = (part.reshape(count, dim) for part in self.pair(queries, probes))
        # The difference that the layer sees is the rounded one.
        moved = (near - own).reshape(*queries.shape)
        if self.causal:
            tokens = repeat_pair(near, own, self.before, self.after)
            answers = self.oracle(tokens, read=tuple(range(self.before, self.before + self.after)))
        else:
            parts = [repeat_pair(near, own, j, k) for j, k in self.copies]
            rows = (-1, 0)[: self.views]
            answers = self.oracle(np.concatenate(parts), read=rows).reshape(len(parts), count, len(rows), dim)
            answers = np.moveaxis(answers, 0, 2)
        answers = answers.reshape(*queries.shape[:2], self.views, len(self.copies), dim)
        plain = self.sums.read(own.reshape(*queries.shape))[:, :, None]
        plain = plain + expit(-self.shifts)[:, None] * (moved @ self.sums.projection)[:, :, None]
        rest: Array = answers - plain[:, :, None]
        return rest.reshape(len(probes), -1, len(self.copies), dim)

    def level(self, queries: Array, probe: Array, answers: Array | float = 0.0) -> float:
        """Root mean square error of one entry of the centred answers, from the size of what was asked and answered."""
        longer = 1 + np.sqrt(np.mean(queries**2) / np.mean(probe**2))
        parts = queries @ self.sums.projection, probe @ self.sums.projection, longer * np.asarray(answers)
        return float(max(self.noise, 2 * EPS) * sum(np.sqrt(np.mean(part**2)) for part in parts))


class Separation(NamedTuple):
    """The heads at the first probe, and what the next probes are asked."""

    probe: Array  # v0 (d,), of norm sqrt(d)
    queries: Array  # (n, d), the same at every probe; each has one row of logits, or two where both are read
    design: NetDesign  # the net of these queries
    net: PairNets  # logits (m, n) and values (m, d) at v0
    scale: float  # scale of queries at which logits are about one
    level: float  # root mean square error of one entry of the answers
    lacking: float  # norm of v0 W_S - sum_i C_i: rounding, or what heads read that ignore the tokens
    separation: float  # smallest relative distance of two eigenvalues of the pencil that was used

    def take(self, pairs: Pairs, chosen: Indices) -> "Separation":
        """Return the same heads with some of the queries."""
        views = np.arange(pairs.views)
        rows = (pairs.views * chosen[:, None] + views).ravel()
        net = PairNets(self.net.slopes[:, rows], self.net.values, self.net.residual)
        return self._replace(queries=self.queries[chosen], design=pairs.design(len(rows)), net=net)

    def figures(self) -> Figures:
        """Return what a report shows of this stage."""
        figures = {"heads": len(self.net.values), "scale": self.scale, "separation": self.separation}
        return figures | {"residual": float(self.net.residual), "lacking": self.lacking, "queries": len(self.queries)}


def separate_heads(pairs: Pairs, dim: int, rng: Generator, *, oversampling: float, tries: int) -> Separation:
    """Find the number of heads, and logits and values of each at one probe."""
    refused = FitError("no probe was tried")
    for _ in range(PROBES):
        probe = pairs.probe(rng, dim)
        scale = find_scale(pairs, probe, rng) if pairs.scaled else 1.0
        try:
            return _separate_at(pairs, probe, scale, rng, oversampling, tries)
        except FitError as error:
            refused = error
    raise refused


def find_scale(pairs: Pairs, probe: Array, rng: Generator) -> float:
    """Return the scale of normal queries at which doubling them makes the answers 1.5 to 1.9 times as large."""
    pairs = replace(pairs, middle=False)
    directions = rng.standard_normal((4 // pairs.views, len(probe)))
    start = np.tile(pairs.respond(0 * directions[:1], probe), (1, len(directions), 1, 1))
    sizes: dict[float, Array] = {}

    def size(exponent: float) -> Array:
        if exponent not in sizes:
            answers = pairs.respond(pairs.shortened(2.0**exponent * directions), probe) - start
            sizes[exponent] = np.sqrt((answers**2).sum((0, 2, 3)))
        return sizes[exponent]

    exponent, stride = 0.0, 1.0
    for _ in range(40):
        ratio = float(np.median(size(exponent + 1) / np.maximum(size(exponent), np.finfo(float).tiny)))
        if 1.5 <= ratio <= 1.9 or stride < 0.5:
            break
        step = stride if ratio > 1.9 else -stride
        # a point met twice lies between two octaves.
        if exponent + step in sizes and exponent + step + 1 in sizes:
            step, stride = step / 2, stride / 2
        exponent += step
    return float(2.0**exponent)


def _separate_at(
    pairs: Pairs, probe: Array, scale: float, rng: Generator, oversampling: float, tries: int
) -> Separation:
    """One probe: rank, pencils, start, fit."""
    queries, answers, axes = _count_heads(pairs, probe, scale, rng, oversampling)
    heads, dim = len(axes), len(probe)
    unknown = heads * len(answers)
    FitError.if_above(unknown, MOST, f"{heads} heads have {unknown} logits in one fit: raise {__name__}.MOST")
    level = pairs.level(queries, probe, answers)
    design = pairs.design(len(answers))
    flat = answers.reshape(-1, dim)
    if heads == 0:
        net = PairNets(np.zeros((0, len(answers))), np.zeros((0, dim)), np.zeros(()))
        return Separation(probe, queries, design, net, scale, level, _lack(net, probe, pairs), np.inf)
    allowed = 10 * level * np.sqrt(flat.size) / np.linalg.norm(flat)
    pencils = Pencils(across=pairs.scaled)
    directions = np.linalg.qr(rng.standard_normal((dim, heads)))[0].T * np.sqrt(dim)
    step = max(1e-3, pairs.noise**0.25) * scale
    closest, separation, real = np.inf, 0.0, False
    for turn in range(tries):
        spread = scale * (1.0, 1.5, 2.0, 3.0, 6.0, 0.6)[turn % 6]
        point = pairs.shortened(spread * rng.standard_normal(dim))
        pencils.extend(_jacobians(pairs, probe, point, step * directions, axes))
        for _, distance, frame in pencils.found[:2]:
            real, separation = True, max(separation, distance)
            start = start_net(answers @ axes.T, frame, pairs.shifts)
            if start is None:
                continue
            # a right start falls at once; only then is it worth converging.
            net = fit_nets(design, flat, start, iterations=15, tolerance=1e-2)
            if net.residual < PROMISING:
                net = fit_nets(design, flat, net.slopes, iterations=100)
            closest = min(closest, float(net.residual))
            if net.residual <= allowed:
                lacking = _lack(net, probe, pairs)
                return Separation(probe, queries, design, net, scale, level, lacking, distance)
    if not real:
        why = f"{heads} heads show, and no pencil of Jacobians is real: no attention heads, or too noisy"
        raise FitError(why, separation, EPS)
    what = f"{heads} heads show in answers to pairs of tokens, and as many sigmoid gates do not fit them"
    raise FitError(f"{what}: scores are not bilinear, or the input is added (residual=True)", closest, allowed)


def _count_heads(
    pairs: Pairs, probe: Array, scale: float, rng: Generator, oversampling: float
) -> tuple[Array, Array, Array]:
    """Ask queries until there are enough for the heads that show: queries, answers (n, K, d), axes (m, d)."""
    dim = len(probe)
    queries, answers = np.zeros((0, dim)), np.zeros((0, len(pairs.copies), dim))
    wanted = FIRST // pairs.views
    while True:
        more = wanted - len(queries)
        scales = np.resize(pairs.scales, wanted)[len(queries) :, None]
        new = pairs.shortened(scale * scales * rng.standard_normal((more, dim)))
        queries = np.concatenate([queries, new])
        answers = np.concatenate([answers, pairs.respond(new, probe)[0]])
        flat = answers.reshape(-1, dim)
        _, singular, axes = np.linalg.svd(flat, full_matrices=False)
        floor = pairs.level(queries, probe, answers) * (np.sqrt(len(flat)) + np.sqrt(dim))
        heads = int((singular > SEEN * floor).sum())
        needed = -(-(int(np.ceil(oversampling * heads)) + 4) // pairs.views)
        if wanted >= needed or (heads >= dim and wanted >= 2 * dim):
            return queries, answers, axes[:heads]
        wanted = needed


def _jacobians(pairs: Pairs, probe: Array, point: Array, steps: Array, axes: Array) -> list[Array]:
    """Differentiate the answers along `steps` at `point`: one (m, m) matrix per shift and row of logits."""
    pairs = replace(pairs, middle=False)
    moved = pairs.respond(pairs.beside(point, steps, probe), probe)[0] @ axes.T
    moved = moved.reshape(2 * len(steps), -1, moved.shape[2])  # (2 m, views K, m)
    slopes = (moved[: len(steps)] - moved[len(steps) :]) / 2
    return [slopes[:, place].T for place in range(slopes.shape[1])]


def _lack(net: PairNets, probe: Array, pairs: Pairs) -> float:
    return float(np.linalg.norm(probe @ pairs.sums.projection - net.values.sum(0)))

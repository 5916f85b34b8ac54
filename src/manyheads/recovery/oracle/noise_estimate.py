"""Relative noise of an oracle, from identities that every attention layer obeys exactly.

With one token attention is 1 on it, so that F(x) = x W_S + c is affine whatever the heads are; W_S = sum_i W_i. What is
left of

    F(a) + F(b) - F(a + b) - F(0)            additivity
    F(s a) - F(0) - s (F(a) - F(0))          homogeneity, s no power of two, which would round to nothing

is rounding or noise; where it moves smoothly with a, it is neither, and the function is no attention layer. Behind a
LayerNorm the same holds on the sphere |u|^2 = d, sum(u) = 0: with c the mean of F(u) and F(-u),
F((u + v)/sqrt 2) - c = (F(u) + F(v) - 2c)/sqrt 2, while F(s u) = F(u). Two more exact identities need no LayerNorm to
be known: the last row does not change when the earlier tokens are exchanged (unless positions turn the queries and
keys), and no row of a causal layer changes with a later token.

The noise level is the root mean square of what is left, relative to that of the terms without their constant
c = (F(a) + F(-a)) / 2, which says nothing about the heads: about a fifth of the distance between neighbouring
floating-point numbers where answers are rounded, times |F| / |F - c|, and sigma where noise of standard deviation sigma
is added to a token-dependent part of unit size. The identities hold for every layer of this form (Chen and Li, arXiv
2402.04084, equation 1); their use here is derived here.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.refusals import NotALayer

LARGEST = 0.03  # noise beyond which no method here tells heads apart; joint fits from random weights need no less
ROUNDING = 64.0  # units of the answers' dtype by which two runs of the same arithmetic may differ
PLAIN = 0.01  # relative change of an answer that is no rounding, unless more was measured: float16 has three digits
HIDDEN = "answers do not depend on the tokens beyond their rounding ({}): no head reads them, or an output "
HIDDEN += "bias hides them: take it off, or answer in a wider type"
SMOOTH = 0.5  # correlation of what is left at two neighbouring points beyond which it is a function and not rounding


@dataclass(frozen=True)
class OracleNoise:
    """Measured noise and properties of an oracle."""

    level: float  # of the answers relative to their token-dependent part: the largest figure below that is noise
    repeat: float  # relative difference of two answers to the same question: zero for a function
    affine: float  # what is left of additivity and homogeneity with one token, on the sphere where `normalized`
    order: float  # what exchanging the earlier tokens changes in the last row; noise, unless `positional`
    causal: bool  # whether no row depends on a later token
    normalized: bool  # whether the function reads its tokens through a normalization: F(s x) = F(x)
    centred: bool  # whether that normalization subtracts the mean too, as a LayerNorm does: F(x + s 1) = F(x)
    positional: bool  # whether the last row depends on the order of the earlier tokens
    dtype: str  # floating-point type of the answers
    dim: int
    rounding: float  # distance between neighbouring numbers of that type, relative to the token-dependent part


def oracle_noise(oracle: Oracle, rng: Generator, *, stochastic: bool = False, sinks: bool = False) -> OracleNoise:
    """Measure the noise of an oracle, and whether it is causal, normalized or positional.

    Parameters
    ----------
    oracle
        Asked about 29 sequences of one and three tokens (more below dimension 64), in the stage "noise".
    rng
        Draws the tokens.
    stochastic
        Accept an oracle that answers the same question differently each time.
    sinks
        Accept answers to one token that are not affine but smooth, as those of layers with learned sinks: noise is
        rounding and what repetition shows then.

    Raises
    ------
    NotALayer
        Answers to one token are not affine (an MLP, or a layer that is followed by a nonlinearity), the same question
        is answered differently, or the noise is beyond 3% of the token-dependent part of the answers.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery import planted_layer
    >>> from manyheads.recovery.oracle.noise_estimate import oracle_noise
    >>> from manyheads.recovery.oracle.oracle import Oracle
    >>> rng = np.random.default_rng(0)
    >>> noise = oracle_noise(Oracle.of(planted_layer(rng, 16, 2, causal=True)), rng)
    >>> noise.level < 1e-14, noise.causal, noise.normalized
    (True, True, False)
    """
    with oracle.stage("noise"):
        frames = _frames(rng, max(2, -(-128 // oracle.dim)), oracle.dim) * (oracle.unit / np.sqrt(oracle.dim))
        f = _Answers(oracle, frames)
        repeat = f.relative([(1.0, f(f.a)), (-1.0, f.ask(f.a))])[0]
        floor = f.relative_spacing()
        if repeat > ROUNDING * floor and not stochastic:
            what = "the same question is answered differently each time: switch dropout off, or give noise (--noise)"
            raise NotALayer(what, repeat, ROUNDING * floor)
        NotALayer.if_above(floor / 5, LARGEST, HIDDEN.format(oracle.answer_dtype))
        least = max(repeat, floor)
        normalized, centred = _is_normalized(f, least)
        affine = _check_affine(f, normalized, least, sinks)
        known = max(min(1e3 * floor, PLAIN), 10 * max(repeat, affine))
        order = f.relative([(1.0, f.rows[:, -1]), (-1.0, f.exchanged[:, -1])])[0]
        later = f.relative([(1.0, f.rows[:, :2]), (-1.0, f.continued[:, :2])])[0]
        level = max(repeat, affine, order if order <= known else 0.0, floor / 5)
        if not level <= LARGEST:
            fault = "the answers are too noisy to tell heads apart"
            if level <= ROUNDING / 10 * floor:
                fault = HIDDEN.format(oracle.answer_dtype)
            elif affine > LARGEST > repeat:  # asked again, it says the same
                fault = "answers to one token are not affine in it: this is no attention layer, or its noise is fixed"
            raise NotALayer(fault, level, LARGEST)
    measured = (level, repeat, affine, order, later <= known, normalized, centred, order > known)
    return OracleNoise(*measured, str(oracle.answer_dtype), oracle.dim, floor)


class Steadiness:
    """Check that answers do not change during an extraction: four sequences are asked at the start, and by `check`."""

    def __init__(self, oracle: Oracle, level: float, rng: Generator):
        self.oracle = oracle
        self.x = oracle.limits.fit(rng.standard_normal((4, 3, oracle.dim)))
        with oracle.stage("noise"):
            self.before = oracle(self.x, read="all")
        self.size = root_mean_square(self.before - self.before.mean((0, 1)))
        floor = oracle.limits.spacing(root_mean_square(self.before), oracle.answer_dtype or np.float64)
        self.allowed = max(ROUNDING * floor / self.size, 10 * level) if self.size > 0 else 0.0

    def check(self) -> None:
        """Ask again."""
        with self.oracle.stage("noise"):
            now = self.oracle(self.x, read="all")
        apart = root_mean_square(now - self.before)
        changed = apart / self.size if self.size > 0 else np.inf if apart > 0 else 0.0
        what = "the answers have changed since the extraction began: give a function of its argument alone"
        NotALayer.if_above(changed, self.allowed, what)


def _frames(rng: Generator, count: int, dim: int) -> Array:
    """Draw `count` times four tokens (4, n, d) of norm sqrt(d): orthogonal to each other and to 1 where d allows it."""
    u = rng.standard_normal((count, dim, 4))
    if dim > 4:
        u = np.linalg.qr(np.concatenate([np.ones((count, dim, 1)), u], -1))[0][..., 1:]
    u = np.moveaxis(u, -1, 0)
    return u * (np.sqrt(dim) / np.linalg.norm(u, axis=-1, keepdims=True))


class _Answers:
    """Answers to one token, and to sequences of three, and the size of what depends on tokens: the unit of noise."""

    def __init__(self, oracle: Oracle, frames: Array):
        self.oracle = oracle
        self.a, self.b, self.e, self.f = a, b, e, f = frames
        stacks = [np.stack(tokens, 1) for tokens in ((a, b, e), (b, a, e), (a, b, f))]
        self.rows, self.exchanged, self.continued = np.split(oracle(np.concatenate(stacks), read="all"), 3)
        self._known: dict[bytes, Array] = {}
        self.constant = 0.5 * (self(self.a) + self(-self.a)).mean(0)  # exact for affine answers, on the sphere too
        self.size = root_mean_square(self.rows - self.constant)

    def __call__(self, x: Array) -> Array:
        """Answer tokens (n, d), each of them asked once."""
        key = x.tobytes()
        if key not in self._known:
            self._known[key] = self.ask(x)
        return self._known[key]

    def relative_spacing(self) -> float:
        """Return the distance of neighbouring numbers at the size of the answers, relative to their moving part."""
        spacing = self.oracle.limits.spacing(root_mean_square(self.rows) or 1.0, self.oracle.answer_dtype or np.float64)
        if self.size > 0:
            return spacing / self.size
        return np.inf if self.rows.any() else spacing

    def ask(self, x: Array) -> Array:
        """Ask about tokens (n, d), whether or not they were asked before."""
        return self.oracle(x[:, None, :])

    def relative(self, terms: list[tuple[float, Array]]) -> tuple[float, Array]:
        """Return the root mean square of a sum of terms s_j y_j, relative to that of s_j (y_j - c), and the sum."""
        left = sum((s * y for s, y in terms), np.zeros(()))
        size = np.sqrt(sum((s * max(root_mean_square(y - self.constant), self.size)) ** 2 for s, y in terms))
        return (root_mean_square(left) / float(size) if size > 0 else 0.0), left


def root_mean_square(x: Array) -> float:
    """Return the root of the mean square over all entries."""
    return float(np.sqrt(np.mean(x**2)))


def _is_normalized(f: _Answers, least: float) -> tuple[bool, bool]:
    """Tell whether F(3 x) = F(x) and F(x + 2) = F(x), up to the epsilon that a normalization adds to the variance."""
    if f.oracle.dim <= 4:
        return False, False
    y = f(f.a)
    change = root_mean_square(y - f(-f.a)) / 2
    allowed = max(0.02 * change, 20 * least * max(root_mean_square(y - f.constant), f.size))
    normalized = change > allowed and root_mean_square(f(3 * f.a) - y) <= allowed
    return normalized, normalized and root_mean_square(f(f.a + 2 * np.sqrt(np.mean(f.a**2))) - y) <= allowed


def _check_affine(f: _Answers, normalized: bool, least: float, sinks: bool) -> float:
    """Return what is left of the identities; of a smooth function it is 0 where there may be sinks, or refused."""
    turn = np.array([np.cos(0.1), np.sin(0.1)])
    near_a, near_b = turn[0] * f.a + turn[1] * f.e, turn[0] * f.b + turn[1] * f.f
    identity = _sphere_identity if normalized else _additivity
    level, left = f.relative(identity(f, f.a, f.b))
    if not normalized:
        zero = f(np.zeros((1, f.oracle.dim)))
        y = f(f.a)
        for s in (0.3, 3.0):
            level = max(level, f.relative([(1.0, f(s * f.a)), (-s, y), (s - 1, np.broadcast_to(zero, y.shape))])[0])
    if level > 1e3 * least:
        beside = f.relative(identity(f, near_a, near_b))[1]
        correlation = float((left * beside).sum() / np.sqrt((left**2).sum() * (beside**2).sum()))
        if correlation > SMOOTH:
            hint = "this is no attention layer, or more than one; say mlp=True of a block, scores=True of learned sinks"
            moved = f(3 * f.a) - f(f.a)
            if not f.oracle.residual and root_mean_square(moved - 2 * f.a) <= 0.02 * root_mean_square(moved):
                hint = "it looks like x + F(LN(x)): if the function adds its input, say residual=True"
            elif sinks:
                return 0.0
            smooth = f"by a smooth function (correlation {correlation:.2f} between neighbouring points)"
            raise NotALayer(f"answers to one token are not affine in it, and {smooth}: {hint}", level, 1e3 * least)
    return level


def _additivity(f: _Answers, a: Array, b: Array) -> list[tuple[float, Array]]:
    zero = f(np.zeros_like(a[:1]))
    return [(1.0, f(a)), (1.0, f(b)), (-1.0, f(a + b)), (-1.0, np.broadcast_to(zero, a.shape))]


def _sphere_identity(f: _Answers, a: Array, b: Array) -> list[tuple[float, Array]]:
    """F((a + b)/sqrt 2) - c = (F(a) + F(b) - 2 c)/sqrt 2 with 2 c = F(b) + F(-b)."""
    half = np.sqrt(0.5)
    rest = 0.5 * (1 - 2 * half)  # of c, half of it from F(b) and half from F(-b)
    return [(1.0, f(half * (a + b))), (-half, f(a)), (-half - rest, f(b)), (-rest, f(-b))]

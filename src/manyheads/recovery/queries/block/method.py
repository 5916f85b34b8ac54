r"""Extraction of the attention of a whole transformer block, its MLP left as an oracle.

B0  How the block is built, and the size of tokens at which its token-wise part is inverted (`token_wise`).
B1  Sum of the projections and epsilon of the norm, from sequences of one repeated token (`value_sum`).
B2  With both, every answer of the block gives the attention's: the methods for layers behind a norm run
    on it unchanged.
B3  The layer found and the block's answers to single tokens make the function of the block, which is
    what the certificate is about.

Identifiable is what a norm in front leaves of the layer, but the output bias, which the token-wise part absorbs. That
part stays an oracle: g(y) = F([k^-1(y)]), one sequence of one token.

Composition of an extracted attention layer with a block's own token-wise part.

With the layer found, k(v) = v + N(v) W is known, and the block is

.. math:: F(x)_r = h(k^{-1}(x_r + A_r(x))) \quad\text{or}\quad F(x)_r = h(x_r) + A_r(x) - N(x_r) W \text{ (parallel)},

h(v) = F([v]) one sequence of one token: the MLP is an oracle, and this is the function of the whole block. For a norm
N(v) = v C / rho(v), with C the identity or what subtracts the mean, a given y has

.. math:: v(\rho) = y\,(1 + C W / \rho)^{-1}, \qquad \rho^2 = \operatorname{mean}\,(v C)^2 + \epsilon,

one equation for the number rho. From infinity down to the largest pole of v(rho) or sqrt(epsilon) its sides change
order, so that there always is a solution, and h gives the same answer at each. Derived here.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, ArrayFunction, Generator
from manyheads.recovery.layers.evaluation import apply_layer
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.noise_estimate import root_mean_square
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Behind, Oracle, Read
from manyheads.recovery.queries.block.token_wise import TokenWise, open_token_wise
from manyheads.recovery.queries.block.value_sum import read_value_sum
from manyheads.recovery.queries.options import ExtractionOptions
from manyheads.recovery.refusals import LimitError, NotALayer
from manyheads.recovery.result.certificates import oracle_errors
from manyheads.recovery.result.distributions import Draw
from manyheads.recovery.result.results import Extracted, Stage, StageLog

STEPS = 60  # of the bracket of log rho, at most
CLOSE = 1e-14  # of log rho
ROWS = 1 << 12  # tokens that are solved together
POLISH = 3  # corrections with the linear map of the solution


@dataclass(frozen=True)
class Composition:
    """The function of a block: an attention layer, and the block's own answers to single tokens."""

    token_wise: TokenWise
    layer: AttentionLayer | RotaryLayer  # acts on what `norm` makes of the tokens
    norm: Normalization

    def __call__(self, x: Array) -> Array:
        """Return the answers to sequences (n, k, d)."""
        attended = apply_layer(self.layer, self.norm(x))
        return attended + self.token_wise_part(x) if self.token_wise.parallel else self.token_wise_part(x + attended)

    def token_wise_part(self, y: Array) -> Array:
        """Return g(y), what the block makes of tokens (..., d) besides its attention, from one-token sequences."""
        if self.token_wise.parallel:
            return self.token_wise.answer(y, None) - self.norm(y) @ self.projection
        return self.token_wise.answer(one_token_inverse(self.projection, self.norm, y), None)

    def beyond_one_token(self, x: Array) -> Array:
        """Return what other tokens change in the answers."""
        if self.token_wise.parallel:
            return apply_layer(self.layer, self.norm(x)) - self.norm(x) @ self.projection
        return self(x) - self.token_wise.answer(x, None)

    @property
    def projection(self) -> Array:
        """Sum of the projections, W (d, d)."""
        return np.asarray(self.layer.projection, np.float64).sum(0)


def _root(function: ArrayFunction, low: Array, high: Array) -> Array:
    """Return the zeros of a function of many numbers between points of other signs, by the Illinois rule."""
    at_low, at_high = np.maximum(function(low), 0.0), np.minimum(function(high), 0.0)
    middle = low
    for step in range(STEPS):
        slope = at_low / np.maximum(at_low - at_high, np.finfo(float).tiny)
        middle = low + (high - low) * np.where(step % 4 == 3, 0.5, slope)
        at = function(middle)
        if (np.minimum(high - low, np.abs(at)) < CLOSE).all():
            break
        above = at > 0
        at_high, at_low = np.where(above, at_high / 2, at), np.where(above, at, at_low / 2)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return middle


def one_token_inverse(projection: Array, norm: Normalization, y: Array) -> Array:
    """Return v (..., d) with v + N(v) W = y, the solution of the largest norm."""
    dim = len(projection)
    centre = np.eye(dim) - np.full((dim, dim), norm.centred / dim)
    values, frame = np.linalg.eig(centre @ projection)
    back = np.linalg.inv(frame)
    poles = -values.real[(np.abs(values.imag) < 1e-12 * np.abs(values).max()) & (values.real < 0)]
    least = max(float(poles.max(initial=0.0)) * (1 + 1e-12), norm.epsilon**0.5)
    flat = y.reshape(-1, dim)
    found = np.empty_like(flat)
    for start in range(0, len(flat), ROWS):
        part = flat[start : start + ROWS]
        turned = part @ frame

        def solve(rho: Array, turned: Array = turned) -> Array:
            return ((turned / (1 + values / rho[:, None])) @ back).real

        def excess(log_rho: Array, solve: ArrayFunction = solve) -> Array:
            v = solve(np.exp(log_rho)) @ centre
            return np.log(np.mean(v**2, 1) + norm.epsilon) / 2 - log_rho

        largest = np.sqrt(np.mean(part**2, 1) + norm.epsilon) + 2 * np.linalg.norm(projection, 2) + least
        rho = np.exp(_root(excess, np.full(len(part), np.log(least)), np.log(largest)))
        v = solve(rho)
        for _ in range(POLISH):
            rest = part - v - norm(v) @ projection
            moved = v + solve(rho, rest @ frame)
            better = np.linalg.norm(part - moved - norm(moved) @ projection, axis=1) < np.linalg.norm(rest, axis=1)
            v = np.where(better[:, None], moved, v)
        found[start : start + ROWS] = v
    return found.reshape(y.shape)


METHODS = ("auto", "sphere", "rotary-sphere", "scores-sphere")


@dataclass(frozen=True)
class Block:
    """A block whose attention can be asked."""

    token_wise: TokenWise
    attention: Behind  # the attention as an oracle
    beyond: Behind  # F(x)_r - F([x_r]), what other tokens change in the answers, as an oracle: what is verified
    norm: Normalization  # in front of the attention
    level: float  # relative noise of the attention's answers
    stages: tuple[Stage, ...]  # figures of what was asked so far

    def compose(self, found: Extracted) -> Extracted:
        """Return an extracted attention as the function of the block."""
        norm, layer = self.norm, dataclasses.replace(found.layer, bias=None)
        kept = found.acts_on.partition(found.prepare.formula)[2] if isinstance(found.prepare, Normalization) else ""
        acts_on = f"u = {norm.formula}{kept}; the rest of the block, MLP and output bias, stays an oracle"
        whole = Composition(self.token_wise, layer, norm)
        return Extracted(layer, (*self.stages, *found.stages), acts_on, norm, found.longest, whole)

    def can_run(self, method: str) -> bool:
        """Tell whether a method asks what can be asked: tokens of every length only beside an MLP."""
        return self.token_wise.parallel or not method.startswith("scores")

    def attention_error(self, found: Extracted, rng: Generator, count: int, draw: Draw) -> tuple[float, float]:
        """Return the largest squared error of the attention alone, relative to its variance, and the variance."""
        layer, scale = found.layer, self.token_wise.scale
        with self.beyond.stage("selection"):
            errors = oracle_errors(self.attention, lambda x: apply_layer(layer, self.norm(scale * x)), rng, count, draw)
        return float(errors.relative.max()), errors.variance


def open_block(oracle: Oracle, options: ExtractionOptions, method: str, rng: Generator) -> Block:
    """Take the token-wise part of a block out, so that its attention can be asked."""
    _check(options, method)
    log = StageLog(oracle)
    with log.stage("structure") as figures:
        token_wise = open_token_wise(oracle, rng)
        figures |= {"parallel": token_wise.parallel, "scale": token_wise.scale, "rate": token_wise.rate}
        if options.scores and not token_wise.parallel:
            what = "other scores than plain or rotary ones, with an MLP behind. Extract the attention without it"
            raise NotALayer(what, token_wise.scale)
    with log.stage("value sum") as figures:
        projection, norm = read_value_sum(token_wise, options.rotary or options.scores, rng, figures)
        left = figures["left"]
    attention = attention_oracle(token_wise, projection, norm)
    x = rng.standard_normal((4, 3, oracle.dim))
    with attention.stage("noise"):
        one, two = attention(x), attention((1 + 1e-5) * x)
    level = max(left, root_mean_square(two - one) / root_mean_square(one))

    def changes(x: Array, read: Read) -> Array:
        return oracle(x, read) - token_wise.answer(x[:, -1] if read == "last" else x, stage=None)

    beyond = Behind(oracle, changes, causal=token_wise.causal)
    return Block(token_wise, attention, beyond, norm, level, tuple(log.stages))


def attention_oracle(token_wise: TokenWise, projection: Array, norm: Normalization) -> Behind:
    r"""Return the attention of a block as an oracle: A_r(x) = D + N(u) W, without a constant.

    Tokens are asked at the scale s of `token_wise`: this is an attention layer behind a norm whose epsilon is that of
    the block over s^2. With one token it is N(x) W, and nothing is asked.
    """
    norm = dataclasses.replace(norm, epsilon=max(norm.epsilon, np.finfo(float).tiny))  # a token 0 has value 0

    def answer(x: Array, read: Read) -> Array:
        x = token_wise.scale * np.asarray(x, np.float64)
        if x.shape[1] == 1:
            rows = norm(x) @ projection  # attention is 1
        else:
            moved, base = token_wise.differences(x, read)  # those of the rows that are read must be large
            rows = moved + norm(base) @ projection
        return rows[:, -1] if read == "last" else rows

    limits = dataclasses.replace(token_wise.block.limits, max_norm=None)
    return Behind(token_wise.block, answer, causal=token_wise.causal, limits=limits)


def _check(options: ExtractionOptions, method: str) -> None:
    if method not in METHODS:
        raise UsageError(f"method {method!r}: behind the norm of a block choose from {', '.join(METHODS)}")
    for name, said in (("residual", options.residual), ("normalized=False", options.normalized is False)):
        if said:
            raise UsageError(f"mlp with {name}: a block reads its residual stream through a norm; leave {name} out")
    limits = options.limits
    if limits.decimals is not None or limits.bits is not None or limits.vocabulary is not None:
        what = "rounded answers or a vocabulary leave no room for the large tokens by which an MLP is inverted"
        raise LimitError(f"{what}: extract the attention alone")

r"""Servers that round or add noise, and what an attack on them costs.

Noise s is relative to the standard deviation of the answers on Gaussian sequences of four tokens, and so are the
answers that are rounded to b bits over four standard deviations either way: their error is uniform, with root mean
square s = 8 / sqrt(12) 2^-b. What is extracted is worth its squared error on such sequences over the variance.

Asking again averages independent noise, R times leave s / sqrt(R), and leaves deterministic rounding as it is: the same
question has the same answer. Questions that are moved by less than a rounding step (dither) round independently.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.recovery import RotaryLayer, evaluate_layer, gpt_layer, sequences
from manyheads.recovery._types import Array
from manyheads.recovery.fit.rotary_tangent import RotaryWeights
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.bounded.method import extract_bounded
from manyheads.recovery.queries.cramer_rao import Factors, information, query_cost
from manyheads.recovery.queries.effort import ACCURATE
from manyheads.recovery.queries.leak_meter import ROUNDED
from manyheads.recovery.queries.refinement import LENGTH, refine_layer
from manyheads.recovery.queries.rotary.method import extract_rotary
from manyheads.recovery.queries.rotary.random_starts import RotaryShape, fit_from_random_starts
from manyheads.recovery.queries.scores.method import extract_scores
from manyheads.recovery.refusals import FitError, RecoveryRefused

Function = Callable[[Array], Array]

SHAPES = {"gpt2": "GPT-2-shaped", "llama": "LLaMA-shaped", "qwen": "Qwen-shaped"}
FAMILIES = tuple(SHAPES)
"""GPT-2-shaped layers (biases, no positions), LLaMA-shaped (RoPE), Qwen-shaped (RoPE, biases on queries and keys)."""

NORMS = ("norm", "norm-without-biases")
"""Limits of the norm of tokens: for layers with query biases, and without."""

BASE = 1e4  # of the frequencies of RoPE
KEY_BIAS = 0.3  # standard deviation of the biases of queries and keys
FRESH = 400  # sequences on which an error is measured
DITHER = 0.4  # of a rounding step, in the size of the answers: standard deviation by which tokens are moved
TWICE = 2.5  # error of a fit that has ended, against that of the law
ATTEMPTS = 6  # joint fits that are made
FIRST = 1.5  # labels of the first joint fit, against those of the law


@dataclass(frozen=True)
class Cost:
    """Calls and tokens of an attack, and the relative squared error of what it found; infinite where nothing was."""

    calls: float
    tokens: float
    error: float


def build_layer(family: str, rng: np.random.Generator, dim: int, heads: int) -> Function:
    """Return a random layer of a family."""
    if family == "gpt2":
        layer = gpt_layer(rng, dim, heads)
        return lambda x: evaluate_layer(layer, x)
    rank = dim // heads
    query, key, value = (rng.standard_normal((heads, dim, rank)) / dim**0.5 for _ in range(3))
    output = rng.standard_normal((heads, rank, dim)) / dim**0.5
    biases = (KEY_BIAS if family == "qwen" else 0.0) * rng.standard_normal((2, heads, 1, rank))
    query, key = (np.concatenate([w, b], axis=1) / rank**0.25 for w, b in zip((query, key), biases, strict=True))
    frequencies = BASE ** (-np.arange(rank // 2) / (rank // 2))
    return RotaryLayer.of_projections(query, key, value @ output, frequencies)


class Server:
    """A layer behind noise of a relative standard deviation, or behind rounding to so many bits; 0 for none.

    `rng` draws the noise, and the sequences on which errors are measured.
    """

    def __init__(self, layer: Function, dim: int, rng: np.random.Generator, noise: float = 0.0, bits: float = 0):
        self.layer, self.dim, self.rng = layer, dim, rng
        self.x = sequences(rng, FRESH, LENGTH, dim, distribution="gaussian")
        self.y = layer(self.x)
        self.size = float(self.y.std())
        self.bits = bits
        self.step = 8 * self.size * 2.0**-bits
        self.noise = ROUNDED * 2.0**-bits if bits else noise

    def __call__(self, x: Array) -> Array:
        """Answer sequences (n, k, d)."""
        y = self.layer(x)
        if self.bits:
            return np.round(y / self.step) * self.step
        return y + self.noise * self.size * self.rng.standard_normal(y.shape)

    def averaged(self, repeats: int, dither: float = 0.0) -> Function:
        """Return the mean of `repeats` answers; tokens are moved by `dither` rounding steps where answers are rounded.

        The mean of independent noise is drawn as such.
        """

        def quiet(x: Array) -> Array:
            y = self.layer(x)
            return y + self.noise * self.size / repeats**0.5 * self.rng.standard_normal(y.shape)

        def moved(x: Array) -> Array:
            width = dither * self.step / self.size if repeats > 1 else 0.0
            answers = np.zeros_like(x)
            for _ in range(repeats):
                answers += self(x + width * self.rng.standard_normal(x.shape))
            return answers / repeats

        return moved if self.bits else quiet

    def error(self, found: Function) -> float:
        """Return the relative squared error of a function, on sequences that were used for nothing else."""
        left = float(np.mean((found(self.x) - self.y) ** 2)) / self.size**2
        return left if np.isfinite(left) else np.inf


def extract_from(family: str, server: Server, rng: np.random.Generator, repeats: int, dither: float = DITHER) -> Cost:
    """Extract once, from means of `repeats` answers."""
    oracle = Oracle(server.averaged(repeats, dither), server.dim)
    noise = max(server.noise / repeats**0.5, 1e-15)
    error, extract = np.inf, extract_rotary if family == "llama" else extract_scores
    with suppress(RecoveryRefused, np.linalg.LinAlgError), np.errstate(all="ignore"):
        gpt2 = family == "gpt2"
        error = server.error(extract_bounded(oracle, noise, rng) if gpt2 else extract(oracle, noise, rng, ACCURATE))
    return Cost(repeats * oracle.total.calls, repeats * oracle.total.tokens, error)


def attack(family: str, server: Server, rng: np.random.Generator, target: float, heads: int) -> Cost:
    """Return the least cost at which the error is `target`, to within the noise of one joint fit.

    A fit from random weights, heads and ranks told, and one to as many fresh sequences as the target needs, by Gaussian
    sequences of standard deviation one: longer tokens cost less.
    """
    oracle = Oracle(server, server.dim)
    shape = RotaryShape(server.dim, heads, server.dim // heads, family != "llama", family != "gpt2")
    try:
        layer, _ = fit_from_random_starts(oracle, shape, server.noise, rng)
    except FitError:
        return Cost(np.inf, np.inf, np.inf)
    start = Cost(oracle.total.calls, oracle.total.tokens, server.error(layer))
    if start.error <= target:
        return start
    excess = max(12.0, FIRST * server.noise**2 / target)
    for _ in range(ATTEMPTS):
        oracle = Oracle(server, server.dim)
        layer = refine_layer(oracle, layer, rng, excess=excess).layer
        error = server.error(layer)
        asked, share = oracle.total, min(1.0, error / target)
        if error <= target:
            return Cost(start.calls + share * asked.calls, start.tokens + share * asked.tokens, error)
        if error < TWICE * server.noise**2 / excess:  # else the fit has not ended: once more from where it stopped
            excess *= float(np.clip(1.1 * error / target, 1.3, 64))
    return Cost(np.inf, np.inf, error)


def free_numbers(family: str, dim: int, heads: int) -> int:
    """Return the free parameters of a layer: the rank of the Jacobian of its answers to sequences of four tokens.

    Examples
    --------
    >>> [free_numbers(family, 8, 2) for family in FAMILIES]
    [208, 228, 244]
    """
    layer = build_layer(family, np.random.default_rng(0), dim, heads)
    if isinstance(layer, RotaryLayer):
        return RotaryWeights.of(layer).free(LENGTH)
    return Factors.of(gpt_layer(np.random.default_rng(0), dim, heads)).free


def least_calls(
    family: str,
    rng: np.random.Generator,
    size: tuple[int, int],
    length: int,
    scale: float,
    count: int,
    biases: bool = True,
) -> float:
    r"""Return the calls of an unbiased estimate, for noise s and error e in units of s^2 / e.

    The Cramér-Rao bound (`manyheads.recovery.queries.cramer_rao`) of `count` calls of `length` tokens of standard
    deviation `scale` to a layer of `size` (d, m). `biases` are those of GPT-2-shaped queries.
    """
    dim, heads = size
    layer: Any = gpt_layer(rng, dim, heads, key_bias=biases) if family == "gpt2" else build_layer(family, rng, *size)
    asked, honest = (sequences(rng, count, k, dim, distribution="gaussian") for k in (length, LENGTH))
    own = RotaryWeights.of(layer) if isinstance(layer, RotaryLayer) else Factors.of(layer)
    return query_cost(own, scale * asked, information(own, honest))

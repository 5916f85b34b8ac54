r"""Leak meter: the cheapest attacks known on a layer behind noise or rounding. No figure is a promise of safety.

From N calls of k tokens, answers of noise s relative to their standard deviation on Gaussian sequences, a fit that
begins at random weights leaves the squared error e = phi s^2 / N there, the Cramér-Rao bound of these queries
(`cramer_rao`), as soon as it has found the layer at all:

    counting bound    p / (k d) calls, p the free parameters: fewer numbers than unknowns
    noise             max(2 p / (k d), phi s^2 / e) calls, phi of tokens at the largest norm that the server takes
    rounding          6 p / (k d), and 4.5 p / (k d) more for every factor of ten from s^2 / 6 to e, or as noise if less

Two numbers for a parameter are the fewest from which a random start has found a layer, six those from which it always
has. Rounding to b bits over four standard deviations either way is an error of size s = 8 / sqrt(12) 2^-b that the
attacker computes: questions whose predicted answers lie on rounding thresholds halve what is feasible, number by
number, so that calls grow as log(1 / e), and hardly with the bits. Measured for d = 8 and 16, up to 928 parameters,
noise of 1e-3 to 3 and 4 to 8 bits, heads and ranks told or not. Derived here; a better attack may exist. Designs of
queries with all tokens shorter than 3 sqrt(d) gain up to 2.3 times and are not computed: no price is given there.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.fit.rotary_tangent import RotaryWeights
from manyheads.recovery.layers.panels import rank_tolerance
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.limits import ServerLimits
from manyheads.recovery.queries.cramer_rao import Factors, information, query_cost
from manyheads.recovery.queries.refinement import LARGEST, LENGTH
from manyheads.recovery.result.results import Recovery

METHODS = ("subspaces", "probes", "bounded", "rotary", "scores")  # of layers without a norm in front
ROUNDED = 8 / 12**0.5  # error of b bits over four standard deviations either way, times 2^b
NOISES = (1e-3, 1e-2, 1e-1)
BITS = (8, 6, 4)
START = 2.0  # numbers a free parameter: the fewest from which a random start has found a layer
SURE = 6.0  # the same from which it has always found one
DECADE = 4.5  # numbers a free parameter for each factor of ten of the error, by questions on rounding thresholds
SHORT = 3.0  # norm of tokens, in units of sqrt(d), below which designs were cheaper than random tokens
NORMS = (2.0, 3.0, 5.0)  # of tokens, in units of sqrt(d): the best of these, as far as the server takes them
UNCOUNTED = (
    "no attack behind noise was run on layers behind a norm, over a vocabulary, with other scores, or with RoPE and "
)
UNCOUNTED += f"more than {LARGEST:,} weights"
LABELS = (60.0, 400.0)  # numbers a free parameter of the queries of which phi is computed: few make it too large
WORK = 8e9  # by which they are bounded: numbers times the square of the free parameters
MOST = 500  # free parameters up to which phi is computed: it falls with them, so that no constant may stand for it


@dataclass(frozen=True)
class Defence:
    """One defence: noise of the answers, what is known of extraction behind it, and what an honest user loses."""

    name: str
    noise: float  # relative to the standard deviation of the answers
    bound: float  # calls: Cramér-Rao bound of the queries; of rounding, the bits that answers hold
    cheapest: float | None  # calls of the cheapest attack known; None where none was measured
    loss: float  # squared error of an answer, relative to the variance


@dataclass(frozen=True)
class LeakMeter:
    """Calls that attacks on a layer without positions have needed.

    Examples
    --------
    >>> meter = LeakMeter(each=6.5, target=1e-6, cost=6.5)
    >>> [round(meter.behind_noise(noise).cheapest) for noise in (1e-1, 1e-3)], round(meter.behind_rounding(4).cheapest)
    ([65000, 13], 143)
    """

    each: float  # p / (k d): free parameters over the numbers of a call
    target: float  # relative squared error at which the layer counts as extracted
    cost: float | None  # phi, the Cramér-Rao bound of the calls in units of s^2 / e; None if not computed
    rounded: bool = True  # whether attacks on rounding were run

    def behind_noise(self, noise: float) -> Defence:
        """Return what is known of calls whose answers have independent noise."""
        bound = max(self.each, (self.cost or 0.0) * noise**2 / self.target)
        cheapest = None if self.cost is None else max(START * self.each, bound)
        return Defence(f"noise {noise:g}", noise, bound, cheapest, noise**2)

    def behind_rounding(self, bits: int) -> Defence:
        """Return what is known of calls whose answers are rounded, by a rule that the attacker knows."""
        noise = ROUNDED * 2.0**-bits
        numbers = noise**2 / self.target  # as behind noise, for each free parameter
        halved = SURE + DECADE * math.log10(max(numbers / SURE, 1.0))
        cheapest = self.each * max(START, min(numbers, halved)) if self.rounded else None
        bound = self.each * max(0.0, math.log2(1 / self.target)) / (2 * bits)
        return Defence(f"rounding to {bits} bits", noise, bound, cheapest, noise**2)

    def defences(self) -> tuple[Defence, ...]:
        """Return noises and roundings."""
        return (*map(self.behind_noise, NOISES), *map(self.behind_rounding, BITS))


def measure_leak(found: "Recovery", target: float, limits: ServerLimits | None = None) -> dict[str, Any] | None:
    """Return what is known of the cost of an extraction behind noise and rounding, as JSON holds it.

    None where free parameters are not counted: behind a norm or a vocabulary, for scores other than RoPE's, and for
    RoPE of more than `LARGEST` weights.
    """
    layer: Any = found.layer
    if found.method not in METHODS:
        return None
    limits = limits or ServerLimits()
    length = int(np.clip(LENGTH, limits.min_length, limits.max_length or np.inf))
    own: Factors | RotaryWeights
    if isinstance(layer, AttentionLayer):
        own = Factors.of(layer, rank_tolerance(float(found.certificate.largest_error)))
        free = own.free
    elif type(layer) is RotaryLayer and layer.turns is not None:
        own = RotaryWeights.of(layer)
        if own.flat().size > LARGEST:
            return None
        free = own.free(length)
    else:
        return None
    each = free / (layer.dim * (1 if limits.last_row else length))
    root = math.sqrt(layer.dim)
    norm = min(limits.reach / root, NORMS[-1])
    unmeasured = _explain_gap(layer, free, norm, limits, length)
    cost = None
    if not unmeasured and free <= MOST:
        labels = np.clip(WORK / free**3, *LABELS)
        x = np.random.default_rng(0).standard_normal((math.ceil(labels * each), length, layer.dim))
        sphere = x * (root / np.linalg.norm(x, axis=-1, keepdims=True))
        norms = [one for one in NORMS if one < norm] + [norm]
        wide = information(own, x)
        cost, norm = min((query_cost(own, one * sphere, wide), one) for one in norms)
    meter = LeakMeter(each, target, cost, not unmeasured)
    verified = found.counts["verification"].calls if "verification" in found.counts else 0
    priced = {"target": target, "asked": found.total.calls - verified, "parameters": free, "counting": each}
    priced |= {"length": length, "norm": norm * root, "unmeasured": unmeasured}
    return priced | {"defences": [asdict(one) for one in meter.defences()]}


def _explain_gap(layer: Any, free: int, norm: float, limits: ServerLimits, length: int) -> str:
    """Return why no price of an attack is known; an empty text if one is."""
    if isinstance(layer, RotaryLayer):
        return "attacks on RoPE were run at the norm sqrt(d) only (study recovery/leakage)"
    if limits.last_row:
        return "none was run on servers that return the last row only"
    if norm < SHORT:
        return f"for tokens shorter than {SHORT:g} sqrt(d), designed queries were cheaper and are not computed here"
    if length != LENGTH:
        return f"none was run with calls of {length} tokens"
    if free > MOST and norm < NORMS[-1]:
        return f"none was run on more than {MOST} free parameters under a limit of the norm"
    return ""


def describe_queries(leak: Mapping[str, Any]) -> str:
    """Return the target error and the queries that the figures refer to."""
    tokens = f"{leak['length']} tokens a call, of norm {leak['norm']:.3g} at most (more tokens a call need fewer calls)"
    return f"to a squared error of {leak['target']:g}, {tokens}"


def describe_unmeasured(leak: Mapping[str, Any]) -> str:
    """Return the limitation of the figures."""
    if leak["unmeasured"]:
        return f"no price of an attack is known, which is no protection: {leak['unmeasured']}"
    return "a better attack may exist: no figure is a promise of safety"


def name_bound(defence: Mapping[str, Any]) -> str:
    """Return the name of the bound of one defence: behind noise that of counting where phi was not computed."""
    if defence["name"].startswith("rounding"):
        return "bits of the answers"
    return "counting bound" if defence["cheapest"] is None else "Cramér-Rao bound of these tokens"

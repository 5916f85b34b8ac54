r"""Cost of an extraction behind noise, rounding and limits of norm: laws for layers without positions and with RoPE.

An extraction that bears noise tells heads apart at noise s_0, to which answers are averaged, and fits all weights to
fresh sequences of k tokens until their squared error is e:

    calls = C max(1, (s / s_0)^2) + p s^2 / (e k d),   p = m (2 d^2 + d) + d merged weights,

C the calls of the bounded method. Layers with RoPE are fitted from random weights, without a first extraction:

    calls = C + p s^2 / (e k d),   p the free parameters,

C = 36 P / (k d) and an eighth more, P the weights of the fit. The information limit is the same with the free
parameters in the place of p and without the start, and at least the free parameters over the numbers of a call.
Rounding to b bits over four standard deviations of the answers either way is noise s = 8 / sqrt(12) 2^-b to questions
that are all different. Derived here; `recovery/leakage` measures it.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.layers.description import describe_heads, free_parameters, rank_tolerance
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.queries.bounded.algorithm import EXCESS, MIRRORS, BoundedSettings
from manyheads.recovery.queries.refinement import LARGEST, LENGTH, refinement_size, with_held
from manyheads.recovery.queries.rotary.random_starts import random_size
from manyheads.recovery.queries.rotary.tangent import RotaryWeights

if TYPE_CHECKING:
    from manyheads.recovery.results import Recovery

ROTARY_METHODS = ("rotary", "scores")
METHODS = ("subspaces", "bounded")  # of layers whose answers a joint fit explains
START = 2e-3  # noise s_0 to which answers are averaged before heads are told apart
ROUNDED = 8 / 12**0.5  # noise of b bits over four standard deviations either way, times 2^b
NOISES = (1e-3, 3e-3, 1e-2, 3e-2)
BITS = (12, 10, 8, 6)
TENFOLD = 10.0
PAIRS = 14  # calls a head that find the number of heads


@dataclass(frozen=True)
class Defence:
    """One defence: noise of the answers, what extraction costs behind it, and what an honest user loses."""

    name: str
    noise: float  # relative to the standard deviation of the answers
    calls: float
    times: float  # calls over those of answers without noise
    loss: float  # squared error of an answer, relative to the variance


@dataclass(frozen=True)
class LeakMeter:
    """Cost of the extraction of a layer to a relative squared error, by what its server does.

    Parameters
    ----------
    dim, heads
        d and m of the layer.
    parameters
        Its free parameters.
    target
        Relative squared error at which it counts as extracted.
    rotary
        Weights P of the fit of a layer with RoPE; 0 for one without positions.

    Examples
    --------
    >>> meter = LeakMeter(dim=8, heads=2, parameters=250, target=1e-7)
    >>> meter.calls(0.0), round(meter.calls(0.01)), round(meter.limit(0.01))
    (452.0, 20050, 7813)
    >>> tenfold = meter.tenfold()
    >>> round(meter.calls(tenfold.noise) / meter.calls(0.0), 6), tenfold.loss > meter.target
    (10.0, True)
    """

    dim: int
    heads: int
    parameters: int
    target: float
    rotary: int = 0

    @property
    def weights(self) -> int:
        """Merged weights p of the joint fit, or free parameters of a layer with RoPE."""
        if self.rotary:
            return self.parameters
        return self.heads * (2 * self.dim**2 + self.dim) + self.dim

    @property
    def start(self) -> float:
        """Calls C of the start: of the bounded method, or of random weights."""
        if self.rotary:
            return float(with_held(random_size(self.rotary, self.dim)))
        queries = BoundedSettings().queries(self.dim, self.heads, 1.0)
        count = refinement_size(self.dim, self.heads, EXCESS)
        directions = queries * (self.dim + 1) + MIRRORS * self.dim
        return float(self.dim + 1 + PAIRS * self.heads + directions + count + max(16, count // 8))

    def calls(self, noise: float) -> float:
        """Return the calls to the target for answers with relative noise."""
        averaged = 1.0 if self.rotary else max(1.0, (noise / START) ** 2)
        return self.start * averaged + self._fit(self.weights, noise)

    def limit(self, noise: float) -> float:
        """Return the information limit of sequences of k tokens: no unbiased method needs fewer."""
        return max(self.parameters / (LENGTH * self.dim), self._fit(self.parameters, noise))

    def tenfold(self) -> Defence:
        """Return the noise at which calls are ten times those of answers without noise."""
        low, high = 0.0, 1.0
        while self.calls(high) < TENFOLD * self.start:
            high *= 2
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self.calls(middle) < TENFOLD * self.start else (low, middle)
        return self._defence(f"noise {high:.2g}, or {math.log2(ROUNDED / high):.1f} bits", high)

    def defences(self) -> tuple[Defence, ...]:
        """Return noises and roundings, and what makes extraction ten times as dear."""
        noisy = [self._defence(f"noise {noise:g}", noise) for noise in NOISES]
        rounded = [self._defence(f"rounding to {bits} bits", ROUNDED * 2.0**-bits) for bits in BITS]
        return (*noisy, *rounded, self.tenfold())

    def norm_power(self, biases: bool) -> int:
        """Return the power of the inverse norm of tokens by which calls grow where it is limited to small ones."""
        return 6 if biases or self.heads == 1 else 10

    def _fit(self, numbers: float, noise: float) -> float:
        return numbers * noise**2 / (self.target * LENGTH * self.dim)

    def _defence(self, name: str, noise: float) -> Defence:
        calls = self.calls(noise)
        return Defence(name, noise, calls, calls / self.start, noise**2)


def measure_leak(found: "Recovery", target: float) -> dict[str, Any] | None:
    """Return what the extraction would cost behind noise, rounding and a limit of norm, as JSON holds it.

    None for layers with a norm in front of them, with other scores than RoPE's, or of more than `LARGEST` weights: no
    joint fit of theirs is built, and no law measured.
    """
    layer: Any = found.layer
    verified = found.counts["verification"].calls if "verification" in found.counts else 0
    asked = found.total.calls - verified
    if found.method in ROTARY_METHODS and type(layer) is RotaryLayer and layer.turns is not None:
        weights = RotaryWeights.of(layer)
        size = weights.flat().size
        if size > LARGEST:
            return None
        return _said(LeakMeter(layer.dim, layer.heads, weights.free(LENGTH), target, size), asked, None)
    if found.method not in METHODS or not isinstance(layer, AttentionLayer):
        return None
    tolerance = rank_tolerance(float(found.certificate.largest_error))
    heads = describe_heads(layer, tolerance)
    meter = LeakMeter(layer.dim, layer.heads, free_parameters(layer.dim, heads), target)
    biases = layer.key_bias is not None and bool(
        np.linalg.norm(layer.key_bias) > tolerance * np.linalg.norm(layer.theta)
    )
    return _said(meter, asked, 2.0 ** meter.norm_power(biases))


def _said(meter: LeakMeter, asked: int, norm_factor: float | None) -> dict[str, Any]:
    return {
        "target": meter.target,
        "asked": asked,
        "calls": meter.start,
        "limit": meter.limit(0.0),
        "start": "joint fits from random weights, heads and ranks told" if meter.rotary else "method 'bounded'",
        "norm_factor": norm_factor,
        "defences": [asdict(one) | {"limit": meter.limit(one.noise)} for one in meter.defences()],
    }

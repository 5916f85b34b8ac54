r"""`recovery/leakage`: what one attack costs where the answers are noisy, rounded, short, or to small tokens only.

The attack is least squares on Gaussian sequences of four tokens with standard deviation one. It is no lower bound:
tokens three times as long cost 13 to 22 times less behind noise of fixed size, and rounding is no noise to whoever
knows the rule (`manyheads.recovery.queries.leak_meter`).

Noise s of the answers, relative to their standard deviation, is to be brought down to the squared error e of what is
extracted. Least squares on n numbers leaves p s^2 / n, p the number of weights that are fitted, so that

    calls = p s^2 / (e k d),   k tokens a call,

beyond the noise at which the calls of the start suffice, from random weights, heads and ranks told
(`manyheads.recovery.queries.rotary.random_starts`): p are the free parameters. To least squares, rounding to b bits is
noise of size ~2^-b where questions are all different, hence 4^-b; to the same question, asked again, it is always the
same error.

Tokens of size tau: answers without attention are of order tau, a logit beta^T x is too, x^T Theta x of order tau^2.
Theta is seen in answers of order tau^3, so that its cost grows as tau^-6. Sums of Theta_i x W_i over heads that are
known to have low ranks are told apart in the same order; heads of full rank by terms of second order in the logits,
(beta^T x)^2 x^T W of order tau^3 with biases, and of tau^5 without, which costs tau^-10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.queries.leak_meter import ROUNDED
from manyheads.recovery.queries.refinement import LENGTH
from manyheads.statistics import Interval, fit_exponent
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.studies.recovery.leakage_pictures import leakage_panels
from manyheads.studies.recovery.noisy_extraction import (
    DITHER,
    FAMILIES,
    NORMS,
    SHAPES,
    Server,
    attack,
    build_layer,
    extract_from,
    free_numbers,
    least_calls,
)
from manyheads.study import Cell, Claim, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel

QUERIES = Source(
    "bhattamishra2026",
    "Provably Learning Attention with Queries",
    "Satwik Bhattamishra and Kulin Shah and Michael Hahn and Varun Kanade",
    2026,
    kind="inproceedings",
    venue="International Conference on Machine Learning",
    identifier="2601.16873",
    locus="abstract: a polynomial number of queries under additive tolerance; powers and attacks are derived here",
)
RISING = 3e-3
"""Noise from which the start's calls do not suffice, for a target of 1e-7."""

TENFOLD = 10.0
CLOSE = 3.0
"""Factor over the bound: leverage of single rows, the start and whole steps of the search."""


@dataclass(frozen=True)
class Leakage(Study):
    """Least squares on noisy or rounded answers costs the square of the noise; small tokens cost the most.

    Attributes
    ----------
    families
        Of gpt2, llama and qwen.
    noises
        Noise of the answers, relative to their standard deviation.
    bits
        Bits to which answers are rounded, over four standard deviations either way.
    repeats
        How often each question is asked, where answers are rounded to the most of `bits`.
    norms
        Standard deviations of tokens where their norm is limited.
    lengths
        Tokens of a call where they are limited.
    numbers
        Numbers of heads, whose ranks are the dimension over them.
    dim, heads
        Of the layers.
    target
        Relative squared error at which a layer counts as extracted.
    count
        Calls of which the Cramer-Rao bound is taken, for norms, lengths and heads.
    """

    name: ClassVar[str] = "recovery/leakage"
    claim: ClassVar[str] = "Least squares on noisy or rounded answers costs the square of the noise"
    source: ClassVar[Source] = QUERIES
    revision: ClassVar[int] = 3

    families: tuple[str, ...] = ("gpt2", "llama", "qwen")
    noises: tuple[float, ...] = (1e-6, 1e-3, 3e-3, 6e-3)
    bits: tuple[int, ...] = (8, 9, 10, 12)
    repeats: tuple[int, ...] = (4, 16, 64)
    norms: tuple[float, ...] = (0.025, 0.05, 0.1)
    lengths: tuple[int, ...] = (2, 4, 8)
    numbers: tuple[int, ...] = (1, 4)
    dim: int = 8
    heads: int = 2
    target: float = 1e-7
    count: int = 200

    def __post_init__(self) -> None:
        if not set(self.families) <= set(FAMILIES) or "gpt2" not in self.families:
            raise UsageError(f"families={self.families}: gpt2, and any of {', '.join(FAMILIES[1:])}")
        for name, least in (("noises", 3), ("bits", 2), ("repeats", 2), ("norms", 2), ("lengths", 2), ("numbers", 2)):
            given = getattr(self, name)
            if len(given) < least or list(given) != sorted(set(given)) or not given[0] > 0:
                raise UsageError(f"{name}={given}: give {least} or more, positive, in rising order")
        if self.dim % self.heads or (self.dim // self.heads) % 2 or self.heads < 2:
            raise UsageError(f"dim={self.dim}, heads={self.heads}: two heads or more, of an even dimension each")
        if any(self.dim % (2 * number) for number in self.numbers):
            raise UsageError(f"dim={self.dim}, numbers={self.numbers}: heads of an even dimension each")
        if not 0 < self.target < 1:
            raise UsageError(f"target={self.target}: give a relative squared error between 0 and 1")

    @classmethod
    def full(cls) -> Leakage:
        """Return the study at 16 dimensions and four heads."""
        return cls(dim=16, heads=4)

    @classmethod
    def small(cls) -> Leakage:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            families=("gpt2", "llama"),
            noises=(1e-6, 1e-3, 1e-2),
            bits=(8, 10),
            repeats=(4, 16),
            norms=(0.05, 0.1),
            lengths=(2, 4),
            numbers=(1, 2),
            dim=4,
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return every family at every noise, rounding, length and number of heads; the rest for GPT-2's shape."""
        of_all: list[tuple[str, tuple[float, ...]]] = [
            ("noise", self.noises),
            ("bits", self.bits),
            ("length", self.lengths),
            ("heads", self.numbers),
        ]
        cells = [
            Cell(family=f, limit=n, size=float(s))
            for n, sizes in of_all
            for f in self.families
            for s in (sizes[1:2] if n == "bits" and f != "gpt2" else sizes)
        ]
        others: list[tuple[str, tuple[float, ...]]] = [
            ("same", self.repeats),
            ("nearby", self.repeats),
        ]
        others += [(name, self.norms) for name in NORMS]
        return tuple(cells + [Cell(family="gpt2", limit=name, size=float(s)) for name, sizes in others for s in sizes])

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the bound of Gaussian sequences: free parameters over numbers of a call, times s^2 / e if more."""
        families, noises = list(self.families), np.asarray(self.noises)
        free = [free_numbers(family, self.dim, self.heads) for family in families]
        least = np.outer(free, np.maximum(1.0, noises**2 / self.target)) / (LENGTH * self.dim)
        by_heads = np.array([[free_numbers(f, self.dim, number) for number in self.numbers] for f in families])
        return xr.Dataset(
            {
                "limit": (("family", "noise"), least, label("calls")),
                "limit_by_heads": (
                    ("family", "heads"),
                    by_heads / (LENGTH * self.dim),
                    label("calls in units of s^2 / e"),
                ),
            },
            coords={"family": families, "noise": noises, "heads": list(self.numbers)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Attack one server, or take the bound of one limit; the layer of a family is the same in all cells."""
        family, limit, size = str(cell["family"]), str(cell["limit"]), float(cell["size"])
        for_layer, for_server, for_queries = generator(key).spawn(3)
        calls = tokens = error = honest = math.nan
        if limit in (*NORMS, "length", "heads"):
            length = int(size) if limit == "length" else LENGTH
            heads = int(size) if limit == "heads" else self.heads
            scale = size if limit in NORMS else 1.0
            biases = limit != NORMS[1]
            calls = least_calls(family, for_layer, (self.dim, heads), length, scale, self.count, biases)
            tokens = length * calls
        else:
            layer = build_layer(family, for_layer, self.dim, self.heads)
            bits = {"noise": 0.0, "bits": size}.get(limit, float(self.bits[-1]))
            noise = size if limit == "noise" else 0.0
            server = Server(layer, self.dim, for_server, noise, bits)
            honest = server.honest()
            if limit in ("same", "nearby"):
                _, cost = extract_from(family, server, for_queries, int(size), DITHER if limit == "nearby" else 0.0)
            else:
                cost = attack(family, server, for_queries, self.target, self.heads)
            calls, tokens, error = cost.calls, cost.tokens, cost.error
        named = (
            ("calls", calls, "calls to the target, or in units of s^2 / e"),
            ("tokens", tokens, "tokens of these calls"),
            ("error", error, "relative squared error of what was found"),
            ("honest", honest, "relative squared error of an answer"),
        )
        return xr.Dataset({name: ((), float(value), label(words)) for name, value, words in named})

    def over_sizes(self, trained: xr.Dataset, name: str, family: str, limit: str) -> np.ndarray:
        """Return a variable over the sizes of a limit, (replicates, sizes)."""
        chosen = (trained["family"].values == family) & (trained["limit"].values == limit)
        return trained[name].isel(cell=np.flatnonzero(chosen)).transpose("replicate", "cell").values

    def tenfold(self, trained: xr.Dataset, family: str) -> np.ndarray:
        """Return the noise, (replicates,), at which calls are ten times the fewest, between sizes in logarithms."""
        logs = np.log(self.over_sizes(trained, "calls", family, "noise"))
        wanted = logs.min(1) + math.log(TENFOLD)
        noises = np.log(self.noises)
        return np.exp([np.interp(w, np.maximum.accumulate(row), noises) for w, row in zip(wanted, logs, strict=True)])

    def over_limit(self, predicted: xr.Dataset, trained: xr.Dataset, family: str) -> np.ndarray:
        """Return the calls at the largest noise over the information limit, (replicates,)."""
        largest = self.noises[-1]
        asked = of_cell(trained, "calls", family=family, limit="noise", size=largest)
        return np.asarray(asked / float(predicted["limit"].sel(family=family, noise=largest)))

    def over_limit_by_heads(self, predicted: xr.Dataset, trained: xr.Dataset, family: str) -> np.ndarray:
        """Return the Cramer-Rao bound by number of heads over the information limit, (replicates, numbers)."""
        calls = self.over_sizes(trained, "calls", family, "heads")
        return np.asarray(calls / predicted["limit_by_heads"].sel(family=family).values)

    def claims(self) -> tuple[Claim, ...]:
        """Compare powers with those derived, and the loss of an honest user with the error of the copy."""

        def power(name: str, sizes: tuple[float, ...], limit: str, family: str = "gpt2", last: int = 0) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
                values = self.over_sizes(trained, name, family, limit)[:, -last:]
                fit = fit_exponent(np.asarray(sizes, float)[-last:], values)
                return fit.exponent, fit.interval

            return measure

        def per_bit(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            values = self.over_sizes(trained, "calls", "gpt2", "bits")
            fit = fit_exponent(2.0 ** np.asarray(self.bits, float)[:3], values[:, :3])
            return fit.exponent, fit.interval

        def over_noise(family: str) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
                noisy = np.log10(self.over_sizes(trained, "calls", family, "noise"))
                bits = self.bits[1]  # the one at which all families are attacked
                rounded = np.log10(of_cell(trained, "calls", family=family, limit="bits", size=float(bits)))
                at = math.log(ROUNDED * 2.0**-bits)
                return rounded - np.array([np.interp(at, np.log(self.noises), row) for row in noisy])

            return measure

        def at_largest(family: str) -> Measure:
            return lambda predicted, trained: np.log10(self.over_limit(predicted, trained, family))

        def by_heads(family: str) -> Measure:
            return lambda predicted, trained: np.log10(self.over_limit_by_heads(predicted, trained, family).max(1))

        def loss(family: str) -> Measure:
            return lambda predicted, trained: np.log10(self.tenfold(trained, family) ** 2 / self.target)

        rising = max(2, sum(noise >= RISING for noise in self.noises))

        exact = "a power counted from the orders of the answers"
        found = [
            Claim(
                f"The calls by which least squares extracts a {SHAPES[family]} layer from noisy answers grow as the "
                "square of the noise",
                power("calls", self.noises, "noise", family, rising),
                quantity="exponent of calls in the noise",
                target=2.0,
                tolerance=0.4,
                basis="errors are p s^2 / n; a share of the calls is the start's, which steps in whole answers",
            )
            for family in self.families
        ] + [
            Claim(
                f"Noise that makes least squares on a {SHAPES[family]} layer cost ten times as much costs an honest "
                "user more than the copy's error",
                loss(family),
                quantity="squared error of the answers over the copy's (log10)",
                target=0.0,
                tolerance=(0.0, math.inf),
                basis="log10; with p s^2 / n it is ten times the calls over the information limit, above one",
            )
            for family in self.families
        ]
        for family in self.families:
            found += [
                Claim(
                    f"At the largest noise calls for a {SHAPES[family]} layer are within a factor of {CLOSE:g} of the "
                    "Cramér-Rao bound of these queries",
                    at_largest(family),
                    quantity="calls over the bound (log10)",
                    target=0.0,
                    tolerance=(0.0, math.log10(CLOSE)),
                    basis="free parameters alone are fitted; leverage of rows, the start, whole steps of the search",
                ),
                Claim(
                    f"With every number of heads the bound of the calls for a {SHAPES[family]} layer stays within a "
                    f"factor of {CLOSE:g} of the free parameters",
                    by_heads(family),
                    quantity="largest bound over the limit (log10)",
                    target=0.0,
                    tolerance=math.log10(CLOSE),
                    basis="the limit counts the free parameters, the bound weighs them: leverage of single rows",
                ),
                Claim(
                    f"To least squares rounding costs what noise of the same size costs, for a {SHAPES[family]} layer",
                    over_noise(family),
                    quantity="calls under rounding over calls under noise (log10)",
                    target=0.0,
                    tolerance=math.log10(2.0),
                    basis="a factor of two: noise between its sizes is interpolated",
                ),
                Claim(
                    f"Longer calls to a {SHAPES[family]} layer save more than their tokens",
                    power("calls", self.lengths, "length", family),
                    quantity="exponent of calls in the length",
                    target=-1.0,
                    tolerance=(math.inf, 0.0),
                    basis="the first row of a sequence shows the sum of the projections alone: k - 1 rows of k inform",
                ),
            ]
        return (
            *found,
            Claim(
                "Calls of least squares fall by a factor of four with every bit by which answers are rounded less "
                "coarsely",
                per_bit,
                quantity="exponent of calls in 2^bits",
                target=-2.0,
                tolerance=0.4,
                basis="rounding to b bits is noise of size 2^-b to questions that are all different",
            ),
            Claim(
                "Asking the same rounded question again does not lower the error",
                power("error", self.repeats, "same"),
                quantity="exponent of the error in the number of answers",
                target=0.0,
                tolerance=0.1,
                basis="the answer is the same each time; only what the attack believes of its noise changes",
            ),
            Claim(
                "Asking rounded questions near by lowers the squared error in inverse proportion",
                power("error", self.repeats, "nearby"),
                quantity="exponent of the error in the number of answers",
                target=-1.0,
                tolerance=0.25,
                basis="tokens moved by less than a step round independently; what remains of the step's bias, doubled",
            ),
            Claim(
                "With biases the calls grow as the sixth power of the inverse norm of the tokens",
                power("calls", self.norms, NORMS[0]),
                quantity="exponent of calls in the norm",
                target=-6.0,
                tolerance=0.5,
                basis=exact,
            ),
            Claim(
                "Without biases heads whose ranks are known are told apart at the sixth power, too",
                power("calls", self.norms, NORMS[1]),
                quantity="exponent of calls in the norm",
                target=-6.0,
                tolerance=0.5,
                basis=exact,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show calls by noise and limit, the loss of an honest user, rounding, repeated questions, norms, lengths."""
        return leakage_panels(self, predicted, trained)

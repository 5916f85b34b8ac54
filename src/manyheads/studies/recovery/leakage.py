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

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery.queries.leak_meter import ROUNDED
from manyheads.recovery.queries.refinement import LENGTH
from manyheads.studies.recovery import noisy_extraction as servers
from manyheads.studies.recovery.noisy_extraction import FAMILIES, NORMS, SHAPES
from manyheads.theory.papers import BHATTAMISHRA

RISING = 3e-3
"""Noise from which the start's calls do not suffice, for a target of 1e-7."""

TENFOLD = 10.0
CLOSE = 3.0
"""Factor over the bound: leverage of single rows, the start and whole steps of the search."""

AXES = {
    "length": ("length", "tokens of a call"),
    **dict.fromkeys(("same", "nearby"), ("answers", "answers to each question")),
    **dict.fromkeys(NORMS, ("norm", "standard deviation of the tokens")),
}
"""Dimension of the sizes of a limit, and what they are."""


class Leakage(st.Study):
    """Least squares on noisy or rounded answers costs the square of the noise; small tokens cost the most."""

    name = "recovery/leakage"
    claim = "Least squares on noisy or rounded answers costs the square of the noise"
    source = BHATTAMISHRA.at(
        "abstract: a polynomial number of queries under additive tolerance; powers and attacks are derived here"
    )
    revision = 3

    families: tuple[str, ...] = st.setting(
        FAMILIES, "shapes of layers, gpt2 among them", choices=FAMILIES, small=("gpt2", "llama")
    )
    noises: tuple[float, ...] = st.sweep(
        (1e-6, 1e-3, 3e-3, 6e-3),
        "noise of the answers, relative to their standard deviation",
        above=0,
        count=3,
        small=(1e-6, 1e-3, 1e-2),
    )
    bits: tuple[int, ...] = st.sweep(
        (8, 9, 10, 12), "bits to which answers are rounded, over four standard deviations either way", small=(8, 10)
    )
    repeats: tuple[int, ...] = st.sweep(
        (4, 16, 64), "how often each question is asked, where answers are rounded to the most bits", small=(4, 16)
    )
    norms: tuple[float, ...] = st.sweep(
        (0.025, 0.05, 0.1), "standard deviations of tokens where their norm is limited", above=0, small=(0.05, 0.1)
    )
    lengths: tuple[int, ...] = st.sweep((2, 4, 8), "tokens of a call where they are limited", small=(2, 4))
    numbers: tuple[int, ...] = st.sweep(
        (1, 4), "numbers of heads, whose ranks are the dimension over them", small=(1, 2)
    )
    dim: int = st.setting(8, "token dimension", small=4, full=16)
    heads: int = st.setting(2, "heads of the layers", least=2, full=4)
    target: float = st.setting(1e-7, "relative squared error at which a layer counts as extracted", above=0, below=1)
    count: int = st.setting(200, "calls of which the Cramer-Rao bound is taken, for norms, lengths and heads")

    def check(self) -> None:
        if "gpt2" not in self.families:
            raise st.UsageError(f"families={self.families}: expected gpt2 among them")
        if any(self.dim % (2 * number) for number in (self.heads, *self.numbers)):
            given = f"dim={self.dim}, heads={self.heads}, numbers={self.numbers}"
            raise st.UsageError(f"{given}: expected heads of an even dimension each")

    def cells(self) -> tuple[st.Cell, ...]:
        """Return every family at every noise, rounding, length and number of heads; the rest for GPT-2's shape."""
        of_all = {"noise": self.noises, "bits": self.bits, "length": self.lengths, "heads": self.numbers}
        others = {"same": self.repeats, "nearby": self.repeats} | dict.fromkeys(NORMS, self.norms)
        places = [
            (family, limit, size)
            for limit, sizes in of_all.items()
            for family in self.families
            for size in (sizes[1:2] if limit == "bits" and family != "gpt2" else sizes)
        ] + [("gpt2", limit, size) for limit, sizes in others.items() for size in sizes]
        return tuple(st.Cell(family=family, limit=limit, size=float(size)) for family, limit, size in places)

    def predict(self, key: jax.Array) -> st.Record:
        """Return the bound of Gaussian sequences: free parameters over numbers of a call, times s^2 / e if more."""
        noises = np.asarray(self.noises)
        free, *by_heads = (
            [servers.free_numbers(family, self.dim, number) for family in self.families]
            for number in (self.heads, *self.numbers)
        )
        least = np.outer(free, np.maximum(1.0, noises**2 / self.target)) / (LENGTH * self.dim)
        least_by_heads = np.array(by_heads).T / (LENGTH * self.dim)
        return {
            "family": ("family", list(self.families), "family", None),
            "noise": ("noise", noises, "noise of the answers"),
            "heads": ("heads", list(self.numbers), "heads"),
            "limit": (("family", "noise"), least, "calls"),
            "limit_by_heads": (("family", "heads"), least_by_heads, "calls in units of s^2 / e"),
        }

    def train(self, key: jax.Array, family: str, limit: str, size: float) -> st.Record:
        """Attack one server, or take the bound of one limit; the layer of a family is the same in all cells."""
        for_layer, for_server, for_queries = st.generator(key).spawn(3)
        error = honest = math.nan
        if limit in (*NORMS, "length", "heads"):
            length = int(size) if limit == "length" else LENGTH
            heads = int(size) if limit == "heads" else self.heads
            scale = size if limit in NORMS else 1.0
            biases = limit != NORMS[1]
            calls = servers.least_calls(family, for_layer, (self.dim, heads), length, scale, self.count, biases)
            tokens = length * calls
        else:
            layer = servers.build_layer(family, for_layer, self.dim, self.heads)
            bits = {"noise": 0.0, "bits": size}.get(limit, float(self.bits[-1]))
            server = servers.Server(layer, self.dim, for_server, size if limit == "noise" else 0.0, bits)
            honest = server.honest()
            if limit in ("same", "nearby"):
                dither = servers.DITHER if limit == "nearby" else 0.0
                _, cost = servers.extract_from(family, server, for_queries, int(size), dither)
            else:
                cost = servers.attack(family, server, for_queries, self.target, self.heads)
            calls, tokens, error = cost.calls, cost.tokens, cost.error
        return {
            "calls": ((), float(calls), "calls to the target, or in units of s^2 / e"),
            "tokens": ((), float(tokens), "tokens of these calls"),
            "error": ((), float(error), "relative squared error of what was found"),
            "honest": ((), float(honest), "relative squared error of an answer"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        rising = max(2, sum(noise >= RISING for noise in self.noises))
        for family in self.families:
            noisy = _over(trained, family, "noise", self.noises).isel(noise=slice(-rising, None))
            yield st.Claim(
                f"The calls by which least squares extracts a {SHAPES[family]} layer from noisy answers grow as the "
                "square of the noise",
                st.exponent(noisy, "noise").value,
                st.near(2, 0.4),
                "errors are p s^2 / n; a share of the calls is the start's, which steps in whole answers",
                "exponent of calls in the noise",
            )
        for family in self.families:
            yield st.Claim(
                f"Noise that makes least squares on a {SHAPES[family]} layer cost ten times as much costs an honest "
                "user more than the copy's error",
                _log10(self._tenfold(trained, family) ** 2 / self.target),
                st.above(0),
                "log10; with p s^2 / n it is ten times the calls over the information limit, above one",
                "squared error of the answers over the copy's (log10)",
            )
        for family in self.families:
            yield from self._of_family(family, theory.sel(family=family), trained)
        yield from self._of_limits(trained)

    def _of_family(self, family: str, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        noisy, bit = _over(trained, family, "noise", self.noises), self.bits[1]  # at which all families are attacked
        yield st.Claim(
            f"At the largest noise calls for a {SHAPES[family]} layer are within a factor of {CLOSE:g} of the "
            "Cramér-Rao bound of these queries",
            _log10((noisy / theory["limit"]).isel(noise=-1)),
            st.near(0, (0, math.log10(CLOSE))),
            "free parameters alone are fitted; leverage of rows, the start, whole steps of the search",
            "calls over the bound (log10)",
        )
        by_heads = _over(trained, family, "heads", self.numbers) / theory["limit_by_heads"]
        yield st.Claim(
            f"With every number of heads the bound of the calls for a {SHAPES[family]} layer stays within a factor of "
            f"{CLOSE:g} of the free parameters",
            _log10(by_heads.max("heads")),
            st.near(0, math.log10(CLOSE)),
            "the limit counts the free parameters, the bound weighs them: leverage of single rows",
            "largest bound over the limit (log10)",
        )
        rounded = _over(trained, family, "bits", (bit,)).isel(bits=0)
        at = math.log(ROUNDED * 2.0**-bit)
        same = xr.DataArray([np.interp(at, np.log(self.noises), row) for row in _log10(noisy).values], dims="replicate")
        text = f"To least squares rounding costs what noise of the same size costs, for a {SHAPES[family]} layer"
        basis = "a factor of two: noise between its sizes is interpolated"
        quantity = "calls under rounding over calls under noise (log10)"
        yield st.Claim(text, _log10(rounded) - same, st.near(0, math.log10(2)), basis, quantity)
        yield st.Claim(
            f"Longer calls to a {SHAPES[family]} layer save more than their tokens",
            st.exponent(_over(trained, family, "length", self.lengths), "length"),
            st.below(-1),
            "the first row of a sequence shows the sum of the projections alone: k - 1 rows of k inform",
            "exponent of calls in the length",
        )

    def _of_limits(self, trained: st.Data) -> Iterator[st.Claim]:
        bits = self.bits[:3]
        yield st.Claim(
            "Calls of least squares fall by a factor of four with every bit by which answers are rounded less coarsely",
            st.exponent(_over(trained, "gpt2", "bits", bits).assign_coords(bits=2.0 ** np.asarray(bits)), "bits").value,
            st.near(-2, 0.4),
            "rounding to b bits is noise of size 2^-b to questions that are all different",
            "exponent of calls in 2^bits",
        )
        what = f"squared error by rounded answers, {self.bits[-1]} bits"
        quantity = "exponent of the error in the number of answers"
        same, nearby = (
            st.exponent(_over(trained, "gpt2", limit, self.repeats, "error"), "answers", what=what)
            for limit in ("same", "nearby")
        )
        text = "Asking the same rounded question again does not lower the error"
        basis = "the answer is the same each time; only what the attack believes of its noise changes"
        yield st.Claim(text, same, st.near(0, 0.1), basis, quantity)
        text = "Asking rounded questions near by lowers the squared error in inverse proportion"
        basis = "tokens moved by less than a step round independently; what remains of the step's bias, doubled"
        yield st.Claim(text, nearby, st.near(-1, 0.25), basis, quantity)
        basis, quantity = "a power counted from the orders of the answers", "exponent of calls in the norm"
        texts = (
            "With biases the calls grow as the sixth power of the inverse norm of the tokens",
            "Without biases heads whose ranks are known are told apart at the sixth power, too",
        )
        for limit, text in zip(NORMS, texts, strict=True):
            figure = st.exponent(_over(trained, "gpt2", limit, self.norms), "norm")
            yield st.Claim(text, figure, st.near(-6, 0.5), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> Iterator[st.Panel]:
        calls = {SHAPES[family]: _over(trained, family, "noise", self.noises) for family in self.families}
        fewest = {shape: each.min("noise") for shape, each in calls.items()}
        yield st.lines(
            f"Calls of least squares to a squared error of {self.target:g}",
            "noise",
            "calls",
            calls,
            {},
            {"bound of these queries": theory["limit"].rename(family="replicate")},
            x_label="noise of the answers",
            log="xy",
            note="Bands: full range of the replicates.",
            shows=("grow as the square of the noise",),
        )
        squares = np.square(self.noises)
        dear = {shape: (each / fewest[shape]).assign_coords(noise=squares) for shape, each in calls.items()}
        yield st.lines(
            "Cost of extraction by what an honest user loses",
            "noise",
            "calls over the fewest",
            dear,
            {},
            {"ten times as much": xr.DataArray([TENFOLD] * 2, {"noise": squares[[0, -1]]}, "noise")},
            x_label="squared error of the answers",
            log="xy",
            note=f"The copy's squared error is {self.target:g}.",
            shows=("costs an honest",),
        )
        rounded, errors = _over(trained, "gpt2", "bits", self.bits), ROUNDED * 2.0 ** -np.asarray(self.bits)
        both = {"noise": calls[SHAPES["gpt2"]], "bits": rounded.assign_coords(bits=errors).rename(bits="noise")}
        labels, label = ("Rounding beside noise", "noise", "calls"), "error of the answers"
        note, shows = f"GPT-2-shaped. {self.bits[0]} to {self.bits[-1]} bits.", ("rounding costs what",)
        yield st.lines(*labels, both, x_label=label, log="xy", note=note, shows=shows)
        over = {
            SHAPES[family]: _over(trained, family, "heads", self.numbers) / theory["limit_by_heads"].sel(family=family)
            for family in self.families
        }
        labels = "Number of heads", "heads", "bound of the calls over the information limit"
        note, shows = f"Cramer-Rao bound. Ranks are {self.dim} over the heads.", ("With every number of heads",)
        yield st.lines(*labels, over, log="xy", note=note, shows=shows)

        def row(family: str) -> dict[str, str]:
            noise = float(np.exp(np.log(self._tenfold(trained, family)).mean()))
            return {
                "layer": SHAPES[family],
                "fewest calls": f"{float(fewest[SHAPES[family]].mean()):,.0f}",
                "noise": f"{noise:.2g}",
                "as bits": f"{math.log2(ROUNDED / noise):.1f}",
                "squared error of answers": f"{noise**2:.2g}",
                "over the copy's": f"{noise**2 / self.target:.2g}",
            }

        note = "Means of replicates, in logarithms. Least squares on tokens of standard deviation one."
        yield st.table("What makes least squares ten times as dear", map(row, self.families), note)

    def _tenfold(self, trained: st.Data, family: str) -> xr.DataArray:
        """Return the noise at which calls are ten times the fewest, between sizes in logarithms."""
        logs, noises = st.log(_over(trained, family, "noise", self.noises)).values, np.log(self.noises)
        wanted = logs.min(1) + math.log(TENFOLD)
        found = [np.interp(w, np.maximum.accumulate(row), noises) for w, row in zip(wanted, logs, strict=True)]
        return xr.DataArray(np.exp(found), dims="replicate")


def _over(trained: st.Data, family: str, limit: str, sizes: Sequence[float], name: str = "calls") -> xr.DataArray:
    """Return a variable over the sizes of a limit, (replicate, limit)."""
    axis, words = AXES.get(limit, (limit, limit))
    chosen = trained[name].sel(family=family, limit=limit, size=[float(size) for size in sizes]).rename(None)
    return chosen.rename(limit="kind", size=axis).assign_coords({axis: (axis, list(sizes), {"long_name": words})})


def _log10(values: xr.DataArray) -> xr.DataArray:
    return st.log(values) / np.log(10)

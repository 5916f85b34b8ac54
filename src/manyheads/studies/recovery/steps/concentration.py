r"""`recovery/concentration`: variance of softmax attention, and of its conditional expectation given Hamming weights.

Logits of fixed size make a softmax pattern that is random however many tokens or dimensions there are. Given how many
ones each coordinate has over the tokens of a sequence, that is given the sum of the tokens, its expectation is close to
uniform: this is what lets one gradient step from uniform attention see the projections. Patterns with the same Hamming
weights are drawn by permuting every coordinate over the tokens; the variance of the conditional expectation is the
covariance of two of them, without bias.

With :math:`z = x_r \Theta x_j^\top` and k A = 1 + z - mean_j z, the pattern has the variance beta^2 (1 - 1/k) over all
its entries. Given the sum S of the tokens, those of one coordinate are exchangeable, so that every logit has the same
expectation but that of a token with itself, and

.. math:: \mathbb{E}[\mathrm{tr} A | S] = 1 + \sum_c \Theta_{cc} (1 - S_c^2 / k^2), \qquad
          \mathrm{Var} = 2 (k - 1) \|\mathrm{diag}\, \Theta\|^2 / k^3 .

Over all entries this is the variance of the trace over k - 1. The squared diagonal is beta^2 / d for a matrix in
general position, and beta^2 for one that is diagonal.
"""

import math
from collections.abc import Iterator

import jax
import numpy as np

import manyheads.study as st
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.theory.papers import CHEN_LI

COPIES = 8  # sequences with the same Hamming weights
SERIES = ("tokens", "dims", "diagonal")  # more tokens, more dimensions, and these with a diagonal attention matrix
FIGURES = {"pattern": "variance of the pattern", "given": "variance of its expectation given Hamming weights"}
GIVEN = "The variance of its conditional expectation given Hamming weights"


class Concentration(st.Study):
    """Softmax attention does not concentrate; its conditional expectation given Hamming weights does."""

    name = "recovery/concentration"
    claim = "Softmax does not concentrate; given Hamming weights its expectation does"
    revision = 2
    source = CHEN_LI.at("example of the talk; both laws and their constants derived here")

    tokens: tuple[int, ...] = st.sweep(
        (4, 8, 16), "Lengths k, in dims[0] dimensions", least=2, small=(2, 4), full=(4, 8, 16, 32)
    )
    dims: tuple[int, ...] = st.sweep(
        (8, 16, 32), "Dimensions d, equal to the stable rank, of tokens[0] tokens", small=(2, 4), full=(8, 16, 32, 64)
    )
    scale: float = st.setting(0.5, "Standard deviation of the logits", least=1e-9)
    layers: int = st.setting(8, "Attention matrices of a replicate: their diagonals differ", least=1, small=1)
    count: int = st.setting(2000, "Hamming weights drawn for each matrix", least=2, small=400, full=10_000)

    def cells(self) -> tuple[st.Cell, ...]:
        ladders = {"tokens": self.tokens, "dims": self.dims, "diagonal": self.dims}
        return tuple(st.Cell(series=series, size=size) for series, sizes in ladders.items() for size in sizes)

    def predict(self, key: jax.Array) -> st.Record:
        series, size = zip(*(cell.values() for cell in self.cells()), strict=True)
        length, dim = np.array([self._sizes(*place) for place in zip(series, size, strict=True)]).T
        diagonal = self.scale**2 / np.where(np.array(series) == "diagonal", 1, dim)
        return {
            "pattern": ("place", self.scale**2 * (1 - 1 / length), FIGURES["pattern"]),
            "given": ("place", 2 * diagonal / length**3, FIGURES["given"]),
        }

    def train(self, key: jax.Array, series: str, size: int) -> st.Record:
        """Measure both variances over all entries of the pattern, for several attention matrices."""
        rngs = st.generator(key).spawn(self.layers)
        means = np.mean([self._measure(rng, series, size) for rng in rngs], axis=0)
        labels = FIGURES | {"diagonal": "squared norm of the diagonal, over that in general position"}
        return {name: ((), float(mean), labels[name]) for name, mean in zip(labels, means, strict=True)}

    def claims(self, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        tokens, dims, diagonal = (trained.sel(series=series) for series in SERIES)
        apart = "half of the distance of the two laws' powers"
        text = "The variance of a softmax pattern does not fall with the number of tokens"
        basis = "an inequality: beta^2 (1 - 1/k) rises; a quarter for the error of the slope"
        quantity = "power of the length k"
        yield st.Claim(text, st.exponent(tokens["pattern"], "size"), st.near(0, (0.25, math.inf)), basis, quantity)
        text = "The variance of a softmax pattern does not fall with the dimension"
        basis = "logits keep their size; a quarter, for corrections of order 1/d"
        yield st.Claim(text, st.exponent(dims["pattern"], "size"), st.near(0, 0.25), basis, "power of the dimension d")
        scaled = tokens["given"] / tokens["diagonal"]  # one matrix at all lengths: its diagonal is a common factor
        figure = st.exponent_of_mean(scaled, "size", what="variance over the squared diagonal")
        basis, power = "neither k^-2 nor k^-4: half of the distance to them", "power of the dimension d"
        yield st.Claim(f"{GIVEN} falls as k^-3", figure, st.near(-3, 0.5), basis, "power of the length k")
        figure = st.exponent_of_mean(dims["given"], "size")
        yield st.Claim(f"{GIVEN} falls as 1/d", figure, st.near(-1, 0.5), apart, power)
        last, law = dims.sel(size=self.dims[-1]), theory["given"][len(self.tokens) + len(self.dims) - 1]
        text = "At the largest dimension the variance of the conditional expectation is 2 |diag Theta|^2 / k^3"
        basis, quantity = "the next order is scale^2 relative to it, doubled", "variance over that of the closed form"
        yield st.Claim(text, last["given"] / (law * last["diagonal"]), st.near(1, 2 * self.scale**2), basis, quantity)
        text = "Control: for a diagonal attention matrix the variance does not fall with the dimension"
        yield st.Claim(text, st.exponent_of_mean(diagonal["given"], "size"), st.near(0, 0.5), apart, power)

    def _sizes(self, series: str, size: int) -> tuple[int, int]:
        return (size, self.dims[0]) if series == "tokens" else (self.tokens[0], size)

    def _measure(self, rng: np.random.Generator, series: str, size: int) -> tuple[float, float, float]:
        for_layer, for_data = rng.spawn(2)
        length, dim = self._sizes(series, size)
        if series == "diagonal":
            theta = self.scale / dim**0.5 * np.diag((-1.0) ** np.arange(dim))  # no trace: logits keep their mean
        else:
            theta = np.asarray(equal_spectrum_layer(for_layer, dim, 1, dim, scale=self.scale).theta[0])
        x = sequences(for_data, self.count, length, dim)
        traces, squares, mean = np.empty((COPIES, self.count)), 0.0, np.zeros((length, length))
        for copy in range(COPIES):
            x = for_data.permuted(x, axis=1)  # every coordinate by itself, over the tokens
            pattern = softmax((x @ theta) @ x.transpose(0, 2, 1))
            traces[copy] = np.trace(pattern, axis1=1, axis2=2)
            squares, mean = squares + float(np.square(pattern).sum()), mean + pattern.sum(0)
        drawn = COPIES * self.count
        own = float(np.trace(mean)) / length / drawn  # expected weight of a token on itself; the others share the rest
        expected = length * own**2 + (1 - own) ** 2 * length / (length - 1)
        between = traces.mean(0).var(ddof=1) - traces.var(0, ddof=1).mean() / COPIES
        diagonal = float(np.sum(np.diag(theta) ** 2)) * dim / self.scale**2
        return squares / drawn - expected, float(between) / (length - 1), diagonal

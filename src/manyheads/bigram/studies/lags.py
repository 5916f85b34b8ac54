"""`bigram/lags`: planted lags on real text are found by regression where counting each lag by itself is misled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram.lags import LagFit, LagSettings, fit_lags
from manyheads.bigram.screening import screen
from manyheads.bigram.streams import plant_lags, read_streams
from manyheads.data import Vocabulary, build_vocabulary, load_text
from manyheads.errors import UsageError
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Source, Study, Verdict, grid, spread_curve

REAL_LAGS = 16  # lags of the fit to the text's own next character
HELD_OUT = 0.1  # share of a stream on which losses are measured, beyond the samples of the fit


@dataclass(frozen=True)
class PlantedLags(Study):
    """A shared transition finds the lags that were planted on real text; counting lag by lag finds half of them.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation.
    sizes
        Samples of a fit, rising.
    lags
        Lags L, lag 0 included.
    planted
        Lags that every symbol's target depends on, drawn from 1 to L - 1.
    vocabulary
        Symbols: the most frequent characters in lower case, and one for all others.
    """

    name: ClassVar[str] = "bigram/lags"
    claim: ClassVar[str] = "one shared transition finds planted lags of real text where counting lag by lag is misled"
    source: ClassVar[Source] = Source(
        "ren2024",
        "Learning and Transferring Sparse Contextual Bigrams with Linear Transformers",
        "Yunwei Ren and Zixuan Wang and Jason D. Lee",
        2024,
        venue="NeurIPS",
        identifier="2410.23438",
        locus="the model; fitting it to streams by alternating least squares, and planting, are ours",
    )

    text: Path | None = None
    sizes: tuple[int, ...] = (5000, 20_000)
    lags: int = 64
    planted: int = 2
    vocabulary: int = 32

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise UsageError(f"sizes={self.sizes}: give one or more, rising")
        if not 1 <= self.planted < self.lags:
            raise UsageError(f"planted={self.planted}: between 1 and the {self.lags - 1} lags beyond the symbol itself")

    @classmethod
    def full(cls) -> PlantedLags:
        """Return the study up to 250,000 samples."""
        return cls(sizes=(20_000, 60_000, 250_000))

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text.

        Raises
        ------
        UsageError
            The text is too short for the largest fit.
        """
        text = load_text(self.text)
        needed = self._stretch(max(self.sizes))
        if len(text.content) <= needed:
            raise UsageError(f"{text.name} has {len(text.content)} characters: fits of {max(self.sizes)} need {needed}")
        return {"text": text.sha256}

    def cells(self) -> tuple[Cell, ...]:
        """Return every size."""
        return grid(samples=self.sizes)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what guessing finds: the ceiling of everything that sees nothing."""
        chance = self.planted / (self.lags - 1)
        attributes = {"long_name": "share of lags that guessing finds", "units": "1"}
        return xr.Dataset(
            {"recall": ("size", [chance] * len(self.sizes), attributes)}, coords={"size": list(self.sizes)}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Plant lags on a stretch of the text and look for them; then fit the text's own next character."""
        size = int(cell["samples"])
        vocabulary, tokens, table = prepare(self.text, self.vocabulary)
        symbols = len(vocabulary)
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), size])
        length = self._stretch(size)
        begin = int(rng.integers(len(tokens) - length))
        stream = tokens[begin : begin + length]
        lags = np.stack(
            [np.sort(rng.choice(np.arange(1, self.lags), self.planted, replace=False)) for _ in range(symbols)]
        )
        weights = rng.dirichlet(np.full(self.planted, 20.0), size=symbols)  # between about a third and two thirds
        targets = plant_lags(rng, stream, table, lags, weights)
        settings = LagSettings(held_out=HELD_OUT)
        fit = fit_lags(stream, self.lags, targets=targets, vocabulary=symbols, settings=settings)
        data, _ = read_streams(stream, self.lags, targets, symbols).split(HELD_OUT)
        counted = screen(data.windows, data.queries, data.targets, vocabulary=symbols)
        real = fit_lags(stream, min(REAL_LAGS, self.lags), vocabulary=symbols, settings=settings)
        truth = np.zeros((symbols, self.lags), bool)
        np.put_along_axis(truth, lags, True, 1)
        chosen = fit.attention > 0
        share = fit.counts / fit.counts.sum()
        # a rarely seen symbol has sparse tables, so its statistics are compared above what chance alone gives
        standing = (counted.scores - counted.dof) / np.sqrt(2 * np.maximum(counted.dof, 1))
        best = np.argsort(-standing, axis=1, kind="stable")[:, : self.planted]
        lag = "lag"
        return xr.Dataset(
            {
                "recall": ((), share @ _overlap(truth, fit.top(self.planted)), _label("planted lags found")),
                "counted": ((), share @ _overlap(truth, best), _label("planted lags found by chi-square")),
                "false": ((), (chosen & ~truth).sum() / (~truth).sum(), _label("share of empty lags that were chosen")),
                "cosine": ((), _cosine(fit, table), _label("cosine of fitted and planted transition")),
                "violation": ((), fit.violation, _label("violation of the optimality conditions")),
                "importance": (lag, real.importance, _label("weight of the lag for the next character")),
                "information": (lag, real.information, {"long_name": "mutual information", "units": "bit"}),
                **{
                    f"real_{name}": ((), getattr(real.loss, name), _label(f"held-out loss, next character, {name}"))
                    for name in ("unigram", "bigram", "additive", "fitted")
                },
            },
            coords={lag: (lag, np.arange(len(real.importance)), {"long_name": "lag", "units": "characters"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the share of planted lags that is found, and the losses on the text's own next character."""
        table = {name: trained[name].transpose("replicate", "cell", ...).values for name in trained.data_vars}
        place = next((number for number, size in enumerate(self.sizes) if size >= 20_000), len(self.sizes) - 1)
        size = self.sizes[place]
        grain = 1 / (2 * self.planted * size)
        gap = table["real_bigram"][:, -1] - table["real_fitted"][:, -1]
        return (
            Verdict.from_samples(
                f"the fit finds the planted lags at {size:,} samples",
                table["recall"][:, place],
                target=1.0,
                tolerance=(0.02, grain),
                resolution=grain,
                basis="98% of the lags, weighted by how often their symbol occurs, is what is required",
            ),
            Verdict.from_samples(
                f"counting lag by lag finds them at {size:,} samples as well",
                table["counted"][:, place],
                target=1.0,
                tolerance=(0.02, grain),
                resolution=grain,
                expected="refuted",
                basis="the same requirement: text carries every dependence on to other lags, and counting follows it",
            ),
            Verdict.from_samples(
                "most of the lags that are chosen are planted ones",
                table["false"][:, place],
                target=0.0,
                tolerance=self.planted / (self.lags - self.planted),
                resolution=1 / (self.vocabulary * self.lags),
                basis="share of empty lags that are chosen; at the tolerance they are as many as there are planted ones",
            ),
            Verdict.from_samples(
                f"chosen lags predict the next character better than the last one, {self.sizes[-1]:,} samples",
                gap,
                target=0.0,
                tolerance=(0.0, float("inf")),
                basis="an inequality: the held-out loss of the fit is below that of the bigram table",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show recall by size, weights beside mutual information, and losses."""
        sizes = tuple(map(float, self.sizes))
        values = {name: trained[name].transpose("replicate", "cell", ...).values for name in trained.data_vars}
        lags = trained["lag"].values
        weight, bits = values["importance"][:, -1], values["information"][:, -1]
        names = ("unigram", "bigram", "additive", "fitted")
        rows = tuple(
            (f"{size:,}", *(f"{values[f'real_{name}'][:, place].mean():.4f}" for name in names))
            for place, size in enumerate(self.sizes)
        )
        return (
            Lines(
                "Planted lags found, on real text",
                "samples",
                "share found, weighted by frequency",
                (
                    spread_curve(sizes, values["recall"], "one shared transition", group=0),
                    spread_curve(sizes, values["counted"], "chi-square, lag by lag", group=1),
                    Curve(sizes, tuple(predicted["recall"].values.tolist()), "guessing", "reference"),
                ),
                log_x=True,
                note=f"Among the {self.planted} strongest lags of every symbol. Bands reach over replicates.",
            ),
            Lines(
                f"Which earlier characters count, {self.sizes[-1]:,} samples",
                "lag [characters]",
                "relative to lag 0",
                (
                    spread_curve(lags, weight / weight[:, :1], "weight of the fit", group=0),
                    spread_curve(lags, bits / bits[:, :1], "mutual information", group=1),
                ),
                note="The text's own next character. Mutual information is carried on from lag to lag; the fit is not.",
            ),
            Listing(
                "Squared error on held-out text, next character",
                ("samples", "unigram", "bigram", "additive, 8 lags", "one shared transition"),
                rows,
                note="Half the mean squared distance from what came. A detector of lags, no language model.",
            ),
        )

    def _stretch(self, size: int) -> int:
        """Return the characters that leave `size` samples for the fit."""
        return self.lags + int(np.ceil(size / (1 - HELD_OUT))) + 1


@lru_cache(maxsize=2)
def prepare(path: Path | None, size: int) -> tuple[Vocabulary, np.ndarray, np.ndarray]:
    """Return the vocabulary, the tokens in lower case, and the table of what follows what, columns summing to one."""
    content = load_text(path).content.lower()
    vocabulary = build_vocabulary(content, size)
    tokens = vocabulary.encode(content)
    counts = np.full((len(vocabulary), len(vocabulary)), 0.1)
    np.add.at(counts, (tokens[1:], tokens[:-1]), 1.0)
    return vocabulary, tokens, counts / counts.sum(0)


def _overlap(truth: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the share of true lags among the chosen ones, (N,); -1 is no lag."""
    hits = np.take_along_axis(truth, np.maximum(chosen, 0), 1) & (chosen >= 0)
    return np.asarray(hits.sum(1) / truth.sum(1))


def _cosine(fit: LagFit, table: np.ndarray) -> float:
    """Return the cosine of the fitted and the planted transition, weighted by the frequencies of the symbols."""
    planted = table - fit.mean[:, None]
    weights = fit.counts / fit.counts.sum()
    inner = [float(weights @ (a * b).sum(0)) for a, b in ((fit.value, planted), (fit.value, fit.value), (planted,) * 2)]
    return inner[0] / (inner[1] * inner[2]) ** 0.5


def _label(name: str) -> dict[str, str]:
    return {"long_name": name, "units": "1"}

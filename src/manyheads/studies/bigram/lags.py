"""`bigram/lags`: planted lags on real text are found by regression where counting each lag by itself is misled."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.data import load_text
from manyheads.data.characters import Vocabulary, build_vocabulary
from manyheads.errors import CertificateError, UsageError
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, Picture, spread_curve
from manyheads.theory.bigram.lags.fit import LagSettings, fit_lags
from manyheads.theory.bigram.lags.result import LagFit
from manyheads.theory.bigram.lags.streams import lag_information, plant_lags, read_streams
from manyheads.theory.bigram.screening import screen
from manyheads.theory.papers import REN

REAL_LAGS = 16  # lags of the fit to the text's own next character
LOSSES = ("unigram", "bigram", "additive", "fitted")
SIGNS = {" ": "·", "\n": "¶"}
SHOWN = 20  # characters whose lags are drawn, the most frequent ones
PIECES = 40  # places of the text from which the samples of a fit come: one place is prose, another a table
ENOUGH = 20_000  # samples from which on planted lags are required, and the fit is compared with the bigram table
HELD_OUT = 0.2  # share of a stream on which losses are measured, beyond the samples of the fit


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
    revision: ClassVar[int] = 5
    claim: ClassVar[str] = "One shared transition finds planted lags of real text; counting lag by lag fails"
    source: ClassVar[Source] = replace(
        REN, locus="the model; fitting it to streams by alternating least squares, and planting, are ours"
    )
    unread_prediction: ClassVar[str] = (
        "guessing's recall is drawn beside the curves; the claims compare the fit with counting and with a bigram table"
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

    @classmethod
    def small(cls) -> PlantedLags:
        """Return the smallest configuration in which every claim can change."""
        return cls(sizes=(1500, 3000), lags=6, planted=1, vocabulary=8)

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
        """Plant lags on pieces of the text and look for them; then fit the text's own next character."""
        size = int(cell["samples"])
        vocabulary, tokens, table = prepare(self.text, self.vocabulary)
        symbols = len(vocabulary)
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), size])
        length = self._stretch(size)
        streams = [tokens[begin : begin + length] for begin in rng.integers(len(tokens) - length, size=PIECES)]
        lags = np.stack(
            [np.sort(rng.choice(np.arange(1, self.lags), self.planted, replace=False)) for _ in range(symbols)]
        )
        weights = rng.dirichlet(np.full(self.planted, 20.0), size=symbols)  # between about a third and two thirds
        targets = [plant_lags(rng, stream, table, lags, weights) for stream in streams]
        settings = LagSettings(held_out=HELD_OUT)
        data, _ = read_streams(streams, self.lags, targets, symbols).split(HELD_OUT)
        counted = screen(data.windows, data.queries, data.targets, vocabulary=symbols)
        fit = _try_fit(streams, self.lags, targets=targets, vocabulary=symbols, settings=settings)
        real = _try_fit(streams, min(REAL_LAGS, self.lags), vocabulary=symbols, settings=settings)
        truth = np.zeros((symbols, self.lags), bool)
        np.put_along_axis(truth, lags, True, 1)
        share = np.bincount(data.queries, minlength=symbols) / len(data)
        # a rarely seen symbol has sparse tables, so its statistics are compared above what chance alone gives
        standing = (counted.scores - counted.dof) / np.sqrt(2 * np.maximum(counted.dof, 1))
        best = np.argsort(-standing, axis=1, kind="stable")[:, : self.planted]
        found = _describe(fit, truth, table, self.planted) if fit else dict.fromkeys(("recall", "false", "cosine"), 0.0)
        names = [SIGNS.get(symbol, symbol) for symbol in vocabulary.symbols[1 : SHOWN + 1]]
        reach = min(REAL_LAGS, self.lags)
        shown = real.weights[1 : SHOWN + 1] if real else np.zeros((len(names), reach))
        losses = [float(getattr(real.loss, name)) if real else np.nan for name in LOSSES]
        return xr.Dataset(
            {
                "recall": ((), found["recall"], _label("planted lags found")),
                "counted": ((), share @ _overlap(truth, best), _label("planted lags found by chi-square")),
                "false": ((), found["false"], _label("share of empty lags that were chosen")),
                "cosine": ((), found["cosine"], _label("cosine of fitted and planted transition")),
                "loss": ("model", losses, _label("held-out loss, next character")),
                "importance": ("lag", real.importance if real else np.zeros(reach), _label("weight of the lag")),
                "information": (
                    "lag",
                    lag_information(streams, reach, vocabulary=symbols),
                    {"long_name": "mutual information", "units": "bit"},
                ),
                "pattern": (("symbol", "lag"), shown, _label("weight of the lag for the next character")),
                "symbols": ("symbol", names, {"long_name": "present character"}),
            },
            coords={
                "lag": ("lag", np.arange(reach), {"long_name": "lag", "units": "characters"}),
                "model": ("model", list(LOSSES), {"long_name": "model"}),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Claim the share of planted lags that is found, and the loss on the text's own next character."""
        place = next((number for number, size in enumerate(self.sizes) if size >= ENOUGH), len(self.sizes) - 1)
        size, last = self.sizes[place], self.sizes[-1]
        grain = 1 / (2 * self.planted * size)

        def at_size(name: str) -> Measure:
            return lambda predicted, trained: trained[name].transpose("replicate", "cell", ...).values[:, place]

        def gain(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            loss = trained["loss"].isel(cell=-1).transpose("replicate", "model")
            return (loss.sel(model="bigram") - loss.sel(model="fitted")).values

        found = (
            Claim(
                f"The fit finds the planted lags at {size:,} samples (share of the lags)",
                at_size("recall"),
                quantity="share of the planted lags",
                target=1.0,
                tolerance=(0.02, float("inf")),
                resolution=grain,
                bounds=(0.0, 1.0),
                basis="98% of the lags, weighted by how often their symbol occurs, is required",
            ),
            Claim(
                f"Counting lag by lag finds the planted lags at {size:,} samples (share of the lags)",
                at_size("counted"),
                quantity="share of the planted lags",
                target=1.0,
                tolerance=(0.02, grain),
                resolution=grain,
                expected="refuted",
                bounds=(0.0, 1.0),
                basis="the same requirement; text carries every dependence on to other lags, and counting follows it",
            ),
            Claim(
                "Most of the lags that the fit chooses are planted (share of empty lags that are chosen)",
                at_size("false"),
                quantity="share of empty lags that are chosen",
                target=0.0,
                tolerance=self.planted / (self.lags - self.planted),
                resolution=1 / (self.vocabulary * self.lags),
                bounds=(0.0, 1.0),
                basis="at the tolerance as many empty lags as planted ones are chosen",
            ),
        )
        if last < ENOUGH:  # with few samples both tables are about equally uncertain
            return found
        beside = Claim(
            f"The chosen lags predict the next character better than the last character does at {last:,} samples",
            gain,
            quantity="loss of the bigram table minus that of the fit",
            target=0.0,
            tolerance=(0.0, float("inf")),
            basis="an inequality: the held-out loss of the fit is below that of the bigram table",
        )
        return (*found, beside)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show recall by size, weights beside mutual information, and losses."""
        sizes = tuple(map(float, self.sizes))
        values = {name: trained[name].transpose("replicate", "cell", ...).values for name in trained.data_vars}
        lags = trained["lag"].values
        weight, bits = values["importance"][:, -1], values["information"][:, -1]
        mean = trained["loss"].mean("replicate").transpose("cell", "model").values
        rows = tuple((f"{size:,}", *(f"{loss:.4f}" for loss in mean[place])) for place, size in enumerate(self.sizes))
        drawn = trained.isel(cell=len(self.sizes) - 1, replicate=0)
        pattern = drawn["pattern"].transpose("symbol", "lag").values
        pattern = pattern / np.maximum(pattern.sum(1, keepdims=True), 1e-300)
        return (
            Picture(
                "Which preceding characters the next one depends on",
                "lag: characters before the present one",
                "present character",
                tuple(tuple(map(float, row)) for row in pattern),
                value_label="share of the weight",
                x_ticks=tuple(str(int(lag)) for lag in lags),
                y_ticks=tuple(drawn["symbols"].values.tolist()),
                note="Fitted to the text's own next character, first seed; lag 0 is the present character itself. "
                "A row without colour found no lag that stands out. · is a space, ¶ a line end.",
            ),
            Lines(
                "Planted lags found, on real text",
                "samples",
                "share found, weighted by frequency",
                (
                    spread_curve(sizes, values["recall"], "one shared transition", group=0),
                    spread_curve(sizes, values["counted"], "chi-square, lag by lag", group=1),
                    Curve(sizes, tuple(predicted["recall"].values.tolist()), "guessing", "reference"),
                ),
                log_x=len(self.sizes) > 2,
                note=f"Among the {self.planted} strongest lags of every symbol. Bands reach over replicates.",
                shows=("The fit finds",),
            ),
            Lines(
                f"Weight of preceding characters, {self.sizes[-1]:,} samples",
                "lag [characters]",
                "relative to the largest",
                (
                    spread_curve(
                        lags, weight / np.maximum(weight.max(1, keepdims=True), 1e-300), "weight of the fit", group=0
                    ),
                    spread_curve(lags, bits / bits.max(1, keepdims=True), "mutual information", group=1),
                ),
                note="The text's own next character: weights of the fit, and mutual information lag by lag.",
            ),
            Listing(
                "Squared error on held-out text, next character",
                ("samples", "unigram", "bigram", "additive, 8 lags", "one shared transition"),
                rows,
                note="Half the mean squared distance from what came. A detector of lags, no language model.",
            ),
        )

    def _stretch(self, size: int) -> int:
        """Return the length of a piece, so that all of them together leave `size` samples for the fit."""
        return self.lags + int(np.ceil(size / (1 - HELD_OUT) / PIECES)) + 1


@lru_cache(maxsize=2)
def prepare(path: Path | None, size: int) -> tuple[Vocabulary, np.ndarray, np.ndarray]:
    """Return the vocabulary, the tokens in lower case, and the table of what follows what, columns summing to one."""
    content = load_text(path).content.lower()
    vocabulary = build_vocabulary(content, size)
    tokens = vocabulary.encode(content)
    counts = np.full((len(vocabulary), len(vocabulary)), 0.1)
    np.add.at(counts, (tokens[1:], tokens[:-1]), 1.0)
    return vocabulary, tokens, counts / counts.sum(0)


def _try_fit(*args: Any, **kwargs: Any) -> LagFit | None:
    """Fit lags; None if there are too few samples: then nothing is found, and that is the result.

    That text has no table in common to all lags is known.
    """
    with suppress(CertificateError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one transition table for all lags is rejected", UserWarning)
        return fit_lags(*args, **kwargs)
    return None


def _describe(fit: LagFit, truth: np.ndarray, table: np.ndarray, planted: int) -> dict[str, float]:
    """Return how many planted lags a fit found, how many empty ones it chose, and how near its transition is."""
    chosen = fit.attention > 0
    return {
        "recall": float(fit.counts @ _overlap(truth, fit.top(planted)) / fit.counts.sum()),
        "false": float((chosen & ~truth).sum() / (~truth).sum()),
        "cosine": _cosine(fit, table),
    }


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

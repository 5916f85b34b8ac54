"""`bigram/lags`: planted lags on real text are found by regression where counting each lag by itself is misled."""

import math
from pathlib import Path
from typing import Any

import numpy as np

import manyheads.study as st
from manyheads.data import load_text
from manyheads.study.panels import Picture
from manyheads.theory.bigram import LagSettings, screen
from manyheads.theory.bigram.lags.planted import measure_planted, plant_evenly, prepare, share_of_lags, try_fit
from manyheads.theory.bigram.lags.streams import lag_information, read_streams
from manyheads.theory.bigram.setups import replicate_seed
from manyheads.theory.papers import REN

REAL_LAGS = 16  # lags of the fit to the text's own next character
LOSSES = ("unigram", "bigram", "additive", "fitted")
SIGNS = {" ": "·", "\n": "¶"}
SHOWN = 20  # characters whose lags are drawn, the most frequent ones
PIECES = 40  # places of the text from which the samples of a fit come: one place is prose, another a table
ENOUGH = 20_000  # samples from which on planted lags are required, and the fit is compared with the bigram table
HELD_OUT = 0.2  # share of a stream on which losses are measured, beyond the samples of the fit


class PlantedLags(st.Study):
    """A shared transition finds the lags that were planted on real text; counting lag by lag finds half of them."""

    name = "bigram/lags"
    revision = 5
    claim = "One shared transition finds planted lags of real text; counting lag by lag fails"
    source = REN.at("the model; fitting it to streams by alternating least squares, and planting, are ours")
    unread_prediction = (
        "guessing's recall is drawn beside the curves; the claims compare the fit with counting and with a bigram table"
    )
    grid = {"samples": "sizes"}

    text: Path | None = st.setting(None, "a UTF-8 file; by default Python's own documentation")
    sizes: tuple[int, ...] = st.sweep(
        (5000, 20_000), "samples of a fit", count=1, small=(1500, 3000), full=(20_000, 60_000, 250_000)
    )
    lags: int = st.setting(64, "lags L, lag 0 included", small=6)
    planted: int = st.setting(2, "lags of every symbol's target, from 1 to L - 1", least=1, below="lags", small=1)
    vocabulary: int = st.setting(32, "the most frequent characters in lower case, and one for all others", small=8)

    def predict(self, key: st.Key) -> st.Record:
        """Return what guessing finds: the ceiling of everything that sees nothing."""
        chance = self.planted / (self.lags - 1)
        return {
            "size": ("size", list(self.sizes), "samples"),
            "recall": ("size", [chance] * len(self.sizes), "share of lags that guessing finds"),
        }

    def train(self, key: st.Key, samples: int) -> st.Record:
        """Plant lags on pieces of the text and look for them; then fit the text's own next character."""
        vocabulary, tokens, table = prepare(self.text, self.vocabulary)
        symbols = len(vocabulary)
        rng = np.random.default_rng([*replicate_seed(key), samples])
        length = self._stretch(samples)
        streams = [tokens[begin : begin + length] for begin in rng.integers(len(tokens) - length, size=PIECES)]
        truth, targets = plant_evenly(rng, streams, table, self.lags, self.planted)
        settings = LagSettings(held_out=HELD_OUT)
        data, _ = read_streams(streams, self.lags, targets, symbols).split(HELD_OUT)
        counted = screen(data.windows, data.queries, data.targets, vocabulary=symbols)
        fit = try_fit(streams, self.lags, targets=targets, vocabulary=symbols, settings=settings)
        real = try_fit(streams, min(REAL_LAGS, self.lags), vocabulary=symbols, settings=settings)
        share = np.bincount(data.queries, minlength=symbols) / len(data)
        # a rarely seen symbol has sparse tables, so its statistics are compared above what chance alone gives
        standing = (counted.scores - counted.dof) / np.sqrt(2 * np.maximum(counted.dof, 1))
        best = np.argsort(-standing, axis=1, kind="stable")[:, : self.planted]
        found = measure_planted(fit, truth, table, self.planted)
        names = [SIGNS.get(symbol, symbol) for symbol in vocabulary.symbols[1 : SHOWN + 1]]
        reach = min(REAL_LAGS, self.lags)
        shown = real.weights[1 : SHOWN + 1] if real else np.zeros((len(names), reach))
        losses = [float(getattr(real.loss, name)) if real else np.nan for name in LOSSES]
        information = lag_information(streams, reach, vocabulary=symbols)
        return {
            "lag": ("lag", np.arange(reach), "lag", "characters"),
            "model": ("model", list(LOSSES), "model", None),
            "recall": ((), found["recall"], "planted lags found"),
            "counted": ((), share @ share_of_lags(truth, best), "planted lags found by chi-square"),
            "false": ((), found["false"], "share of empty lags that were chosen"),
            "cosine": ((), found["cosine"], "cosine of fitted and planted transition"),
            "loss": ("model", losses, "held-out loss, next character"),
            "importance": ("lag", real.importance if real else np.zeros(reach), "weight of the lag"),
            "information": ("lag", information, "mutual information", "bit"),
            "pattern": (("symbol", "lag"), shown, "weight of the lag for the next character"),
            "symbols": ("symbol", names, "present character", None),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        place = next((number for number, size in enumerate(self.sizes) if size >= ENOUGH), len(self.sizes) - 1)
        size, last, at_size = self.sizes[place], self.sizes[-1], trained.isel(samples=place)
        grain, found = 1 / (2 * self.planted * size), f"the planted lags at {size:,} samples (share of the lags)"
        share: dict[str, Any] = {"quantity": "share of the planted lags", "resolution": grain, "bounds": (0, 1)}
        basis = "98% of the lags, weighted by how often their symbol occurs, is required"
        yield st.Claim(f"The fit finds {found}", at_size["recall"], st.near(1, (0.02, math.inf)), basis, **share)
        text, region = f"Counting lag by lag finds {found}", st.near(1, (0.02, grain))
        basis = "the same requirement; text carries every dependence on to other lags, and counting follows it"
        yield st.Claim(text, at_size["counted"], region, basis, expected="refuted", **share)
        yield st.Claim(
            "Most of the lags that the fit chooses are planted (share of empty lags that are chosen)",
            at_size["false"],
            st.near(0, self.planted / (self.lags - self.planted)),
            "at the tolerance as many empty lags as planted ones are chosen",
            "share of empty lags that are chosen",
            resolution=1 / (self.vocabulary * self.lags),
            bounds=(0, 1),
        )
        if last >= ENOUGH:  # with few samples both tables are about equally uncertain
            loss = trained["loss"].isel(samples=-1)
            text = f"The chosen lags predict the next character better than the last character does at {last:,} samples"
            basis = "an inequality: the held-out loss of the fit is below that of the bigram table"
            quantity = "loss of the bigram table minus that of the fit"
            yield st.Claim(text, loss.sel(model="bigram") - loss.sel(model="fitted"), st.above(0), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        last = trained.isel(samples=-1)
        pattern = last["pattern"].isel(replicate=0).transpose("symbol", "lag").values
        pattern = pattern / np.maximum(pattern.sum(1, keepdims=True), 1e-300)
        yield Picture(
            "Which preceding characters the next one depends on",
            "lag: characters before the present one",
            "present character",
            tuple(tuple(map(float, row)) for row in pattern),
            value_label="share of the weight",
            x_ticks=tuple(str(int(lag)) for lag in trained["lag"]),
            y_ticks=tuple(last["symbols"].isel(replicate=0).values.tolist()),
            note="Fitted to the text's own next character, first seed; lag 0 is the present character itself. "
            "A row without colour found no lag that stands out. · is a space, ¶ a line end.",
        )
        yield st.lines(
            "Planted lags found, on real text",
            "samples",
            "share found, weighted by frequency",
            {"one shared transition": trained["recall"], "chi-square, lag by lag": trained["counted"]},
            reference={"guessing": theory["recall"].rename(size="samples")},
            log="x" if len(self.sizes) > 2 else "",
            note=f"Among the {self.planted} strongest lags of every symbol. Bands reach over replicates.",
            shows=("The fit finds",),
        )
        weight, bits = last["importance"], last["information"]
        shares = {"weight of the fit": weight / weight.max("lag").clip(1e-300)}
        shares["mutual information"] = bits / bits.max("lag")
        title = f"Weight of preceding characters, {self.sizes[-1]:,} samples"
        note = "The text's own next character: weights of the fit, and mutual information lag by lag."
        yield st.lines(title, "lag", "relative to the largest", shares, note=note)
        loss = trained["loss"].mean("replicate")
        rows = (
            {"samples": f"{size:,}"} | {name: f"{float(loss.sel(samples=size, model=name)):.4f}" for name in LOSSES}
            for size in self.sizes
        )
        note = "Half the mean squared distance from what came. A detector of lags, no language model."
        yield st.table("Squared error on held-out text, next character", rows, note)

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
            raise st.UsageError(
                f"{text.name} has {len(text.content)} characters: fits of {max(self.sizes)} need {needed}"
            )
        return {"text": text.sha256}

    def _stretch(self, size: int) -> int:
        """Return the length of a piece, so that all of them together leave `size` samples for the fit."""
        return self.lags + int(np.ceil(size / (1 - HELD_OUT) / PIECES)) + 1

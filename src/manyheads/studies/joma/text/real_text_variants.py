"""`joma/real-text-variants`: drop and rebound on text with words, post-norm, an encoder, other widths and heads.

Each variant changes one thing about a decoder of two layers that reads words. Words in random order are the control.
Recorded are the attention entropy and the stable ranks of both MLP matrices, layer by layer, and their order in time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import optax
import xarray as xr

from manyheads.curves.drop_and_rise import replicated_drop_and_rise
from manyheads.data import TextWindows, load_text
from manyheads.errors import UsageError
from manyheads.spectra import causal_entropy_level, expected_stable_rank
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.text.variants import (
    VARIANTS,
    LanguageWindows,
    asked_loss,
    held_out_batch,
    layer_statistics,
    read_tokens,
    variant_config,
)
from manyheads.theory.papers import TIAN
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.training import train
from manyheads.transformer.transformer import initialize

RECORDED = {
    "entropy": ("attention entropy", "nat"),
    "lower_rank": ("stable rank of the lower MLP matrix", "1"),
    "upper_rank": ("stable rank of the upper MLP matrix", "1"),
}
REBOUNDING = ("words", "characters", "post-norm", "encoder")
SAME = 0.1  # nat; a third of the rebound of the published runs, 0.34 [0.15, 0.53]
CLEAR = 0.05  # nat; a third of the lower end
ROUNDING = 1e-5  # of an entropy or a relative stable rank in single precision


@dataclass(frozen=True)
class RealTextVariants(Study):
    """Attention entropy and stable ranks of both MLP matrices in variants of a transformer on text.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation.
    width, depth
        Width of the stream, which one variant doubles, and number of layers.
    vocabulary
        Most words of the vocabulary; rarer ones are one token.
    length, batch
        Tokens of a window, and windows of a step.
    steps, snapshots, learning_rate
        Updates of Adam, how often the statistics are recorded, and its rate.
    """

    name: ClassVar[str] = "joma/real-text-variants"
    claim: ClassVar[str] = "On words the bottom layer's entropy drops first; it rebounds in post-norm blocks"
    source: ClassVar[Source] = replace(TIAN, locus="figures 6 to 8 and B.2; the control and statistics are added here")
    revision: ClassVar[int] = 1

    text: Path | None = None
    width: int = 64
    depth: int = 2
    vocabulary: int = 512
    length: int = 32
    batch: int = 16
    steps: int = 240
    snapshots: int = 24
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        if self.width < 4 or self.width % 4:
            raise UsageError(f"width={self.width}: expected a multiple of 4, the number of heads")
        if self.depth < 2 or self.length < 2 or self.batch < 1 or self.vocabulary < 2:
            raise UsageError(
                f"depth={self.depth}, length={self.length}, batch={self.batch}, vocabulary={self.vocabulary}: expected "
                "two or more layers, tokens and words, and one window or more"
            )
        if self.snapshots < 2 or self.steps < self.snapshots or self.steps % self.snapshots:
            raise UsageError(f"steps={self.steps}: expected a multiple of snapshots={self.snapshots}, two or more")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate={self.learning_rate}: expected a positive number")

    @classmethod
    def full(cls) -> RealTextVariants:
        """Return the study with the width, batches and windows of the paper, and twenty times the updates."""
        return cls(
            width=192, depth=4, vocabulary=4096, length=35, batch=20, steps=4800, snapshots=48, learning_rate=1e-3
        )

    @classmethod
    def small(cls) -> RealTextVariants:
        """Return the smallest configuration in which every claim can change."""
        return cls(width=16, vocabulary=16, length=8, batch=2, steps=6, snapshots=3, learning_rate=0.02)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text, the default one included, which differs between releases of Python."""
        text, shortest = load_text(self.text), len(read_tokens("words", self.text, self.vocabulary)[1][1])
        if shortest <= self.length + 1:
            raise UsageError(
                f"{text.name} leaves {shortest} held-out words, too few for a window of {self.length}: give a text of "
                f"more than {10 * (self.length + 2)} words, or a shorter --length"
            )
        return {"text": text.sha256}

    def cells(self) -> tuple[Cell, ...]:
        """Return the variants."""
        return grid(variant=tuple(VARIANTS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the levels of uniform attention and of a random matrix of the MLP's shape."""
        uniform = [
            float(np.log(self.length)) if variant.masked else causal_entropy_level(self.length)
            for variant in VARIANTS.values()
        ]
        widths = [self.width * variant.widen for variant in VARIANTS.values()]
        random = [expected_stable_rank(4 * width, width) for width in widths]
        return dataset(
            {
                "uniform": ("variant", uniform, "entropy of uniform attention", "nat"),
                "random_rank": ("variant", random, "stable rank of a random matrix"),
            },
            coords={"variant": list(VARIANTS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one variant and record loss, entropy and ranks on held-out text."""
        variant = VARIANTS[str(cell["variant"])]
        vocabulary, texts = read_tokens(variant.tokens, self.text, self.vocabulary)
        mask = vocabulary if variant.masked else None
        batches, held_out = (LanguageWindows(TextWindows(text, self.length, self.batch), mask) for text in texts)
        asked = held_out_batch(held_out)
        config = variant_config(variant, self.width, self.depth, self.length, vocabulary)
        for_model, for_batches = jax.random.split(key)
        done = train(
            initialize(config, standard_scaling(config.shape, config.inputs), for_model),
            asked_loss,
            batches,
            _adam(self.learning_rate),
            self.steps,
            for_batches,
            every=self.steps // self.snapshots,
            measure=lambda snapshot: {
                "validation_loss": np.asarray(_loss(snapshot.model, asked)),
                **{name: np.asarray(value) for name, value in layer_statistics(snapshot.model, asked[0]).items()},
            },
        )
        values = {name: np.stack([found[name] for _, found in done.measured]) for name in done.measured[0][1]}
        return dataset(
            {
                "validation_loss": ("step", values["validation_loss"], "loss on held-out text", "nat"),
                **{name: (("step", "layer"), values[name], *words) for name, words in RECORDED.items()},
            },
            coords={
                "step": (np.asarray([step for step, _ in done.measured]), "update"),
                "layer": (np.arange(self.depth), "layer, from the bottom"),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test rebounds, widths and heads, both matrices, the order of layers, and the control."""

        def rebounds(variant: str, layer: int, words: str, expected: Expected) -> Claim:
            return Claim(
                f"The attention entropy of the {words} rebounds by {CLEAR:g} nat: {variant}",
                lambda predicted, trained: _shape(trained, variant, "entropy", layer).rise,
                quantity="rise after a drop (nat)",
                target=CLEAR,
                tolerance=(0.0, infinite),
                expected=expected,
                resolution=ROUNDING,
                basis=f"an inequality; {CLEAR:g} nat is a third of the least rebound of published runs. "
                "Minimum and rise are located on the other seeds, so that noise alone gives zero",
            )

        def equal(words: str, first: str, second: str, expected: Expected) -> Claim:
            return Claim(
                f"The rebound of the bottom layer is the same with {words}",
                lambda predicted, trained: (
                    _shape(trained, second, "entropy", 0).rise - _shape(trained, first, "entropy", 0).rise
                ),
                quantity="difference of rises (nat)",
                target=0.0,
                tolerance=SAME,
                expected=expected,
                resolution=ROUNDING,
                basis=f"{SAME:g} nat is a third of the rebound in the published runs; paired by seed",
            )

        def rank(matrix: str, change: str, expected: Expected) -> Claim:
            return Claim(
                f"The stable rank of the {matrix} MLP matrix {change} in decoders and encoder, pre-norm and post-norm",
                _ranks(f"{matrix}_rank", "drop" if change == "drops" else "rise"),
                quantity="drop or rise (of the random level)",
                target=0.02,
                tolerance=(0.0, infinite),
                expected=expected,
                resolution=ROUNDING,
                basis="an inequality; a fiftieth of the level of a random matrix, by choice. "
                "Mean over layers and four variants, located on the other seeds",
            )

        def first(variant: str, expected: Expected) -> Claim:
            return Claim(
                f"The bottom layer's entropy completes half of its drop before the top layer's: {variant}",
                lambda predicted, trained: _half(trained, variant, -1) - _half(trained, variant, 0),
                quantity="top minus bottom (updates)",
                target=0.0,
                tolerance=(0.0, infinite),
                expected=expected,
                resolution=self.steps / self.snapshots / 2,
                basis="an inequality; times are interpolated between records, paired by seed",
            )

        infinite = float("inf")
        return (
            *(rebounds(variant, 0, "bottom layer", BOTTOM[variant]) for variant in REBOUNDING),
            *(rebounds(variant, -1, "top layer", TOP[variant]) for variant in REBOUNDING),
            equal("twice the width", "words", "double-width", "holds"),
            equal("one head in place of four", "words", "one-head", "holds"),
            rank("lower", "drops", "holds"),
            rank("upper", "drops", "holds"),
            rank("lower", "rebounds", "refuted"),
            rank("upper", "rebounds", "holds"),
            first("words", "holds"),
            first("encoder", "holds"),
            Claim(
                "On words in random order the attention entropy of the top layer does not drop",
                lambda predicted, trained: _shape(trained, "shuffled-words", "entropy", -1).drop,
                quantity="drop (nat)",
                target=0.0,
                tolerance=SAME,
                resolution=ROUNDING,
                basis="the control: attention has nothing to learn from words in random order",
            ),
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> Any:
        """Decide the claims; outcomes are known for the default text and size alone."""
        verdicts = super().compare(predicted, trained)
        return verdicts if self == RealTextVariants() else tuple(replace(each, expected=None) for each in verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropy and ranks of four variants by layer, entropy of the other variants, and a table of all."""
        titles = (
            ("entropy", "Attention entropy", "entropy [nat]", f"rebounds by {CLEAR:g} nat: words"),
            ("lower_rank", "Stable rank of the lower MLP matrix", "stable rank", "of the lower MLP matrix rebounds"),
            ("upper_rank", "Stable rank of the upper MLP matrix", "stable rank", "of the upper MLP matrix rebounds"),
        )
        shown: list[Panel] = []
        for name, title, label, claim in titles:
            for place, words in ((0, "bottom layer"), (-1, "top layer")):
                # The claims on ranks are means over layers: the first picture of each is titled by its claim.
                shows = (
                    (f"The attention entropy of the {words} {claim}",) if name == "entropy" else (claim,) * (place == 0)
                )
                shown.append(_lines(trained, name, place, (f"{title}, {words}", label), REBOUNDING, shows))
        others = [name for name in VARIANTS if name not in REBOUNDING]
        caption = ("Attention entropy, bottom layer: width, heads, words in random order", "entropy [nat]")
        shown.append(_lines(trained, "entropy", 0, caption, tuple(others), ("On words in random order",)))
        return (*shown, self._table(predicted, trained))

    def _table(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        rows = []
        for variant in VARIANTS:
            here = select_cell(trained, variant=variant)
            level = float(predicted["random_rank"].sel(variant=variant))
            entropy = [_shape(trained, variant, "entropy", layer) for layer in (0, -1)]
            ranks = [
                np.mean([_shape(trained, variant, name, layer).rise.mean() for layer in range(self.depth)]) / level
                for name in ("lower_rank", "upper_rank")
            ]
            rows.append(
                (
                    variant,
                    f"{float(here['validation_loss'].min('step').mean()):.2f}",
                    f"{float(predicted['uniform'].sel(variant=variant)):.2f}",
                    *(f"{part.mean():.2f}" for found in entropy for part in (found.drop, found.rise)),
                    *(f"{value:.2f}" for value in ranks),
                )
            )
        columns = ("variant", "loss", "uniform", "bottom drops", "rises", "top drops", "rises", "lower rank", "upper")
        return Listing(
            "Drop and rise by variant",
            columns,
            tuple(rows),
            note="Loss: lowest on held-out text, nat a token that is asked for. Entropies in nat; rises of stable "
            "ranks over the level of a random matrix, mean over layers. Means over replicates.",
        )


# Outcomes at the default size, by variant.
BOTTOM: dict[str, Expected] = {**dict.fromkeys(REBOUNDING, "refuted"), "post-norm": "holds"}
TOP: dict[str, Expected] = dict.fromkeys(REBOUNDING, "refuted")

_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once
_loss = eqx.filter_jit(asked_loss)


def _curves(trained: xr.Dataset, variant: str, name: str, layer: int) -> np.ndarray:
    """Return the curves of one layer, (replicates, steps)."""
    return select_cell(trained, variant=variant)[name].isel(layer=layer).transpose("replicate", "step").values


def _shape(trained: xr.Dataset, variant: str, name: str, layer: int) -> Any:
    return replicated_drop_and_rise(_curves(trained, variant, name, layer))


def _ranks(name: str, part: str) -> Measure:
    def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
        levels = [float(predicted["random_rank"].sel(variant=variant)) for variant in REBOUNDING]
        layers = range(trained.sizes["layer"])
        return np.mean(
            [
                getattr(_shape(trained, variant, name, layer), part) / level
                for variant, level in zip(REBOUNDING, levels, strict=True)
                for layer in layers
            ],
            axis=0,
        )

    return measured


def _half(trained: xr.Dataset, variant: str, layer: int) -> np.ndarray:
    """Return the first time at which each curve has completed half of its drop, (replicates,), interpolated."""
    steps, curves = trained["step"].values, _curves(trained, variant, "entropy", layer)
    times = []
    for curve in curves:
        middle = (curve[0] + curve.min()) / 2
        later = int(np.argmax(curve <= middle))
        times.append(
            np.interp(-middle, -curve[[later - 1, later]], steps[[later - 1, later]]) if later else float(steps[0])
        )
    return np.asarray(times)


def _lines(
    trained: xr.Dataset,
    name: str,
    layer: int,
    words: tuple[str, str],
    variants: tuple[str, ...],
    shows: tuple[str, ...],
) -> Lines:
    steps = trained["step"].values
    curves: list[Curve] = [
        spread_curve(steps, _curves(trained, variant, name, layer), variant, group=group)
        for group, variant in enumerate(variants)
    ]
    return Lines(words[0], "update", words[1], tuple(curves), note="Means; bands range over replicates.", shows=shows)

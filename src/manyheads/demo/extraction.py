"""`demo/extraction`: the weights of one layer of the demo's own transformer, found by asking it questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.attention import AttentionLayer, MultiHeadAttention
from manyheads.data import read_characters
from manyheads.demo.rebound import open_trainings, read_training
from manyheads.demo.text import TextTraining, trained_model
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, RecoveryRefused, compare_layers, extract_layer
from manyheads.recovery.certificates import GaussianSequences
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.oracle.normalization import Normalisation, projected
from manyheads.recovery.pictures import layer_panels
from manyheads.recovery.source import SOURCE
from manyheads.study import Cell, Listing, Panel, Source, Study, Verdict
from manyheads.study.reporting.html import format_figure

if TYPE_CHECKING:
    from manyheads.recovery import Recovery
    from manyheads.transformer.transformer import Transformer

FRESH = 500  # sequences that were asked nowhere else, on which the certificate is put to the test
WINDOWS = 4  # windows of real text on which the extracted layer is compared with the transformer's own

# What is said of a transformer that was refused: nothing was found, everything is wrong.
FIGURES = {
    "heads": (0.0, "heads that were found"),
    "theta_error": (1.0, "error of the attention matrices, largest head"),
    "projection_error": (1.0, "error of the projections, largest head"),
    "text_error": (1.0, "squared error on real text"),
    "largest_error": (1.0, "largest squared error of the certificate's sequences"),
    "exceeding": (0.0, "share of sequences that may have a larger one"),
    "exceeded": (1.0, "share of fresh sequences that have a larger one"),
    "calls": (0.0, "sequences that were asked, verification included"),
    "tokens": (0.0, "their tokens"),
}


@dataclass(frozen=True)
class Extraction(Study):
    """One attention layer of the demo's transformer, extracted through its LayerNorm and its residual connection.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation.
    finished
        ``run.json`` of a run of `demo/text` on the same text, with the same seed and at least as many replicates: its
        transformers are asked. Without it they are trained.
    layer
        Which block is asked.
    """

    name: ClassVar[str] = "demo/extraction"
    claim: ClassVar[str] = "the weights of an attention layer follow from its answers alone"
    revision: ClassVar[int] = 2
    source: ClassVar[Source] = replace(
        SOURCE, locus="equation 1: the form of the layer; how it is asked is derived here"
    )

    text: Path | None = None
    finished: Path | None = None
    layer: int = 1

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text.

        Raises
        ------
        UsageError
            `finished` belongs to another study or text.
        """
        digests = TextTraining(text=self.text).inputs()
        if self.finished is not None and dict(open_trainings(self.finished).header["inputs"]) != digests:
            raise UsageError(f"{self.finished} holds trainings on another text: give the same --text")
        return digests

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return how many heads the transformer has."""
        return xr.Dataset({"heads": ((), self._training().heads, {"long_name": "heads", "units": "1"})})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Ask the transformer that was trained with this key; a refusal is a result, too."""
        study = self._training()
        done = study.train(key, cell) if self.finished is None else read_training(open_trainings(self.finished), key)
        model = trained_model(study, done.expand_dims(("cell", "replicate")))
        asked = asked_block(model, self.layer)
        seed = int(jax.random.bits(jax.random.fold_in(key, 1)))
        figures, outcome = {name: absent for name, (absent, _) in FIGURES.items()}, "extracted"
        matrices = np.zeros((2, study.heads, asked.layer.dim, asked.layer.dim))  # Theta, W
        try:
            found = extract_layer(asked, asked.layer.dim, seed=seed, options=ExtractionOptions(residual=True))
        except RecoveryRefused as refusal:
            outcome = type(refusal).__name__
        else:
            figures |= _figures(asked, found, seed) | {"text_error": self._text_error(model, found)}
            if found.layer.theta.shape == asked.layer.theta.shape:
                matrices = np.stack([found.layer.theta, found.layer.projection])
        axes = ("head", "row", "column")
        return xr.Dataset(
            {name: ((), figures[name], {"long_name": label, "units": "1"}) for name, (_, label) in FIGURES.items()}
            | {
                "outcome": ((), outcome, {"long_name": "extracted, or why not"}),
                "theta": (axes, matrices[0], {"long_name": "extracted attention matrices", "units": "1"}),
                "projection": (axes, matrices[1], {"long_name": "extracted projections", "units": "1"}),
            },
            coords={"head": ("head", np.arange(study.heads), {"long_name": "head"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Ask of the worst transformer whether everything was found, on real text too, and certified truly."""
        one = trained.isel(cell=0)
        missing = np.abs(one["heads"].values - float(predicted["heads"])).max()
        beyond = (one["exceeded"] - one["exceeding"]).values.max()
        tolerance = ExtractionOptions().tolerance
        return (
            Verdict.exact(
                "every head of every transformer is found",
                float(missing),
                target=0.0,
                tolerance=0.5,
                basis="a count: heads too few or too many, in the worst transformer",
            ),
            Verdict.exact(
                "on real text, which it was never asked about, the extracted layer does what the transformer does",
                float(one["text_error"].values.max()),
                target=0.0,
                tolerance=tolerance,
                basis=f"the relative squared error that verification accepts, {tolerance:g}; the largest of all seeds",
            ),
            Verdict.exact(
                "the certificate is true: no more sequences than it says have a larger error",
                float(beyond),
                target=0.0,
                tolerance=(float("inf"), 0.0),
                basis=f"the share of {FRESH} fresh sequences above the certificate's error, less the share that it "
                "allows; it may fail once in 10,000 certificates",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the recovered heads of the first seed, and every seed in figures."""
        one = trained.isel(cell=0).transpose("replicate", ...)
        first = one.isel(replicate=0)
        layer = AttentionLayer(first["theta"].values, first["projection"].values, causal=True)
        pictures = layer_panels(layer) if str(first["outcome"].values) == "extracted" else ()
        return (_table(one), *pictures)

    def _training(self) -> TextTraining:
        """Return the study whose transformers are asked."""
        if self.finished is None:
            return TextTraining(text=self.text)
        fields = open_trainings(self.finished).header["configuration"]
        key_dim, heads, depth, length = (int(fields[name]) for name in ("key_dim", "heads", "depth", "length"))
        study = TextTraining(self.text, key_dim, heads, depth, length)
        if self.layer >= study.depth:
            raise UsageError(f"layer={self.layer} of a transformer of depth {study.depth}: layers count from 0")
        return study

    def _text_error(self, model: Transformer, found: Recovery) -> float:
        """Compare with what the transformer itself computes in this layer on windows of held-out text."""
        _, (_, validation) = read_characters(self.text)
        length = model.config.length
        starts = np.linspace(0, len(validation) - length, WINDOWS).astype(int)
        record = model.record(jnp.asarray(np.stack([validation[start : start + length] for start in starts])))
        below = record.start if self.layer == 0 else record.layers.stream[self.layer - 1]
        expected = float(model.scaling.branch) * np.asarray(record.layers.attention[self.layer], np.float64)
        assert found.extracted is not None
        answered = found.extracted(np.asarray(below, np.float64))
        return float(np.sum((answered - expected) ** 2) / np.sum(expected**2))


@dataclass(frozen=True, eq=False)
class Asked:
    """A block's attention in float64, x + layer(gain * norm(x)): what extraction may only call."""

    layer: AttentionLayer
    gain: np.ndarray
    norm: Normalisation

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Answer sequences (n, k, d)."""
        return x + evaluate_layer(self.layer, self.gain * self.norm(x))


def asked_block(model: Transformer, layer: int) -> Asked:
    """Return the attention of one block of a trained pre-norm transformer without biases, widened to float64."""
    blocks, scaling, config = model.weights.blocks, model.scaling, model.config

    def scaled(role: str, weight: Any) -> np.ndarray:
        return float(scaling.multiplier[role]) * np.asarray(weight[layer], np.float64)

    if config.norm != "pre" or config.biases or blocks.attention_gain is None:
        raise UsageError("the demo's transformer normalises first, with gains, and has no biases")
    attention = MultiHeadAttention(
        scaled("query", blocks.query),
        scaled("key", blocks.key),
        scaled("value", blocks.value),
        float(scaling.branch) * scaled("output", blocks.output),
        scale=float(scaling.logit(config.shape.key_dim)),
        causal=True,
    )
    gain = scaled("norm", blocks.attention_gain)
    return Asked(attention.merged(), gain, Normalisation(config.centred, config.epsilon))


def _figures(asked: Asked, found: Recovery, seed: int) -> dict[str, float]:
    """Return what an extraction cost, and how it compares with the weights that it never saw."""
    certificate, total = found.certificate, found.total
    fresh = GaussianSequences()(np.random.default_rng([seed, 1]), FRESH, asked.layer.dim)
    assert found.extracted is not None
    errors = [np.mean((asked(x) - x - found.extracted(x)) ** 2, axis=(1, 2)) for x in fresh]
    above = np.concatenate(errors) > certificate.largest_error * certificate.variance
    figures = {
        "heads": float(found.heads),
        "largest_error": certificate.largest_error,
        "exceeding": certificate.exceeding,
        "exceeded": float(above.mean()),
        "calls": float(total.calls),
        "tokens": float(total.tokens),
    }
    if found.layer.theta.shape == asked.layer.theta.shape:
        truth = projected(asked.layer, asked.gain, centred=asked.norm.centred)
        compared = compare_layers(truth, found.layer)
        figures |= {"theta_error": compared.theta, "projection_error": compared.projection}
    return figures


def _table(one: xr.Dataset) -> Listing:
    rows = tuple(
        (str(seed), str(run["outcome"].values), *(format_figure(float(run[name])) for name in FIGURES))
        for seed, run in ((seed, one.isel(replicate=seed)) for seed in range(one.sizes["replicate"]))
    )
    names = (label.replace("_", " ") for label in FIGURES)
    return Listing(
        "What came back",
        ("seed", "outcome", *names),
        rows,
        note="Errors of weights are relative, the largest over heads; squared errors are relative to the variance "
        "of the answers. The transformer computes in single precision, which the error on its own text shows.",
    )

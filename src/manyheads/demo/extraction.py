"""`demo/extraction`: the weights of one attention layer of the demo's transformer, recovered by queries."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads._namespaces import Floats
from manyheads.attention import AttentionLayer, MultiHeadAttention
from manyheads.data.characters import read_characters
from manyheads.demo.entropy_rebound import finished_study, open_trainings, training_of
from manyheads.demo.text import TextTraining, trained_model
from manyheads.recovery import ExtractionOptions, Recovery, RecoveryRefused, compare_layers, extract_layer
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.layers.panels import layer_panels
from manyheads.recovery.oracle.normalization import Normalization, projected
from manyheads.recovery.result.distributions import GaussianSequences
from manyheads.study.reporting.html import format_figure
from manyheads.theory.papers import CHEN_LI
from manyheads.transformer.transformer import Transformer

FRESH = 500  # fresh sequences on which the certificate is tested
WINDOWS = 4  # windows of real text on which the extracted layer is compared with the transformer

# Value if the extraction is refused, and label.
FIGURES = {
    "heads": (0.0, "recovered heads"),
    "theta_error": (1.0, "relative error of the attention matrices, largest head"),
    "projection_error": (1.0, "relative error of the projections, largest head"),
    "text_error": (1.0, "relative squared error on real text"),
    "largest_error": (1.0, "largest squared error that the certificate states"),
    "exceeding": (0.0, "share of sequences that may exceed it"),
    "exceeded": (1.0, "share of fresh sequences that exceed it"),
    "calls": (0.0, "query sequences, verification included"),
    "tokens": (0.0, "query tokens"),
}


class Extraction(st.Study):
    """One attention layer of the demo's transformer, extracted through its LayerNorm and residual connection.

    A finished run is on the same text, with the same seed and at least as many replicates.
    """

    name = "demo/extraction"
    claim = "The weights of an attention layer are recovered from its outputs alone"
    revision = 3
    source = CHEN_LI.at("equation 1: the form of the layer; the queries are derived here")

    text: Path | None = st.setting(None, "UTF-8 file; by default Python's own documentation")
    finished: Path | None = st.setting(
        None, "``run.json`` of a run of `demo/text` whose transformers are queried; by default they are trained"
    )
    layer: int = st.setting(1, "Block that is queried, from 0")

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text; UsageError if `finished` belongs to another study or text."""
        digests = TextTraining(text=self.text).inputs()
        if self.finished is not None and dict(open_trainings(self.finished).header["inputs"]) != digests:
            raise st.UsageError(f"{self.finished} holds trainings on another text: give the same --text")
        return digests

    def predict(self, key: st.Key) -> st.Record:
        return {"heads": ((), self._training().heads, "heads")}

    def train(self, key: st.Key) -> st.Record:
        """Extract a layer of the transformer trained with this key; a refusal is a result."""
        study = self._training()
        done = training_of(self.finished, study, key)
        model = trained_model(study, done.expand_dims(("cell", "replicate")))
        oracle = block_oracle(model, self.layer)
        seed = int(jax.random.bits(jax.random.fold_in(key, 1)))
        figures, outcome = {name: absent for name, (absent, _) in FIGURES.items()}, "extracted"
        matrices = np.zeros((2, study.heads, oracle.layer.dim, oracle.layer.dim))  # Theta, W
        try:
            found = extract_layer(oracle, oracle.layer.dim, seed=seed, options=ExtractionOptions(residual=True))
        except RecoveryRefused as refusal:
            outcome = type(refusal).__name__
        else:
            figures |= _figures(oracle, found, seed) | {"text_error": self._text_error(model, found)}
            if found.layer.theta.shape == oracle.layer.theta.shape:
                matrices = np.stack([found.layer.theta, found.layer.projection])
        axes = ("head", "row", "column")
        return {name: ((), figures[name], label) for name, (_, label) in FIGURES.items()} | {
            "head": ("head", np.arange(study.heads), "head"),
            "outcome": ((), outcome, "extracted, or the refusal", None),
            "theta": (axes, matrices[0], "extracted attention matrices"),
            "projection": (axes, matrices[1], "extracted projections"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        tolerance = ExtractionOptions().tolerance
        yield st.Claim(
            "All heads of the layer are recovered",
            abs(trained["heads"] - theory["heads"]).max(),
            st.near(0, 0.5),
            "a count: heads missing or in excess, in the worst transformer",
            "heads missing or in excess",
        )
        yield st.Claim(
            "On real text, outside the queries, the output of the extracted layer is that of the transformer",
            trained["text_error"].max(),
            st.near(0, tolerance),
            f"the relative squared error that verification accepts, {tolerance:g}; the largest of all seeds",
            "relative squared error",
        )
        yield st.Claim(
            "No more fresh sequences exceed the certified error than the certificate states",
            (trained["exceeded"] - trained["exceeding"]).max(),
            st.below(0),
            f"the share of {FRESH} fresh sequences above the certified error, less the share that the "
            "certificate allows, which fails once in 10,000 certificates",
            "share of sequences in excess",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield _table(trained)
        first = trained.isel(replicate=0)
        if str(first["outcome"].values) == "extracted":
            yield from layer_panels(AttentionLayer(first["theta"].values, first["projection"].values, causal=True))

    def _training(self) -> TextTraining:
        """Return the study whose transformers are queried."""
        if self.finished is None:
            return TextTraining(text=self.text)
        study = replace(finished_study(self.finished), text=self.text)
        if self.layer >= study.depth:
            deep = f"a transformer of depth {study.depth}"
            raise st.UsageError(f"layer={self.layer} of {deep}: layers are numbered from 0")
        return study

    def _text_error(self, model: Transformer, found: Recovery) -> float:
        """Compare with the output of the layer inside the transformer on windows of held-out text."""
        _, (_, validation) = read_characters(self.text)
        length = model.config.length
        starts = np.linspace(0, len(validation) - length, WINDOWS).astype(int)
        record = model.record(jnp.asarray(np.stack([validation[start : start + length] for start in starts])))
        below = record.start if self.layer == 0 else record.layers.stream[self.layer - 1]
        expected = float(model.scaling.branch) * np.asarray(record.layers.attention[self.layer], np.float64)
        assert found.extracted is not None
        return function_error(lambda _: expected, found.extracted.attention, np.asarray(below, np.float64))


@dataclass(frozen=True, eq=False)
class BlockOracle:
    """Attention of a block in float64, x + layer(gain * norm(x)), as an oracle."""

    layer: AttentionLayer
    gain: Floats
    norm: Normalization

    def __call__(self, x: np.ndarray) -> Floats:
        """Compute the outputs of sequences (n, k, d)."""
        return x + evaluate_layer(self.layer, self.gain * self.norm(x))


def block_oracle(model: Transformer, layer: int) -> BlockOracle:
    """Return the attention of one block of a trained pre-norm transformer without biases, widened to float64."""
    blocks, scaling, config = model.weights.blocks, model.scaling, model.config

    def scaled(role: str, weight: jax.Array) -> Floats:
        return float(scaling.multiplier[role]) * np.asarray(weight[layer], np.float64)

    if config.norm != "pre" or config.biases or blocks.attention_gain is None:
        raise st.UsageError("expected a pre-norm transformer with gains and without biases, as the demo's")
    query, key, value, output = (scaled(role, getattr(blocks, role)) for role in ("query", "key", "value", "output"))
    scale = float(scaling.logit(config.shape.key_dim))
    attention = MultiHeadAttention(query, key, value, float(scaling.branch) * output, scale=scale, causal=True)
    gain = scaled("norm", blocks.attention_gain)
    return BlockOracle(attention.merged(), gain, Normalization(config.centred, config.epsilon))


def _figures(oracle: BlockOracle, found: Recovery, seed: int) -> dict[str, float]:
    """Return the cost of an extraction and its errors against the true weights."""
    certificate, total = found.certificate, found.total
    fresh = GaussianSequences()(np.random.default_rng([seed, 1]), FRESH, oracle.layer.dim)
    assert found.extracted is not None
    errors = [np.mean((oracle(x) - found.extracted(x)) ** 2, axis=(1, 2)) for x in fresh]
    above = np.concatenate(errors) > certificate.largest_error * certificate.variance
    figures = {"heads": float(found.heads), "calls": float(total.calls), "tokens": float(total.tokens)}
    figures |= {"largest_error": certificate.largest_error, "exceeding": certificate.exceeding}
    figures["exceeded"] = float(above.mean())
    if found.layer.theta.shape == oracle.layer.theta.shape:
        truth = projected(oracle.layer, oracle.gain, centred=oracle.norm.centred)
        compared = compare_layers(truth, found.layer)
        figures |= {"theta_error": compared.theta, "projection_error": compared.projection}
    return figures


def _table(trained: st.Data) -> st.Listing:
    runs = [trained.isel(replicate=seed) for seed in range(trained.sizes["replicate"])]
    rows = tuple(
        (str(seed), str(run["outcome"].values), *(format_figure(float(run[name])) for name in FIGURES))
        for seed, run in enumerate(runs)
    )
    note = "Squared errors are relative to the variance of the outputs. The text error compares with the transformer "
    names = (label.replace("_", " ") for label in FIGURES)
    return st.Listing("Extraction", ("seed", "outcome", *names), rows, f"{note}in single precision.")

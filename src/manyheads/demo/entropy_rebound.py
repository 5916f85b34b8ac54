"""`demo/rebound`: drop and rebound of attention entropy and stable rank in the trainings of `demo/text`, by layer."""

from pathlib import Path

import jax
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.curves.drop_and_rise import replicated_drop_and_rise
from manyheads.demo.text import TextTraining
from manyheads.studies.joma.text.real_text import ROUNDING, RealText
from manyheads.study import Cell
from manyheads.study.execution.units import Unit, replicate_key, train
from manyheads.study.store.run_store import RunStore
from manyheads.theory.joma.text.record import reference_levels
from manyheads.theory.joma.theorems.rebound import REBOUND

STATISTICS = ("validation_loss", "entropy", "stable_rank")
PICTURES = (
    ("Attention entropy, by layer", "entropy [nat]", "uniform attention", "uniform"),
    ("Stable rank of the lower MLP matrix, by layer", "stable rank", "a random matrix", "random_rank"),
)
THEORY = {
    "attention entropy": "It decreases while the most salient token is learned and increases as the others follow: "
    "with rates that grow with salience the limit is approached from below.",
    "stable rank of the lower MLP": "It drops and rises for the same reason: one direction first, then the others.",
    "assumptions": "One layer, frozen orthonormal embeddings, fixed salience, gradient flow at a constant rate.",
    "not covered": "Which of several layers rebounds, when and by how much; Adam, a learning-rate schedule, "
    "positions and the residual stream; the validation loss (study joma/real-text).",
}


class DemoRebound(st.Study):
    """Drop and rebound of attention entropy and stable rank, by layer, in runs of `demo/text`.

    A finished run has the same seed and at least as many replicates.
    """

    name = "demo/rebound"
    claim = "Attention entropy of the upper layers drops and rebounds in the demo's training"
    source = RealText.source.at("figures 6 and 7: attention entropy and stable rank over training, by layer")

    finished: Path | None = st.setting(
        None, "``run.json`` of a run of `demo/text` whose trainings are read; by default they are trained"
    )

    def inputs(self) -> dict[str, str]:
        """Return the digest of the training text; UsageError if `finished` belongs to a run of another study."""
        if self.finished is None:
            return TextTraining().inputs()
        return dict(open_trainings(self.finished).header["inputs"])

    def predict(self, key: st.Key) -> st.Data:
        """Return the entropy of uniform causal attention and the stable rank of a random matrix of the MLP's shape."""
        study = self._training()
        return reference_levels(study.length, study.key_dim * study.heads)

    def train(self, key: st.Key) -> st.Data:
        """Return the statistics of the training with this key."""
        return training_of(self.finished, TextTraining(), key)[list(STATISTICS)]

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        entropy, rank = _curves(trained)
        for layer in range(self._training().depth):
            found = replicated_drop_and_rise(entropy.isel(layer=layer).values)
            ranks = replicated_drop_and_rise(rank.isel(layer=layer).values / float(theory["random_rank"]))
            both, of_rank = np.minimum(ranks.drop, ranks.rise), "stable rank of the lower MLP matrix drops and rebounds"
            for words, figure, expected, unit in (
                ("attention entropy drops", found.drop, "holds", "nat"),
                ("attention entropy rebounds", found.rise, "holds", "nat"),
                (of_rank, both, "refuted", "of the random level"),
            ):
                yield st.Claim(
                    f"Layer {layer}: the {words}",
                    figure,
                    st.above(REBOUND),
                    f"an inequality, from {REBOUND:g} {unit} on; minimum and rise are located on the other seeds, so "
                    "that noise gives zero",
                    f"drop or rise ({unit})",
                    expected,
                    resolution=ROUNDING,
                )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for values, (words, label, name, variable) in zip(_curves(trained), PICTURES, strict=True):
            ends, level = values["step"].isel(step=[0, -1]), float(theory[variable])
            yield st.lines(
                words,
                "step",
                label,
                {f"layer {layer}": values.isel(layer=layer) for layer in range(values.sizes["layer"])},
                reference={name: 0 * ends + level},
                x_label="step",
                note="Mean over heads and seeds, bands from the smallest to the largest seed; dotted, "
                f"{name}: {level:.2f}.",
            )
        yield st.Listing("Statements of the theory of joint dynamics", ("of", "statement"), tuple(THEORY.items()))

    def _training(self) -> TextTraining:
        """Return the study whose trainings are read."""
        return TextTraining() if self.finished is None else finished_study(self.finished)


def finished_study(finished: Path) -> TextTraining:
    """Rebuild the study of a run of `demo/text`, apart from its text and its training."""
    fields = open_trainings(finished).header["configuration"]
    return TextTraining(None, *(int(fields[name]) for name in ("key_dim", "heads", "depth", "length")))


def open_trainings(finished: Path) -> RunStore:
    """Open a run of `demo/text` by its ``run.json``; UsageError for a run of another study."""
    runs = RunStore(finished.parent)
    if runs.header["study"] != TextTraining.name:
        raise st.UsageError(f"{finished} holds a run of {runs.header['study']}: expected a run of {TextTraining.name}")
    return runs


def training_of(finished: Path | None, study: TextTraining, key: jax.Array) -> st.Data:
    """Read the stored training with this key, or train; UsageError if the run has no replicate with this key."""
    if finished is None:
        return train(study, key, Cell())
    runs = open_trainings(finished)
    seed, replicate = int(runs.header["seed"]), 0
    while (unit := Unit(Cell(), replicate, replicate)) in runs:
        if (jax.random.key_data(replicate_key(seed, replicate)) == jax.random.key_data(key)).all():
            return runs.read(unit)
        replicate += 1
    raise st.UsageError(
        f"{runs.path} holds {replicate} replicates of seed {seed} and none with this key: use the same --seed and "
        "no more --replicates"
    )


def _curves(trained: st.Data) -> tuple[xr.DataArray, xr.DataArray]:
    """Return entropies, averaged over heads, and stable ranks, both (replicate, layer, step)."""
    order = ("replicate", "layer", "step")
    return trained["entropy"].mean("head").transpose(*order), trained["stable_rank"].transpose(*order)

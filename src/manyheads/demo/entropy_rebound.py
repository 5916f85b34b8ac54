"""`demo/rebound`: drop and rebound of attention entropy and stable rank in the trainings of `demo/text`, by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.curves.drop_and_rise import replicated_drop_and_rise
from manyheads.demo.text import TextTraining
from manyheads.errors import UsageError
from manyheads.studies.joma.text.real_text import ROUNDING, RealText
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.execution.units import Unit, replicate_key
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.store.run_store import RunStore
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.text.record import reference_levels
from manyheads.theory.joma.theorems.rebound import REBOUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATISTICS = ("validation_loss", "entropy", "stable_rank")
THEORY = {
    "attention entropy": "It decreases while the most salient token is learned and increases as the others follow: "
    "with rates that grow with salience the limit is approached from below.",
    "stable rank of the lower MLP": "It drops and rises for the same reason: one direction first, then the others.",
    "assumptions": "One layer, frozen orthonormal embeddings, fixed salience, gradient flow at a constant rate.",
    "not covered": "Which of several layers rebounds, when and by how much; Adam, a learning-rate schedule, "
    "positions and the residual stream; the validation loss (study joma/real-text).",
}


@dataclass(frozen=True)
class DemoRebound(Study):
    """Drop and rebound of attention entropy and stable rank, by layer, in runs of `demo/text`.

    Attributes
    ----------
    finished
        ``run.json`` of a run of `demo/text` with the same seed and at least as many replicates, whose trainings are
        read; by default they are trained.
    """

    name: ClassVar[str] = "demo/rebound"
    claim: ClassVar[str] = "Attention entropy of the upper layers drops and rebounds in the demo's training"
    source: ClassVar[Source] = replace(
        RealText.source, locus="figures 6 and 7: attention entropy and stable rank over training, by layer"
    )

    finished: Path | None = None

    def inputs(self) -> dict[str, str]:
        """Return the digest of the training text.

        Raises
        ------
        UsageError
            `finished` belongs to a run of another study.
        """
        if self.finished is None:
            return TextTraining().inputs()
        return dict(open_trainings(self.finished).header["inputs"])

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the entropy of uniform causal attention and the stable rank of a random matrix of the MLP's shape."""
        study = self._training()
        return reference_levels(study.length, study.key_dim * study.heads)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Return the statistics of the training with this key."""
        return training_of(self.finished, TextTraining(), key)[list(STATISTICS)]

    def claims(self) -> tuple[Claim, ...]:
        """Test drop and rebound of attention entropy and stable rank in every layer."""

        def entropy(layer: int, part: str) -> Measure:
            return lambda predicted, trained: getattr(replicated_drop_and_rise(_curves(trained)[0][:, layer]), part)

        def rank(layer: int) -> Measure:
            def smaller(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                found = replicated_drop_and_rise(_curves(trained)[1][:, layer] / float(predicted["random_rank"]))
                return np.minimum(found.drop, found.rise)

            return smaller

        def claim(words: str, measure: Measure, expected: Expected, unit: str) -> Claim:
            return Claim(
                words,
                measure,
                quantity=f"drop or rise ({unit})",
                target=REBOUND,
                tolerance=(0.0, float("inf")),
                expected=expected,
                resolution=ROUNDING,
                basis=f"an inequality, from {REBOUND:g} {unit} on; minimum and rise are located on the other seeds, so "
                "that noise gives zero",
            )

        claims = []
        for layer in range(self._training().depth):
            of, level = f"Layer {layer}: the", "of the random level"
            claims += [
                claim(f"{of} attention entropy drops", entropy(layer, "drop"), "holds", "nat"),
                claim(f"{of} attention entropy rebounds", entropy(layer, "rise"), "holds", "nat"),
                claim(f"{of} stable rank of the lower MLP matrix drops and rebounds", rank(layer), "refuted", level),
            ]
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropy and stable rank by layer, and the statements of the theory."""
        entropy, rank = _curves(trained)
        steps = trained["step"].values
        uniform, random = (float(predicted[name]) for name in ("uniform", "random_rank"))
        entropy_words = ("Attention entropy, by layer", "entropy [nat]")
        rank_words = ("Stable rank of the lower MLP matrix, by layer", "stable rank")
        return (
            _lines(entropy_words, steps, entropy, ("uniform attention", uniform)),
            _lines(rank_words, steps, rank, ("a random matrix", random)),
            Listing("Statements of the theory of joint dynamics", ("of", "statement"), tuple(THEORY.items())),
        )

    def _training(self) -> TextTraining:
        """Return the study whose trainings are read."""
        return TextTraining() if self.finished is None else finished_study(self.finished)


def finished_study(finished: Path) -> TextTraining:
    """Rebuild the study of a run of `demo/text`, apart from its text and its training."""
    fields = open_trainings(finished).header["configuration"]
    return TextTraining(None, *(int(fields[name]) for name in ("key_dim", "heads", "depth", "length")))


def open_trainings(finished: Path) -> RunStore:
    """Open a run of `demo/text` by its ``run.json``.

    Raises
    ------
    UsageError
        A run of another study.
    """
    runs = RunStore(finished.parent)
    if runs.header["study"] != TextTraining.name:
        raise UsageError(f"{finished} holds a run of {runs.header['study']}: expected a run of {TextTraining.name}")
    return runs


def training_of(finished: Path | None, study: TextTraining, key: jax.Array) -> xr.Dataset:
    """Read the stored training with this key, or train.

    Raises
    ------
    UsageError
        The run has no replicate with this key.
    """
    if finished is None:
        return study.train(key, Cell())
    runs = open_trainings(finished)
    seed, replicate = int(runs.header["seed"]), 0
    while (unit := Unit(Cell(), replicate, replicate)) in runs:
        if (jax.random.key_data(replicate_key(seed, replicate)) == jax.random.key_data(key)).all():
            return runs.read(unit)
        replicate += 1
    raise UsageError(
        f"{runs.path} holds {replicate} replicates of seed {seed} and none with this key: use the same --seed and "
        "no more --replicates"
    )


def _curves(trained: xr.Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return entropies, averaged over heads, and stable ranks, both (replicates, layers, steps)."""
    one, order = trained.isel(cell=0), ("replicate", "layer", "step")
    return one["entropy"].mean("head").transpose(*order).values, one["stable_rank"].transpose(*order).values


def _lines(
    words: tuple[str, str], steps: NDArray[np.int64], values: NDArray[np.float64], level: tuple[str, float]
) -> Lines:
    """Draw values (replicates, layers, steps) by layer, and a reference level."""
    curves = [spread_curve(steps, values[:, layer], f"layer {layer}", group=layer) for layer in range(values.shape[1])]
    curves.append(Curve((float(steps[0]), float(steps[-1])), (level[1], level[1]), level[0], "reference"))
    note = "Mean over heads and seeds, bands from the smallest to the largest seed; dotted, "
    return Lines(words[0], "step", words[1], tuple(curves), note=f"{note}{level[0]}: {level[1]:.2f}.")

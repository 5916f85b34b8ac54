"""`demo/rebound`: the demo's own training, looked at again, to see whose attention drops and comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.demo.text import TextTraining
from manyheads.errors import UsageError
from manyheads.joma.drop_and_rise import Valley, cross_rises, cross_valleys, find_valley
from manyheads.joma.studies.real_text import ROUNDING, RealText
from manyheads.joma.theory.rebound import BOUNCE
from manyheads.spectra import causal_entropy_level, expected_stable_rank
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Source, Study, Verdict, spread_curve
from manyheads.study.store.run_store import RunStore
from manyheads.study.store.units import Unit, replicate_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEEN = ("validation_loss", "entropy", "stable_rank")
SAYS = {
    "entropy of attention": "It drops while the most salient token is learned, and rises again as the others follow: "
    "the slower a component is, the later it stops, so that the last entropy is approached from below.",
    "stable rank of the lower MLP": "It dips for the same reason: one direction first, the others later.",
    "what is assumed": "One layer, frozen orthonormal embeddings, what is worth attending to fixed, gradient flow at "
    "a constant rate.",
    "what it does not say": "Which of several layers rebounds, when, by how much, or what Adam, a falling rate, "
    "positions and the residual stream do to it; nor that a rebound means a low loss (study joma/real-text).",
}


@dataclass(frozen=True)
class Rebound(Study):
    """Drop and rebound of entropy and stable rank, layer by layer, in runs of `demo/text`.

    Attributes
    ----------
    finished
        ``run.json`` of a run of `demo/text` with the same seed and at least as many replicates: its trainings are read,
        not repeated. Without it they are trained.
    """

    name: ClassVar[str] = "demo/rebound"
    claim: ClassVar[str] = "in the demo's training the attention of the upper layer drops and rebounds; what else does?"
    source: ClassVar[Source] = replace(
        RealText.source, locus="figures 6 and 7: attention entropy and stable rank over training, by layer"
    )

    finished: Path | None = None

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text that is, or was, trained on.

        Raises
        ------
        UsageError
            `finished` belongs to a run of another study.
        """
        return (
            TextTraining().inputs() if self.finished is None else dict(open_trainings(self.finished).header["inputs"])
        )

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the levels without training: uniform causal attention, a random matrix of the MLP's shape."""
        length, width = self._sizes()
        return xr.Dataset(
            {
                "uniform": (
                    (),
                    causal_entropy_level(length),
                    {"long_name": "entropy of uniform causal attention", "units": "nat"},
                ),
                "random_rank": (
                    (),
                    expected_stable_rank(4 * width, width),
                    {"long_name": "stable rank of a random matrix", "units": "1"},
                ),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Return what was seen of the training with this key."""
        whole = (
            TextTraining().train(key, cell)
            if self.finished is None
            else read_training(open_trainings(self.finished), key)
        )
        return whole[list(SEEN)]

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Ask of every layer whether its entropy drops and rebounds, and whether its stable rank does."""
        entropy, rank = _curves(trained)
        ranks = rank / float(predicted["random_rank"])
        verdicts = []
        for layer in range(entropy.shape[1]):
            attention, matrix = _measure(entropy[:, layer]), _measure(ranks[:, layer])
            verdicts += [
                _claim(f"layer {layer}: the entropy of its attention drops", attention.drop, "holds", "nat"),
                _claim(f"layer {layer}: it then rebounds", attention.rebound, "holds", "nat"),
                _claim(
                    f"layer {layer}: the stable rank of its MLP drops and rebounds",
                    np.minimum(matrix.drop, matrix.rebound),
                    "refuted",
                    "of the random level",
                ),
            ]
        return tuple(verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropy and rank by layer with seeds as bands, and what the theory says of them."""
        entropy, rank = _curves(trained)
        steps = trained["step"].values
        uniform, random = (float(predicted[name]) for name in ("uniform", "random_rank"))
        note = "Mean over heads and seeds, bands from the smallest to the largest seed; dotted, {}."
        return (
            _lines(
                "Attention entropy, by layer", "entropy [nat]", steps, entropy, note, ("uniform attention", uniform)
            ),
            _lines(
                "Stable rank of the lower MLP matrix, by layer",
                "stable rank",
                steps,
                rank,
                note,
                ("a random matrix", random),
            ),
            Listing("What the theory of joint dynamics says of such curves", ("of", "statement"), tuple(SAYS.items())),
        )

    def _sizes(self) -> tuple[int, int]:
        """Return length of a window and width of the stream."""
        if self.finished is None:
            study = TextTraining()
            return study.length, study.key_dim * study.heads
        fields = open_trainings(self.finished).header["configuration"]
        return int(fields["length"]), int(fields["key_dim"]) * int(fields["heads"])


def open_trainings(finished: Path) -> RunStore:
    """Return the run of `demo/text` whose ``run.json`` this is.

    Raises
    ------
    UsageError
        It is a run of another study.
    """
    runs = RunStore(finished.parent)
    if runs.header["study"] != TextTraining.name:
        raise UsageError(f"{finished} holds a run of {runs.header['study']}: give one of {TextTraining.name}")
    return runs


def read_training(runs: RunStore, key: jax.Array) -> xr.Dataset:
    """Return the stored training with this key, checked.

    Raises
    ------
    UsageError
        The run has no replicate with this key.
    """
    seed, replicate = int(runs.header["seed"]), 0
    while (unit := Unit(Cell(), replicate, replicate)) in runs:
        if (jax.random.key_data(replicate_key(seed, replicate)) == jax.random.key_data(key)).all():
            return runs.read(unit)
        replicate += 1
    raise UsageError(
        f"{runs.path} holds {replicate} replicates of seed {seed} and none with this key: ask for the same --seed and "
        "no more --replicates"
    )


def _curves(trained: xr.Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return entropies, means over heads, and stable ranks, both (replicates, layers, steps)."""
    one, order = trained.isel(cell=0), ("replicate", "layer", "step")
    return one["entropy"].mean("head").transpose(*order).values, one["stable_rank"].transpose(*order).values


def _measure(curves: NDArray[np.float64]) -> Valley:
    # A single seed has no others that could name the place; its interval is infinite, and decides nothing.
    # A rebound is the largest rise after a drop: a layer may narrow a second time and hide it.
    return cross_valleys(curves)._replace(rebound=cross_rises(curves)) if len(curves) > 1 else find_valley(curves)


def _claim(words: str, samples: NDArray[np.float64], expected: str, unit: str) -> Verdict:
    return Verdict.from_samples(
        words,
        samples,
        target=BOUNCE,
        tolerance=(0.0, float("inf")),
        expected=expected,  # type: ignore[arg-type]
        resolution=ROUNDING,
        basis=f"an inequality, from {BOUNCE:g} {unit} on; lowest point and rise are where the others have them, so "
        "that noise gives zero",
    )


def _lines(
    title: str,
    label: str,
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    note: str,
    level: tuple[str, float],
) -> Lines:
    curves = [spread_curve(steps, values[:, layer], f"layer {layer}", group=layer) for layer in range(values.shape[1])]
    span = (float(steps[0]), float(steps[-1]))
    curves.append(Curve(span, (level[1], level[1]), level[0], "reference"))
    return Lines(title, "step", label, tuple(curves), note=note.format(f"{level[0]}: {level[1]:.2f}"))

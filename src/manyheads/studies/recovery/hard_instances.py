"""`recovery/hard-instances`: a student on parity and wave layers, and on ordinary layers of equal size.

The same student, with the same number of heads, as many sequences and the same budget of work, meets a parity layer, a
wave layer, and for each a planted layer of its size. The Fourier weights of the hard layers by degree are known
exactly, and an algorithm that finds the hidden set is run beside the student, so that the hardness is that of the
learner and not of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.examples.student import StudentSettings, search
from manyheads.recovery.fit.variable_projection import Examples, Tangent
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.attacks import unmask_parity, unmask_wave
from manyheads.recovery.planted.hard_instances import guarantees, parity_layer, wave_layer
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

LAYERS = {
    "parity": "parity layer",
    "parity-size": "ordinary layer, same size",
    "wave": "wave layer",
    "wave-size": "ordinary layer, size of the wave",
}
HARD = ("parity", "wave")
STUDENT = StudentSettings()
SOLVED = 1e-10  # unexplained share of the training labels at which no further start is tried


class Taught(NamedTuple):
    """The best point of a restarted student, its evaluations over all starts, and its starts."""

    best: Tangent
    evaluations: int
    starts: int


@dataclass(frozen=True)
class HardInstances(Study):
    """A restarted student explains nothing of parity and wave layers in the work that solves ordinary ones.

    Attributes
    ----------
    parity
        Token dimension and heads of the parity layer; as many coordinates are hidden.
    wave
        Token dimension, heads and hidden coordinates of the wave layer, of period 4.
    samples
        Sequences of two tokens to learn from, and as many to test on.
    evaluations
        Evaluations of the loss and its gradient that a student may spend, over all its starts.
    """

    name: ClassVar[str] = "recovery/hard-instances"
    claim: ClassVar[str] = "A restarted student fits ordinary layers and fails on parity and wave layers"
    revision: ClassVar[int] = 4
    source: ClassVar[Source] = replace(
        CHEN_LI, locus="lower bounds: that hard instances exist; the two that are tried here are derived here"
    )
    unread_prediction: ClassVar[str] = (
        "the Fourier weights say why a layer is hard; what a student leaves unexplained has no closed form"
    )

    parity: tuple[int, int] = (16, 4)
    wave: tuple[int, int, int] = (12, 6, 4)
    samples: int = 2500
    evaluations: int = 500

    def __post_init__(self) -> None:
        if len(self.parity) != 2 or len(self.wave) != 3:
            raise UsageError(f"parity={self.parity}, wave={self.wave}: give (d, heads) and (d, heads, hidden)")
        if self.samples < 100 or self.evaluations < 1:
            raise UsageError(f"samples={self.samples}, evaluations={self.evaluations}: give 100 or more, and 1 or more")
        for name in HARD:  # refuses sizes that make no hard layer before work starts
            self._hard(name, np.random.default_rng(0))

    @classmethod
    def full(cls) -> HardInstances:
        """Return the study with a wave of 16 heads over 12 of 24 coordinates, and 8,000 sequences."""
        return cls(wave=(24, 16, 12), samples=8000, evaluations=1500)

    @classmethod
    def small(cls) -> HardInstances:
        """Return the smallest configuration in which every claim can change."""
        return cls((6, 2), (6, 4, 2), samples=300, evaluations=40)

    def cells(self) -> tuple[Cell, ...]:
        """Return the two hard layers, and for each an ordinary one of its size."""
        return grid(layer=tuple(LAYERS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the Fourier weights of the hard layers' signals, exactly."""
        rng, found = np.random.default_rng(0), {}
        for name in HARD:
            layer, hidden = self._hard(name, rng)
            found[name] = guarantees(layer, hidden)
        weights = {
            f"{name}_weight": (f"{name}_degree", one.fourier_weights, label("Fourier weight of the signal"))
            for name, one in found.items()
        }
        family = [float(one.family) for one in found.values()]
        return xr.Dataset(
            {
                **weights,
                "family": ("hard", family, label("layers that differ by the hidden set alone")),
            },
            coords={"hard": list(found)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Teach one student, restarted within its budget, and look for the hidden set in the way that finds it."""
        for_layer, for_data, for_student, for_search = generator(key).spawn(4)
        name = str(cell["layer"])
        layer, hidden = self._layer(name, for_layer)
        x, fresh = (sequences(for_data, self.samples, 2, layer.dim) for _ in range(2))
        y, labels = evaluate_layer(layer, x), evaluate_layer(layer, fresh)
        signal, tested = _beyond_linear(x, y, x, y), _beyond_linear(x, y, fresh, labels)
        done = self._teach(x, y, layer.heads, SOLVED * signal / np.sum(y**2), for_student)
        error = float(np.sum((evaluate_layer(done.best.layer, fresh) - labels) ** 2))
        return xr.Dataset(
            {
                "unexplained": ((), error / tested, label("unexplained share of the signal, fresh sequences")),
                "learned": (
                    (),
                    done.best.loss * float(np.sum(y**2)) / signal,
                    label("unexplained share of the signal, training sequences"),
                ),
                "spent": ((), float(done.evaluations), label("evaluations of the loss", "evaluations")),
                "starts": ((), float(done.starts), label("starts of the student")),
                "unmasked": (
                    (),
                    _unmask(name, hidden, x, y, for_search),
                    label("hidden set found by the right question"),
                ),
                "low_share": (
                    (),
                    _low_share(layer, hidden),
                    label("share of the Fourier weight at degrees 1 to 2|S| - 2"),
                ),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare what is left unexplained, and what finds the hidden sets."""

        def figure(name: str, layer: str) -> Measure:
            return lambda predicted, trained: of_cell(trained, name, layer=layer)

        def worst(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            left = [of_cell(trained, "unexplained", layer=name).max() for name in ("parity-size", "wave-size")]
            return float(np.log10(max(left)))

        def least(layer: str) -> Measure:
            return lambda predicted, trained: float(of_cell(trained, "unmasked", layer=layer).min())

        return (
            *(
                Claim(
                    f"The student leaves more than half of the signal of a {LAYERS[name]} unexplained",
                    figure("unexplained", name),
                    quantity="share of the signal, unexplained",
                    bounds=(0.0, float("inf")),
                    target=1.0,
                    tolerance=(0.5, float("inf")),
                    basis="half of the signal: the best predictor that a correlational learner can reach explains "
                    "nothing of it",
                )
                for name in HARD
            ),
            Claim(
                "With the same budget the student learns every ordinary layer of the same sizes",
                worst,
                quantity="share of the signal, unexplained (log10), worst layer",
                target=-6.0,
                tolerance=(float("inf"), 0.0),
                basis="log10 of the worst over replicates; a start that is stuck leaves about one in a hundred",
            ),
            Claim(
                f"All Fourier weight of the parity layer lies at degree {2 * self.parity[1] - 1} or above",
                lambda predicted, trained: float(of_cell(trained, "low_share", layer="parity").max()),
                quantity="Fourier weight at lower degrees",
                target=0.0,
                tolerance=(0.0, 1e-20),
                basis="the square of rounding error in the labels, with three orders to spare",
            ),
            Claim(
                "Squares of the labels reveal the hidden set of a parity layer in every replicate",
                least("parity"),
                quantity="share of replicates that find the set",
                target=1.0,
                tolerance=0.0,
                basis="scores 4/m² apart with standard error 8/(m sqrt(samples))",
            ),
            Claim(
                "Gaussian elimination finds the hidden set of a wave of period 4 in every replicate",
                least("wave"),
                quantity="share of replicates that find the set",
                target=1.0,
                tolerance=0.0,
                basis="labels without noise are linear equations over two elements",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show learning, Fourier weights by degree, and the figures of each layer."""
        table = trained.set_index(cell="layer").transpose("cell", "replicate")
        weights = [
            Curve(
                tuple(range(predicted[f"{name}_weight"].size)),
                tuple(np.maximum(predicted[f"{name}_weight"].values, 1e-32).tolist()),
                LAYERS[name],
                "predicted",
                2 * group,
            )
            for group, name in enumerate(HARD)
        ]
        return (
            self._errors(table),
            Lines(
                "Where the signal is",
                "degree in the hidden signs",
                "Fourier weight",
                tuple(weights),
                log_y=True,
                note="Exact. Zero is drawn at 1e-32; degree 0 is a linear function of the tokens.",
                shows=("All Fourier weight",),
            ),
            self._listing(predicted, table),
        )

    def _errors(self, table: xr.Dataset) -> Lines:
        curves = []
        for group, (what, title) in enumerate((("learned", "training sequences"), ("unexplained", "fresh sequences"))):
            values = np.log10(np.maximum(table[what].sel(cell=list(LAYERS)).values, 1e-20))  # (layer, replicate)
            curves.append(spread_curve(range(len(LAYERS)), values.T, title, group=group))
        return Lines(
            "What a student leaves unexplained, within one budget",
            "layer",
            "log10 of the unexplained share of the signal",
            tuple(curves),
            note="Bars reach over replicates.",
            shows=("leaves more than half", "With the same budget"),
            x_ticks=tuple(LAYERS.values()),
        )

    def _listing(self, predicted: xr.Dataset, table: xr.Dataset) -> Listing:
        rows = []
        for name, title in LAYERS.items():
            cell = table.sel(cell=name)
            middle = {what: float(cell[what].median()) for what in ("unexplained", "spent", "starts")}
            family = f"{float(predicted['family'].sel(hard=name)):,.0f}" if name in HARD else ""
            found = f"{float(cell['unmasked'].mean()):.0%}" if family else ""
            figures = (f"{middle['unexplained']:.2g}", f"{middle['spent']:.0f}", f"{middle['starts']:g}")
            rows.append((title, *figures, family, found))
        columns = ("layer", "unexplained, fresh", "evaluations", "starts", "hidden sets", "found by the right question")
        note = "Medians over replicates. The right question: squares of labels for parity, elimination for the wave."
        return Listing("Equal sizes, equal work", columns, tuple(rows), note)

    def _teach(self, x: Array, y: Array, heads: int, enough: float, rng: np.random.Generator) -> Taught:
        """Start the student again and again, until it has learned the labels or spent its evaluations."""
        examples, spent, starts = Examples(x, y), 0, 0
        best: Tangent | None = None
        while spent < self.evaluations and (best is None or best.loss > enough):
            left = replace(STUDENT, evaluations=self.evaluations - spent)
            found, used = search(examples, heads, rng, until=enough, settings=left)
            spent, starts = spent + used, starts + 1
            best = found if best is None or found.loss < best.loss else best
        assert best is not None
        return Taught(best, spent, starts)

    def _layer(self, name: str, rng: np.random.Generator) -> tuple[AttentionLayer, tuple[int, ...]]:
        if name in HARD:
            return self._hard(name, rng)
        dim, heads = getattr(self, name.removesuffix("-size"))[:2]
        return planted_layer(rng, dim, heads), ()

    def _hard(self, name: str, rng: np.random.Generator) -> tuple[AttentionLayer, tuple[int, ...]]:
        dim, heads, size = (*self.parity, self.parity[1]) if name == "parity" else self.wave
        hidden = tuple(sorted(int(one) for one in 1 + rng.permutation(dim - 1)[:size]))
        return (parity_layer if name == "parity" else wave_layer)(dim, heads, hidden), hidden


def _beyond_linear(x: Array, y: Array, fresh: Array, labels: Array) -> float:
    """Return the squares of labels that the best linear function of both tokens, fitted to (x, y), leaves."""
    dim = x.shape[2]
    linear = np.linalg.lstsq(_both(x), y.reshape(-1, dim), rcond=None)[0]
    return float(np.sum((labels.reshape(-1, dim) - _both(fresh) @ linear) ** 2))


def _both(x: Array) -> Array:
    """Return every token beside the other one of its pair, (n k, 2 d)."""
    return np.concatenate([x, x[:, ::-1]], axis=-1).reshape(-1, 2 * x.shape[2])


def _unmask(name: str, hidden: tuple[int, ...], x: Array, y: Array, rng: np.random.Generator) -> float:
    """Tell whether the question that suits the layer finds its hidden set; an ordinary layer has none."""
    if not hidden:
        return float("nan")
    try:
        found = unmask_wave(x, y, rng=rng) if name == "wave" else unmask_parity(x, y, len(hidden))
    except UsageError:
        return 0.0
    return float(found == hidden)


def _low_share(layer: AttentionLayer, hidden: tuple[int, ...]) -> float:
    """Return the share of a hard layer's Fourier weight below the degree of a parity layer's."""
    return guarantees(layer, hidden).share_up_to(2 * len(hidden) - 2) if hidden else float("nan")

"""`recovery/layer-and-mlp`: an attention layer and the MLP behind it, learned together from examples.

Whether theories of feed-forward networks and of attention compose is an open question of the authors; this is an
example at small sizes. A student learns both from sequences and outputs alone, and each of them by itself beside it.
The six stages, whose certificates need labels in the simplex of projected tokens, are given the composed labels too.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.recovery.examples.composed_student import Composed, draw_composed, evaluate_composed, fit_composed
from manyheads.recovery.examples.six_stages import learn_in_six_stages
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.recovery.refusals import RecoveryRefused
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

# Fields that are given to the student, and so not learned
GIVEN: dict[str, tuple[str, ...]] = {
    "both": (),
    "layer": ("into", "bias", "out"),
    "mlp": ("theta", "projection"),
    "uniform": ("theta",),
}
TITLES = {
    "both": "layer and MLP together",
    "layer": "layer, MLP given",
    "mlp": "MLP, layer given",
    "uniform": "both, attention held uniform",
}
FRESH = 1000  # sequences on which everything is tested
ENOUGH = 1e-12  # share of the variance, unexplained, at which a student is done
FIGURES = {
    "error": "unexplained share of the variance, fresh sequences",
    "theta": "relative error of the attention matrices",
    "projection": "relative error of the projections",
    "mapped": "relative error of the projections after a common linear map",
    "evaluations": "evaluations of the loss",
    "starts": "starts",
    "refused": "six stages refuse the labels",
}


@dataclass(frozen=True)
class LayerAndMlp(Study):
    """A student learns an attention layer and the MLP behind it together, exactly and from few starts.

    Attributes
    ----------
    dim, heads, hidden
        Token dimension, heads, and width of the MLP.
    tokens, count
        Length, and sequences to learn from.
    starts, evaluations
        Random starts at most, and evaluations of the loss in each.
    """

    name: ClassVar[str] = "recovery/layer-and-mlp"
    claim: ClassVar[str] = "A layer and its MLP are learned together from examples, to rounding"
    source: ClassVar[Source] = replace(CHEN_LI, locus="closing question of the talk; the example is ours")
    unread_prediction: ClassVar[str] = (
        "what is expected is that nothing is left, and what is left is compared with bounds"
    )

    dim: int = 4
    heads: int = 2
    hidden: int = 6
    tokens: int = 2
    count: int = 800
    starts: int = 10
    evaluations: int = 2000

    def __post_init__(self) -> None:
        sizes = (self.dim, self.heads, self.hidden, self.count, self.starts, self.evaluations)
        if min(sizes) < 1 or self.tokens < 2 or self.hidden < self.dim:
            raise UsageError(
                f"{self}: give positive sizes, two tokens or more, and an MLP that is as wide as its input or wider"
            )

    @classmethod
    def full(cls) -> LayerAndMlp:
        """Return the study in eight dimensions, with three heads."""
        return cls(dim=8, heads=3, hidden=32, tokens=3, count=6000, evaluations=10_000)

    @classmethod
    def small(cls) -> LayerAndMlp:
        """Return the smallest configuration in which every claim can change."""
        return cls(dim=2, heads=2, hidden=2, count=100, starts=1, evaluations=300)

    def cells(self) -> tuple[Cell, ...]:
        """Return what is learned; all see the same layer, MLP, sequences and starts."""
        return grid(learned=tuple(GIVEN))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what is expected of a student of the right form: nothing is left."""
        return xr.Dataset({"error": ((), 0.0, label(FIGURES["error"]))})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Teach the student what is not given, and compare its weights with the teacher's."""
        for_teacher, for_data, for_starts, for_stages = generator(key).spawn(4)
        learned = str(cell["learned"])
        layer = planted_layer(for_teacher, self.dim, self.heads)
        drawn = draw_composed(for_teacher, self.dim, self.heads, self.hidden)
        teacher = drawn._replace(theta=np.asarray(layer.theta), projection=np.asarray(layer.projection))
        x = sequences(for_data, self.count + FRESH, self.tokens, self.dim, distribution="gaussian")
        y = np.asarray(evaluate_composed(teacher, x))
        starts = []
        for _ in range(self.starts):
            start = draw_composed(for_starts, self.dim, self.heads, self.hidden)
            given = {name: getattr(teacher, name) for name in GIVEN[learned]}
            if learned == "uniform":
                given["theta"] = np.zeros_like(teacher.theta)
            starts.append(start._replace(**given))
        if learned == "uniform":
            starts = starts[:2]  # the control is solved from no start: two show it
        fit = fit_composed(
            x[: self.count], y[: self.count], starts, held=GIVEN[learned], enough=ENOUGH, evaluations=self.evaluations
        )
        fresh, expected = x[self.count :], y[self.count :]
        left = np.mean((np.asarray(evaluate_composed(fit.weights, fresh)) - expected) ** 2) / np.var(expected)
        values = {
            "error": left,
            **_compare(teacher, fit.weights),
            "evaluations": fit.evaluations,
            "starts": fit.starts,
            "refused": self._refused(x, y, for_stages) if learned == "both" else math.nan,
        }
        return xr.Dataset({name: ((), float(values[name]), label(words)) for name, words in FIGURES.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Compare what is left of the function and of the weights, and the work."""

        def worst(name: str, learned: str = "both") -> Measure:
            return lambda predicted, trained: float(np.log10(of_cell(trained, name, learned=learned).max() + 1e-40))

        def work(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            both, layer, mlp = (
                of_cell(trained, "evaluations", learned=name).sum() for name in ("both", "layer", "mlp")
            )
            return float(both / (layer + mlp))

        infinite = math.inf
        return (
            Claim(
                "A student learns the function of a layer and the MLP behind it from examples, in every replicate",
                worst("error"),
                quantity="unexplained share of the variance (log10), worst replicate",
                target=-10.0,
                tolerance=(infinite, 0.0),
                basis="log10 of the worst error on fresh sequences: a hundred times what ends the training",
            ),
            Claim(
                "The student finds the attention matrices",
                worst("theta"),
                quantity="relative error of the attention matrices (log10), worst replicate",
                target=-4.0,
                tolerance=(infinite, 0.0),
                basis="the square root of the function's error, with a factor of ten for its condition",
            ),
            Claim(
                "The student finds the projections up to one linear map, which the MLP takes back",
                worst("mapped"),
                quantity="relative error of the projections after the best common map (log10), worst replicate",
                target=-4.0,
                tolerance=(infinite, 0.0),
                basis="the square root of the function's error, with a factor of ten for its condition",
            ),
            Claim(
                "The student does not find the projections themselves",
                lambda predicted, trained: of_cell(trained, "projection", learned="both"),
                quantity="relative error of the projections",
                target=0.1,
                tolerance=(0.0, infinite),
                basis="an inequality: the map is not near the identity",
            ),
            Claim(
                "Learning both takes at most five times the evaluations of the layer and the MLP by themselves",
                work,
                quantity="evaluations over those of both parts, all replicates",
                target=5.0,
                tolerance=(infinite, 0.0),
                basis="an inequality: five times the sum of the parts",
            ),
            Claim(
                "The six stages refuse the composed labels: their certificates need the layer's own",
                lambda predicted, trained: float(of_cell(trained, "refused", learned="both").min()),
                quantity="share of replicates refused",
                target=1.0,
                tolerance=0.0,
                basis="a refusal counts one",
            ),
            Claim(
                "Control: with attention held uniform the same student does not learn the function",
                lambda predicted, trained: of_cell(trained, "error", learned="uniform"),
                quantity="unexplained share of the variance",
                target=0.01,
                tolerance=(0.0, infinite),
                basis="an inequality: a hundredth of the variance, eight orders above what counts as learned",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the errors of every student, and all figures."""
        names = ("error", "theta", "mapped", "projection")
        curves = tuple(
            spread_curve(
                range(len(TITLES)),
                np.stack([_logarithms(of_cell(trained, name, learned=one)) for one in TITLES], axis=1),
                FIGURES[name],
                group=group,
            )
            for group, name in enumerate(names)
        )
        rows = [
            (words, *(f"{np.median(of_cell(trained, name, learned=one)):.2g}" for one in TITLES))
            for name, words in FIGURES.items()
            if name != "refused"
        ]
        return (
            Lines(
                "What is left",
                "student",
                "log10 of the figure",
                curves,
                note="Bars reach over replicates; what is given has no error, and no point.",
                shows=("A student learns the function",),
                x_ticks=tuple(TITLES.values()),
            ),
            Listing("Medians over replicates", ("", *TITLES.values()), tuple(rows)),
        )

    def _refused(self, x: Array, y: Array, rng: np.random.Generator) -> float:
        try:
            learn_in_six_stages((x, y), self.heads, rng=rng)
        except RecoveryRefused:
            return 1.0
        return 0.0


def _compare(teacher: Composed, found: Composed) -> dict[str, float]:
    """Return the errors of the heads under the best matching, and of the projections after the best common map."""
    heads, dim = teacher.theta.shape[:2]
    size, norm = np.linalg.norm(teacher.theta), np.linalg.norm(teacher.projection)
    orders = [list(order) for order in itertools.permutations(range(heads))]
    order = min(orders, key=lambda one: float(np.linalg.norm(found.theta[one] - teacher.theta)))
    projection = found.projection[order]
    stacked, wanted = (one.reshape(heads * dim, dim) for one in (projection, teacher.projection))
    mapped = stacked @ np.linalg.lstsq(stacked, wanted)[0]
    return {
        "theta": float(np.linalg.norm(found.theta[order] - teacher.theta) / size),
        "projection": float(np.linalg.norm(projection - teacher.projection) / norm),
        "mapped": float(np.linalg.norm(mapped - wanted) / norm),
    }


def _logarithms(values: np.ndarray) -> np.ndarray:
    """Return log10, NaN for the zeros of what is given."""
    return np.log10(np.where(values > 0, values, np.nan))

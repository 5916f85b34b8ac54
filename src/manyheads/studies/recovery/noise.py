"""`recovery/noise`: squared error of layers learned from noisy labels, against the parametric rate p sigma^2 / n.

A layer is learned from labels with independent noise. Least squares on p numbers from n labels leaves, to first order
in the noise, the squared error p sigma^2 / n on fresh sequences, whatever the layer: the parametric rate, which no
unbiased method can beat. The student starts from random matrices; refinement from the truth shows what the labels
allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.examples.student import ENOUGH, StudentSettings, fit_student, free_numbers
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.statistics import Interval, fit_exponent
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

FRESH = 2000  # sequences on which the error is measured
HELD_OUT = 200  # sequences that choose between starts
FRESH_ERROR = "squared error on fresh sequences"
WITHIN = 1.3  # factor within which the rate must be met
REFINEMENT = GaussNewtonSettings(gain=1e-6, inner=100)


@dataclass(frozen=True)
class Noise(Study):
    """The student reaches the parametric rate p sigma^2 / n on labels with noise sigma.

    Attributes
    ----------
    sigmas
        Standard deviations of the noise; labels have a mean square of about one.
    dim, heads, length
        Of the layer, and tokens of a sequence.
    count
        Sequences to learn from.
    """

    name: ClassVar[str] = "recovery/noise"
    claim: ClassVar[str] = "On noisy labels the student attains the parametric rate from random starts"
    revision: ClassVar[int] = 3
    source: ClassVar[Source] = replace(CHEN_LI, locus="noise is not treated there; the parametric rate is classical")

    sigmas: tuple[float, ...] = (0.001, 0.01, 0.1, 0.5)
    dim: int = 8
    heads: int = 2
    length: int = 2
    count: int = 2000

    def __post_init__(self) -> None:
        if len(self.sigmas) < 2 or list(self.sigmas) != sorted(set(self.sigmas)) or not self.sigmas[0] > 0:
            raise UsageError(f"sigmas={self.sigmas}: give two or more, positive, in rising order")
        if min(self.dim, self.heads) < 1 or self.length < 2:
            raise UsageError(f"dim={self.dim}, heads={self.heads}, length={self.length}: at least 1, 1 and 2")
        if self.count * self.length < 2 * ENOUGH * self.heads * self.dim:
            raise UsageError(f"count={self.count}: {ENOUGH:g} labels for each of 2 d^2 numbers a head are needed")

    @classmethod
    def full(cls) -> Noise:
        """Return the study at 16 dimensions, with 20,000 sequences."""
        return cls(dim=16, count=20_000)

    @classmethod
    def small(cls) -> Noise:
        """Return the smallest configuration in which every claim can change."""
        return cls((0.01, 0.1), dim=3, heads=1, count=120)

    def cells(self) -> tuple[Cell, ...]:
        """Return every size of the noise."""
        return grid(sigma=self.sigmas)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the parametric rate."""
        numbers, labels = 2 * self.heads * self.dim**2, self.count * self.length * self.dim
        rate = numbers / labels * np.square(self.sigmas)
        return xr.Dataset({"error": ("sigma", rate, label(FRESH_ERROR))}, coords={"sigma": list(self.sigmas)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Learn one layer from labels with noise; layer, sequences and normals are the same for all sizes."""
        sigma = float(cell["sigma"])
        for_layer, for_data, for_noise, for_student = generator(key).spawn(4)
        layer = planted_layer(for_layer, self.dim, self.heads)
        x, held, fresh = (sequences(for_data, n, self.length, self.dim) for n in (self.count, HELD_OUT, FRESH))
        normals = for_noise.normal(size=(self.count + HELD_OUT, *x.shape[1:]))
        y, held_y = (
            evaluate_layer(layer, tokens) + sigma * noise
            for tokens, noise in ((x, normals[: self.count]), (held, normals[self.count :]))
        )
        examples, held_out = Examples(x, y), Examples(held, held_y)
        share = sigma**2 * held_y.size / held_out.power
        wanted = share * (1 + free_numbers(examples, self.heads) / y.size) * (1 + 5 * (2 / held_y.size) ** 0.5)
        fit = fit_student(
            examples, held_out, self.heads, for_student, wanted=wanted, settings=StudentSettings(refinement=REFINEMENT)
        )
        best = fit_gauss_newton(layer, x, y, settings=REFINEMENT).layer
        truth = evaluate_layer(layer, fresh)
        errors = [float(np.mean((evaluate_layer(found, fresh) - truth) ** 2)) for found in (fit.layer, best)]
        return xr.Dataset(
            {
                "error": ((), errors[0], label(FRESH_ERROR)),
                "attainable": ((), errors[1], label(f"{FRESH_ERROR}, refined from the truth")),
                "theta": ((), compare_layers(layer, fit.layer).theta, label("relative error of Theta")),
                "restarts": ((), float(fit.restarts), label("random starts")),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the error with the rate, its exponent with two, and random starts with a start at the truth."""
        weak = max((sigma for sigma in self.sigmas if sigma <= 0.1), default=self.sigmas[0])
        numbers, labels = 2 * self.heads * self.dim**2, self.count * self.length * self.dim

        def errors(trained: xr.Dataset, name: str = "error") -> np.ndarray:
            return trained[name].transpose("replicate", "cell").values

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return of_cell(trained, "error", sigma=weak) / float(predicted["error"].sel(sigma=weak))

        def exponent(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            fit = fit_exponent(np.asarray(self.sigmas), errors(trained))
            return fit.exponent, fit.interval

        return (
            Claim(
                f"At noise sigma = {weak:g} in the labels the squared error is p sigma^2 / n",
                ratio,
                quantity="squared error, measured over predicted",
                target=1.0,
                tolerance=(1 - 1 / WITHIN, WITHIN - 1),
                basis="a factor of 1.3 either way: the excess is sigma^2 chi^2_p / n, and p/n is small",
            ),
            Claim(
                "The squared error scales as the square of the noise",
                exponent,
                quantity="exponent of sigma",
                target=2.0,
                tolerance=max(0.05, 2 * numbers / labels),
                basis="the next order in the noise is felt at the largest sigma only, by 2 p/n at most, or 0.05",
            ),
            Claim(
                "Random starts reach the error of a start at the truth",
                lambda predicted, trained: np.log(errors(trained) / errors(trained, "attainable")).max(1),
                quantity="error over the attainable one (ln)",
                target=0.0,
                tolerance=math.log(WITHIN),
                basis="log of the ratio of both errors, the worst sigma of a replicate; the factor is that of the rate",
                resolution=1e-3,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the error against the rate."""
        table = trained.set_index(cell="sigma").transpose("replicate", "cell")
        rate = predicted["error"].values
        return (
            Lines(
                "Error of learned layers",
                "noise sigma of the labels",
                "squared error on fresh sequences",
                (
                    spread_curve(self.sigmas, table["error"].values, "student", group=0),
                    spread_curve(self.sigmas, table["attainable"].values, "refined from the truth", group=1),
                    spread_curve(self.sigmas, rate[None], "p sigma^2 / n", "predicted", group=0),
                ),
                log_x=True,
                log_y=True,
                note="Bands: full range of the replicates.",
                shows=("The squared error scales",),
            ),
            Lines(
                "Error in units of the rate",
                "noise sigma of the labels",
                "error / (p sigma^2 / n)",
                (
                    spread_curve(self.sigmas, table["error"].values / rate, "student", group=0),
                    spread_curve(self.sigmas, table["attainable"].values / rate, "refined from the truth", group=1),
                    spread_curve(self.sigmas, np.ones((1, len(rate))), "the rate", "reference"),
                ),
                log_x=True,
                note="Bands: full range of the replicates.",
                shows=("the squared error is p",),
            ),
        )

"""`meanfield/mlp-width`: loss trajectories of MLPs of finite width around the limit, one and both layers trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cells
from manyheads.theory.meanfield.incontext.circle import circle_flow
from manyheads.theory.meanfield.incontext.particles import circle_particles, particle_flow
from manyheads.theory.meanfield.incontext.task import circle_task
from manyheads.theory.papers import KIM

RECORDS = 80
LARGEST_DIFFERENCE = 5e-5  # of two references: a tenth of the smallest RMS error, 0.5 N^(-1/2) at N = 2^20
LEARNED = 0.3  # amplitude of the target that is learned first, with a frozen first layer
STARTS = {  # G_0, activation, nodes
    "outer": (0.6 * np.eye(2), "relu", 128),
    "both": (0.3 * np.eye(2), "softplus", 64),
}


@dataclass(frozen=True)
class MLPWidth(Study):
    """Loss trajectories at width N beside the limit: ReLU with a frozen first layer, softplus with both layers.

    Attributes
    ----------
    missed
        Initial amplitude of the second target where the second layer is trained. Independent neurons add about
        0.8 N^(-1/2) to it: the error is linear in that only where the amplitude is much larger, else the escape from
        the saddle is shifted by a logarithm.
    outer_widths, both_widths
        Widths N where the second layer is trained, and where both are, rising.
    networks
        Independent MLPs of a replicate where the second layer is trained, whose mean square error is taken: single ones
        scatter fivefold. One where both layers are.
    reference
        Width of the quadrature grid of the second reference; that of the first is four times as large where both
        layers are trained.
    outer_duration, both_duration
        Last times.
    """

    name: ClassVar[str] = "meanfield/mlp-width"
    claim: ClassVar[str] = "Losses at width N deviate by N^(-1/2) if amplitudes start well above N^(-1/2)"
    source: ClassVar[Source] = replace(KIM, locus="mean-field limit; rates of finite width are measured here")

    missed: float = 0.2
    outer_widths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    both_widths: tuple[int, ...] = (64, 256, 1024, 4096)
    networks: int = 6
    reference: int = 512
    outer_duration: float = 80.0
    both_duration: float = 4.0

    def __post_init__(self) -> None:
        for name in ("outer_widths", "both_widths"):
            check_rising(name, getattr(self, name), least=2)
        if self.networks < 1 or not 0 < self.missed <= LEARNED:
            raise UsageError(
                f"networks={self.networks}, missed={self.missed}: expected at least 1, and a number up to {LEARNED:g}"
            )

    @classmethod
    def full(cls) -> MLPWidth:
        """Return the study up to a million neurons with a frozen first layer."""
        return cls(outer_widths=(256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576))

    @classmethod
    def small(cls) -> MLPWidth:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            outer_widths=(32, 128),
            both_widths=(8, 32),
            networks=2,
            reference=256,
            outer_duration=8.0,
            both_duration=0.1,
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return every width, with one layer trained and with both."""
        widths = {"outer": self.outer_widths, "both": self.both_widths}
        return tuple(Cell(layers=layers, width=width) for layers in STARTS for width in widths[layers])

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the limits, each from two references that agree.

        Raises
        ------
        CertificateError
            Closed equations and quadrature, or two quadratures, that differ by more than 5e-5 in the loss.
        """
        closed = circle_flow(self._signal("outer"), STARTS["outer"][0], self._times("outer")).loss
        pairs = {
            "outer": (closed, self._flow("outer", 2048, None)),
            "both": (self._flow("both", 4 * self.reference, None), self._flow("both", self.reference, None)),
        }
        differences = {layers: float(np.abs(first - second).max()) for layers, (first, second) in pairs.items()}
        if (worst := max(differences.values())) > LARGEST_DIFFERENCE:
            raise CertificateError(
                f"two references differ ({differences}): take a wider grid of particles, or end earlier",
                measured=worst,
                threshold=LARGEST_DIFFERENCE,
            )
        return dataset(
            {
                "loss": (("layers", "share"), np.stack([pairs[layers][0] for layers in STARTS]), "loss of the limit"),
                "difference": ("layers", list(differences.values()), "largest difference of two references"),
            },
            {"layers": list(STARTS), "share": (self._shares(), "time over the last time")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw first-layer weights and integrate the two-timescale flow."""
        layers, width = str(cell["layers"]), int(cell["width"])
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).tolist(), width])
        losses = np.full((self.networks, RECORDS), np.nan)
        for place in range(self.networks if layers == "outer" else 1):
            losses[place] = self._flow(layers, width, rng)
        label = "loss of an MLP; NaN for networks that are not trained"
        return dataset(
            {"loss": (("network", "share"), losses, label)}, {"share": (self._shares(), "time over the last time")}
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the exponent with one layer trained, and the decrease with both."""

        def exponent(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return fit_exponent(self.outer_widths, errors(predicted, trained, "outer"))

        def typical(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return np.sqrt((errors(predicted, trained, "both") ** 2).mean(0))

        def decrease(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = typical(predicted, trained)
            return float(found[-1] / found[0])

        def steps(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = typical(predicted, trained)
            return float((found[1:] / found[:-1]).max())

        return (
            Claim(
                "With the first layer frozen and amplitudes well above N^(-1/2) the RMS error decreases as N^(-1/2)",
                exponent,
                quantity="exponent of N",
                target=-0.5,
                tolerance=0.15,
                basis="0.8 N^(-1/2) over the amplitude, a quarter at N = 256, changes the exponent by 0.05; scatter of "
                "48 networks: 0.07",
            ),
            Claim(
                "With both layers trained the RMS error falls to less than 0.3 from the smallest to the largest width",
                decrease,
                quantity="error at the largest over that at the smallest N",
                target=0.3,
                tolerance=(np.inf, 0.0),
                basis="stated without a power law: networks leave the symmetric start at different times",
            ),
            Claim(
                "With both layers trained the RMS error falls at every step of the width (largest ratio)",
                steps,
                quantity="largest ratio of errors at neighbouring N",
                target=1.0,
                tolerance=(np.inf, 0.0),
                basis="a decrease at every step",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show loss trajectories around the limit, and errors against the width."""
        panels: list[Panel] = []
        for layers, widths in (("outer", self.outer_widths), ("both", self.both_widths)):
            found = (
                select_cells(trained, layers=layers)["loss"]
                .isel(network=0)
                .transpose("cell", "replicate", "share")
                .values
            )
            limit = predicted["loss"].sel(layers=layers).values
            difference = float(predicted["difference"].sel(layers=layers))
            times = self._times(layers)
            shown = sorted({0, len(widths) // 2, len(widths) - 1})
            panels.append(
                Lines(
                    f"Loss, {'second layer' if layers == 'outer' else 'both layers'} trained",
                    "mean-field time",
                    "loss",
                    (
                        *(spread_curve(times, found[at], f"N = {widths[at]:,}", group=at) for at in shown),
                        Curve(tuple(times.tolist()), tuple(limit.tolist()), "limit", "predicted", 9),
                    ),
                    note=f"Bands: replicates. Two references differ by {difference:.1e} at most.",
                )
            )
        curves = [
            spread_curve(widths, errors(predicted, trained, layers), label, group=place)
            for place, (layers, widths, label) in enumerate(
                (("outer", self.outer_widths, "second layer"), ("both", self.both_widths, "both layers"))
            )
        ]
        x = np.asarray(self.outer_widths, float)
        line = errors(predicted, trained, "outer")[:, 0].mean() * np.sqrt(x[0] / x)
        rate = Curve(tuple(x.tolist()), tuple(line.tolist()), "N^(-1/2) through the first point", "reference")
        fit = fit_exponent(self.outer_widths, errors(predicted, trained, "outer"))
        title = f"RMS error of the loss trajectory: N^({fit.exponent:.2f}) with the second layer trained"
        quantities = "width N", "RMS error of the loss"
        return (*panels, Lines(title, *quantities, (*curves, rate), log_x=True, log_y=True, note="Bands: replicates."))

    def _shares(self) -> np.ndarray:
        return np.arange(1, RECORDS + 1) / RECORDS

    def _times(self, layers: str) -> np.ndarray:
        return self._shares() * (self.outer_duration if layers == "outer" else self.both_duration)

    def _signal(self, layers: str) -> np.ndarray:
        return np.diag([LEARNED, self.missed] if layers == "outer" else [0.1, 0.06])

    def _flow(self, layers: str, width: int, rng: np.random.Generator | None) -> np.ndarray:
        foreign, activation, nodes = STARTS[layers]
        start = circle_particles(self._signal(layers), foreign, width, rng, activation)
        chosen: Any = layers
        return particle_flow(
            circle_task(nodes=nodes), start, self._times(layers), activation=activation, layers=chosen, tolerance=1e-5
        ).loss


def errors(predicted: xr.Dataset, trained: xr.Dataset, layers: str) -> np.ndarray:
    """Return the RMS error of the loss trajectories of a replicate, shape (replicates, widths)."""
    found = select_cells(trained, layers=layers)["loss"].transpose("replicate", "cell", "network", "share").values
    return np.sqrt(np.nanmean((found - predicted["loss"].sel(layers=layers).values) ** 2, axis=(2, 3)))

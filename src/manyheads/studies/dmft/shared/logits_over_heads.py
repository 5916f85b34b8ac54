"""Logits over heads of networks and of the sampled limit: exponents of N in their variance, distances, and panels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import xarray as xr

from manyheads.statistics import fit_exponent
from manyheads.statistics.distances import SquaredDistance, half_width_of_draws, squared_distance
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.dmft.shared.claims import CAPTION
from manyheads.studies.dmft.shared.logit_distributions import (
    LEVELS,
    density_curve,
    hold_against_gaussian,
)
from manyheads.studies.dmft.shared.mean_field import along
from manyheads.studies.scaling.shared.curves import geometric_curve, power_curve
from manyheads.study import Curve, Lines, Listing
from manyheads.study.claims import SampledFigure
from manyheads.study.panels import Multiples, Panel

EXPONENTS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
WHENS = {"start": "before", "end": "after"}


@dataclass(frozen=True)
class LogitsOverHeads:
    """The results of a run over key dimensions N and both logit exponents.

    Attributes
    ----------
    predicted
        Of the limit, (prediction, logit_exponent, key_dim, ...): `variance_start`, `variance_end`, `variance_without`
        (response functions), and `below`, the shares of logits below `LEVELS`; empty where no limit is solved.
    trained
        Of networks, (replicate, cell, network, ...): the same, and the moments `mean` and `square` of the logits.
    """

    predicted: xr.Dataset
    trained: xr.Dataset
    key_dims: tuple[int, ...]  # sizes of the networks

    def networks(self, name: str, exponent: float) -> np.ndarray:
        """Return a variable of the networks, (replicates, sizes, network, ...)."""
        return along(self.trained, name, "key_dim", logit_exponent=exponent)

    def limit(self, name: str, exponent: float, key_dims: tuple[int, ...] | None = None) -> np.ndarray:
        """Return a variable of the limit at some or all N, (draws, sizes, ...)."""
        found = self.predicted[name].sel(logit_exponent=exponent).transpose("prediction", "key_dim", ...)
        return (found if key_dims is None else found.sel(key_dim=list(key_dims))).values

    def fit(self, exponent: float, when: str) -> ExponentFit:
        """Return the exponent of N in the variance of the networks' logits."""
        return fit_exponent(self.key_dims, self.networks(f"variance_{when}", exponent).mean(-1))

    def limit_exponents(self, exponent: float, when: str, key_dims: tuple[int, ...] | None = None) -> np.ndarray:
        """Return the exponent of N in the limit's variance, one a draw, by default over the networks' sizes."""
        sizes = key_dims or self.key_dims
        return np.asarray(fit_exponent(sizes, self.limit(f"variance_{when}", exponent, sizes)).replicate_exponents)

    def change(self, exponent: float) -> np.ndarray:
        """Return by what training changes the exponent in the limit, one a draw."""
        return np.subtract(*(self.limit_exponents(exponent, when) for when in ("end", "start")))

    def measured_change(self, exponent: float) -> SampledFigure:
        """Return by what training changes the exponent in networks, with the error of the limit's draws."""
        before, after = (self.fit(exponent, when).replicate_exponents for when in WHENS)
        theory = self.change(exponent)
        error = float(theory.std(ddof=1)) / math.sqrt(len(theory))
        return SampledFigure(np.subtract(after, before), error, len(theory) - 1)

    def below(self, exponent: float, size: int) -> np.ndarray:
        """Return shares below every level of all networks of one size, (network, level)."""
        return self.networks("below", exponent)[:, self.key_dims.index(size)].reshape(-1, len(LEVELS))

    def gaussian(self, exponent: float, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return shares of networks of one size and of the Gaussian of their mean and variance, to be compared."""
        place = self.key_dims.index(size)
        mean, square = (self.networks(name, exponent)[:, place].ravel() for name in ("mean", "square"))
        return hold_against_gaussian(self.below(exponent, size), mean, square)

    def limit_distance(self, exponent: float, size: int) -> SquaredDistance:
        """Return the distance of the networks' distribution of logits from the limit's."""
        return squared_distance(self.below(exponent, size), self.limit("below", exponent, (size,))[:, 0])

    def gaussian_distance(self, exponent: float, size: int) -> SquaredDistance:
        """Return the distance of the networks' distribution of logits from a Gaussian of their variance."""
        shares, gaussian = self.gaussian(exponent, size)
        return squared_distance(shares, gaussian[None])

    def growth(self, exponent: float) -> SampledFigure:
        """Return the growth of the variance at the largest N between that without responses (0) and the limit's (1).

        In logarithms; the error of the draws by the jackknife.
        """
        size = self.key_dims[-1]  # where training adds most; corrections are of size 1/H at any N
        before, after = (self.networks(f"variance_{when}", exponent)[:, -1] for when in WHENS)
        grown = np.log(after / before).mean(-1)  # (replicates,)
        start, limit, without = (
            np.log(self.limit(f"variance_{when}", exponent, (size,))[:, 0]) for when in (*WHENS, "without")
        )

        def between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            return (grown - low.mean()) / (high.mean() - low.mean())

        growths, count = (without - start, limit - start), len(start)
        rest = [float(between(*(np.delete(growth, draw) for growth in growths)).mean()) for draw in range(count)]
        return SampledFigure(between(*growths), math.sqrt(count - 1) * float(np.std(rest)), count - 1)


def variances_panel(data: LogitsOverHeads, note: str) -> Panel:
    """Draw the variance over heads against N, before and after training, of networks and of the limit."""
    curves: list[Curve] = []
    for place, exponent in enumerate(EXPONENTS):
        for late, (when, words) in enumerate(WHENS.items()):
            group, name = 2 * place + late, f"variance_{when}"
            own = data.networks(name, exponent).mean(-1)
            curves.append(geometric_curve(data.key_dims, own, f"exponent {exponent:g}, {words} training", group))
            if name in data.predicted:
                sizes = tuple(data.predicted["key_dim"].values.tolist())
                curves.append(geometric_curve(sizes, data.limit(name, exponent), "", group, "predicted"))
    first = float(np.exp(np.log(data.networks("variance_end", 1.0).mean(-1)[:, 0]).mean()))
    curves += [power_curve(data.key_dims, first, power, f"N^{power:g}", 4) for power in (-1.0, CAPTION)]
    return Lines(
        "Variance of attention logits over heads",
        "key dimension N",
        "variance over heads",
        tuple(curves),
        log_x=True,
        log_y=True,
        note=f"{note} Geometric means; bands range over replicates. Grey: powers of N from the networks' first point "
        "after "
        "training at exponent 1.",
        shows=("variance of attention logits over heads scales",),
    )


def densities_panel(data: LogitsOverHeads) -> Panel:
    """Draw the distribution of the logits of single heads after training beside the limit's and a Gaussian."""

    def plot(exponent: float, size: int) -> tuple[Curve, ...]:
        networks = data.networks("below", exponent)[:, data.key_dims.index(size)].mean(1)  # (replicates, level)
        return (
            density_curve(networks, "networks", "trained", 0),
            density_curve(data.limit("below", exponent, (size,))[:, 0], "limit", "predicted", 1),
            density_curve(data.gaussian(exponent, size)[1][None], "Gaussian of their variance", "reference", 2),
        )

    return Multiples(
        "Logits of single heads after training",
        "logit over its std before training",
        "density",
        tuple(tuple(plot(exponent, size) for size in data.key_dims) for exponent in EXPONENTS),
        tuple(f"exponent {exponent:g}" for exponent in EXPONENTS),
        tuple(f"N={size}" for size in data.key_dims),
        log_y=True,
        note="Heads, samples and pairs of tokens together; bands range over replicates and over draws of the limit.",
    )


def exponents_panel(data: LogitsOverHeads) -> Panel:
    """Tabulate exponents of N in the variance, of networks and of the limit over the same and over all sizes."""
    ranges = (data.key_dims, tuple(data.predicted["key_dim"].values.tolist()))
    rows = []
    for exponent in EXPONENTS:
        for when, words in WHENS.items():
            fit = data.fit(exponent, when)
            limits = (data.limit_exponents(exponent, when, sizes) for sizes in ranges)
            own = f"{fit.exponent:.3f} [{fit.interval.low:.3f}, {fit.interval.high:.3f}]"
            shown = (f"{found.mean():.3f} ± {half_width_of_draws(found):.3f}" for found in limits)
            rows.append((f"{exponent:g}", words, own, *shown))
    return Listing(
        "Exponent of N in the variance of logits over heads",
        ("logit exponent", "training", "networks", *(f"limit, N={sizes[0]} to {sizes[-1]}" for sizes in ranges)),
        tuple(rows),
        note="99% intervals, over replicates and over draws of the limit.",
    )


def distances_panel(data: LogitsOverHeads) -> Panel:
    """Tabulate the distances of the distribution of logits from the limit's and from a Gaussian."""
    rows = []
    for exponent in EXPONENTS:
        for size in data.key_dims:
            found = (data.limit_distance(exponent, size), data.gaussian_distance(exponent, size))
            shown = [f"{each.distance:.4f} [{each.interval().low:.4f}, {each.interval().high:.4f}]" for each in found]
            rows.append((f"{exponent:g}", str(size), *shown))
    return Listing(
        "Distances between distributions of single heads' logits",
        ("logit exponent", "N", "from the limit", "from a Gaussian of their variance"),
        tuple(rows),
        note="Root mean square difference of probabilities, without the noise of networks and of draws; a negative "
        "one is "
        "a square below zero.",
    )

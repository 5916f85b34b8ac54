"""`limits/forecast`: forecast loss curves of many heads beside networks that are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics.intervals import Interval, proportion_interval
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Source, Study, grid
from manyheads.study.panels import Listing, Multiples, Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.finite.forecast import LossForecast, forecast_loss
from manyheads.theory.dmft.finite.problems import digits_problem, text_problem
from manyheads.theory.dmft.problem import Problem

COVERED = 0.95
WITHIN = 0.01
CURVES = {
    "trained": "geometric mean loss of the trained networks",
    "forecast": "forecast loss",
    "low": "lower end of the band",
    "high": "upper end of the band",
    "limit": "loss of infinitely many heads",
}
FIGURES = {
    "covered": "share of networks whose curve is in the band of a single network",
    "covered_by_errors": "share of networks whose curve is in the band of the mean",
    "error": "relative error of the forecast",
    "error_of_small": "relative error of the larger small ensemble",
    "bias": "log distance of the mean network from the limit, along the forecast bias",
    "bias_norm": "square of the forecast bias, mean over steps",
}


@dataclass(frozen=True)
class Forecast(Study):
    """Loss curves of H heads from the limit and two small ensembles, beside networks that are trained.

    Every replicate is a case of its own: other windows of the text (or other images), other heads of the limit, other
    small networks, another network of `heads` heads.

    Attributes
    ----------
    task
        ``"text"`` (causal, every token reads out, cross-entropy) or ``"digits"`` (pooled, squared loss).
    richness
        Richness of the cases.
    heads
        H of the network that is forecast; one is trained in every case.
    checked_heads, checked_networks
        A smaller H, at which so many networks are trained to see their mean and the share that the band covers.
    sizes, networks
        Heads of the small ensembles, and networks of each.
    key_dim, depth, steps, learning_rate
        Of all networks, and their training by gradient descent.

    Notes
    -----
    A single network is off the forecast by its fluctuation, of relative size (v/H)^(1/2), which is a property of the
    task: at H = 512 it can be forecast within one per cent where v is 0.05 or less, about. That is so where the loss
    halves in a mild training of the text. Where it falls by decades networks scatter further, and where log losses of
    the larger small ensemble scatter by more than a half the forecast is refused. The error is the mean distance of the
    curves over the mean loss.
    """

    name: ClassVar[str] = "limits/forecast"
    claim: ClassVar[str] = "The limit and two small ensembles forecast the loss curve of 512 heads within 1%"
    source: ClassVar[Source] = bordelon("the limit of infinitely many heads; the forecast is derived here")

    task: str = "text"
    richness: tuple[float, ...] = (0.5, 0.75)
    heads: int = 512
    checked_heads: int = 32
    checked_networks: int = 96
    sizes: tuple[int, int] = (8, 16)
    networks: int = 48
    key_dim: int = 4
    depth: int = 2
    steps: int = 8
    learning_rate: float = 0.3

    def __post_init__(self) -> None:
        check_rising("heads", (*self.sizes, self.checked_heads, self.heads))
        if self.task not in PROBLEMS or not self.richness:
            raise UsageError(f"task={self.task!r}, richness={self.richness}: {' or '.join(PROBLEMS)}, at least one")
        if self.networks < 8 or self.checked_networks < 2:
            raise UsageError(f"networks={self.networks}, checked_networks={self.checked_networks}: from 8 and from 2")
        self.problem(self.richness[0], 0)

    @classmethod
    def full(cls) -> Forecast:
        """Return the study with larger ensembles and more checked networks."""
        return cls(checked_networks=256, sizes=(8, 16), networks=256)

    @classmethod
    def small(cls) -> Forecast:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            richness=(0.5, 0.75),
            heads=8,
            checked_heads=6,
            checked_networks=8,
            sizes=(2, 4),
            networks=8,
            key_dim=2,
            steps=3,
        )

    def problem(self, richness: float, seed: int) -> Problem:
        """Return a case."""
        training = {"steps": self.steps, "learning_rate": self.learning_rate, "depth": self.depth}
        return PROBLEMS[self.task](seed=seed, richness=richness, **training)

    def cells(self) -> tuple[Cell, ...]:
        """Return the forecast and the checked number of heads at every richness."""
        return grid(richness=self.richness, heads=(self.checked_heads, self.heads))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what is required of the forecast."""
        return dataset(
            {
                "covered": ((), COVERED, "least share of curves that the band covers"),
                "error": ((), WITHIN, "largest mean relative error"),
                "slope": ((), 1.0, "share of the forecast bias in the mean network"),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Forecast one case, train its networks, and compare."""
        heads = int(cell["heads"])
        for_case, for_networks = jax.random.split(key)
        seeds = np.random.default_rng(np.asarray(jax.random.key_data(for_case))).integers(0, 2**31, 2)
        problem, network = self.problem(float(cell["richness"]), int(seeds[0])), Network(self.key_dim, heads)
        single = forecast_loss(problem, network, sizes=self.sizes, networks=self.networks, seed=int(seeds[1]))
        count = 1 if heads == self.heads else self.checked_networks
        losses = mean_field.train_seeds(problem, network, for_networks, count)["loss"].values
        found = compare_losses(single, losses)
        return dataset(
            {name: ("step", found[name], text, "nat") for name, text in CURVES.items()}
            | {name: ((), found[name], text) for name, text in FIGURES.items()},
            {"step": (np.arange(self.steps), "updates", "1")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test coverage and error of single networks, the bias of the mean, and what fails without the parts."""
        return (
            self._cases(),
            self._coverage("covered", "the band of a single network covers 95% of networks or more"),
            self._coverage("covered_by_errors", "the band without their fluctuation covers 95% of networks or more"),
            *(self._error(richness) for richness in self.richness),
            *(self._small(richness) for richness in self.richness),
            self._slope(1.0),
            self._slope(0.0),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show some cases with their bands, and tabulate errors and coverage."""
        return self._curves(trained), self._table(trained)

    def values(self, trained: xr.Dataset, name: str, heads: int) -> np.ndarray:
        """Return a figure of one number of heads, (replicates, richness)."""
        each = [mean_field.along(trained, name, "heads", richness=richness) for richness in self.richness]
        place = (self.checked_heads, self.heads).index(heads)
        return np.stack([found[:, place] for found in each], axis=1)

    def _cases(self) -> Claim:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            covered = self.values(trained, "covered", self.heads)
            return float(covered.mean()), proportion_interval(round(float(covered.sum())), covered.size)

        return Claim(
            f"At H={self.heads} the 99% band covers the whole loss curve of the network in nearly every case",
            measure,
            quantity="share of cases",
            target=1.0,
            tolerance=(0.4, 0.0),
            basis="the exact interval of all of 16 cases begins at 0.72, that of 14 at 0.53: two misses are undecided",
        )

    def _coverage(self, name: str, text: str) -> Claim:
        return Claim(
            f"At H={self.checked_heads} {text}",
            lambda predicted, trained: self.values(trained, name, self.checked_heads).mean(-1),
            quantity="share of networks",
            target=lambda predicted: float(predicted["covered"]),
            tolerance=(0.0, 1 - COVERED),
            bounds=(0.0, 1.0),
            resolution=1 / (self.checked_networks * len(self.richness)),
            basis="what a band of level 0.99 may lose to the small ensembles' own errors, which are not Gaussian",
            expected="holds" if name == "covered" else "refuted",
        )

    def _error(self, richness: float) -> Claim:
        return Claim(
            f"At H={self.heads} and richness {richness:g} the forecast of a loss curve is within 1% in the mean",
            lambda predicted, trained: self._at(trained, "error", richness),
            quantity="relative error",
            target=0.0,
            tolerance=lambda predicted: (math.inf, float(predicted["error"])),
            basis="required; the fluctuation of a single network is the larger part of it",
        )

    def _small(self, richness: float) -> Claim:
        return Claim(
            f"At H={self.heads} and richness {richness:g} the mean of H={self.sizes[-1]} is within 1% in the mean",
            lambda predicted, trained: self._at(trained, "error_of_small", richness),
            quantity="relative error",
            target=0.0,
            tolerance=lambda predicted: (math.inf, float(predicted["error"])),
            basis=f"as for the forecast; its bias is c/{self.sizes[-1]}",
            expected="refuted",
        )

    def _slope(self, target: float) -> Claim:
        def slope(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            along, norm = (self.values(trained, name, self.checked_heads).mean(-1) for name in ("bias", "bias_norm"))
            return along / norm.mean() / float(predicted["slope"])

        text = "is off the limit by the forecast bias c/H" if target else "is that of the limit without a bias"
        return Claim(
            f"At H={self.checked_heads} the mean loss curve {text} (ratio)",
            slope,
            quantity="log distance from the limit along the forecast bias",
            target=target,
            tolerance=0.5,
            basis="half of the bias: the limit with it and the limit without are equally far from there",
            expected="holds" if target else "refuted",
        )

    def _at(self, trained: xr.Dataset, name: str, richness: float) -> np.ndarray:
        return self.values(trained, name, self.heads)[:, self.richness.index(richness)]

    def _curves(self, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        shown = range(min(4, trained.sizes["replicate"]))

        def plot(richness: float, case: int) -> tuple:
            found = {
                name: mean_field.along(trained, name, "heads", richness=richness)[case, -1]
                for name in ("trained", "forecast", "low", "high", "limit")
            }
            ends = np.stack([found["low"], found["forecast"], found["high"]])
            return (
                spread_curve(steps, found["trained"][None], f"trained, H={self.heads}", "trained", 0),
                spread_curve(steps, np.sort(ends, axis=0), "forecast with band", "predicted", 1),
            )

        return Multiples(
            "Loss curves and their forecasts",
            "updates",
            "loss",
            tuple(tuple(plot(richness, case) for case in shown) for richness in self.richness),
            tuple(f"richness {richness:g}" for richness in self.richness),
            tuple(f"case {case + 1}" for case in shown),
            note="The first cases; bands are those of a single network at the level 99% for the whole curve.",
        )

    def _table(self, trained: xr.Dataset) -> Panel:
        rows = []
        for place, richness in enumerate(self.richness):
            for heads in (self.checked_heads, self.heads):
                shown = (
                    self.values(trained, name, heads)[:, place].mean()
                    for name in ("covered", "covered_by_errors", "error", "error_of_small")
                )
                rows.append((f"{richness:g}", str(heads), *(f"{value:.4f}" for value in shown)))
        return Listing(
            "Errors and coverage of forecasts",
            ("richness", "H", "covered", "covered without fluctuation", "error", f"error of H={self.sizes[-1]}"),
            tuple(rows),
            note="Means over cases and networks. Errors are mean distances of the curves over the mean loss.",
        )


PROBLEMS = {
    "text": lambda **training: text_problem(samples=3, length=3, **training),
    "digits": lambda **training: digits_problem(tests=0, **training),
}


def compare_losses(single: LossForecast, losses: np.ndarray) -> dict[str, np.ndarray | float]:
    """Compare the forecast of a network with trained losses (networks, step): `CURVES` and `FIGURES`."""
    share = single.error / np.maximum(np.hypot(single.error, single.fluctuation), np.finfo(float).tiny)
    low, high = (single.loss * (end / single.loss) ** share for end in (single.low, single.high))
    mean = replace(single, target="mean", low=low, high=high)
    apart = np.log(losses).mean(0) - np.log(single.limit)
    return {
        "trained": np.exp(np.log(losses).mean(0)),
        "forecast": single.loss,
        "low": single.low,
        "high": single.high,
        "limit": single.limit,
        "covered": float(single.covers(losses).mean()),
        "covered_by_errors": float(mean.covers(losses).mean()),
        "error": relative_error(single.loss, losses),
        "error_of_small": relative_error(single.ensembles[-1], losses),
        "bias": float((apart * single.bias).mean()),
        "bias_norm": float((single.bias**2).mean()),
    }


def relative_error(curve: np.ndarray, losses: np.ndarray) -> float:
    """Return the mean distance of a curve from losses (networks, step) over the mean loss."""
    return float((np.abs(losses - curve).mean(-1) / losses.mean(-1)).mean())

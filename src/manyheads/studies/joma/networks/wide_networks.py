"""`joma/wide-networks`: lucky neurons of wide layers, whose random start is near what they learn.

Layers of many neurons with random weights are trained by SGD, with the constant gains of theorem 2, and with a loss
that the neurons share. Attention begins where the weights are large, or uniform; small weights are the control.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Curve, Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining, train_alone, train_together
from manyheads.theory.joma.theorems.lucky_neurons import (
    mean_first_time,
    shared_output,
    some_neuron,
    winning_probability,
)
from manyheads.theory.papers import TIAN

SETTINGS = {  # attention at the start, and whether the gain is constant
    "aligned": "attention aligned with the weights",
    "uniform": "uniform attention",
    "small": "uniform attention, small weights",
    "shared": "one loss for all neurons",
}
SMALL = 0.05  # standard deviation of small weights; 1 otherwise
HORIZON = 4.0  # of time, over the inverse of the larger gain
SAMPLED = 2048  # networks of the prediction of a shared loss


@dataclass(frozen=True)
class WideNetworks(Study):
    """Neurons that are won by a token, and when, against the width of the layer.

    Attributes
    ----------
    widths
        Neurons of a layer.
    networks
        Layers of the largest width in each replicate; of smaller widths there are more, with as many neurons in all.
    gain
        Gain of the weaker of two tokens; that of the other is 1.
    level
        A neuron is won where a weight reaches this value.
    target
        Change of the output that a shared loss asks for.
    learning_rate, batch
        Of SGD.
    """

    name: ClassVar[str] = "joma/wide-networks"
    claim: ClassVar[str] = "The first of n neurons is won after a time ~ 1/(n + 1), if attention is aligned"
    source: ClassVar[Source] = replace(TIAN, locus="theorem 2; lucky neurons as reviews ask, derived here from it")
    revision: ClassVar[int] = 1

    widths: tuple[int, ...] = (4, 16, 64)
    networks: int = 128
    gain: float = 0.2
    level: float = 4.0
    target: float = 8.0
    learning_rate: float = 5e-4
    batch: int = 16

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise UsageError(f"widths={self.widths}: expected two or more positive numbers, in rising order")
        if min(self.networks, self.batch) < 1 or not 0 < self.gain < 1 or not 2 < self.level <= 6:
            raise UsageError(
                f"networks={self.networks}, batch={self.batch}, gain={self.gain}, level={self.level}: expected "
                "positive numbers, a gain in (0, 1) and a level in (2, 6]"
            )
        if not self.target > 0 or not 0 < self.learning_rate <= 0.05:
            raise UsageError(
                f"target={self.target}, learning_rate={self.learning_rate}: expected a positive number and a learning "
                "rate in (0, 0.05]"
            )

    @classmethod
    def full(cls) -> WideNetworks:
        """Return the study with wider layers, at a fifth of the learning rate."""
        return cls(widths=(4, 16, 64, 256), learning_rate=1e-4)

    @classmethod
    def small(cls) -> WideNetworks:
        """Return the smallest configuration in which every claim can change."""
        return cls(widths=(2, 8), networks=16, learning_rate=0.01)

    def cells(self) -> tuple[Cell, ...]:
        """Return every setting at every width."""
        return grid(setting=tuple(SETTINGS), width=self.widths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return mean times and shares by quadrature, and the luckiest neuron's share of a shared output by sampling.

        The last is the mean over `SAMPLED` random layers, each solved without training.
        """
        rng = np.random.default_rng(0)  # one set of layers: the prediction is one number
        times, shares = {}, {}
        for setting in ("aligned", "uniform", "small"):
            attention, std = _start(setting)
            times[setting] = [mean_first_time(width, 1.0, self.level, std, attention) for width in self.widths]
            shares[setting] = winning_probability((1.0, self.gain), self.level, HORIZON, std, attention)
        luckiest = []
        for width in self.widths:
            changes = shared_output(rng.normal(size=(SAMPLED, width)), self.target, level=6.0)
            luckiest.append((changes.max(1) / changes.sum(1)).mean())
        settings = list(times)
        return dataset(
            {
                "first_time": (("setting", "width"), list(times.values()), "mean time until the first neuron is won"),
                "weaker": ("setting", list(shares.values()), "share of neurons that the weaker token wins"),
                "some": (
                    ("setting", "width"),
                    [some_neuron(shares[name], np.array(self.widths)) for name in settings],
                    "share of layers in which the weaker token wins a neuron",
                ),
                "luckiest": ("width", luckiest, "share of the luckiest neuron in a shared output"),
            },
            coords={"setting": settings, "width": (np.asarray(self.widths), "neurons")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train the layers of one setting and width; NaN for what the setting does not measure."""
        for_init, for_batches = jax.random.split(key)
        setting, width = str(cell["setting"]), int(cell["width"])
        steps = round(HORIZON / self.learning_rate)
        training = WideTraining(self.learning_rate, steps, self.batch, self.level)
        layers = self.networks * self.widths[-1] // width
        weights = _start(setting)[1] * jax.random.normal(for_init, (layers, width, 2), jnp.float64)
        first, weaker, some, luckiest = np.nan, np.nan, np.nan, np.nan
        if setting == "shared":
            changes = np.asarray(train_together(weights[..., 0], jnp.float64(self.target), training, for_batches))
            luckiest = (changes.max(1) / changes.sum(1)).mean()
        else:
            logits = weights**2 / 2 if setting == "aligned" else jnp.zeros_like(weights)
            times = np.asarray(train_alone(weights, logits, jnp.array([1.0, self.gain]), training, for_batches))
            # A layer without a winner counts with the horizon.
            first = np.minimum(times[..., 0].min(1), HORIZON).mean()
            won = times[..., 1] < times[..., 0]
            weaker, some = won.mean(), won.any(1).mean()
        return dataset(
            {
                "first_time": ((), first, "mean time until the first neuron is won"),
                "weaker": ((), weaker, "share of neurons that the weaker token wins"),
                "some": ((), some, "share of layers in which the weaker token wins a neuron"),
                "luckiest": ((), luckiest, "share of the luckiest neuron in a shared output"),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test both laws of the first time, what a weaker token wins, the control, and a shared loss."""
        widest, narrow = self.widths[-1], self.widths[0]

        def at(name: str, setting: str, width: int) -> Measure:
            return lambda predicted, trained: select_cell(trained, setting=setting, width=width)[name].values

        def weaker(setting: str) -> Measure:
            return lambda predicted, trained: select_cells(trained, setting=setting)["weaker"].mean("cell").values

        def exponent(setting: str) -> Measure:
            def fitted(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                times = select_cells(trained, setting=setting)["first_time"].transpose("replicate", "cell").values
                fit = fit_exponent(np.asarray(self.widths) + 1, times)
                return fit.exponent, fit.interval

            return fitted

        def ratio(name: str, setting: str) -> Measure:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                law = predicted[name] if "setting" not in predicted[name].dims else predicted[name].sel(setting=setting)
                found = select_cells(trained, setting=setting)[name].transpose("replicate", "cell").values
                return (found / law.values).mean(1)

            return measured

        def saving(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return at("first_time", "small", widest)(predicted, trained) / at("first_time", "small", narrow)(
                predicted, trained
            )

        infinite = float("inf")
        time: dict[str, Any] = {"quantity": "exponent of the time in n + 1", "target": -1.0, "tolerance": 0.1}
        share: dict[str, Any] = {"quantity": "share of neurons", "bounds": (0.0, 1.0)}
        steps = "a percent of the sampling, and the finite steps of SGD: the shortest times are some eighty steps"
        return (
            Claim(
                "With aligned attention the time until the first of n neurons is won scales as 1/(n + 1)",
                exponent("aligned"),
                basis="an equality up to the level, whose tail is below a hundredth, and the finite steps of SGD",
                **time,
            ),
            Claim(
                "With uniform attention at the start the time until the first of n neurons is won scales as 1/(n + 1)",
                exponent("uniform"),
                basis="as for aligned attention; Mills' ratio of the largest of n numbers falls as a logarithm",
                expected="refuted",
                **time,
            ),
            Claim(
                "With uniform attention at the start the time until the first neuron is won is Mills' ratio of the "
                "largest weight",
                ratio("first_time", "uniform"),
                quantity="measured over predicted time",
                target=1.0,
                tolerance=0.05,
                basis=f"order statistics by quadrature; {steps}",
            ),
            Claim(
                f"With aligned attention a token of gain {self.gain:g} against 1 wins half of {self.gain:g} of the "
                "neurons",
                weaker("aligned"),
                target=self.gain / 2,
                tolerance=0.01,
                basis="a closed form: the ratio of two uniform numbers",
                **share,
            ),
            Claim(
                "With uniform attention at the start it wins the share beyond the separatrix of random starts",
                weaker("uniform"),
                target=lambda predicted: float(predicted["weaker"].sel(setting="uniform")),
                tolerance=0.01,
                basis="quadrature over random starts",
                **share,
            ),
            Claim(
                f"In layers of {self.widths[1]} neurons it wins some neuron with 1 - (1 - p)^n",
                at("some", "aligned", self.widths[1]),
                quantity="share of layers",
                bounds=(0.0, 1.0),
                target=lambda predicted: float(predicted["some"].sel(setting="aligned", width=self.widths[1])),
                tolerance=0.04,
                resolution=self.widths[1] / (self.networks * self.widths[-1]),
                basis="independent neurons; five standard errors of the layers of eight replicates",
            ),
            Claim(
                "From small weights the weaker token wins no neuron",
                weaker("small"),
                target=0.0,
                tolerance=0.001,
                resolution=1e-9,
                basis="the control: without spread at the start there are no lucky neurons",
                **share,
            ),
            Claim(
                f"From small weights the first neuron of {widest} is won as late as that of {narrow}",
                saving,
                quantity="ratio of times",
                target=1.0,
                tolerance=0.15,
                resolution=1e-9,
                basis="the control: starts that are two or three standard deviations up save a tenth of the time",
            ),
            Claim(
                "Under a shared loss the luckiest neuron adds to the output what one accumulated gain for all predicts",
                ratio("luckiest", "shared"),
                quantity="measured over predicted share",
                target=1.0,
                tolerance=0.05,
                basis="an equality of the flow; two percent of the sampling of layers",
            ),
            Claim(
                f"Under a shared loss the luckiest of {widest} neurons adds half of the output",
                at("luckiest", "shared", widest),
                quantity="share of the output",
                target=0.5,
                tolerance=(0.0, infinite),
                resolution=1e-9,
                expected="refuted",
                basis="an inequality: half is what the luckiest of four adds",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show times, layers won by the weaker token, and the luckiest neuron's share, against the width."""
        shown = (
            ("Time until the first neuron is won", "first_time", "mean time", ("scales as 1/(n + 1)",), True),
            ("Layers in which the weaker token wins a neuron", "some", "share of layers", ("wins some neuron",), False),
            ("Share of the luckiest neuron in a shared output", "luckiest", "share", ("adds half",), True),
        )
        panels: list[Panel] = []
        for title, name, label, claims, log in shown:
            curves: list[Curve] = []
            settings = ("shared",) if name == "luckiest" else tuple(SETTINGS)[:3]
            for group, setting in enumerate(settings):
                found = select_cells(trained, setting=setting)[name].transpose("replicate", "cell").values
                law = predicted[name] if name == "luckiest" else predicted[name].sel(setting=setting)
                curves.append(spread_curve(self.widths, found, SETTINGS[setting], group=group))
                curves.append(spread_curve(self.widths, law.values, "", "predicted", group))
            panels.append(
                Lines(
                    title,
                    "neurons of the layer",
                    label,
                    tuple(curves),
                    log_x=True,
                    log_y=log,
                    note=f"Dashed: predicted. Bands range over replicates of {self.networks} layers or more.",
                    shows=claims[:1],
                )
            )
        return tuple(panels)


def _start(setting: str) -> tuple[str, float]:
    """Return the attention at the start, and the standard deviation of the weights."""
    return ("aligned" if setting == "aligned" else "uniform"), (SMALL if setting == "small" else 1.0)

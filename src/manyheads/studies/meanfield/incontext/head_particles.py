"""`meanfield/head-particles`: error of H averaged attention heads against the limit of many heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError, check_integers
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, unstack
from manyheads.theory.meanfield.incontext.gaussian_points import gaussian_points
from manyheads.theory.meanfield.incontext.head_particles import (
    PARAMETERS,
    HeadParticles,
    LabelledPrompts,
    cross_entropy,
    draw_labelled_prompts,
    initial_variance,
    train_head_particles,
)


@dataclass(frozen=True)
class HeadParticlesStudy(Study):
    """Fluctuation and bias of logits and loss of H heads around the limit, and a sum of heads as a control.

    Attributes
    ----------
    heads
        H, increasing.
    drawn
        Heads that a replicate draws at every H, in systems of H.
    reference
        Heads at points of low discrepancy that stand for the limit, a power of two: the same in every replicate.
    prompts, length
        Fixed prompts trained on, and labelled inputs in each.
    learning_rate, steps
        Gradient descent in the time of the limit.
    """

    name: ClassVar[str] = "meanfield/head-particles"
    claim: ClassVar[str] = "Logits of H averaged heads deviate from their mean-field limit by H^(-1/2)"
    source: ClassVar[Source] = Source(
        "huan2026crossentropy",
        "A Mean-Field Analysis of Multi-Head Self-Attention under Cross-Entropy Training",
        "Cheng Huan and Hongwei Yuan",
        2026,
        kind="misc",
        venue="arXiv",
        identifier="2606.10469",
        locus="abstract: heads as particles, finite heads against the limit; rate, constant and task are derived here",
    )

    heads: tuple[int, ...] = (16, 64, 256)
    drawn: int = 24_576
    reference: int = 16_384
    prompts: int = 12
    length: int = 4
    learning_rate: float = 1.0
    steps: int = 20

    def __post_init__(self) -> None:
        check_integers(self, "prompts", "length", "steps")
        sizes = list(self.heads)
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1 or self.drawn < 2 * sizes[-1]:
            raise UsageError(
                f"heads={self.heads}, drawn={self.drawn}: expected two or more increasing sizes, and two systems of "
                "the last"
            )

    @classmethod
    def small(cls) -> HeadParticlesStudy:
        """Return the smallest configuration in which every claim can change."""
        return cls(heads=(4, 16), drawn=64, reference=512, prompts=3, length=3, steps=3)

    def cells(self) -> tuple[Cell, ...]:
        """Return every size, averaged and summed."""
        return grid(output=("averaged", "summed"), heads=self.heads)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Compute Var f at initialization and the limit, from two sets of points that must agree."""
        prompts = self._prompts()
        variance = initial_variance(prompts)
        points = [gaussian_points(PARAMETERS, self.reference, np.random.default_rng(seed)) for seed in (0, 1)]
        pair = self._train(np.stack(points), prompts)
        error = float(np.sqrt(np.mean((pair[0] - pair[1]) ** 2)) / 2)  # of the mean of two
        threshold = float(np.sqrt(variance.mean() / self.heads[-1])) / 8
        if error > threshold:
            raise CertificateError(
                f"two references of {self.reference} heads differ too much to measure the error of {self.heads[-1]}; "
                "raise reference",
                measured=error,
                threshold=threshold,
            )
        logits = pair.mean(0)
        return dataset(
            {
                "variance": ("prompt", variance, "variance of f at initialization"),
                "error": ((), error, "rms error of the reference"),
                "logit": (("step", "prompt"), logits, "logit of the reference"),
                "loss": ("step", np.asarray(cross_entropy(jnp.asarray(logits), prompts.answer)), "loss", "nat"),
            },
            {"step": (np.arange(self.steps + 1), "updates")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train systems of one size; keep mean and variance over systems of the logits at both ends and of the loss."""
        prompts, heads = self._prompts(), int(cell["heads"])
        seeds = np.asarray(jax.random.key_data(key)).ravel().tolist()
        rng = np.random.default_rng([*seeds, heads, int(cell["output"] == "summed")])
        points = rng.standard_normal((self.drawn // heads, heads, PARAMETERS))
        logits = self._train(points, prompts, cell["output"] == "summed")
        loss = np.asarray(cross_entropy(jnp.asarray(logits[:, -1]), prompts.answer))
        return dataset(
            {
                "initial_square": ("prompt", (logits[:, 0] ** 2).mean(0), "mean square of the logit at initialization"),
                "mean": ("prompt", logits[:, -1].mean(0), "mean logit after training"),
                "spread": ("prompt", logits[:, -1].var(0, ddof=1), "variance of the logit after training"),
                "loss_mean": ((), loss.mean(), "mean loss after training", "nat"),
                "loss_spread": ((), loss.std(ddof=1), "standard deviation of the loss after training", "nat"),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the variance at initialization, fluctuation and bias after training, and the sum of heads."""
        sizes = np.asarray(self.heads)
        first, second = self.heads[:2]

        def slope(output: str) -> Measure:
            return lambda predicted, trained: fit_exponent(sizes, errors(predicted, trained, output))

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            squares = _averaged(trained, "initial_square").mean("prompt").values * sizes
            return squares.mean(1) / float(predicted["variance"].mean())

        def bias(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            found = biases(predicted, trained) * sizes
            return (found[:, 1] - found[:, 0]) / abs(found[:, 0].mean())

        return (
            Claim(
                "At initialization H times the mean squared logit equals the variance of one head's output (ratio)",
                level,
                quantity="squared logit, measured over predicted",
                target=1.0,
                tolerance=0.1,
                basis="Monte Carlo error of a mean of squares over systems and replicates; the law itself is exact",
            ),
            Claim(
                "After training the rms error of logits falls as H^(-1/2)",
                slope("averaged"),
                quantity="exponent of H",
                target=-0.5,
                tolerance=0.05,
                basis=f"the squared error has corrections of relative order 1/H: of relative size 4/H at H = {first} "
                "they move the exponent by 0.04; the reference moves it by less than 0.01",
            ),
            Claim(
                "After training the loss fluctuates over systems by H^(-1/2)",
                lambda predicted, trained: fit_exponent(sizes, _averaged(trained, "loss_spread").values),
                quantity="exponent of H",
                target=-0.5,
                tolerance=0.05,
                basis=f"corrections of relative order 1/H to the variance, as above at H = {first}",
            ),
            Claim(
                f"The bias of the loss falls as 1/H (relative change of H times the bias, H = {first} to {second})",
                bias,
                quantity="relative change of H times the bias",
                target=0.0,
                tolerance=0.5 * ((second / first) ** 0.5 - 1),
                basis="half the change that a bias in proportion to H^(-1/2) would make",
            ),
            Claim(
                "Logits of heads that are summed instead of averaged approach the limit as H^(-1/2)",
                slope("summed"),
                quantity="exponent of H",
                target=-0.5,
                tolerance=0.05,
                basis="the same tolerance; the logit of a sum has the variance H Var f at initialization",
                expected="refuted",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show errors of logits after training, averaged and summed, and fluctuation and bias of the loss."""
        sizes = np.asarray(self.heads)
        found = {output: errors(predicted, trained, output) for output in ("averaged", "summed")}
        slopes = {output: fit_exponent(sizes, each).exponent for output, each in found.items()}
        ratio = {output: each[:, -1].mean() / each[:, 0].mean() for output, each in found.items()}
        spread, shift = _averaged(trained, "loss_spread").values, np.abs(biases(predicted, trained).mean(0))

        def law(value: float, exponent: float, label: str) -> Curve:
            line = value * (sizes / sizes[0]) ** exponent
            return Curve(tuple(map(float, sizes)), tuple(line.tolist()), label, "reference")

        return (
            Lines(
                f"Error of H heads against many: H^({slopes['averaged']:.2f}), summed H^({slopes['summed']:.2f})",
                "heads H",
                "rms error of logits",
                (
                    *(spread_curve(sizes, each, output, group=at) for at, (output, each) in enumerate(found.items())),
                    law(float(found["averaged"][:, 0].mean()), -0.5, "H^(-1/2)"),
                ),
                log_x=True,
                log_y=True,
                note=f"From H = {sizes[0]} to {sizes[-1]} the error is multiplied by {ratio['averaged']:.3g} "
                f"(averaged), {ratio['summed']:.3g} (summed). The reference has {float(predicted['error']):.2g}.",
            ),
            Lines(
                f"Loss of H averaged heads: bias below its fluctuation at H = {sizes[-1]}"
                if shift[-1] < spread[:, -1].mean()
                else "Loss of H averaged heads",
                "heads H",
                "deviation of the loss [nat]",
                (
                    spread_curve(sizes, spread, "standard deviation over systems"),
                    Curve(tuple(map(float, sizes)), tuple(shift.tolist()), "bias, absolute value", "trained", 1),
                    law(float(spread[:, 0].mean()), -0.5, "H^(-1/2), 1/H"),
                    law(float(shift[0]), -1.0, ""),
                ),
                log_x=True,
                log_y=True,
                note="H times the bias: "
                + ", ".join(f"{H * value:.3g}" for H, value in zip(sizes, shift, strict=True))
                + ", with the standard errors "
                + ", ".join(f"{value:.2g}" for value in _standard_errors(predicted, trained) * sizes)
                + ".",
            ),
        )

    def _prompts(self) -> LabelledPrompts:
        """Draw the prompts, the same for all systems."""
        return draw_labelled_prompts(np.random.default_rng(0), self.prompts, self.length)

    def _train(self, points: np.ndarray, prompts: LabelledPrompts, summed: bool = False) -> np.ndarray:
        return np.asarray(
            train_head_particles(
                HeadParticles.of(points), prompts, learning_rate=self.learning_rate, steps=self.steps, summed=summed
            )
        )


def errors(predicted: xr.Dataset, trained: xr.Dataset, output: str) -> np.ndarray:
    """Return rms errors of logits after training over systems and prompts, (replicates, sizes)."""
    mean, spread = (unstack(trained, name).sel(output=output) for name in ("mean", "spread"))
    squares = ((mean - predicted["logit"].isel(step=-1)) ** 2 + spread).mean("prompt")
    return np.sqrt(squares.transpose("replicate", "heads").values)


def biases(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
    """Return the mean loss of averaged heads after training minus that of the limit, (replicates, sizes)."""
    return np.asarray(_averaged(trained, "loss_mean").values - float(predicted["loss"][-1]))


def _standard_errors(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
    found = biases(predicted, trained)
    return found.std(0, ddof=min(1, len(found) - 1)) / len(found) ** 0.5


def _averaged(trained: xr.Dataset, name: str) -> xr.DataArray:
    """Return a variable of averaged heads, (replicate, heads, its own)."""
    return unstack(trained, name).sel(output="averaged").transpose("replicate", "heads", ...)

"""`limits/logit-exponent`: both logit exponents on a real text as N grows, at fixed steps and at fixed compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.costs import ModelShape, transformer_cost
from manyheads.errors import UsageError, check_rising
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.trained.trajectories import follow_networks
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.scaling.shared.parametrizations import bordelon, task_of
from manyheads.study import Cell, Claim, Curve, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Lines, Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

EXPONENTS = {1.0: "1", 0.5: "1/2"}
WINDOW = 4  # losses are averaged over the last quarter of the steps
SAME = 1e-3  # in log loss, of two runs of one network


@dataclass(frozen=True)
class LogitExponent(Study):
    """Loss of causal transformers on a text, trained by Adam at both logit exponents, from one base.

    Attributes
    ----------
    key_dims
        N; the smallest is the base, at which both exponents are one network.
    heads, depth
        H and L.
    richness
        gamma_0 at the base. The branch multiplier beta_0/L is one at the base, so that beta_0 is the depth.
    steps, batch, learning_rate
        Updates of Adam, sequences of a batch, and the learning rate at the base.

    Notes
    -----
    At one N a step costs as much at both exponents, so that fixed compute differs from fixed steps only by how far
    larger networks are trained: to the steps that the smallest one's compute buys. Exponent 1/2 is the better one at
    fixed steps and the worse one at fixed compute where it begins behind and overtakes; curves are compared on the same
    batches, from weights that differ by the init's scale of queries and keys. (Derived here.)
    """

    name: ClassVar[str] = "limits/logit-exponent"
    claim: ClassVar[str] = "Larger N favours logit exponent 1/2 at fixed steps, exponent 1 at fixed compute"
    source: ClassVar[Source] = bordelon("figures 7 and 12: language models, base (8, 8, 4), beta_0 = 4, gamma_0 = 0.25")

    key_dims: tuple[int, ...] = (8, 32)
    heads: int = 8
    depth: int = 4
    richness: float = 0.25
    steps: int = 200
    batch: int = 4
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        check_rising("key_dims", self.key_dims)
        if not (self.learning_rate > 0 and self.richness > 0):
            raise UsageError(f"learning_rate={self.learning_rate}, richness={self.richness}: expected positive numbers")
        if self.bought(self.key_dims[-1]) < 2:
            raise UsageError(
                f"steps={self.steps}: the compute of N={self.key_dims[0]} buys less than two at N={self.key_dims[-1]}; "
                "give more steps or smaller key_dims"
            )

    @classmethod
    def full(cls) -> LogitExponent:
        """Return the study with larger key dimensions and longer training."""
        return cls(key_dims=(8, 16, 32, 64), steps=1000, batch=16)

    @classmethod
    def small(cls) -> LogitExponent:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dims=(2, 4), heads=2, depth=1, steps=12, batch=2)

    def flops(self, cell: Cell) -> int:
        """Return the matrix-multiply FLOPs of a training."""
        return self.steps * self._step(int(cell["key_dim"]))

    def bought(self, key_dim: int) -> int:
        """Return the steps at one N that cost as much as all steps at the smallest."""
        return self.steps * self._step(self.key_dims[0]) // self._step(key_dim)

    def cells(self) -> tuple[Cell, ...]:
        """Return all key dimensions at both exponents."""
        return grid(logit_exponent=tuple(EXPONENTS), key_dim=self.key_dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the steps that one compute buys."""
        return dataset(
            {"bought": ("key_dim", [self.bought(size) for size in self.key_dims], "steps at fixed compute")},
            {"key_dim": (list(self.key_dims), "key dimension", "1")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one transformer; its batches are those of every cell."""
        base = Shape(self.key_dims[0], self.heads, self.depth)
        # Outputs of the base are divided by gamma_0 d in the paper, by the root of d in a standard init.
        richness = self.richness * math.sqrt(base.width)
        parametrization = Parametrization(float(cell["logit_exponent"]), 1.0, richness, base=base)
        shape = Shape(int(cell["key_dim"]), self.heads, self.depth)
        task, recipe = task_of("text", self.batch), Recipe(self.steps)
        found = follow_networks(task, parametrization, shape, recipe, self.learning_rate, (self.steps,), 1, key)
        return dataset(
            {"loss": ("step", np.asarray(found.losses[0], np.float64), "loss of the batch before the update", "nat")},
            {"step": (np.arange(self.steps), "updates", "1")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the exponents at the largest N, at fixed steps and compute, and sizes at fixed steps."""
        largest = self.key_dims[-1]
        better = "the loss of logit exponent 1/2 is below that of 1 (log ratio)"
        return (
            self._base(),
            self._compare(f"At N={largest} and fixed steps {better}", "below", self._ratio(compute=False)),
            self._compare(
                f"At N={largest} and fixed compute {better.replace('below', 'above')}",
                "above",
                self._ratio(compute=True),
            ),
            *(self._growth(exponent) for exponent in EXPONENTS),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show losses against compute and the difference of the exponents against steps."""
        return self._losses(trained), self._differences(predicted, trained)

    def losses(self, trained: xr.Dataset, exponent: float) -> np.ndarray:
        """Return log losses of one exponent, (replicates, sizes, step)."""
        return np.log(mean_field.along(trained, "loss", "key_dim", logit_exponent=exponent))

    def differences(self, trained: xr.Dataset) -> np.ndarray:
        """Return log loss at 1/2 minus that at 1, (replicates, sizes, step)."""
        return self.losses(trained, 0.5) - self.losses(trained, 1.0)

    def _step(self, key_dim: int) -> int:
        """Matrix-multiply FLOPs of one step."""
        config = task_of("text", self.batch).config(Shape(key_dim, self.heads, self.depth))
        width = config.shape.width
        hidden = round(config.mlp_ratio * width)
        model = ModelShape(self.depth, width, self.heads, mlp_hidden=hidden, vocabulary=config.outputs, causal=True)
        return transformer_cost(model, config.length, self.batch, training=True, convention="dense").flops

    def _ratio(self, *, compute: bool) -> Measure:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            last = int(predicted["bought"].values[-1]) if compute else self.steps
            return self.differences(trained)[:, -1, _window(last)].mean(-1)

        return measure

    def _compare(self, text: str, side: str, measure: Measure) -> Claim:
        return Claim(
            text,
            measure,
            quantity="loss at 1/2 over loss at 1 (ln)",
            target=0.0,
            tolerance=(math.inf, 0.0) if side == "below" else (0.0, math.inf),
            basis="the sign; mean over the last quarter of the steps, on the same batches",
        )

    def _base(self) -> Claim:
        return Claim(
            f"At N={self.key_dims[0]} both logit exponents train one network (largest log ratio)",
            lambda predicted, trained: float(np.abs(self.differences(trained)[:, 0]).max()),
            quantity="loss at 1/2 over loss at 1 (ln)",
            target=0.0,
            tolerance=SAME,
            basis="the base, at which all factors are one; rounding",
        )

    def _growth(self, exponent: float) -> Claim:
        return Claim(
            f"Logit exponent {EXPONENTS[exponent]}: at fixed steps the loss at N={self.key_dims[-1]} is below that at "
            f"N={self.key_dims[0]} (log ratio)",
            lambda predicted, trained: np.subtract(
                *(self.losses(trained, exponent)[:, place, _window(self.steps)].mean(-1) for place in (-1, 0))
            ),
            quantity="loss at the largest over that at the smallest N (ln)",
            target=0.0,
            tolerance=(math.inf, 0.0),
            basis="the sign; mean over the last quarter of the steps, on the same batches",
        )

    def _losses(self, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        for exponent, name in EXPONENTS.items():
            for place, size in enumerate(self.key_dims):
                compute = self._step(size) * (np.arange(self.steps) + 1.0)
                losses = np.exp(_smooth(self.losses(trained, exponent)[:, place]))
                label = f"exponent {name}, N={size}"
                curves.append(spread_curve(compute, losses, label, group=len(curves)))
        return Lines(
            "Loss against compute",
            "FLOPs",
            "loss (nat)",
            tuple(curves),
            log_x=True,
            note="Geometric means over a tenth of the steps; bands range over replicates.",
        )

    def _differences(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        found = _smooth(self.differences(trained))
        curves = [
            spread_curve(np.arange(self.steps) + 1.0, found[:, place], f"N={size}", group=place)
            for place, size in enumerate(self.key_dims)
        ]
        bought = int(predicted["bought"].values[-1])
        return Lines(
            "Loss of logit exponent 1/2 over that of 1",
            "updates",
            "log ratio of losses",
            tuple(curves),
            note=f"On the same batches, means over a tenth of the steps; bands range over replicates. The compute of "
            f"N={self.key_dims[0]} buys {bought} updates at N={self.key_dims[-1]}.",
            shows=(f"At N={self.key_dims[-1]}",),
        )


def _window(last: int) -> slice:
    """Return the last quarter of the steps up to one."""
    return slice(last - max(1, last // WINDOW), last)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over the tenth of all steps that ends at each, fewer at the beginning."""
    width = max(1, values.shape[-1] // 10)
    total = np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, -1)], -1)
    ends = np.arange(1, values.shape[-1] + 1)
    starts = np.maximum(ends - width, 0)
    return (total[..., ends] - total[..., starts]) / (ends - starts)

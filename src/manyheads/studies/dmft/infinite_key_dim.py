"""`limits/infinite-key-dim`: convergence of networks to the mean-field limit of infinite key dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.statistics import fit_exponent
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.claims import nearer_claim, single_network_claim
from manyheads.studies.dmft.shared.mean_field import DIMS, QUANTITIES
from manyheads.studies.scaling.shared.curves import power_curve
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.problem import Problem


@dataclass(frozen=True)
class InfiniteKeyDim(Study):
    """Single networks and their mean against the limit of infinite key dimension, for one head and for several.

    Attributes
    ----------
    task
        ``"digits"`` (pooled, squared loss) or ``"text"`` (causal, every token reads out, cross-entropy).
    key_dims, heads_counts
        Sizes N, and numbers of heads H, for which the limit is the same.
    depth, depth_exponent
        Blocks, and the exponent of their branch multiplier.
    norm
        Whether streams are normalized.
    steps, learning_rate, richness, momentum
        Of the training by gradient descent.
    networks
        Networks of one replicate.
    """

    name: ClassVar[str] = "limits/infinite-key-dim"
    claim: ClassVar[str] = "Training converges to its mean-field limit as N grows, for any number of heads"
    source: ClassVar[Source] = bordelon(
        "the limit of infinite key dimension; its solution and the rates are derived here"
    )

    task: str = "digits"
    key_dims: tuple[int, ...] = (4, 16, 64)
    heads_counts: tuple[int, ...] = (1, 4)
    depth: int = 2
    depth_exponent: float = 1.0
    norm: bool = False
    steps: int = 12
    learning_rate: float = 0.25
    richness: float = 0.75
    momentum: float = 0.0
    networks: int = 48

    def __post_init__(self) -> None:
        check_rising("key_dims", self.key_dims)
        if not self.heads_counts or min(self.heads_counts) < 1 or self.networks < 2:
            raise UsageError(f"heads_counts={self.heads_counts}, networks={self.networks}: from 1 head and 2 networks")
        self.problem()

    @classmethod
    def full(cls) -> InfiniteKeyDim:
        """Return the study with four blocks, larger networks, and more of them."""
        return cls(key_dims=(4, 16, 64, 256), depth=4, networks=32)

    @classmethod
    def small(cls) -> InfiniteKeyDim:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dims=(2, 4), heads_counts=(2,), depth=1, steps=3, networks=2)

    def problem(self) -> Problem:
        """Return what is trained."""
        return mean_field.problem_of(self)

    def cells(self) -> tuple[Cell, ...]:
        """Return all sizes with all numbers of heads."""
        return grid(key_dim=self.key_dims, heads=self.heads_counts)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit, and, to see what they are worth, the same equations without their response functions."""
        problem = self.problem()
        solved, without = (mean_field.solve_blocks(problem, responses=responses) for responses in (True, False))
        return mean_field.label(
            mean_field.summarize(solved) | {"output_without": without.outputs},
            dims=DIMS | {"output_without": DIMS["output"]},
            names=QUANTITIES | {"output_without": "outputs without response functions"},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size, and keep what the limit predicts about each."""
        network = Network(int(cell["key_dim"]), int(cell["heads"]))
        return mean_field.train_ensemble(self.problem(), network, key, self.networks)

    def claims(self) -> tuple[Claim, ...]:
        """Test the convergence of single networks and of their mean, and the variance of logits over heads."""
        claims: list[Claim] = []
        for heads in self.heads_counts:
            claims += [self._convergence(name, heads) for name in QUANTITIES]
            claims.append(self._control(heads))
            if heads > 1:
                claims += [self._variance(heads, when) for when in ("start", "end")]
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show one output over training at every size, and the distances against size."""
        return self._trajectory(predicted, trained), self._distances(predicted, trained)

    def distances(self, predicted: xr.Dataset, trained: xr.Dataset, name: str, heads: int) -> np.ndarray:
        """Return root mean square distances of single networks from the limit, (replicates, sizes)."""
        return mean_field.distances(self._along(trained, name, heads), predicted[name].values)

    def biases(self, predicted: xr.Dataset, trained: xr.Dataset, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how far the mean network of a replicate is from either solution at the largest N, (replicates,)."""
        largest = self._along(trained, "output", heads)[:, -1:]
        near, far = (mean_field.biases(largest, predicted[name].values)[:, 0] for name in ("output", "output_without"))
        return near, far

    def _along(self, trained: xr.Dataset, name: str, heads: int) -> np.ndarray:
        return mean_field.along(trained, name, "key_dim", heads=heads)

    def _convergence(self, name: str, heads: int) -> Claim:
        return single_network_claim(
            f"H={heads}: the distance of single networks from the limit scales as N^(-1/2) ({QUANTITIES[name]})",
            lambda predicted, trained: fit_exponent(self.key_dims, self.distances(predicted, trained, name, heads)),
            "N",
            self.key_dims,
        )

    def _control(self, heads: int) -> Claim:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            near, far = self.biases(predicted, trained, heads)
            return np.log(near / far)

        return nearer_claim(
            f"H={heads}: at N={self.key_dims[-1]} the mean network is nearer to the limit than to the equations "
            "without response functions (log ratio)",
            measure,
        )

    def _variance(self, heads: int, when: str) -> Claim:
        bias = -finite_size_bias(self.key_dims)
        return Claim(
            f"H={heads}: {'before' if when == 'start' else 'after'} training the variance of attention logits over "
            "heads scales as 1/N",
            lambda predicted, trained: fit_exponent(
                self.key_dims, self._along(trained, f"variance_{when}", heads).mean(-1)
            ),
            quantity="exponent of N",
            target=-1.0,
            tolerance=2 * bias,
            basis=f"a correction 1 + N^(-1/2) moves the exponent by {bias:.2f} over these sizes, and that of a square "
            "by twice as much",
        )

    def _trajectory(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        curves = [spread_curve(steps, predicted["output"].values[:, 0, 0], "limit", "predicted")]
        for place, size in enumerate(self.key_dims):
            values = self._along(trained, "output", self.heads_counts[-1])[
                :, place, ..., 0, 0
            ]  # (replicates, nets, step)
            curves.append(spread_curve(steps, values.reshape(-1, self.steps), f"N={size}", group=place))
        note = f"Networks with H={self.heads_counts[-1]}; bands range over all of them."
        return Lines("Output of the first read-out over training", "updates", "output", tuple(curves), note=note)

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        sizes = np.asarray(self.key_dims, float)
        for heads in self.heads_counts:
            for name, text in QUANTITIES.items():
                values = self.distances(predicted, trained, name, heads)
                label = f"{text.removesuffix(' at the end').removesuffix(' over training')}, H={heads}"
                curves.append(spread_curve(sizes, values, label, group=len(curves)))
        curves.append(power_curve(self.key_dims, curves[0].y[0], -0.5, "N^(-1/2)", len(curves)))
        return Lines(
            "Distance of single networks from the limit",
            "key dimension N",
            "root mean square distance",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means over replicates; bands range over all.",
            shows=("distance of single networks from the limit",),
        )

"""`limits/key-dim-stability`: growth of the backward signal with the key dimension at logit exponent 1/2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.studies.dmft.shared.mean_field import along, problem_of, solve_blocks, train_seeds
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.verdicts import Expected
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.problem import Problem

MOST = 64  # networks at once
FLAT = 1.1  # over all sizes
GROWN = 1.5
NAMES = {1.0: "1", 0.5: "1/2"}


@dataclass(frozen=True)
class KeyDimStability(Study):
    """Backward signal below attention against the key dimension, before and after training.

    With e the backward signal behind W_O and M_ab = sigma_ab (e_a . v_b - e_a . u_a)/N, a block adds to the backward
    variable N^(1 - alpha_A) sum_b M_ab W_Q^T k_b, and the same with queries and keys exchanged. At the start e and v
    are independent, M is N^(-1/2), and the sum is of order one or less at both exponents. Training aligns e with v: M
    becomes a number of order one, and at alpha_A = 1/2 the sum grows like N^(1/2), at alpha_A = 1 it stays. So a
    coordinate check at the start sees nothing, and `infinite_key_dim` refuses alpha_A = 1/2. (Derived here.)

    Measured is the root mean square of the backward variable below all blocks over that above them, which is free of
    the size of the error; over tokens in the loss only.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    key_dims, heads_counts
        Sizes N, and numbers of heads H.
    depth, norm
        Blocks, and whether streams are normalized.
    steps, learning_rate, richness
        Of the training by gradient descent.
    networks
        Of the largest size, in one replicate.
    """

    name: ClassVar[str] = "limits/key-dim-stability"
    claim: ClassVar[str] = "At logit exponent 1/2 gradients below attention grow with N during training"
    source: ClassVar[Source] = bordelon("table 3, the two logit exponents; that training breaks 1/2 is derived here")

    task: str = "digits"
    key_dims: tuple[int, ...] = (4, 16, 64)
    heads_counts: tuple[int, ...] = (4, 16)
    depth: int = 1
    norm: bool = False
    steps: int = 32
    learning_rate: float = 0.15
    richness: float = 1.5
    networks: int = 4

    def __post_init__(self) -> None:
        check_rising("key_dims", self.key_dims)
        if not self.heads_counts or min(self.heads_counts) < 1 or self.networks < 1:
            raise UsageError(f"heads_counts={self.heads_counts}, networks={self.networks}: from 1 head and 1 network")
        self.problem()

    @classmethod
    def full(cls) -> KeyDimStability:
        """Return the study with a larger key dimension and more networks."""
        return cls(key_dims=(4, 16, 64, 256), heads_counts=(1, 4), networks=8)

    @classmethod
    def small(cls) -> KeyDimStability:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dims=(4, 8), heads_counts=(4,), steps=3, networks=16)

    def problem(self) -> Problem:
        """Return what is trained."""
        return problem_of(self)

    def cells(self) -> tuple[Cell, ...]:
        """Return both exponents with all sizes."""
        return grid(logit_exponent=tuple(NAMES), key_dim=self.key_dims, heads=self.heads_counts)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit of infinite key dimension at exponent 1, the only one that has it; also without responses."""
        dataset, without = (
            self._label(amplification(self.problem(), np.einsum("tlaa->tla", solved.backward)))
            for solved in (solve_blocks(self.problem(), responses=responses) for responses in (True, False))
        )
        return dataset.assign(backward_without=without["backward"])

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size, and more of the smaller ones, whose noise is larger; keep their mean."""
        network = Network(int(cell["key_dim"]), int(cell["heads"]), float(cell["logit_exponent"]))
        count = min(MOST, self.networks * self.key_dims[-1] * max(self.heads_counts) // network.width)
        trained = train_seeds(self.problem(), network, key, count)
        sizes = amplification(self.problem(), np.einsum("stlaa->stla", trained["backward"].values))
        dataset = self._label(np.exp(np.log(sizes).mean(0)))
        logits = trained["logits"].values
        moved = np.sqrt(((logits[:, -1] - logits[:, 0]) ** 2).mean())
        dataset["update"] = ((), moved, {"long_name": "change of the attention logits", "units": "1"})
        dataset["loss"] = (("step",), trained["loss"].values.mean(0), {"long_name": "loss", "units": "1"})
        return dataset

    def claims(self) -> tuple[Claim, ...]:
        """Compare the smallest with the largest key dimension, before and after training, and with the limit."""
        claims: list[Claim] = []
        for exponent, name in NAMES.items():
            for heads in self.heads_counts:
                where = f"logit exponent {name}, H={heads}"
                claims += [self._flat(exponent, heads, where, place) for place in ("before", "after")]
                if exponent == 1:
                    claims += self._beside_the_limit(heads, where)
                else:
                    claims.append(self._growth(heads, where))
        return tuple(claims)

    def _flat(self, exponent: float, heads: int, where: str, when: str) -> Claim:
        return Claim(
            f"{where}: {when} training the backward signal below attention changes by at most 10% from "
            f"N={self.key_dims[0]} to N={self.key_dims[-1]} (log ratio)",
            lambda predicted, trained: self._log_ratio(trained, exponent, heads)[:, 0 if when == "before" else -1],
            quantity="backward signal, largest over smallest N (ln)",
            target=0.0,
            tolerance=math.log(FLAT),
            basis=f"corrections are of relative size 1/N, at most a tenth at N={self.key_dims[0]} where M^2 is 1/N",
            expected="refuted" if when == "after" and exponent < 1 else "holds",
        )

    def _growth(self, heads: int, where: str) -> Claim:
        return Claim(
            f"{where}: after training the backward signal below attention grows by half or more from "
            f"N={self.key_dims[0]} to N={self.key_dims[-1]} (log ratio)",
            lambda predicted, trained: self._log_ratio(trained, 0.5, heads)[:, -1],
            quantity="backward signal, largest over smallest N (ln)",
            target=math.log(GROWN),
            tolerance=(0.0, math.inf),
            basis="its square is a + c N: from N=4 to 64 it grows by 1.5^2 where the part that grows is a tenth of the "
            "rest at N=4",
        )

    def _beside_the_limit(self, heads: int, where: str) -> list[Claim]:
        """Compare the largest key dimension with the limit, and with the limit without responses, which must fail."""

        def measure(name: str) -> Measure:
            def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
                found = along(trained, "backward", "key_dim", logit_exponent=1.0, heads=heads)[:, -1, -1]
                return np.log(found / float(predicted[name].values[-1]))

            return ratio

        cases: tuple[tuple[str, str, Expected], ...] = (
            ("of the limit", "backward", "holds"),
            ("of the limit without response functions", "backward_without", "refuted"),
        )
        return [
            Claim(
                f"{where}: after training the backward signal at N={self.key_dims[-1]} is that {text} to 10% "
                "(log ratio)",
                measure(name),
                quantity="backward signal, measured over predicted (ln)",
                target=0.0,
                tolerance=math.log(FLAT),
                basis="corrections are of relative size 1/N, and at most a tenth at the smallest",
                expected=expected,
            )
            for text, name, expected in cases
        ]

    def _log_ratio(self, trained: xr.Dataset, exponent: float, heads: int) -> np.ndarray:
        """Return the logarithm of the signal at the largest N over that at the smallest, (replicates, steps)."""
        sizes = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
        return np.asarray(np.log(sizes[:, -1] / sizes[:, 0]))

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the backward signal against N, and over training at the largest N."""
        sizes = (self._sizes(predicted, trained, exponent) for exponent in NAMES)
        return (*sizes, self._trajectory(predicted, trained))

    def _label(self, values: np.ndarray) -> xr.Dataset:
        about = {"long_name": "backward variable below attention over that above", "units": "1"}
        steps = ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"})
        return xr.Dataset({"backward": ("step", values, about)}, coords={"step": steps})

    def _sizes(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> Panel:
        sizes = np.asarray(self.key_dims, float)
        curves: list[Curve] = []
        for place, when in ((0, "before training"), (-1, "after")):
            for heads in self.heads_counts:
                found = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
                curves.append(spread_curve(sizes, found[..., place], f"H={heads}, {when}", group=len(curves)))
            if exponent == 1:
                flat = np.full(len(sizes), predicted["backward"].values[place])
                group = len(curves) - len(self.heads_counts)  # the colour of the first of those that it predicts
                curves.append(spread_curve(sizes, flat, f"infinite N, {when}", "predicted", group))
        return Lines(
            f"Backward signal below attention, logit exponent {NAMES[exponent]}",
            "key dimension N",
            "root mean square, over that above attention",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means over networks and replicates; bands range over replicates.",
            shows=(f"logit exponent {NAMES[exponent]},",),
        )

    def _trajectory(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        curves = [spread_curve(steps, predicted["backward"].values, "limit at exponent 1", "predicted")]
        heads = self.heads_counts[-1]
        for exponent, name in NAMES.items():
            found = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
            for place, size in enumerate(self.key_dims):
                label = f"exponent {name}, N={size}"
                curves.append(spread_curve(steps, found[:, place], label, group=len(curves) - 1))
        return Lines(
            f"Backward signal below attention over training, H={heads}",
            "updates",
            "root mean square, over that above attention",
            tuple(curves),
            note="Means over networks; bands range over replicates.",
        )


def amplification(problem: Problem, sizes: np.ndarray) -> np.ndarray:
    """Return how much larger the backward variable is below all blocks than above: mean squares (..., level, row)."""
    shares = problem.loss_weights.any(0)  # (O,)
    rows = problem.pooling[shares].any(0)  # tokens that are in the loss
    return np.asarray(np.sqrt((sizes[..., 0, rows] / sizes[..., -1, rows]).mean(-1)))

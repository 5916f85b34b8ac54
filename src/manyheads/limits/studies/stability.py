"""`limits/key-dim-stability`: why infinite key dimension is no limit of training at logit exponent 1/2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.comparisons.mean_field import along, problem_of, solve_blocks, train_seeds
from manyheads.limits.comparisons.schemes import bordelon, check_rising
from manyheads.limits.dmft.problem import Problem
from manyheads.limits.systems.ensembles import Network
from manyheads.study import Cell, Curve, Lines, Source, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

MOST = 64  # networks at once
FLAT = 1.1  # over all sizes
GROWN = 1.5
NAMES = {1.0: "1", 0.5: "1/2"}


@dataclass(frozen=True)
class KeyDimStability(Study):
    """Size of what attention sends back, against the key dimension, before and after training.

    With e what W_O sends back and M_ab = sigma_ab (e_a . v_b - e_a . u_a)/N, a block adds to the backward variable
    N^(1 - alpha_A) sum_b M_ab W_Q^T k_b, and the same with queries and keys exchanged. At the start e and v are
    independent, M is N^(-1/2), and the sum is of order one or less at both exponents. Training aligns e with v: M
    becomes a number of order one, and at alpha_A = 1/2 the sum grows like N^(1/2), at alpha_A = 1 it stays. So a check
    of coordinates at the start sees nothing, and `infinite_key_dim` refuses alpha_A = 1/2. (Derived here.)

    What is looked at is the root mean square of the backward variable below all blocks over that above them, which is
    free of the size of the error; tokens in the loss only.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    key_dims, heads_counts
        Sizes N, and numbers of heads H, which do not cure it.
    depth, norm
        Blocks, and whether streams are normalised.
    steps, rate, richness
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
    rate: float = 0.15
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
        dataset["motion"] = ((), moved, {"long_name": "motion of the attention logits", "units": "1"})
        dataset["loss"] = (("step",), trained["loss"].values.mean(0), {"long_name": "loss", "units": "1"})
        return dataset

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the smallest with the largest key dimension, before and after training."""
        span = f"from N={self.key_dims[0]} to N={self.key_dims[-1]}"
        basis = f"corrections are of relative size 1/N, at most a tenth at N={self.key_dims[0]} where M^2 is 1/N"
        verdicts = []
        for exponent, name in NAMES.items():
            for heads in self.heads_counts:
                sizes = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
                growth = np.log(sizes[:, -1] / sizes[:, 0])  # (replicates, steps)
                who = f"logit exponent {name}, {heads} head" + "s" * (heads > 1)
                what = f"what is sent back below attention is flat within 10% {span} (log ratio)"
                for place, when in ((0, "at the start"), (-1, "after training")):
                    verdicts.append(
                        Verdict.from_samples(
                            f"{who}: {when} {what}",
                            growth[:, place],
                            target=0.0,
                            tolerance=math.log(FLAT),
                            basis=basis,
                            expected="refuted" if place and exponent < 1 else "holds",
                        )
                    )
                if exponent == 1:
                    verdicts += self._beside_the_limit(who, predicted, sizes[:, -1, -1])
                else:
                    verdicts.append(
                        Verdict.from_samples(
                            f"{who}: after training it has grown by half or more {span} (log ratio)",
                            growth[:, -1],
                            target=math.log(GROWN),
                            tolerance=(0.0, math.inf),
                            basis="its square is a + c N: from N=4 to 64 it grows by 1.5^2 where the part that grows "
                            "is a tenth of the rest at N=4",
                        )
                    )
        return tuple(verdicts)

    def _beside_the_limit(self, who: str, predicted: xr.Dataset, found: np.ndarray) -> list[Verdict]:
        """Hold the largest key dimension against the limit, and, which must fail, against it without responses."""
        cases = (("the limit says", "backward", "holds"), ("it says without responses", "backward_without", "refuted"))
        return [
            Verdict.from_samples(
                f"{who}: after training what is sent back at N={self.key_dims[-1]} is what {says}, to 10% (log ratio)",
                np.log(found / float(predicted[name].values[-1])),
                target=0.0,
                tolerance=math.log(FLAT),
                basis="corrections are of relative size 1/N, and at most a tenth at the smallest",
                expected=expected,  # type: ignore[arg-type]
            )
            for says, name, expected in cases
        ]

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the size of what is sent back against N, and over training at the largest N."""
        sizes = (self._sizes(predicted, trained, exponent) for exponent in NAMES)
        return (*sizes, self._course(predicted, trained))

    def _label(self, values: np.ndarray) -> xr.Dataset:
        about = {"long_name": "backward variable below attention, over that above", "units": "1"}
        steps = ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"})
        return xr.Dataset({"backward": ("step", values, about)}, coords={"step": steps})

    def _sizes(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> Panel:
        sizes = np.asarray(self.key_dims, float)
        curves: list[Curve] = []
        for place, when in ((0, "start"), (-1, "end")):
            for heads in self.heads_counts:
                found = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
                curves.append(spread_curve(sizes, found[..., place], f"H={heads}, {when}", group=len(curves)))
            if exponent == 1:
                level = float(predicted["backward"].values[place])
                flat = (level,) * len(sizes)
                group = len(curves) - len(self.heads_counts)  # the colour of the first of those that it predicts
                curves.append(Curve(tuple(sizes.tolist()), flat, f"infinite N, {when}", "predicted", group))
        return Lines(
            f"What is sent back below attention, logit exponent {NAMES[exponent]}",
            "key dimension N",
            "root mean square, over that above",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means over networks and replicates; bands reach over replicates.",
        )

    def _course(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        limit = predicted["backward"].values
        curves = [Curve(tuple(map(float, steps)), tuple(limit.tolist()), "limit at exponent 1", "predicted")]
        heads = self.heads_counts[-1]
        for exponent, name in NAMES.items():
            found = along(trained, "backward", "key_dim", logit_exponent=exponent, heads=heads)
            for place, size in enumerate(self.key_dims):
                label = f"exponent {name}, N={size}"
                curves.append(spread_curve(steps, found[:, place], label, group=len(curves) - 1))
        return Lines(
            f"The same over training, H={heads}",
            "updates",
            "root mean square, over that above",
            tuple(curves),
            note="Means over networks; bands reach over replicates.",
        )


def amplification(problem: Problem, sizes: np.ndarray) -> np.ndarray:
    """Return how much larger the backward variable is below all blocks than above: mean squares (..., level, row)."""
    shares = problem.loss_weights.any(0)  # (O,)
    rows = problem.pooling[shares].any(0)  # tokens that are in the loss
    return np.asarray(np.sqrt((sizes[..., 0, rows] / sizes[..., -1, rows]).mean(-1)))

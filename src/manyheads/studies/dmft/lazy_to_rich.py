"""`limits/lazy-to-rich`: feature learning against the richness, from the lazy limit (NTK) to rich training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.studies.dmft.shared.claims import nearer_claim, single_network_claim
from manyheads.studies.dmft.shared.mean_field import (
    along,
    biases,
    distances,
    problem_of,
    projection,
    solve_blocks,
    train_seeds,
)
from manyheads.studies.scaling.shared.curves import power_curve
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.ntk import ntk_outputs
from manyheads.theory.dmft.problem import Problem

UPDATES = {
    "output": "distance of the outputs from NTK descent",
    "pooled": "update of the kernel of the read-outs",
    "logits": "update of the attention logits, mean over heads",
}
SHORT = {"output": "outputs", "pooled": "kernel", "logits": "logits"}
NAMES = {
    **UPDATES,
    **{f"limit_{name}": f"{text}, at infinite key dimension" for name, text in UPDATES.items()},
    "output": "outputs over training",
    "output_without": "outputs without response functions",
    "lazy": "outputs of NTK descent",
}
DIMS = {
    "output": ("step", "read_out", "class"),
    "pooled": ("read_out", "read_out_too"),
    "logits": ("layer", "sample", "token", "token_too"),
}
SMALL = 0.1  # richness up to which powers are fitted


@dataclass(frozen=True)
class LazyToRich(Study):
    """Updates of outputs, kernels and logits against the richness gamma0, in the theory and in networks.

    The equations of the limit are unchanged under gamma0 -> -gamma0 with w -> -w: outputs, kernels and logits are even
    in it. So outputs depart from NTK descent by gamma0^2, kernels move by gamma0^2, and so do logits: what queries
    and keys learn has a factor gamma0, and so has M, which is <e v> once value and output weights have learned. One
    finite network has no such symmetry: its M is N^(-1/2) before anything is learned, and its logits move by gamma0 (N
    H)^(-1/2) first. (Derived here.)

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``, which trains well at ``norm=True, learning_rate=0.5``.
    richness
        gamma0, in rising order; two or more of them up to 0.1, and two or more above. Updates saturate between the last
        two where the loss has settled.
    key_dims, heads
        Sizes N, and the number of heads H.
    depth, norm
        Blocks, and whether streams are normalized.
    steps, learning_rate
        Of the training by gradient descent.
    networks
        Networks of one replicate.
    """

    name: ClassVar[str] = "limits/lazy-to-rich"
    claim: ClassVar[str] = "Features move as richness squared up to 0.1, and saturate in rich training"
    source: ClassVar[Source] = bordelon("the richness gamma0; the powers are derived here")

    task: str = "digits"
    richness: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
    key_dims: tuple[int, ...] = (4, 16, 64)
    heads: int = 4
    depth: int = 2
    norm: bool = False
    steps: int = 16
    learning_rate: float = 0.15
    networks: int = 16

    def __post_init__(self) -> None:
        levels = self.richness
        small = sum(level <= SMALL for level in levels)
        if small < 2 or list(levels) != sorted(set(levels)) or levels[0] <= 0:
            raise UsageError(f"richness={levels}: positive, in rising order, two or more of them up to {SMALL}")
        if len(levels) < small + 2:
            raise UsageError(f"richness={levels}: expected two more above {SMALL}, where updates saturate")
        check_rising("key_dims", self.key_dims)
        if self.heads < 1 or self.networks < 2:
            raise UsageError(f"heads={self.heads}, networks={self.networks}: from 1 head and 2 networks")
        self.problem(levels[0])

    @classmethod
    def full(cls) -> LazyToRich:
        """Return the study with a finer grid, larger networks, and more of them."""
        levels = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.4, 2.0)
        return cls(richness=levels, key_dims=(4, 16, 64, 256), networks=32)

    @classmethod
    def small(cls) -> LazyToRich:
        """Return the smallest configuration in which every claim can change."""
        return cls(richness=(0.03, 0.1, 1.0, 2.0), key_dims=(2, 4), heads=2, depth=1, steps=3, networks=2)

    def problem(self, richness: float) -> Problem:
        """Return what is trained at one richness."""
        return problem_of(self, richness=richness)

    def cells(self) -> tuple[Cell, ...]:
        """Return all sizes at every richness."""
        return grid(key_dim=self.key_dims, richness=self.richness)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit at every richness, with and without response functions, and the lazy limit (NTK)."""
        solved = [solve_blocks(self.problem(level)) for level in self.richness]
        without = [solve_blocks(self.problem(level), responses=False) for level in self.richness]
        dims = ("richness", *DIMS["output"])
        found = {
            "output": (dims, np.stack([each.outputs for each in solved])),
            "output_without": (dims, np.stack([each.outputs for each in without])),
            "lazy": (DIMS["output"], ntk_outputs(self.problem(self.richness[0]))),
        }
        return self._label(found).assign_coords(richness=("richness", list(self.richness)))

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size at one richness, from the same weights at every richness.

        The root mean square updates of the limit at this richness are recorded with them.
        """
        problem, network = self.problem(float(cell["richness"])), Network(int(cell["key_dim"]), self.heads)
        trained = train_seeds(problem, network, key, self.networks)
        moved = {name: trained[name].values[:, -1] - trained[name].values[:, 0] for name in ("pooled", "logits")}
        found = {
            name: (("network", *DIMS[name]), value)
            for name, value in (moved | {"output": trained["output"].values}).items()
        }
        solved = solve_blocks(problem)
        logits = [np.stack([look["logits"] for look in solved.observables[moment]]) for moment in (0, -1)]
        updates = {
            "output": solved.outputs - ntk_outputs(self.problem(self.richness[0])),
            "pooled": solved.pooled[-1] - solved.pooled[0],
            "logits": logits[1] - logits[0],
        }
        found |= {f"limit_{name}": ((), np.sqrt((value**2).mean())) for name, value in updates.items()}
        return self._label(found)

    def claims(self) -> tuple[Claim, ...]:
        """Test exponents of the richness in the theory, and networks against the theory at every richness."""
        return (*self._small(), *self._saturation(), *self._networks(), self._single())

    def updates(self, trained: xr.Dataset, name: str) -> np.ndarray:
        """Return root mean square updates of the limit, (richness,)."""
        return along(trained, f"limit_{name}", "richness", key_dim=self.key_dims[0]).mean(0)

    def single_updates(self, trained: xr.Dataset, name: str, key_dim: int) -> np.ndarray:
        """Return root mean square updates of single networks, (replicates, richness)."""
        values = along(trained, name, "richness", key_dim=key_dim)
        return np.sqrt((values**2).reshape(*values.shape[:2], -1).mean(-1))

    def gaps(self, predicted: xr.Dataset, trained: xr.Dataset, name: str = "output") -> np.ndarray:
        """Return how far the mean network is from a solution, (replicates, richness, key_dim)."""
        found = [
            biases(self._at(trained, level), predicted[name].sel(richness=level).values) for level in self.richness
        ]
        return np.stack(found, 1)

    def single_gaps(self, predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
        """Return how far single networks are from the theory, (replicates, richness, key_dim)."""
        found = [
            distances(self._at(trained, level), predicted["output"].sel(richness=level).values)
            for level in self.richness
        ]
        return np.stack(found, 1)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show updates against richness, the distances of networks from theory, and an output over training."""
        return self._updates(trained), self._distances(predicted, trained), self._trajectory(predicted, trained)

    def _at(self, trained: xr.Dataset, level: float) -> np.ndarray:
        return along(trained, "output", "key_dim", richness=level)

    def _label(self, values: dict[str, tuple[tuple[str, ...], np.ndarray]]) -> xr.Dataset:
        steps = ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"})
        variables = {name: (*value, {"long_name": NAMES[name], "units": "1"}) for name, value in values.items()}
        return xr.Dataset(variables, coords={"step": steps})

    def _small(self) -> list[Claim]:
        levels = np.asarray(self.richness)
        small = levels <= SMALL

        def exponent(name: str) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> float:
                update = np.log(self.updates(trained, name))
                return float(np.polyfit(np.log(levels[small]), update[small], 1)[0])

            return measure

        return [
            Claim(
                f"Theory: the {text} scales as gamma0^2 up to gamma0={SMALL}",
                exponent(name),
                quantity="exponent of gamma0",
                target=2.0,
                tolerance=0.1,
                basis=f"the next term is gamma0^4: with a coefficient of 10 it is a tenth at {SMALL}, and moves an "
                "exponent fitted over a decade by less than 0.1",
            )
            for name, text in UPDATES.items()
        ]

    def _saturation(self) -> list[Claim]:
        levels = self.richness

        def exponent(name: str) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> float:
                update = np.log(self.updates(trained, name))
                return float((update[-1] - update[-2]) / np.log(levels[-1] / levels[-2]))

            return measure

        cases = (
            ("output", 1.0, "targets bound it: at most half the power of small gamma0"),
            ("pooled", 1.5, "a product of two equal factors that is gamma0 moves like gamma0: half way there from 2"),
        )
        return [
            Claim(
                f"Theory: from gamma0={levels[-2]:g} on the {UPDATES[name]} grows at most as gamma0^{most:g}",
                exponent(name),
                quantity="exponent of gamma0",
                target=most,
                tolerance=(math.inf, 0.0),
                basis=why,
            )
            for name, most, why in cases
        ]

    def _networks(self) -> list[Claim]:
        largest, width = self.key_dims[-1], self.key_dims[-1] * self.heads

        def share(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            lazy = predicted["lazy"].values
            mean = along(trained, "output", "key_dim", richness=self.richness[0])[:, -1].mean(1)
            return projection(mean, lazy)

        def exponent(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            mild = np.asarray(self.richness) <= 1  # beyond, the smallest networks have not settled
            distances = np.log(self.single_gaps(predicted, trained))[:, mild]  # (replicates, richness, key_dim)
            sizes = np.log(self.key_dims) - np.log(self.key_dims).mean()
            return np.asarray((distances @ sizes / (sizes @ sizes)).mean(-1))

        def control(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            near, far = self.gaps(predicted, trained), self.gaps(predicted, trained, "output_without")
            return np.log(near / far)[..., -1].max(-1)

        return [
            Claim(
                f"Networks: at gamma0={self.richness[0]:g} their mean at N={largest} follows NTK descent (projection)",
                share,
                quantity="projection on NTK descent",
                target=1.0,
                tolerance=width**-0.5,
                basis="a mean of many lies nearer than one network's fluctuation, one over the root of the width",
            ),
            single_network_claim(
                "Networks: up to gamma0=1 the distance of single ones from the theory scales as N^(-1/2) (mean "
                "exponent)",
                exponent,
                "N",
                self.key_dims,
            ),
            nearer_claim(
                f"Networks: at the worst richness their mean at N={largest} is nearer to the theory than to that "
                "without response functions (log ratio)",
                control,
            ),
        ]

    def _single(self) -> Claim:
        smallest = self.key_dims[0]
        return Claim(
            f"In a single network of N={smallest} the update of attention logits scales as gamma0 where gamma0 is "
            "smallest",
            lambda predicted, trained: fit_exponent(
                self.richness[:2], self.single_updates(trained, "logits", smallest)[:, :2]
            ),
            quantity="exponent of gamma0",
            target=1.0,
            tolerance=0.5,
            basis="half way to the square of the limit, which takes over at gamma0 of about (N H)^(-1/2)",
        )

    def _updates(self, trained: xr.Dataset) -> Panel:
        levels = np.asarray(self.richness)
        curves: list[Curve] = []
        for group, (name, label) in enumerate(SHORT.items()):
            values = self.updates(trained, name)
            curves.append(spread_curve(levels, values, f"{label}, theory", "predicted", group))
            if name != "output":
                found = self.single_updates(trained, name, self.key_dims[-1])
                curves.append(spread_curve(levels, found, f"{label}, N={self.key_dims[-1]}", group=group))
        first = float(self.updates(trained, "pooled")[0])
        curves.append(power_curve(self.richness, first, 2.0, "gamma0^2", len(UPDATES)))
        return Lines(
            "Updates against richness",
            "richness gamma0",
            "root mean square",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Single networks: bands range over replicates.",
            shows=("Theory:",),
        )

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        levels = np.asarray(self.richness)
        single = self.single_gaps(predicted, trained)
        curves = [
            spread_curve(levels, single[..., place], f"single, N={size}", group=place)
            for place, size in enumerate(self.key_dims)
        ]
        near, far = self.gaps(predicted, trained), self.gaps(predicted, trained, "output_without")
        largest, count = self.key_dims[-1], len(self.key_dims)
        curves.append(spread_curve(levels, near[..., -1], f"mean, N={largest}", group=count))
        curves.append(spread_curve(levels, far[..., -1], f"mean, N={largest}, no responses", group=count + 1))
        return Lines(
            "Distance of networks from the theory",
            "richness gamma0",
            "root mean square distance of outputs",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means and ranges over replicates. No responses: from the theory without response functions.",
            shows=("distance of single ones",),
        )

    def _trajectory(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        curves = [spread_curve(steps, predicted["lazy"].values[:, 0, 0], "NTK descent", "reference")]
        for group, level in enumerate((self.richness[0], self.richness[-2])):
            theory = predicted["output"].sel(richness=level).values[:, 0, 0]
            label = f"gamma0={level:g}"
            curves.append(spread_curve(steps, theory, f"{label}, theory", "predicted", group))
            found = self._at(trained, level)[:, -1, :, :, 0, 0].mean(1)  # (replicates, step)
            curves.append(spread_curve(steps, found, f"{label}, mean of networks", group=group))
        note = f"Networks of N={self.key_dims[-1]}; bands range over the means of replicates."
        return Lines("Output of the first read-out over training", "updates", "output", tuple(curves), note=note)

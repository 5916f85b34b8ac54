"""`limits/infinite-depth`: convergence of the theory and of networks to a continuum of blocks as L grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.statistics.distances import noise_of_mean
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.dmft.shared.claims import nearer_claim
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
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.branches.uniform_attention import UniformAttention
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.grids.depth import continuum_step
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion

NAMES = {1.0: "1", 0.5: "1/2"}
DIMS = {"output": ("step", "read_out", "class"), "logits": ("sample", "token", "token_too")}
LONG = {
    "output": "outputs over training",
    "logits": "what attention logits have learned, mean over layers and heads",
    "limit_output": "outputs at infinite key dimension",
    "limit_logits": "attention logits at infinite key dimension, mean over layers",
    "limit_size": "root mean square of the attention logits at infinite key dimension",
}
SETTLED = 4  # depth from which corrections to 1/L are small


@dataclass(frozen=True)
class InfiniteDepth(Study):
    """Theory at growing depth L against the continuum, and networks against both.

    At depth exponent 1 the continuum is an ordinary differential equation, solved in cells; at 1/2 attention stays
    uniform, and the equation that closes is extrapolated. The theory at depth L is c_1/L + c_2/L^2 + ... away, so that
    a doubling divides the distance by 2 + c/L + O(1/L^2), and 2 f(2L) - f(L) is better than f(2L). At exponent 1/2
    logits are even in what one block learns, which is of order L^(-1/2): they fall like 1/L, by 2 + c/L a doubling,
    with the same kind of correction. Where training stops in mid-growth c is large, and depths must be larger.
    (Derived here.)

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``, which trains well at ``norm=True, learning_rate=1``.
    depths
        Depths L of the theory and of networks, each twice the one before.
    key_dim, heads
        N and H of the networks.
    continuum_cells
        Of the continuum at exponent 1.
    norm, steps, learning_rate, richness
        Whether streams are normalized, and the training by gradient descent.
    networks
        Networks of one replicate.
    """

    name: ClassVar[str] = "limits/infinite-depth"
    claim: ClassVar[str] = "Infinite depth: attention learns at depth exponent 1 and stays uniform at 1/2"
    source: ClassVar[Source] = bordelon("the limit of infinite depth and figure 5; its equations are derived here")

    task: str = "digits"
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    key_dim: int = 32
    heads: int = 4
    continuum_cells: int = 16
    norm: bool = False
    steps: int = 8
    learning_rate: float = 0.3
    richness: float = 0.75
    networks: int = 16

    def __post_init__(self) -> None:
        levels = self.depths
        if len(levels) < 3 or levels[0] < 1 or any(2 * a != b for a, b in pairwise(levels)):
            raise UsageError(f"depths={levels}: three or more, each twice the one before")
        if min(self.key_dim, self.heads, self.continuum_cells) < 1 or self.networks < 2:
            raise UsageError(
                f"key_dim={self.key_dim}, heads={self.heads}, continuum_cells={self.continuum_cells}, "
                f"networks={self.networks}: from 1, 1, 1 and 2"
            )
        self.problem(1.0, 1)

    @classmethod
    def full(cls) -> InfiniteDepth:
        """Return the study with deeper networks, and more of them."""
        return cls(depths=(1, 2, 4, 8, 16, 32, 64), networks=32)

    @classmethod
    def small(cls) -> InfiniteDepth:
        """Return the smallest configuration in which every claim can change."""
        return cls(depths=(4, 8, 16), key_dim=2, heads=2, continuum_cells=2, steps=3, networks=2)

    def problem(self, exponent: float, depth: int) -> Problem:
        """Return what is trained at one exponent and depth: two samples, so that the theory of many layers fits."""
        tests = {"tests": 0} if self.task == "digits" else {}
        return problem_of(self, samples=2, depth=depth, depth_exponent=exponent, **tests)

    def cells(self) -> tuple[Cell, ...]:
        """Return both exponents at every depth of networks."""
        return grid(depth_exponent=tuple(NAMES), depth=self.depths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the continuum at both exponents, and the largest finite depth without response functions."""
        continuum = np.stack([self._continuum(exponent) for exponent in NAMES])
        deepest = [self.problem(exponent, self.depths[-1]) for exponent in NAMES]
        without = np.stack([solve_blocks(problem, responses=False).outputs for problem in deepest])
        dims = ("depth_exponent", *DIMS["output"])
        about = {"continuum": "outputs at infinite depth", "without": "outputs of the largest depth without responses"}
        variables = {
            name: (dims, value, {"long_name": about[name], "units": "1"})
            for name, value in (("continuum", continuum), ("without", without))
        }
        return xr.Dataset(variables, coords={"depth_exponent": list(NAMES), "step": self._steps()})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Solve one finite depth at infinite key dimension, and train some networks of that depth.

        Embeddings and read-outs of networks are the same at every depth.
        """
        problem = self.problem(float(cell["depth_exponent"]), int(cell["depth"]))
        solved = solve_blocks(problem)
        shown = np.stack([look["logits"] for look in solved.observables[-1]])  # (layer, P, T, T)
        trained = train_seeds(problem, Network(self.key_dim, self.heads), key, self.networks)
        logits = trained["logits"].values.mean(2)  # over layers
        found = {
            "output": (("network", *DIMS["output"]), trained["output"].values),
            "logits": (("network", *DIMS["logits"]), logits[:, -1] - logits[:, 0]),
            "limit_output": (DIMS["output"], solved.outputs),
            "limit_logits": (DIMS["logits"], shown.mean(0)),
            "limit_size": ((), np.sqrt((shown**2).mean())),
        }
        variables = {name: (*value, {"long_name": LONG[name], "units": "1"}) for name, value in found.items()}
        return xr.Dataset(variables, coords={"step": self._steps()})

    def claims(self) -> tuple[Claim, ...]:
        """Test how the theory converges to the continuum, and networks against both."""
        orders = [self._orders(exponent, f"Theory at depth exponent {name}") for exponent, name in NAMES.items()]
        networks = [self._networks(exponent, f"Networks at depth exponent {name}") for exponent, name in NAMES.items()]
        return tuple(claim for pair in zip(orders, networks, strict=True) for claims in pair for claim in claims)

    def distances_of_theory(
        self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how far f(L), and 2 f(2L) - f(L), are from the continuum: (depths,) and (depths - 1,)."""
        outputs = self._theory(trained, "limit_output", exponent)
        limit = predicted["continuum"].sel(depth_exponent=exponent).values
        return _rms(outputs - limit), _rms(2 * outputs[1:] - outputs[:-1] - limit)

    def learned_shares(self, trained: xr.Dataset, exponent: float) -> np.ndarray:
        """Return how much of the theory's logits the mean of networks has learned, (replicates, depths)."""
        moved = along(trained, "logits", "depth", depth_exponent=exponent).mean(2)
        wanted = self._theory(trained, "limit_logits", exponent)
        return np.stack([projection(moved[:, place], wanted[place]) for place in range(len(wanted))], -1)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show distances from the continuum and logits against depth."""
        distances = (self._distances(predicted, trained, exponent) for exponent in NAMES)
        return (*distances, self._logits(trained))

    def _continuum(self, exponent: float) -> np.ndarray:
        """Return outputs (S, O, C) at infinite depth."""
        if exponent == 1:
            problem, start = self.problem(exponent, 1), np.random.default_rng(0)
            layers = [[InfiniteKeyDimAttention().start(problem, start)] for _ in range(self.continuum_cells)]
            return solve_recursion(problem, layers, continuum_step(problem, self.continuum_cells)).outputs
        closed = [solve_blocks(self.problem(exponent, L), (UniformAttention(),)).outputs for L in self.depths[-3:]]
        return (8 * closed[2] - 6 * closed[1] + closed[0]) / 3  # Richardson's extrapolation, twice: 1/L and 1/L^2 go

    def _steps(self) -> tuple[str, np.ndarray, dict[str, str]]:
        return "step", np.arange(self.steps), {"long_name": "updates", "units": "1"}

    def _theory(self, trained: xr.Dataset, name: str, exponent: float) -> np.ndarray:
        """Return what is solved at every depth, (depths, ...): the same in all replicates."""
        return along(trained, name, "depth", depth_exponent=exponent).mean(0)

    def _orders(self, exponent: float, who: str) -> list[Claim]:
        left = (2 / self.depths[-3]) ** 2
        basis = (
            "a ratio is 2 + c/L + e/L^2: of the last two, extrapolated, e/(2 L^2) is left at "
            f"L={self.depths[-3]}, |e| up to 8"
        )

        def gain(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            plain, better = self.distances_of_theory(predicted, trained, exponent)
            return float(np.log(better / plain[1:])[self._settled()].max())

        def sizes(trained: xr.Dataset) -> np.ndarray:
            return self._theory(trained, "limit_size", exponent)

        if exponent == 1:
            logits = Claim(
                f"{who}: the attention logits are independent of depth (ratio of the last doubling)",
                lambda predicted, trained: sizes(trained)[-1] / sizes(trained)[-2],
                quantity="logits, ratio of the last doubling",
                target=1.0,
                tolerance=2 / self.depths[-2],
                basis=f"a correction c/L, |c| up to 4, changes by c/(2 L) at L={self.depths[-2]}",
            )
        else:
            logits = Claim(
                f"{who}: attention stays uniform, its logits scale as 1/L (last two ratios, extrapolated)",
                lambda predicted, trained: _ratio(sizes(trained)),
                quantity="logits, ratio of a doubling of depth",
                target=2.0,
                tolerance=left,
                basis=basis,
            )
        return [
            Claim(
                f"{who}: the distance from the continuum scales as 1/L (last two ratios, extrapolated)",
                lambda predicted, trained: _ratio(self.distances_of_theory(predicted, trained, exponent)[0]),
                quantity="distances, ratio of a doubling of depth",
                target=2.0,
                tolerance=left,
                basis=basis,
            ),
            Claim(
                f"{who}: from L={SETTLED}, 2 f(2L) - f(L) is nearer to the continuum than f(2L) (largest log ratio)",
                gain,
                quantity="extrapolated over plain distance (ln)",
                target=0.0,
                tolerance=(math.inf, 0.0),
                basis="extrapolation leaves c_2/(2 L^2) of c_1/(2 L) + c_2/(4 L^2)",
            ),
            logits,
        ]

    def _settled(self) -> np.ndarray:
        """Return which pairs of depths L, 2L count in claims about all of them, (depths - 1,)."""
        shallow = np.asarray(self.depths[:-1])
        return shallow >= min(SETTLED, shallow[-1])

    def _networks(self, exponent: float, who: str) -> list[Claim]:
        first, last = self.depths[0], self.depths[-1]

        def outputs(trained: xr.Dataset) -> np.ndarray:
            return along(trained, "output", "depth", depth_exponent=exponent)  # (replicates, depths, networks, ...)

        def theory(trained: xr.Dataset) -> np.ndarray:
            return self._theory(trained, "limit_output", exponent)  # (depths, ...)

        def width(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
            return fit_exponent(self.depths, distances(outputs(trained), theory(trained)[:, None]))

        def change(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            found, wanted = outputs(trained), theory(trained)
            return projection(found[:, 0].mean(1) - found[:, -1].mean(1), wanted[0] - wanted[-1])

        def approach(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            limit = predicted["continuum"].sel(depth_exponent=exponent).values
            return np.diff(np.log(biases(outputs(trained), limit)[:, [0, -1]]))[:, 0]

        def learned(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            shares, depths = self.learned_shares(trained, exponent), np.log(self.depths) - np.log(self.depths).mean()
            return np.asarray(shares @ depths / (depths @ depths) / shares.mean(-1))

        def control(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            without = predicted["without"].sel(depth_exponent=exponent).values
            near, far = (biases(outputs(trained)[:, [-1]], one)[:, 0] for one in (theory(trained)[-1], without))
            return np.log(near / far)

        return [
            Claim(
                f"{who}: the distance of single networks from the theory at their depth scales as L^0",
                width,
                quantity="exponent of L",
                target=0.0,
                tolerance=0.25,
                basis="it is that of finite width; half way to the power 1/2 of noise that adds up over blocks",
            ),
            Claim(
                f"{who}: from L={first} to L={last} the mean network changes as the theory predicts (share)",
                change,
                quantity="share of the predicted change",
                target=1.0,
                tolerance=0.5,
                basis="half way to networks that do not depend on depth",
            ),
            nearer_claim(
                f"{who}: the mean network is nearer to the continuum at L={last} than at L={first} (log ratio)",
                approach,
            ),
            Claim(
                f"{who}: from L={first} to L={last} the learned logits of the mean network follow the theory "
                "(exponent of L in their ratio)",
                learned,
                quantity="exponent of L in measured over predicted",
                target=0.0,
                tolerance=0.25,
                basis="corrections of relative size 1/N are those of every depth; half way to a power of 1/2",
            ),
            nearer_claim(
                f"{who}: at L={last} the mean network is nearer to the theory than to the theory without responses "
                "(log ratio)",
                control,
            ),
        ]

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> Panel:
        plain, better = self.distances_of_theory(predicted, trained, exponent)
        outputs = along(trained, "output", "depth", depth_exponent=exponent)
        limit = predicted["continuum"].sel(depth_exponent=exponent).values
        curves = (
            spread_curve(self.depths, plain, "theory, f(L)", "predicted", 0),
            spread_curve(self.depths[1:], better, "theory, 2 f(L) - f(L/2)", "predicted", 1),
            spread_curve(self.depths, biases(outputs, limit), "mean of networks", group=0),
            spread_curve(self.depths, self._noise(outputs), "its standard error", group=2),
            power_curve(self.depths, plain[-1] * self.depths[-1] / self.depths[0], -1.0, "1/L", 3),
        )
        return Lines(
            f"Distance of outputs from the continuum, depth exponent {NAMES[exponent]}",
            "depth L",
            "root mean square distance",
            curves,
            log_x=True,
            log_y=True,
            note=f"Networks of N={self.key_dim}, H={self.heads}: means over a replicate; bands range over replicates. "
            "A distance below the standard error is noise.",
            shows=(f"depth exponent {NAMES[exponent]}: the distance from the continuum",),
        )

    def _noise(self, outputs: np.ndarray) -> np.ndarray:
        """Return the standard error of the mean network of every replicate and depth, (replicates, depths)."""
        return np.sqrt(noise_of_mean(outputs.reshape(*outputs.shape[:3], -1)))

    def _logits(self, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        for group, (exponent, name) in enumerate(NAMES.items()):
            size = _rms(self._theory(trained, "limit_logits", exponent))
            curves.append(spread_curve(self.depths, size, f"theory, exponent {name}", "predicted", group))
            found = self.learned_shares(trained, exponent)
            curves.append(spread_curve(self.depths, found * size, f"networks, exponent {name}", group=group))
        first = curves[2].y[-1] * self.depths[-1] / self.depths[0]
        curves.append(power_curve(self.depths, first, -1.0, "1/L", len(curves)))
        return Lines(
            "Attention logits at the end, mean over layers",
            "depth L",
            "root mean square",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Networks: mean of a replicate, projected on the theory; bands range over replicates.",
            shows=("logits are independent", "attention stays uniform"),
        )


def _rms(values: np.ndarray) -> np.ndarray:
    """Root mean square over all axes but the first."""
    return np.asarray(np.sqrt((values**2).reshape(len(values), -1).mean(-1)))


def _ratio(values: np.ndarray) -> float:
    """Return the ratio of a doubling, extrapolated from the last two."""
    ratios = values[:-1] / values[1:]
    return float(2 * ratios[-1] - ratios[-2])

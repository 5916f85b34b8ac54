"""`limits/infinite-key-dim`: networks of growing key dimension against the mean-field theory of their training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.coordinates import finite_size_bias
from manyheads.limits.ensembles import Network, train_networks
from manyheads.limits.problems import digits_problem, text_problem
from manyheads.limits.studies.shared import TASKS, bordelon
from manyheads.limits.theory.attention_limit import AttentionLimit
from manyheads.limits.theory.marching import March, blocks_in_depth, march
from manyheads.limits.theory.problem import Problem
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Panel, Source, Study, Verdict, grid, spread_curve

QUANTITIES = {
    "output": "outputs over training",
    "logits": "attention logits at the end",
    "pooled": "kernel of the read-outs at the end",
}


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
        Whether streams are normalised.
    steps, rate, richness, momentum
        Of the training by gradient descent.
    networks
        Networks of one replicate.
    """

    name: ClassVar[str] = "limits/infinite-key-dim"
    claim: ClassVar[str] = "training converges to its mean-field theory as the key dimension grows, whatever the heads"
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
    rate: float = 0.25
    richness: float = 0.75
    momentum: float = 0.0
    networks: int = 16

    def __post_init__(self) -> None:
        if len(self.key_dims) < 2 or list(self.key_dims) != sorted(set(self.key_dims)) or self.key_dims[0] < 1:
            raise UsageError(f"key_dims={self.key_dims}: give two or more sizes, in rising order")
        if not self.heads_counts or min(self.heads_counts) < 1 or self.networks < 2:
            raise UsageError(f"heads_counts={self.heads_counts}, networks={self.networks}: from 1 head and 2 networks")
        self.problem()

    @classmethod
    def full(cls) -> InfiniteKeyDim:
        """Return the study with four blocks, larger networks, and more of them."""
        return cls(key_dims=(4, 16, 64, 256), depth=4, networks=32)

    def problem(self) -> Problem:
        """Return what is trained."""
        return _problem(
            self.task, self.steps, self.rate, self.richness, self.depth, self.depth_exponent, self.norm, self.momentum
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return all sizes with all numbers of heads."""
        return grid(key_dim=self.key_dims, heads=self.heads_counts)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit, and, to see what they are worth, the same equations without their response functions."""
        problem = self.problem()
        solved, without = (_solve(problem, responses) for responses in (True, False))
        found = _last(solved) | {"output_without": without.outputs}
        dims = _dims() | {"output_without": ("step", "read_out", "class")}
        names = QUANTITIES | {"output_without": "outputs without response functions"}
        return xr.Dataset(
            {name: (dims[name], value, {"long_name": names[name], "units": "1"}) for name, value in found.items()},
            coords={"step": ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"})},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size, and keep what the limit predicts about each."""
        network = Network(int(cell["key_dim"]), int(cell["heads"]))
        seeds = np.random.default_rng(np.asarray(jax.random.key_data(key))).integers(0, 2**31, self.networks)
        trained = train_networks(self.problem(), network, seeds.tolist(), chunk=self.networks)
        found = {
            "output": trained["output"].values,
            "logits": trained["logits"].values[:, -1],
            "pooled": trained["pooled"].values[:, -1],
        }
        variables = {
            name: (("network", *_dims()[name]), value, {"long_name": QUANTITIES[name], "units": "1"})
            for name, value in found.items()
        }
        ends = trained["logit_variance"].values[:, [0, -1]].mean(-1)  # (network, 2), mean over layers
        for place, when in enumerate(("start", "end")):
            about = {"long_name": f"variance of the logits over heads at the {when}", "units": "1"}
            variables[f"variance_{when}"] = (("network",), ends[:, place], about)
        steps = ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"})
        return xr.Dataset(variables, coords={"step": steps})

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Fit powers of N to the distance of single networks, and hold the mean network against both solutions."""
        bias = -finite_size_bias(self.key_dims)
        basis = f"a correction 1 + N^(-1/2) moves the power by {bias:.2f} over these sizes"
        verdicts = []
        for heads in self.heads_counts:
            who = f"{heads} head" + "s" * (heads > 1)
            for name in QUANTITIES:
                fit = fit_exponent(self.key_dims, self.distances(predicted, trained, name, heads))
                verdicts.append(
                    Verdict.from_interval(
                        f"{who}: the {QUANTITIES[name]} of single networks lie N^(-1/2) from the limit",
                        fit.interval,
                        figure=fit.exponent,
                        target=-0.5,
                        tolerance=bias,
                        basis=basis,
                    )
                )
            near, far = self.biases(predicted, trained, heads)
            verdicts.append(
                Verdict.from_samples(
                    f"{who}: at N={self.key_dims[-1]} the mean network is nearer to the limit than without responses",
                    np.log(near / far),
                    target=0.0,
                    tolerance=(float("inf"), 0.0),
                    basis="the logarithm of a ratio of distances is negative where the first is the smaller one",
                )
            )
            if heads > 1:
                verdicts += [self._variance(trained, heads, when, bias, basis) for when in ("start", "end")]
        return tuple(verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show one output over training at every size, and the distances against size."""
        return self._course(predicted, trained), self._distances(predicted, trained)

    def distances(self, predicted: xr.Dataset, trained: xr.Dataset, name: str, heads: int) -> np.ndarray:
        """Return root mean square distances of single networks from the limit, (replicates, sizes)."""
        values = self._along(trained, name, heads)  # (replicates, sizes, networks, ...)
        gaps = (values - predicted[name].values) ** 2
        return np.sqrt(gaps.reshape(*gaps.shape[:2], -1).mean(-1))

    def biases(self, predicted: xr.Dataset, trained: xr.Dataset, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how far the mean network of a replicate is from either solution at the largest N, (replicates,)."""
        mean = self._along(trained, "output", heads)[:, -1].mean(1)  # (replicates, step, read_out, class)
        gaps = [mean - predicted[name].values for name in ("output", "output_without")]
        near, far = (np.sqrt((gap**2).reshape(len(gap), -1).mean(-1)) for gap in gaps)
        return near, far

    def _along(self, trained: xr.Dataset, name: str, heads: int) -> np.ndarray:
        places = np.flatnonzero(trained["heads"].values == heads)
        places = places[np.argsort(trained["key_dim"].values[places])]
        return trained[name].isel(cell=places).transpose("replicate", "cell", "network", ...).values

    def _variance(self, trained: xr.Dataset, heads: int, when: str, bias: float, basis: str) -> Verdict:
        fit = fit_exponent(self.key_dims, self._along(trained, f"variance_{when}", heads).mean(-1))
        return Verdict.from_interval(
            f"{heads} heads: logits vary over heads like N^-1 at the {when} of training",
            fit.interval,
            figure=fit.exponent,
            target=-1.0,
            tolerance=2 * bias,
            basis=basis + ", and that of a square by twice as much",
        )

    def _course(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        curves = [
            Curve(tuple(map(float, steps)), tuple(predicted["output"].values[:, 0, 0].tolist()), "limit", "predicted")
        ]
        for group, size in enumerate(self.key_dims):
            place = self.key_dims.index(size)
            values = self._along(trained, "output", self.heads_counts[-1])[
                :, place, :, :, 0, 0
            ]  # (replicates, nets, step)
            curves.append(spread_curve(steps, values.reshape(-1, self.steps), f"N={size}", group=group))
        note = f"Networks with H={self.heads_counts[-1]}; bands reach over all of them."
        return Lines("Output of the first read-out over training", "updates", "output", tuple(curves), note=note)

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        sizes = np.asarray(self.key_dims, float)
        for heads in self.heads_counts:
            for name, text in QUANTITIES.items():
                values = self.distances(predicted, trained, name, heads)
                label = f"{text.removesuffix(' at the end').removesuffix(' over training')}, H={heads}"
                curves.append(spread_curve(sizes, values, label, group=len(curves)))
        start = curves[0].y[0]
        guide = start * (sizes / sizes[0]) ** -0.5
        curves.append(Curve(tuple(sizes.tolist()), tuple(guide.tolist()), "N^(-1/2)", "reference", len(curves)))
        return Lines(
            "Distance of single networks from the limit",
            "key dimension N",
            "root mean square distance",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means over replicates, bands reach over all.",
        )


@lru_cache(maxsize=8)
def _problem(
    task: str, steps: int, rate: float, richness: float, depth: int, exponent: float, norm: bool, momentum: float
) -> Problem:
    if task not in TASKS:
        raise UsageError(f"task={task!r}: choose one of {', '.join(TASKS)}")
    make = digits_problem if task == "digits" else text_problem
    fields = {"steps": steps, "rate": rate, "richness": richness, "depth": depth, "momentum": momentum}
    return make(depth_exponent=exponent, norm=norm, **fields)  # type: ignore[arg-type]


def _solve(problem: Problem, responses: bool) -> March:
    processes = [[AttentionLimit().start(problem, np.random.default_rng(0))] for _ in range(problem.depth)]
    return march(problem, processes, blocks_in_depth(problem), responses=responses)


def _last(solved: March) -> dict[str, np.ndarray]:
    logits = np.stack([look["logits"] for look in solved.looks[-1]])
    return {"output": solved.outputs, "logits": logits, "pooled": solved.pooled[-1]}


def _dims() -> dict[str, tuple[str, ...]]:
    return {
        "output": ("step", "read_out", "class"),
        "logits": ("layer", "sample", "token", "token_too"),
        "pooled": ("read_out", "read_out_too"),
    }

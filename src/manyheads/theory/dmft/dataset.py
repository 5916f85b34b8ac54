"""Solution of the recursion in time, and its labelled dataset with an error beside every variable that has one.

Outputs, losses and kernels of every moment, two-time functions if asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from manyheads._extras import Figure, pd
from manyheads._overview import Overview
from manyheads.theory.dmft.branches.attention_infinite_heads import QUANTILES
from manyheads.theory.dmft.grids.coarse_grid import TimeGrid
from manyheads.theory.dmft.problem import Problem


@dataclass
class Trajectory:
    """The solution in time: S moments, B layers."""

    outputs: np.ndarray  # f (S, O, C)
    losses: np.ndarray  # (S,)
    stream: np.ndarray  # <h^l h^l>/d at equal times (S, B + 1, PT, PT), the last level above the last layer
    backward: np.ndarray  # <g^l g^l>/d likewise
    pooled: np.ndarray  # kernel of the read-outs (S, O, O)
    observables: list[list[dict[str, np.ndarray]]] = field(default_factory=list)  # of every moment and layer
    two_time: dict[str, np.ndarray] = field(default_factory=dict)  # correlations and responses (B, n, n), if asked for

    @staticmethod
    def zeros(problem: Problem, layers: int) -> "Trajectory":
        """Return a trajectory of zeros over the moments of a problem."""
        steps, rows, outputs = problem.steps, problem.rows, problem.outputs
        return Trajectory(
            outputs=np.zeros((steps, outputs, problem.classes)),
            losses=np.zeros(steps),
            stream=np.zeros((steps, layers + 1, rows, rows)),
            backward=np.zeros((steps, layers + 1, rows, rows)),
            pooled=np.zeros((steps, outputs, outputs)),
        )

    def record(
        self,
        moment: int,
        output: np.ndarray,
        loss: float,
        kernels: tuple[list[np.ndarray], list[np.ndarray], np.ndarray],
        observables: list[dict[str, np.ndarray]],
    ) -> None:
        """Write the solution at one moment, of the kernels those of stream, backward variable and read-outs."""
        self.outputs[moment], self.losses[moment] = output, loss
        self.stream[moment], self.backward[moment], self.pooled[moment] = kernels
        self.observables.append(observables)

    def until(self, moments: int) -> "Trajectory":
        """Return the first moments, without functions of two times."""
        names = ("outputs", "losses", "stream", "backward", "pooled", "observables")
        return Trajectory(**{name: getattr(self, name)[:moments] for name in names})


# Dimensions after the step, and what a reader calls it.
VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "output": (("read_out", "class"), "output"),
    "loss": ((), "training loss"),
    "stream": (("level", "row", "row_too"), "kernel of the residual stream"),
    "backward": (("level", "row", "row_too"), "kernel of the backward variable"),
    "pooled": (("read_out", "read_out_too"), "kernel of what is read out"),
    "logits": (("layer", "sample", "token", "key"), "attention logits, mean over heads"),
    "logit_variance": (("layer", "sample", "token", "key"), "variance of attention logits over heads"),
    "logit_quantiles": (("layer", "sample", "token", "key", "quantile"), "quantiles of attention logits over heads"),
    "attention": (("layer", "sample", "token", "key"), "attention pattern, mean over heads"),
}
# Functions of two times, kept with keep="two-time": dimensions (layer, step, row, step_too, row_too).
TWO_TIME = {
    "correlation": "correlation of the stream below a layer, as its branches see it",
    "backward_correlation": "correlation of the backward variable above a layer",
    "response": "response of what a layer writes to the backward variable above it",
    "backward_response": "response of what a layer sends back to the stream below it",
}
OBSERVED = ("logits", "logit_variance", "logit_quantiles", "attention")  # by the branches that have them
# Two grids, one of three times as long intervals, differ by 3 - 1 errors of the finer one at first order, by 9 - 1 at
# second. Intervals are of second order, but not where weights in the loss change with every step, nor for backward
# variables, which are dressed with the mean errors of the half interval ahead, nor while features move far within the
# longer intervals; so no more than first order is claimed. In 350 solutions (six kinds of problem, 44 to 110 steps,
# intervals of 3 to 27) the root mean square error was a tenth to a quarter of the claim in the middle. It was at most
# 0.9 of it for problems whose weights stay, and up to 1.7 times it, in one of a hundred, where they change; that of the
# loss, one number a step, for which the two grids can cross, was up to 1.8 times its claim.
ERRORS = 3.0 - 1.0


def label(
    halves: list[Trajectory], grid: TimeGrid, coarse: list[Trajectory] | None = None, coarser: TimeGrid | None = None
) -> xr.Dataset:
    """Return the mean of two halves, or the one trajectory, at the steps that a grid shows.

    The dataset is over `step`, with an error `<name>_error` beside every variable that has one: half the difference of
    the halves, half that of the grids (between moments interpolated), or the root of the sum of their squares.
    They are estimates and no bounds: of an error in the root mean square over many entries, not of every entry.
    """
    steps, found = _at_shown_steps(halves, grid)
    errors = {name: np.zeros_like(values[0]) for name, values in found.items()}
    if len(halves) == 2:
        errors = {name: np.abs(values[0] - values[1]) / 2 for name, values in found.items()}
    if coarse is not None and coarser is not None:
        nodes, rough = _at_shown_steps(coarse, coarser)
        common = np.intersect1d(steps, nodes)
        for name, values in found.items():
            fine, other = (np.mean(each, axis=0) for each in (values, rough[name]))
            gap = np.abs(fine[np.isin(steps, common)] - other[np.isin(nodes, common)])
            errors[name] = np.hypot(errors[name], _interpolate(common, gap / ERRORS, steps))
    variables: dict[str, Any] = {}
    known = len(halves) == 2 or coarse is not None
    for name, values in found.items():
        axes, long_name = VARIABLES[name]
        mean = np.mean(values, axis=0)
        variables |= _variable(name, ("step", *axes), mean, errors[name] if known else None, long_name)
    if all(half.two_time for half in halves):
        variables |= _two_time(halves, grid.problem)
    coords = {"step": ("step", steps, {"long_name": "updates", "units": "1"})}
    if "logit_quantiles" in variables:
        coords["quantile"] = ("quantile", np.array(QUANTILES), {"long_name": "share of heads below", "units": "1"})
    attrs = {"learning_rate": grid.problem.learning_rate, "richness": grid.problem.richness}
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def _variable(name: str, dims: Any, mean: np.ndarray, error: np.ndarray | None, long_name: str) -> dict[str, Any]:
    """Label a variable, and its error where one is known."""
    found = {name: (dims, mean, {"long_name": long_name, "units": "1"})}
    if error is not None:
        found[f"{name}_error"] = (dims, error, {"long_name": f"error of the {long_name}", "units": "1"})
    return found


def _two_time(halves: list[Trajectory], problem: Problem) -> dict[str, Any]:
    """Return the functions of two times, and half the difference of two halves as their errors."""
    attending = len([each for each in halves[0].observables[0] if each])  # layers with logits; an MLP has none
    layer = "layer" if attending == len(halves[0].observables[0]) else "branch"
    dims, times = (layer, "step", "row", "step_too", "row_too"), (problem.steps, problem.rows)
    variables: dict[str, Any] = {}
    for name, long_name in TWO_TIME.items():
        values = [half.two_time[name].reshape(-1, *times, *times) for half in halves]
        error = np.abs(values[0] - values[1]) / 2 if len(values) == 2 else None
        variables |= _variable(name, dims, np.mean(values, axis=0), error, long_name)
    return variables


def _at_shown_steps(halves: list[Trajectory], grid: TimeGrid) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
    """Return the steps that are shown, and every variable of every trajectory there."""
    places = grid.shown[grid.shown < len(halves[0].losses)]
    found = [_arrays(one) for one in halves]
    return grid.times[places], {name: [arrays[name][places] for arrays in found] for name in found[0]}


def _interpolate(nodes: np.ndarray, values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Interpolate values (nodes, ...) linearly to steps."""
    right = np.clip(np.searchsorted(nodes, steps), 1, max(len(nodes) - 1, 1))
    if len(nodes) == 1:
        return np.broadcast_to(values, (len(steps), *values.shape[1:]))
    share = ((steps - nodes[right - 1]) / (nodes[right] - nodes[right - 1])).reshape(-1, *[1] * (values.ndim - 1))
    return (1 - share) * values[right - 1] + share * values[right]


def _arrays(half: Trajectory) -> dict[str, np.ndarray]:
    names = {"output": "outputs", "loss": "losses", "stream": "stream", "backward": "backward", "pooled": "pooled"}
    arrays = {name: getattr(half, field) for name, field in names.items()}
    for name in OBSERVED:
        shown = [[layer[name] for layer in layers if name in layer] for layers in half.observables]
        if shown[0]:
            arrays[name] = np.array(shown)
    return arrays


SHOWN = 6  # steps in a `repr`


class _Plots(xr.Dataset.plot):  # type: ignore[misc,valid-type]  # the methods of Dataset.plot, such as scatter
    def __call__(self, *arguments: Any, **options: Any) -> "Figure":
        """Draw the training loss against the step, with its error as a band."""
        from manyheads.study.panels import Curve, Lines
        from manyheads.study.reporting.charts import draw_titled

        solved = self._ds
        loss, error = (np.asarray(each, float) for each in _losses(solved))
        steps, low, high = (tuple(each.tolist()) for each in (solved["step"].values * 1.0, loss - error, loss + error))
        curve = Curve(steps, tuple(loss.tolist()), "", low=low, high=high)
        return draw_titled(Lines("Training loss in the limit", "step", "loss", (curve,)))


class Solution(xr.Dataset):
    """A dataset over `step`: `repr` shows the loss, `plot()` draws it; everything else is xarray's."""

    __slots__ = ()

    @property
    def plot(self) -> _Plots:  # type: ignore[override]
        """Plots: ``plot()`` draws the loss, the methods are those of every dataset."""
        return _Plots(self)

    def to_dataframe(self, dim_order: Any = None) -> "pd.DataFrame":
        """Return losses and outputs by step; of a part without a loss everything, as other datasets do."""
        kept = {"step", "read_out", "class"}
        names = [name for name, each in self.data_vars.items() if kept.issuperset(each.dims) or "loss" not in self]
        return xr.Dataset.to_dataframe(self[names], dim_order)

    def __repr__(self) -> str:
        """Return a few losses, and the names of the variables with their dimensions."""
        if "loss" not in self or self["loss"].dims != ("step",):
            return str(super().__repr__())
        loss, error = _losses(self)
        steps = self["step"].values
        chosen = np.unique(np.linspace(0, len(steps) - 1, min(SHOWN, len(steps))).astype(int))
        rows = [(int(steps[place]), float(loss[place]), float(error[place])) for place in chosen]
        names = [
            f"{name} {tuple(each.dims)}" for name, each in self.data_vars.items() if not str(name).endswith("_error")
        ]
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        title = f"Solution of a limit at {len(steps)} steps: {sizes}"
        return Overview(title, ("step", "loss", "error"), rows, (f"variables: {', '.join(names)}",)).text()


def _losses(solved: xr.Dataset) -> tuple[Any, Any]:
    """Return the losses and their errors, zero where nothing is sampled."""
    loss = solved["loss"].values
    return loss, solved["loss_error"].values if "loss_error" in solved else np.zeros_like(loss)

"""Error control of the DMFT solver: cost estimate, recursion, more samples or a finer grid until the tolerance is met.

Where a branch is sampled the recursion runs twice with independent samples (halves): the mean of the two is returned,
half their difference is their error, and samples are doubled until the tolerance is met. A long training on a coarse
grid is solved on a grid of three times as long intervals as well, and their difference estimates the error of the grid
(`dataset`). Half of the tolerance is then left to samples, whose noise is in the difference of the grids as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError
from manyheads.study.execution.progress import announce
from manyheads.theory.dmft.branches.branch import Branch
from manyheads.theory.dmft.dataset import Trajectory, label
from manyheads.theory.dmft.grids.coarse_grid import TimeGrid, check_every
from manyheads.theory.dmft.grids.depth import DepthStep, continuum_step, extrapolate, finite_depth_step
from manyheads.theory.dmft.options import Request, Sampling
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion

WORTH_SAYING = 5.0  # seconds from which a solution is announced
CONTINUUM = ", or solve the continuum in depth (`infinite_depth`), which keeps no sources of layers"
MORE_SAMPLES = (
    "outputs are not known to the error that was asked for, and {samples} samples are more than `most`, `memory` or "
    "`seconds` allow: raise them, or take a smaller richness or fewer steps; `partial` is what was solved"
)
FINER_GRID = (
    "outputs on intervals of up to {every} steps are not known to the error that was asked for, or to any where longer "
    "ones diverge: take a smaller `every`, or ask for an error with `Sampling.tolerance` and allow the `memory` and "
    "`seconds` of more short intervals; `partial` is what was solved"
)
EVERY = tuple(3**power for power in range(1, 8))  # intervals that a refusal offers


# Multiplications, each with an addition, that one core does in a second: fitted to solutions over 512 rows on one core
# of a shared AMD EPYC server. Another machine has another figure, by a factor of a few; times below a second are
# governed by other things.
SPEED = 1.6e10


@dataclass(frozen=True)
class CostEstimate:
    """Memory in bytes and multiplications of one trajectory.

    With n = S P T rows and B layers the stream keeps its coefficients on all sources, the last two levels of all
    moments among them, (4 B^2 + 4 B) n^2 numbers with the sources of the layers and (2 B + 1) n (PT + C) without,
    besides two or four n x n kernels a layer and what branches keep.
    """

    memory: float
    multiplications: float

    @property
    def seconds(self) -> float:
        """Seconds of one core, to a factor of two or so on the machine where `SPEED` was fitted."""
        return self.multiplications / SPEED

    @staticmethod
    def of(
        problem: Problem,
        block: Sequence[Sequence[Branch]],
        blocks: int,
        depth_step: DepthStep,
        *,
        two_time: bool = False,
    ) -> "CostEstimate":
        """Estimate the cost of one trajectory through so many blocks; of a long training, through its grid."""
        n, count = float(problem.steps * problem.rows), float(len(block) * blocks)
        sourced = depth_step.sources
        width = problem.rows + problem.classes + (2 * count * n if sourced else 0)
        read = float(problem.steps * problem.outputs)
        numbers = ((2 * count + 1) * n + read) * width  # z and g of all layers, g at the bottom, what is read out
        numbers += 6 * problem.rows * width  # rows in hand
        numbers += (4 if sourced else 2) * count * n**2 + 2 * (count + 1) * n * problem.rows
        numbers += 6 * count * n**2 if two_time else 0  # responses, and the functions of another half
        # Every row is multiplied with the covariances of the sources, and with the rows of all earlier moments.
        work = 2 * count * n**2 * (width + (count * n if sourced else 0))
        for layer in block:
            for branch in layer:
                kept, done = branch.cost(problem)
                numbers, work = numbers + blocks * kept, work + blocks * done
        return CostEstimate(8 * numbers, depth_step.sweeps * work)


@final
@dataclass(frozen=True)
class _Task:
    """One trajectory to be solved, or its two halves: independent samples."""

    grid: TimeGrid
    block: list[list[Branch]]  # the layers of one block, or of one cell
    blocks: int
    depth_step: DepthStep
    request: Request

    @staticmethod
    def of(request: Request, grid: TimeGrid) -> "_Task":
        """Lay out branches: in depth one after the other, in a cell those of a block side by side."""
        problem, cells, samples = grid.moments, request.cells, request.sampling.samples
        sized = [branch.sized(problem, samples, request.factor) for branch in request.branches]
        if cells is None:
            return _Task(grid, [[branch] for branch in sized], problem.depth, finite_depth_step(problem), request)
        return _Task(grid, [sized], cells, continuum_step(problem, cells), request)

    def cost(self, grid: TimeGrid) -> CostEstimate:
        """Estimate the cost of one trajectory through a grid."""
        two_time = self.request.two_time
        return CostEstimate.of(grid.moments, self.block, self.blocks, self.depth_step, two_time=two_time)

    def solve(self, grid: TimeGrid) -> list[Trajectory]:
        """Solve through a grid: one trajectory, or two halves."""
        sampling, halves = self.request.sampling, []
        for stream in np.random.default_rng(sampling.seed).spawn(2 if self.request.sampled else 1):
            layers = [[branch.start(grid.moments, stream) for branch in layer] for layer in self.block * self.blocks]
            try:
                two_time = self.request.two_time
                halves.append(solve_recursion(grid.moments, layers, self.depth_step, grid=grid, two_time=two_time))
            except CertificateError as error:
                if isinstance(error.partial, Trajectory):
                    error.partial = label([error.partial], grid)
                raise
            del layers  # the memory of one half is free for the next
        return halves


def _refine(request: Request, finer: Request, error: float, refusal: str) -> Request | CertificateError:
    """Return the request that comes nearer, or the refusal where the options do not allow it."""
    tasks, sampling = _tasks(finer, _grids(finer)), request.sampling
    samples = max(getattr(branch, "samples", 0) for layer in tasks[0].block for branch in layer)
    enough = finer.factor > 1 and samples > sampling.most
    if sampling.tolerance is not None and not enough and _fits(_total_cost(tasks), sampling):
        return finer
    message = refusal.format(every=request.every, samples=samples)
    threshold = np.inf if sampling.tolerance is None else sampling.tolerance
    return CertificateError(message, measured=error, threshold=threshold)


def solve(request: Request) -> xr.Dataset:
    """Solve a request; with more samples, and with later long intervals, until the error asked for is reached."""
    tolerance = np.inf if request.sampling.tolerance is None else request.sampling.tolerance
    _check(_memory_lower_bound(request), request)  # before a grid is laid out, whose own arrays grow with the steps
    while True:
        _check(estimate_cost(request), request)
        tasks = _tasks(request, request.grids())
        halves = _trajectories(tasks, [task.grid for task in tasks])
        error = 0.0  # root mean square error of the mean of two halves; zero where nothing is sampled
        if len(halves) == 2:
            error = float(np.sqrt(np.mean((halves[0].outputs - halves[1].outputs) ** 2)) / 2)
        nearer: Request | CertificateError
        if error > (tolerance if request.every == 1 else tolerance / 2):  # the share of the samples
            nearer = _refine(request, replace(request, factor=2 * request.factor), error, MORE_SAMPLES)
            if isinstance(nearer, Request):
                request = nearer
                continue
            if error > tolerance:
                nearer.partial = _dataset(halves, tasks, request)
                raise nearer
        solved = _dataset(halves, tasks, request)
        if request.every == 1 or solved.sizes["step"] == request.problems[0].steps:  # every step is solved
            return solved
        error = float(np.sqrt(np.mean(solved["output_error"].values ** 2)))
        if np.isfinite(error) and error <= tolerance:
            return solved
        nearer = _refine(request, replace(request, each=2 * request.each, factor=1), error, FINER_GRID)
        if isinstance(nearer, CertificateError):
            nearer.partial = solved
            raise nearer
        request = nearer


def _dataset(halves: list[Trajectory], tasks: list[_Task], request: Request) -> xr.Dataset:
    """Return the dataset with its errors, those of long intervals among them, and the cost that was foreseen."""
    grid, cost = tasks[0].grid, _total_cost(tasks)
    if request.every == 1:
        solved = label(halves, grid)
    else:
        coarse = [task.grid.tripled() for task in tasks]
        try:
            solved = label(halves, grid, _trajectories(tasks, coarse), coarse[0])
        except CertificateError:  # longer intervals have no solution: that of these is not known to be near
            solved = label(halves, grid)
            solved["output_error"] = xr.full_like(solved["output"], np.inf)
    return solved.assign_attrs(planned_bytes=cost.memory, planned_seconds=cost.seconds)


def _trajectories(tasks: list[_Task], grids: list[TimeGrid]) -> list[Trajectory]:
    """Return the trajectory, or its two halves, extrapolated to infinite depth where there are two problems."""
    solved = [task.solve(grid) for task, grid in zip(tasks, grids, strict=True)]
    if len(solved) == 1:
        return solved[0]
    deep = [extrapolate(*pair) for pair in zip(*solved, strict=True)]
    return [replace(each, losses=grids[0].moments.losses(each.outputs)) for each in deep]


def estimate_cost(request: Request) -> CostEstimate:
    """Return what a solution will keep at most, and all its multiplications; of samples not doubled."""
    return _total_cost(_tasks(request, _grids(request)))


def _tasks(request: Request, grids: list[TimeGrid]) -> list[_Task]:
    return [_Task.of(request, grid) for grid in grids]


def _grids(request: Request) -> list[TimeGrid]:
    """Return the moments of every problem, where tangent kernels do not matter yet."""
    return [TimeGrid.of(problem, request.every, each=request.each) for problem in request.problems]


def _memory_lower_bound(request: Request) -> CostEstimate:
    """Return a lower bound of the memory, in closed form: outputs of all steps, and two kernels over the moments."""
    problem = request.problems[0]
    check_every(problem, request.every)
    rows = float(problem.rows) * problem.steps / request.every
    return CostEstimate(memory=8 * (2 * rows**2 + float(problem.steps) * problem.outputs), multiplications=0.0)


def _total_cost(tasks: list[_Task]) -> CostEstimate:
    """Estimate the cost of all trajectories, with those through the coarser grids."""
    request, plans = tasks[0].request, [task.cost(task.grid) for task in tasks]
    work = sum(plan.multiplications for plan in plans)
    if request.every > 1:
        work += sum(task.cost(task.grid.tripled()).multiplications for task in tasks)
    return CostEstimate(max(plan.memory for plan in plans), (1 + request.sampled) * work)


def _fits(plan: CostEstimate, sampling: Sampling) -> bool:
    return plan.memory <= sampling.memory and (sampling.seconds is None or plan.seconds <= sampling.seconds)


def _check(plan: CostEstimate, request: Request) -> None:
    """Announce a solution, or refuse one that does not fit."""
    sampling = request.sampling
    foreseen = f"{plan.memory / 1e9:.2g} GB"
    foreseen += f" and about {max(plan.seconds, 1):.0f} s of one core" if plan.multiplications else " at least"
    if _fits(plan, sampling):
        if plan.seconds > WORTH_SAYING:
            announce(f"mean-field theory: {foreseen}")
        return
    allowed = f"{sampling.memory / 1e9:.2g} GB" + ("" if sampling.seconds is None else f" and {sampling.seconds:.2g} s")
    is_deep = request.cells is None and len(request.problems) == 1 and request.problems[0].depth > 1
    raise UsageError(
        f"this solution takes {foreseen}, and {allowed} are allowed: {_coarser_grid_hint(request)}take fewer steps, "
        f"tokens, samples or {'layers' if request.cells is None else 'cells'}" + (CONTINUUM if is_deep else "")
    )


def _coarser_grid_hint(request: Request) -> str:
    """Say which coarser grid in time would fit."""
    problem = request.problems[0]
    for every in EVERY:
        if problem.momentum == 0 and request.every < every < problem.steps:
            coarse = replace(request, every=every)
            if _fits(_memory_lower_bound(coarse), request.sampling) and _fits(estimate_cost(coarse), request.sampling):
                moments = TimeGrid.of(problem, every).moments.steps
                return f"`every={every}` solves {moments} moments for {problem.steps} steps, and fits; or "
    return ""

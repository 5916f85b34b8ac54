"""Error control of the DMFT solver: cost estimate, recursion, more samples or a finer grid until the tolerance is met.

Where a branch is sampled the recursion runs twice with independent samples (halves): the mean of the two is returned,
half their difference is their error, and samples are doubled until the tolerance is met. A long training on a coarse
grid is solved on a grid of three times as long intervals as well, and their difference estimates the error of the grid
(`dataset`). Half of the tolerance is then left to samples, whose noise is in the difference of the grids as well.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError
from manyheads.study.execution.progress import announce
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.branch import Branch, BranchProcess
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.branches.normals import fewest_heads, fewest_neurons
from manyheads.theory.dmft.cost import CostEstimate
from manyheads.theory.dmft.dataset import label
from manyheads.theory.dmft.grids.coarse_grid import TimeGrid, check_every
from manyheads.theory.dmft.grids.depth import DepthStep, continuum_step, extrapolate, finite_depth_step
from manyheads.theory.dmft.options import Request, Sampling
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion
from manyheads.theory.dmft.trajectory import Trajectory

WORTH_SAYING = 5.0  # seconds from which a solution is announced
CONTINUUM = ", or solve the continuum in depth (`infinite_depth`), which keeps no sources of layers"
EVERY = tuple(3**power for power in range(1, 8))  # intervals that a refusal offers


@final
@dataclass(frozen=True)
class _Task:
    """One trajectory to be solved, or its two halves: independent samples."""

    grid: TimeGrid
    block: list[list[Branch]]  # the layers of one block, or of one cell
    blocks: int
    depth_step: DepthStep
    two_time: bool

    @staticmethod
    def of(request: Request, grid: TimeGrid, factor: int) -> "_Task":
        """Lay out branches: in depth one after the other, in a cell those of a block side by side."""
        problem, cells = grid.moments, request.cells
        sized = [_sized(branch, problem, request.sampling, factor) for branch in request.branches]
        if cells is None:
            layers = [[branch] for branch in sized]
            return _Task(grid, layers, problem.depth, finite_depth_step(problem), request.two_time)
        return _Task(grid, [sized], cells, continuum_step(problem, cells), request.two_time)

    @cached_property
    def plan(self) -> CostEstimate:
        return self.through(self.grid)

    def through(self, grid: TimeGrid) -> CostEstimate:
        """Estimate the cost of one trajectory through a grid."""
        return CostEstimate.of(grid.moments, self.block, self.blocks, self.depth_step, two_time=self.two_time)

    @property
    def samples(self) -> int:
        """The most samples of a branch."""
        return max(getattr(branch, "samples", 0) for layer in self.block for branch in layer)

    def solve(self, grid: TimeGrid, streams: list[np.random.Generator]) -> list[Trajectory]:
        """Solve through a grid, once for each stream of random numbers."""
        halves: list[Trajectory] = []
        for stream in streams:
            try:
                started = self._start(grid, stream)
                halves.append(
                    solve_recursion(grid.moments, started, self.depth_step, grid=grid, two_time=self.two_time)
                )
                del started  # the memory of one half is free for the next
            except CertificateError as error:
                if isinstance(error.partial, Trajectory):
                    error.partial = label([error.partial], grid)
                raise
        return halves

    def _start(self, grid: TimeGrid, stream: np.random.Generator) -> list[list[BranchProcess]]:
        """Start the branches."""
        return [[branch.start(grid.moments, stream) for branch in layer] for layer in self.block * self.blocks]


def solve(request: Request) -> xr.Dataset:
    """Solve a request; where an error is asked for, with more samples, and later long intervals, until it is reached.

    Raises
    ------
    UsageError
        It does not fit into the memory or the time that are allowed; the message says what would.
    CertificateError
        The limit diverges, or the error that was asked for is not reached; `partial` is what was solved.
    """
    wanted = request.sampling.tolerance
    _check(_least(request), request)  # before a grid is laid out, whose own arrays grow with the steps
    while True:
        solved = _solve_on(request)
        if request.every == 1 or solved.sizes["step"] == request.problems[0].steps:  # every step is solved
            return solved
        error = float(np.sqrt(np.mean(solved["output_error"].values ** 2)))
        if np.isfinite(error) and (wanted is None or error <= wanted):
            return solved
        finer = replace(request, each=2 * request.each)
        if wanted is None or not _fits(estimate_cost(finer), request.sampling):
            raise CertificateError(
                f"outputs on intervals of up to {request.every} steps are not known to the error that was asked for, "
                "or to any where longer ones diverge: take a smaller `every`, or ask for an error with "
                "`Sampling.tolerance` and allow the `memory` and `seconds` of more short intervals; `partial` is what "
                "was solved",
                measured=error,
                threshold=np.inf if wanted is None else wanted,
                partial=solved,
            )
        request = finer


def _solve_on(request: Request) -> xr.Dataset:
    """Solve on one grid, with as many samples as their error asks for."""
    sampling, factor = request.sampling, 1
    wanted = np.inf if sampling.tolerance is None else sampling.tolerance
    share = wanted if request.every == 1 else wanted / 2  # of the samples
    tasks = [_Task.of(request, grid, factor) for grid in _grids(request)]
    _check(_whole(tasks, request), request)
    grids = request.grids()
    found = _trajectories(tasks, grids, request)
    while _sampling_error(found) > share:
        factor *= 2
        more = [_Task.of(request, grid, factor) for grid in grids]
        next_plan = _whole(more, request)
        if more[0].samples > sampling.most or not _fits(next_plan, sampling):
            if _sampling_error(found) <= wanted:
                break
            raise CertificateError(
                f"outputs are not known to the error that was asked for, and {more[0].samples} samples are more than "
                "`most`, `memory` or `seconds` allow: raise them, or take a smaller richness or fewer steps; `partial` "
                "is what was solved",
                measured=_sampling_error(found),
                threshold=wanted,
                partial=_told(found, tasks, grids, request),
            )
        tasks = more
        _check(next_plan, request)
        found = _trajectories(tasks, grids, request)
    return _told(found, tasks, grids, request)


def _told(found: list[Trajectory], tasks: list[_Task], grids: list[TimeGrid], request: Request) -> xr.Dataset:
    """Label what was found, with its errors, those of long intervals among them, and what it was foreseen to cost."""
    if request.every == 1:
        return label(found, grids[0]).assign_attrs(_costs(_whole(tasks, request)))
    coarse = [grid.tripled() for grid in grids]
    try:
        solved = label(found, grids[0], _trajectories(tasks, coarse, request), coarse[0])
    except CertificateError:  # longer intervals have no solution: that of these is not known to be near
        solved = label(found, grids[0])
        solved["output_error"] = xr.full_like(solved["output"], np.inf)
    return solved.assign_attrs(_costs(_whole(tasks, request)))


def _costs(plan: CostEstimate) -> dict[str, float]:
    return {"planned_bytes": plan.memory, "planned_seconds": plan.seconds}


def _trajectories(tasks: list[_Task], grids: list[TimeGrid], request: Request) -> list[Trajectory]:
    """Return the trajectory, or its two halves, extrapolated to infinite depth where there are two problems."""
    solved = []
    for task, grid in zip(tasks, grids, strict=True):
        streams = np.random.default_rng(request.sampling.seed).spawn(2 if request.sampled else 1)
        solved.append(task.solve(grid, streams))
    if len(solved) == 1:
        return solved[0]
    deep = [extrapolate(*pair) for pair in zip(*solved, strict=True)]
    return [replace(each, losses=grids[0].moments.losses(each.outputs)) for each in deep]


def estimate_cost(request: Request) -> CostEstimate:
    """Return what a solution will keep at most, and all its multiplications; of samples not doubled.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Problem, Sampling
    >>> from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
    >>> from manyheads.theory.dmft.options import Request
    >>> from manyheads.theory.dmft.solver import estimate_cost
    >>> problem = Problem(np.ones((4, 4, 16)), np.ones(4), steps=500)
    >>> attention, sampling = InfiniteKeyDimAttention(), Sampling()
    >>> plans = [estimate_cost(Request((problem,), attention, None, sampling, every)) for every in (1, 27)]
    >>> [f"{plan.memory / 1e9:.1f} GB, {plan.seconds:.0f} s" for plan in plans]
    ['9.5 GB, 704 s', '0.2 GB, 3 s']
    """
    return _whole([_Task.of(request, grid, 1) for grid in _grids(request)], request)


def _least(request: Request) -> CostEstimate:
    """Return a lower bound of the memory, in closed form: outputs of all steps, and two kernels over the moments."""
    problem = request.problems[0]
    check_every(problem, request.every)
    rows = float(problem.rows) * problem.steps / request.every
    return CostEstimate(memory=8 * (2 * rows**2 + float(problem.steps) * problem.outputs), multiplications=0.0)


def _grids(request: Request) -> list[TimeGrid]:
    """Return the moments of every problem, where tangent kernels do not matter yet."""
    return [TimeGrid.of(problem, request.every, each=request.each) for problem in request.problems]


def _whole(tasks: list[_Task], request: Request) -> CostEstimate:
    """Estimate the cost of all trajectories, with those through the coarser grids."""
    work = sum(task.plan.multiplications for task in tasks)
    if request.every > 1:
        work += sum(task.through(task.grid.tripled()).multiplications for task in tasks)
    return CostEstimate(memory=max(task.plan.memory for task in tasks), multiplications=(1 + request.sampled) * work)


def _fits(plan: CostEstimate, sampling: Sampling) -> bool:
    return plan.memory <= sampling.memory and (sampling.seconds is None or plan.seconds <= sampling.seconds)


def _check(plan: CostEstimate, request: Request) -> None:
    """Announce a solution, or refuse one that does not fit."""
    sampling = request.sampling
    said = f"{plan.memory / 1e9:.2g} GB"
    said += f" and about {max(plan.seconds, 1):.0f} s of one core" if plan.multiplications else " at least"
    if _fits(plan, sampling):
        if plan.seconds > WORTH_SAYING:
            announce(f"mean-field theory: {said}")
        return
    allowed = f"{sampling.memory / 1e9:.2g} GB" + ("" if sampling.seconds is None else f" and {sampling.seconds:.2g} s")
    raise UsageError(
        f"this solution takes {said}, and {allowed} are allowed: {_instead(request)}take fewer steps, tokens, samples "
        f"or {'layers' if request.cells is None else 'cells'}" + (CONTINUUM if _of_blocks(request) else "")
    )


def _of_blocks(request: Request) -> bool:
    """Whether it is several blocks of a finite depth that are solved."""
    return request.cells is None and len(request.problems) == 1 and request.problems[0].depth > 1


def _instead(request: Request) -> str:
    """Say which coarser grid in time would fit."""
    problem = request.problems[0]
    for every in EVERY:
        if problem.momentum == 0 and request.every < every < problem.steps:
            coarse = replace(request, every=every)
            if _fits(_least(coarse), request.sampling) and _fits(estimate_cost(coarse), request.sampling):
                moments = TimeGrid.of(problem, every).moments.steps
                return f"`every={every}` solves {moments} moments for {problem.steps} steps, and fits; or "
    return ""


def _sized(branch: Branch, problem: Problem, sampling: Sampling, factor: int) -> Branch:
    """Return a branch with its samples: what was asked for, or twice the fewest that match moments."""
    rows = problem.steps * problem.rows
    if isinstance(branch, InfiniteHeadsAttention):
        few = max(512, fewest_heads(2 * rows, branch.key_dim))
        return replace(branch, samples=factor * (sampling.samples or few))
    if isinstance(branch, InfiniteWidthMLP):
        return replace(branch, samples=factor * (sampling.samples or max(2048, fewest_neurons(2 * rows))))
    return branch


def _sampling_error(halves: list[Trajectory]) -> float:
    """Root mean square error of the mean of two halves, from their difference; zero where nothing is sampled."""
    if len(halves) == 1:
        return 0.0
    return float(np.sqrt(np.mean((halves[0].outputs - halves[1].outputs) ** 2)) / 2)

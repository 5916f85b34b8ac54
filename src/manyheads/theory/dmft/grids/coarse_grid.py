"""Coarse grid in time for long training: errors keep their fine steps, features move once an interval.

Kernels over n = S P T rows cost n^2 memory and n^3 time, and features that move little over k steps need no moment for
each. An interval of k steps from t_i keeps the gradients of all outputs as they are in its middle, c = t_i + (k - 1)/2,
while the outputs themselves take every step,

    f(t+1) = f(t) + eta K c(t) Delta(t),    W(t_i + k) = W(t_i) - rates sum_t (gradients of outputs at c) c(t) Delta(t),

and its middle is reached with the gradients at its start. Losses and mini-batches are so followed step by step, and
what decays within an interval needs no fine grid; one step of k times the rate would diverge from eta k lambda = 2 on.
Every k is odd, so that the middle is a step: the error is k (k^2 - 1)/24 times the second derivative of the gradients
an interval, of second order, and nothing for k = 1, which is the training itself. Such a training is linear in its
gradients, and its limit is exactly that of the recursion with

    g_i = gradients dressed with the mean of c Delta over the interval,    m(n, i) = k for later n.

The tangent kernel K only has to be near: it starts as the lazy one and learns from the outputs found (BFGS, which keeps
it positive). Where outputs are found beside those predicted, the steps in between are gone through again with the
difference distributed over them, and what errors then come to more is carried to the next interval. (Derived here.)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from manyheads.errors import UsageError, check_integer
from manyheads.theory.dmft.problem import Problem

QUIET = 1e-4  # outputs that move by a smaller share of what they have come to tell no kernel: sampled ones are noisy
EACH = 9  # intervals of 1, 3, 9, ... steps before the next length: training moves fastest at its start


def check_every(problem: Problem, every: int) -> None:
    """Refuse intervals without a step in their middle, and momentum, whose velocity is not followed."""
    if check_integer("every", every) % 2 == 0:
        raise UsageError(f"every={every}: an odd number of steps, whose middle is a step; 1 solves every step")
    if every > 1 and problem.momentum > 0:
        raise UsageError(
            f"every={every} with momentum={problem.momentum}: a velocity is not followed over long intervals; "
            f"momentum 0 at the rate {problem.learning_rate / (1 - problem.momentum):.3g} trains alike where steps "
            "are small"
        )


@final
@dataclass(frozen=True, eq=False)
class TimeGrid:
    """The moments at which a long training is solved: the starts of intervals, and the middles of long ones.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Problem
    >>> from manyheads.theory.dmft.grids.coarse_grid import TimeGrid
    >>> problem = Problem(np.ones((2, 3, 4)), np.array([1.0, -1.0]), steps=100, learning_rate=0.1)
    >>> grid = TimeGrid.of(problem, every=9, kernel=np.eye(2))
    >>> grid.lengths
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 9, 9, 9, 9, 9, 9, 9)
    >>> grid.tripled().lengths, grid.moments.steps
    ((1, 1, 1, 1, 1, 1, 1, 1, 1, 9, 9, 9, 27, 35, 1), 42)
    """

    problem: Problem  # the training with all its steps
    lengths: tuple[int, ...]  # steps of the intervals, odd numbers that add up to one less than the steps
    kernel: np.ndarray | None = None  # tangent kernel (O, O) at the start, for long intervals

    @staticmethod
    def of(problem: Problem, every: int, kernel: np.ndarray | None = None, each: int = EACH) -> "TimeGrid":
        """Return a grid whose intervals grow from single steps to `every` steps, by factors of three after `each`."""
        check_every(problem, every)
        lengths: list[int] = []
        left, length, alike = problem.steps - 1, 1, 0
        while left:
            fits = length if length <= left else left - (1 - left % 2)
            lengths.append(fits)
            left -= fits
            alike += 1
            if alike == each and length < every:
                length, alike = min(3 * length, every), 0
        return TimeGrid(problem, tuple(lengths), kernel)

    def tripled(self) -> "TimeGrid":
        """Join long intervals by three, which makes nine times the error or more.

        Where a pair or four are left at the end, their even sum is cut by a single step; one alone takes two single
        steps before it.
        """
        long = [place for place, length in enumerate(self.lengths) if length > 1]
        if not long:
            return self
        first, end = long[0] - 2 * (len(long) == 1), long[-1] + 1
        places = range(first, end)
        groups = [places[start : start + 3] for start in range(0, len(places), 3)]
        if len(groups[-1]) == 1:
            groups[-2:] = [range(groups[-2][0], end)]
        sums = [sum(self.lengths[place] for place in group) for group in groups]
        joined = [part for total in sums for part in ((total,) if total % 2 else (total - 1, 1))]
        return replace(self, lengths=(*self.lengths[:first], *joined, *self.lengths[end:]))

    @cached_property
    def starts(self) -> np.ndarray:
        """Steps at which intervals start, and the last step, (intervals + 1,)."""
        return np.append(0, np.cumsum(self.lengths, dtype=int))

    @cached_property
    def intervals(self) -> np.ndarray:
        """The interval of every moment, (moments,); the last step is one of its own."""
        return np.repeat(np.arange(len(self.starts)), [1 + (length > 1) for length in (*self.lengths, 1)])

    @cached_property
    def opening(self) -> np.ndarray:
        """Whether a moment is the start of a long interval, whose gradients serve to reach its middle, (moments,)."""
        return np.append(self.intervals[1:] == self.intervals[:-1], False)

    @cached_property
    def shown(self) -> np.ndarray:
        """The moments that are starts: training has reached them with all its accuracy, (intervals + 1,)."""
        return np.searchsorted(self.intervals, np.arange(len(self.starts)))

    @cached_property
    def spans(self) -> np.ndarray:
        """First step and end of the steps whose gradients a moment stands for, (moments, 2)."""
        first = self.starts[self.intervals]
        length = np.array((*self.lengths, 1))[self.intervals]
        return np.stack([first, first + np.where(self.opening, length // 2, length)], axis=1)

    @cached_property
    def times(self) -> np.ndarray:
        """Steps of the moments, (moments,)."""
        middle = np.append(False, self.opening[:-1])
        return np.where(middle, (self.spans[:, 0] + self.spans[:, 1]) // 2, self.spans[:, 0])

    @cached_property
    def moments(self) -> Problem:
        """The problem over the moments alone: what branches are started with, and whose rows are kept."""
        weights = self.problem.weights
        if weights.ndim == self.problem.targets.ndim:  # of every step
            weights = weights[self.times]
        return replace(self.problem, steps=len(self.times), weights=weights)

    @cached_property
    def memory(self) -> np.ndarray:
        """m(n, i) (moments, moments): how much of the mean gradient of moment i is in the weights at moment n."""
        if self.problem.momentum > 0:  # and all intervals are single steps
            return self.problem.memory
        ages = np.arange(len(self.times))[:, None] - np.arange(len(self.times))[None, :]
        return np.where((ages > 0) & ~(self.opening & (ages > 1)), np.diff(self.spans)[:, 0], 0.0)


def dressed_errors(problem: Problem, step: int, output: np.ndarray) -> np.ndarray:
    """Return c(t) Delta of outputs (O, C)."""
    return problem.loss_weights[step][:, None] * problem.loss_function.error(problem.flat_targets, output)


class IntervalState(NamedTuple):
    """State of the outputs on a coarse grid at one moment; vectors (O C,)."""

    kernel: np.ndarray  # tangent kernel K (O C, O C), as learned so far
    found: np.ndarray  # outputs at the moment before
    start: np.ndarray  # outputs at the start of the interval
    predicted: np.ndarray  # outputs at its end
    drift: np.ndarray  # what outputs move by a step besides K
    carried: np.ndarray  # dressed errors, from the interval before


def start_interval(grid: TimeGrid) -> IntervalState | None:
    """Return the state before the first moment; None where all intervals are single steps."""
    longest = max(grid.lengths, default=1)
    if longest == 1:
        return None
    if grid.kernel is None:
        raise UsageError(f"intervals of {longest} steps: give the tangent kernel at the start")
    kernel = np.kron(np.asarray(grid.kernel), np.eye(grid.problem.classes))
    return IntervalState(kernel, *(np.zeros(len(kernel)) for _ in range(5)))


def mean_errors(
    grid: TimeGrid, state: IntervalState | None, moment: int, output: np.ndarray, past: np.ndarray
) -> tuple[np.ndarray, IntervalState | None]:
    """Return the mean dressed errors (O, C) that a moment stands for, and the state after it.

    `output` (O, C) is what was found at the moment, `past` (t, O, C) the mean errors of the moments before.
    """
    first, end = grid.spans[moment]
    if state is None:
        return dressed_errors(grid.problem, first, output), None
    found, past = output.ravel(), past.reshape(moment, output.size)
    if moment and grid.opening[moment - 1]:  # the middle of an interval
        state = _update_kernel(grid, state, moment, found, past)
        middle = grid.times[moment]
        _, predicted = _descend(grid, state, range(first, middle), np.zeros_like(found))
        state = state._replace(drift=(found - predicted) / (middle - first))
    else:
        if moment:
            state = _correct(grid, state, moment, found, past)
            state = _update_kernel(grid, state, moment, found, past)
        state = state._replace(start=found, drift=np.zeros_like(found))
    total, predicted = _descend(grid, state, range(first, end), state.drift)
    return (total / (end - first)).reshape(output.shape), state._replace(found=found, predicted=predicted)


def _descend(grid: TimeGrid, state: IntervalState, steps: range, drift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Descend from the start of the interval with a fixed tangent kernel: f(t+1) = f(t) + eta K c Delta(t) + drift.

    Returned are vectors (O C,): the sum of the dressed errors c Delta over the steps and the outputs at their end.
    """
    problem, output = grid.problem, state.start
    total = np.zeros_like(output)
    for step in steps:
        error = dressed_errors(problem, step, output.reshape(problem.flat_targets.shape)).ravel()
        if step == steps.start:
            error = error + state.carried
        total = total + error
        output = output + problem.learning_rate * state.kernel @ error + drift
    return total, output


def _correct(grid: TimeGrid, state: IntervalState, moment: int, found: np.ndarray, past: np.ndarray) -> IntervalState:
    """Repeat the last interval with the prediction error distributed over it, and carry the difference."""
    first, end = grid.spans[moment - 1]
    total, _ = _descend(grid, state, range(first, end), state.drift + (found - state.predicted) / (end - first))
    return state._replace(carried=total - past[-1] * (end - first))


def _update_kernel(
    grid: TimeGrid, state: IntervalState, moment: int, found: np.ndarray, past: np.ndarray
) -> IntervalState:
    """Bring the tangent kernel in line with the change of the outputs since the moment before (BFGS).

    Outputs that have arrived move by what is left of their noise, and a kernel learned from that lets them diverge. It
    stays as it is where it would not stay positive.
    """
    if np.abs(found - state.found).max() <= QUIET * np.abs(found).max():
        return state
    errors = (grid.memory[moment, :moment] - grid.memory[moment - 1, :moment]) @ past
    displacement = (found - state.found) / grid.problem.learning_rate  # K errors
    before = state.kernel @ errors
    if not (errors @ displacement > 0 and errors @ before > 0):
        return state
    change = np.outer(displacement, displacement) / (errors @ displacement) - np.outer(before, before) / (
        errors @ before
    )
    return state._replace(kernel=state.kernel + change)

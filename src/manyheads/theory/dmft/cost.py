"""Cost estimate of a solution: memory, multiplications, seconds of one core."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.theory.dmft.branches.branch import Branch
from manyheads.theory.dmft.grids.depth import DepthStep
from manyheads.theory.dmft.problem import Problem

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

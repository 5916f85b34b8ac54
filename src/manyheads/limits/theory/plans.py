"""What a solution will cost, before it starts: memory and multiplications, to leading order."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.errors import UsageError
from manyheads.limits.theory.branches import Branch
from manyheads.limits.theory.marching import Depthwise
from manyheads.limits.theory.problem import Problem


@dataclass(frozen=True)
class Plan:
    """Memory in bytes and multiplications of one march.

    With n = S P T rows and B layers the stream keeps coefficients on all sources, 4 B^2 n^2 numbers with the sources of
    the layers and 2 B n (PT + C) without, besides four n x n kernels a layer.
    """

    memory: float
    multiplications: float

    @staticmethod
    def of(problem: Problem, layers: Sequence[Sequence[Branch]], depthwise: Depthwise) -> "Plan":
        """Plan a march."""
        n, count = float(problem.steps * problem.rows), len(layers)
        width = problem.rows + problem.classes + (2 * count * n if depthwise.sources else 0)
        numbers = 2 * count * n * width + (4 if depthwise.sources else 2) * count * n**2
        # Every row is multiplied with the covariances of the sources, and with the rows of all earlier moments.
        work = 2 * count * n**2 * (width + (count * n if depthwise.sources else 0))
        for layer in layers:
            for branch in layer:
                kept, done = branch.effort(problem)
                numbers, work = numbers + kept, work + done
        return Plan(8 * numbers, depthwise.sweeps * work)

    def check(self, memory: float) -> None:
        """Refuse a march that needs more than so many bytes.

        Raises
        ------
        UsageError
            It does not fit; the message says what would.
        """
        if self.memory > memory:
            raise UsageError(
                f"this solution keeps {self.memory / 1e9:.1f} GB, {memory / 1e9:.1f} are allowed: take fewer steps, "
                "tokens, samples or layers, or solve the continuum in depth (`infinite_depth`), which keeps no sources "
                "of layers"
            )

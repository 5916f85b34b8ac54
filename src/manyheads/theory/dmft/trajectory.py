"""Solution of the recursion in time: outputs, losses and kernels of every moment, two-time functions if asked for."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from manyheads.theory.dmft.problem import Problem


class Snapshot(NamedTuple):
    """The solution at one moment; kernels of the levels 0 to B, the last above the last layer."""

    output: np.ndarray  # f (O, C)
    stream: list[np.ndarray]  # <h^l h^l>/d, (PT, PT) each
    backward: list[np.ndarray]  # <g^l g^l>/d
    pooled: np.ndarray  # kernel of the read-outs (O, O)
    observables: list[dict[str, np.ndarray]]  # of every layer: what its branches show (logits, attention)


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

    def record(self, moment: int, snapshot: Snapshot, loss: float) -> None:
        """Write the solution at one moment."""
        self.outputs[moment], self.losses[moment], self.pooled[moment] = snapshot.output, loss, snapshot.pooled
        self.stream[moment], self.backward[moment] = snapshot.stream, snapshot.backward
        self.observables.append(snapshot.observables)

    def until(self, moments: int) -> "Trajectory":
        """Return the first moments, without functions of two times."""
        names = ("outputs", "losses", "stream", "backward", "pooled", "observables")
        return Trajectory(**{name: getattr(self, name)[:moments] for name in names})

"""Solution of the recursion in time: outputs, losses and kernels of every moment, two-time functions if asked for."""

from dataclasses import dataclass, field

import numpy as np

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

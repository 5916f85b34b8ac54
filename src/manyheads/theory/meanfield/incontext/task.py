r"""In-context regression on shared features: inputs x, target features f°(x), tasks v and prompts.

A task v ~ (0, I_k) is drawn for every prompt; its pairs are :math:`(x_i, y_i)` with :math:`y_i = v^\top f°(x_i) +
\text{noise}`. Inputs are uniform on a finite set of nodes, so that every expectation over x is a finite sum, exactly. A
covariance :math:`\Sigma_v` of the tasks is the case of the features :math:`\Sigma_v^{1/2} f°`.

Source: Kim and Suzuki, ICML 2024 (arXiv 2402.01258); the normalization and the task on the circle are derived here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.stats import norm, qmc

from manyheads._arrays import as_floats, check_generator
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._overview import ArraysAsShapes
from manyheads.errors import ShapeError, UsageError, check_integer


def as_matrix(
    value: Float[ArrayLike, "rows columns"], name: str, shape: tuple[int, int] | None = None
) -> Float[np.ndarray, "rows columns"]:
    """Return a matrix of finite numbers as float64, of a given shape, or refuse it."""
    matrix = as_floats(value, name)
    if matrix.ndim != 2 or not matrix.size or matrix.shape != (shape or matrix.shape):
        raise ShapeError(f"{name} of shape {matrix.shape}: expected {shape or 'a matrix with one row or more'}")
    if not np.isfinite(matrix).all():
        raise UsageError(f"{name}: expected finite numbers")
    return matrix


@dataclass(frozen=True, eq=False, repr=False)
class FeatureTask(ArraysAsShapes):
    """Inputs with the same probability each, and the target features on them.

    Examples
    --------
    >>> FeatureTask(np.eye(2), np.array([[1.0], [-1.0]])).features
    1
    """

    inputs: Float[np.ndarray, "nodes input_dim"]  # nodes x
    targets: Float[np.ndarray, "nodes features"]  # f°(x)
    label_noise: float = constrained(0.0, Constraint(least=0))  # variance in a prompt; that of the query has none

    def __post_init__(self) -> None:
        for name in ("inputs", "targets"):
            object.__setattr__(self, name, as_matrix(getattr(self, name), name))
        if len(self.inputs) != len(self.targets):
            raise ShapeError(f"inputs have {len(self.inputs)} nodes and targets {len(self.targets)}: expected as many")
        check_fields(self)

    @property
    def features(self) -> int:
        """Number k of target features."""
        return int(self.targets.shape[1])

    @property
    def covariance(self) -> np.ndarray:
        """Second moments of the target features, shape (features, features)."""
        return self.targets.T @ self.targets / len(self.targets)


def circle_task(
    degrees: Sequence[int] = (2, 2), amplitudes: Sequence[float] | None = None, nodes: int = 256
) -> FeatureTask:
    r"""Return harmonics on the circle as target features.

    The first feature of a degree is :math:`\sqrt2 \cos \ell\theta`, the second :math:`\sqrt2 \sin \ell\theta`, times
    its amplitude; inputs are :math:`(\cos\theta, \sin\theta)` on equidistant angles.

    Parameters
    ----------
    degrees
        Degree of every feature; each at most twice.
    amplitudes
        As many; one by default. Their squares are the eigenvalues of the covariance.
    nodes
        Equidistant angles: more than four times the largest degree, so that second moments are exact.

    Raises
    ------
    UsageError
        No sequence of degrees, a degree more than twice, too few nodes, or amplitudes of another number.

    Examples
    --------
    >>> circle_task((2, 2)).covariance.round(12).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    if not isinstance(degrees, Sequence) or isinstance(degrees, str):
        raise UsageError(f"degrees={degrees!r}: expected a degree for each feature, such as (2, 2)")
    degrees = tuple(check_integer("degrees", degree) for degree in degrees)
    sizes = np.ones(len(degrees)) if amplitudes is None else as_floats(amplitudes, "amplitudes")
    if not degrees or sizes.shape != (len(degrees),) or max(map(degrees.count, degrees)) > 2:
        raise UsageError(
            f"degrees={degrees}, amplitudes={amplitudes}: expected one amplitude a feature, and a degree twice at most"
        )
    nodes = check_integer("nodes", nodes, 4 * max(degrees) + 1)
    angles = 2 * np.pi * np.arange(nodes) / nodes
    columns = [
        amplitude * harmonics(degree, angles)[:, int(degree in degrees[:place])]
        for place, (degree, amplitude) in enumerate(zip(degrees, sizes.tolist(), strict=True))
    ]
    return FeatureTask(np.stack([np.cos(angles), np.sin(angles)], 1), np.stack(columns, 1))


def ridge_task(
    dim: int, eigenvalues: Sequence[float], nodes: int, rng: np.random.Generator, steepness: float = 0.7
) -> FeatureTask:
    r"""Return sigmoid ridge functions of orthogonal directions as target features, on normal inputs.

    Feature j is :math:`\sigma(\gamma x_j) - 1/2`, decorrelated on the nodes and scaled to the eigenvalue j. Inputs come
    in opposite pairs, so that all features have mean zero exactly.

    The dimension d is at least the number of features, `nodes` is even, eigenvalues and the steepness gamma positive.
    """
    variances = np.asarray(eigenvalues, np.float64)
    dim = check_integer("dim", dim, max(variances.size, 1))
    nodes = check_integer("nodes", nodes, 2 * variances.size + 2)
    if nodes % 2 or variances.ndim != 1 or not (np.isfinite(variances).all() and (variances > 0).all()):
        raise UsageError(f"nodes={nodes}, eigenvalues={eigenvalues}: expected an even number and positive eigenvalues")
    Constraint(above=0).kept("steepness", steepness, "float")
    half = check_generator(rng).standard_normal((nodes // 2, dim))
    ridges = np.tanh(steepness * half[:, : variances.size] / 2) / 2
    factor = np.linalg.cholesky(ridges.T @ ridges / len(half))
    half_targets = np.linalg.solve(factor, ridges.T).T * np.sqrt(variances)
    return FeatureTask(np.concatenate([half, -half]), np.concatenate([half_targets, -half_targets]))


def harmonics(degree: int, angles: Float[ArrayLike, " nodes"]) -> Float[np.ndarray, "nodes 2"]:
    """Return cosine and sine of a degree, of unit mean square."""
    angles = np.asarray(angles)
    return np.sqrt(2) * np.stack([np.cos(degree * angles), np.sin(degree * angles)], -1)


def gaussian_points(dim: int, count: int, rng: np.random.Generator) -> Float[np.ndarray, "count dim"]:
    """Return scrambled Sobol points with a standard normal distribution; `count` is a power of two.

    Particles at such points stand for infinitely many with an error below N^(-1/2).
    """
    if count < 2 or count & (count - 1):
        raise UsageError(f"{count} points: expected a power of two, which makes Sobol points balanced")
    uniform = qmc.Sobol(dim, seed=rng).random(count)
    return norm.ppf(np.clip(uniform, 1e-12, 1 - 1e-12))

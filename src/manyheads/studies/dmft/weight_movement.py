"""`limits/weight-movement`: relative movement of the attention matrices against the depth L."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.scaling.shared.curves import geometric_curve, power_curve
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Source, Study, grid
from manyheads.study.panels import Multiples, Panel
from manyheads.study.tables import dataset
from manyheads.theory.dmft.finite.ensembles import MATRICES, Network
from manyheads.theory.dmft.problem import Problem

EXPONENTS = {1.0: "depth exponent 1", 0.5: "depth exponent 1/2"}
LETTERS = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}
NEXT = 0.25  # half of the difference between the exponents at the two depth exponents


@dataclass(frozen=True)
class WeightMovement(Study):
    """Relative movement |W_t - W_0| / |W_0| of queries, keys, values and outputs after a fixed training, against L.

    Attributes
    ----------
    task
        ``"digits"`` (pooled, squared loss) or ``"text"`` (causal, every token reads out, cross-entropy).
    depths
        Numbers of blocks L.
    key_dim, heads, activation
        N, H, and the activation of an MLP after every attention, "none" for no MLP.
    norm
        Whether streams are normalized.
    steps, learning_rate, richness
        Of the training by gradient descent.
    networks
        Networks of one replicate.

    Notes
    -----
    The gradient of a matrix inside a block is L^(-alpha_L) times one of order one, and its learning rate is
    L^(2 alpha_L - 1): the matrix moves by L^(alpha_L - 1), which is L^(-1/2) at alpha_L = 1/2 and of order one at 1.
    All L blocks together move the stream by L L^(-alpha_L) L^(alpha_L - 1), of order one at both. At fixed N the
    derivative of the softmax is random and of order one in N at the init, so queries and keys follow the same powers;
    at infinite N and alpha_L = 1/2 they would move by 1/L. (Derived here.)
    """

    name: ClassVar[str] = "limits/weight-movement"
    claim: ClassVar[str] = "Attention weights move by L^(-1/2) at depth exponent 1/2 and by order one at 1"
    source: ClassVar[Source] = bordelon("figure 5 and its caption; the powers of single matrices are derived here")

    task: str = "digits"
    depths: tuple[int, ...] = (4, 8, 16, 32)
    key_dim: int = 4
    heads: int = 8
    activation: str = "none"
    norm: bool = True
    steps: int = 12
    learning_rate: float = 0.25
    richness: float = 0.75
    networks: int = 8

    def __post_init__(self) -> None:
        check_rising("depths", self.depths)
        if self.networks < 1:
            raise UsageError(f"networks={self.networks}: a replicate trains at least one")
        self.network()
        self.problem(1.0, 1)

    @classmethod
    def full(cls) -> WeightMovement:
        """Return the study with complete blocks and larger depths."""
        return cls(depths=(4, 8, 16, 32, 64, 128), activation="gelu", networks=16)

    @classmethod
    def small(cls) -> WeightMovement:
        """Return the smallest configuration in which every claim can change."""
        return cls(depths=(1, 4), key_dim=2, heads=2, steps=3, networks=2)

    def network(self) -> Network:
        """Return a network of the ensemble."""
        return Network(self.key_dim, self.heads, activation=None if self.activation == "none" else self.activation)

    def problem(self, depth_exponent: float, depth: int) -> Problem:
        """Return what is trained."""
        return mean_field.problem_of(self, depth=depth, depth_exponent=depth_exponent)

    def cells(self) -> tuple[Cell, ...]:
        """Return all depths at both depth exponents."""
        return grid(depth_exponent=tuple(EXPONENTS), depth=self.depths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents of L."""
        return dataset(
            {
                "movement": (
                    "depth_exponent",
                    [power - 1 for power in EXPONENTS],
                    "exponent of L in weights' movement",
                ),
                "stream": ("depth_exponent", [0.0] * len(EXPONENTS), "exponent of L in the update of the kernel"),
            },
            {"depth_exponent": (list(EXPONENTS), "depth exponent", "1")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one depth; keep the movement of their matrices and the update of their kernel."""
        problem = self.problem(float(cell["depth_exponent"]), int(cell["depth"]))
        trained = mean_field.train_seeds(problem, self.network(), key, self.networks, movement=True)
        kernels = trained["stream"].values[:, [0, -1], -1]
        updates = np.sqrt(((kernels[:, 1] - kernels[:, 0]) ** 2).mean((-1, -2)))
        return dataset(
            {
                "movement": (
                    "matrix",
                    np.exp(np.log(trained["movement"].values[:, -1]).mean(0)),
                    "relative movement of the weights",
                ),
                "stream": ((), float(np.exp(np.log(updates).mean())), "update of the kernel of the last stream"),
                "loss": ((), float(trained["loss"].values[:, -1].mean()), "loss"),
            },
            {"matrix": list(MATRICES)},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the powers of all matrices and of the stream at both exponents, and that those of 1 fail at 1/2."""
        claims: list[Claim] = []
        for exponent in EXPONENTS:
            claims += [self._movement(exponent, matrix) for matrix in MATRICES]
            claims.append(self._stream(exponent))
        return *claims, *(self._unmoved(matrix) for matrix in MATRICES)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show movements and the update of the stream against L."""
        columns = [(matrix, LETTERS[matrix]) for matrix in MATRICES] + [("stream", "kernel of the stream")]

        def plot(name: str) -> tuple[Curve, ...]:
            curves: list[Curve] = []
            for exponent, words in EXPONENTS.items():
                values = self._values(trained, exponent, name)
                power = float(predicted["stream" if name == "stream" else "movement"].sel(depth_exponent=exponent))
                start = float(np.exp(np.log(values[:, 0]).mean()))
                curves.append(geometric_curve(self.depths, values, words, len(curves)))
                curves.append(power_curve(self.depths, start, power, f"L^{power:g}", len(curves)))
            return tuple(curves)

        return (
            Multiples(
                "Movement of weights and of features against depth",
                "depth L",
                "relative movement, update of the kernel",
                (tuple(plot(name) for name, _ in columns),),
                ("",),
                tuple(title for _, title in columns),
                log_y=True,
                note=f"After {self.steps - 1} updates; geometric means, bands range over replicates. "
                "Grey: derived powers.",
                shows=("the relative movement of",),
            ),
        )

    def fit(self, trained: xr.Dataset, exponent: float, name: str) -> ExponentFit:
        """Return the exponent of L of one matrix, or of the update of the "stream"."""
        return fit_exponent(self.depths, self._values(trained, exponent, name))

    def _values(self, trained: xr.Dataset, exponent: float, name: str) -> np.ndarray:
        variable = "stream" if name == "stream" else "movement"
        found = mean_field.along(trained, variable, "depth", depth_exponent=exponent)
        return found if name == "stream" else found[..., MATRICES.index(name)]

    def _movement(self, exponent: float, matrix: str) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: the relative movement of {LETTERS[matrix]} scales as L^{exponent - 1:g}",
            lambda predicted, trained: self.fit(trained, exponent, matrix),
            quantity="exponent of L",
            target=lambda predicted: float(predicted["movement"].sel(depth_exponent=exponent)),
            tolerance=NEXT,
            basis="half of the difference between the powers at the two depth exponents",
        )

    def _stream(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: the update of the residual stream's kernel is independent of L",
            lambda predicted, trained: self.fit(trained, exponent, "stream"),
            quantity="exponent of L",
            target=lambda predicted: float(predicted["stream"].sel(depth_exponent=exponent)),
            tolerance=NEXT,
            basis="half of L^(-1/2), the movement of a single matrix at depth exponent 1/2",
        )

    def _unmoved(self, matrix: str) -> Claim:
        return Claim(
            f"{EXPONENTS[0.5]}: the relative movement of {LETTERS[matrix]} is independent of L",
            lambda predicted, trained: self.fit(trained, 0.5, matrix),
            quantity="exponent of L",
            target=0.0,
            tolerance=NEXT,
            basis="the power at depth exponent 1, to half of the difference to that at 1/2",
            expected="refuted",
        )

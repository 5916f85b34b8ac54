"""`limits/initialization`: residual kernels against H and the law of attention logits against N, before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.statistics.distances import SquaredDistance, squared_distance
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.claims import distance_claim
from manyheads.studies.dmft.shared.logit_distributions import LEVELS, density_curve, gaussian_below, pool_logits
from manyheads.studies.dmft.shared.product_logits import excess_kurtosis, product_below
from manyheads.studies.scaling.shared.curves import geometric_curve, power_curve
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Multiples, Panel
from manyheads.study.tables import dataset
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.finite.problems import digits_problem
from manyheads.theory.dmft.problem import Problem

EXPONENTS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
GAUSSIAN = 0.01  # of probability


@dataclass(frozen=True)
class Initialization(Study):
    """Kernels of the residual stream against H, and attention logits of single heads against N, before training.

    Attributes
    ----------
    heads_counts, key_dim
        Numbers of heads at which kernels are compared, and their key dimension.
    key_dims, heads
        Key dimensions at which logits are compared, and the number of heads.
    depth, branch
        Blocks L and beta0 of their multiplier beta0/L; streams are normalized, as in the paper's transformer.
    networks
        Networks of one replicate.
    oversampling
        How many times as many heads of the limit are sampled as moments need to be matched.

    Notes
    -----
    Kernels are h_a . h_b / d, d = N H. Below the first block entries of h are independent Gaussians of covariance X, so
    one kernel deviates by mean square (X_aa X_bb + X_ab^2)/d, exactly. Each block adds the output weights' own
    fluctuation, of mean square 1/d, that of a mean over H heads, 1/H, and transports the one below it: at fixed N all
    of it is 1/H, so what is of order 1/H is the square, and the root mean square goes as H^(-1/2). The mean kernel is
    off by the second order of these fluctuations, 1/H. A logit of a normalized stream is q . k / N^alpha_A with q and k
    Gaussian and independent, in every block and at any H: its variance over heads is N^(1 - 2 alpha_A), its law that of
    `product_below`, its excess kurtosis 6/N. (Derived here.)
    """

    name: ClassVar[str] = "limits/initialization"
    claim: ClassVar[str] = "Before training kernels deviate as 1/H (squared); logits have kurtosis 3 + 6/N"
    source: ClassVar[Source] = bordelon(
        "figure 3 and its caption; constants and the law of the logits are derived here"
    )
    predictions: ClassVar[int | None] = 4

    heads_counts: tuple[int, ...] = (4, 16, 64)
    key_dim: int = 4
    key_dims: tuple[int, ...] = (1, 4, 16)
    heads: int = 16
    depth: int = 8
    branch: float = 4.0
    networks: int = 32
    oversampling: int = 4

    def __post_init__(self) -> None:
        check_rising("heads_counts", self.heads_counts)
        check_rising("key_dims", self.key_dims)
        if min(self.heads, self.key_dim, self.oversampling) < 1 or self.networks < 3:
            raise UsageError(
                f"heads={self.heads}, key_dim={self.key_dim}, oversampling={self.oversampling}, "
                f"networks={self.networks}: expected at least 1, 1, 1 and 3"
            )
        self.problem()

    @classmethod
    def full(cls) -> Initialization:
        """Return the study with more heads and the larger key dimensions."""
        return cls(heads_counts=(4, 16, 64, 256), key_dims=(1, 2, 4, 16, 64), networks=64)

    @classmethod
    def small(cls) -> Initialization:
        """Return the smallest configuration in which every claim can change."""
        return cls(heads_counts=(2, 4), key_dim=2, key_dims=(1, 2), heads=4, depth=2, networks=3, oversampling=1)

    def problem(self) -> Problem:
        """Return the inputs and the architecture; nothing is trained."""
        return digits_problem(steps=1, depth=self.depth, branch=self.branch, norm=True)

    def cells(self) -> tuple[Cell, ...]:
        """Return the networks of both comparisons at both logit exponents, each once."""
        sizes = [(self.key_dim, heads) for heads in self.heads_counts] + [(size, self.heads) for size in self.key_dims]
        return tuple(
            Cell(logit_exponent=exponent, key_dim=size, heads=heads)
            for exponent in EXPONENTS
            for size, heads in dict.fromkeys(sizes)
        )

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the kernel of infinitely many heads, that of uniform attention, and the laws of logits."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        problem, gram = self.problem(), self.problem().gram
        limits = []
        for exponent, stream in zip(EXPONENTS, rng.spawn(len(EXPONENTS)), strict=True):
            branches = mean_field.sampled_blocks(problem, self.key_dim, exponent, oversampling=self.oversampling)
            limits.append(mean_field.solve_blocks(problem, branches, stream).stream[0, -1])
        own = np.diag(gram)
        return dataset(
            {
                "kernel": (
                    ("logit_exponent", "row", "row_too"),
                    np.stack(limits),
                    "kernel of the stream, H to infinity",
                ),
                "uniform": (
                    ("row", "row_too"),
                    mean_field.solve_blocks(problem).stream[0, -1],
                    "kernel of the stream under uniform attention, N to infinity",
                ),
                "gram": (("row", "row_too"), gram, "kernel below the first block, H to infinity"),
                "fluctuation": (
                    (),
                    float((np.outer(own, own) + gram**2).mean()),
                    "d times the kernel's variance there",
                ),
                "power": (
                    "logit_exponent",
                    [1 - 2 * exponent for exponent in EXPONENTS],
                    "exponent of N in the variance",
                ),
                "kurtosis": ("key_dim", [*map(excess_kurtosis, self.key_dims)], "excess kurtosis of the logits"),
                "below": (
                    ("key_dim", "level"),
                    np.stack([product_below(size) for size in self.key_dims]),
                    "share of the logits below a level",
                ),
            },
            {
                "logit_exponent": (list(EXPONENTS), "logit exponent", "1"),
                "key_dim": (list(self.key_dims), "key dimension", "1"),
            },
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw some networks of one size; keep their kernels below and above all blocks and describe their logits."""
        exponent, size = float(cell["logit_exponent"]), int(cell["key_dim"])
        network = Network(size, int(cell["heads"]), exponent)
        drawn = mean_field.train_seeds(self.problem(), network, key, self.networks, every_head=True)
        logits = drawn["head_logits"].values[:, 0].swapaxes(2, 3)  # (network, layer, head, sample, token, key)
        unit = size ** (0.5 - exponent)  # the std of all of them, since streams are normalized
        pooled = pool_logits(logits, np.full(logits.shape[-3:], unit))
        return dataset(
            {
                "kernel": (
                    ("network", "end", "row", "row_too"),
                    drawn["stream"].values[:, 0, [0, -1]],
                    "kernel of the stream below and above all blocks",
                ),
                "variance": ("network", pooled["square"] * unit**2, "variance of the logits over heads"),
                "excess": (
                    "network",
                    ((logits / unit) ** 4).reshape(len(logits), -1).mean(-1) - 3,
                    "excess kurtosis of the logits over heads",
                ),
                "below": (("network", "level"), pooled["below"], "share of the logits below a level"),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test kernels against H, then variance, kurtosis and distribution of logits against N."""
        claims = [self._start()]
        for exponent in EXPONENTS:
            claims += [self._square(exponent), self._root(exponent)]
            claims += [self._mean(exponent, uniform=uniform) for uniform in (False, True)]
        for exponent in EXPONENTS:
            claims.append(self._variance(exponent))
            for size in (self.key_dims[0], self.key_dims[-1]):
                claims += [self._kurtosis(exponent, size), self._law(exponent, size), self._gaussian(exponent, size)]
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show deviations of kernels against H, variances against N, and densities of logits."""
        return self._kernels(predicted, trained), self._variances(trained), self._densities(predicted, trained)

    def deviations(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> np.ndarray:
        """Return mean square deviations of single networks' kernels from the limit, (replicates, sizes)."""
        draws = self._draws(predicted, exponent)
        return mean_field.distances(self._stream(trained, exponent), draws.mean(0), _noise(draws)) ** 2

    def bias(
        self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float, *, uniform: bool = False
    ) -> SquaredDistance:
        """Return how far the mean kernel at the largest H is from a limit, over the root mean square of the limit."""
        found = self._stream(trained, exponent)[:, -1]
        wanted = predicted["uniform"].values[:1] if uniform else self._draws(predicted, exponent)
        size = float(np.sqrt((wanted.mean(0) ** 2).mean()))
        return squared_distance(found.reshape(-1, *found.shape[2:]) / size, wanted / size)

    def _start(self) -> Claim:
        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            found = self._stream(trained, 1.0, 0)  # the same at both exponents
            squares = mean_field.distances(found, predicted["gram"].values[0]) ** 2
            widths = self.key_dim * np.asarray(self.heads_counts)
            return (squares * widths).mean(-1) / float(predicted["fluctuation"].mean())

        return Claim(
            "Below the first block N H times the mean square deviation of a network's kernel is "
            "mean(X_aa X_bb + X_ab^2) (ratio)",
            ratio,
            quantity="mean square deviation, measured over derived",
            target=1.0,
            tolerance=0.1,
            basis="exact for sums over Gaussian entries; a tenth of it is allowed",
        )

    def _square(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: the mean square deviation of a network's residual kernel from the limit scales as "
            "1/H",
            lambda predicted, trained: fit_exponent(self.heads_counts, self.deviations(predicted, trained, exponent)),
            quantity="exponent of H",
            target=-1.0,
            tolerance=self._correction(),
            basis=f"a correction 1 + 2/H of the square moves the exponent by {self._correction():.2f} over these sizes",
        )

    def _root(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: the root mean square deviation of a network's residual kernel scales as 1/H",
            lambda predicted, trained: fit_exponent(
                self.heads_counts, np.sqrt(self.deviations(predicted, trained, exponent))
            ),
            quantity="exponent of H",
            target=-1.0,
            tolerance=0.25,
            basis="half way to H^(-1/2), which is derived here",
            expected="refuted",
        )

    def _mean(self, exponent: float, *, uniform: bool) -> Claim:
        most = 2 / self.heads_counts[-1]
        return distance_claim(
            f"{EXPONENTS[exponent]}: at H={self.heads_counts[-1]} the mean kernel is within {most:.2g} of that of "
            + ("uniform attention" if uniform else "infinitely many heads"),
            lambda predicted, trained: self.bias(predicted, trained, exponent, uniform=uniform),
            most,
            self.networks,
            basis="relative: c/H, the second order of fluctuations, with c of order one, at most 2; attention is "
            "uniform at infinite N only",
            expected="refuted" if uniform else "holds",
        )

    def _variance(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: the variance of attention logits over heads scales as N^{1 - 2 * exponent:g}",
            lambda predicted, trained: fit_exponent(
                self.key_dims, self._logits(trained, "variance", exponent).mean(-1)
            ),
            quantity="exponent of N",
            target=lambda predicted: float(predicted["power"].sel(logit_exponent=exponent).mean()),
            tolerance=0.05,
            basis="exact in every block of a normalized stream; a tenth of the difference to N^(-1/2) is allowed",
        )

    def _kurtosis(self, exponent: float, size: int) -> Claim:
        wanted = excess_kurtosis(size)
        return Claim(
            f"{EXPONENTS[exponent]}, N={size}: the excess kurtosis of attention logits over heads is 6/N",
            lambda predicted, trained: self._at(trained, "excess", exponent, size).mean(-1),
            quantity="excess kurtosis",
            target=lambda predicted: float(predicted["kurtosis"].sel(key_dim=size).mean()),
            tolerance=wanted / 2,
            basis="half of it: a Gaussian and the kurtosis of twice as small an N are both outside",
        )

    def _law(self, exponent: float, size: int) -> Claim:
        return distance_claim(
            f"{EXPONENTS[exponent]}, N={size}: attention logits of single heads have the law of q . k, both Gaussian",
            lambda predicted, trained: squared_distance(
                self._at(trained, "below", exponent, size).reshape(-1, len(LEVELS)),
                predicted["below"].sel(key_dim=size).values[:1],
            ),
            GAUSSIAN / 2,
            self.networks,
            basis="root mean square over levels of shares below them: half a per cent of probability",
        )

    def _gaussian(self, exponent: float, size: int) -> Claim:
        return distance_claim(
            f"{EXPONENTS[exponent]}, N={size}: attention logits of single heads are Gaussian",
            lambda predicted, trained: squared_distance(
                self._at(trained, "below", exponent, size).reshape(-1, len(LEVELS)), gaussian_below(0.0, 1.0)[None]
            ),
            GAUSSIAN,
            self.networks,
            basis="root mean square over levels: one per cent of probability",
            expected="holds" if _from_gaussian(size) < GAUSSIAN else "refuted",
        )

    def _correction(self) -> float:
        first, last = self.heads_counts[0], self.heads_counts[-1]
        return float(np.log((1 + 2 / first) / (1 + 2 / last)) / np.log(last / first))

    def _stream(self, trained: xr.Dataset, exponent: float, level: int = -1) -> np.ndarray:
        """Kernels below (0) or above all blocks, (replicates, sizes, network, row, row_too)."""
        found = mean_field.along(trained, "kernel", "heads", logit_exponent=exponent, key_dim=self.key_dim)
        counts = np.unique(trained["heads"].values[trained["key_dim"].values == self.key_dim])
        return found[:, np.isin(counts, self.heads_counts)][:, :, :, level]

    def _logits(self, trained: xr.Dataset, name: str, exponent: float) -> np.ndarray:
        """Return a variable along N, (replicates, sizes, network, ...)."""
        found = mean_field.along(trained, name, "key_dim", logit_exponent=exponent, heads=self.heads)
        sizes = np.unique(trained["key_dim"].values[trained["heads"].values == self.heads])
        return found[:, np.isin(sizes, self.key_dims)]

    def _at(self, trained: xr.Dataset, name: str, exponent: float, size: int) -> np.ndarray:
        return self._logits(trained, name, exponent)[:, self.key_dims.index(size)]

    def _draws(self, predicted: xr.Dataset, exponent: float) -> np.ndarray:
        return predicted["kernel"].sel(logit_exponent=exponent).transpose("prediction", "row", "row_too").values

    def _kernels(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        for exponent, words in EXPONENTS.items():
            squares = self.deviations(predicted, trained, exponent)
            curves.append(geometric_curve(self.heads_counts, squares, words, len(curves)))
        widths = self.key_dim * np.asarray(self.heads_counts)
        exact = float(predicted["fluctuation"].mean()) / widths
        curves.append(geometric_curve(self.heads_counts, exact[None], "below the first block", 2, "predicted"))
        curves.append(power_curve(self.heads_counts, curves[0].y[0], -1.0, "1/H", 3))
        return Lines(
            "Deviation of a network's residual kernel from infinitely many heads",
            "heads H",
            "mean square deviation",
            tuple(curves),
            log_x=True,
            log_y=True,
            note=f"After {self.depth} blocks, N={self.key_dim}; geometric means, bands range over replicates. Dashed: "
            "derived, below the first block.",
            shows=("the mean square deviation of a network's residual kernel",),
        )

    def _variances(self, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        for exponent, words in EXPONENTS.items():
            found = self._logits(trained, "variance", exponent).mean(-1)
            curves.append(geometric_curve(self.key_dims, found, words, len(curves)))
            guide = power_curve(self.key_dims, 1.0 if self.key_dims[0] == 1 else curves[-1].y[0], 1 - 2 * exponent, "")
            curves.append(guide)
        return Lines(
            "Variance of attention logits over heads before training",
            "key dimension N",
            "variance over heads",
            tuple(curves),
            log_x=True,
            log_y=True,
            note=f"H={self.heads}, all blocks; bands range over replicates. Grey: N^(1 - 2 alpha_A).",
            shows=("the variance of attention logits over heads scales",),
        )

    def _densities(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        def plot(exponent: float, size: int) -> tuple[Curve, ...]:
            return (
                density_curve(self._at(trained, "below", exponent, size).mean(1), "networks", "trained", 0),
                density_curve(predicted["below"].sel(key_dim=size).values[:1], "law of q . k", "predicted", 1),
                density_curve(gaussian_below(0.0, 1.0)[None], "Gaussian", "reference", 2),
            )

        return Multiples(
            "Attention logits of single heads before training",
            "logit over N^(1/2 - alpha_A)",
            "density",
            tuple(tuple(plot(exponent, size) for size in self.key_dims) for exponent in EXPONENTS),
            tuple(EXPONENTS.values()),
            tuple(f"N={size}" for size in self.key_dims),
            log_y=True,
            note="Heads, blocks, samples and pairs of tokens together; bands range over replicates.",
        )


def _noise(draws: np.ndarray) -> float:
    """Mean square error of the mean of draws of the limit."""
    return float(draws.var(0, ddof=1).mean()) / len(draws)


def _from_gaussian(size: int) -> float:
    """Root mean square difference over levels of the law of logits from a Gaussian."""
    return float(np.sqrt(((product_below(size) - gaussian_below(0.0, 1.0)) ** 2).mean()))

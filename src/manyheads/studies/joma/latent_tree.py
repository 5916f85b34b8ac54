"""`joma/latent-tree`: co-occurrence of the leaves of a latent tree, by theorem 5 and in sampled sequences.

The control is a tree with asymmetric transitions, whose co-occurrence is given by message passing and not by theorem 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.stats import norm

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Lines, Source, Study, Verdict, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cells
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.systems.latent_tree_task import LatentTree, binary_tree
from manyheads.theory.joma.theorems.latent_tree import heights, marginals, predict_cooccurrence, unroll
from manyheads.theory.papers import TIAN

TREES = ("symmetric", "asymmetric")
ALARM = 1e-5  # false alarm of the largest deviation over all heights and replicates
BLOCKS = 32  # independent blocks of sequences, whose standard deviation is the error
ASYMMETRIC = 0.8  # P(off | off) of the asymmetric tree; P(on | on) is that of the symmetric one


@dataclass(frozen=True)
class LatentTreeStudy(Study):
    """Co-occurrence of leaves by the height of their lowest common ancestor, beside theorem 5.

    Attributes
    ----------
    depth
        L: levels of the tree, the label's included; L - 1 levels of binary edges.
    branching
        Children of every latent.
    correlation
        rho of every edge.
    imbalance
        rho_0: minus the mean bias of the top latent.
    samples
        Sequences of one block, in rising order; 32 blocks are drawn.
    """

    name: ClassVar[str] = "joma/latent-tree"
    claim: ClassVar[str] = "Leaves of a latent tree co-occur as theorem 5 says, with correlation rho^(2H)"
    source: ClassVar[Source] = replace(TIAN, locus="theorem 5; the extension to any branching and the control are ours")
    vectorized: ClassVar[bool] = True

    depth: int = 6
    branching: int = 2
    correlation: float = 0.8
    imbalance: float = 0.2
    samples: tuple[int, ...] = (256, 1024, 4096)

    def __post_init__(self) -> None:
        if self.depth < 3 or self.branching < 2 or self.branching ** (self.depth - 1) > 4096:
            given = f"depth={self.depth}, branching={self.branching}"
            raise UsageError(f"{given}: expected a depth of 3 or more, branching of 2 or more, 4096 leaves at most")
        if len(self.samples) < 2 or list(self.samples) != sorted(set(self.samples)) or self.samples[0] < 64:
            raise UsageError(f"samples={self.samples}: expected two sizes or more, 64 or more each, in rising order")
        self._tree("symmetric")  # checks correlation and imbalance

    @classmethod
    def full(cls) -> LatentTreeStudy:
        """Return the study with a depth of eight and up to half a million sequences."""
        return cls(depth=8, samples=(256, 1024, 4096, 16384))

    @classmethod
    def small(cls) -> LatentTreeStudy:
        """Return the smallest configuration in which every claim can change."""
        return cls(depth=3, samples=(64, 128))

    def cells(self) -> tuple[Cell, ...]:
        """Return both trees at every number of samples."""
        return grid(tree=TREES, samples=self.samples)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the closed form, and message passing on both trees."""
        levels = np.arange(1, self.depth)
        first, others = self._pairs()
        exact = []
        for kind in TREES:
            tree = unroll(self._tree(kind))
            leaves = tree.leaves
            given = marginals(tree, {int(leaves[first]): 1})[1]
            exact.append([given[leaves[other]][1] for other in others])
        alone = marginals(unroll(self._tree("symmetric")), {})[1][-1][1]
        formula = predict_cooccurrence(self.correlation, levels, self.depth, self.imbalance)
        return dataset(
            {
                "formula": ("height", formula, "P(on | other on), theorem 5"),
                "together": (("tree", "height"), np.asarray(exact), "P(on | other on), message passing"),
                "alone": ((), alone, "P(on)"),
            },
            coords={"tree": list(TREES), "height": (levels, "height of the common ancestor")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Sample sequences; one pair of leaves per height gives binomial counts, all pairs the mean over pairs."""
        size = int(cell["samples"])
        place = TREES.index(str(cell["tree"])) * len(self.samples) + self.samples.index(size)
        drawn = self._tree(str(cell["tree"])).draw(jax.random.fold_in(key, place), BLOCKS * size)
        on = drawn.levels[-1].astype(jnp.float32)  # (all, leaves): sums below are whole and below 2^24
        first, others = self._pairs()
        blocks = on.reshape(BLOCKS, size, -1)
        given = blocks[..., first].sum(1).astype(jnp.float64)  # (blocks,)
        both = jnp.einsum("bn,bnh->bh", blocks[..., first], blocks[..., jnp.asarray(others)]).astype(jnp.float64)
        scatter = (both / jnp.maximum(given, 1)[:, None]).std(0, ddof=1)  # (height,)
        counts = on.T @ on  # (leaves, leaves)
        share = counts.astype(jnp.float64) / jnp.diagonal(counts).astype(jnp.float64)[:, None]
        above = jnp.asarray(heights((self.branching,) * (self.depth - 1)))
        levels = jnp.arange(1, self.depth)
        every = jax.vmap(lambda height: jnp.mean(share, where=above == height))(levels)
        return dataset(
            {
                "both": ("height", both.sum(0), "sequences with both on"),
                "given": ((), given.sum(), "sequences with the first on"),
                "scatter": ("height", scatter, "standard deviation of the frequency over blocks"),
                "together": ("height", every, "P(on | other on), mean over pairs"),
            },
            coords={"height": (np.arange(1, self.depth), "height of the common ancestor")},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Test counts against their binomial distribution, the order of the error, and the control.

        By hand, since the tolerance of the largest score follows from the number of replicates.
        """
        symmetric, asymmetric = (select_cells(trained, tree=kind) for kind in TREES)
        count = symmetric.sizes["replicate"] * symmetric.sizes["cell"] * symmetric.sizes["height"]
        bound = float(norm.isf(ALARM / 2 / count))
        basis = f"binomial counts: exceeded by chance once in {1 / ALARM:.0e} runs of {count} counts"
        formula, exact = predicted["formula"], predicted["together"]

        def agree(claim: str, counts: xr.Dataset, probability: xr.DataArray, expected: Expected = "holds") -> Verdict:
            score = float(np.abs(_scores(counts, probability)).max())
            found = Verdict.exact(claim, score, target=0.0, tolerance=bound, basis=basis, expected=expected)
            return replace(found, quantity="largest z-score of a count")

        error = symmetric["scatter"].mean("height").transpose("replicate", "cell").values
        fit = fit_exponent(np.asarray(self.samples), np.maximum(error, 1e-12))
        nearest, next_nearest = (symmetric["together"].isel(cell=-1, height=place).values for place in (0, 1))
        return (
            agree("With symmetric transitions leaves co-occur as the closed form of theorem 5", symmetric, formula),
            agree(
                "With asymmetric transitions leaves co-occur as message passing gives",
                asymmetric,
                exact.sel(tree="asymmetric"),
            ),
            agree(
                "With asymmetric transitions leaves co-occur as the closed form of theorem 5",
                asymmetric,
                formula,
                "refuted",
            ),
            replace(
                Verdict.from_interval(
                    "The error of the empirical co-occurrence scales as n^(-1/2) with n sequences",
                    fit.interval,
                    figure=fit.exponent,
                    target=-0.5,
                    tolerance=0.12,
                    basis="the rate of a mean; the error of 32 blocks is known to a tenth, a slope to hundredths",
                ),
                quantity="exponent of n",
            ),
            replace(
                Verdict.from_samples(
                    "Siblings co-occur more often than leaves of height two, by the difference of theorem 5",
                    nearest - next_nearest,
                    target=float(formula[0] - formula[1]),
                    tolerance=0.5 * float(formula[0] - formula[1]),
                    basis="within half of the predicted difference; the sampling error is far smaller",
                ),
                quantity="difference of probabilities",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show co-occurrence by height on both trees, and the error by the number of samples."""
        levels = predicted["height"].values
        formula = predicted["formula"]
        curves = []
        for group, kind in enumerate(TREES):
            found = select_cells(trained, tree=kind)["together"].isel(cell=-1).transpose("replicate", "height").values
            curves.append(spread_curve(levels, found, f"{kind}, drawn", group=group))
            exact = predicted["together"].sel(tree=kind).values[None]
            curves.append(spread_curve(levels, exact, f"{kind}, message passing", "predicted", group))
        curves.append(spread_curve(levels, formula.values[None], "closed form of theorem 5", "reference"))
        symmetric = select_cells(trained, tree="symmetric")
        error = symmetric["scatter"].mean("height").transpose("replicate", "cell").values
        sizes = np.asarray(self.samples, float)
        law = error.mean(0)[0] * (sizes / sizes[0]) ** -0.5
        return (
            Lines(
                "Co-occurrence of leaves",
                "height of the lowest common ancestor",
                "P(on | other on)",
                tuple(curves),
                note=f"{self.branching ** (self.depth - 1)} leaves; bands range over replicates.",
                shows=("leaves co-occur",),
            ),
            Lines(
                "Error of the empirical co-occurrence, symmetric tree",
                "sequences",
                "standard deviation over blocks",
                (spread_curve(sizes, error, "drawn"), spread_curve(sizes, law[None], "slope -1/2", "reference")),
                log_x=True,
                log_y=True,
                note="One pair of leaves per height, mean over heights.",
                shows=("error of the empirical",),
            ),
        )

    def _tree(self, kind: str) -> LatentTree:
        gap = 1 - abs(self.imbalance)  # the largest difference between the two labels
        bias = (-self.imbalance - gap, -self.imbalance + gap)
        tree = binary_tree((self.branching,) * (self.depth - 1), self.correlation, bias)
        if kind == "symmetric":
            return tree
        matrix = ((ASYMMETRIC, 1 - ASYMMETRIC), tree.transitions[0][1])
        return LatentTree(tree.branching, (matrix,) * (self.depth - 1), tree.top)

    def _pairs(self) -> tuple[int, list[int]]:
        """Return the first leaf and one partner for every height: the first leaf of the next group of that height."""
        return 0, [self.branching ** (height - 1) for height in range(1, self.depth)]


def _scores(trained: xr.Dataset, probability: xr.DataArray) -> np.ndarray:
    """Return binomial scores of the counts: their departure from the mean in standard deviations."""
    given, both = trained["given"].values, trained["both"].transpose("height", ...).values
    p = probability.values.reshape(-1, *(1,) * given.ndim)
    return (both - given * p) / np.sqrt(given * p * (1 - p))

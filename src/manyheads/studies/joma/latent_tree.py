"""`joma/latent-tree`: co-occurrence of the leaves of a latent tree, by theorem 5 and in sampled sequences.

The control is a tree with asymmetric transitions, whose co-occurrence is given by message passing and not by theorem 5.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

import manyheads.study as st
from manyheads.theory.joma.systems.latent_tree_task import LatentTree, binary_tree
from manyheads.theory.joma.theorems.latent_tree import heights, marginals, predict_cooccurrence, unroll
from manyheads.theory.papers import TIAN

TREES = ("symmetric", "asymmetric")
ALARM = 1e-5  # false alarm of the largest deviation over all heights and replicates
BLOCKS = 32  # independent blocks of sequences, whose standard deviation is the error
ASYMMETRIC = 0.8  # P(off | off) of the asymmetric tree; P(on | on) is that of the symmetric one
HEIGHT = "height of the lowest common ancestor"


class LatentTreeStudy(st.Study):
    """Co-occurrence of leaves by the height of their lowest common ancestor, beside theorem 5."""

    name = "joma/latent-tree"
    claim = "Leaves of a latent tree co-occur as theorem 5 says, with correlation rho^(2H)"
    source = TIAN.at("theorem 5; the extension to any branching and the control are ours")
    vectorized = True
    grid = {"tree": TREES, "samples": "samples"}

    depth: int = st.setting(6, "L: levels of the tree, the label's included", least=3, small=3, full=8)
    branching: int = st.setting(2, "Children of every latent", least=2)
    correlation: float = st.setting(0.8, "rho of every edge")
    imbalance: float = st.setting(0.2, "rho_0: minus the mean bias of the top latent")
    samples: tuple[int, ...] = st.sweep(
        (256, 1024, 4096), "Sequences of one of 32 blocks", least=64, small=(64, 128), full=(256, 1024, 4096, 16384)
    )

    def check(self) -> None:
        if self.branching ** (self.depth - 1) > 4096:
            raise st.UsageError(f"depth={self.depth}, branching={self.branching}: expected 4096 leaves at most")
        self._tree("symmetric")  # checks correlation and imbalance

    def predict(self, key: st.Key) -> st.Record:
        levels, exact = np.arange(1, self.depth), []
        for tree in (unroll(self._tree(kind)) for kind in TREES):
            given = marginals(tree, {int(tree.leaves[0]): 1})[1]
            exact.append([given[tree.leaves[other]][1] for other in self._partners()])
        formula = predict_cooccurrence(self.correlation, levels, self.depth, self.imbalance)
        return {
            "height": ("height", levels, HEIGHT),
            "formula": ("height", formula, "P(on | other on), theorem 5"),
            "together": (("tree", "height"), np.asarray(exact), "P(on | other on), message passing"),
        }

    def train(self, key: st.Key, tree: str, samples: int) -> st.Record:
        """Sample sequences; one pair of leaves per height gives binomial counts, all pairs the mean over pairs."""
        drawn = self._tree(tree).draw(self.independent(key, tree=tree, samples=samples), BLOCKS * samples)
        on = drawn.levels[-1].astype(jnp.float32)  # (all, leaves): sums below are whole and below 2^24
        blocks = on.reshape(BLOCKS, samples, -1)
        given = blocks[..., 0].sum(1).astype(jnp.float64)  # (blocks,)
        others = blocks[..., jnp.asarray(self._partners())]
        both = jnp.einsum("bn,bnh->bh", blocks[..., 0], others).astype(jnp.float64)
        counts = (on.T @ on).astype(jnp.float64)  # (leaves, leaves)
        share = counts / jnp.diagonal(counts)[:, None]
        levels, above = np.arange(1, self.depth), jnp.asarray(heights((self.branching,) * (self.depth - 1)))
        every = jax.vmap(lambda height: jnp.mean(share, where=above == height))(jnp.asarray(levels))
        scatter = (both / jnp.maximum(given, 1)[:, None]).std(0, ddof=1)
        return {
            "height": ("height", levels, HEIGHT),
            "both": ("height", both.sum(0), "sequences with both on"),
            "given": ((), given.sum(), "sequences with the first on"),
            "scatter": ("height", scatter, "standard deviation of the frequency over blocks"),
            "together": ("height", every, "P(on | other on), mean over pairs"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        both, given = trained["both"], trained["given"]
        count = both.sel(tree="symmetric").size
        for tree, words, p, expected in (
            ("symmetric", "the closed form of theorem 5", theory["formula"], "holds"),
            ("asymmetric", "message passing gives", theory["together"], "holds"),
            ("asymmetric", "the closed form of theorem 5", theory["formula"], "refuted"),
        ):
            score = abs(both - given * p) / (given * p * (1 - p)) ** 0.5
            yield st.Claim(
                f"With {tree} transitions leaves co-occur as {words}",
                score.sel(tree=tree).max(),
                st.near(0, norm.isf(ALARM / 2 / count)),
                f"binomial counts: exceeded by chance once in {1 / ALARM:.0e} runs of {count} counts",
                "largest z-score of a count",
                expected,
            )
        symmetric, step = trained.sel(tree="symmetric"), float(theory["formula"][0] - theory["formula"][1])
        yield st.Claim(
            "The error of the empirical co-occurrence scales as n^(-1/2) with n sequences",
            st.exponent(symmetric["scatter"].mean("height").clip(1e-12), "samples", "n"),
            st.near(-0.5, 0.12),
            "the rate of a mean; the error of 32 blocks is known to a tenth, a slope to hundredths",
        )
        siblings, cousins = (symmetric["together"].isel(samples=-1, height=place) for place in (0, 1))
        text = "Siblings co-occur more often than leaves of height two, by the difference of theorem 5"
        basis = "within half of the predicted difference; the sampling error is far smaller"
        yield st.Claim(text, siblings - cousins, st.near(step, step / 2), basis, "difference of probabilities")

    def _tree(self, kind: str) -> LatentTree:
        gap = 1 - abs(self.imbalance)  # the largest difference between the two labels
        bias = (-self.imbalance - gap, -self.imbalance + gap)
        tree = binary_tree((self.branching,) * (self.depth - 1), self.correlation, bias)
        if kind == "symmetric":
            return tree
        matrix = ((ASYMMETRIC, 1 - ASYMMETRIC), tree.transitions[0][1])
        return LatentTree(tree.branching, (matrix,) * (self.depth - 1), tree.top)

    def _partners(self) -> list[int]:
        """Return, for every height, the leaf beside leaf 0 whose lowest common ancestor with it has that height."""
        return [self.branching ** (height - 1) for height in range(1, self.depth)]

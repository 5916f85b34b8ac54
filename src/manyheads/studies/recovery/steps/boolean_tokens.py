"""`recovery/boolean-tokens`: how far logits of Boolean tokens are from normal ones, on lattices and far from them.

Logits are taken from an attention matrix and a query, and their distribution over Boolean keys is computed without
sampling. A signed permutation has the largest stable rank, no heavy row or column, and entries on a lattice; giving its
entries sizes between one half and three halves takes it off the lattice. A dense normal matrix is beside them.
"""

import numpy as np

import manyheads.study as st
from manyheads.recovery.planted import boolean_logits as logits
from manyheads.recovery.planted.task import normal_matrix
from manyheads.theory.papers import CHEN_LI

KINDS = ("lattice", "scaled", "dense")  # signed permutation, the same with entries of random sizes, normal matrix
FIGURES = {
    "distance": "Kolmogorov distance to the normal distribution",
    "near": "probability of |u| <= 1/d, over the normal one",
    "leading": "leading order of the distance",
}


class BooleanTokens(st.Study):
    """A Gaussian estimate for Boolean tokens is off by 1/sqrt(d) on lattices and by 1/d far from them."""

    name = "recovery/boolean-tokens"
    claim = "Gaussian estimates of Boolean logits are off by d^-1/2; far from lattices by 1/d"
    source = CHEN_LI.at("Boolean tokens and lattices, as told in the talk; laws derived here")
    grid = {"kind": KINDS, "dim": "dims"}

    dims: tuple[int, ...] = st.sweep(
        (16, 32, 64, 128), "dimensions d, even", least=2, multiple=2, small=(4, 8), full=(16, 32, 64, 128, 256, 512)
    )
    queries: int = st.setting(8, "queries for each attention matrix; figures are means over them", least=1, small=1)

    def predict(self, key: st.Key) -> st.Record:
        floor = [logits.lattice_distance_to_normal(dim) for dim in self.dims]
        return {"floor": ("dim", floor, FIGURES["leading"]), "power": ("kind", [-0.5, -1.0, -1.0], "power of d")}

    def train(self, key: st.Key, kind: str, dim: int) -> st.Record:
        rng = st.generator(key)
        if kind == "dense":
            theta = normal_matrix(rng, dim, 1.0)
        else:
            sizes = rng.uniform(0.5, 1.5, dim) if kind == "scaled" else np.ones(dim)
            sizes *= 2.0 * rng.integers(0, 2, dim) - 1
            theta = np.zeros((dim, dim))
            theta[rng.permutation(dim), np.arange(dim)] = sizes
        found = []
        for query in 2.0 * rng.integers(0, 2, (self.queries, dim)) - 1:
            weights = query @ theta
            lattice, other = logits.lattice_distance_to_normal, logits.edgeworth_distance_to_normal
            leading = lattice(dim) if kind == "lattice" else other(weights)
            found.append((*logits.measure_gap(weights, 1 / dim), leading))
        means = np.mean(found, axis=0)
        return {name: ((), float(value), FIGURES[name]) for name, value in zip(FIGURES, means, strict=True)}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        lattice, scaled, dense = (trained.sel(kind=kind) for kind in KINDS)
        last, (least, most) = dense.sel(dim=self.dims[-1]), (self.dims[0], self.dims[-1])
        power, half = "power of the dimension d", "half of the distance of the two laws' powers"
        yield st.Claim(
            "On a lattice the distance of Boolean logits to normal ones falls as d^-1/2 only, at full stable rank",
            st.exponent(lattice["distance"], "dim"),
            st.near(theory["power"].sel(kind="lattice"), 1 / least),
            "corrections of relative order 1/d",
            power,
        )
        yield st.Claim(
            "The distance on a lattice is half of the largest atom, (2 pi d)^-1/2",
            (lattice["distance"].mean("replicate") / theory["floor"]).sel(dim=most),
            st.near(1, 1 / most),
            "Stirling's next term, 1/(4 d), and the density's curvature over a step, four times as much",
            "distance over the closed form, largest dimension",
        )
        for kind, start in ((scaled, "Off the lattice, all else equal,"), (dense, "For a dense matrix")):
            text = f"{start} the distance falls as 1/d"
            figure = st.exponent(kind["distance"], "dim")
            yield st.Claim(text, figure, st.near(theory["power"].sel(kind=kind["kind"]), 0.25), half, power)
        text = "For a dense matrix the distance is the fourth-cumulant term of Edgeworth's expansion"
        basis = "the terms of sixth order are at most 9/d of it for normal weights"
        quantity = "distance over the closed form, largest dimension"
        yield st.Claim(text, last["distance"] / last["leading"], st.near(1, 9 / most), basis, quantity)
        text = "On a lattice a logit lies within 1/d of zero sqrt(d) times as often as the Gaussian estimate says"
        basis = "one atom, sqrt(2/(pi d)), over 2/(d sqrt(2 pi)); corrections of relative order 1/d"
        yield st.Claim(text, st.exponent(lattice["near"], "dim"), st.near(0.5, 1 / least), basis, power)
        yield st.Claim(
            "For a dense matrix the Gaussian estimate of logits within 1/d of zero is right below the floor of "
            "1/sqrt(d)",
            last["near"],
            st.near(1, 3 / most),
            "Edgeworth's correction of the density at zero is 3/(4 d) for normal weights; four of them",
            "probability over the Gaussian one, largest dimension",
        )

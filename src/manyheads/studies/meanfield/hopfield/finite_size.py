"""`meanfield/hopfield-finite-size`: overlaps of finite networks with 1-bit tokens against the mean-field map.

Where the map contracts, overlaps deviate from it by N^(-1/2), with a constant that linear response gives. Attention
multiplies noise by gamma / sqrt(M), so the law needs N well above gamma^2 / M; below that the deviation falls slower.
"""

import numpy as np

import manyheads.study as st
from manyheads.theory.meanfield import OneBitNetwork, mean_field_trajectory
from manyheads.theory.meanfield.hopfield.simulation import overlap_fluctuations, simulate_network
from manyheads.theory.papers import POC_LOPEZ

SLOPE = 0.05  # tolerance of a fitted exponent
LEVEL = 0.05  # tolerance of the mean squared error, relative to linear response


class FiniteSize(st.Study):
    """Deviation of the overlaps of finite networks from the mean-field map, by number of neurons."""

    name = "meanfield/hopfield-finite-size"
    claim = "Overlaps of N neurons deviate from the mean-field map by N^(-1/2)"
    source = POC_LOPEZ.at("mean-field limit; the error and its constant are derived here")

    weak: float = st.setting(0.5, "output inverse temperature beta far below the first bifurcation")
    strong: float = st.setting(1.0, "output inverse temperature beta near it")
    neurons: tuple[int, ...] = st.sweep(
        (300, 3000, 30_000, 300_000, 3_000_000, 30_000_000, 300_000_000),
        "N, multiples of the number of types",
        small=(30, 300, 3000),
    )
    asymptotic: int = st.setting(30_000, "size from which N^(-1/2) is expected at the larger beta", small=300)
    steps: int = st.setting(100, "tokens compared", small=8)
    runs: int = st.setting(1024, "runs behind each figure", small=4)

    def check(self) -> None:
        if min(len(self._sizes(below=True)), len(self._sizes(below=False))) < 2:
            raise st.UsageError(f"neurons={self.neurons}: expected two or more on each side of {self.asymptotic}")

    def cells(self) -> tuple[st.Cell, ...]:
        return st.grid(beta=(self.weak, self.strong), neurons=self.neurons)

    def predict(self, key: st.Key) -> st.Record:
        network, betas = OneBitNetwork.published(), (self.weak, self.strong)
        found = [(overlap_fluctuations(network, beta, self.steps) ** 2).mean() ** 0.5 for beta in betas]
        return {
            "constant": ("beta", found, "sqrt(N) times the rms deviation of overlaps, linear response"),
            "beta": ("beta", list(betas), "output inverse temperature"),
            "neurons": ("neurons", list(self.neurons), "neurons N"),
        }

    def train(self, key: st.Key, beta: float, neurons: int) -> st.Record:
        network = OneBitNetwork.published()
        rng = st.generator(key, neurons)
        exact = mean_field_trajectory(network, beta, self.steps)
        found = simulate_network(network, beta, self.steps, np.full(self.runs, neurons), rng)
        return {"error": ((), ((found - exact) ** 2).mean() ** 0.5, "rms deviation of overlaps")}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        weak, strong = (trained["error"].sel(beta=beta) for beta in (self.weak, self.strong))
        response = theory["constant"] / trained["neurons"] ** 0.5
        below, above = (self._sizes(below=which) for which in (True, False))
        law, root = "noise of independent bits has exponent -1/2; a tenth of it is allowed", st.near(-0.5, SLOPE)
        text = f"At beta = {self.weak:g} overlaps deviate from the mean-field map by N^(-1/2)"
        figure = st.exponent(weak, "neurons", "N", predicted=response.sel(beta=self.weak))
        yield st.Claim(text, figure, root, law)
        text = f"At beta = {self.strong:g} overlaps deviate by N^(-1/2)"
        figure = st.exponent(strong.sel(neurons=above), "neurons", "N", predicted=response.sel(beta=self.strong))
        yield st.Claim(f"{text} from N = {self.asymptotic:,} on", figure, root, law)
        network, figure = OneBitNetwork.published(), st.exponent(strong.sel(neurons=below), "neurons", "N")
        needed = f"attention multiplies noise, and gamma^2/M = {network.gain**2 / network.features:,.0f} neurons"
        text, basis = f"{text} already below N = {self.asymptotic:,}", f"{law}; {needed} are needed"
        yield st.Claim(text, figure, root, basis, expected="refuted")
        for beta in (self.weak, self.strong):
            constant = float(theory["constant"].sel(beta=beta))
            yield st.Claim(
                f"At beta = {beta:g} and the largest N the squared deviation is that of linear response (ratio)",
                trained["error"].sel(beta=beta).isel(neurons=-1) ** 2 * self.neurons[-1] / constant**2,
                st.near(1, LEVEL),
                "corrections of relative order gamma^2/(M N), below 0.1%, and 5% allowed",
                "squared deviation, measured over predicted",
            )

    def _sizes(self, below: bool) -> list[int]:
        """Return the sizes up to the asymptotic one, or from it on."""
        return [size for size in self.neurons if (size <= self.asymptotic if below else size >= self.asymptotic)]

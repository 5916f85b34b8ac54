"""`meanfield/stationary-moments`: time averages of finite networks with 1-bit tokens against those of the mean field.

A chaotic orbit of a finite network leaves the mean-field orbit after a time of order log N, so single tokens cannot be
compared. The averages <m_c> and <m_c^2> over a long orbit can: they differ by the error of a time average, and by a
bias of order 1/N once N is well above gamma^2 / M. On orbits that do not expand nearby ones the first part vanishes as
N^(-1/2). At eps = 0 the map is odd, so attractors come in mirrored pairs and averages over both are refused.
"""

from dataclasses import replace

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.meanfield import OneBitNetwork, mean_field_trajectory, simulate_network
from manyheads.theory.papers import POC_LOPEZ

EARLY = 100  # tokens of the comparison token by token
CHUNK = 16  # orbits of the mean field in memory at a time
AVERAGES = "time averages of overlaps and of their squares"
RMS_AVERAGES, RMS_TOKENS = "rms deviation of <m>, <m²>", f"rms deviation of the first {EARLY} tokens"


class StationaryMoments(st.Study):
    """Time averages of overlaps and of their squares in finite networks, by number of neurons."""

    name = "meanfield/stationary-moments"
    claim = "In chaos time averages converge to the mean field as N grows, tokens do not"
    source = POC_LOPEZ.at("mean-field limit; errors of time averages are derived here")

    regular: tuple[float, ...] = st.setting(
        (1.0, 1.255), "inverse temperatures of locked or quasi-periodic orbits", small=(1.0,)
    )
    chaotic: tuple[float, ...] = st.setting((1.28, 1.4, 2.0), "those of chaotic orbits", small=(1.4,))
    neurons: tuple[int, ...] = st.sweep(
        (300, 3000, 30_000, 300_000, 3_000_000, 30_000_000), "N, multiples of the number of types", small=(30, 300)
    )
    transient: int = st.setting(2000, "tokens before the averages", least=0, small=4)
    steps: int = st.setting(38_000, "averaged tokens", least=2, small=40)
    runs: int = st.setting(4, "finite networks of each size", least=1, small=2)
    orbits: int = st.setting(48, "orbits of the mean field, from random first tokens", least=2, small=2)
    positional_weight: float = st.setting(0.02, "eps, positive")

    def check(self) -> None:
        if not 0 < self.positional_weight <= 1:
            raise st.UsageError(
                f"positional_weight={self.positional_weight:g}: at eps = 0 the map is odd, and averages over mirrored "
                "attractors are zero without meaning; expected a number above 0 and up to 1"
            )

    def predict(self, key: st.Key) -> st.Record:
        network, rng, moments, early = self.network(), np.random.default_rng(0), [], []
        for begin in range(0, self.orbits, CHUNK):
            first = rng.uniform(-1, 1, (len(self.betas), CHUNK, network.types))
            if not begin:
                first[:, 0] = network.output[0]
            betas = np.repeat(np.array(self.betas)[:, None], CHUNK, 1)
            orbits = mean_field_trajectory(network, betas, self.transient + self.steps, initial=first)
            moments.append(_moments(orbits[:, :, self.transient :]))
            early.append(orbits[:, 0, :EARLY])
        found = np.concatenate(moments, 1)[:, : self.orbits]  # (beta, orbit, moment)
        return {
            "moments": (("beta", "moment"), found.mean(1), AVERAGES),
            "averaging": ("beta", found.var(1, ddof=1).mean(1) ** 0.5, "rms error of a time average"),
            "early": (("beta", "token", "feature"), early[0], "overlaps of the first tokens"),
            "beta": ("beta", list(self.betas), "output inverse temperature"),
            "moment": ("moment", _names(network.features), "moment"),
        }

    def train(self, key: st.Key) -> st.Record:
        network, rng = self.network(), st.generator(key)
        sizes = np.repeat(np.asarray(self.neurons)[:, None], self.runs, 1)
        moments, early = [], []
        for beta in self.betas:
            orbits = simulate_network(network, beta, self.transient + self.steps, sizes, rng)
            moments.append(_moments(orbits[:, :, self.transient :]))
            early.append(orbits[:, :, :EARLY])
        dims = ("beta", "neurons", "run")
        return {
            "moments": ((*dims, "moment"), moments, AVERAGES),
            "early": ((*dims, "token", "feature"), early, "overlaps of the first tokens"),
            "beta": ("beta", list(self.betas), "output inverse temperature"),
            "neurons": ("neurons", list(self.neurons), "neurons N"),
            "moment": ("moment", _names(network.features), "moment"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        averages, tokens = (deviations(theory, trained, name) for name in ("moments", "early"))
        for beta in self.regular:
            yield st.Claim(
                f"At beta = {beta:g}, not chaotic, time averages deviate from the mean field by N to a power of -1 to "
                "-1/2",
                st.exponent(averages.sel(beta=beta), "neurons", "N", RMS_AVERAGES),
                st.near(-0.75, 0.35),
                "bias by noise has exponent -1, the noise of an average -1/2; a tenth is allowed on either side",
            )
        for beta in self.chaotic:
            yield st.Claim(
                f"At beta = {beta:g}, chaotic, time averages at the largest N deviate by the error of an average "
                "(ratio)",
                averages.sel(beta=beta).isel(neurons=-1) / float(theory["averaging"].sel(beta=beta)),
                st.near(1, 1),
                f"rms over {self.orbits} orbits of the mean field, averaged as long; the error of an average is "
                "the tolerance as well",
                "deviation over the error of an average",
            )
        for beta in self.chaotic:
            yield st.Claim(
                f"At beta = {beta:g}, chaotic, the first {EARLY} tokens deviate from the mean field by N^(-1/2)",
                st.exponent(tokens.sel(beta=beta), "neurons", "N", RMS_TOKENS),
                st.near(-0.5, 0.05),
                "the exponent of noise that does not grow; a tenth of it is allowed",
                expected="refuted",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        averages, tokens = (deviations(theory, trained, name) for name in ("moments", "early"))
        error = theory["averaging"].broadcast_like(averages.isel(replicate=0, drop=True))
        yield st.lines(
            "Deviation of time averages from the mean field",
            "neurons",
            RMS_AVERAGES,
            {f"β = {beta:g}": averages.sel(beta=beta) for beta in self.chaotic + self.regular},
            {f"β = {beta:g}": error.sel(beta=beta) for beta in self.chaotic},
            log="xy",
            note=f"Averages over {self.steps:,} tokens of {self.runs} runs a replicate; bands: replicates. Dashed: "
            "error of a time average in chaos, from orbits of the mean field itself, averaged as long.",
            shows=("time averages",),
        )
        labels = "Deviation token by token, from the same first token", "neurons", RMS_TOKENS
        curves = {f"β = {beta:g}": tokens.sel(beta=beta) for beta in self.chaotic + self.regular}
        yield st.lines(*labels, curves, log="xy", shows=(f"the first {EARLY} tokens",))
        largest = trained["moments"].isel(neurons=-1).mean(("replicate", "run"))
        yield st.table(
            "Stationary moments",
            (
                {"β": f"{beta:g}", "system": system}
                | {str(name.values): f"{float(moments.sel(beta=beta, moment=name)):.3g}" for name in moments["moment"]}
                for beta in self.betas
                for system, moments in (("mean field", theory["moments"]), (f"N = {self.neurons[-1]:,}", largest))
            ),
            f"Mean over all runs and {self.orbits} orbits.",
        )

    @property
    def betas(self) -> tuple[float, ...]:
        return self.regular + self.chaotic

    def network(self) -> OneBitNetwork:
        return replace(OneBitNetwork.published(), positional_weight=self.positional_weight)


def deviations(theory: st.Data, trained: st.Data, name: str) -> xr.DataArray:
    """Return the rms deviation from the mean field over runs and all else, (replicate, beta, neurons)."""
    squares = (trained[name] - theory[name]) ** 2
    others = [dim for dim in squares.dims if dim not in ("replicate", "beta", "neurons")]
    return squares.mean(others) ** 0.5


def _moments(overlaps: np.ndarray) -> np.ndarray:
    """Return the averages of overlaps and of their squares over tokens: (..., tokens, M) to (..., 2 M)."""
    return np.concatenate([overlaps.mean(-2), (overlaps**2).mean(-2)], axis=-1)


def _names(features: int) -> list[str]:
    return [f"<m{at + 1}{power}>" for power in ("", "²") for at in range(features)]

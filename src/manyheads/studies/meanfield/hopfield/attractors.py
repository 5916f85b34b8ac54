"""`meanfield/attractors`: Lyapunov exponents and attractors of 1-bit self-attention, and finite networks on them.

Two runs of a finite network from one token differ by their noise. On an orbit that contracts their distance stays that
noise, of order N^(-1/2). On a chaotic one noise of any size grows to the size of the attractor. So the sign of the
largest Lyapunov exponent of the mean field says how the distance of two runs depends on N.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.studies.meanfield.hopfield.attractor_panels import attractor_panels
from manyheads.theory.meanfield import OneBitNetwork, simulate_network
from manyheads.theory.meanfield.hopfield.attractors import classify_attractors
from manyheads.theory.meanfield.hopfield.lyapunov import LyapunovSpectrum, bifurcation_scan, lyapunov_spectrum
from manyheads.theory.papers import POC_LOPEZ

# Output inverse temperatures of the publication's trajectories, and some on either side of them.
TABLE = (0.8, 1.0, 1.2, 1.255, 1.26451, 1.266, 1.27, 1.28, 1.4, 1.554, 2.0, 3.0)
WINDOW, ONSET = (0.5, 3.0), (1.24, 1.28)  # of the bifurcation diagrams: all temperatures, and the onset of chaos
GAINS = (20.0, 300.0)  # attention inverse temperatures of the phase diagram
EXPONENTS = 4
RECORD = 800  # tokens kept of an orbit of the table; orbits of period up to half of them are recognised
SHOWN = 80  # tokens kept of an orbit in a diagram
COEXISTENCE = 1.27  # of TABLE: two locked orbits exist
SLOPE = 0.05  # tolerance of a fitted exponent
TEMPERATURE = "output inverse temperature"
LYAPUNOV = ("Lyapunov exponents", "nat/step")


class AttractorStudy(st.Study):
    """Attractors of the published configuration by inverse temperature, and distances of finite networks on them."""

    name = "meanfield/attractors"
    claim = "The sign of the Lyapunov exponent decides if finite networks stay together"
    source = POC_LOPEZ.at("attractors of the mean field; exponents are derived here")
    revision = 2

    betas: tuple[float, ...] = st.setting(
        (0.8, 1.0, 1.28, 1.4, 2.0),
        "output inverse temperatures at which finite networks run",
        choices=TABLE,
        small=(0.8, 1.4),
    )
    neurons: tuple[int, ...] = st.sweep(
        (30_000, 300_000, 3_000_000, 30_000_000), "N, multiples of the number of types", small=(300, 3000)
    )
    tokens: int = st.setting(600, "tokens of the finite networks, of which the last half counts", least=2, small=8)
    pairs: int = st.setting(64, "pairs of runs", least=2, small=2)
    starts: int = st.setting(32, "random first tokens of the mean field at each temperature", least=1, small=1)
    transient: int = st.setting(40_000, "steps before those that count, a tenth in diagrams", small=80, full=100_000)
    steps: int = st.setting(
        20_000, "steps for the Lyapunov exponents of the table, a tenth in the diagrams", small=80, full=75_000
    )
    scan: int = st.setting(
        300,
        "temperatures of each bifurcation diagram: from a fixed token, and by continuation, up and down",
        least=2,
        small=len(TABLE),
        full=600,
    )
    phase: tuple[int, int] = st.setting(
        (48, 64), "gains and temperatures of the phase diagram", least=2, small=(3, len(TABLE) // 3), full=(100, 100)
    )

    def predict(self, key: st.Key) -> st.Record:
        network, (gains, temperatures) = OneBitNetwork.published(), self.phase
        networks = {"published": network, "no positions": replace(network, positional_weight=0.0)}
        table = [self._spectrum(each, np.array(TABLE), 1) for each in networks.values()]
        betas, onset = np.linspace(*WINDOW, self.scan), np.linspace(*ONSET, self.scan)
        shorter = self.transient // 10, self.steps // 10, SHOWN
        scans = [
            self._spectrum(network, betas, 10),
            *(bifurcation_scan(network, onset, direction, EXPONENTS, *shorter) for direction in ("up", "down")),
        ]
        gain, beta = np.linspace(*GAINS, gains), np.linspace(*WINDOW, temperatures)
        phases = self._spectrum(network, beta, 10, gain=gain[:, None])
        found = [classify_attractors(each) for each in table]
        periods = [classify_attractors(each).period for each in scans]
        where, along = ("network", "temperature"), ("scan", "place")
        return {
            "exponents": ((*where, "order"), [each.exponents for each in table], *LYAPUNOV),
            "error": (where, [each.errors for each in table], "standard error of the largest exponent", "nat/step"),
            "kind": (where, [each.kind for each in found], "attractor", None),
            "period": (where, [each.period for each in found], "period; 0 where there is none", "step"),
            "orbit": ((*where, "token", "feature"), [each.overlaps for each in table], "overlaps of the last tokens"),
            "beta": (along, [betas, onset, onset], TEMPERATURE),
            "scanned": ((*along, "order"), [each.exponents for each in scans], *LYAPUNOV),
            "scanned_period": (along, periods, f"period; 0 where there is none up to {SHOWN // 2}", "step"),
            "visited": ((*along, "late"), [each.overlaps[..., 0] for each in scans], "overlaps with the first feature"),
            "phases": (("gain", "phase_beta"), phases.exponents[..., 0], "largest Lyapunov exponent", "nat/step"),
            "network": ("network", list(networks), "network"),
            "scan": ("scan", ["fixed start", "up", "down"], "scan"),
            "temperature": ("temperature", list(TABLE), TEMPERATURE),
            "gain": ("gain", gain, "attention inverse temperature"),
            "phase_beta": ("phase_beta", beta, TEMPERATURE),
        }

    def train(self, key: st.Key) -> st.Record:
        network, sizes = OneBitNetwork.published(), np.asarray(self.neurons)
        rng = st.generator(key)
        apart = []
        for beta in self.betas:
            neurons = np.broadcast_to(sizes, (2, self.pairs, sizes.size))
            late = simulate_network(network, beta, self.tokens, neurons, rng)[..., self.tokens // 2 :, :]
            apart.append(((late[0] - late[1]) ** 2).mean((0, 2, 3)) ** 0.5)
        first = rng.uniform(-1, 1, (len(TABLE), self.starts, network.types))
        orbits = self._spectrum(network, np.repeat(np.array(TABLE)[:, None], self.starts, 1), 1, initial=first)
        found, dims = classify_attractors(orbits), ("temperature", "start")
        return {
            "distance": (("beta", "neurons"), apart, "rms distance of the overlaps of two networks"),
            "start_exponent": (dims, orbits.exponents[..., 0], "largest exponent from a random token", "nat/step"),
            "start_kind": (dims, found.kind, "attractor from a random token", None),
            "start_period": (dims, found.period, "its period; 0 where there is none", "step"),
            "beta": ("beta", list(self.betas), TEMPERATURE),
            "neurons": ("neurons", sizes, "neurons N"),
            "temperature": ("temperature", list(TABLE), TEMPERATURE),
        }

    def _spectrum(self, network: OneBitNetwork, betas: np.ndarray, shorter: int, **options: Any) -> LyapunovSpectrum:
        """Return the spectrum of orbits, `shorter` times as short as those of the table."""
        record = SHOWN if shorter > 1 else min(RECORD, self.steps)
        lengths = self.transient // shorter, self.steps // shorter
        return lyapunov_spectrum(network, betas, EXPONENTS, *lengths, record, **options)

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        published = theory.sel(network="published")
        for beta in self.betas:
            negative = float(published["exponents"].sel(temperature=beta)[0]) < 0
            yield st.Claim(
                f"At beta = {beta:g} the distance of two finite networks goes as N^(-1/2) if the largest Lyapunov "
                "exponent is negative, as N^0 if it is positive",
                st.exponent(trained["distance"].sel(beta=beta), "neurons", "N"),
                st.near(-0.5 if negative else 0, SLOPE),
                f"noise of independent bits has exponent -1/2, and noise that saturates before the last "
                f"{self.tokens - self.tokens // 2} tokens has 0; a tenth of their difference is allowed",
            )
        yield st.Claim(
            f"From random first tokens the kinds of attractors at {len(TABLE)} temperatures are those from W^o_1 "
            "(share of others)",
            float(_others(published, trained, "kind").mean()),
            st.near(0, 0.02),
            "counted; an exponent that is zero within its error is allowed for in two of a hundred orbits",
            "share of first tokens of another kind",
        )
        yield st.Claim(
            f"At beta = {COEXISTENCE:g} every random first token leads to an orbit of the period from W^o_1 (share "
            "of others)",
            float(_others(published, trained, "period").sel(temperature=COEXISTENCE).mean()),
            st.near(0, 0),
            "counted; one orbit of another period refutes it",
            "share of first tokens of another period",
            expected="refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        coexisting = _others(theory.sel(network="published"), trained, "period").mean("replicate")
        yield from attractor_panels(theory, coexisting, self.starts)


def _others(published: st.Data, trained: st.Data, what: str) -> xr.DataArray:
    """Return the share of random starts with another kind or period of attractor, (replicate, temperature)."""
    return (trained[f"start_{what}"] != published[what]).mean("start")

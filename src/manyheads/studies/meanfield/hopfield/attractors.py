"""`meanfield/attractors`: Lyapunov exponents and attractors of 1-bit self-attention, and finite networks on them.

Two runs of a finite network from one token differ by their noise. On an orbit that contracts their distance stays that
noise, of order N^(-1/2). On a chaotic one noise of any size grows to the size of the attractor. So the sign of the
largest Lyapunov exponent of the mean field says how the distance of two runs depends on N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.studies.meanfield.hopfield.attractor_panels import attractor_panels, distance_panel
from manyheads.study import Cell, Claim, Source, Study
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.hopfield.attractors import classify_attractors
from manyheads.theory.meanfield.hopfield.bifurcation import bifurcation_scan
from manyheads.theory.meanfield.hopfield.lyapunov import LyapunovSpectrum, lyapunov_spectrum
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork
from manyheads.theory.meanfield.hopfield.simulation import simulate_network
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


@dataclass(frozen=True)
class AttractorStudy(Study):
    """Attractors of the published configuration by inverse temperature, and distances of finite networks on them.

    Attributes
    ----------
    betas
        Output inverse temperatures at which finite networks run; of `TABLE`.
    neurons
        N, increasing; multiples of the number of types.
    tokens, pairs
        Tokens of the finite networks, of which the last half counts, and pairs of runs.
    starts
        Random first tokens of the mean field at each temperature of `TABLE`.
    transient, steps
        Steps of the mean field before and for the Lyapunov exponents of the table; a tenth of them in the diagrams.
    scan
        Temperatures in each bifurcation diagram: one from a fixed first token, two by continuation, up and down.
    phase
        Gains and temperatures of the phase diagram.
    """

    name: ClassVar[str] = "meanfield/attractors"
    claim: ClassVar[str] = "The sign of the Lyapunov exponent decides if finite networks stay together"
    source: ClassVar[Source] = replace(POC_LOPEZ, locus="attractors of the mean field; exponents are derived here")
    revision: ClassVar[int] = 2

    betas: tuple[float, ...] = (0.8, 1.0, 1.28, 1.4, 2.0)
    neurons: tuple[int, ...] = (30_000, 300_000, 3_000_000, 30_000_000)
    tokens: int = 600
    pairs: int = 64
    starts: int = 32
    transient: int = 40_000
    steps: int = 20_000
    scan: int = 300
    phase: tuple[int, int] = (48, 64)

    def __post_init__(self) -> None:
        if not self.betas or not set(self.betas) <= set(TABLE):
            raise UsageError(f"betas={self.betas}: expected temperatures of {TABLE}")
        check_rising("neurons", self.neurons)
        if min(self.tokens, self.pairs, self.scan, *self.phase) < 2 or self.starts < 1:
            raise UsageError("tokens, pairs, scan and phase: expected 2 or more of each, and one of starts")

    @classmethod
    def small(cls) -> AttractorStudy:
        """Return the smallest configuration in which every claim can change; all its orbits share one program."""
        return cls((0.8, 1.4), (300, 3000), 8, 2, 1, 80, 80, scan=len(TABLE), phase=(3, len(TABLE) // 3))

    @classmethod
    def full(cls) -> AttractorStudy:
        """Return the study with a phase diagram of 100 x 100 points and longer orbits."""
        return cls(transient=100_000, steps=75_000, scan=600, phase=(100, 100))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return exponents and attractors of the table, of three scans of beta, and of a phase diagram."""
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
        where, along = ("network", "temperature"), ("scan", "place")
        return dataset(
            {
                "exponents": ((*where, "order"), [each.exponents for each in table], "Lyapunov exponents", "nat/step"),
                "error": (where, [each.errors for each in table], "standard error of the largest exponent", "nat/step"),
                "kind": (where, [each.kind for each in found], "attractor", None),
                "period": (where, [each.period for each in found], "period; 0 where there is none", "step"),
                "orbit": (
                    (*where, "token", "feature"),
                    [each.overlaps for each in table],
                    "overlaps of the last tokens",
                ),
                "beta": (along, [betas, onset, onset], "output inverse temperature"),
                "scanned": ((*along, "order"), [each.exponents for each in scans], "Lyapunov exponents", "nat/step"),
                "scanned_period": (
                    along,
                    [classify_attractors(each).period for each in scans],
                    f"period; 0 where there is none up to {SHOWN // 2}",
                    "step",
                ),
                "visited": (
                    (*along, "late"),
                    [each.overlaps[..., 0] for each in scans],
                    "overlaps with the first feature",
                ),
                "phases": (("gain", "phase_beta"), phases.exponents[..., 0], "largest Lyapunov exponent", "nat/step"),
            },
            {
                "network": list(networks),
                "scan": ["fixed start", "up", "down"],
                "temperature": (list(TABLE), "output inverse temperature"),
                "gain": (gain, "attention inverse temperature"),
                "phase_beta": (beta, "output inverse temperature"),
            },
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Measure distances of pairs of finite networks, and follow the mean field from random first tokens."""
        network, sizes = OneBitNetwork.published(), np.asarray(self.neurons)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        apart = []
        for beta in self.betas:
            neurons = np.broadcast_to(sizes, (2, self.pairs, sizes.size))
            late = simulate_network(network, beta, self.tokens, neurons, rng)[..., self.tokens // 2 :, :]
            apart.append(((late[0] - late[1]) ** 2).mean((0, 2, 3)) ** 0.5)
        first = rng.uniform(-1, 1, (len(TABLE), self.starts, network.types))
        orbits = self._spectrum(network, np.repeat(np.array(TABLE)[:, None], self.starts, 1), 1, initial=first)
        found, dims = classify_attractors(orbits), ("temperature", "start")
        return dataset(
            {
                "distance": (("beta", "neurons"), apart, "rms distance of the overlaps of two networks"),
                "start_exponent": (dims, orbits.exponents[..., 0], "largest exponent from a random token", "nat/step"),
                "start_kind": (dims, found.kind, "attractor from a random token", None),
                "start_period": (dims, found.period, "its period; 0 where there is none", "step"),
            },
            {
                "beta": (list(self.betas), "output inverse temperature"),
                "neurons": (sizes, "neurons N"),
                "temperature": (list(TABLE), "output inverse temperature"),
            },
        )

    def _spectrum(
        self,
        network: OneBitNetwork,
        betas: np.ndarray,
        shorter: int,
        gain: np.ndarray | None = None,
        initial: np.ndarray | None = None,
    ) -> LyapunovSpectrum:
        """Return the spectrum of orbits, `shorter` times as short as those of the table."""
        record = SHOWN if shorter > 1 else min(RECORD, self.steps)
        lengths = self.transient // shorter, self.steps // shorter
        return lyapunov_spectrum(network, betas, EXPONENTS, *lengths, record, gain, initial)

    def claims(self) -> tuple[Claim, ...]:
        """Test distances against the sign of the exponent of the mean field, and attractors from random tokens."""
        return (
            *map(self._distance_claim, self.betas),
            Claim(
                f"From random first tokens the kinds of attractors at {len(TABLE)} temperatures are those from W^o_1 "
                "(share of others)",
                lambda predicted, trained: float(_others(predicted, trained, "kind").mean()),
                quantity="share of first tokens of another kind",
                target=0.0,
                tolerance=0.02,
                basis="counted; an exponent that is zero within its error is allowed for in two of a hundred orbits",
            ),
            Claim(
                f"At beta = {COEXISTENCE:g} every random first token leads to an orbit of the period from W^o_1 (share "
                "of others)",
                lambda predicted, trained: float(
                    _others(predicted, trained, "period")[:, TABLE.index(COEXISTENCE)].mean()
                ),
                quantity="share of first tokens of another period",
                target=0.0,
                tolerance=0.0,
                basis="counted; one orbit of another period refutes it",
                expected="refuted",
            ),
        )

    def _distance_claim(self, beta: float) -> Claim:
        """Compare the power of the distance in N with the sign of the largest exponent."""

        def exponent(predicted: xr.Dataset) -> float:
            table = predicted.sel(network="published", temperature=beta)
            return -0.5 if float(table["exponents"][0]) < 0 else 0.0

        return Claim(
            f"At beta = {beta:g} the distance of two finite networks goes as N^(-1/2) if the largest Lyapunov exponent "
            "is negative, as N^0 if it is positive",
            lambda predicted, trained: fit_exponent(np.asarray(self.neurons), distances(trained, beta)),
            quantity="exponent of N",
            target=exponent,
            tolerance=SLOPE,
            basis=f"noise of independent bits has exponent -1/2, and noise that saturates before the last "
            f"{self.tokens - self.tokens // 2} tokens has 0; a tenth of their difference is allowed",
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the bifurcation diagrams, attractors, exponents, the phase diagram, and distances by size."""
        apart = {beta: distances(trained, beta) for beta in self.betas}
        late = f"Tokens {self.tokens // 2 + 1} to {self.tokens} of {self.pairs} pairs of runs; bands: replicates."
        coexisting = _others(predicted, trained, "period").mean(0)
        return (*attractor_panels(predicted, coexisting, self.starts), distance_panel(apart, self.neurons, late))


def distances(trained: xr.Dataset, beta: float) -> np.ndarray:
    """Return the distances at one temperature, (replicates, sizes)."""
    return trained["distance"].isel(cell=0).sel(beta=beta).transpose("replicate", "neurons").values


def _others(predicted: xr.Dataset, trained: xr.Dataset, what: str) -> np.ndarray:
    """Return the share of random starts with another kind or period of attractor, (replicates, temperatures)."""
    expected = predicted[what].sel(network="published", drop=True)
    found = trained[f"start_{what}"].isel(cell=0)
    return (found != expected).mean("start").transpose("replicate", "temperature").values

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
from manyheads.study.panels import Picture, Scatter
from manyheads.theory.meanfield import OneBitNetwork, simulate_network
from manyheads.theory.meanfield.hopfield.attractors import classify_attractors
from manyheads.theory.meanfield.hopfield.lyapunov import LyapunovSpectrum, bifurcation_scan, lyapunov_spectrum
from manyheads.theory.papers import POC_LOPEZ

Rows = tuple[tuple[float, ...], ...]
BETA = "output inverse temperature β"
EXPONENT = "largest Lyapunov exponent (nat/step)"
CHAOTIC = 0.01  # exponents above it count as chaotic
COLOURED = (-0.15, 0.15)  # exponents at the ends of the scale of colours
DRAWN = (1.2, 1.255, 1.26451, 1.266, 1.27, 1.4, 3.0)  # temperatures whose attractors are drawn
PLACES = 4  # digits of a coordinate


def attractor_panels(theory: st.Data, coexisting: xr.DataArray, starts: int) -> st.Panels:
    """Draw the mean field; `coexisting` is the share of random starts with another period, by temperature."""
    scan = theory.sel(scan="fixed start")
    spectrum = scan["scanned"].assign_coords(place=scan["beta"].values)
    chaotic = _chaotic(spectrum.values[:, 0])
    yield _bifurcations(scan)
    yield _onset(theory.sel(scan=["up", "down"]))
    yield _attractors(theory)
    yield _table(theory, coexisting, starts)
    labels = f"Lyapunov spectrum, the {spectrum.sizes['order']} largest exponents", "place", "exponent (nat/step)"
    note = f"The largest exponent is above {CHAOTIC:g} at {chaotic} of the temperatures."
    curves = {f"λ{at + 1}": spectrum.isel(order=at, drop=True) for at in range(spectrum.sizes["order"])}
    yield st.lines(*labels, curves, reference={"": 0 * spectrum.isel(order=0, drop=True)}, x_label=BETA, note=note)
    yield _phases(theory)


def _bifurcations(scan: st.Data) -> Scatter:
    betas, visited, largest = scan["beta"].values, scan["visited"].values, scan["scanned"].values[:, 0]
    return Scatter(
        f"Bifurcation diagram: chaos at {_chaotic(largest)} of the temperatures",
        BETA,
        "overlap with feature 1",
        *_points(scan),
        EXPONENT,
        note=f"The last {visited.shape[1]} overlaps at each of {len(betas)} temperatures, every orbit from the first "
        f"token W^o_1. Chaos: a largest exponent above {CHAOTIC:g}.",
        limits=COLOURED,
        diverging=True,
    )


def _onset(scans: st.Data) -> Scatter:
    columns = [_points(scans.sel(scan=name)) for name in scans["scan"].values]
    x, y, values = (tuple(row for (row,) in column) for column in zip(*columns, strict=True))
    count, late = scans.sizes["place"], scans.sizes["late"]
    different = _hysteresis(scans["scanned_period"].values, scans["scanned"].values[..., 0])
    return Scatter(
        f"Bifurcation diagram by continuation: hysteresis at {different.mean():.0%} of the temperatures",
        BETA,
        "overlap with feature 1",
        x,
        y,
        values,
        EXPONENT,
        ("β increases", "β decreases"),
        note=f"The last {late} overlaps at each of {count} temperatures, each orbit from the end of the previous one. "
        f"At {different.sum()} temperatures the two scans find locked orbits of different periods (up to {late // 2}), "
        f"or one is locked and the other chaotic (exponent above {CHAOTIC:g}): several attractors coexist there.",
        limits=COLOURED,
        diverging=True,
    )


def _hysteresis(periods: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return at which temperatures two scans, (2, betas), end on different attractors that are both resolved."""
    kinds = np.where(periods > 0, periods, np.where(largest > CHAOTIC, -1, 0))  # 0: neither locked nor chaotic
    return (kinds[0] != kinds[1]) & (kinds != 0).all(0)


def _points(scan: st.Data) -> tuple[Rows, Rows, Rows]:
    """Return temperatures, overlaps and largest exponents of one scan, as one row of points each."""
    visited = scan["visited"].values
    betas, largest = (np.repeat(each, visited.shape[1]) for each in (scan["beta"].values, scan["scanned"].values[:, 0]))
    return _rows(betas), _rows(visited.ravel()), _rows(largest)


def _attractors(predicted: st.Data) -> Scatter:
    context = OneBitNetwork.published().context
    free = predicted.isel(temperature=0).sel(network="no positions")
    driven = [predicted.sel(network="published", temperature=beta) for beta in DRAWN]
    orbits, labels, kinds = [], [], []
    for chosen, name in ((free, ", ε = 0"), *((each, "") for each in driven)):
        period = int(chosen["period"])
        kinds.append(str(chosen["kind"].values))
        kind = f"period {period}" if period > 1 else kinds[-1]
        labels.append(f"β = {float(chosen['temperature']):g}{name}: {kind}")
        orbits.append(chosen["orbit"].transpose("token", "feature").values)
    position = np.arange(len(orbits[0])) % context + 1.0
    return Scatter(
        f"Attractors in the plane of two overlaps: {', '.join(sorted(set(kinds)))}",
        "overlap with feature 1",
        "overlap with feature 2",
        tuple(row for orbit in orbits for row in _rows(orbit[:, 0])),
        tuple(row for orbit in orbits for row in _rows(orbit[:, 1])),
        _rows(position) * len(orbits),
        "position of the token in the context",
        tuple(labels),
        shared=False,
        note=f"The last {len(orbits[0])} tokens. The positional bits drive the map with period {context}, so "
        "orbits that lock to them have a multiple of that period, and fixed points need ε = 0.",
    )


def _table(theory: st.Data, coexisting: xr.DataArray, starts: int) -> st.Listing:
    rows = []
    for beta in theory["temperature"].values:
        chosen = theory.sel(network="published", temperature=beta)
        exponents, kind, period = chosen["exponents"].values, str(chosen["kind"].values), int(chosen["period"])
        row = {"β": f"{beta:g}", "attractor, period": f"{kind}, {period}" if period else kind}
        row["λ1"] = f"{exponents[0].round(4) + 0.0:.4f} ± {float(chosen['error']):.1g}"
        row |= {f"λ{at}": f"{exponent:.3f}" for at, exponent in enumerate(exponents[1:], 2)}
        row["dimension"] = f"{_kaplan_yorke(exponents):.2f}" if kind == "chaotic" else ""
        rows.append(row | {"other period": f"{float(coexisting.sel(temperature=beta)):.0%}"})
    return st.table(
        "Attractors and Lyapunov exponents (nat/step)",
        rows,
        "From the first token W^o_1; ± is the standard error over blocks of the orbit. Dimension: Kaplan-Yorke, "
        f"of chaotic attractors. Other period: share of {starts} random first tokens that lead to another.",
    )


def _kaplan_yorke(exponents: np.ndarray) -> float:
    """Return the Kaplan-Yorke dimension: j + (sum of the j largest exponents, not negative) / |the next one|."""
    sums = np.cumsum(exponents)
    positive = int((sums >= 0).sum())
    if positive == len(exponents):
        return float("nan")
    return float(positive + (sums[positive - 1] / abs(exponents[positive]) if positive else 0.0))


def _phases(predicted: st.Data) -> Picture:
    betas, gains = predicted["phase_beta"].values, predicted["gain"].values[::-1]
    values = predicted["phases"].values[::-1]
    return Picture(
        f"Phase diagram: chaos at {_chaotic(values)} of {values.size:,} points",
        BETA,
        "attention inverse temperature γ",
        tuple(tuple(row.tolist()) for row in values.round(PLACES)),
        EXPONENT,
        _marks(betas, 0.5),
        _marks(gains, 50.0),
        note=f"Every orbit from the first token W^o_1. Chaos: a largest exponent above {CHAOTIC:g}.",
        limits=COLOURED,
        diverging=True,
    )


def _chaotic(exponents: np.ndarray) -> str:
    return f"{(exponents > CHAOTIC).mean():.0%}"


def _rows(values: np.ndarray) -> Rows:
    """Return the coordinates of one plot, rounded."""
    return (tuple(values.round(PLACES).tolist()),)


def _marks(values: np.ndarray, unit: float) -> tuple[str, ...]:
    """Return the multiples of a unit at the values nearest to them, and an empty text at the others."""
    texts = [""] * len(values)
    for multiple in np.arange(np.ceil(values.min() / unit), np.floor(values.max() / unit) + 1) * unit:
        texts[int(np.abs(values - multiple).argmin())] = f"{multiple:g}"
    return tuple(texts)


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

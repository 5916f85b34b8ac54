"""Pictures of `meanfield/attractors`: bifurcation diagrams, attractors, exponents and the phase diagram."""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.study.panels import Picture, Scatter
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

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

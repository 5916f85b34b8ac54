"""`demo/chaos`: the smallest self-attention network that is chaotic, and finite networks of its kind.

One feature, equal weights of all neurons and a context of two tokens. With the mean spin x_t of token t and the
positional bit p_t = -1, +1, -1, ... the mean field is a map of two numbers,

    q_t = -(1 - eps) x_t + eps p_t,    k_t = -(1 - eps) x_t - eps p_t,    v_t = (1 - eps) x_t - eps p_t,
    w_t = sigmoid(gamma q_t (k_t - k_{t-1})),    x_{t+1} = tanh(beta (w_t v_t + (1 - w_t) v_{t-1})).

With one token in the context w = 1 and x_{t+1} is a monotone function of x_t alone, which has no chaotic orbit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel, Scatter
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.hopfield.lyapunov import lyapunov_spectrum
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork
from manyheads.theory.meanfield.hopfield.simulation import simulate_network
from manyheads.theory.papers import POC_LOPEZ

POSITIONAL_WEIGHT = 0.1  # eps
GAINS = (0.0, 400.0)  # attention inverse temperatures of the bifurcation diagram
FIRST = 0.1  # mean spin of the first token of finite networks: of the size that overlaps have on the attractor
RECORD, SHOWN = 3000, 40  # tokens of the attractor, and at each gain of the diagram
NEARBY = 1e-8  # distance of two nearby orbits
AGREEMENT = 0.02  # of two measurements of an exponent, nat/step
CHAOTIC = 0.01  # exponents above it are drawn and counted as chaotic


@dataclass(frozen=True)
class DemoChaos(Study):
    """Lyapunov exponents of the smallest chaotic network, and the distance of finite networks that start alike.

    Attributes
    ----------
    beta, gain
        Inverse temperatures of the output and of attention.
    neurons
        Sizes N of the finite networks, increasing.
    tokens, pairs
        Tokens of a finite run, and pairs of runs at each size.
    starts
        First tokens from which the exponents are computed, and from which nearby orbits are followed.
    steps
        Steps behind the predicted exponents of each; a fifth of them for each pair of nearby orbits.
    scan
        Gains in the bifurcation diagram.
    """

    name: ClassVar[str] = "demo/chaos"
    claim: ClassVar[str] = "One feature and a context of two tokens are enough for chaos"
    source: ClassVar[Source] = replace(POC_LOPEZ, locus="the system; the smallest chaotic network is found here")

    beta: float = 1.25
    gain: float = 251.0
    neurons: tuple[int, ...] = (1000, 1_000_000, 1_000_000_000)
    tokens: int = 160
    pairs: int = 64
    starts: int = 32
    steps: int = 10_000
    scan: int = 400

    def __post_init__(self) -> None:
        check_rising("neurons", self.neurons)
        if min(self.tokens, self.pairs, self.scan) < 2 or self.starts < 2 or self.steps < 50:
            raise UsageError("expected tokens, pairs, starts and scan of 2 or more, and 50 steps or more")

    @classmethod
    def small(cls) -> DemoChaos:
        """Return the smallest configuration in which every claim can change."""
        return cls(neurons=(10, 1000), tokens=8, pairs=2, starts=2, steps=200, scan=2)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return Lyapunov exponents of the mean field, the attractor, and both along a scan of the gain."""
        scan = np.linspace(*GAINS, self.scan)
        gains = np.concatenate([np.full(self.starts, self.gain), scan])
        first = np.concatenate([np.linspace(-1, 1, self.starts), np.ones(self.scan)])[:, None]
        found = lyapunov_spectrum(
            smallest_network(), self.beta, 2, self.steps // 10, self.steps, RECORD, gains, initial=first
        )
        exponents = found.exponents[: self.starts]
        rest = slice(self.starts, None)
        return dataset(
            {
                "exponents": ("order", exponents.mean(0), "Lyapunov exponents, mean over first tokens", "nat/step"),
                "error": (
                    (),
                    exponents[:, 0].std(ddof=1) / self.starts**0.5,
                    "standard error of the largest one",
                    "nat/step",
                ),
                "orbit": ("token", found.overlaps[0, :, 0], "overlap of the last tokens"),
                "scanned": ("gain", found.exponents[rest, 0], "largest Lyapunov exponent", "nat/step"),
                "visited": (("gain", "late"), found.overlaps[rest, -SHOWN:, 0], "overlap of the last tokens"),
            },
            {"gain": (scan, "attention inverse temperature")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Follow nearby orbits of the closed form, and pairs of finite networks from the same first token."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        steps = self.steps // 5
        exponents = [separation_rate(self.beta, gain, self.starts, steps, rng) for gain in (self.gain, 0.0)]
        sizes = np.broadcast_to(np.asarray(self.neurons)[:, None, None], (len(self.neurons), self.pairs, 2))
        runs = simulate_network(smallest_network(), self.beta, self.tokens, sizes, rng, self.gain, np.array([FIRST]))[
            ..., 0
        ]
        apart = np.abs(runs[:, :, 0] - runs[:, :, 1])  # (sizes, pairs, tokens)
        return dataset(
            {
                "exponent": ((), exponents[0], "rate at which nearby orbits separate", "nat/step"),
                "uniform": ((), exponents[1], "that rate under uniform attention", "nat/step"),
                "apart": (("neurons", "token"), np.median(apart, 1), "median distance of two finite networks"),
                "late": ("neurons", apart[..., self.tokens // 2 :].mean((1, 2)), "mean distance in the last half"),
                "runs": (("run", "token"), runs[-1, 0], "overlap of the first pair of the largest size"),
            },
            {"neurons": (list(self.neurons), "neurons N"), "token": (np.arange(self.tokens) + 1, "token")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the exponent against nearby orbits, its sign, and finite networks."""
        return (
            Claim(
                "Nearby orbits separate at the largest Lyapunov exponent",
                lambda predicted, trained: _samples(trained, "exponent"),
                quantity="separation rate (1/token)",
                target=lambda predicted: float(predicted["exponents"][0]),
                tolerance=AGREEMENT,
                basis="two ways to measure one number, each of which averages over the attractor",
                prediction_error=lambda predicted: float(predicted["error"]),
            ),
            Claim(
                "The network is chaotic: nearby orbits separate (rate)",
                lambda predicted, trained: _samples(trained, "exponent"),
                quantity="separation rate (1/token)",
                target=CHAOTIC,
                tolerance=(0.0, np.inf),
                basis="a positive exponent, by more than the rate of a quasi-periodic orbit in so many steps",
            ),
            Claim(
                "Under uniform attention (gamma = 0) they approach each other (rate)",
                lambda predicted, trained: _samples(trained, "uniform"),
                quantity="separation rate (1/token)",
                target=-CHAOTIC,
                tolerance=(np.inf, 0.0),
                basis="a negative exponent",
            ),
            Claim(
                "Finite networks from one token separate to a distance that does not depend on N (exponent)",
                lambda predicted, trained: fit_exponent(
                    np.asarray(self.neurons), _samples(trained, "late").reshape(-1, len(self.neurons))
                ),
                quantity="exponent of N",
                target=0.0,
                tolerance=0.05,
                basis=f"noise of any size saturates before token {self.tokens // 2}; noise that does not has -1/2",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show how runs separate, the attractor, and the bifurcation diagram."""
        return (*self._separation(predicted, trained), self._attractor(predicted), self._bifurcations(predicted))

    def _separation(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Lines, Lines]:
        tokens = trained["token"].values
        pair = trained["runs"].isel(cell=0, replicate=0).transpose("run", "token").values
        apart = trained["apart"].isel(cell=0).transpose("neurons", "replicate", "token").values
        rate, kept = float(predicted["exponents"][0]), slice(0, min(60, len(tokens)))
        shown = tuple(tokens[kept].astype(float).tolist())
        largest = f"{self.neurons[-1]:,}"
        far = np.flatnonzero(np.abs(pair[0] - pair[1]) > 0.1)
        when = f"token {tokens[far[0]]}" if far.size else "no token"
        curves = [
            Curve(shown, tuple(np.maximum(each.mean(0), 1e-12)[kept].tolist()), f"N = {size:,}", group=group)
            for group, (size, each) in enumerate(zip(self.neurons, apart, strict=True))
        ]
        for group, size in enumerate(self.neurons):
            law = size**-0.5 * np.exp(rate * (tokens - 1.0))
            below = law < 1
            line = (tuple(tokens[below].astype(float).tolist()), tuple(law[below].tolist()))
            curves.append(Curve(*line, "exp(λ t) / √N" if not group else "", "predicted", group))
        return (
            Lines(
                f"Two networks of {largest} neurons from the same token",
                "token t",
                "overlap with the feature",
                tuple(
                    Curve(shown, tuple(run[kept].tolist()), f"run {at + 1}", group=at) for at, run in enumerate(pair)
                ),
                note=f"The runs differ by the noise of their neurons only. They are 0.1 apart from {when} on.",
            ),
            Lines(
                "Distance of two networks from the same token",
                "token t",
                "median distance of the overlaps",
                tuple(curves),
                log_y=True,
                note=f"Dashed: noise that grows at the largest Lyapunov exponent of the mean field, λ = {rate:.3f} "
                f"nat/step. Nearby orbits separate at {_samples(trained, 'exponent').mean():.3f} nat/step, and at "
                f"{_samples(trained, 'uniform').mean():.3f} under uniform attention.",
                shows=("Finite networks from one token",),
            ),
        )

    def _attractor(self, predicted: xr.Dataset) -> Scatter:
        orbit = predicted["orbit"].values
        position = np.arange(len(orbit) - 1) % 2 + 1.0
        return Scatter(
            "The attractor: each token against the next one",
            "overlap of token t",
            "overlap of token t + 1",
            (tuple(orbit[:-1].round(4).tolist()),),
            (tuple(orbit[1:].round(4).tolist()),),
            (tuple(position.tolist()),),
            "position of token t in the context",
            note=f"{len(orbit):,} tokens of the mean field, in the limit of infinitely many neurons.",
        )

    def _bifurcations(self, predicted: xr.Dataset) -> Scatter:
        visited, largest = predicted["visited"].values, predicted["scanned"].values
        columns = (np.repeat(each, visited.shape[1]) for each in (predicted["gain"].values, largest))
        gains, exponents = (tuple(column.round(4).tolist()) for column in columns)
        return Scatter(
            "Bifurcation diagram of attention",
            "attention inverse temperature γ",
            "overlap with the feature",
            (gains,),
            (tuple(visited.ravel().round(4).tolist()),),
            (exponents,),
            "largest Lyapunov exponent (nat/step)",
            note=f"The last {visited.shape[1]} tokens at each of {len(visited)} gains. The largest exponent is above "
            f"{CHAOTIC:g} at {(largest > CHAOTIC).mean():.0%} of them.",
            limits=(-0.5, 0.5),
            diverging=True,
        )


def smallest_network() -> OneBitNetwork:
    """Return the network of one feature, one type of neurons and a context of two tokens."""
    minus, plus = np.full((1, 1), -1.0), np.full((1, 1), 1.0)
    positional = np.array([[[1.0]], [[-1.0]], [[-1.0]]])
    return OneBitNetwork(plus, minus, minus, plus, positional, positional_weight=POSITIONAL_WEIGHT)


def next_spin(now: np.ndarray, before: np.ndarray, bit: float, beta: float, gain: float) -> np.ndarray:
    """Return the mean spin of the next token by the closed form above; `bit` is p of the token `now`."""

    def overlap(spins: np.ndarray, spin_sign: float, bit: float) -> np.ndarray:
        return spin_sign * (1 - POSITIONAL_WEIGHT) * spins + POSITIONAL_WEIGHT * bit

    query, key, key_before = overlap(now, -1, bit), overlap(now, -1, -bit), overlap(before, -1, bit)
    value, value_before = overlap(now, 1, -bit), overlap(before, 1, bit)
    weight = 0.5 * (1 + np.tanh(0.5 * gain * query * (key - key_before)))
    return np.tanh(beta * (weight * value + (1 - weight) * value_before))


def separation_rate(beta: float, gain: float, starts: int, steps: int, rng: np.random.Generator) -> float:
    """Return the rate at which nearby orbits of the closed form separate, in nats per step, from random tokens."""
    state, bit, logs = rng.uniform(-1, 1, (2, starts)), -1.0, []  # the latest token first
    offset = rng.standard_normal((2, starts))
    offset *= NEARBY / np.hypot(*offset)
    for place in range(steps + steps // 10):  # the first tenth aligns the offsets and is not counted
        both = np.stack([state, state + offset], axis=1)  # (2 tokens, 2 orbits, starts)
        both = np.stack([next_spin(both[0], both[1], bit, beta, gain), both[0]])
        state, offset, bit = both[:, 0], both[:, 1] - both[:, 0], -bit
        length = np.maximum(np.hypot(*offset), 1e-300)
        offset *= NEARBY / length
        if place >= steps // 10:
            logs.append(np.log(length / NEARBY))
    return float(np.mean(logs))


def _samples(trained: xr.Dataset, name: str) -> np.ndarray:
    """Return a variable by replicate, shape (replicates, ...)."""
    return trained[name].isel(cell=0).transpose("replicate", ...).values

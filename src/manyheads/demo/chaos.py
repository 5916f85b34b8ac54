"""`demo/chaos`: the smallest self-attention network that is chaotic, and finite networks of its kind.

One feature, equal weights of all neurons and a context of two tokens. With the mean spin x_t of token t and the
positional bit p_t = -1, +1, -1, ... the mean field is a map of two numbers,

    q_t = -(1 - eps) x_t + eps p_t,    k_t = -(1 - eps) x_t - eps p_t,    v_t = (1 - eps) x_t - eps p_t,
    w_t = sigmoid(gamma q_t (k_t - k_{t-1})),    x_{t+1} = tanh(beta (w_t v_t + (1 - w_t) v_{t-1})).

With one token in the context w = 1 and x_{t+1} is a monotone function of x_t alone, which has no chaotic orbit.
"""

from typing import Any

import numpy as np

import manyheads.study as st
from manyheads._namespaces import Floats
from manyheads.study.panels import Scatter
from manyheads.theory.meanfield import OneBitNetwork, lyapunov_spectrum, simulate_network
from manyheads.theory.papers import POC_LOPEZ

POSITIONAL_WEIGHT = 0.1  # eps
GAINS = (0.0, 400.0)  # attention inverse temperatures of the bifurcation diagram
FIRST = 0.1  # mean spin of the first token of finite networks: of the size that overlaps have on the attractor
RECORD, SHOWN = 3000, 40  # tokens of the attractor, and at each gain of the diagram
NEARBY = 1e-8  # distance of two nearby orbits
AGREEMENT = 0.02  # of two measurements of an exponent, nat/step
CHAOTIC = 0.01  # exponents above it are drawn and counted as chaotic


class DemoChaos(st.Study):
    """Lyapunov exponents of the smallest chaotic network, and the distance of finite networks that start alike."""

    name = "demo/chaos"
    claim = "One feature and a context of two tokens are enough for chaos"
    source = POC_LOPEZ.at("the system; the smallest chaotic network is found here")

    beta: float = st.setting(1.25, "Inverse temperature of the output")
    gain: float = st.setting(251.0, "Inverse temperature of attention")
    neurons: tuple[int, ...] = st.sweep((1000, 1_000_000, 1_000_000_000), "Neurons N", small=(10, 1000))
    tokens: int = st.setting(160, "Tokens of a finite run", least=2, small=8)
    pairs: int = st.setting(64, "Pairs of runs at each size", least=2, small=2)
    starts: int = st.setting(32, "First tokens of exponents, and of nearby orbits", least=2, small=2)
    steps: int = st.setting(10_000, "Steps of a predicted exponent; of nearby orbits a fifth", least=50, small=200)
    scan: int = st.setting(400, "Gains in the bifurcation diagram", least=2, small=2)

    def predict(self, key: st.Key) -> st.Record:
        """Return Lyapunov exponents of the mean field, the attractor, and both along a scan of the gain."""
        scan = np.linspace(*GAINS, self.scan)
        gains = np.concatenate([np.full(self.starts, self.gain), scan])
        first = np.concatenate([np.linspace(-1, 1, self.starts), np.ones(self.scan)])[:, None]
        times = self.steps // 10, self.steps, RECORD
        found = lyapunov_spectrum(smallest_network(), self.beta, 2, *times, gains, initial=first)
        exponents, rest = found.exponents[: self.starts], slice(self.starts, None)
        error = exponents[:, 0].std(ddof=1) / self.starts**0.5
        return {
            "exponents": ("order", exponents.mean(0), "Lyapunov exponents, mean over first tokens", "nat/step"),
            "error": ((), error, "standard error of the largest one", "nat/step"),
            "orbit": ("token", found.overlaps[0, :, 0], "overlap of the last tokens"),
            "gain": ("gain", scan, "attention inverse temperature"),
            "scanned": ("gain", found.exponents[rest, 0], "largest Lyapunov exponent", "nat/step"),
            "visited": (("gain", "late"), found.overlaps[rest, -SHOWN:, 0], "overlap of the last tokens"),
        }

    def train(self, key: st.Key) -> st.Record:
        """Follow nearby orbits of the closed form, and pairs of finite networks from the same first token."""
        rng = st.generator(key)
        steps = self.steps // 5
        exponents = [separation_rate(self.beta, gain, self.starts, steps, rng) for gain in (self.gain, 0.0)]
        sizes = np.broadcast_to(np.asarray(self.neurons)[:, None, None], (len(self.neurons), self.pairs, 2))
        given = smallest_network(), self.beta, self.tokens, sizes, rng, self.gain
        runs = simulate_network(*given, np.array([FIRST]))[..., 0]
        apart = np.abs(runs[:, :, 0] - runs[:, :, 1])  # (sizes, pairs, tokens)
        return {
            "neurons": ("neurons", list(self.neurons), "neurons N"),
            "token": ("token", np.arange(self.tokens) + 1, "token"),
            "exponent": ((), exponents[0], "rate at which nearby orbits separate", "nat/step"),
            "uniform": ((), exponents[1], "that rate under uniform attention", "nat/step"),
            "apart": (("neurons", "token"), np.median(apart, 1), "median distance of two finite networks"),
            "late": ("neurons", apart[..., self.tokens // 2 :].mean((1, 2)), "mean distance in the last half"),
            "runs": (("run", "token"), runs[-1, 0], "overlap of the first pair of the largest size"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        rate = "separation rate (1/token)"
        yield st.Claim(
            "Nearby orbits separate at the largest Lyapunov exponent",
            trained["exponent"],
            st.near(theory["exponents"][0], AGREEMENT),
            "two ways to measure one number, each of which averages over the attractor",
            rate,
            prediction_error=float(theory["error"]),
        )
        yield st.Claim(
            "The network is chaotic: nearby orbits separate (rate)",
            trained["exponent"],
            st.above(CHAOTIC),
            "a positive exponent, by more than the rate of a quasi-periodic orbit in so many steps",
            rate,
        )
        yield st.Claim(
            "Under uniform attention (gamma = 0) they approach each other (rate)",
            trained["uniform"],
            st.below(-CHAOTIC),
            "a negative exponent",
            rate,
        )
        yield st.Claim(
            "Finite networks from one token separate to a distance that does not depend on N (exponent)",
            st.exponent(trained["late"], "neurons", "N"),
            st.near(0, 0.05),
            f"noise of any size saturates before token {self.tokens // 2}; noise that does not has -1/2",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        pair = trained["runs"].isel(replicate=0)
        gaps = abs(pair.isel(run=0) - pair.isel(run=1))
        far = gaps["token"].values[gaps.values > 0.1]
        yield st.lines(
            f"Two networks of {self.neurons[-1]:,} neurons from the same token",
            "token",
            "overlap with the feature",
            {f"run {run + 1}": pair.isel(run=run, token=slice(60)) for run in (0, 1)},
            x_label="token t",
            note="The runs differ by the noise of their neurons only. They are 0.1 apart from "
            f"{f'token {far[0]}' if far.size else 'no token'} on.",
        )
        rate, token = float(theory["exponents"][0]), trained["token"]
        noise = {f"N = {size:,}": size**-0.5 * np.exp(rate * (token - 1.0)) for size in self.neurons}
        apart = trained["apart"].isel(token=slice(60)).clip(1e-12)
        yield st.lines(
            "Distance of two networks from the same token",
            "token",
            "median distance of the overlaps",
            {f"N = {size:,}": apart.sel(neurons=size) for size in self.neurons},
            {name: law.where(law < 1) for name, law in noise.items()},
            log="y",
            x_label="token t",
            note=f"Dashed: exp(λ t) / √N, noise that grows at the largest Lyapunov exponent of the mean field, λ = "
            f"{rate:.3f} nat/step. Nearby orbits separate at {float(trained['exponent'].mean()):.3f} nat/step, and at "
            f"{float(trained['uniform'].mean()):.3f} under uniform attention.",
            shows=("Finite networks from one token",),
        )
        orbit = theory["orbit"].values
        note = f"{len(orbit):,} tokens of the mean field, in the limit of infinitely many neurons."
        labels = "overlap of token t", "overlap of token t + 1", "position of token t in the context"
        shown = orbit[:-1], orbit[1:], np.arange(len(orbit) - 1) % 2 + 1.0
        yield _scatter("The attractor: each token against the next one", labels, shown, note=note)
        visited, largest = theory["visited"].values, theory["scanned"].values
        gains, exponents = (np.repeat(each, visited.shape[1]) for each in (theory["gain"].values, largest))
        note = f"The last {visited.shape[1]} tokens at each of {len(visited)} gains. The largest exponent is above "
        note += f"{CHAOTIC:g} at {(largest > CHAOTIC).mean():.0%} of them."
        labels = "attention inverse temperature γ", "overlap with the feature", "largest Lyapunov exponent (nat/step)"
        scale: dict[str, Any] = {"note": note, "limits": (-0.5, 0.5), "diverging": True}
        yield _scatter("Bifurcation diagram of attention", labels, (gains, visited.ravel(), exponents), **scale)


def _scatter(title: str, labels: tuple[str, str, str], columns: tuple[np.ndarray, ...], **options: Any) -> Scatter:
    x, y, values = ((tuple(each.round(4).tolist()),) for each in columns)
    return Scatter(title, *labels[:2], x, y, values, labels[2], **options)


def smallest_network() -> OneBitNetwork:
    """Return the network of one feature, one type of neurons and a context of two tokens."""
    minus, plus = np.full((1, 1), -1.0), np.full((1, 1), 1.0)
    positional = np.array([[[1.0]], [[-1.0]], [[-1.0]]])
    return OneBitNetwork(plus, minus, minus, plus, positional, positional_weight=POSITIONAL_WEIGHT)


def next_spin(now: Floats, before: Floats, bit: float, beta: float, gain: float) -> Floats:
    """Return the mean spin of the next token by the closed form above; `bit` is p of the token `now`."""

    def overlap(spins: Floats, spin_sign: float, bit: float) -> Floats:
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

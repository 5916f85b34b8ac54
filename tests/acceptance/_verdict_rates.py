"""Rates of wrong verdicts on samples of many distributions, and those of runs that go on until they are decided.

``python -m tests.acceptance._verdict_rates`` prints the tables of docs/verdicts.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from tests.acceptance._lane import Measured

from manyheads.statistics import decide, mean_interval
from manyheads.statistics.intervals import half_widths, mean_of, proportion_interval, standard_error_of
from manyheads.study.verdicts import Verdict

SIZES = (4, 8, 16, 32, 64)
BASIS = "a simulation"


@dataclass(frozen=True)
class Distribution:
    """A distribution: how it is sampled, its mean, and its interquartile range, a scale that all of them have."""

    name: str
    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
    mean: float
    quartiles: float


def _lognormal(sigma: float) -> Distribution:
    quartiles = 2 * math.sinh(sigma * stats.norm.isf(0.25))
    mean = math.exp(sigma**2 / 2)
    return Distribution(f"lognormal, σ = {sigma:g}", lambda rng, shape: rng.lognormal(0, sigma, shape), mean, quartiles)


def _pareto(power: float) -> Distribution:
    quartiles = 4 ** (1 / power) - (4 / 3) ** (1 / power)
    return Distribution(
        f"Pareto, exponent {power:g}", lambda rng, shape: 1 + rng.pareto(power, shape), power / (power - 1), quartiles
    )


def _outliers(share: float) -> Distribution:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return rng.standard_normal(shape) + 20 * (rng.random(shape) < share)

    return Distribution(f"normal, {share:.0%} outliers at 20 σ", draw, 20 * share, 1.35)


def _two_modes(share: float) -> Distribution:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return np.where(rng.random(shape) < share, 5.0, 0.0) + 0.1 * rng.standard_normal(shape)

    return Distribution(f"two modes, {share:.0%} in the smaller one", draw, 5 * share, 0.135)


def _centred(law: Distribution) -> Distribution:
    return Distribution(
        f"{law.name}, less its mean", lambda rng, shape: law.draw(rng, shape) - law.mean, 0.0, law.quartiles
    )


DISTRIBUTIONS = (
    Distribution("normal", lambda rng, shape: rng.standard_normal(shape), 0.0, 1.349),
    Distribution("Student, 5 degrees of freedom", lambda rng, shape: rng.standard_t(5, shape), 0.0, 1.453),
    Distribution("uniform", lambda rng, shape: rng.random(shape), 0.5, 0.5),
    Distribution("exponential", lambda rng, shape: rng.exponential(1, shape), 1.0, math.log(3)),
    _lognormal(0.5),
    _lognormal(1.0),
    _lognormal(1.5),
    _pareto(3.0),
    _pareto(1.5),
    _outliers(0.01),
    _outliers(0.05),
    _two_modes(0.15),
    _centred(_lognormal(1.5)),
)


@dataclass(frozen=True)
class Rates:
    """Shares of samples, by Student's interval and by the rule: [0] is Student's."""

    refuted: np.ndarray  # (2,), what is exactly true
    held: np.ndarray  # (2,), a claim "at most" or "at least" whose edge is the truth, the worse of the two
    decided: np.ndarray  # (2,), "the mean is this within two interquartile ranges", which is true, holds


def rates(law: Distribution, size: int, trials: int, rng: np.random.Generator) -> Rates:
    """Simulate the three claims."""
    samples = law.draw(rng, (trials, size))
    middle, half = mean_of(samples), half_widths(standard_error_of(samples), size - 1, 0.99)
    ends = np.array([(found.low, found.high) for found in map(mean_interval, samples)])
    low, high = np.array([middle - half, ends[:, 0]]), np.array([middle + half, ends[:, 1]])
    over, under = (low > law.mean).mean(1), (high < law.mean).mean(1)
    within = (low >= law.mean - 2 * law.quartiles) & (high <= law.mean + 2 * law.quartiles)
    return Rates(over + under, np.maximum(over, under), within.mean(1))


def logarithmic(law: Distribution, size: int, trials: int, rng: np.random.Generator) -> float:
    """Return how often a claim of the scale "log" on the true geometric mean is refuted."""
    samples = np.log(law.draw(rng, (trials, size)))
    truth = 0.0 if "lognormal" in law.name else 1 / float(law.name.split()[-1])
    return float(np.mean([decide(each.mean(), mean_interval(each), truth, 0.0) == "refuted" for each in samples]))


@dataclass(frozen=True)
class Peeking:
    """A run that is looked at after every replicate: outcome, and the replicates that it took."""

    naive: bool
    outcome: str
    replicates: int


def peek(samples: np.ndarray, first: int, target: float, tolerance: float) -> Peeking:
    """Look after every replicate from `first` on; `naive` is what Student's interval says at any of them."""
    counts = np.arange(first, len(samples) + 1)
    middles = np.cumsum(samples)[first - 1 :] / counts
    squares = np.cumsum((samples - samples.mean()) ** 2)[first - 1 :] - counts * (middles - samples.mean()) ** 2
    halves = half_widths(np.sqrt(squares / (counts - 1) / counts), counts - 1, 0.99)
    naive = bool((np.abs(middles - target) > tolerance + halves).any())
    stated = {"target": target, "tolerance": tolerance, "basis": BASIS}
    for now, middle in zip(counts.tolist(), middles.tolist(), strict=True):
        verdict = Verdict.from_interval("c", mean_interval(samples[:now]), figure=middle, **stated)
        verdict = verdict.at_any_time(first, now)
        if verdict.outcome != "inconclusive":
            break
    return Peeking(naive, verdict.outcome, now)


ALLOWED = {4: 0.07, 8: 0.045, 16: 0.015, 32: 0.01, 64: 0.01}  # with a finite variance and no outliers
UNSEEN = ("outliers", "modes", "less its mean")  # few samples hold none; without a sign there are no logarithms


def skewed_samples(folder: Path, trials: int, seed: int) -> Measured:
    """Simulate verdicts on all distributions and sizes."""
    rng, worst, passed = np.random.default_rng(seed), {}, True
    for size in SIZES:
        for law in DISTRIBUTIONS:
            if any(words in law.name for words in UNSEEN) or law is DISTRIBUTIONS[8]:
                continue
            found = rates(law, size, trials, rng)
            interval = proportion_interval(round(found.refuted[1] * trials), trials, 0.9999)
            passed &= interval.low <= ALLOWED[size]
            worst[size] = max(worst.get(size, (0.0, "")), (float(found.refuted[1]), law.name))
    shown = "; ".join(f"n = {size}: {100 * rate:.1f}% ({name})" for size, (rate, name) in worst.items())
    return Measured(
        f"refuted though true, at worst: {shown}", f"{trials} samples of each of 8 distributions", str(seed), passed
    )


def until_decided(folder: Path, trials: int, most: int, seed: int) -> Measured:
    """Look after every replicate at claims that are true of normal, Student, uniform and lognormal samples."""
    rng, parts, passed = np.random.default_rng(seed), [], True
    for law in (DISTRIBUTIONS[0], DISTRIBUTIONS[1], DISTRIBUTIONS[2], DISTRIBUTIONS[5]):
        found = [peek(each, 8, law.mean, 0.0) for each in law.draw(rng, (trials, most))]
        refuted = sum(each.outcome == "refuted" for each in found)
        passed &= proportion_interval(refuted, trials, 0.9999).low <= (0.02 if "lognormal" in law.name else 0.01)
        naive = sum(each.naive for each in found)
        parts.append(f"{law.name}: {100 * refuted / trials:.1f}% (Student's interval {100 * naive / trials:.0f}%)")
    return Measured(
        f"refuted though true: {'; '.join(parts)}", f"{trials} runs of 8 to {most} replicates", str(seed), passed
    )


def main(trials: int = 10_000, runs: int = 2000) -> None:
    """Print the tables."""
    rng = np.random.default_rng(31)
    head = f"| samples | {' | '.join(f'n = {size}' for size in SIZES)} |\n|---{'|---' * len(SIZES)}|"
    table = {(law.name, size): rates(law, size, trials, rng) for law in DISTRIBUTIONS for size in SIZES}
    for name in ("refuted", "held", "decided"):
        print(f"\n{name}, percent by Student's interval -> by the rule\n{head}")
        for law in DISTRIBUTIONS:
            pairs = [100 * getattr(table[law.name, size], name) for size in SIZES]
            print(f"| {law.name} | {' | '.join(f'{old:.1f} → {new:.1f}' for old, new in pairs)} |")
    print(f"\nrefuted on the scale log, percent\n{head}")
    for law in DISTRIBUTIONS[4:9]:
        print(f"| {law.name} | {' | '.join(f'{100 * logarithmic(law, n, trials, rng):.1f}' for n in SIZES)} |")
    print("\nuntil decided, percent refuted of what is exactly true, naive and by the sequence")
    for law in DISTRIBUTIONS[:9]:
        found = [peek(each, 8, law.mean, 0.0) for each in law.draw(rng, (runs, 64))]
        shares = np.mean([each.naive for each in found]), np.mean([each.outcome == "refuted" for each in found])
        print(f"| {law.name} | {100 * shares[0]:.1f} | {100 * shares[1]:.2f} |")
    print("\nuntil decided, normal samples, truth in the middle of target ± c standard deviations: mean replicates")
    for tolerance in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        found = [peek(each, 8, 0.0, tolerance) for each in rng.standard_normal((300, 256))]
        counts = [each.replicates for each in found]
        decided = np.mean([each.outcome == "holds" for each in found])
        print(f"| {tolerance} | {np.mean(counts):.0f} | {np.quantile(counts, 0.9):.0f} | {100 * decided:.0f} |")


if __name__ == "__main__":
    main()

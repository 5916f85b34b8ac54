"""Exact gradients, noise, reduced simulation against real training, sample laws, contexts of 100,000 positions."""

import time
from pathlib import Path

import jax
import numpy as np
from scipy import stats
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of
from tests.bigram.theory.test_noise import sample_gradients, state_at
from tests.bigram.theory.test_population import enumerate_task

from manyheads.bigram.studies.sample_law import SampleLaw
from manyheads.bigram.task import draw_batch, draw_task
from manyheads.bigram.theory.laws import balanced_settings, noise_strength
from manyheads.bigram.theory.noise import attention_noise, row_coefficients
from manyheads.bigram.theory.population import excess, measure_overlaps, raw_gradients
from manyheads.bigram.training.gaussian_sgd import simulate
from manyheads.bigram.training.proximal_sgd import State, StepSettings, descend, start
from manyheads.bigram.training.reduced_model import (
    descend_reduced,
    flip_reduced,
    materialise,
    measure_reduced,
    start_reduced,
)
from manyheads.bigram.training.sparse_sgd import descend_lazily, forget_places, measure_lazy
from manyheads.statistics import fit_exponent


def population_gradients(folder: Path, count: int, seed: int) -> Measured:
    """Compare with sums over all 2^4 contexts, queries and answers, for random V and A without any constraint."""
    rng, worst = np.random.default_rng(seed), 0.0
    for number in range(count):
        task = draw_task(rng, 2, 4, 1 + number % 4, uniform=False)
        value, attention = rng.standard_normal((2, 2)), rng.standard_normal((2, 4))
        _, for_value, for_attention = enumerate_task(task, value, attention)
        found = raw_gradients(task, value, attention)
        worst = max(worst, np.abs(found.value - for_value).max(), np.abs(found.attention - for_attention).max())
    return Measured(f"{worst:.1e}", f"worst entry of {count} random tasks and weights", str(seed), bool(worst < 1e-12))


def attention_scatter(folder: Path, signals: list[float], draws: int, seed: int) -> Measured:
    """Compare the variance at the positions that do not count with its closed form, over all queries."""
    rng, ratios = np.random.default_rng(seed), []
    task = draw_task(rng, 4, 40, 2)
    outside = task.attention == 0
    for signal in signals:
        value, attention = state_at(task, signal, signal)
        expected = attention_noise(task, value, row_coefficients(task, attention), 1) ** 2  # (N,)
        total, count = np.zeros(4), np.zeros(4)
        for _ in range(draws // 20_000):
            batch = draw_batch(rng, task, 20_000)
            gathered, _ = sample_gradients(task, value, attention, batch)
            kept = outside[batch.queries]
            np.add.at(total, batch.queries, np.where(kept, gathered**2, 0).sum(1))
            np.add.at(count, batch.queries, kept.sum(1))
        ratios.append(float(np.mean(total / count / task.stationary / expected)))
    shown = ", ".join(f"{ratio:.4f} at {signal:g}" for ratio, signal in zip(ratios, signals, strict=True))
    passed = all(0.98 <= ratio <= 1.02 for ratio in ratios)
    return Measured(shown, f"N = 4, T = 40, {draws:,} samples a signal", str(seed), passed)


def reduced_against_real(folder: Path, length: int, batch: int, real: int, reduced: int, looks: list[int]) -> Measured:
    """Compare medians of the value signal's size and of the attention's energy, at the steps of `looks`."""
    task = draw_task(np.random.default_rng(0), 3, length, 2, energy=0.206)
    rates = StepSettings(batch, 0.01 / task.attention_energy, 0.01 / task.transition_energy)
    states, runs = [start(task)] * real, start_reduced(task, reduced)
    rng, before, ratios, chances = np.random.default_rng(1), 0, [], []
    for look in looks:
        steps = look - before
        states = [descend(task, one, rates, steps, seed=[2, i], first_step=before) for i, one in enumerate(states)]
        runs, before = descend_reduced(task, runs, rates, steps, rng), look
        measured = [measure_overlaps(task, *one) for one in states]
        values = np.abs([one.value_signal for one in measured])
        simulated = measure_reduced(task, runs)
        ratios.append(np.median(values) / np.median(np.abs(simulated.value_signal)))
        chances.append(stats.ks_2samp(values, np.abs(simulated.value_signal)).pvalue)
    energy = np.median([one.attention_energy for one in measured]) / np.median(simulated.attention_energy)
    shown = ", ".join(f"{ratio:.3f} at {look}" for ratio, look in zip(ratios, looks, strict=True))
    extent = f"{real} real and {reduced} reduced runs; Kolmogorov-Smirnov p {min(chances):.2g} at least; "
    passed = all(abs(ratio - 1) < 0.15 for ratio in ratios)
    return Measured(shown, f"{extent}attention energy at the last {energy:.3f}", f"2, runs 0-{real - 1}", passed)


def stage_one_slope(folder: Path, lengths: list[int], kappa: float, groups: int, runs: int) -> Measured:
    """Fit samples until the boost against the length; a group of runs gives one median, a group one slope."""
    middle = 1 / (0.2 * (0.52 - 1 / 1000))  # kappa = eta T / B is kappa2 K_P K_Q
    law = SampleLaw(lengths=tuple(lengths), noises=(1.0, kappa * middle), noise=kappa * middle, runs=runs)
    cells = [cell for cell in law.cells() if cell["engine"] == "sgd"]
    found = [[law.train(jax.random.key(group), cell) for cell in cells] for group in range(groups)]
    samples = np.array([[float(one["samples"]) for one in row] for row in found])  # (groups, lengths)
    raw = fit_exponent(lengths, samples)
    divided = fit_exponent(lengths, samples / (np.log(lengths) + 1.3))
    mirrored = np.mean([[float(one["mirrored"]) for one in row] for row in found])
    medians = ", ".join(f"{value:,.0f}" for value in np.median(samples, axis=0))
    passed = 1.05 <= raw.exponent <= 1.25 and abs(divided.exponent - 1.03) < 0.07
    shown = f"{raw.exponent:.3f} raw, {divided.exponent:.3f} divided by ln T + 1.3"
    ends = (
        f"[{raw.interval.low:.3f}, {raw.interval.high:.3f}], [{divided.interval.low:.3f}, {divided.interval.high:.3f}]"
    )
    extent = f"{ends}; n = {medians}; mirrored {mirrored:.0%}"
    return Measured(shown, extent, f"0-{groups - 1}, {runs} runs each", bool(passed))


def large_simulation(
    folder: Path, vocabulary: int, length: int, seeds: int, steps: int, noise_ratio: float
) -> Measured:
    """Follow stage one without positions, then every position, without penalty and with three strengths."""
    rows, supports, lazies = [], [], []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, vocabulary])
        task = draw_task(rng, vocabulary, length, 2)
        batch = round(0.02 * length / (noise_ratio * task.transition_energy * task.attention_energy))
        rates = balanced_settings(task, batch, noise_ratio=noise_ratio)
        first = int((np.log(length) - 0.3) / 0.02)
        boosted = descend_reduced(task, start_reduced(task, 1), rates, first, rng, at_start=True)
        begin = materialise(task, flip_reduced(task, boosted), 0, rng)
        none = 0.5 * task.transition_energy * task.weight_energy
        best = []
        for ratio in (0.0, 1.0, 2.0, 3.0):
            strength = noise_strength(ratio, task.transition_energy, batch)
            settings = StepSettings(batch, rates.value_rate, rates.attention_rate, strength, constrained=False)
            spent = time.process_time()
            losses, last = _follow(task, begin, settings, steps, seed)
            spent = time.process_time() - spent
            best.append(min(losses) / none)
            top = np.sort(np.argpartition(-last.attention, 2, axis=1)[:, :2], axis=1)
            supports.append(float((top == task.positions).all(1).mean()))
        lazy, state, quick = [], forget_places(task, begin), time.process_time()
        for _ in range(steps // 10):
            state = descend_lazily(task, state, settings, 10, rng)
            lazy.append(measure_lazy(task, state).excess)
        lazies.append((min(lazy) / none / best[-1], spent / (time.process_time() - quick)))
        rows.append(best)
    table = np.array(rows)
    names = ("no penalty", "r = 1", "r = 2", "r = 3")
    shown = ", ".join(f"{name}: {value:.3f}" for name, value in zip(names, table.mean(0), strict=True))
    spans = ", ".join(f"{low:.3f}-{high:.3f}" for low, high in zip(table.min(0), table.max(0), strict=True))
    agree, faster = np.mean(lazies, axis=0)
    extent = f"{spans}; batch {batch:,}, right positions {min(supports):.0%} at least; lazy at r = 3: "
    extent += f"{agree:.3f} of the dense loss, {faster:.1f} times its speed in CPU time"
    passed = bool((table[:, 2] < 0.06).all() and (table[:, 0] / table[:, 2] > 10).all() and min(supports) == 1)
    return Measured(shown, extent, f"0-{seeds - 1}", passed)


def _follow(task, begin: State, settings: StepSettings, steps: int, seed: int) -> tuple[list[float], State]:
    """Return the excess loss every ten steps, and the last state."""
    state, losses = begin, []
    for first in range(0, steps, 10):
        state = simulate(task, state, settings, 10, seed=seed, first_step=first, noise="start", workers=1)
        losses.append(excess(task, *state))
    return losses, state


FIGURES = (
    Figure(
        "population-gradients",
        "the closed forms are the sums over all contexts, for any V and A",
        "< 1e-12 at N = 2, T = 4",
        population_gradients,
        {"count": 200, "seed": 0},
    ),
    Figure(
        "attention-scatter",
        "the variance of a batch's attention gradient off the true positions",
        "ratio to the closed form in [.98, 1.02] at 400,000 draws",
        attention_scatter,
        {"signals": [0.1, 0.5, 1.0], "draws": 400_000, "seed": 0},
    ),
    Figure(
        "reduced-against-real",
        "stage one without positions is stage one of real training",
        "medians within 15% at steps 200 to 800 (N = 3, T = 5000, B = 64)",
        reduced_against_real,
        {"length": 5000, "batch": 64, "real": 192, "reduced": 2048, "looks": [200, 400, 600, 800]},
    ),
    Figure(
        "stage-one-slope",
        "samples of real training grow like T (ln T + 1.3)",
        "raw slope in [1.05, 1.25]; divided by ln T + 1.3 within .07 of 1.03 (T = 250 to 4000, kappa = 1)",
        stage_one_slope,
        {"lengths": [250, 500, 1000, 2000, 4000], "kappa": 1.0, "groups": 8, "runs": 8},
    ),
    Figure(
        "large-simulation-100",
        "at 100,000 positions a penalty of two standard deviations beats none, from the same start",
        "relative excess at r = 2 below .06 and ten times below that without penalty; all positions right",
        large_simulation,
        {"vocabulary": 100, "length": 100_000, "seeds": 3, "steps": 200, "noise_ratio": 8.0},
    ),
    Figure(
        "large-simulation-500",
        "and at 500 tokens, 50 million entries of the attention",
        "relative excess at r = 2 below .06 and ten times below that without penalty; all positions right",
        large_simulation,
        {"vocabulary": 500, "length": 100_000, "seeds": 1, "steps": 120, "noise_ratio": 8.0},
    ),
    Figure(
        "sample-law",
        "samples by length, vocabulary and noise; the share of runs on the mirror side",
        "every verdict as expected",
        study,
        {"name": "bigram/sample-law", "replicates": 8},
        command=words_of("bigram/sample-law", 8),
    ),
)

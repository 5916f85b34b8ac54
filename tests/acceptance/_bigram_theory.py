"""Exact gradients, gradient noise, the reduced model against SGD, and sample complexity."""

from pathlib import Path

import jax
import numpy as np
from scipy import stats
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of
from tests.theory.bigram.theorems.test_gradient_noise import row_coefficients, sample_gradients, state_at
from tests.theory.bigram.theorems.test_population import enumerate_task

from manyheads.statistics import fit_exponent
from manyheads.studies.bigram.sample_complexity import SampleComplexity
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.gradient_noise import attention_noise
from manyheads.theory.bigram.theorems.population import gradients, measure_overlaps
from manyheads.theory.bigram.training.proximal_sgd import StepSettings, descend, initial_state
from manyheads.theory.bigram.training.reduced_model import ReducedChain, initial_runs, measure_reduced


def population_gradients(folder: Path, count: int, seed: int) -> Measured:
    """Compare with sums over all 2^4 contexts, queries and targets, for random A and random W with W mu = 0."""
    rng, worst = np.random.default_rng(seed), 0.0
    for number in range(count):
        task = draw_bigram_task(rng, 2, 4, 1 + number % 4, uniform=False)
        value, attention, mu = rng.standard_normal((2, 2)), rng.standard_normal((2, 4)), task.stationary
        value -= (value @ mu)[:, None]
        value -= value.mean(0)
        _, for_value, for_attention = enumerate_task(task, value, attention, centred=True)
        for_value = (for_value - np.outer(for_value.sum(1), mu)) / mu
        for_attention = for_attention / mu[:, None]
        for_attention -= for_attention.mean(1, keepdims=True)
        found = gradients(task, value, attention)
        worst = max(worst, np.abs(found.value - for_value).max(), np.abs(found.attention - for_attention).max())
    return Measured(f"{worst:.1e}", f"worst entry of {count} random tasks and weights", str(seed), bool(worst < 1e-12))


def attention_scatter(folder: Path, signals: list[float], draws: int, seed: int) -> Measured:
    """Compare the variance at the positions that do not count with its closed form, over all queries."""
    rng, ratios = np.random.default_rng(seed), []
    task = draw_bigram_task(rng, 4, 40, 2)
    outside = task.attention == 0
    for signal in signals:
        value, attention = state_at(task, signal, signal)
        expected = attention_noise(task, value, row_coefficients(task, attention), 1) ** 2  # (N,)
        total, count = np.zeros(4), np.zeros(4)
        for _ in range(draws // 20_000):
            batch = task.draw(rng, 20_000)
            gathered, _ = sample_gradients(task, value, attention, batch)
            kept = outside[batch.queries]
            np.add.at(total, batch.queries, np.where(kept, gathered**2, 0).sum(1))
            np.add.at(count, batch.queries, kept.sum(1))
        ratios.append(float(np.mean(total / count / task.stationary / expected)))
    shown = ", ".join(f"{ratio:.4f} at {signal:g}" for ratio, signal in zip(ratios, signals, strict=True))
    passed = all(0.98 <= ratio <= 1.02 for ratio in ratios)
    return Measured(shown, f"N = 4, T = 40, {draws:,} samples a signal", str(seed), passed)


def reduced_against_real(folder: Path, length: int, batch: int, real: int, reduced: int, looks: list[int]) -> Measured:
    """Compare medians of the value signal's size and of the attention's squared norm, at the steps of `looks`."""
    task = draw_bigram_task(np.random.default_rng(0), 3, length, 2, squared_norm=0.206)
    rates = StepSettings(batch, 0.01 / task.attention_squared_norm, 0.01 / task.transition_squared_norm)
    states, runs = [initial_state(task)] * real, initial_runs(task, reduced)
    chain, rng, before, ratios, chances = ReducedChain(task, rates), np.random.default_rng(1), 0, [], []
    for look in looks:
        steps = look - before
        states = [descend(task, one, rates, steps, seed=[2, i], first_step=before) for i, one in enumerate(states)]
        for _ in range(steps):
            runs = chain.step(rng, runs)
        before = look
        measured = [measure_overlaps(task, *one) for one in states]
        values = np.abs([one.value_signal for one in measured])
        simulated = measure_reduced(task, runs)
        ratios.append(np.median(values) / np.median(np.abs(simulated.value_signal)))
        chances.append(stats.ks_2samp(values, np.abs(simulated.value_signal)).pvalue)
    norm = np.median([one.attention_squared_norm for one in measured]) / np.median(simulated.attention_squared_norm)
    shown = ", ".join(f"{ratio:.3f} at {look}" for ratio, look in zip(ratios, looks, strict=True))
    extent = f"{real} real and {reduced} reduced runs; Kolmogorov-Smirnov p {min(chances):.2g} at least; "
    passed = all(abs(ratio - 1) < 0.15 for ratio in ratios)
    return Measured(shown, f"{extent}attention norm at the last {norm:.3f}", f"2, runs 0-{real - 1}", passed)


def stage_one_slope(folder: Path, lengths: list[int], kappa: float, groups: int, runs: int) -> Measured:
    """Fit samples until the plateau escape against the length; a group of runs gives one median, a group one slope."""
    middle = 1 / (0.2 * (0.52 - 1 / 1000))  # kappa = eta T / B is kappa2 K_P K_Q
    law = SampleComplexity(lengths=tuple(lengths), noises=(1.0, kappa * middle), noise=kappa * middle, runs=runs)
    cells = [cell for cell in law.cells() if cell["engine"] == "sgd"]
    found = [[law.train(jax.random.key(group), cell) for cell in cells] for group in range(groups)]
    samples = np.array([[float(one["samples"]) for one in row] for row in found])  # (groups, lengths)
    raw = fit_exponent(lengths, samples)
    divided = fit_exponent(lengths, samples / (np.log(lengths) + 1.3))
    flipped = np.mean([[float(one["flipped"]) for one in row] for row in found])
    medians = ", ".join(f"{value:,.0f}" for value in np.median(samples, axis=0))
    passed = 1.05 <= raw.exponent <= 1.25 and abs(divided.exponent - 1.03) < 0.07
    shown = f"{raw.exponent:.3f} raw, {divided.exponent:.3f} divided by ln T + 1.3"
    ends = (
        f"[{raw.interval.low:.3f}, {raw.interval.high:.3f}], [{divided.interval.low:.3f}, {divided.interval.high:.3f}]"
    )
    extent = f"{ends}; n = {medians}; flipped {flipped:.0%}"
    return Measured(shown, extent, f"0-{groups - 1}, {runs} runs each", bool(passed))


FIGURES = (
    Figure(
        "population-gradients",
        "the projected gradients are the sums over all contexts",
        "< 1e-12 at N = 2, T = 4",
        population_gradients,
        {"count": 200, "seed": 0},
        revision=2,
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
        "sample-complexity",
        "samples by length, vocabulary and noise; the share of flipped signs",
        "every verdict as expected",
        study,
        {"name": "bigram/sample-complexity", "replicates": 8},
        command=words_of("bigram/sample-complexity", 8),
    ),
)

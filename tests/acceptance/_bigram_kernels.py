"""The bigram's kernels: their speed against JAX and against memory, their agreement with JAX, and the normals' tails.

All but the last need the extra `fast`.
"""

from pathlib import Path

import numpy as np
from benchmarks import bigram as benchmark
from scipy import stats
from tests.acceptance._lane import Figure, Measured

from manyheads.bigram import StepSettings, descend, draw_task, start
from manyheads.bigram.engines.gaussian import draw_normals
from manyheads.bigram.engines.generator import sample_keys, scramble
from manyheads.bigram.training.proximal_sgd import State, observe


def step_speed(folder: Path, tokens: int, per_token: float, times: float) -> Measured:
    """Compare the step with the faster of JAX's two generators, in CPU time of children of their own."""
    results = {name: benchmark.in_child(name, tokens) for name in ("ours", "threefry", "rbg")}
    ours = results["ours"]
    faster = min("threefry", "rbg", key=lambda name: min(results[name]["cpu"]))
    spent = 1e9 * min(ours["cpu"]) / (benchmark.BATCH * benchmark.LENGTH)
    wall = 1e9 * min(ours["wall"]) / (benchmark.BATCH * benchmark.LENGTH)
    ratio = min(results[faster]["cpu"]) / min(ours["cpu"])
    return Measured(
        f"{spent:.2f} ns a token of CPU time, {wall:.2f} of wall time; JAX ({faster}) takes {ratio:.1f} times as long",
        f"N = {tokens}, T = {benchmark.LENGTH}, B = {benchmark.BATCH}; least of {len(ours['cpu'])} and of "
        f"{len(results[faster]['cpu'])} repeats; over pairs {benchmark.ratio(results[faster], ours)}",
        "task 4",
        spent <= per_token and ratio >= times,
    )


def pass_speed(folder: Path, times: float, per_normal: float) -> Measured:
    """Compare the simulation's pass with scaling the same array in place."""
    results = {name: benchmark.in_child(name) for name in ("roof", "quiet", "noisy", "normals")}
    least = {name: min(result["cpu"]) for name, result in results.items()}
    wall = {name: min(result["wall"]) for name, result in results.items()}
    numbers = benchmark.ROWS * benchmark.COLUMNS
    ratio, normal = least["quiet"] / least["roof"], 1e9 * least["normals"] / benchmark.NORMALS
    return Measured(
        f"without noise {ratio:.2f} times the roof ({1e3 * least['quiet']:.1f} against {1e3 * least['roof']:.1f} ms "
        f"CPU); {normal:.2f} ns per normal; with noise {1e3 * least['noisy']:.0f} ms, "
        f"{1e9 * least['noisy'] / numbers:.2f} ns per number",
        f"{benchmark.ROWS} x {benchmark.COLUMNS} float32; wall {1e3 * wall['quiet']:.1f}, {1e3 * wall['roof']:.1f} and "
        f"{1e3 * wall['noisy']:.0f} ms",
        "0",
        ratio <= times and normal < per_normal,
    )


def agreement(folder: Path, seeds: int, steps: int, states: float) -> Measured:
    """Compare both engines: gradients of the first step and states after tens of steps, and the tokens behind them."""
    worst, slopes = 0.0, 0.0
    for seed in range(seeds):
        for tokens, uniform in ((3, True), (3, False), (20, True), (20, False)):
            rng = np.random.default_rng([seed, tokens])
            task = draw_task(rng, tokens, 1000, 2, uniform=uniform)
            value = 0.5 * task.centred
            begin = State(value, start(task).attention)
            one, two = (observe(task, begin, 64, seed=seed, engine=engine) for engine in ("jax", "numba"))
            # every token enters the gradient of its position: a single one that differs moves it by more than rounding
            off = np.abs(one.attention - two.attention).max() / np.abs(one.attention).max()
            slopes = max(slopes, float(off))
            for strength, constrained in ((0.0, True), (0.01, False), (0.01, True)):
                settings = StepSettings(64, 0.01, 0.01, strength, constrained)
                one, two = (descend(task, begin, settings, steps, seed=seed, engine=e) for e in ("jax", "numba"))
                gaps = (np.abs(a - b).max() for a, b in zip(one, two, strict=True))
                worst = max(worst, *(float(gap) for gap in gaps))
    return Measured(
        f"states differ by {worst:.1e} at most after {steps} steps, gradients of a step by {slopes:.1e} of the largest",
        "N = 3 and 20, even and uneven laws, T = 1000, B = 64, all three rules",
        f"0-{seeds - 1}",
        worst < states and slopes < states,
    )


def normal_tails(folder: Path, seeds: int, kolmogorov: int, tails: int) -> Measured:
    """Test the distribution, and count the tails to 5 standard deviations."""
    pvalues, edges = [], np.array([3.0, 4.0, 4.5, 5.0])
    counts = np.zeros(len(edges))
    for seed in range(seeds):
        keys = sample_keys(scramble(seed), np.zeros(1, np.uint32), np.arange(1 + tails // 10**7, dtype=np.uint32))
        keys = np.stack(keys, axis=1)
        pvalues.append(float(stats.kstest(draw_normals(kolmogorov, *keys[0]), "norm").pvalue))
        for key in keys[1:]:
            sizes = np.abs(draw_normals(10**7, *key))
            counts += [(sizes > np.float32(edge)).sum() for edge in edges]
    expected = 2 * stats.norm.sf(edges) * seeds * (tails // 10**7) * 10**7
    ratios = counts / expected
    corrected = min(1.0, seeds * min(pvalues))
    z = (counts[-1] - expected[-1]) / expected[-1] ** 0.5
    return Measured(
        f"KS p {corrected:.2f} (least of {seeds}, times {seeds}); beyond 4 sigma {ratios[1]:.3f} of theory, beyond 5 "
        f"{ratios[-1]:.3f} ({int(counts[-1])} against {expected[-1]:.0f}, {z:+.1f} sd)",
        f"beyond 3 sigma {ratios[0]:.4f}, beyond 4.5 {ratios[2]:.3f} of theory; "
        f"{kolmogorov} and {tails} normals a seed",
        f"0-{seeds - 1}",
        bool(corrected > 0.01 and abs(ratios[1] - 1) < 0.1 and abs(z) < 4),
    )


FIGURES = [
    Figure(
        "sgd-step",
        "The compiled step draws, reads and differentiates a token in at most a nanosecond, 8 times faster than JAX",
        "at most 1 ns per token; at least 8 times faster than the gather-based JAX step",
        step_speed,
        {"tokens": 3, "per_token": 1.0, "times": 8.0},
    ),
    Figure(
        "population-step",
        "A simulated step without noise is limited by memory, one with noise by the normal generator",
        "without noise within 2 times an in-place scaling; below 1.5 ns per normal",
        pass_speed,
        {"times": 2.0, "per_normal": 1.5},
    ),
    Figure(
        "engines-agree",
        "Compiled kernels and JAX see the same tokens and agree to rounding",
        "states and relative gradients within 1e-5",
        agreement,
        {"seeds": 8, "steps": 50, "states": 1e-5},
    ),
    Figure(
        "normals",
        "The generator's normals are normal, to 5 standard deviations",
        "KS p above .01 at 2e6; fraction beyond 4 sigma within 10%; beyond 5 sigma within 4 sd",
        normal_tails,
        {"seeds": 8, "kolmogorov": 2_000_000, "tails": 20_000_000},
    ),
]

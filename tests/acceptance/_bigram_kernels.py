"""The compiled step of the bigram: its speed against JAX and its agreement with JAX; needs the extra `fast`."""

from pathlib import Path

import numpy as np
from benchmarks import bigram as benchmark
from tests.acceptance._lane import Figure, Measured

from manyheads.theory.bigram import draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings, batch_gradients, descend, initial_state


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


def agreement(folder: Path, seeds: int, steps: int, states: float) -> Measured:
    """Compare both engines: gradients of the first step and states after tens of steps, and the tokens behind them."""
    worst, slopes = 0.0, 0.0
    for seed in range(seeds):
        for tokens, uniform in ((3, True), (3, False), (20, True), (20, False)):
            rng = np.random.default_rng([seed, tokens])
            task = draw_bigram_task(rng, tokens, 1000, 2, uniform=uniform)
            value = 0.5 * task.centred
            begin = State(value, initial_state(task).attention)
            one, two = (batch_gradients(task, begin, 64, seed=seed, engine=engine) for engine in ("jax", "numba"))
            # every token enters the gradient of its position: a single one that differs moves it by more than rounding
            off = np.abs(one.attention - two.attention).max() / np.abs(one.attention).max()
            slopes = max(slopes, float(off))
            for penalty in (0.0, 0.01):
                settings = StepSettings(64, 0.01, 0.01, penalty)
                one, two = (descend(task, begin, settings, steps, seed=seed, engine=e) for e in ("jax", "numba"))
                gaps = (np.abs(a - b).max() for a, b in zip(one, two, strict=True))
                worst = max(worst, *(float(gap) for gap in gaps))
    return Measured(
        f"states differ by {worst:.1e} at most after {steps} steps, gradients of a step by {slopes:.1e} of the largest",
        "N = 3 and 20, even and uneven laws, T = 1000, B = 64, with and without a penalty",
        f"0-{seeds - 1}",
        worst < states and slopes < states,
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
        "engines-agree",
        "Compiled kernels and JAX see the same tokens and agree to rounding",
        "states and relative gradients within 1e-5",
        agreement,
        {"seeds": 8, "steps": 50, "states": 1e-5},
    ),
]

"""The mean-field theory of training against closed forms, its own limits, and networks of finite size."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.data import cut_patches, load_digits
from manyheads.limits import Network, Problem, train_networks
from manyheads.limits.theory.attention_heads import AttentionHeads
from manyheads.limits.theory.attention_limit import AttentionLimit
from manyheads.limits.theory.branches import Branch
from manyheads.limits.theory.depth import cells_in_depth, extrapolate
from manyheads.limits.theory.lazy import lazy_outputs
from manyheads.limits.theory.marching import March, blocks_in_depth, march
from manyheads.limits.theory.perceptron import Perceptron
from manyheads.limits.theory.uniform_attention import UniformAttention


def digits(samples: int = 2, **fields: Any) -> Problem:
    """Threes against fives in four patches of 16 pixels, 8 steps; at richness 1.5 the kernel moves by its own size."""
    found = load_digits()
    chosen = [np.flatnonzero(found.labels == (3, 5)[place % 2])[place // 2] for place in range(samples)]
    tokens = cut_patches(found.images[chosen].astype(float), 4).reshape(samples, 4, 16)
    tokens = tokens - tokens.mean((0, 1))
    targets = np.where(np.arange(samples) % 2, -1.0, 1.0)
    fields = {"steps": 8, "rate": 0.3, "richness": 0.75} | fields
    return Problem(tokens / np.sqrt((tokens**2).mean()), targets, **fields)


def solve(
    problem: Problem, *branches: Branch, cells: int | None = None, responses: bool = True, seed: int = 0
) -> March:
    rng = np.random.default_rng(seed)
    if cells is None:
        layers = [[branch.start(problem, rng)] for _ in range(problem.depth) for branch in branches]
        return march(problem, layers, blocks_in_depth(problem), responses=responses)
    layers = [[branch.start(problem, rng) for branch in branches] for _ in range(cells)]
    return march(problem, layers, cells_in_depth(problem, cells))


def rms(values: Any) -> float:
    return float(np.sqrt(np.nanmean(np.asarray(values) ** 2)))


def slope(sizes: list[int], errors: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def looked(found: March, name: str) -> np.ndarray:
    """What branches show at the last moment, (layer, ...)."""
    return np.array([look[name] for look in found.looks[-1] if name in look])


def lazy(folder: Path) -> Measured:
    """Lazy outputs and first steps at every depth and exponent; causal, per token, two outputs."""
    far, first = 0.0, 0.0
    for exponent in (1.0, 0.5):
        for depth in (1, 2, 4, 8):
            lesson = digits(depth=depth, depth_exponent=exponent, richness=1.0, steps=5)
            closed = lazy_outputs(lesson)
            far = max(far, np.abs(solve(replace(lesson, richness=1e-4), AttentionLimit()).outputs - closed).max())
            first = max(first, np.abs(solve(lesson, AttentionLimit()).outputs[1] - closed[1]).max())
    targets = np.random.default_rng(0).standard_normal((2, 4, 2))
    tokens = digits().inputs
    lesson = Problem(tokens, targets, steps=5, rate=0.3, richness=1e-4, depth=3, causal=True, read_out="token")
    token = np.abs(solve(lesson, AttentionLimit()).outputs - lazy_outputs(lesson)).max()
    shown = f"lazy {far:.1e}, first step {first:.1e}, causal per token {token:.1e}"
    return Measured(
        shown, "L = 1, 2, 4, 8, both exponents", "none", bool(far < 1e-8 and first < 1e-13 and token < 1e-8)
    )


def perceptron(folder: Path, neurons: int, seeds: int) -> Measured:
    """The first step at richness 1e-3 with erf neurons, and identity neurons against the exact linear branch."""
    lesson = digits(richness=1e-3, steps=2)
    closed = lazy_outputs(lesson, "erf")
    rich = Problem(digits().inputs[:, :1], np.array([1.0, -1.0]), steps=8, rate=0.3, depth=2)
    linear = solve(rich, AttentionLimit()).outputs
    anchors, identities = [], []
    for seed in range(seeds):
        anchors.append(
            rms(solve(lesson, AttentionLimit(), Perceptron("erf", neurons), seed=seed).outputs[1] - closed[1])
        )
        identities.append(rms(solve(rich, Perceptron("identity", neurons), seed=seed).outputs - linear))
    shown = f"erf {max(anchors):.1e}, identity {max(identities):.1e}"
    passed = max(anchors) < 2e-3 and max(identities) < 2e-3
    return Measured(shown, f"{neurons:,} neurons, the worst seed", f"0-{seeds - 1}", passed)


def continuum(folder: Path) -> Measured:
    """Midpoint cells, extrapolated finite depth at richness 1.5, and 1/L at richness 0.75."""
    rich, mild = digits(richness=1.5), digits()
    fine = solve(rich, AttentionLimit(), cells=32).outputs
    cells = rms(solve(rich, AttentionLimit(), cells=8).outputs - fine)
    deep = [solve(replace(rich, depth=depth), AttentionLimit()) for depth in (32, 64)]
    met = rms(extrapolate(*deep).outputs - fine)
    limit = solve(mild, AttentionLimit(), cells=32).outputs
    gaps = [rms(solve(replace(mild, depth=depth), AttentionLimit()).outputs - limit) for depth in (4, 8, 16, 32)]
    falls = [before / after for before, after in pairwise(gaps)]
    shown = f"8 cells {cells:.1e}; 2 f(64) - f(32) {met:.1e}; falls {', '.join(f'{fall:.2f}' for fall in falls)}"
    passed = cells < 1e-3 and met <= 0.005 and all(1.8 <= fall <= 2.1 for fall in falls)
    return Measured(shown, "rms over steps and samples", "none", passed)


def collapse(folder: Path, rate: float) -> Measured:
    """Depth exponent 1/2: logits vanish like 1/L, and the closed equations take over."""
    logits, marches = [], []
    for depth in (8, 16, 32):
        lesson = digits(depth=depth, depth_exponent=0.5, richness=1.5, rate=rate)
        whole, closed = solve(lesson, AttentionLimit()), solve(lesson, UniformAttention())
        logits.append(rms(looked(whole, "logits")[depth // 2]))
        marches.append(whole.outputs - closed.outputs)
    falls = [before / after for before, after in pairwise(logits)]
    left = rms(2 * marches[2] - marches[1])
    shown = f"logits fall by {', '.join(f'{fall:.2f}' for fall in falls)}; extrapolated difference {left:.1e}"
    return Measured(shown, "L = 8, 16, 32", "none", min(falls) >= 1.8 and left <= 0.008)


def key_dims(folder: Path, seeds: int) -> Measured:
    """Four blocks, four heads, N = 4, 16, 64: how single networks and the variance over heads approach the limit."""
    lesson, sizes = digits(depth=4), [4, 16, 64]
    limit = solve(lesson, AttentionLimit())
    wanted, logits = limit.outputs, looked(limit, "logits")
    errors: dict[str, list[float]] = {"outputs": [], "logits": [], "stream": []}
    spread = []
    for key_dim in sizes:
        found = train_networks(lesson, Network(key_dim, 4), range(seeds))
        errors["outputs"].append(rms(found.output - wanted))
        errors["logits"].append(rms(found.logits.values[:, -1] - logits))
        errors["stream"].append(rms(found.stream.values[:, -1] - limit.stream[-1]))
        spread.append(float(found.logit_variance[:, -1].mean()))
    without = rms(found.output.mean("seed") - solve(lesson, AttentionLimit(), responses=False).outputs)
    bias = rms(found.output.mean("seed") - wanted)
    slopes = {name: slope(sizes, values) for name, values in errors.items()}
    over = slope(sizes, spread)
    shown = ", ".join(f"{name} N^{value:.2f}" for name, value in slopes.items())
    shown += f"; variance over heads N^{over:.2f}; bias at N=64 {bias:.3f}, without responses {without:.3f}"
    passed = all(abs(value + 0.5) <= 0.12 for value in slopes.values()) and abs(over + 1.05) <= 0.15
    return Measured(shown, f"N = 4, 16, 64, H = 4, {seeds} seeds", f"0-{seeds - 1}", passed and without >= 0.08)


def half(folder: Path, seeds: int, samples: int) -> Measured:
    """Two blocks, N = 4, logit exponent 1/2: mean outputs and the spread of logits over heads at H = 64."""
    lesson = digits(depth=2)
    limit = solve(lesson, AttentionHeads(4, samples, 0.5))
    found = train_networks(lesson, Network(4, 64, 0.5), range(seeds))
    bias, error = rms(found.output.mean("seed") - limit.outputs), rms(found.output.std("seed")) / np.sqrt(seeds)
    spread = np.sqrt(looked(limit, "logit_variance").mean((1, 2, 3)))
    networks = np.sqrt(found.logit_variance[:, -1].mean("seed").values)
    start = [float(np.sqrt(look["logit_variance"].mean())) for look in limit.looks[0]]
    ratio = networks / spread
    shown = f"bias {bias:.4f}, spread of networks over theory {', '.join(f'{each:.4f}' for each in ratio)}"
    extent = f"standard error {error:.4f}; spread {np.round(start, 3).tolist()} -> {np.round(spread, 3).tolist()}"
    passed = bias <= 0.02 and bool(np.all(np.abs(ratio - 1) <= 0.02))
    return Measured(shown, extent, f"0-{seeds - 1}", passed)


def complete(folder: Path, seeds: int) -> Measured:
    """Pre-norm blocks with attention at N = 4 and gelu neurons, H = 4, 16, 64."""
    lesson, sizes = digits(depth=2, norm=True), [4, 16, 64]
    branches = (AttentionHeads(4, 2048), Perceptron("gelu", 8192))
    limit = solve(lesson, *branches)
    errors: dict[str, list[float]] = {"outputs": [], "logits": [], "pooled": []}
    for heads in sizes:
        found = train_networks(lesson, Network(4, heads, 1.0, "gelu"), range(seeds))
        errors["outputs"].append(rms(found.output - limit.outputs))
        errors["logits"].append(rms(found.logits.values[:, -1] - looked(limit, "logits")))
        errors["pooled"].append(rms(found.pooled.values[:, -1] - limit.pooled[-1]))
    mean, noise = found.output.mean("seed"), rms(found.output.std("seed")) / np.sqrt(seeds)
    bias = rms(mean - limit.outputs)
    without = rms(mean - solve(lesson, *branches, responses=False).outputs)
    slopes = {name: slope(sizes, values) for name, values in errors.items()}
    shown = ", ".join(f"{name} H^{value:.2f}" for name, value in slopes.items())
    shown += f"; bias at H=64 {bias:.4f}, without responses {without:.3f}"
    passed = all(abs(value + 0.5) <= 0.1 for value in slopes.values()) and bias <= 0.012 and without >= 0.08
    return Measured(shown, f"standard error of the mean {noise:.4f}", f"0-{seeds - 1}", passed)


def towards_key_dim(folder: Path, samples: int) -> Measured:
    """Infinitely many heads of key dimension N against infinite N, four blocks, richness 1.5."""
    lesson = digits(depth=4, richness=1.5)
    limit = solve(lesson, AttentionLimit()).outputs
    gaps = [rms(solve(lesson, AttentionHeads(N, samples // N)).outputs - limit) for N in (4, 8, 16, 32)]
    shown = f"{', '.join(f'{gap:.3f}' for gap in gaps)}: falls by {gaps[0] / gaps[-1]:.1f}"
    return Measured(shown, "N = 4, 8, 16, 32", "0", gaps[0] / gaps[-1] >= 3)


def figure(measure: Callable[..., Measured], name: str, claim: str, required: str, **settings: Any) -> Figure:
    return Figure(f"meanfield-{name}", claim, required, measure, settings)


FIGURES = (
    figure(lazy, "lazy", "the lazy limit and the first step in closed form", "1e-8; 1e-13; 1e-8"),
    figure(
        perceptron, "neurons", "erf and identity neurons against closed forms", "2e-3 each", neurons=16_384, seeds=2
    ),
    figure(continuum, "continuum", "finite depth and midpoint cells meet", "1e-3; 5e-3; each doubling 1.8 to 2.1"),
    figure(
        collapse,
        "collapse",
        "depth exponent 1/2: attention stays uniform",
        "falls >= 1.8; difference <= 0.008",
        rate=0.15,
    ),
    figure(
        key_dims,
        "key-dim",
        "networks approach infinite key dimension",
        "slopes -0.5 +- 0.12, variance -1.05 +- 0.15, without responses >= 0.08",
        seeds=24,
    ),
    figure(half, "half", "logit exponent 1/2, many heads", "bias <= 0.02, spread within 2%", seeds=64, samples=2048),
    figure(
        complete,
        "complete",
        "complete blocks, many heads",
        "slopes -0.5 +- 0.1, bias <= 0.012, without responses >= 0.08",
        seeds=24,
    ),
    figure(
        towards_key_dim, "towards-key-dim", "many heads approach infinite key dimension", "falls by 3", samples=8192
    ),
)

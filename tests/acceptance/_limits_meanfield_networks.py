"""The mean-field theory of training against trained networks: rates, means, and what they are without responses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.stats import sem
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._limits_distances import (
    GROUPS,
    about,
    apart,
    approach,
    bare,
    means,
    power,
    shown,
    signed_root,
    train,
)
from tests.acceptance._limits_meanfield import figure, looked, rms, seeds_of, solve, toy_problem

from manyheads.statistics import Interval
from manyheads.statistics.exponents import fit_exponent_to_means
from manyheads.statistics.intervals import discrepancy_interval
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.finite.problems import text_problem

LIMITS = (InfiniteKeyDimAttention(),)


def key_dims(folder: Path, seeds: int) -> Measured:
    """Four blocks, four heads, N = 4, 16, 64: single networks, the variance over heads, the mean of the largest."""
    problem, sizes = toy_problem(depth=4), [4, 16, 64]
    found, limit, words, near = approach(problem, [Network(size, 4) for size in sizes], "N", LIMITS, seeds, 0.12)
    over = power(sizes, [each.logit_variance[:, -1].mean("layer").values for each in found], root=False)
    ends, low = means(found[-1], problem, LIMITS, np.inf, 0.08)
    passed = near and low and over.interval.within(Interval(-1.2, -0.9))
    figure = f"{words}; variance over heads N^{shown(over.exponent, over.interval)}; {ends}"
    return Measured(figure, f"{about(limit)}; {GROUPS} groups of networks", seeds_of(seeds), passed)


def one_block(folder: Path, seeds: int) -> Measured:
    """One block with one head and with four: the same limit; the variance over heads at both ends of training.

    Both have the widths 16, 64, 256: corrections to a power are of relative order one over the width.
    """
    problem, parts, passed = toy_problem(), [], True
    for heads in (1, 4):
        sizes = [width // heads for width in (16, 64, 256)]
        networks = [Network(size, heads) for size in sizes]
        found, limit, words, near = approach(problem, networks, "N", LIMITS, seeds, 0.12)
        ends, low = means(found[-1], problem, LIMITS, np.inf, 0.08)
        parts.append(f"H={heads}: {words}; {ends}")
        passed &= near and low
    for when, step in (("start", 0), ("end", -1)):
        over = power(sizes, [each.logit_variance[:, step].mean("layer").values for each in found], root=False)
        parts.append(f"variance over heads at the {when} N^{shown(over.exponent, over.interval)}")
        passed &= over.interval.within(Interval(-1.15, -0.85))
    extent = (
        f"N H = 16, 64, 256; {about(limit)}; {GROUPS} groups of networks. At N = 4, 16, 64 one head, which is four "
        "wide at first, has outputs N^-0.42 [-0.47, -0.37] and pooled N^-0.41 [-0.49, -0.34] with 192 networks"
    )
    return Measured("<br>".join(parts), extent, seeds_of(seeds), passed)


def biases(folder: Path, few: int, many: int) -> Measured:
    """Two tokens, one, two, four blocks: the mean of many small networks falls like 1/N, that of large ones is near."""
    parts, passed, sizes = [], True, [4, 8, 16]
    wide = toy_problem(2)
    halves = replace(wide, inputs=wide.inputs.reshape(2, 2, 32))
    for depth in (1, 2, 4):
        problem = replace(halves, depth=depth)
        wanted = solve(problem, InfiniteKeyDimAttention()).outputs
        squares = [bare(train(problem, Network(size, 4), many).output.values, wanted) for size in sizes]
        centres, errors = (np.array([each(values) for values in squares]) for each in (np.mean, sem))
        fit = fit_exponent_to_means(sizes, centres, errors, dof=GROUPS - 1)
        interval = fit.interval.mapped(lambda power: power / 2)
        measured = ", ".join(f"{signed_root(centre):.4f}" for centre in centres)
        ends, near = means(train(problem, Network(64, 4), few), problem, LIMITS, 0.008, 0.08)
        parts.append(f"L={depth}: {measured} at N = 4, 8, 16: N^{shown(fit.exponent / 2, interval)}; at N=64 {ends}")
        passed &= interval.high <= -0.9 and near
    extent = f"H = 4, {many:,} networks each, {few} at N = 64; {GROUPS} groups"
    return Measured("<br>".join(parts), extent, f"0-{many - 1}, at N = 64 {seeds_of(few)}", passed)


def variants(folder: Path, seeds: int) -> Measured:
    """Three blocks that are causal with a loss at every token, on digits and on text, and pre-norm."""
    images = toy_problem(depth=3)
    every = np.broadcast_to(images.targets, (4, 4))  # the label at every token
    settings = {"steps": 8, "learning_rate": 0.3, "richness": 0.75, "depth": 3}
    problems = {
        "causal, per token": Problem(images.inputs, every, causal=True, read_out="token", **settings),
        "pre-norm": replace(images, norm=True),
        "text, causal, per token": text_problem(**settings | {"learning_rate": 0.5, "steps": 12}),
    }
    parts, extents, passed, sizes = [], [], True, [4, 16, 64]
    for name, problem in problems.items():
        networks = [Network(size, 4) for size in sizes]
        found, limit, words, near = approach(problem, networks, "N", LIMITS, seeds, 0.2)
        ends, low = means(found[-1], problem, LIMITS, 0.03, 0.06)
        parts.append(f"{name}: {words}; {ends}")
        extents.append(f"{name}: {about(limit)}")
        passed &= near and low
    return Measured("<br>".join(parts), "<br>".join(extents), seeds_of(seeds), passed)


def heads_at(folder: Path, depth: int, exponent: float, seeds: int, samples: int, draws: int) -> Measured:
    """N = 4 with infinitely many heads against H = 64: mean outputs, and the spread of logits over heads."""
    problem, branch, heads = toy_problem(depth=depth), InfiniteHeadsAttention(4, samples, exponent), 64
    limits = [solve(problem, branch, seed=seed) for seed in range(draws)]
    found = train(problem, Network(4, heads, exponent), seeds)
    ends, near = means(found, problem, (branch,), 0.02, 0.02)
    theory = np.array([[np.sqrt(looked(limit, "logit_variance").mean()) for limit in limits]])[0]
    start = np.sqrt(np.mean([look["logit_variance"].mean() for look in limits[0].observables[0]]))
    # The variance of 64 heads about their own mean is too small by one over their number.
    variances = found.logit_variance[:, -1].mean("layer").values * heads / (heads - 1)
    networks = np.sqrt(variances.reshape(GROUPS, -1).mean(1))
    error = float(theory.std(ddof=1) / np.sqrt(draws))
    gap = discrepancy_interval(networks, float(theory.mean()), error, draws - 1)
    ratio = Interval(1 + gap.low / theory.mean(), 1 + gap.high / theory.mean())
    figure = f"{ends}; spread over heads, networks over theory {shown(networks.mean() / theory.mean(), ratio, 4)}"
    extent = (
        f"spread in theory {start:.3f} -> {theory.mean():.3f} (s.e. {error:.4f}, {draws} draws); {about(limits[0])}"
    )
    return Measured(figure, extent, seeds_of(seeds), near and ratio.within(Interval(0.98, 1.02)))


def frozen(folder: Path, seeds: int, samples: int) -> Measured:
    """N = 4, rich, embedding frozen, H = 4 to 64: single networks, and the mean of 24 of the largest."""
    problem = replace(toy_problem(tests=2), embedding=False, richness=3.0, learning_rate=0.15, steps=16)
    branches, sizes = (InfiniteHeadsAttention(4, samples),), [4, 8, 16, 32, 64]
    networks = [Network(4, size) for size in sizes]
    found, limit, words, near = approach(problem, networks, "H", branches, seeds, 0.12)
    ends, low = means(found[-1], problem, branches, 0.02, 0.04)
    moved = rms(limit.pooled[-1] - limit.pooled[0])
    extent = f"{about(limit)}; pooled kernel moves by {moved:.2f} of {rms(limit.pooled[-1]):.2f}"
    return Measured(f"{words}; {ends}", extent, seeds_of(seeds), near and low)


def complete(folder: Path, seeds: int) -> Measured:
    """Pre-norm blocks with attention at N = 4 and gelu neurons, H = 4, 16, 64."""
    problem, sizes = toy_problem(depth=2, norm=True), [4, 16, 64]
    branches = (InfiniteHeadsAttention(4, 2048), InfiniteWidthMLP("gelu", 8192))
    networks = [Network(4, size, 1.0, "gelu") for size in sizes]
    found, limit, words, near = approach(problem, networks, "H", branches, seeds, 0.1)
    ends, low = means(found[-1], problem, branches, 0.012, 0.08)
    return Measured(f"{words}; {ends}", about(limit), seeds_of(seeds), near and low)


def starts(folder: Path, seeds: int) -> Measured:
    """Before training: the variance of logits over heads against N, the kernel of the stream against H."""
    parts, passed, sizes = [], True, [4, 16, 64]
    problem = toy_problem(depth=2, steps=1)
    for exponent in (1.0, 0.5):
        found = [train(problem, Network(size, 4, exponent), seeds) for size in sizes]
        over = power(sizes, [each.logit_variance[:, 0].mean("layer").values for each in found], root=False)
        parts.append(f"logit exponent {exponent:g}: variance over heads N^{shown(over.exponent, over.interval)}")
        passed &= over.interval.within(Interval(0.9 - 2 * exponent, 1.1 - 2 * exponent))
    limit = solve(problem, InfiniteHeadsAttention(4, 8192))
    squares = [apart(train(problem, Network(4, size), seeds), limit)["stream"] for size in sizes]
    fit = power(sizes, squares)
    parts.append(f"kernel of the stream, N = 4, H^{shown(fit.exponent, fit.interval)}")
    passed &= fit.interval.within(Interval(-0.6, -0.4))
    return Measured("<br>".join(parts), f"two blocks; {GROUPS} groups of networks", seeds_of(seeds), passed)


FIGURES: tuple[Figure, ...] = (
    figure(
        one_block,
        "one-block-networks",
        "one block: networks with one head and with four approach the same infinite key dimension",
        "slopes -0.5 +- 0.12, variance over heads -1 +- 0.15, without responses >= 0.08, each with its interval",
        seeds=384,
    ),
    figure(
        key_dims,
        "key-dim",
        "four blocks: networks approach infinite key dimension",
        "slopes -0.5 +- 0.12, variance over heads -1.05 +- 0.15, without responses >= 0.08, each with its interval",
        2,
        seeds=192,
    ),
    figure(
        biases,
        "bias",
        "one, two, four blocks: the mean network approaches infinite key dimension like 1/N",
        "slope <= -0.9, bias at N = 64 <= 0.008, without responses >= 0.08, each with its interval",
        few=384,
        many=8192,
    ),
    figure(
        variants,
        "variants",
        "causal with a loss at every token, and pre-norm, three blocks",
        "slopes -0.5 +- 0.2, bias <= 0.03, without responses >= 0.06, each with its interval",
        seeds=96,
    ),
    figure(
        heads_at,
        "half",
        "logit exponent 1/2, two blocks, many heads",
        "bias <= 0.02, spread over heads within 2%, without responses > 0.02, each with its interval",
        depth=2,
        exponent=0.5,
        seeds=768,
        samples=2048,
        draws=32,
    ),
    figure(
        heads_at,
        "heads",
        "logit exponent 1, four blocks, many heads",
        "bias <= 0.02, spread over heads within 2%, without responses > 0.02, each with its interval",
        depth=4,
        exponent=1.0,
        seeds=768,
        samples=2048,
        draws=8,
    ),
    figure(
        frozen,
        "frozen",
        "rich training with a frozen embedding, many heads",
        "slopes -0.5 +- 0.12, bias <= 0.02, without responses >= 0.04, each with its interval",
        seeds=192,
        samples=4096,
    ),
    figure(
        complete,
        "complete",
        "complete blocks, many heads",
        "slopes -0.5 +- 0.1, bias <= 0.012, without responses >= 0.08, each with its interval",
        2,
        seeds=384,
    ),
    figure(
        starts,
        "starts",
        "before training: variance over heads N^(1 - 2 alpha), kernel of the stream H^(-1/2)",
        "each slope within 0.1, with its interval",
        seeds=192,
    ),
)

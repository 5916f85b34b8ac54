"""The student: benign layers of up to 12 heads from one front door, and the parametric rate on noisy labels."""

import time
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.recovery import LearningOptions, compare_layers, evaluate_layer, learn_layer, planted_layer, sequences
from manyheads.recovery.examples.student import StudentSettings, fit_student
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.matching import function_error


def benign(folder: Path, layers: list[list[int]], count: int, seeds: int) -> Measured:
    """Learn layers (d, k, m), the number of heads not given; report the worst errors."""
    worst, wrong, seconds = [0.0, 0.0], 0, []
    for dim, length, heads in layers:
        for seed in range(seeds):
            rng = np.random.default_rng([seed, dim, length, heads])
            layer = planted_layer(rng, dim, heads)
            x, fresh = (sequences(rng, n, length, dim) for n in (count, 2000))
            begun = time.process_time()
            found = learn_layer(x, evaluate_layer(layer, x), seed=seed)
            seconds.append(time.process_time() - begun)
            wrong += found.heads != heads
            if found.heads == heads:
                worst[0] = max(worst[0], compare_layers(layer, found.layer).theta)
            error = function_error(
                lambda s, a=layer: evaluate_layer(a, s), lambda s, b=found.layer: evaluate_layer(b, s), fresh
            )
            worst[1] = max(worst[1], error)
    figure = (
        f"function error {worst[1]:.1e}, Theta {worst[0]:.1e}; {wrong} of {len(layers) * seeds} numbers of heads wrong"
    )
    extent = f"worst of {len(layers)} kinds of layers x {seeds} seeds; CPU seconds up to {max(seconds):.1f}"
    return Measured(figure, extent, f"0-{seeds - 1}", worst[1] < 1e-24 and wrong == 0)


def parametric_rate(folder: Path, sigma: float, count: int, dim: int, seeds: int) -> Measured:
    """Compare the error of a student on noisy labels with (numbers) sigma^2 / (labels)."""
    ratios = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, 4])
        layer = planted_layer(rng, dim, 2)
        x, held, fresh = (sequences(rng, n, 2, dim) for n in (count, 500, 4000))
        noisy = [evaluate_layer(layer, part) + sigma * rng.normal(size=part.shape) for part in (x, held)]
        settings = StudentSettings(refinement=GaussNewtonSettings(gain=1e-6, inner=100))
        examples, held_out = Examples(x, noisy[0]), Examples(held, noisy[1])
        wanted = 1.1 * sigma**2 * noisy[1].size / held_out.power
        fit = fit_student(examples, held_out, 2, rng, wanted=wanted, settings=settings)
        error = np.mean((evaluate_layer(fit.layer, fresh) - evaluate_layer(layer, fresh)) ** 2)
        ratios.append(float(error / (4 * dim**2 * sigma**2 / x.size)))
    extent = f"{min(ratios):.3f} to {max(ratios):.3f} over the seeds"
    return Measured(f"{max(ratios):.3f} times the rate", extent, f"0-{seeds - 1}", max(ratios) < 1.3)


def certified(folder: Path, count: int, seeds: int) -> Measured:
    """Count certificates whose statement is false: the share of 20,000 fresh sequences beyond the largest error."""
    false, shares = 0, []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, 5])
        layer, options = planted_layer(rng, 6, 2), LearningOptions(noise=0.1)
        x, fresh = (sequences(rng, n, 3, 6, distribution="gaussian") for n in (count, 20_000))
        y, target = (evaluate_layer(layer, part) + 0.1 * rng.normal(size=part.shape) for part in (x, fresh))
        found = learn_layer(x, y, 2, seed=seed, options=options)
        errors = ((evaluate_layer(found.layer, fresh) - target) ** 2).mean((1, 2)) / found.certificate.variance
        shares.append(float((errors > found.certificate.largest_error).mean()))
        false += shares[-1] > found.certificate.exceeding
    extent = f"largest share beyond {max(shares):.4f}, allowed {found.certificate.exceeding:.4f}"
    return Measured(f"{false} false statements of {seeds}", extent, f"0-{seeds - 1}", false == 0)


def replicated(name: str, replicates: int) -> Figure:
    return Figure(
        f"{name.split('/')[1]}-study",
        f"`{name}` over {replicates} replicates",
        "every verdict as expected",
        lambda folder, **settings: study(folder, **settings),
        {"name": name, "replicates": replicates},
        words_of(name, replicates),
    )


FIGURES = [
    Figure(
        "student-benign",
        "P0: the student learns benign layers and finds their number of heads",
        "relative squared function error < 1e-24, every number of heads right",
        benign,
        {"layers": [[8, 2, 2], [16, 2, 2], [16, 2, 3], [16, 3, 3], [16, 2, 4], [16, 3, 8]], "count": 4000, "seeds": 2},
    ),
    Figure(
        "student-twelve-heads",
        "P0: twelve heads, the number found",
        "relative squared function error < 1e-24, every number of heads right",
        benign,
        {"layers": [[16, 3, 12]], "count": 6000, "seeds": 2},
    ),
    Figure(
        "student-noise",
        "P4: noise 0.1 on the labels",
        "error < 1.3 (numbers) sigma^2 / (labels)",
        parametric_rate,
        {"sigma": 0.1, "count": 20_000, "dim": 16, "seeds": 3},
    ),
    Figure(
        "student-certificates",
        "certificates of noisy passive recoveries",
        "no false statement",
        certified,
        {"count": 1000, "seeds": 30},
    ),
    replicated("recovery/leakage", 8),
    replicated("recovery/noise", 8),
    replicated("recovery/passive-against-queries", 8),
]

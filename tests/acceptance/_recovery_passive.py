"""The six-stage learner: planted layers of several sizes, and sums over shards against a single pass."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.recovery import compare_layers, evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.six_stages import learn_in_six_stages
from manyheads.recovery.examples.stages.crude_sum import estimate_crude_sum, measure_moments
from manyheads.recovery.examples.stages.fit import FitSettings, fit_in_span
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import add_up, open_shards
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.refusals import RecoveryRefused


def plant(seed: int, size: dict):
    """Return a layer, sequences and labels of one of the table's rows."""
    rng = np.random.default_rng([seed, size["dim"], size["length"], size["heads"]])
    layer = planted_layer(rng, size["dim"], size["heads"], scale=size.get("scale", 2.0))
    x = sequences(rng, size["count"], size["length"], size["dim"], distribution=size.get("inputs", "boolean"))
    return rng, layer, x, evaluate_layer(layer, x)


def along_the_stages(folder: Path, size: dict, limits: dict[str, float], seeds: int) -> Measured:
    """Measure the error of every stage, then run the learner; the worst seed of each figure counts."""
    worst: dict[str, float] = {}
    for seed in range(seeds):
        rng, layer, x, y = plant(seed, size)
        data, total, heads = open_shards((x[2000:], y[2000:])), layer.projection.sum(0), size["heads"]
        crude, _ = estimate_crude_sum(data)
        refined = refine_sum(data, None, RefinementSettings())
        span = span_of(find_hull(data, refined, heads, HullSettings()))
        fit = fit_in_span(span, *data.take(np.arange(600)), heads, rng, FitSettings())
        figures = {
            "crude sum": np.linalg.norm(crude - total) / np.linalg.norm(total),
            "refined sum": np.linalg.norm(refined - total) / np.linalg.norm(total),
            "span": measure_span_error(span, layer.theta),
            "before the joint fit": relative_error(fit.layer, Examples(x[:2000], y[:2000])),
        }
        figures |= learn(rng, layer, x, y)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in figures.items()}
    figure = ", ".join(f"{name} {worst[name]:.2g}" for name in limits)
    passed = all(worst[name] < limit for name, limit in limits.items())
    return Measured(figure, f"worst of {seeds} layers, {size['count']:,} sequences each", f"0-{seeds - 1}", passed)


def learn(rng, layer, x, y) -> dict[str, float]:
    """Run the learner with the number of heads unknown; return its error on fresh sequences, and if it miscounts."""
    fresh = sequences(rng, 4000, x.shape[1], x.shape[2])
    try:
        found = learn_in_six_stages((x, y), rng=rng)
    except RecoveryRefused as error:
        print(type(error).__name__, error, flush=True)
        return {"after": np.inf, "wrong number": 1.0, "weights": np.inf}
    right = found.heads == layer.heads
    return {
        "after": relative_error(found.layer, Examples(fresh, evaluate_layer(layer, fresh))),
        "wrong number": float(not right),
        "weights": compare_layers(layer, found.layer).worst if right else np.inf,
    }


def benign_rows(folder: Path, rows: list[dict], seeds: int, limit: float) -> Measured:
    """Run the learner over rows of the table."""
    figures, parts = [], []
    for size in rows:
        for seed in range(seeds):
            start = time.process_time()
            rng, layer, x, y = plant(seed, size)
            figures.append(learn(rng, layer, x, y))
            took = time.process_time() - start
            print(size, seed, figures[-1], round(took, 1), flush=True)
            parts.append(took)
    reached = sum(figure["after"] < limit for figure in figures)
    right = sum(not figure["wrong number"] for figure in figures)
    worst = max(figure["after"] for figure in figures)
    figure = f"{reached} of {len(figures)} exact, {right} with the right number; worst error {worst:.1e}"
    extent = f"{len(rows)} rows, {seeds} layers each, {np.median(parts):.1f} CPU s (median), {max(parts):.1f} (longest)"
    return Measured(figure, extent, f"0-{seeds - 1}", reached == len(figures))


def shards_against_one_pass(folder: Path, seeds: int) -> Measured:
    """Compare every statistic over uneven shards, worked on by threads, with a single pass."""
    worst = 0.0
    size = {"dim": 8, "length": 3, "heads": 2, "count": 20_000}
    for seed in range(seeds):
        rng, _, x, y = plant(seed, size)
        places = np.sort(rng.choice(np.arange(1, len(x)), 6, replace=False))
        with ThreadPoolExecutor(2) as pool:
            pieces = open_shards(list(zip(np.split(x, places), np.split(y, places), strict=True)), pool)
            both = (open_shards((x, y)), pieces)
            moments = [add_up(data.map(measure_moments)) for data in both]
            crude = [estimate_crude_sum(data)[0] for data in both]
            hulls = [find_hull(data, total, 2, HullSettings()) for data, total in zip(both, crude, strict=True)]
            refined = [
                refine_sum(data, hull.nearest, RefinementSettings("margin"))
                for data, hull in zip(both, hulls, strict=True)
            ]
        pairs = [(moments[0].inputs, moments[1].inputs), (moments[0].cross, moments[1].cross), crude, refined]
        pairs += [[hull.eigenvalues for hull in hulls], [hull.nearest for hull in hulls]]
        for one, many in pairs:
            worst = max(worst, float(np.abs(one - many).max() / np.abs(one).max()))
    extent = f"largest relative difference of moments, sums, eigenvalues and hull; 7 uneven shards, {seeds} layers"
    return Measured(f"{worst:.1e}", extent, f"0-{seeds - 1}", worst <= 1e-12)


def row(dim: int, length: int, heads: int, count: int, **more) -> dict:
    return {"dim": dim, "length": length, "heads": heads, "count": count, **more}


BENIGN = [
    row(8, 2, 1, 50_000),
    row(8, 2, 2, 50_000),
    row(8, 3, 2, 50_000),
    row(16, 4, 2, 100_000),
    row(16, 2, 3, 200_000, inputs="gaussian"),
    row(16, 2, 2, 100_000, scale=4.0),
    row(16, 2, 2, 100_000, scale=1.0),
]

FIGURES = [
    Figure(
        "passive-two-heads",
        "six stages, d = 16, two tokens, two heads, signs: every stage, and the number of heads",
        "crude < .2, refined < .06, span < .04, before the joint fit < 5e-4, after < 1e-24, the right number",
        along_the_stages,
        {
            "size": row(16, 2, 2, 50_000),
            "limits": {
                "crude sum": 0.2,
                "refined sum": 0.06,
                "span": 0.04,
                "before the joint fit": 5e-4,
                "after": 1e-24,
                "wrong number": 0.5,
            },
            "seeds": 3,
        },
    ),
    Figure(
        "passive-three-heads",
        "six stages, d = 16, two tokens, three heads, signs",
        "span < .12, after < 1e-24",
        along_the_stages,
        {"size": row(16, 2, 3, 200_000), "limits": {"span": 0.12, "after": 1e-24}, "seeds": 3},
    ),
    Figure(
        "passive-three-tokens",
        "six stages, d = 16, three tokens, two heads, normal inputs",
        "after < 1e-24",
        along_the_stages,
        {"size": row(16, 3, 2, 50_000, inputs="gaussian"), "limits": {"after": 1e-24}, "seeds": 3},
    ),
    Figure(
        "passive-shards",
        "sums over shards against a single pass",
        "<= 1e-12, relative",
        shards_against_one_pass,
        {"seeds": 5},
    ),
    Figure(
        "passive-benign",
        "six stages with the number of heads unknown: benign layers up to four tokens and three heads",
        "error < 1e-20 in every run",
        benign_rows,
        {"rows": BENIGN, "seeds": 2, "limit": 1e-20},
    ),
]

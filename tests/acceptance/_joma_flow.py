"""Figures of the joint flow of logits and weights: theorem 1, theorem 2, and how fast the flow is.

Every figure is the worst of its seeds; within a task, seeds are vmapped.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.statistics import fit_exponent
from manyheads.theory.joma.systems.gradient_flow import (
    AdaptiveSteps,
    FixedSteps,
    adaptive_gradient_flow,
    gradient_descent,
    gradient_flow,
)
from manyheads.theory.joma.systems.layer import (
    CrossEntropy,
    LayerParameters,
    attend,
    draw_parameters,
    draw_upper,
    token_weights,
)
from manyheads.theory.joma.task import JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.invariants import (
    conserved_quantity,
    decayed_quantity,
    per_query_quantity,
    softmax_relation,
)

SMOOTH = ("identity", "gelu", "square")
HORIZON = 40.0


def draw(rule: UpdateRule, sizes: Sizes, seeds: int) -> tuple[LayerParameters, JomaTask, CrossEntropy]:
    """Draw one problem for each seed, stacked; call with 64-bit types enabled."""

    problems = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        problems.append((draw_parameters(sizes, rule, rng), draw_joma_task(sizes, rng), draw_upper(sizes, rng)))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)


def follow(rule: UpdateRule, queries: int, seeds: int, contexts: int = 40, records: int = 50):
    """Return logits, token weights and times of flows with a fixed step of 0.02, and the tasks."""
    with jax.enable_x64(True):
        problems = draw(rule, Sizes(queries=queries, contexts=contexts), seeds)
        path = jax.vmap(lambda *problem: gradient_flow(*problem, rule, FixedSteps.until(HORIZON, 0.02, records)))(
            *problems
        )
        weights = jax.vmap(token_weights)(problems[1], path.network.weights)
        return np.asarray(path.network.logits), np.asarray(weights), np.asarray(path.times), problems[1]


def departure(relation: np.ndarray) -> np.ndarray:
    """Return the largest change of a relation (seeds, S, ...) since its start, one a seed."""
    return np.abs(relation - relation[:, :1]).reshape(len(relation), -1).max(1)


def conservation(folder: Path, activations: list[str], limit: float, seeds: int) -> Measured:
    """Measure the departure from the relation, summed over queries, with one query and with three."""
    worst, moved, cells = 0.0, np.inf, []
    for attention in ("linear", "exp"):
        for activation in activations:
            for queries in (1, 3):
                rule = UpdateRule(attention, activation)
                logits, weights, _, _ = follow(rule, queries, seeds)
                cells.append(float(departure(conserved_quantity(rule, logits, weights)).max()))
                moved = min(moved, float(departure(logits).min()))
    worst = max(cells)
    extent = f"worst of {len(cells)} settings; every path moves a logit by {moved:.2f} or more"
    return Measured(f"{worst:.1e}", extent, f"0-{seeds - 1}", worst < limit)


def single_query(folder: Path, seeds: int) -> Measured:
    """Measure the departure from the relation of one query alone, with three that share their weights."""
    errors = []
    for attention in ("linear", "exp"):
        for activation in SMOOTH:
            rule = UpdateRule(attention, activation)
            logits, weights, _, _ = follow(rule, 3, seeds)
            errors.extend(departure(per_query_quantity(rule, logits, weights)))
    low, high = min(errors), max(errors)
    return Measured(f"{low:.2f} to {high:.2f}", f"{len(errors)} paths", f"0-{seeds - 1}", bool(low > 0.1))


def events(folder: Path, seeds: int) -> Measured:
    """Measure the departure with a ReLU when gates are held between kinks."""
    worst, crossings = 0.0, 0
    for attention in ("linear", "exp"):
        rule = UpdateRule(attention, "relu")
        for seed in range(seeds):
            rng, sizes = np.random.default_rng(seed), Sizes()
            problem = draw_parameters(sizes, rule, rng), draw_joma_task(sizes, rng), draw_upper(sizes, rng)
            path = adaptive_gradient_flow(*problem, rule, AdaptiveSteps(HORIZON, 10))
            relation = conserved_quantity(rule, path.network.logits, token_weights(problem[1], path.network.weights))
            worst, crossings = max(worst, float(departure(relation[None])[0])), crossings + int(path.crossings)
    return Measured(f"{worst:.1e}", f"{crossings} crossings of kinks", f"0-{seeds - 1}", worst < 1e-10)


def descent_order(folder: Path, rates: list[float], seeds: int) -> Measured:
    """Fit the order of the drift of plain gradient descent in its learning rate."""
    passed, figures = True, []
    for attention in ("linear", "exp"):
        rule = UpdateRule(attention, "gelu")
        slips = []
        with jax.enable_x64(True):
            problems = draw(rule, Sizes(), seeds)
            for rate in rates:
                steps = FixedSteps(rate, round(HORIZON / rate), 1)
                path = jax.vmap(lambda *problem, rule=rule, steps=steps: gradient_descent(*problem, rule, steps))(
                    *problems
                )
                weights = jax.vmap(token_weights)(problems[1], path.network.weights)
                slips.append(departure(np.asarray(conserved_quantity(rule, path.network.logits, weights))))
        fit = fit_exponent(np.asarray(rates), np.stack(slips, axis=1))
        figures.append(f"{attention} {fit.exponent:.4f} [{fit.interval.low:.4f}, {fit.interval.high:.4f}]")
        passed = passed and bool(fit.interval.low > 0.95 and fit.interval.high < 1.05)
    return Measured("; ".join(figures), f"99% intervals over {seeds} seeds", f"0-{seeds - 1}", passed)


def decay_law(folder: Path, decay: float, seeds: int) -> Measured:
    """Measure the departure from exp(-2 decay t) under linear attention with weight decay."""
    rule, plain = UpdateRule("linear", "gelu", weight_decay=decay), UpdateRule("linear", "gelu")
    logits, weights, times, _ = follow(rule, 1, seeds)
    relation = conserved_quantity(plain, logits, weights)  # (seeds, S, M)
    law = np.stack([decayed_quantity(rule, row[0], clock) for row, clock in zip(relation, times, strict=True)])
    worst = float(np.abs(relation - law).max())
    return Measured(f"{worst:.1e}", "all tokens and times", f"0-{seeds - 1}", worst < 1e-10)


def softmax(folder: Path, contexts: int, limit: float | None, seeds: int) -> Measured:
    """Measure the softmax form: the moving mean against a limit, the fixed mean as a report."""
    moving, fixed, shapes, squares = [], [], [], []
    for activation in ("identity", "relu", "gelu"):
        rule = UpdateRule("softmax", activation)
        # Every step is kept: splines through every second one err by 3e-4 of a small movement where a ReLU has a kink.
        logits, weights, times, tasks = follow(rule, 1, seeds, contexts, records=2000)
        with jax.enable_x64(True):
            means = np.asarray(
                jax.vmap(lambda z, x, rule=rule: attend(rule, z, x).mean(1))(logits, np.asarray(tasks.contexts))
            )
        for z, v, t, mean in zip(logits, weights, times, means, strict=True):
            form = softmax_relation(rule, t, z, v, mean)
            moving.append(form.relative_error("moving_mean"))
            fixed.append(form.relative_error("fixed_mean"))
            shapes.append(form.correlation("fixed_mean"))
            squares.append(form.correlation("squares"))
    figure = f"moving mean {max(moving):.1e}; fixed mean {min(fixed):.2f} to {max(fixed):.2f}"
    extent = f"shape of the fixed mean {min(shapes):.3f} to {max(shapes):.3f}, of squares alone "
    extent += f"{min(squares):.3f} to {max(squares):.3f}; {len(fixed)} paths"
    return Measured(figure, extent, f"0-{seeds - 1}", limit is None or bool(max(moving) < limit))


def speed(folder: Path, repeats: int) -> Measured:
    """Measure CPU seconds of the flow of the check of theorem 1, compilation excluded."""
    seconds = []
    for activation in ("gelu", "relu"):
        rng, sizes, rule = np.random.default_rng(0), Sizes(), UpdateRule("exp", activation)
        problem = draw_parameters(sizes, rule, rng), draw_joma_task(sizes, rng), draw_upper(sizes, rng)
        gradient_flow(*problem, rule, FixedSteps.until(HORIZON))
        for _ in range(repeats):
            start = time.process_time()
            gradient_flow(*problem, rule, FixedSteps.until(HORIZON))
            seconds.append(time.process_time() - start)
    figure = f"{np.median(seconds):.2f} s, at most {max(seconds):.2f} s"
    return Measured(figure, "CPU time of 2,000 steps, 40 contexts, 24 neurons, gelu and relu", "0", max(seconds) < 2)


FIGURES = (
    Figure(
        "conservation-smooth",
        "linear and exp attention conserve the relation, summed over queries",
        "< 1e-10",
        conservation,
        {"activations": list(SMOOTH), "limit": 1e-10, "seeds": 8},
    ),
    Figure(
        "conservation-relu",
        "a fixed step over a ReLU's kinks leaves it by little",
        "< 1e-4",
        conservation,
        {"activations": ["relu"], "limit": 1e-4, "seeds": 8},
    ),
    Figure("conservation-events", "gates held between kinks conserve it", "< 1e-10", events, {"seeds": 3}),
    Figure(
        "single-query", "one query of three that share weights does not keep it", "> 0.1", single_query, {"seeds": 8}
    ),
    Figure(
        "descent-order",
        "plain gradient descent drifts in proportion to its learning rate",
        "order 1 ± 0.05",
        descent_order,
        {"rates": [0.4, 0.2, 0.1, 0.05, 0.025], "seeds": 8},
    ),
    Figure(
        "decay-law",
        "the relation of linear attention decays like exp(-2 decay t)",
        "< 1e-10",
        decay_law,
        {"decay": 0.02, "seeds": 8},
    ),
    Figure(
        "softmax-single",
        "with one context the softmax form with a moving mean is exact",
        "relative error < 1e-4",
        softmax,
        {"contexts": 1, "limit": 1e-4, "seeds": 8},
        revision=2,
    ),
    Figure(
        "softmax-ordinary",
        "with 40 contexts the softmax form is a shape",
        "reported",
        softmax,
        {"contexts": 40, "limit": None, "seeds": 8},
        revision=2,
    ),
    Figure("flow-speed", "the flow of this check to time 40", "< 2 s after compilation", speed, {"repeats": 3}),
    Figure(
        "nearly-orthogonal",
        "theorem 1 for embeddings with the cosines of trained models: drift, bound, and the sum over tokens",
        "every verdict as expected",
        study,
        {"name": "joma/nearly-orthogonal", "replicates": 64, "flags": "--seed 1"},
        command=words_of("joma/nearly-orthogonal", 64, "--seed 1"),
    ),
    Figure(
        "wide-networks",
        "lucky neurons of wide layers: times, shares, and a shared loss",
        "every verdict as expected",
        study,
        {"name": "joma/wide-networks", "replicates": 8, "flags": "--seed 1"},
        command=words_of("joma/wide-networks", 8, "--seed 1"),
    ),
    Figure(
        "shuffled-labels",
        "simple patterns first, and the rank of both MLP matrices, on real and shuffled labels",
        "every verdict as expected",
        study,
        {"name": "joma/shuffled-labels", "replicates": 16, "flags": "--seed 1"},
        command=words_of("joma/shuffled-labels", 16, "--seed 1"),
    ),
    Figure(
        "hierarchical-prior",
        "patterns that labels share, in a layer and in transformers",
        "every verdict as expected",
        study,
        {"name": "joma/hierarchical-prior", "replicates": 16, "flags": "--seed 1"},
        command=words_of("joma/hierarchical-prior", 16, "--seed 1"),
    ),
    Figure(
        "real-text-variants",
        "words, post-norm, encoder, width and heads on text, and the order of layers",
        "every verdict as expected",
        study,
        {"name": "joma/real-text-variants", "replicates": 8, "flags": "--seed 1"},
        command=words_of("joma/real-text-variants", 8, "--seed 1"),
    ),
    Figure(
        "attention-functions",
        "other attention functions: their conserved quantities, how many there are, and trained networks",
        "every verdict as expected",
        study,
        {"name": "joma/attention-functions", "replicates": 16, "flags": "--seed 1"},
        command=words_of("joma/attention-functions", 16, "--seed 1"),
    ),
    Figure(
        "winners",
        "theorem 2: erf law, blow-up, limits, where it does not hold, and gradients that fade",
        "every verdict as expected",
        study,
        {"name": "joma/winners", "replicates": 8},
        command=words_of("joma/winners", 8),
        revision=2,
    ),
)

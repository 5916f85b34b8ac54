"""Limited servers: what each restriction costs in calls, and what comes back, from servers that refuse the rest."""

import dataclasses
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

import manyheads as mh
from manyheads.errors import ManyheadsError
from manyheads.recovery import ExtractionOptions, ServerLimits, compare_layers, evaluate_layer, gpt_layer

LIMITS = {
    "none": ServerLimits(),
    "at most 3 tokens": ServerLimits(max_length=3),
    "at most 5 tokens": ServerLimits(max_length=5),
    "at least 16 tokens": ServerLimits(min_length=16),
    "norms up to sqrt(d)": ServerLimits(max_norm=32**0.5),
    "norms up to 1": ServerLimits(max_norm=1.0),
    "one sequence a call": ServerLimits(max_batch=1),
    "last row only": ServerLimits(last_row=True),
    "last row, 3 to 8 tokens, norms up to 4": ServerLimits(last_row=True, min_length=3, max_length=8, max_norm=4.0),
    "9 decimals": ServerLimits(decimals=9),
    "6 decimals": ServerLimits(decimals=6),
    "3 decimals": ServerLimits(decimals=3),
    "24 bits": ServerLimits(bits=24),
    "11 bits": ServerLimits(bits=11),
    "8 bits": ServerLimits(bits=8),
}


def limited_servers(folder: Path, dim: int, heads: int, seeds: int, first: int) -> Measured:
    """Extract the same layers behind every restriction; calls without those of the verification."""
    costs: dict[str, list[float]] = {name: [] for name in LIMITS}
    errors: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
    wrong: list[str] = []
    for seed in range(first, first + seeds):
        layer = gpt_layer(np.random.default_rng([seed, 0]), dim, heads)
        layer = dataclasses.replace(layer, causal=seed % 2 == 0)
        plain = 0
        for name, limits in LIMITS.items():
            answer = limits.serve(lambda x, layer=layer: evaluate_layer(layer, x))
            exact = limits.decimals is None and limits.bits is None
            options = ExtractionOptions(limits=limits, tolerance=1e-6 if exact else 3e-2, verify=100)
            try:
                found = mh.extract_layer(answer, dim, seed=seed, options=options)
            except ManyheadsError as error:
                wrong.append(f"{name}: {type(error).__name__}")
                continue
            asked = sum(c.calls for stage, c in found.counts.items() if stage not in ("verification", "selection"))
            plain = asked if name == "none" else plain
            costs[name].append(asked / plain)
            wrong += [f"{name}: {found.heads} heads"] * (found.heads != heads)
            if found.heads == heads:
                compared = compare_layers(layer, found.layer)
                errors[name] = max(errors[name], compared.theta, compared.projection)
    said = "; ".join(
        f"{name} x{np.median(ratios):.3g} [{min(ratios):.3g}, {max(ratios):.3g}], {errors[name]:.0e}"
        for name, ratios in costs.items()
        if ratios and name != "none"
    )
    figure = f"calls relative to no limit and worst relative error of a weight: {said}; {len(wrong)} refused or wrong"
    extent = f"{seeds} random layers (d {dim}, {heads} heads), even seeds causal, odd ones not; {wrong[:4]}"
    return Measured(figure, extent, f"{first}-{first + seeds - 1}", not wrong)


def vocabularies(folder: Path, seeds: int, first: int) -> Measured:
    """Extract layers from the tokens of random tables, as many heads as there are."""
    ends: dict[int, list[str]] = {}
    errors, calls, wrong = [], [], 0
    for seed in range(first, first + seeds):
        for dim, heads in ((12, 1), (16, 2), (18, 3), (24, 4), (30, 5), (32, 8), (60, 10)):
            rng = np.random.default_rng([seed, dim, heads])
            layer = dataclasses.replace(gpt_layer(rng, dim, heads), causal=seed % 2 == 0)
            limits = ServerLimits(vocabulary=0.7 * rng.standard_normal((10 * dim, dim)) + 0.1)
            answer = limits.serve(lambda x, layer=layer: evaluate_layer(layer, x))
            try:
                found = mh.extract_layer(answer, dim, seed=seed, options=ExtractionOptions(limits=limits, verify=100))
            except ManyheadsError:
                ends.setdefault(heads, []).append("refused")
                continue
            right = found.heads == heads
            wrong += not right
            ends.setdefault(heads, []).append("found" if right else "wrong")
            if right:
                compared = compare_layers(layer, found.layer)
                errors.append(max(compared.theta, compared.projection))
                asked = sum(c.calls for stage, c in found.counts.items() if stage not in ("verification", "selection"))
                calls += [asked / dim] if layer.causal else []
    said = ", ".join(f"{heads} heads {one.count('found')} of {len(one)}" for heads, one in sorted(ends.items()))
    figure = (
        f"found: {said}; {wrong} with a wrong number of heads; error of a weight median {np.median(errors):.0e}, "
        f"worst {max(errors):.0e}; causal {np.median(calls):.0f} d calls [{min(calls):.0f}, {max(calls):.0f}]"
    )
    extent = "random layers, d 12 to 60, tables of 10 d tokens of deviation .7, even seeds causal, odd ones not"
    few = all(end == "found" for heads, one in ends.items() if heads <= 8 for end in one)
    return Measured(figure, extent, f"{first}-{first + seeds - 1}", few and not wrong)


FIGURES = [
    Figure(
        "vocabularies",
        "extraction from the tokens of a table alone, by number of heads",
        "all layers of up to eight heads; no wrong number of heads",
        vocabularies,
        {"seeds": 6, "first": 720},
    ),
    Figure(
        "limited-servers",
        "extraction within the limits of a server: length, norm, requests, rows, digits",
        "all heads of every layer behind every restriction; servers refuse what is beyond",
        limited_servers,
        {"dim": 32, "heads": 4, "seeds": 8, "first": 700},
    ),
]

"""Extraction behind a LayerNorm that cannot be bypassed, and with rotary positions: errors of the weights, calls."""

from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.recovery import RecoveryRefused, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.normalization import Normalization, projected
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.rotary.method import extract_rotary
from manyheads.recovery.queries.subspaces.method import extract_on_sphere

EXACT = 1e-15
SEEDS = [0, 1, 2, 3, 4]


def behind_a_norm(
    folder: Path, dim: int, heads: int, limits: dict[str, float], seeds: list[int], norm: str = "LayerNorm"
) -> Measured:
    """Random layers behind a norm with random weights, with and without a residual connection."""
    worst = {"theta": 0.0, "projection": 0.0, "function": 0.0, "calls": 0.0}
    tokens, right, refused = 0, 0, 0
    for seed in seeds:
        for residual in (False, True):
            rng = np.random.default_rng([seed, residual])
            layer = gpt_layer(rng, dim, heads)
            gain, shift = np.exp(0.3 * rng.standard_normal(dim)), 0.3 * rng.standard_normal(dim)
            normalize = Normalization(norm == "LayerNorm")
            truth = projected(layer, gain, shift, centred=normalize.centred)

            def block(x, layer=layer, gain=gain, shift=shift, normalize=normalize, residual=residual):
                y = evaluate_layer(layer, gain * normalize(x) + shift)
                return x + y if residual else y

            oracle = Oracle(block, dim, OracleSettings(residual=residual))
            try:
                found = extract_on_sphere(oracle, EXACT, rng)
            except RecoveryRefused:
                refused += 1
                continue
            right += found.layer.heads == heads
            if found.layer.heads == heads:
                errors = compare_layers(truth, found.layer)
                x = 1 + 2 * rng.standard_normal((40, 8, dim))
                function = function_error(lambda x: block(x) - (x if residual else 0), found, x)  # noqa: B023
                seen = {"theta": errors.theta, "projection": errors.projection, "function": function}
                worst = {name: max(worst[name], seen.get(name, oracle.total.calls)) for name in worst}
                tokens = max(tokens, oracle.total.tokens)
    runs = 2 * len(seeds)
    passed = right == runs and all(worst[name] < limit for name, limit in limits.items())
    return Measured(
        f"{right} of {runs} with {heads} heads; Theta {worst['theta']:.1e}, W {worst['projection']:.1e}, function "
        f"{worst['function']:.1e}, {worst['calls']:.0f} calls",
        f"largest of {right} runs, {refused} refused; {tokens} tokens",
        ", ".join(map(str, seeds)),
        passed,
    )


def rotary(folder: Path, dim: int, heads: int, seeds: list[int], offsets: list[int]) -> Measured:
    """Layers with rotary positions: projections, and forms at some offsets (the symmetric part at 0)."""
    worst = dict.fromkeys(["W", *map(str, offsets)], 0.0)
    calls = tokens = right = refused = 0
    function = 0.0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        layer = planted_rotary_layer(rng, dim, heads)
        oracle = Oracle(layer, dim)
        try:
            found = extract_rotary(oracle, EXACT, rng)
        except RecoveryRefused:
            refused += 1
            continue
        if found.layer.heads != heads:
            continue
        right += 1
        apart = np.linalg.norm(layer.projection[:, None] - found.layer.projection, axis=(2, 3))
        order, size = apart.argmin(1), np.linalg.norm(layer.projection, axis=(1, 2))
        worst["W"] = max(worst["W"], float((apart.min(1) / size).max()))
        for offset in offsets:
            true, mine = layer.attention(offset), found.layer.attention(offset)[order]
            if offset == 0:
                true, mine = true + true.swapaxes(1, 2), mine + mine.swapaxes(1, 2)
            error = np.linalg.norm(true - mine, axis=(1, 2)) / np.linalg.norm(true, axis=(1, 2))
            worst[str(offset)] = max(worst[str(offset)], float(error.max()))
        for length in (2, 4, 8, 16):
            x = rng.standard_normal((20, length, dim))
            function = max(function, function_error(layer, found, x))
        calls, tokens = max(calls, oracle.total.calls), max(tokens, oracle.total.tokens)
    shown = ", ".join(f"{worst[str(offset)]:.1e}" for offset in offsets)
    return Measured(
        f"W {worst['W']:.1e}; Theta at offsets {offsets}: {shown}; function {function:.1e} on 2 to 16 tokens",
        f"largest of {right} of {len(seeds)} runs, {refused} refused; {calls} calls, {tokens} tokens",
        ", ".join(map(str, seeds)),
        right == len(seeds) and max(worst.values()) < 1e-6,
    )


def norm_figure(dim: int, heads: int, limits: dict[str, float], norm: str = "LayerNorm") -> Figure:
    required = f"{heads} heads; " + ", ".join(f"{name} < {limit:g}" for name, limit in limits.items())
    return Figure(
        f"behind-{norm.lower()}-{dim}-{heads}",
        f"F(LN(X)) and X + F(LN(X)), {norm} with random weights, d = {dim}, {heads} heads, float64",
        required,
        behind_a_norm,
        {"dim": dim, "heads": heads, "limits": limits, "seeds": SEEDS, "norm": norm},
    )


def rotary_figure(heads: int) -> Figure:
    offsets = [0, 1, 2, 3, 7, 15]
    return Figure(
        f"rotary-32-{heads}",
        f"rotary positions, d = 32, {heads} heads: W and Theta at offsets {offsets}, its symmetric part at 0",
        "all heads; all errors < 1e-6",
        rotary,
        {"dim": 32, "heads": heads, "seeds": SEEDS, "offsets": offsets},
    )


FIGURES = (
    norm_figure(64, 4, {"theta": 1e-8, "calls": 1000}),
    norm_figure(64, 4, {"theta": 1e-8, "calls": 1000}, "RMSNorm"),
    norm_figure(64, 8, {"theta": 1e-7, "calls": 1835}),
    norm_figure(128, 8, {"theta": 1e-7, "calls": 1835}),
    rotary_figure(2),
    rotary_figure(4),
)

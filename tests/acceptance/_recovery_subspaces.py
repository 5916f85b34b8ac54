"""Extraction by subspaces: random layers of GPT's shape and deformed ones, in calls, errors and CPU seconds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.attention import AttentionLayer
from manyheads.recovery import compare_layers, gpt_layer
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import ACCURATE, SPARING
from manyheads.recovery.queries.subspaces.method import extract_by_subspaces
from manyheads.recovery.refusals import RecoveryRefused
from manyheads.recovery.result.results import Extracted

EXACT = 4.4e-17
"""Relative noise that is measured of a float64 oracle: a fifth of the distance between numbers."""


def random_layers(
    folder: Path, dim: int, heads: int, seeds: int, accurate: bool, calls: float, error: float, seconds: float
) -> Measured:
    """Extract random layers; `calls` in units of the information limit 4 d - 2 d / m."""
    limit = 4 * dim - 2 * dim / heads
    rows = []
    for seed in range(seeds):
        layer = gpt_layer(np.random.default_rng([seed, 0]), dim, heads)
        oracle = Oracle.of(layer)
        settings = ACCURATE if accurate else SPARING
        found = extract_by_subspaces(oracle, EXACT, np.random.default_rng([seed, 1]), settings)
        errors, total = compare_layers(layer, found.layer), oracle.total
        rows.append((errors.theta, errors.projection, total.calls, total.tokens, total.numbers, total.own_seconds))
    theta, projection, most, tokens, numbers, own = np.max(rows, axis=0)
    figure = (
        f"Theta {theta:.1e}, W {projection:.1e}, {most:.0f} calls = {most / limit:.2f} x the limit, {own:.1f} CPU s"
    )
    extent = (
        f"worst of {seeds}; {tokens:.0f} tokens = {tokens / limit:.1f} x, numbers / d = {numbers / dim / limit:.1f} x"
        f"; median Theta {np.median([row[0] for row in rows]):.1e}; CPU seconds beside the oracle's"
    )
    passed = max(theta, projection) < error and most <= calls * limit and own < seconds
    return Measured(figure, extent, f"0-{seeds - 1}", bool(passed))


def deform(kind: str, layer: AttentionLayer, rng: np.random.Generator) -> AttentionLayer:
    """Deform a layer in the way that a row names; head 0, and head 1 where there are two."""
    theta, projection, beta = layer.theta.copy(), layer.projection.copy(), layer.key_bias.copy()
    heads, dim = layer.heads, layer.dim
    name, _, number = kind.partition(" ")
    size = float(number or 0)
    factors = np.ones(heads)
    if name == "projection":
        projection[0] *= size
    elif name in ("attention", "two-uniform"):
        factors[: 2 if name == "two-uniform" else 1] = size
    elif name == "spread":
        factors = size ** (-np.arange(heads) / (heads - 1))
    elif name == "strong":
        factors = 10 * size ** (-np.arange(heads) / (heads - 1))
    elif name == "near-outputs":
        rank = dim // heads
        first = np.linalg.svd(projection[0])[2][:rank]
        left, singular, second = (part[..., :rank] for part in _transposed_svd(projection[1]))
        rows = np.linalg.qr((first + size * second.T).T)[0].T
        projection[1] = (left * singular) @ rows
    elif name == "collinear":
        projection[1] = -0.6 * projection[0]
    elif name == "equal":
        theta[1], beta[1] = theta[0], beta[0]
    elif name == "shared":
        key, value = rng.normal(size=(2, dim, dim // heads)) / dim**0.5
        queries, outputs = rng.normal(size=(2, heads, dim, dim // heads)) / dim**0.5
        theta, projection = queries @ key.T / (dim // heads) ** 0.5, value @ np.swapaxes(outputs, 1, 2)
    theta, beta = theta * factors[:, None, None], beta * factors[:, None]
    return AttentionLayer(theta, projection, beta, layer.bias, causal=layer.causal)


def _transposed_svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    left, singular, right = np.linalg.svd(matrix)
    return left, singular, right.T


KINDS = {
    "projection 0.1": 0,
    "projection 0.01": 0,
    "projection 1e-4": 0,
    "projection 0": -1,
    "attention 0.1": 0,
    "attention 0.01": 0,
    "attention 0": 0,
    "two-uniform 0": -1,
    "spread 100": 0,
    "strong 10": 0,
    "near-outputs 0.1": 0,
    "near-outputs 0.01": 0,
    "near-outputs 0.001": 0,
    "equal": -1,
    "shared": 0,
}
"""Deformations, and how many heads the answer has beside those of the layer: dead ones none, merged ones one."""


def deformed_layers(folder: Path, dim: int, heads: int, seeds: int) -> Measured:
    """Extract every deformation; the function error counts, and the number of heads."""
    worst: dict[str, float] = {}
    wrong: list[str] = []
    most = 0
    for kind, beside in KINDS.items():
        for seed in range(seeds):
            rng = np.random.default_rng([seed, *kind.encode()])
            layer, oracle, found = _extract_deformed(kind, dim, heads, rng)
            if isinstance(found, RecoveryRefused):
                wrong.append(f"{kind} refused ({type(found).__name__})")
                continue
            if found.layer.heads != heads + beside:
                wrong.append(f"{kind}: {found.layer.heads} heads")
            x = rng.normal(size=(16, 8, dim))
            error = function_error(_evaluator(layer), found, x)
            worst[kind] = max(worst.get(kind, 0.0), error)
            most = max(most, oracle.total.calls)
    others = [_extract_deformed("collinear", dim, heads, np.random.default_rng([seed, 7]))[2] for seed in range(seeds)]
    refused = sum(isinstance(found, RecoveryRefused) for found in others)
    name, error = max(worst.items(), key=lambda item: item[1])
    figure = f"{len(wrong)} wrong, function error {error:.0e} ({name}), {refused} of {seeds} collinear refused"
    extent = f"{len(KINDS)} deformations x {seeds} layers (d {dim}, {heads} heads), at most {most} calls; {wrong[:5]}"
    return Measured(figure, extent, f"0-{seeds - 1}", not wrong and error < 1e-12 and refused == seeds)


def _evaluator(layer: AttentionLayer) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: evaluate_layer(layer, x)


def _extract_deformed(
    kind: str, dim: int, heads: int, rng: np.random.Generator
) -> tuple[AttentionLayer, Oracle, Extracted | RecoveryRefused]:
    """Draw a layer, deform it and extract it; return it, who was asked, and what was found or why nothing was."""
    layer = deform(kind, gpt_layer(rng, dim, heads), rng)
    oracle = Oracle.of(layer)
    try:
        return layer, oracle, extract_by_subspaces(oracle, EXACT, rng)
    except RecoveryRefused as refused:
        return layer, oracle, refused


def _random(dim: int, heads: int, required: str, *, accurate: bool = False, **limits: float) -> Figure:
    """Return the figure of a random layer; `limits` are the other arguments of `random_layers`."""
    name = f"subspaces-{dim}-{heads}{'-accurate' if accurate else ''}"
    kind = "accurate" if accurate else "default"
    claim = f"extraction by subspaces, random layer d {dim}, {heads} heads, {kind} settings"
    settings = {"dim": dim, "heads": heads, "accurate": accurate, **limits}
    return Figure(name, claim, required, random_layers, settings)


FIGURES = [
    _random(
        64, 4, "< 700 calls (3.13 x the limit), both errors < 1e-8", seeds=20, calls=699 / 224, error=1e-8, seconds=5
    ),
    _random(64, 4, "both errors < 1e-10", accurate=True, seeds=20, calls=1e3, error=1e-10, seconds=5),
    _random(
        256, 12, "within 1.6 x the limit, both errors < 1e-8, < 5 CPU s", seeds=3, calls=1.6, error=1e-8, seconds=5
    ),
    _random(256, 12, "< 1e-11 within 3.5 x the limit", accurate=True, seeds=3, calls=3.5, error=1e-11, seconds=60),
    _random(
        768, 12, "within 1.5 x the limit, both errors < 1e-8, < 60 CPU s", seeds=1, calls=1.5, error=1e-8, seconds=60
    ),
    _random(
        768, 12, "goal beyond: 1e-10 within 2 x the limit", accurate=True, seeds=1, calls=2.0, error=1e-10, seconds=60
    ),
    Figure(
        "subspaces-deformed",
        "weak, dead, uniform, merged, uneven, nearly collinear heads and shared keys come back; collinear ones refuse",
        "none wrong, function error < 1e-12, all collinear layers refused",
        deformed_layers,
        {"dim": 64, "heads": 4, "seeds": 8},
    ),
]

"""Bounded extraction: rounded and noisy oracles, short tokens, odd heads, layers whose heads are easily exchanged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.attention import AttentionLayer
from manyheads.recovery import compare_layers, gpt_layer, planted_layer
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.bounded.method import extract_bounded
from manyheads.recovery.refusals import FitError, RecoveryRefused

Answer = Callable[[np.ndarray], np.ndarray]

LEVELS = {"float64": 4.4e-17, "float32": 1e-7, "bfloat16": 2e-3}
"""Relative noise of the answers by how they are rounded: what the front door measures, about."""


def evaluate_rounded(layer: AttentionLayer, x: np.ndarray, bits: int) -> np.ndarray:
    """Return the answers of a layer with so many bits in the mantissa."""
    mantissa, exponent = np.frexp(evaluate_layer(layer, x))
    return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


def evaluate_single(layer: AttentionLayer, x: np.ndarray) -> np.ndarray:
    """Return the answers of a layer whose weights, tokens and arithmetic are float32 throughout."""
    x = x.astype(np.float32)
    theta, projection, beta, bias = (
        np.asarray(part, np.float32) for part in (layer.theta, layer.projection, layer.key_bias, layer.bias)
    )
    y = np.zeros_like(x) + bias
    allowed = np.tril(np.ones((x.shape[1],) * 2, bool)) if layer.causal else True
    for start in range(0, len(x), 4096):
        part = x[start : start + 4096]
        for head in range(layer.heads):
            logits = (part @ theta[head]) @ part.transpose(0, 2, 1) + (part @ beta[head])[:, None]
            logits = np.where(allowed, logits, np.float32(-np.inf))
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            y[start : start + 4096] += (weights / weights.sum(-1, keepdims=True)) @ part @ projection[head]
    return y


def make_oracle(layer: AttentionLayer, kind: str, rng: np.random.Generator) -> tuple[Oracle, float]:
    """Return an oracle that answers in a precision, or with noise of a standard deviation, and its relative noise."""
    if kind in LEVELS:
        functions: dict[str, Answer] = {
            "float64": lambda x: evaluate_layer(layer, x),
            "float32": lambda x: evaluate_single(layer, x),
            "bfloat16": lambda x: evaluate_rounded(layer, x, 8),
        }
        return Oracle(functions[kind], layer.dim), LEVELS[kind]
    sigma = float(kind)
    return Oracle(lambda x: evaluate_layer(layer, x) + sigma * rng.standard_normal(x.shape), layer.dim), sigma


def precision(folder: Path, dim: int, heads: int, kind: str, seeds: int, error: float, norm: float) -> Measured:
    """Extract random layers of GPT's shape; the largest errors, calls and token norms over seeds."""
    rows = []
    for seed in range(seeds):
        layer = gpt_layer(np.random.default_rng([seed, 0]), dim, heads)
        oracle, noise = make_oracle(layer, kind, np.random.default_rng([seed, 2]))
        found = extract_bounded(oracle, noise, np.random.default_rng([seed, 1]))
        total, errors = oracle.total, compare_layers(layer, found.layer)
        rows.append((errors.theta, errors.projection, total.calls, total.largest_norm / dim**0.5, total.own_seconds))
    theta, projection, calls, longest, cpu = np.max(rows, axis=0)
    figure = (
        f"Theta {theta:.1e}, W {projection:.1e}, {calls:.0f} calls, tokens of {longest:.2f} sqrt(d), {cpu:.1f} CPU s"
    )
    return Measured(figure, f"worst of {seeds}", f"0-{seeds - 1}", bool(theta < error and longest < norm))


def odd_heads(folder: Path, dim: int, seeds: int, error: float) -> Measured:
    """Extract layers with odd heads in float32; collinear projections must be refused by the names that say so."""
    wrong, worst = [], 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        for name, heads, layer in odd_layers(rng, dim):
            oracle, noise = make_oracle(layer, "float32", rng)
            try:
                found = extract_bounded(oracle, noise, rng).layer
            except FitError as refusal:
                if heads:
                    wrong.append(f"{name} {seed}: {type(refusal).__name__}")
                continue
            gap = _function_error(layer, found, rng)
            worst = max(worst, gap)
            if found.heads != heads or not gap < error:
                wrong.append(f"{name} {seed}: {found.heads} heads, error {gap:.0e}")
    figure = f"{len(wrong)} wrong, function error of those found {worst:.0e}"
    extent = "uniform, equal, dead, weak, full-rank, shared key and value, collinear heads" + "".join(wrong[:3])
    return Measured(figure, extent, f"0-{seeds - 1}", not wrong)


def odd_layers(rng: np.random.Generator, dim: int) -> list[tuple[str, int, AttentionLayer]]:
    """Return layers with the number of heads that can be found, 0 where the layer must be refused."""
    layer = gpt_layer(rng, dim, 4)
    shared = gpt_layer(rng, dim, 4)
    key, value = shared.theta[0], shared.projection[0]

    def altered(**parts: np.ndarray) -> AttentionLayer:
        kept = {"theta": layer.theta, "projection": layer.projection, "key_bias": layer.key_bias, "bias": layer.bias}
        return AttentionLayer(**{**kept, **parts}, causal=True)

    def first(weight: np.ndarray, factor: float) -> np.ndarray:
        return weight * np.r_[factor, 1, 1, 1].reshape(-1, *(1,) * (weight.ndim - 1))

    same = np.r_[1, 1, 2, 3]
    turns = np.linalg.qr(rng.standard_normal((4, dim, dim)))[0]
    parallel = layer.projection[np.r_[0, 0, 2, 3]] * np.r_[1, -0.6, 1, 1][:, None, None]
    return [
        ("uniform", 4, altered(theta=first(layer.theta, 0), key_bias=first(layer.key_bias, 0))),
        ("equal", 3, altered(theta=layer.theta[same], key_bias=layer.key_bias[same])),
        ("dead", 3, altered(projection=first(layer.projection, 0))),
        ("weak", 4, altered(projection=first(layer.projection, 0.01))),
        ("full rank", 4, planted_layer(rng, dim, 4, key_bias=True, bias=True, causal=True)),
        ("shared", 4, altered(theta=turns @ key, projection=value @ turns)),
        ("collinear", 0, altered(projection=layer.projection[0] * np.r_[1, 0.5, -2, 0.7][:, None, None])),
        ("parallel pair", 0, altered(projection=parallel)),
    ]


def ill_conditioned(rng: np.random.Generator, dim: int, heads: int, outputs: float, attention: float) -> AttentionLayer:
    """Plant what makes trained layers hard: nearly dependent output spaces, decaying spectra, and small logits."""
    rank = dim // heads

    def shape(matrix: np.ndarray, condition: float) -> np.ndarray:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        wanted = np.geomspace(1, 1 / condition, len(values))
        return (left * wanted * np.linalg.norm(values) / np.linalg.norm(wanted)) @ right

    out = shape(rng.standard_normal((dim, dim)), outputs).reshape(heads, rank, dim) / dim**0.5
    query, key, value = rng.standard_normal((3, heads, dim, rank)) / dim**0.5
    common = rng.standard_normal((dim, rank)) / dim**0.5
    size = rng.uniform(0.3, 1.2, (heads, 1, 1))
    theta = size * np.stack(
        [
            shape(q + 0.7 * common, attention**0.5) @ shape(k + 0.7 * common, attention**0.5).T
            for q, k in zip(query, key, strict=True)
        ]
    )
    theta /= rank**0.5
    beta = 0.3 * np.einsum("hdr,hr->hd", key, rng.standard_normal((heads, rank))) / rank**0.5
    return AttentionLayer(theta, value @ out, beta, 0.1 * rng.standard_normal(dim), causal=True)


def silent_failures(folder: Path, dim: int, heads: int, seeds: int, error: float) -> Measured:
    """Count what leaves extraction unverified and wrong, on layers and in precisions in which heads are exchanged."""
    silent, refused, worst, calls = 0, [], 0.0, 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        outputs, attention = 500 * 15.4 ** rng.uniform(), rng.uniform(50, 140)
        layer = ill_conditioned(rng, dim, heads, outputs, attention)
        oracle, noise = make_oracle(layer, "float32", rng)
        try:
            found = extract_bounded(oracle, noise, rng).layer
        except RecoveryRefused as refusal:
            refused.append(type(refusal).__name__)
            continue
        gap = _function_error(layer, found, rng)
        worst, calls = max(worst, gap), max(calls, oracle.total.calls)
        silent += not gap < error
    figure = f"{silent} silent failures, {len(refused)} refused; function error {worst:.0e}, {calls} calls"
    extent = "outputs of condition 500-7700, attention 50-140, heads that share directions; " + ", ".join(refused)
    return Measured(figure, extent, f"0-{seeds - 1}", silent == 0 and len(refused) <= seeds // 5)


def _function_error(layer: AttentionLayer, found: AttentionLayer, rng: np.random.Generator) -> float:
    x = rng.standard_normal((50, 8, layer.dim))
    return function_error(lambda x: evaluate_layer(layer, x), lambda x: evaluate_layer(found, x), x)


def _precision(name: str, dim: int, heads: int, kind: str, error: float, norm: float = 1e9) -> Figure:
    said = f"Theta < {error:g}" + (f", token norm < {norm:g} sqrt(d)" if norm < 1e9 else "")
    settings = {"dim": dim, "heads": heads, "kind": kind, "seeds": 5, "error": error, "norm": norm}
    return Figure(f"bounded-{name}", f"random layers ({dim}, {heads}), {kind}", said, precision, settings)


FIGURES = [
    _precision("float64", 64, 8, "float64", 1e-11, 3.0),
    _precision("float32-4", 64, 4, "float32", 1e-5),
    _precision("float32-8", 64, 8, "float32", 5e-5),
    _precision("bfloat16", 64, 4, "bfloat16", 3e-2),
    _precision("noise", 64, 4, "1e-3", 1e-2),
    Figure(
        "bounded-odd-heads",
        "odd heads in float32: found, merged or refused, each as it must be",
        "0 wrong, function error < 1e-8",
        odd_heads,
        {"dim": 32, "seeds": 5, "error": 1e-8},
    ),
    Figure(
        "bounded-silent",
        "ill-conditioned layers (64, 8) in float32, before verification: a wrong layer is never returned",
        "0 silent failures, at most a fifth refused, function error < 1e-8",
        silent_failures,
        {"dim": 64, "heads": 8, "seeds": 20, "error": 1e-8},
    ),
]

"""Random functions, layers and others, in four precisions, and how wrong the certificate of an extraction is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from scipy.stats import binom
from tests.recovery.mixed_layers import CHANGES, attend, normalize
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.attention import AttentionLayer
from manyheads.errors import CertificateError, ManyheadsError
from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.refusals import VerificationError
from manyheads.recovery.result.distributions import GaussianSequences

Function = Callable[[np.ndarray], np.ndarray]

LAYERS = (
    "GPT-like",
    "rank one",
    "full rank",
    "shared values",
    "norm spread 16",
    "small head",
    "gain 4",
    "gain 0.1",
    "dead head",
    "uniform head",
    "collinear W",
    "not causal",
    "residual",
    "LayerNorm",
    "rotary",
)
"""Attention layers of the class; heads with collinear projections cannot be told apart."""

NEAR = ("window", "capped logits", "sink", "normalized keys", "distance bias", "added positions", "tanh")
"""Attention layers with one thing changed, which puts them outside."""

OTHERS = ("MLP", "convolution", "recurrence", "two layers", "linear attention", "hash")
"""Functions of a sequence that are no attention layer."""

KINDS = (*LAYERS, *NEAR, *OTHERS)
DTYPES = ("float64", "float32", "bfloat16", "float16")
BIASES = (0.0, 1.0, 1e2, 1e4, 1e6)
TOLERANCES = {"bfloat16": 1e-3, "float16": 1e-4}
"""Relative squared errors that are accepted, where rounding does not allow the default."""

FRESH = 300
"""Sequences on which a layer that was found is compared with the function in float64."""

UNLIKELY = 1e-4
"""Probability, for a statement that just holds, of so many sequences beyond its error that it is called false."""


@dataclass(frozen=True)
class Row:
    """Outcome of one function: its kind, precision and bias, and how it ended.

    `end` is "accepted", "rejected" (found, and refused by its certificate), "refused" or "unnamed" (an error that is no
    refusal). `stated` is E*; `error` the mean relative squared error of the token-dependent part, against the function
    in float64; `beyond` the number of fresh sequences above E*, against the answers in their precision.
    """

    kind: str
    dtype: str
    bias: float
    end: str
    word: str
    stated: float | None = None
    error: float | None = None
    beyond: int | None = None
    allowed: float | None = None
    unresolved: int = 0

    @property
    def chance(self) -> float:
        """Probability of so many sequences beyond E* where as many exceed it as the statement allows."""
        return 1.0 if self.beyond is None else float(binom.sf(self.beyond - 1, FRESH, self.allowed))


def build(kind: str, rng: np.random.Generator, bias: float) -> tuple[Function, int, dict[str, Any]]:
    """Return a function in float64, its dimension and what is said of it."""
    heads = int(rng.choice([1, 2, 3]))
    dim = int(rng.integers(max(6, 3 * heads), 13))
    if kind in OTHERS:
        return _other(kind, rng, dim, heads, bias), dim, {}
    if kind == "rotary":
        layer = planted_rotary_layer(rng, 4 * heads, heads, gain=1.0)
        constant = bias * rng.standard_normal(layer.dim)
        return (lambda x: layer(x) + constant), layer.dim, {"rotary": True}
    ranks = {"rank one": 1, "full rank": dim}
    heads = max(heads, 2) if kind in CHANGES else heads
    plain = gpt_layer(rng, dim, heads, rank=ranks.get(kind, dim // heads))
    parts = {name: getattr(plain, name) for name in ("theta", "projection", "key_bias", "bias")}
    if kind in CHANGES:
        parts |= CHANGES[kind](rng, plain)
    if kind == "small head":
        parts["projection"] = plain.projection * 10.0 ** -rng.integers(0, 10, (heads, 1, 1))
    if kind == "shared values":
        left = np.linalg.svd(plain.projection[0])[0][:, : dim // heads]
        parts["projection"] = np.stack([left @ (left.T @ one) for one in plain.projection])
    constant = bias * rng.standard_normal(dim)
    layer = AttentionLayer(**parts | {"bias": plain.bias + constant}, causal=kind != "not causal")
    if kind == "residual":
        return (lambda x: evaluate_layer(layer, x) + x), dim, {"residual": True}
    if kind == "LayerNorm":
        gain, shift = np.exp(0.3 * rng.standard_normal(dim)), 0.3 * rng.standard_normal(dim)
        return (lambda x: evaluate_layer(layer, normalize(x) * gain + shift)), dim, {}
    if kind == "window":
        return (lambda x: _windowed(layer, x, 17)), dim, {}
    if kind == "capped logits":
        return (lambda x: attend(layer, x, cap=3.0)), dim, {}
    if kind in NEAR:
        return _near(kind, rng, layer), dim, {}
    return (lambda x: evaluate_layer(layer, x)), dim, {}


def _near(kind: str, rng: np.random.Generator, layer: AttentionLayer) -> Function:
    """Return a layer with a learned sink, normalized keys, a bias of distance, added positions, or tanh behind it."""
    positions = rng.standard_normal((max(GaussianSequences().lengths), layer.dim))
    sinks = rng.standard_normal(layer.heads)
    if kind == "added positions":
        return lambda x: evaluate_layer(layer, x + positions[: x.shape[1]])
    if kind == "tanh":
        inner = replace(layer, bias=None)
        return lambda x: np.tanh(evaluate_layer(inner, x)) + layer.bias

    def function(x: np.ndarray) -> np.ndarray:
        keys = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) if kind == "normalized keys" else x
        place = np.arange(x.shape[1])
        y = np.zeros_like(x)
        for head in range(layer.heads):
            logits = x @ layer.theta[head] @ keys.transpose(0, 2, 1) + (keys @ layer.key_bias[head])[:, None, :]
            if kind == "distance bias":
                logits = logits - 2.0 ** -(head + 1) * (place[:, None] - place)
            logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
            sink = sinks[head] if kind == "sink" else -np.inf
            top = np.maximum(logits.max(-1, keepdims=True), sink)
            weights = np.exp(logits - top)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
            y += weights @ x @ layer.projection[head]
        return y + layer.bias

    return function


def _other(kind: str, rng: np.random.Generator, dim: int, heads: int, bias: float) -> Function:
    """Return a function that is no attention layer, of the size of one."""
    a, b, c = rng.standard_normal((3, dim, dim)) / dim**0.5
    constant = bias * rng.standard_normal(dim)
    layers = [gpt_layer(rng, dim, heads) for _ in range(2)]

    def function(x: np.ndarray) -> np.ndarray:
        counts = np.arange(1, x.shape[1] + 1)[:, None]
        if kind == "MLP":
            return np.maximum(x.cumsum(1) / counts @ a, 0) @ b + constant
        if kind == "convolution":
            return x @ a + np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1) @ b + constant
        if kind == "recurrence":
            state, rows = np.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                state = np.tanh(state @ a + x[:, t] @ b)
                rows.append(state @ c)
            return np.stack(rows, axis=1) + constant
        if kind == "two layers":
            return evaluate_layer(layers[1], evaluate_layer(layers[0], x)) + constant
        if kind == "linear attention":
            outer = (x[..., :, None] * (x @ b)[..., None, :]).cumsum(1)  # (n, k, d, d)
            return ((x @ a)[..., None, :] @ outer)[..., 0, :] / (dim * counts) + constant
        return np.sin(1e3 * x.cumsum(1) @ a) + constant

    return function


def _windowed(layer: AttentionLayer, x: np.ndarray, width: int) -> np.ndarray:
    """Let every token see the last `width` ones."""
    rows = [evaluate_layer(layer, x[:, max(0, t - width + 1) : t + 1])[:, -1] for t in range(x.shape[1])]
    return np.stack(rows, axis=1)


def attempt(kind: str, dtype: str, bias: float, seed: list[int]) -> Row:
    """Extract one function, and compare what is accepted with it."""
    rng = np.random.default_rng(seed)
    exact, dim, said = build(kind, rng, bias)
    options = ExtractionOptions(tries=2, progress=False, tolerance=TOLERANCES.get(dtype, 1e-6), **said)

    def function(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # float16 ends at 65504: infinite answers are refused
            y = exact(x)
            return y.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else y.astype(dtype)

    end = "accepted"
    try:
        found = extract_layer(function, dim, seed=seed[-1], options=options)
    except VerificationError as error:
        found, end = error.result, "rejected"
    except (CertificateError, ManyheadsError) as error:
        return Row(kind, dtype, bias, "refused", type(error).__name__)
    except Exception as error:  # a defect, which is counted
        return Row(kind, dtype, bias, "unnamed", f"{type(error).__name__}: {error}")
    certificate, extracted = found.certificate, found.extracted
    lengths = (2, 4, 8, 16) if extracted.longest else GaussianSequences().lengths
    moved, truths, beyond = [], [], 0
    allowed = certificate.largest_error * certificate.variance
    for x in GaussianSequences(lengths)(rng, FRESH, dim):
        added = x if options.residual else 0.0
        predicted, truth, answered = extracted.attention(x), exact(x) - added, function(x).astype(np.float64) - added
        weight = 1 / x.shape[1]
        beyond += int((((predicted - answered) ** 2).mean((1, 2)) > allowed).sum())
        moved.append(((predicted - truth).reshape(-1, dim), np.full(x.shape[0] * x.shape[1], weight)))
        truths.append((truth.reshape(-1, dim), moved[-1][1]))
    unresolved = sum(not one.resolved for one in found.head_accuracy)
    error = _variance(moved) / _variance(truths)
    stated = certificate.largest_error
    return Row(kind, dtype, bias, end, found.method, stated, error, beyond, certificate.exceeding, unresolved)


def _variance(parts: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the variance about the mean of every column, every sequence weighted alike."""
    rows, weights = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    rows = rows - rows[0]
    mean = np.average(rows, axis=0, weights=weights)
    return float(np.average(((rows - mean) ** 2).mean(1), weights=weights))


def is_wrong(row: Row) -> bool:
    """Say whether an accepted layer is wrong by more than it states."""
    return row.end == "accepted" and not row.error <= row.stated

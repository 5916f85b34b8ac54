"""Random functions of sixteen kinds, precisions and output biases, and how wrong an accepted extraction of one is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.recovery.mixed_layers import CHANGES, attend, normalize
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.attention import AttentionLayer
from manyheads.errors import CertificateError, ManyheadsError
from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.certificates import GaussianSequences

Function = Callable[[np.ndarray], np.ndarray]

KINDS = (
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
    "not causal",
    "residual",
    "LayerNorm",
    "rotary",
    "window",
    "capped logits",
)
DTYPES = ("float64", "float32", "float16")
BIASES = (0.0, 1.0, 1e2, 1e4, 1e6)
FRESH = 300
"""Sequences on which an accepted layer is compared with the function in float64."""


@dataclass(frozen=True)
class Row:
    """Outcome of one function: its kind, precision and bias, and how it ended.

    `end` is "accepted", "refused" or "unnamed" (an error that is no refusal). `stated` is E*; `error` the mean relative
    squared error of the token-dependent part, against the function in float64, `share` of sequences above E*.
    """

    kind: str
    dtype: str
    bias: float
    end: str
    word: str
    stated: float | None = None
    error: float | None = None
    share: float | None = None
    allowed: float | None = None
    unresolved: int = 0


def build(kind: str, rng: np.random.Generator, bias: float) -> tuple[Function, int, dict[str, Any]]:
    """Return a function in float64, its dimension and what is said of it."""
    heads = int(rng.choice([1, 2, 3]))
    dim = int(rng.integers(max(6, 3 * heads), 17))
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
    return (lambda x: evaluate_layer(layer, x)), dim, {}


def _windowed(layer: AttentionLayer, x: np.ndarray, width: int) -> np.ndarray:
    """Let every token see the last `width` ones."""
    rows = [evaluate_layer(layer, x[:, max(0, t - width + 1) : t + 1])[:, -1] for t in range(x.shape[1])]
    return np.stack(rows, axis=1)


def attempt(kind: str, dtype: str, bias: float, seed: list[int]) -> Row:
    """Extract one function, and compare what is accepted with it."""
    rng = np.random.default_rng(seed)
    exact, dim, said = build(kind, rng, bias)
    options = ExtractionOptions(tries=2, progress=False, **said)

    def function(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # float16 ends at 65504: infinite answers are refused
            return exact(x).astype(dtype)

    try:
        found = extract_layer(function, dim, seed=seed[-1], options=options)
    except (CertificateError, ManyheadsError) as error:
        return Row(kind, dtype, bias, "refused", type(error).__name__)
    except Exception as error:  # a defect, which is counted
        return Row(kind, dtype, bias, "unnamed", f"{type(error).__name__}: {error}")
    certificate, extracted = found.certificate, found.extracted
    lengths = (2, 4, 8, 16) if extracted.longest else GaussianSequences().lengths
    moved, truths, each = [], [], []
    for x in GaussianSequences(lengths)(rng, FRESH, dim):
        truth = exact(x) - (x if options.residual else 0.0)
        left = extracted(x) - truth
        weight = 1 / x.shape[1]
        each.append((left**2).mean((1, 2)))
        moved.append((left.reshape(-1, dim), np.full(left.shape[0] * left.shape[1], weight)))
        truths.append((truth.reshape(-1, dim), moved[-1][1]))
    variance = _variance(truths)
    share = float((np.concatenate(each) > certificate.largest_error * certificate.variance).mean())
    unresolved = sum(not one.resolved for one in found.head_accuracy)
    error = _variance(moved) / variance
    stated = certificate.largest_error
    return Row(kind, dtype, bias, "accepted", found.method, stated, error, share, certificate.exceeding, unresolved)


def _variance(parts: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the variance about the mean of every column, every sequence weighted alike."""
    rows, weights = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    rows = rows - rows[0]
    mean = np.average(rows, axis=0, weights=weights)
    return float(np.average(((rows - mean) ** 2).mean(1), weights=weights))


def is_wrong(row: Row) -> bool:
    """Say whether an accepted layer is wrong by more than it states."""
    return row.end == "accepted" and not row.error <= row.stated

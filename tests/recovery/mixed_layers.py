"""Functions of mixed difficulty, attention layers and others, and what becomes of each at the front door."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import ManyheadsError
from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.refusals import RecoveryRefused, VerificationError
from manyheads.recovery.result.certificates import Certificate, oracle_errors
from manyheads.recovery.result.distributions import GaussianSequences


@dataclass(frozen=True)
class Case:
    """A function to be extracted, and what is known of it."""

    kind: str
    function: Callable[[np.ndarray], np.ndarray]
    dim: int
    options: ExtractionOptions


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case.

    `end` is "accepted", "rejected" (verified and found wrong), "refused", or "unnamed" (an error that is no refusal:
    a defect). `beyond` is the share of new sequences whose error exceeds the certificate's, relative to what it
    allows; `count` their number, of `new`.
    """

    kind: str
    end: str
    word: str
    certificate: Certificate | None = None
    heads: int = 0
    calls: int = 0
    count: int = 0
    new: int = 0
    bad_accept: bool = False

    @property
    def beyond(self) -> float:
        return self.count / self.new / self.certificate.exceeding if self.certificate else 0.0


def attend(layer: AttentionLayer, x: np.ndarray, dtype: Any = np.float64, cap: float | None = None) -> np.ndarray:
    """Apply a layer in another precision, or with capped logits: cap tanh(s / cap)."""
    x, y = x.astype(dtype), np.zeros(x.shape, dtype)
    for theta, projection, bias in zip(layer.theta, layer.projection, layer.key_bias, strict=True):
        logits = (x @ theta.astype(dtype)) @ x.transpose(0, 2, 1) + (x @ bias.astype(dtype))[:, None, :]
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        y += ((weights / weights.sum(-1, keepdims=True)) @ x) @ projection.astype(dtype)
    return y + layer.bias.astype(dtype)


def normalize(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def spread(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
    ratio = 16.0 ** (-np.arange(layer.heads) / max(layer.heads - 1, 1))[:, None, None]
    return {"theta": layer.theta * ratio, "projection": layer.projection * 4.0 ** -rng.random((layer.heads, 1, 1))}


def decaying(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
    def fall(matrix: np.ndarray) -> np.ndarray:
        u, s, v = np.linalg.svd(matrix)
        return u * s / np.arange(1, len(s) + 1) @ v

    return {"theta": np.stack([*map(fall, layer.theta)]), "projection": np.stack([*map(fall, layer.projection)])}


def first(name: str, change: Callable[..., np.ndarray]) -> Callable[..., dict[str, Any]]:
    """Change what the first head has of `name`, as a function of what the second one has."""

    def changed(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
        new = getattr(layer, name).copy()
        new[0] = change(rng, new[0], new[1])
        return {name: new}

    return changed


def same_pattern(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[0], beta[0] = theta[1], beta[1]
    return {"theta": theta, "key_bias": beta}


def near_pattern(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
    """Make the first head nearly the second one in its pattern: relative distance 1e-3, on the same spaces."""
    rank = layer.dim // layer.heads
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    u, s, v = np.linalg.svd(theta[1])
    noise = rng.standard_normal((rank, rank)) * 1e-3 * np.sqrt((s**2).sum()) / rank
    theta[0], beta[0] = theta[1] + u[:, :rank] @ noise @ v[:rank], beta[1]
    return {"theta": theta, "key_bias": beta}


def uniform(rng: np.random.Generator, layer: AttentionLayer) -> dict[str, Any]:
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[0], beta[0] = 0, 0
    return {"theta": theta, "key_bias": beta}


CHANGES: dict[str, Callable[..., dict[str, Any]]] = {
    "GPT-like": lambda rng, layer: {},
    "norm spread 16": spread,
    "decaying spectra": decaying,
    "gain 4": lambda rng, layer: {"theta": 4 * layer.theta, "key_bias": 4 * layer.key_bias},
    "gain 0.1": lambda rng, layer: {"theta": 0.1 * layer.theta, "key_bias": 0.1 * layer.key_bias},
    "dead head": first("projection", lambda rng, one, other: 0 * one),
    "equal Theta": same_pattern,
    "Theta within 1e-3": near_pattern,
    "uniform head": uniform,
    "collinear W": first("projection", lambda rng, one, other: -0.6 * other),
}
"""Attention layers, as changes of one of the shape of GPT's."""

WRAPPED = (
    "float32",
    "noise 1e-8",
    "noise 1e-5",
    "noise 1e-3",
    "MLP",
    "capped logits",
    "rare region",
    "residual",
    "LayerNorm",
    "full rank",
    "not causal",
)
"""Functions around a layer, or others."""

KINDS = ("GPT-like", *CHANGES, *WRAPPED)
"""All kinds, the plain one twice."""

IMPOSSIBLE = ("collinear W", "MLP", "capped logits")
"""Kinds that no right program accepts."""


def build(kind: str, rng: np.random.Generator, dim: int, layer: AttentionLayer | None = None) -> Case:
    """Build one case; `layer` is changed where it is given, a random one otherwise."""
    if layer is None:
        gain, heads = float(rng.choice([0.5, 1.0, 2.0])), int(rng.choice([2, 4]))
        layer = gpt_layer(rng, dim, heads, gain=gain, rank=dim if kind == "full rank" else None)
    if kind in CHANGES:
        layer = _changed(layer, CHANGES[kind](rng, layer))
    if kind == "not causal":
        layer = _changed(layer, {}, causal=False)
    options = ExtractionOptions(progress=False)
    if kind == "residual":
        options = replace(options, residual=True)
    if kind.startswith("noise"):
        options = replace(options, stochastic=True)
    return Case(kind, _function(kind, rng, layer), layer.dim, options)


def _changed(layer: AttentionLayer, changes: dict[str, Any], causal: bool = True) -> AttentionLayer:
    parts = {name: getattr(layer, name) for name in ("theta", "projection", "key_bias", "bias")}
    return AttentionLayer(**parts | changes, causal=causal)


def _function(kind: str, rng: np.random.Generator, layer: AttentionLayer) -> Callable[[np.ndarray], np.ndarray]:
    if kind == "float32":
        return lambda x: attend(layer, x, np.float32)
    if kind.startswith("noise"):
        sigma = float(kind.split()[1])
        return lambda x: evaluate_layer(layer, x) + sigma * rng.standard_normal(x.shape)
    if kind == "MLP":
        a, b = rng.standard_normal((layer.dim, 2 * layer.dim)), rng.standard_normal((2 * layer.dim, layer.dim))
        return lambda x: np.maximum(x.cumsum(1) / np.arange(1, x.shape[1] + 1)[:, None] @ a, 0) @ b / layer.dim
    if kind == "capped logits":
        return lambda x: attend(layer, x, cap=3.0)
    if kind == "rare region":
        u = rng.standard_normal(layer.dim)
        u /= np.linalg.norm(u)
        return lambda x: evaluate_layer(layer, x) + 5.0 * ((x @ u).max(1) > 6.0)[:, None, None]
    if kind == "residual":
        return lambda x: evaluate_layer(layer, x) + x
    if kind == "LayerNorm":
        gain, shift = np.exp(0.3 * rng.standard_normal(layer.dim)), 0.3 * rng.standard_normal(layer.dim)
        return lambda x: evaluate_layer(layer, normalize(x) * gain + shift)
    return lambda x: evaluate_layer(layer, x)


def surprise(outcome: Outcome) -> float:
    """Return how probable at least so many new errors beyond the largest of n are, whatever the layer.

    If no two errors are equal, every order of the n old and N new ones is equally probable; the c largest are all new
    with probability prod_{i < c} (N - i) / (n + N - i). Equal errors make it less.
    """
    if outcome.certificate is None:
        return 1.0
    i, new = np.arange(outcome.count), outcome.new
    return float(np.prod((new - i) / (outcome.certificate.sequences + new - i)))


def run_case(case: Case, seed: int, new: int) -> Outcome:
    """Extract a case, and compare what its certificate states with `new` sequences that nobody has seen."""
    try:
        found = extract_layer(case.function, case.dim, seed=seed, options=case.options)
        end, word = "accepted", found.method
    except VerificationError as error:
        found, end, word = error.result, "rejected", error.result.method
    except RecoveryRefused as error:
        return Outcome(case.kind, "refused", type(error).__name__)
    except (ManyheadsError, Exception) as error:
        return Outcome(case.kind, "unnamed", f"{type(error).__name__}: {error}")
    certificate = found.certificate
    oracle = Oracle(case.function, case.dim, OracleSettings(residual=case.options.residual))
    rng = np.random.default_rng([seed, 9000])
    errors = oracle_errors(oracle, found.extracted.attention, rng, new, GaussianSequences())
    relative = errors.squared / certificate.variance
    count = int((relative > certificate.largest_error).sum())
    bad = end == "accepted" and float(np.quantile(relative, 1 - certificate.exceeding)) > certificate.tolerance
    return Outcome(case.kind, end, word, certificate, found.heads, found.total.calls, count, new, bad)

"""Summary of a recovery: ranks and norms of heads, cost, errors against known weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.results import Recovery

RANK_TOLERANCE = 1e-6  # a singular value below this share of the largest one does not count towards a rank


@dataclass(frozen=True)
class Head:
    """One head in figures."""

    # Numbers of singular values above a share of the largest one
    theta_rank: int
    projection_rank: int
    # Frobenius norms
    theta_norm: float
    projection_norm: float
    key_bias_norm: float


def describe_heads(layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> tuple[Head, ...]:
    """Return ranks and norms of every head, heads in the order of the layer.

    A singular value counts towards a rank when it is above the share `tolerance` of the largest one.
    """
    weights = (np.asarray(layer.theta, np.float64), np.asarray(layer.projection, np.float64))
    spectra = [np.linalg.svd(stack, compute_uv=False) for stack in weights]  # (m, d) each
    ranks = [np.sum(values > tolerance * values[:, :1], axis=1) for values in spectra]
    norms = [np.sqrt((values**2).sum(1)) for values in spectra]
    biases = np.zeros(layer.heads) if layer.key_bias is None else np.linalg.norm(layer.key_bias, axis=1)
    rows = zip(*ranks, *norms, biases, strict=True)
    return tuple(Head(int(a), int(b), float(c), float(d), float(e)) for a, b, c, d, e in rows)


def say_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words.

    Examples
    --------
    >>> say_ranks([16, 16, 16]), say_ranks([4, 3, 4])
    ('16', '3 to 4')
    """
    low, high = min(found := list(ranks)), max(found)
    return str(low) if low == high else f"{low} to {high}"


def at_offset_one(layer: AttentionLayer | RotaryLayer) -> AttentionLayer:
    """Return a layer with merged weights: itself, or what a layer with rotary positions does one token back."""
    if not isinstance(layer, RotaryLayer):
        return layer
    return layer.at_offset(1)


def summarize_recovery(found: Recovery, truth: AttentionLayer | RotaryLayer | None = None) -> dict[str, Any]:
    """Return what a recovery found, what it cost and what is known of it, as JSON can hold it."""
    layer = at_offset_one(found.layer)
    tolerance = rank_tolerance(found)
    heads = describe_heads(layer, tolerance)
    total = asdict(found.total)
    # Forms of all offsets hang together by the turns of a head; how many numbers that leaves free is not counted here.
    parameters = None if isinstance(found.layer, RotaryLayer) else free_parameters(layer.dim, heads)
    acts_on = "the tokens" if found.extracted is None else found.extracted.acts_on
    summary = {
        "heads": found.heads,
        "dim": layer.dim,
        "acts_on": acts_on,
        "theta_ranks": [head.theta_rank for head in heads],
        "projection_ranks": [head.projection_rank for head in heads],
        "rank_tolerance": tolerance,
        "certificate": dict(found.certificate.to_json()),
        "asked": total,
        "asked_by_stage": {name: asdict(counts) for name, counts in found.counts.items()},
        "parameters": parameters,
        "numbers_per_parameter": None if parameters is None else total["numbers"] / parameters,
        "stages": [{"name": one.name, "figures": dict(one.figures), "seconds": one.seconds} for one in found.stages],
        "method": found.method,
        "reason": found.reason,
        "noise": None if found.noise is None else asdict(found.noise),
        "tried": list(found.tried),
        "head_accuracy": [asdict(one) for one in found.head_accuracy],
        "notes": list(found.notes),
        "against_weights": {} if truth is None else _against(truth, found.layer),
    }
    return _plain(summary)


def rank_tolerance(found: Recovery) -> float:
    """Return the share of the largest singular value that counts: well above the error of the recovery."""
    error = float(found.certificate.largest_error)
    return float(min(max(RANK_TOLERANCE, 10 * math.sqrt(error)), 0.1)) if math.isfinite(error) else 0.1


def free_parameters(dim: int, heads: Iterable[Head]) -> int:
    """Return how many numbers determine a layer of matrices of given ranks.

    A matrix of rank r has r (rows + columns - r): [Theta; beta^T] with d + 1 rows, W with d; and d for the bias.

    Examples
    --------
    >>> free_parameters(8, [Head(2, 2, 1.0, 1.0, 1.0)])
    66
    """
    return dim + sum(
        head.theta_rank * (2 * dim + 1 - head.theta_rank) + head.projection_rank * (2 * dim - head.projection_rank)
        for head in heads
    )


def _against(truth: AttentionLayer | RotaryLayer, found: AttentionLayer | RotaryLayer) -> dict[str, float]:
    """Return the errors of the weights, relative and the largest over heads, where heads can be matched."""
    known, layer = at_offset_one(truth), at_offset_one(found)
    if known.theta.shape != layer.theta.shape:
        return {"heads": known.heads}
    errors = compare_layers(known, layer)
    names = ("theta", "projection", "key_bias", "bias")
    return {"heads": known.heads} | {name: getattr(errors, name) for name in names}


def _plain(value: Any) -> Any:
    """Return numbers of NumPy as Python's, and what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

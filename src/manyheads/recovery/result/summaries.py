"""Summary of a recovery: ranks and norms of heads, cost, errors against known weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Figures
from manyheads.recovery.layers.description import at_offset_one, describe_heads, free_parameters, rank_tolerance
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.result.results import Recovery


def summarize_recovery(found: Recovery, truth: AttentionLayer | RotaryLayer | None = None) -> dict[str, Any]:
    """Return what a recovery found, what it cost and what is known of it, as JSON can hold it."""
    layer = at_offset_one(found.layer)
    tolerance = rank_tolerance(found.certificate.largest_error)
    heads = describe_heads(layer, tolerance)
    total = asdict(found.total)
    # Forms of all offsets hang together by the turns of a head; how many numbers that leaves free is not counted here.
    parameters = None if isinstance(found.layer, RotaryLayer) else free_parameters(layer.dim, heads)
    acts_on = "the tokens" if found.extracted is None else found.extracted.acts_on
    summary: dict[str, Any] = {"heads": found.heads, "dim": layer.dim, "acts_on": acts_on, "rank_tolerance": tolerance}
    for name in ("theta", "projection"):
        summary[f"{name}_ranks"] = [getattr(head, f"{name}_rank") for head in heads]
    summary |= {"certificate": dict(found.certificate.to_json()), "asked": total, "parameters": parameters}
    summary["asked_by_stage"] = {name: asdict(counts) for name, counts in found.counts.items()}
    summary["numbers_per_parameter"] = None if parameters is None else total["numbers"] / parameters
    summary["stages"] = [
        {"name": one.name, "figures": dict(one.figures), "seconds": one.seconds} for one in found.stages
    ]
    summary |= {"method": found.method, "reason": found.reason, "tried": list(found.tried), "notes": list(found.notes)}
    summary["noise"] = None if found.noise is None else asdict(found.noise)
    summary["head_accuracy"] = [asdict(one) for one in found.head_accuracy]
    summary["against_weights"] = {} if truth is None else _against(truth, found.layer)
    return _plain_values(summary)


def _against(truth: AttentionLayer | RotaryLayer, found: AttentionLayer | RotaryLayer) -> Figures:
    """Return the errors of the weights, relative and the largest over heads, where heads can be matched."""
    known, layer = at_offset_one(truth), at_offset_one(found)
    if known.theta.shape != layer.theta.shape:
        return {"heads": known.heads}
    errors = compare_layers(known, layer)
    names = ("theta", "projection", "key_bias", "bias")
    return {"heads": known.heads} | {name: getattr(errors, name) for name in names}


def _plain_values(value: Any) -> Any:
    """Return numbers of NumPy as Python's, and what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(name): _plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_values(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

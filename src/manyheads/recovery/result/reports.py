"""Report on a recovery: its summary in figures, and a chapter with pictures of its layer, stages and queries."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Figures
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.layers.panels import (
    at_offset_one,
    describe_heads,
    free_parameters,
    layer_panels,
    rank_tolerance,
)
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.queries.leak_meter import describe_queries, describe_unmeasured, name_bound
from manyheads.recovery.result.results import Recovery
from manyheads.study import Listing
from manyheads.study.reporting.html import Section, format_figure


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


def stages_panel(found: Recovery) -> Listing:
    """Return what every stage asked, found and took, as a table."""
    figures = {stage.name: stage for stage in found.stages}
    rows = []
    for name in dict.fromkeys([*found.counts, *figures]):
        asked, stage = found.counts.get(name), figures.get(name)
        said = (
            "" if stage is None else ", ".join(f"{key} {format_figure(value)}" for key, value in stage.figures.items())
        )
        cost = ("", "", "") if asked is None else (f"{asked.calls:,}", f"{asked.tokens:,}", f"{asked.numbers:,}")
        rows.append((name, *cost, "" if stage is None else format_figure(round(stage.seconds, 3)), said))
    columns = ("stage", "calls", "tokens", "numbers read", "CPU s", "what it found")
    note = "A call is one sequence. Noise is measured before, and the result is selected and verified afterwards."
    return Listing("Stage by stage", columns, tuple(rows), note=note)


def leak_panel(leak: Mapping[str, Any]) -> Listing:
    """Return what is known of attacks behind every defence, from `measure_leak`."""
    rows, gap = [], describe_unmeasured(leak)
    for one in leak["defences"]:
        calls = ("bound", "cheapest")
        figures = ["not measured" if one[name] is None else format_figure(float(f"{one[name]:.3g}")) for name in calls]
        rows.append((one["name"], *figures, format_figure(float(f"{one['loss']:.3g}"))))
    columns = ("defence", "bound, calls", "cheapest attack known, calls", "squared error of an answer")
    bounds = ", ".join(dict.fromkeys(map(name_bound, leak["defences"])))
    note = f"Calls {describe_queries(leak)}. {leak['counting']:,.3g} calls show as many numbers as the layer has free "
    note += f"parameters. Bounds: {bounds}. {gap[:1].upper()}{gap[1:]}. Errors are relative to the variance."
    return Listing("What attacks behind noise and rounding have cost", columns, tuple(rows), note=note)


def recovery_section(found: Recovery, summary: Mapping[str, Any]) -> Section:
    """Return the chapter of a report on one recovery, from it and its `summarize_recovery`."""
    asked, against = summary["asked"], summary["against_weights"].items()
    facts = {"oracle": summary.get("oracle", ""), "method": f"{summary['method']}: {summary['reason']}"}
    facts["acts on"] = summary["acts_on"]
    facts["pictures"] = "of the heads one token back" if isinstance(found.layer, RotaryLayer) else ""
    facts["asked"] = f"{asked['calls']:,} calls, {asked['tokens']:,} tokens, {asked['numbers']:,} numbers read"
    facts["free parameters"] = f"{summary['parameters']:,}" if summary["parameters"] else ""
    facts["largest token"] = format_figure(asked["largest_norm"])
    facts["against the weights"] = ", ".join(f"{name.replace('_', ' ')} {format_figure(v)}" for name, v in against)
    facts["tried"] = "; ".join(summary["tried"])
    layer = at_offset_one(found.layer)
    leak = summary.get("leak")
    panels = (
        *layer_panels(layer, summary["rank_tolerance"]),
        stages_panel(found),
        *([leak_panel(leak)] if leak else []),
    )
    title = f"{summary['heads']} heads in {summary['dim']} dimensions, from answers alone"
    facts_ = tuple((name, value) for name, value in facts.items() if value)
    statement, command = summary["certificate"]["statement"], summary.get("command", "")
    return Section(title, statement, panels, facts=facts_, command=command)

"""Chapter of a report on a recovery: pictures of its layer, stages, queries."""

from collections.abc import Mapping
from typing import Any

from manyheads.recovery.layers.description import at_offset_one
from manyheads.recovery.layers.panels import layer_panels
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.queries.leak_meter import describe_queries, describe_unmeasured, name_bound
from manyheads.recovery.result.results import Recovery
from manyheads.study import Listing
from manyheads.study.reporting.html import Section, format_figure


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

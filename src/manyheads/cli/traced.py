"""`manyheads count config.json --traced`: the model of transformers on the meta device beside the closed form."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.costs import Cost

ROUTES = ("closed form", "traced")


def compare_traced(raw: Mapping[str, Any], path: Path, length: int, batch: int, training: bool) -> dict[str, Any]:
    """Return exact and dense FLOPs of the closed form and of the traced model, and what the differences are."""
    from manyheads.costs import count, transformer_cost
    from manyheads.errors import UsageError
    from manyheads.models import shape_from_config
    from manyheads.models.config import read_config
    from manyheads.models.counts import matrix_flops
    from manyheads.models.refusals import ConfigInvalid

    config = read_config(dict(raw), path)
    model, given = _meta_model(config, length, batch)
    try:
        cost = count(model, given, training=training, device="meta")
    except (RuntimeError, IndexError) as error:
        raise UsageError(f"--traced: the model cannot run {length} tokens ({error}); give another --length") from error
    closed = {name: batch * matrix_flops(config, length, masked=name == "exact") for name in ("exact", "dense")}
    notes = list(cost.notes)
    if training:
        try:
            shape = shape_from_config(config.raw)
            closed = {name: transformer_cost(shape, length, batch, True, convention=name).flops for name in closed}
        except ConfigInvalid:
            closed = {name: 3 * flops for name, flops in closed.items()}
            notes.append("the closed form of training is three forward passes")
    traced = {name: cost.to(name).flops for name in closed}
    return {"closed form": closed, "traced": traced, "differences": _differences(closed, traced, cost), "notes": notes}


def _meta_model(config: Any, length: int, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers without memory, and a batch of images or of tokens that are no padding."""
    from manyheads._extras import require
    from manyheads.models.checkpoints.loading import class_of, quiet_transformers
    from manyheads.models.families.heads import has_language_head

    torch, transformers = require("torch"), require("transformers")
    with quiet_transformers(), torch.device("meta"):
        given = transformers.AutoConfig.for_model(**config.raw)
        kind = class_of(given)
        if kind is transformers.AutoModel and has_language_head(config):
            kind = transformers.AutoModelForCausalLM
        model = (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(given).eval()
    if "pixel_values" in model.main_input_name:
        size = given.image_size
        return model, {"pixel_values": torch.zeros(batch, given.num_channels, size, size)}
    token = next(each for each in range(1, 3) if each != getattr(given, "pad_token_id", None))
    cached = {"use_cache": False} if hasattr(given, "use_cache") else {}
    return model, {"input_ids": torch.full((batch, length), token)} | cached


def _differences(closed: Mapping[str, int], traced: Mapping[str, int], cost: "Cost") -> list[str]:
    """Explain each difference, or show where the traced model multiplies."""
    if closed == traced:
        return []
    if closed["dense"] == traced["dense"]:
        masks = [note for note in cost.notes if "pairs" in note]
        return [f"exact: {'; '.join(masks) or 'not explained'}"]
    parts: dict[str, int] = {}
    for name, figures in cost.to("dense").by_module().breakdown().items():
        folded = re.sub(r"\b\d+\b", "*", name)
        parts[folded] = parts.get(folded, 0) + figures["flops"]
    more = traced["dense"] - closed["dense"]
    if left_out := [name for name, flops in parts.items() if flops == more]:
        return [f"dense: {more:+,} FLOPs of {left_out[0]}, which the closed form leaves out"]
    if free := [name for name, flops in parts.items() if flops == -2 * more]:  # its forward pass and one gradient
        return [f"dense: {more:+,} FLOPs of {free[0]}, whose input needs no gradient"]
    shown = "; ".join(f"{name} {flops:,}" for name, flops in sorted(parts.items(), key=lambda part: -part[1]) if flops)
    return [f"dense: {more:+,} FLOPs, not explained; the traced model has {shown}"]


def render_traced(found: Mapping[str, Any]) -> str:
    """Render both counts, their ratio, and what the differences are."""
    from manyheads._overview import render_table

    closed, traced = (found[route] for route in ROUTES)
    rows = [(name, f"{closed[name]:,}", f"{traced[name]:,}", f"{traced[name] / closed[name]:.4f}") for name in closed]
    table = render_table(("FLOPs", *ROUTES, "ratio"), rows)
    differences = [f"difference: {each}" for each in found["differences"]] or ["no difference"]
    return "\n".join((table, *differences, *(f"note: {note}" for note in found["notes"])))

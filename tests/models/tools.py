"""What each tool does with a family of the table: supported, refused or without reference, by the table's own data."""

from functools import cache

from tests.models import tiny

from manyheads.errors import UsageError
from manyheads.models.architecture import read_body
from manyheads.models.attention_layers import attention_config
from manyheads.models.config import read_config
from manyheads.models.families import FAMILIES
from manyheads.models.refusals import CheckpointRefused, NotExtractable

TOOLS = ("count", "scale", "audit", "probe", "extract")
WORDS = ("supported", "refused", "degraded", "no reference")
NO_STD = "its configuration does not say at which std its weights start"
OUTSIDE = "its attention is computed outside of the interface of transformers"
# Families whose attention no function of the interface computes, at the pinned version of transformers.
OWN_ATTENTION = ("gptj", "codegen", "gpt_neo", "openai-gpt", "bloom", "falcon", "mpt", "mpnet", "xglm")
APART = "transformers returns its pattern without the sink, which it applies to the output: nothing to compare with"
SINK_APART = ("granite_swa", "granitemoe_swa")
PREFIX = "transformers saves its layers without the prefix of its other tensors"
SAVED_OTHERWISE = ("vit_msn",)


@cache
def verdicts(family):
    """Return tool → word, and tool → reason of what is not supported."""
    raw = {"model_type": family, **tiny.settings(family)}
    reasons = {}
    try:
        read_body(raw)
    except UsageError as error:
        reasons["scale"] = reasons["audit"] = str(error)
    if not FAMILIES[family].plain_start:
        reasons.setdefault("audit", NO_STD)
    if family in OWN_ATTENTION:
        reasons["probe"] = OUTSIDE
    if family in SINK_APART:
        reasons["probe"] = APART
    try:
        attention_config(read_config(raw), 0)
    except (CheckpointRefused, NotExtractable) as error:
        reasons["extract"] = getattr(error, "found", str(error))
    if family in SAVED_OTHERWISE:
        reasons["extract"] = PREFIX
    words = {tool: "refused" if tool in reasons else "supported" for tool in TOOLS}
    return words | ({"probe": "no reference"} if family in SINK_APART else {}), reasons


NO_CLASS = {
    "emu3", "mllama", "mllama_text_model", "musicgen", "musicgen_decoder", "musicgen_melody",
    "musicgen_melody_decoder", "blip", "blip_text_model", "deepseek_ocr2", "deepseek_ocr2_text", "diffusion_gemma",
    "diffusion_gemma_text", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "evolla", "granite4_vision", "kosmos-2",
    "kosmos-2.5", "kosmos_2_text_model", "kosmos_2_5_text_model", "paddleocr_vl", "pix2struct",
    "pix2struct_text_model", "pp_formulanet", "pp_formulanet_text", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker",
    "step3p7", "step3p5", "t5gemma2", "t5gemma2_decoder", "unlimited_ocr", "unlimited_ocr_text",
    "vision-encoder-decoder",
}  # fmt: skip
"""Types whose text part has no class of its own in the Auto registry of transformers."""
RECORDED = ("t5", "whisper", "qwen3_next")  # tests/probe/test_families.py


def words_without_table(name):
    """Return tool → word of a type without a table: refused with its reason, but for what needs no roles."""
    count = "refused" if name in NO_CLASS else "degraded"
    probe = "supported" if name in RECORDED else "no reference"
    return {"count": count, "scale": "refused", "audit": "refused", "probe": probe, "extract": "refused"}


EXTRACTED = tuple(family for family in FAMILIES if verdicts(family)[0]["extract"] == "supported")

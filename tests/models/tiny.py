"""Tiny models of transformers in every family of the table, built from the table's own keys."""

import warnings

from manyheads.models.families import FAMILIES

CLASSES = {
    "vit_mae": "ViTMAEModel",
    "clip_vision_model": "CLIPVisionModel",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "gpt2": "GPT2LMHeadModel",
    "deit": "DeiTForImageClassification",
    "emu3_text_model": "Emu3ForCausalLM",
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "granite4_vision_text": "Granite4VisionTextModel",
    "granite_docling_text": "GraniteDoclingTextModel",
    "glm_ocr_text": "GlmOcrTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "glm4v_text": "Glm4vTextModel",
    "glm4v_moe_text": "Glm4vMoeTextModel",
    "mistral4": "Mistral4ForCausalLM",
}
MROPE = (
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "qwen3_vl_moe_text",
    "qwen3_omni_moe_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "paddleocr_vl_text",
)  # fmt: skip
SIZES = {
    "experts": 4, "active_experts": 2, "expert_hidden": 8, "shared_hidden": 12, "shared_experts": 2, "query_rank": 8,
    "key_value_rank": 12, "rotary_key_dim": 4, "plain_key_dim": 4, "value_dim": 8, "vocabulary": 29, "positions": 16,
    "image": 8, "patch": 4, "window": 4, "rotary_dims": 4,
}  # fmt: skip
PLAIN = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def settings(family, width=24, heads=3, layers=2, key_value_heads=None, key_dim=8, hidden=40, **changes):
    """Return the configuration of a tiny model, by the names that its family gives to sizes."""
    table = FAMILIES[family]
    sizes = {**SIZES, "width": width, "heads": heads, "layers": layers, "key_dim": key_dim, "mlp_hidden": hidden}
    sizes |= {"key_value_heads": key_value_heads or heads, "embedding_width": width}
    keys = {**table.keys, **table.counted}
    found = {key.name.split("|")[0]: sizes[name] for name, key in keys.items() if key.name and name in sizes}
    if family == "gpt_neo":
        found["attention_types"] = [[["global", "local"], layers // 2]]
    if family == "cwm":
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if family == "mistral4":
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 99}
        found["rope_parameters"] = yarn | {"llama_4_scaling_beta": 0.1, "mscale_all_dim": 0.0, "mscale": 1.0}
    if family in MROPE:
        turned = key_dim // (4 if family == "glm4v_moe_text" else 2)
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [turned - 2, 1, 1]}
        found["rope_parameters"] |= {"partial_rotary_factor": 0.5} if family == "glm4v_moe_text" else {}
    return {**found, **(PLAIN if "vocabulary" in keys else {}), **changes}


def model_class(family):
    """Return the name of the class with the head that the family is known for."""
    from transformers.models.auto import modeling_auto as auto

    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    tables = tables if FAMILIES[family].causal is True else tables[::-1]
    for table in (*tables, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES):
        if family in table:
            return CLASSES.get(family, table[family])
    return CLASSES[family]


def skip_before(version, family, reason, only=("aria_text",)):
    """Skip the test of a family under versions of transformers before this one."""
    import pytest
    import transformers

    if family in only and tuple(map(int, transformers.__version__.split(".")[:2])) < version:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")


def known(family):
    """Skip the test of a family that the installed version of transformers does not have."""
    import pytest
    import transformers

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def build(family, device="cpu", **sizes):
    """Return a random tiny model of a family; `sizes` as `settings` takes them."""
    import torch
    import transformers

    torch.set_num_threads(1)
    known(family)
    config = transformers.CONFIG_MAPPING[family](**settings(family, **sizes))
    config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as GPT-BigCode is imported
        kind = getattr(transformers, model_class(family))
    with torch.device(device):
        return kind(config)

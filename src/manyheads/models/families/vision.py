"""Encoders of images: ViT and those built alike, DINOv2, BEiT, CLIP's."""

from dataclasses import replace
from typing import Any

from manyheads.models.modules import CLASSIFIERS, MAYBE, NEVER, Family, Module, Role, head, keys, modules

_ATTENTION_RENAMED = (
    (r"attention\.attention\.q\.", "attention.attention.query."),
    (r"attention\.attention\.k\.", "attention.attention.key."),
    (r"attention\.attention\.v\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
)
VIT = Family(
    "vit",
    ("", "vit."),
    keys(width=768, heads=12, layers=12, eps=1e-12, qkv_bias=True)
    | keys(mlp_hidden=3072, activation=("hidden_act", "gelu"), image=224, patch=16, channels=3),
    (
        *modules("embeddings.cls_token=marker"),
        *modules("embeddings.mask_token=marker", when=MAYBE),
        Module("embeddings.position_embeddings", Role.POSITION, sort="bare"),
        *modules("embeddings.patch_embeddings.projection=patch"),
        *modules("encoder.layer.{layer}. layernorm_before=attention_norm"),
        *modules("encoder.layer.{layer}.attention.attention. query=query key=key value=value", "qkv_bias"),
        *modules("""
            encoder.layer.{layer}. attention.output.dense=output layernorm_after=mlp_norm
            encoder.layer.{layer}. intermediate.dense=mlp_in output.dense=mlp_out
            layernorm=final_norm
        """),
        *modules("pooler.dense=pooler", when=MAYBE),
    ),
    (*CLASSIFIERS, *head("decoder.0=classifier")),
    causal=False,
    language_heads=(),
    renamed=(
        (r"layers\.(\d+)\.attention\.([qkv])_proj\.", r"layers.\1.attention.attention.\2."),
        *_ATTENTION_RENAMED,
        (r"mlp\.fc1\.", "intermediate.dense."),
        (r"mlp\.fc2\.", "output.dense."),
        (r"(^|\.)layers\.", r"\1encoder.layer."),
    ),
)
_CLASS, _MASK, *_REST = VIT.body[:-1]
_ZERO = (Role.MARKER, Role.POSITION)
VIT_MSN = VIT.derive("vit_msn", body=VIT.body[:-1], blank=_ZERO)
VIT_MAE = VIT.derive("vit_mae", keys(mask_ratio=0.75), body=(_CLASS, *_REST), heads=(), blank=(Role.MARKER,))
IJEPA = VIT.derive("ijepa", keys(markers=("", 0)), prefixes=("", "ijepa."), body=(*VIT.body[2:], _MASK))
DEIT = VIT.derive(
    "deit",
    keys(markers=("", 2)),
    blank=_ZERO,
    prefixes=("", "deit."),
    body=(_CLASS, *modules("embeddings.distillation_token=marker"), *VIT.body[1:]),
    heads=(*VIT.heads, *head("cls_classifier=classifier distillation_classifier=classifier")),
)

_DINO_NAMES = {
    Role.ATTENTION_NORM: "encoder.layer.{layer}.norm1",
    Role.MLP_NORM: "encoder.layer.{layer}.norm2",
    Role.MLP_IN: "encoder.layer.{layer}.mlp.fc1",
    Role.MLP_OUT: "encoder.layer.{layer}.mlp.fc2",
}
DINOV2 = VIT.derive(
    "dinov2",
    keys(masked=("use_mask_token", True), layer_scale=("layerscale_value", 1.0))
    | keys(patch=14, mlp_ratio=4, mlp_hidden=("", None)),
    prefixes=("", "dinov2."),
    renamed=((r"\.attention\.([qkv])_proj\.", r".attention.attention.\1."), *_ATTENTION_RENAMED),
    body=(
        _CLASS,
        replace(_MASK, when="masked"),
        *(replace(each, path=_DINO_NAMES.get(each.role, each.path)) for each in _REST),
        *modules("encoder.layer.{layer}. layer_scale1.lambda1=attention_scale layer_scale2.lambda1=mlp_scale"),
    ),
    heads=head("classifier=classifier"),
    refused={"use_swiglu_ffn": (True, "the gated MLP of the largest DINOv2 has a hidden width of its own")},
)
_BEIT_CHANGES: dict[Role, dict[str, Any]] = {
    Role.POSITION: {"when": "absolute"},
    Role.KEY: {"bias": NEVER},
    Role.FINAL_NORM: {"bias": "!mean_pooled", "when": "!mean_pooled"},
    Role.QUERY: {"bias": "always"},
    Role.VALUE: {"bias": "always"},
}
BEIT = VIT.derive(
    "beit",
    keys(absolute=("use_absolute_position_embeddings", False), layer_scale=("layer_scale_init_value", 0.1))
    | keys(mean_pooled=("use_mean_pooling", True)),
    blank=_ZERO,
    prefixes=("", "beit."),
    body=(
        *(replace(each, **_BEIT_CHANGES.get(each.role, {})) for each in VIT.body[:-1]),
        *modules("encoder.layer.{layer}. lambda_1=attention_scale lambda_2=mlp_scale"),
        *modules("pooler.layernorm=final_norm", "mean_pooled", when="mean_pooled"),
    ),
    heads=head("classifier=classifier lm_head=classifier layernorm=final_norm"),
    refused={
        "use_relative_position_bias": (True, "a table of relative positions in every layer is not described"),
        "use_shared_relative_position_bias": (True, "a table of relative positions shared by layers is not described"),
    },
)

CLIP_VISION = Family(
    "clip_vision_model",
    ("", "vision_model."),
    keys(width=768, heads=12, layers=12, eps=1e-5)
    | keys(mlp_hidden=3072, activation=("hidden_act", "quick_gelu"), image=224, patch=32, channels=3),
    modules("""
        embeddings. class_embedding=marker patch_embedding=patch:never position_embedding=position position_ids=buffer
        pre_layrnorm=embedding_norm
        encoder.layers.{layer}. layer_norm1=attention_norm
        encoder.layers.{layer}.self_attn. q_proj=query k_proj=key v_proj=value out_proj=output
        encoder.layers.{layer}. layer_norm2=mlp_norm mlp.fc1=mlp_in mlp.fc2=mlp_out
        post_layernorm=final_norm
    """),
    (*head("visual_projection=classifier:never"), *CLASSIFIERS),
    causal=False,
    language_heads=(),
    plain_start=False,
)

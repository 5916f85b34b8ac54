"""Encoders of images: ViT and those built alike, DINOv2, BEiT, CLIP's."""

from collections.abc import Mapping
from dataclasses import replace

from manyheads.models.families.common import CLASSIFIERS, head, sizes
from manyheads.models.modules import MAYBE, NEVER, Family, Key, Module, Role


def _patches(image: int = 224, patch: int = 16, activation: str = "gelu") -> dict[str, Key]:
    return {
        "mlp_hidden": Key("intermediate_size", 3072),
        "activation": Key("hidden_act", activation),
        "image": Key("image_size", image),
        "patch": Key("patch_size", patch),
        "channels": Key("num_channels", 3),
    }


_RENAMED = (
    (r"layers\.(\d+)\.attention\.([qkv])_proj\.", r"layers.\1.attention.attention.\2."),
    (r"attention\.attention\.q\.", "attention.attention.query."),
    (r"attention\.attention\.k\.", "attention.attention.key."),
    (r"attention\.attention\.v\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
    (r"mlp\.fc1\.", "intermediate.dense."),
    (r"mlp\.fc2\.", "output.dense."),
    (r"(^|\.)layers\.", r"\1encoder.layer."),
)
_VIT_BODY = (
    Module("embeddings.cls_token", Role.MARKER, "bare"),
    Module("embeddings.mask_token", Role.MARKER, "bare", MAYBE),
    Module("embeddings.position_embeddings", Role.POSITION, "bare"),
    Module("embeddings.patch_embeddings.projection", Role.PATCH),
    Module("encoder.layer.{layer}.layernorm_before", Role.ATTENTION_NORM, "norm"),
    Module("encoder.layer.{layer}.attention.attention.query", Role.QUERY, bias=("qkv_bias",)),
    Module("encoder.layer.{layer}.attention.attention.key", Role.KEY, bias=("qkv_bias",)),
    Module("encoder.layer.{layer}.attention.attention.value", Role.VALUE, bias=("qkv_bias",)),
    Module("encoder.layer.{layer}.attention.output.dense", Role.OUTPUT),
    Module("encoder.layer.{layer}.layernorm_after", Role.MLP_NORM, "norm"),
    Module("encoder.layer.{layer}.intermediate.dense", Role.MLP_IN),
    Module("encoder.layer.{layer}.output.dense", Role.MLP_OUT),
    Module("layernorm", Role.FINAL_NORM, "norm"),
    Module("pooler.dense", Role.POOLER, when=MAYBE),
)

VIT = Family(
    model_type="vit",
    prefixes=("", "vit."),
    causal=False,
    language_heads=(),
    renamed=_RENAMED,
    keys={
        **sizes(768, 12, 12),
        "eps": Key("layer_norm_eps", 1e-12),
        "qkv_bias": Key("qkv_bias", True),
    },
    counted=_patches(),
    body=_VIT_BODY,
    heads=(*CLASSIFIERS, head("decoder.0")),
)
_ZERO = (Role.MARKER, Role.POSITION)
VIT_MSN = replace(VIT, model_type="vit_msn", body=_VIT_BODY[:-1], blank=_ZERO)
VIT_MAE = replace(
    VIT,
    model_type="vit_mae",
    body=tuple(module for module in _VIT_BODY[:-1] if module.path != "embeddings.mask_token"),
    counted=_patches() | {"mask_ratio": Key("mask_ratio", 0.75)},
    heads=(),
    blank=(Role.MARKER,),
)
IJEPA = replace(
    VIT,
    model_type="ijepa",
    prefixes=("", "ijepa."),
    body=(*_VIT_BODY[2:], _VIT_BODY[1]),
    counted=_patches() | {"markers": Key("", 0)},
)
DEIT = replace(
    VIT,
    model_type="deit",
    blank=_ZERO,
    prefixes=("", "deit."),
    body=(_VIT_BODY[0], Module("embeddings.distillation_token", Role.MARKER, "bare"), *_VIT_BODY[1:]),
    counted=_patches() | {"markers": Key("", 2)},
    heads=(*VIT.heads, head("cls_classifier"), head("distillation_classifier")),
)

_DINO_RENAMED = (
    (r"\.attention\.([qkv])_proj\.", r".attention.attention.\1."),
    (r"attention\.attention\.q\.", "attention.attention.query."),
    (r"attention\.attention\.k\.", "attention.attention.key."),
    (r"attention\.attention\.v\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
)
_DINO_NAMES = {
    Role.ATTENTION_NORM: "encoder.layer.{layer}.norm1",
    Role.MLP_NORM: "encoder.layer.{layer}.norm2",
    Role.MLP_IN: "encoder.layer.{layer}.mlp.fc1",
    Role.MLP_OUT: "encoder.layer.{layer}.mlp.fc2",
}
DINOV2 = replace(
    VIT,
    model_type="dinov2",
    prefixes=("", "dinov2."),
    renamed=_DINO_RENAMED,
    keys={**VIT.keys, "masked": Key("use_mask_token", True), "layer_scale": Key("layerscale_value", 1.0)},
    counted={**_patches(patch=14), "mlp_ratio": Key("mlp_ratio", 4), "mlp_hidden": Key("", None)},
    body=(
        _VIT_BODY[0],
        replace(_VIT_BODY[1], when=("masked",)),
        *(replace(each, path=_DINO_NAMES.get(each.role, each.path)) for each in _VIT_BODY[2:-1]),
        Module("encoder.layer.{layer}.layer_scale1.lambda1", Role.ATTENTION_SCALE, "bare"),
        Module("encoder.layer.{layer}.layer_scale2.lambda1", Role.MLP_SCALE, "bare"),
    ),
    heads=(head("classifier"),),
    refused={"use_swiglu_ffn": (True, "the gated MLP of the largest DINOv2 has a hidden width of its own")},
)
BEIT = replace(
    VIT,
    model_type="beit",
    blank=_ZERO,
    prefixes=("", "beit."),
    keys={
        **VIT.keys,
        "absolute": Key("use_absolute_position_embeddings", False),
        "layer_scale": Key("layer_scale_init_value", 0.1),
        "mean_pooled": Key("use_mean_pooling", True),
    },
    body=(
        *(
            replace(each, when=("absolute",))
            if each.role is Role.POSITION
            else replace(each, bias=NEVER)
            if each.role is Role.KEY
            else replace(each, bias=("!mean_pooled",), when=("!mean_pooled",))
            if each.role is Role.FINAL_NORM
            else replace(each, bias=())
            if each.role in (Role.QUERY, Role.VALUE)
            else each
            for each in _VIT_BODY[:-1]
        ),
        Module("encoder.layer.{layer}.lambda_1", Role.ATTENTION_SCALE, "bare"),
        Module("encoder.layer.{layer}.lambda_2", Role.MLP_SCALE, "bare"),
        Module("pooler.layernorm", Role.FINAL_NORM, "norm", ("mean_pooled",), ("mean_pooled",)),
    ),
    heads=(head("classifier"), head("lm_head"), head("layernorm", Role.FINAL_NORM, "norm")),
    refused={
        "use_relative_position_bias": (True, "a table of relative positions in every layer is not described"),
        "use_shared_relative_position_bias": (True, "a table of relative positions shared by layers is not described"),
    },
)

_CLIP = "encoder.layers.{layer}."
CLIP_VISION = Family(
    model_type="clip_vision_model",
    plain_start=False,
    prefixes=("", "vision_model."),
    causal=False,
    language_heads=(),
    keys={**sizes(768, 12, 12), "eps": Key("layer_norm_eps", 1e-5)},
    counted=_patches(patch=32, activation="quick_gelu"),
    body=(
        Module("embeddings.class_embedding", Role.MARKER, "bare"),
        Module("embeddings.patch_embedding", Role.PATCH, bias=NEVER),
        Module("embeddings.position_embedding", Role.POSITION, "table"),
        Module("embeddings.position_ids", Role.BUFFER, "bare", MAYBE),
        Module("pre_layrnorm", Role.EMBEDDING_NORM, "norm"),
        Module(_CLIP + "layer_norm1", Role.ATTENTION_NORM, "norm"),
        Module(_CLIP + "self_attn.q_proj", Role.QUERY),
        Module(_CLIP + "self_attn.k_proj", Role.KEY),
        Module(_CLIP + "self_attn.v_proj", Role.VALUE),
        Module(_CLIP + "self_attn.out_proj", Role.OUTPUT),
        Module(_CLIP + "layer_norm2", Role.MLP_NORM, "norm"),
        Module(_CLIP + "mlp.fc1", Role.MLP_IN),
        Module(_CLIP + "mlp.fc2", Role.MLP_OUT),
        Module("post_layernorm", Role.FINAL_NORM, "norm"),
    ),
    heads=(head("visual_projection", bias=NEVER), *CLASSIFIERS),
)

VISION: Mapping[str, Family] = {
    family.model_type: family for family in (VIT, VIT_MSN, VIT_MAE, IJEPA, DEIT, DINOV2, BEIT, CLIP_VISION)
}

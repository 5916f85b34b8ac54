"""Parameters and matrix FLOPs from configurations: published figures, the models of transformers, closed forms."""

import pytest
from tests.models import tiny

from manyheads.costs import transformer_cost
from manyheads.models import shape_from_config
from manyheads.models.counts import count_parameters, matrix_flops
from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.models.refusals import ConfigInvalid, FamilyUnknown


def llama(width, layers, heads, hidden, vocabulary=128256, kv=8):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "llama", **sizes, "num_key_value_heads": kv, "intermediate_size": hidden,
            "vocab_size": vocabulary}  # fmt: skip


def image(model_type, width, layers, heads):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    labels = {"id2label": {str(each): "" for each in range(1000)}, "architectures": ["ViTForImageClassification"]}
    return {"model_type": model_type, **sizes, "intermediate_size": 4 * width, **labels}


DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536, "intermediate_size": 12288, "first_k_dense_replace": 1, "vocab_size": 102400,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112}

# Total and active parameters as published, in units of the last digit given, and where.
PUBLISHED = {
    "GPT-NeoX-20B": ({"model_type": "gpt_neox"}, 20_554_567_680, None, 1, "Black et al. 2022, Table 1"),
    "BLOOM-176B": (BLOOM, 176_247_271_424, None, 1, "model card"),
    "LLaMA-2-7B": ({"model_type": "llama"}, 6.74e9, None, 1e7, "model card, safetensors"),
    "Llama-3-8B": (llama(4096, 32, 32, 14336), 8.03e9, None, 1e7, "model card, safetensors"),
    "Llama-3.1-405B": (llama(16384, 126, 128, 53248), 406e9, None, 1e9, "safetensors of the model card"),
    "Mistral-7B": ({"model_type": "mistral"}, 7.24e9, None, 1e7, "model card, safetensors"),
    "Mixtral-8x7B": ({"model_type": "mixtral"}, 46.7e9, 12.9e9, 1e8, "Mistral AI, December 2023"),
    "Gemma-2-2B": ({"model_type": "gemma2"}, 2024517888 + 589824000, None, 1, "Gemma 2 report, Table 2"),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 116.83e9, 5.13e9, 1e7, "model card, Table 1: without embedding"),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5e9, 3.3e9, 1e8, "model card"),
    "DeepSeek-V2": (DEEPSEEK_V2, 236e9, 21e9, 1e9, "arXiv 2405.04434"),
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671e9, 37e9, 1e9, "arXiv 2412.19437: without embedding"),
    "ViT-L/16": (image("vit", 1024, 24, 16), 304.3e6, None, 1e5, "torchvision"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name):
    config, total, active, unit, source = PUBLISHED[name]
    found = count_parameters(config)
    assert abs(found.total - total) <= unit / 2
    if active:
        # What a source leaves out of its active parameters differs; the table that is looked up, or nothing.
        without = found.embedding if "without embedding" in source else 0
        assert abs(found.active - without - active) <= unit * 0.6


def test_blocks_of_multi_token_prediction():
    found = count_parameters({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1})
    assert round(found.predicted / 1e9, 1) == 11.6  # beside the 671B: 14B with both shared tables


# GFLOPs: of a training step for each token at 4096 tokens (DeepSeek-AI, ISCA 2025, Table 2), of a forward pass of 128
# tokens without a mask (Clark et al. 2020, Table 8), multiply-adds of an image (Touvron et al. 2021; Liu et al. 2022).
COMPUTE = {
    "DeepSeek-V3": (lambda: 3 * matrix_flops({"model_type": "deepseek_v3"}, 4096) / 4096, 250, 0.01),
    "DeepSeek-V2": (lambda: 3 * matrix_flops(DEEPSEEK_V2, 4096) / 4096, 155, 0.01),
    "Llama-3.1-405B": (lambda: 3 * matrix_flops(PUBLISHED["Llama-3.1-405B"][0], 4096) / 4096, 2448, 0.015),
    "GPT": (lambda: matrix_flops({"model_type": "openai-gpt"}, 128, masked=False), 30, 0.02),
    "ViT-B/16": (lambda: matrix_flops(image("vit", 768, 12, 12), 197) / 2, 17.6, 0.005),
    "ViT-L/16": (lambda: matrix_flops(image("vit", 1024, 24, 16), 197) / 2, 61.6, 0.005),
    "DeiT-S": (lambda: matrix_flops(image("deit", 384, 12, 6), 197) / 2, 4.6, 0.01),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_published_flops(name):
    count, published, tolerance = COMPUTE[name]
    assert abs(count() / 1e9 / published - 1) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_flops_are_those_of_the_closed_form(family):
    # The closed form adds items of a plain block, this count goes through the table of modules.
    config = {"model_type": family, **tiny.settings(family, layers=7)}  # a whole period of windows
    config |= {"architectures": ["BertForMaskedLM"]} if family == "bert" else {}
    uneven = {"experts", "key_value_rank", "window_period", "mask_ratio"} & {
        *FAMILIES[family].keys,
        *FAMILIES[family].counted,
    }
    if uneven:
        with pytest.raises(ConfigInvalid, match=r"experts|latent|window|mask_ratio"):
            shape_from_config(config)
        return
    shape = shape_from_config(config)
    length = shape.fixed_length or 13
    assert matrix_flops(config, length) == transformer_cost(shape, length).flops


def test_windows_and_masks_by_enumeration():
    config = {"model_type": "gemma2", **tiny.settings("gemma2", window=4, layers=3)}
    config["sliding_window"] = 4
    length = 7
    whole, near = length * (length + 1) // 2, sum(min(i + 1, 4) for i in range(length))
    matrices = count_parameters(config).matrix * length
    assert matrix_flops(config, length) == 2 * (matrices + 3 * 2 * 8 * (whole + 2 * near))
    both = {"model_type": "modernbert", **tiny.settings("modernbert"), "local_attention": 4}
    seen = sum(abs(i - j) <= 2 for i in range(length) for j in range(length))
    matrices = count_parameters(both).matrix * length
    assert matrix_flops(both, length) == 2 * (matrices + 3 * 2 * 8 * (length * length + seen))


def test_families_are_known_or_refused_by_name():
    assert len(FAMILIES) >= 60
    assert not set(FAMILIES) & set(UNSUPPORTED)
    for name, reason in UNSUPPORTED.items():
        with pytest.raises(FamilyUnknown, match=name) as caught:
            count_parameters({"model_type": name})
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mixtral", "num_local_experts": 0}, "visits 2 experts, expected 1 to their number, 0"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "visits 9 experts, expected 1 to their number, 8"),
        ({"model_type": "vit", "patch_size": 0}, "patch_size is 0, expected 1 to the image_size, 224"),
        ({"model_type": "vit", "image_size": 15}, "patch_size is 16, expected 1 to the image_size, 15"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(config, says):
    with pytest.raises(ConfigInvalid, match=says):
        count_parameters(config)

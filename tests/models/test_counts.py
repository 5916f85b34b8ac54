"""Parameters and matrix FLOPs from configurations: published figures, the models of transformers, closed forms."""

import re

import pytest
from tests.models import tiny
from tests.models.by_modules import matrix_flops

from manyheads.costs import kv_cache_bytes, transformer_cost
from manyheads.costs.formulas.decoding import token_cost
from manyheads.costs.formulas.memory import matrix_parameters, stored_matrices
from manyheads.errors import UsageError
from manyheads.models import shape_from_config
from manyheads.models.counts import count_parameters, parameters_per_device
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
    "DeepSeek-V3": (lambda: training({"model_type": "deepseek_v3"}, 4096) / 4096, 250, 0.01),
    "DeepSeek-V2": (lambda: training(DEEPSEEK_V2, 4096) / 4096, 155, 0.01),
    "Llama-3.1-405B": (lambda: training(PUBLISHED["Llama-3.1-405B"][0], 4096) / 4096, 2448, 0.015),
    "GPT": (lambda: forward({"model_type": "openai-gpt"}, 128, convention="dense"), 30, 0.02),
    "ViT-B/16": (lambda: forward(image("vit", 768, 12, 12), 197) / 2, 17.6, 0.005),
    "ViT-L/16": (lambda: forward(image("vit", 1024, 24, 16), 197) / 2, 61.6, 0.005),
    "DeiT-S": (lambda: forward(image("deit", 384, 12, 6), 197) / 2, 4.6, 0.01),
}


def forward(config, length, batch=1, **options):
    return transformer_cost(shape_from_config(config), length, batch, **options).flops


def training(config, length, batch=1, **options):
    return forward(config, length, batch, training=True, **options)


@pytest.mark.parametrize("name", COMPUTE)
def test_published_flops(name):
    count, published, tolerance = COMPUTE[name]
    assert abs(count() / 1e9 / published - 1) < tolerance


DEEPSEEK_16B = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
}  # fmt: skip


def test_published_steps_of_training_with_experts_and_latent_attention():
    """To the last digit: tests/unit/flop_calculation_test.py of MaxText; Mixtral's to the digits that are given."""
    assert training(DEEPSEEK_16B, 4096, 8, convention="dense") == 593_272_422_531_072
    assert training({"model_type": "deepseek_v3"}, 2048, 8, convention="dense") == 4_103_370_952_409_088
    mixtral = [training({"model_type": "mixtral"}, 4096, 6, convention=each) for each in ("exact", "all-experts")]
    assert [round(flops / 1e12, 1) for flops in mixtral] == [1959.0, 6946.4]


GEMMA3_1B = {
    "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "intermediate_size": 6912,
}  # fmt: skip
CACHES = [
    ({"model_type": "gpt_oss"}, 1, 73_728),
    ({"model_type": "gpt_oss", "num_hidden_layers": 24}, 1, 49_152),
    ({"model_type": "deepseek_v3"}, 32_768, 2_302_672_896),
    (GEMMA3_1B, 32_768, 139 * 2**20),
]


@pytest.mark.parametrize(("config", "context", "size"), CACHES)
def test_published_sizes_of_caches(config, context, size):
    assert kv_cache_bytes(shape_from_config(config), context, itemsize=2) == size


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_forms_are_those_of_a_walk_through_the_modules(family):
    config = {"model_type": family, **tiny.settings(family, layers=7)}  # a whole period of windows
    config |= {"architectures": ["BertForMaskedLM"]} if family == "bert" else {}
    shape, parameters = shape_from_config(config), count_parameters(config)
    assert matrix_parameters(shape) == parameters.matrix
    length = shape.fixed_length or 13
    for convention in ("exact", "dense"):
        assert matrix_flops(config, length, convention == "exact") == forward(config, length, convention=convention)
    assert parameters_per_device(config) == parameters.total
    if shape.causal and not config.get("architectures"):
        whole, one = (transformer_cost(shape, n).flops for n in (13, 12))
        if not shape.classes and all(kind.latent is None for kind in shape.blocks):
            assert token_cost(shape, 13).flops == whole - one


def test_decoding_over_latent_vectors_is_the_product_of_their_factors():
    """Against the products by hand: keys and values of each head never appear."""
    shape = shape_from_config(DEEPSEEK_16B)
    kind, T = shape.blocks[0], 100
    absorbed = 16 * (512 + 64) * T + 16 * 512 * T  # scores, mixture
    projections = 2048 * 16 * 192 + 2048 * (512 + 64) + 16 * 128 * 512 + 16 * 512 * 128 + 16 * 128 * 2048
    assert kind.projection_macs == projections
    rest = count_parameters(DEEPSEEK_16B).matrix - 27 * projections
    assert token_cost(shape, T).flops == 2 * (27 * (absorbed + projections) + rest)


def test_weights_of_experts_that_a_call_reads():
    shape = shape_from_config({"model_type": "mixtral"})
    expert = 3 * 4096 * 14336 * 32
    for tokens, visited in ((1, 2), (3, 6), (4, 8), (100, 8), (None, 8)):
        assert stored_matrices(shape, tokens) - stored_matrices(shape, 1) == (visited - 2) * expert


DIVIDED = {"heads": 4, "key_value_heads": 2, "hidden": 48}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_parameters_of_all_devices_are_the_model_and_what_each_holds(family):
    """Of t devices the sum exceeds the model by what is held t times, listed here from the model of transformers."""
    torch = pytest.importorskip("torch")
    model = tiny.build(family, **{**DIVIDED, "width": 32, "layers": 3})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    split = r"(q_proj|k_proj|v_proj|c_attn|q_b_proj|kv_b_proj|gate_proj|up_proj|c_fc|embed_tokens|wte|lm_head|sinks)"
    inward = r"(o_proj|c_proj|down_proj)\.weight$|experts\.(gate_up_proj|down_proj)$|gate_up_proj_bias"
    vocabulary = model.config.vocab_size
    padded = sum(-vocabulary % 2 * each.shape[1] for name, each in model.named_parameters() if vocabulary in each.shape)
    whole = sum(p.numel() for name, p in model.named_parameters() if not re.search(f"{split}|{inward}", name))
    assert isinstance(model, torch.nn.Module)
    assert 2 * parameters_per_device(config, 2) == count_parameters(config).total + whole + padded


def test_devices_that_do_not_divide_are_refused():
    for devices, says in (({"tensor": 3}, "3 devices do not divide heads=32"), ({"expert": 3}, "experts=8")):
        with pytest.raises(UsageError, match=says):
            parameters_per_device({"model_type": "mixtral"}, **devices)
    for config in ({"model_type": "llama"}, {"model_type": "deepseek_v3", "first_k_dense_replace": 61}):
        with pytest.raises(UsageError, match="no layer of this"):
            parameters_per_device(config, expert=2)
    with pytest.raises(UsageError, match="devices=0"):
        kv_cache_bytes(shape_from_config({"model_type": "llama"}), 9, devices=0)
    with pytest.raises(UsageError, match="one to divide the other"):
        kv_cache_bytes(shape_from_config({"model_type": "mixtral"}), 9, devices=3)
    held = [kv_cache_bytes(shape_from_config({"model_type": "mixtral"}), 9, devices=n) for n in (1, 2, 8, 16)]
    assert held[0] == 2 * held[1] == 8 * held[2] == 8 * held[3]


def test_windows_and_masks_by_enumeration():
    config = {"model_type": "gemma2", **tiny.settings("gemma2", window=4, layers=3)}
    config["sliding_window"] = 4
    length = 7
    whole, near = length * (length + 1) // 2, sum(min(i + 1, 4) for i in range(length))
    matrices = count_parameters(config).matrix * length
    assert forward(config, length) == 2 * (matrices + 3 * 2 * 8 * (whole + 2 * near))
    both = {"model_type": "modernbert", **tiny.settings("modernbert"), "local_attention": 4}
    seen = sum(abs(i - j) <= 2 for i in range(length) for j in range(length))
    matrices = count_parameters(both).matrix * length
    assert forward(both, length) == 2 * (matrices + 3 * 2 * 8 * (length * length + seen))


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

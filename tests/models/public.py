"""Public configurations: what matters of their `config.json`, and the parameters that their authors publish.

The figures were written down from memory, not copied from model cards. `differs` explains every figure that is not
equal: of "published" parameters, of the "forward" and "training" pass as traced, and of the "cache" that transformers
keeps. `FAMILY_DIFFERS` does so for whole families.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

WINDOW = "transformers keeps one token less of a window: the next one takes its place"
PAIRS = "its attention in transformers is none of the fused ones and computes masked pairs too: equal as dense"

BIASES = "the file also holds 256 correction biases of the router for each of 58 layers, which are no parameters"


class Public(NamedTuple):
    """A public configuration."""

    config: dict
    published: int | None
    differs: Mapping[str, str] = MappingProxyType({})


def dense(model_type, width, layers, heads, hidden, vocabulary, groups=None, **more):
    """Return a configuration by the usual keys."""
    return {"model_type": model_type, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": groups or heads, "intermediate_size": hidden, "vocab_size": vocabulary,
            **more}  # fmt: skip


def gpt2(width, layers, heads):
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}


def opt(width, layers, heads, **more):
    return {"model_type": "opt", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "ffn_dim": 4 * width, "word_embed_proj_dim": width, **more}  # fmt: skip


def bloom(width, layers, heads):
    return {"model_type": "bloom", "hidden_size": width, "n_layer": layers, "n_head": heads}


def pythia(width, layers, heads, vocabulary=50304):
    sizes = dense("gpt_neox", width, layers, heads, 4 * width, vocabulary)
    return {name: value for name, value in sizes.items() if name != "num_key_value_heads"}


TIED = {"tie_word_embeddings": True}
NARROW = {"head_dim": 128}
DEEPSEEK_LITE = {
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V2 = {**DEEPSEEK_LITE, "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536,
               "n_group": 8, "topk_group": 3}  # fmt: skip
SLIDES = {"sliding_window": 512, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6}
OSS = {"head_dim": 64, "num_experts_per_tok": 4}
STARCODER = {"use_bias": True, "sliding_window": 4096}

PUBLIC = {
    "GPT-2": Public(gpt2(768, 12, 12), 124_439_808),
    "GPT-2 medium": Public(gpt2(1024, 24, 16), 354_823_168),
    "GPT-2 large": Public(gpt2(1280, 36, 20), 774_030_080),
    "GPT-2 XL": Public(gpt2(1600, 48, 25), 1_557_611_200),
    "OPT-125M": Public(opt(768, 12, 12), 125_239_296),
    "OPT-350M": Public(opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False), 331_196_416),
    "OPT-6.7B": Public(opt(4096, 32, 32), 6_658_473_984),
    "BLOOM-560M": Public(bloom(1024, 24, 16), 559_214_592),
    "BLOOM-176B": Public(bloom(14336, 70, 112), 176_247_271_424),
    "GPT-J-6B": Public({"model_type": "gptj"}, 6_050_882_784),
    "GPT-NeoX-20B": Public({"model_type": "gpt_neox"}, 20_554_567_680),
    "Pythia-70M": Public(pythia(512, 6, 8), 70_426_624),
    "Pythia-410M": Public(pythia(1024, 24, 16), 405_334_016),
    "Pythia-1.4B": Public(pythia(2048, 24, 16), 1_414_647_808),
    "Pythia-6.9B": Public(pythia(4096, 32, 32, 50432), 6_857_302_016),
    "Pythia-12B": Public(pythia(5120, 36, 40, 50688), 11_846_072_320),
    "LLaMA-7B": Public(dense("llama", 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "LLaMA-13B": Public(dense("llama", 5120, 40, 40, 13824, 32000), 13_015_864_320),
    "LLaMA-65B": Public(dense("llama", 8192, 80, 64, 22016, 32000), 65_285_660_672),
    "Llama-2-70B": Public(dense("llama", 8192, 80, 64, 28672, 32000, 8), 68_976_648_192),
    "Llama-3-8B": Public(dense("llama", 4096, 32, 32, 14336, 128256, 8), 8_030_261_248),
    "Llama-3-70B": Public(dense("llama", 8192, 80, 64, 28672, 128256, 8), 70_553_706_496),
    "Llama-3.1-405B": Public(dense("llama", 16384, 126, 128, 53248, 128256, 8), 405_853_388_800),
    "Llama-3.2-1B": Public(dense("llama", 2048, 16, 32, 8192, 128256, 8, **TIED), 1_235_814_400),
    "Llama-3.2-3B": Public(dense("llama", 3072, 28, 24, 8192, 128256, 8, **TIED), 3_212_749_824),
    "TinyLlama-1.1B": Public(dense("llama", 2048, 22, 32, 5632, 32000, 4), 1_100_048_384),
    "SmolLM2-135M": Public(dense("llama", 576, 30, 9, 1536, 49152, 3, **TIED), 134_515_008),
    "SmolLM2-1.7B": Public(dense("llama", 2048, 24, 32, 8192, 49152, **TIED), 1_711_376_384),
    "Yi-6B": Public(dense("llama", 4096, 32, 32, 11008, 64000, 4), 6_061_035_520),
    "Yi-34B": Public(dense("llama", 7168, 60, 56, 20480, 64000, 8), 34_388_917_248),
    "SmolLM3-3B": Public(dense("smollm3", 2048, 36, 16, 11008, 128256, 4, **TIED), 3_075_098_624),
    "Mistral-7B": Public(dense("mistral", 4096, 32, 32, 14336, 32000, 8), 7_241_732_096),
    "Mistral-Nemo-12B": Public(dense("mistral", 5120, 40, 32, 14336, 131072, 8, sliding_window=None, **NARROW),
                               12_247_782_400),
    "Mixtral-8x7B": Public(dense("mixtral", 4096, 32, 32, 14336, 32000, 8), 46_702_792_704),
    "Mixtral-8x22B": Public(dense("mixtral", 6144, 56, 48, 16384, 32768, 8), 140_630_071_296),
    "Qwen2-0.5B": Public(dense("qwen2", 896, 24, 14, 4864, 151936, 2, **TIED), 494_032_768),
    "Qwen2-7B": Public(dense("qwen2", 3584, 28, 28, 18944, 152064, 4), 7_615_616_512),
    "Qwen2-72B": Public(dense("qwen2", 8192, 80, 64, 29568, 152064, 8), 72_706_203_648),
    "Qwen2.5-14B": Public(dense("qwen2", 5120, 48, 40, 13824, 152064, 8), 14_770_033_664),
    "Qwen3-0.6B": Public(dense("qwen3", 1024, 28, 16, 3072, 151936, 8, **TIED, **NARROW), 596_049_920),
    "Qwen3-8B": Public(dense("qwen3", 4096, 36, 32, 12288, 151936, 8, **NARROW), 8_190_735_360),
    "Qwen3-32B": Public(dense("qwen3", 5120, 64, 64, 25600, 151936, 8, **NARROW), 32_762_123_264),
    "Qwen3-30B-A3B": Public(dense("qwen3_moe", 2048, 48, 32, 6144, 151936, 4, num_experts=128, num_experts_per_tok=8,
                                  moe_intermediate_size=768, **NARROW), 30_532_122_624),
    "Qwen3-235B-A22B": Public(dense("qwen3_moe", 4096, 94, 64, 12288, 151936, 4, num_experts=128,
                                    num_experts_per_tok=8, moe_intermediate_size=1536, **NARROW), 235_093_634_560),
    "Gemma-2B": Public(dense("gemma", 2048, 18, 8, 16384, 256000, 1, head_dim=256), 2_506_172_416),
    "Gemma-7B": Public(dense("gemma", 3072, 28, 16, 24576, 256000, 16, head_dim=256), 8_537_680_896),
    "Gemma-2-2B": Public(dense("gemma2", 2304, 26, 8, 9216, 256000, 4, head_dim=256), 2_614_341_888),
    "Gemma-2-9B": Public(dense("gemma2", 3584, 42, 16, 14336, 256000, 8, head_dim=256), 9_241_705_984),
    "Gemma-2-27B": Public(dense("gemma2", 4608, 46, 32, 36864, 256000, 16, query_pre_attn_scalar=144, **NARROW),
                          27_227_128_320),
    "Gemma-3-1B": Public(dense("gemma3_text", 1152, 26, 4, 6912, 262144, 1, **SLIDES), 999_885_952, {"cache": WINDOW}),
    "Phi-1.5": Public(dense("phi", 2048, 24, 32, 8192, 51200, partial_rotary_factor=0.5), 1_418_270_720),
    "Phi-2": Public(dense("phi", 2560, 32, 32, 10240, 51200, partial_rotary_factor=0.4), 2_779_683_840),
    "Phi-3-mini": Public(dense("phi3", 3072, 32, 32, 8192, 32064, pad_token_id=0), 3_821_079_552),
    "Phi-4": Public(dense("phi3", 5120, 40, 40, 17920, 100352, 10, pad_token_id=0), 14_659_507_200),
    "OLMo-7B": Public(dense("olmo", 4096, 32, 32, 11008, 50304), 6_888_095_744),
    "OLMo-2-7B": Public(dense("olmo2", 4096, 32, 32, 11008, 100352), 7_298_617_344),
    "OLMo-3-7B": Public(dense("olmo3", 4096, 32, 32, 11008, 100278), 7_298_011_136),
    "OLMoE-1B-7B": Public(dense("olmoe", 2048, 16, 16, 1024, 50304), 6_919_161_856),
    "DeepSeek-V2-Lite": Public(dense("deepseek_v2", 2048, 27, 16, 10944, 102400, **DEEPSEEK_LITE), 15_706_484_224),
    "DeepSeek-V2": Public(dense("deepseek_v2", 5120, 60, 128, 12288, 102400, **DEEPSEEK_V2), 235_741_434_880),
    "DeepSeek-V3": Public({"model_type": "deepseek_v3"}, 671_026_419_200, {"published": BIASES}),
    "gpt-oss-20b": Public(dense("gpt_oss", 2880, 24, 64, 2880, 201088, 8, num_local_experts=32, **OSS), 20_914_757_184,
                          {"cache": WINDOW}),
    "gpt-oss-120b": Public(dense("gpt_oss", 2880, 36, 64, 2880, 201088, 8, num_local_experts=128, **OSS),
                           116_829_156_672, {"cache": WINDOW}),
    "Falcon-7B": Public({"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
                         "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False},
                        6_921_720_704),
    "MPT-7B": Public({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432},
                     6_649_286_656),
    "StarCoder2-3B": Public(dense("starcoder2", 3072, 30, 24, 12288, 49152, 2, **STARCODER), 3_030_371_328),
    "StarCoder2-7B": Public(dense("starcoder2", 4608, 32, 36, 18432, 49152, 4, **STARCODER), 7_173_923_840),
    "StableLM-3B": Public(dense("stablelm", 2560, 32, 32, 6912, 50304), 2_795_443_200),
    "Command-R": Public(dense("cohere", 8192, 40, 64, 22528, 256000), 34_980_831_232),
    "Command-R7B": Public(dense("cohere2", 4096, 32, 32, 14336, 256000, 8, **NARROW), 8_028_033_024),
    "GLM-4-9B": Public(dense("glm", 4096, 40, 32, 13696, 151552, 2, **NARROW, pad_token_id=0), 9_399_951_360),
    "Granite-3.0-8B": Public(dense("granite", 4096, 40, 32, 12800, 49155, 8, **TIED), 8_170_848_256),
    "Apertus-8B": Public(dense("apertus", 4096, 32, 32, 21504, 131072, 8), 8_053_338_176),
    "ERNIE-4.5-0.3B": Public(dense("ernie4_5", 1024, 18, 16, 3072, 103424, 2, **TIED, **NARROW), 360_748_032),
    "Seed-OSS-36B": Public(dense("seed_oss", 5120, 64, 80, 27648, 155136, 8, **NARROW), 36_151_104_512),
    "Qwen2.5-VL-7B, text": Public(dense("qwen2_5_vl_text", 3584, 28, 28, 18944, 152064, 4), None),
    "GLM-4.7-Flash": Public(dense("glm4_moe_lite", 2048, 47, 20, 10240, 154880), None),
    "MiniMax-M2": Public(dense("minimax_m2", 3072, 62, 48, 1536, 200064, 8, **NARROW, num_local_experts=256,
                               num_experts_per_tok=8), None),
    "Granite-3.0-3B-A800M": Public(dense("granitemoe", 1536, 32, 24, 512, 49155, 8, **TIED, num_local_experts=40,
                                         num_experts_per_tok=8), None),
}  # fmt: skip
FAMILY_DIFFERS = {
    family: {"forward": PAIRS, "training": PAIRS} for family in ("bloom", "gptj", "gemma2", "mpt", "gpt_oss")
}


def differences(name):
    """Return the explanations of a row, by figure."""
    row = PUBLIC[name]
    return FAMILY_DIFFERS.get(row.config["model_type"], {}) | dict(row.differs)

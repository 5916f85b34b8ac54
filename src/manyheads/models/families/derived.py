"""Families that differ from another by keys, norms or experts: CWM, Jais 2, Granite-MoE, GLM-4.7-Flash, text parts."""

from manyheads.models.families import experts, gated
from manyheads.models.families.experts import _PLAIN, _ROUTED, _ROUTER, GLM4_MOE, QWEN3_MOE, _experts, _shared, _visits
from manyheads.models.families.gated import GRANITE, LLAMA, QWEN2, attention, decoder, grouped, window
from manyheads.models.modules import NEVER, keys, modules

_SINKS = modules("layers.{layer}.self_attn. sinks=sink")
_FOURTH = window(128, window_period=("", -4))
_FILLED = {"key_dim": ("", None)}  # heads fill the width
_BIASED = {"mlp_bias": (True, "biases of its experts are not described")}
_LATENT_DENSE = {name: key for name, key in experts.DEEPSEEK_V2.settings.items() if "expert" not in name}
_GRANITE_MOE = decoder(
    "granitemoe", grouped(4096, 32, 32, None, None, 11008, 32000, attention_bias=False)
    | _visits(8, 2, 11008, experts._LOCAL, _PLAIN) | keys(shared=("shared_intermediate_size", 0)), attention(),
    modules("layers.{layer}.block_sparse_moe. router.layer=router", NEVER)
    + modules("layers.{layer}.block_sparse_moe. input_linear.weight=expert_in output_linear.weight=expert_out",
              sort="bare"),
    renamed=((r"moe\.experts\.gate_up_proj$", "moe.input_linear.weight"), (r"moe\.router\.w", "moe.router.layer.w"),
             (r"moe\.experts\.down_proj$", "moe.output_linear.weight")), fixed_scale=True, beyond=gated.FIXED,
)  # fmt: skip
_GRANITE_SHARED = (
    *modules("layers.{layer}.shared_mlp. input_linear=mlp_gate_in", NEVER, sides="2*shared,width", when="shared"),
    *modules("layers.{layer}.shared_mlp. output_linear=mlp_out", NEVER, sides="width,shared", when="shared"),
)
_GROUP_NORMS = attention(NEVER, NEVER) + gated.QUERY_KEY_NORMS
_MOE = experts._DENSE + _ROUTER + experts._CORRECTION + _experts() + _shared("shared_experts")
_SHARED = keys(shared_experts=("num_shared_experts|n_shared_experts", 1))
_FIRST_DENSE = keys(dense_layers=("first_k_dense_replace", 1))
DERIVED = (
    LLAMA.derive("internlm3", grouped(4096, 32, 48, 2, 128, 10240, 128512, mlp_bias=False,
        attention_bias=("attention_bias|qkv_bias", False))),
    LLAMA.derive("iquestcoder", grouped(5120, 40, 80, 8, 128, 27648, 76800, **gated._BIASES)),
    LLAMA.derive("emu3_text_model", grouped(4096, 32, 32, 8, None, 14336, 184622, **gated._BIASES)),
    decoder("cwm", grouped(6144, 48, 64, 8, 128, 21504, 128256, **_FOURTH | window(8192), mlp_bias=False), gated.PLAIN,
        gated.gated_mlp("mlp_bias")),
    gated.NEMOTRON.derive("jais2", grouped(3328, 26, 32, 26, 128, 26624, 150272, "relu2", attention_bias=True,
        mlp_bias=True, eps=("layer_norm_eps", 1e-5)), gain_offset=0.0, gain_start=1.0),
    gated.MISTRAL.derive("ministral"),
    gated.MISTRAL.derive("ministral3", grouped(4096, 32, 34, 8, 128, 14336, 131072, **window(None)),
        beyond="its queries grow with the position"),
    GRANITE.derive("hyperclovax", keys(post_norms=("use_post_norm", True)), body=(*GRANITE.body,
        *modules("layers.{layer}. post_norm1=attention_post_norm post_norm2=mlp_post_norm", NEVER, when="post_norms"))),
    GRANITE.derive("granite_swa", grouped(2560, 20, 24, 4, None, 8192, 100352, tied=True, **gated._BIASES, **_FOURTH),
        body=(*GRANITE.body, *_SINKS), plain_start=False),
    decoder("vaultgemma", gated.GEMMA2.settings, attention(), norms=gated._SANDWICH[:2], fixed_scale=True,
        beyond=gated.CAPPED, **gated._GEMMA),
    decoder("hunyuan_v1_dense", dict(LLAMA.settings) | keys(vocabulary=290943), attention()
        + modules("layers.{layer}.self_attn. query_layernorm=query_norm key_layernorm=key_norm", NEVER)),
    GRANITE.derive("granite4_vision_text"),
    GRANITE.derive("granite_docling_text", grouped(1024, 16, 28, 4, None, 2048, 133800, tied=True, **gated._BIASES)),
    gated.ERNIE.derive("paddleocr_vl_text"),
    QWEN2.derive("qwen2_vl_text", grouped(8192, 64, 80, 8, None, 29568, 152064) | keys(**_FILLED)),
    QWEN2.derive("qwen2_5_vl_text", grouped(8192, 64, 80, 8, None, 29568, 152064) | keys(**_FILLED)),
    QWEN2.derive("qwen2_5_omni_text", grouped(3584, 28, 28, 4, None, 18944, 152064, tied=True) | keys(**_FILLED)),
    gated.QWEN3.derive("qwen3_vl_text"),
    gated.GLM4.derive("glm4v_text", keys(**_FILLED, attention_bias=("", True))),
    gated.GLM4.derive("glm_ocr_text", grouped(1024, 16, 16, 8, None, 4096, 59392, attention_bias=("", False))),
    _GRANITE_MOE,
    _GRANITE_MOE.derive("granitemoeshared", body=(*_GRANITE_MOE.body, *_GRANITE_SHARED)),
    _GRANITE_MOE.derive("granitemoe_swa", keys(**_FOURTH), body=(*_GRANITE_MOE.body, *_GRANITE_SHARED, *_SINKS),
        plain_start=False),
    decoder("flex_olmo", grouped(4096, 32, 32, None, None, 11008, 100352, attention_bias=False) | _visits(7, 5, 11008,
        size=_PLAIN), attention() + gated.whole_norms(), _ROUTER + _experts(), gated._BEHIND),
    QWEN3_MOE.derive("mellum", grouped(2304, 32, 28, 4, 128, 7168, 98304, attention_bias=False, **window(1024,
        window_period=("", 1))) | _visits(64, 8, 896)),
    QWEN3_MOE.derive("qwen3_vl_moe_text", grouped(2048, 16, 24, 16, 128, 5632, 151936, attention_bias=False, tied=True)
        | _visits(60, 4, 1408)),
    QWEN3_MOE.derive("qwen3_omni_moe_text", grouped(2048, 28, 28, 4, None, 18944, 3584, attention_bias=False)),
    decoder("minimax_m2", grouped(3072, 48, 62, 8, 128, 1536, 200064) | _visits(256, 8, 1536, experts._LOCAL, _PLAIN),
        attention(NEVER, NEVER) + gated.whole_norms(), experts._BLOCK_SPARSE
        + modules("layers.{layer}. block_sparse_moe.e_score_correction_bias=buffer", only="sparse"),
        renamed=((r"\.mlp\.gate\.", ".block_sparse_moe.gate."), (r"\.mlp\.e_sc", ".block_sparse_moe.e_sc"))),
    decoder("exaone_moe", grouped(4096, 32, 32, None, None, 16384, 102400, **window(4096,
        window_period=("sliding_window_pattern", 4, 0))) | _FIRST_DENSE | _visits(64, 8, 1024) | _SHARED, _GROUP_NORMS,
        _MOE),
    decoder("hy_v3", grouped(4096, 64, 80, 8, 128, 13312, 120832, attention_bias=False) | _FIRST_DENSE | _visits(192, 8,
        1536) | _SHARED, attention() + gated.QUERY_KEY_NORMS, _MOE, refused=_BIASED),
    decoder("kolibri1", grouped(2560, 48, 50, 4, 128, 0, 128000, **window(513, window_period=("", 5)))
        | keys(shared_hidden=("shared_expert_intermediate_size", 512)) | _visits(384, 6, 512), _GROUP_NORMS, _ROUTER
        + experts._CORRECTION + _experts() + _shared("shared_experts"), gated.NORMS
        + modules("layers.{layer}. post_self_attn_layernorm=attention_post_norm post_mlp_layernorm=mlp_post_norm",
        NEVER)),
    decoder("dots1", grouped(4608, 32, 62, None, None, 10944, 152064, attention_bias=False, **window(4096,
        ("max_window_layers", 62))) | keys(dense_layers=("first_k_dense_replace", 0),
        shared_experts=("n_shared_experts", 0)) | _visits(0, 0, 1408, _ROUTED), attention() + gated.QUERY_KEY_NORMS,
        _MOE),
    decoder("aria_text", grouped(4096, 32, 32, None, None, 4096, 32000, attention_bias=False)
        | keys(experts=("moe_num_experts", 8), active_experts=("moe_topk", 2), expert_hidden=(_PLAIN, 4096),
        shared_experts=("moe_num_shared_experts", 2)), attention(), modules("layers.{layer}. mlp.router=router", NEVER,
        only="sparse") + _shared("shared_experts") + modules("layers.{layer}.mlp.experts. fc1.weight=expert_in",
        sort="bare", sides="experts,width,2*expert_hidden")
        + modules("layers.{layer}.mlp.experts. fc2.weight=expert_out", sort="bare",
        sides="experts,expert_hidden,width"), renamed=((r"experts\.gate_up_proj$", "experts.fc1.weight"),
        (r"experts\.down_proj$", "experts.fc2.weight")), refused=_BIASED),
    GLM4_MOE.derive("solar_open", grouped(4096, 64, 48, 8, 128, 10240, 196608, attention_bias=False)
        | keys(dense_layers=("", 0), normed=("", False)) | _visits(128, 8, 1280, _ROUTED)),
    GLM4_MOE.derive("glm4v_moe_text", keys(vocabulary=151424, attention_bias=True, normed=("", False))),
    experts.DEEPSEEK_V3.derive("glm4_moe_lite", grouped(2048, 20, 47, None, None, 10240, 154880) | experts._LATENT_KEYS
        | _FIRST_DENSE | keys(query_rank=("q_lora_rank", 768, 0), shared_experts=("n_shared_experts", 1),
        value_dim=("v_head_dim", 256), plain_key_dim=("qk_nope_head_dim", 192)) | _visits(64, 4, 1536, _ROUTED)),
    experts.DEEPSEEK_V3.derive("mistral4", keys(width=4096, heads=32, layers=36, mlp_hidden=12288, vocabulary=131072,
        dense_layers=("first_k_dense_replace", 0)) | _visits(128, 4, 2048, _ROUTED) | keys(query_rank=("q_lora_rank",
        1024, 0), key_value_rank=("kv_lora_rank", 256), plain_key_dim=("qk_nope_head_dim", 64))),
    decoder("youtu", _LATENT_DENSE | keys(width=2048, heads=16, mlp_hidden=6144, vocabulary=128256, tied=True),
        experts._LATENT, plain_start=False),
)  # fmt: skip
"""Families that no other module imports by a name."""

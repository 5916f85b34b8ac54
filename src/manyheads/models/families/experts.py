"""Decoders with experts, with and without latent attention: Mixtral to DeepSeek-V3."""

from typing import Any

from manyheads.models.families import gated
from manyheads.models.families.gated import attention, decoder, grouped, window
from manyheads.models.modules import ALWAYS, NEVER, Key, Module, keys, modules


def _experts(saved: str = "mlp.experts", names: str = "gate_proj up_proj down_proj") -> tuple[Module, ...]:
    """Return the matrices of all experts of a layer; a file holds them one by one."""
    *inward, outward = (f"layers.{{layer}}.{saved}.{{expert}}.{name}" for name in names.split())
    return (
        *modules("layers.{layer}. mlp.experts.gate_up_proj=expert_in", only="sparse", saved=tuple(inward)),
        *modules("layers.{layer}. mlp.experts.down_proj=expert_out", only="sparse", saved=(outward,)),
    )


def _shared(path: str) -> tuple[Module, ...]:
    """Return the expert that every token visits."""
    inward, outward = f"layers.{{layer}}.mlp.{path}. gate_proj=mlp_gate up_proj=mlp_in", f"layers.{{layer}}.mlp.{path}."
    return (
        *modules(inward, NEVER, sides="shared_hidden,width", only="sparse"),
        *modules(f"{outward} down_proj=mlp_out", NEVER, sides="width,shared_hidden", only="sparse"),
    )


def _visits(count: int, visited: Any, hidden: int, name: str = "num_experts|num_local_experts",
            size: str = "moe_intermediate_size") -> dict[str, Key]:  # fmt: skip
    """Return the keys of the number of experts, of those that a token visits, and of their hidden width."""
    visited = visited if isinstance(visited, tuple) else ("num_experts_per_tok", visited)
    return keys(experts=(name, count), active_experts=visited, expert_hidden=(size, hidden))


_ROUTER = modules("layers.{layer}. mlp.gate=router", NEVER, only="sparse")
_CORRECTION = modules("layers.{layer}. mlp.gate.e_score_correction_bias=buffer", only="sparse")
_BLOCK_SPARSE = (
    *modules("layers.{layer}. block_sparse_moe.gate=router", NEVER, only="sparse"),
    *_experts("block_sparse_moe.experts", "w1 w3 w2"),
)
_DENSE = gated.gated_mlp(only="dense")
_LOCAL, _ROUTED, _PLAIN = "num_local_experts", "n_routed_experts|num_local_experts", "intermediate_size"

MIXTRAL = decoder(
    "mixtral",
    grouped(4096, 32, 32, 8, None, 14336, 32000, **window(None)) | _visits(8, 2, 14336, _LOCAL, _PLAIN),
    gated.PLAIN,
    _BLOCK_SPARSE,
    renamed=((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),
)
PHIMOE = decoder(
    "phimoe",
    grouped(4096, 32, 32, 8, None, 6400, 32064, attention_bias=False, **window(None))
    # Its router takes the best expert and the next one, whatever num_experts_per_tok says.
    | _visits(16, ("", 2), 6400, _LOCAL, _PLAIN),
    attention(),
    _BLOCK_SPARSE,
    gated.BOTH_NORMS,
    modules("norm=final_norm"),
    norm="layer",
    renamed=((r"\.mlp\.router\.", ".block_sparse_moe.gate."),),
    refused={"lm_head_bias": (True, "a bias on the unembedding is not read for this family")},
)
_QWEN: dict[str, Any] = window(windowed=("use_sliding_window", False))
_QWEN |= {"sparse_step": ("decoder_sparse_step", 1), "dense_list": ("mlp_only_layers", [])}
QWEN2_MOE = decoder(
    "qwen2_moe",
    grouped(2048, 16, 24, 16, None, 5632, 151936, **_QWEN, attention_bias=("qkv_bias", True))
    | keys(window_period=("", 2), window_until_layer=("max_window_layers", 28))
    | _visits(60, 4, 1408)
    | keys(shared_hidden=("shared_expert_intermediate_size", 5632)),
    attention(output=NEVER),
    _DENSE
    + _ROUTER
    + _experts()
    + _shared("shared_expert")
    + modules("layers.{layer}. mlp.shared_expert_gate=shared_gate", NEVER, only="sparse"),
)
QWEN3_MOE = decoder(
    "qwen3_moe",
    grouped(2048, 32, 24, 4, None, 6144, 151936, **_QWEN, attention_bias=False) | _visits(128, 8, 768),
    attention() + gated.QUERY_KEY_NORMS,
    _DENSE + _ROUTER + _experts(),
)
OLMOE = decoder(
    "olmoe",
    grouped(2048, 16, 16, None, None, 2048, 50304, attention_bias=False) | _visits(64, 8, 2048, size=_PLAIN),
    attention() + gated.whole_norms(),
    _ROUTER + _experts(),
    refused=gated.CLIPPED,
)

GPT_OSS = decoder(
    "gpt_oss",
    grouped(2880, 64, 36, 8, 64, 2880, 201088, attention_bias=True)
    | keys(windowed=("", True), window=("sliding_window", 128, 0), window_period=("", 2))
    | _visits(128, ("num_experts_per_tok|experts_per_token", 4), 2880, "num_local_experts|num_experts", _PLAIN),
    attention() + modules("layers.{layer}.self_attn. sinks=sink"),
    modules("layers.{layer}.mlp. router=router", ALWAYS, only="sparse")
    + modules("layers.{layer}. mlp.experts.gate_up_proj=expert_in", sides="experts,width,2*expert_hidden")
    + modules("layers.{layer}. mlp.experts.gate_up_proj_bias=expert_in", sides="experts,2*expert_hidden")
    + modules("layers.{layer}. mlp.experts.down_proj=expert_out", sides="experts,expert_hidden,width")
    + modules("layers.{layer}. mlp.experts.down_proj_bias=expert_out", sides="experts,width"),
)

_LATENT_KEYS = (
    keys(key_dim=("", None), attention_bias=False, query_rank=("q_lora_rank", 1536, 0))
    | keys(key_value_rank=("kv_lora_rank", 512), rotary_key_dim=("qk_rope_head_dim", 64))
    | keys(plain_key_dim=("qk_nope_head_dim", 128), value_dim=("v_head_dim", 128))
    | _visits(64, 0, 1407, _ROUTED)
    | keys(shared_experts=("n_shared_experts", 2), predicted=("num_nextn_predict_layers", 0))
)
_LATENT = (
    *modules("layers.{layer}.self_attn. q_proj=query:never", when="!query_rank"),
    *modules(
        "layers.{layer}.self_attn. q_a_proj=query_down:attention_bias q_a_layernorm=query_down_norm q_b_proj=query_up",
        NEVER,
        when="query_rank",
    ),
    *modules("layers.{layer}.self_attn. kv_a_proj_with_mqa=key_value_down", "attention_bias"),
    *modules("layers.{layer}.self_attn. kv_a_layernorm=key_value_down_norm kv_b_proj=key_value_up", NEVER),
    *modules("layers.{layer}.self_attn. o_proj=output", "attention_bias", sides="width,heads*value_dim"),
)
_SPARSE = (*_experts(), *_shared("shared_experts"))
DEEPSEEK_V2 = decoder(
    "deepseek_v2",
    grouped(4096, 32, 32, None, None, 11008, 102400) | _LATENT_KEYS | keys(dense_layers=("first_k_dense_replace", 0)),
    _LATENT,
    _DENSE + _ROUTER + _SPARSE,
)
DEEPSEEK_V3 = DEEPSEEK_V2.derive(
    "deepseek_v3",
    keys(width=7168, heads=128, layers=61, dense_layers=("first_k_dense_replace", 3), mlp_hidden=18432)
    | keys(vocabulary=129280, shared_experts=("n_shared_experts", 1))
    | _visits(256, 8, 2048, _ROUTED),
    body=(*DEEPSEEK_V2.body, *_CORRECTION),
)
GLM4_MOE = decoder(
    "glm4_moe",
    grouped(4096, 96, 46, 8, None, 10944, 151552, attention_bias=False)
    | keys(dense_layers=("first_k_dense_replace", 1), normed=("use_qk_norm", False))
    | _visits(128, 8, 1408, _ROUTED)
    | keys(shared_experts=("n_shared_experts", 1), predicted=("num_nextn_predict_layers", 0)),
    attention(output=NEVER)
    + modules("layers.{layer}.self_attn. q_norm=query_norm k_norm=key_norm", NEVER, when="normed"),
    _DENSE + _ROUTER + _CORRECTION + _SPARSE,
)

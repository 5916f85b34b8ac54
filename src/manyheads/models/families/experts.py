"""Decoders with experts, with and without latent attention: Mixtral to DeepSeek-V3."""

from collections.abc import Mapping

from manyheads.models.families.common import mlp
from manyheads.models.families.gated import (
    ATTENTION,
    LAYER,
    attention,
    decoder,
    final_norm,
    gated_mlp,
    grouped,
    norms,
    query_key_norms,
)
from manyheads.models.modules import ALWAYS, NEVER, Condition, Family, Key, Module, Role

_BIASED = ("attention_bias",)
_ATTENTION_BIAS = {"attention_bias": Key("attention_bias", False)}


def experts(
    saved: str = "mlp.experts.{expert}.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Module, ...]:
    """Return the matrices of all experts of a layer; a file holds them one by one."""
    one = [LAYER + saved + name for name in names]
    return (
        Module(
            LAYER + "mlp.experts.gate_up_proj",
            Role.EXPERT_IN,
            "bare",
            sides="experts,2*expert_hidden,width",
            only="sparse",
            saved=(one[0], one[1]),
        ),
        Module(
            LAYER + "mlp.experts.down_proj",
            Role.EXPERT_OUT,
            "bare",
            sides="experts,width,expert_hidden",
            only="sparse",
            saved=(one[2],),
        ),
    )


def router(path: str = "mlp.gate", bias: Condition = NEVER) -> Module:
    """Return the matrix that chooses experts."""
    return Module(LAYER + path, Role.ROUTER, bias=bias, sides="experts,width", only="sparse")


def shared(path: str) -> tuple[Module, ...]:
    """Return the expert that every token visits."""
    roles = (Role.MLP_GATE, Role.MLP_IN, Role.MLP_OUT)
    names = ("gate_proj", "up_proj", "down_proj")
    sides = ("shared_hidden,width", "shared_hidden,width", "width,shared_hidden")
    return tuple(
        Module(f"{LAYER}mlp.{path}.{name}", role, bias=NEVER, sides=side, only="sparse")
        for name, role, side in zip(names, roles, sides, strict=True)
    )


def _counted(
    hidden: int, vocabulary: int, total: Key, active: Key, expert: Key, shared_hidden: Key | None = None
) -> dict[str, Key]:
    found = {**mlp(hidden, vocabulary, "silu"), "experts": total, "active_experts": active, "expert_hidden": expert}
    return found | ({"shared_hidden": shared_hidden} if shared_hidden else {})


MIXTRAL = decoder(
    "mixtral",
    grouped(4096, 32, 32, 8)
    | {"windowed": Key("", True), "window": Key("sliding_window", None, null=0), "window_from_layer": Key("", 0)},
    _counted(14336, 32000, Key("num_local_experts", 8), Key("num_experts_per_tok", 2), Key("intermediate_size", 14336)),
    (
        *norms(),
        *attention(),
        router("block_sparse_moe.gate"),
        *experts("block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        final_norm(),
    ),
    renamed=((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),
)
PHIMOE = decoder(
    "phimoe",
    grouped(4096, 32, 32, 8)
    | _ATTENTION_BIAS
    | {"windowed": Key("", True), "window": Key("sliding_window", None, null=0), "window_from_layer": Key("", 0)},
    # Its router takes the best expert and the next one, whatever num_experts_per_tok says.
    _counted(6400, 32064, Key("num_local_experts", 16), Key("", 2), Key("intermediate_size", 6400)),
    (
        *norms(bias=ALWAYS),
        *attention(_BIASED, _BIASED),
        router("block_sparse_moe.gate"),
        *experts("block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        final_norm(ALWAYS),
    ),
    norm="layer",
    renamed=((r"\.mlp\.router\.", ".block_sparse_moe.gate."),),
    refused={"lm_head_bias": (True, "a bias on the unembedding is not read for this family")},
)
_SPARSE = {"sparse_step": Key("decoder_sparse_step", 1), "dense_list": Key("mlp_only_layers", [])}
_WINDOW = {
    "windowed": Key("use_sliding_window", False),
    "window": Key("sliding_window", 4096, null=0),
    "window_from_layer": Key("max_window_layers", 28),
}
QWEN2_MOE = decoder(
    "qwen2_moe",
    grouped(2048, 16, 24, 16) | _WINDOW | _SPARSE | {"attention_bias": Key("qkv_bias", True)},
    _counted(
        5632,
        151936,
        Key("num_experts|num_local_experts", 60),
        Key("num_experts_per_tok", 4),
        Key("moe_intermediate_size", 1408),
        Key("shared_expert_intermediate_size", 5632),
    ),
    (
        *norms(),
        *attention(_BIASED),
        *gated_mlp(only="dense"),
        router(),
        *experts(),
        *shared("shared_expert"),
        Module(LAYER + "mlp.shared_expert_gate", Role.SHARED_GATE, bias=NEVER, sides="1,width", only="sparse"),
        final_norm(),
    ),
)
QWEN3_MOE = decoder(
    "qwen3_moe",
    grouped(2048, 32, 24, 4) | _WINDOW | _SPARSE | _ATTENTION_BIAS,
    _counted(
        6144,
        151936,
        Key("num_experts|num_local_experts", 128),
        Key("num_experts_per_tok", 8),
        Key("moe_intermediate_size", 768),
    ),
    (
        *norms(),
        *attention(_BIASED, _BIASED),
        *query_key_norms(),
        *gated_mlp(only="dense"),
        router(),
        *experts(),
        final_norm(),
    ),
)
OLMOE = decoder(
    "olmoe",
    grouped(2048, 16, 16, None) | _ATTENTION_BIAS,
    _counted(
        2048,
        50304,
        Key("num_experts|num_local_experts", 64),
        Key("num_experts_per_tok", 8),
        Key("intermediate_size", 2048),
    ),
    (
        *norms(),
        *attention(_BIASED, _BIASED),
        *query_key_norms(("queries", "keys")),
        router(),
        *experts(),
        final_norm(),
    ),
    refused={"clip_qkv": (..., "clipped queries, keys and values are not described")},
)
GPT_OSS = decoder(
    "gpt_oss",
    grouped(2880, 64, 36, 8, 64)
    | {"attention_bias": Key("attention_bias", True)}
    | {"windowed": Key("", True), "window": Key("sliding_window", 128, null=0), "window_period": Key("", 2)},
    _counted(
        2880,
        201088,
        Key("num_local_experts|num_experts", 128),
        Key("num_experts_per_tok|experts_per_token", 4),
        Key("intermediate_size", 2880),
    ),
    (
        *norms(),
        *attention(_BIASED, _BIASED),
        Module(ATTENTION + "sinks", Role.SINK, "bare"),
        router("mlp.router", ALWAYS),
        Module(LAYER + "mlp.experts.gate_up_proj", Role.EXPERT_IN, "bare", sides="experts,width,2*expert_hidden"),
        Module(LAYER + "mlp.experts.gate_up_proj_bias", Role.EXPERT_IN, "bare", sides="experts,2*expert_hidden"),
        Module(LAYER + "mlp.experts.down_proj", Role.EXPERT_OUT, "bare", sides="experts,expert_hidden,width"),
        Module(LAYER + "mlp.experts.down_proj_bias", Role.EXPERT_OUT, "bare", sides="experts,width"),
        final_norm(),
    ),
)

_LATENT_KEYS = {
    "key_dim": Key("", None),
    "attention_bias": Key("attention_bias", False),
    "query_rank": Key("q_lora_rank", 1536, null=0),
    "key_value_rank": Key("kv_lora_rank", 512),
    "rotary_key_dim": Key("qk_rope_head_dim", 64),
    "plain_key_dim": Key("qk_nope_head_dim", 128),
    "value_dim": Key("v_head_dim", 128),
}
_LATENT = (
    Module(ATTENTION + "q_proj", Role.QUERY, when=("!query_rank",), bias=NEVER, sides="queries,width"),
    Module(ATTENTION + "q_a_proj", Role.QUERY_DOWN, when=("query_rank",), bias=_BIASED, sides="query_rank,width"),
    Module(ATTENTION + "q_a_layernorm", Role.QUERY_DOWN_NORM, "norm", ("query_rank",), NEVER, "query_rank"),
    Module(ATTENTION + "q_b_proj", Role.QUERY_UP, when=("query_rank",), bias=NEVER, sides="queries,query_rank"),
    Module(
        ATTENTION + "kv_a_proj_with_mqa",
        Role.KEY_VALUE_DOWN,
        bias=_BIASED,
        sides="key_value_rank+rotary_key_dim,width",
    ),
    Module(ATTENTION + "kv_a_layernorm", Role.KEY_VALUE_DOWN_NORM, "norm", bias=NEVER, sides="key_value_rank"),
    Module(
        ATTENTION + "kv_b_proj",
        Role.KEY_VALUE_UP,
        bias=NEVER,
        sides="heads*plain_key_dim+heads*value_dim,key_value_rank",
    ),
    Module(ATTENTION + "o_proj", Role.OUTPUT, bias=_BIASED, sides="width,heads*value_dim"),
)
_LATENT_BODY = (
    *norms(),
    *_LATENT,
    *gated_mlp(only="dense"),
    router(),
    *experts(),
    *shared("shared_experts"),
    final_norm(),
)


def _latent_counted(hidden: int, vocabulary: int, total: int, active: int, expert: int) -> dict[str, Key]:
    found = _counted(
        hidden,
        vocabulary,
        Key("n_routed_experts|num_local_experts", total),
        Key("num_experts_per_tok", active),
        Key("moe_intermediate_size", expert),
    )
    return found | {"shared_experts": Key("n_shared_experts", 1), "predicted": Key("num_nextn_predict_layers", 0)}


DEEPSEEK_V2 = decoder(
    "deepseek_v2",
    {**grouped(4096, 32, 32, None), **_LATENT_KEYS, "dense_layers": Key("first_k_dense_replace", 0)},
    _latent_counted(11008, 102400, 64, 0, 1407) | {"shared_experts": Key("n_shared_experts", 2)},
    _LATENT_BODY,
)
DEEPSEEK_V3 = decoder(
    "deepseek_v3",
    {**grouped(7168, 128, 61, None), **_LATENT_KEYS, "dense_layers": Key("first_k_dense_replace", 3)},
    _latent_counted(18432, 129280, 256, 8, 2048) | {"predicted": Key("num_nextn_predict_layers", 0)},
    (
        *_LATENT_BODY,
        Module(LAYER + "mlp.gate.e_score_correction_bias", Role.BUFFER, "bare", ("maybe",), only="sparse"),
    ),
)
GLM4_MOE = decoder(
    "glm4_moe",
    grouped(4096, 96, 46, 8)
    | _ATTENTION_BIAS
    | {"dense_layers": Key("first_k_dense_replace", 1), "normed": Key("use_qk_norm", False)},
    _latent_counted(10944, 151552, 128, 8, 1408),
    (
        *norms(),
        *attention(_BIASED),
        *query_key_norms(when=("normed",)),
        *gated_mlp(only="dense"),
        router(),
        Module(LAYER + "mlp.gate.e_score_correction_bias", Role.BUFFER, "bare", ("maybe",), only="sparse"),
        *experts(),
        *shared("shared_experts"),
        final_norm(),
    ),
)

EXPERTS: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        MIXTRAL, PHIMOE, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE,
    )
}  # fmt: skip

"""Decoders with a gated MLP: LLaMA, Mistral, Qwen, Gemma, OLMo, Phi-3 and those built alike."""

from collections.abc import Mapping
from typing import Any

from manyheads.models.modules import ALWAYS, NEVER, Condition, Family, Key, Module, Role, keys, modules

NEIGHBOURS = "rotary positions pair neighbouring components"
CAPPED = "its logits are capped"
FIXED = "its logits are multiplied by a number of the configuration"

NORMS = modules("layers.{layer}. input_layernorm=attention_norm post_attention_layernorm=mlp_norm", NEVER)
FINAL_NORM = modules("norm=final_norm", NEVER)
QUERY_KEY_NORMS = modules("layers.{layer}.self_attn. q_norm=query_norm k_norm=key_norm", NEVER)
BIASED = "attention_bias"


def attention(bias: Condition = BIASED, output: Condition = BIASED) -> tuple[Module, ...]:
    """Return query, key, value and output projections."""
    return modules(f"""
        layers.{{layer}}.self_attn. q_proj=query:{bias} k_proj=key:{bias} v_proj=value:{bias} o_proj=output:{output}
        layers.{{layer}}.self_attn. rotary_emb.inv_freq=buffer
    """)


def gated_mlp(bias: Condition = NEVER, **facts: Any) -> tuple[Module, ...]:
    """Return gate, input and output of an MLP."""
    return modules("layers.{layer}.mlp. gate_proj=mlp_gate up_proj=mlp_in down_proj=mlp_out", bias, **facts)


def whole_norms(when: Condition = ALWAYS) -> tuple[Module, ...]:
    """Return norms over all queries, and over all keys."""
    return (
        *modules("layers.{layer}.self_attn. q_norm=query_norm", NEVER, sides="queries", when=when),
        *modules("layers.{layer}.self_attn. k_norm=key_norm", NEVER, sides="keys", when=when),
    )


def grouped(width: int, heads: int, layers: int, key_value_heads: int | None, key_dim: int | None = None,
            hidden: int = 0, vocabulary: int = 0, activation: str = "silu", **more: Any) -> dict[str, Key]:  # fmt: skip
    """Return the keys that these families share, and more."""
    shared = {
        "width": width,
        "heads": heads,
        "layers": layers,
        "key_value_heads": ("num_key_value_heads", key_value_heads, None),
        "key_dim": key_dim,
        "eps": ("rms_norm_eps", 1e-6),
        "tied": False,
        "rotary_theta": 10000.0,
        "rotary_fraction": 1.0,
    }
    return keys(**{**shared, **more}, mlp_hidden=hidden, vocabulary=vocabulary, activation=activation)


def window(size: int | None = 4096, first: Any = ("", 0), windowed: Any = ("", True), **more: Any) -> dict[str, Any]:
    """Return the keys of a sliding window."""
    return {"windowed": windowed, "window": ("sliding_window", size, 0), "window_from_layer": first, **more}


def decoder(model_type: str, settings: Mapping[str, Key], body: tuple[Module, ...] = (), **facts: Any) -> Family:
    """Return a family with LLaMA's ends, and LLaMA's blocks without biases unless the body is given."""
    body = body or (*NORMS, *attention(NEVER, NEVER), *gated_mlp(), *FINAL_NORM)
    prefixes = ("", "model.", "transformer.")
    return Family(
        model_type, prefixes, settings, (*modules("embed_tokens=embedding"), *body), **{"norm": "rms", **facts}
    )


LLAMA = Family(
    "llama",
    ("", "model.", "transformer."),
    keys(
        width=4096,
        heads=32,
        layers=32,
        key_value_heads=("num_key_value_heads", None, None),
        key_dim=None,
        eps=("rms_norm_eps", 1e-6),
        tied=False,
        rotary_theta=10000.0,
        rotary_fraction=1.0,
        attention_bias=False,
        mlp_bias=False,
        mlp_hidden=11008,
        vocabulary=32000,
        activation="silu",
    ),
    modules("""
        embed_tokens=embedding
        layers.{layer}. input_layernorm=attention_norm:never post_attention_layernorm=mlp_norm:never
        layers.{layer}.self_attn. q_proj=query:attention_bias k_proj=key:attention_bias v_proj=value:attention_bias
        layers.{layer}.self_attn. o_proj=output:attention_bias rotary_emb.inv_freq=buffer
        layers.{layer}.mlp. gate_proj=mlp_gate:mlp_bias up_proj=mlp_in:mlp_bias down_proj=mlp_out:mlp_bias
        norm=final_norm:never
    """),
    norm="rms",
)
_QWEN_WINDOW = window(4096, ("max_window_layers", 28), ("use_sliding_window", False))
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
MISTRAL = decoder("mistral", grouped(4096, 32, 32, 8, None, 14336, 32000, **window()))
QWEN2 = decoder(
    "qwen2",
    grouped(4096, 32, 32, 32, None, 22016, 151936, **_QWEN_WINDOW),
    NORMS + attention(ALWAYS, NEVER) + gated_mlp() + FINAL_NORM,
)
QWEN3 = decoder(
    "qwen3",
    grouped(4096, 32, 32, 32, 128, 22016, 151936, attention_bias=False, **_QWEN_WINDOW),
    NORMS + attention() + QUERY_KEY_NORMS + gated_mlp() + FINAL_NORM,
)
_SMOLLM3 = {"tied": True, "rotary_period": ("no_rope_layer_interval", 4), **_BIASES, **_QWEN_WINDOW}
SMOLLM3 = LLAMA.derive("smollm3", grouped(2048, 16, 36, 4, None, 11008, 128256, **_SMOLLM3))
GRANITE = LLAMA.derive("granite", fixed_scale=True, beyond=FIXED)
HELIUM = decoder(
    "helium",
    grouped(2560, 20, 24, 20, 128, 7040, 48000, **_BIASES),
    NORMS + attention(output=NEVER) + gated_mlp("mlp_bias") + FINAL_NORM,
    beyond=NEIGHBOURS,
)
ERNIE = decoder(
    "ernie4_5",
    grouped(1024, 16, 18, 2, 128, 3072, 103424, tied=True, attention_bias=("use_bias", False)),
    NORMS + attention() + gated_mlp(BIASED) + FINAL_NORM,
    beyond=NEIGHBOURS,
)
SEED_OSS = decoder(
    "seed_oss",
    grouped(4096, 80, 64, 8, 128, 27648, 155136, attention_bias=True, mlp_bias=False)
    | keys(output_bias=("attention_out_bias", False)),
    NORMS + attention(output="output_bias") + gated_mlp("mlp_bias") + FINAL_NORM,
)
ARCEE = LLAMA.derive(
    "arcee",
    keys(width=2560, mlp_hidden=18432, activation="relu2"),
    body=tuple(module for module in LLAMA.body if module.role is not Role.MLP_GATE),
)

_GEMMA = {"gain_offset": 1.0, "root_width": True}
GEMMA = decoder(
    "gemma",
    grouped(3072, 16, 28, 16, 256, 24576, 256000, "gelu_pytorch_tanh", tied=True, attention_bias=False),
    NORMS + attention() + gated_mlp() + FINAL_NORM,
    **_GEMMA,
)
_SANDWICH = modules(
    """
    layers.{layer}. input_layernorm=attention_norm pre_feedforward_layernorm=mlp_norm
    layers.{layer}. post_attention_layernorm=attention_post_norm post_feedforward_layernorm=mlp_post_norm
    """,
    NEVER,
)
_GEMMA2: dict[str, Any] = {"tied": True, "attention_bias": False, "scale_dim": ("query_pre_attn_scalar", 256.0)}
GEMMA2 = decoder(
    "gemma2",
    grouped(2304, 8, 26, 4, 256, 9216, 256000, "gelu_pytorch_tanh", **_GEMMA2, **window(window_period=("", 2))),
    _SANDWICH + attention() + gated_mlp() + FINAL_NORM,
    fixed_scale=True,
    beyond=CAPPED,
    **_GEMMA,
)
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    keys(window_period=("sliding_window_pattern", 6), vocabulary=262208),
    body=(*modules("embed_tokens=embedding"), *_SANDWICH, *attention(), *QUERY_KEY_NORMS, *gated_mlp(), *FINAL_NORM),
    beyond="",
)

OLMO = decoder(
    "olmo",
    grouped(4096, 32, 32, None, None, 11008, 50304, attention_bias=False),
    attention() + gated_mlp(),
    norm="layer",
    refused={"clip_qkv": (..., "clipped queries, keys and values are not described")},
)
_BEHIND = _SANDWICH[2:]
OLMO2 = decoder("olmo2", OLMO.settings, _BEHIND + attention() + whole_norms() + gated_mlp() + FINAL_NORM)
OLMO3 = OLMO2.derive("olmo3", keys(**window(window_period=("", 4))))
EXAONE4 = decoder(
    "exaone4",
    grouped(4096, 32, 32, None, None, 16384, 102400, **window(window_period=("sliding_window_pattern", 4, 0))),
    _BEHIND + attention(NEVER, NEVER) + QUERY_KEY_NORMS + gated_mlp() + FINAL_NORM,
)
_JOINT_MLP = modules("layers.{layer}.mlp. gate_up_proj=mlp_gate_in down_proj=mlp_out", NEVER)
PHI3 = decoder(
    "phi3",
    grouped(3072, 32, 32, None, None, 8192, 32064, **window(None)),
    NORMS
    + modules("layers.{layer}.self_attn. qkv_proj=query_key_value o_proj=output", NEVER)
    + _JOINT_MLP
    + FINAL_NORM,
    fused="parts",
)
GLM = decoder(
    "glm",
    grouped(4096, 32, 40, 2, 128, 13696, 151552, attention_bias=True),
    NORMS + attention(output=NEVER) + _JOINT_MLP + FINAL_NORM,
    beyond=NEIGHBOURS,
)
_GLM4_NORMS = modules(
    "layers.{layer}. post_self_attn_layernorm=attention_post_norm post_mlp_layernorm=mlp_post_norm", NEVER
)
GLM4 = GLM.derive("glm4", body=(*GLM.body[:3], *_GLM4_NORMS, *GLM.body[3:]))
STABLELM = decoder(
    "stablelm",
    grouped(2560, 32, 32, 32, None, 6912, 50304, eps=1e-6, rotary_fraction=0.25)
    | keys(attention_bias=("use_qkv_bias", False), parallel=("use_parallel_residual", False)),
    modules("layers.{layer}. input_layernorm=attention_norm")
    + modules("layers.{layer}. post_attention_layernorm=mlp_norm", "!parallel", when="!parallel")
    + attention(output=NEVER)
    + gated_mlp()
    + modules("norm=final_norm"),
    norm="layer",
    parallel="parallel",
    refused={"qk_layernorm": (True, "one norm for each head, queries and keys apart, has no role")},
)
_COHERE = {"norm": "layer", "parallel": True, "beyond": NEIGHBOURS}
_COHERE_KEYS = grouped(8192, 64, 40, None, None, 22528, 256000, eps=1e-6, tied=True, attention_bias=False)
COHERE = decoder(
    "cohere",
    _COHERE_KEYS | keys(normed=("use_qk_norm", False)),
    NORMS[:1] + attention() + whole_norms("normed") + gated_mlp() + FINAL_NORM,
    **_COHERE,
)
COHERE2 = decoder(
    "cohere2",
    _COHERE_KEYS | keys(**window(window_period=("", 4))),
    NORMS[:1] + attention() + gated_mlp() + FINAL_NORM,
    **_COHERE,
)
BITNET = decoder(
    "bitnet",
    grouped(2560, 20, 30, 5, None, 6912, 128256, "relu2", attention_bias=False),
    NORMS
    + attention()
    + modules("layers.{layer}. self_attn.attn_sub_norm=mixed_norm", NEVER)
    + gated_mlp()
    + modules("layers.{layer}. mlp.ffn_sub_norm=mlp_hidden_norm", NEVER)
    + FINAL_NORM,
)
APERTUS = decoder(
    "apertus",
    grouped(4096, 32, 32, None, None, 14336, 131072, "xielu", attention_bias=False),
    modules("layers.{layer}. attention_layernorm=attention_norm feedforward_layernorm=mlp_norm", NEVER)
    + attention()
    + QUERY_KEY_NORMS
    + gated_mlp()[1:]
    + modules("layers.{layer}.mlp.act_fn. alpha_p=mlp_activation alpha_n=mlp_activation beta=buffer eps=buffer")
    + FINAL_NORM,
)
NANOCHAT = decoder(
    "nanochat",
    grouped(768, 6, 12, 6, None, 8192, 50304, "relu2", attention_bias=False),
    attention() + modules("layers.{layer}.mlp. fc1=mlp_in fc2=mlp_out", NEVER),
    plain_start=False,
    fixed_scale=True,
    bare_query_norms=True,
)
NEMOTRON = decoder(
    "nemotron",
    grouped(6144, 48, 32, None, None, 24576, 256000, "relu2", eps=("norm_eps", 1e-6), rotary_fraction=0.5, **_BIASES),
    modules("layers.{layer}. input_layernorm=attention_norm post_attention_layernorm=mlp_norm")
    + attention()
    + gated_mlp("mlp_bias")[1:]
    + modules("norm=final_norm"),
    norm="layer",
    gain_offset=1.0,
    gain_start=2.0,
)

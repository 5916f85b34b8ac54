"""Decoders with a gated MLP: LLaMA, Mistral, Qwen, Gemma, OLMo, Phi-3 and those built alike."""

from collections.abc import Mapping
from typing import Any

from manyheads.models.modules import ALWAYS, NEVER, Condition, Family, Key, Module, Role, keys, modules

Modules = tuple[Module, ...]

NEIGHBOURS = "rotary positions pair neighbouring components"
CAPPED = "its logits are capped"
FIXED = "its logits are multiplied by a number of the configuration"

NORMS = modules("layers.{layer}. input_layernorm=attention_norm post_attention_layernorm=mlp_norm", NEVER)
FINAL_NORM = modules("norm=final_norm", NEVER)
QUERY_KEY_NORMS = modules("layers.{layer}.self_attn. q_norm=query_norm k_norm=key_norm", NEVER)
BIASED = "attention_bias"


def attention(bias: Condition = BIASED, output: Condition = BIASED) -> Modules:
    """Return query, key, value and output projections."""
    return modules(f"""
        layers.{{layer}}.self_attn. q_proj=query:{bias} k_proj=key:{bias} v_proj=value:{bias} o_proj=output:{output}
        layers.{{layer}}.self_attn. rotary_emb.inv_freq=buffer
    """)


def gated_mlp(bias: Condition = NEVER, **facts: Any) -> Modules:
    """Return gate, input and output of an MLP."""
    return modules("layers.{layer}.mlp. gate_proj=mlp_gate up_proj=mlp_in down_proj=mlp_out", bias, **facts)


MLP = gated_mlp()


def whole_norms(when: Condition = ALWAYS) -> Modules:
    """Return norms over all queries, and over all keys."""
    return (
        *modules("layers.{layer}.self_attn. q_norm=query_norm", NEVER, sides="queries", when=when),
        *modules("layers.{layer}.self_attn. k_norm=key_norm", NEVER, sides="keys", when=when),
    )


def grouped(width: int, heads: int, layers: int, key_value_heads: int | None, key_dim: int | None = None,
            hidden: int = 0, vocabulary: int = 0, activation: str = "silu", **more: Any) -> dict[str, Key]:  # fmt: skip
    """Return the keys that these families share, and more."""
    groups: dict[str, Any] = {"key_value_heads": ("num_key_value_heads", key_value_heads, None), "key_dim": key_dim}
    shared = groups | {"eps": ("rms_norm_eps", 1e-6), "tied": False, "rotary_theta": 10000.0, "rotary_fraction": 1.0}
    sizes = {"mlp_hidden": hidden, "vocabulary": vocabulary, "activation": activation}
    return keys(width=width, heads=heads, layers=layers, **{**shared, **more}, **sizes)


def window(size: int | None = 4096, first: Any = ("", 0), windowed: Any = ("", True), **more: Any) -> dict[str, Any]:
    """Return the keys of a sliding window."""
    return {"windowed": windowed, "window": ("sliding_window", size, 0), "window_from_layer": first, **more}


def decoder(model_type: str, settings: Mapping[str, Key], core: Modules, mlp: Modules = MLP, norms: Modules = NORMS,
            final: Modules = FINAL_NORM, **facts: Any) -> Family:  # fmt: skip
    """Return a family with LLaMA's ends, of blocks with these norms, attention and MLP."""
    body = (*modules("embed_tokens=embedding"), *norms, *core, *mlp, *final)
    return Family(model_type, ("", "model.", "transformer."), settings, body, **{"norm": "rms", **facts})


PLAIN = attention(NEVER, NEVER)
CLIPPED = {"clip_qkv": (..., "clipped queries, keys and values are not described")}
_QWEN_WINDOW = window(4096, ("max_window_layers", 28), ("use_sliding_window", False))
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
LLAMA = decoder("llama", grouped(4096, 32, 32, None, None, 11008, 32000, **_BIASES), attention(), gated_mlp("mlp_bias"))
MISTRAL = decoder("mistral", grouped(4096, 32, 32, 8, None, 14336, 32000, **window()), PLAIN)
QWEN2 = decoder("qwen2", grouped(4096, 32, 32, 32, None, 22016, 151936, **_QWEN_WINDOW), attention(ALWAYS, NEVER))
QWEN3 = decoder(
    "qwen3",
    grouped(4096, 32, 32, 32, 128, 22016, 151936, attention_bias=False, **_QWEN_WINDOW),
    attention() + QUERY_KEY_NORMS,
)
_SMOLLM3 = {"tied": True, "rotary_period": ("no_rope_layer_interval", 4), **_BIASES}
_SMOLLM3 |= window(None, windowed=("use_sliding_window", False))
SMOLLM3 = LLAMA.derive("smollm3", grouped(2048, 16, 36, 4, None, 11008, 128256, **_SMOLLM3))
GRANITE = LLAMA.derive("granite", fixed_scale=True, beyond=FIXED)
_HELIUM = grouped(2560, 20, 24, 20, 128, 7040, 48000, **_BIASES)
HELIUM = decoder("helium", _HELIUM, attention(output=NEVER), gated_mlp("mlp_bias"), beyond=NEIGHBOURS)
_ERNIE = grouped(1024, 16, 18, 2, 128, 3072, 103424, tied=True, attention_bias=("use_bias", False))
ERNIE = decoder("ernie4_5", _ERNIE, attention(), gated_mlp(BIASED), beyond=NEIGHBOURS)
SEED_OSS = decoder(
    "seed_oss",
    grouped(4096, 80, 64, 8, 128, 27648, 155136, attention_bias=True, mlp_bias=False)
    | keys(output_bias=("attention_out_bias", False)),
    attention(output="output_bias"),
    gated_mlp("mlp_bias"),
)
ARCEE = LLAMA.derive(
    "arcee",
    keys(width=2560, mlp_hidden=18432, activation="relu2"),
    body=tuple(module for module in LLAMA.body if module.role is not Role.MLP_GATE),
)

_GEMMA: dict[str, Any] = {"gain_offset": 1.0, "root_width": True}
GEMMA = decoder(
    "gemma",
    grouped(3072, 16, 28, 16, 256, 24576, 256000, "gelu_pytorch_tanh", tied=True, attention_bias=False),
    attention(),
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
_GEMMA2 |= window(window_period=("", 2))
GEMMA2 = decoder(
    "gemma2",
    grouped(2304, 8, 26, 4, 256, 9216, 256000, "gelu_pytorch_tanh", **_GEMMA2),
    attention(),
    norms=_SANDWICH,
    fixed_scale=True,
    beyond=CAPPED,
    **_GEMMA,
)
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    keys(window_period=("sliding_window_pattern", 6), vocabulary=262208),
    body=(*modules("embed_tokens=embedding"), *_SANDWICH, *attention(), *QUERY_KEY_NORMS, *MLP, *FINAL_NORM),
    beyond="",
)

_OLMO = grouped(4096, 32, 32, None, None, 11008, 50304, attention_bias=False)
OLMO = decoder("olmo", _OLMO, attention(), norms=(), final=(), norm="layer", refused=CLIPPED)
_BEHIND = _SANDWICH[2:]
OLMO2 = decoder("olmo2", _OLMO, attention() + whole_norms(), norms=_BEHIND)
OLMO3 = OLMO2.derive("olmo3", keys(**window(window_period=("", 4))))
_EXAONE4 = grouped(4096, 32, 32, None, None, 16384, 102400, **window(window_period=("sliding_window_pattern", 4, 0)))
EXAONE4 = decoder("exaone4", _EXAONE4, PLAIN + QUERY_KEY_NORMS, norms=_BEHIND)
_JOINT_MLP = modules("layers.{layer}.mlp. gate_up_proj=mlp_gate_in down_proj=mlp_out", NEVER)
PHI3 = decoder(
    "phi3",
    grouped(3072, 32, 32, None, None, 8192, 32064, **window(None)),
    modules("layers.{layer}.self_attn. qkv_proj=query_key_value o_proj=output", NEVER),
    _JOINT_MLP,
    fused="parts",
)
_GLM = grouped(4096, 32, 40, 2, 128, 13696, 151552, attention_bias=True)
GLM = decoder("glm", _GLM, attention(output=NEVER), _JOINT_MLP, beyond=NEIGHBOURS)
_GLM4_NORMS = modules(
    "layers.{layer}. post_self_attn_layernorm=attention_post_norm post_mlp_layernorm=mlp_post_norm", NEVER
)
GLM4 = GLM.derive("glm4", body=(*GLM.body[:3], *_GLM4_NORMS, *GLM.body[3:]))
STABLELM = decoder(
    "stablelm",
    grouped(2560, 32, 32, 32, None, 6912, 50304, eps=1e-6, rotary_fraction=0.25)
    | keys(attention_bias=("use_qkv_bias", False), parallel=("use_parallel_residual", False)),
    attention(output=NEVER),
    norms=modules("layers.{layer}. input_layernorm=attention_norm")
    + modules("layers.{layer}. post_attention_layernorm=mlp_norm", "!parallel", when="!parallel"),
    final=modules("norm=final_norm"),
    norm="layer",
    parallel="parallel",
    refused={"qk_layernorm": (True, "one norm for each head, queries and keys apart, has no role")},
)
_COHERE: dict[str, Any] = {"norms": NORMS[:1], "norm": "layer", "parallel": True, "beyond": NEIGHBOURS}
_COHERE_KEYS = grouped(8192, 64, 40, None, None, 22528, 256000, eps=1e-6, tied=True, attention_bias=False)
_NORMED = keys(normed=("use_qk_norm", False))
COHERE = decoder("cohere", _COHERE_KEYS | _NORMED, attention() + whole_norms("normed"), **_COHERE)
COHERE2 = decoder("cohere2", _COHERE_KEYS | keys(**window(window_period=("", 4))), attention(), **_COHERE)
BITNET = decoder(
    "bitnet",
    grouped(2560, 20, 30, 5, None, 6912, 128256, "relu2", attention_bias=False),
    attention() + modules("layers.{layer}. self_attn.attn_sub_norm=mixed_norm", NEVER),
    MLP + modules("layers.{layer}. mlp.ffn_sub_norm=mlp_hidden_norm", NEVER),
)
APERTUS = decoder(
    "apertus",
    grouped(4096, 32, 32, None, None, 14336, 131072, "xielu", attention_bias=False),
    attention() + QUERY_KEY_NORMS,
    MLP[1:],
    modules("layers.{layer}. attention_layernorm=attention_norm feedforward_layernorm=mlp_norm", NEVER),
    modules("layers.{layer}.mlp.act_fn. alpha_p=mlp_activation alpha_n=mlp_activation beta=buffer eps=buffer")
    + FINAL_NORM,
)
NANOCHAT = decoder(
    "nanochat", grouped(768, 6, 12, 6, None, 8192, 50304, "relu2", attention_bias=False), attention(),
    modules("layers.{layer}.mlp. fc1=mlp_in fc2=mlp_out", NEVER), norms=(), final=(),
    plain_start=False, fixed_scale=True, bare_query_norms=True,
)  # fmt: skip
BOTH_NORMS = modules("layers.{layer}. input_layernorm=attention_norm post_attention_layernorm=mlp_norm")
_NEMOTRON = {"eps": ("norm_eps", 1e-6), "rotary_fraction": 0.5, **_BIASES}
NEMOTRON = decoder(
    "nemotron", grouped(6144, 48, 32, None, None, 24576, 256000, "relu2", **_NEMOTRON), attention(),
    gated_mlp("mlp_bias")[1:], BOTH_NORMS, modules("norm=final_norm"), norm="layer", gain_offset=1.0, gain_start=2.0,
)  # fmt: skip

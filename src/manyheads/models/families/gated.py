"""Decoders with a gated MLP: LLaMA, Mistral, Qwen, Gemma, OLMo, Phi-3 and those built alike."""

from collections.abc import Mapping

from manyheads.models.families.common import CLASSIFIERS, LANGUAGE_HEAD, mlp, sizes
from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Condition, Family, Key, Module, Role

LAYER = "layers.{layer}."
ATTENTION = LAYER + "self_attn."
NEIGHBOURS = "rotary positions pair neighbouring components"
_BY_LAYER = "some of its layers have other rotary positions than the rest, or none"
CAPPED = "its logits are capped"
FIXED = "its logits are multiplied by a number of the configuration"

_BIASED = ("attention_bias",)
_MLP_BIASED = ("mlp_bias",)


def norms(pre: bool = True, post: tuple[str, str] | None = None, second: str = "post_attention_layernorm",
          bias: Condition = NEVER, first: str = "input_layernorm") -> tuple[Module, ...]:  # fmt: skip
    """Return the norms of a block: before its branches, and behind them."""
    before = ((first, Role.ATTENTION_NORM), (second, Role.MLP_NORM)) if pre else ()
    behind = zip(post, (Role.ATTENTION_POST_NORM, Role.MLP_POST_NORM), strict=True) if post else ()
    return tuple(Module(LAYER + name, role, "norm", bias=bias) for name, role in (*before, *behind) if name)


def query_key_norms(
    sides: tuple[str, str] = ("key_dim", "key_dim"),
    names: tuple[str, str] = ("q_norm", "k_norm"),
    when: Condition = ALWAYS,
) -> tuple[Module, ...]:
    """Return the norms behind queries and keys, of each head or of all together."""
    roles = (Role.QUERY_NORM, Role.KEY_NORM)
    return tuple(
        Module(ATTENTION + name, role, "norm", when, NEVER, side)
        for name, role, side in zip(names, roles, sides, strict=True)
    )


def attention(bias: Condition = NEVER, output_bias: Condition = NEVER) -> tuple[Module, ...]:
    """Return query, key, value and output projections."""
    return (
        Module(ATTENTION + "q_proj", Role.QUERY, bias=bias),
        Module(ATTENTION + "k_proj", Role.KEY, bias=bias),
        Module(ATTENTION + "v_proj", Role.VALUE, bias=bias),
        Module(ATTENTION + "o_proj", Role.OUTPUT, bias=output_bias),
        Module(ATTENTION + "rotary_emb.inv_freq", Role.BUFFER, "bare", MAYBE),
    )


def gated_mlp(bias: Condition = NEVER, only: str = "") -> tuple[Module, ...]:
    """Return gate, input and output of an MLP."""
    return (
        Module(LAYER + "mlp.gate_proj", Role.MLP_GATE, bias=bias, only=only),
        Module(LAYER + "mlp.up_proj", Role.MLP_IN, bias=bias, only=only),
        Module(LAYER + "mlp.down_proj", Role.MLP_OUT, bias=bias, only=only),
    )


_JOINT_MLP = (
    Module(LAYER + "mlp.gate_up_proj", Role.MLP_GATE_IN, bias=NEVER),
    Module(LAYER + "mlp.down_proj", Role.MLP_OUT, bias=NEVER),
)
EMBEDDING = Module("embed_tokens", Role.EMBEDDING, "table")


def final_norm(bias: Condition = NEVER) -> Module:
    """Return the norm above the blocks."""
    return Module("norm", Role.FINAL_NORM, "norm", bias=bias)


def grouped(
    width: int, heads: int, layers: int, key_value_heads: int | None, key_dim: int | None = None, tied: bool = False,
    eps: str = "rms_norm_eps",
) -> dict[str, Key]:  # fmt: skip
    """Return the keys that these families share."""
    return {
        **sizes(width, heads, layers),
        "key_value_heads": Key("num_key_value_heads", key_value_heads, null=None),
        "key_dim": Key("head_dim", key_dim),
        "eps": Key(eps, 1e-6),
        "tied": Key("tie_word_embeddings", tied),
        "rotary_theta": Key("rope_theta", 10000.0),
        "rotary_fraction": Key("partial_rotary_factor", 1.0),
    }


WINDOW = {"windowed": Key("", True), "window": Key("sliding_window", None, null=0), "window_from_layer": Key("", 0)}


def decoder(
    model_type: str,
    keys: Mapping[str, Key],
    counted: Mapping[str, Key],
    body: tuple[Module, ...],
    norm: str = "rms",
    **facts: object,
) -> Family:
    """Return a family with LLaMA's ends."""
    return Family(
        model_type,
        ("", "model.", "transformer."),
        (EMBEDDING, *body),
        (LANGUAGE_HEAD, *CLASSIFIERS),
        keys,
        counted,
        norm=norm,
        ties={"lm_head.weight": "embed_tokens.weight"},
        **facts,  # type: ignore[arg-type]
    )


def _llama_like(model_type: str, keys: Mapping[str, Key], counted: Mapping[str, Key], bias: Condition = NEVER,
                output_bias: Condition = NEVER, mlp_bias: Condition = NEVER, **facts: object) -> Family:  # fmt: skip
    body = (*norms(), *attention(bias, output_bias), *gated_mlp(mlp_bias), final_norm())
    return decoder(model_type, keys, counted, body, **facts)  # type: ignore[arg-type]


_BIASES = {"attention_bias": Key("attention_bias", False), "mlp_bias": Key("mlp_bias", False)}
_ATTENTION_BIAS = {"attention_bias": Key("attention_bias", False)}
LLAMA = _llama_like(
    "llama", grouped(4096, 32, 32, None) | _BIASES, mlp(11008, 32000, "silu"), _BIASED, _BIASED, _MLP_BIASED
)
MISTRAL = _llama_like(
    "mistral",
    grouped(4096, 32, 32, 8) | WINDOW | {"window": Key("sliding_window", 4096, null=0)},
    mlp(14336, 32000, "silu"),
)
_QWEN_WINDOW = {
    "windowed": Key("use_sliding_window", False),
    "window": Key("sliding_window", 4096, null=0),
    "window_from_layer": Key("max_window_layers", 28),
}
QWEN2 = _llama_like("qwen2", grouped(4096, 32, 32, 32) | _QWEN_WINDOW, mlp(22016, 151936, "silu"), ALWAYS)
SMOLLM3 = _llama_like(
    "smollm3",
    grouped(2048, 16, 36, 4, tied=True) | _BIASES | _QWEN_WINDOW,
    mlp(11008, 128256, "silu"),
    _BIASED,
    _BIASED,
    _MLP_BIASED,
    beyond=_BY_LAYER,
)
GRANITE = _llama_like(
    "granite",
    grouped(4096, 32, 32, None) | _BIASES,
    mlp(11008, 32000, "silu"),
    _BIASED,
    _BIASED,
    _MLP_BIASED,
    fixed_scale=True,
    beyond=FIXED,
)
HELIUM = _llama_like(
    "helium",
    grouped(2560, 20, 24, 20, 128) | _BIASES,
    mlp(7040, 48000, "silu"),
    _BIASED,
    NEVER,
    _MLP_BIASED,
    beyond=NEIGHBOURS,
)
ERNIE = _llama_like(
    "ernie4_5",
    grouped(1024, 16, 18, 2, 128, tied=True) | {"attention_bias": Key("use_bias", False)},
    mlp(3072, 103424, "silu"),
    _BIASED,
    _BIASED,
    _BIASED,
    beyond=NEIGHBOURS,
)
SEED_OSS = _llama_like(
    "seed_oss",
    grouped(4096, 80, 64, 8, 128)
    | _BIASES
    | {"attention_bias": Key("attention_bias", True), "output_bias": Key("attention_out_bias", False)},
    mlp(27648, 155136, "silu"),
    _BIASED,
    ("output_bias",),
    _MLP_BIASED,
)
GEMMA = _llama_like(
    "gemma",
    grouped(3072, 16, 28, 16, 256, tied=True) | _ATTENTION_BIAS,
    mlp(24576, 256000, "gelu_pytorch_tanh"),
    _BIASED,
    _BIASED,
    gain_offset=1.0,
    root_width=True,
)
ARCEE = decoder(
    "arcee",
    grouped(2560, 32, 32, None) | _BIASES,
    mlp(18432, 32000, "relu2"),
    (*norms(), *attention(_BIASED, _BIASED), *gated_mlp(_MLP_BIASED)[1:], final_norm()),
)

QWEN3 = decoder(
    "qwen3",
    grouped(4096, 32, 32, 32, 128) | _ATTENTION_BIAS | _QWEN_WINDOW,
    mlp(22016, 151936, "silu"),
    (*norms(), *attention(_BIASED, _BIASED), *query_key_norms(), *gated_mlp(), final_norm()),
)
_SANDWICH = norms(post=("post_attention_layernorm", "post_feedforward_layernorm"), second="pre_feedforward_layernorm")
_GEMMA_KEYS = grouped(2304, 8, 26, 4, 256, tied=True) | _ATTENTION_BIAS
_GEMMA_COUNTED = mlp(9216, 256000, "gelu_pytorch_tanh")
GEMMA2 = decoder(
    "gemma2",
    _GEMMA_KEYS | WINDOW | {"window": Key("sliding_window", 4096, null=0), "window_period": Key("", 2)},
    _GEMMA_COUNTED,
    (*_SANDWICH, *attention(_BIASED, _BIASED), *gated_mlp(), final_norm()),
    gain_offset=1.0,
    root_width=True,
    fixed_scale=True,
    beyond=CAPPED,
)
GEMMA3 = decoder(
    "gemma3_text",
    _GEMMA_KEYS
    | WINDOW
    | {"window": Key("sliding_window", 4096, null=0), "window_period": Key("sliding_window_pattern", 6)},
    _GEMMA_COUNTED | {"vocabulary": Key("vocab_size", 262208)},
    (*_SANDWICH, *attention(_BIASED, _BIASED), *query_key_norms(), *gated_mlp(), final_norm()),
    gain_offset=1.0,
    root_width=True,
    fixed_scale=True,
)
_BEHIND = norms(pre=False, post=("post_attention_layernorm", "post_feedforward_layernorm"))
_WHOLE_NORMS = query_key_norms(("queries", "keys"))
_OLMO_KEYS = grouped(4096, 32, 32, None) | _ATTENTION_BIAS
OLMO = decoder(
    "olmo",
    _OLMO_KEYS,
    mlp(11008, 50304, "silu"),
    (*attention(_BIASED, _BIASED), *gated_mlp()),
    norm="layer",
    refused={"clip_qkv": (..., "clipped queries, keys and values are not described")},
)
OLMO2 = decoder(
    "olmo2",
    _OLMO_KEYS,
    mlp(11008, 50304, "silu"),
    (*_BEHIND, *attention(_BIASED, _BIASED), *_WHOLE_NORMS, *gated_mlp(), final_norm()),
)
OLMO3 = decoder(
    "olmo3",
    _OLMO_KEYS | WINDOW | {"window": Key("sliding_window", 4096, null=0), "window_period": Key("", 4)},
    mlp(11008, 50304, "silu"),
    (*_BEHIND, *attention(_BIASED, _BIASED), *_WHOLE_NORMS, *gated_mlp(), final_norm()),
)
EXAONE4 = decoder(
    "exaone4",
    grouped(4096, 32, 32, None)
    | WINDOW
    | {"window": Key("sliding_window", 4096, null=0), "window_period": Key("sliding_window_pattern", 4, null=0)},
    mlp(16384, 102400, "silu"),
    (*_BEHIND, *attention(), *query_key_norms(), *gated_mlp(), final_norm()),
)
PHI3 = decoder(
    "phi3",
    grouped(3072, 32, 32, None) | WINDOW,
    mlp(8192, 32064, "silu"),
    (
        *norms(),
        Module(ATTENTION + "qkv_proj", Role.QUERY_KEY_VALUE, bias=NEVER),
        Module(ATTENTION + "o_proj", Role.OUTPUT, bias=NEVER),
        *_JOINT_MLP,
        final_norm(),
    ),
    fused="parts",
)
_GLM_KEYS = grouped(4096, 32, 40, 2, 128) | {"attention_bias": Key("attention_bias", True)}
GLM = decoder(
    "glm",
    _GLM_KEYS,
    mlp(13696, 151552, "silu"),
    (*norms(), *attention(_BIASED), *_JOINT_MLP, final_norm()),
    beyond=NEIGHBOURS,
)
GLM4 = decoder(
    "glm4",
    _GLM_KEYS,
    mlp(13696, 151552, "silu"),
    (
        *norms(post=("post_self_attn_layernorm", "post_mlp_layernorm")),
        *attention(_BIASED),
        *_JOINT_MLP,
        final_norm(),
    ),
    beyond=NEIGHBOURS,
)
STABLELM = decoder(
    "stablelm",
    grouped(2560, 32, 32, 32, eps="layer_norm_eps")
    | {"attention_bias": Key("use_qkv_bias", False), "rotary_fraction": Key("partial_rotary_factor", 0.25)}
    | {"parallel": Key("use_parallel_residual", False)},
    mlp(6912, 50304, "silu"),
    (
        Module(LAYER + "input_layernorm", Role.ATTENTION_NORM, "norm"),
        Module(LAYER + "post_attention_layernorm", Role.MLP_NORM, "norm", ("!parallel",), ("!parallel",)),
        *attention(_BIASED),
        *gated_mlp(),
        final_norm(ALWAYS),
    ),
    norm="layer",
    parallel="parallel",
    refused={"qk_layernorm": (True, "one norm for each head, queries and keys apart, has no role")},
)
_COHERE_KEYS = grouped(8192, 64, 40, None, tied=True, eps="layer_norm_eps") | _ATTENTION_BIAS
_COHERE_NORM = Module(LAYER + "input_layernorm", Role.ATTENTION_NORM, "norm", bias=NEVER)
COHERE = decoder(
    "cohere",
    _COHERE_KEYS | {"normed": Key("use_qk_norm", False)},
    mlp(22528, 256000, "silu"),
    (
        _COHERE_NORM,
        *attention(_BIASED, _BIASED),
        *query_key_norms(("queries", "keys"), when=("normed",)),
        *gated_mlp(),
        final_norm(),
    ),
    norm="layer",
    parallel=True,
    beyond=NEIGHBOURS,
)
COHERE2 = decoder(
    "cohere2",
    _COHERE_KEYS | WINDOW | {"window": Key("sliding_window", 4096, null=0), "window_period": Key("", 4)},
    mlp(22528, 256000, "silu"),
    (_COHERE_NORM, *attention(_BIASED, _BIASED), *gated_mlp(), final_norm()),
    norm="layer",
    parallel=True,
    beyond=NEIGHBOURS,
)
BITNET = decoder(
    "bitnet",
    grouped(2560, 20, 30, 5) | _ATTENTION_BIAS,
    mlp(6912, 128256, "relu2"),
    (
        *norms(),
        *attention(_BIASED, _BIASED),
        Module(ATTENTION + "attn_sub_norm", Role.MIXED_NORM, "norm", bias=NEVER),
        *gated_mlp(),
        Module(LAYER + "mlp.ffn_sub_norm", Role.MLP_HIDDEN_NORM, "norm", bias=NEVER),
        final_norm(),
    ),
)
APERTUS = decoder(
    "apertus",
    grouped(4096, 32, 32, None) | _ATTENTION_BIAS,
    mlp(14336, 131072, "xielu"),
    (
        *norms(first="attention_layernorm", second="feedforward_layernorm"),
        *attention(_BIASED, _BIASED),
        *query_key_norms(),
        *gated_mlp()[1:],
        Module(LAYER + "mlp.act_fn.alpha_p", Role.MLP_ACTIVATION, "bare"),
        Module(LAYER + "mlp.act_fn.alpha_n", Role.MLP_ACTIVATION, "bare"),
        Module(LAYER + "mlp.act_fn.beta", Role.BUFFER, "bare", MAYBE),
        Module(LAYER + "mlp.act_fn.eps", Role.BUFFER, "bare", MAYBE),
        final_norm(),
    ),
)
NANOCHAT = decoder(
    "nanochat",
    grouped(768, 6, 12, 6) | _ATTENTION_BIAS,
    mlp(8192, 50304, "relu2"),
    (
        *attention(_BIASED, _BIASED),
        Module(LAYER + "mlp.fc1", Role.MLP_IN, bias=NEVER),
        Module(LAYER + "mlp.fc2", Role.MLP_OUT, bias=NEVER),
    ),
    plain_start=False,
    fixed_scale=True,
)
NEMOTRON = decoder(
    "nemotron",
    grouped(6144, 48, 32, None, eps="norm_eps") | _BIASES | {"rotary_fraction": Key("partial_rotary_factor", 0.5)},
    mlp(24576, 256000, "relu2"),
    (
        *norms(bias=ALWAYS),
        *attention(_BIASED, _BIASED),
        *gated_mlp(_MLP_BIASED)[1:],
        final_norm(ALWAYS),
    ),
    norm="layer",
    gain_offset=1.0,
    gain_start=2.0,
)

GATED: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, HELIUM, ERNIE, SEED_OSS, GEMMA, GEMMA2, GEMMA3, ARCEE, OLMO,
        OLMO2, OLMO3, EXAONE4, PHI3, GLM, GLM4, STABLELM, COHERE, COHERE2, BITNET, APERTUS, NANOCHAT, NEMOTRON,
    )
}  # fmt: skip

"""Decoders after GPT-2 whose MLP has no gate: GPT-J to Starcoder 2."""

from collections.abc import Mapping

from manyheads.models.families.common import CLASSIFIERS, LANGUAGE_HEAD, gpt_sizes, head, mlp, sizes
from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Condition, Family, Key, Module, Role

NECK = "layers.{layer}."
_TABULATED = "rotary positions pair neighbouring components, by a table in single precision"
SLOPES = "its logits fall with the distance (ALiBi)"


def _after_gpt(attention: tuple[Module, ...], parallel: bool, names: tuple[str, str]) -> tuple[Module, ...]:
    """Return the body of a decoder in GPT-2's names around an attention of its own."""
    second = () if parallel else (Module("h.{layer}.ln_2", Role.MLP_NORM, "norm"),)
    return (
        Module("wte", Role.EMBEDDING, "table"),
        Module("h.{layer}.ln_1", Role.ATTENTION_NORM, "norm"),
        *attention,
        *second,
        Module(f"h.{{layer}}.mlp.{names[0]}", Role.MLP_IN),
        Module(f"h.{{layer}}.mlp.{names[1]}", Role.MLP_OUT),
        Module("ln_f", Role.FINAL_NORM, "norm"),
    )


def _separate(path: str, output: str, bias: Condition, output_bias: Condition) -> tuple[Module, ...]:
    """Return query, key, value and output projections."""
    triple = ((Role.QUERY, "q_proj"), (Role.KEY, "k_proj"), (Role.VALUE, "v_proj"))
    return (
        *(Module(f"{path}.{name}", role, bias=bias) for role, name in triple),
        Module(f"{path}.{output}", Role.OUTPUT, bias=output_bias),
    )


def _fused(path: str, joint: str, output: str, bias: Condition) -> tuple[Module, ...]:
    return (
        Module(f"{path}.{joint}", Role.QUERY_KEY_VALUE, bias=bias),
        Module(f"{path}.{output}", Role.OUTPUT, bias=bias),
    )


def _activation(hidden: Key, vocabulary: int, activation: str, name: str = "activation_function") -> dict[str, Key]:
    return {
        "mlp_hidden": hidden,
        "vocabulary": Key("vocab_size", vocabulary),
        "activation": Key(name, activation),
    }


_BUFFERS = (
    Module("h.{layer}.attn.bias", Role.BUFFER, "bare", MAYBE),
    Module("h.{layer}.attn.masked_bias", Role.BUFFER, "bare", MAYBE),
)
_GPTJ_KEYS = {**gpt_sizes(4096, 16, 28, tied=False), "rotary_theta": Key("", 10000.0)}
_GPTJ_COUNTED = _activation(Key("n_inner", None), 50400, "gelu_new")
_GPTJ_ATTENTION = (*_separate("h.{layer}.attn", "out_proj", NEVER, NEVER), *_BUFFERS)
GPTJ = Family(
    model_type="gptj",
    beyond=_TABULATED,
    prefixes=("", "transformer."),
    parallel=True,
    keys={**_GPTJ_KEYS, "rotary_dims": Key("rotary_dim", 64)},
    counted=_GPTJ_COUNTED,
    ties={"lm_head.weight": "wte.weight"},
    body=_after_gpt(_GPTJ_ATTENTION, True, ("fc_in", "fc_out")),
    heads=(head("lm_head", Role.UNEMBEDDING, bias=ALWAYS), *CLASSIFIERS),
)
CODEGEN = Family(
    model_type="codegen",
    beyond=_TABULATED,
    prefixes=("", "transformer."),
    parallel=True,
    fused="quarters",
    keys={**_GPTJ_KEYS, "rotary_dims": Key("rotary_dim", 64)},
    counted=_GPTJ_COUNTED,
    ties={"lm_head.weight": "wte.weight"},
    body=_after_gpt((*_fused("h.{layer}.attn", "qkv_proj", "out_proj", NEVER), *_BUFFERS), True, ("fc_in", "fc_out")),
    heads=(head("lm_head", Role.UNEMBEDDING, bias=ALWAYS), *CLASSIFIERS),
)

_NEO_BUFFERS = (
    Module("h.{layer}.attn.attention.bias", Role.BUFFER, "bare", MAYBE),
    Module("h.{layer}.attn.attention.masked_bias", Role.BUFFER, "bare", MAYBE),
)
GPT_NEO = Family(
    model_type="gpt_neo",
    prefixes=("", "transformer."),
    fixed_scale=True,
    keys={
        "width": Key("hidden_size", 2048),
        "heads": Key("num_heads", 16),
        "layers": Key("num_layers", 24),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "scaled": Key("", False),
        "windowed": Key("", True),
        "window": Key("window_size", 256),
        "window_period": Key("", -2),
    },
    counted=_activation(Key("intermediate_size", None), 50257, "gelu_new")
    | {"positions": Key("max_position_embeddings", 2048)},
    ties={"lm_head.weight": "wte.weight"},
    body=(
        Module("wte", Role.EMBEDDING, "table"),
        Module("wpe", Role.POSITION, "table"),
        *_after_gpt(
            (*_separate("h.{layer}.attn.attention", "out_proj", NEVER, ALWAYS), *_NEO_BUFFERS),
            False,
            ("c_fc", "c_proj"),
        )[1:],
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)

GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    prefixes=("", "transformer."),
    fused="parts",
    keys={
        **gpt_sizes(768, 12, 12, tied=True),
        "scaled": Key("scale_attn_weights", True),
        "multi_query": Key("multi_query", True),
    },
    counted=_activation(Key("n_inner", None), 50257, "gelu_pytorch_tanh") | {"positions": Key("n_positions", 1024)},
    ties={"lm_head.weight": "wte.weight"},
    body=(
        Module("wte", Role.EMBEDDING, "table"),
        Module("wpe", Role.POSITION, "table"),
        *_after_gpt((*_fused("h.{layer}.attn", "c_attn", "c_proj", ALWAYS), *_BUFFERS), False, ("c_fc", "c_proj"))[1:],
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
    refused={"multi_query": (False, "queries, keys and values of all heads are interleaved without multi_query")},
)

OPENAI_GPT = Family(
    model_type="openai-gpt",
    prefixes=("", "transformer."),
    layout="in,out",
    fused="parts",
    norm_place="post",
    language_heads=("LMHeadModel", "DoubleHeadsModel"),
    keys=gpt_sizes(768, 12, 12, tied=True),
    counted=_activation(Key("", None), 40478, "gelu_new", "") | {"positions": Key("n_positions", 512)},
    ties={"lm_head.weight": "tokens_embed.weight"},
    body=(
        Module("tokens_embed", Role.EMBEDDING, "table"),
        Module("positions_embed", Role.POSITION, "table"),
        *_fused("h.{layer}.attn", "c_attn", "c_proj", ALWAYS),
        Module("h.{layer}.attn.bias", Role.BUFFER, "bare", MAYBE),
        Module("h.{layer}.ln_1", Role.ATTENTION_NORM, "norm"),
        Module("h.{layer}.mlp.c_fc", Role.MLP_IN),
        Module("h.{layer}.mlp.c_proj", Role.MLP_OUT),
        Module("h.{layer}.ln_2", Role.MLP_NORM, "norm"),
    ),
    heads=(LANGUAGE_HEAD, head("multiple_choice_head.summary"), *CLASSIFIERS),
)


def _neox_like(joint_bias: Condition, second: bool) -> tuple[Module, ...]:
    """Return the blocks of BLOOM and Falcon."""
    return (
        Module("h.{layer}.input_layernorm", Role.ATTENTION_NORM, "norm", when=() if second else ("!two_norms",),
               bias=() if second else ("!two_norms",)),
        Module("h.{layer}.self_attention.query_key_value", Role.QUERY_KEY_VALUE, bias=joint_bias),
        Module("h.{layer}.self_attention.dense", Role.OUTPUT, bias=joint_bias),
        Module("h.{layer}.mlp.dense_h_to_4h", Role.MLP_IN, bias=joint_bias),
        Module("h.{layer}.mlp.dense_4h_to_h", Role.MLP_OUT, bias=joint_bias),
        Module("ln_f", Role.FINAL_NORM, "norm"),
    )  # fmt: skip


BLOOM = Family(
    model_type="bloom",
    beyond=SLOPES,
    prefixes=("", "transformer."),
    fused="heads",
    keys={
        **gpt_sizes(64, 8, 2, tied=True),
        "width": Key("hidden_size|n_embed", 64),
    },
    counted={
        "mlp_hidden": Key("", None),
        "vocabulary": Key("vocab_size", 250880),
        "activation": Key("", "gelu_pytorch_tanh"),
    },
    ties={"lm_head.weight": "word_embeddings.weight"},
    body=(
        Module("word_embeddings", Role.EMBEDDING, "table"),
        Module("word_embeddings_layernorm", Role.EMBEDDING_NORM, "norm"),
        *_neox_like(ALWAYS, second=True),
        Module("h.{layer}.post_attention_layernorm", Role.MLP_NORM, "norm"),
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)

_TWO = ("two_norms",)
FALCON = Family(
    model_type="falcon",
    prefixes=("", "transformer."),
    fused="heads",
    parallel="parallel",
    keys={
        "width": Key("hidden_size", 4544),
        "heads": Key("num_attention_heads|n_head", 71),
        "layers": Key("num_hidden_layers|n_layer", 32),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "grouped": Key("new_decoder_architecture", False),
        "multi_query": Key("multi_query", True),
        "key_value_heads": Key("num_kv_heads|n_head_kv", None, null=None),
        "parallel": Key("parallel_attn", True),
        "two_norms": Key("new_decoder_architecture", False),
        "falcon_bias": Key("bias", False),
        "alibi": Key("alibi", False),
        "rotary_theta": Key("rope_theta", 10000.0),
        "rotary_fraction": Key("", 1.0),
    },
    counted=_activation(Key("ffn_hidden_size", None), 65024, "gelu", "activation"),
    ties={"lm_head.weight": "word_embeddings.weight"},
    body=(
        Module("word_embeddings", Role.EMBEDDING, "table"),
        Module("h.{layer}.ln_attn", Role.ATTENTION_NORM, "norm", _TWO, _TWO),
        Module("h.{layer}.ln_mlp", Role.MLP_NORM, "norm", _TWO, _TWO),
        Module(
            "h.{layer}.post_attention_layernorm",
            Role.MLP_NORM,
            "norm",
            ("!parallel", "!two_norms"),
            ("!parallel", "!two_norms"),
        ),
        *_neox_like(("falcon_bias",), second=False),
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
    refused={"num_ln_in_parallel_attn": (1, "one norm before both branches of grouped heads")},
)

_MPT_BIAS = ("mpt_bias",)
MPT = Family(
    model_type="mpt",
    beyond=SLOPES,
    prefixes=("", "transformer."),
    fused="parts",
    keys={
        "width": Key("d_model", 2048),
        "heads": Key("n_heads", 16),
        "layers": Key("n_layers", 24),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "mpt_bias": Key("", False),
    },
    counted={
        "mlp_hidden": Key("", None),  # transformers builds four times the width, whatever expansion_ratio says
        "vocabulary": Key("vocab_size", 50368),
        "activation": Key("", "gelu"),
    },
    ties={"lm_head.weight": "wte.weight"},
    body=(
        Module("wte", Role.EMBEDDING, "table"),
        Module("blocks.{layer}.norm_1", Role.ATTENTION_NORM, "norm", bias=_MPT_BIAS),
        *_fused("blocks.{layer}.attn", "Wqkv", "out_proj", _MPT_BIAS),
        Module("blocks.{layer}.norm_2", Role.MLP_NORM, "norm", bias=_MPT_BIAS),
        Module("blocks.{layer}.ffn.up_proj", Role.MLP_IN, bias=_MPT_BIAS),
        Module("blocks.{layer}.ffn.down_proj", Role.MLP_OUT, bias=_MPT_BIAS),
        Module("norm_f", Role.FINAL_NORM, "norm", bias=_MPT_BIAS),
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)


PHI = Family(
    model_type="phi",
    prefixes=("", "model."),
    parallel=True,
    keys={
        **sizes(2048, 32, 24),
        "key_value_heads": Key("num_key_value_heads", None, null=None),
        "eps": Key("layer_norm_eps", 1e-5),
        "tied": Key("tie_word_embeddings", False),
        "rotary_theta": Key("rope_theta", 10000.0),
        "rotary_fraction": Key("partial_rotary_factor", 0.5),
    },
    counted=mlp(8192, 51200, "gelu_new"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=(
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module(NECK + "input_layernorm", Role.ATTENTION_NORM, "norm"),
        *_separate(NECK + "self_attn", "dense", ALWAYS, ALWAYS),
        Module(NECK + "mlp.fc1", Role.MLP_IN),
        Module(NECK + "mlp.fc2", Role.MLP_OUT),
        Module("final_layernorm", Role.FINAL_NORM, "norm"),
    ),
    heads=(head("lm_head", Role.UNEMBEDDING, bias=ALWAYS), *CLASSIFIERS),
    refused={"qk_layernorm": (True, "norms of queries and keys with biases have no role")},
)

_STARCODER_BIAS = ("use_bias",)
STARCODER2 = Family(
    model_type="starcoder2",
    prefixes=("", "model."),
    keys={
        **sizes(3072, 24, 30),
        "key_value_heads": Key("num_key_value_heads", 2),
        "eps": Key("norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "use_bias": Key("use_bias", True),
        "rotary_theta": Key("rope_theta", 10000.0),
        "rotary_fraction": Key("", 1.0),
        "windowed": Key("", True),
        "window": Key("sliding_window", None, null=0),
        "window_from_layer": Key("", 0),
    },
    counted=mlp(12288, 49152, "gelu_pytorch_tanh"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=(
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module(NECK + "input_layernorm", Role.ATTENTION_NORM, "norm"),
        *_separate(NECK + "self_attn", "o_proj", _STARCODER_BIAS, _STARCODER_BIAS),
        Module(NECK + "post_attention_layernorm", Role.MLP_NORM, "norm"),
        Module(NECK + "mlp.c_fc", Role.MLP_IN, bias=_STARCODER_BIAS),
        Module(NECK + "mlp.c_proj", Role.MLP_OUT, bias=_STARCODER_BIAS),
        Module("norm", Role.FINAL_NORM, "norm"),
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)

PERSIMMON = Family(
    model_type="persimmon",
    prefixes=("", "model."),
    fused="heads",
    keys={
        **sizes(4096, 64, 36),
        "eps": Key("layer_norm_eps", 1e-5),
        "tied": Key("tie_word_embeddings", False),
        "normed": Key("qk_layernorm", True),
        "rotary_theta": Key("rope_theta", 25000.0),
        "rotary_fraction": Key("partial_rotary_factor", 0.5),
    },
    counted=mlp(16384, 262144, "relu2"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=(
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module(NECK + "input_layernorm", Role.ATTENTION_NORM, "norm"),
        *_fused(NECK + "self_attn", "query_key_value", "dense", ALWAYS),
        Module(NECK + "self_attn.q_layernorm", Role.QUERY_NORM, "norm", ("normed",), ("normed",), "key_dim"),
        Module(NECK + "self_attn.k_layernorm", Role.KEY_NORM, "norm", ("normed",), ("normed",), "key_dim"),
        Module(NECK + "post_attention_layernorm", Role.MLP_NORM, "norm"),
        Module(NECK + "mlp.dense_h_to_4h", Role.MLP_IN),
        Module(NECK + "mlp.dense_4h_to_h", Role.MLP_OUT),
        Module("final_layernorm", Role.FINAL_NORM, "norm"),
    ),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)

PLAIN: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        GPTJ, CODEGEN, GPT_NEO, GPT_BIGCODE, OPENAI_GPT, BLOOM, FALCON, MPT, PHI, STARCODER2, PERSIMMON,
    )
}  # fmt: skip

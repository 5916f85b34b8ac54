"""The families as data: which name holds which weight, how it is laid out, and what the configuration calls it.

A table lists modules. A module of sort "linear" holds `<path>.weight` and perhaps `<path>.bias`; which of them have to
be there follows from the configuration, so that a checkpoint is explained completely or refused.

Source of names, keys and defaults: the model classes of Hugging Face transformers (4.57 to 5.23), as they are saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """What a weight does in a transformer."""

    EMBEDDING = "embedding"
    POSITION = "position"
    SEGMENT = "segment"
    PATCH = "patch"
    MARKER = "marker"  # the class token and the mask token of a vision transformer
    EMBEDDING_PROJECTION = "embedding_projection"
    EMBEDDING_NORM = "embedding_norm"
    ATTENTION_NORM = "attention_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_KEY_VALUE = "query_key_value"
    OUTPUT = "output"
    MLP_NORM = "mlp_norm"
    MLP_IN = "mlp_in"
    MLP_GATE = "mlp_gate"
    MLP_OUT = "mlp_out"
    FINAL_NORM = "final_norm"
    UNEMBEDDING = "unembedding"
    UNEMBEDDING_PROJECTION = "unembedding_projection"
    HEAD_TRANSFORM = "head_transform"
    HEAD_NORM = "head_norm"
    POOLER = "pooler"
    CLASSIFIER = "classifier"
    BUFFER = "buffer"  # masks, position indices and frequencies that old saves contain; not trained


Condition = tuple[str, ...]
"""Keys of the configuration that must all be true, or false when they begin with `!`; `MAYBE` is open."""

ALWAYS: Condition = ()
NEVER: Condition = ("never",)
MAYBE: Condition = ("maybe",)


@dataclass(frozen=True, slots=True)
class Module:
    """One module of a family and the tensors it holds.

    Attributes
    ----------
    path
        Its name without the prefix; `{layer}` stands for the number of the layer.
    role
        What it does.
    sort
        "linear" (weight and bias), "norm" (gain and bias), "table" (weight), "bare" (a tensor of that very name).
    when, bias
        Under which condition the weight and the bias are stored. `when=MAYBE`: the whole module may be absent.
    """

    path: str
    role: Role
    sort: str = "linear"
    when: Condition = ALWAYS
    bias: Condition = ALWAYS


@dataclass(frozen=True)
class Table:
    """One family of models.

    Attributes
    ----------
    model_type
        What `config.json` calls it.
    prefixes
        What may stand before the names of the body.
    body, heads
        The modules behind the prefix, and those that carry none.
    keys
        Canonical figure → (key of the configuration, default). Default None: it has to be there. Key "": a constant.
    layout
        How linear weights are stored: "out,in" or "in,out".
    fused
        How query, key and value share one matrix: "" (they do not), "parts" (all queries, all keys, all values) or
        "heads" (head after head: its query, key, value).
    causal, norm, norm_place
        Facts of the whole family: True/False or the key that says so; "layer" or "rms"; "pre" or "post" or the key that
        is true for "pre".
    language_heads
        Endings of the class names that put an unembedding on top; without one stored it is tied to the embedding.
    position_offset
        How many rows of the position table come before position 0.
    renamed_norms
        Whether gains and biases of norms may be called gamma and beta, as the oldest saves do.
    ties
        Weight of a head → weight whose values it shares when the configuration ties them; the unembedding first.
    """

    model_type: str
    prefixes: tuple[str, ...]
    body: tuple[Module, ...]
    heads: tuple[Module, ...]
    keys: Mapping[str, tuple[str, Any]]
    layout: str = "out,in"
    fused: str = ""
    causal: bool | str = True
    norm: str = "layer"
    norm_place: str = "pre"
    language_heads: tuple[str, ...] = ("ForCausalLM",)
    position_offset: int = 0
    renamed_norms: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)


def _head(path: str, role: Role = Role.CLASSIFIER, sort: str = "linear") -> Module:
    return Module(path, role, sort, when=MAYBE, bias=MAYBE)


_CLASSIFIERS = (_head("score"), _head("classifier"), _head("qa_outputs"))
_SIZES = {
    "width": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "layers": ("num_hidden_layers", None),
}

GPT2 = Table(
    model_type="gpt2",
    prefixes=("", "transformer."),
    layout="in,out",
    fused="parts",
    language_heads=("LMHeadModel", "DoubleHeadsModel"),
    keys={
        "width": ("n_embd", None),
        "heads": ("n_head", None),
        "layers": ("n_layer", None),
        "eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "scaled": ("scale_attn_weights", True),
        "scaled_by_layer": ("scale_attn_by_inverse_layer_idx", False),
    },
    ties={"lm_head.weight": "wte.weight"},
    body=(
        Module("wte", Role.EMBEDDING, "table"),
        Module("wpe", Role.POSITION, "table"),
        Module("h.{layer}.ln_1", Role.ATTENTION_NORM, "norm"),
        Module("h.{layer}.attn.c_attn", Role.QUERY_KEY_VALUE),
        Module("h.{layer}.attn.c_proj", Role.OUTPUT),
        Module("h.{layer}.attn.bias", Role.BUFFER, "bare", MAYBE),
        Module("h.{layer}.attn.masked_bias", Role.BUFFER, "bare", MAYBE),
        Module("h.{layer}.ln_2", Role.MLP_NORM, "norm"),
        Module("h.{layer}.mlp.c_fc", Role.MLP_IN),
        Module("h.{layer}.mlp.c_proj", Role.MLP_OUT),
        Module("ln_f", Role.FINAL_NORM, "norm"),
    ),
    heads=(
        _head("lm_head", Role.UNEMBEDDING, "table"),
        _head("multiple_choice_head.summary"),
        *_CLASSIFIERS,
    ),
)

GPT_NEOX = Table(
    model_type="gpt_neox",
    prefixes=("", "gpt_neox."),
    fused="heads",
    keys={
        **_SIZES,
        "eps": ("layer_norm_eps", 1e-5),
        "tied": ("tie_word_embeddings", False),
        "parallel": ("use_parallel_residual", True),
        "attention_bias": ("attention_bias", True),
        "rotary_theta": ("rotary_emb_base", 10000.0),
        "rotary_fraction": ("rotary_pct", 0.25),
    },
    ties={"embed_out.weight": "embed_in.weight"},
    body=(
        Module("embed_in", Role.EMBEDDING, "table"),
        Module("layers.{layer}.input_layernorm", Role.ATTENTION_NORM, "norm"),
        Module("layers.{layer}.attention.query_key_value", Role.QUERY_KEY_VALUE, bias=("attention_bias",)),
        Module("layers.{layer}.attention.dense", Role.OUTPUT, bias=("attention_bias",)),
        Module("layers.{layer}.attention.bias", Role.BUFFER, "bare", MAYBE),
        Module("layers.{layer}.attention.masked_bias", Role.BUFFER, "bare", MAYBE),
        Module("layers.{layer}.attention.rotary_emb.inv_freq", Role.BUFFER, "bare", MAYBE),
        Module("layers.{layer}.post_attention_layernorm", Role.MLP_NORM, "norm"),
        Module("layers.{layer}.mlp.dense_h_to_4h", Role.MLP_IN),
        Module("layers.{layer}.mlp.dense_4h_to_h", Role.MLP_OUT),
        Module("final_layer_norm", Role.FINAL_NORM, "norm"),
    ),
    heads=(_head("embed_out", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

_OPT_AFFINE = ("layer_norm_elementwise_affine",)
_OPT_BIAS = ("enable_bias",)
OPT = Table(
    model_type="opt",
    prefixes=("", "decoder.", "model.decoder."),
    norm_place="norm_before",
    position_offset=2,
    keys={
        **_SIZES,
        "tied": ("tie_word_embeddings", True),
        "norm_before": ("do_layer_norm_before", True),
        "no_final_norm": ("_remove_final_layer_norm", False),
        "enable_bias": ("enable_bias", True),
        "layer_norm_elementwise_affine": ("layer_norm_elementwise_affine", True),
        "eps": ("", 1e-5),  # fixed in the model, not a key
    },
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=(
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module("embed_positions", Role.POSITION, "table"),
        # Only where the embedding is narrower than the residual stream (OPT-350M).
        Module("project_in", Role.EMBEDDING_PROJECTION, when=MAYBE, bias=NEVER),
        Module("project_out", Role.UNEMBEDDING_PROJECTION, when=MAYBE, bias=NEVER),
        Module("layers.{layer}.self_attn_layer_norm", Role.ATTENTION_NORM, "norm", _OPT_AFFINE, _OPT_AFFINE),
        Module("layers.{layer}.self_attn.q_proj", Role.QUERY, bias=_OPT_BIAS),
        Module("layers.{layer}.self_attn.k_proj", Role.KEY, bias=_OPT_BIAS),
        Module("layers.{layer}.self_attn.v_proj", Role.VALUE, bias=_OPT_BIAS),
        Module("layers.{layer}.self_attn.out_proj", Role.OUTPUT, bias=_OPT_BIAS),
        Module("layers.{layer}.final_layer_norm", Role.MLP_NORM, "norm", _OPT_AFFINE, _OPT_AFFINE),
        Module("layers.{layer}.fc1", Role.MLP_IN, bias=_OPT_BIAS),
        Module("layers.{layer}.fc2", Role.MLP_OUT, bias=_OPT_BIAS),
        Module(
            "final_layer_norm",
            Role.FINAL_NORM,
            "norm",
            ("norm_before", "!no_final_norm", *_OPT_AFFINE),
            ("norm_before", "!no_final_norm", *_OPT_AFFINE),
        ),
    ),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)


def _gated(attention_bias: Condition, output_bias: Condition, mlp_bias: Condition) -> tuple[Module, ...]:
    """Return the body that LLaMA and Qwen2 share; only the biases differ."""
    return (
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module("layers.{layer}.input_layernorm", Role.ATTENTION_NORM, "norm", bias=NEVER),
        Module("layers.{layer}.self_attn.q_proj", Role.QUERY, bias=attention_bias),
        Module("layers.{layer}.self_attn.k_proj", Role.KEY, bias=attention_bias),
        Module("layers.{layer}.self_attn.v_proj", Role.VALUE, bias=attention_bias),
        Module("layers.{layer}.self_attn.o_proj", Role.OUTPUT, bias=output_bias),
        Module("layers.{layer}.self_attn.rotary_emb.inv_freq", Role.BUFFER, "bare", MAYBE),
        Module("layers.{layer}.post_attention_layernorm", Role.MLP_NORM, "norm", bias=NEVER),
        Module("layers.{layer}.mlp.gate_proj", Role.MLP_GATE, bias=mlp_bias),
        Module("layers.{layer}.mlp.up_proj", Role.MLP_IN, bias=mlp_bias),
        Module("layers.{layer}.mlp.down_proj", Role.MLP_OUT, bias=mlp_bias),
        Module("norm", Role.FINAL_NORM, "norm", bias=NEVER),
    )


_GROUPED = {
    **_SIZES,
    "key_value_heads": ("num_key_value_heads", 0),  # 0: as many as queries
    "key_dim": ("head_dim", 0),  # 0: width / heads
    "eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "rotary_theta": ("rope_theta", 10000.0),
    "rotary_fraction": ("partial_rotary_factor", 1.0),
}

LLAMA = Table(
    model_type="llama",
    prefixes=("", "model.", "transformer."),
    norm="rms",
    keys={**_GROUPED, "attention_bias": ("attention_bias", False), "mlp_bias": ("mlp_bias", False)},
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=_gated(("attention_bias",), ("attention_bias",), ("mlp_bias",)),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

QWEN2 = Table(
    model_type="qwen2",
    prefixes=("", "model.", "transformer."),
    norm="rms",
    keys={
        **_GROUPED,
        "windowed": ("use_sliding_window", False),
        "window": ("sliding_window", 4096),
        "window_from_layer": ("max_window_layers", 28),
    },
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=_gated(ALWAYS, NEVER, NEVER),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

BERT = Table(
    model_type="bert",
    prefixes=("", "bert."),
    causal="decoder",
    norm_place="post",
    language_heads=("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
    renamed_norms=True,
    keys={
        **_SIZES,
        "eps": ("layer_norm_eps", 1e-12),
        "tied": ("tie_word_embeddings", True),
        "decoder": ("is_decoder", False),
    },
    ties={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    body=(
        Module("embeddings.word_embeddings", Role.EMBEDDING, "table"),
        Module("embeddings.position_embeddings", Role.POSITION, "table"),
        Module("embeddings.token_type_embeddings", Role.SEGMENT, "table"),
        Module("embeddings.LayerNorm", Role.EMBEDDING_NORM, "norm"),
        Module("embeddings.position_ids", Role.BUFFER, "bare", MAYBE),
        Module("encoder.layer.{layer}.attention.self.query", Role.QUERY),
        Module("encoder.layer.{layer}.attention.self.key", Role.KEY),
        Module("encoder.layer.{layer}.attention.self.value", Role.VALUE),
        Module("encoder.layer.{layer}.attention.output.dense", Role.OUTPUT),
        Module("encoder.layer.{layer}.attention.output.LayerNorm", Role.ATTENTION_NORM, "norm"),
        Module("encoder.layer.{layer}.intermediate.dense", Role.MLP_IN),
        Module("encoder.layer.{layer}.output.dense", Role.MLP_OUT),
        Module("encoder.layer.{layer}.output.LayerNorm", Role.MLP_NORM, "norm"),
        Module("pooler.dense", Role.POOLER, when=MAYBE),
    ),
    heads=(
        _head("cls.predictions.bias", Role.UNEMBEDDING, "bare"),
        Module("cls.predictions.transform.dense", Role.HEAD_TRANSFORM, when=MAYBE),
        Module("cls.predictions.transform.LayerNorm", Role.HEAD_NORM, "norm", when=MAYBE),
        _head("cls.predictions.decoder", Role.UNEMBEDDING),
        _head("cls.seq_relationship"),
        *_CLASSIFIERS,
    ),
)

VIT = Table(
    model_type="vit",
    prefixes=("", "vit."),
    causal=False,
    language_heads=(),
    keys={
        **_SIZES,
        "eps": ("layer_norm_eps", 1e-12),
        "qkv_bias": ("qkv_bias", True),
    },
    body=(
        Module("embeddings.cls_token", Role.MARKER, "bare"),
        Module("embeddings.mask_token", Role.MARKER, "bare", MAYBE),
        Module("embeddings.position_embeddings", Role.POSITION, "bare"),
        Module("embeddings.patch_embeddings.projection", Role.PATCH),
        Module("encoder.layer.{layer}.layernorm_before", Role.ATTENTION_NORM, "norm"),
        Module("encoder.layer.{layer}.attention.attention.query", Role.QUERY, bias=("qkv_bias",)),
        Module("encoder.layer.{layer}.attention.attention.key", Role.KEY, bias=("qkv_bias",)),
        Module("encoder.layer.{layer}.attention.attention.value", Role.VALUE, bias=("qkv_bias",)),
        Module("encoder.layer.{layer}.attention.output.dense", Role.OUTPUT),
        Module("encoder.layer.{layer}.layernorm_after", Role.MLP_NORM, "norm"),
        Module("encoder.layer.{layer}.intermediate.dense", Role.MLP_IN),
        Module("encoder.layer.{layer}.output.dense", Role.MLP_OUT),
        Module("layernorm", Role.FINAL_NORM, "norm"),
        Module("pooler.dense", Role.POOLER, when=MAYBE),
    ),
    heads=(*_CLASSIFIERS, _head("decoder.0")),
)

TABLES: Mapping[str, Table] = {table.model_type: table for table in (GPT2, GPT_NEOX, OPT, LLAMA, QWEN2, BERT, VIT)}
"""The known families by the `model_type` of their configuration."""

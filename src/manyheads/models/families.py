"""Model families as data: modules, the roles and layouts of their tensors, and the keys of their configurations.

A module of sort "linear" holds `<path>.weight` and perhaps `<path>.bias`; which of them have to be there follows from
the configuration, so that a checkpoint is explained completely or refused.

Source of names, keys and defaults: the model classes of Hugging Face transformers (4.57 to 5.23), as they are saved.
"""

from collections.abc import Mapping

from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Condition, Family, Key, Module, Role


def _head(path: str, role: Role = Role.CLASSIFIER, sort: str = "linear") -> Module:
    return Module(path, role, sort, when=MAYBE, bias=MAYBE)


_CLASSIFIERS = (_head("score"), _head("classifier"), _head("qa_outputs"))


def _sizes(width: int, heads: int, layers: int) -> dict[str, Key]:
    return {
        "width": Key("hidden_size", width),
        "heads": Key("num_attention_heads", heads),
        "layers": Key("num_hidden_layers", layers),
    }


def _mlp(hidden: int, vocabulary: int, activation: str = "gelu") -> dict[str, Key]:
    return {
        "mlp_hidden": Key("intermediate_size", hidden),
        "vocabulary": Key("vocab_size", vocabulary),
        "activation": Key("hidden_act", activation),
    }


GPT2 = Family(
    model_type="gpt2",
    prefixes=("", "transformer."),
    layout="in,out",
    fused="parts",
    language_heads=("LMHeadModel", "DoubleHeadsModel"),
    keys={
        "width": Key("n_embd", 768),
        "heads": Key("n_head", 12),
        "layers": Key("n_layer", 12),
        "eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "scaled": Key("scale_attn_weights", True),
        "scaled_by_layer": Key("scale_attn_by_inverse_layer_idx", False),
    },
    counted={
        "mlp_hidden": Key("n_inner", None),
        "vocabulary": Key("vocab_size", 50257),
        "activation": Key("activation_function", "gelu_new"),
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

GPT_NEOX = Family(
    model_type="gpt_neox",
    prefixes=("", "gpt_neox."),
    fused="heads",
    keys={
        **_sizes(6144, 64, 44),
        "eps": Key("layer_norm_eps", 1e-5),
        "tied": Key("tie_word_embeddings", False),
        "parallel": Key("use_parallel_residual", True),
        "attention_bias": Key("attention_bias", True),
        "rotary_theta": Key("rotary_emb_base", 10000.0),
        "rotary_fraction": Key("rotary_pct", 0.25),
    },
    counted=_mlp(24576, 50432),
    ties={"embed_out.weight": "embed_in.weight"},
    renamed=((r"^lm_head\.", "embed_out."),),
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
OPT = Family(
    model_type="opt",
    prefixes=("", "decoder.", "model.decoder."),
    norm_place="norm_before",
    position_offset=2,
    keys={
        **_sizes(768, 12, 12),
        "tied": Key("tie_word_embeddings", True),
        "norm_before": Key("do_layer_norm_before", True),
        "no_final_norm": Key("_remove_final_layer_norm", False),
        "enable_bias": Key("enable_bias", True),
        "layer_norm_elementwise_affine": Key("layer_norm_elementwise_affine", True),
        "eps": Key("", 1e-5),  # fixed in the model, not a key
    },
    counted={
        "mlp_hidden": Key("ffn_dim", 3072),
        "vocabulary": Key("vocab_size", 50272),
        "embedding_width": Key("word_embed_proj_dim", None),
        "activation": Key("activation_function", "relu"),
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
    """Return the body that LLaMA, Mistral and Qwen2 share; only the biases differ."""
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


def _grouped(width: int, heads: int, layers: int, key_value_heads: int | None) -> dict[str, Key]:
    """Return the keys that LLaMA, Mistral and Qwen2 share."""
    return {
        **_sizes(width, heads, layers),
        "key_value_heads": Key("num_key_value_heads", key_value_heads, null=None),
        "key_dim": Key("head_dim", None),
        "eps": Key("rms_norm_eps", 1e-6),
        "tied": Key("tie_word_embeddings", False),
        "rotary_theta": Key("rope_theta", 10000.0),
        "rotary_fraction": Key("partial_rotary_factor", 1.0),
    }


LLAMA = Family(
    model_type="llama",
    prefixes=("", "model.", "transformer."),
    norm="rms",
    keys={
        **_grouped(4096, 32, 32, None),
        "attention_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
    },
    counted=_mlp(11008, 32000, "silu"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=_gated(("attention_bias",), ("attention_bias",), ("mlp_bias",)),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

MISTRAL = Family(
    model_type="mistral",
    prefixes=("", "model.", "transformer."),
    norm="rms",
    keys={
        **_grouped(4096, 32, 32, 8),
        "windowed": Key("", True),
        "window": Key("sliding_window", 4096, null=0),
        "window_from_layer": Key("", 0),
    },
    counted=_mlp(14336, 32000, "silu"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=_gated(NEVER, NEVER, NEVER),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

QWEN2 = Family(
    model_type="qwen2",
    prefixes=("", "model.", "transformer."),
    norm="rms",
    keys={
        **_grouped(4096, 32, 32, 32),
        "windowed": Key("use_sliding_window", False),
        "window": Key("sliding_window", 4096, null=0),
        "window_from_layer": Key("max_window_layers", 28),
    },
    counted=_mlp(22016, 151936, "silu"),
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=_gated(ALWAYS, NEVER, NEVER),
    heads=(_head("lm_head", Role.UNEMBEDDING, "table"), *_CLASSIFIERS),
)

BERT = Family(
    model_type="bert",
    prefixes=("", "bert."),
    causal="decoder",
    norm_place="post",
    language_heads=("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
    renamed_norms=True,
    keys={
        **_sizes(768, 12, 12),
        "eps": Key("layer_norm_eps", 1e-12),
        "tied": Key("tie_word_embeddings", True),
        "decoder": Key("is_decoder", False),
    },
    counted=_mlp(3072, 30522),
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

VIT = Family(
    model_type="vit",
    prefixes=("", "vit."),
    causal=False,
    language_heads=(),
    renamed=(
        (r"layers\.(\d+)\.attention\.([qkv])_proj\.", r"layers.\1.attention.attention.\2."),
        (r"attention\.attention\.q\.", "attention.attention.query."),
        (r"attention\.attention\.k\.", "attention.attention.key."),
        (r"attention\.attention\.v\.", "attention.attention.value."),
        (r"attention\.o_proj\.", "attention.output.dense."),
        (r"mlp\.fc1\.", "intermediate.dense."),
        (r"mlp\.fc2\.", "output.dense."),
        (r"(^|\.)layers\.", r"\1encoder.layer."),
    ),
    keys={
        **_sizes(768, 12, 12),
        "eps": Key("layer_norm_eps", 1e-12),
        "qkv_bias": Key("qkv_bias", True),
    },
    counted={
        "mlp_hidden": Key("intermediate_size", 3072),
        "activation": Key("hidden_act", "gelu"),
        "image": Key("image_size", 224),
        "patch": Key("patch_size", 16),
        "channels": Key("num_channels", 3),
        "labels": Key("num_labels", 2),
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

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (GPT2, GPT_NEOX, OPT, LLAMA, MISTRAL, QWEN2, BERT, VIT)
}
"""The known families by the `model_type` of their configuration."""

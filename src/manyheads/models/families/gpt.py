"""GPT-2, GPT-NeoX, OPT and decoders from fairseq."""

from collections.abc import Mapping

from manyheads.models.families.common import CLASSIFIERS, LANGUAGE_HEAD, head, mlp, sizes
from manyheads.models.modules import MAYBE, NEVER, Family, Key, Module, Role

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
        "positions": Key("n_positions", 1024),
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
        head("lm_head", Role.UNEMBEDDING, "table"),
        head("multiple_choice_head.summary"),
        *CLASSIFIERS,
    ),
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    prefixes=("", "gpt_neox."),
    fused="heads",
    parallel="parallel",
    keys={
        **sizes(6144, 64, 44),
        "eps": Key("layer_norm_eps", 1e-5),
        "tied": Key("tie_word_embeddings", False),
        "parallel": Key("use_parallel_residual", True),
        "attention_bias": Key("attention_bias", True),
        "rotary_theta": Key("rotary_emb_base", 10000.0),
        "rotary_fraction": Key("rotary_pct", 0.25),
    },
    counted=mlp(24576, 50432),
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
    heads=(head("embed_out", Role.UNEMBEDDING, "table"), *CLASSIFIERS),
)

_OPT_AFFINE = ("layer_norm_elementwise_affine",)
_OPT_BIAS = ("enable_bias",)
OPT = Family(
    model_type="opt",
    prefixes=("", "decoder.", "model.decoder."),
    norm_place="norm_before",
    position_offset=2,
    keys={
        **sizes(768, 12, 12),
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
        "positions": Key("max_position_embeddings", 2048),
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
    heads=(head("lm_head", Role.UNEMBEDDING, "table"), *CLASSIFIERS),
)

_LAYER = "layers.{layer}."


def _fairseq(final: str) -> tuple[Module, ...]:
    """Return the blocks of decoders that come from fairseq, under pre-norm."""
    return (
        Module(_LAYER + "self_attn_layer_norm", Role.ATTENTION_NORM, "norm"),
        Module(_LAYER + "self_attn.q_proj", Role.QUERY),
        Module(_LAYER + "self_attn.k_proj", Role.KEY),
        Module(_LAYER + "self_attn.v_proj", Role.VALUE),
        Module(_LAYER + "self_attn.out_proj", Role.OUTPUT),
        Module(_LAYER + "final_layer_norm", Role.MLP_NORM, "norm"),
        Module(_LAYER + "fc1", Role.MLP_IN),
        Module(_LAYER + "fc2", Role.MLP_OUT),
        Module(final, Role.FINAL_NORM, "norm"),
    )


XGLM = Family(
    model_type="xglm",
    prefixes=("", "model."),
    root_width="scale_embedding",
    keys={
        "width": Key("d_model|hidden_size", 1024),
        "heads": Key("attention_heads|num_attention_heads", 16),
        "layers": Key("num_layers|num_hidden_layers", 24),
        "eps": Key("", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "scale_embedding": Key("scale_embedding", True),
    },
    counted={
        "mlp_hidden": Key("ffn_dim", 4096),
        "vocabulary": Key("vocab_size", 256008),
        "activation": Key("activation_function", "gelu"),
    },
    ties={"lm_head.weight": "embed_tokens.weight"},
    body=(Module("embed_tokens", Role.EMBEDDING, "table"), *_fairseq("layer_norm")),
    heads=(LANGUAGE_HEAD, *CLASSIFIERS),
)
BIOGPT = Family(
    model_type="biogpt",
    prefixes=("", "biogpt."),
    root_width="scale_embedding",
    position_offset=2,
    keys={
        **sizes(1024, 16, 24),
        "eps": Key("layer_norm_eps", 1e-12),
        "tied": Key("tie_word_embeddings", True),
        "scale_embedding": Key("scale_embedding", True),
    },
    counted=mlp(4096, 42384) | {"positions": Key("max_position_embeddings", 1024)},
    ties={"output_projection.weight": "embed_tokens.weight"},
    body=(
        Module("embed_tokens", Role.EMBEDDING, "table"),
        Module("embed_positions", Role.POSITION, "table"),
        *_fairseq("layer_norm"),
    ),
    heads=(head("output_projection", Role.UNEMBEDDING, "table"), *CLASSIFIERS),
)

GPT: Mapping[str, Family] = {family.model_type: family for family in (GPT2, GPT_NEOX, OPT, XGLM, BIOGPT)}

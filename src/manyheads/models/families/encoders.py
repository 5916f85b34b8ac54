"""Encoders of text: BERT, RoBERTa and those built alike, DistilBERT, ModernBERT."""

from collections.abc import Mapping
from dataclasses import replace

from manyheads.models.families.common import CLASSIFIERS, head, mlp, sizes
from manyheads.models.modules import ALWAYS, MAYBE, Family, Key, Module, Role


def _encoder_sizes(vocabulary: int, positions: int = 512, segments: int = 2) -> dict[str, Key]:
    return mlp(3072, vocabulary) | {
        "positions": Key("max_position_embeddings", positions),
        "segments": Key("type_vocab_size", segments),
    }


_BERT_BODY = (
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
)

BERT = Family(
    model_type="bert",
    prefixes=("", "bert."),
    causal="decoder",
    norm_place="post",
    language_heads=("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
    renamed_norms=True,
    keys={
        **sizes(768, 12, 12),
        "eps": Key("layer_norm_eps", 1e-12),
        "tied": Key("tie_word_embeddings", True),
        "decoder": Key("is_decoder", False),
    },
    counted=_encoder_sizes(30522),
    ties={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    body=_BERT_BODY,
    heads=(
        head("cls.predictions.bias", Role.UNEMBEDDING, "bare"),
        Module("cls.predictions.transform.dense", Role.HEAD_TRANSFORM, when=MAYBE),
        Module("cls.predictions.transform.LayerNorm", Role.HEAD_NORM, "norm", when=MAYBE),
        head("cls.predictions.decoder", Role.UNEMBEDDING),
        head("cls.seq_relationship"),
        *CLASSIFIERS,
    ),
)

_ROBERTA_HEADS = (
    head("lm_head.bias", Role.UNEMBEDDING, "bare"),
    Module("lm_head.dense", Role.HEAD_TRANSFORM, when=MAYBE),
    Module("lm_head.layer_norm", Role.HEAD_NORM, "norm", when=MAYBE),
    head("lm_head.decoder", Role.UNEMBEDDING),
    head("classifier.dense", Role.POOLER),
    head("classifier.out_proj"),
    *CLASSIFIERS,
)
_ROBERTA_TIES = {
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_ROBERTA = {
    # Positions are counted from the index of the padding token; the table holds what the configuration says.
    "roberta": (50265, "roberta."),
    "camembert": (30522, "roberta."),
    "xlm-roberta": (30522, "roberta."),
    "data2vec-text": (30522, "data2vec_text."),
}
ROBERTAS = tuple(
    replace(
        BERT,
        model_type=name,
        prefixes=("", prefix),
        language_heads=("ForMaskedLM", "ForCausalLM"),
        renamed_norms=False,
        counted=_encoder_sizes(vocabulary),
        ties=_ROBERTA_TIES,
        heads=_ROBERTA_HEADS,
    )
    for name, (vocabulary, prefix) in _ROBERTA.items()
)
_NARROW = {
    Role.POSITION: "positions,embedding_width",
    Role.SEGMENT: "segments,embedding_width",
    Role.EMBEDDING_NORM: "embedding_width",
}
ELECTRA = replace(
    BERT,
    model_type="electra",
    prefixes=("", "electra."),
    language_heads=("ForMaskedLM", "ForCausalLM"),
    renamed_norms=False,
    keys={**BERT.keys, **sizes(256, 4, 12)},
    counted=_encoder_sizes(30522)
    | {"mlp_hidden": Key("intermediate_size", 1024), "embedding_width": Key("embedding_size", 128)},
    ties={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    body=(
        *(
            replace(module, sides=_NARROW.get(module.role, ""))
            for module in _BERT_BODY
            if module.role is not Role.POOLER
        ),
        Module("embeddings_project", Role.EMBEDDING_PROJECTION, when=MAYBE),
    ),
    heads=(
        Module("generator_predictions.dense", Role.HEAD_TRANSFORM, when=MAYBE, sides="embedding_width,width"),
        Module("generator_predictions.LayerNorm", Role.HEAD_NORM, "norm", when=MAYBE, sides="embedding_width"),
        head("generator_lm_head", Role.UNEMBEDDING, bias=ALWAYS),
        head("discriminator_predictions.dense", Role.POOLER),
        head("discriminator_predictions.dense_prediction"),
        head("classifier.dense", Role.POOLER),
        head("classifier.out_proj"),
        *CLASSIFIERS,
    ),
)


def _prelayer(module: Module) -> Module:
    """Return a module of BERT under the names of the encoder with norms before its branches."""
    moved = {
        Role.ATTENTION_NORM: "encoder.layer.{layer}.attention.LayerNorm",
        Role.MLP_NORM: "encoder.layer.{layer}.intermediate.LayerNorm",
    }
    return replace(module, path=moved.get(module.role, module.path))


ROBERTA_PRE = replace(
    ROBERTAS[0],
    model_type="roberta-prelayernorm",
    prefixes=("", "roberta_prelayernorm."),
    norm_place="pre",
    body=(*map(_prelayer, _BERT_BODY), Module("LayerNorm", Role.FINAL_NORM, "norm")),
)

_BLOCK = "transformer.layer.{layer}."
DISTILBERT = Family(
    model_type="distilbert",
    prefixes=("", "distilbert."),
    causal=False,
    norm_place="post",
    language_heads=("ForMaskedLM",),
    keys={
        "width": Key("dim|hidden_size", 768),
        "heads": Key("n_heads|num_attention_heads", 12),
        "layers": Key("n_layers|num_hidden_layers", 6),
        "eps": Key("", 1e-12),
        "tied": Key("tie_word_embeddings", True),
    },
    counted={
        "mlp_hidden": Key("hidden_dim", 3072),
        "vocabulary": Key("vocab_size", 30522),
        "activation": Key("activation", "gelu"),
        "positions": Key("max_position_embeddings", 512),
    },
    ties={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    body=(
        Module("embeddings.word_embeddings", Role.EMBEDDING, "table"),
        Module("embeddings.position_embeddings", Role.POSITION, "table"),
        Module("embeddings.LayerNorm", Role.EMBEDDING_NORM, "norm"),
        Module(_BLOCK + "attention.q_lin", Role.QUERY),
        Module(_BLOCK + "attention.k_lin", Role.KEY),
        Module(_BLOCK + "attention.v_lin", Role.VALUE),
        Module(_BLOCK + "attention.out_lin", Role.OUTPUT),
        Module(_BLOCK + "sa_layer_norm", Role.ATTENTION_NORM, "norm"),
        Module(_BLOCK + "ffn.lin1", Role.MLP_IN),
        Module(_BLOCK + "ffn.lin2", Role.MLP_OUT),
        Module(_BLOCK + "output_layer_norm", Role.MLP_NORM, "norm"),
    ),
    heads=(
        Module("vocab_transform", Role.HEAD_TRANSFORM, when=MAYBE),
        Module("vocab_layer_norm", Role.HEAD_NORM, "norm", when=MAYBE),
        head("vocab_projector", Role.UNEMBEDDING, bias=ALWAYS),
        head("pre_classifier", Role.POOLER),
        *CLASSIFIERS,
    ),
)
MPNET = Family(
    model_type="mpnet",
    prefixes=("", "mpnet."),
    causal=False,
    norm_place="post",
    language_heads=("ForMaskedLM",),
    keys={
        **sizes(768, 12, 12),
        "eps": Key("layer_norm_eps", 1e-12),
        "tied": Key("tie_word_embeddings", True),
    },
    counted=mlp(3072, 30527)
    | {
        "positions": Key("max_position_embeddings", 512),
        "buckets": Key("relative_attention_num_buckets", 32),
    },
    ties=_ROBERTA_TIES,
    body=(
        Module("embeddings.word_embeddings", Role.EMBEDDING, "table"),
        Module("embeddings.position_embeddings", Role.POSITION, "table"),
        Module("embeddings.LayerNorm", Role.EMBEDDING_NORM, "norm"),
        Module("encoder.layer.{layer}.attention.attn.q", Role.QUERY),
        Module("encoder.layer.{layer}.attention.attn.k", Role.KEY),
        Module("encoder.layer.{layer}.attention.attn.v", Role.VALUE),
        Module("encoder.layer.{layer}.attention.attn.o", Role.OUTPUT),
        Module("encoder.layer.{layer}.attention.LayerNorm", Role.ATTENTION_NORM, "norm"),
        Module("encoder.layer.{layer}.intermediate.dense", Role.MLP_IN),
        Module("encoder.layer.{layer}.output.dense", Role.MLP_OUT),
        Module("encoder.layer.{layer}.output.LayerNorm", Role.MLP_NORM, "norm"),
        Module("encoder.relative_attention_bias", Role.RELATIVE_POSITION, "table"),
        Module("pooler.dense", Role.POOLER, when=MAYBE),
    ),
    heads=_ROBERTA_HEADS,
)

_NORM_BIAS = ("norm_bias",)
_BIASED = ("attention_bias",)
MODERNBERT = Family(
    model_type="modernbert",
    plain_start=False,
    beyond="windows of both sides, and rotary positions by layer",
    prefixes=("", "model."),
    causal=False,
    fused="parts",
    language_heads=("ForMaskedLM",),
    keys={
        **sizes(768, 12, 22),
        "eps": Key("norm_eps", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "norm_bias": Key("norm_bias", False),
        "attention_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
        "decoder_bias": Key("decoder_bias", True),
        "classifier_bias": Key("classifier_bias", False),
        "windowed": Key("", True),
        "window": Key("local_attention", 128, null=0),
        "window_period": Key("", -3),
        "rotary_theta": Key("", 10000.0),
        "rotary_fraction": Key("", 1.0),
    },
    counted=mlp(1152, 50368),
    ties={"decoder.weight": "embeddings.tok_embeddings.weight"},
    body=(
        Module("embeddings.tok_embeddings", Role.EMBEDDING, "table"),
        Module("embeddings.norm", Role.EMBEDDING_NORM, "norm", bias=_NORM_BIAS),
        Module("layers.{layer}.attn_norm", Role.ATTENTION_NORM, "norm", bias=_NORM_BIAS, only="later"),
        Module("layers.{layer}.attn.Wqkv", Role.QUERY_KEY_VALUE, bias=_BIASED),
        Module("layers.{layer}.attn.Wo", Role.OUTPUT, bias=_BIASED),
        Module("layers.{layer}.mlp_norm", Role.MLP_NORM, "norm", bias=_NORM_BIAS),
        Module("layers.{layer}.mlp.Wi", Role.MLP_GATE_IN, bias=("mlp_bias",)),
        Module("layers.{layer}.mlp.Wo", Role.MLP_OUT, bias=("mlp_bias",)),
        Module("final_norm", Role.FINAL_NORM, "norm", bias=_NORM_BIAS),
    ),
    heads=(
        Module("head.dense", Role.HEAD_TRANSFORM, when=MAYBE, bias=("classifier_bias",)),
        Module("head.norm", Role.HEAD_NORM, "norm", when=MAYBE, bias=_NORM_BIAS),
        head("decoder", Role.UNEMBEDDING, bias=("decoder_bias",)),
        *CLASSIFIERS,
    ),
)

ENCODERS: Mapping[str, Family] = {
    family.model_type: family for family in (BERT, *ROBERTAS, ELECTRA, ROBERTA_PRE, DISTILBERT, MPNET, MODERNBERT)
}

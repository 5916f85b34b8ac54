"""Encoders of text: BERT, RoBERTa and those built alike, DistilBERT, ModernBERT."""

from dataclasses import replace
from typing import Any

from manyheads.models.modules import CLASSIFIERS, MAYBE, Family, Module, Role, head, keys, modules

BERT = Family(
    "bert",
    ("", "bert."),
    keys(width=768, heads=12, layers=12, eps=1e-12, tied=True, decoder=("is_decoder", False))
    | keys(mlp_hidden=3072, vocabulary=30522, activation="gelu", positions=512, segments=2),
    (
        *modules("""
            embeddings. word_embeddings=embedding position_embeddings=position token_type_embeddings=segment
            embeddings. LayerNorm=embedding_norm position_ids=buffer
            encoder.layer.{layer}.attention. self.query=query self.key=key self.value=value output.dense=output
            encoder.layer.{layer}. attention.output.LayerNorm=attention_norm intermediate.dense=mlp_in
            encoder.layer.{layer}. output.dense=mlp_out output.LayerNorm=mlp_norm
        """),
        *modules("pooler.dense=pooler", when=MAYBE),
    ),
    (
        Module("cls.predictions.bias", Role.UNEMBEDDING, MAYBE, MAYBE, "bare"),
        *head("cls.predictions. transform.dense=head_transform:always transform.LayerNorm=head_norm:always"),
        *head("cls. predictions.decoder=unembedding seq_relationship=classifier"),
        *CLASSIFIERS,
    ),
    causal="decoder",
    norm_place="post",
    language_heads=("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
    renamed_norms=True,
)

# Positions are counted from the index of the padding token; the table holds what the configuration says.
ROBERTA = BERT.derive(
    "roberta",
    keys(vocabulary=50265),
    prefixes=("", "roberta."),
    language_heads=("ForMaskedLM", "ForCausalLM"),
    renamed_norms=False,
    heads=(
        Module("lm_head.bias", Role.UNEMBEDDING, MAYBE, MAYBE, "bare"),
        *head("lm_head. dense=head_transform:always layer_norm=head_norm:always decoder=unembedding"),
        *head("classifier. dense=pooler out_proj=classifier"),
        *CLASSIFIERS,
    ),
)
CAMEMBERT = ROBERTA.derive("camembert", keys(vocabulary=30522))
XLM_ROBERTA = ROBERTA.derive("xlm-roberta", keys(vocabulary=30522))
DATA2VEC = ROBERTA.derive("data2vec-text", keys(vocabulary=30522), prefixes=("", "data2vec_text."))

_NARROW = {
    Role.POSITION: "positions,embedding_width",
    Role.SEGMENT: "segments,embedding_width",
    Role.EMBEDDING_NORM: "embedding_width",
}
ELECTRA = BERT.derive(
    "electra",
    keys(width=256, heads=4, mlp_hidden=1024, embedding_width=("embedding_size", 128)),
    prefixes=("", "electra."),
    language_heads=("ForMaskedLM", "ForCausalLM"),
    renamed_norms=False,
    body=(
        *(replace(module, sides=_NARROW.get(module.role, module.sides)) for module in BERT.body[:-1]),
        *modules("embeddings_project=embedding_projection", when=MAYBE),
    ),
    heads=(
        Module("generator_predictions.dense", Role.HEAD_TRANSFORM, when=MAYBE, sides="embedding_width,width"),
        Module("generator_predictions.LayerNorm", Role.HEAD_NORM, when=MAYBE, sides="embedding_width"),
        *head("generator_lm_head=unembedding:always"),
        *head("discriminator_predictions. dense=pooler dense_prediction=classifier"),
        *head("classifier. dense=pooler out_proj=classifier"),
        *CLASSIFIERS,
    ),
)

_MOVED = {
    Role.ATTENTION_NORM: "encoder.layer.{layer}.attention.LayerNorm",
    Role.MLP_NORM: "encoder.layer.{layer}.intermediate.LayerNorm",
}
ROBERTA_PRE = ROBERTA.derive(
    "roberta-prelayernorm",
    prefixes=("", "roberta_prelayernorm."),
    norm_place="pre",
    body=(
        *(replace(module, path=_MOVED.get(module.role, module.path)) for module in BERT.body),
        *modules("LayerNorm=final_norm"),
    ),
)

_POST: dict[str, Any] = {"causal": False, "norm_place": "post", "language_heads": ("ForMaskedLM",)}
DISTILBERT = Family(
    "distilbert",
    ("", "distilbert."),
    keys(width=("dim|hidden_size", 768), heads=("n_heads|num_attention_heads", 12))
    | keys(layers=("n_layers|num_hidden_layers", 6), eps=("", 1e-12), tied=True, mlp_hidden=("hidden_dim", 3072))
    | keys(vocabulary=30522, activation=("activation", "gelu"), positions=512),
    modules("""
        embeddings. word_embeddings=embedding position_embeddings=position LayerNorm=embedding_norm
        transformer.layer.{layer}.attention. q_lin=query k_lin=key v_lin=value out_lin=output
        transformer.layer.{layer}. sa_layer_norm=attention_norm ffn.lin1=mlp_in ffn.lin2=mlp_out
        transformer.layer.{layer}. output_layer_norm=mlp_norm
    """),
    (
        *head("vocab_transform=head_transform:always vocab_layer_norm=head_norm:always"),
        *head("vocab_projector=unembedding:always pre_classifier=pooler"),
        *CLASSIFIERS,
    ),
    **_POST,
)
MPNET = Family(
    "mpnet",
    ("", "mpnet."),
    keys(width=768, heads=12, layers=12, eps=1e-12, tied=True, mlp_hidden=3072, vocabulary=30527, activation="gelu")
    | keys(positions=512, buckets=("relative_attention_num_buckets", 32)),
    (
        *modules("""
            embeddings. word_embeddings=embedding position_embeddings=position LayerNorm=embedding_norm
            encoder.layer.{layer}.attention. attn.q=query attn.k=key attn.v=value attn.o=output LayerNorm=attention_norm
            encoder.layer.{layer}. intermediate.dense=mlp_in output.dense=mlp_out output.LayerNorm=mlp_norm
            encoder.relative_attention_bias=relative_position
        """),
        *modules("pooler.dense=pooler", when=MAYBE),
    ),
    ROBERTA.heads,
    **_POST,
)

MODERNBERT = Family(
    "modernbert",
    ("", "model."),
    keys(width=768, heads=12, layers=22, eps=("norm_eps", 1e-5), tied=True, norm_bias=False, attention_bias=False)
    | keys(mlp_bias=False, decoder_bias=True, classifier_bias=False, windowed=("", True))
    | keys(window=("local_attention", 128, 0), window_period=("", -3), rotary_theta=("", 10000.0))
    | keys(rotary_fraction=("", 1.0), mlp_hidden=1152, vocabulary=50368, activation="gelu"),
    (
        *modules("embeddings. tok_embeddings=embedding norm=embedding_norm:norm_bias"),
        *modules("layers.{layer}. attn_norm=attention_norm", "norm_bias", only="later"),
        *modules("""
            layers.{layer}.attn. Wqkv=query_key_value:attention_bias Wo=output:attention_bias
            layers.{layer}. mlp_norm=mlp_norm:norm_bias mlp.Wi=mlp_gate_in:mlp_bias mlp.Wo=mlp_out:mlp_bias
            final_norm=final_norm:norm_bias
        """),
    ),
    (
        *head("head. dense=head_transform:classifier_bias norm=head_norm:norm_bias"),
        *head("decoder=unembedding:decoder_bias"),
        *CLASSIFIERS,
    ),
    causal=False,
    fused="parts",
    language_heads=("ForMaskedLM",),
    plain_start=False,
    beyond="windows of both sides, and rotary positions by layer",
)

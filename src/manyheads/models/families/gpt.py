"""GPT-2, GPT-NeoX, OPT and decoders from fairseq."""

from manyheads.models.modules import CLASSIFIERS, NEVER, Family, Module, Role, head, keys, lookup_head, modules

GPT2 = Family(
    "gpt2",
    ("", "transformer."),
    keys(width=("n_embd", 768), heads=("n_head", 12), layers=("n_layer", 12), eps=("layer_norm_epsilon", 1e-5))
    | keys(tied=True, scaled=("scale_attn_weights", True), scaled_by_layer=("scale_attn_by_inverse_layer_idx", False))
    | keys(mlp_hidden=("n_inner", None), vocabulary=50257, activation=("activation_function", "gelu_new"))
    | keys(positions=("n_positions", 1024)),
    modules("""
        wte=embedding wpe=position
        h.{layer}. ln_1=attention_norm attn.c_attn=query_key_value attn.c_proj=output
        h.{layer}. attn.bias=buffer attn.masked_bias=buffer ln_2=mlp_norm mlp.c_fc=mlp_in mlp.c_proj=mlp_out
        ln_f=final_norm
    """),
    (lookup_head(), *head("multiple_choice_head.summary=classifier"), *CLASSIFIERS),
    layout="in,out",
    fused="parts",
    language_heads=("LMHeadModel", "DoubleHeadsModel"),
)

GPT_NEOX = Family(
    "gpt_neox",
    ("", "gpt_neox."),
    keys(width=6144, heads=64, layers=44, eps=1e-5, tied=False, parallel=("use_parallel_residual", True))
    | keys(attention_bias=True, rotary_theta=("rotary_emb_base", 10000.0), rotary_fraction=("rotary_pct", 0.25))
    | keys(mlp_hidden=24576, vocabulary=50432, activation="gelu"),
    modules("""
        embed_in=embedding
        layers.{layer}. input_layernorm=attention_norm
        layers.{layer}.attention. query_key_value=query_key_value:attention_bias dense=output:attention_bias
        layers.{layer}.attention. bias=buffer masked_bias=buffer rotary_emb.inv_freq=buffer
        layers.{layer}. post_attention_layernorm=mlp_norm mlp.dense_h_to_4h=mlp_in mlp.dense_4h_to_h=mlp_out
        final_layer_norm=final_norm
    """),
    (lookup_head("embed_out"), *CLASSIFIERS),
    fused="heads",
    parallel="parallel",
    renamed=((r"^lm_head\.", "embed_out."),),
)

_AFFINE = "layer_norm_elementwise_affine"
_LAST = f"norm_before !no_final_norm {_AFFINE}"
OPT = Family(
    "opt",
    ("", "decoder.", "model.decoder."),
    keys(width=768, heads=12, layers=12, tied=True, norm_before=("do_layer_norm_before", True))
    | keys(no_final_norm=("_remove_final_layer_norm", False), enable_bias=True, layer_norm_elementwise_affine=True)
    | keys(eps=("", 1e-5))  # fixed in the model, not a key
    | keys(mlp_hidden=("ffn_dim", 3072), vocabulary=50272, embedding_width=("word_embed_proj_dim", None))
    | keys(activation=("activation_function", "relu"), positions=2048),
    (
        *modules("embed_tokens=embedding embed_positions=position"),
        # Only where the embedding is narrower than the residual stream (OPT-350M).
        *modules("project_in=embedding_projection project_out=unembedding_projection", NEVER, when="maybe"),
        Module("layers.{layer}.self_attn_layer_norm", Role.ATTENTION_NORM, _AFFINE, _AFFINE),
        *modules("layers.{layer}.self_attn. q_proj=query k_proj=key v_proj=value out_proj=output", "enable_bias"),
        Module("layers.{layer}.final_layer_norm", Role.MLP_NORM, _AFFINE, _AFFINE),
        *modules("layers.{layer}. fc1=mlp_in fc2=mlp_out", "enable_bias"),
        Module("final_layer_norm", Role.FINAL_NORM, _LAST, _LAST),
    ),
    norm_place="norm_before",
    position_offset=2,
)

_FAIRSEQ = modules("""
    layers.{layer}. self_attn_layer_norm=attention_norm
    layers.{layer}.self_attn. q_proj=query k_proj=key v_proj=value out_proj=output
    layers.{layer}. final_layer_norm=mlp_norm fc1=mlp_in fc2=mlp_out
    layer_norm=final_norm
""")
XGLM = Family(
    "xglm",
    ("", "model."),
    keys(width=("d_model|hidden_size", 1024), heads=("attention_heads|num_attention_heads", 16))
    | keys(layers=("num_layers|num_hidden_layers", 24), eps=("", 1e-5), tied=True, scale_embedding=True)
    | keys(mlp_hidden=("ffn_dim", 4096), vocabulary=256008, activation=("activation_function", "gelu")),
    (*modules("embed_tokens=embedding"), *_FAIRSEQ),
    root_width="scale_embedding",
)
BIOGPT = Family(
    "biogpt",
    ("", "biogpt."),
    keys(width=1024, heads=16, layers=24, eps=1e-12, tied=True, scale_embedding=True)
    | keys(mlp_hidden=4096, vocabulary=42384, activation="gelu", positions=1024),
    (*modules("embed_tokens=embedding embed_positions=position"), *_FAIRSEQ),
    (lookup_head("output_projection"), *CLASSIFIERS),
    root_width="scale_embedding",
    position_offset=2,
)

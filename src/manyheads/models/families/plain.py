"""Decoders whose MLP has no gate: GPT-2, GPT-NeoX, OPT, decoders from fairseq, and GPT-J to Starcoder 2."""

from manyheads.models.modules import CLASSIFIERS, NEVER, Family, Key, Module, Role, head, keys, lookup_head, modules

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

TABULATED = "rotary positions pair neighbouring components, by a table in single precision"
SLOPES = "its logits fall with the distance (ALiBi)"


def _gpt(width: int, heads: int, layers: int, vocabulary: int, activation: str = "gelu_new", tied: bool = True,
         named: bool = True) -> dict[str, Key]:  # fmt: skip
    """Return the keys of families named after GPT-2; `named` if width and activation of the MLP have keys."""
    hidden, function = ("n_inner", "activation_function") if named else ("", "")
    return (
        keys(width=("n_embd|hidden_size", width), heads=("n_head|num_attention_heads", heads))
        | keys(layers=("n_layer|num_hidden_layers", layers), eps=("layer_norm_epsilon", 1e-5), tied=tied)
        | keys(mlp_hidden=(hidden, None), vocabulary=vocabulary, activation=(function, activation))
    )


_ROTARY_BLOCKS = """
    wte=embedding
    h.{{layer}}. ln_1=attention_norm
    h.{{layer}}.attn. {}
    h.{{layer}}.attn. bias=buffer masked_bias=buffer
    h.{{layer}}.mlp. fc_in=mlp_in fc_out=mlp_out
    ln_f=final_norm
"""
GPTJ = Family(
    "gptj",
    ("", "transformer."),
    _gpt(4096, 16, 28, 50400, tied=False) | keys(rotary_theta=("", 10000.0), rotary_dims=("rotary_dim", 64)),
    modules(_ROTARY_BLOCKS.format("q_proj=query:never k_proj=key:never v_proj=value:never out_proj=output:never")),
    (*head("lm_head=unembedding:always"), *CLASSIFIERS),
    parallel=True,
    beyond=TABULATED,
)
CODEGEN = GPTJ.derive(
    "codegen",
    fused="quarters",
    body=modules(_ROTARY_BLOCKS.format("qkv_proj=query_key_value:never out_proj=output:never")),
)

GPT_NEO = Family(
    "gpt_neo",
    ("", "transformer."),
    keys(width=2048, heads=("num_heads", 16), layers=("num_layers", 24), eps=("layer_norm_epsilon", 1e-5), tied=True)
    | keys(scaled=("", False), windowed=("", True), window=("window_size", 256), window_period=("", -2))
    | keys(mlp_hidden=None, vocabulary=50257, activation=("activation_function", "gelu_new"), positions=2048),
    modules("""
        wte=embedding wpe=position
        h.{layer}. ln_1=attention_norm
        h.{layer}.attn.attention. q_proj=query:never k_proj=key:never v_proj=value:never out_proj=output
        h.{layer}.attn.attention. bias=buffer masked_bias=buffer
        h.{layer}. ln_2=mlp_norm mlp.c_fc=mlp_in mlp.c_proj=mlp_out
        ln_f=final_norm
    """),
    fixed_scale=True,
)

GPT_BIGCODE = Family(
    "gpt_bigcode",
    ("", "transformer."),
    _gpt(768, 12, 12, 50257, "gelu_pytorch_tanh")
    | keys(scaled=("scale_attn_weights", True), multi_query=True, positions=("n_positions", 1024)),
    GPT2.body,
    fused="parts",
    refused={"multi_query": (False, "queries, keys and values of all heads are interleaved without multi_query")},
)

OPENAI_GPT = Family(
    "openai-gpt",
    ("", "transformer."),
    _gpt(768, 12, 12, 40478, named=False) | keys(positions=("n_positions", 512)),
    modules("""
        tokens_embed=embedding positions_embed=position
        h.{layer}. attn.c_attn=query_key_value attn.c_proj=output attn.bias=buffer ln_1=attention_norm
        h.{layer}. mlp.c_fc=mlp_in mlp.c_proj=mlp_out ln_2=mlp_norm
    """),
    GPT2.heads,
    layout="in,out",
    fused="parts",
    norm_place="post",
    language_heads=GPT2.language_heads,
)

BLOOM = Family(
    "bloom",
    ("", "transformer."),
    _gpt(64, 8, 2, 250880, "gelu_pytorch_tanh", named=False) | keys(width=("hidden_size|n_embed", 64)),
    modules("""
        word_embeddings=embedding word_embeddings_layernorm=embedding_norm
        h.{layer}. input_layernorm=attention_norm
        h.{layer}.self_attention. query_key_value=query_key_value dense=output
        h.{layer}.mlp. dense_h_to_4h=mlp_in dense_4h_to_h=mlp_out
        ln_f=final_norm
        h.{layer}. post_attention_layernorm=mlp_norm
    """),
    fused="heads",
    beyond=SLOPES,
)

_ONE, _SECOND = "!two_norms", "!parallel !two_norms"
FALCON = Family(
    "falcon",
    ("", "transformer."),
    keys(width=4544, heads=("num_attention_heads|n_head", 71), layers=("num_hidden_layers|n_layer", 32))
    | keys(eps=("layer_norm_epsilon", 1e-5), tied=True, grouped=("new_decoder_architecture", False), multi_query=True)
    | keys(key_value_heads=("num_kv_heads|n_head_kv", None, None), parallel=("parallel_attn", True))
    | keys(two_norms=("new_decoder_architecture", False), falcon_bias=("bias", False), alibi=False)
    | keys(rotary_theta=10000.0, rotary_fraction=("", 1.0))
    | keys(mlp_hidden=("ffn_hidden_size", None), vocabulary=65024, activation=("activation", "gelu")),
    (
        *modules("word_embeddings=embedding"),
        *modules("h.{layer}. ln_attn=attention_norm ln_mlp=mlp_norm", "two_norms", when="two_norms"),
        Module("h.{layer}.post_attention_layernorm", Role.MLP_NORM, _SECOND, _SECOND),
        Module("h.{layer}.input_layernorm", Role.ATTENTION_NORM, _ONE, _ONE),
        *modules("h.{layer}.self_attention. query_key_value=query_key_value dense=output", "falcon_bias"),
        *modules("h.{layer}.mlp. dense_h_to_4h=mlp_in dense_4h_to_h=mlp_out", "falcon_bias"),
        *modules("ln_f=final_norm"),
    ),
    fused="heads",
    parallel="parallel",
    refused={"num_ln_in_parallel_attn": (1, "one norm before both branches of grouped heads")},
)

MPT = Family(
    "mpt",
    ("", "transformer."),
    keys(width=("d_model", 2048), heads=("n_heads", 16), layers=("n_layers", 24), eps=("layer_norm_epsilon", 1e-5))
    | keys(tied=True, mpt_bias=("", False))
    # transformers builds four times the width, whatever expansion_ratio says
    | keys(mlp_hidden=("", None), vocabulary=50368, activation=("", "gelu")),
    (
        *modules("wte=embedding"),
        *modules("blocks.{layer}. norm_1=attention_norm attn.Wqkv=query_key_value attn.out_proj=output", "mpt_bias"),
        *modules("blocks.{layer}. norm_2=mlp_norm ffn.up_proj=mlp_in ffn.down_proj=mlp_out", "mpt_bias"),
        *modules("norm_f=final_norm", "mpt_bias"),
    ),
    fused="parts",
    beyond=SLOPES,
)

PHI = Family(
    "phi",
    ("", "model."),
    keys(width=2048, heads=32, layers=24, key_value_heads=("num_key_value_heads", None, None), eps=1e-5, tied=False)
    | keys(rotary_theta=10000.0, rotary_fraction=0.5, mlp_hidden=8192, vocabulary=51200, activation="gelu_new"),
    modules("""
        embed_tokens=embedding
        layers.{layer}. input_layernorm=attention_norm
        layers.{layer}.self_attn. q_proj=query k_proj=key v_proj=value dense=output
        layers.{layer}.mlp. fc1=mlp_in fc2=mlp_out
        final_layernorm=final_norm
    """),
    (*head("lm_head=unembedding:always"), *CLASSIFIERS),
    parallel=True,
    refused={"qk_layernorm": (True, "norms of queries and keys with biases have no role")},
)

STARCODER2 = Family(
    "starcoder2",
    ("", "model."),
    keys(width=3072, heads=24, layers=30, key_value_heads=("num_key_value_heads", 2), eps=("norm_epsilon", 1e-5))
    | keys(tied=True, use_bias=True, rotary_theta=10000.0, rotary_fraction=("", 1.0))
    | keys(windowed=("", True), window=("sliding_window", None, 0), window_from_layer=("", 0))
    | keys(mlp_hidden=12288, vocabulary=49152, activation="gelu_pytorch_tanh"),
    modules("""
        embed_tokens=embedding
        layers.{layer}. input_layernorm=attention_norm
        layers.{layer}.self_attn. q_proj=query:use_bias k_proj=key:use_bias v_proj=value:use_bias o_proj=output:use_bias
        layers.{layer}. post_attention_layernorm=mlp_norm mlp.c_fc=mlp_in:use_bias mlp.c_proj=mlp_out:use_bias
        norm=final_norm
    """),
)

PERSIMMON = Family(
    "persimmon",
    ("", "model."),
    keys(width=4096, heads=64, layers=36, eps=1e-5, tied=False, normed=("qk_layernorm", True), rotary_theta=25000.0)
    | keys(rotary_fraction=0.5, mlp_hidden=16384, vocabulary=262144, activation="relu2"),
    (
        *modules("embed_tokens=embedding"),
        *modules("layers.{layer}. input_layernorm=attention_norm self_attn.query_key_value=query_key_value"),
        *modules("layers.{layer}. self_attn.dense=output"),
        *modules("layers.{layer}.self_attn. q_layernorm=query_norm k_layernorm=key_norm", "normed", when="normed"),
        *modules("layers.{layer}. post_attention_layernorm=mlp_norm"),
        *modules("layers.{layer}.mlp. dense_h_to_4h=mlp_in dense_4h_to_h=mlp_out"),
        *modules("final_layernorm=final_norm"),
    ),
    fused="heads",
)

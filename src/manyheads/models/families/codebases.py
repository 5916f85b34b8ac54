"""Model classes of training codebases, known by the names of their parameters alone, without a configuration.

nanoGPT has GPT-2's names. Sources: torchtitan `models/common` (before 2026 Meta's LLaMA, also llama2.c), litgpt
`model.py`, nanochat `gpt.py`.
"""

from dataclasses import replace

from manyheads.models.modules import MAYBE, Family, head, modules

TORCHTITAN = Family("torchtitan", ("",), {}, (
    *modules("tok_embeddings=embedding"),
    *modules("""
        layers.{layer}.attention.qkv_linear. wq=query wk=key wv=value wqkv=query_key_value
        layers.{layer}.attention. wq=query wk=key wv=value q_norm=query_norm k_norm=key_norm
    """, when=MAYBE),
    *modules("""
        layers.{layer}. attention_norm=attention_norm attention.wo=output ffn_norm=mlp_norm
        layers.{layer}.feed_forward. w1=mlp_gate w3=mlp_in w2=mlp_out
        norm=final_norm
    """),
), head("lm_head=unembedding output=unembedding"), fused="heads")  # fmt: skip
LITGPT = Family("litgpt", ("transformer.",), {}, (
    *modules("wte=embedding h.{layer}.attn.proj=output h.{layer}.mlp.proj=mlp_out ln_f=final_norm"),
    *modules("""
        h.{layer}. norm_1=attention_norm post_attention_norm=attention_post_norm
        h.{layer}.attn. qkv=query_key_value norm_q=query_norm norm_k=key_norm
        h.{layer}. norm_2=mlp_norm mlp.fc=mlp_in mlp.fc_1=mlp_gate mlp.fc_2=mlp_in post_mlp_norm=mlp_post_norm
    """, when=MAYBE),
), head("lm_head=unembedding"), fused="parts")  # fmt: skip
_INTERLEAVED = tuple(replace(each, path=each.path.replace("attn.qkv", "attn.attn")) for each in LITGPT.body)
NANOCHAT = Family("nanochat", ("",), {}, (
    *modules("""
        transformer.wte=embedding
        transformer.h.{layer}.attn. c_q=query c_k=key c_v=value c_proj=output
        transformer.h.{layer}.mlp. c_fc=mlp_in c_proj=mlp_out
    """),
    *modules("transformer.h.{layer}.attn.ve_gate=gate value_embeds.{layer}=value_embedding", when=MAYBE),
), (
    *head("lm_head=unembedding smear_gate=gate"),
    *head("resid_lambdas=scalar x0_lambdas=scalar smear_lambda=scalar backout_lambda=scalar"),
))  # fmt: skip
CODEBASES = (TORCHTITAN, LITGPT, LITGPT.derive("litgpt", body=_INTERLEAVED, fused="heads"), NANOCHAT)
"""Until 2024 litgpt had the rows of each group of heads together."""
USUAL = Family("", ("",), {}, (
    *modules("token_embedding=embedding linear1=mlp_in linear2=mlp_out head=unembedding"),
    *modules("in_proj_weight=query_key_value in_proj_bias=query_key_value", sort="bare"),
    *modules("wq_a=query_down wq_b=query_up wkv_a=key_value_down wkv_b=key_value_up kv_norm=key_value_down_norm"),
))  # fmt: skip
"""Names of PyTorch's own layers, of tutorials and of latent attention: their parts are guessed, nothing is read."""

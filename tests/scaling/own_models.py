"""Decoders whose modules have the names of a codebase: made of a listing of roles and names, as in its source."""

from dataclasses import dataclass

LLAMA = {
    "embedding": "embed_tokens",
    "attention_norm": "layers.*.input_layernorm",
    "query": "layers.*.self_attn.q_proj",
    "key": "layers.*.self_attn.k_proj",
    "value": "layers.*.self_attn.v_proj",
    "output": "layers.*.self_attn.o_proj",
    "mlp_norm": "layers.*.post_attention_layernorm",
    "mlp_gate": "layers.*.mlp.gate_proj",
    "mlp_in": "layers.*.mlp.up_proj",
    "mlp_out": "layers.*.mlp.down_proj",
    "final_norm": "norm",
    "unembedding": "lm_head",
}
# torchtitan 0.1, models/llama3/model/model.py; the names of Meta's LLaMA and of llama2.c
TORCHTITAN = {
    "embedding": "tok_embeddings",
    "attention_norm": "layers.*.attention_norm",
    "query": "layers.*.attention.wq",
    "key": "layers.*.attention.wk",
    "value": "layers.*.attention.wv",
    "output": "layers.*.attention.wo",
    "mlp_norm": "layers.*.ffn_norm",
    "mlp_gate": "layers.*.feed_forward.w1",
    "mlp_in": "layers.*.feed_forward.w3",
    "mlp_out": "layers.*.feed_forward.w2",
    "final_norm": "norm",
    "unembedding": "output",
}
# torchtitan 0.3, models/common/attention.py and decoder.py
TORCHTITAN_NEW = TORCHTITAN | {
    "query": "layers.*.attention.qkv_linear.wq",
    "key": "layers.*.attention.qkv_linear.wk",
    "value": "layers.*.attention.qkv_linear.wv",
    "unembedding": "lm_head",
}
# litgpt 0.5.13, model.py
LITGPT = {
    "embedding": "transformer.wte",
    "attention_norm": "transformer.h.*.norm_1",
    "query+key+value": "transformer.h.*.attn.qkv",
    "output": "transformer.h.*.attn.proj",
    "mlp_norm": "transformer.h.*.norm_2",
    "mlp_gate": "transformer.h.*.mlp.fc_1",
    "mlp_in": "transformer.h.*.mlp.fc_2",
    "mlp_out": "transformer.h.*.mlp.proj",
    "final_norm": "transformer.ln_f",
    "unembedding": "lm_head",
}
# nanochat at its first commit, nanochat/gpt.py: norms without gains
NANOCHAT = {
    "embedding": "transformer.wte",
    "query": "transformer.h.*.attn.c_q",
    "key": "transformer.h.*.attn.c_k",
    "value": "transformer.h.*.attn.c_v",
    "output": "transformer.h.*.attn.c_proj",
    "mlp_in": "transformer.h.*.mlp.c_fc",
    "mlp_out": "transformer.h.*.mlp.c_proj",
    "unembedding": "lm_head",
}
GPT2 = {
    "embedding": "transformer.wte",
    "attention_norm": "transformer.h.*.ln_1",
    "query+key+value": "transformer.h.*.attn.c_attn",
    "output": "transformer.h.*.attn.c_proj",
    "mlp_norm": "transformer.h.*.ln_2",
    "mlp_in": "transformer.h.*.mlp.c_fc",
    "mlp_out": "transformer.h.*.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "unembedding": "lm_head",
}
# nanochat at 92d63d4, nanochat/gpt.py, class GPT: name and shape of what its older versions do not have, at 4 layers,
# 4 heads in 2 groups of 16
NANOCHAT_SCALARS = {
    "resid_lambdas": (4,),
    "x0_lambdas": (4,),
    "smear_lambda": (1,),
    "backout_lambda": (1,),
    "smear_gate.weight": (1, 24),
    "transformer.h.1.attn.ve_gate.weight": (2, 12),
    "transformer.h.3.attn.ve_gate.weight": (2, 12),
    "value_embeds.1.weight": (64, 32),
    "value_embeds.3.weight": (64, 32),
}


@dataclass
class Sizes:
    """Sizes of a model and how it is wired."""

    key_dim: int = 8
    heads: int = 4
    depth: int = 3
    groups: int = 4
    width: int = 32
    ratio: int = 4
    bias: bool = False
    tied: bool = False
    post: bool = False  # norms behind the residual sum, under the same names
    swapped: bool = False  # queries and keys exchanged in the forward pass
    scaled: float = 1.0  # of logits, beside N^-1/2
    stated: str = "n_heads"  # attribute of attention modules that holds their heads


def place(root, path, module):
    """Put a module or a parameter under a path, making what holds it."""
    import torch

    *above, last = path.split(".")
    for piece in above:
        if piece not in dict(root.named_children()):
            root.add_module(piece, torch.nn.Module())
        root = root.get_submodule(piece)
    if isinstance(module, torch.nn.Parameter):
        root.register_parameter(last, module)
    else:
        root.add_module(last, module)


def build(names, sizes=None, **changes):
    """Return a decoder with these names."""
    from torch import nn
    from torch.nn import functional as F

    s = sizes or Sizes(**changes)
    queries, keys, hidden = s.heads * s.key_dim, s.groups * s.key_dim, s.ratio * s.width
    outputs = {"query": queries, "key": keys, "value": keys, "query+key+value": queries + 2 * keys}
    outputs |= {"output": s.width, "mlp_gate": hidden, "mlp_in": hidden, "mlp_out": s.width, "unembedding": 31}
    inputs = {"output": queries, "mlp_out": hidden}

    class Decoder(nn.Module):
        def part(self, role, layer=0):
            return self.get_submodule(names[role].replace("*", str(layer)))

        def normalize(self, role, x, layer=0):
            return self.part(role, layer)(x) if role in names else F.rms_norm(x, x.shape[-1:])

        def attend(self, x, layer):
            if "query" in names:
                q, k, v = (self.part(each, layer)(x) for each in ("query", "key", "value"))
            else:
                q, k, v = self.part("query+key+value", layer)(x).split((queries, keys, keys), -1)
            q, k, v = (each.unflatten(-1, (-1, s.key_dim)).transpose(1, 2) for each in (q, k, v))
            q, k = (k, q) if s.swapped else (q, k)
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=s.groups != s.heads, scale=s.scaled * s.key_dim**-0.5
            )
            return self.part("output", layer)(mixed.transpose(1, 2).flatten(2))

        def feed(self, x, layer):
            gated = "mlp_gate" in names
            hidden = F.silu(self.part("mlp_gate", layer)(x)) * self.part("mlp_in", layer)(x) if gated else None
            hidden = F.gelu(self.part("mlp_in", layer)(x)) if hidden is None else hidden
            return self.part("mlp_out", layer)(hidden)

        def forward(self, idx, targets=None):
            x = self.part("embedding")(idx)
            for block in self.get_submodule(names["output"].partition(".*")[0]).children():
                x = block(x)
            logits = self.part("unembedding")(self.normalize("final_norm", x))
            return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            own, layer = model[0], self.layer
            if s.post:
                x = own.normalize("attention_norm", x + own.attend(x, layer), layer)
                return own.normalize("mlp_norm", x + own.feed(x, layer), layer)
            x = x + own.attend(own.normalize("attention_norm", x, layer), layer)
            return x + own.feed(own.normalize("mlp_norm", x, layer), layer)

    model = [Decoder()]
    stem = names["output"].partition(".*")[0]
    for layer in range(s.depth):
        place(model[0], f"{stem}.{layer}", Block(layer))
    for role, name in names.items():
        for layer in range(s.depth) if "*" in name else [0]:
            if role == "embedding":
                made = nn.Embedding(31, s.width)
            elif role.endswith("norm"):
                made = nn.LayerNorm(s.width, bias=s.bias)
            else:
                made = nn.Linear(inputs.get(role, s.width), outputs[role], bias=s.bias and role != "unembedding")
            place(model[0], name.replace("*", str(layer)), made)
    if s.stated:
        for layer in range(s.depth):
            attention = names["output"].rpartition(".")[0].replace("*", str(layer))
            setattr(model[0].get_submodule(attention), s.stated, s.heads)
    if s.tied:
        model[0].part("unembedding").weight = model[0].part("embedding").weight
    return model[0]


def role_map(names):
    """Return the role map of a listing, written by hand."""
    found = {}
    for role, name in names.items():
        weight = f"{role.removesuffix('_norm')}_gain" if role.endswith("norm") else role
        shift = f"{role.removesuffix('_norm')}_shift" if role.endswith("norm") else None
        found[f"{name}.weight"] = weight
        found[f"{name}.bias"] = shift or "+".join(f"{each}_bias" for each in role.split("+"))
    return found

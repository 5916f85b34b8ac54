"""Tiny models of transformers in every supported family, at any shape, and a plain module with the house's formula."""

from manyheads.transformer import Shape

GROUPED = ("llama", "qwen2")


def build(family, shape, **changes):
    """Return a random model of a family at a shape; `changes` go into its configuration."""
    import torch
    import transformers

    torch.set_num_threads(1)
    d, heads, depth = shape.width, shape.heads, shape.depth
    sizes = {"hidden_size": d, "num_attention_heads": heads, "num_hidden_layers": depth, "vocab_size": 29}
    sizes |= {"intermediate_size": 2 * d, "max_position_embeddings": 12}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    gpt2 = {"n_embd": d, "n_head": heads, "n_layer": depth, "vocab_size": 29, "n_positions": 12}
    gpt2 |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    opt = {**sizes, "ffn_dim": 2 * d, "pad_token_id": 1, "word_embed_proj_dim": d}
    vit = {key: sizes[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")}
    vit |= {"image_size": 4, "patch_size": 2, "num_labels": 5}
    grouped = {**sizes, "num_key_value_heads": max(heads // 2, 1)}
    kinds = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", gpt2),
        "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", sizes),
        "opt": ("OPTConfig", "OPTForCausalLM", opt),
        "llama": ("LlamaConfig", "LlamaForCausalLM", grouped),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**grouped, "tie_word_embeddings": True}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**grouped, "head_dim": shape.key_dim}),
        "bert": ("BertConfig", "BertForPreTraining", {**sizes, "pad_token_id": 0}),
        "vit": ("ViTConfig", "ViTForImageClassification", vit),
    }
    configuration, model, given = kinds[family]
    model = changes.pop("model", model)
    config = getattr(transformers, configuration)(**{**given, **changes})
    return getattr(transformers, model)(config)


FAMILIES = ("gpt2", "gpt_neox", "opt", "llama", "qwen2", "bert", "vit")
FUSED = ("gpt2", "gpt_neox")
BASE = Shape(8, 4, 2)


def grown(family):
    """Shapes to which a family can be scaled from the base without more: BERT's blocks are post-norm, not deeper."""
    wider = (BASE, Shape(8, 8, 2), Shape(8, 2, 2))
    deeper = () if family == "bert" else (Shape(8, 4, 5),)
    keys = () if family in FUSED else (Shape(16, 4, 2),)
    both = () if family in (*FUSED, "bert") else (Shape(2, 6, 3),)
    return wider + deeper + keys + both


PLAIN = {
    "embedding.weight": "embedding",
    "positions": "positional",
    "blocks.*.query.weight": "query",
    "blocks.*.key.weight": "key",
    "blocks.*.value.weight": "value",
    "blocks.*.output.weight": "output",
    "blocks.*.mlp_in.weight": "mlp_in",
    "blocks.*.mlp_out.weight": "mlp_out",
    "blocks.*.attention_norm.weight": "attention_gain",
    "blocks.*.attention_norm.bias": "attention_shift",
    "blocks.*.mlp_norm.weight": "mlp_gain",
    "blocks.*.mlp_norm.bias": "mlp_shift",
    "blocks.*.query.bias": "query_bias",
    "blocks.*.key.bias": "key_bias",
    "blocks.*.value.bias": "value_bias",
    "blocks.*.output.bias": "output_bias",
    "blocks.*.mlp_in.bias": "mlp_in_bias",
    "blocks.*.mlp_out.bias": "mlp_out_bias",
    "final_norm.weight": "final_gain",
    "final_norm.bias": "final_shift",
    "unembedding.weight": "unembedding",
    "unembedding.bias": "unembedding_bias",
}
"""The roles of `plain`."""


def plain(shape, vocabulary, length, forward=None, tied=False):
    """Return the house's causal pre-norm transformer in torch, in double precision.

    Without `forward` its pass is the usual one: logits over the root of N, no multipliers. With one (branch, logit
    scale, output) it multiplies these itself.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    branch, logit, output = forward or (1.0, shape.key_dim**-0.5, 1.0)
    d, n, heads = shape.width, shape.key_dim, shape.heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.output = (nn.Linear(d, d) for _ in range(4))
            self.mlp_in, self.mlp_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
            self.attention_norm, self.mlp_norm = nn.LayerNorm(d, 1e-6), nn.LayerNorm(d, 1e-6)

        def forward(self, x):
            z = self.attention_norm(x)
            q, k, v = (f(z).unflatten(-1, (heads, n)).transpose(-2, -3) for f in (self.query, self.key, self.value))
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
            logits = (logit * q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
            mixed = (logits.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
            x = x + branch * self.output(mixed)
            return x + branch * self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, d)
            self.positions = nn.Parameter(torch.randn(length, d))
            self.blocks = nn.ModuleList(Block() for _ in range(shape.depth))
            self.final_norm = nn.LayerNorm(d, 1e-6)
            self.unembedding = nn.Linear(d, vocabulary, bias=not tied)
            if tied:
                self.unembedding.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens) + self.positions[: tokens.shape[-1]]
            for block in self.blocks:
                x = block(x)
            return self.unembedding(output * self.final_norm(x))

    return Plain().double()


def train(model, optimizer, tokens, steps):
    """Predict the next token in full batch; return the losses."""
    from torch.nn.functional import cross_entropy

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

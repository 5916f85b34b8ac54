"""Three small training scripts as people write them, nanoGPT-, Llama- and ViT-like, right and with planted mistakes."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from manyheads.scaling import (
    BaseHyperparameters,
    ForwardMultipliers,
    MuonHyperparameters,
    Parametrization,
    initialize_model,
    torch_groups,
)
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.transformer import Shape

VOCABULARY, LENGTH, BATCH = 29, 16, 8
BASE = Shape(8, 4, 2)


def attend(q, k, v, heads, scale, causal):
    q, k, v = (each.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for each in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class NanoBlock(nn.Module):
    """A block with one matrix for queries, keys and values."""

    def __init__(self, shape, branch, scale, causal=True):
        super().__init__()
        d = shape.width
        self.heads, self.branch, self.scale, self.causal = shape.heads, branch, scale, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.attn_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        y = attend(*self.c_attn(self.ln_1(x)).chunk(3, -1), self.heads, self.scale, self.causal)
        x = x + self.branch * self.attn_proj(y)
        return x + self.branch * self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A model that returns (logits, loss), as nanoGPT's."""

    def __init__(self, shape, branch, scale):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(LENGTH, shape.width)
        self.h = nn.ModuleList(NanoBlock(shape, branch, scale) for _ in range(shape.depth))
        self.ln_f, self.lm_head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


NANO = {
    "wte.*": "embedding",
    "wpe.*": "positional",
    "h.*.c_attn.*": "query+key+value",
    "h.*.attn_proj.*": "output",
    "h.*.c_fc.*": "mlp_in",
    "h.*.c_proj.*": "mlp_out",
    "h.*.ln_1.weight": "attention_gain",
    "h.*.ln_1.bias": "attention_shift",
    "h.*.ln_2.weight": "mlp_gain",
    "h.*.ln_2.bias": "mlp_shift",
    "ln_f.weight": "final_gain",
    "ln_f.bias": "final_shift",
    "lm_head.*": "unembedding",
}


def rotate(x, heads):
    """Turn pairs of queries or keys by their position."""
    x = x.unflatten(-1, (heads, 2, -1))
    n = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None, None] * 100.0 ** (-torch.arange(n) / n)
    one, two, c, s = x[..., 0, :], x[..., 1, :], angles.cos(), angles.sin()
    return torch.stack([c * one - s * two, s * one + c * two], -2).flatten(-3)


class LlamaBlock(nn.Module):
    """A block with grouped queries, rotary positions, a gated MLP and RMS norms."""

    def __init__(self, shape, branch, scale):
        super().__init__()
        d, self.heads, self.groups = shape.width, shape.heads, shape.heads // 2
        self.branch, self.scale = branch, scale
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = nn.Linear(d, d // 2, bias=False), nn.Linear(d, d // 2, bias=False)
        self.w1, self.w3 = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.w2 = nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        z = self.attention_norm(x)
        q, k = rotate(self.wq(z), self.heads), rotate(self.wk(z), self.groups)
        x = x + self.branch * self.wo(attend(q, k, self.wv(z), self.heads, self.scale, True))
        z = self.ffn_norm(x)
        return x + self.branch * self.w2(functional.silu(self.w1(z)) * self.w3(z))


class Llama(nn.Module):
    """A model that returns logits."""

    def __init__(self, shape, branch, scale):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(LlamaBlock(shape, branch, scale) for _ in range(shape.depth))
        self.norm, self.output = nn.RMSNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


LLAMA = {
    "tok_embeddings.*": "embedding",
    "layers.*.wq.*": "query",
    "layers.*.wk.*": "key",
    "layers.*.wv.*": "value",
    "layers.*.wo.*": "output",
    "layers.*.w1.*": "mlp_gate",
    "layers.*.w3.*": "mlp_in",
    "layers.*.w2.*": "mlp_out",
    "layers.*.attention_norm.*": "attention_gain",
    "layers.*.ffn_norm.*": "mlp_gain",
    "norm.*": "final_gain",
    "output.*": "unembedding",
}


class ViT(nn.Module):
    """A classifier of patches, pooled over tokens."""

    def __init__(self, shape, branch, scale):
        super().__init__()
        self.patches, self.positions = (
            nn.Linear(4, shape.width, bias=False),
            nn.Parameter(torch.zeros(1, 16, shape.width)),
        )
        self.blocks = nn.Sequential(*(NanoBlock(shape, branch, scale, causal=False) for _ in range(shape.depth)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 5, bias=False)

    def forward(self, images):
        x = images.unflatten(1, (4, 2)).unflatten(3, (4, 2)).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.blocks(self.patches(x) + self.positions)).mean(1))


VIT = {name.replace("h.*.", "blocks.*."): part for name, part in NANO.items() if name.startswith("h.*.")}
VIT |= {"patches.*": "embedding", "positions": "positional", "head.*": "unembedding"}
VIT |= {"norm.weight": "final_gain", "norm.bias": "final_shift"}


def texts(seed):
    """Batches of a text with structure: every token follows from the one before it, with noise."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(8):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
        for place in range(LENGTH):
            kept = torch.rand(BATCH, generator=draw) < 0.2
            tokens[:, place + 1] = torch.where(kept, tokens[:, place + 1], (3 * tokens[:, place] + 1) % VOCABULARY)
        found.append((tokens[:, :-1], tokens[:, 1:]))
    return found


def images(seed):
    """Batches of noisy pictures of five classes."""
    classes = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(99))
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(8):
        labels = torch.randint(5, (2 * BATCH,), generator=draw)
        found.append((classes[labels] + 0.5 * torch.randn(2 * BATCH, 8, 8, generator=draw), labels))
    return found


def classify(model, batch):
    """Cross-entropy of tokens or of pictures."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


SCRIPTS = {  # name → model, roles, batches, loss, what stands for positions
    "nano": (NanoGPT, NANO, texts, None, "wpe"),
    "llama": (Llama, LLAMA, texts, classify, "norm"),
    "vit": (ViT, VIT, images, classify, "positions"),
}
STDS = dict.fromkeys(("query", "key", "value", "output", "mlp_in", "mlp_out", "unembedding"), 0.1)
STDS |= {"embedding": 0.5, "positional": 0.2}
TUNED = BaseHyperparameters(3e-3, weight_decay=0.01, stds=STDS, muon=MuonHyperparameters(0.01, weight_decay=0.01))


def parametrization(optimizer="adam", **changes):
    return replace(Parametrization(optimizer=optimizer, base=BASE), **changes)


def script(name, p, mistake=""):
    """Return `make` of a script under a parametrization, with a planted mistake."""
    model_class, roles, batches, loss, positions = SCRIPTS[name]

    def make(shape, seed):
        asked = forward_multipliers(p, shape)
        fused = p.logit_exponent == 1 and name != "llama"  # the model scales its logits itself
        scale = asked.logit * BASE.key_dim**-0.5 if fused else shape.key_dim**-0.5
        logit = asked.logit if fused else (shape.key_dim / BASE.key_dim) ** -0.5
        model = model_class(shape, asked.branch if mistake == "branch both" else 1.0, scale)
        said = ForwardMultipliers(
            branch=asked.branch if mistake == "branch neither" else 1.0,
            logit=asked.logit if mistake == "logit neither" else logit,
        )
        initialize_model(p, model, TUNED, roles, shape, folded=said)
        groups = torch_groups(p, model, TUNED, roles, shape, folded=said)
        if mistake == "one rate":
            groups = [group | {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-8} for group in groups]
        if mistake == "positions in none":
            groups = [group for group in groups if not any(key.startswith(positions) for key in group["names"])]
        if mistake == "table in Muon":
            groups = [g | ({"algorithm": "muon", "lr": 0.01} if g["role"] == "embedding" else {}) for g in groups]
        kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        chosen = {kind: [g for g in groups if g.get("algorithm", "adamw") == kind] for kind in kinds}
        optimizers = [kinds[kind](some) for kind, some in chosen.items() if some]
        return model, optimizers if len(optimizers) > 1 else optimizers[0], batches(seed), loss, roles

    return make


def standard(name):
    """Return `make` of a script as people write it: fan-in init, one learning rate."""
    model_class, _, batches, loss, _ = SCRIPTS[name]

    def make(shape, seed):
        model = model_class(shape, 1.0, shape.key_dim**-0.5)
        return model, torch.optim.AdamW(model.parameters(), 3e-3), batches(seed), loss

    return make


standard_nano = standard("nano")

"""Models that no table knows, with their roles written by hand, and variants of a GPT that are read or refused."""

# ruff: noqa: RUF012  # maps of roles, never changed

import torch
from tests.models.strange import WORDS, Model, Plain, drawn, heads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Rms(nn.Module):
    """A norm by hand."""

    def __init__(self, size):
        super().__init__()
        self.g = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Fused(nn.Module):
    """One matrix for queries, keys and values, norms behind the transposed ones, a functional tie, checkpoints."""

    ROLES = {
        "words": "embedding+unembedding", "places": "positional", "*.mix.weight": "query+key+value",
        "*.mix.bias": "query_bias+key_bias+value_bias", "*.back.weight": "output", "*.back.bias": "output_bias",
        "*.qn.g": "query_gain", "*.kn.g": "key_gain", "*.up.weight": "mlp_in", "*.up.bias": "mlp_in_bias",
        "*.down.weight": "mlp_out", "*.down.bias": "mlp_out_bias", "*.a.weight": "attention_gain",
        "*.a.bias": "attention_shift", "*.b.weight": "mlp_gain", "*.b.bias": "mlp_shift", "end.weight": "final_gain",
        "end.bias": "final_shift",
    }  # fmt: skip

    class Block(nn.Module):
        def __init__(self, n, h):
            super().__init__()
            self.n, d = n, n * h
            self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
            self.mix, self.back = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.qn, self.kn = Rms(n), Rms(n)
            self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x):
            q, k, v = (heads(t, self.n) for t in self.mix(self.a(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v, is_causal=True)
            x = x + self.back(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.b(x))))

    def __init__(self, n, h, depth):
        super().__init__()
        self.words, self.places = drawn(WORDS, n * h, fan_in=50), drawn(16, n * h, fan_in=50)
        self.blocks = nn.ModuleList([self.Block(n, h) for _ in range(depth)])
        self.end = nn.LayerNorm(n * h)

    def forward(self, ids):
        x = F.embedding(ids, self.words) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.end(x), self.words)


class Parallel(nn.Module):
    """A parallel block of raw arrays: grouped keys by einsum on (D, H, N), a sink, layer scale, a fused gate."""

    ROLES = {
        "words.weight": "embedding", "*.norm.g": "attention_gain", "*.wq": "query", "*.wk": "key", "*.wv": "value",
        "*.wo": "output", "*.sink": "sink", "*.both": "mlp_gate+mlp_in", "*.down": "mlp_out", "*.scale": "branch_gain",
        "end.g": "final_gain", "read.weight": "unembedding",
    }  # fmt: skip

    class Block(nn.Module):
        def __init__(self, n, h):
            super().__init__()
            d, k = n * h, max(h // 2, 1)
            self.share, self.norm = h // k, Rms(d)
            self.wq, self.wk, self.wv = drawn(d, h, n), drawn(d, k, n), drawn(d, k, n)
            self.wo, self.sink = drawn(h, n, d, fan_in=d), nn.Parameter(torch.zeros(h))
            self.both, self.down, self.scale = drawn(d, 6 * d), drawn(3 * d, d), nn.Parameter(torch.full((d,), 0.1))

        def forward(self, x):
            z, length = self.norm(x), x.shape[1]
            q, k, v = (torch.einsum("btd,dhn->bhtn", z, w) for w in (self.wq, self.wk, self.wv))
            k, v = (t.repeat_interleave(self.share, 1) for t in (k, v))
            logits = torch.einsum("bhqn,bhkn->bhqk", q, k) / q.shape[-1] ** 0.5
            logits = logits.masked_fill(torch.ones(length, length).tril().eq(0), -1e9)
            sink = self.sink.view(1, -1, 1, 1).expand(len(x), -1, length, 1)
            y = torch.einsum("bhqk,bhkn->bqhn", torch.cat([logits, sink], -1).softmax(-1)[..., :-1], v)
            gate, up = (z @ self.both).chunk(2, -1)
            return x + self.scale * torch.einsum("bqhn,hnd->bqd", y, self.wo) + (F.silu(gate) * up) @ self.down

    def __init__(self, n, h, depth):
        super().__init__()
        d = n * h
        self.words, self.end, self.read = nn.Embedding(WORDS, d), Rms(d), nn.Linear(d, WORDS, bias=False)
        self.layers = nn.ModuleList([self.Block(n, h) for _ in range(depth)])

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.read(self.end(x))


class Stacked(nn.Module):
    """Weights of all layers in one array, norms 1 + w also behind branches, a router, one-hot inputs, a cap."""

    ROLES = {
        "words": "embedding", "g1": "attention_gain", "g2": "mlp_gain", "p1": "attention_post_gain",
        "p2": "mlp_post_gain", "q": "query", "k": "key", "v": "value", "o": "output", "router": "router",
        "w1": "mlp_in", "w2": "mlp_out", "end": "final_gain", "read": "unembedding",
    }  # fmt: skip

    def __init__(self, n, h, depth):
        super().__init__()
        self.n, self.depth, d = n, depth, n * h
        self.words, self.read = drawn(WORDS, d, fan_in=d), drawn(WORDS, d, fan_in=d)
        self.g1, self.g2, self.p1, self.p2 = (nn.Parameter(torch.zeros(depth, d)) for _ in range(4))
        self.end = nn.Parameter(torch.zeros(d))
        self.q, self.k, self.v, self.o = (drawn(depth, d, d, fan_in=d) for _ in range(4))
        self.router, self.w1 = drawn(depth, 3, d, fan_in=d), drawn(depth, 3, 2 * d, d, fan_in=d)
        self.w2 = drawn(depth, 3, d, 2 * d, fan_in=2 * d)

    def forward(self, ids):
        def norm(x, w):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)

        x = F.one_hot(ids, WORDS).to(self.words.dtype) @ self.words
        for i in range(self.depth):
            z = norm(x, self.g1[i])
            q, k, v = (heads(F.linear(z, w[i]), self.n) for w in (self.q, self.k, self.v))
            logits = torch.tanh(q @ k.transpose(-1, -2) / self.n**0.5 / 30) * 30
            x = x + norm(F.linear((logits.softmax(-1) @ v).transpose(1, 2).flatten(2), self.o[i]), self.p1[i])
            z = norm(x, self.g2[i])
            share = F.linear(z, self.router[i]).softmax(-1)
            top, where = share.topk(2, -1)
            share = torch.zeros_like(share).scatter(-1, where, top)
            made = [F.linear(F.relu(F.linear(z, self.w1[i, e])), self.w2[i, e]) for e in range(3)]
            x = x + norm((torch.stack(made, -2) * share[..., None]).sum(-2), self.p2[i])
        return F.linear(norm(x, self.end), self.read)


OWN = (Fused, Parallel, Stacked)  # 32, 21 and 14 parameters


class Gpt(Model):
    """A small GPT, and what is changed in it."""

    ROLES = {"places.weight": "positional"}
    kind = "plain"

    class Block(Plain):
        kind = "plain"

        def __init__(self, n, h):
            super().__init__(n, h)
            d = self.d
            made = {
                "attention gate": lambda: {"gate": nn.Linear(d, d)},
                "adapter": lambda: {"low": nn.Linear(d, 2, bias=False), "high": nn.Linear(2, d, bias=False)},
                "rezero": lambda: {"z": nn.Parameter(torch.ones(()))},
                "value embedding": lambda: {"own": nn.Embedding(WORDS, d)},
                "three-layer MLP": lambda: {"middle": nn.Linear(4 * d, 4 * d, bias=False)},
                "weight norm": lambda: {"up": nn.utils.parametrizations.weight_norm(self.up)},
                "convolution": lambda: {"conv": nn.Conv1d(d, d, 3, padding=1, groups=d)},
                "talking heads": lambda: {"mixed": nn.Parameter(torch.eye(h))},
                "temperature": lambda: {"hot": nn.Parameter(torch.ones(h, 1, 1))},
            }
            for name, module in made.get(self.kind, dict)().items():
                setattr(self, name, module)

        def forward(self, x, ids):
            z, kind = self.one(x), self.kind
            if kind == "convolution":
                z = z + self.conv(z.transpose(1, 2)).transpose(1, 2)
            q = self.wq(z) + (self.high(self.low(z)) if kind == "adapter" else 0)
            v = self.wv(z) + (self.own(ids) if kind == "value embedding" else 0)
            q, k, v = heads(q, self.n), heads(self.wk(z), self.n), heads(v, self.n)
            q = q * self.hot if kind == "temperature" else q
            logits = q @ k.transpose(-1, -2) / self.n**0.5
            if kind == "transposed logits":
                logits = (k @ q.transpose(-1, -2) / self.n**0.5).transpose(-1, -2)
            elif kind == "talking heads":
                logits = torch.einsum("bhqk,hg->bgqk", logits, self.mixed)
            made = {"relu attention": F.relu, "squared attention": torch.square}.get(kind, lambda a: a.softmax(-1))
            y = (made(logits) @ v).transpose(1, 2).flatten(2)
            f = self.wo(y * torch.sigmoid(self.gate(z)) if kind == "attention gate" else y)
            f = self.z * f if kind == "rezero" else f
            if kind == "sums in place":
                x += f
            else:
                x = x + f
            hidden = F.gelu(self.up(self.two(x)))
            return x + self.down(F.gelu(self.middle(hidden)) if kind == "three-layer MLP" else hidden)

    def __init__(self, n, h, depth):
        super().__init__(n, h, depth)
        self.places = nn.Embedding(16, self.d)
        if self.kind == "shared layers":
            self.blocks = self.blocks[:1]
        if self.kind == "skips":
            self.w = nn.Parameter(torch.ones(depth))

    def forward(self, ids):
        x, kept = F.embedding(ids, self.table) + self.places(torch.arange(ids.shape[1])), []
        for i in range(self.depth):
            if self.kind == "skips" and i >= self.depth // 2:
                x = x + self.w[i] * kept.pop()
            x = self.blocks[i % len(self.blocks)](x, ids)
            kept.append(x)
        y = self.read(self.last(x))
        return F.cross_entropy(y.flatten(0, 1), ids.flatten()) if self.kind == "returns the loss" else y


def variant(kind):
    """Return the GPT with one change."""
    block = type("Block", (Gpt.Block,), {"kind": kind})
    return type("Gpt", (Gpt,), {"kind": kind, "Block": block})


class Encoder(nn.Module):
    """The encoder of torch itself."""

    ROLES = {
        "table.weight": "embedding", "*in_proj_weight": "query+key+value", "*.out_proj.weight": "output",
        "*in_proj_bias": "query_bias+key_bias+value_bias", "*.out_proj.bias": "output_bias",
        "*.linear1.weight": "mlp_in", "*.linear1.bias": "mlp_in_bias", "*.linear2.weight": "mlp_out",
        "*.linear2.bias": "mlp_out_bias", "*.norm1.weight": "attention_gain", "*.norm1.bias": "attention_shift",
        "*.norm2.weight": "mlp_gain", "*.norm2.bias": "mlp_shift", "body.norm.weight": "final_gain",
        "body.norm.bias": "final_shift", "read.weight": "unembedding", "read.bias": "unembedding_bias",
    }  # fmt: skip

    def __init__(self, n, h, depth, first=True):
        super().__init__()
        d = n * h
        layer = nn.TransformerEncoderLayer(d, h, 4 * d, batch_first=True, norm_first=first)
        last = nn.LayerNorm(d)
        self.body = nn.TransformerEncoder(layer, depth, norm=last, enable_nested_tensor=False)
        self.table, self.read = nn.Embedding(WORDS, d), nn.Linear(d, WORDS)

    def forward(self, ids):
        return self.read(self.body(self.table(ids)))


VARIANTS = {
    "plain": "", "sums in place": "", "transposed logits": "", "returns the loss": "",
    "attention gate": "blocks.0.gate.weight: a gate on the output of attention has no derived role",
    "adapter": "blocks.0.high.weight: a product of low rank beside a full matrix",
    "rezero": "blocks.0.z multiplies by one trained number; scalars have no role",
    "value embedding": "value of attention is made of the stream without a weight of its own",
    "three-layer MLP": "blocks.0.middle.weight: it reads another weight and is read by blocks.0.down.weight",
    "weight norm": "original0 and blocks.0.up.parametrizations.weight.original1 are combined before they meet",
    "relu attention": "a product of three activations without a softmax: linear attention",
    "squared attention": "a product of three activations without a softmax: linear attention",
    "convolution": "blocks.0.conv.weight is a convolution inside the blocks",
    "talking heads": "blocks.0.mixed multiplies logits or patterns of attention",
    "temperature": "blocks.0.hot: a trained factor of queries or keys without a norm before it: a temperature",
    "shared layers": "blocks.0.wq.weight: one weight serves 2 attention layers; shared layers are not derived",
    "skips": "w multiplies by one trained number; scalars have no role",
}  # fmt: skip
"""What is changed → the reason of the refusal, none if it is read."""

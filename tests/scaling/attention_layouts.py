"""A small causal decoder whose attention is laid out in the ways of different codes, with any multiplier of logits."""

import torch
from torch import nn
from torch.nn import functional

NORMED = ("norm before", "norm behind", "norm of all heads")
LAYOUTS = (
    "plain",
    *NORMED,
    "norm without gains",
    "einsum modules",
    "einsum parameters",
    "keys and values in one",
    "one matrix, groups",
    "heads last in logits",
)


class Product(nn.Module):
    """One weight of several axes."""

    def __init__(self, equation, *sizes):
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(0.1 * torch.randn(*sizes))

    def forward(self, x):
        return torch.einsum(self.equation, x, self.weight)


class Block(nn.Module):
    """A block with grouped queries; attention alone differs from layout to layout."""

    def __init__(self, shape, layout, scale, groups):
        super().__init__()
        d, h, n, k = shape.width, shape.heads, shape.key_dim, groups
        self.sizes, self.layout, self.scale = (h, k, n), layout, scale
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        if layout == "einsum modules":
            self.q, self.k, self.v = (Product("btd,dhn->bhtn", d, each, n) for each in (h, k, k))
            self.o = Product("bhtn,hnd->btd", h, n, d)
        elif layout == "einsum parameters":
            self.wq, self.wk, self.wv = (nn.Parameter(0.1 * torch.randn(d, each, n)) for each in (h, k, k))
            self.wo = nn.Parameter(0.1 * torch.randn(h, n, d))
        else:
            self.o = nn.Linear(h * n, d, bias=False)
            if layout == "one matrix, groups":
                self.qkv = nn.Linear(d, (h + 2 * k) * n, bias=False)
            elif layout == "keys and values in one":
                self.q, self.kv = nn.Linear(d, h * n, bias=False), nn.Linear(d, 2 * k * n, bias=False)
            else:
                self.q, self.k, self.v = (nn.Linear(d, each * n, bias=False) for each in (h, k, k))
        if layout in NORMED:
            wide = layout == "norm of all heads"
            self.q_norm, self.k_norm = nn.RMSNorm(h * n if wide else n), nn.RMSNorm(k * n if wide else n)
        self.up, self.down = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def project(self, x):
        """Return queries, keys and values, (batch, heads, tokens, N)."""
        (_, k, n), layout = self.sizes, self.layout
        if layout == "einsum parameters":
            return [torch.einsum("btd,dhn->bhtn", x, each) for each in (self.wq, self.wk, self.wv)]
        if layout == "einsum modules":
            return [self.q(x), self.k(x), self.v(x)]
        if layout == "one matrix, groups":  # group after group, each with its queries, key and value
            rows = self.qkv(x).unflatten(-1, (k, -1, n))
            parts = [rows[..., :-2, :].flatten(2), rows[..., -2, :].flatten(2), rows[..., -1, :].flatten(2)]
        elif layout == "keys and values in one":
            parts = [self.q(x), *self.kv(x).chunk(2, -1)]
        else:
            parts = [self.q(x), self.k(x), self.v(x)]
        if layout == "norm of all heads":
            parts[:2] = self.q_norm(parts[0]), self.k_norm(parts[1])
        parts = [each.unflatten(-1, (-1, n)) for each in parts]
        if layout == "norm before":
            parts[:2] = self.q_norm(parts[0]), self.k_norm(parts[1])
        q, k, v = (each.transpose(1, 2) for each in parts)
        if layout == "norm behind":
            q, k = self.q_norm(q), self.k_norm(k)
        if layout == "norm without gains":
            q, k = (functional.rms_norm(each, (n,)) for each in (q, k))
        return q, k, v

    def forward(self, x):
        q, k, v = self.project(self.norm1(x))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        logits = (self.scale * q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        if self.layout == "heads last in logits":
            weights = logits.permute(0, 2, 3, 1).softmax(2).permute(0, 3, 1, 2)
        else:
            weights = logits.softmax(-1)
        y = weights @ v
        if self.layout == "einsum parameters":
            y = torch.einsum("bhtn,hnd->btd", y, self.wo)
        else:
            y = self.o(y if self.layout == "einsum modules" else y.transpose(1, 2).flatten(2))
        x = x + y
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, blocks, read-out."""

    def __init__(self, shape, layout="plain", scale=None, groups=2):
        super().__init__()
        torch.set_num_threads(1)
        scale = shape.key_dim**-0.5 if scale is None else scale
        self.table, self.last = nn.Embedding(19, shape.width), nn.RMSNorm(shape.width)
        self.blocks = nn.ModuleList(Block(shape, layout, scale, groups) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, 19, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


PARTS = {"q": "query", "k": "key", "v": "value", "o": "output", "wq": "query", "wk": "key", "wv": "value"}
PARTS |= {"wo": "output", "kv": "key+value", "qkv": "query+key+value", "up": "mlp_in", "down": "mlp_out"}
PARTS |= {"norm1": "attention_gain", "norm2": "mlp_gain", "q_norm": "query_gain", "k_norm": "key_gain"}
PARTS |= {"table": "embedding", "last": "final_gain", "head": "unembedding"}


def roles_of(model):
    """Return the role map of a decoder."""
    return {name: PARTS[name.removesuffix(".weight").rpartition(".")[2]] for name, _ in model.named_parameters()}

"""Architectures that the rules of role inference were not written on: read rightly, or refused."""

# ruff: noqa: RUF012  # maps of roles, never changed

import math

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 31


def drawn(*sides, fan_in=None):
    return nn.Parameter(torch.randn(*sides) * (fan_in or sides[0]) ** -0.5)


def heads(x, n):
    return x.unflatten(-1, (-1, n)).transpose(1, 2)


def attend(q, k, v, bias=0.0):
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A table, blocks that a subclass defines, a last norm, a read-out."""

    ROLES = {
        "table": "embedding",
        "last.weight": "final_gain",
        "last.bias": "final_shift",
        "read.weight": "unembedding",
    }

    def __init__(self, n, h, depth):
        super().__init__()
        self.n, self.h, self.depth, self.d = n, h, depth, n * h
        self.table = drawn(WORDS, self.d, fan_in=1)
        self.blocks = nn.ModuleList([self.Block(n, h) for _ in range(depth)])
        self.last, self.read = nn.LayerNorm(self.d), nn.Linear(self.d, WORDS, bias=False)

    def forward(self, ids):
        return self.read(self.last(self.body(F.embedding(ids, self.table))))

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Module):
    """A block whose pieces subclasses replace."""

    ROLES = {
        "*.wq.weight": "query", "*.wk.weight": "key", "*.wv.weight": "value", "*.wo.weight": "output",
        "*.up.weight": "mlp_in", "*.down.weight": "mlp_out", "*.one.weight": "attention_gain",
        "*.one.bias": "attention_shift", "*.two.weight": "mlp_gain", "*.two.bias": "mlp_shift",
    }  # fmt: skip

    def __init__(self, n, h):
        super().__init__()
        self.n, self.h, d = n, h, n * h
        self.d = d
        self.one, self.two = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def attention(self, x):
        return self.wo(attend(*(heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))))

    def mlp(self, x):
        return self.down(F.relu(self.up(x)).square())

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


class OneMatrix(Model):
    """A parallel block whose one matrix makes queries, one key and value head, gate and hidden units; tied table."""

    ROLES = {
        "table": "embedding+unembedding", "last.*": "final_gain", "*.norm": "attention_gain",
        "*.all": "query+key+value+mlp_gate+mlp_in", "*.out": "output", "*.down": "mlp_out",
    }  # fmt: skip

    class Block(nn.Module):
        def __init__(self, n, h):
            super().__init__()
            self.n, self.d = n, n * h
            self.norm = nn.Parameter(torch.ones(self.d))
            self.all, self.out, self.down = (
                drawn(self.d, 9 * self.d + 2 * n),
                drawn(self.d, self.d),
                drawn(4 * self.d, self.d),
            )

        def forward(self, x):
            z = F.rms_norm(x, (self.d,), self.norm) @ self.all
            q, k, v, gate, up = z.split([self.d, self.n, self.n, 4 * self.d, 4 * self.d], -1)
            far = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
            slope = 2.0 ** -torch.arange(1, self.d // self.n + 1)
            y = attend(heads(q, self.n), k[:, None], v[:, None], slope[:, None, None] * far)
            return x + y @ self.out + (F.silu(gate) * up) @ self.down

    def forward(self, ids):
        return F.linear(F.rms_norm(self.body(F.embedding(ids, self.table)), (self.d,), self.last.weight), self.table)

    def __init__(self, n, h, depth):
        super().__init__(n, h, depth)
        del self.read
        self.last = nn.RMSNorm(self.d)


class HeadMajor(Model):
    """Weights of one slice a head, (H, D, N) and (H, N, D)."""

    class Block(Plain):
        ROLES = Plain.ROLES | {
            f"*.w{each}": role for each, role in zip("qkvo", ("query", "key", "value", "output"), strict=True)
        }

        def __init__(self, n, h):
            super().__init__(n, h)
            del self.wq, self.wk, self.wv, self.wo
            self.wq, self.wk, self.wv = (drawn(h, self.d, n, fan_in=self.d) for _ in range(3))
            self.wo = drawn(h, n, self.d, fan_in=self.d)

        def attention(self, x):
            q, k, v = (torch.einsum("btd,hdn->bhtn", x, w) for w in (self.wq, self.wk, self.wv))
            return torch.einsum("bhtn,hnd->btd", F.scaled_dot_product_attention(q, k, v), self.wo)


class SharedKeys(Model):
    """Later layers attend to keys and values of the first one."""

    Block = Plain

    def body(self, x):
        kept = None
        for block in self.blocks:
            z = block.one(x)
            kept = kept or (heads(block.wk(z), self.n), heads(block.wv(z), self.n))
            x = x + block.wo(attend(heads(block.wq(z), self.n), *kept))
            x = x + block.mlp(block.two(x))
        return x


class NormalizedWeights(Model):
    """Every row of a matrix is normalized before it is used."""

    class Block(Plain):
        def mlp(self, x):
            return F.linear(F.gelu(F.linear(x, F.normalize(self.up.weight, dim=-1))), self.down.weight)


class ScaledWeights(Model):
    """The matrices of the MLP are divided by the root of their fan-in as they are used."""

    class Block(Plain):
        def mlp(self, x):
            up, down = (w.weight / w.in_features**0.5 for w in (self.up, self.down))
            return F.linear(F.gelu(F.linear(x, up)), down)


class SigmoidAttention(Model):
    """Attention weights are sigmoids of the logits."""

    class Block(Plain):
        def attention(self, x):
            q, k, v = (heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
            return self.wo((torch.sigmoid(q @ k.transpose(-1, -2) / self.n) @ v).transpose(1, 2).flatten(2))


class TokenMixer(Model):
    """The MLP mixes tokens."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.up, self.down = nn.Linear(7, 28, bias=False), nn.Linear(28, 7, bias=False)

        def mlp(self, x):
            return super().mlp(x.transpose(1, 2)).transpose(1, 2)


class Prefixes(Model):
    """Trained keys and values stand before those of the tokens."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.keys, self.values = drawn(h, 3, n, fan_in=1), drawn(h, 3, n, fan_in=1)

        def attention(self, x):
            q, k, v = (heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
            k, v = (torch.cat([own.expand(len(x), -1, -1, -1), t], 2) for own, t in ((self.keys, k), (self.values, v)))
            return self.wo(attend(q, k, v))


class Highway(Model):
    """A trained gate between the stream and what a branch computes."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.gate = nn.Linear(self.d, self.d)

        def forward(self, x):
            x = x + self.attention(self.one(x))
            open_ = torch.sigmoid(self.gate(x))
            return open_ * self.mlp(self.two(x)) + (1 - open_) * x


class Patches(nn.Module):
    """Patches by one matrix, registers, layer scale, norms without shifts, a class read off the first register."""

    ROLES = {
        "patch": "patch", "places": "positional", "registers": "marker", "*.n1.weight": "attention_gain",
        "*.n2.weight": "mlp_gain", "*.qkv.weight": "query+key+value", "*.qkv.bias": "query_bias+key_bias+value_bias",
        "*.back.weight": "output", "*.s1": "branch_gain", "*.s2": "branch_gain", "*.both.weight": "mlp_gate+mlp_in",
        "*.end.weight": "mlp_out", "out.weight": "unembedding", "out.bias": "unembedding_bias",
        "norm.weight": "final_gain",
    }  # fmt: skip

    class Block(nn.Module):
        def __init__(self, n, h):
            super().__init__()
            self.n, d = n, n * h
            self.n1, self.n2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
            self.qkv, self.back = nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
            self.both, self.end = nn.Linear(d, 8 * d, bias=False), nn.Linear(4 * d, d, bias=False)
            self.s1, self.s2 = (nn.Parameter(torch.full((d,), 1e-2)) for _ in range(2))

        def forward(self, x):
            q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, -1, self.n)).permute(2, 0, 3, 1, 4)
            x = x + self.s1 * self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            up, gate = self.both(self.n2(x)).chunk(2, -1)
            return x + self.s2 * self.end(up * F.gelu(gate, approximate="tanh"))

    def __init__(self, n, h, depth):
        super().__init__()
        d = n * h
        self.patch, self.places, self.registers = drawn(48, d), drawn(4, d, fan_in=50), drawn(3, d, fan_in=50)
        self.blocks = nn.Sequential(*(self.Block(n, h) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(d, bias=False), nn.Linear(d, 10)

    def forward(self, pixels):
        patches = F.unfold(pixels, 4, stride=4).transpose(1, 2)
        x = torch.cat([self.registers.expand(len(pixels), -1, -1), patches @ self.patch + self.places], 1)
        return self.out(self.norm(self.blocks(x))[:, 0])

    @staticmethod
    def example(model):
        return (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


class Sequential(Model):
    """MLPs as sequences, whose matrices differ by a number alone."""

    class Block(Plain):
        ROLES = Plain.ROLES | {
            "*.mlp_.0.weight": "mlp_in", "*.mlp_.0.bias": "mlp_in_bias", "*.mlp_.3.weight": "mlp_out",
            "*.mlp_.3.bias": "mlp_out_bias",
        }  # fmt: skip

        def __init__(self, n, h):
            super().__init__(n, h)
            del self.up, self.down
            wide = nn.Linear(self.d, 4 * self.d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * self.d, self.d)
            self.mlp_ = nn.Sequential(*wide)

        def mlp(self, x):
            return self.mlp_(x)


class SharedNorm(Model):
    """One norm stands before every branch."""

    Block = Plain

    def __init__(self, n, h, depth):
        super().__init__(n, h, depth)
        for block in self.blocks:
            block.one = block.two = self.blocks[0].one


class SameQueries(Model):
    """Queries are keys."""

    class Block(Plain):
        def attention(self, x):
            return self.wo(attend(heads(self.wk(x), self.n), heads(self.wk(x), self.n), heads(self.wv(x), self.n)))

        def __init__(self, n, h):
            super().__init__(n, h)
            del self.wq


class Experts(Model):
    """A loop over experts that the data choose, a sigmoid router with a bias of the choice alone, a shared expert."""

    class Block(Plain):
        ROLES = Plain.ROLES | {
            "*.router.weight": "router", "*.choice": "router_bias", "*.gate.*": "mlp_gate", "*.ins.*": "mlp_in",
            "*.outs.*": "mlp_out",
        }  # fmt: skip

        def __init__(self, n, h):
            super().__init__(n, h)
            d = self.d
            self.router, self.choice = nn.Linear(d, 4, bias=False), nn.Parameter(torch.zeros(4))
            self.gate, self.ins, self.outs = (
                nn.ModuleList(nn.Linear(*sides, bias=False) for _ in range(4)) for sides in ((d, d), (d, d), (d, d))
            )

        def mlp(self, x):
            flat = x.flatten(0, 1)
            score = torch.sigmoid(self.router(flat))
            picked = (score + self.choice).topk(3, -1).indices
            weight = score.gather(-1, picked)
            weight = weight / weight.sum(-1, keepdim=True)
            summed = torch.zeros_like(flat)
            for number in range(4):
                rows, slot = (picked == number).nonzero(as_tuple=True)
                some = flat[rows]
                made = self.outs[number](F.silu(self.gate[number](some)) * self.ins[number](some))
                summed.index_add_(0, rows, made * weight[rows, slot, None])
            return summed.view_as(x) + super().mlp(x)


class BiasedDistances(Model):
    """A trained number for each distance and head, as the mask of the fused attention."""

    class Block(Plain):
        ROLES = Plain.ROLES | {"*.far.weight": "sink"}

        def __init__(self, n, h):
            super().__init__(n, h)
            self.far = nn.Embedding(32, h)

        def attention(self, x):
            place = torch.arange(x.shape[1])
            bias = self.far(place - place[:, None] + 16).permute(2, 0, 1)[None]
            q, k, v = (heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
            return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class BareNorms(Model):
    """Queries and keys are normalized, without gains."""

    class Block(Plain):
        def attention(self, x):
            q, k = (F.rms_norm(heads(w(x), self.n), (self.n,)) for w in (self.wq, self.wk))
            return self.wo(attend(q, k, heads(self.wv(x), self.n)))


class FirstAgain(Model):
    """The embeddings are added to the stream once more in the middle."""

    Block = Plain

    def body(self, x):
        first = x
        for number, block in enumerate(self.blocks):
            x = block(x + first if number == self.depth // 2 else x)
        return x


class DeepNorm(Model):
    """The stream is multiplied before each norm."""

    class Block(Plain):
        def forward(self, x):
            x = self.one(1.5 * x + self.attention(x))
            return self.two(1.5 * x + self.mlp(x))


class OwnMultipliers(Model):
    """A model that multiplies logits, branches, embeddings and outputs itself."""

    class Block(Plain):
        depth = 1

        def attention(self, x):
            q, k, v = (heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
            made = F.scaled_dot_product_attention(q, k, v, scale=3 / self.n)
            return self.wo(made.transpose(1, 2).flatten(2)) / self.depth

        def mlp(self, x):
            return super().mlp(x) / self.depth

    def __init__(self, n, h, depth):
        super().__init__(n, h, depth)
        for block in self.blocks:
            block.depth = depth

    def forward(self, ids):
        x = math.sqrt(self.d) * F.embedding(ids, self.table)
        return self.read(self.last(self.body(x))) / self.d


class GrowingHidden(Model):
    """Hidden units are multiplied by a number that follows the width."""

    class Block(Plain):
        def mlp(self, x):
            return self.down(F.gelu(self.up(x) * self.d**-0.25))


class FeatureSkips(Model):
    """The second half of the blocks reads two points of the stream side by side."""

    Block = Plain

    def __init__(self, n, h, depth):
        super().__init__(n, h, depth)
        self.merge = nn.Linear(2 * self.d, self.d, bias=False)

    def body(self, x):
        first = x
        x = self.blocks[0](x)
        x = self.merge(torch.cat([x, first], -1))
        for block in self.blocks[1:]:
            x = block(x)
        return x


class QueryPlaces(Model):
    """Queries have a trained row for each position."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.where = drawn(7, self.d, fan_in=1)

        def attention(self, x):
            q = self.wq(x) + self.where[: x.shape[1]]
            return self.wo(attend(heads(q, self.n), heads(self.wk(x), self.n), heads(self.wv(x), self.n)))


class NormPlaces(QueryPlaces):
    """Positions are added behind every norm."""

    class Block(QueryPlaces.Block):
        def attention(self, x):
            return Plain.attention(self, x + self.where[: x.shape[1]])


class StreamGain(Model):
    """The stream is multiplied by a trained vector before each sum."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.keep = nn.Parameter(torch.ones(self.d))

        def forward(self, x):
            x = self.keep * x + self.attention(self.one(x))
            return x + self.mlp(self.two(x))


class HiddenGain(Model):
    """Hidden units are multiplied by a trained vector, as (IA)^3 does."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.vector = nn.Parameter(torch.ones(4 * self.d))

        def mlp(self, x):
            return self.down(F.gelu(self.up(x)) * self.vector)


class QueryMlp(Model):
    """Queries come from an MLP."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.more = nn.Linear(self.d, self.d, bias=False)

        def attention(self, x):
            q = self.wq(F.gelu(self.more(x)))
            return self.wo(attend(heads(q, self.n), heads(self.wk(x), self.n), heads(self.wv(x), self.n)))


class HeadTemperature(Model):
    """Queries and keys are normalized, and each head has a trained temperature."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.hot = nn.Parameter(torch.ones(h, 1, 1))

        def attention(self, x):
            q, k = (F.rms_norm(heads(w(x), self.n), (self.n,)) for w in (self.wq, self.wk))
            return self.wo(attend(q * self.hot, k, heads(self.wv(x), self.n)))


class DeepPrompts(Model):
    """Trained tokens are put before those of every layer."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.tokens = drawn(1, self.d, fan_in=1)

        def forward(self, x):
            return super().forward(torch.cat([self.tokens.expand(len(x), 1, -1), x[:, 1:]], 1))


class SideAdapter(Model):
    """A bottleneck of two numbers stands beside every MLP."""

    class Block(Plain):
        def __init__(self, n, h):
            super().__init__(n, h)
            self.small, self.wide = nn.Linear(self.d, 2, bias=False), nn.Linear(2, self.d, bias=False)

        def mlp(self, x):
            return super().mlp(x) + self.wide(F.relu(self.small(x)))


class BentValues(Model):
    """A nonlinearity stands on the output of attention."""

    class Block(Plain):
        def attention(self, x):
            return self.wo(F.gelu(attend(*(heads(w(x), self.n) for w in (self.wq, self.wk, self.wv)))))


READ = (OneMatrix, HeadMajor, Sequential, Patches, Experts, BiasedDistances, BareNorms, OwnMultipliers)
REFUSED = (
    SharedKeys, NormalizedWeights, ScaledWeights, SigmoidAttention, TokenMixer, Prefixes, Highway, SharedNorm,
    SameQueries, FirstAgain, DeepNorm, GrowingHidden, FeatureSkips, QueryPlaces, NormPlaces, StreamGain, HiddenGain,
    QueryMlp, HeadTemperature, DeepPrompts, SideAdapter, BentValues,
)  # fmt: skip


def roles_of(kind):
    """Return the map from patterns of names to parts, written by hand."""
    own = getattr(kind.Block, "ROLES", {}) if issubclass(kind, Model) else {}
    return {**(Model.ROLES if issubclass(kind, Model) else {}), **own, **kind.ROLES}

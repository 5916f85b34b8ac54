"""Events of the forward pass that no transformer has are refused; the usual ones, written otherwise, are read."""

import math

import pytest

from manyheads.errors import UsageError
from manyheads.scaling import BaseHyperparameters, Parametrization, audit_model, infer_roles
from manyheads.transformer import Shape

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

strange = pytest.importorskip("tests.models.strange")
Plain, drawn, heads = strange.Plain, strange.drawn, strange.heads
pytestmark = pytest.mark.torch
BASE = (8, 4, 2)


def kind_of(block=None, model=None, own=None, last=None):
    """A class of models with other methods, and more parameters of its blocks or of itself."""

    def start_block(self, n, h):
        Plain.__init__(self, n, h)
        (own or (lambda _: None))(self)

    def start(self, n, h, depth):
        strange.Model.__init__(self, n, h, depth)
        for each in self.blocks:
            each.depth = depth
        (last or (lambda _: None))(self)

    inner = type("Block", (Plain,), {"__init__": start_block} | (block or {}))
    return type("Kind", (strange.Model,), {"__init__": start, "Block": inner} | (model or {}))


def infer(**change):
    """Infer the roles of a changed model."""
    kind = kind_of(**change)
    return infer_roles(lambda s: kind(s.key_dim, s.heads, s.depth), BASE)


def mlp(change):
    """What the MLP puts out, changed."""
    return {"block": {"mlp": lambda self, x: change(self, Plain.mlp(self, x), x)}}


def hidden(change):
    """The hidden units, changed."""
    return {"block": {"mlp": lambda self, x: self.down(change(self, self.up(x), x))}}


def sides(change):
    """Queries, keys and values, changed."""

    def attention(self, x):
        parts = [heads(w(x), self.n) for w in (self.wq, self.wk, self.wv)]
        return self.wo(F.scaled_dot_product_attention(*change(self, *parts)).transpose(1, 2).flatten(2))

    return {"block": {"attention": attention}}


def logits(change):
    """Attention written out, from its logits."""

    def attention(self, x):
        q, k, v = (heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
        return self.wo(change(self, q @ k.mT * self.n**-0.5, v, x).transpose(1, 2).flatten(2))

    return {"block": {"attention": attention}}


def outputs(change):
    """The read-out, changed."""
    whole = {"forward": lambda self, ids: change(self, self.last(self.body(F.embedding(ids, self.table))), ids)}
    return {"model": whole}


def start(change):
    """What the first block reads, changed."""
    return {"model": {"forward": lambda self, ids: self.read(self.last(self.body(change(self, ids))))}}


def have(name, *shape, std=1.0):
    """A parameter more; a side is a number, or "d", "n" or "h"."""
    return lambda self: setattr(
        self, name, nn.Parameter(std * torch.randn([getattr(self, s) if isinstance(s, str) else s for s in shape]))
    )


def words(self, ids):
    return F.embedding(ids, self.table)


def explicit(weights):
    return lambda self, a, v, x: weights(self, a, x) @ v


def shift(x, count=1):
    return F.pad(x, (0, 0, count, 0))[:, : x.shape[1]]


def one_buffer(self, q, k, v):
    kept = torch.zeros(2, *k.shape)
    kept[0, :], kept[1, :] = k, v
    return q, kept[0], kept[1]


def written_zeros(self, q, k, v):
    q = q.clone()
    q[q < 0] = 0.0
    return q, k, v


def split_write(self, f, x):
    made = torch.zeros_like(x)
    made[:, :3], made[:, 3:] = f[:, :3] / self.depth, f[:, 3:]
    return made


def experts(self):
    del self.up, self.down
    self.ins, self.outs = drawn(self.h, self.d, 2 * self.d), drawn(self.h, 2 * self.d, self.d)


def many(self):
    del self.up, self.down
    self.ins, self.outs = (
        nn.ParameterList(drawn(*s) for _ in range(self.h)) for s in ((self.d, 2 * self.d), (2 * self.d, self.d))
    )


def mixed(self, x):
    return (torch.relu(x[:, :, None, None] @ self.ins) @ self.outs)[:, :, :, 0].sum(2)


def chosen(self, x):
    return Plain.attention(self, x) * self.pick(x).softmax(-1).topk(2, -1).values[..., :1]


def realformer(self, x):
    kept = 0.0
    for each in self.blocks:
        z = each.one(x)
        q, k, v = (heads(w(z), self.n) for w in (each.wq, each.wk, each.wv))
        kept = q @ k.mT * self.n**-0.5 + kept
        x = x + each.wo((kept.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + each.mlp(each.two(x))
    return x


def all_points(self, x):
    points = [x := each(x) for each in self.blocks]
    return torch.stack(points).sum(0)


def writes_parameter(self, f, x):
    self.scratch.mul_(0.5)
    return f


def gated_branch(change):
    block = {"mlp": lambda s, x: change(s, s.g(x).sigmoid(), Plain.mlp(s, x))}
    return {"block": block, "own": lambda s: setattr(s, "g", nn.Linear(s.d, 1, bias=False))}


CONSTANT = "a product with a constant matrix that neither turns nor picks entries"
NUMBER = "not one number"
STATISTIC = "a sum over features that does not make it a norm"
BEHIND = r"a nonlinearity or a product stands between blocks.0.down.weight and the stream"
BENT = "blocks.0.wq.weight: a nonlinearity stands behind the query"
SOFTMAX = "attention weights are not a softmax over the keys"
SHARES = "numbers that sum to one"
STREAM = "a nonlinearity on the stream itself"
ADDED = "an activation is added to the logits"
REFUSED = {
    # Products with constants
    "constant matrix on hidden units": (hidden(lambda s, h, x: F.relu(h) @ torch.ones(4 * s.d, 4 * s.d)), CONSTANT),
    "tokens mixed by constants": (mlp(lambda s, f, x: torch.ones(7, 7) / 7 @ f), CONSTANT),
    "causal means of queries": (sides(lambda s, q, k, v: (torch.ones(7, 7).tril() / 7 @ q, k, v)), CONSTANT),
    "a constant linear map": (hidden(lambda s, h, x: F.relu(F.linear(h, torch.rand(4 * s.d, 4 * s.d)))), CONSTANT),
    "words in bags": (start(lambda s, ids: (F.one_hot(ids, 31) + F.one_hot(ids * 0, 31)).float() @ s.table), CONSTANT),
    # Sums
    "a stack of the layers": ({"model": {"body": all_points}}, "two points of the stream are added"),
    "as many experts as heads": ({"block": {"mlp": mixed}, "own": experts}, NUMBER),
    "a stack of one branch": (mlp(lambda s, f, x: torch.stack([f] * s.h).sum(0)), NUMBER),
    "a mean with zeros": (
        mlp(lambda s, f, x: torch.stack([f, *[torch.zeros_like(f)] * (s.depth - 1)]).mean(0)),
        "as terms of a sum",
    ),
    "the stream twice": (
        {"block": {"forward": lambda s, x: (y := Plain.forward(s, x)) + y}},
        "multiplied by 2 between",
    ),
    "tokens shifted and added": (mlp(lambda s, f, x: f + shift(f)), NUMBER),
    "keys of two tokens": (sides(lambda s, q, k, v: (q, k + k.roll(1, 2), v)), NUMBER),
    # Biases and other added parameters
    "a bias behind 1/L": (mlp(lambda s, f, x: f / s.depth + s.b) | {"own": have("b", "d")}, "b is multiplied by"),
    "a bias behind 1/N of queries": (
        {
            "block": {
                "attention": lambda s, x: s.wo(
                    strange.attend(heads(s.wq(x) / s.n + s.b, s.n), heads(s.wk(x), s.n), heads(s.wv(x), s.n))
                )
            },
            "own": have("b", "d"),
        },
        "b is multiplied by",
    ),
    "a bias of outputs over D": (
        outputs(lambda s, z, ids: (s.read(z) + s.b) / s.d) | {"last": have("b", 31)},
        "b is multiplied by",
    ),
    "log-probabilities of outputs with a bias over D": (
        outputs(lambda s, z, ids: ((s.read(z) + s.b) / s.d).log_softmax(-1)) | {"last": have("b", 31)},
        "b is multiplied by",
    ),
    "a sink over N": (
        logits(explicit(lambda s, a, x: ((a * s.n**0.5 + s.b[:, None, None]) / s.n).softmax(-1)))
        | {"own": have("b", "h")},
        "b is multiplied by .* in the logits",
    ),
    "a sink times the root of H": (
        logits(explicit(lambda s, a, x: (a + s.h**0.5 * s.b[:, None, None]).softmax(-1))) | {"own": have("b", "h")},
        "b is multiplied by .* in the logits",
    ),
    "positions times the root of D": (
        start(lambda s, ids: (words(s, ids) + s.p[:7]) * s.d**0.5) | {"last": have("p", 9, "d")},
        "p is multiplied by",
    ),
    "a marker times the root of D": (
        start(lambda s, ids: torch.cat([s.p.expand(2, 1, -1), words(s, ids)], 1) * s.d**0.5)
        | {"last": have("p", 1, "d")},
        "p is multiplied by",
    ),
    "a marker alone times D": (
        start(lambda s, ids: torch.cat([s.d * s.p.expand(2, 1, -1), words(s, ids)], 1)) | {"last": have("p", 1, "d")},
        "p is multiplied by",
    ),
    # Gates and uneven constants
    "a gate over L": (gated_branch(lambda s, g, f: g / s.depth * f), "down.weight is multiplied by .* by its gate"),
    "a gate times the root of H": (
        gated_branch(lambda s, g, f: f * (s.h**0.5 * g)),
        "down.weight is multiplied by .* by its gate",
    ),
    "uneven queries": (sides(lambda s, q, k, v: (q * torch.linspace(1, 2, s.n) / s.n, k, v)), NUMBER),
    "uneven values": (sides(lambda s, q, k, v: (q, k, v * torch.linspace(1, 2, s.n))), NUMBER),
    "an uneven branch": (mlp(lambda s, f, x: f * torch.linspace(1, 2, s.d) / s.depth), NUMBER),
    "uneven outputs": (outputs(lambda s, z, ids: s.read(z) / torch.linspace(1, 2, 31)), NUMBER),
    "uneven embeddings": (start(lambda s, ids: words(s, ids) * torch.linspace(1, 2, s.d)), NUMBER),
    "waves without a turn": (
        sides(lambda s, q, k, v: (q * torch.arange(s.n).cos() + q.flip(-1) * torch.arange(s.n).cos(), k, v)),
        NUMBER,
    ),
    # Softmax and its kin
    "softmax over heads": (logits(explicit(lambda s, a, x: a.softmax(1))), SOFTMAX),
    "softmax over queries": (logits(explicit(lambda s, a, x: a.softmax(-2))), SOFTMAX),
    "exponentials alone": (logits(explicit(lambda s, a, x: a.exp())), SOFTMAX),
    "exponentials over the sum of queries": (
        logits(explicit(lambda s, a, x: (e := a.exp()) / e.sum(-2, keepdim=True))),
        SOFTMAX,
    ),
    "a key-value memory": (hidden(lambda s, h, x: h.softmax(-1)), SHARES),
    "softmax of groups": (hidden(lambda s, h, x: h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2)), SHARES),
    "hidden units over their sum": (hidden(lambda s, h, x: (r := F.relu(h)) / r.sum(-1, keepdim=True)), SHARES),
    "softmax times hidden units": (
        {
            "block": {"mlp": lambda s, x: s.down(s.g(x).softmax(-1) * s.up(x))},
            "own": lambda s: setattr(s, "g", nn.Linear(s.d, 4 * s.d, bias=False)),
        },
        SHARES,
    ),
    "sums along hidden units": (hidden(lambda s, h, x: F.relu(h).cumsum(-1)), "the operation cumsum"),
    # The stream, its norms and statistics
    "a nonlinear stream": ({"block": {"forward": lambda s, x: F.relu(Plain.forward(s, x))}}, STREAM),
    "a stream that gates itself": (
        {"block": {"forward": lambda s, x: (y := Plain.forward(s, x)) * y.sigmoid()}},
        STREAM,
    ),
    "nonlinear embeddings": (start(lambda s, ids: F.gelu(words(s, ids) * s.d**0.5)), STREAM),
    "a nonlinearity between norm and matrix": (
        {"block": {"mlp": lambda s, x: Plain.mlp(s, F.silu(x))}},
        STREAM,
    ),
    "normed embeddings times the root of D": (
        start(lambda s, ids: F.rms_norm(words(s, ids), (s.d,)) * s.d**0.5),
        "behind a norm: no table can carry",
    ),
    "a branch times the length of the stream": (mlp(lambda s, f, x: f * x.norm(dim=-1, keepdim=True)), STATISTIC),
    "hidden units times a length": (hidden(lambda s, h, x: F.relu(h * x.norm(dim=-1, keepdim=True))), STATISTIC),
    "hidden units over the length of the stream": (
        hidden(lambda s, h, x: F.relu(h / x.norm(dim=-1, keepdim=True))),
        STATISTIC,
    ),
    "over the largest": (hidden(lambda s, h, x: F.relu(h / h.abs().amax(-1, keepdim=True))), STATISTIC),
    "times their own mean": (sides(lambda s, q, k, v: (q * q.square().mean(-1, keepdim=True), k, v)), STATISTIC),
    # Masks that activations make of themselves
    "a stream masked by its sign": ({"block": {"mlp": lambda s, x: Plain.mlp(s, x * (x > 0))}}, STREAM),
    "positive queries by a product": (sides(lambda s, q, k, v: (q * (q > 0).float(), k, v)), BENT),
    "positive queries by filling": (sides(lambda s, q, k, v: (q.masked_fill(q < 0, 0.0), k, v)), BENT),
    "positive queries by writing": (sides(written_zeros), BENT),
    "positive keys by a choice": (
        sides(lambda s, q, k, v: (q, torch.where(k > 0, k, torch.zeros(())), v)),
        "blocks.0.wk.weight: a nonlinearity stands behind the key",
    ),
    # Behind the last matrix of a branch
    "a branch that ends in GELU": (mlp(lambda s, f, x: F.gelu(f)), BEHIND),
    "a branch that ends in ReLU": (mlp(lambda s, f, x: F.relu(f)), BEHIND),
    "a branch masked by its sign": (mlp(lambda s, f, x: f * (f > 0)), BEHIND),
    "a branch that ends in tanh": (mlp(lambda s, f, x: f.tanh()), BEHIND),
    "a branch that ends in a square": (mlp(lambda s, f, x: f.square()), BEHIND),
    "a branch that ends in a gated half": (
        {
            "block": {"mlp": lambda s, x: F.glu(s.end(F.relu(s.up(x))))},
            "own": lambda s: setattr(s, "end", nn.Linear(4 * s.d, 2 * s.d, bias=False)),
        },
        "stands between blocks.0.end.weight and the stream",
    ),
    "a branch that ends in a product": (
        {
            "block": {"mlp": lambda s, x: s.down(h := F.relu(s.up(x))) * s.end(h)},
            "own": lambda s: setattr(s, "end", nn.Linear(4 * s.d, s.d, bias=False)),
        },
        "stands between blocks.0.down.weight, blocks.0.end.weight and the stream",
    ),
    "a sum of read-outs": (
        outputs(lambda s, z, ids: s.read(z) + s.more(z)) | {"last": lambda s: setattr(s, "more", nn.Linear(s.d, 31))},
        "the outputs are a sum of products with more.weight and read.weight",
    ),
    "log-probabilities of a sum of read-outs": (
        outputs(lambda s, z, ids: (s.read(z) + z @ s.more).log_softmax(-1)) | {"last": have("more", "d", 31)},
        "the outputs are a sum of products with more and read.weight",
    ),
    # Logits
    "logits and lengths of keys": (
        {
            "block": {
                "attention": lambda s, x: s.wo(
                    (
                        (
                            heads(s.wq(x), s.n) @ (k := heads(s.wk(x), s.n)).mT - k.square().sum(-1)[..., None, :]
                        ).softmax(-1)
                        @ heads(s.wv(x), s.n)
                    )
                    .transpose(1, 2)
                    .flatten(2)
                )
            }
        },
        ADDED,
    ),
    "a forget gate": (
        logits(explicit(lambda s, a, x: (a + F.logsigmoid(s.g(x)).mT[:, :, None]).softmax(-1)))
        | {"own": lambda s: setattr(s, "g", nn.Linear(s.d, s.h))},
        ADDED,
    ),
    "logits over their length": (
        logits(explicit(lambda s, a, x: (a / a.norm(dim=-1, keepdim=True)).softmax(-1))),
        "logits are normalized before",
    ),
    "logits times an activation": (
        logits(explicit(lambda s, a, x: (a * x[..., : s.h].mT[:, :, None]).softmax(-1))),
        "logits or patterns are multiplied by an activation",
    ),
    "logits of the layer before": ({"model": {"body": realformer}}, "logits or patterns are a sum of several products"),
    "attention that a router weights": (
        {"block": {"attention": chosen}, "own": lambda s: setattr(s, "pick", nn.Linear(s.d, 3))},
        "a router weights the output of attention",
    ),
    # Writes
    "a branch written in two parts": (mlp(split_write), NUMBER),
    "keys and values in one buffer": (sides(one_buffer), "a buffer holds different products in its parts"),
    "a parameter written in place": (
        mlp(writes_parameter) | {"own": have("scratch", 3)},
        "blocks.0.scratch is written to in the forward pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_event_of_no_transformer_is_refused(name):
    change, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason):
        infer(**change)


def turned(q):
    one, other = q.chunk(2, -1)
    places = torch.arange(q.shape[2])[:, None] * 10.0 ** -torch.arange(q.shape[-1] // 2)
    return torch.cat([one * places.cos() - other * places.sin(), other * places.cos() + one * places.sin()], -1)


def turned_planes(q):
    places = torch.arange(q.shape[2])[:, None] * 10.0 ** -torch.arange(q.shape[-1] // 2)
    plane = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(places), places)
    return torch.view_as_real(plane).flatten(-2)


def fused(self):
    del self.wq, self.wk, self.wv
    self.mix = nn.Linear(self.d, 3 * self.d, bias=False)


def scaled_in_place(self, x):
    q, k, v = (heads(each, self.n) for each in self.mix(x).chunk(3, -1))
    q *= self.n**-0.5
    v.mul_(1 / self.depth)
    return self.wo(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2))


def loss(self, z, ids):
    return F.cross_entropy((self.read(z) / self.d).flatten(0, 1), ids.flatten())


READ = {
    "a turn of hidden units over L": (
        mlp(lambda s, f, x: f @ torch.eye(s.d).flip(0) / s.depth),
        {"branch mlp_out": "0.5 L^-1"},
    ),
    "a scaled identity": (mlp(lambda s, f, x: f @ (torch.eye(s.d) / s.h)), {"branch mlp_out": "0.25 H^-1"}),
    "one-hot words times the root of D": (
        start(lambda s, ids: (F.one_hot(ids, 31) * s.d**0.5) @ s.table),
        {"embedding": "5.65685 N^1/2 H^1/2"},
    ),
    "a branch as often as there are heads": (mlp(lambda s, f, x: sum([f] * s.h)), {"branch mlp_out": "4 H"}),
    "a branch behind a fixed mask": (
        mlp(lambda s, f, x: f * (torch.arange(7) > 2)[:, None] / s.depth),
        {"branch mlp_out": "0.5 L^-1"},
    ),
    "hidden units masked by their sign": (
        hidden(lambda s, h, x: 0.5 * h * (h > 0)),
        {"logit": "0.353553 N^-1/2", "branch mlp_out": "1"},
    ),
    "a branch and its half": (mlp(lambda s, f, x: f + f / 2), {"branch mlp_out": "1.5"}),
    "a bias within 1/L": (
        mlp(lambda s, f, x: (f + s.b) / s.depth) | {"own": have("b", "d")},
        {"branch mlp_out": "0.5 L^-1"},
    ),
    "a bias behind outputs over D": (
        outputs(lambda s, z, ids: s.read(z) / s.d + s.b) | {"last": have("b", 31)},
        {"output": "0.03125 N^-1 H^-1"},
    ),
    "a gate of a branch over L": (gated_branch(lambda s, g, f: g * (f / s.depth)), {"branch mlp_out": "0.5 L^-1"}),
    "turns in pairs": (sides(lambda s, q, k, v: (0.5 * turned(q), turned(k), v)), {"logit": "0.176777 N^-1/2"}),
    "turns of the plane": (
        sides(lambda s, q, k, v: (turned_planes(q), turned_planes(k), v)),
        {"logit": "0.353553 N^-1/2"},
    ),
    "rows of a table": (start(lambda s, ids: s.table[ids]), {"embedding": "1"}),
    "selected rows": (
        start(lambda s, ids: s.table.index_select(0, ids.flatten()).view(2, -1, s.d)),
        {"embedding": "1"},
    ),
    "only a loss of outputs over D": (outputs(loss), {"output": "0.03125 N^-1 H^-1"}),
    "outputs over D and their loss": (
        outputs(lambda s, z, ids: (s.read(z) / s.d, loss(s, z, ids))),
        {"output": "0.03125 N^-1 H^-1"},
    ),
    "queries and values scaled in place": (
        {"block": {"attention": scaled_in_place}, "own": fused},
        {"logit": "0.353553 N^-1/2", "branch output": "0.5 L^-1"},
    ),
    "exponentials over the sum of keys": (
        logits(explicit(lambda s, a, x: (e := (a - a.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True))),
        {"logit": "0.353553 N^-1/2"},
    ),
    "positions and words, each as they are": (
        start(lambda s, ids: words(s, ids) * s.d**0.5 + s.p[:7]) | {"last": have("p", 9, "d")},
        {"embedding": "5.65685 N^1/2 H^1/2", "position p": "1"},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_usual_event_in_another_spelling_is_read(name):
    change, numbers = READ[name]
    found = infer(**change).multipliers
    assert found | numbers == found
    assert not any(math.isnan(float(each.split()[0].rstrip(","))) for each in found.values())


ROLE_MAPS = {  # name, its part, the shape, whether all factors are folded, what is said
    "a bias of outputs over D": ("b", "unembedding_bias", (8, 8, 2), False, r"b takes .* 0.015625, which is D\^-1"),
    "a sink over N": ("*.b", "sink", (16, 4, 2), True, r"blocks.0.b takes .* times 0.0625, which is N\^-1"),
    "a sink times the root of H": ("*.b", "sink", (8, 8, 2), True, r"blocks.0.b takes .* 2.82843, which is H\^1/2"),
    "a gate times the root of H": ("*.g.weight", "router", (8, 8, 2), True, r"its gate times 2.82843, which is H\^1/2"),
    "a gate over L": ("*.g.weight", "router", (8, 4, 4), True, r"down takes its gate times 0.25, which is L\^-1"),
    "a bias behind outputs over D": ("b", "unembedding_bias", (8, 8, 2), False, None),
}


@pytest.mark.parametrize("name", ROLE_MAPS)
def test_biases_sinks_and_gates_are_measured_where_roles_are_given(name):
    pattern, part, shape, folded, reason = ROLE_MAPS[name]
    kind = kind_of(**(REFUSED if reason else READ)[name][0])
    model, roles = kind(*shape), strange.roles_of(kind) | {pattern: part}
    given = model, torch.optim.AdamW(model.parameters(), 1.0), BaseHyperparameters(1.0), roles, Shape(*shape), folded
    if reason:
        with pytest.raises(UsageError, match=reason):
            audit_model(Parametrization(base=BASE), *given)
    else:
        assert not any("biases" in note for note in audit_model(Parametrization(base=BASE), *given).notes)

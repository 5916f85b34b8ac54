"""Sides, uses and multipliers that contradict a role: one model for each, changed in one place, refused by name."""

import pytest

from manyheads.errors import UsageError
from manyheads.scaling import BaseHyperparameters, Parametrization, infer_roles, torch_groups
from manyheads.transformer import Shape

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

strange = pytest.importorskip("tests.models.strange")
Plain, drawn, heads, attend = strange.Plain, strange.drawn, strange.heads, strange.attend
pytestmark = pytest.mark.torch
BASE = (8, 4, 2)


def made(block=None, model=None, weights=None, ends=None):
    """Return a builder; `weights` and `ends` add named parameters and modules to blocks and to the model."""

    def block_init(self, n, h):
        Plain.__init__(self, n, h)
        for name, each in (weights(self, n, h) if weights else {}).items():
            setattr(self, name, each)

    inner = type("Block", (Plain,), {"__init__": block_init, **(block or {})})

    def model_init(self, n, h, depth):
        strange.Model.__init__(self, n, h, depth)
        for name, each in (ends(self, n, h, depth) if ends else {}).items():
            setattr(self, name, each)

    kind = type("Kind", (strange.Model,), {"Block": inner, "__init__": model_init, **(model or {})})
    return lambda shape: kind(shape.key_dim, shape.heads, shape.depth)


def linear(*sides):
    return nn.Linear(*sides, bias=False)


def qkv(block, x):
    return [heads(w(x), block.n) for w in (block.wq, block.wk, block.wv)]


def mixed(change, weights=None):
    """Attention behind a change of queries, keys and values."""
    return made({"attention": lambda b, x: b.wo(attend(*change(b, x, *qkv(b, x))))}, weights=weights)


def core(change, weights=None):
    """Attention with a change of what its heads put out."""
    return made({"attention": lambda b, x: change(b, x, attend(*qkv(b, x)))}, weights=weights)


def mlp(change, weights=None):
    return made({"mlp": change}, weights=weights)


def ended(change, ends=None):
    """Another read-out of the last norm's output."""
    forward = {"forward": lambda m, ids: change(m, m.last(m.body(F.embedding(ids, m.table))))}
    return made(model=forward, ends=ends)


def begun(change, ends=None):
    forward = {"forward": lambda m, ids: m.read(m.last(m.body(change(m, ids))))}
    return made(model=forward, ends=ends)


def experts(*widths, shared=0):
    """Three experts chosen by data, of a width of its own for each, and a shared one."""

    def weights(b, n, h):
        sizes = [width(n * h) if callable(width) else width for width in widths]
        ups, downs = ([linear(b.d, size) for size in sizes], [linear(size, b.d) for size in sizes])
        own = {"s1": linear(b.d, shared), "s2": linear(shared, b.d)} if shared else {}
        return {"router": linear(b.d, 3), "up": nn.ModuleList(ups), "down": nn.ModuleList(downs), **own}

    def forward(b, x):
        share = b.router(x).softmax(-1)
        top, where = share.topk(2, -1)
        share = torch.zeros_like(share).scatter(-1, where, top)
        parts = torch.stack([down(F.relu(up(x))) for up, down in zip(b.up, b.down, strict=True)], -2)
        total = (parts * share[..., None]).sum(-2)
        return total + b.s2(F.relu(b.s1(x))) if shared else total

    return mlp(forward, weights)


def values_of(width):
    """Values of another dimension than keys."""

    def weights(b, n, h):
        return {"wv": linear(b.d, h * width(n)), "wo": linear(h * width(n), b.d)}

    def attention(b, x):
        return b.wo(attend(heads(b.wq(x), b.n), heads(b.wk(x), b.n), b.wv(x).unflatten(-1, (b.h, -1)).transpose(1, 2)))

    return made({"attention": attention}, weights=weights)


def low_rank(name):
    """An adapter of rank 2 beside a matrix."""

    def weights(b, n, h):
        matrix = getattr(b, name)
        low = nn.Sequential(linear(matrix.in_features, 2), linear(2, matrix.out_features))
        return {"plain": matrix, name: None, "low": low}

    def sum_of(b, x):
        return b.plain(x) + b.low(x)

    if name == "wo":
        return core(lambda b, x, y: sum_of(b, y), weights)
    if name == "up":
        return mlp(lambda b, x: b.down(F.relu(sum_of(b, x))), weights)
    return mlp(lambda b, x: sum_of(b, F.relu(b.up(x))), weights)


def within_heads(place):
    def change(b, x, *parts):
        return [torch.einsum("bhtn,hnm->bhtm", t, b.r) if k == place else t for k, t in enumerate(parts)]

    return mixed(change, lambda b, n, h: {"r": drawn(h, n, n, fan_in=n)})


def gated(what):
    """Values, or hidden units, under a gate of fixed rows."""
    if what == "heads":

        def change(b, x, q, k, v):
            return q, k, v * b.gate(x).sigmoid().transpose(1, 2)[..., None]

        return mixed(change, lambda b, n, h: {"gate": linear(b.d, h)})
    rows = {"one": lambda b, h: 1, "two": lambda b, h: 2}[what]

    def forward(b, x):
        gate = b.gate(x).sigmoid().repeat_interleave(4 * b.d // b.gate.out_features, -1)
        return b.down(b.up(x) * gate)

    return mlp(forward, lambda b, n, h: {"gate": linear(b.d, rows(b, h))})


def grouped(count, order):
    """Fewer heads of keys and values, each taken in an order."""

    def weights(b, n, h):
        return {"wk": linear(b.d, count(h) * n), "wv": linear(b.d, count(h) * n)}

    def change(b, x, q, k, v):
        return q, *(torch.stack([t[:, each % t.shape[1]] for each in order(q.shape[1])], 1) for t in (k, v))

    return mixed(change, weights)


def beside_mlp(b, x):
    z = b.one(x)
    return x + b.both(torch.cat([attend(*qkv(b, z)), F.relu(b.up(z))], -1))


def same_end(b, x):
    x = x + b.attention(b.one(x))
    return x + b.mlp(b.two(x)) + b.down(F.relu(b.other(b.two(x))))


def across(m, x):
    memory = F.embedding(m.ids, m.more)
    for b in m.blocks:
        z = b.one(x)
        q, k, v = heads(b.wq(z), b.n), heads(b.wk(memory), b.n), heads(b.wv(memory), b.n)
        x = x + b.wo(attend(q, k, v))
        x = x + b.mlp(b.two(x))
    return x


def crossed():
    def forward(m, ids):
        m.ids = ids.flip(1)
        return m.read(m.last(across(m, F.embedding(ids, m.table))))

    return made(model={"forward": forward}, ends=lambda m, n, h, depth: {"more": drawn(31, n * h)})


REFUSED = {
    "read-out of a bottleneck": (
        ended(
            lambda m, x: m.out(m.narrow(x)),
            lambda m, n, h, depth: {"narrow": linear(m.d, 16), "out": linear(16, 31), "read": None},
        ),
        r"out.weight sums over 16 numbers, and the table takes 32 at build\(16, 4, 2\)",
    ),
    "read-out of 2 N": (
        ended(
            lambda m, x: m.out(m.narrow(x).relu()),
            lambda m, n, h, depth: {"narrow": linear(m.d, 2 * n), "out": linear(2 * n, 31), "read": None},
        ),
        r"out.weight sums over 16 numbers, and the table takes 32 at build\(8, 8, 2\)",
    ),
    "read-out of a slice": (
        ended(lambda m, x: m.out(x[..., :16]), lambda m, n, h, depth: {"out": linear(16, 31), "read": None}),
        "out.weight sums over 16 numbers, and the table takes 32",
    ),
    "adapter of the read-out": (
        ended(lambda m, x: m.read(x) + m.b(m.a(x)), lambda m, n, h, depth: {"a": linear(m.d, 2), "b": linear(2, 31)}),
        "the outputs are a sum of products with b.weight and read.weight",
    ),
    "experts of two fixed widths": (experts(8, 16, 8), "down.0.weight sums over 8 numbers, and the table takes 16"),
    "a shared expert of fixed width": (
        experts(*[lambda d: d] * 3, shared=12),
        "s2.weight sums over 12 numbers, and the table takes 24",
    ),
    "values of six": (values_of(lambda n: 6), "wo.weight sums over 24 numbers, and the table takes 48"),
    "values of four more": (values_of(lambda n: n + 4), "wo.weight sums over 80 numbers, and the table takes 96"),
    "hidden units summed in groups": (
        mlp(
            lambda b, x: b.down(b.wide(x).unflatten(-1, (b.h, -1)).sum(-2).relu()),
            lambda b, n, h: {"up": None, "wide": linear(b.d, 4 * b.d * h)},
        ),
        "wide.weight: before a nonlinearity, what is multiplied is not one number",
    ),
    "values gated by head": (gated("heads"), "gate.weight puts out 4 numbers, and the table takes 8"),
    "hidden units under one gate": (gated("one"), "gate.weight puts out 1 numbers, and the table takes 2"),
    "hidden units under two gates": (gated("two"), "gate.weight puts out 2 numbers, and the table takes 4"),
    "a matrix within heads of queries": (within_heads(0), "blocks.0.r: rank of queries 8 follows N alone"),
    "a matrix within heads of values": (within_heads(2), "blocks.0.r: rank of keys and values 8 follows N alone"),
    "in and out of an MLP in one matrix": (
        mlp(lambda b, x: F.linear(F.relu(b.up(x)), b.up.weight.T), lambda b, n, h: {"down": None}),
        "up.weight: it reads the stream and another weight: the sum of these gradients is not derived",
    ),
    "in and out of an MLP in one array": (
        mlp(
            lambda b, x: F.relu(x @ b.both[0]) @ b.both[1].T,
            lambda b, n, h: {"up": None, "down": None, "both": drawn(2, b.d, 4 * b.d, fan_in=b.d)},
        ),
        "blocks.0.both: it reads the stream and another weight",
    ),
    "queries and output in one matrix": (
        core(lambda b, x, y: b.wq(y), lambda b, n, h: {"wo": None}),
        "wq.weight: it reads the stream and attention",
    ),
    **{
        f"an adapter of {name}": (low_rank(name), "product of low rank beside a full matrix")
        for name in ("wo", "up", "down")
    },
    "bent queries": (
        mixed(lambda b, x, q, k, v: (F.elu(q), k, v)),
        "wq.weight: a nonlinearity stands behind the query",
    ),
    "bent keys": (mixed(lambda b, x, q, k, v: (q, k.relu(), v)), "wk.weight: a nonlinearity stands behind the key"),
    "gated queries": (
        mixed(
            lambda b, x, q, k, v: (q * heads(b.gate(x).sigmoid(), b.n), k, v),
            lambda b, n, h: {"gate": linear(b.d, b.d)},
        ),
        "gate.weight: a nonlinearity stands behind the query",
    ),
    "a pool of hidden units": (
        mlp(lambda b, x: Plain.mlp(b, x) * b.up(x).mean(-1, keepdim=True)),
        "down.weight: on its branch, what is multiplied is not one number",
    ),
    "outputs of many factors": (
        ended(lambda m, x: m.read(x) * (torch.linspace(1, 2, 31) / m.d)),
        "read.weight: on outputs, what is multiplied is not one number",
    ),
    "branches of many factors": (
        mlp(lambda b, x: Plain.mlp(b, x) / x.abs().sum(-1, keepdim=True)),
        "down.weight: on its branch, what is multiplied is not one number",
    ),
    "one gain of queries and keys": (
        mixed(
            lambda b, x, q, k, v: (F.rms_norm(q, (b.n,), b.g), F.rms_norm(k, (b.n,), b.g), v),
            lambda b, n, h: {"g": nn.Parameter(torch.ones(n))},
        ),
        "blocks.0.g: one gain of queries and keys: it has two roles",
    ),
    "narrow embeddings": (
        begun(
            lambda m, ids: m.widen(F.embedding(ids, m.few)),
            lambda m, n, h, depth: {"table": None, "few": drawn(31, 12), "widen": linear(12, m.d)},
        ),
        "widen.weight: between the embeddings and the stream, it has no role$",
    ),
    "embeddings behind an MLP": (
        begun(
            lambda m, ids: m.b(m.a(F.embedding(ids, m.table)).relu()),
            lambda m, n, h, depth: {"a": linear(m.d, 9), "b": linear(9, m.d)},
        ),
        "a.weight: between the embeddings and the stream, it has no role$",
    ),
    "blocks without sums": (
        made({"forward": lambda b, x: b.mlp(b.two(b.attention(b.one(x))))}),
        "no branch is added to a stream: no role is known$",
    ),
    "attention beside the MLP": (
        made(
            {"forward": beside_mlp},
            weights=lambda b, n, h: {"wo": None, "down": None, "two": None, "both": linear(5 * b.d, b.d)},
        ),
        "both.weight: it reads attention beside blocks.0.up.weight: their sum is not derived$",
    ),
    "values beside attention": (
        core(lambda b, x, y: b.wo(y + b.wv(x))),
        "wo.weight: it reads attention beside blocks.0.wv",
    ),
    "heads twice": (
        core(lambda b, x, y: b.wo(torch.cat([y, y], -1)), lambda b, n, h: {"wo": linear(2 * b.d, b.d)}),
        "wo.weight sums over 64 numbers of attention, 8 a head, and 4 heads make queries: no shape has these$",
    ),
    "no output matrix": (
        core(lambda b, x, y: y, lambda b, n, h: {"wo": None}),
        "an attention core is added to the stream without a matrix$",
    ),
    "three heads of keys for four": (
        grouped(lambda h: h - 1, range),
        r"4 heads of queries and 3 of keys: no shape has these",
    ),
    "a block more": (
        made(
            model={"forward": lambda m, ids: m.read(m.last(m.extra(m.body(F.embedding(ids, m.table)))))},
            ends=lambda m, n, h, depth: {"extra": m.Block(n, h)},
        ),
        r"build\(8, 4, 2\) runs 3 attention layers: expected 2, one a block",
    ),
    "as many MLPs as heads": (
        mlp(
            lambda b, x: sum(Plain.mlp(part, x) for part in b.parts),
            lambda b, n, h: {"up": None, "down": None, "parts": nn.ModuleList([Plain(n, h) for _ in range(h)])},
        ),
        "parts|not at the base",
    ),
    "cross-attention": (crossed(), "wq.weight: cross-attention: queries and keys read different streams"),
    "one end of two MLPs": (
        made({"forward": same_end}, weights=lambda b, n, h: {"other": linear(b.d, 4 * b.d)}),
        "down.weight: one weight ends 2 branches; shared layers are not derived",
    ),
    **{
        f"a shift for each position, {order}": (
            made({"attention": attention}, weights=lambda b, n, h: {"where": drawn(16, b.d)}),
            "where: it is added to something that is neither stream, product, norm nor logits",
        )
        for order, attention in {
            "behind the norm": lambda b, x: Plain.attention(b, x + b.where[:7]),
            "before it in the sum": lambda b, x: Plain.attention(b, b.where[:7] + x),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_a_role_is_refused_by_name(name):
    build, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason):
        infer_roles(build, BASE)


@pytest.mark.parametrize("add", [lambda x, p: x + p, lambda x, p: p + x])
def test_positions_behind_a_norm_of_embeddings_are_read_in_both_orders(add):
    def ends(m, n, h, depth):
        return {"first": nn.LayerNorm(m.d), "where": drawn(16, m.d)}

    found = infer_roles(begun(lambda m, ids: add(m.first(F.embedding(ids, m.table)), m.where[:7]), ends), BASE)
    assert (found.roles["where"], found.roles["first.weight"]) == ("positional", "embedding_gain")


READ = {  # model, name, its part, its factor of the learning rate at twice N and H
    "experts of one fixed width": (experts(16, 16, 16), "blocks.0.down.0.weight", "mlp_out", 1),
    "experts as wide as the stream": (experts(*[lambda d: d] * 3), "blocks.0.down.0.weight", "mlp_out", 1 / 4),
    "values of half the keys": (values_of(lambda n: n // 2), "blocks.0.wo.weight", "output", 1 / 4),
    "values of three heads": (values_of(lambda n: 3 * n), "blocks.0.wo.weight", "output", 1 / 4),
    "read-out of half the stream": (
        ended(
            lambda m, x: m.out(m.narrow(x)),
            lambda m, n, h, depth: {"narrow": linear(m.d, m.d // 2), "out": linear(m.d // 2, 31), "read": None},
        ),
        "out.weight",
        "unembedding",
        1 / 4,
    ),
    "maxout": (
        mlp(
            lambda b, x: b.down(b.wide(x).unflatten(-1, (2, -1)).amax(-2)),
            lambda b, n, h: {"up": None, "wide": linear(b.d, 8 * b.d)},
        ),
        "blocks.0.wide.weight",
        "mlp_in",
        1 / 4,
    ),
    "bent values": (mixed(lambda b, x, q, k, v: (q, k, F.gelu(v))), "blocks.0.wv.weight", "value", 1 / 4),
    "one head of keys": (grouped(lambda h: 1, range), "blocks.0.wk.weight", "key", 1 / 4),
}


@pytest.mark.parametrize("name", READ)
def test_sides_that_follow_the_shape_are_read(name):
    build, weight, part, factor = READ[name]
    found = infer_roles(build, BASE)
    assert found.roles[weight] == part
    groups = torch_groups(
        Parametrization(base=found.shape), build(Shape(16, 8, 2)), BaseHyperparameters(1.0), roles=found
    )
    assert [row["lr"] for row in groups if weight in row["names"]] == [pytest.approx(factor)]


# What a trace leaves alone


def test_a_trace_leaves_random_states_and_buffers_alone():
    def step(m, x):
        m.steps += 1
        m.seen = torch.rand(3) + m.seen
        return m.read(x)

    ends = {"steps": nn.Buffer(torch.zeros(())), "seen": nn.Buffer(torch.zeros(3))}
    build, models = ended(step, lambda m, n, h, depth: {name: each.clone() for name, each in ends.items()}), []

    def kept(shape):
        models.append(build(shape))
        for name in ends:
            each = getattr(models[-1], name)
            delattr(models[-1], name)
            models[-1].register_buffer(name, each)
        return models[-1]

    def example(model):
        return (torch.randint(31, (2, 7)),)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    infer_roles(kept, BASE, example)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(models) == 4
    assert not any(model.steps or model.seen.any() for model in models)


def test_numbers_of_built_models_are_not_kept():
    import weakref

    build, alive, most = made(), [], []

    def counted(shape):
        most.append(sum(each() is not None for each in alive))
        model = build(shape)
        alive.append(weakref.ref(model.read.weight))
        return model

    found = infer_roles(counted, BASE)
    assert max(most) <= 2
    assert not any(each() is not None for each in alive)
    assert found.base.tensors["read.weight"].requires_grad

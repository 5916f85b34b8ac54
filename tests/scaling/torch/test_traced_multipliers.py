"""Multipliers that a trace reads off code as people write it: norms, activations, attention, positions, outputs."""

import math

import pytest

from manyheads.models.infer.multipliers import Multiplier, read_multipliers
from manyheads.models.torch.model import ModelOptions, read_model
from manyheads.transformer import Shape

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.nn import functional as F  # noqa: E402

strange = pytest.importorskip("tests.models.strange")
pytestmark = pytest.mark.torch
SHAPE = Shape(8, 4, 2)
D, N = 32, 8


def found(block=None, model=None, roles=None):
    """Multipliers other than those of a usual model, by kind, of one whose methods are replaced."""
    inner = type("Block", (strange.Plain,), block or {})
    kind = type("Kind", (strange.Model,), {"Block": inner} | (model or {}))
    made = kind(SHAPE.key_dim, SHAPE.heads, SHAPE.depth)
    read = read_model(made, ModelOptions(strange.roles_of(kind) | (roles or {}), SHAPE))
    each = {name: value for name, value in vars(read_multipliers(made, read)).items() if isinstance(value, Multiplier)}
    usual = {name: N**-0.5 if name == "logit" else 1.0 for name in each}
    numbers = {
        name: {round(number, 6) for number in value.values.values() if not math.isclose(number, usual[name])}
        for name, value in each.items()
    }
    return {name: some.pop() for name, some in numbers.items() if some}, {
        k: v.unknown for k, v in each.items() if v.unknown
    }


def normed(make):
    """A block whose norms are written out."""
    return {"attention": lambda self, x: strange.Plain.attention(self, make(self.one.weight, x))}


NORMS = {
    "root of the mean of squares": (lambda w, x: w * x * x.square().mean(-1, keepdim=True).rsqrt(), 1),
    "a factor beside it": (lambda w, x: w * (0.3 * x) * x.pow(2).mean(-1, keepdim=True).rsqrt(), 0.3),
    "a factor in it": (lambda w, x: w * x * (4 * x * x).mean(-1, keepdim=True).rsqrt(), 0.5),
    "a factor in both": (lambda w, x: w * (0.3 * x) / (0.3 * x).pow(2).mean(-1, keepdim=True).sqrt(), 1),
    "length": (lambda w, x: w * F.normalize(x, dim=-1) * D**0.5, 1),
    "length alone": (lambda w, x: w * F.normalize(x, dim=-1), D**-0.5),
    "sum": (lambda w, x: w * x / ((x * x).sum(-1, keepdim=True) / D + 1e-6) ** 0.5, 1),
    "length over the root of D": (lambda w, x: w * x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5), 1),
    "variance": (lambda w, x: w * (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, correction=0).sqrt(), 1),
    "variance of squares": (lambda w, x: w * x / (x.pow(2).mean(-1, True) - x.mean(-1, True) ** 2).sqrt(), 1),
    "deviation": (lambda w, x: w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6), 1),
    "none": (lambda w, x: w * 0.3 * (x - x.mean(-1, keepdim=True)), 0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_written_out_multiply_by_what_they_do_not_take_away(name):
    make, factor = NORMS[name]
    numbers, unknown = found(normed(lambda w, x: make(w, 5 * x)) if name != "none" else normed(make))
    assert numbers == ({} if factor == 1 else {"input": pytest.approx(factor, abs=1e-6)})
    assert not unknown


ACTIVATIONS = {
    "GELU by erf": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "GELU by its share": lambda x: x * (0.5 * (1 + torch.erf(x / 2**0.5))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "GELU of BLOOM": lambda x: x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "GELU by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": lambda x: x / (1 + torch.exp(-x)),
    "Mish": lambda x: x * torch.tanh(F.softplus(x)),
    "squared ReLU": lambda x: F.relu(x) ** 2,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_written_out_have_no_factor_of_their_own(name):
    f = ACTIVATIONS[name]
    for before, behind in ((1.0, 1.0), (0.3, 1.0), (1.0, 0.3)):
        numbers, unknown = found({"mlp": lambda self, x, c=before, s=behind: self.down(s * f(c * self.up(x)))})
        assert numbers == ({} if before == behind else {"hidden": 0.3})
        assert not unknown
    late = found({"mlp": lambda self, x: self.down((lambda h: h * (1 + torch.erf(h / 2**0.5)) * 0.5)(self.up(x)))})
    assert late[0] == {}
    assert "is no known activation" in " ".join(late[1]["hidden"])


def attention(change):
    """Explicit attention with a change of logits, patterns or outputs."""

    def attend(self, x):
        q, k, v = (strange.heads(w(x), self.n) for w in (self.wq, self.wk, self.wv))
        return self.wo(change(q @ k.transpose(-1, -2) * N**-0.5, v, x).transpose(1, 2).flatten(2))

    return {"attention": attend}


PATTERNS = {
    "behind the softmax": (lambda a, v, x: (0.3 * a.softmax(-1)) @ v, {"value": 0.3}),
    "in front of it": (lambda a, v, x: (0.3 * a).softmax(-1) @ v, {"logit": round(0.3 * N**-0.5, 6)}),
    "a cap": (lambda a, v, x: (5 * torch.tanh(a / 5)).softmax(-1) @ v, {}),
    "written out": (lambda a, v, x: ((e := (a - a.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)) @ v, {}),
    "uneven values": (lambda a, v, x: a.softmax(-1) @ v * torch.linspace(1, 2, N), "value"),
    "gated": (lambda a, v, x: a.softmax(-1) @ v * strange.heads(x, N).sigmoid(), "value"),
    "bent": (lambda a, v, x: F.gelu(a.softmax(-1) @ v), "value"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_factors_of_logits_and_values_are_told_apart(name):
    change, expected = PATTERNS[name]
    numbers, unknown = found(attention(change))
    assert (numbers, unknown) == (expected, {}) if isinstance(expected, dict) else list(unknown) == [expected]


OUTPUTS = {
    "log-probabilities": (lambda self, z: (0.3 * self.read(z)).log_softmax(-1), {"output": 0.3}),
    "a cap": (lambda self, z: 5 * torch.tanh(0.3 * self.read(z) / 5), {"output": 0.3}),
    "a loss": (lambda self, z: F.cross_entropy(0.3 * self.read(z)[:, 0], torch.tensor([1, 2])), {"output": 0.3}),
    "centred": (lambda self, z: (y := 0.3 * self.read(z)) - y.mean(-1, keepdim=True), {"output": 0.3}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_factors_of_outputs_are_read_through_what_follows(name):
    make, expected = OUTPUTS[name]
    whole = {"forward": lambda self, ids: make(self, self.last(self.body(F.embedding(ids, self.table))))}
    assert found(model=whole) == (expected, {})


def test_fixed_positions_are_read_off_their_buffer_and_others_are_named():
    def model(factor, fly=False):
        def build(self, n, h, depth):
            strange.Model.__init__(self, n, h, depth)
            self.register_buffer("places", torch.arange(12 * D).reshape(12, D).cos())

        def forward(self, ids):
            places = self.places.sin() if fly else self.places
            x = F.embedding(ids, self.table) + factor * places[2 : 2 + ids.shape[1]]
            return self.read(self.last(self.body(x)))

        return found(model={"__init__": build, "forward": forward})

    assert model(1.0) == ({}, {})
    assert model(0.3) == ({"position": 0.3}, {})
    assert model(1.0, fly=True)[1]["position"] == ["the stream below the first block holds more than known tables"]


def test_a_stream_that_is_multiplied_and_a_branch_that_is_gated():
    def between(self, x):
        x = 0.3 * x + strange.Plain.attention(self, self.one(x))
        return x + self.mlp(self.two(x)) * x.sigmoid()

    numbers, unknown = found({"forward": between})
    assert numbers["stream"] == 0.3
    assert unknown["branch"] == [f"what is added to the stream does not follow blocks.{n}.down" for n in range(2)]


def test_an_operation_without_a_rule_leaves_everything_open():
    numbers, unknown = found({"mlp": lambda self, x: self.down(F.prelu(self.up(x), self.two.weight[:1]))})
    assert not numbers
    assert set(unknown) >= {"logit", "branch", "hidden"}
    assert "enters the operation" in unknown["logit"][0]


def test_a_sharded_model_is_read(tmp_path):
    from tests.scaling.torch_models import PLAIN, plain
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    try:
        model, mesh = plain(SHAPE, 7, 6, (0.3, 0.11, 0.7)), init_device_mesh("cpu", (1,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        read = read_multipliers(model, read_model(model, ModelOptions(PLAIN, SHAPE)))
    finally:
        torch.distributed.destroy_process_group()
    numbers = [set(each.values.values()) for each in (read.branch, read.logit, read.output)]
    assert numbers == [{0.3}, {0.11}, {0.7}]

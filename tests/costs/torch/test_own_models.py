"""Modules written without a look at the rules: counts by hand, on the CPU and on the meta device."""

import pytest

import manyheads as mh
from manyheads.costs import ModelShape, transformer_cost
from manyheads.costs.conventions import ConventionError
from manyheads.costs.cost import UnknownCost
from manyheads.errors import UsageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

DEVICES = pytest.mark.parametrize("device", [None, "meta"])


class Cell(nn.Module):
    """A gated recurrent network of Linear layers in a loop."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.x, self.h, self.hidden = nn.Linear(inputs, 2 * hidden), nn.Linear(hidden, 2 * hidden, bias=False), hidden

    def forward(self, sequence):
        state = sequence.new_zeros(sequence.shape[1], self.hidden)
        for x in sequence:
            gate, new = (self.x(x) + self.h(state)).chunk(2, -1)
            state = torch.lerp(state, new.tanh(), gate.sigmoid())
        return state


@DEVICES
def test_a_recurrent_cell(device):
    cell, x = Cell(5, 7), torch.randn(11, 3, 5)
    inward, across = 11 * 3 * 5 * 14, 11 * 3 * 7 * 14
    assert mh.count(cell, x, device=device).flops == 2 * (inward + across)
    # The input and the first state need no gradient.
    trained = mh.count(cell, x, training=True, device=device)
    assert trained.flops == 2 * (2 * inward + 3 * across - 3 * 7 * 14)
    assert {name: row["flops"] for name, row in trained.by_module().breakdown().items() if row["flops"]} == {
        "x": 4 * inward, "h": 2 * (3 * across - 3 * 7 * 14),
    }  # fmt: skip


class Experts(nn.Module):
    """Mixture of experts by einsum: every token meets every expert, weighted by its gate."""

    def __init__(self, width, hidden, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        hidden = torch.einsum("btd,edf->btef", x, self.up).relu()
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, weights)


@DEVICES
def test_a_mixture_of_experts_by_einsum(device):
    cost = mh.count(Experts(6, 10, 4), torch.randn(2, 3, 6), device=device)
    gate, up, down = 6 * 6 * 4, 6 * 4 * 6 * 10, 6 * 4 * 10 * 6
    # The three factors of the last einsum are contracted in PyTorch's order, two at a time.
    assert cost.flops in {2 * (gate + up + down), 2 * (gate + up + down + 6 * 4 * 6)}
    assert not [note for note in cost.notes if "attention" in note]


class Vision(nn.Module):
    """Patches by a convolution, one layer of explicit attention, a head on the class token."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 12, 4, stride=4), nn.Parameter(torch.zeros(1, 1, 12))
        self.qkv, self.out, self.head = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, images):
        x = self.patch(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        q, k, v = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(((q @ k.mT) / 2).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


@DEVICES
def test_convolved_patches(device):
    cost = mh.count(Vision(), torch.randn(2, 3, 8, 8), device=device)
    patch, qkv, out, head, core = 2 * 4 * 48 * 12, 10 * 12 * 36, 10 * 12 * 12, 2 * 12 * 5, 2 * 3 * 25 * 8
    assert cost.flops == 2 * (patch + qkv + out + head + core)
    assert cost.notes[0] == "1 attention layers compute all pairs: masked ones are counted"
    trained = mh.count(Vision(), torch.randn(2, 3, 8, 8), training=True, device=device)
    assert trained.flops == 3 * cost.flops - 2 * patch  # an image needs no gradient


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels=None):
        logits = self.head(self.table(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())} if labels is not None else logits


@DEVICES
def test_tied_weights_and_a_batch_by_name(device):
    ids = torch.randint(0, 17, (2, 6))
    macs = 12 * 8 * 17
    assert mh.count(Tied(), ids, training=True, device=device).flops == 6 * macs
    named = {"ids": ids, "labels": ids}
    assert mh.count(Tied(), named, training=True, device=device).flops == 6 * macs
    assert mh.count(Tied(), (ids, ids), training=True, device=device).flops == 6 * macs
    weighted = mh.count(Tied(), named, training=True, loss=lambda found: 3 * found["loss"], device=device)
    assert weighted.flops == 6 * macs


class Lora(nn.Module):
    """A frozen matrix with a trained update of low rank."""

    def __init__(self, width, rank):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(*sides, bias=False) for sides in ((width, width), (width, rank), (rank, width))
        )
        self.base.requires_grad_(False)

    def forward(self, x):
        return x + self.base(x) + self.b(self.a(x))


@DEVICES
def test_lora_pays_for_no_gradient_of_what_is_frozen(device):
    stack, x = nn.Sequential(Lora(8, 2), Lora(8, 2)), torch.randn(5, 8)
    base, low = 5 * 64, 5 * 16
    assert mh.count(stack, x, device=device).flops == 2 * 2 * (base + 2 * low)
    # Second layer: the gradient of its input through the base; first layer: its input needs none.
    backward = 2 * 2 * low + base + 2 * 2 * low - low
    trained = mh.count(stack, x, training=True, device=device)
    assert trained.flops == 2 * (2 * (base + 2 * low) + backward)
    assert set(trained.by_module(depth=1).breakdown()) == {"0", "1"}


class Checkpointed(nn.Module):
    """A function of parameters under a checkpoint, without a module of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(lambda x: (x @ self.weight).tanh() @ self.weight, x, use_reentrant=False)
        return x


@DEVICES
def test_a_checkpoint_without_modules(device):
    cost = mh.count(Checkpointed(), torch.randn(4, 6), training=True, device=device)
    one = 4 * 36
    assert cost.flops == 2 * (3 * 6 * one - one)
    assert cost.to("executed").flops == cost.flops + 2 * 3 * one


class Force(nn.Module):
    """An energy whose gradient is the output: a backward pass within the forward pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.b(self.a(x).tanh()).sum(), x, create_graph=True)[0]


def test_a_gradient_within_the_forward_pass_is_counted():
    cost = mh.count(Force(), torch.randn(5, 3))
    assert cost.flops == 2 * 2 * 5 * (3 * 8 + 8)
    assert cost.to("executed") == cost.to("executed")
    assert cost.to("executed").flops == cost.flops


def test_conventions_that_a_trace_answers():
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    cost = mh.count(
        lambda x: attend(x, x, x, need_weights=False, is_causal=True, attn_mask=MASK)[0], torch.randn(1, 5, 8)
    )
    assert cost.flops == 2 * (5 * 4 * 64 + 2 * 15 * 8)
    assert cost.to("dense").flops == 2 * cost.to("mac").flops == 2 * (5 * 4 * 64 + 2 * 25 * 8)
    assert cost.to("halved").flops == 2 * 5 * 4 * 64 + 2 * 25 * 8
    for name in ("chinchilla", "megatron", "flash"):
        with pytest.raises(ConventionError, match="choose from exact, halved"):
            cost.to(name)
    assert (2 * cost + cost).flops == 3 * cost.flops
    with pytest.raises(ConventionError, match="do not add"):
        cost + transformer_cost(ModelShape(layers=1, width=8, heads=2), 4)


MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)


def test_wrong_use_is_refused():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(UsageError, match="device='cuda'"):
        mh.count(layer, x, device="cuda")
    with pytest.raises(UsageError, match="trips=3"):
        mh.count(layer, x, trips=3)
    with pytest.raises(UsageError, match="requires a gradient"):
        mh.count(torch.relu, x, training=True)
    with pytest.raises(UsageError, match="training for PyTorch, but neither the function nor its 0 arguments"):
        mh.count(lambda: 0, training=True)
    with pytest.raises(UsageError, match="belongs to a module"):
        mh.count(torch.mm, x, x.T).by_module()
    with pytest.raises(UsageError, match="give training=True"):
        mh.count(layer, x, loss=torch.sum)


def test_figures_that_are_not_counted_are_refused_or_absent():
    """Of a traced module `flops` alone are known: other figures are no zeros."""
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    cost = mh.count(layer, x)
    for traced in (cost, 2 * cost, cost + cost, cost.by_module(), cost.to("executed"), cost.lower_bound()):
        for name in ("bytes", "elementwise", "transcendental"):
            with pytest.raises(UnknownCost, match=f"{name}: not counted for a PyTorch program"):
                getattr(traced, name)
        assert set(traced.breakdown().popitem()[1]) == {"flops"}
        assert list(traced.to_dataframe().columns) == ["item", "flops"]
        assert traced.table().split()[:5] == ["item", "FLOPs", "%", "of", "FLOPs"]
        assert repr(traced).splitlines()[1].split()[:5] == ["item", "FLOPs", "%", "of", "FLOPs"]
    assert (cost.as_dict()["flops"], cost.as_dict()["items"]) == (48, {"addmm (2,3) (3,4)": {"flops": 48}})
    assert cost.by_module().breakdown() == {"Linear": {"flops": 48}}  # the module itself has the name of its class
    assert not {"bytes", "elementwise", "transcendental", "bytes_convention"} & set(cost.as_dict())


def test_a_function_that_holds_its_tensors_says_what_to_do():
    held = torch.ones(2, 2)
    with pytest.raises(UsageError, match="give its tensors as arguments"):
        mh.count(lambda: held @ held)
    assert mh.count(lambda x: x @ x, held).flops == 16
    assert "0 bytes" not in repr(mh.count(lambda x: x @ x, held))
    assert mh.count(lambda x: x @ x, held).to("palm").flops == 16

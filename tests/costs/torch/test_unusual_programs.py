"""Programs that are unlike a model in a loop of training: each is counted by hand, noted or refused."""

import random
import warnings

import numpy as np
import pytest

import manyheads as mh
from manyheads.costs.cost import UnknownCost

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

DEVICES = pytest.mark.parametrize("device", [None, "meta"])
R, SDPA = torch.randn, F.scaled_dot_product_attention


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def penalty(x, weight):
    """A gradient that is differentiated again."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(((x @ weight).tanh() @ weight).sum(), x, create_graph=True)[0]


class Inner(nn.Module):
    """A step of training in the forward pass, with a checkpoint of a function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(R(6, 6))

    def forward(self, x):
        with torch.enable_grad():
            weight = self.weight.detach().requires_grad_()
            value = checkpoint(lambda weight: (x @ weight).tanh() @ weight, weight, use_reentrant=False).sum()
            (gradient,) = torch.autograd.grad(value, weight)
        return x @ (self.weight - gradient)


class Reversed(torch.autograd.Function):
    """Products that a backward pass of one's own computes again."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh() @ weight

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            again = (leaves[0] @ leaves[1]).tanh() @ leaves[1]
        return torch.autograd.grad(again, leaves, gradient)


def repeated(x, weight):
    return checkpoint(lambda x: ((x @ weight).tanh() @ weight).tanh(), x, use_reentrant=True)


STAGES = {  # multiply-adds: forward, exact training, executed training, None where it is not asked
    "gradient of a gradient": (penalty, (R(3, 4), leaf(4, 4)), 4 * 48, 9 * 48, 9 * 48),
    "training within a module": (Inner(), (R(3, 6),), 6 * 108, 7 * 108, 8 * 108),
    "own backward pass": (Reversed.apply, (leaf(3, 4), leaf(4, 4)), 96, 3 * 96, 4 * 96),
    "checkpoint of a function": (repeated, (leaf(3, 6), leaf(6, 6)), 216, 3 * 216, 4 * 216),
    "gradients of functorch": (
        lambda x, w: torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).sin().sum()), (None, 0))(w, x),
        (R(3, 5), R(5, 4)), 2 * 3 * 5 * 4, None, None,
    ),
}  # fmt: skip


@DEVICES
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_that_of_the_program(name, device):
    function, args, forward, exact, executed = STAGES[name]
    cost = mh.count(function, *args, device=device)
    assert cost.flops == 2 * forward
    if exact:
        cost = mh.count(function, *args, training=True, device=device)
        assert (cost.flops, cost.to("executed").flops) == (2 * exact, 2 * executed)


RIGHT, LEFT = causal_lower_right(8, 16), causal_upper_left(8, 16)
Q, K = leaf(2, 4, 8, 16), leaf(2, 4, 16, 16)
BLOCKS = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 16, device="cpu", BLOCK_SIZE=8)
ATTENTION = {  # pairs of a head, gradients of two that are needed
    "lower right": (lambda q, k: SDPA(q, k, k, attn_mask=RIGHT), (Q, K), 8 * 8 + 36, 4),
    "upper left": (lambda q, k: SDPA(q, k, k, attn_mask=LEFT), (Q, K), 36, 4),
    "flex by name": (lambda q, k: flex_attention(q, k, k, block_mask=BLOCKS), (Q, K), 36, 4),
    "flex with sums": (
        lambda q, k: flex_attention(q, k, k, block_mask=BLOCKS, return_aux=AuxRequest(lse=True))[0], (Q, K), 36, 4,
    ),
    "queries alone": (lambda q, k: SDPA(q, k, k), (Q, K.detach()), 128, 2),
    "values alone": (lambda q, k: SDPA(q.detach(), k.detach(), k), (Q, K), 128, 1),
    "functorch": (lambda q, k: torch.func.vmap(SDPA)(q, k, k), (Q, K), 128, 4),
}  # fmt: skip


@DEVICES
@pytest.mark.parametrize("name", ATTENTION)
def test_fused_attention(name, device):
    function, args, pairs, needed = ATTENTION[name]
    one = 8 * pairs * 16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert mh.count(function, *args, device=device).flops == 2 * 2 * one
        assert mh.count(function, *args, training=True, device=device).flops == 2 * (2 + needed) * one


class Scripted(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attention_below_python():
    scripted = torch.jit.script(Scripted())
    assert "is opaque" in mh.count(scripted, Q).unknown[0]
    assert mh.count(scripted, Q, device="meta").notes[0].startswith("1 attention layers compute all pairs")


def jagged(a, b):
    return torch.nested.as_nested_tensor([a, b], layout=torch.jagged)


def test_nested_tensors():
    layer = nn.Linear(8, 8)
    assert mh.count(lambda a, b: layer(jagged(a, b)).values(), R(3, 8), R(2, 8)).flops == 2 * 5 * 64

    def attend(a, b):
        q = jagged(a, b).unflatten(-1, [2, 4]).transpose(1, 2)
        return SDPA(q, q, q).values()

    with pytest.raises(UnknownCost, match="attention of nested tensors"):
        mh.count(attend, R(3, 8), R(2, 8))


@DEVICES
def test_second_gradients_of_fused_attention_are_refused(device):
    def force(x, weight):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            q = x @ weight
            return torch.autograd.grad(SDPA(q, q, q).sum(), x, create_graph=True)[0]

    args = R(1, 1, 3, 4), leaf(4, 4)
    assert mh.count(force, *args, device=device).flops == 2 * (48 * 2 + 6 * 9 * 4)
    with pytest.raises(UnknownCost, match="gradients of gradients"):
        mh.count(force, *args, training=True, device=device)


SPARSE = R(4, 4).to_sparse()
UNKNOWN = {
    "sparse": (lambda x: SPARSE @ x, (R(4, 3),), "aten.mm of sparse tensors"),
    "rows": (lambda x: SPARSE.to_sparse_csr() @ x, (R(4, 3),), "sparse"),
    "time first": (torch.conv_tbc, (R(7, 2, 3), R(3, 3, 5), R(5)), "conv_tbc"),
    "distances": (lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"), (R(30, 5),), "_euclidean_dist"),
    "bilinear": (nn.Bilinear(3, 3, 2), (R(2, 3), R(2, 3)), "_trilinear"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", UNKNOWN)
def test_products_that_operations_hide_are_unknown(name):
    function, args, says = UNKNOWN[name]
    assert says in mh.count(function, *args).unknown[0]


def test_names_that_resemble_products():
    x = R(2, 3, 8)
    run = lambda x: F.interpolate(x, scale_factor=2, mode="linear") + torch.linspace(0, 1, 16) + x.norm().lgamma()  # noqa: E731
    assert not mh.count(run, x).unknown


@DEVICES
def test_grouped_products_and_complex_ones(device):
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    x, w = R(2, 16, 16).bfloat16(), R(16, 16).bfloat16()
    run = lambda x, w, offsets: F.grouped_mm(x, w, offs=offsets)  # noqa: E731
    assert mh.count(run, x, w, offsets, device=device).flops == 2 * 16 * 256  # columns by group
    assert mh.count(run, w, x, offsets, device=device).flops == 2 * 16 * 256  # rows by group
    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    cost = mh.count(torch.mm, x, x.detach(), training=True, device=device)
    assert (cost.flops, cost.notes[0]) == (2 * 2 * 27, "a multiply-add of complex numbers is counted as one")


class Changing(nn.Module):
    """One module under two names, attributes, buffers and random numbers that a call makes, overwritten weights."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(6, 6)
        self.table, self.cache, self.calls, self.seen = nn.Embedding(9, 6, max_norm=0.1), None, 0, []
        self.mask = torch.zeros(6)
        self.recurrent = nn.LSTM(6, 6)

    def forward(self, ids):
        x = self.table(ids)
        if self.cache is None:
            self.cache = torch.ones(6, device=x.device)
            self.register_buffer("late", torch.ones(6, device=x.device), persistent=False)
        self.mask += 1
        self.first.weight.data.clamp_(-0.1, 0.1)
        self.calls, _ = self.calls + 1, self.seen.append(x)
        random.random()
        np.random.rand()  # noqa: NPY002
        return self.second(self.first(x)) * self.cache + self.late


@DEVICES
def test_a_module_stays_as_it_is(device):
    module = Changing()
    names, weights = list(vars(module)), list(module.recurrent._flat_weights)
    kept = {name: (each, each.detach().clone()) for name, each in module.named_parameters()}
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    assert mh.count(module, torch.arange(9), training=True, device=device).flops == 2 * 6 * 9 * 36
    for name, each in module.named_parameters(remove_duplicate=False):
        tensor, numbers = kept[name.replace("second", "first")]
        assert each is tensor
        assert torch.equal(each, numbers)
    assert all(each is other for each, other in zip(module.recurrent._flat_weights, weights, strict=True))
    assert (list(vars(module)), list(module.named_buffers())) == (names, [])
    assert (module.cache, module.calls, module.seen, module.mask.sum()) == (None, 0, [], 0)
    assert random.getstate() == states[0]
    assert np.random.get_state()[2] == states[1][2]  # noqa: NPY002
    assert module(torch.arange(9)).shape == (9, 6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_around_a_count(mode):
    with mode():
        layer = nn.Linear(3, 3)
        assert mh.count(layer, R(2, 3), training=True).flops == 2 * 2 * 18
    assert mh.count(layer, R(2, 3), training=mode is torch.no_grad).flops == 2 * 18 * (1 + (mode is torch.no_grad))


@DEVICES
def test_an_error_within_leaves_pytorch_as_it_was(device):
    def broken(q, k):
        flex_attention(q, k, k, block_mask=BLOCKS)
        raise RecursionError

    code, engine = flex_attention.__code__, torch.autograd._engine_run_backward
    with pytest.raises(RecursionError):
        mh.count(broken, Q.detach(), K.detach(), device=device)
    assert (flex_attention.__code__, torch.autograd._engine_run_backward) == (code, engine)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None

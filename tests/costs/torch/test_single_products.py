"""One computation at a time, by hand: CPU and meta, forward and training."""

import warnings
from functools import partial

import pytest

import manyheads as mh
from manyheads.costs.cost import UnknownCost
from manyheads.costs.torch.attention_products import MASKED
from manyheads.errors import UsageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

B, H, K, T, N, D = 2, 4, 2, 16, 8, 32
CAUSAL = T * (T + 1) // 2
ONE = B * T * 2 * 4 * D * D
PROJECTIONS = B * T * 4 * D * D
CLOSURE = "the function holds trained tensors of its own"


def draw(*shape):
    return torch.randn(*shape, requires_grad=True)


def qkv(heads=H):
    return draw(B, H, T, N), draw(B, heads, T, N), draw(B, heads, T, N)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Blocks(nn.Module):
    def __init__(self, wrap=lambda block, x: block(x)):
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList(Mlp() for _ in range(3)), wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


class Attend(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = nn.MultiheadAttention(D, H, batch_first=True), options

    def forward(self, x):
        return self.inner(x, x, x, **self.options)[0]


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        for _ in range(10):
            x = torch.tanh(x @ self.weight)
        return x


SDPA = F.scaled_dot_product_attention
MASK = torch.ones(T, T, dtype=torch.bool).tril()
WINDOW = lambda b, h, i, j: (i >= j) & (i - j < 4)  # noqa: E731
PRODUCTS = {
    "sdpa": (SDPA, qkv, B * H * T * T * 2 * N),
    "sdpa causal": (partial(SDPA, is_causal=True), qkv, B * H * CAUSAL * 2 * N),
    "sdpa grouped": (partial(SDPA, is_causal=True, enable_gqa=True), partial(qkv, K), B * H * CAUSAL * 2 * N),
    "sdpa boolean mask": (lambda q, k, v: SDPA(q, k, v, attn_mask=MASK), qkv, B * H * CAUSAL * 2 * N),
    "sdpa float mask": (
        lambda q, k, v: SDPA(q, k, v, attn_mask=torch.zeros(T, T).masked_fill(~MASK, -torch.inf)),
        qkv, B * H * CAUSAL * 2 * N,
    ),
    "sdpa C name": (partial(torch._C._nn.scaled_dot_product_attention, is_causal=True), qkv, B * H * CAUSAL * 2 * N),
    "multi-head": (Attend(need_weights=False), lambda: (draw(B, T, D),), PROJECTIONS + B * H * T * T * 2 * N),
    "multi-head with weights": (Attend(), lambda: (draw(B, T, D),), PROJECTIONS + B * H * T * T * 2 * N),
    "encoder layer": (
        nn.TransformerEncoderLayer(D, H, 4 * D, batch_first=True).eval(), lambda: (draw(B, T, D),),
        PROJECTIONS + B * H * T * T * 2 * N + ONE,
    ),
    "linear": (nn.Linear(D, 4 * D), lambda: (draw(B, T, D),), B * T * 4 * D * D),
    "einsum": (partial(torch.einsum, "bhqn,bhkn->bhqk"), lambda: qkv()[:2], B * H * T * T * N),
    "conv2d": (nn.Conv2d(3, 8, 3, padding=1), lambda: (draw(B, 3, 6, 6),), B * 8 * 36 * 27),
    "depthwise": (nn.Conv1d(8, 8, 3, groups=8), lambda: (draw(B, 8, 10),), B * 8 * 8 * 3),
    "transposed": (nn.ConvTranspose1d(4, 6, 3, stride=2), lambda: (draw(B, 4, 5),), B * 4 * 5 * 6 * 3),
    "embedding": (nn.Embedding(31, D), lambda: (torch.randint(0, 31, (B, T)),), 0),
    "loop": (Loop(), lambda: (draw(B, T, D),), 10 * B * T * D * D),
    "blocks": (Blocks(), lambda: (draw(B, T, D),), 3 * ONE),
    "checkpoint": (Blocks(partial(checkpoint, use_reentrant=False)), lambda: (draw(B, T, D),), 3 * ONE),
    "reentrant": (Blocks(partial(checkpoint, use_reentrant=True)), lambda: (draw(B, T, D),), 3 * ONE),
    "baddbmm": (torch.baddbmm, lambda: (draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5)), 2 * 3 * 4 * 5),
    "matrix by vector": (torch.mv, lambda: (draw(3, 4), draw(4)), 12),
}  # fmt: skip


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_multiply_adds_are_those_counted_by_hand(name, device):
    function, arguments, macs = PRODUCTS[name]
    given = arguments()
    times = 4 if name == "matrix by vector" else 6  # the gradient of the matrix is an outer product: nothing is added
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a checkpoint without gradients warns
        assert mh.count(function, *given, device=device).flops == 2 * macs
        assert mh.count(function, *given, training=True, device=device).flops == times * macs


@pytest.mark.parametrize("device", [None, "meta"])
def test_flex_attention(device):
    window = flex.create_block_mask(WINDOW, None, None, T, T, device="cpu", BLOCK_SIZE=8)
    attend = lambda q, k, v: flex.flex_attention(q, k, v, block_mask=window)  # noqa: E731
    macs = B * H * sum(min(i + 1, 4) for i in range(T)) * 2 * N
    cost = mh.count(attend, *qkv(), training=True, device=device)
    assert (cost.flops, cost.to("halved").flops) == (6 * macs, 3 * B * H * T * T * 2 * N)
    assert mh.count(attend, *qkv(), device=device).flops == 2 * macs


@pytest.mark.parametrize(("reentrant", "again"), [(False, 0.5), (True, 1)])
@pytest.mark.parametrize("device", [None, "meta"])
def test_what_a_checkpoint_runs_again_is_counted_as_executed(reentrant, again, device):
    """A checkpoint that is not reentrant stops at the last tensor that it needs."""
    blocks = Blocks(partial(checkpoint, use_reentrant=reentrant))
    cost = mh.count(blocks, draw(B, T, D), training=True, device=device)
    assert cost.to("executed").flops == cost.flops + again * 2 * 3 * ONE
    assert cost.to("executed-mac").flops * 2 == cost.to("executed").flops
    plain = mh.count(Blocks(), draw(B, T, D), training=True, device=device).by_module()
    assert cost.by_module().breakdown() == plain.breakdown()


def test_attention_that_a_checkpoint_repeats_is_no_backward_pass():
    layer = Attend(need_weights=False)
    again = lambda x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    cost = mh.count(again, draw(B, T, D), training=True)
    assert cost.flops == 6 * (PROJECTIONS + B * H * T * T * 2 * N)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_run_without_their_compiler():
    mlp = Mlp()
    inner = nn.Sequential()
    for index in range(3):
        inner.add_module(str(index), torch.compile(Mlp(), backend="eager"))
    for function, macs in ((torch.compile(mlp), ONE), (inner, 3 * ONE)):
        for device in (None, "meta"):
            assert mh.count(function, draw(B, T, D), training=True, device=device).flops == 6 * macs


def test_closures_on_meta_are_refused():
    layer = Mlp()
    run = lambda x: layer(x)  # noqa: E731
    assert mh.count(run, draw(B, T, D), training=True).flops == 6 * ONE
    for training in (False, True):
        with pytest.raises(UsageError, match=CLOSURE):
            mh.count(run, draw(B, T, D), training=training, device="meta")
    assert mh.count(layer.forward, draw(B, T, D), device="meta").flops == 2 * ONE  # a method brings its module


class Routed(nn.Module):
    """Experts found by `nonzero`: how many rows each gets depends on the router."""

    def __init__(self, experts=4):
        super().__init__()
        self.router, self.experts = nn.Linear(D, experts), nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

    def forward(self, x):
        flat = x.reshape(-1, D)
        gate, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (gate == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]))
        return out


def test_experts_by_nonzero():
    cost = mh.count(Routed(), draw(B, T, D))
    assert cost.flops == 2 * B * T * (4 * D + D * D)
    assert cost.notes[:-1] == ("the data decide some sizes (nonzero): the count holds for this batch",)
    trained = mh.count(Routed(), draw(B, T, D), training=True)
    assert trained.flops == 2 * B * T * (4 * D + 3 * D * D)  # the choice has no gradient
    with pytest.raises(
        UnknownCost, match="a number that depends on weights or data decides what runs; count on the CPU"
    ):
        mh.count(Routed(), draw(B, T, D), device="meta")


@pytest.mark.parametrize("device", [None, "meta"])
def test_opaque_operations_are_unknown_unless_they_have_a_formula(device):
    module = nn.LSTM(D, D)
    cost = mh.count(module, draw(T, B, D), device=device)
    if not cost.unknown:  # meta runs the cells one by one
        assert cost.flops == 2 * T * B * 8 * D * D
        return
    operation = cost.unknown[0].partition(" ")[0]
    assert cost.unknown[0].endswith("is opaque: its products are not in the program")
    with pytest.raises(UnknownCost, match=r"is opaque: .* Take lower_bound\(\), or give formulas=\{op: function\}$"):
        _ = cost.flops
    assert cost.lower_bound().flops == 0
    known = mh.count(module, draw(T, B, D), formulas={operation: lambda out, *_, **__: T * B * 8 * D * D})
    assert known.flops == 2 * T * B * 8 * D * D
    for wrong in (1.5, -1, None):
        with pytest.raises(UsageError, match=f"multiply-adds={wrong}: expected an integer of at least 0"):
            mh.count(module, draw(T, B, D), formulas={operation: lambda *_, wrong=wrong, **__: wrong})


NARROW = {  # which of queries, keys, values and mask need a gradient; its multiply-adds for a pair
    "queries": 4 + 16, "keys": 4 + 16, "values": 4, "mask": 4,
    "queries and keys": 4 + 2 * 16, "keys and values": 8 + 16,
}  # fmt: skip


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("needed", NARROW)
def test_gradients_of_fused_attention_with_narrow_values(needed, device):
    """Values of 4 features beside queries of 16: a gradient of scores costs 4 a pair, one of queries or keys 16."""
    shapes = {"queries": (1, 2, 6, 16), "keys": (1, 2, 9, 16), "values": (1, 2, 9, 4), "mask": (6, 9)}
    given = [torch.randn(shape).requires_grad_(name in needed) for name, shape in shapes.items()]
    cost = mh.count(lambda q, k, v, mask: SDPA(q, k, v, attn_mask=mask), *given, training=True, device=device)
    assert cost.flops == 2 * 2 * 6 * 9 * (16 + 4 + NARROW[needed])


@pytest.mark.parametrize("device", [None, "meta"])
def test_grouped_products_have_two_gradients(device):
    x, w = draw(16, 16), draw(2, 16, 32)
    run = lambda x, w, ends: F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends).float()  # noqa: E731
    cost = mh.count(run, x, w, torch.tensor([8, 16], dtype=torch.int32), training=True, device=device)
    assert cost.flops == 3 * 2 * 16 * 16 * 32


def test_a_foreign_operation_has_the_formula_that_is_given():
    @torch.library.custom_op("manyheads_test::twice", mutates_args=())
    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w @ w

    @twice.register_fake
    def _(x, w):
        return torch.empty_like(x)

    operation, run = torch.ops.manyheads_test.twice, lambda x, w: twice(x, w)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    for device in (None, "meta"):
        assert "manyheads_test.twice is opaque" in mh.count(run, x, w, device=device).unknown[0]
        for key in (operation, operation.default, "manyheads_test.twice"):
            formulas = {key: lambda out, x, w: 2 * x.numel() * w.shape[1]}
            assert mh.count(run, x, w, device=device, formulas=formulas).flops == 2 * 2 * 3 * 16


@pytest.mark.parametrize("name", ["fft", "svd", "solve", "inverse", "cdist"])
def test_decompositions_are_opaque(name):
    x = torch.randn(4, 4) + 4 * torch.eye(4)
    run = {
        "fft": torch.fft.fft, "svd": torch.linalg.svd, "inverse": torch.linalg.inv,
        "solve": lambda x: torch.linalg.solve(x, x),
        "cdist": lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"),
    }[name]  # fmt: skip
    assert mh.count(run, x).unknown
    assert not mh.count(lambda x: torch.rsqrt(x.abs()) + x.norm(), x).unknown


def test_explicit_attention_is_said_to_compute_all_pairs():
    class Explicit(nn.Module):
        def forward(self, q, k, v):
            scores = (q @ k.mT).masked_fill(~MASK, -torch.inf)
            return F.dropout(scores.softmax(-1), 0.1) @ v

    for device in (None, "meta"):
        cost = mh.count(lambda q, k, v: Explicit()(Explicit()(q, k, v), k, v), *qkv(), device=device)
        assert cost.flops == 2 * 2 * B * H * T * T * 2 * N
        assert cost.notes[:-1] == ("2 attention layers compute all pairs: masked ones are counted",)


def test_inference_mode_counts_the_same():
    layer = Attend(need_weights=False).eval()
    with torch.inference_mode():
        x = torch.randn(B, T, D)
        assert mh.count(layer, x).flops == 2 * (PROJECTIONS + B * H * T * T * 2 * N)


def test_masks_of_this_batch():
    """Left padding: pairs of each sequence by its own mask; a mask with too many numbers counts all pairs."""
    ids = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6]])

    def attend(q, ids):
        mask = torch.ones(4, 4, dtype=torch.bool, device=q.device).tril() & (ids != 0)[:, None, None, :]
        return SDPA(q, q, q, attn_mask=mask)

    for device in (None, "meta"):
        cost = mh.count(attend, torch.randn(2, H, 4, N), ids, device=device)
        assert cost.flops == 2 * H * (3 + 10) * 2 * N
        assert cost.to("halved").flops == 2 * H * (8 + 8) * 2 * N
        assert cost.to("dense").flops == 2 * H * (16 + 16) * 2 * N
        assert cost.notes[:-1] == (MASKED,)


def test_causal_queries_that_are_more_or_fewer_than_keys():
    for queries, keys in ((3, 5), (5, 3), (4, 4)):
        q, k = torch.randn(1, 1, queries, N), torch.randn(1, 1, keys, N)
        cost = mh.count(partial(SDPA, is_causal=True), q, k, k)
        seen = torch.ones(queries, keys).tril()
        assert cost.flops == 2 * int(seen.sum()) * 2 * N
        masked = mh.count(lambda q, k, seen: SDPA(q, k, k, attn_mask=seen), q, k, seen.bool())
        assert masked.flops == cost.flops

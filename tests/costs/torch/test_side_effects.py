"""A count leaves no trace: parameters, buffers, gradients, modes, random state, batch, hooks."""

import subprocess
import sys

import pytest

import manyheads as mh

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


class Busy(nn.Module):
    """Dropout, running statistics, overwritten ids, attention."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.calls += 1
        ids[ids == 8] = 0
        x = self.drop(self.norm(self.table(ids).mT).mT)
        return F.relu(self.attend(x, x, x)[0])


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("train", [True, False])
def test_nothing_changes(device, train):
    torch.manual_seed(0)
    model, ids = Busy().train(train), torch.tensor([[1, 8, 2], [3, 4, 8]])
    model.norm.eval()
    model.table.weight.grad = torch.ones(9, 8)
    calls = []
    model.table.weight.register_post_accumulate_grad_hook(calls.append)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (each, each.detach().clone(), each.grad) for name, each in tensors.items()}
    modes, draws, given = [each.training for each in model.modules()], torch.get_rng_state(), ids.clone()
    sdpa, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()

    assert mh.count(model, ids, training=True, device=device).flops

    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, (tensor, numbers, gradient) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, numbers)
        assert tensor.grad is gradient
        assert gradient is None or torch.equal(gradient, torch.ones(9, 8))
    assert [each.training for each in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), draws)
    assert torch.equal(ids, given)
    assert not calls
    assert F.scaled_dot_product_attention is sdpa
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_gradients_of_arguments_and_of_closures_stay():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    layer.weight.grad = kept = torch.ones(3, 3)
    mh.count(lambda x: layer(x), x, training=True)
    assert layer.weight.grad is kept
    assert kept.sum() == 9
    assert (layer.bias.grad, x.grad) == (None, None)


@pytest.mark.parametrize("device", [None, "meta"])
def test_an_error_of_the_module_leaves_it_as_it_was(device):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            self.layer(x)
            raise ValueError("broken")

    model = Broken()
    weight, sdpa = model.layer.weight, F.scaled_dot_product_attention
    with pytest.raises(ValueError, match="broken"):
        mh.count(model, torch.randn(2, 3), training=True, device=device)
    assert model.layer.weight is weight
    assert F.scaled_dot_product_attention is sdpa
    assert not torch.nn.modules.module._global_forward_hooks
    assert mh.count(nn.Linear(3, 3), torch.randn(2, 3)).flops == 2 * 2 * 9


def test_numbers_are_computed_on_the_cpu_as_without_a_count():
    """Data decide as they would: fused attention has its real result."""
    seen = []
    layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def run(x):
        seen.append(layer(x, x, x, need_weights=False)[0].detach().clone())
        return seen[-1]

    x = torch.randn(2, 5, 8)
    run(x)
    mh.count(run, x)
    torch.testing.assert_close(seen[0], seen[1])


def test_jax_is_counted_without_pytorch():
    """And PyTorch without JAX: tests/test_light.py."""
    count = "assert mh.count(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4))).flops == 48"
    code = f"import sys, manyheads as mh, jax.numpy as jnp; {count}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

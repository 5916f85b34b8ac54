"""The plain GPT of the acceptance lane: what its arms give every parameter, and its own Muon in float32."""

import numpy as np
import pytest
from tests.acceptance import _limits_gpt as gpt

from manyheads.transformer import Shape

pytestmark = pytest.mark.torch


def test_arms_differ_in_rates_and_optimizers_as_published():
    shape, found = Shape(8, 16, 2), {}
    for name, p in gpt.ARMS.items():
        made = gpt.optimizers(p, gpt.build(shape, 20), shape, 1.0, 0)
        groups = [group for optimizer in made for group in optimizer.param_groups]
        found[name] = len(made), {word: group["lr"] for group in groups for word in group["names"]}
    for name in ("Muon, table", "Muon, one rate"):
        assert (found[name][0], found[name][1]["h.0.q.weight"]) == (2, 5.0)
    assert found["mup, AdamW"][1]["h.0.q.weight"] == found["mup, AdamW"][1]["head.weight"] == 0.25
    assert set(found["AdamW, one rate"][1].values()) == {1.0}
    assert found["Muon, table"][1]["head.weight"] == 0.25
    assert found["Muon, one rate"][1]["head.weight"] == 1.0


def test_muon_steps_by_a_polar_factor_and_training_is_reproducible():
    import torch

    weight = torch.nn.Parameter(torch.zeros(8, 4))
    weight.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    gpt.muon([{"params": [weight], "lr": 0.1}]).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.1 * 2**0.5)
    assert ((values > 0.6) & (values < 1.2)).all()
    assert float((weight.detach() * weight.grad).sum()) < 0
    tokens = np.random.default_rng(0).integers(20, size=200)
    losses = {gpt.train(gpt.ARMS["Muon, table"], Shape(8, 2, 1), 1e-3, 3, 2, tokens) for _ in range(2)}
    assert len(losses) == 1
    assert np.isfinite(losses.pop())

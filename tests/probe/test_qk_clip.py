"""QK-clip: factors applied to a copy bring the largest logits to the threshold, by the rule that is named."""

import copy

import numpy as np
import pytest
from tests.probe.families import batch, build, run

from manyheads.errors import UsageError
from manyheads.probe import qk_clip_factors, record_attention

pytestmark = pytest.mark.torch

RULES = {
    "gpt2": "head",
    "opt": "head",
    "llama": "group",
    "deepseek_v3": "latent",
    "qwen3": "shared gain",
    "olmo2": "gain of a head",
}


def attention(family, model):
    """Return the attention module of the first layer."""
    if family == "gpt2":
        return model.transformer.h[0].attn
    return (model.model.decoder if family == "opt" else model.model).layers[0].self_attn


def scale_rows(projection, factors, size=8):
    """Multiply the rows of each head of a projection by its factor."""
    for tensor in projection.parameters():
        tensor.view(len(factors), size, -1).mul_(factors.view(-1, 1, 1))


def clip(family, module, factor):
    """Apply factors of the heads, (4,), to an attention module by the rule of its family."""
    root = factor.sqrt()
    if family == "gpt2":
        for start in (0, 32):
            module.c_attn.weight[:, start : start + 32].view(32, 4, 8).mul_(root.view(1, 4, 1))
            module.c_attn.bias[start : start + 32].view(4, 8).mul_(root.view(4, 1))
    elif family == "opt":
        scale_rows(module.q_proj, root)
        scale_rows(module.k_proj, root)
    elif family == "llama":
        scale_rows(module.q_proj, root)
        scale_rows(module.k_proj, root[::2])
    elif family == "deepseek_v3":
        query = module.q_b_proj.weight.view(4, 12, -1)
        query[:, :8] *= root.view(4, 1, 1)
        query[:, 8:] *= factor.view(4, 1, 1)
        module.kv_b_proj.weight.view(4, 16, -1)[:, :8] *= root.view(4, 1, 1)
    elif family == "qwen3":
        module.q_norm.weight.mul_(factor[0])
    else:
        module.q_norm.weight.view(4, 8).mul_(factor.view(4, 1))


def recorded(model, family, seed=0):
    with record_attention(model, rows=None) as record:
        run(model, batch(family, seed))
    return record.dataset()


def clip_copy(family, seed):
    """Return the dataset of factors, and the largest logits of the first layer before and after a copy is clipped."""
    import torch

    model = build(family, seed).double()
    before = recorded(model, family)
    largest = before.max_logit.values[0]
    found = qk_clip_factors(model, before, float(np.sort(largest)[1:3].mean()))
    clipped = copy.deepcopy(model)
    with torch.no_grad():
        clip(family, attention(family, clipped), torch.as_tensor(found.applied.values[0]))
    return found, largest, recorded(clipped, family).max_logit.values[0]


@pytest.mark.parametrize("family", RULES)
def test_factors_bring_the_largest_logits_to_the_threshold(family, seed):
    found, before, after = clip_copy(family, seed)
    threshold = found.attrs["threshold"]
    assert set(found.rule.values) == {RULES[family]}
    np.testing.assert_allclose(found.factor.values[0], np.minimum(1, threshold / before))
    np.testing.assert_allclose(after, found.applied.values[0] * before, rtol=1e-5)
    np.testing.assert_array_less(after, threshold * (1 + 1e-5))
    if RULES[family] in ("head", "latent", "gain of a head"):
        np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)


def test_what_cannot_be_clipped_is_refused():
    model = build("llama")
    found = recorded(model, "llama")
    assert (qk_clip_factors(model, found, 1e6).factor == 1).all()
    with pytest.raises(UsageError, match="threshold=0"):
        qk_clip_factors(model, found, 0)
    with pytest.raises(UsageError, match="no module"):
        qk_clip_factors(build("gpt2"), found)
    with pytest.raises(UsageError, match="record with rows=None"):
        qk_clip_factors(model, found.drop_vars("max_logit"))


def test_heads_of_nan_weights_are_nan_beside_whole_ones():
    import torch

    model = build("gpt2")
    with torch.no_grad():
        attention("gpt2", model).c_attn.weight[0, 0] = torch.nan  # a query of head 0
    found = recorded(model, "gpt2")
    with record_attention(model, rows=1000) as record:
        run(model, batch("gpt2"))
    rows = record.dataset().max_logit.values[0]
    assert np.isfinite(rows).tolist() == [False, True, True, True]
    np.testing.assert_allclose(found.max_logit.values[0], rows, rtol=1e-5)
    factors = qk_clip_factors(model, found, 1e-3).isel(layer=0)
    assert factors.rule == "head"
    assert (factors.applied < 1).values.tolist() == [False, True, True, True]
    assert np.isnan(factors.applied[0])

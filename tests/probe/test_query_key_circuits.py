"""Norms and stable rank of W_Q^T W_K: against dense matrices, under changes of basis, and their null level."""

import math

import numpy as np
import pytest
from tests.probe.families import batch, build, run

from manyheads.errors import UsageError
from manyheads.probe import query_key_spectra, record_attention
from manyheads.probe.query_key_circuits import circuit_spectrum, random_circuit_rank


def test_small_gram_matrices_give_the_norms_of_the_product(rng):
    query, key = rng.normal(size=(4, 6, 20)), rng.normal(size=(2, 6, 20))
    frobenius, spectral = circuit_spectrum(query, key)
    for head in range(4):
        values = np.linalg.svd(query[head].T @ key[head // 2], compute_uv=False)
        np.testing.assert_allclose([frobenius[head], spectral[head]], [np.linalg.norm(values), values[0]], rtol=1e-12)
    basis = np.linalg.qr(rng.normal(size=(4, 6, 6)))[0] * np.logspace(-1, 1, 6)  # condition 100
    keys = np.linalg.inv(basis).swapaxes(1, 2) @ np.repeat(key, 2, axis=0)
    np.testing.assert_allclose(circuit_spectrum(basis @ query, keys), (frobenius, spectral), rtol=1e-10)


@pytest.mark.parametrize(("size", "width", "measured"), [(64, 512, 28.6), (128, 1024, None), (16, 8, None)])
def test_the_null_level_is_that_of_the_product_of_two_marchenko_pastur_laws(size, width, measured, rng):
    """Free probability: with c = N / d, the edge of the product is min_z (1 + z)(1 + c z)^2 / z, reached from below."""
    mean, std = random_circuit_rank(size, width)
    if measured:
        assert abs(mean - measured) < 0.3
    if width > size:
        c = size / width
        z = (math.sqrt(c * c + 8 * c) - c) / (4 * c)
        limit = size * z / ((1 + z) * (1 + c * z) ** 2)
        assert limit < mean < 1.06 * limit
    drawn = [circuit_spectrum(*rng.normal(size=(2, 1, size, width))) for _ in range(12)]
    ranks = [float((frobenius / spectral) ** 2) for (frobenius,), (spectral,) in drawn]
    assert abs(np.mean(ranks) - mean) < 5 * std * math.sqrt(1 / 12 + 1 / 64)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "bert", "modernbert", "t5", "whisper", "qwen3"])
def test_weights_are_found_by_head(family, seed):
    """By logits: x_i^T M x_j of a module without biases, norms and positions equals q_i . k_j from its projections."""
    import torch

    model = build(family, seed)
    found = query_key_spectra(model)
    assert found.normalized.values.tolist() == [family == "qwen3"] * found.sizes["layer"]
    name = str(found.module.values[-1])
    module = dict(model.named_modules())[name]
    d = model.config.hidden_size
    with torch.no_grad():
        for tensor_name, tensor in module.named_parameters():
            if tensor_name.endswith("bias"):
                tensor.zero_()
        x = torch.eye(d)
        if family in ("gpt2", "gpt_neox", "modernbert"):
            joint = getattr(module, {"gpt2": "c_attn", "gpt_neox": "query_key_value", "modernbert": "Wqkv"}[family])(x)
            shape = (d, 4, 3, 8) if family == "gpt_neox" else (d, 3, 4, 8)
            joint = joint.view(shape).movedim(2 if family == "gpt_neox" else 1, 0)
            query, key = joint[0], joint[1]
        else:
            names = {"t5": ("q", "k"), "bert": ("query", "key")}.get(family, ("q_proj", "k_proj"))
            query, key = (getattr(module, part)(x).view(d, -1, 8) for part in names)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    circuits = torch.einsum("ihn,jhn->hij", query, key).double()
    values = torch.linalg.svdvals(circuits)
    np.testing.assert_allclose(found.spectral.values[-1], values[:, 0], rtol=1e-5)
    rank = values.square().sum(-1) / values[:, 0] ** 2
    np.testing.assert_allclose(found.stable_rank.values[-1], rank, rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize(("family", "width"), [("qwen3", 8), ("gemma3", 8), ("olmo2", 32), ("llama", None)])
def test_gains_of_norms_bound_the_logits(family, width, seed):
    """A norm over one head or over all; the gain is the weight, or one more than it (gemma3)."""
    import torch

    model = build(family, seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                tensor.uniform_(-2, 2)
    bound = query_key_spectra(model).logit_bound.values
    if width is None:
        assert np.isnan(bound).all()
        return
    with record_attention(model, rows=None) as record:
        run(model, batch(family, seed))
    assert (record.dataset().max_logit.max("head").values <= bound * (1 + 1e-5)).all()
    module = model.model.layers[0].self_attn
    gains = [(module.get_submodule(name).weight + (family == "gemma3")).abs().max() for name in ("q_norm", "k_norm")]
    np.testing.assert_allclose(bound[0], module.scaling * width * float((gains[0] * gains[1]).detach()), rtol=1e-4)


@pytest.mark.torch
def test_latent_attention_is_refused():
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM has no module with projections"):
        query_key_spectra(build("deepseek_v3"))

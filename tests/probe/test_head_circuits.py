"""Norms and stable rank of the matrices of heads: against dense ones, under changes of basis, and their null level."""

import math

import numpy as np
import pytest
from tests.probe.families import batch, build, run

from manyheads.errors import UsageError
from manyheads.probe import head_spectra, record_attention, weight_spectra
from manyheads.probe.heads.circuits import CIRCUITS, MATRICES, head_norms, random_head_ranks, stable_ranks
from manyheads.spectra.levels import expected_stable_rank


def test_small_gram_matrices_give_the_norms(rng):
    weights = {name: rng.normal(size=(4 if name in ("query", "output") else 2, 6, 20)) for name in MATRICES[:4]}
    norms = head_norms(weights)
    for head in range(4):
        of_head = {name: weight[head // (4 // len(weight))] for name, weight in weights.items()}
        dense = of_head | {name: of_head[left].T @ of_head[right] for name, (left, right) in CIRCUITS.items()}
        for place, name in enumerate(MATRICES):
            values = np.linalg.svd(dense[name], compute_uv=False)
            found = norms[:, place, head // 2 if name in ("key", "value") else head]
            p = values[:6] / values[:6].sum()
            ranks = np.exp(-p @ np.log(p)), (values**2).sum() ** 2 / (values**4).sum()
            np.testing.assert_allclose(found[:2], [np.linalg.norm(values), values[0]], rtol=1e-12)
            np.testing.assert_allclose(found[2:], ranks, rtol=1e-9)
    assert np.isnan(norms[:, [1, 2], 2:]).all()  # two heads of keys and values
    basis = np.linalg.qr(rng.normal(size=(4, 6, 6)))[0] * np.logspace(-1, 1, 6)  # condition 100
    keys = np.linalg.inv(basis).swapaxes(1, 2) @ np.repeat(weights["key"], 2, axis=0)
    turned = head_norms({"query": basis @ weights["query"], "key": keys})
    np.testing.assert_allclose(turned[:, MATRICES.index("query-key")], norms[:, MATRICES.index("query-key")], rtol=1e-9)
    assert np.isnan(turned[:, [2, 3, 5]]).all()


@pytest.mark.parametrize(("size", "width", "measured"), [(64, 512, 28.6), (128, 1024, None), (16, 8, None)])
def test_the_null_level_is_that_of_the_product_of_two_marchenko_pastur_laws(size, width, measured, rng):
    """Free probability: with c = N / d, the edge of the product is min_z (1 + z)(1 + c z)^2 / z, reached from below."""
    place = MATRICES.index("query-key")
    mean, std = random_head_ranks(size, width)
    if measured:
        assert abs(mean[place] - measured) < 0.3
    if width > size:
        c = size / width
        z = (math.sqrt(c * c + 8 * c) - c) / (4 * c)
        limit = size * z / ((1 + z) * (1 + c * z) ** 2)
        assert limit < mean[place] < 1.06 * limit
        assert mean[0] == pytest.approx(expected_stable_rank(size, width), rel=0.01)
    drawn = [head_norms(dict(zip(MATRICES, rng.normal(size=(4, 1, size, width)), strict=False))) for _ in range(12)]
    ranks = np.mean([stable_ranks(each)[:, 0] for each in drawn], axis=0)
    assert (abs(ranks - mean) < 5 * std * math.sqrt(1 / 12 + 1 / 64)).all()


@pytest.mark.torch
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "bert", "modernbert", "t5", "whisper", "qwen3"])
def test_weights_are_found_by_head(family, seed):
    """By logits: x_i^T M x_j of a module without biases, norms and positions equals q_i . k_j from its projections.

    By outputs: what the output projection makes of the values of one head alone is M^T x_j.
    """
    import torch

    model = build(family, seed)
    found = head_spectra(model)
    assert found.normalized.values.tolist() == [family == "qwen3"] * found.sizes["layer"]
    name = str(found.module.values[-1])
    modules = dict(model.named_modules())
    module = modules[name]
    written = {"gpt2": "c_proj", "gpt_neox": "dense", "modernbert": "Wo", "t5": "o", "whisper": "out_proj"}
    beside = name.removesuffix("self") + "output.dense"
    output = modules[beside] if family == "bert" else getattr(module, written.get(family, "o_proj"))
    d = model.config.hidden_size
    with torch.no_grad():
        for owner in (module, output):
            for tensor_name, tensor in owner.named_parameters():
                if tensor_name.endswith("bias"):
                    tensor.zero_()
        x = torch.eye(d)
        if family in ("gpt2", "gpt_neox", "modernbert"):
            joint = getattr(module, {"gpt2": "c_attn", "gpt_neox": "query_key_value", "modernbert": "Wqkv"}[family])(x)
            shape = (d, 4, 3, 8) if family == "gpt_neox" else (d, 3, 4, 8)
            joint = joint.view(shape).movedim(2 if family == "gpt_neox" else 1, 0)
            query, key, value = joint[0], joint[1], joint[2]
        else:
            names = {"t5": "qkv", "bert": ("query", "key", "value")}.get(family, ("q_proj", "k_proj", "v_proj"))
            query, key, value = (getattr(module, part)(x).view(d, -1, 8) for part in names)
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        heads = range(query.shape[1])
        alone = torch.zeros(len(heads), d, *query.shape[1:])
        for head in heads:
            alone[head, :, head] = value[:, head]
        written = output(alone.flatten(2))
    circuits = {"query-key": torch.einsum("ihn,jhn->hij", query, key), "output-value": written}
    for circuit, matrices in circuits.items():
        values = torch.linalg.svdvals(matrices.double())
        last = found.isel(layer=-1).sel(head_matrix=circuit)
        np.testing.assert_allclose(last.spectral, values[:, 0], rtol=1e-5)
        np.testing.assert_allclose(last.stable_rank, values.square().sum(-1) / values[:, 0] ** 2, rtol=1e-5)


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
    bound = head_spectra(model).logit_bound.values
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
def test_rotary_positions_that_multiply_raise_the_bound(tmp_path, seed):
    """YaRN multiplies sines and cosines by 0.1 ln(factor) + 1; a checkpoint says why it has no bound."""
    scaling = {"rope_type": "yarn", "factor": 50.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    model, plain = build("qwen3", seed, rope_scaling=scaling), build("qwen3", seed)
    bounds = [head_spectra(each).logit_bound.values for each in (model, plain)]
    np.testing.assert_allclose(bounds[0], (0.1 * math.log(50) + 1) ** 2 * bounds[1])
    for each, said in ((model, "none: rotary positions of type 'yarn' may multiply"), (plain, "measured")):
        each.save_pretrained(tmp_path)
        found = weight_spectra(tmp_path)
        assert found.attrs["logit_bound"].startswith(said)
    np.testing.assert_allclose(found.head_logit_bound, bounds[1], rtol=1e-5)


@pytest.mark.torch
def test_latent_attention_is_refused():
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM has no module with projections"):
        head_spectra(build("deepseek_v3"))

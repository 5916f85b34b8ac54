"""The projections in one convention: against each family's own forward pass, written from its stored layout."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from manyheads.errors import UsageError
from manyheads.models import attention_weights, open_checkpoint
from manyheads.models.attention_layers import Rotary, attention_config
from manyheads.models.config import read_config
from manyheads.models.parameters import parameter_map
from manyheads.models.refusals import ConfigInvalid


def _scores(weights, x):
    """q_h k_g^T for every head h and its group g, (H, n, n); and x W_V W_O summed over heads as if all attended."""
    facts = weights.config
    group = np.arange(facts.heads) // (facts.heads // facts.key_value_heads)
    q = np.einsum("nd,hde->hne", x, weights.query)
    k = np.einsum("nd,hde->hne", x, weights.key)
    v = np.einsum("nd,hde->hne", x, weights.value)
    if weights.query_bias is not None:
        q, k, v = q + weights.query_bias[:, None], k + weights.key_bias[:, None], v + weights.value_bias[:, None]
    y = np.einsum("hne,hed->nd", v[group], weights.output)
    return np.einsum("hne,hme->hnm", q, k[group]), y + (0 if weights.output_bias is None else weights.output_bias)


def _naive(kind, arrays, layer, x, heads, groups):
    """The same two, from the stored matrices and in the words of each family's own model code."""
    name = {
        "gpt2": "transformer.h.{}.attn.",
        "gpt_neox": "gpt_neox.layers.{}.attention.",
        "opt": "model.decoder.layers.{}.self_attn.",
        "llama": "model.layers.{}.self_attn.",
        "qwen2": "model.layers.{}.self_attn.",
        "bert": "bert.encoder.layer.{}.attention.",
        "vit": "vit.encoder.layer.{}.attention.",
    }[kind].format(layer)
    get = {key.removeprefix(name): array for key, array in arrays.items() if key.startswith(name)}.get

    def linear(path, inputs):
        bias = get(f"{path}.bias")
        return inputs @ get(f"{path}.weight").T + (0 if bias is None else bias)

    n = len(x)
    if kind == "gpt2":  # (in, out); query, key and value one after the other, then heads
        q, k, v = np.split(x @ get("c_attn.weight") + get("c_attn.bias"), 3, axis=-1)
        last = lambda z: z @ get("c_proj.weight") + get("c_proj.bias")  # noqa: E731
    elif kind == "gpt_neox":  # heads, and for each its query, key and value one after the other
        joint = linear("query_key_value", x).reshape(n, heads, -1)
        q, k, v = (part.reshape(n, -1) for part in np.split(joint, 3, axis=-1))
        last = lambda z: linear("dense", z)  # noqa: E731
    else:
        paths = {
            "bert": ("self.query", "self.key", "self.value", "output.dense"),
            "vit": ("attention.query", "attention.key", "attention.value", "output.dense"),
            "opt": ("q_proj", "k_proj", "v_proj", "out_proj"),
        }.get(kind, ("q_proj", "k_proj", "v_proj", "o_proj"))
        q, k, v = (linear(path, x) for path in paths[:3])
        last = lambda z: linear(paths[3], z)  # noqa: E731
    q = q.reshape(n, heads, -1).transpose(1, 0, 2)
    k, v = (np.repeat(z.reshape(n, groups, -1).transpose(1, 0, 2), heads // groups, axis=0) for z in (k, v))
    return q @ k.transpose(0, 2, 1), last(v.transpose(1, 0, 2).reshape(n, -1))


def test_projections_act_as_the_stored_matrices(model, rng):
    kind, config, arrays, folder = model
    x = rng.standard_normal((5, 12)).astype(np.float32)
    heads = config.get("num_attention_heads", config.get("n_head"))
    groups = config.get("num_key_value_heads", heads)
    checkpoint = open_checkpoint(folder)
    family = parameter_map(checkpoint)
    for layer in range(2):
        weights = attention_weights(checkpoint, layer, family)
        N = config.get("head_dim", 12 // heads)
        assert weights.query.shape == (heads, 12, N)
        assert weights.key.shape == weights.value.shape == (groups, 12, N)
        assert weights.output.shape == (heads, N, 12)
        assert weights.scale == weights.config.scale == N**-0.5
        for ours, theirs in zip(_scores(weights, x), _naive(kind, arrays, layer, x, heads, groups), strict=True):
            # float32 sums of 12 terms in another order
            assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


def test_no_number_is_changed(model):
    _, _, arrays, folder = model
    stored = {value for array in arrays.values() for value in array.ravel().tolist()}
    checkpoint = open_checkpoint(folder)
    weights = attention_weights(checkpoint, 1)
    for field in dataclasses.fields(weights)[:-1]:
        array = getattr(weights, field.name)
        if array is not None:
            assert array.dtype == np.float32
            assert set(array.ravel().tolist()) <= stored


def test_facts(model):
    kind, *_, folder = model
    checkpoint = open_checkpoint(folder)
    family = parameter_map(checkpoint)
    facts = [attention_config(family.config, layer) for layer in range(2)]
    assert facts[0].causal is (kind not in ("bert", "vit"))
    assert facts[0].norm == ("rms" if kind in ("llama", "qwen2") else "layer")
    assert facts[0].norm_place == ("post" if kind in ("bert", "opt") else "pre")  # this OPT is made like OPT-350M
    assert facts[0].norm_eps == {"bert": 1e-12, "vit": 1e-12, "llama": 1e-6, "qwen2": 1e-6}.get(kind, 1e-5)
    assert facts[0].parallel is (kind == "gpt_neox")
    assert [fact.window for fact in facts] == ([None, 4] if kind == "qwen2" else [None, None])
    rotary = {
        "gpt_neox": Rotary(2, 0.5, 100.0),
        "llama": Rotary(6, 1.0, 5e5, {"rope_type": "llama3", "factor": 8.0}),
        "qwen2": Rotary(2, 1.0, 1e6),
    }
    assert facts[0].rotary == rotary.get(kind)
    for layer in (-1, 2):
        with pytest.raises(UsageError, match="layers 0 to 1"):
            attention_config(family.config, layer)


def _gpt2(tmp_path, **changes):
    shapes = {"wte": (5, 4), "wpe": (3, 4), "ln_f": (4,)}
    for h in ("h.0.", "h.1."):
        shapes |= {h + "ln_1": (4,), h + "attn.c_attn": (4, 12), h + "attn.c_proj": (4, 4), h + "ln_2": (4,)}
        shapes |= {h + "mlp.c_fc": (4, 16), h + "mlp.c_proj": (16, 4)}
    arrays = {f"{name}.weight": np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    arrays |= {f"{n}.bias": np.zeros(s[-1], ml_dtypes.bfloat16) for n, s in shapes.items() if n not in ("wte", "wpe")}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    config = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 2, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, (2**-0.5, 2**-0.5)),
        ({"scale_attn_weights": False}, (1.0, 1.0)),
        ({"scale_attn_by_inverse_layer_idx": True}, (2**-0.5, 2**-1.5)),
    ],
)
def test_scales_of_gpt2(tmp_path, changes, scales):
    checkpoint = _gpt2(tmp_path, **changes)
    weights = [attention_weights(checkpoint, layer) for layer in range(2)]
    assert tuple(weight.scale for weight in weights) == pytest.approx(scales, rel=1e-15)
    assert weights[0].query.dtype == ml_dtypes.bfloat16


def test_rotary_that_is_not_the_plain_one_is_stated_not_computed():
    with pytest.raises(UsageError, match="llama3"):
        Rotary(4, 1.0, 1e4, {"rope_type": "llama3"}).frequencies()


@pytest.mark.parametrize("beside", [{}, {"rope_theta": None, "rope_type": "default"}])  # transformers 5.15 adds these
@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_full_and_windowed_layers_turn_by_their_own_angles(family, beside):
    angles = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    raw = {"model_type": family, "layer_types": [*angles], "rope_parameters": angles | beside, "num_hidden_layers": 2}
    config = read_config(raw)
    full, windowed = (attention_config(config, layer, any_score=True).rotary for layer in range(2))
    assert (full.theta, full.scaling) == (1e6, angles["full_attention"])
    assert (windowed.theta, windowed.scaling) == (1e4, {})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_theta": -1}},
        {"rope_parameters": {"rope_theta": "10000"}},
        {"rope_parameters": {"partial_rotary_factor": 2.0}},
        {"rope_parameters": {"full_attention": 1.0}, "layer_types": ["full_attention"] * 2, "use_sliding_window": True},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
    ],
)
@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_contradictions_are_refused(model, change):
    _, config, _, folder = model
    checkpoint = open_checkpoint(folder, config={**config, **change})
    with pytest.raises(ConfigInvalid):
        attention_weights(checkpoint, 1)

"""Checkpoints with other scores: transformers' own sub-modules, asked and extracted."""

import numpy as np
import pytest
from tests.recovery.score_checkpoints import MODELS, t5_attention, tiny_model

import manyheads as mh
from manyheads.models.refusals import NotExtractable
from manyheads.recovery import ExtractionOptions
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

pytestmark = pytest.mark.torch

WINDOWS = {"Mistral, window": 12, "Gemma 2, local": 12, "Gemma 3, local": 12, "gpt-oss, local": 12}


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_extracted(name, tmp_path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, layer = tiny_model(name, 0)
    model.save_pretrained(tmp_path)
    oracle = checkpoint_oracle(tmp_path, layer)
    assert oracle.scores
    found = mh.extract_layer(oracle, seed=0, options=ExtractionOptions(verify=60))
    assert (found.heads, found.method) == (4, "scores")
    assert getattr(found.layer, "window", None) == WINDOWS.get(name)
    if name.startswith("Gemma 2"):
        assert found.layer.cap == pytest.approx(50.0, rel=1e-3)
    if name in ("BLOOM", "MPT"):
        np.testing.assert_allclose(np.sort(-found.layer.slopes), [2.0**-8, 2.0**-6, 2.0**-4, 2.0**-2], atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Pythia", "Mistral, window", "BLOOM", "MPT"])
def test_a_block_is_extracted_through_its_norm(name):
    """x + attn(norm(x)), where the same model is found as by its attention."""
    model, layer = tiny_model(name, 0)
    found = mh.extract_layer(
        checkpoint_oracle(model, layer, through="block"), seed=0, options=ExtractionOptions(verify=60)
    )
    assert (found.heads, found.method) == (4, "scores-sphere")
    assert getattr(found.layer, "window", None) == WINDOWS.get(name)


@pytest.mark.parametrize(
    ("name", "reason"), [("Gemma 2, local", "what its attention adds"), ("gpt-oss, local", "learned sinks")]
)
def test_blocks_that_hide_something_are_refused(name, reason):
    with pytest.raises(NotExtractable, match=reason):
        checkpoint_oracle(*tiny_model(name, 0), through="block")
    with pytest.raises(NotExtractable, match=reason):
        checkpoint_oracle(*tiny_model(name, 0), through="block-with-mlp")


def test_a_block_of_other_scores_is_refused_with_its_mlp():
    with pytest.raises(NotExtractable, match="Ask with through='block'"):
        checkpoint_oracle(*tiny_model("Qwen3", 0), through="block-with-mlp")


def test_a_norm_without_weights_is_found():
    """OLMo's LayerNorm has no weights by which a table could find it."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = transformers.OlmoModel(transformers.OlmoConfig(**sizes, vocab_size=9, pad_token_id=0)).double()
    x = np.random.default_rng(0).standard_normal((2, 3, 16))
    oracle = checkpoint_oracle(model, 0, through="block")
    with torch.no_grad():
        u = model.layers[0].input_layernorm(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(oracle(x), x + checkpoint_oracle(model, 0)(u), atol=1e-6)


@pytest.mark.parametrize(
    "name", ["Mistral, window", "Gemma 3, local", "Gemma 2, global", "BLOOM", "MPT", "gpt-oss, local"]
)
def test_the_sub_module_answers_as_in_its_model(name):
    """Masks, angles and slopes are those with which the model calls its attention, up to single precision."""
    import torch

    model, layer = tiny_model(name, 1)
    if name.startswith("Gemma 2"):
        model.set_attn_implementation("eager")  # other kernels leave out the soft cap
    seen = {}

    def keep(module, given, named, answer):
        seen["x"] = named["hidden_states"] if "hidden_states" in named else given[0]
        seen["residual"] = given[1] if name == "BLOOM" else None
        seen["y"] = answer[0]

    oracle = checkpoint_oracle(model, layer)
    inside = next(
        part
        for place, part in model.named_modules()
        if "Attention" in type(part).__name__ and f".{layer}." in f".{place}."
    )
    inside.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(20)[None] % 29)
    y = seen["y"] if seen["residual"] is None else seen["y"] - seen["residual"]
    expected = y.numpy()
    found = oracle(seen["x"].numpy().astype(np.float64))
    assert np.abs(found - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


def test_double_precision_stays_double(rng):
    """Norms of queries and keys are narrowed to float32 by transformers, and are not here."""
    model, layer = tiny_model("Qwen3", 0)
    x = rng.standard_normal((2, 6, 32))
    exact, near = checkpoint_oracle(model, layer)(x), checkpoint_oracle(model, layer, dtype="float32")(x)
    assert 1e-9 < np.abs(exact - near).max() < 1e-4
    moved = checkpoint_oracle(model, layer)(x * (1 + 1e-12))
    assert 0 < np.abs(exact - moved).max() < 1e-9  # float32 would round this away, or to 1e-7


def test_the_attention_of_t5_as_a_function():
    """Tables of relative biases of the decoder."""
    found = mh.extract_layer(t5_attention(0), 32, seed=0, options=ExtractionOptions(scores=True, verify=60))
    assert (found.heads, found.layer.position_bias.shape, found.layer.slopes) == (4, (4, 128), None)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_attention_of_an_encoder_sees_later_tokens(seed):
    """T5's encoder: one table for earlier and one for later tokens."""
    function = t5_attention(seed, decoder=False)
    found = mh.extract_layer(function, 32, seed=seed, options=ExtractionOptions(scores=True, verify=60)).layer
    assert not found.causal
    assert found.parts() == ["terms of position", "terms of later tokens"]
    x = np.random.default_rng(seed).standard_normal((4, 100, 32))
    assert function_error(function, found, x) < 1e-12


@pytest.mark.parametrize("place", [0, 1])
def test_sinks_of_a_checkpoint_are_found(place):
    """Logits of sinks are the stored ones, beside YaRN, grouped queries and biases."""
    model, layer = tiny_model(("gpt-oss, local", "gpt-oss, global")[place], 1)
    module = model.layers[layer].self_attn
    found = mh.extract_layer(module, seed=0, options=ExtractionOptions(verify=60)).layer
    np.testing.assert_allclose(np.sort(found.sink), np.sort(module.sinks.detach().numpy()), atol=1e-5)
    assert found.value_bias is not None

"""Layers of checkpoints as oracles: the sub-module of transformers against the layer that the weights say."""

import numpy as np
import pytest
from tests.scaling.torch_models import FAMILIES, build

from manyheads.errors import UsageError
from manyheads.models.refusals import NotExtractable
from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer
from manyheads.recovery.oracle.checkpoint_layers import true_layer
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle
from manyheads.recovery.result.summaries import summarize_recovery
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

SHAPE = Shape(8, 2, 2)
# Half of the components are turned: the checkpoint and the layer pair them differently.
UNBIASED = {"gpt_neox": {"attention_bias": False, "rotary_pct": 0.5}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, seed):
    """Write a random model of a family, once; return its folder."""
    import torch
    import transformers

    folders = {}

    def write(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in folders:
            torch.manual_seed(seed)  # for each anew: which models were drawn before must not matter
            model = build(family, SHAPE, **changes)
            with torch.no_grad():
                for weight in model.parameters():  # also biases and gains, which start at zero and one
                    weight.normal_(0.0, 0.4)
            folders[key] = tmp_path_factory.mktemp(family)
            transformers.utils.logging.disable_progress_bar()
            model.save_pretrained(folders[key])
        return folders[key]

    return write


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sub_module_is_the_layer_that_its_weights_say(family, saved, rng):
    path = saved(family, **UNBIASED.get(family, {}))
    x = rng.normal(size=(3, 6, SHAPE.width))
    oracle = checkpoint_oracle(path, 1)
    y = oracle(x)
    assert (oracle.dim, oracle.residual, oracle.normalized, y.dtype) == (SHAPE.width, False, False, np.float64)
    assert oracle.rotary == (family in ("llama", "gpt_neox", "qwen2"))
    assert oracle.scores == (family == "qwen2")
    assert oracle.causal == (family not in ("bert", "vit"))
    truth = true_layer(path, 1)
    expected = truth(x) if oracle.rotary else evaluate_layer(truth, x)
    # transformers keeps rotary frequencies in float32, which turns the angles by up to 1e-7 of themselves.
    assert np.abs(y - expected).max() <= (1e-6 if oracle.rotary else 1e-12) * np.abs(y).max()


@pytest.mark.parametrize("stated", [{"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0]}])
def test_layers_of_smollm3_have_positions_or_none(stated, rng, tmp_path):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.SmolLM3Config(
        **sizes, intermediate_size=8, vocab_size=11, pad_token_id=0, bos_token_id=1, eos_token_id=2, **stated
    )
    torch.manual_seed(0)
    model = transformers.SmolLM3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.4)
    model.save_pretrained(tmp_path)
    x = rng.normal(size=(3, 6, 16))
    for layer, turned in enumerate((True, False)):
        oracle, truth = checkpoint_oracle(tmp_path, layer), true_layer(tmp_path, layer)
        assert oracle.rotary is turned
        expected = truth(x) if turned else evaluate_layer(truth, x)
        assert np.abs(oracle(x) - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_block_sees_its_tokens_through_the_norm(family, saved, rng):
    path = saved(family)
    x = rng.normal(size=(3, 5, SHAPE.width))
    oracle = checkpoint_oracle(path, 0, through="block")
    assert (oracle.residual, oracle.normalized) == (True, True)
    centred = x - x.mean(-1, keepdims=True)
    u = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = x + evaluate_layer(true_layer(path, 0, through="block"), u)
    assert np.abs(oracle(x) - expected).max() <= 1e-12 * np.abs(expected).max()


def test_float32_is_computed_in_float32(saved, rng):
    path = saved("gpt2")
    x = rng.normal(size=(3, 5, SHAPE.width))
    exact, rough = checkpoint_oracle(path, 0)(x), checkpoint_oracle(path, 0, dtype="float32")(x)
    assert rough.dtype == np.float32
    assert 1e-9 < np.abs(exact - rough).max() / np.abs(exact).max() < 1e-5


def test_what_queries_cannot_tell_is_refused_with_the_reason(saved):
    reasons = {
        ("bert", "block"): "after the residual sum",
        ("qwen2", "block-with-mlp"): "Ask with through='block'",
    }
    for (family, through), reason in reasons.items():
        with pytest.raises(NotExtractable, match=reason):
            checkpoint_oracle(saved(family), 0, through=through)
    path = saved("gpt2")
    with pytest.raises(UsageError, match="layer 2 of a model with layers 0 to 1"):
        checkpoint_oracle(path, 2)
    with pytest.raises(UsageError, match="through = 'mlp'"):
        checkpoint_oracle(path, 0, through="mlp")
    with pytest.raises(UsageError, match="a folder with config"):
        checkpoint_oracle(path / "config.json", 0)


@pytest.mark.parametrize(
    ("family", "through", "changes"),
    [
        ("gpt2", "attention", {}),
        ("gpt2", "block", {}),
        ("opt", "attention", {}),
        ("bert", "attention", {}),
        ("vit", "attention", {}),
        ("vit", "block", {}),
        ("llama", "block", {}),
        ("llama", "attention", {}),  # two heads share keys and values
        ("gpt_neox", "attention", UNBIASED["gpt_neox"]),
        ("gpt_neox", "attention", {}),
        ("gpt_neox", "block", UNBIASED["gpt_neox"]),  # the shift of its LayerNorm makes biases
        ("gpt_neox", "block", {}),
        ("qwen2", "block", {}),
        ("qwen2", "attention", {}),
    ],
)
def test_what_transformers_computes_is_extracted_and_its_weights_agree(family, through, changes, seed, tmp_path):
    """The way through: a checkpoint on the disk, transformers' own sub-module, questions, and the stored weights."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = build(family, Shape(8, 4, 2), **changes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.25)
    model.save_pretrained(tmp_path)
    oracle = checkpoint_oracle(tmp_path, 1, through=through)
    said = {name: getattr(oracle, name) for name in ("causal", "residual", "normalized", "rotary", "scores")}
    found = extract_layer(oracle, oracle.dim, seed=seed, options=ExtractionOptions(**said, verify=100))
    summary = summarize_recovery(found, true_layer(tmp_path, 1, through=through))
    assert (summary["heads"], summary["theta_ranks"]) == (4, [8] * 4)
    # Verified to a squared error of 1e-6; weights are less certain than the function where heads are alike.
    assert max(summary["against_weights"][name] for name in ("theta", "projection")) < 1e-3

"""Front doors: what a user has at hand is asked without glue, and stays as it was."""

import numpy as np
import pytest
from tests.recovery.trained_families import attention_pairs
from tests.scaling.torch_models import build

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.models.families import FAMILIES
from manyheads.models.refusals import NotExtractable
from manyheads.recovery import (
    ExtractionOptions,
    ServerLimits,
    compare_layers,
    evaluate_layer,
    gpt_layer,
    load_layer,
    save_layer,
)
from manyheads.recovery.oracle.checkpoint_layers import true_layer
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle
from manyheads.recovery.oracle.front_doors import open_oracle
from manyheads.recovery.refusals import OracleError, VerificationError
from manyheads.transformer import Shape

FEW = ExtractionOptions(verify=40)

ENCODERS = ("bert", "roberta", "camembert", "xlm-roberta", "electra", "roberta-prelayernorm")
IMAGES = ("vit", "deit", "dinov2", "beit", "vit_mae", "vit_msn", "ijepa", "clip_vision_model")
OTHERS = ("glm", "cohere", "ernie4_5", "granite")
TURNED = ("llama", "mistral", "phi3", "arcee", "mixtral", "stablelm", "falcon")
PLAIN = ("gpt2", "gpt_bigcode", "opt", "biogpt", "distilbert")


def tiny(family, seed=3, *, language=False):
    """Return a random model of a family: 16 dimensions, 2 heads, 2 layers; with a language head as it is drawn."""
    import torch
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
    gpt = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 29}
    grouped = {**sizes, "vocab_size": 29, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    given = {
        **{name: {**grouped, "sliding_window": None, "num_local_experts": 2} for name in (*TURNED, *OTHERS)},
        **{name: {**sizes, "vocab_size": 29} for name in (*ENCODERS, "falcon", "biogpt")},
        **{name: {**sizes, "image_size": 4, "patch_size": 2} for name in IMAGES},
        **dict.fromkeys(("gpt2", "gpt_bigcode"), gpt),
        "opt": {**sizes, "vocab_size": 29, "ffn_dim": 24, "word_embed_proj_dim": 16},
        "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24, "vocab_size": 29},
    }
    torch.manual_seed(seed)
    kind = transformers.AutoModelForCausalLM if language else transformers.AutoModel
    model = kind.from_config(transformers.AutoConfig.for_model(family, **given[family]))
    if language:
        return model
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.4)
    return model


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of transformers
@pytest.mark.parametrize("family", [*PLAIN, *ENCODERS, *IMAGES, *TURNED])
def test_attention_is_found_by_the_roles_of_its_weights(family, rng, tmp_path):
    """In memory and from its folder the function is the one that the stored weights say."""
    assert family in FAMILIES
    model = tiny(family)
    model.save_pretrained(tmp_path)
    x = rng.normal(size=(2, 5, 16))
    oracle, truth = checkpoint_oracle(model, 0), true_layer(tmp_path, 0)
    y = oracle(x)
    expected = truth(x) if oracle.rotary else evaluate_layer(truth, x)
    assert np.abs(y - expected).max() <= (1e-6 if oracle.rotary else 1e-12) * np.abs(y).max()
    assert np.array_equal(y, checkpoint_oracle(tmp_path, 0)(x))


@pytest.mark.torch
def test_a_sub_module_and_a_model_with_a_number_are_the_same_layer(rng):
    model = build("llama", Shape(4, 2, 2))
    x = rng.normal(size=(2, 5, 8))
    module = model.model.layers[1].self_attn
    oracle = open_oracle(module)
    assert (oracle.dim, oracle.rotary, oracle.causal) == (8, True, True)
    assert np.array_equal(oracle(x), open_oracle(model, layer=1)(x))
    assert not np.allclose(oracle(x), open_oracle(model, layer=0)(x))
    assert next(module.parameters()).dtype.itemsize == 4  # the model itself is not widened


@pytest.mark.torch
def test_modules_of_a_user_are_extracted(seed):
    import torch

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.Linear(8, 8)

        def forward(self, x):
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            found, weights = self.inner(x, x, x, attn_mask=later)
            return self.out(found), weights

    torch.manual_seed(seed)
    for module, causal in ((Mine(), True), (torch.nn.MultiheadAttention(8, 2), False)):
        with torch.no_grad():
            for weight in module.parameters():
                weight.normal_(0.0, 0.5)
        found = mh.extract_layer(module, seed=seed, options=FEW)
        assert (found.heads, found.layer.causal, found.certificate.accepted) == (2, causal, True)
        x = torch.randn(2, 5, 8)
        own = module(x)[0] if causal else module(*3 * [x.transpose(0, 1)])[0].transpose(0, 1)
        assert np.allclose(found.extracted(x.numpy()), own.detach().numpy(), atol=1e-4)


def test_functions_say_what_they_are_and_results_are_saved(rng, tmp_path):
    layer = gpt_layer(np.random.default_rng(1), 8, 2)

    def answer(x):
        return x + evaluate_layer(layer, x)

    answer.dim, answer.residual = 8, True
    found = mh.extract_layer(answer, options=FEW)
    path = found.save(tmp_path / "found.safetensors")
    again = mh.extract_layer(path, options=FEW)
    for one in (found.layer, load_layer(path), again.layer, mh.extract_layer(layer, options=FEW).layer):
        errors = compare_layers(layer, one)
        assert errors.worst < 1e-6
    assert errors.to_dataframe().shape == (1, 4)
    assert "projection" in errors._repr_html_()


def test_answers_of_a_strangers_function():
    """Tuples are taken; what a function raises comes back with what may help."""
    layer = gpt_layer(np.random.default_rng(1), 8, 2)

    def short(x):
        if x.shape[1] > 64:
            raise ValueError("too long")
        return evaluate_layer(layer, x), None

    limits = ServerLimits(max_length=64)
    assert mh.extract_layer(short, 8, options=ExtractionOptions(verify=40, limits=limits)).heads == 2
    with pytest.raises(OracleError, match=r"too long.*max_length"):
        mh.extract_layer(short, 8)
    with pytest.raises(OracleError, match="given NumPy arrays"):
        mh.extract_layer(_typed, 8)
    with pytest.raises(VerificationError, match=r"has the relative size 0\.\d+; give a tolerance above its square"):
        mh.extract_layer(lambda x: evaluate_layer(layer, x).round(2), 8)


def _typed(x):
    raise TypeError(f"must be Tensor, not {type(x).__module__}.{type(x).__name__}")


@pytest.mark.torch
@pytest.mark.parametrize("family", ["glm", "cohere", "ernie4_5", "granite"])
def test_neighbouring_components_and_multiplied_logits_are_scores(family):
    """The sub-module answers as in its model, and is extracted."""
    import torch

    model = tiny(family)
    oracle = checkpoint_oracle(model, 1)
    x, y = attention_pairs(model, family, 1, {"input_ids": torch.arange(20)[None]})
    np.testing.assert_allclose(oracle(x), y, rtol=0, atol=1e-12 * np.abs(y).max())
    assert mh.extract_layer(oracle, options=FEW).heads == 2


@pytest.mark.torch
def test_what_is_no_layer_is_refused_before_it_is_asked(tmp_path):
    import torch

    model = build("gpt2", Shape(4, 2, 1))
    layer = gpt_layer(np.random.default_rng(1), 8, 2)
    save_layer(tmp_path / "layer.safetensors", layer)
    for words, said in {
        (model, None, None): "no layer of GPT2LMHeadModel is named",
        (model, None, 4): "layers 0 to 0",
        (model, 5, 0): "dim = 5, and the attention sub-module of layer 0",
        (3, None, None): "the oracle is a int",
        (np.tanh, None, None): "no attribute dim",
        (np.tanh, 8, 1): "of models only",
        (str(tmp_path / "absent"), None, None): "no such file or folder",
        ("", None, 0): "the path is empty: give a checkpoint folder",
        (str(tmp_path / "layer.safetensors"), None, 0): "holds one layer",
        (torch.nn.Linear(4, 8), None, None): "does not show its token dimension: of the widths .4. of its linear maps",
        (torch.nn.Linear, 4, None): "the class Linear, not an object of it",
        (torch.nn.Linear(4, 4), None, 0): "no model of transformers",
    }.items():
        with pytest.raises(UsageError, match=said):
            open_oracle(*words)
    with pytest.raises(NotExtractable, match="not its attention"):
        open_oracle(model.transformer.h[0])


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of transformers
@pytest.mark.parametrize("family", ["opt", "vit", "dinov2", "llama"])
def test_a_whole_block_of_a_model_is_extracted(family, seed, tmp_path):
    """The block as transformers calls it; layer scale and gain stand in the weights, the output bias does not."""
    model = tiny(family)
    model.save_pretrained(tmp_path)
    found = mh.extract_layer(model, layer=1, through="block-with-mlp", seed=seed, options=FEW)
    errors = compare_layers(true_layer(tmp_path, 1, through="block-with-mlp"), found.layer)
    assert (found.heads, found.certificate.accepted) == (2, True)
    assert errors.theta < 1e-4
    assert errors.projection < 1e-5


@pytest.mark.torch
def test_a_whole_block_is_the_one_of_the_model(rng, seed):
    """Asked through the door, the block answers as inside of its model."""
    import torch

    model = tiny("gpt2")
    oracle = open_oracle(model, layer=1, through="block-with-mlp")
    assert (oracle.mlp, oracle.residual, oracle.normalized, oracle.causal) == (True, False, True, True)
    wide = model.double().eval()
    seen = {}
    wide.h[1].register_forward_hook(lambda module, given, answer: seen.update(x=given[0], y=answer))
    with torch.no_grad():
        wide(torch.arange(7)[None])
    answer = seen["y"][0] if isinstance(seen["y"], tuple) else seen["y"]
    np.testing.assert_allclose(oracle(seen["x"].numpy()), answer.numpy(), atol=1e-12)
    found = mh.extract_layer(model, layer=1, through="block-with-mlp", seed=seed, options=FEW)
    assert found.heads == 2
    with pytest.raises(NotExtractable, match="after the residual sum"):
        open_oracle(tiny("bert"), layer=1, through="block-with-mlp")


@pytest.mark.torch
@pytest.mark.parametrize("through", ["attention", "block"])
def test_what_was_extracted_is_the_function_that_was_asked_and_the_model_itself_is_certified(through, rng):
    """Against transformers' own call in single precision: residual included, and as near as the certificate says."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=9, pad_token_id=0)).eval()
    options = ExtractionOptions(verify=60, progress=False)
    found = mh.extract_layer(model, layer=0, through=through, options=options)
    x = torch.from_numpy(rng.standard_normal((6, 5, 16))).float()
    part = model.layers[0]
    with torch.no_grad():
        tokens = x if through == "attention" else part.input_layernorm(x)
        mask = torch.full((5, 5), torch.finfo(x.dtype).min).triu(1).expand(6, 1, 5, 5)
        turns = model.rotary_emb(x, torch.arange(5)[None])
        attended = part.self_attn(tokens, position_embeddings=turns, attention_mask=mask)[0].double().numpy()
    tokens = x.double().numpy()
    whole = attended + (tokens if through == "block" else 0)
    certificate = found.certificate
    errors = ((found.extracted(tokens) - whole) ** 2).mean((1, 2)) / certificate.variance
    assert certificate.largest_error < 1e-15 < errors.max() < certificate.itself < 1e-8
    assert "which computes in float32" in str(certificate)
    np.testing.assert_allclose(found.extracted.attention(tokens), attended, atol=1e-5)

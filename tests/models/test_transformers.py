"""Random models of transformers, saved by their own method: every weight explained, every layer reproduced."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy
from tests.models import tiny
from tests.models.tools import EXTRACTED, SAVED_OTHERWISE

from manyheads.models import attention_weights, open_checkpoint
from manyheads.models.attention_layers import attention_config
from manyheads.models.config import read_config
from manyheads.models.families import FAMILIES
from manyheads.models.modules import Role
from manyheads.models.parameters import parameter_map, parameter_roles
from manyheads.models.refusals import ConfigInvalid, WeightsMismatch

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 29, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
OPT = {**SIZES, "ffn_dim": 40, "pad_token_id": 1}
GROUPED = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}
VIT = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
VIT |= {"image_size": 8, "patch_size": 4}

# A name, the class of the configuration and of the model, and what departs from the sizes above.
MODELS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2-by-layer": ("GPT2Config", "GPT2Model", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-score": ("GPT2Config", "GPT2ForSequenceClassification", GPT2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "gpt_neox-body": (
        "GPTNeoXConfig",
        "GPTNeoXModel",
        {**SIZES, "use_parallel_residual": False, "attention_bias": False},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "opt-post": ("OPTConfig", "OPTForCausalLM", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 12}),
    "opt-body": ("OPTConfig", "OPTModel", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "llama-wide": ("LlamaConfig", "LlamaModel", {**GROUPED, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    "llama-answers": ("LlamaConfig", "LlamaForQuestionAnswering", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 3}),
    "mistral-wide": ("MistralConfig", "MistralModel", {**GROUPED, "head_dim": 10, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "bert": ("BertConfig", "BertForPreTraining", {**SIZES, "pad_token_id": 0}),
    "bert-decoder": ("BertConfig", "BertLMHeadModel", {**SIZES, "pad_token_id": 0, "is_decoder": True}),
    "bert-body": ("BertConfig", "BertModel", {**SIZES, "pad_token_id": 0}),
    "vit": ("ViTConfig", "ViTForImageClassification", VIT),
    "vit-body": ("ViTConfig", "ViTModel", {**VIT, "qkv_bias": False}),
    "vit-masked": ("ViTConfig", "ViTForMaskedImageModeling", VIT),
}

# Endings of the module that reads the stream and of the one that writes it, as versions 4 and 5 call them.
READERS = ("c_attn", "query_key_value", "q_proj", "attention.self.query", "attention.attention.query")
WRITERS = ("attn.c_proj", "attention.dense", "out_proj", "o_proj", "attention.output.dense")


@pytest.fixture
def built(request, seed, tmp_path):
    """A random model with weights large enough for sharp attention, and the folder it is saved in."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    configuration, model_class, changes = MODELS[request.param]
    config = getattr(transformers, configuration)(**changes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if request.param in ("gpt2", "llama") else "5GB")
    return model, tmp_path


def record(model, seed):
    """Run the model once; return what each attention layer read and wrote, (n, d) each."""
    import torch

    layers = {"read": [], "wrote": []}
    for name, module in model.named_modules():
        if name.endswith(READERS):
            module.register_forward_pre_hook(lambda _, inputs: layers["read"].append(inputs[0][0].double().numpy()))
        elif name.endswith(WRITERS):
            module.register_forward_hook(lambda _m, _i, output: layers["wrote"].append(output[0].double().numpy()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if hasattr(model.config, "image_size"):
            model(pixel_values=torch.randn(1, 3, 8, 8, generator=generator))
        else:
            model(input_ids=torch.randint(2, 29, (1, 11), generator=generator))
    return layers["read"], layers["wrote"]


def turn(z, rotary):
    """Apply rotary positions to z (heads, n, N)."""
    if rotary is None:
        return z
    half = rotary.dims // 2
    angles = np.arange(z.shape[1])[:, None] * rotary.frequencies()  # (n, dims/2)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = z[..., :half], z[..., half : rotary.dims], z[..., rotary.dims :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def forward(weights, x):
    """One attention layer in float64, from the weights in the common convention and the stated facts."""
    facts = weights.config

    def project(weight, bias):
        y = np.einsum("nd,hde->hne", x, weight.astype(np.float64))
        return y if bias is None else y + bias[:, None].astype(np.float64)

    q = turn(project(weights.query, weights.query_bias), facts.rotary)
    k = turn(project(weights.key, weights.key_bias), facts.rotary)
    v = project(weights.value, weights.value_bias)
    group = np.arange(facts.heads) // (facts.heads // facts.key_value_heads)
    logits = facts.scale * np.einsum("hne,hme->hnm", q, k[group])
    back = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = (back < 0) & facts.causal
    if facts.window is not None:
        hidden |= back >= facts.window
    logits = np.where(hidden, -np.inf, logits)
    pattern = np.exp(logits - logits.max(-1, keepdims=True))
    pattern /= pattern.sum(-1, keepdims=True)
    y = np.einsum("hnm,hme,hed->nd", pattern, v[group], weights.output.astype(np.float64))
    return y if weights.output_bias is None else y + weights.output_bias


@pytest.mark.slow
@pytest.mark.parametrize("built", MODELS, indirect=True)
def test_layers_are_those_of_the_model(built, seed):
    model, folder = built
    read, wrote = record(model, seed)
    assert len(read) == len(wrote) == 2
    checkpoint = open_checkpoint(folder)
    family = parameter_map(checkpoint)
    for layer in range(2):
        ours = forward(attention_weights(checkpoint, layer, family), read[layer])
        # The model computes in float32: 24 to 60 terms a sum, four sums deep.
        assert np.abs(ours - wrote[layer]).max() < 1e-5 * max(1.0, np.abs(wrote[layer]).max())
    assert np.abs(wrote[0]).max() > 0.5  # the weights are large enough for the comparison to mean something


@pytest.mark.parametrize("built", MODELS, indirect=True)
def test_roles_cover_every_parameter(built):
    model, folder = built
    checkpoint = open_checkpoint(folder)
    weights = parameter_roles(checkpoint)
    family = parameter_map(checkpoint)
    facts = [attention_config(family.config, layer) for layer in range(2)]
    for name, tensor in checkpoint.stream():
        assert np.isfinite(tensor).all(), name
    own = [weight for weight in weights if weight.tied_to is None and weight.role is not Role.BUFFER]
    assert sum(math.prod(weight.shape) for weight in own) == model.num_parameters()
    assert len(own) == len(list(model.parameters()))
    # In PyTorch, and in it alone, the unembedding is the parameter of the output embeddings.
    output = model.get_output_embeddings()
    stored = {weight.name: weight for weight in weights}
    if output is None:
        assert family.unembedding is None
    else:
        assert stored[family.unembedding].shape == tuple(output.weight.shape)
        tied = output.weight is model.get_input_embeddings().weight
        assert (stored[family.unembedding].role is Role.EMBEDDING) == tied
    config = model.config
    eps = getattr(
        config, "layer_norm_epsilon", getattr(config, "layer_norm_eps", getattr(config, "rms_norm_eps", None))
    )
    assert facts[0].norm_eps == (eps or 1e-5)


def test_every_family_is_here():
    assert {name.partition("-")[0] for name in MODELS} <= set(FAMILIES)


@pytest.mark.parametrize("built", ["gpt2", "llama"], indirect=True)
def test_shards_of_transformers(built):
    _, folder = built
    assert (folder / "model.safetensors.index.json").exists()
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.files) > 1


# Families whose attention is read, but for those above and those whose positions are counted from padding.
READ = [name for name in EXTRACTED if name not in MODELS and name not in ("camembert", "xlm-roberta", "data2vec-text")]


@pytest.mark.slow
@pytest.mark.parametrize("family", READ)
def test_layers_of_other_families_are_those_of_the_model(family, seed, tmp_path):
    import torch

    torch.manual_seed(seed)
    model = tiny.build(family, key_value_heads=1 if "key_value_heads" in FAMILIES[family].keys else None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = parameter_map(checkpoint)
    layers = {"read": [], "wrote": []}

    def keep(where, tensor):
        layers[where].append(tensor.reshape(-1, tensor.shape[-1]).double().numpy())

    for name, module in model.named_modules():
        role = found.roles.get(FAMILIES[family].saved_name(f"{name}.weight"))
        if role is not None and role.kind == "weight" and role.role in (Role.QUERY, Role.QUERY_KEY_VALUE):
            module.register_forward_pre_hook(lambda _, inputs: keep("read", inputs[0]))
        elif role is not None and role.kind == "weight" and role.role is Role.OUTPUT:
            module.register_forward_hook(lambda _m, _i, output: keep("wrote", output))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if getattr(model.config, "image_size", None):
            model(pixel_values=torch.randn(1, 3, 8, 8, generator=generator))
        else:
            model(input_ids=torch.randint(2, 29, (1, 11), generator=generator))
    for layer in range(2):
        ours = forward(attention_weights(checkpoint, layer, found), layers["read"][layer])
        wrote = layers["wrote"][layer]
        assert np.abs(ours - wrote).max() < 1e-5 * max(1.0, np.abs(wrote).max())


@pytest.mark.parametrize("family", SAVED_OTHERWISE)
def test_names_that_no_table_explains_are_refused(family, tmp_path):
    tiny.build(family).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    if any(name.startswith("encoder.layer") for name in checkpoint.names):  # some versions
        with pytest.raises(WeightsMismatch, match="does not explain"):
            parameter_map(checkpoint)


def test_attention_of_another_form_is_refused_by_name():
    for family, reason in (
        ("qwen3", "norms stand behind"),
        ("gemma", r"1 \+ w"),
        ("gptj", "neighbouring"),
        ("mpt", "ALiBi"),
    ):
        with pytest.raises(ConfigInvalid, match=reason):
            attention_config(read_config({"model_type": family, **tiny.settings(family)}), 0)


def layouts(folder, model, stored):
    """Rearrange a model of several shards in ways that transformers reads; yield the name of each."""
    index = folder / "model.safetensors.index.json"

    def rearrange(name, placed=(), **arrays):
        for old in folder.glob("*"):
            old.unlink()
        model.save_pretrained(folder, max_shard_size="8KB")
        table = json.loads(index.read_text())
        shards = sorted(set(table["weight_map"].values()))
        for shard, added in arrays.items():
            file = folder / shards[{"first": 0, "last": -1}[shard]]
            safetensors.numpy.save_file(safetensors.numpy.load_file(file) | added, file, {"format": "pt"})
        table["weight_map"] |= {key: shards[place] for key, place in placed}
        index.write_text(json.dumps(table))
        return name, shards, table

    yield rearrange("as saved")[0]
    _, shards, table = rearrange("")
    name = next(name for name, shard in table["weight_map"].items() if shard == shards[1])
    array = stored[name]
    yield rearrange("another shard before it has other values", first={name: array + 1})[0]
    yield rearrange("the index names the last of two shards", [(name, -1)], last={name: array + 1})[0]
    yield rearrange("another shard behind it has the same values", last={name: array})[0]
    yield rearrange("the index names a shard that lacks it", [(name, 0)])[0]
    table["weight_map"] = {key: shard for key, shard in table["weight_map"].items() if key != name}
    rearrange("")
    index.write_text(json.dumps({"metadata": {}, "weight_map": table["weight_map"]}))
    yield "the index names no shard for it"
    rearrange("")
    model.save_pretrained(folder)
    assert index.exists()
    yield "one file, and the index of an earlier save"
    rearrange("")
    safetensors.numpy.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    yield "one file and the same in shards"
    changed = {key: value + 1 for key, value in stored.items()}
    safetensors.numpy.save_file(changed, folder / "other.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    yield "a file that the configuration names"


def test_layouts_of_files_are_read_as_transformers_reads_them(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    stored = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for layout in layouts(tmp_path, model, stored):
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        found = dict(open_checkpoint(tmp_path).stream())
        assert found.keys() == expected.keys(), layout
        assert all(np.array_equal(found[name], expected[name].numpy()) for name in found), layout

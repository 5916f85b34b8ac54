"""Shapes from configurations: families, defaults, refusals."""

import json
from dataclasses import fields, replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.alphabet import ALPHABET

from manyheads.costs import ModelShape, layer_costs, transformer_cost
from manyheads.costs.formulas.decoding import token_cost
from manyheads.costs.formulas.depth import crossover_length
from manyheads.costs.formulas.memory import stored_matrices
from manyheads.errors import FileRefused, UsageError
from manyheads.models import shape_from_config
from manyheads.models.families import FAMILIES

# Weights of matrices as published, from the families' own defaults or the named model's fields: the number of
# parameters less biases, norms and learned positions.
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
}  # fmt: skip
PUBLISHED = [
    ({"model_type": "gpt2"}, 124_439_808 - 1024 * 768 - 12 * (13 * 768) - 2 * 768),
    (QWEN2_7B, 7_615_616_512 - 28 * (3584 + 2 * 512 + 2 * 3584) - 3584),
    ({"model_type": "llama"}, 6_738_415_616 - 65 * 4096),
    ({"model_type": "opt"}, 125_239_296 - 2050 * 768 - 12 * (13 * 768) - 2 * 768),
]


@pytest.mark.parametrize(
    ("config", "weights"), PUBLISHED, ids=lambda value: value.get("model_type") if isinstance(value, dict) else ""
)
def test_published_parameter_counts(config, weights):
    assert stored_matrices(shape_from_config(config)) == weights


def test_fields_of_each_family():
    assert shape_from_config(QWEN2_7B).itemsize == 2
    assert shape_from_config(QWEN2_7B).biases == "qkv"
    mistral = shape_from_config({"model_type": "mistral", "sliding_window": 4096})
    assert (mistral.kv_heads, mistral.mlp_hidden, mistral.window) == (8, 14336, 4096)
    assert shape_from_config({"model_type": "mistral", "sliding_window": None}).window == 0
    bert = shape_from_config({"model_type": "bert"})
    assert (bert.causal, bert.unembedding) == (False, False)
    assert shape_from_config({"model_type": "bert", "architectures": ["BertForMaskedLM"]}).head_transform
    vit = shape_from_config({"model_type": "vit"})
    assert (vit.patch_features, vit.fixed_length, vit.classes) == (768, 197, 0)
    labels = {"id2label": {str(i): str(i) for i in range(1000)}, "architectures": ["ViTForImageClassification"]}
    assert shape_from_config({"model_type": "vit", **labels}).classes == 1000
    assert (
        shape_from_config(
            {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 16}
        ).embedding_width
        == 512
    )


BIASES = [
    ("gpt2", {}, "all"),
    ("gpt_neox", {}, "all"),
    ("gpt_neox", {"attention_bias": False}, "mlp"),
    ("opt", {}, "all"),
    ("opt", {"enable_bias": False}, "none"),
    ("llama", {}, "none"),
    ("llama", {"attention_bias": True}, "qkv+output"),
    ("llama", {"mlp_bias": True}, "mlp"),
    ("llama", {"attention_bias": True, "mlp_bias": True}, "all"),
    ("mistral", {}, "none"),
    ("qwen2", {}, "qkv"),
    ("bert", {}, "all"),
    ("vit", {}, "all"),
    ("vit", {"qkv_bias": False}, "output+mlp"),
]


@pytest.mark.parametrize(("family", "options", "biases"), BIASES)
def test_biases_are_those_that_the_configuration_asks_for(family, options, biases):
    assert shape_from_config({"model_type": family, **options}).biases == biases


def test_a_bias_is_one_addition_a_value():
    """Listed by hand for one block: three heads, one of keys and values, and a gated MLP of 40."""
    sizes = {"qkv": 8 * (3 + 2), "output": 24, "mlp": 2 * 40 + 24}
    bare = ModelShape(2, 24, 3, mlp_hidden=40, kv_heads=1, gated=True, biases="none")
    cost = transformer_cost(bare, 11, 2)
    for biases in ("qkv", "output", "mlp", "qkv+output", "qkv+mlp", "output+mlp", "all"):
        parts = sizes if biases == "all" else biases.split("+")
        more = transformer_cost(replace(bare, biases=biases), 11, 2).elementwise - cost.elementwise
        assert more == 2 * 22 * sum(sizes[part] for part in parts)
    with pytest.raises(UsageError, match="biases='output\\+qkv'"):
        replace(bare, biases="output+qkv")


def test_files_and_folders(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    assert (
        shape_from_config(file)
        == shape_from_config(str(tmp_path))
        == shape_from_config({"model_type": "gpt2", "n_layer": 3})
    )
    file.write_text(json.dumps({"layers": 3, "width": 8, "heads": 2, "gated": True}))
    assert shape_from_config(str(file)) == ModelShape(3, 8, 2, gated=True)


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 77,
    "num_key_value_heads": 2,
}
IMAGE = {"image_size": 32, "patch_size": 8, "architectures": ["ViTForImageClassification"], "num_labels": 7}
# FLOPs and elementwise operations of training on two sequences of 100 tokens and FLOPs of decoding the next one,
# as counted when the families had a reader of configurations for costs alone.
COUNTED = [
    ({"model_type": "gpt2"}, (149_355_417_600, 273_432_000, 250_787_328)),
    ({"model_type": "gpt2", "n_inner": 100, "activation_function": "relu"}, (83_619_532_800, 112_190_400, 141_227_520)),
    ({"model_type": "gpt_neox", **SMALL}, (8_548_531_200, 209_730_000, 14_276_640)),
    (
        {"model_type": "opt", **SMALL, "word_embed_proj_dim": 20, "enable_bias": False},
        (1_116_465_600, 6_363_600, 1_889_864),
    ),
    ({"model_type": "llama", **SMALL, "head_dim": 10}, (5_746_262_400, 75_123_600, 9_601_344)),
    ({"model_type": "mistral", **SMALL, "sliding_window": 64}, (7_476_251_904, 96_955_776, 12_472_032)),
    ({"model_type": "qwen2", **SMALL}, (11_459_865_600, 147_934_800, 19_128_864)),
    ({"model_type": "bert", **SMALL, "architectures": ["BertForMaskedLM"]}, (1_136_620_800, 29_971_200, 0)),
    ({"model_type": "bert", **SMALL}, (1_129_420_800, 29_664_000, 0)),
    ({"model_type": "vit", **SMALL, **IMAGE}, (188_308_800, 4_736_716, 0)),
]


@pytest.mark.parametrize(("config", "counts"), COUNTED)
def test_counts_of_every_family_stay(config, counts):
    shape = shape_from_config(config)
    training = transformer_cost(shape, shape.fixed_length or 100, 2, training=True)
    decoded = token_cost(shape, 101).flops if shape.causal else 0
    assert (training.flops, training.elementwise, decoded) == counts


def test_every_family_is_counted():
    assert {config["model_type"] for config, _ in COUNTED} <= set(FAMILIES)  # the others: tests/models/test_counts.py


def test_a_decoder_of_bert_is_causal_and_has_its_head():
    shape = shape_from_config({"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]})
    assert (shape.causal, shape.unembedding, shape.head_transform) == (True, True, True)


def test_null_means_what_it_means_to_transformers():
    """As many key-value heads as heads, no window, and an MLP of four times the width; else the default."""
    grouped = {"model_type": "mistral", "num_key_value_heads": None, "sliding_window": None}
    assert (shape_from_config(grouped).kv_heads, shape_from_config(grouped).window) == (32, 0)
    assert shape_from_config({"model_type": "mistral"}).kv_heads == 8
    assert shape_from_config({"model_type": "gpt2", "n_embd": 24, "n_inner": None}).mlp_hidden == 96
    assert shape_from_config({"model_type": "gpt2", "n_embd": 24, "n_inner": 0}).mlp_hidden == 0


def test_layers_of_different_windows_are_kinds():
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    for changes, window in (
        ({"max_window_layers": 0}, 64),
        ({"max_window_layers": 4}, 0),
        ({"sliding_window": None}, 0),
    ):
        assert shape_from_config(config | changes).window == window
        assert shape_from_config(config | changes).kinds == ()
    for changes, kinds in (
        ({"max_window_layers": 1}, [("0", 0), ("1-3", 64)]),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [("0-2", 0), ("3", 64)]),
    ):
        assert [(kind.name, kind.window) for kind in shape_from_config(config | changes).kinds] == kinds
    assert shape_from_config(config | {"layer_types": ["sliding_attention"] * 4}).window == 64


def test_kinds_of_ones_own_and_models_without_layers():
    block = {"layers": 1, "width": 8, "heads": 2}
    own = {**block, "layers": 2, "kinds": [{**block, "latent": {"key_value_rank": 3}}, {**block, "window": 4}]}
    shape = shape_from_config(own)
    assert (shape.kinds[0].latent.cached, shape.kinds[1].window) == (3, 4)
    assert [*layer_costs(shape, 8)] == ["0", "1"]
    for family in ("llama", "mixtral", "gemma2", "modernbert", "vit", "deepseek_v3"):
        empty = shape_from_config({"model_type": family, "num_hidden_layers": 0})
        assert (empty.layers, empty.kinds, crossover_length(empty) > 0) == (0, (), True)


@pytest.mark.torch
@pytest.mark.parametrize("changes", [{}, {"max_window_layers": 3}, {"no_rope_layers": [1, 0, 0, 1, 1, 0]}])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "gemma3_text", "mistral"])
def test_windows_are_those_of_the_layers_of_transformers(family, changes):
    transformers = pytest.importorskip("transformers")
    given = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 8, **changes}
    config = transformers.AutoConfig.for_model(family, **given)
    shape = shape_from_config({"model_type": family, **given})
    one = config.sliding_window  # of all layers, where the configuration lists no types
    types = getattr(config, "layer_types", None) or ["sliding_attention" if one else "full_attention"] * 6
    slides = types.count("sliding_attention")
    assert sum(kind.layers for kind in shape.blocks if kind.window) == slides
    if family == "smollm3":
        assert sum(kind.layers for kind in shape.blocks if kind.positions == "none") == 6 - sum(config.no_rope_layers)


OWN = {"layers": 1, "width": 8, "heads": 2}
REFUSED = [
    ({"model_type": "mamba"}, "'mamba'"),
    ({"model_type": ["gpt2"]}, "none of gpt2"),
    ({"model_type": "gpt2", "n_layer": "12"}, "n_layer"),
    ({"model_type": "gpt2", "n_head": 0}, "0 heads"),
    ({"model_type": "gpt2", "n_head": 7}, "no multiple of the 7 heads"),
    ({"model_type": "gpt2", "activation_function": "mish"}, "'mish'"),
    ({"model_type": "llama", "torch_dtype": "int3"}, "'int3'"),
    ({"model_type": "llama", "num_attention_heads": 0}, "0 heads"),
    ({"model_type": "gemma3_text", "num_hidden_layers": 10**5}, "100000 layers that may differ"),
    ({"layers": 3, "width": 8, "heads": 2, "experts": {"count": 4}}, "active"),
    ({"layers": 3, "width": 8, "heads": 2, "experts": {"count": 4, "active": 5, "hidden": 1}}, "at most count=4"),
    ({"layers": 3, "width": 8, "heads": 2, "latent": 3}, "expected a Latent or None"),
    ({"layers": 3, "width": 8, "heads": 2, "kinds": [{"layers": 3}]}, "width, heads is missing"),
    ({"layers": 3, "width": 8, "heads": 2, "kinds": [{"layers": 2, "width": 8, "heads": 2}]}, "its kinds have 2"),
    ({"layers": 3, "width": 8, "heads": 2, "kinds": [{"layers": 3, "width": 4, "heads": 2}]}, "kinds of width=4"),
    (
        {"layers": 2, "width": 8, "heads": 2, "kinds": [{"layers": 1, "width": 8, "heads": 2, "name": "a"}] * 2},
        "kinds named a, a",
    ),
    ({"model_type": "deepseek_v3", "moe_intermediate_size": 0}, "Experts: hidden=0"),
    ({"model_type": "bert", "architectures": True}, "architectures is True"),
    ({"model_type": "vit", "architectures": "ViTForImageClassification"}, "list of class names"),
    ({"model_type": "vit", "architectures": [3]}, "list of class names"),
    ({"model_type": "vit", "patch_size": 0}, "patch_size"),
    (reduce(lambda inner, _: {**OWN, "kinds": [inner]}, range(2000), OWN), "recursion"),
    ({"layers": 3, "width": 8}, "heads is missing"),
    ({"layers": 3, "width": 8, "heads": 2, "depth": 4}, "depth"),
    ({"layers": 3, "width": 8, "heads": None}, "heads=None"),
    ({"layers": 3, "width": 8, "heads": 2, "notes": 4}, "notes is 4"),
    ({"layers": 3, "width": 8, "heads": 2, "notes": [4]}, "list of sentences"),
    ({"layers": 3, "width": 8, "heads": 2, "notes": ["\ud800"]}, "no UTF-8 form"),
    ({"layers": 10**310, "width": 8, "heads": 2}, "layers=1000.*expected an integer of at least 0 and at most"),
    (
        {"model_type": "mistral", "hidden_size": 10**310, "num_attention_heads": 1, "num_key_value_heads": 1},
        "width=1000.*expected an integer of at least 1",
    ),
    ([], "JSON object"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED)
def test_refused_by_name(config, says):
    with pytest.raises(FileRefused, match=says):
        shape_from_config(config)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"3", b'{"model_type": NaN}', b'{"n_embd": 1, "n_embd": 2}', b"1" * 5000],
)
def test_unreadable_files(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FileRefused, match=r"config\.json"):
        shape_from_config(tmp_path)
    with pytest.raises(FileRefused, match="absent"):
        shape_from_config(tmp_path / "absent")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**7) | st.floats() | st.text(ALPHABET, max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(ALPHABET, max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = """n_embd n_layer n_head n_inner vocab_size tie_word_embeddings num_hidden_layers hidden_size torch_dtype
num_attention_heads num_key_value_heads intermediate_size hidden_act sliding_window patch_size image_size id2label
architectures head_dim word_embed_proj_dim attention_bias"""


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(sorted(set(FIELDS.split()))), json_values, max_size=6),
)
def test_any_content_is_a_shape_or_a_named_refusal(family, content):
    try:
        shape = shape_from_config({"model_type": family, **content})
    except FileRefused:
        return
    assert shape.width > 0


@given(st.dictionaries(st.sampled_from([field.name for field in fields(ModelShape)]), json_values, max_size=8))
def test_any_fields_are_a_shape_or_a_named_refusal(content):
    try:
        shape = shape_from_config({"layers": 2, "width": 8, "heads": 2, **content})
    except FileRefused:
        return
    assert shape.width > 0

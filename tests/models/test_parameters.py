"""Roles of weights, for checkpoints with the names that transformers writes."""

from collections import Counter

import pytest
import safetensors.numpy

from manyheads.models import open_checkpoint
from manyheads.models.families import FAMILIES
from manyheads.models.modules import Role
from manyheads.models.parameters import parameter_map, parameter_roles, recognize
from manyheads.models.refusals import WeightsMismatch

UNEMBEDDING = {
    "gpt2": "transformer.wte.weight",
    "gpt_neox": "embed_out.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "llama": "lm_head.weight",
    "qwen2": "model.embed_tokens.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
    "vit": None,
}

# A part of the name that tells the role, longest first; written down apart from the tables.
TELLING = [
    ("self_attn_layer_norm", Role.ATTENTION_NORM),
    ("attention.output.layernorm", Role.ATTENTION_NORM),
    ("transform.layernorm", Role.HEAD_NORM),
    ("embeddings.layernorm", Role.EMBEDDING_NORM),
    ("post_attention_layernorm", Role.MLP_NORM),
    ("input_layernorm", Role.ATTENTION_NORM),
    ("layernorm_before", Role.ATTENTION_NORM),
    ("layernorm_after", Role.MLP_NORM),
    ("output.layernorm", Role.MLP_NORM),
    ("ln_1", Role.ATTENTION_NORM),
    ("ln_2", Role.MLP_NORM),
    ("ln_f", Role.FINAL_NORM),
    ("query_key_value", Role.QUERY_KEY_VALUE),
    ("c_attn", Role.QUERY_KEY_VALUE),
    ("attn.c_proj", Role.OUTPUT),
    ("mlp.c_proj", Role.MLP_OUT),
    ("rotary_emb", Role.BUFFER),
    ("position_ids", Role.BUFFER),
    ("attention.bias", Role.BUFFER),
    ("gate_proj", Role.MLP_GATE),
    ("up_proj", Role.MLP_IN),
    ("down_proj", Role.MLP_OUT),
    ("c_fc", Role.MLP_IN),
    ("fc1", Role.MLP_IN),
    ("fc2", Role.MLP_OUT),
    ("dense_h_to_4h", Role.MLP_IN),
    ("dense_4h_to_h", Role.MLP_OUT),
    ("intermediate.dense", Role.MLP_IN),
    ("attention.output.dense", Role.OUTPUT),
    ("attention.dense", Role.OUTPUT),
    ("output.dense", Role.MLP_OUT),
    ("transform.dense", Role.HEAD_TRANSFORM),
    ("pooler", Role.POOLER),
    ("out_proj", Role.OUTPUT),
    ("o_proj", Role.OUTPUT),
    ("q_proj", Role.QUERY),
    ("k_proj", Role.KEY),
    ("v_proj", Role.VALUE),
    ("query", Role.QUERY),
    ("key", Role.KEY),
    ("value", Role.VALUE),
    ("project_in", Role.EMBEDDING_PROJECTION),
    ("project_out", Role.UNEMBEDDING_PROJECTION),
    ("cls_token", Role.MARKER),
    ("patch_embeddings", Role.PATCH),
    ("token_type", Role.SEGMENT),
    ("position", Role.POSITION),
    ("wpe", Role.POSITION),
    ("cls.predictions", Role.UNEMBEDDING),
    ("embed_out", Role.UNEMBEDDING),
    ("lm_head", Role.UNEMBEDDING),
    ("seq_relationship", Role.CLASSIFIER),
    ("classifier", Role.CLASSIFIER),
    ("wte", Role.EMBEDDING),
    ("word_embeddings", Role.EMBEDDING),
    ("embed", Role.EMBEDDING),
]


def expected_role(name):
    lowered = name.lower()
    if "final_layer_norm" in lowered:
        return Role.MLP_NORM if ".layers." in lowered else Role.FINAL_NORM
    if lowered.endswith((".layernorm.weight", ".layernorm.bias")) and "vit.layernorm" in lowered:
        return Role.FINAL_NORM
    for part, role in TELLING:
        if part in lowered:
            return role
    assert name.endswith("norm.weight")
    return Role.FINAL_NORM


def test_every_weight_has_its_role(model):
    kind_of_model, config, arrays, folder = model
    checkpoint = open_checkpoint(folder)
    weights = parameter_roles(checkpoint)
    family = parameter_map(checkpoint)
    assert {weight.name for weight in weights} == set(arrays)
    for weight in weights:
        assert weight.role == expected_role(weight.name), weight.name
        assert weight.shape == arrays[weight.name].shape
        digits = [int(part) for part in weight.name.split(".") if part.isdigit()]
        assert weight.layer == (digits[0] if digits else None)
        norm = "norm" in weight.role
        if weight.role is Role.BUFFER:
            assert weight.kind == "buffer"
        elif weight.name.endswith((".bias", ".beta")):
            assert weight.kind == "bias"
        else:
            assert weight.kind == ("gain" if norm else "weight")
        matrix = weight.kind == "weight" and weight.name.endswith("weight") and weight.layer is not None
        if matrix:
            assert weight.layout == ("in,out" if kind_of_model == "gpt2" else "out,in")
        if weight.kind != "weight":
            assert weight.layout == ""
    assert family.config.family is FAMILIES[kind_of_model]
    assert family.unembedding == UNEMBEDDING[kind_of_model]
    assert family.config.values["layers"] == config.get("num_hidden_layers", config.get("n_layer"))


def test_layers_are_alike(model):
    *_, folder = model
    checkpoint = open_checkpoint(folder)
    weights = parameter_roles(checkpoint)
    layers = [Counter((w.role, w.kind, w.shape) for w in weights if w.layer == layer) for layer in range(2)]
    assert layers[0] == layers[1]
    assert sum(layers[0].values()) > 8


def test_ties_are_stated(model):
    kind, _, _, folder = model
    checkpoint = open_checkpoint(folder)
    tied = {weight.name: weight.tied_to for weight in parameter_roles(checkpoint) if weight.tied_to}
    family = parameter_map(checkpoint)
    stored = {"bert": {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}}
    assert tied == stored.get(kind, {})
    left_out = {
        "gpt2": {"lm_head.weight": "transformer.wte.weight"},
        "opt": {"lm_head.weight": "model.decoder.embed_tokens.weight"},
        "qwen2": {"lm_head.weight": "model.embed_tokens.weight"},
        "bert": {**stored["bert"], "cls.predictions.decoder.bias": "cls.predictions.bias"},
    }
    assert family.tied == left_out.get(kind, {})


def test_an_alias_of_the_metadata_is_a_tie(tmp_path, rng):
    shapes = {"wte.weight": (5, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    arrays = {f"transformer.{name}": rng.standard_normal(shape) for name, shape in shapes.items()}
    metadata = {"lm_head.weight": "transformer.wte.weight"}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata)
    # Untied by the configuration, shared in memory all the same: the file says so, and the file is believed.
    config = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 0, "tie_word_embeddings": False}
    checkpoint = open_checkpoint(tmp_path, config=config | {"architectures": ["GPT2LMHeadModel"]})
    last = parameter_roles(checkpoint)[-1]
    assert parameter_map(checkpoint).unembedding == "lm_head.weight"
    assert (last.name, last.role, last.tied_to) == ("lm_head.weight", Role.UNEMBEDDING, "transformer.wte.weight")


# Modules that some models of a family have and others have not, and what of them cannot be absent alone.
OPEN = {
    "gpt_neox": ("attention.bias", "rotary_emb"),
    "opt": ("project_in", "project_out"),
    "bert": ("pooler", "cls.predictions.transform.dense", "cls.predictions.bias", "cls.seq_relationship",
             "cls.predictions.transform.LayerNorm", "cls.predictions.decoder", "position_ids"),
    "vit": ("classifier",),
}  # fmt: skip
HALVES = [
    "pooler.dense.weight",
    "pooler.dense.bias",
    "transform.dense.bias",
    "relationship.weight",
    "classifier.weight",
]


def test_each_missing_or_foreign_name_is_refused(model):
    """Take any one weight away, or rename it: nothing is guessed."""
    kind, config, arrays, _ = model
    for name in arrays:
        rest = [other for other in arrays if other != name]
        if not any(module in name for module in OPEN.get(kind, ())) or name.endswith(tuple(HALVES)):
            with pytest.raises(WeightsMismatch):
                recognize(config, rest)
        with pytest.raises(WeightsMismatch) as caught:
            recognize(config, [*rest, name.replace(".", "_", 1) + ".qweight"])
        assert kind in str(caught.value)


def test_open_modules_may_be_absent(model):
    kind, config, arrays, _ = model
    for module in OPEN.get(kind, ()):
        rest = [name for name in arrays if module not in name]
        assert len(rest) < len(arrays)
        assert set(recognize(config, rest).roles) == set(rest)


def test_every_prefix_is_known(model):
    _, config, arrays, folder = model
    checkpoint = open_checkpoint(folder)
    family = parameter_map(checkpoint)
    for prefix in family.config.family.prefixes:
        renamed = [
            prefix + name.removeprefix(family.prefix) if name.startswith(family.prefix) else name for name in arrays
        ]
        again = recognize(config, renamed)
        assert again.prefix == prefix
        assert list(again.roles.values()) == [family.roles[name] for name in arrays]
    assert family.prefix != ""


def test_a_body_without_head_has_no_unembedding(model):
    _, config, arrays, folder = model
    checkpoint = open_checkpoint(folder)
    family = parameter_map(checkpoint)
    body = [name.removeprefix(family.prefix) for name in arrays if name.startswith(family.prefix)]
    assert recognize({**config, "architectures": None}, body).unembedding is None


def test_names_in_memory_are_those_of_files():
    saved = FAMILIES["vit"].saved_name
    assert saved("vit.layers.3.attention.q_proj.bias") == "vit.encoder.layer.3.attention.attention.query.bias"
    assert saved("layers.0.mlp.fc2.weight") == "encoder.layer.0.output.dense.weight"
    assert FAMILIES["gpt_neox"].saved_name("lm_head.weight") == "embed_out.weight"
    assert FAMILIES["llama"].saved_name("lm_head.weight") == "lm_head.weight"

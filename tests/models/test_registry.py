"""Every causal model type of transformers and every text part of a wrapper: a table, or a reason that is true.

The registry is that of the installed transformers. Types that are missing fail up to the pinned version; under a newer
one they are reported.
"""

import json
import re

import pytest
from tests.models.tools import NO_CLASS

from manyheads.cli.count import Count
from manyheads.errors import FileRefused
from manyheads.models.config import read_config, text_part
from manyheads.models.counts import count_parameters
from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.models.families.heads import has_language_head

pytestmark = pytest.mark.torch

PINNED = (5, 23)
GIVEN = {
    "reformer": {"is_decoder": True}, "hunyuan_v1_dense": {"head_dim": 128}, "ministral": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "lfm2": {"layer_types": ["full_attention", "conv"] * 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 16},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2},
    "deepseek_v2": {"num_experts_per_tok": 2}, "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
}  # fmt: skip
"""What the default configuration of a type lacks to build a model."""
NO_DEFAULT = {
    "cohere_compass_text", "cohere_compass", "dbrx", "gemma4_assistant", "gemma4_unified_assistant", "marian",
    "qwen4_exp", "qwen4_exp_text", "chameleon", "hunyuan_vl", "hunyuan_vl_text", "nemotron", "funnel",
    "switch_transformers",
}  # fmt: skip
"""Types whose default configuration is none of a model."""


def registry():
    """Return the causal model types of transformers, and those of images and text."""
    from transformers.models.auto import modeling_auto as auto

    return tuple(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), tuple(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def default(name):
    """Return the default configuration of a type, None if transformers has none."""
    import transformers

    try:
        return transformers.CONFIG_MAPPING[name](**GIVEN.get(name, {}))
    except Exception:  # defaults that their own class refuses, or of a package that is absent
        return None


def after_pinned():
    """Tell whether the installed transformers is newer than the pinned one."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) > PINNED


def is_pinned():
    """Tell whether the installed transformers is of the pinned version."""
    import transformers

    return transformers.__version__.startswith("{}.{}.".format(*PINNED))


def text_type(name):
    """Return the type of the text part of a wrapper, by its default configuration."""
    config = default(name)
    try:
        return name if config is None else config.get_text_config(decoder=True).model_type
    except ValueError:  # several text parts
        return name


def meta(config):
    """Return the causal model, or the model without a head, of a configuration on the meta device."""
    import torch
    import transformers

    with torch.device("meta"):
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        return transformers.AutoModel.from_config(config)


def test_every_type_has_a_table_or_a_reason():
    import transformers

    causal, wrappers = registry()
    known = FAMILIES.keys() | UNSUPPORTED.keys()
    missing = [name for name in causal if name not in known and text_type(name) not in known]
    missing += [name for name in wrappers if name not in known and text_type(name) not in known]
    if missing and after_pinned():
        pytest.skip(f"transformers {transformers.__version__} has types without a table or a reason: {missing}")
    assert not missing
    assert len(causal) > 150


def test_types_that_are_named_exist():
    """In the pinned version; what a table names and transformers does not know is a misprint."""
    import transformers

    if not is_pinned():
        pytest.skip(f"the names are those of transformers {PINNED}")
    assert not [name for name in (*FAMILIES, *UNSUPPORTED) if name not in transformers.CONFIG_MAPPING]


STATES = r"mamba|ssm|mixer|delta|recurrent|rwkv|lstm|linear_?attn|linearattention|shortconv|conv|lightning|rglru"
# Reason → what a module of its default model is called, by name or class.
EVIDENCE = {
    "cross-attention": r"cross|encoder_attn|encdec|encoderattn|latents|multiheadattention|knowledge",
    "state in place": STATES,
    "keep a state": STATES,
    "convolutions over positions": r"conv",
    "indexer or a trained mask": r"indexer|compressor|dt_proj",
    "gate multiplies": r"attn\.(gate_proj|g_proj)",
    "two attentions": r"self_attn\.1",
    "adapters": r"adapter|lora",
    "difference of two softmaxes": r"lambda|diff",
    "low-rank branches": r"laurel|altup",
    "a router chooses": r"moa|experts",
    "encoder of images or actions": r"vision|image|vq",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, why in UNSUPPORTED.items() if any(each in why for each in EVIDENCE)])
def test_a_reason_is_what_the_model_holds(name):
    wanted = next(pattern for reason, pattern in EVIDENCE.items() if reason in UNSUPPORTED[name])
    try:
        config = default(name)
        model = meta(config.get_text_config(decoder=True) if hasattr(config, "text_config") else config)
    except Exception as error:
        pytest.skip(f"the default configuration of {name} builds no model ({type(error).__name__})")
    named = [f"{path} {type(module).__name__}".lower() for path, module in model.named_modules()]
    named += [path.lower() for path, _ in model.named_parameters()]
    assert any(re.search(wanted, each) for each in named)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    config = default(family)
    if config is None:
        pytest.skip("transformers has no default configuration of it")
    given = GIVEN.get(family, {})
    ours = count_parameters({"model_type": family, **given})
    theirs = count_parameters({**config.to_dict(), "model_type": family, "architectures": None})
    if ours.total != theirs.total and not is_pinned():
        pytest.skip("the defaults of this version differ from those of the pinned one")
    assert ours.total == theirs.total
    assert ours.matrix == theirs.matrix
    ours, theirs = read_config({"model_type": family, **given}), read_config({**config.to_dict(), "model_type": family})
    assert ours.windows() == theirs.windows()


def total(model):
    return sum(each.numel() for each in model.parameters())


@pytest.mark.slow
def test_parameters_of_every_causal_type_and_text_part():
    """By the table where there is one, else as the command builds it, beside the class of transformers."""
    causal, wrappers = registry()
    seen, unbuilt = {}, []
    for name in dict.fromkeys((*causal, *wrappers, *UNSUPPORTED)):
        config = default(name)
        try:
            kind = config.get_text_config(decoder=True).model_type
            config = (default(kind) if kind in GIVEN else None) or config.get_text_config(decoder=True)
            model = meta(config)
        except Exception:
            unbuilt.append(name)
            continue
        if kind in seen:
            continue
        raw = {**config.to_dict(), "model_type": kind, "architectures": None}
        if kind in FAMILIES:
            head = {"architectures": [type(model).__name__]}
            found = count_parameters(raw | head).total
        elif kind in UNSUPPORTED:
            from manyheads.models.checkpoints.loading import make_model

            found = total(make_model(json.loads(json.dumps(raw, default=str)), True, 8, 1)[0])
        else:  # of a version after the pinned one: the first test says which
            continue
        seen[kind] = (found, total(model))
    assert not {kind: pair for kind, pair in seen.items() if pair[0] != pair[1]}
    assert len(seen) > 150
    assert set(unbuilt) <= NO_DEFAULT | NO_CLASS or not is_pinned()


SMALL = {"mamba": {"num_hidden_layers": 2}, "bart": {"decoder_layers": 2}}


@pytest.mark.parametrize("name", ["mamba", "gemma3n_text", "bart"])
def test_a_type_without_a_table_is_counted_as_it_runs(name, capsys, tmp_path):
    import transformers

    config = transformers.CONFIG_MAPPING[name](**SMALL.get(name, {}))
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": name}, default=str))
    Count(str(tmp_path), length=8, json=True).run()
    found = json.loads(capsys.readouterr().out)
    assert found["total_parameters"] == total(meta(config))
    assert found["flops"] >= 2 * 8 * found["total_parameters"] * 0.1
    assert any(UNSUPPORTED[name] in note for note in found["notes"])
    assert any("no closed form" in note for note in found["notes"])
    with pytest.raises(FileRefused, match="is not described"):
        read_config({"model_type": name})


def test_the_text_part_of_a_wrapper_is_counted_alone():
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    whole = {"model_type": "llava", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    found, alone = count_parameters(whole), count_parameters({**text, "tie_word_embeddings": True})
    assert found.total == alone.total
    assert "the text part of 'llava' alone" in found.notes
    assert text_part(text) == (text, "")
    assert has_language_head(read_config(whole))
    assert text_part(whole | {"model_type": []})[1] == "[]"  # a type that is no name
    with pytest.raises(FileRefused, match="qwen3_5_text"):
        count_parameters({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}})


def test_families_that_the_installed_version_lacks_are_few():
    import transformers

    lacking = [name for name in FAMILIES if name not in transformers.CONFIG_MAPPING]
    assert len(lacking) < 12, lacking

"""Counts from configurations beside the forward pass of the same model of transformers, watched product by product."""

import random
import warnings

import pytest
from tests.models import tiny
from tests.models.by_modules import matrix_flops

from manyheads.costs import transformer_cost
from manyheads.costs.formulas.memory import matrix_parameters
from manyheads.models import shape_from_config
from manyheads.models.counts import EXPERT_ROLES, PRODUCTS, count_parameters
from manyheads.models.families import FAMILIES
from manyheads.models.parameters import recognize

pytestmark = pytest.mark.torch
LENGTH = 11


def draw(family, rng):
    """Return a random configuration of a family that transformers can build: sizes apart, options of every kind."""
    table = FAMILIES[family]
    keys = {**table.keys, **table.counted}
    heads = 4 if family == "codegen" else rng.choice((2, 3, 4, 6))
    groups = (
        heads if "plain_key_dim" in keys else rng.choice([each for each in range(1, heads + 1) if not heads % each])
    )
    key_dim = rng.choice((8, 16))
    # These build their output projection, or their norms, for heads that fill the width.
    free = "key_dim" in keys and keys["key_dim"].name and family not in ("helium", "bitnet", "olmoe", "stablelm")
    width = heads * rng.choice((5, 9, 13)) if free else heads * key_dim
    sizes = {
        "experts": rng.choice((4, 6)), "active_experts": rng.choice((1, 2, 3)), "expert_hidden": rng.choice((7, 11)),
        "shared_hidden": rng.choice((5, 13)), "shared_experts": rng.choice((1, 2, 3)),
        "query_rank": rng.choice((6, 10, None)), "key_value_rank": rng.choice((10, 14)),
        "rotary_key_dim": rng.choice((4, 8)), "plain_key_dim": rng.choice((4, 6)), "value_dim": rng.choice((4, 6, 10)),
        "vocabulary": rng.choice((29, 37, 53)), "patch": rng.choice((2, 4)), "dense_layers": rng.choice((0, 1)),
        "mlp_ratio": rng.choice((2, 3)), "embedding_width": rng.choice((width, 10)), "segments": rng.choice((2, 3)),
        "channels": 3,
    }  # fmt: skip
    layers, hidden = rng.choice((2, 4)), rng.choice((31, 40, 57))
    found = tiny.settings(family, width, heads, layers, groups, key_dim, hidden, num_labels=rng.choice((1, 2, 5, 7)))
    for name, key in keys.items():
        option = key.name.split("|")[0]
        if option and isinstance(key.default, bool) and name not in ("decoder", "windowed", "multi_query"):
            found[option] = rng.random() < 0.5
        elif option and name in sizes:
            found[option] = sizes[name]
    if family == "internlm3":
        found["qkv_bias"] = found["bias"] = found["attention_bias"]
    if family == "falcon":
        found["parallel_attn"] |= found["new_decoder_architecture"]
    if "n_routed_experts" in found:
        found |= {"n_group": 1, "topk_group": 1}
    return found


def build(family, settings, name=None):
    """Return a random model and what its configuration says."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tiny.known(family)
    name = name or tiny.model_class(family)
    if name.endswith("QuestionAnswering"):
        settings = settings | {"num_labels": 2}
    config = transformers.CONFIG_MAPPING[family](**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as GPT-BigCode is imported
        model = getattr(transformers, name)(config)
    return model, {**model.config.to_dict(), "architectures": [name]}


def run(model, name=""):
    """Watch a forward pass over one sequence."""
    import torch
    from tests.models.trace import trace

    if "pixel_values" in model.main_input_name:
        return trace(model, torch.rand(1, 3, model.config.image_size, model.config.image_size))
    shape = (1, 1, LENGTH) if name.endswith("MultipleChoice") else (1, LENGTH)
    return trace(model, torch.randint(2, 29, shape))


def check_counts(model, config, watched):
    """Compare totals, and the closed form where one shape holds the model."""
    found = count_parameters(config)
    assert found.total == sum(each.numel() for each in model.parameters())
    assert matrix_flops(config, LENGTH, masked=False) == watched.flops
    shape = shape_from_config(config)
    assert transformer_cost(shape, shape.fixed_length or LENGTH, convention="dense").flops == watched.flops
    assert matrix_parameters(shape) == found.matrix


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_multiplied_is_what_the_table_says(family):
    changes = {"heads": 4, "width": 32} if family == "codegen" else {}
    grouped = "key_value_heads" in FAMILIES[family].keys and "plain_key_dim" not in FAMILIES[family].keys
    settings = tiny.settings(family, key_value_heads=1 if grouped else None, **changes)
    model, config = build(family, settings)
    watched, parameters = run(model), dict(model.named_parameters())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    saved = {name: FAMILIES[family].saved_name(name) for name in names}
    roles = recognize({**config, "architectures": None}, saved.values()).roles
    said = {name for name in names if roles[saved[name]].role in PRODUCTS and roles[saved[name]].kind == "weight"}
    own = {id(tensor): name for name, tensor in model.named_parameters()}
    tied = dict(model.named_parameters(remove_duplicate=False))
    assert {own[id(tied[name])] for name in said} == set(watched.weights)

    def active(name):
        visited = (2, 4) if roles[saved[name]].role in EXPERT_ROLES else (1, 1)
        return parameters[name].numel() * visited[0] // visited[1]

    assert count_parameters(config).matrix == sum(map(active, watched.weights))
    check_counts(model, config, watched)


ENDS = (
    "Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification",
    "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction",
    "ForImageClassification", "ForImageClassificationWithTeacher",
)  # fmt: skip


def classes(family):
    """Return the names of all classes of a family whose head is described."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = [table for name, table in vars(auto).items() if name.endswith("_MAPPING_NAMES")]
    names = [table[family] for table in tables if family in table]
    names = {each for name in names for each in ([name] if isinstance(name, str) else name)} | {
        name for name in ("DeiTForImageClassificationWithTeacher",) if family == "deit"
    }
    names -= {"ViTMAEForPreTraining"}
    return sorted(name for name in names if name.endswith(ENDS) and hasattr(transformers, name))


def check_random(family, name, rng):
    settings = draw(family, rng)
    model, config = build(family, settings, name)
    try:
        check_counts(model, config, run(model, name))
    except AssertionError as error:
        raise AssertionError(f"{name} {settings}: {error}") from error


def test_random_configurations(seed):
    rng = random.Random(seed)
    for family in rng.sample([name for name in sorted(FAMILIES) if classes(name)], 20):
        check_random(family, rng.choice(classes(family)), rng)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_of_every_family(family, seed):
    rng = random.Random(f"{family} {seed}")
    for name in classes(family):
        check_random(family, name, rng)


def test_biases_stacked_over_experts_are_no_matrices():
    config = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    assert matrix_flops(config, 4096) == 31_300_861_820_928
    assert count_parameters(config).matrix == 3_607_142_400


def test_heads_that_are_not_described_are_said():
    vit = {"model_type": "vit", "architectures": ["ViTForMaskedImageModeling"]}
    for notes in (count_parameters(vit).notes, shape_from_config(vit).notes):
        assert "body only: the head of ViTForMaskedImageModeling is not described" in notes


def test_the_decoder_of_a_masked_autoencoder_is_said_to_be_left_out():
    config = {"model_type": "vit_mae", "architectures": ["ViTMAEForPreTraining"]}
    body = count_parameters(config | {"architectures": ["ViTMAEModel"]})
    found = count_parameters(config)
    assert found.total == body.total
    assert any("body only" in note for note in found.notes)

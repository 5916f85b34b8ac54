"""Frozen parameters: factors of the forward pass that nobody carries are named, and nothing is said where none is."""

import warnings

import pytest
from tests.scaling.torch_models import BASE, PLAIN, build, plain

from manyheads.errors import UsageError
from manyheads.models.architecture import apply_role_map
from manyheads.scaling import (
    BaseHyperparameters,
    Parametrization,
    audit_model,
    initialize_model,
    scale_logits,
    torch_groups,
)
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.scaling.torch.init import measure_init
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

GROWN = Shape(16, 8, 5)  # twice N and H, five halves of L
TUNED = BaseHyperparameters(learning_rate=1e-3, weight_decay=0.1)
P = Parametrization(base=BASE)


def freeze(model, *words):
    """Freeze the parameters with one of the words in their names; return the model."""
    for name, tensor in model.named_parameters():
        if any(word in name for word in words):
            tensor.requires_grad_(False)
    return model


def said(model, p=P, **reading):
    """The sentences about frozen parameters, which groups warn of and an audit notes."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        groups = torch_groups(p, model, TUNED, **reading)
    sentences = [str(each.message) for each in found]
    assert all(each.filename == __file__ for each in found)  # the line that asked for the groups
    notes = audit_model(p, model, groups, TUNED, fresh=False, **reading).notes
    assert [note for note in notes if "frozen" in note] == sentences
    return sentences


LOGITS, BRANCHES, OUTPUTS = "0.7071 on the logits", "0.4 on the branches", "0.25 on the outputs"


@pytest.mark.parametrize(
    ("words", "carrier"),
    [
        ("q_proj", {LOGITS: "model.layers.0.self_attn.q_proj.weight and 4 more, which are"}),
        ("k_proj", {}),
        ("v_proj gate_proj up_proj norm", {}),
        ("embed_tokens", {}),
        ("lm_head", {OUTPUTS: "lm_head.weight, which is"}),
        ("down_proj", {BRANCHES: "model.layers.0.mlp.down_proj.weight and 4 more, which are"}),
        (
            "layers.3",
            {
                LOGITS: "model.layers.3.self_attn.q_proj.weight, which is",
                BRANCHES: "model.layers.3.self_attn.o_proj.weight and 1 more, which are",
            },
        ),
        (  # queries and values alone are trained
            "k_proj o_proj mlp norm embed_tokens lm_head",
            {
                BRANCHES: "model.layers.0.self_attn.o_proj.weight and 9 more, which are",
                OUTPUTS: "lm_head.weight, which is",
            },
        ),
    ],
)
def test_a_factor_whose_weight_is_frozen_is_named(words, carrier, seed):
    """With the std of the family, as a model is made or loaded; and not if it was drawn with it before."""
    import torch

    words = words.split()
    sentences = said(freeze(build("llama", GROWN), *words))
    starts = [
        f"the factor {factor} belongs into {names} frozen: nothing here puts it" for factor, names in carrier.items()
    ]
    assert [sentence[: len(start)] for sentence, start in zip(sentences, starts, strict=True)] == starts
    for sentence in sentences:
        assert "multiply" in sentence
        assert ("scale_logits(model, parametrization)" in sentence) == (LOGITS in sentence)
    assert not said(freeze(build("llama", BASE), *words))  # where nothing changes
    drawn = build("llama", GROWN)
    initialize_model(P, drawn, TUNED, generator=torch.Generator().manual_seed(seed))
    assert not said(freeze(drawn, *words))
    applied = freeze(build("llama", GROWN), *words)
    scale_logits(applied, P)
    assert not said(applied, folded=forward_multipliers(P, GROWN))


def test_logits_that_the_attention_scales_itself_need_no_weight():
    for family, word in (("llama", "q_proj"), ("gpt2", "c_attn")):
        model = freeze(build(family, Shape(16, 4, 2)), word)
        (sentence,) = said(model)
        assert "0.7071 on the logits" in sentence
        assert ("multiply what belongs to the queries by 0.7071 once" in sentence) == (family == "gpt2")
        scale_logits(model, P)
        assert not said(model)


def test_zeros_hold_every_factor():
    import torch

    deep = Shape(8, 4, 5)
    model = freeze(build("opt", deep), "out_proj.bias", "fc2.bias")
    assert not said(model)
    with torch.no_grad():
        model.model.decoder.layers[2].fc2.bias[0] = 0.1
    (sentence,) = said(model)
    assert sentence.startswith("the factor 0.4 on the branches belongs into model.decoder.layers.2.fc2.bias, which is")
    emptied = freeze(build("opt", deep), "fc2.weight")
    assert len(said(emptied)) == 1
    with torch.no_grad():
        for layer in emptied.model.decoder.layers:
            layer.fc2.weight.zero_()
    assert not said(emptied)


def test_a_last_norm_that_trains_its_shift_alone_carries_no_factor():
    """As where biases alone are trained: the shift would be scaled, and the gain beside it not."""
    model = build("gpt2", Shape(8, 8, 2))
    freeze(model, "weight")
    with pytest.raises(UsageError, match=r"a frozen table is embedding and unembedding.*no gain that is trained"):
        torch_groups(P, model, TUNED)


def test_frozen_parameters_of_a_plain_module():
    """A map may name them, and then goes on fitting when a part is frozen; or leave them out."""
    shape = Shape(16, 4, 2)
    model = freeze(plain(shape, 7, 6), "query")
    reading = {"roles": PLAIN, "shape": shape}
    (sentence,) = said(model, **reading)
    assert "belongs into blocks.0.query.weight and 3 more, which are frozen" in sentence
    assert "scale_logits" not in sentence
    short = {pattern: part for pattern, part in PLAIN.items() if "query" not in part}
    (sentence,) = said(model, roles=short, shape=shape)
    assert "0.7071 on the logits belongs into query, and the role map gives no parameter that part" in sentence
    assert not said(model, **reading, folded=forward_multipliers(P, shape))
    tied = freeze(plain(shape, 7, 6, tied=True), "embedding")
    roles = {pattern: part for pattern, part in PLAIN.items() if pattern != "unembedding.bias"}
    learning_rates = {group["role"]: group["lr"] for group in torch_groups(P, tied, TUNED, roles, shape)}
    assert learning_rates["final_norm"] == pytest.approx(
        TUNED.learning_rate / 2
    )  # carries the factor behind a frozen table


def test_layers_that_are_frozen_alone_do_not_contradict_the_depth():
    shape = Shape(8, 4, 3)
    (sentence,) = said(freeze(plain(shape, 7, 6), "blocks.1."), roles=PLAIN, shape=shape)
    assert "0.6667 on the branches belongs into blocks.1.output.weight and 3 more" in sentence


def test_numbers_that_cannot_be_read_hold_nothing():
    import torch

    assert measure_init(torch.empty(0, 4), "random") == {}  # of a sharded parameter another process has all of it
    with torch.device("meta"):
        model = build("llama", Shape(16, 4, 2))
    assert len(said(freeze(model, "q_proj"))) == 1
    model = freeze(build("llama", Shape(16, 4, 2)), "q_proj")
    for block in model.model.layers:
        quantized = torch.zeros(block.self_attn.q_proj.weight.shape, dtype=torch.int8)
        block.self_attn.q_proj.weight = torch.nn.Parameter(quantized, requires_grad=False)
    assert len(said(model)) == 1
    for block in model.model.layers:  # floating, and yet no numbers without the scale beside them
        weight = torch.zeros(block.self_attn.q_proj.weight.shape).to(torch.float8_e4m3fn)
        block.self_attn.q_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert len(said(model)) == 1


def test_a_read_out_that_is_frozen_and_not_in_the_map_is_missed():
    shape = Shape(8, 8, 2)
    for tied, word in ((False, "unembedding"), (True, "embedding")):
        short = {pattern: part for pattern, part in PLAIN.items() if word not in pattern}
        (sentence,) = said(freeze(plain(shape, 7, 6, tied=tied), word), roles=short, shape=shape)
        assert "0.5 on the outputs belongs into unembedding, and the role map gives no parameter that part" in sentence
    roles = {pattern: part for pattern, part in PLAIN.items() if pattern not in ("unembedding.bias", "positions")}
    assert not said(freeze(plain(shape, 7, 6, tied=True), "positions"), roles=roles, shape=shape)


def test_a_frozen_shift_before_a_tied_table_needs_the_factor_that_its_gain_carries():
    import torch

    model = freeze(build("gpt2", Shape(8, 8, 2)), "ln_f.bias")
    assert not said(model)
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(0.1)
    (sentence,) = said(model)
    assert sentence.startswith("the factor 0.5 on the outputs belongs into transformer.ln_f.bias, which is frozen")


def test_a_frozen_parameter_in_two_parts_is_refused_by_name():
    with pytest.raises(UsageError, match="q = k is one parameter in the roles key and query"):
        apply_role_map({"q": "query", "k": "key", "v": "value"}, BASE, ["v"], frozen=[("q", "k")])

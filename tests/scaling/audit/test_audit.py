"""Audits: planted mistakes are found and named with their factor, right groups raise no alarm."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.alphabet import ALPHABET
from tests.scaling.torch_models import BASE, FAMILIES, FUSED, PLAIN, build, grown, plain

from manyheads.errors import UsageError
from manyheads.models.architecture import apply_role_map, read_architecture, read_body
from manyheads.models.families import FAMILIES as TABLES
from manyheads.scaling import (
    BaseHyperparameters,
    Parametrization,
    audit_model,
    initialize_model,
    scale_logits,
    torch_groups,
)
from manyheads.scaling.audit.findings import OTHER_FACTOR, OTHER_STD, Finding
from manyheads.scaling.audit.parameter_settings import ActualSettings, Audit, audit_learning_rates, compare_settings
from manyheads.scaling.parametrization.targets import forward_multipliers, parameter_targets, role_factors
from manyheads.transformer import Shape

WIDE = Shape(8, 16, 2)  # four times the base's heads
TUNED = BaseHyperparameters(learning_rate=1e-3, epsilon=1e-8, weight_decay=0.1)


def gpt2_names(layers):
    """The names of the parameters of GPT-2, the tied ones together."""
    modules = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"]
    blocks = [
        f"h.{layer}.{module}.{end}" for layer in range(layers) for module in modules for end in ("weight", "bias")
    ]
    body = ["wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    return [("transformer.wte.weight", "lm_head.weight"), *(f"transformer.{name}" for name in body)]


def gpt2(shape):
    config = {"model_type": "gpt2", "n_embd": shape.width, "n_head": shape.heads, "n_layer": shape.depth}
    return read_architecture(config, gpt2_names(shape.depth))


def right(targets):
    """What parameters have if they have what they want."""
    return {
        target.parameter.name: ActualSettings(target.learning_rate, target.epsilon, target.weight_decay)
        for target in targets
    }


@pytest.mark.parametrize(
    ("shape", "names", "learning_rate", "cause"),
    [
        (BASE, "", None, "all learning rates are off by this factor and consistent with each other"),
        (WIDE, "", None, "all learning rates are off by this factor and consistent with each other"),
        (
            WIDE,
            ("c_attn.weight", "c_attn.bias"),
            None,
            "all learning rates are off by this factor and consistent with each other",
        ),
        (WIDE, "c_attn.weight", None, "its factor is wrong"),  # a single class tells no common factor
        (WIDE, "c_attn.weight", TUNED.learning_rate, "it has the base's learning rate"),
    ],
)
def test_a_common_factor_is_told_from_that_of_one_class(shape, names, learning_rate, cause):
    targets = [
        target
        for target in parameter_targets(Parametrization(base=BASE), gpt2(shape), TUNED)
        if target.parameter.name.endswith(names)
    ]
    settings = {
        target.parameter.name: ActualSettings(
            2 * target.learning_rate if learning_rate is None else learning_rate, target.epsilon, target.weight_decay
        )
        for target in targets
    }
    learning_rates = [each for each in compare_settings(targets, settings, TUNED) if each.quantity == "learning_rate"]
    assert len(learning_rates) == len(targets)
    assert {each.factor for each in learning_rates} == {2.0 if learning_rate is None else 4.0}
    assert {each.meaning.partition(":")[0].partition(";")[0] for each in learning_rates} == {cause}


def test_the_rates_of_a_wider_gpt2_by_hand():
    targets = {
        target.parameter.name: target for target in parameter_targets(Parametrization(base=BASE), gpt2(WIDE), TUNED)
    }
    table, norm = targets["transformer.wte.weight"], targets["transformer.ln_f.weight"]
    matrix = targets["transformer.h.0.attn.c_attn.weight"]
    assert (table.learning_rate, table.epsilon, table.weight_decay, table.initial) == (1e-3, 2.5e-9, 0.1, 0.02)
    assert (norm.learning_rate, norm.epsilon, norm.weight_decay, norm.initial) == (2.5e-4, 1e-8, 0.4, 0.25)
    assert (matrix.learning_rate, matrix.epsilon, matrix.weight_decay, matrix.initial) == (2.5e-4, 2.5e-9, 0.4, 0.01)
    output = targets["transformer.h.1.mlp.c_proj.weight"]
    assert output.initial == pytest.approx(0.02 / math.sqrt(2 * BASE.depth) / 2)


def test_depth_goes_into_what_writes_to_the_stream():
    deep = Shape(8, 4, 8)
    targets = {
        target.parameter.name: target for target in parameter_targets(Parametrization(base=BASE), gpt2(deep), TUNED)
    }
    output, read = targets["transformer.h.7.attn.c_proj.weight"], targets["transformer.h.7.mlp.c_fc.weight"]
    assert (output.factors.initial, output.factors.learning_rate, output.factors.epsilon) == (0.25, 0.25, 1.0)
    assert (read.factors.initial, read.factors.learning_rate, read.factors.epsilon) == (1.0, 1.0, 0.25)
    assert targets["transformer.h.7.mlp.c_proj.bias"].factors.learning_rate == 0.25
    assert targets["transformer.h.7.mlp.c_fc.bias"].factors.learning_rate == 1.0


def test_gradient_descent_folds_by_the_square():
    p = Parametrization(optimizer="sgd", base=BASE)
    deep = Shape(8, 4, 8)
    targets = {target.parameter.name: target for target in parameter_targets(p, gpt2(deep), TUNED)}
    law = p.table(deep)["output"].learning_rate
    assert targets["transformer.h.0.attn.c_proj.weight"].factors.learning_rate == pytest.approx(law / 16)


def test_matrices_above_the_blocks_follow_width_alone():
    for optimizer in ("adam", "sgd"):
        p = Parametrization(0.5, 0.75, optimizer=optimizer, base=BASE)
        deep, same = Shape(16, 4, 9), Shape(16, 4, BASE.depth)
        hidden, table = role_factors(p, deep)["hidden"], p.table(same)["value"]
        assert (hidden.initial, hidden.learning_rate, hidden.epsilon) == (
            table.initial,
            table.learning_rate,
            table.epsilon,
        )


def test_planted_mistakes_are_named_with_their_factor():
    targets = parameter_targets(Parametrization(base=BASE), gpt2(WIDE), TUNED)
    name = "transformer.h.0.mlp.c_fc.weight"
    target = next(target for target in targets if target.parameter.name == name)
    tied = role_factors(Parametrization(base=BASE), WIDE)["unembedding"].learning_rate
    assert all(each.right for each in compare_settings(targets, right(targets), TUNED, tied))

    def fault(name, settings):
        (found,) = [
            each for each in compare_settings(targets, right(targets) | {name: settings}, TUNED, tied) if not each.right
        ]
        return found

    forgotten = fault(name, ActualSettings(TUNED.learning_rate, target.epsilon, target.weight_decay))
    assert (forgotten.quantity, forgotten.factor) == ("learning_rate", pytest.approx(4))
    assert "the base's learning rate" in forgotten.meaning
    assert "4 times as far" in forgotten.meaning
    twice = fault(name, ActualSettings(target.learning_rate, target.epsilon, 16 * TUNED.weight_decay))
    assert (twice.quantity, twice.factor) == ("weight_decay", pytest.approx(4))
    assert "scaled twice" in twice.meaning
    assert "4 times the share" in twice.meaning
    epsilon = fault(name, ActualSettings(target.learning_rate, TUNED.epsilon, target.weight_decay))
    assert (epsilon.quantity, epsilon.factor) == ("epsilon", pytest.approx(4))
    assert "not rescaled" in epsilon.meaning
    assert "damped" in epsilon.meaning
    table = next(target for target in targets if target.parameter.tied)
    both = fault(table.parameter.name, ActualSettings(table.learning_rate / 4, table.epsilon, table.weight_decay))
    assert (both.quantity, both.factor) == ("learning_rate", pytest.approx(0.25))
    assert "tied embedding treated twice" in both.meaning
    odd = fault(name, ActualSettings(3 * target.learning_rate, target.epsilon, target.weight_decay))
    assert "is wrong" in odd.meaning
    missing = compare_settings(
        targets, {key: settings for key, settings in right(targets).items() if key != name}, TUNED
    )
    assert [each.meaning for each in missing if not each.right] == ["it is in no group: it is never trained"]
    decay = Finding("w", "query", "weight_decay", 0.0, 0.1, math.inf, False, "it should have none")
    assert "weight_decay is not 0\n    expected 0, found 0.1: it should have none" in str(Audit((decay,)))


def test_stds_of_one_draw_are_one_finding_and_other_factors_are_not():
    def wrong(name, quantity, factor):
        cause = f"{OTHER_STD}: far off" if quantity == "initial" else f"{OTHER_FACTOR}; far off"
        return Finding(name, "output", quantity, 1.0, factor, factor, False, cause)

    drawn = [wrong(f"layer.{place}", "initial", factor) for place, factor in enumerate((3.0, 2.994, 3.006))]
    assert [len(same) for same in Audit((*drawn, wrong("last", "initial", 1.5))).causes()] == [3, 1]
    assert [len(same) for same in Audit((wrong("a", "epsilon", 3.0), wrong("b", "epsilon", 2.99))).causes()] == [1, 1]


def test_spreads_are_judged_by_their_sampling_error(rng):
    (target,) = parameter_targets(
        Parametrization(base=BASE),
        apply_role_map({"q": "query"}, WIDE, ["q"]),
        BaseHyperparameters(1e-3, stds={"query": 0.2}),
    )
    assert target.initial == pytest.approx(0.1)
    for count in (16, 400, 100_000):  # 300 draws at a false-alarm rate of 1e-6
        for _ in range(100):
            std = math.sqrt(np.square(0.1 * rng.normal(size=count)).mean())
            assert compare_settings([target], {"q": ActualSettings(target.learning_rate, std=std, count=count)}, TUNED)[
                -1
            ].right
    wrong = compare_settings([target], {"q": ActualSettings(target.learning_rate, std=0.2, count=400)}, TUNED)[-1]
    assert (wrong.right, wrong.quantity, wrong.factor) == (False, "initial", pytest.approx(2))
    assert "the base's std" in wrong.meaning
    assert not compare_settings(
        [target], {"q": ActualSettings(target.learning_rate, std=0.1003, count=10_000_000)}, TUNED
    )[-1].right


def test_one_cause_is_one_line_whatever_the_noise_of_the_draw():
    names = ["a", "b", "c"]
    targets = parameter_targets(
        Parametrization(base=BASE),
        apply_role_map(dict.fromkeys(names, "query"), WIDE, names),
        BaseHyperparameters(1e-3, stds={"query": 0.2}),
    )
    stds = dict(zip(names, (0.2001, 0.1990, 0.5), strict=True))  # wanted is half the base's 0.2
    settings = {name: ActualSettings(1e-3 / 4, std=std, count=400) for name, std in stds.items()}
    text = str(Audit(compare_settings(targets, settings, TUNED)))
    assert "a and 1 more (query): initial is 2 times" in text
    assert "c (query): initial is 5 times" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected a positive number"),
        ({"learning_rate": 1.0, "epsilon": -1.0}, "epsilon=-1.0"),
        ({"learning_rate": "3e-4"}, "learning_rate='3e-4': expected a positive number"),
        ({"learning_rate": 1.0, "stds": {"query": 10**400}}, r"stds\['query'\]=10"),
        ({"learning_rate": 1.0, "no_decay": "norm"}, "no_decay='norm': expected words in a tuple"),
        ({"learning_rate": 1.0, "no_decay": None}, "no_decay=None: expected words in a tuple"),
        ({"learning_rate": 1.0, "no_decay": (["norm"],)}, "expected words in a tuple"),
        ({"learning_rate": 1.0, "stds": None}, "stds=None: expected a mapping from role to number"),
        ({"learning_rate": 1.0, "muon": 0.02}, "muon=0.02: expected MuonHyperparameters"),
        ({"learning_rate": 1.0, "weight_decay": -1.0}, "weight_decay=-1.0: expected a number of at least 0"),
        ({"learning_rate": 1.0, "stds": {"querry": 0.1}}, "no role is called 'querry': choose from embedding"),
        ({"learning_rate": 1.0, "stds": {"query": -0.1}}, r"stds\['query'\]=-0.1"),
        (
            {"learning_rate": 1.0, "no_decay": ("nrom",)},
            "no role is called 'nrom': choose from .*; or from their parts, .*blank",
        ),
    ],
)
def test_what_cannot_have_been_tuned_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        BaseHyperparameters(**given)


def test_role_maps_are_refused_where_they_do_not_fit():
    with pytest.raises(UsageError, match=r"'\*' is given the role 'wq': choose from embedding"):
        apply_role_map({"*": "wq"}, BASE, ["q"])
    with pytest.raises(UsageError, match="the pattern 'k' of the role map fits no parameter"):
        apply_role_map({"q": "query", "k": "key"}, BASE, ["q"])
    with pytest.raises(UsageError, match="no pattern of the role map fits the parameter 'v'"):
        apply_role_map({"q": "query"}, BASE, ["q", "v"])
    with pytest.raises(UsageError, match="is one parameter in the roles key and query"):
        apply_role_map({"q": "query", "k": "key"}, BASE, [("q", "k")])
    tied = apply_role_map({"in": "embedding", "out": "unembedding"}, WIDE, [("in", "out")])
    with pytest.raises(UsageError, match=r"factor 0.25 behind it.*0 parameters of role final_gain"):
        parameter_targets(Parametrization(base=BASE), tied, TUNED)
    p = Parametrization(base=BASE)
    assert len(parameter_targets(p, tied, TUNED, forward_multipliers(p, WIDE))) == 1
    fused = apply_role_map({"*": "query+key+value"}, Shape(16, 4, 2), ["qkv"])
    with pytest.raises(UsageError, match="qkv holds query, key, value"):
        parameter_targets(Parametrization(base=BASE), fused, TUNED)
    with pytest.raises(UsageError, match="give all of them the same std"):
        parameter_targets(Parametrization(base=Shape(16, 4, 2)), fused, BaseHyperparameters(1.0, stds={"query": 0.1}))


@pytest.mark.parametrize("roles", [["q"], {"q": 3}, {3: "query"}, "query"])
def test_role_maps_that_are_none_are_refused(roles):
    with pytest.raises(UsageError, match="expected a map from patterns of names to parts"):
        apply_role_map(roles, BASE, ["q"])


def test_a_shape_or_what_was_tuned_of_another_kind_is_refused():
    with pytest.raises(UsageError, match=r"shape=\(8, 4\): expected Shape"):
        apply_role_map({"q": "query"}, (8, 4), ["q"])
    with pytest.raises(UsageError, match=r"hyperparameters=0\.001: give BaseHyperparameters\(learning_rate="):
        parameter_targets(Parametrization(base=BASE), gpt2(WIDE), 1e-3)


def test_configurations_are_refused_where_they_do_not_divide():
    with pytest.raises(UsageError, match="the width 30 is no multiple of the 4 heads"):
        read_architecture({"model_type": "gpt2", "n_embd": 30, "n_head": 4, "n_layer": 1}, gpt2_names(1))
    with pytest.raises(UsageError, match=r"also needs 1 tensors: transformer\.ln_f\.bias"):
        read_architecture({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}, gpt2_names(1)[:-1])


def test_rates_by_role(rng):
    for form in ("effective", "multiplier"):
        p = Parametrization(0.5, base=BASE, form=form)
        table = p.table(WIDE)
        learning_rates = {role: TUNED.learning_rate * factor for role, factor in table.column("learning_rate").items()}
        epsilons = {role: TUNED.epsilon * factor for role, factor in table.column("epsilon").items()}
        decays = {role: TUNED.weight_decay * factor for role, factor in table.column("weight_decay").items()}
        audit = audit_learning_rates(p, WIDE, learning_rates, TUNED, epsilons, decays)
        assert audit.passed
        assert len(audit.findings) == 3 * len(learning_rates)
        role = str(rng.choice(list(learning_rates)))
        (fault,) = audit_learning_rates(
            p, WIDE, learning_rates | {role: 5 * learning_rates[role]}, TUNED, epsilons, decays
        ).faults
        assert (fault.name, fault.quantity, fault.factor) == (role, "learning_rate", pytest.approx(5))
    with pytest.raises(UsageError, match="no role is called 'querry'"):
        audit_learning_rates(p, WIDE, {"querry": 0.1}, TUNED)


def test_a_part_of_a_role_can_be_spared():
    """Usual practice spares biases and gains alone; the bias of patches has the role of positions, which decay."""
    names = {"bias": "embedding_bias", "positions": "positional", "token": "marker", "q": "query+key+value"}
    architecture = apply_role_map(names, BASE, list(names))

    def decays(*no_decay):
        hyperparameters = BaseHyperparameters(1e-3, weight_decay=0.1, no_decay=no_decay)
        return [
            target.weight_decay
            for target in parameter_targets(Parametrization(base=BASE), architecture, hyperparameters)
        ]

    assert decays("embedding_bias") == [0, 0.1, 0.1, 0.1]
    assert decays("positional") == [0, 0, 0, 0.1]  # the role
    assert decays("value") == [0.1, 0.1, 0.1, 0]
    assert decays("bias") == [0, 0.1, 0.1, 0.1]
    assert decays("embedding") == [0.1, 0, 0, 0.1]
    p, hyperparameters = Parametrization(base=BASE), BaseHyperparameters(1e-3, no_decay=("embedding_bias",))
    assert audit_learning_rates(p, BASE, {"positional": 1e-3}, hyperparameters).passed
    with pytest.raises(UsageError, match="no_decay='embedding_bias' is no role of the table"):
        audit_learning_rates(p, BASE, {"positional": 1e-3}, hyperparameters, weight_decays={"positional": 0.0})


@pytest.mark.slow
@pytest.mark.torch
def test_a_vit_whose_gains_and_biases_alone_do_not_decay_raises_no_alarm(seed):
    """As transformers and timm group them; classes of the theory are wider."""
    import torch

    no_decay = {0: ("norm", "bias"), 1: ("1-d",)}[seed % 2]
    p, model = Parametrization(base=BASE), build("vit", WIDE)
    hyperparameters = BaseHyperparameters(1e-3, weight_decay=0.1, no_decay=no_decay)
    initialize_model(p, model, hyperparameters, generator=torch.Generator().manual_seed(seed))
    without = {
        name
        for group in torch_groups(p, model, hyperparameters)
        if not group["weight_decay"]
        for name in group["names"]
    }
    assert without == {name for name, tensor in model.named_parameters() if tensor.dim() == 1}


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_no_false_alarm_on_right_groups(family, seed):
    import torch

    for number, shape in enumerate(grown(family)):
        for optimizer, kind in (("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
            p = Parametrization(base=BASE, optimizer=optimizer)
            model = build(family, shape)
            initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(1000 * seed + number))
            groups = torch_groups(p, model, TUNED)
            audit = audit_model(p, model, kind(groups, lr=1.0), TUNED)
            assert audit.passed, str(audit)
            assert len({each.name for each in audit.findings}) == len(list(model.parameters()))
            assert audit_model(p, model, groups, TUNED).passed


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_start_is_right_at_the_base_and_wrong_beyond(family, seed):
    import torch

    torch.manual_seed(seed)
    p = Parametrization(base=BASE)
    model = build(family, BASE)
    assert audit_model(p, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), TUNED).passed
    wide = build(family, WIDE)
    audit = audit_model(p, wide, torch.optim.AdamW(wide.parameters(), lr=1e-3, weight_decay=0.1), TUNED)
    assert {each.quantity for each in audit.faults} == {"initial", "learning_rate", "epsilon", "weight_decay"}
    assert {"the base's" in each.meaning for each in audit.faults if each.quantity == "learning_rate"} == {True}


def test_a_decay_that_should_not_be_is_said_and_is_json():
    target = parameter_targets(Parametrization(base=BASE), gpt2(WIDE), BaseHyperparameters(learning_rate=1e-3))[0]
    settings = {target.parameter.name: ActualSettings(target.learning_rate, target.epsilon, 0.1)}
    audit = Audit(compare_settings([target], settings, BaseHyperparameters(learning_rate=1e-3)))
    assert audit.faults[0].factor == math.inf
    assert audit.faults[0].meaning == "it should have none, as at the base"
    assert json.loads(json.dumps(audit.as_dict(), allow_nan=False))["findings"][2]["factor"] is None


@pytest.mark.torch
def test_mistakes_planted_in_an_optimizer(seed):
    import torch

    p, model = Parametrization(base=BASE), build("qwen2", Shape(8, 8, 3))
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    kept = [group for group in groups if group["role"] != "mlp_in"]
    assert {each.role for each in audit_model(p, model, kept, TUNED).faults} == {"mlp_in"}
    doubled = [*groups, {**groups[0], "names": []}]
    assert "in two groups" in audit_model(p, model, doubled, TUNED).faults[0].meaning
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(2)
        model.model.norm.weight[3] = 1.0
    audit = audit_model(p, model, groups, TUNED)
    assert {(each.role, each.quantity) for each in audit.faults} == {("output", "initial"), ("final_norm", "initial")}
    assert "model.layers.1.self_attn.o_proj.weight (output): initial is" in str(audit)
    assert audit.as_dict()["passed"] is False
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    model(input_ids=torch.zeros(1, 3, dtype=int), labels=torch.zeros(1, 3, dtype=int)).loss.backward()
    optimizer.step()
    trained = audit_model(p, model, optimizer, TUNED)
    assert trained.passed
    assert "have been trained" in trained.notes[0]
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0
    assert audit_model(p, model, optimizer, TUNED).passed, warm


@pytest.mark.torch
def test_a_forgotten_logit_scale_is_found(seed):
    """Fused queries: the scale is an attribute, and a model that was loaded again has lost it."""
    import torch

    shape = Shape(16, 4, 2)
    for family in FUSED:
        p, model = Parametrization(base=BASE), build(family, shape)
        scale_logits(model, p)
        initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
        groups = torch_groups(p, model, TUNED)
        assert audit_model(p, model, groups, TUNED).passed
        again = build(family, shape)
        again.load_state_dict(model.state_dict())
        with pytest.raises(UsageError, match="scale_logits"):
            audit_model(p, again, groups, TUNED)


@pytest.mark.torch
def test_audits_are_refused_where_there_is_nothing_to_audit():
    import torch

    p, model = Parametrization(base=BASE), build("llama", BASE)
    with pytest.raises(UsageError, match=r"object has no parameter groups: give a torch\.optim optimizer"):
        audit_model(p, model, object(), TUNED)
    with pytest.raises(UsageError, match="no group with params"):
        audit_model(p, model, [], TUNED)
    with pytest.raises(UsageError, match="no group with params"):
        audit_model(p, model, [{"lr": 0.1}], TUNED)
    with pytest.raises(UsageError, match=r"group 0 says no weight_decay: audit the optimizer itself"):
        audit_model(p, model, [{"lr": 0.1, "params": []}], TUNED)
    with pytest.raises(UsageError, match=r"SGD is audited against optimizer='adam'.*optimizer='sgd'"):
        audit_model(p, model, torch.optim.SGD(model.parameters(), lr=0.1), TUNED)
    other = build("llama", BASE)
    with pytest.raises(UsageError, match=r"group 0 holds a tensor .* of another model"):
        audit_model(p, model, torch.optim.AdamW(other.parameters()), TUNED)
    coupled = audit_model(p, model, torch.optim.Adam(torch_groups(p, model, TUNED)), TUNED)
    assert "use AdamW" in coupled.notes[0]


def kept(groups, *left_out):
    """The groups without names, and without what an optimizer does not know."""
    unknown = {"names", "role", *left_out}
    return [{key: value for key, value in group.items() if key not in unknown} for group in groups]


@pytest.mark.torch
def test_optimizers_whose_steps_scale_otherwise_are_refused_by_name(seed):
    """Their rates mean something else: right numbers would be no comfort, wrong ones no fault."""
    import torch

    class Lion(torch.optim.Optimizer):
        """Moves by signs, and has no epsilon by which it could be taken for Adam."""

        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1})

    class Lamb(torch.optim.Optimizer):
        """Has the keys of Adam, and rescales every layer by its norm."""

        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6})

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    lion = Lion(kept(groups, "eps"))
    audit = audit_model(p, model, lion, TUNED)  # its rate is its update, and it has no epsilon
    assert audit.passed
    assert {each.quantity for each in audit.findings} == {"learning_rate", "weight_decay", "initial"}
    lion.param_groups[1]["lr"] *= 4
    faults = audit_model(p, model, lion, TUNED).faults
    assert len(faults) == len(lion.param_groups[1]["params"])
    assert all(each.factor == pytest.approx(4) for each in faults)
    for optimizer in (
        Lamb(kept(groups)),
        torch.optim.Adafactor(kept(groups, "eps")),
        torch.optim.Adadelta(kept(groups)),
        torch.optim.Rprop(kept(groups, "eps", "weight_decay")),
        torch.optim.LBFGS(model.parameters()),
    ):
        with pytest.raises(UsageError, match=rf"steps of {type(optimizer).__name__} .*known are SGD.*param_groups"):
            audit_model(p, model, optimizer, TUNED)
    assert audit_model(p, model, Lamb(kept(groups)).param_groups, TUNED).passed  # the caller vouches
    with pytest.raises(UsageError, match=r"a group has eps=\(None, 0\.001\): expected one number"):
        audit_model(p, model, torch.optim.Adafactor(kept(groups, "eps")).param_groups, TUNED)
    for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad):
        audit = audit_model(p, model, kind(kept(groups)), TUNED)
        assert audit.passed
        assert any(each.quantity == "initial" for each in audit.findings)  # also where state is there from the start


@pytest.mark.torch
def test_groups_by_name_and_a_schedule_of_one_cycle_are_read(seed):
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    named = [{**group, "params": list(zip(group["names"], group["params"], strict=True))} for group in groups]
    assert audit_model(p, model, named, TUNED).passed
    optimizer = torch.optim.AdamW(kept(groups))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in groups], total_steps=10)
    assert optimizer.param_groups[0]["initial_lr"] < groups[0]["lr"] / 10
    assert audit_model(p, model, optimizer, TUNED).passed, schedule


@pytest.mark.torch
def test_a_trained_model_is_told_from_a_fresh_one_or_one_is_asked(seed):
    """Gradient descent without momentum keeps no trace of its steps."""
    import torch

    p, model = Parametrization(base=BASE, optimizer="sgd"), build("llama", Shape(8, 8, 2))
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(torch_groups(p, model, TUNED))
    assert audit_model(p, model, optimizer, TUNED).passed
    for tensor in model.parameters():
        tensor.grad = torch.full_like(tensor, 10 / TUNED.learning_rate)
    optimizer.step()
    assert not optimizer.state
    audit = audit_model(p, model, optimizer, TUNED)
    assert {each.quantity for each in audit.faults} == {"initial"}
    assert "fresh=False" in audit.notes[0]
    assert audit_model(p, model, optimizer, TUNED, fresh=False).passed


@pytest.mark.torch
def test_numbers_that_are_none_are_a_fault_and_still_json(seed):
    import torch

    p, model = Parametrization(base=BASE), build("llama", BASE)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    audit = audit_model(p, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), TUNED)
    assert [(each.name, each.quantity) for each in audit.faults] == [("lm_head.weight", "initial")]
    assert "NaN" in audit.faults[0].meaning
    json.dumps(audit.as_dict(), allow_nan=False)


KEYS = sorted({key.name for table in TABLES.values() for key in table.keys.values() if key.name})
values = (
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(ALPHABET, max_size=3) | st.lists(st.none())
)


@pytest.mark.slow
@given(
    st.sampled_from(sorted(TABLES)),
    st.dictionaries(
        st.sampled_from([*KEYS, "initializer_range", "init_std", "word_embed_proj_dim", "add_cross_attention"]),
        values | st.lists(values) | st.dictionaries(st.text(ALPHABET, max_size=2), values),
        max_size=4,
    ),
)
def test_any_configuration_is_read_or_refused_by_name(family, content):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "n_embd": 8, "n_head": 2, "n_layer": 1}
    config = sizes | content | {"model_type": family}
    for read in (read_body, lambda config: read_architecture(config, gpt2_names(1))):
        try:
            shape = read(config).shape
        except UsageError:
            continue
        assert shape.width > 0


def test_configurations_with_a_spread_that_is_none_are_refused():
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1}
    for name, value in (("initializer_range", "0.02"), ("initializer_range", -0.1), ("init_std", 10**400)):
        with pytest.raises(UsageError, match=f"{name} is .*standard deviation"):
            read_architecture(config | {name: value}, gpt2_names(1))
    assert read_architecture(config | {"initializer_range": None, "init_std": 0.1}, gpt2_names(1)).std == 0.1


@pytest.mark.torch
def test_random_biases_are_judged_by_their_spread_or_not_at_all(seed):
    """`nn.Linear` starts its biases at random: no fault unless they were said to start otherwise at the base."""
    import torch

    torch.manual_seed(seed)
    p, hyperparameters = Parametrization(base=BASE), BaseHyperparameters(1e-3, weight_decay=0.1)
    model = plain(BASE, 7, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    audit = audit_model(p, model, optimizer, hyperparameters, PLAIN, BASE)
    assert audit.passed, str(audit)
    (note,) = (note for note in audit.notes if note.startswith("initial stds of "))
    assert {"bias", "logit_bias", "unembedding_bias"} <= set(note.partition(":")[0].replace(",", "").split())
    usual = {"logit_bias": 1 / math.sqrt(3 * BASE.width), "value_bias": 1 / math.sqrt(3 * BASE.width)}
    given = audit_model(p, model, optimizer, replace(hyperparameters, stds=usual), PLAIN, BASE)
    assert given.passed, str(given)
    judged = {each.name.rpartition(".")[0][-5:] for each in given.findings if each.quantity == "initial"}
    assert {"query", "value"} <= judged
    wrong = audit_model(
        p, model, optimizer, replace(hyperparameters, stds={"bias": 1.0, "logit_bias": 0.0}), PLAIN, BASE
    )
    assert {(each.role, each.quantity) for each in wrong.faults} == {("bias", "initial"), ("logit_bias", "initial")}
    with torch.no_grad():
        model.final_norm.bias[0] = 0.1  # of a norm's shift the start is known
    assert {each.name for each in audit_model(p, model, optimizer, hyperparameters, PLAIN, BASE).faults} == {
        "final_norm.bias"
    }


@pytest.mark.torch
def test_spreads_of_biases_are_honoured_by_role_and_by_part(seed):
    import torch

    p, wide = Parametrization(base=BASE), Shape(16, 4, 4)
    stds = dict.fromkeys(("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out"), 0.1)
    stds |= {"unembedding": 0.1, "bias": 0.3, "output_bias": 0.2, "logit_bias": 0.5, "final_shift": 0.4, "norm": 2.0}
    hyperparameters, model = BaseHyperparameters(1e-3, weight_decay=0.1, stds=stds), plain(wide, 7, 6)
    initialize_model(p, model, hyperparameters, PLAIN, wide, generator=torch.Generator().manual_seed(seed))
    block = model.blocks[0]
    expected = {
        block.value.bias: 0.3,
        block.output.bias: 0.2 / 2,  # with half the branch factor, as L doubles
        block.query.bias: 0.5 / math.sqrt(2),  # with the logit factor, as N doubles
        block.key.bias: 0.5,
        model.final_norm.bias: 0.4,
    }
    for tensor, std in expected.items():  # 64 numbers: five standard errors
        assert tensor.square().mean().sqrt().item() == pytest.approx(std, rel=5 / math.sqrt(2 * tensor.numel()))
    assert torch.all(block.attention_norm.weight == 2)  # of gains the number itself
    assert torch.all(model.final_norm.weight == 1)
    assert not block.attention_norm.bias.any()
    assert not model.unembedding.bias.any()
    assert audit_model(
        p, model, torch_groups(p, model, hyperparameters, PLAIN, wide), hyperparameters, PLAIN, wide
    ).passed
    fused = apply_role_map({"qkv": "query_bias+key_bias+value_bias"}, wide, ["qkv"])
    with pytest.raises(UsageError, match="holds logit_bias and bias: give all of them the same std"):
        parameter_targets(Parametrization(base=wide), fused, BaseHyperparameters(1.0, stds={"value_bias": 0.1}))
    given = BaseHyperparameters(1.0, stds={"bias": 0.1})  # the word means those of queries and keys as well
    assert [each.initial for each in parameter_targets(Parametrization(base=wide), fused, given)] == [0.1]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mark", "rule"),
    [
        ({"ns_steps": 5}, r"Muon \(ns_steps\)"),
        ({"use_muon": True}, "use_muon=True"),
        ({"algorithm": "dion"}, "algorithm='dion'"),
        ({"rho": 0.9}, r"Adadelta or SAM \(rho\)"),
        ({"d_coef": 1.0}, "Prodigy"),
        ({"relative_step": True}, "Adafactor"),
    ],
)
def test_groups_that_are_marked_as_those_of_another_rule_are_refused_by_name(mark, rule):
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    rows = torch.optim.AdamW(kept(torch_groups(p, model, TUNED))).param_groups
    mixed = [row | (mark if number in (1, 3) else {}) for number, row in enumerate(rows)]
    with pytest.raises(UsageError, match=rf"groups 1, 3 are marked as those of {rule}.*have no such mark"):
        audit_model(p, model, mixed, TUNED)
    beside = {"use_muon": False, "algorithm": "adamw"}
    assert audit_model(p, model, [row | beside for row in rows], TUNED, fresh=False).passed


@pytest.mark.torch
def test_groups_of_muon_beside_those_of_adamw_are_told_apart():
    """Concatenated, as `muon.param_groups + adamw.param_groups`; and Muon alone."""
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    matrices = [t for name, t in model.named_parameters() if t.dim() == 2 and "layers" in name]
    rest = [t for t in model.parameters() if not any(t is each for each in matrices)]
    muon, adamw = torch.optim.Muon(matrices), torch.optim.AdamW(rest)
    with pytest.raises(
        UsageError, match=r"group 0 is marked as those of Muon \(ns_steps\).*of 2 groups, group 1 have no"
    ):
        audit_model(p, model, muon.param_groups + adamw.param_groups, TUNED)
    with pytest.raises(UsageError, match=r"how the steps of Muon scale is not described"):
        audit_model(p, model, muon, TUNED)
    with pytest.raises(UsageError, match=r"group 0 is audited against optimizer='sgd'.*optimizer='adam'"):
        audit_model(Parametrization(base=BASE, optimizer="sgd"), model, adamw.param_groups, TUNED)
    sgd = torch.optim.SGD(rest).param_groups
    with pytest.raises(UsageError, match=r"group 1 is audited against optimizer='adam'.*optimizer='sgd'"):
        audit_model(p, model, adamw.param_groups + sgd, TUNED)


@pytest.mark.torch
def test_decay_inside_the_gradient_is_told_from_groups_alone():
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    for kind, coupled in ((torch.optim.Adam, True), (torch.optim.AdamW, False)):
        rows = kind(kept(torch_groups(p, model, TUNED))).param_groups
        audit = audit_model(p, model, rows, TUNED, fresh=False)
        assert ("use AdamW" in audit.notes[0]) == coupled


RECIPES = {  # how a script chooses what decays, and the words for what does not
    "norm and bias": (lambda module, name, t: "norm" not in name and not name.endswith("bias"), ("norm", "bias")),
    "two axes": (lambda module, name, t: t.dim() > 1, ("1-d",)),
    "no tables": (
        lambda module, name, t: t.dim() > 1 and name != "positions" and type(module).__name__ != "Embedding",
        ("1-d", "embedding"),
    ),
    "all": (lambda module, name, t: True, ()),
}


@pytest.mark.torch
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tied", [False, True])
def test_usual_recipes_of_weight_decay_have_no_finding(recipe, tied, seed):
    """Words of recipes mean all parameters that they mean there: biases of queries, the last norm, shifts."""
    import torch

    decays, words = RECIPES[recipe]
    stds = dict.fromkeys(("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out"), 0.1)
    tuned = BaseHyperparameters(1e-3, weight_decay=0.1, stds=stds | {"unembedding": 0.1}, no_decay=words)
    roles = {name: part for name, part in PLAIN.items() if not (tied and name == "unembedding.bias")}
    p, model = Parametrization(base=BASE), plain(WIDE, 7, 6, tied=tied)
    initialize_model(p, model, tuned, roles, WIDE, generator=torch.Generator().manual_seed(seed))
    rows = []
    for group in torch_groups(p, model, replace(tuned, no_decay=()), roles, WIDE):
        for name, tensor in zip(group["names"], group["params"], strict=True):
            module = model.get_submodule(name.rpartition(".")[0])
            decay = group["weight_decay"] if decays(module, name, tensor) else 0.0
            rows.append({"params": [tensor], "lr": group["lr"], "eps": group["eps"], "weight_decay": decay})
    audit = audit_model(p, model, torch.optim.AdamW(rows), tuned, roles, WIDE)
    assert audit.passed, str(audit)


def test_no_message_is_off_by_zero_or_infinitely_many_times():
    """Of every quantity zero, infinite, NaN and where nothing was expected."""
    targets = parameter_targets(Parametrization(base=BASE), gpt2(WIDE), TUNED)
    bare = parameter_targets(Parametrization(base=BASE), gpt2(WIDE), replace(TUNED, weight_decay=0.0))
    odd = (0.0, math.inf, math.nan, 1e-3)
    for some, tuned in ((targets, TUNED), (bare, replace(TUNED, weight_decay=0.0))):
        for number in odd:
            for quantity in ("learning_rate", "epsilon", "weight_decay", "std", "rule"):
                value = "muon" if quantity == "rule" else number
                settings = {
                    name: replace(each, **{quantity: value, **({"count": 100} if quantity == "std" else {})})
                    for name, each in right(some).items()
                }
                audit = Audit(compare_settings(some, settings, tuned))
                said = " ".join([*audit.sentences(), str(audit), *(each.meaning for each in audit.faults)])
                assert not re.search(r"(?<![\d.])(0|inf|nan) times|× (0|inf|nan)(?![\w.])|is (inf|nan)\b", said), said
    decay_alone = Audit(
        compare_settings(targets, {each.parameter.name: ActualSettings(weight_decay=1.0) for each in targets}, TUNED)
    )
    assert "removes 10 times the share" in str(decay_alone.faults)
    given = right(targets)
    doubled = {name: replace(each, weight_decay=2 * each.weight_decay) for name, each in given.items()}
    faults = Audit(compare_settings(targets, doubled, TUNED)).faults  # at learning rates that differ from the base's
    assert {each.factor for each in faults} == {2.0}
    assert all("removes 2 times the share" in each.meaning for each in faults)

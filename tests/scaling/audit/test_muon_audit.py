"""Audits of Muon beside AdamW: planted mistakes of Muon runs with their factor and cause, right setups without one."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.scaling.audit.muon_mistakes import (
    BASE,
    LONG,
    MISTAKES,
    TUNED,
    WIDE,
    by_head,
    optimizers,
    parametrization,
    scaled,
    setup,
)
from tests.scaling.torch_models import build

from manyheads.errors import UsageError
from manyheads.models.architecture import apply_role_map
from manyheads.scaling import Parametrization, audit_model, initialize_model, preflight, torch_groups
from manyheads.scaling.audit.muon_groups import patch_target
from manyheads.scaling.parametrization.muon import FACTORS, MUON_ROLES
from manyheads.scaling.parametrization.targets import parameter_targets
from manyheads.scaling.preflight_checks.judge import Judge
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("factor", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [WIDE, LONG, Shape(16, 4, 6)])
def test_right_setups_have_no_fault(factor, shape):
    p = parametrization(factor=factor)
    model, muon, adamw = setup(p, shape)
    assert audit_model(p, model, optimizers(p, muon, adamw), TUNED).passed
    assert audit_model(p, model, [*muon, *adamw], TUNED).passed  # groups that say their algorithm


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_one_finding(mistake):
    quantity, said, make = MISTAKES[mistake]
    p, model, given = make()
    causes = audit_model(p, model, given, TUNED).causes()
    if mistake.startswith("fused"):  # nothing makes AdamW's groups for the biases beside it
        causes = [each for each in causes if said in each[0].meaning]
    (cause,) = causes
    assert cause[0].quantity == quantity
    assert said in cause[0].meaning


def test_groups_of_one_optimizer_and_schedules_are_read():
    import torch

    p = parametrization()
    model, muon, adamw = setup(p)
    marked = [group | {"use_muon": group["algorithm"] == "muon"} for group in (*muon, *adamw)]
    assert audit_model(p, model, [{k: v for k, v in g.items() if k != "algorithm"} for g in marked], TUNED).passed
    both = optimizers(p, muon, adamw)
    decaying = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.1) for each in both]
    assert audit_model(p, model, decaying, TUNED).passed
    alone = audit_model(p, model, [decaying[0], both[1]], TUNED)
    assert any("one optimizer has none" in note for note in alone.notes)
    unnamed = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in muon]
    with pytest.raises(UsageError, match="does not say whether Muon or AdamW steps it"):
        audit_model(p, model, unnamed, TUNED)


def test_fused_queries_keys_and_values_are_noted_or_refused():
    import torch

    p = parametrization()
    for shape, wrong in ((WIDE, False), (LONG, True)):
        model = build("gpt2", shape)
        initialize_model(p, model, TUNED)
        names = dict(model.named_parameters())
        matrices = [t for name, t in names.items() if t.dim() == 2 and ".h." in name]
        rest = [t for name, t in names.items() if not (t.dim() == 2 and ".h." in name)]
        both = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.05),
        ]
        audit = audit_model(p, model, both, TUNED)
        blocks = [each for each in audit.faults if each.quantity == "block"]
        assert bool(blocks) == wrong
        if wrong:
            assert {each.role for each in blocks} == {"query+key+value", "logit_bias+bias"}
            assert all("0.7071" in each.meaning for each in blocks)
            with pytest.raises(UsageError, match="is one parameter, and its parts need"):
                torch_groups(p, model, TUNED)
        else:
            assert any("fused queries, keys and values" in note for note in audit.notes)


def test_per_head_at_the_base_rate_is_noted_and_by_columns_wrong():
    """The power of H is between 0 and -1/2: right to (H/H0)^1/2 = 2 too high; summed blocks of W_O 2 to 4 too high."""
    p = parametrization("heads-in")
    model, rows = by_head(p, "heads-in")
    audit = audit_model(p, model, rows, TUNED)
    assert audit.passed
    assert any("by a power between 0 and 1/2" in note for note in audit.notes)
    p = parametrization("heads")
    model, rows = by_head(p, "heads")
    audit = audit_model(p, model, rows, TUNED)
    rates = [each for each in audit.faults if each.quantity == "learning_rate"]
    assert {each.role for each in rates} == {"output"}
    assert rates[0].factor == pytest.approx(4, rel=0.01)
    assert "2 to 4 times" in rates[0].meaning
    right = [row | ({"lr": 0.02 / 4, "weight_decay": 0.04} if row["role"] == "output" else {}) for row in rows]
    assert audit_model(p, model, right, TUNED).passed


ATTENTION = ("query", "key")
CASES = [  # which factor, shape, what is changed in Muon's groups, what is found
    ("match_rms_adamw", WIDE, lambda g: scaled(g, 2.0), "learning_rate", 2.0, None),
    ("original", WIDE, lambda g: scaled(g, 0.25), "learning_rate", 0.25, None),
    ("original", WIDE, lambda g: scaled(g, 10.0, key="weight_decay"), "weight_decay", 10.0, None),
    ("match_rms_adamw", WIDE, lambda g: scaled(g, 0.5, key="weight_decay"), "weight_decay", 0.5, None),
    ("original", LONG, lambda g: scaled(g, 2**0.5, ATTENTION), "learning_rate", 2**0.5, ATTENTION),
]


@pytest.mark.parametrize(("factor", "shape", "change", "quantity", "expected", "roles"), CASES)
def test_rates_and_decays_of_muon_are_found_with_their_factor(factor, shape, change, quantity, expected, roles):
    p = parametrization(factor=factor)
    model, muon, adamw = setup(p, shape)
    audit = audit_model(p, model, optimizers(p, change(muon), adamw), TUNED)
    found = [each for each in audit.faults if each.quantity == quantity]
    matrices = {each.name for each in audit.findings if each.quantity == "block"}
    assert {each.name for each in found} == {
        each.name for each in audit.findings if each.name in matrices and (not roles or each.role in roles)
    }
    assert [each.factor for each in found] == pytest.approx([expected] * len(found), rel=0.01)


def test_a_branch_factor_that_nothing_carries():
    p, deep = parametrization(), Shape(16, 2, 8)
    model, muon, adamw = setup(p, deep)
    unfolded = scaled(muon, 4.0, ("output", "mlp_out"))
    for name, tensor in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            tensor.data *= 4
    audit = audit_model(p, model, optimizers(p, unfolded, adamw), TUNED)
    assert {each.role for each in audit.faults} == {"output", "mlp_out"}
    rates = [each.factor for each in audit.faults if each.quantity == "learning_rate"]
    assert rates == pytest.approx([4.0] * 16, rel=0.01)
    assert {round(each.factor) for each in audit.faults if each.quantity == "initial"} == {4}


def test_experts_in_neither_optimizer_are_trained_by_nobody():
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(0.25 * torch.randn(3, 64, 32))
            self.query = nn.Parameter(0.1 * torch.randn(32, 32))

    model = Experts()
    p = Parametrization(optimizer="muon", base=BASE)
    roles = {"up": "mlp_in", "query": "query"}
    both = [torch.optim.Muon([model.query], lr=0.02, weight_decay=0.01)]
    audit = audit_model(p, model, both, TUNED, roles, BASE)
    assert [(each.name, each.factor) for each in audit.faults] == [("up", 0.0)]
    assert "never trained" in audit.faults[0].meaning


@pytest.mark.parametrize("factor", FACTORS)
def test_a_matrix_of_pixels_moves_by_as_much_at_every_width(factor):
    """Its inputs are dense: a polar factor of D rows, at the rate that the audit asks for and the shape factor."""
    import torch

    p, moved, draw = parametrization(factor=factor), [], torch.Generator().manual_seed(0)
    pixels = torch.randn(64, 12, generator=draw)
    for heads in (2, 4, 16):
        shape = Shape(16, heads, 2)
        (target,) = parameter_targets(p, apply_role_map({"patch": "patch"}, shape, ["patch"]), TUNED)
        wanted = patch_target(p, target, 12, shape, TUNED)
        rate = wanted.learning_rate
        # Least Frobenius norm: of D times 12 entries, each of which falls as AdamW's epsilon does.
        falls, count = target.epsilon / TUNED.epsilon, shape.width / BASE.width
        assert wanted.epsilon == pytest.approx(TUNED.muon.epsilon * falls * count**0.5)
        u, _, v = torch.linalg.svd(torch.randn(shape.width, 12, generator=draw), full_matrices=False)
        update = rate * FACTORS[factor].at(shape.width, 12) * u @ v
        moved.append(float((pixels @ update.T).square().mean().sqrt()))
    assert moved == pytest.approx([moved[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("table", ["Linear", "Embedding"])
def test_pixels_may_be_in_muon_and_a_table_may_not(table):
    import torch
    from tests.scaling.attention_layouts import Decoder, roles_of

    class Patches(Decoder):
        """A decoder of pixels."""

        def __init__(self, shape):
            super().__init__(shape)
            self.table = torch.nn.Linear(12, shape.width, bias=False)

    p, model = parametrization(), {"Linear": Patches, "Embedding": Decoder}[table](WIDE)
    tuned = replace(TUNED, stds=dict.fromkeys((*MUON_ROLES, "embedding", "unembedding"), 0.1))
    example = torch.randn(2, 5, 12) if table == "Linear" else torch.randint(19, (2, 5))
    given = (p, model, tuned, roles_of(model), WIDE)
    initialize_model(*given, example=example)
    groups = torch_groups(*given, example=example)
    rows = [
        row | ({"algorithm": "muon", "lr": 0.02, "weight_decay": 0.01} if row["role"] == "embedding" else {})
        for row in groups
    ]
    for asked, right in ((groups, True), (rows, table == "Linear")):
        audit = audit_model(p, model, asked, *given[2:], example=example)
        assert audit.passed == right
    if not right:
        said = f"{audit} {audit.sentences()}"
        assert "optimizer is wrong" in said
        assert "its inputs are one-hot" in said
        assert " 0 times" not in said
        assert {each["factor"] for each in audit.as_dict()["findings"] if each["quantity"] == "optimizer"} == {None}


def test_gains_behind_queries_and_keys_may_have_a_rate_of_their_own():
    tuned = replace(TUNED, learning_rates={"query_gain": 0.05, "key_gain": 0.04})
    p = Parametrization(optimizer="muon", base=BASE)
    model = build("qwen3", LONG)
    initialize_model(p, model, tuned)
    groups = torch_groups(p, model, tuned)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    folded = 0.5**0.5  # of the logit factor, which the gain behind the norm carries
    assert rates["model.layers.0.self_attn.q_norm.weight"] == pytest.approx(0.05 * folded)
    assert rates["model.layers.1.self_attn.k_norm.weight"] == pytest.approx(0.04)
    assert rates["model.layers.0.input_layernorm.weight"] == pytest.approx(3e-3)
    assert audit_model(p, model, groups, tuned).passed
    faults = audit_model(p, model, torch_groups(p, model, TUNED), tuned).faults  # one rate for all of AdamW
    assert {each.name.rpartition(".self_attn.")[2] for each in faults} == {"q_norm.weight", "k_norm.weight"}
    assert {each.quantity for each in faults} == {"learning_rate"}
    assert all("has the common learning rate, and its own was tuned apart" in each.meaning for each in faults)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"query": 0.1}, "learning_rates names query, and Muon trains it"),
        ({"query_gain": 0.0}, "expected a positive number"),
        ({"query_gain": float("nan")}, "expected a positive number"),
        ({"qk_gain": 0.1}, "no role is called 'qk_gain'"),
    ],
)
def test_rates_that_no_group_could_have_are_refused(rates, said):
    p = Parametrization(optimizer="muon", base=BASE)
    with pytest.raises(UsageError, match=re.escape(said)):
        torch_groups(p, build("qwen3", LONG), replace(TUNED, learning_rates=rates))


@pytest.mark.parametrize(("rate", "slow"), [(3e-3, True), (0.1, False), (None, True)])
def test_a_preflight_over_n_warns_of_gains_that_move_too_slowly(rate, slow):
    """At .003 a gain needs more than 100 steps to grow by 2^(1/4); frozen ones never do."""
    import torch

    tuned = replace(TUNED, learning_rates={"query_gain": rate or 3e-3, "key_gain": rate or 3e-3})
    p = Parametrization(optimizer="muon", base=BASE)

    def make(shape, seed):
        model = build("qwen3", shape)
        initialize_model(p, model, tuned)
        groups = torch_groups(p, model, tuned)
        if rate is None:
            groups = [g | {"lr": 0.0} if g["role"] == "norm" else g for g in groups]
        muon, adamw = ([g for g in groups if g["algorithm"] == name] for name in ("muon", "adamw"))
        tokens = torch.randint(0, 16, (4, 8))
        batch = {"input_ids": tokens, "labels": tokens}
        return model, [torch.optim.Muon(muon, adjust_lr_fn="original"), torch.optim.AdamW(adamw)], [batch]

    found = preflight(make, BASE, axes={"key_dim": (16, 64)}, parametrization=p, seeds=range(2), steps=4)
    notes = [note for note in found.notes if "gains of a norm behind queries or keys" in note]
    assert bool(notes) == slow
    if slow:
        assert "(N/N0)^(1/4) = 1.41" in notes[0]


@pytest.mark.parametrize(("moved", "steps"), [(0.008, 104), (0.004, 207), (0.0, "inf"), (0.0084, None)])
def test_the_steps_that_gains_need_are_those_of_their_growth(moved, steps):
    """Over 4 steps a gain of 1/2 moves by so much in the mean of two seeds; 4 times N asks for 4^(1/4) - 1 = 0.414."""
    p, shape = Parametrization(optimizer="muon", base=BASE), Shape(64, 4, 2)
    judge = Judge(p, None, SimpleNamespace(steps=4))
    judge.gains[shape, "q_norm"] = 0.5
    notes = judge._slow_gains(shape, {"q_norm": [0.5 * moved, 1.5 * moved], "other": [0.0]})
    assert [f"need {steps} steps" in note for note in notes] == [True] * (steps is not None)
    assert not judge._slow_gains(BASE, {"q_norm": [0.0]})

"""Preflight of users' training code: right scripts pass, mistakes are named, odd code is refused or measured."""

import ast
import json
from pathlib import Path

import pytest

from manyheads.errors import UsageError
from manyheads.models.parts import PARTS
from manyheads.scaling import preflight
from manyheads.scaling.preflight_checks.expected import role_powers
from manyheads.scaling.preflight_checks.training import Training

pytestmark = pytest.mark.torch

SIZES = {"heads": (4, 16)}
DEEP = {"depth": (2, 8)}


@pytest.fixture(scope="module")
def scripts():
    from tests.scaling.preflight import scripts

    return scripts


def judged(scripts, make, axes=SIZES, **changes):
    p = scripts.parametrization(changes.pop("optimizer", "adam"))
    given = {"seeds": range(3), "steps": 4} | changes
    return preflight(make(p), scripts.BASE, axes=axes, parametrization=p, hyperparameters=scripts.TUNED, **given)


def test_a_right_script_passes_and_shows_itself(scripts):
    said = []
    found = judged(scripts, lambda p: scripts.script("nano", p), announce=said.append, seeds=range(2), steps=2)
    assert found.passed
    assert not found.faults()
    assert [use.state for use in found.factors] == ["folded"]
    assert said[0].startswith("about ")
    assert found.cost.trainings > 2 * 2
    assert found.outcome == "inconclusive"  # two seeds leave much open, and the headline says so
    assert f"nothing wrong, not all decided: 12 updates, 0 wrong, {len(found.undecided())} undecided" in repr(found)
    assert "<table>" in found._repr_html_()
    assert len(found.to_dataframe()) == len(found.growths)
    assert found.plot().axes
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["passed"]


def test_usual_practice_is_measured_growing_in_the_matrices_of_the_blocks(scripts):
    found = preflight(scripts.standard("nano"), scripts.BASE, axes=SIZES, seeds=range(4), steps=4)
    assert not found.judged
    grown = {each.module.rpartition(".")[2] for each in found.broken if each.fit.exponent > 0}
    assert {"c_attn", "c_fc"} <= grown
    assert not grown & {"wte", "wpe", "ln_1", "ln_2", "ln_f"}
    assert "grows" in str(found)


def test_the_recipe_of_a_preflight_takes_under_twenty_lines():
    page = (Path(__file__).parents[3] / "docs/scaling-recipes.md").read_text()
    (block,) = [each for each in page.split("```")[1::2] if "def make(shape, seed):" in each]
    parts = ast.parse(block.removeprefix("python\n")).body
    assert sum(each.end_lineno - each.lineno + 1 for each in parts if getattr(each, "name", "") != "make_usual") < 20


CASES = [  # script, optimizer, mistake, axes, what is said of it
    ("nano", "adam", "one rate", SIZES, "h.*.c_attn: H^"),
    ("llama", "adam", "branch neither", DEEP, "branch factor 0.25 at (N, H, L) = (8, 4, 8) is neither applied"),
    (
        "vit",
        "adam",
        "branch both",
        DEEP,
        "branch factor 0.25 at (N, H, L) = (8, 4, 8) is applied in the forward pass and folded",
    ),
    ("llama", "adam", "logit neither", {"key_dim": (8, 32)}, "logit factor 0.5 at (N, H, L) = (32, 4, 2) is neither"),
    ("vit", "adam", "positions in none", SIZES, "positions is in no optimizer"),
    ("nano", "muon", "table in Muon", SIZES, "it needs AdamW: its inputs are one-hot"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer", "mistake", "axes", "said"), CASES)
def test_planted_mistakes_are_named(scripts, name, optimizer, mistake, axes, said):
    few = {"seeds": range(2), "steps": 1} if optimizer == "muon" else {}  # the audit finds it
    found = judged(scripts, lambda p: scripts.script(name, p, mistake), axes, optimizer=optimizer, **few)
    assert not found.passed
    assert any(said in each for each in found.faults()), found.faults()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "steps"), [("llama", "adam", 4), ("vit", "adam", 4), ("llama", "muon", 1)]
)
def test_other_right_scripts_pass(scripts, name, optimizer, steps):
    found = judged(scripts, lambda p: scripts.script(name, p), {**SIZES, **DEEP}, optimizer=optimizer, steps=steps)
    assert found.passed, found.faults()


@pytest.mark.slow
def test_a_model_of_transformers_needs_no_roles(scripts):
    import torch
    from tests.scaling.torch_models import build

    from manyheads.scaling import initialize_model, torch_groups

    p = scripts.parametrization()

    def make(shape, seed):
        model = build("llama", shape)
        initialize_model(p, model, scripts.TUNED)
        tokens = torch.randint(29, (4, 8, 12))
        optimizer = torch.optim.AdamW(torch_groups(p, model, scripts.TUNED))
        return model, optimizer, [{"input_ids": each, "labels": each} for each in tokens]

    found = judged(scripts, lambda p: make, seeds=range(2), steps=1)
    assert found.judged
    assert found.passed, found.faults()
    assert [use.state for use in found.factors] == ["folded"]


class Odd:
    """Small trainings that are odd in one way."""

    def __init__(self, kind):
        self.kind, self.kept = kind, None

    def __call__(self, shape, seed):
        import torch
        from torch import nn

        if self.kind == "one seed":
            torch.manual_seed(0)
        d = 4 * shape.heads if self.kind != "one size" else 8
        model = nn.Sequential(nn.Linear(3, d), nn.BatchNorm1d(d), nn.Linear(d, d), nn.Linear(d, 1))
        if self.kind == "same model":
            self.kept = model = self.kept or model
        if self.kind == "frozen":
            model[0].requires_grad_(requires_grad=False)
        if self.kind == "tied":
            model[2].weight = nn.Parameter(model[2].weight.detach())
            model.append(nn.Linear(d, d)), model.append(nn.Linear(1, 1))
            model = nn.Sequential(*(model[i] for i in (0, 2, 4, 3)))
            model[2].weight = model[1].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=1e18 if self.kind == "diverges" else 1e-2)
        batches = [] if self.kind == "no batch" else iter([torch.randn(5, 3)])  # one batch for all steps
        loss = None if self.kind == "no loss" else lambda model, x: model(x).square().mean()
        if self.kind == "no training":
            return model
        return Training(model, optimizer, batches, loss)


@pytest.mark.parametrize("kind", ["frozen", "tied"])
def test_odd_trainings_are_measured(kind):
    found = preflight(Odd(kind), (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2), steps=2)
    assert not found.judged
    assert found.passed
    assert ("0" in {each.module for each in found.growths}) == (kind != "frozen")


def test_a_training_that_diverges_is_wrong():
    found = preflight(Odd("diverges"), (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2), steps=8)
    assert not found.passed
    assert any("diverges along H" in each for each in found.faults())


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("same model", {}, "returned the same model twice"),
        ("one size", {}, "at every size along H"),
        ("one seed", {}, "the same training for all seeds"),
        ("no batch", {}, "batches is empty"),
        ("no loss", {}, "expected one number"),
        ("no training", {}, "expected .model, optimizer, batches."),
        ("", {"axes": {"heads": (2,)}}, "needs at least two"),
        ("", {"axes": ()}, "give at least one of"),
        ("", {"seeds": (0,)}, "at least two"),
        ("", {"limit": 1e-9}, "limit=1e-09"),
        ("", {"steps": 0}, "give at least 1"),
    ],
)
def test_what_cannot_be_a_preflight_is_refused(kind, changes, said):
    given = {"axes": {"heads": (2, 4)}, "seeds": range(2), "steps": 2} | changes
    with pytest.raises(UsageError, match=said):
        preflight(Odd(kind), (4, 2, 1), **given)


def test_every_part_of_a_model_has_an_expected_update(scripts):
    for optimizer in ("adam", "muon"):
        assert set(PARTS.values()) <= set(role_powers(scripts.parametrization(optimizer)))


def test_a_search_for_the_best_rate_says_how_many_would_decide():
    found = preflight(
        Odd(""), (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2), steps=2, rate_factors=(0.25, 0.5, 1.0, 2.0), train=8
    )
    said = [each.sentence() for each in found.transfers] + list(found.notes)
    assert any("per doubling of H" in each or "not decided" in each for each in said)


WRONG = {  # what a model multiplies at a shape, along axes on which the parametrization leaves it alone
    "logits over the root of H": (lambda s: (1.0, s.heads**-0.5), {"heads": (4, 8, 64)}, "logit factor 1 at"),
    "branches over the root of H": (lambda s: (s.heads**-0.5, 8**-0.5), SIZES, "branch factor 1 at"),
    "logits over L": (lambda s: (1.0, 1 / s.depth), DEEP, "logit factor 1 at"),
}


@pytest.mark.parametrize("mistake", ["", *WRONG])
def test_multipliers_are_held_against_those_of_the_base(scripts, mistake):
    """Also where they equal a right one at some shape, and where the base has a constant of its own."""
    from manyheads.scaling import ForwardMultipliers, initialize_model, torch_groups

    p = scripts.parametrization()
    factors, axes, said = WRONG.get(mistake, (lambda s: (0.3, 0.2), SIZES, ""))

    def make(shape, seed):
        branch, logit = factors(shape)
        model = scripts.NanoGPT(shape, branch, logit)
        given = (p, model, scripts.TUNED, scripts.NANO, shape, ForwardMultipliers())
        initialize_model(*given)
        import torch

        return model, torch.optim.AdamW(torch_groups(*given)), scripts.texts(seed), None, scripts.NANO

    found = judged(scripts, lambda p: make, axes, seeds=range(2), steps=1)
    wrong = [each.sentence() for each in found.factors if not each.right]
    if not mistake:
        assert not wrong
    else:
        assert not found.passed
        assert len(wrong) == len(next(iter(axes.values()))) - 1  # at every shape but the base
        assert all(said in each and "is not that of the base" in each for each in wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda shape: None, r"<lambda>\(shape\) takes other arguments: expected a function of \(shape, seed\)"),
        (7, "make is int: expected a function of"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_by_name(make, said):
    with pytest.raises(UsageError, match=said):
        preflight(make, (4, 2, 1))

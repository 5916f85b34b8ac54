"""Factors between the weights of a branch: every one is found or named, and right models pass."""

import numpy as np
import pytest

from manyheads.scaling import Parametrization
from manyheads.scaling.preflight_checks.factors import NAMES, Factors, find_uses
from manyheads.scaling.torch.groups import ModelOptions, read_model
from manyheads.transformer import Shape

planted = pytest.importorskip("tests.scaling.planted_factors", reason="torch is not installed")
pytestmark = pytest.mark.torch
HEADS = Shape(8, 12, 2)  # no power of 12 or of 12/4 is one of 2 or of 8
WORDS = {"embeddings": "embeddings", "positions": "positions", "logits": "logits", "qk norm": "logits",
         "branch": "branches", "outputs": "outputs", "final norm": "outputs", "below": "embeddings"}  # fmt: skip


@pytest.mark.parametrize("place", planted.PLACES)
def test_a_factor_of_heads_is_refused_wherever_it_stands(place):
    rng = np.random.default_rng(len(place))
    exponent = rng.choice([-1, -0.5, 0.5])
    while not planted.applies(place, variant := planted.draw_variant(rng)):
        continue
    outcome, said = planted.judge(variant, HEADS, {place: HEADS.heads**exponent})
    assert outcome == "refused", said
    if place in WORDS:
        assert f"multiplies its {WORDS[place]} by" in said
    else:
        found = {-1: "0.0833333", -0.5: "0.288675", 0.5: "3.4641"}[exponent]
        assert f"times {found}, which is H^" in said


@pytest.mark.parametrize("seed", range(16))
def test_a_right_gpt_passes_and_its_constants_are_named(seed):
    variant, shape = planted.draw_clean(np.random.default_rng(seed))
    outcome, said = planted.judge(variant, shape)
    assert outcome == ("noted" if variant.constants else "passed"), said
    assert not variant.constants or "not judged whether the base multiplies them by" in said


@pytest.mark.parametrize("by_name", [False, True])
def test_an_attention_module_of_torch_is_read(monkeypatch, by_name):
    import torch

    class Block(planted.Block):
        def __init__(self, shape, *options):
            super().__init__(shape, *options)
            del self.q, self.k, self.v_proj, self.o
            self.mha = torch.nn.MultiheadAttention(shape.width, shape.heads, bias=False, batch_first=True)

        def attend(self, z):
            return (self.mha(query=z, key=z, value=z) if by_name else self.mha(z, z, z))[0]

    monkeypatch.setattr(planted, "Block", Block)
    parts = {"mha": ("query", "key", "value")}
    monkeypatch.setattr(planted, "FUSED", parts)
    monkeypatch.setattr(planted, "PARTS", planted.PARTS | parts | {"out_proj": "output"})
    outcome, said = planted.judge(planted.Variant(), HEADS)
    assert outcome == "passed", said


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_factors_in_low_precision(precision):
    import torch

    model = planted.GPT(HEADS, planted.Variant(), {"hidden": 12**-0.5}).to(getattr(torch, precision))
    right = planted.GPT(HEADS, planted.Variant()).to(getattr(torch, precision))
    p, roles = Parametrization(base=planted.BASE), planted.roles_of(right)
    assert planted.torch_groups(p, right, planted.TUNED, roles, HEADS)
    with pytest.raises(planted.UsageError, match=r"h.0.down takes its hidden units times 0.28\d+, which is H\^-1/2"):
        planted.torch_groups(p, model, planted.TUNED, roles, HEADS)


def test_what_is_not_measured_is_named(monkeypatch):
    """A gate on attention, a weight that is not used, a table that is not added; an activation of its own is read."""
    import torch

    def said(**changes):
        with monkeypatch.context() as patch:
            for name, change in changes.items():
                kind, _, method = name.partition("_")
                patch.setattr(getattr(planted, kind), method, change)
            return planted.judge(planted.Variant(), HEADS)[1]

    def gated(self, z, attend=planted.Block.attend):
        hook = self.o.register_forward_pre_hook(lambda _, given: given[0] * z.sigmoid())
        done = attend(self, z)
        hook.remove()
        return done

    def summed(self, tokens):
        return self.head(self.ln_f(torch.nn.Sequential(*self.h)(self.wte(tokens).cumsum(1))))

    found = said(Block_mlp=lambda self, z: self.down((5 * self.up(z)).sin()))
    assert found == (
        "hidden units: not judged whether the base multiplies them by 5 as well; here h.0.up, in front of its "
        "activation, takes its hidden units times that"
    )
    words = "not judged, what goes into h.0.{} does not follow"
    assert said(Block_attend=gated) == f"values: multipliers {words.format('o')} its values (1 more)"
    assert said(Block_mlp=lambda self, z: self.down(torch.nn.functional.gelu(z @ self.up.weight.T))) == ""
    found = said(Block_mlp=lambda self, z: self.down(torch.nn.functional.gelu(z.repeat_interleave(3, -1))))
    assert found == "inputs of weights: multipliers not judged, no product with the weights of h.0.up was seen (1 more)"
    assert "the operation cumsum on activations has no derivation" in said(GPT_forward=summed)


@pytest.mark.parametrize("place", ["values", "hidden", "positions", "attention norm", "stream"])
def test_preflight_holds_factors_within_branches_against_the_base(place):
    """A constant is right, which one shape cannot tell."""

    def measured(shape, factor):
        model = planted.GPT(shape, planted.Variant(), {place: factor})
        return Factors(model, read_model(model, ModelOptions(planted.roles_of(model), shape)), None)

    name = {"values": "value", "hidden": "hidden", "positions": "position", "stream": "stream"}.get(place, "input")
    p, base = Parametrization(base=planted.BASE), measured(planted.BASE, 0.5)
    for factor, wrong in ((0.5, []), (12**-0.5, [name])):
        uses = find_uses(p, "heads", HEADS, measured(HEADS, factor), base)
        assert [use.name for use in uses if use.state == "other" and use.name not in NAMES] == wrong
        assert not wrong or "is not that of the base" in next(use for use in uses if use.name == name).sentence()

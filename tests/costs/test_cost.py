"""Costs convert exactly, add, repeat, and refuse what they do not know."""

import itertools
import json
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.costs import Cost, ModelShape, count, transformer_cost
from manyheads.costs.conventions import (
    PRESETS,
    Backward,
    Causal,
    Convention,
    ConventionError,
    Embedding,
    Recompute,
    find_convention,
)
from manyheads.costs.cost import Item, UnknownCost
from manyheads.costs.counting import compare_conventions, render_comparison
from manyheads.costs.shapes import Experts
from manyheads.costs.tally import Tally
from manyheads.errors import UsageError

FORMULA = [name for name, preset in PRESETS.items() if not preset.convention.executed]


def choices(kind):
    return st.sampled_from([value for value in get_args(kind) if value != "executed"])


conventions = st.builds(
    Convention,
    multiply_add=st.just(2),
    causal=choices(Causal),
    softmax=st.sampled_from([0, 2, 4]),  # even: an odd charge on half a score is no integer
    recompute=choices(Recompute),
    embedding=choices(Embedding),
    backward=choices(Backward),
)
heads = st.integers(1, 3)
models = st.builds(
    lambda layers, heads, dim, vocabulary, causal, gated: ModelShape(
        layers, heads * dim, heads, vocabulary=vocabulary, causal=causal, gated=gated
    ),
    st.integers(0, 3), heads, st.integers(1, 5), st.integers(0, 9), st.booleans(), st.booleans(),
)  # fmt: skip


@given(models, st.integers(1, 9), st.booleans(), st.lists(conventions, min_size=1, max_size=6))
def test_conversion_is_exact_whatever_the_way(shape, length, training, path):
    """Through any conventions and back: the same cost as counted under the last one directly."""
    direct = transformer_cost(shape, length, training=training, convention=path[-1])
    cost = transformer_cost(shape, length, training=training)
    start = cost.as_dict()
    for convention in path:
        cost = cost.to(convention)
    assert cost.as_dict() == direct.as_dict()
    assert cost.to("exact").as_dict() == start


@given(models, st.integers(1, 9), st.booleans())
def test_order_of_the_conventions(shape, length, training):
    cost = transformer_cost(shape, length, training=training)
    flops = {name: cost.to(name).flops for name in FORMULA}
    assert flops["halved"] <= flops["exact"] <= flops["dense"] <= min(flops["megatron"], flops["chinchilla"])
    assert flops["dense"] == flops["palm"] == 2 * flops["mac"]
    if not training:
        assert flops["dense"] == flops["megatron"]
    if not shape.causal:
        assert flops["exact"] == flops["dense"]


def test_recomputation_adds_what_it_says():
    cost = transformer_cost(ModelShape(3, 8, 2, 20, causal=False), 5, 2, training=True)
    forward = transformer_cost(ModelShape(3, 8, 2, 20, causal=False), 5, 2).flops
    added = {
        way: cost.to(Convention(recompute=way)).flops - cost.flops for way in get_args(Recompute) if way != "executed"
    }
    scores, last = 3 * 2 * 2 * 5 * 5 * 8, 3 * 2 * 2 * 5 * 8 * 20
    assert added == {
        "none": 0,
        "scores": scores,
        "block": forward,
        "block-needed": forward - last,
        "block+scores": forward + scores,
    }


def test_programs_and_formulas_do_not_convert_into_each_other():
    program = count(jnp.dot, *[jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2)
    for name in FORMULA:
        with pytest.raises(ConventionError, match="a program as it runs"):
            program.to(name)
        with pytest.raises(ConventionError, match="a formula"):
            transformer_cost(ModelShape(1, 4, 2), 3).to(name).to("executed")
    assert (program.flops, program.to("executed-mac").flops) == (128, 64)
    assert program.to("executed-mac").to("executed") == program
    with pytest.raises(ConventionError, match="do not add"):
        program + transformer_cost(ModelShape(1, 4, 2), 3)


@given(models, st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_costs_add_and_repeat(shape, length, a, b):
    cost = transformer_cost(shape, length, training=True)
    total = a * cost + cost * b
    for name in ("flops", "elementwise", "transcendental", "bytes"):
        assert getattr(total, name) == (a + b) * getattr(cost, name)
        assert sum(item[name] for item in total.breakdown().values()) == getattr(total, name)


def test_what_cannot_be_added_or_repeated():
    cost = Cost((Item("x", macs=Tally.of(1)),))
    with pytest.raises(TypeError):
        cost + 1
    with pytest.raises(TypeError):
        1.5 * cost
    with pytest.raises(UsageError, match="-1 times"):
        -1 * cost


def test_unknown_parts_refuse_every_figure():
    cost = Cost((Item("x", macs=Tally.of(1), bytes=3),), unknown=("a loop",))
    for name in ("flops", "elementwise", "transcendental", "bytes"):
        with pytest.raises(UnknownCost, match="a loop"):
            getattr(cost, name)
    assert cost.lower_bound().flops == 2
    assert "a loop" in cost.lower_bound().notes[0]
    assert "at least" in cost.table()
    assert "unknown: a loop" in cost.table()
    assert json.loads(json.dumps(cost.as_dict()))["lower_bound"]["flops"] == 2
    assert (2 * cost).unknown == ("a loop",)
    assert (cost + cost).unknown == ("a loop",)


def test_json_and_table_hold_the_figures():
    cost = transformer_cost(ModelShape(2, 8, 2, vocabulary=11), 5, training=True, convention="megatron")
    data = json.loads(json.dumps(cost.as_dict()))
    assert data["flops"] == cost.flops
    assert data["convention"]["name"] == "megatron"
    assert sum(item["bytes"] for item in data["items"].values()) == data["bytes"] == cost.bytes
    text = str(cost)
    assert f"{cost.flops:,}" in text
    assert "convention megatron: multiply-add = 2" in text


def test_comparison_lists_every_preset_that_can_read():
    cost = transformer_cost(ModelShape(1, 3, 3, causal=True), 3, training=True)
    rows = compare_conventions(cost)
    assert list(rows) == [each for each in FORMULA if each != "all-experts"]
    mixture = ModelShape(1, 3, 3, experts=Experts(4, 2, 5))
    assert list(compare_conventions(transformer_cost(mixture, 3))) == FORMULA
    assert rows["dense"] == cost.to("dense").flops
    odd = Cost((Item("x", macs=Tally(9, 6, 9)),), Convention(multiply_add=2))
    assert compare_conventions(odd)["halved"] == 9
    assert "megatron" in render_comparison(cost)


def test_conventions_are_described_apart():
    everything = itertools.product(
        (1, 2),
        get_args(Causal),
        (0, 3),
        get_args(Recompute),
        get_args(Embedding),
        get_args(Backward),
        ("visited", "all"),
    )
    valid = set()
    for values in everything:
        executed = {value == "executed" for value in (values[1], *values[3:6])}
        if len(executed) == 1 and not (executed == {True} and (values[2] or values[6] == "all")):
            valid.add(Convention(*values))
        else:
            with pytest.raises(UsageError, match="executed"):
                Convention(*values)
    assert len({convention.describe() for convention in valid}) == len(valid) == 2 * (3 * 2 * 5 * 2 * 2 * 2 + 1)


def test_names_of_conventions():
    assert all(find_convention(name).name == name for name in PRESETS if name != "palm")
    assert find_convention("palm").name == "dense"
    assert Convention(softmax=1).name == "custom"
    with pytest.raises(UsageError, match="'flops'"):
        find_convention("flops")
    for wrong in ({"multiply_add": 3}, {"causal": "half"}, {"softmax": -1}, {"recompute": True}, {"backward": ""}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Convention(**wrong)

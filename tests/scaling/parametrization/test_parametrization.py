"""The table against the published one, both of its forms by training, and the schemes at the base shape."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import UsageError
from manyheads.scaling import Parametrization
from manyheads.scaling.axes import shapes_along
from manyheads.scaling.parametrization.muon import FACTORS, Muon
from manyheads.scaling.parametrization.power_laws import Power
from manyheads.scaling.parametrization.scaling_exponents import SCHEMES
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.transformer import Shape, TokenInput, standard_scaling
from manyheads.transformer.scaling import ROLES

ALONE = ("adam", "sgd")
BASE = Shape(4, 2, 2)
LARGER = Shape(8, 4, 4)
EXPONENTS = list(product((0.5, 1.0), (0.5, 0.75, 1.0)))
SIZES = st.integers(1, 64)
SHAPES = st.builds(Shape, SIZES, SIZES, SIZES)
COMMON = {
    "logit_exponent": st.sampled_from([0.5, 1.0]),
    "depth_exponent": st.floats(0.5, 1.0),
    "scheme": st.sampled_from(SCHEMES),
    "base": SHAPES,
}
MUONS = st.builds(Muon, st.sampled_from(["whole", "heads-in", "heads"]), st.sampled_from(list(FACTORS)))
PARAMETRIZATIONS = st.one_of(
    st.builds(
        Parametrization,
        optimizer=st.sampled_from(ALONE),
        form=st.sampled_from(["effective", "multiplier"]),
        **COMMON,
    ),
    st.builds(Parametrization, optimizer=st.just("muon"), muon=MUONS, **COMMON),
)


def published(n, h, depth, a, c, optimizer):
    """Return the published table at N = n, H = h, L = depth, gamma0 = 1: (multiplier, std) by role, and the rate.

    Bordelon, Chaudhry, Pehlevan (2024), Table 1 and the captions; a and c are the exponents of logits and depth.
    """
    d = n * h
    bulk = (d**-0.5, 1.0)
    logit = (h**-0.5 * n ** (a - 1.5), n ** (1 - a))
    if optimizer == "sgd":
        first, learning_rate = depth ** (0.5 - c), d * depth ** (2 * c - 1)
        last = (depth ** (0.5 - c) / d, depth ** (c - 0.5))
    else:
        first, learning_rate = d**0.5 * depth ** (1 - c), d**-0.5 * depth ** (c - 1)
        last = (depth ** (1 - c) * d**0.5 / d, d**-0.5 * depth ** (c - 1))
    table = dict.fromkeys(("value", "output", "mlp_in", "mlp_out"), bulk) | dict.fromkeys(("query", "key"), logit)
    table |= dict.fromkeys(("embedding", "positional", "final_norm"), (first, 1 / first)) | {"unembedding": last}
    return table, learning_rate


@pytest.mark.parametrize("optimizer", ALONE)
@pytest.mark.parametrize(("a", "c"), EXPONENTS)
def test_the_multiplier_form_is_the_published_table(a, c, optimizer):
    found = Parametrization(a, c, optimizer=optimizer, form="multiplier").table(Shape(3, 5, 7))
    expected, learning_rate = published(3, 5, 7, a, c, optimizer)
    for role, (multiplier, std) in expected.items():
        row = found[role]
        assert row.multiplier == pytest.approx(multiplier, rel=1e-12)
        assert row.initial == pytest.approx(std, rel=1e-12)
    assert [row.learning_rate for row in found.rows] == pytest.approx([learning_rate] * len(ROLES), rel=1e-12)
    assert found.branch == pytest.approx(7**-c)
    assert found.logit_prefactor * 3**-found.logit_exponent == pytest.approx(3**-a)


@given(PARAMETRIZATIONS)
def test_nothing_changes_at_the_base(p):
    table = p.table(p.base)
    for row in table.rows:
        assert (row.initial, row.multiplier, row.learning_rate, row.epsilon, row.weight_decay) == (1, 1, 1, 1, 1)
    assert table.branch == 1
    scaling, usual = p.scaling(p.base, TokenInput(9)), standard_scaling(p.base, TokenInput(9))
    assert scaling.initial == usual.initial
    assert scaling.logit(p.base.key_dim) == pytest.approx(usual.logit(p.base.key_dim))


@given(PARAMETRIZATIONS, SHAPES, SHAPES)
def test_a_change_of_base_is_a_product(p, middle, target):
    second = replace(p, base=middle)
    there, on, whole = p.table(middle), second.table(target), p.table(target)
    for role in ROLES:
        for column in ("initial", "multiplier", "learning_rate", "epsilon"):
            product_ = getattr(there[role], column) * getattr(on[role], column)
            assert product_ == pytest.approx(getattr(whole[role], column), rel=1e-9)


@given(PARAMETRIZATIONS, SHAPES)
def test_every_role_has_a_row_and_rate_times_decay_stays(p, shape):
    table = p.table(shape)
    assert {row.role for row in table.rows} == set(ROLES)
    for row in table.rows:
        assert row.learning_rate * row.weight_decay == pytest.approx(1)
        assert all(np.isfinite([row.initial, row.multiplier, row.learning_rate, row.epsilon]))
    if p.form == "multiplier" and p.scheme == "completep":
        assert [row.learning_rate for row in table.rows] == pytest.approx(
            [table["value"].learning_rate] * len(ROLES), rel=1e-9
        )


@given(SHAPES, SHAPES)
def test_complete_p_and_mup_are_members(base, shape):
    """At equal depth, width-only muP is the member with logit exponent one, epsilon apart."""
    flat = Shape(shape.key_dim, shape.heads, base.depth)
    ours, mup = Parametrization.complete_p(base).table(flat), Parametrization.mup(base).table(flat)
    for role in ROLES:
        assert (ours[role].initial, ours[role].learning_rate) == pytest.approx(
            (mup[role].initial, mup[role].learning_rate)
        )
    assert {row.epsilon for row in mup.rows} == {1.0}
    standard = Parametrization.standard(base).table(shape)
    assert {row.learning_rate for row in standard.rows} == {1.0}
    fresh = standard_scaling(shape, TokenInput(9)).initial
    scaled = Parametrization.standard(base).scaling(shape, TokenInput(9)).initial
    assert scaled == pytest.approx(fresh)


def test_powers_print_and_multiply():
    assert str(Power(-1.5, -1, 0.5)) == "N^-3/2 H^-1 L^1/2"
    assert str(Power()) == "1"
    assert Power(1, 2, 3, 4) * Power(1, 2, 3, 4) ** -1 == Power()
    assert Power(richness=2).ratio(BASE, BASE, richness=3.0) == 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "lion"},
        {"scheme": "ntk"},
        {"form": "stored"},
        {"optimizer": "muon", "form": "multiplier"},
        {"muon": "whole"},
        {"logit_exponent": 0.75},
        {"depth_exponent": 0.4},
        {"richness": 0.0},
        {"scheme": "mup", "richness": 2.0},
        {"base": (8, 4)},
        {"base": (8, 4, True)},
        {"base": "842"},
        {"depth_exponent": None},
        {"richness": "1"},
    ],
)
def test_wrong_use_is_refused(wrong):
    with pytest.raises(UsageError):
        Parametrization(**wrong)


@pytest.mark.parametrize(
    ("given", "shape", "said"),
    [
        ({}, (8, 4), "expected Shape"),
        ({}, 8, "expected Shape"),
        ({}, Shape(10**400, 4, 2), "beyond what a float holds"),
        ({"richness": 1e300, "optimizer": "sgd"}, BASE, "beyond what a float holds"),
        ({"richness": 1e-300, "optimizer": "sgd"}, BASE, "beyond what a float holds"),
    ],
)
def test_a_shape_without_a_table_is_refused(given, shape, said):
    with pytest.raises(UsageError, match=said):
        Parametrization(base=BASE, **given).table(shape)


def test_three_integers_do_for_a_shape():
    p = Parametrization(base=(4, 2, 2))
    assert p == Parametrization(base=BASE)
    assert p.table((16, 4, 2)) == p.table([16, 4, 2]) == p.table(Shape(16, 4, 2))
    assert forward_multipliers(p, (16, 4, 2)) == forward_multipliers(p, Shape(16, 4, 2))
    assert shapes_along("heads", (8, 4, 2), (2, 16)) == (Shape(8, 2, 2), Shape(8, 16, 2))
    assert p.scaling((16, 4, 2), TokenInput(30)).initial == p.scaling(Shape(16, 4, 2), TokenInput(30)).initial


def test_a_table_gives_the_numbers_at_its_shape():
    """Those of groups that are made of the same hyperparameters, by hand for one class."""
    table = Parametrization(0.5, base=BASE).table((16, 2, 2))
    found = table.at(learning_rate=1e-2, epsilon=1e-6, weight_decay=0.1)
    assert set(found) == {row.role for row in table.rows}
    assert found["value"] == {"learning_rate": 1e-2 / 4, "epsilon": 1e-6 / 4, "weight_decay": 0.4}
    assert found["query"]["learning_rate"] == 1e-2 / 4 / 2
    assert found["embedding"] == {"learning_rate": 1e-2, "epsilon": 1e-6 / 4, "weight_decay": 0.1}

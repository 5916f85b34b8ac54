"""Muon beside AdamW: powers of its table, polar factors by singular values, shape factors."""

from itertools import product

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.models.architecture import apply_role_map, read_body
from manyheads.scaling import BaseHyperparameters, Muon, MuonHyperparameters, Parametrization
from manyheads.scaling.parametrization.muon import BLOCKS, FACTORS, MUON_ROLES, SPLITS, find_factor
from manyheads.scaling.parametrization.targets import parameter_targets
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
TUNED = BaseHyperparameters(3e-3, weight_decay=0.05, muon=MuonHyperparameters(0.02))


def muon(split="whole", factor="none", logit=1.0, depth=1.0, base=BASE):
    return Parametrization(logit, depth, optimizer="muon", base=base, muon=Muon(split, factor))


def expected(role, split, shape, logit, depth):
    """The rate at which what a role computes moves by one, written from the derivation; relative to nothing."""
    n, h, d, m = shape.key_dim, shape.heads, shape.width, shape.key_dim * shape.heads
    m_k, f = n * shape.group_heads, shape.hidden or 4 * d
    whole = {"query": (m / d) ** 0.5, "key": (m_k / d) ** 0.5, "value": (m_k / d) ** 0.5, "output": (d / m) ** 0.5}
    whole |= {"mlp_in": (f / d) ** 0.5, "mlp_out": (d / f) ** 0.5}
    by_head = {"query": (n / d) ** 0.5, "key": (n / d) ** 0.5, "value": (n / d) ** 0.5}
    chosen = {"whole": {}, "heads-in": by_head, "heads": by_head | {"output": (d / n) ** 0.5 / h}}[split]
    rate = (whole | chosen)[role] * shape.depth ** (depth - 1)
    return rate * n ** (logit - 1) if role in ("query", "key") else rate


SHAPES = [
    Shape(32, 4, 2),
    Shape(8, 16, 2),
    Shape(8, 4, 16),
    Shape(8, 4, 2, stream=128),
    Shape(16, 6, 3, stream=40, key_heads=3, hidden=70),
]


@pytest.mark.parametrize("split", ["whole", "heads-in", "heads"])
@pytest.mark.parametrize(("logit", "depth"), list(product((0.5, 1.0), (0.5, 1.0))))
def test_the_rates_are_those_that_move_every_module_by_one(split, logit, depth):
    base = Shape(8, 4, 2, key_heads=2, hidden=128)
    for shape, factor in product(SHAPES, FACTORS):
        table = muon(split, factor, logit, depth, base).table(shape)
        # A size that a shape leaves out keeps the base's ratio.
        filled = Shape(
            *(shape.key_dim, shape.heads, shape.depth, shape.width),
            shape.key_heads or shape.heads // 2,
            shape.hidden or 4 * shape.width,
        )
        for role in MUON_ROLES:
            block = BLOCKS[split][role]
            wanted = expected(role, split, filled, logit, depth) / expected(role, split, base, logit, depth)
            sides = [[side.ratio(each, Shape(1, 1, 1, 1, 1, 1)) for side in block[:2]] for each in (filled, base)]
            own = FACTORS[factor].at(*sides[0]) / FACTORS[factor].at(*sides[1])
            assert table[role].learning_rate * own == pytest.approx(wanted), (role, shape, factor)
            assert table[role].rate_factor == pytest.approx(own)


def test_powers_at_width_heads_times_key_dimension():
    """Whole matrices have no power of H or N but the logit's; heads have H^-1/2; Moonlight's factor has D^1/2."""
    grown = Shape(16, 8, 4)
    powers = {
        (split, factor): {row.role: row.powers["learning_rate"] for row in muon(split, factor, 0.5).table(grown).rows}
        for split, factor in product(("whole", "heads-in", "heads"), FACTORS)
    }
    for factor in ("none", "original", "sqrt(r/c)"):
        assert {powers["whole", factor][role] for role in ("value", "output", "mlp_in", "mlp_out")} == {"1"}
        assert {powers["whole", factor][role] for role in ("query", "key")} == {"N^-1/2"}
    assert powers["whole", "match_rms_adamw"]["value"] == "N^-1/2 H^-1/2"
    assert powers["heads-in", "none"]["value"] == powers["heads", "none"]["output"] == "H^-1/2"
    assert powers["heads-in", "sqrt(r/c)"]["value"] == "1"
    assert powers["heads", "original"]["output"] == powers["heads", "sqrt(r/c)"]["output"] == "H^-1"
    assert powers["heads", "match_rms_adamw"]["value"] == "N^-1/2 H^-1"
    assert powers["heads-in", "original"]["output"] == "1"


def test_adamw_keeps_its_rows_and_epsilon_has_no_width():
    table, adam = muon(factor="original").table((16, 8, 4)), Parametrization(base=BASE).table((16, 8, 4))
    assert {row.role for row in table.rows if row.rule == "muon"} == set(MUON_ROLES)
    for row in table.rows:
        if row.rule == "adam":
            assert row == adam[row.role]
        assert row.initial == adam[row.role].initial
    assert table["value"].powers["epsilon"] == "L^-1 γ^-1"
    assert muon("heads").table((16, 8, 4))["value"].powers["epsilon"] == "H^-1/2 L^-1 γ^-1"


def polar(matrix):
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def rms(array):
    return float(np.sqrt(np.square(array).mean()))


def test_a_square_block_moves_any_input_by_one(rng):
    x = rng.normal(size=(32, 5)) ** 3
    assert rms(polar(rng.normal(size=(32, 32))) @ x) == pytest.approx(rms(x), rel=1e-12)
    tall, wide = rng.normal(size=(64, 32)), rng.normal(size=(32, 64))
    assert rms(polar(tall) @ x) == pytest.approx(rms(x) / 2**0.5)  # (cols/rows)^(1/2)
    inside = wide.T @ rng.normal(size=(32, 5))  # in the row space
    assert rms(polar(wide) @ inside) == pytest.approx(rms(inside) * 2**0.5)


def test_blocks_of_heads_grow_where_whole_matrices_do_not(rng):
    """One gradient of a value and of an output matrix, exact polar factors, inputs whose spectrum falls off."""
    grown = {}
    for heads in (2, 16):
        n, d, tokens = 8, 8 * heads, 64
        x = rng.normal(size=(d, tokens)) * (np.arange(tokens) + 1.0) ** -0.5
        x /= np.sqrt(np.square(x).mean(0))
        value = rng.normal(size=(d, tokens)) @ x.T
        u, back = rng.normal(size=(2, d, tokens))
        output = back @ u.T
        blocks = [polar(part) @ x for part in np.split(value, heads)]
        summed = sum(
            polar(part) @ own for part, own in zip(np.split(output, heads, 1), np.split(u, heads), strict=True)
        )
        grown[heads] = [rms(polar(value) @ x), rms(np.concatenate(blocks)), rms(summed) * (n / d) ** 0.5]
        assert rms(polar(output) @ u) == pytest.approx(rms(u), rel=0.2 if heads == 16 else 0.02)
    assert grown[2][0] == pytest.approx(1, rel=1e-6)
    assert grown[16][1] > 1.4 * grown[2][1]


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_changes_at_the_base_and_a_step_takes_its_share(split):
    for factor in FACTORS:
        p = muon(split, factor)
        at_base = p.table(BASE)
        assert all((row.learning_rate, row.epsilon, row.rate_factor) == (1, 1, 1) for row in at_base.rows)
        numbers = p.table((8, 16, 6)).at(3e-3, weight_decay=0.05, muon=TUNED.muon)
        for role, own in numbers.items():
            share = 0.02 * 0.1 if role in MUON_ROLES else 3e-3 * 0.05
            assert own["learning_rate"] * own["weight_decay"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("p", "shape", "said"),
    [
        (muon("fused", logit=0.5), Shape(16, 4, 2), "one fused matrix has one"),
        (muon("fused", base=Shape(8, 4, 2, key_heads=4)), Shape(8, 4, 2, key_heads=2), "in one fused matrix"),
        (Parametrization(base=BASE, optimizer="sgd"), Shape(8, 4, 2, stream=64), "random to an aligned sum"),
        (
            Parametrization(base=Shape(8, 4, 2, key_heads=4), optimizer="sgd"),
            Shape(8, 4, 2, key_heads=2),
            "query heads for each key head",
        ),
    ],
)
def test_a_ratio_without_a_power_is_refused_by_name(p, shape, said):
    with pytest.raises(UsageError, match=said):
        p.table(shape)


def test_underived_roles_and_gains_behind_queries_are_refused_by_name():
    with pytest.raises(UsageError, match="query_down, query_up, key_value_down"):
        apply_role_map({"q_a": "latent"}, BASE, ["q_a"])
    names = {"q": "query", "q_norm": "query_gain", "gate": "mlp_gate"}
    half = Parametrization(0.5, base=BASE)
    for shape, refused in ((Shape(16, 4, 2), True), (Shape(8, 8, 2), False)):
        architecture = apply_role_map(names, shape, list(names))
        if refused:
            with pytest.raises(UsageError, match="gains is not derived"):
                parameter_targets(half, architecture, TUNED)
    # At exponent 1 the norm would eat a factor in W_Q: the gain carries it, in init and rate.
    q, gain, gate = parameter_targets(Parametrization(base=BASE), apply_role_map(names, (32, 4, 2), list(names)), TUNED)
    assert (gain.factors.initial, gain.factors.learning_rate) == pytest.approx((0.5, 0.5))
    assert (q.factors.initial, q.factors.learning_rate) == pytest.approx((0.5, 0.25))
    assert gate.factors == q.factors


def test_wrong_use_is_refused():
    for wrong in ({"split": "rows"}, {"factor": "moonlight"}):
        with pytest.raises(UsageError, match="choose "):
            Muon(**wrong)
    with pytest.raises(UsageError, match=r"muon=MuonHyperparameters\(learning_rate"):
        muon().table((8, 8, 2)).at(1e-3)
    with pytest.raises(UsageError, match="expected a positive number"):
        MuonHyperparameters(0.0)
    pytest.importorskip("jax")
    with pytest.raises(UsageError, match="three arrays here"):
        Muon("fused").dimensions(None)


def test_a_base_without_grouped_queries_states_its_key_heads():
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    plain, grouped = (read_body(sizes | {"num_key_value_heads": number}).shape for number in (8, 2))
    rows = muon(factor="none", base=plain).table(grouped)
    assert (rows["key"].learning_rate, rows["value"].learning_rate, rows["query"].learning_rate) == (0.5, 0.5, 1.0)


# Words and formulas as the frameworks' own sources have them; r, c are rows (outputs) and columns (inputs).
WORDS = {
    "torch:original": lambda r, c: max(1, r / c) ** 0.5,
    "torch:match_rms_adamw": lambda r, c: 0.2 * max(r, c) ** 0.5,
    "megatron:shape_scaling": lambda r, c: max(1, r / c) ** 0.5,
    "megatron:spectral": lambda r, c: max(r, c) ** 0.5,
    "megatron:unit_rms_norm": lambda r, c: (r / c) ** 0.5,
    "dion:spectral_norm": lambda r, c: (r / c) ** 0.5,
    "dion:rms_norm": lambda r, c: 0.2 * max(r, c) ** 0.5,
    "sqrt(r/c)": lambda r, c: (r / c) ** 0.5,
    "√max(r, c)": lambda r, c: max(r, c) ** 0.5,
    "sqrt(max(1,r/c))": lambda r, c: max(1, r / c) ** 0.5,
    "0.2*sqrt(max(r, c))": lambda r, c: 0.2 * max(r, c) ** 0.5,
}


@pytest.mark.parametrize("word", WORDS)
def test_a_framework_word_is_the_formula_of_its_framework(word):
    for sides in ((64, 64), (256, 64), (64, 256), (3, 7)):
        assert FACTORS[Muon(factor=word).factor].at(*sides) == pytest.approx(WORDS[word](*sides), rel=1e-12)


@pytest.mark.parametrize("word", ["spectral", "rms", "", "Megatron:spectral", "shape", None, "sqrt(r)/c", "√r/c"])
def test_a_word_of_several_formulas_is_refused_with_all_of_them(word):
    with pytest.raises(UsageError, match="shape factor") as caught:
        find_factor(word)
    if word == "spectral":
        assert "megatron:spectral for √max(r, c)" in str(caught.value)
        assert "dion:spectral_norm for √(r/c)" in str(caught.value)

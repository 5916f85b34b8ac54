"""Both checks on planted growth and planted optima, and the grid's refusals."""

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.scaling import Parametrization, coordinate_check, transfer_check
from manyheads.scaling.axes import shapes_along
from manyheads.scaling.checks import transfer_check as transfer
from manyheads.scaling.checks.coordinate_check import check_growth, finite_size_bias
from manyheads.scaling.checks.growth_powers import QUANTITIES, least_growth, required_growth
from manyheads.scaling.checks.transfer_check import decide_drift, find_optimum, search_optimum
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
SHAPES = shapes_along("key_dim", BASE, (4, 8, 32))
RATES = np.geomspace(1e-4, 1e-1, 13)


def planted(rng, exponents, spread=0.05):
    """Measure quantities that grow with N by the given exponents, with log-normal spread over seeds."""

    def measure(shape, seed):
        noise = np.random.default_rng([int(rng.integers(2**31)), seed]).normal(size=len(QUANTITIES))
        grown = {name: shape.key_dim ** exponents.get(name, 0.0) for name in QUANTITIES}
        return {name: [grown[name] * np.exp(spread * z)] for name, z in zip(QUANTITIES, noise, strict=True)}

    return measure


@pytest.mark.parametrize("logit_exponent", [0.5, 1.0])
def test_planted_growth_is_found_in_the_module_that_has_it(rng, logit_exponent):
    p = Parametrization(logit_exponent, base=BASE)
    right = {name: power.key_dim for name, power in required_growth(p).items()}
    # Eight seeds of spread 0.05 over sizes x 8 know an exponent to 0.04 (99.99%): tolerances are 0.15 and 0.35.
    assert coordinate_check(p, SHAPES, planted(rng, right), checkpoints=(4,)).outcome == "holds"
    for name in QUANTITIES:
        wrong = right | {name: right[name] + 0.6}
        found = coordinate_check(p, SHAPES, planted(rng, wrong), checkpoints=(4,))
        assert [growth.quantity for growth in found.broken] == [name]
        assert found.outcome == "refuted"
        assert "grows" in found.broken[0].sentence()


def test_a_random_sum_is_no_failure_where_theory_has_one_and_is_one_elsewhere(rng):
    for logit_exponent, outcome in ((1.0, "holds"), (0.5, "refuted")):
        p = Parametrization(logit_exponent, base=BASE)
        right = {name: power.key_dim for name, power in required_growth(p).items()}
        slow = right | {"logits": -0.5}
        assert coordinate_check(p, SHAPES, planted(rng, slow), checkpoints=(4,)).outcome == outcome


def test_gradient_descent_may_start_slowly_but_must_arrive(rng):
    def measure(shape, seed):
        noise = np.exp(0.02 * rng.normal(size=2))
        return {name: noise * (shape.key_dim**-0.5 if name == "query_by_weights" else 1) for name in QUANTITIES}

    for optimizer, steps in (("sgd", {20}), ("adam", {4, 20})):
        p = Parametrization(base=BASE, optimizer=optimizer)
        broken = coordinate_check(p, SHAPES, measure, checkpoints=(4, 20)).broken
        assert {growth.step for growth in broken} == steps
        assert {growth.quantity for growth in broken} == {"query_by_weights"}
        assert "shrinks" in broken[0].sentence()


@pytest.mark.parametrize("scheme", ["mup", "standard"])
def test_plain_rates_break_the_queries_of_logits_over_the_root_of_n(rng, scheme):
    p = Parametrization(0.5, base=BASE, scheme=scheme)
    flat = dict.fromkeys(QUANTITIES, 0.0)
    broken = coordinate_check(p, SHAPES, planted(rng, flat), checkpoints=(4,)).broken
    assert [growth.module for growth in broken] == [QUANTITIES["query_by_weights"]]


def test_what_finite_size_does_is_the_slope_of_a_correction():
    for sizes in ((4, 8, 32), (2, 4, 16), (3, 50)):
        expected = np.polyfit(np.log(sizes), np.log1p(np.asarray(sizes, float) ** -0.5), 1)[0]
        assert finite_size_bias(sizes) == pytest.approx(expected, rel=1e-9)
    for p in (Parametrization(a, b, optimizer=o) for a in (0.5, 1) for b in (0.5, 0.75, 1) for o in ("adam", "sgd")):
        required = required_growth(p)
        for early in (False, True):
            for name, least in least_growth(p, early).items():
                assert all(getattr(least, axis) <= getattr(required[name], axis) for axis in ("key_dim", "depth"))
    with pytest.raises(UsageError, match="above"):
        check_growth("outputs", "heads", (2, 4), np.ones((2, 2)), 0.0, 0.1, least=0.5)


def test_noise_is_called_noise(rng):
    p = Parametrization(base=BASE)
    found = coordinate_check(p, SHAPES, planted(rng, {}, spread=5.0), checkpoints=(4,), seeds=range(3))
    assert found.outcome != "holds"
    assert all("seeds" in growth.sentence() for growth in found.growths if growth.outcome == "inconclusive")


def test_divergence_is_a_failure(rng):
    def measure(shape, seed):
        value = np.nan if shape.key_dim == 32 else 1.0
        return {name: [value] for name in QUANTITIES}

    found = coordinate_check(Parametrization(base=BASE), SHAPES, measure, checkpoints=(4,))
    assert found.outcome == "refuted"
    assert "diverges along N" in found.growths[0].sentence()


def flat(shape, seed):
    """Measure one at a single checkpoint."""
    return {name: [1.0] for name in QUANTITIES}


def bowl(exponent, spread, width=0.5):
    """Return losses whose best rate drifts by a power of N, with a spread of the optimum over seeds (decades)."""

    def losses(shape, learning_rates, seed):
        centre = -2.5 + exponent * np.log10(shape.key_dim / 8)
        centre += spread * np.random.default_rng([seed, shape.key_dim]).normal()
        loss = 1 - np.exp(-((np.log10(learning_rates) - centre) ** 2) / width)
        return np.where(np.log10(learning_rates) > centre + 1.2, np.nan, loss)

    return losses


@pytest.mark.parametrize(("exponent", "outcome"), [(0.0, "holds"), (-1.0, "refuted"), (0.6, "refuted")])
def test_a_planted_drift_is_found(exponent, outcome):
    found = transfer_check(SHAPES, RATES, bowl(exponent, 0.02))
    assert found.outcome == outcome
    fitted, low, high = found.decades
    assert low <= exponent * np.log10(8) + 0.02
    assert high >= exponent * np.log10(8) - 0.02
    assert fitted == pytest.approx(exponent * np.log10(8), abs=0.08)
    assert found.sentence().startswith("transfers" if outcome == "holds" else "drifts by a factor")


def test_too_few_seeds_are_undecided_and_say_how_many():
    found = transfer_check(SHAPES, RATES, bowl(0.0, 0.15), seeds=(0, 1))
    assert found.outcome == "inconclusive"
    assert found.sentence().startswith("undecided")


def test_bounds_without_meaning_are_not_printed():
    """Two seeds that are far apart have an interval over dozens of powers of ten."""
    learning_rates = np.array([[1e-3, 1e-3, 1e-3], [1e-3, 1e-2, 2e-1]])
    found = decide_drift("key_dim", (4, 8, 32), learning_rates)
    assert found.drift.factor_per_doubling.high > 1e10
    assert "per doubling of N, to which 2 seeds set no bounds), needs" in found.sentence()
    assert "[" not in found.sentence()
    fallen = decide_drift(
        "key_dim", (4, 8, 32), np.array([[1, 1e-4, 1e-11], [1, 1.1e-4, 1.01e-11], [1, 1e-4, 1.1e-11]])
    )
    assert fallen.outcome == "refuted"
    assert "drifts by a factor 2e-04 [" in fallen.sentence()
    assert "0.00" not in fallen.sentence()


def test_the_parabola_is_exact_and_the_ends_are_refused():
    for best in (-2.9, -2.0, -1.71):
        losses = 3 + 0.7 * (np.log10(RATES) - best) ** 2
        assert np.log10(find_optimum(RATES, losses)) == pytest.approx(best, abs=1e-9)
    for place, side in ((0, "below"), (-1, "above")):
        losses = np.ones(13)
        losses[place] = 0.5
        with pytest.raises(CertificateError, match=side):
            find_optimum(RATES, losses)
    with pytest.raises(CertificateError, match="diverged at every learning rate"):
        find_optimum(RATES, np.full(13, np.nan))
    half = np.where(np.arange(13) > 6, np.nan, (np.arange(13) - 6.0) ** 2)  # diverges right above the best
    assert find_optimum(RATES, half) == pytest.approx(RATES[6])


@pytest.mark.parametrize(
    ("centre", "outcome", "points"), [(-2, "inside", 7), (-3.2, "inside", 10), (0.2, "inside", 10)]
)
def test_a_grid_widens_until_it_brackets_the_best_rate(centre, outcome, points):
    seen = []

    def losses(learning_rates):
        seen.extend(learning_rates)
        return np.where(np.log10(learning_rates) > centre + 2, np.nan, (np.log10(learning_rates) - centre) ** 2)

    found = search_optimum(np.geomspace(1e-3, 1e-0, 7), losses)
    assert (found.outcome, len(found.learning_rates), len(seen)) == (outcome, points, points)
    assert np.log10(found.best) == pytest.approx(centre, abs=1e-9)
    assert (np.diff(found.learning_rates) > 0).all()
    np.testing.assert_allclose(found.losses, losses(found.learning_rates))


def test_a_search_ends_and_says_on_which_side():
    grid = np.geomspace(1e-3, 1e-0, 7)
    below = search_optimum(grid, lambda learning_rates: learning_rates)
    above = search_optimum(grid, lambda learning_rates: -learning_rates)
    never = search_optimum(grid, lambda learning_rates: np.full(len(learning_rates), np.nan))
    assert (below.outcome, above.outcome, never.outcome) == ("below", "above", "below")
    assert (below.best, above.best) == (below.learning_rates[0], above.learning_rates[-1])
    assert len(never.learning_rates) == 13
    with pytest.raises(CertificateError, match="below"):
        transfer_check(SHAPES, grid, lambda shape, learning_rates, seed: learning_rates)


def test_a_final_loss_is_the_mean_of_the_last_eighth_in_pieces_of_three(monkeypatch):
    pytest.importorskip("jax")
    from manyheads.scaling.trained import transformers

    calls = []

    def sweep(task, parametrization, shape, recipe, learning_rates, key):
        calls.append(len(learning_rates))
        return np.outer(learning_rates, np.arange(recipe.steps))

    monkeypatch.setattr(transformers, "sweep_losses", sweep)
    learning_rates = np.array([1.0, 2.0, 4.0, 8.0])
    found = transfer.final_losses(None, None, BASE, transformers.Recipe(16), learning_rates, None)
    np.testing.assert_allclose(found, 14.5 * learning_rates)
    assert calls == [3, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda: find_optimum([1e-3, 1e-2], [1, 2]),
        lambda: find_optimum([1e-3, 1e-2, 2e-2], [2, 1, 2]),
        lambda: find_optimum([1e-1, 1e-2, 1e-3], [2, 1, 2]),
        lambda: transfer_check([BASE, BASE], RATES, bowl(0, 0)),
        lambda: transfer_check([BASE, Shape(4, 8, 2)], RATES, bowl(0, 0)),
        lambda: transfer_check(SHAPES, RATES, bowl(0, 0), seeds=(0,)),
        lambda: transfer_check(SHAPES, RATES, bowl(0, 0.1), seeds=(0, 1, 0)),
        lambda: coordinate_check(Parametrization(), SHAPES, flat, checkpoints=(4,), seeds=(3, 3)),
        lambda: coordinate_check(Parametrization(), SHAPES, flat, checkpoints=(20, 4)),
        lambda: coordinate_check(Parametrization(), SHAPES, flat, checkpoints=(4, 20)),
        lambda: coordinate_check(Parametrization(), SHAPES[:1], flat, checkpoints=(4,)),
        lambda: coordinate_check(Parametrization(), SHAPES, lambda shape, seed: {"outputs": [1]}, checkpoints=(4,)),
        lambda: shapes_along("width", BASE, (2, 4)),
    ],
)
def test_wrong_use_is_refused(call):
    with pytest.raises(UsageError):
        call()


def every(value):
    """Measure the same number for all quantities."""
    return lambda shape, seed: {name: [value] for name in QUANTITIES}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measure": every(0.0)}, r"outputs = 0 \(\(N, H, L\) = \(4, 4, 2\), seed 0\), no update"),
        ({"measure": every(-1.0)}, "outputs = -1"),
        ({"measure": every(0.5)}, "the same numbers for all 8 seeds"),
        ({"measure": lambda shape, seed: every(1.0)(shape, seed) if not seed else {}}, "returned no .*seed 1"),
        ({"seeds": 8}, r"such as range\(8\)"),
        ({"tolerance": 0.2}, "one for each axis, such as {'key_dim': 0.25}"),
        ({"tolerance": {"depth": 0.2}}, "one for each axis"),
    ],
)
def test_a_coordinate_check_of_what_is_none_says_what_is_wrong(rng, changes, said):
    call = {"measure": planted(rng, {}), "seeds": range(8)} | changes
    with pytest.raises(UsageError, match=said):
        coordinate_check(Parametrization(base=BASE), SHAPES, checkpoints=(4,), **call)
    assert coordinate_check(Parametrization(base=BASE), SHAPES, every(np.inf), checkpoints=(4,)).outcome == "refuted"


def test_what_diverged_is_no_motion_of_size_zero(rng):
    """A stream that has overflown is divided by infinity in the next norm, and moves what follows by nothing."""
    measured = planted(rng, {})

    def measure(shape, seed):
        lost = {"outputs": [np.nan], "residual": [np.inf], "query_by_weights": [0.0]}
        return measured(shape, seed) | (lost if (shape.key_dim, seed) == (32, 3) else {})

    found = coordinate_check(Parametrization(base=BASE), SHAPES, measure, checkpoints=(4,))
    diverged = {growth.quantity for growth in found.growths if growth.fit is None}
    assert diverged == {"outputs", "residual", "query_by_weights"}


@pytest.mark.parametrize("loss", [1.0, None, [1.0], [[1.0]] * len(RATES)])
def test_losses_that_are_not_one_a_rate_are_refused(loss):
    with pytest.raises(UsageError, match=rf"for {len(RATES)} rates: return one for each rate"):
        transfer_check(SHAPES, RATES, lambda shape, learning_rates, seed: loss)
    with pytest.raises(UsageError, match="widenings=-1"):
        search_optimum(RATES, lambda learning_rates: learning_rates, widenings=-1)


def test_an_optimum_that_is_not_found_is_said_with_shape_and_seed():
    def losses(shape, learning_rates, seed):
        return -learning_rates if (shape.key_dim, seed) == (8, 1) else np.log(learning_rates / 3e-3) ** 2

    with pytest.raises(CertificateError, match=r"\(N, H, L\) = \(8, 4, 2\), seed 1: the least loss is at"):
        transfer_check(SHAPES, RATES, losses)

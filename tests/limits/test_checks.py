"""Both checks on planted growth and planted optima, and the grid's refusals."""

import numpy as np
import pytest

from manyheads.attention import Shape
from manyheads.errors import CertificateError, UsageError
from manyheads.limits import Parametrization, coordinate_check, find_optimum, shapes_along, transfer_check
from manyheads.limits.coordinates import required_growth
from manyheads.limits.finite import QUANTITIES

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


def bowl(exponent, spread, width=0.5):
    """Return losses whose best rate drifts by a power of N, with a spread of the optimum over seeds (decades)."""

    def losses(shape, rates, seed):
        centre = -2.5 + exponent * np.log10(shape.key_dim / 8)
        centre += spread * np.random.default_rng([seed, shape.key_dim]).normal()
        loss = 1 - np.exp(-((np.log10(rates) - centre) ** 2) / width)
        return np.where(np.log10(rates) > centre + 1.2, np.nan, loss)

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


def test_the_parabola_is_exact_and_the_ends_are_refused():
    for best in (-2.9, -2.0, -1.71):
        losses = 3 + 0.7 * (np.log10(RATES) - best) ** 2
        assert np.log10(find_optimum(RATES, losses)) == pytest.approx(best, abs=1e-9)
    for place, side in ((0, "below"), (-1, "above")):
        losses = np.ones(13)
        losses[place] = 0.5
        with pytest.raises(CertificateError, match=side):
            find_optimum(RATES, losses)
    with pytest.raises(CertificateError, match="diverged at every rate"):
        find_optimum(RATES, np.full(13, np.nan))
    half = np.where(np.arange(13) > 6, np.nan, (np.arange(13) - 6.0) ** 2)  # diverges right above the best
    assert find_optimum(RATES, half) == pytest.approx(RATES[6])


@pytest.mark.parametrize(
    "call",
    [
        lambda: find_optimum([1e-3, 1e-2], [1, 2]),
        lambda: find_optimum([1e-3, 1e-2, 2e-2], [2, 1, 2]),
        lambda: find_optimum([1e-1, 1e-2, 1e-3], [2, 1, 2]),
        lambda: transfer_check([BASE, BASE], RATES, bowl(0, 0)),
        lambda: transfer_check([BASE, Shape(4, 8, 2)], RATES, bowl(0, 0)),
        lambda: transfer_check(SHAPES, RATES, bowl(0, 0), seeds=(0,)),
        lambda: coordinate_check(Parametrization(), SHAPES, lambda shape, seed: {"outputs": [1]}, checkpoints=(4,)),
        lambda: shapes_along("width", BASE, (2, 4)),
    ],
)
def test_wrong_use_is_refused(call):
    with pytest.raises(UsageError):
        call()

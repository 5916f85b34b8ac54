"""Which networks of a study are one and the same."""

import jax
import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.comparisons.schemes import SCHEMES, Plan
from manyheads.limits.studies.coordinate_check import CoordinateCheckStudy
from manyheads.limits.studies.head_diversity import HeadDiversity
from manyheads.limits.studies.rate_transfer import RateTransfer
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
SIZES = (("key_dim", (4, 8, 32)), ("heads", (2, 4, 16)), ("depth", (2, 8, 16)))


def test_equal_networks_are_trained_once():
    plan = Plan(BASE, SIZES, tuple(SCHEMES), "adam")
    networks = plan.networks()
    assert len({networks[name, BASE] for name in SCHEMES}) == 1
    deep, wide, many = Shape(8, 4, 16), Shape(32, 4, 2), Shape(8, 16, 2)
    assert networks["standard", deep] == networks["mup", deep] == networks["mup-half-logit", deep]
    assert networks["limits", deep] == networks["half-logit", deep] != networks["half-depth", deep]
    assert networks["limits", many] == networks["half-logit", many] == networks["half-depth", many]
    assert len({networks[name, wide] for name in SCHEMES}) == 5  # a depth exponent is nothing along N
    assert len(plan.cells()) == len(set(networks.values())) == 1 + 2 * (5 + 3 + 3)
    # Width alone differs from the limits in Adam's epsilon only, along N and H.
    small = Plan(BASE, SIZES, tuple(SCHEMES), "adam", epsilon=False).networks()
    assert small["mup", wide] == small["limits", wide]
    assert ("standard", "depth") not in plan.pairs()


def test_a_cell_is_trained_with_its_own_scheme_and_shape():
    plan = Plan(BASE, SIZES, ("standard",), "sgd")
    for cell in plan.cells():
        parametrization, shape = plan.train_with(cell)
        assert (parametrization.scheme, parametrization.optimizer) == ("standard", "sgd")
        assert shape.key_dim == cell["key_dim"]


def test_the_optimizer_and_the_rate_of_head_diversity_reach_its_networks():
    def moved(**fields):
        study = HeadDiversity(base=(4, 2, 2), key_dims=(4, 8), checkpoints=(1, 2), **fields)  # the contract's row
        with jax.enable_x64(True):
            return float(study.train(jax.random.key(0), study.cells()[0])["motion"][1])

    slow, fast = (moved(optimizer="sgd", rate=rate) for rate in (1e-3, 2e-3))
    assert fast == pytest.approx(2 * slow, rel=0.02)
    assert moved(optimizer="sgd") == pytest.approx(300 * slow, rel=0.3)  # its own rate
    assert moved(optimizer="adam", rate=1e-3) > 10 * slow  # a sign is larger than a gradient


def test_all_rates_of_a_search_are_in_the_frame():
    study = RateTransfer()
    rates = study.rates()
    assert rates[6] == pytest.approx(study.lowest)
    assert len(rates) == study.points + 12


def test_best_rates_beyond_the_grid_prove_no_transfer(rng):
    study = RateTransfer(schemes=("limits",), key_dims=(4, 8, 32))
    cells = study.cells()
    coords = {name: ("cell", [cell[name] for cell in cells]) for name in cells[0]}
    best = (("replicate", "cell"), 0.01 * np.exp(0.05 * rng.normal(size=(8, 3))))
    for last, outcome in (("inside", "holds"), ("above", "inconclusive")):
        where = np.full((8, 3), "inside", dtype=object)
        where[5, 2] = last
        trained = xr.Dataset({"best_rate": best, "outcome": (("replicate", "cell"), where)}, coords=coords)
        (verdict,) = study.compare(trained, trained)
        assert verdict.outcome == outcome


@pytest.mark.parametrize(
    "call",
    [
        lambda: Plan(BASE, SIZES, ("maximal",), "adam"),
        lambda: Plan(BASE, (("width", (1, 2)),), ("mup",), "adam"),
        lambda: Plan(BASE, (("heads", (4,)),), ("mup",), "adam"),
        lambda: Plan(BASE, (), ("mup",), "adam"),
        lambda: Plan(BASE, SIZES, ("mup", "mup"), "adam"),
        lambda: Plan(BASE, (SIZES[0], SIZES[0]), ("mup",), "adam"),
        lambda: RateTransfer(schemes=("mup-half-logit",)),
        lambda: RateTransfer(axes=("width",)),
        lambda: RateTransfer(ratio=1.0),
        lambda: RateTransfer(task="speech"),
        lambda: CoordinateCheckStudy(checkpoints=(4, 4)),
        lambda: CoordinateCheckStudy(checkpoints=(0,)),
    ],
)
def test_wrong_use_is_refused(call):
    with pytest.raises(UsageError):
        call()

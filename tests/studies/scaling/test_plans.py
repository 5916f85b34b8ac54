"""Which networks of a study are one and the same."""

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.scaling.coordinate_check import CoordinateCheckStudy
from manyheads.studies.scaling.learning_rates.learning_rate_transfer import LearningRateTransfer
from manyheads.studies.scaling.learning_rates.muon_transfer import MuonTransfer
from manyheads.studies.scaling.muon_coordinates import MuonCoordinates
from manyheads.studies.scaling.shared.parametrizations import LABELS, Plan, parametrization_of
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
SIZES = (("key_dim", (4, 8, 32)), ("heads", (2, 4, 16)), ("depth", (2, 8, 16)))


def test_equal_networks_are_trained_once():
    plan = Plan(BASE, SIZES, tuple(LABELS), "adam")
    networks = plan.networks()
    assert len({networks[name, BASE] for name in LABELS}) == 1
    deep, wide, many = Shape(8, 4, 16), Shape(32, 4, 2), Shape(8, 16, 2)
    assert networks["standard", deep] == networks["mup", deep] == networks["mup-half-logit", deep]
    assert networks["limits", deep] == networks["half-logit", deep] != networks["half-depth", deep]
    assert networks["limits", many] == networks["half-logit", many] == networks["half-depth", many]
    assert len({networks[name, wide] for name in LABELS}) == 5  # a depth exponent is nothing along N
    assert len(plan.cells()) == len(set(networks.values())) == 1 + 2 * (5 + 3 + 3)
    # Width alone differs from the limits in Adam's epsilon only, along N and H.
    small = Plan(BASE, SIZES, tuple(LABELS), "adam", epsilon=False).networks()
    assert small["mup", wide] == small["limits", wide]
    assert ("standard", "depth") not in plan.pairs()


def test_a_cell_is_trained_with_its_own_scheme_and_shape():
    plan = Plan(BASE, SIZES, ("standard",), "sgd")
    for cell in plan.cells():
        parametrization, shape = plan.train_with(**cell)
        assert (parametrization.scheme, parametrization.optimizer) == ("standard", "sgd")
        assert shape.key_dim == cell["key_dim"]


def test_adamw_for_all_weights_stands_beside_muon():
    plan = MuonTransfer(parametrizations=("muon", "mup", "standard")).plan()
    schemes = {name: parametrization_of(name, BASE, "muon") for name in ("mup", "standard")}
    assert [(each.optimizer, each.scheme) for each in schemes.values()] == [("adam", "mup"), ("adam", "standard")]
    networks = plan.networks()
    assert networks["muon", BASE] != networks["mup", BASE] == networks["standard", BASE]
    drifting = {("mup", "depth"), ("standard", "key_dim"), ("standard", "heads")}
    assert drifting <= set(plan.pairs()) <= drifting | {(name, axis) for name in ("muon", "mup") for axis, _ in SIZES}
    with pytest.raises(UsageError, match=r"parametrizations=\('mup',\): choose from"):
        MuonCoordinates(parametrizations=("mup",))


def test_all_rates_of_a_search_are_in_the_frame():
    study = LearningRateTransfer()
    learning_rates = study.learning_rates()
    assert learning_rates[6] == pytest.approx(study.lowest)
    assert len(learning_rates) == study.points + 12


def test_optimal_learning_rates_beyond_the_grid_prove_no_transfer(rng):
    study = LearningRateTransfer(parametrizations=("limits",), key_dims=(4, 8, 32))
    cells = study.cells()
    coords = {name: ("cell", [cell[name] for cell in cells]) for name in cells[0]}
    best = (("replicate", "cell"), 0.01 * np.exp(0.05 * rng.normal(size=(8, 3))))
    for last, outcome in (("inside", "holds"), ("above", "inconclusive")):
        where = np.full((8, 3), "inside", dtype=object)
        where[5, 2] = last
        trained = xr.Dataset({"optimal_learning_rate": best, "outcome": (("replicate", "cell"), where)}, coords=coords)
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
        lambda: LearningRateTransfer(parametrizations=("mup-half-logit",)),
        lambda: LearningRateTransfer(axes=("width",)),
        lambda: LearningRateTransfer(ratio=1.0),
        lambda: LearningRateTransfer(task="speech"),
        lambda: CoordinateCheckStudy(checkpoints=(4, 4)),
        lambda: CoordinateCheckStudy(checkpoints=(0,)),
    ],
)
def test_wrong_use_is_refused(call):
    with pytest.raises(UsageError):
        call()

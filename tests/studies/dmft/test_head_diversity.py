"""Head diversity under SGD and Adam: networks, expectations, panels, and options of gradient descent."""

import jax
import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.dmft.head_diversity import HeadDiversity
from manyheads.study.base import decide
from manyheads.study.execution.units import predict, train

SMALL = {"base_key_dim": 4, "heads": 2, "depth": 2, "key_dims": (4, 8)}


@pytest.mark.slow
def test_the_optimizer_and_the_learning_rate_reach_the_networks():
    def update(**fields):
        study = HeadDiversity(**SMALL, steps=1, **fields)
        with jax.enable_x64(True):
            return float(train(study, jax.random.key(0), study.cells()[0])["update"][0])

    slow, fast = (update(optimizer="sgd", learning_rate=rate) for rate in (1e-3, 2e-3))
    assert fast == pytest.approx(2 * slow, rel=0.02)
    assert update(optimizer="sgd") == pytest.approx(300 * slow, rel=0.3)  # its own learning rate
    assert update(optimizer="adam", learning_rate=1e-3) > 10 * slow  # a sign is larger than a gradient


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("adam", ["refuted", None]), ("sgd", ["holds", "holds"])], ids=["adam", "sgd"]
)
def test_heads_trained_by_adam_are_expected_to_be_no_copies(optimizer, expected):
    study = HeadDiversity(optimizer=optimizer)
    cells = study.cells()
    names = ("variance_start", "variance_end", "update")
    trained = xr.Dataset(
        {name: (("cell", "replicate", "network"), np.ones((len(cells), 2, 1))) for name in names},
        coords={name: ("cell", [cell[name] for cell in cells]) for name in cells[0]},
    )
    predicted = predict(study, jax.random.key(0)).expand_dims(prediction=2)
    verdicts = decide(study, predicted, trained)
    assert [verdict.expected for verdict in verdicts if " steps of " in verdict.claim] == expected
    panel, *_ = study.panels(predicted, trained)
    assert panel.title == "Update of the attention logits"
    assert {value for curve in panel.curves for value in curve.y} == {1.0}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"optimizer": "lion"}, "optimizer"),
        ({"optimizer": "adam", "richness": 1.5}, "richness with optimizer='adam'"),
        ({"optimizer": "adam", "task": "music"}, "task"),
        ({"optimizer": "sgd", "learning_rate": -1.0}, "learning_rate"),
        ({"optimizer": "sgd", "steps": -1}, "steps"),
        ({"heads": 1}, "heads"),
        ({"key_dims": (4,)}, "key_dims"),
        ({"networks": 2}, "networks"),
    ],
)
def test_wrong_use_is_refused(fields, match):
    with pytest.raises(UsageError, match=match):
        HeadDiversity(**fields)

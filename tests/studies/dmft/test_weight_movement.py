"""Relative movement of the attention matrices: what is recorded, and what the study concludes from made-up results."""

import jax
import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.dmft.weight_movement import EXPONENTS, WeightMovement
from manyheads.study.execution.units import predict
from manyheads.theory.dmft.finite.ensembles import MATRICES, Network, train_networks
from manyheads.theory.dmft.finite.problems import digits_problem
from manyheads.theory.dmft.problem import Problem


def test_the_movement_after_one_step_follows_from_the_kernels(rng, seed):
    """With single tokens sigma = 1, so that |dW_O|^2 = kappa^2 d sum_ab G_ab U_ab, and queries and keys rest."""
    problem = Problem(rng.standard_normal((3, 1, 6)), rng.choice([-1.0, 1.0], 3), steps=2, learning_rate=0.4)
    trained = train_networks(problem, Network(4, 64), [seed], movement=True)
    assert trained["movement"].dims == ("seed", "step", "matrix")
    assert (trained["movement"].values[0, 0] == 0).all()
    moved = dict(zip(MATRICES, trained["movement"].values[0, 1], strict=True))
    backward, stream = (trained[name].values[0, 0] for name in ("backward", "stream"))
    wanted = 0.4 * np.sqrt((backward[-1] * stream[0]).sum() / 256)  # kappa is the learning rate; U is near the stream's
    assert moved["output"] == pytest.approx(wanted, rel=0.15)
    assert moved["value"] == pytest.approx(wanted, rel=0.15)
    assert moved["query"] == moved["key"] == 0


def test_networks_are_the_same_without_the_record(seed):
    problem = digits_problem(samples=2, tests=0, steps=2)
    with_it, without = (train_networks(problem, Network(2, 2), [seed], movement=wanted) for wanted in (True, False))
    assert "movement" not in without
    xr.testing.assert_allclose(without, with_it.drop_vars(["movement", "matrix"]), rtol=1e-9)


def made_up(study, rng, powers, stream):
    cells = study.cells()

    def values(power, *sizes):
        found = [np.full((5, *sizes), cell["depth"] ** power[cell["depth_exponent"]]) for cell in cells]
        noise = 0.02 * rng.standard_normal((5, len(cells), *sizes))
        return np.stack(found, 1) * np.exp(noise)

    trained = xr.Dataset(
        {
            "movement": (("replicate", "cell", "matrix"), values(powers, len(MATRICES))),
            "stream": (("replicate", "cell"), values(stream)),
        },
        coords={name: ("cell", [cell[name] for cell in cells]) for name in cells[0]} | {"matrix": list(MATRICES)},
    )
    with jax.enable_x64(True):
        return predict(study, jax.random.key(0)), trained


@pytest.mark.parametrize(("powers", "outcome"), [({1.0: 0.0, 0.5: -0.5}, "holds"), ({1.0: -0.5, 0.5: 0.0}, "refuted")])
def test_weights_move_with_their_powers_of_the_depth_or_do_not(powers, outcome, rng):
    study = WeightMovement()
    results = made_up(study, rng, powers, dict.fromkeys(EXPONENTS, 0.0))
    verdicts = {verdict.claim: verdict.outcome for verdict in study.compare(*results)}
    assert {found for claim, found in verdicts.items() if "scales as L" in claim} == {outcome}
    other = "refuted" if outcome == "holds" else "holds"
    assert {found for claim, found in verdicts.items() if "movement of W" in claim and "independent" in claim} == {
        other
    }
    assert {found for claim, found in verdicts.items() if "stream" in claim} == {"holds"}
    assert study.panels(*results)


def test_features_that_stop_moving_with_depth_are_seen(rng):
    study = WeightMovement()
    results = made_up(study, rng, {1.0: 0.0, 0.5: -0.5}, dict.fromkeys(EXPONENTS, -0.5))
    assert {verdict.outcome for verdict in study.compare(*results) if "stream" in verdict.claim} == {"refuted"}


@pytest.mark.parametrize("wrong", [{"depths": (4,)}, {"depths": (8, 4)}, {"networks": 0}, {"task": "music"}])
def test_what_cannot_be_judged_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        WeightMovement(**wrong)

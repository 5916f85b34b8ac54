"""Logit exponents at fixed steps and at fixed compute: what the study concludes from made-up losses."""

import jax
import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.scaling.text.logit_exponent import LogitExponent
from manyheads.study.execution.units import predict


def made_up(study, rng, gaps):
    """Losses that fall with steps and with N; at the largest N exponent 1/2 is off by `gaps` (step,) in log loss."""
    cells, replicates = study.cells(), 8
    fall = np.log(3.5) - 0.3 * np.linspace(0, 1, study.steps)
    noise = 0.1 * rng.standard_normal((replicates, study.steps))  # of the batches, the same for all
    losses = []
    for cell in cells:
        large = cell["key_dim"] == study.key_dims[-1]
        gap = gaps if large and cell["logit_exponent"] == 0.5 else 0.0
        own = 0.001 * rng.standard_normal((replicates, study.steps)) if large else 0.0
        losses.append(np.exp(fall + noise + gap + own - 0.05 * large))
    trained = xr.Dataset(
        {"loss": (("replicate", "cell", "step"), np.stack(losses, 1))},
        coords={name: ("cell", [cell[name] for cell in cells]) for name in cells[0]},
    )
    with jax.enable_x64(True):
        return predict(study, jax.random.key(0)), trained


def outcome(study, results, word):
    (found,) = {verdict.outcome for verdict in study.compare(*results) if word in verdict.claim}
    return found


@pytest.mark.parametrize(("early", "late"), [(0.02, -0.02), (-0.02, 0.02)])
def test_the_better_exponent_is_told_at_fixed_steps_and_at_fixed_compute(early, late, rng):
    study = LogitExponent()
    gaps = np.where(np.arange(study.steps) < study.bought(study.key_dims[-1]), early, late)
    found = made_up(study, rng, gaps)
    assert outcome(study, found, "and fixed steps the loss") == ("holds" if late < 0 else "refuted")
    assert outcome(study, found, "and fixed compute the loss") == ("holds" if early > 0 else "refuted")
    assert outcome(study, found, "train one network") == "holds"
    assert outcome(study, found, "Logit exponent 1: at fixed steps") == "holds"
    assert study.panels(*found)


def test_another_base_and_larger_networks_that_are_worse_are_seen(rng):
    study = LogitExponent()
    predicted, trained = made_up(study, rng, np.zeros(study.steps))
    small = (trained["key_dim"] == study.key_dims[0]) & (trained["logit_exponent"] == 0.5)
    other = trained.assign(loss=trained["loss"] * xr.where(small, 0.8, 1.0))
    assert outcome(study, (predicted, other), "train one network") == "refuted"
    assert outcome(study, (predicted, other), "Logit exponent 1/2: at fixed steps") == "refuted"


def test_fixed_compute_buys_steps_as_the_cost_of_a_step_falls():
    study = LogitExponent()
    small, large = (study.flops({"key_dim": size}) for size in study.key_dims)
    assert study.bought(study.key_dims[-1]) == study.steps * small // large
    assert 10 < large / small < 16  # four times the width: 16 times the matrices, less of all else


@pytest.mark.parametrize("wrong", [{"key_dims": (8,)}, {"steps": 20}, {"learning_rate": 0.0}, {"richness": -1.0}])
def test_what_cannot_be_judged_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        LogitExponent(**wrong)

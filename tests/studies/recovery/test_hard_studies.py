"""The studies of hard layers and of broken assumptions: what they cannot be run with, and how they decide."""

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.refusals import IllConditioned
from manyheads.studies.recovery.hard_instances import LAYERS, HardInstances
from manyheads.studies.recovery.violations import Violations
from manyheads.study import Verdict


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: HardInstances(parity=(16, 7)), IllConditioned),
        (lambda: HardInstances(wave=(24, 6, 12)), UsageError),
        (lambda: HardInstances(wave=(24, 16)), UsageError),
        (lambda: HardInstances(samples=10), UsageError),
        (lambda: Violations(violations=("benign", "crooked")), UsageError),
        (lambda: Violations(violations=("parity",)), UsageError),
        (lambda: Violations(heads=1), UsageError),
    ],
)
def test_sizes_that_make_no_study_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_the_full_sizes_are_sizes():
    assert HardInstances.full().wave == (24, 16, 12)
    assert len(Violations.full().cells()) == len(Violations.full().violations) == 17


def outcomes(verdicts: tuple[Verdict, ...]) -> list[str]:
    return [verdict.outcome for verdict in verdicts]


def test_a_student_that_learns_a_hard_layer_refutes_its_hardness(rng):
    names = list(LAYERS)
    figures = {
        "unexplained": np.array([[1.2], [1e-20], [1.1], [1e-20]]) * rng.uniform(0.9, 1.1, (4, 6)),
        "low_share": np.array([[1e-28], [np.nan], [1e-3], [np.nan]]) * np.ones((4, 6)),
        "unmasked": np.array([[1.0], [np.nan], [1.0], [np.nan]]) * np.ones((4, 6)),
    }
    coordinates = {"layer": ("cell", names), "cell": names}
    trained = xr.Dataset({name: (("cell", "replicate"), values) for name, values in figures.items()}, coordinates)
    study = HardInstances()
    assert outcomes(study.compare(xr.Dataset(), trained)) == ["holds"] * 6
    learned = trained.copy(deep=True)
    learned["unexplained"][0] *= 1e-6
    learned["unexplained"][3] = 0.01
    learned["unmasked"][2, 0] = 0.0
    expected = ["refuted", "holds", "refuted", "holds", "holds", "refuted"]
    assert outcomes(study.compare(xr.Dataset(), learned)) == expected


def test_a_wrong_layer_that_is_returned_refutes_the_claim(rng):
    study = Violations(violations=("benign", "cancelled", "parity"))
    figures = {
        "error": np.array([[-30.0], [-29.0], [np.nan]]),
        "refused": np.array([[0.0], [0.0], [1.0]]),
        "warned": np.ones((3, 1)),
        "student": np.array([[-30.0], [-29.0], [-2.0]]),
        "before": np.array([[-4.0], [-0.5], [-1.0]]),
        "signless_error": np.array([[1e-12], [1e-12], [1.0]]),
    }
    tables = {
        name: (("cell", "replicate"), values + 0.1 * rng.uniform(-1, 1, (3, 6)) * (name == "before"))
        for name, values in figures.items()
    }
    names = list(study.violations)
    trained = xr.Dataset(tables, {"violation": ("cell", names), "cell": names})
    assert outcomes(study.compare(xr.Dataset(), trained)) == ["holds"] * 7
    wrong = trained.copy(deep=True)
    wrong["error"][1, 0] = -3.0
    wrong["before"][2] = wrong["before"].values[0, ::-1]
    expected = ["refuted", "holds", "holds", "holds", "holds", "refuted", "holds"]
    assert outcomes(study.compare(xr.Dataset(), wrong)) == expected


def test_rows_whose_tokens_coincide_under_the_sum_are_infinitely_bad_without_a_warning():
    from manyheads.recovery.examples.stages.agreement import measure_quality

    x = np.array([[[1.0, -1.0], [-1.0, 1.0]]])
    quality = measure_quality(x, np.full((1, 2, 2), 10.0), np.full((2, 2), 1e-320), floor=0.02)
    assert np.all(np.isinf(quality))

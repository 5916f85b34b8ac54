"""The contract passes for good studies and names each fault of a bad one."""

import dataclasses

import numpy as np
import pytest
from tests.study.toys import Averages, Still, VectorizedAverages, Walk

from manyheads.study import check_study
from manyheads.study.contract import ContractBroken, check_use_of_prediction, start_trial
from manyheads.study.execution.runner import ComparisonFailed


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(Averages(repeats=5), marks=pytest.mark.slow),
        pytest.param(VectorizedAverages(repeats=5), marks=pytest.mark.slow),
        Walk(),
        Still(),
    ],
    ids=lambda study: study.name,
)
def test_the_toys_keep_the_contract(study, seed):
    check_study(study, replicates=3, seed=seed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("prediction", "predict depends on its key"),
        ("purity", "computed twice"),
        ("labels", "no attribute"),
        ("verdicts", "no claim was decided"),
        ("twice", "states a claim twice"),
        ("unread", "never reads the prediction"),
        ("falsifiable", "no data can change"),
        ("panels", "shows no picture"),
        ("caption", "assert a result whatever the data are.*It stops earlier"),
    ],
)
def test_each_fault_is_named(fault, words, seed):
    with pytest.raises((ContractBroken, ComparisonFailed), match=words):
        check_study(Still(fault=fault), seed=seed)


def test_a_reason_not_to_read_the_prediction_must_be_true(seed, tmp_path):
    class Excused(Still):
        unread_prediction = "a test"

    check_use_of_prediction(start_trial(Excused(fault="unread"), tmp_path, 1, seed))
    with pytest.raises(ContractBroken, match="yet the prediction is read"):
        check_use_of_prediction(start_trial(Excused(), tmp_path, 1, seed))


def test_distortions_are_different_data(seed, tmp_path):
    from manyheads.study.contract import _distortions

    trained = start_trial(Walk(), tmp_path, 2, seed).tree["trained"].to_dataset()
    for distorted in _distortions(trained):
        assert any(not np.array_equal(distorted[name], trained[name]) for name in trained.data_vars)


def test_fields_must_not_be_flags_of_every_run():
    from manyheads.cli.slurm import Submission
    from manyheads.cli.study import Options
    from manyheads.study.contract import RUN_FLAGS

    assert {field.name for kind in (Options, Submission) for field in dataclasses.fields(kind)} == RUN_FLAGS

    class Clashing(Still):
        seed: int = 3

    with pytest.raises(ContractBroken, match="'seed' is a flag of every run"):
        check_study(Clashing())

"""Every registered study keeps the contract, in its smallest configuration."""

import pytest
from tests.study.rows import SMALL

from manyheads.study.contract import CHECKS, start_trial
from manyheads.study.registry import STUDIES, load


@pytest.fixture(scope="module")
def trials(tmp_path_factory, seed):
    made = {}

    def trial(name):
        if name not in made:
            study, replicates = SMALL[name]
            made[name] = start_trial(study, tmp_path_factory.mktemp("trial"), replicates, seed)
        return made[name]

    return trial


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_registered_study_keeps_the_contract(name, check, trials):
    check(trials(name))


@pytest.mark.parametrize("name", STUDIES)
def test_the_registry_says_what_the_study_says(name):
    study = load(name)
    assert study.name == name
    assert study.claim == STUDIES[name].claim


def test_no_contract_row_without_a_study():
    assert set(SMALL) == set(STUDIES)

"""Every registered study keeps the contract, in its smallest configuration."""

import functools
import json
from pathlib import Path

import pytest

from manyheads.cli.flags import Flag
from manyheads.cli.help.descriptions import DESCRIPTIONS, Description, description_to_keep, kept_description
from manyheads.study.contract import CHECKS, Trial, check_identity, start_trial
from manyheads.study.registry import STUDIES, load

RECORDED = Path(__file__).parents[1] / "study" / "recorded"
# Studies whose contract takes two or three CPU seconds, with compilation: those that `make test` holds to it.
QUICK = {
    "bigram/transfer",
    "recovery/hard-instances",
    "recovery/noise",
}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STUDIES]

# Distances stand out from the noise with more replicates than two.
REPLICATES = {"limits/approach": 4, "limits/forecast": 3, "limits/key-dim-stability": 3, "recovery/leakage": 4}


@pytest.fixture(scope="module")
def trials(tmp_path_factory, seed):
    @functools.lru_cache(maxsize=1)
    def trial(name):
        folder, replicates = tmp_path_factory.mktemp("trial"), REPLICATES.get(name, 2)
        return start_trial(load(name).small(), folder, replicates, seed)

    return trial


# The lower decorator is the outer loop: all checks of a study follow each other, in one worker, on one run of it.
@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check is not check_identity],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_study_keeps_the_contract(name, check, trials):
    check(trials(name))


@pytest.mark.parametrize("name", STUDIES)
def test_the_registry_says_what_the_study_says_and_its_seed_and_fields_count(name, seed, tmp_path):
    study = load(name)
    check_identity(Trial(study.small(), seed, 1, tmp_path, None))
    assert study.name == name
    assert study.claim == STUDIES[name].claim
    # None: the file of the study has changed since, and the description is computed when it is asked for.
    now = description_to_keep(name, claims_of(name))
    description = Description(now["text"], [Flag(*flag) for flag in now["flags"]], now["claims"])
    assert kept_description(name) in (None, description), "python -m tests.studies.test_registered_studies renews it"


def claims_of(name):
    """Return the claims that are recorded of a study."""
    verdicts = json.loads((RECORDED / f"{name.replace('/', '.')}.json").read_text())["verdicts"].values()
    return next([each["claim"] for each in decided] for decided in verdicts if not isinstance(decided, str))


if __name__ == "__main__":
    kept = {name: description_to_keep(name, claims_of(name)) for name in STUDIES}
    lines = (f"{json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in kept.items())
    DESCRIPTIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

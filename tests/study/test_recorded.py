"""Every registered study says at `small()` what is recorded of it: identity, trained data, verdicts.

``python -m tests.study.test_recorded [NAME ...]`` records studies anew. Trained data are compared bit for bit, so the
records belong to one version of JAX and one kind of processor.
"""

import hashlib
import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tests.conftest  # noqa: F401  (settings of JAX, before it is imported)

from manyheads._settings import default_numpy_errors
from manyheads.errors import ManyheadsError
from manyheads.study.execution.assembly import _joined
from manyheads.study.execution.units import Layout, compute
from manyheads.study.registry import STUDIES, load
from manyheads.study.store.identity import fingerprint

RECORDED = Path(__file__).with_name("recorded")
SEEDS = 0, 7
FEWEST, MOST = 2, 4  # replicates: the fewest with which a study can be compared
CLOSE = 1e-12  # of a number, or of the tolerance of its claim
NEAR = 1e-9  # where the prediction is not the recorded one to the last bit: sums depend on where arrays lie in memory
SLOW = 3.0  # CPU seconds
TEXTS = "claim", "basis", "quantity", "outcome", "expected"
TIMED = "measured time", "CPU time"  # claims on times, which no run repeats


def test_names():
    assert {path.stem for path in RECORDED.iterdir()} == {_file(name).stem for name in STUDIES}


def _file(name):
    return RECORDED / f"{name.replace('/', '.')}.json"


def _parameters():
    for name in STUDIES:
        slow = not _file(name).exists() or json.loads(_file(name).read_text())["cpu_seconds"] > SLOW
        yield pytest.param(name, marks=[pytest.mark.slow] if slow else [])


COMPILED = tuple(
    f"bigram/{each}"
    for each in ("l1-against-sgd", "sample-complexity", "screening", "softmax", "stability", "stage-two", "two-stages")
)


@pytest.mark.parametrize("name", list(_parameters()))
def test_study(name):
    if name in COMPILED and importlib.util.find_spec("numba") is None:
        pytest.skip("recorded with numba, which is not installed; JAX draws other numbers")
    before = json.loads(_file(name).read_text())
    after = recorded(name, before["replicates"])
    assert after["identity"] == before["identity"]
    for seed in map(str, SEEDS):
        assert after["trained"][seed] == before["trained"][seed]
        close = CLOSE if after["predicted"][seed] == before["predicted"][seed] else NEAR
        old, new = before["verdicts"][seed], after["verdicts"][seed]
        if isinstance(old, str):  # an error of the comparison
            continue
        assert [each["claim"] for each in new] == [each["claim"] for each in old]
        for one, other in zip(old, new, strict=True):
            if not any(words in one["claim"] for words in TIMED):
                assert [one[key] for key in TEXTS] == [other[key] for key in TEXTS]
                assert not (apart := _differing_numbers(one, other, close)), f"{one['claim']}: {apart}"


def _differing_numbers(one, other, close):
    """Return the numbers of two verdicts that differ by more than rounding, by name."""
    names = "figure", "interval", "target", "tolerance"
    pairs = {name: (_numbers(one[name]), _numbers(other[name])) for name in names}
    scale = max([value for value in pairs["tolerance"][0] if math.isfinite(value)], default=0.0)

    def equal(a, b):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=close, abs_tol=close * scale)

    return {name: pair for name, pair in pairs.items() if not all(map(equal, *pair))}


def _numbers(value):
    return [float(each) for each in (value if isinstance(value, list) else [value])]


def recorded(name, replicates=FEWEST):
    """Return what a study says at its smallest size, as JSON can hold it."""
    start, kind = time.process_time(), load(name)
    study = kind.small()
    found = {"name": name, "replicates": replicates, "trained": {}, "predicted": {}, "verdicts": {}}
    found["identity"] = [fingerprint(each, 0) for each in (study, kind(), kind.full())]
    layout = Layout.of(study)
    for seed in SEEDS:
        read = {number: compute(study, layout.unit(number), seed) for number in range(layout.count(replicates))}
        predicted, trained = _joined(layout, replicates, read.__getitem__)
        found["trained"][str(seed)] = _digests(trained)
        found["predicted"][str(seed)] = _digests(
            predicted[list(predicted.data_vars)].drop_vars(predicted.coords, errors="ignore")
        )
        found["verdicts"][str(seed)] = _verdicts(study, predicted, trained)
    return found | {"cpu_seconds": round(time.process_time() - start, 1)}


def _verdicts(study, predicted, trained):
    """Return the verdicts, or the error of a comparison for which the replicates are too few."""
    kept = (*TEXTS, "figure", "interval", "target", "tolerance")
    try:
        with default_numpy_errors():
            verdicts = [verdict.to_json() for verdict in study.compare(predicted, trained)]
    except (ManyheadsError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return [{key: each.get(key, "") for key in kept} for each in verdicts]


def _digests(trained):
    """Return the hash of the bits of every variable, measured times excepted."""
    found = {}
    for name, variable in sorted(trained.variables.items()):
        if variable.attrs.get("deterministic", True):
            values = np.ascontiguousarray(variable.values)
            values = values.astype(str) if values.dtype.kind in "UO" else values
            text = f"{variable.dims} {values.shape} {values.dtype.str}".encode()
            found[str(name)] = hashlib.sha256(text + values.tobytes()).hexdigest()[:16]
    return found


def renew(name):
    """Record a study, with the fewest replicates with which it can be compared at most seeds."""
    tried = []
    for replicates in range(FEWEST, MOST + 1):
        tried.append(recorded(name, replicates))
        if not _undecided(tried[-1]):
            break
    found = min(tried, key=_undecided)
    if _undecided(found) == len(SEEDS):
        raise SystemExit(f"{name} cannot be recorded: {found['verdicts']}")
    _file(name).write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{name}: {found['replicates']} replicates, {found['cpu_seconds']} s", flush=True)


def _undecided(found):
    """Return for how many seeds the comparison failed."""
    return sum(isinstance(verdicts, str) for verdicts in found["verdicts"].values())


if __name__ == "__main__":
    wings = {name.partition("/")[0] for name in STUDIES}
    for asked in sys.argv[1:] or STUDIES:
        for each in [name for name in STUDIES if name == asked or (asked in wings and name.startswith(f"{asked}/"))]:
            renew(each)

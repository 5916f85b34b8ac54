"""The contract that every study keeps, as checks that anyone can run on a study of their own.

`check_study(MyStudy(...))` raises on the first broken promise; `CHECKS` lists the promises one by one, so that a test
suite can show each as a test of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from manyheads._extras import np
from manyheads._extras import xarray as xr
from manyheads._trees import T
from manyheads.errors import ManyheadsError
from manyheads.study.base import Study, configuration, evaluated_claims
from manyheads.study.execution.runner import open_run, run
from manyheads.study.execution.units import Layout, Unit, compute
from manyheads.study.panels import Drawn, Panel, panel_from_json
from manyheads.study.reporting.html import section_of, write_report
from manyheads.study.store import equality, identity, run_store
from manyheads.study.verdicts import Verdict

# What the command line asks of every run; a study's own flags stand beside them.
OF_WORK = {"same_versions", "work_only", "offset", "expect", "array", "sbatch", "prologue", "finish", "until_decided"}
OF_ALL = {"replicates", "most_replicates", "seed", "store", "workers", "executor", "full", "strict", "json", "dry_run"}
RUN_FLAGS = frozenset(OF_WORK | OF_ALL)


class ContractBroken(ManyheadsError, AssertionError):
    """A study breaks a rule of the contract."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A study and one small finished run of it, shared by the checks."""

    study: Study
    seed: int
    replicates: int
    store: Path
    tree: xr.DataTree

    @property
    def predicted(self) -> xr.Dataset:
        """What was predicted."""
        return self.tree["predicted"].to_dataset()

    @property
    def trained(self) -> xr.Dataset:
        """What was measured."""
        return self.tree["trained"].to_dataset()

    def stored(self, unit: Unit) -> xr.Dataset:
        """Return a unit as the run has stored it."""
        return run_store.RunStore(self.tree.attrs["path"]).read(unit)

    def compare(self, trained: xr.Dataset | None = None) -> tuple[Verdict, ...]:
        """Return the verdicts of the study, on other data if there are any."""
        return self.study.compare(self.predicted, self.trained if trained is None else trained)

    def under_distortions(self, measure: Callable[[xr.Dataset], T]) -> Iterator[T]:
        """Yield what is said of data that no theory predicted; nonsense that is refused says nothing."""
        for distorted in _distortions(self.trained):
            try:
                with np.errstate(all="ignore"):  # nonsense may divide by zero
                    found = measure(distorted)
            except (ValueError, ArithmeticError, LookupError, ManyheadsError, RuntimeWarning):
                continue
            yield found


def check_study(study: Study | type[Study], replicates: int = 2, seed: int = 0) -> None:
    """Check a study against the whole contract; it is run with few replicates in a temporary store.

    A class is checked in the configuration of its method `small`. Each cell is trained several times.

    Raises
    ------
    ContractBroken
        The first broken promise, named, with what was found.
    """
    study = study.small() if isinstance(study, type) else study
    with tempfile.TemporaryDirectory() as folder:
        trial = start_trial(study, Path(folder), replicates, seed)
        for check in CHECKS:
            check(trial)


def start_trial(study: Study, store: Path, replicates: int = 2, seed: int = 0) -> Trial:
    """Check what can be seen without running, run the study once, and return what the other checks look at."""
    _check_declaration(study)
    return Trial(study, seed, replicates, store, run(study, replicates, seed, store=store, progress=False))


def _check_declaration(study: Study) -> None:
    _require(bool(study.claim.strip()) and "\n" not in study.claim, study, "states no claim in one line")
    _require(study.revision >= 1, study, "has no revision from 1 on")
    for field in dataclasses.fields(study):
        name = f"field {field.name!r}"
        _require(field.name not in RUN_FLAGS, study, f"{name} is a flag of every run: give it another name")
        default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        _require(default, study, f"{name} has no default, so the study cannot be run by its name alone")


def check_identity(trial: Trial) -> None:
    """Check that a pickled study is the same study, and that its seed and every number in it count."""
    study, own = trial.study, identity.fingerprint(trial.study, trial.seed)
    twin = pickle.loads(pickle.dumps(study))  # our own object, in this process
    _require(twin == study and identity.fingerprint(twin, trial.seed) == own, study, "changes when pickled")
    _require(identity.fingerprint(study, trial.seed + 1) != own, study, "ignores the seed")
    for name, value in configuration(study).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            other = copy.copy(study)
            object.__setattr__(other, name, value + 1)  # not `replace`: a study may refuse that number
            _require(identity.fingerprint(other, trial.seed) != own, study, f"field {name!r} is not hashed")


def check_purity(trial: Trial) -> None:
    """Check that the same key gives the same bits: a unit that is computed again is the stored one."""
    # The prediction of a deterministic theory is computed again by `check_prediction`, with another key.
    predicted = () if trial.study.predictions is None else Layout.of(trial.study).predicted()[:1]
    for unit in (*predicted, *Layout.of(trial.study).trained(1)[:1]):
        found = equality.differences(compute(trial.study, unit, trial.seed), trial.stored(unit))
        _require(not found, trial.study, f"{unit}: computed twice, {found} differ")


def check_prediction(trial: Trial) -> None:
    """Check that a deterministic theory ignores its key, and that the draws of a sampled one differ."""
    first, *others = Layout.of(trial.study).predicted()
    if trial.study.predictions is None:
        found = equality.differences(trial.stored(first), compute(trial.study, first, trial.seed + 1))
        what = f"predict depends on its key ({found} differ): say how many `predictions` to draw"
        _require(not found, trial.study, what)
    else:
        found = equality.differences(trial.stored(first), trial.stored(others[0]))
        _require(bool(found), trial.study, "predict ignores its key: leave `predictions` at None")


def check_labels(trial: Trial) -> None:
    """Check that every variable says what it is and in which unit."""
    for node in ("predicted", "trained"):
        for name, variable in trial.tree[node].data_vars.items():
            wanted = ("long_name",) if variable.dtype.kind in "UOb" else ("long_name", "units")
            for attribute in wanted:
                _require(attribute in variable.attrs, trial.study, f"/{node}/{name} has no attribute {attribute!r}")


def check_resumption(trial: Trial) -> None:
    """Check that a finished run is not computed again, and that reading it back gives the same result."""
    run(trial.study, trial.replicates, trial.seed, store=trial.store, progress=False)
    again = open_run(trial.tree.attrs["path"])
    times, before = (tree["trained"].to_dataset()["wall_seconds"].values.tolist() for tree in (again, trial.tree))
    _require(times == before, trial.study, "a finished run was computed again")
    _require(not (found := equality.differences(trial.tree, again)), trial.study, f"read back, {found} differ")


def check_verdicts(trial: Trial) -> None:
    """Check that each claim has one verdict, and that comparing twice gives the same."""
    first, second = trial.compare(), trial.compare()
    _require(len({verdict.claim for verdict in first}) == len(first), trial.study, "states a claim twice")
    _require(repr(first) == repr(second), trial.study, "comparing the same data twice gives different verdicts")


def check_use_of_prediction(trial: Trial) -> None:
    """Check that the comparison reads the prediction, or that the study says why it does not."""
    study = trial.study
    try:
        study.compare(xr.Dataset(), trial.trained)
        read = False
    except (KeyError, AttributeError, ValueError, IndexError):
        read = True
    remedy = "compute a target from it, or say why not in `unread_prediction`"
    said = read or bool(study.unread_prediction.strip())
    _require(said, study, f"its comparison never reads the prediction: {remedy}")
    _require(not (read and study.unread_prediction), study, "`unread_prediction` is set, yet the prediction is read")


def check_falsifiability(trial: Trial) -> None:
    """Check that every claim can fail: it is refuted as it is, or some distortion of the data changes its outcome."""
    before = trial.compare()
    fixed = {verdict.claim for verdict in before if verdict.outcome != "refuted"}
    for other in trial.under_distortions(trial.compare):
        outcomes = {verdict.claim: verdict.outcome for verdict in other}
        fixed &= {verdict.claim for verdict in before if outcomes.get(verdict.claim) == verdict.outcome}
        if not fixed:
            return
    _require(not fixed, trial.study, f"claims that no data can change: {sorted(fixed)}")


def check_preregistration(trial: Trial) -> None:
    """Check that text, region and basis of every claim are known before the data are: no distortion changes them."""

    def stated(data: xr.Dataset) -> list[tuple[object, ...]]:
        claims = evaluated_claims(trial.study, trial.predicted, data)
        return [(claim.text, claim.region, claim.basis) for claim in claims]

    before = stated(trial.trained)
    for after in trial.under_distortions(stated):
        changed = [old[0] for old, new in itertools.zip_longest(before, after) if old != new and old]
        _require(before == after, trial.study, f"claims depend on what was measured: {changed}")


def check_panels(trial: Trial) -> None:
    """Check that there is a picture, that it survives the store, and that the report shows one of each kind."""
    panels = trial.study.panels(trial.predicted, trial.trained)
    _require(bool(panels), trial.study, "shows no picture")
    for panel in panels:
        same = repr(panel_from_json(panel.to_json())) == repr(panel)
        _require(same, trial.study, f"{panel.title!r} changes in the store")
        if isinstance(panel, Drawn):
            _require(bool(panel.x_label and panel.y_label), trial.study, f"{panel.title!r} has an axis without a label")
    section = section_of(run_store.RunStore(trial.tree.attrs["path"]))
    shown = {type(panel): panel for panel in section.panels}  # pictures take the time: one of each kind is enough
    section = dataclasses.replace(section, panels=tuple(shown.values()))
    written = write_report([section], trial.store / "report.html", "")
    _require(trial.study.name in written.read_text(encoding="utf-8"), trial.study, "is not in the report")


RESULTS = re.compile(
    r"\b(earlier|later|nearer|farther|follows?|better|worse|delays?|stops?|overtakes?|makes? up|longer|cautious|stays?|"
    r"alike|does not matter|whatever|faster|slower|no longer)\b"
)
THEORY = re.compile(r"\b([Dd]ashed|[Gg]rey|law|theory|predict\w*|prescribed|published|limit|if|where|would|means)\b")


def check_captions(trial: Trial) -> None:
    """Check that a caption which asserts a result changes with the data: opposite outcomes are drawn beside the run."""

    def said(data: xr.Dataset) -> set[str]:
        return _sentences(trial.study.panels(trial.predicted, data))

    asserted = {text for text in said(trial.trained) if RESULTS.search(text) and not THEORY.search(text)}
    for other in trial.under_distortions(said) if asserted else ():
        asserted &= other
        if not asserted:
            return
    _require(not asserted, trial.study, f"captions assert a result whatever the data are: {sorted(asserted)}")


def _sentences(panels: tuple[Panel, ...]) -> set[str]:
    """Return all sentences of titles and captions."""
    texts = [text for panel in panels for text in (panel.title, panel.note)]
    return {sentence.strip() for text in texts for sentence in re.split(r"(?<=[.;:])\s", text) if sentence.strip()}


CHECKS: tuple[Callable[[Trial], None], ...] = tuple(
    check for name, check in vars().copy().items() if name.startswith("check_") and check is not check_study
)
"""The promises in the order of this file."""


def _distortions(trained: xr.Dataset) -> Iterator[xr.Dataset]:
    """Yield data that no theory predicted: settled, blown up, turned over, shifted, constant, in reverse order."""
    numeric = [name for name, value in trained.data_vars.items() if value.dtype.kind in "iuf"]
    place = xr.DataArray(np.arange(trained.sizes["cell"]), dims="cell")

    def numbers(change: Callable[[xr.DataArray], xr.DataArray]) -> xr.Dataset:
        return trained.assign({name: change(trained[name]) for name in numeric})

    def settled(position: int, value: xr.DataArray) -> xr.DataArray:
        return value.isel(replicate=0) * (1 + 1e-9 * (position + 1) * value["replicate"]) + 0 * value

    def constant(value: xr.DataArray) -> xr.DataArray:
        return xr.zeros_like(value, dtype=float) + 1e-9 * value["replicate"]

    def reversed_along(value: xr.DataArray, axis: int) -> xr.DataArray:
        return value.copy(data=np.flip(value.values, axis))

    # Replicates that agree, but not to the last bit, decide what was inconclusive.
    agreed = trained.assign({name: settled(position, trained[name]) for position, name in enumerate(numeric)})
    yield agreed
    yield numbers(lambda value: value * 10 + 1)
    yield numbers(lambda value: value * 0.01)
    yield numbers(lambda value: -value)
    yield numbers(lambda value: 1 - value)  # a share remains one, where the bounds of a claim refuse all else
    yield numbers(lambda value: value + 100)
    yield numbers(constant)
    yield numbers(lambda value: constant(value) - 1000)
    for axis in (0, -1):
        yield trained.assign({name: reversed_along(value, axis) for name, value in trained.data_vars.items()})
    for start in (trained, agreed):  # one at a time, and more so in every next cell: what cells say of each other
        for name in numeric:
            yield start.assign({name: start[name] * 10.0**place})
            yield start.assign({name: start[name] * 0.1**place})
    texts = [name for name, value in trained.data_vars.items() if value.dtype.kind == "U"]
    yield trained.assign({name: xr.full_like(trained[name], "other", dtype="U5") for name in texts})
    booleans = [name for name, value in trained.data_vars.items() if value.dtype.kind == "b"]
    yield trained.assign({name: ~trained[name] for name in booleans})


def _require(holds: bool, study: Study, what: str) -> None:
    if not holds:
        raise ContractBroken(f"{type(study).__name__}: {what}")

"""`run`: compute what is missing in a store, compare prediction and training, and return the labelled tree."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads._extras import xarray as xr
from manyheads._settings import default_numpy_errors
from manyheads.errors import FileRefused, ManyheadsError, UsageError, check_integer
from manyheads.study.base import Study, all_of, decide, evaluated_claims
from manyheads.study.execution.assembly import assemble, tree
from manyheads.study.execution.progress import announce, progress_bar
from manyheads.study.execution.units import Layout, Unit
from manyheads.study.execution.work import UnitFailed, Work, WorkersLost
from manyheads.study.panels import Panel
from manyheads.study.registry import load
from manyheads.study.reporting.overview import state_findings
from manyheads.study.store.declaration import check_run
from manyheads.study.store.disk import printable
from manyheads.study.store.identity import fingerprint
from manyheads.study.store.provenance import versions
from manyheads.study.store.run_store import RunStore, Summary, find_runs
from manyheads.study.verdicts import Verdict

if TYPE_CHECKING:
    from manyheads.study.reporting.run_tree import RunTree


__all__ = ["ComparisonFailed", "UnitFailed", "WorkersLost", "open_run", "run"]


class ComparisonFailed(ManyheadsError, RuntimeError):
    """A study's `compare` or `panels` raised an exception; all units are finished and kept."""


def run(
    study: Study | str,
    replicates: int = 8,
    seed: int = 0,
    executor: Executor | None = None,
    store: str | os.PathLike[str] = "runs",
    *,
    progress: bool | None = None,
    until_decided: bool = False,
    most_replicates: int | None = None,
    **settings: object,
) -> RunTree:
    """Run a study and return ``/predicted``, ``/trained`` and ``/verdicts``.

    Only what the store lacks is computed: a run that was killed goes on where it stopped, and a run with more
    replicates adds them. Units are the same on every executor.

    Parameters
    ----------
    study
        What to run: an instance of a frozen dataclass that derives from `Study`, or a study's name as on the command
        line, with `settings`: ``run("attention/costs", width=16)``.
    replicates
        Number of independently trained systems in each cell.
    seed
        Root of all randomness, 0 <= seed < 2**32.
    executor
        Any `concurrent.futures.Executor`; None computes in this process.
    store
        Root folder of the store; the run lies in ``<store>/<study>/<hash>``.
    progress
        Announce and show progress on standard error; None does so when that is a terminal.
    until_decided
        Add replicates until every claim is decided. Intervals are then valid at any number of replicates.
    most_replicates
        With `until_decided`: the number at which to stop; by default eight times `replicates`.
    settings
        Fields of a study that is given by name; the others have their defaults.

    Returns
    -------
    RunTree
        An `xarray.DataTree` that shows its verdicts: `plot()`, `to_dataframe()`, and `grid()` with one dimension for
        each coordinate of the cells. ``/trained`` has dimensions `cell` and `replicate` before its own, ``/predicted``
        has `prediction` when the theory samples, ``/verdicts`` one entry a claim.

    Raises
    ------
    UsageError
        Arguments that cannot mean a run.
    UnitFailed
        A unit raised an unexpected exception; the message names it.
    WorkersLost
        Units came without a result: a process of the executor died, or its scheduler did.
    InputChanged
        A file that the study reads changed while it ran.
    ComparisonFailed
        The study's `compare` or `panels` did; every unit is kept.
    StoreDamaged, StoreFull
        The store cannot be read or written.
    """
    most = last_replicates(replicates, until_decided, most_replicates)
    return finish(_made(study, settings), replicates, seed, executor, store, progress, most=most).tree()


def last_replicates(replicates: int, until_decided: bool, most: int | None) -> int | None:
    """Return the number of replicates at which a run until decision stops; None for a run of a fixed number."""
    if not until_decided:
        if most is not None:
            raise UsageError(f"most_replicates={most} without until_decided: leave it out, or set until_decided")
        return None
    first = check_integer("replicates", replicates, least=2)  # one has no interval, and no sequence begins with it
    return check_integer("most_replicates", 8 * first if most is None else most, least=first)


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished run: its store, its data, and what was decided."""

    store: RunStore
    predicted: xr.Dataset
    trained: xr.Dataset
    verdicts: tuple[Verdict, ...]

    def tree(self) -> RunTree:
        """Return the labelled tree."""
        return tree(self.store, self.predicted, self.trained, self.verdicts)


def finish(
    study: Study,
    replicates: int,
    seed: int,
    executor: Executor | None = None,
    store: str | os.PathLike[str] = "runs",
    progress: bool | None = None,
    *,
    most: int | None = None,
) -> Finished:
    """Compute what the store lacks and decide; `run` without the tree. `most` of `last_replicates` adds replicates."""
    first, seed = check_run(study, replicates, seed)
    check_run(study, most or first, seed)
    runs = RunStore.create(store, study, seed)
    replicates, verdicts = first, None
    while verdicts is None or (most and replicates < most and any(each.outcome == "inconclusive" for each in verdicts)):
        if verdicts:
            replicates = min(most or 0, replicates + max(1, replicates // 8))
        _compute_missing(Work(runs, study, seed, replicates, executor), progress)
        predicted, trained = assemble(runs, replicates)
        with _comparison_errors(study):
            claims = evaluated_claims(study, predicted, trained)
            if not (verdicts := decide(study, predicted, trained, claims)):
                raise UsageError("no claim was decided; compare returns a verdict for each")
            verdicts = tuple(each.at_any_time(first, replicates) for each in verdicts) if most else verdicts
    with _comparison_errors(study):
        panels = all_of(study.panels(predicted, trained, claims), Panel, "panels")
        summary = Summary(replicates, verdicts, state_findings(panels, verdicts))
        summary.to_json()  # refuses panels that no report can show
    runs.write_summary(summary)
    runs.compact()
    return Finished(runs, predicted, trained, verdicts)


def _compute_missing(work: Work, progress: bool | None) -> None:
    """Compute the units that a run of so many replicates lacks."""
    runs = work.runs
    missing, count = runs.missing(work.replicates), runs.layout.count(work.replicates)
    if missing and work.wait:
        runs.verify()  # before any work: a damaged run is left as it is
    announce(_announcement(work.study, count, [runs.layout.unit(number) for number in missing], runs), progress)
    with progress_bar(work.study.name, count, count - len(missing), progress) as advance:
        work.run(advance)


def prepare(study: Study, replicates: int, seed: int, store: str | os.PathLike[str] = "runs") -> RunStore:
    """Make the run in the store if it is not there; nothing is computed."""
    _, seed = check_run(study, replicates, seed)
    return RunStore.create(store, study, seed)


def contribute(
    study: Study,
    replicates: int,
    seed: int,
    executor: Executor | None = None,
    store: str | os.PathLike[str] = "runs",
    *,
    offset: int = 0,
    leaving: Callable[[], bool] = lambda: False,
    progress: bool | None = None,
) -> int:
    """Compute missing units that no other launch has claimed, without a comparison; return how many are still missing.

    `offset` is the number of this launch among those that start together; `leaving` is asked between batches of some
    two seconds, and True leaves the rest to others. UnitFailed at the end if units raised unexpected exceptions.
    """
    runs = prepare(study, replicates, seed, store)
    work = Work(runs, study, seed, replicates, executor, offset, wait=False, keep_going=True, leaving=leaving)
    _compute_missing(work, progress)
    return len(runs.missing(replicates))


def plan(study: Study, replicates: int, seed: int, store: str | os.PathLike[str] = "runs") -> str:
    """Return what `finish` would compute, and where; nothing is written."""
    replicates, seed = check_run(study, replicates, seed)
    layout, path = Layout.of(study), Path(store) / study.name / fingerprint(study, seed)
    runs, count = RunStore(path) if (path / "run.json").exists() else None, layout.count(replicates)
    missing = runs.missing(replicates) if runs else range(count)
    return _announcement(study, count, [layout.unit(number) for number in missing], runs or path)


def require_same_versions(study: Study, seed: int, store: str | os.PathLike[str] = "runs") -> None:
    """Refuse a run whose units were computed under other versions than those of this process, by a UsageError."""
    path = Path(store) / study.name / fingerprint(study, seed)
    if (path / "run.json").exists() and (others := _other_versions(RunStore(path))):
        here = ", ".join(f"{name} {found}" for name, found in versions().items())
        remedy = "install those, or allow other versions"
        raise UsageError(f"{path}: its units come from {others}; here is {here}: {remedy}")


def _made(study: Study | str, settings: dict[str, object]) -> Study:
    """Return a study given by name with its settings, or as it is."""
    if not isinstance(study, str):
        if settings:
            raise UsageError(f"{', '.join(settings)}: settings belong to a study that is given by name")
        return study
    kind = load(study)
    known = [field.name for field in dataclasses.fields(kind)]
    if strange := sorted(set(settings) - set(known)):
        raise UsageError(f"{study} has no setting {strange[0]!r}; it has {', '.join(known)}")
    return kind(**settings)


@contextmanager
def _comparison_errors(study: Study) -> Iterator[None]:
    """Convert exceptions of the study's comparison to `ComparisonFailed`."""
    try:
        with default_numpy_errors():
            yield
    except Exception as error:
        message = f"{study.name}, comparing: {type(error).__name__}: {error}. All units are kept; run again to go on"
        raise ComparisonFailed(message) from error


def _announcement(study: Study, count: int, missing: Sequence[Unit], runs: RunStore | Path) -> str:
    """Return what is about to be done: units, exact FLOPs where the study knows them, and where the results go."""
    trained = [unit for unit in missing if unit.cell is not None]
    text = f"{study.name}: {count} units, {count - len(missing)} stored, {len(missing)} to do"
    costs = [study.flops(unit.cell) for unit in trained if unit.cell is not None]
    known = [cost * (unit.last - unit.first + 1) for cost, unit in zip(costs, trained, strict=True) if cost is not None]
    if known and len(known) == len(trained):
        text += f", {sum(known):.3g} matrix-multiply FLOPs"
    if isinstance(runs, Path):
        return f"{text} -> {runs}"
    if missing and (others := _other_versions(runs)):
        text += f"; stored units come from {others}"
    return f"{text} -> {runs.path}"


def _other_versions(runs: RunStore) -> str:
    """Return the versions of stored units that are not those of this process."""
    here, stored = versions(), runs.environments()
    other = {(name, each.get(name, "unknown")) for each in stored for name in here if each.get(name) != here[name]}
    return ", ".join(sorted(f"{name} {printable(version)}" for name, version in other))


def open_run(path: str | os.PathLike[str]) -> RunTree:
    """Open a finished run, or all of a store, without computing anything, after checking every file.

    Parameters
    ----------
    path
        The run's own folder, ``<store>/<study>/<hash>``, or a folder above runs, such as the store's root.

    Returns
    -------
    RunTree
        Of one run the tree that `run` returned. Of a folder above runs a tree of them by their paths in it, such as
        ``open_run("runs")["attention/costs/0a1b2c3d4e5f"]``; unfinished ones are left out and named in the attribute
        `unfinished`.

    Raises
    ------
    FileRefused
        No run is stored there, one is damaged, or none is finished.
    """
    if (Path(path) / "run.json").exists() or not Path(path).is_dir():
        return _open(RunStore(path))
    from manyheads.study.reporting.run_tree import RunTree

    stores = {store.path.relative_to(path).as_posix(): store for store in find_runs(path)}
    finished = {name: _open(store) for name, store in stores.items() if store.summary() is not None}
    if not finished:
        raise FileRefused(f"{path}: no run is finished yet; 'manyheads study run' finishes one")
    opened = RunTree.from_dict(finished)
    opened.attrs |= {"path": str(path), "unfinished": sorted(set(stores) - set(finished))}
    return opened


def _open(store: RunStore) -> RunTree:
    summary = store.summary()
    if summary is None:
        raise FileRefused(f"{store.path}: this run is not finished; run the same command again to finish it")
    predicted, trained = assemble(store, summary.replicates)
    return tree(store, predicted, trained, summary.verdicts)

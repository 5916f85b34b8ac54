"""Work on a run: units are claimed, computed where a worker is, and appended there to the worker's own segment."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from manyheads.errors import ManyheadsError
from manyheads.study.base import Study
from manyheads.study.execution.units import Failure, Unit, attempt
from manyheads.study.store import disk, identity, provenance, run_store
from manyheads.study.store.leases import Claim, Launch
from manyheads.study.store.records.schema import pack
from manyheads.study.store.records.segments import Frame, SegmentWriter

BATCH_SECONDS = 2.0  # of work that is claimed at once
LARGEST_BATCH = 256
AHEAD = 3  # batches a worker has waiting
WORKERS = 64  # of an executor that does not say how many it has
GOLDEN = 0.6180339887498949  # multiples of it, modulo one, keep apart however many there are
LOOK = 1.0  # seconds between looks at futures that nobody finished
PAUSE = 0.05, 5.0  # seconds between looks at what other launches do
KEPT = "Finished units are kept; run again to go on"
DISCONNECTED = "the executor cancelled them: is its scheduler gone?"
STORE_ERRORS = (disk.StoreDamaged, disk.StoreFull, identity.InputChanged)


class UnitFailed(ManyheadsError, RuntimeError):
    """A unit raised an exception that its study does not expect; what was finished is kept."""


class WorkersLost(ManyheadsError, RuntimeError):
    """Units came without a result: a worker was killed, ran out of memory, or lost its scheduler."""


@dataclass(frozen=True)
class Task:
    """What a worker is told once for all units: the run, the launch, the study and its seed."""

    path: Path
    run: str
    owner: str
    study: Study
    seed: int
    code: tuple[str, str]  # version of manyheads and hash of the study's file, as the launch has them
    inputs: dict[Path, str]  # sha256 of every file that the study reads

    @classmethod
    def of(cls, runs: run_store.RunStore, launch: Launch, study: Study, seed: int) -> "Task":
        """Return the task of a launch."""
        inputs, code = identity.Inputs.of(study), _code(provenance.environment_of(study))
        if identity.fingerprint(study, seed) != runs.run:
            raise identity.InputChanged(f"{runs.path}: a file that {study.name} reads has just changed; run it again")
        return cls(runs.path.absolute(), runs.run, launch.owner, study, seed, code, inputs)


@dataclass
class Done:
    """What a worker tells of a batch: the numbers of stored units, units to be stored by the client, a failure."""

    stored: list[int] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    failed: tuple[Unit, Failure] | None = None
    seconds: float = 0.0


class _Local(threading.local):
    """The segment and the watched files of a thread that works; a process that computes one run writes one segment."""

    task: Task | None = None
    writer: SegmentWriter | None = None
    inputs: identity.Inputs | None = None


_LOCAL = _Local()


def work(task: Task, units: Sequence[tuple[int, Unit]]) -> Done:
    """Compute units, append each to this worker's segment as soon as it is there, and stop at the first failure.

    A worker that does not see the launch's file does not see the run: it returns its units instead.
    """
    begun, done = time.perf_counter(), Done()
    environment = provenance.environment_of(task.study)
    here = _code(environment)
    if any(ours and theirs and ours != theirs for ours, theirs in zip(here, task.code, strict=True)):
        what = f"this worker has manyheads {here[0]} and the study's file {here[1]}, the launch {task.code}"
        done.failed = (units[0][1], Failure(f"{what}: give all workers the same code", ""))
        return done
    if _LOCAL.task is None or (_LOCAL.task.path, _LOCAL.task.owner) != (task.path, task.owner):
        finish_writing()
        sees = (task.path / "leases" / task.owner).exists()
        _LOCAL.inputs = identity.Inputs(task.inputs)
        _LOCAL.writer = SegmentWriter(task.path, task.run, task.owner) if sees else None
        _LOCAL.task = task
    assert _LOCAL.inputs is not None
    for number, unit in units:
        result = attempt(task.study, unit, task.seed)
        if not isinstance(result, Failure):
            try:
                frame = Frame(number, environment, *pack(result))
            except ManyheadsError as error:
                result = Failure(f"{type(error).__name__}: {error}", "")
        if isinstance(result, Failure):
            done.failed = (unit, result)
            break
        _LOCAL.inputs.check()
        if _LOCAL.writer is None:
            done.frames.append(frame)
        else:
            _LOCAL.writer.append(frame)
            done.stored.append(number)
    if _LOCAL.writer is not None:
        _LOCAL.writer.sync()
    done.seconds = time.perf_counter() - begun
    return done


def finish_writing() -> None:
    """Close this thread's segment."""
    writer, _LOCAL.writer, _LOCAL.task = _LOCAL.writer, None, None
    if writer is not None:
        writer.close()


def _code(environment: dict[str, str]) -> tuple[str, str]:
    return environment["manyheads"], environment["code"]


@dataclass(eq=False)
class Work:
    """The missing units of a run, worked through by this launch together with all others until nothing is left.

    Without an executor it computes in this process. With `offset`, the number of this launch among those that start
    together, each begins elsewhere in the missing units. It may `wait` for units that other launches have claimed, and
    `keep_going` with the others when one has failed. `leaving` is asked between batches: True leaves the rest to
    others.
    """

    runs: run_store.RunStore
    study: Study
    seed: int
    replicates: int
    executor: Executor | None = None
    offset: int = 0
    wait: bool = True
    keep_going: bool = False
    leaving: Callable[[], bool] = lambda: False

    flying: dict[Future[Done], list[Claim]] = field(init=False, default_factory=dict)
    told: set[int] = field(init=False, default_factory=set)  # units whose storing a worker has reported
    asked: set[int] = field(init=False, default_factory=set)
    failed: tuple[Unit, Failure] | None = field(init=False, default=None)
    lost: str = field(init=False, default="")
    pace: float = field(init=False, default=0.0)  # seconds a unit

    def run(self, advance: Callable[[int], None] = lambda _: None) -> int:
        """Compute until nothing is missing and return how many units this launch computed.

        Raises
        ------
        UnitFailed
            A unit raised an unexpected exception; units in flight are finished and kept.
        WorkersLost
            Units were given to the executor and did not come back.
        InputChanged, StoreFull, StoreDamaged
            A file changed, the disk is full, or the store is damaged.
        """
        pause, before = PAUSE[0], len(missing := self.runs.missing(self.replicates))
        if not missing and not any(self.runs.path.glob("leases/*")):
            return 0
        with Launch(self.runs.path) as launch:  # also if only claims of the dead are left to be removed
            self.writer = SegmentWriter(self.runs.path, self.runs.run, launch.owner)
            task = Task.of(self.runs, launch, self.study, self.seed)
            try:
                while (missing := self.runs.missing(self.replicates)) and not self.leaving():
                    advance(before - len(missing))
                    before = len(missing)
                    began = self._begin(task, launch, missing)
                    if not self.flying and (self._gives_up() or self.lost):
                        break
                    if self.flying:
                        self._collect(launch)
                        pause = PAUSE[0]
                    elif not began:
                        if not self.wait or not (launch.others() or set(missing) - self.asked):
                            break
                        time.sleep(pause)
                        pause = min(2 * pause, PAUSE[1])
                advance(before - len(missing))
            finally:
                for future in self.flying:
                    future.cancel()
                self.writer.close()
                finish_writing()
                if not self.flying:
                    launch.sweep()
        self._tell(self.runs.missing(self.replicates))
        return len(self.told)

    def _begin(self, task: Task, launch: Launch, missing: Sequence[int]) -> bool:
        """Claim units and give them to workers; tell whether there were any."""
        began = False
        start = int(self.offset * GOLDEN % 1 * len(missing))
        left = [number for number in (*missing[start:], *missing[:start]) if number not in self.asked]
        workers = 1 if self.executor is None else getattr(self.executor, "_max_workers", WORKERS)
        while left and not self._gives_up() and not self.lost and len(self.flying) < AHEAD * workers:
            most = LARGEST_BATCH if self.pace < BATCH_SECONDS / LARGEST_BATCH else int(BATCH_SECONDS / self.pace)
            most = max(1, min(most if self.pace else 1, -(-len(left) // (AHEAD * workers))))
            claims = launch.claim(left, most)
            if not claims:
                break
            stored = self.runs.numbers()  # somebody may have stored it and given its claim back
            free = [claim for claim in claims if claim.unit not in stored]
            launch.release([claim for claim in claims if claim.unit in stored])
            taken = {claim.unit for claim in claims}
            left = [number for number in left if number not in taken]
            began = True
            if free:
                self._give(task, free)
            if self.executor is None:
                break
        return began

    def _give(self, task: Task, claims: list[Claim]) -> None:
        units = [(claim.unit, self.runs.layout.unit(claim.unit)) for claim in claims]
        self.asked |= {claim.unit for claim in claims}
        future: Future[Done] = Future()
        try:
            if self.executor is None:
                future.set_result(work(task, units))
            elif _is_disconnected(self.executor):
                raise BrokenExecutor(DISCONNECTED)
            else:
                future = self.executor.submit(work, task, units)
            self.flying[future] = claims
        except BrokenExecutor as error:
            self.lost = str(error)

    def _collect(self, launch: Launch) -> None:
        """Wait for a batch and take what it tells."""
        for future in self._finished():
            claims = self.flying.pop(future)
            done = self._result(future, claims)
            for frame in done.frames:
                self.writer.append(frame)
            self.told |= {*done.stored, *(frame.unit for frame in done.frames)}
            if count := len(done.stored) + len(done.frames):
                self.pace = max(done.seconds / count, 1e-6)
            if done.failed:
                self.runs.note_failure(*done.failed)
                self.failed = self.failed or done.failed
                failed = self.runs.layout.number(done.failed[0])
                self.asked -= {claim.unit for claim in claims} - self.told - {failed}  # units behind it in the batch
                for other in self.flying if self._gives_up() else ():
                    other.cancel()  # units in flight still finish, and are kept
            launch.release(claims)

    def _finished(self) -> list[Future[Done]]:
        """Wait until a batch has ended, or nothing can end any more, and return those."""
        # `wait` does not wake for a future that is cancelled from outside, as dask's are when its scheduler is gone;
        # and batches whose results dask was fetching, or that were handed in since, are not even cancelled.
        while not (finished := [future for future in self.flying if future.done()]):
            if _is_disconnected(self.executor):
                return list(self.flying)
            wait(self.flying, LOOK, FIRST_COMPLETED)
        return finished

    def _result(self, future: Future[Done], claims: list[Claim]) -> Done:
        """Return what came back; an exception of the executor (it cannot send the study, say) is told as a unit's."""
        if future.cancelled() or not future.done():
            if not self.failed:
                self.lost = self.lost or DISCONNECTED
            return Done()
        try:
            return future.result()
        except BrokenExecutor as error:
            self.lost = self.lost or f"a worker process died: {error}"
            return Done()
        except STORE_ERRORS:
            raise
        except Exception as error:
            unit = self.runs.layout.unit(claims[0].unit)
            return Done(failed=(unit, Failure(f"{type(error).__name__}: {error}", "")))

    def _gives_up(self) -> bool:
        return self.failed is not None and not self.keep_going

    def _tell(self, missing: list[int]) -> None:
        """Raise what happened to the units that are missing now."""
        if self.failed:
            unit, failure = self.failed
            error = UnitFailed(f"{self.study.name}, {unit}: {failure.what}. {KEPT}")
            if failure.trace:
                error.add_note(failure.trace)  # where it was raised, perhaps in another process
            raise error
        gone = [number for number in missing if number in self.asked]
        if gone and not self.leaving():
            reason = self.lost or "workers reported them, and the store lacks them: do all see the same folder?"
            units = f"{len(gone):,} of {len(self.asked):,} units came without a result"
            raise WorkersLost(f"{self.study.name}: {units} ({reason}). {KEPT}")


def _is_disconnected(executor: Executor | None) -> bool:
    """Tell whether an executor of dask has lost its scheduler; of others a broken pool is told by the pool."""
    client = getattr(executor, "_client", None)
    return getattr(client, "status", "running") in ("connecting", "closing", "closed")

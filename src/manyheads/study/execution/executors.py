"""Executors of units: this process, a local pool of single-threaded processes, or a dask cluster.

Any `concurrent.futures.Executor` will do. This module makes the two that the command line offers, with what JAX needs:
processes are spawned and never forked (a fork after JAX has run hangs), each computes with one thread, shares the
persistent compile cache through its environment, and ends itself when its parent is gone.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from manyheads._extras import require
from manyheads._trees import T
from manyheads.errors import UsageError, check_integer

ONE_THREAD_XLA = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
MOST_WORKERS = 64  # each takes some 300 MB and a second to start
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@contextlib.contextmanager
def local_pool(workers: int | None = None) -> Iterator[Executor]:
    """Yield a pool of spawned single-threaded processes, by default one for each processor.

    Workers that still compute are ended when it is interrupted. UsageError for far more than there are processors.
    """
    if workers is not None:
        workers = check_integer("workers", workers)
    processors = os.cpu_count() or 1
    if workers is not None and workers > (most := max(MOST_WORKERS, 4 * processors)):
        raise UsageError(f"workers={workers}: this machine has {processors} processors; ask for at most {most}")
    count = workers or processors
    environment = _one_thread()
    with _environment(environment):
        context = multiprocessing.get_context("spawn")
        pool = _Pool(count, context, initializer=_start_worker, initargs=(os.getpid(), environment))
        ours = set(multiprocessing.active_children())
        try:
            yield pool
        except BaseException:
            if processes := set(multiprocessing.active_children()) - ours:
                _discard_waiting(pool)
            for process in processes:
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True)


@contextlib.contextmanager
def open_executor(address: str | None, workers: int | None = None) -> Iterator[Executor | None]:
    """Yield the executor that a command line names.

    None is the local pool, of which one worker computes in this process; ``dask:tcp://host:port`` is a dask cluster
    (extra `cluster`). UsageError for another address.
    """
    if address is None:
        if workers == 1:
            yield None
        else:
            with local_pool(workers) as pool:
                yield pool
        return
    scheme, _, target = address.partition(":")
    if scheme != "dask" or not re.fullmatch(r"[a-z]+://.+:\d+", target):
        other = "other executors are passed from Python"
        raise UsageError(f"--executor {address!r}: expected dask:tcp://HOST:PORT; {other}")
    distributed = require("distributed")
    with distributed.Client(target) as client:
        yield client.get_executor(pure=False)  # pure=True would merge equal calls


def _one_thread() -> dict[str, str]:
    """Return the environment of a worker: one thread, and whatever else the user tells XLA."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD_XLA}".strip()
    return {"XLA_FLAGS": flags} | dict.fromkeys(POOLS, "1")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the block, and put the old ones back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _discard_waiting(pool: Executor) -> None:
    """Have the pool forget what no worker has begun, and return when it has.

    Its own thread stumbles over cancelled work, with a traceback, when a worker dies before that (CPython 3.11).
    """
    forgotten = threading.Event()
    with contextlib.suppress(RuntimeError):  # a broken pool takes nothing more
        pool.submit(int).add_done_callback(lambda _: forgotten.set())
    pool.shutdown(wait=False, cancel_futures=True)
    forgotten.wait(0.5)  # longer only if a worker has it already, and then nothing waits behind it


class _Pool(ProcessPoolExecutor):
    """A pool that Ctrl-C never meets half started: the first call starts its thread and all workers.

    Workers inherit the mask of signals, so Ctrl-C stays blocked in them until they can ignore it.
    """

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submit a call; an interrupt waits until it is done."""
        with _interrupts_postponed():
            return super().submit(function, *args, **kwargs)


@contextlib.contextmanager
def _interrupts_postponed() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: blocked in this thread, and remembered if another one receives it."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            os.kill(os.getpid(), signal.SIGINT)


def _start_worker(parent: int, environment: dict[str, str]) -> None:
    """Prepare a worker: one thread, no reaction to Ctrl-C (the parent decides), and an end when the parent is gone."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

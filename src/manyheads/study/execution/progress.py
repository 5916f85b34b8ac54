"""Progress of long work, on standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[..., None]  # of a number of units, one by default


@contextlib.contextmanager
def progress_bar(title: str, total: int, done: int = 0, show: bool | None = None) -> Iterator[Advance]:
    """Show a bar of `total` units on standard error and yield a function that advances it; `done` were finished before.

    Where `show` is None, the bar is shown on a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _=1: None
        return
    from rich import progress
    from rich.console import Console

    done_of_all = progress.BarColumn(), progress.MofNCompleteColumn()
    times = progress.TimeElapsedColumn(), "elapsed,", progress.TimeRemainingColumn(), "left"
    with progress.Progress("{task.description}", *done_of_all, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda count=1: bar.advance(task, count)


def announce(text: str, show: bool | None = None) -> None:
    """Print one line to standard error; None prints it when standard error is a terminal."""
    if sys.stderr.isatty() if show is None else show:
        print(text, file=sys.stderr, flush=True)

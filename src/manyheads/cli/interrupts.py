"""Interrupts during garbage collection, where Python would report and drop the exception.

The collector calls callbacks (JAX registers one), finalizers and those of weak references. During imports it runs so
often that one interrupt in ten was lost in JAX's callback alone.
"""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

AGAIN = 0.02  # seconds until an interrupt that came during a collection is tried again


@contextlib.contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, a moment later if it would be dropped.

    Does nothing outside the main thread, or if another handler of Ctrl-C is set.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    collecting = False

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if collecting or _is_callback(frame):
            later = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
            later.daemon = True
            later.start()
        else:
            raise KeyboardInterrupt

    gc.callbacks.insert(0, watch)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.callbacks.remove(watch)


def _is_callback(frame: FrameType | None) -> bool:
    """Tell whether a callback of the collector is running: some run before `watch` is told of its start."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False

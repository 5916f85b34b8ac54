"""An interrupt inside a callback of the garbage collector comes through all the same."""

import gc
import os
import signal
import time

import pytest

from manyheads import cli
from manyheads.cli import heeded_interrupts


def test_an_interrupt_inside_a_collection_is_raised_after_it():
    calls = []

    def callback(phase, info):
        if not calls:
            calls.append(phase)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # Python runs the handler here, and would swallow what it raises

    gc.disable()  # no collection but the one below, which calls the callbacks all the same
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt), heeded_interrupts():  # noqa: PT012
            gc.collect()
            for _ in range(1000):  # a signal just before a sleep is heeded after it
                time.sleep(0.01)
    finally:
        gc.callbacks.remove(callback)
        gc.enable()
    assert calls == ["start"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_else_is_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeded_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "said"), [((), "finished units are kept"), (("this is kept",), "interrupted: this is kept")]
)
def test_an_interrupt_says_what_is_kept(words, said, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt(*words)

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert cli.main(["study"]) == 130
    assert said in capsys.readouterr().err

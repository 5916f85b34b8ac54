"""Wrong use, failure and interruption: one clear line, the right exit status, and nothing lost that was stored."""

import importlib.util
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.toys import Patient

from manyheads.cli import main
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import RunStore, find_runs

WALK = "tests.study.toys:Walk"
PATIENT = "tests.cli.toys:Patient"
SMALL = ("--units", "2", "--replicates", "1", "--workers", "1")

WRONG_USE = [
    ("nonsense", "no command 'nonsense'"),
    ("stdy", "did you mean 'study'"),
    ("study lst", "did you mean 'list'"),
    ("study list --colour", "--colour"),
    ("study list jomma", "did you mean joma"),
    ("study list nowhere", "no study matches 'nowhere'"),
    ("scale --optimzer sgd", "unknown option --optimzer; did you mean --optimizer?"),
    ("report --store runs", "unknown option --store; STORE stands without its name"),
    ("count --layer 12", "did you mean --layers?"),
    ("count --layers 12.5", "--layers '12.5': expected an integer"),
    ("study run attention/costs --replicate 2", "did you mean --replicates?"),
    ("--completion tcsh", "choose one of bash, fish, zsh"),
    ("study run", "needs the name of one study"),
    ("study show --json", "needs the name of one study"),
    ("study show attention/costs --json", "nothing else: leave out '--json'"),
    ("study show attention/costs joma/rebound", "nothing else: leave out 'joma/rebound'"),
    ("study run nothing", "no study is called 'nothing'"),
    ("study run attention.costs", "did you mean attention/costs"),
    ("study run absent.py:Mine", "absent.py: no such file"),
    ("study run absent.module:Mine", "check the spelling"),
    ("study run tests.study.toys:Absent", "has no study 'Absent'"),
    ("study run broken.py:Mine", "broken.py, line 2"),
    ("study run unclosed.py:Mine", "SyntaxError"),
    ("study run tests.cli.toys:Demanding", "give every field a default"),
    (f"study run {WALK} --colour red", "--colour"),
    (f"study run {WALK} --replicates few", "--replicates"),
    (f"study run {WALK} --replicates 0", "of at least 1"),
    (f"study run {WALK} --workers 0", "of at least 1"),
    (f"study run {WALK} --workers -2", "of at least 1"),
    (f"study run {WALK} --seed -1", "seed"),
    (f"study run {WALK} --executor ray:auto", "dask:tcp"),
    (f"study run {WALK} --executor dask:somewhere", "dask:tcp"),
    ("runs list absent", "absent: no such folder"),
    ("runs clean absent", "absent: no such folder"),
    ("report absent", "absent: no such folder"),
    ("cite absent", "neither a folder"),
    ("cite", "neither a folder"),
    ("count", "nothing to count"),
    ("count absent.json", "absent.json: no such file"),
    ("count absent.module:f", "cannot be imported"),
    ("demo --text absent.txt", "'absent.txt' cannot be read"),
    ("demo --text .", "cannot be read"),
    ("demo --workers 0", "of at least 1"),
]

FAILED = [
    ("demo --text binary.txt", "UTF-8"),
    ("report .", "holds no run"),
    ("runs list .", "holds no run"),
    ("count .", "config.json"),
    (f"study run {WALK} --fail-at 0 --replicates 1 --workers 1", "ran into a wall"),
    (f"study run {PATIENT} --fault compare {' '.join(SMALL)}", "ZeroDivisionError: nothing to divide by"),
    (f"study run {PATIENT} --store taken {' '.join(SMALL)}", "taken"),
]


def complaint(capsys, command):
    """Run a command; return its exit status and the one line that it says, progress left out."""
    status = main(command.split())
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("manyheads: ")]
    assert captured.err.rstrip().endswith(line)
    return status, line


@pytest.mark.parametrize(("command", "says"), WRONG_USE)
def test_wrong_use_is_2(capsys, folder, command, says):
    (folder / "broken.py").write_text("x = 1\n1 / 0\n")
    (folder / "unclosed.py").write_text("x = (\n")
    status, line = complaint(capsys, command)
    assert status == 2
    assert says in line
    assert not list(folder.glob("runs/**/run.json"))


@pytest.mark.parametrize(("command", "says"), FAILED)
def test_failure_is_3(capsys, folder, command, says):
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00not text")
    (folder / "taken").write_text("a file where a folder must be")
    status, line = complaint(capsys, command)
    assert status == 3
    assert says in line


@pytest.mark.skipif(importlib.util.find_spec("distributed") is not None, reason="dask.distributed is installed")
def test_a_missing_extra_is_named(capsys):
    status, line = complaint(capsys, f"study run {WALK} --executor dask:tcp://127.0.0.1:1")
    assert status == 2
    assert "manyheads[cluster]" in line


def test_nothing_typed_shows_the_commands(capsys):
    for words in ([], ["study"], ["runs"]):
        assert main(words) == 2
        assert "usage: manyheads" in capsys.readouterr().out


def test_what_nobody_foresaw_keeps_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr("manyheads.cli.study.List.run", lambda self: {}["absent"])
    assert main(["study", "list"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("manyheads: KeyError: 'absent'\n")


def test_the_environment_asks_for_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("MANYHEADS_TRACEBACK", "1")
    assert main(["study", "run", PATIENT, "--fault", "compare", *SMALL]) == 3
    assert "in compare" in capsys.readouterr().err


def test_a_damaged_store_is_named_and_left_as_it_is(capsys, folder):
    words = f"study run {PATIENT} {' '.join(SMALL)}"
    assert main(words.split()) == 0
    (table,) = folder.glob("runs/toy/patient/*/table-*")
    one, two = struct.pack("<d", 1.0), struct.pack("<d", 2.0)
    table.write_bytes(table.read_bytes().replace(one, two, 1))
    before = {path: path.read_bytes() for path in folder.glob("runs/**/*") if path.is_file()}
    capsys.readouterr()
    for command in (words, "report", f"report {table.parent}"):
        status, line = complaint(capsys, command)
        assert status == 3
        assert "has been altered" in line
    assert {path: path.read_bytes() for path in folder.glob("runs/**/*") if path.is_file()} == before


def test_a_full_disk_is_3_and_keeps_what_was_there(capsys, folder, monkeypatch):
    assert main(["study", "run", PATIENT, *SMALL]) == 0
    capsys.readouterr()
    monkeypatch.setattr("manyheads.study.store.records.segments.os.write", _no_room)
    status, line = complaint(capsys, f"study run {PATIENT} --units 2 --replicates 3 --workers 1")
    assert status == 3
    assert "free some space" in line
    (kept,) = find_runs("runs")
    assert kept.verify() == 3


def _no_room(file, data):
    import errno

    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_3(start):
    with open("/dev/full", "w") as full:
        process = start("study", "list", stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (3, "manyheads: No space left on device\n")


@pytest.mark.parametrize("command", ["study list", "count --help", "--help"])
def test_a_reader_that_goes_away_is_no_error(start, command):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*command.split(), stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def wait_for_units(folder, count, process):
    """Wait until so many trained units are stored; return the run's folder."""
    end = time.monotonic() + 60
    while True:
        found = [path.parent for path in folder.glob("runs/toy/patient/*/run.json")]
        if found and len([number for number in RunStore(found[0]).numbers() if number]) >= count:
            return found[0]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def living(group):
    """Return the processes of a session that are neither gone nor defunct."""
    listed = subprocess.run(["ps", "-eo", "pid,sess,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return [int(pid) for pid, session, state in rows if int(session) == group and not state.startswith("Z")]


def wait_until_gone(group):
    end = time.monotonic() + 60
    while left := living(group):
        assert time.monotonic() < end, left
        time.sleep(0.1)


# Ten seconds of work, of which few are waited for: each unit sleeps where the environment says so, and only there.
SLOW = ("study", "run", PATIENT, "--units", "25", "--replicates", "1", "--workers", "2")
SLOWLY = {"PATIENCE": "0.8"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_interrupt_is_130_and_what_is_finished_is_kept(start, folder):
    """Ctrl-C reaches every process of the group, as it does from a terminal."""
    process = start(*SLOW, environment=SLOWLY)
    path = wait_for_units(folder, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    (line,) = [line for line in err.splitlines() if "interrupted" in line]
    assert line == "manyheads: interrupted: finished units are kept; run the same command again to go on"
    assert "Traceback" not in err
    wait_until_gone(process.pid)
    before = RunStore(path)
    kept = before.verify()
    assert 3 <= kept < 26  # the prediction may be among what was not finished
    assert before.summary() is None
    stamps = {number: entry.time for number, entry in before.index.units.items()}
    study = Patient(units=25)
    tree = run(study, replicates=1, store=folder / "runs", progress=False, executor=None)
    assert not before.leftovers()  # what was being written at that moment is swept when the run goes on
    assert differences(tree, open_run(path)) == []
    after = RunStore(path).index.refresh().units
    assert {number: after[number].time for number in stamps} == stamps


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2])
def test_an_interrupt_while_workers_start_is_as_quiet(start, delay):
    process = start(*SLOW, environment=SLOWLY)
    assert "to do" in process.stderr.readline()
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.endswith("manyheads: interrupted: finished units are kept; run the same command again to go on\n")
    wait_until_gone(process.pid)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_workers_do_not_outlive_a_killed_parent(start, folder):
    process = start(*SLOW, environment=SLOWLY)
    path = wait_for_units(folder, 1, process)
    assert len(living(process.pid)) >= 3  # the parent and two workers
    process.kill()
    process.wait()
    wait_until_gone(process.pid)
    assert 1 <= RunStore(path).verify() < 26

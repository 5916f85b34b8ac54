"""Tests of `cli.slurm`: the script of an array, sbatch's answers, and arrays whose tasks are killed and requeued."""

import shlex
import subprocess
import time

import pytest
from tests.study.cluster import Cluster, Nap

from manyheads.cli import main
from manyheads.cli.slurm import SubmissionFailed, job_script, sbatch_options, submit, write_script
from manyheads.errors import UsageError
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

TEXT = {"capture_output": True, "text": True, "check": True, "timeout": 60}
COMMAND = ["python", "-m", "manyheads", "study", "run", "toy/walk", "--note", "it's $HOME"]


def test_a_script_starts_its_command_with_the_number_of_the_task(tmp_path):
    text = job_script(tmp_path, ["echo", *COMMAND], ["--time=2:00:00"], 4, "export GREETING=hello")
    assert text.splitlines()[:3] == ["#!/bin/bash", "#SBATCH --array=0-3", "#SBATCH --requeue"]
    assert "#SBATCH --time=2:00:00" in text
    assert f"#SBATCH --output={tmp_path}/%A_%a.log" in text
    done = subprocess.run(["bash", write_script(tmp_path, text)], env={"SLURM_ARRAY_TASK_ID": "3"}, **TEXT)
    assert done.stdout == f"{' '.join(COMMAND)} --offset 3\n"  # words arrive as they were given
    exported = text.replace("exec echo", "exec printenv GREETING OMP_NUM_THREADS #")
    done = subprocess.run(["bash", "-c", exported], env={"SLURM_CPUS_PER_TASK": "2"}, **TEXT)
    assert done.stdout == "hello\n2\n"


def test_options_of_the_user_replace_the_defaults(tmp_path):
    text = job_script(tmp_path, COMMAND, ["--cpus-per-task=4", "--output=/dev/null"], None, "")
    assert text.count("--cpus-per-task") == 1
    assert "--cpus-per-task=4" in text
    assert text.count("--output") == 1
    assert "--array" not in text
    assert "--offset" not in text


REFUSED = [
    "time=2",
    "-c 4",
    "'--comment=a\nrm'",
    "--array=0-9",
    "-a0-9",
    "'--comment",
    "--wrap=id",
    "--wra=id",
    "--arr=0-9",
]
REFUSED += [
    "-Ha0-9",
    "--parsable",
    "--test-only",
    "-W",
    "--time",
    "--hold=1",
    "'--comment=a\x1b[2J'",
    "--",
    "-",
    "-Oarm",
]


@pytest.mark.parametrize("text", REFUSED)
def test_options_that_would_change_the_script_are_refused(text):
    with pytest.raises(UsageError, match="--sbatch"):
        sbatch_options(text)


def test_a_folder_of_any_name_is_one_word_of_the_script_or_refused(tmp_path):
    """Words of the comments that sbatch reads, split as a shell does; a percent sign is doubled."""
    for name in ("a b", "it's", "100%", "a#b", 'say "x"', "$(id)", "`id`", "a;b", "é"):
        text = job_script(tmp_path / name, COMMAND, [], 2, "")
        words = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH")]
        assert [f"--output={tmp_path}/{name.replace('%', '%%')}/%A_%a.log"] in words
        assert len(text.splitlines()) == 8
    for name in ("a\nid", "a\rid", "a\x1b[2J", "a\u2028b", "a\x00", "a\x85"):
        for folder, command, prologue in ((name, [], ""), ("a", [name], ""), ("a", [], name.replace("\n", "\v"))):
            with pytest.raises(UsageError, match="printable"):
                job_script(tmp_path / folder, [*COMMAND, *command], [], 2, prologue)


def test_sbatch_answers(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path)
    script = write_script(tmp_path / "run", "#!/bin/bash\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmissionFailed, match="not on the path"):
        submit(script)
    monkeypatch.setenv("PATH", cluster.environment["PATH"])
    assert (submit(script), submit(script)) == ("1", "2")  # the cluster's name behind the number is left out
    (tmp_path / "queue" / "refuse").touch()
    with pytest.raises(SubmissionFailed, match="Invalid partition"):
        submit(script)
    assert script.exists()


def test_a_dry_run_prints_the_script_and_leaves_nothing(tmp_path):
    cluster, options = Cluster(tmp_path / "cluster"), ["--sbatch", "--time=2:00:00 --mem=4G", "--dry-run"]
    done = cluster.submit("tests.study.cluster:Nap", "--array", 3, "--store", tmp_path / "runs", *options)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --mem=4G" in done.stdout
    assert "#SBATCH --array=0-2" in done.stdout
    assert "19 to do" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "cluster" / "queue").iterdir())


@pytest.mark.slow
def test_an_array_whose_tasks_are_killed_and_requeued_gives_the_numbers_of_one_process(tmp_path):
    cluster, store = Cluster(tmp_path / "cluster"), tmp_path / "runs"
    flags = ["tests.study.cluster:Nap", "--seconds", 0.5, "--replicates", 12, "--seed", 3, "--store", store]
    done = cluster.submit(*flags, "--array", 3, "--finish")
    assert done.returncode == 0, done.stderr
    assert cluster.size(1) == 3
    assert "--dependency=afterany:1" in (tmp_path / "cluster/queue/words2").read_text()
    for task in range(3):
        cluster.start(1, task)
    (runs,) = find_runs(store)
    _wait_for(runs, 4)
    cluster.kill(1, 1)
    assert cluster.preempt(1, 0) == 0  # it leaves after the units at hand
    assert runs.missing(12)
    cluster.start(1, 0)  # requeued; task 1 is not
    assert set(cluster.end().values()) == {0, -9}
    assert not runs.missing(12), cluster.output(1, 0)
    cluster.start(2)
    assert cluster.end()[2, None] == 0, cluster.output(2)
    assert "holds" in cluster.output(2)
    whole = run(Nap(seconds=0.0), replicates=12, seed=3, store=tmp_path / "whole", progress=False)
    assert not differences(whole, open_run(runs.path))


def _wait_for(runs, count):
    """Wait until so many units are stored."""
    deadline = time.monotonic() + 120
    while len(runs.numbers()) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def test_an_offset_is_for_processes_that_only_work(capsys):
    assert main(["study", "run", "tests.study.toys:Walk", "--offset", "3"]) == 2
    assert "--work-only" in capsys.readouterr().err

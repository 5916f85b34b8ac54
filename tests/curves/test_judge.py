import json
import sys
from pathlib import Path

import numpy as np
import pytest

from manyheads.cli import main
from manyheads.curves import judge_curves, read_curves
from manyheads.curves.curve_files import RunCurves, read_runs, with_losses
from manyheads.errors import ExtraMissing, FileRefused, UsageError

STEPS = np.arange(30)


def curve(rebound, rng, noise=0.005):
    return 2 + np.exp(-STEPS / 3) + rebound * (1 - np.exp(-STEPS / 10)) + noise * rng.normal(size=30)


def table(path, figures, loss=None, extra=""):
    names = list(figures)
    lines = [",".join(["step", "layer", *names, "loss", *(["learning_rate"] if extra else [])])]
    for place, step in enumerate(STEPS):
        for layer in range(next(iter(figures.values())).shape[1]):
            values = [f"{figures[name][place, layer]:.17g}" for name in names]
            lines.append(
                ",".join([str(10 * step), str(layer), *values, "" if loss is None else str(loss[place]), extra])
            )
    path.write_text("\n".join(line.rstrip(",") if not extra else line for line in lines))
    return path


def test_the_three_forms_of_a_run_are_read_alike(tmp_path, rng):
    figures = {"entropy": rng.normal(size=(30, 2)), "stable_rank": rng.normal(size=(30, 2))}
    loss = rng.normal(size=30)
    np.savez(tmp_path / "b.npz", step=10 * STEPS, loss=loss, learning_rate=0.1, uniform_entropy=3.0, **figures)
    first, second = read_curves(table(tmp_path / "a.csv", figures, loss, "0.1")), read_curves(tmp_path / "b.npz")
    for name in figures:
        np.testing.assert_array_equal(first.figures[name], second.figures[name])
    np.testing.assert_array_equal(first.steps, second.steps)
    np.testing.assert_allclose(first.loss, second.loss, rtol=1e-12)
    assert first.learning_rate == second.learning_rate == 0.1
    assert (first.levels, second.levels) == ({}, {"entropy": 3.0})


def results(rng, count=3):
    """Return results as JoMA's authors publish them."""
    import torch

    return [
        {
            "nlayers": 2,
            "dataset": "wikitext2",
            "opt": {"method": "adam", "lr": 1e-3},
            "sweep_filename": None,
            "keys": (1000 * STEPS).tolist(),
            "this_entropies": torch.tensor(np.stack([curve(0.5, rng), curve(0, rng)], 1), dtype=torch.float32),
            "this_val_loss": torch.linspace(9, 5 + place, 30),
            "lr": 10.0**-place,
        }
        for place in range(count)
    ]


@pytest.mark.torch
def test_result_lists_of_the_authors(tmp_path, rng, capsys):
    import torch

    given = results(rng)
    torch.save(given, tmp_path / "runs.pt")
    read = read_runs(tmp_path / "runs.pt")
    assert [(run.name, run.learning_rate) for run in read] == [("runs[0]", 1.0), ("runs[1]", 0.1), ("runs[2]", 0.01)]
    for run, result in zip(read, given, strict=True):
        np.testing.assert_array_equal(run.steps, result["keys"])
        np.testing.assert_array_equal(run.figures["entropy"], result["this_entropies"].numpy())
        np.testing.assert_array_equal(run.loss, result["this_val_loss"].numpy())
    (tmp_path / "again").mkdir()
    torch.save(given[:1], tmp_path / "again/runs.pt")
    assert main(["curves", "judge", str(tmp_path / "runs.pt"), str(tmp_path / "again/runs.pt")]) == 0
    printed = capsys.readouterr().out
    assert "bottom layer: drops and rebounds in 4 of 4 runs" in printed
    assert "top layer: drops and rebounds in 0 of 4 runs" in printed


@pytest.mark.torch
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"keys": [0, 1]}, "list of dictionaries"),
        ([], "list of dictionaries"),
        ([{"keys": [0, 1]}], "expected keys"),
        ([{"keys": [0, 1], "this_entropies": "many"}], "an array of numbers"),
        ([Path("code")], "fails, give a list"),
        (None, "fails, give a list"),
    ],
)
def test_other_result_files_are_refused(tmp_path, content, says):
    import torch

    if content is None:
        (tmp_path / "runs.pt").touch()
    else:
        torch.save(content, tmp_path / "runs.pt")
    with pytest.raises(FileRefused, match=says):
        read_runs(tmp_path / "runs.pt")


def test_result_lists_name_the_extra_that_reads_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExtraMissing, match=r"manyheads\[torch\]"):
        read_runs(tmp_path / "runs.pt")


def test_shapes_and_counts_by_layer(rng):
    runs = [RunCurves(str(i), STEPS, {"entropy": np.stack([curve(0.5, rng), curve(0, rng)], 1)}, {}) for i in range(3)]
    found = judge_curves(runs)
    assert found.rebounds == {("entropy", "bottom"): (3, 3), ("entropy", "top"): (0, 3)}
    assert [v.shape.label for v in found.layers[:2]] == ["rebounded", "levelled off"]
    assert "3 of 3 runs" in found.sentences()[0]
    assert "0 runs with a loss" in found.sentences()[-1]
    assert len(found.to_dataframe()) == 6


def test_the_learning_rate_can_turn_the_sign_of_a_correlation(rng):
    """High rates rebound more and end lower; within a rate a larger rebound ends higher."""
    runs = []
    for place in range(18):
        rate = (1e-3, 1e-2, 1e-1)[place % 3]
        own = rng.random()
        rebound, final = 0.3 + place % 3 + 0.5 * own, 5 - place % 3 + 0.5 * own
        loss = final + np.exp(-STEPS / 2)
        figures = {"entropy": curve(rebound, rng, 1e-4)[:, None]}
        runs.append(RunCurves(str(place), STEPS, figures, {}, loss, rate))
    pooled, within, early, *_ = judge_curves(runs).relations
    assert pooled.value < -0.5
    assert min(within.value, early.value) > 0.9
    assert pooled.interval.high < 0 < within.interval.low


def test_independent_runs_are_covered_at_the_level_stated(rng):
    outside = 0
    for _ in range(300):
        rises, losses, rates = rng.random(12), rng.random(12), np.repeat([1e-3, 1e-2], 6)
        runs = [
            RunCurves(str(i), STEPS[:4], {"entropy": np.array([1, 0, 0, rise])[:, None]}, {}, np.full(4, loss), rate)
            for i, (rise, loss, rate) in enumerate(zip(rises, losses, rates, strict=True))
        ]
        within = judge_curves(runs).relations[1]
        outside += not within.interval.contains(0.0)
    assert outside <= 11  # of 300 at 1%: more has a chance below 1e-4


def test_a_run_that_diverged_counts_with_its_last_finite_values(rng):
    values = curve(0.5, rng)
    broken = np.where(STEPS > 20, np.nan, values)
    one = judge_curves([RunCurves("a", STEPS, {"entropy": broken[:, None]}, {})]).layers[0]
    assert one.shape is None
    assert one.rise == values[20] - values[:21].min()


def test_losses_of_the_trainer(tmp_path, rng):
    run = RunCurves("a", 10 * STEPS, {"entropy": curve(0.5, rng)[:, None]}, {})
    log = [{"step": 10, "loss": 3.0, "learning_rate": 1e-3}, {"step": 20, "eval_loss": 2.5}, {"step": 40, "loss": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    found = with_losses(run, tmp_path / "trainer_state.json")
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(found.loss)), [2])
    assert (found.loss[2], found.learning_rate) == (2.5, 1e-3)
    (tmp_path / "other.csv").write_text("step,loss\n5,1.0\n")
    with pytest.raises(FileRefused, match="steps with one: 5"):
        with_losses(run, tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "step,entropy\n1,2\n", "no column 'layer'"),
        ("a.csv", "step,layer,entropy\n1,0,2\n1,0,3\n2,0,1\n", "one line for each"),
        ("a.csv", "step,layer,entropy\n1,0,high\n2,0,1\n", "expected a number"),
        ("a.csv", "step,layer,entropy\n0.5,0,1\n2,0,1\n", "whole numbers"),
        ("a.npz", "no archive", "no arrays of curves"),
        ("a.txt", "", "expected curves"),
    ],
)
def test_files_without_curves_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(FileRefused, match=says):
        read_curves(tmp_path / name)


def test_other_refusals(tmp_path, rng):
    run = RunCurves("a", STEPS, {"entropy": curve(0.5, rng)[:, None]}, {})
    with pytest.raises(UsageError, match="1 names"):
        judge_curves([run, run])
    with pytest.raises(UsageError, match="at least one"):
        judge_curves([])
    for other in (np.ones((30, 2)), [np.ones(30)], run, None):
        with pytest.raises(UsageError, match="expected a list of RunCurves"):
            judge_curves(other)
    with pytest.raises(UsageError, match="steps, layers"):
        RunCurves("a", STEPS, {"entropy": curve(0.5, rng)}, {})
    for steps, says in (([1, 5, 5], "step 5 is repeated"), ([1, 9, 7], "step 7 follows 9"), ([1], "1 steps")):
        with pytest.raises(UsageError, match=says):
            RunCurves("a", np.array(steps), {"entropy": np.ones((len(steps), 1))}, {})
    with pytest.raises(UsageError, match="no such file"):
        read_curves(tmp_path / "absent.csv")
    np.savez(tmp_path / "objects.npz", step=np.array([{}], dtype=object))
    with pytest.raises(FileRefused, match="no arrays of curves"):
        read_curves(tmp_path / "objects.npz")

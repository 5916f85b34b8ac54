"""The acceptance lane itself: it measures once, goes on where it stopped, and keeps what it found."""

import json

import pytest
from tests.acceptance._lane import Figure, Lane, Measured, find_wings
from tests.acceptance._studies import run_study, words_of
from tests.study.toys import Walk

from manyheads.study import run


@pytest.fixture
def counted():
    """Calls so far, and a figure that is met when it is measured at least as often as asked for."""
    calls = []

    def measure(folder, enough):
        calls.append(folder)
        assert folder.is_dir()
        if enough < 0:
            raise ArithmeticError("no figure")
        return Measured(f"{len(calls)} calls", "a | b", "0", len(calls) >= enough)

    return calls, lambda name, enough: Figure(name, "it counts", "calls", measure, {"enough": enough})


def lane_of(tmp_path, *figures):
    return Lane({"toy": figures}, tmp_path / "work", tmp_path / "results.json")


def test_a_finished_figure_is_measured_once(tmp_path, counted, capsys):
    calls, figure = counted
    lane = lane_of(tmp_path, figure("first", 1), figure("second", 2))
    assert lane.run(["toy"], ["first"])
    assert [row["figure"] for row in json.loads(lane.results.read_text())] == ["first"]
    assert lane.run(["toy"])
    assert len(calls) == 2
    assert lane.run(["toy"], again=True)
    assert len(calls) == 4
    assert [row["measured"] for row in json.loads(lane.results.read_text())] == [
        [["3 calls", "a | b"]],
        [["4 calls", "a | b"]],
    ]
    assert not any(folder.exists() for folder in calls)


def test_what_is_not_met_or_has_other_settings_is_measured_again(tmp_path, counted, capsys):
    calls, figure = counted
    lane = lane_of(tmp_path, figure("first", 2))
    assert not lane.run(["toy"])
    assert not json.loads(lane.results.read_text())[0]["met"]
    assert lane.run(["toy"])
    assert lane_of(tmp_path, figure("first", 1)).record("toy", figure("first", 1)) is None
    assert lane_of(tmp_path, figure("first", 1)).run(["toy"])
    assert len(calls) == 3


def test_a_figure_that_raises_does_not_stop_the_others(tmp_path, counted, capsys):
    calls, figure = counted
    lane = lane_of(tmp_path, figure("broken", -1), figure("sound", 1))
    assert not lane.run(["toy"])
    assert len(calls) == 2
    assert calls[0].is_dir()  # what it has done so far is there for the next attempt
    assert "ArithmeticError: no figure" in capsys.readouterr().err


def test_other_results_stay_and_those_of_figures_that_are_gone_go(tmp_path, counted, capsys):
    _, figure = counted
    lane_of(tmp_path, figure("first", 1), figure("second", 1)).run(["toy"])
    lane = lane_of(tmp_path, figure("second", 1), figure("third", 1))
    lane.run(["toy"], ["third"])
    assert [row["figure"] for row in json.loads(lane.results.read_text())] == ["second", "third"]


def test_the_kept_results_are_those_of_the_figures():
    lane = Lane(find_wings())
    known = {(wing, figure.name, figure.key()) for wing, figures in lane.wings.items() for figure in figures}
    assert len(known & lane.records().keys()) > 250
    assert all(row["measured"] and row["required"] and row["command"] for row in lane.records().values())


def test_every_figure_has_a_name_of_its_own_and_says_what_is_required():
    wings = find_wings()
    assert set(wings) >= {"study", "attention", "costs", "checkpoints"}
    for figures in wings.values():
        assert len({figure.name for figure in figures}) == len(figures)
        assert all(figure.claim and figure.required for figure in figures)


@pytest.mark.slow
def test_a_study_is_run_as_typed_and_its_verdicts_come_back(tmp_path):
    command = f"{words_of('tests.study.toys:Walk', 3, '--seed 2', str(tmp_path))} --workers 1"
    assert command.startswith("manyheads study run tests.study.toys:Walk --replicates 3 --seed 2 --store ")
    tree = run(Walk(), 3, 2, store=tmp_path, progress=False)
    path, verdicts = run_study(command)  # nothing is left to do, and other runs beside it do not matter
    assert str(path) == tree.attrs["path"]
    assert [row["claim"] for row in verdicts] == tree["verdicts"]["claim"].values.tolist()
    assert [row["outcome"] for row in verdicts] == tree["verdicts"]["outcome"].values.tolist()
    assert {row["outcome"] for row in verdicts} <= {"holds", "refuted", "inconclusive"}

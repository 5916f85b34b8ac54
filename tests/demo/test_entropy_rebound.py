"""The chapter on drop and rebound: it reads the demo's own trainings, and knows when they are not the ones."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from tests.study.toys import Still

from manyheads.demo.chapters import CHAPTERS, Scene
from manyheads.demo.entropy_rebound import DemoRebound
from manyheads.demo.text import TextTraining
from manyheads.errors import UsageError
from manyheads.study import check_study, run
from manyheads.study.execution.runner import UnitFailed


@pytest.fixture(scope="module")
def study(trained):
    return DemoRebound(finished=Path(trained.attrs["path"]) / "run.json")


@pytest.mark.slow
def test_it_reads_the_trainings_seed_by_seed(trained, study, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(TextTraining, "train", lambda *_: pytest.fail("trained again"))
    seen = run(study, 3, seed, store=tmp_path, progress=False)["trained"].to_dataset()
    for name in ("validation_loss", "entropy", "stable_rank"):
        np.testing.assert_array_equal(seen[name].values, trained["trained"][name].values)


@pytest.mark.slow
def test_it_keeps_the_contract(study, seed):
    check_study(study, 3, seed)


def test_each_layer_gets_the_verdict_of_its_own_curve(rng):
    """Layer 0 falls and stays, layer 1 falls and comes back; noise is a fiftieth of what is looked for."""
    shapes = np.array([[3.0, 2.0, 1.0, 0.9, 0.8], [3.0, 1.0, 1.5, 1.8, 2.0]])  # (layers, steps)
    entropy = shapes + 0.02 * rng.normal(size=(1, 8, 4, 2, 5))  # (cell, replicate, head, layer, step)
    trained = xr.Dataset(
        {
            "entropy": (("cell", "replicate", "head", "layer", "step"), entropy),
            "stable_rank": (("cell", "replicate", "layer", "step"), 10 * entropy[:, :, 0]),
        },
        coords={"step": np.arange(5), "layer": [0, 1]},
    )
    levels = xr.Dataset({"uniform": 3.1, "random_rank": 30.0})
    verdicts = DemoRebound().compare(levels, trained)
    assert [verdict.outcome for verdict in verdicts] == ["holds", "refuted", "refuted", "holds", "holds", "holds"]
    assert all(verdict.claim.startswith(f"Layer {n // 3}: ") for n, verdict in enumerate(verdicts))
    assert verdicts[4].figure == pytest.approx(1.0, abs=0.05)
    assert len(DemoRebound().panels(levels, trained)) == 3


@pytest.mark.slow
def test_other_trainings_are_refused_by_name(study, seed, tmp_path):
    with pytest.raises(UnitFailed, match="holds 3 replicates"):
        run(study, 4, seed, store=tmp_path / "more", progress=False)
    with pytest.raises(UnitFailed, match="the same --seed"):
        run(study, 2, seed + 1, store=tmp_path / "other", progress=False)


def test_the_demo_hands_its_trainings_on(tmp_path):
    (tmp_path / "run.json").write_text("a stand-in")
    (chapter,) = [chapter for chapter in CHAPTERS if chapter.title == "Drop and rebound"]
    first = CHAPTERS[0]
    made = chapter.study(Scene(None, {"demo/text": tmp_path}))
    assert made.finished.is_file()
    assert chapter.replicates <= first.replicates
    assert chapter.study(Scene(None, {})) == DemoRebound()


def test_a_run_of_another_study_is_refused(seed, tmp_path):
    other = run(Still(), 1, seed, store=tmp_path, progress=False)
    wrong = DemoRebound(finished=Path(other.attrs["path"]) / "run.json")
    with pytest.raises(UsageError, match="holds a run of toy/still"):
        wrong.inputs()

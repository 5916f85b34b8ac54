"""The chapter on scaling: its verdicts on planted motions, its table, and what it trains."""

import jax
import numpy as np
import pytest

from manyheads.demo import scaling
from manyheads.demo.chapters import CHAPTERS, Scene
from manyheads.demo.scaling import DemoScaling
from manyheads.scaling.trained.transformers import Updates
from manyheads.study import Listing, run
from manyheads.study.contract import Trial, check_captions
from manyheads.study.execution.units import predict

STUDY = DemoScaling(key_dim=4, heads=2, depth=1, length=8, batch=2, steps=(1, 3))


@pytest.fixture
def planted(monkeypatch, rng):
    """Motions that double with each doubling in the plain model and stay in the scaled one, spread 0.02 over seeds."""
    asked = []

    def measure_updates(task, parametrization, shape, recipe, rate, checkpoints, key, *, fields):
        asked.append((parametrization.scheme, shape))
        growth = shape.heads * shape.depth / 2 if parametrization.scheme == "standard" else 1.0
        values = {name: growth * np.exp(0.02 * rng.normal(size=len(checkpoints))) for name in fields}
        return Updates(**dict.fromkeys(Updates._fields, np.array(np.nan)) | values)

    monkeypatch.setattr(scaling, "measure_updates", measure_updates)
    return asked


def test_what_stays_holds_and_what_grows_is_refuted(planted, seed, tmp_path):
    tree = run(STUDY, 16, seed, store=tmp_path, progress=False)
    predicted, trained = (tree[name].to_dataset() for name in ("predicted", "trained"))
    verdicts = STUDY.compare(predicted, trained)
    assert [verdict.outcome for verdict in verdicts] == ["holds"] * 3 + ["refuted"]
    assert all(verdict.as_expected for verdict in verdicts)
    assert verdicts[-1].figure == pytest.approx(2.0, abs=0.2)
    assert {(scheme, shape.heads, shape.depth) for scheme, shape in planted} == {
        ("completep", 2, 1), ("standard", 2, 1), ("completep", 4, 2), ("standard", 4, 2)
    }  # fmt: skip
    table, motions = STUDY.panels(predicted, trained)
    assert isinstance(table, Listing)
    assert ("unembedding", "× 0.5   (N^-1 H^-1)", "× 0.5   (N^-1 H^-1)", "× 1") in table.rows
    assert [len(curves) for curves in motions.curves[0]] == [3, 3, 3]
    check_captions(Trial(STUDY, seed, 16, tmp_path, tree))


def test_the_prediction_is_the_table_and_nothing_random(seed):
    one, other = (predict(STUDY, jax.random.key(each)) for each in (seed, seed + 1))
    assert one.identical(other)
    assert float(one["learning_rate"].sel(role="value")) == 0.5
    assert float(one["epsilon"].sel(role="value")) == 0.25


def test_it_is_a_chapter_of_the_demo():
    studies = [chapter.study(Scene(None, {})) for chapter in CHAPTERS if "larger" in chapter.title]
    assert studies == [DemoScaling()]

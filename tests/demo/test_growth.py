"""The chapter on growing blocks: its verdicts on planted trainings, what it reads of a text, and what it trains."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import xarray as xr
from scipy.special import logsumexp

from manyheads.demo import growth
from manyheads.demo.chapters import CHAPTERS, Scene
from manyheads.demo.growth import RARER, DemoGrowth
from manyheads.errors import UsageError
from manyheads.study import Cell, check_study, run
from manyheads.study.execution.units import predict, train
from manyheads.study.panels import Multiples
from manyheads.study.tables import on_grid

SMALL = DemoGrowth(key_dims=(2, 32), heads=1, pieces=2, length=3, vocabulary=5, steps=6, blocks=8)
SMALLEST = replace(SMALL, key_dims=(1, 2), blocks=2)  # the same problem, solved by the same programs


@pytest.fixture
def planted(monkeypatch, rng):
    """Plant blocks that scatter like N^(-1/2) about one of the two trajectories, with a mean that nears it like 1/N."""
    trajectories = predict(SMALL, jax.random.key(0))
    apart = float(np.sqrt(((trajectories["output"] - trajectories["output_without"]) ** 2).mean()))

    def plant(trajectory):
        centre = trajectories[f"output{trajectory}"].values

        def train_networks(problem, network, seeds, *, chunk):
            assert network.heads == SMALL.heads
            shift = rng.normal(size=centre.shape) / network.key_dim
            scatter = rng.normal(size=(len(seeds), *centre.shape)) * network.key_dim**-0.5
            dims = ("seed", *trajectories["output"].dims)
            outputs = centre + apart * (0.1 * shift + scatter)
            return xr.Dataset({"output": (dims, outputs), "loss": (("seed", "step"), outputs[..., 0, 0])})

        monkeypatch.setattr(growth, "train_networks", train_networks)

    return plant


@pytest.mark.parametrize(
    ("trajectory", "expected"), [("", True), pytest.param("_without", False, marks=pytest.mark.slow)]
)
def test_the_trajectory_that_blocks_follow_is_told_from_the_other(planted, trajectory, expected, seed, tmp_path):
    planted(trajectory)
    tree = run(SMALL, 6, seed, store=tmp_path, progress=False)
    predicted, trained = (tree[name].to_dataset() for name in ("predicted", "trained"))
    verdicts = SMALL.compare(predicted, trained)
    assert [verdict.as_expected for verdict in verdicts] == [expected] * 3
    assert [verdict.outcome for verdict in verdicts[1:]] == (["holds", "refuted"] if expected else ["refuted", "holds"])
    apart = np.sqrt(((predicted["output"] - predicted["output_without"]) ** 2).mean().values)
    single, mean, _ = (gap.values for gap in SMALL.gaps(predicted, on_grid(trained, predicted)))
    if expected:
        np.testing.assert_allclose(single.mean(0), apart * np.asarray(SMALL.key_dims) ** -0.5, rtol=0.1)
        assert mean.max() < single.min(0)[0] / 2
    losses, distances, table = SMALL.panels(predicted, trained)
    assert isinstance(losses, Multiples)
    assert [len(curves) for curves in losses.curves[0]] == [3, 3]
    assert [len(curve.x) for curve in distances.curves] == [2] * 4
    assert [len(row) for row in table.rows] == [5] * SMALL.length


@pytest.mark.slow
def test_it_keeps_the_contract(seed):
    check_study(SMALLEST, 2, seed)


@pytest.mark.slow
def test_what_is_trained_is_one_block_on_pieces_of_the_text(seed):
    one, other = (train(SMALLEST, jax.random.key(each), Cell(key_dim=2)) for each in (seed, seed + 1))
    assert one["output"].dims == ("network", "step", "read_out", "class")
    assert np.abs(one["output"].values[:, 0]).max() < 1e-12  # centred at the start
    assert not np.allclose(one["output"].values[:, -1], other["output"].values[:, -1])
    outputs, targets = one["output"].values, SMALLEST.problem().flat_targets
    losses = (logsumexp(outputs, axis=-1) - (outputs * targets).sum(-1)).mean(-1)
    np.testing.assert_allclose(one["loss"].values, losses, rtol=1e-12)


def test_pieces_are_shown_as_they_stand_in_the_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc d\n" * 200)
    predicted = predict(DemoGrowth(text=path, pieces=3, length=7, vocabulary=6, steps=2), jax.random.key(0))
    shown = "".join("abc·d¶"[place % 6] for place in range(20))
    for before, after in zip(predicted["before"].values, predicted["after"].values, strict=True):
        assert str(before + after).replace(RARER, "d") in shown  # of six characters five are told apart


@pytest.mark.slow
def test_a_text_of_one_character_is_learned(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a" * 700)
    study = DemoGrowth(text=path)
    study.inputs()
    predicted = predict(study, jax.random.key(0))
    assert float(predicted["loss"][-1]) < float(predicted["loss"][0]) / 4
    assert set(predicted["after"].values) == {"a"}


def test_what_does_not_do_is_refused_before_work(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("short " * 50)
    with pytest.raises(UsageError, match="30 held-out characters"):
        DemoGrowth(text=path).inputs()
    with pytest.raises(UsageError, match="samples=10000000"):
        DemoGrowth(pieces=10**7).inputs()
    for wrong, words in (({"key_dims": (4,)}, "two or more"), ({"key_dims": (8, 4)}, "rising"), ({"blocks": 1}, "1")):
        with pytest.raises(UsageError, match=words):
            DemoGrowth(**wrong)


def test_it_is_a_chapter_of_the_demo():
    (chapter,) = [chapter for chapter in CHAPTERS if "infinite key dimension" in chapter.title]
    assert chapter.study(Scene(None, {})) == DemoGrowth()

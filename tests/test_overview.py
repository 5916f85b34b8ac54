"""Results show themselves: a short `repr`, an escaped table for notebooks, a data frame and a picture."""

import math
import re
import shutil

import numpy as np
import pytest
from tests.study.toys import Walk

from manyheads._overview import LONGEST_TEXT, Overview, plain_text
from manyheads.costs import ModelShape, transformer_cost
from manyheads.data.characters import Text
from manyheads.errors import FileRefused, UsageError
from manyheads.probe.checkpoints.contents import Finding
from manyheads.probe.checkpoints.verification import Verification
from manyheads.recovery import Recovery, assumptions, planted_layer
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.result.certificates import Certificate
from manyheads.scaling import BaseHyperparameters, Parametrization, coordinate_check, transfer_check
from manyheads.scaling.audit.parameter_settings import audit_learning_rates
from manyheads.scaling.checks.growth_powers import QUANTITIES
from manyheads.statistics import Interval
from manyheads.study import Verdict, open_run, run
from manyheads.study.reporting.charts import Estimate, draw_bars, draw_intervals
from manyheads.theory.bigram.lags.held_out import HeldOutLoss
from manyheads.theory.bigram.lags.result import LagFit
from manyheads.theory.bigram.lags.shared_table import SharedTable
from manyheads.theory.bigram.screening import Screening
from manyheads.theory.bigram.transfer import TransferTest
from manyheads.theory.dmft import Problem, infinite_key_dim

PARAMETRIZATION = Parametrization(base=(8, 4, 2))
LINES = 15


def audited():
    rates = dict.fromkeys(("query", "key", "value", "output", "embedding"), 0.1)
    epsilons = {"query": 1e-8, "value": 1e-8}
    return audit_learning_rates(PARAMETRIZATION, (16, 8, 6), rates, BaseHyperparameters(learning_rate=0.1), epsilons)


def coordinates():
    def measure(shape, seed):
        noise = np.random.default_rng(seed).normal(size=len(QUANTITIES))
        return {
            name: [math.exp(0.02 * z), shape.key_dim * math.exp(z)] for name, z in zip(QUANTITIES, noise, strict=True)
        }

    return coordinate_check(PARAMETRIZATION, [(4, 4, 2), (32, 4, 2)], measure, checkpoints=(4, 25), seeds=range(3))


def transferred():
    def losses(shape, rates, seed):
        best = -2 - np.log10(shape.key_dim) + 0.01 * np.random.default_rng(seed).normal()
        return (np.log10(rates) - best) ** 2

    return transfer_check([(4, 4, 2), (8, 4, 2)], np.geomspace(1e-5, 1e-1, 9), losses, seeds=range(3))


def certified():
    return Certificate(1e-20, 5e-21, 0.023, 0.9999, 400, 1e-6, 1.0, "Gaussian tokens of scale 0.5")


def recovered():
    return Recovery(planted_layer(np.random.default_rng(0), 8, 3), certified(), (), "subspaces")


def lags(symbols=30, count=64):
    rng = np.random.default_rng(0)
    attention = rng.random((symbols, count)) * (rng.random((symbols, count)) > 0.9)
    counts, labels = rng.integers(1, 50, symbols), np.array([f"<{place}>" for place in range(symbols)])
    loss, value = HeldOutLoss(0.3, 0.5, 0.4, 0.35, 100), rng.random((symbols, symbols))
    table = SharedTable(0.4, 3, 0.01, 5, 0.2)
    figures = (rng.random(count), loss, 0.001, 2.5, 0.01, (1.0, 0.9), labels, table, None)
    return LagFit(attention, attention, value, value[0], counts, *figures)


def screened():
    scores = np.random.default_rng(0).random((30, 200))
    return Screening(scores, np.full_like(scores, 4.0), np.full_like(scores, 0.9), np.full(30, 100), 0.01)


def decided():
    return Verdict.from_interval(
        "the slope is -1/2", Interval(-0.53, -0.49), target=-0.5, tolerance=0.1, basis="two standard errors"
    )


def solved():
    inputs = np.random.default_rng(0).standard_normal((2, 2, 8))
    return infinite_key_dim(Problem(inputs, np.array([1.0, -1.0]), steps=8, learning_rate=0.3))


def verified():
    finding = Finding("duplicate", "step2", "the weights of step1", "sha256")
    return Verification(("step1", "step2"), (finding,), 2, 8, (), {})


def transfer_tested():
    figures = (10.0, 4.5, 4.0, False, np.zeros((300, 20), int), 100.0, (80.0, 120.0), math.nan)
    return TransferTest("helps", 0.5, Interval(0.4, 0.6), *figures)


RESULTS = {  # how to make one, what its `repr` says, and how many rows its data frame has
    "cost": (lambda: transformer_cost(ModelShape(12, 768, 12, vocabulary=50257), 1024), "272,339,828,736 FLOPs", 11),
    "table": (lambda: PARAMETRIZATION.table((16, 8, 6)), "query, key, value", 14),
    "audit": (audited, "6 wrong in 1 finding", 7),
    "coordinate check": (coordinates, "refuted, 5 of 10 break", 10),
    "transfer check": (transferred, "refuted", 2),
    "certificate": (certified, "accepted", 1),
    "recovery": (recovered, "3 heads in 8 dimensions", 3),
    "lags": (lags, "LagFit of 30 symbols", None),
    "screening": (screened, "30 queries and 200 positions", None),
    "verification": (verified, "2 checkpoints, 2 readable, 1 findings", 1),
    "verdict": (decided, "holds: the slope is -1/2", 1),
    "solution": (solved, "Solution of a limit at 8 steps", 16),
    "transfer test": (transfer_tested, "helps", 1),
    "assumptions": (lambda: assumptions(planted_layer(np.random.default_rng(0), 8, 3)), "of 14 outside", 14),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself(name):
    make, said, rows = RESULTS[name]
    result = make()
    text = repr(result)
    assert said in text
    assert len(text) <= LONGEST_TEXT
    assert len(text.splitlines()) <= LINES
    assert {"<table", "xr-wrap"} & set(re.findall("<table|xr-wrap", result._repr_html_()))
    frame = result.to_dataframe()
    assert len(frame) == (len(frame) if rows is None else rows)
    assert result.plot()._repr_png_().startswith(b"\x89PNG")


def test_texts_are_escaped_and_cut():
    shown = Overview("<b>", ("a & b",), [("<script>alert(1)</script>",), ("\x1b[2J" + 5000 * "x",)] * 50, ("i < j",))
    page, text = shown.html(), shown.text()
    assert "<script>" not in page
    assert "\x1b" not in page + text
    for escaped in ("&lt;b&gt;", "a &amp; b", "&lt;script&gt;", "i &lt; j"):
        assert escaped in page
    assert "… 92 more rows" in text
    assert "… 60 more rows" in page
    assert len(text) <= LONGEST_TEXT
    assert "&lt;3&gt;" not in lags().plot()._repr_png_().decode("latin1")  # a picture needs no escape


def test_columns_of_numbers_stand_to_the_right_with_their_heads():
    page = Overview("costs", ("item", "share", "bytes"), [("a", "29.0", 1000), ("b", "", None)]).html()
    sides = re.findall(r"<t[hd] style=\"text-align:(\w+);", page)
    assert sides == ["left", "right", "right"] * 3


def test_values_for_people():
    values = (None, True, np.bool_(False), 1234567, 12345.0, 0.00012345, math.inf, "text")
    assert [plain_text(value) for value in values] == [
        "",
        "yes",
        "no",
        "1,234,567",
        "12,345",
        "0.0001234",
        "inf",
        "text",
    ]


def test_arrays_are_named_by_type_and_shape():
    layer = RotaryLayer(np.zeros((16, 3, 9, 9)), np.zeros((3, 8, 8)))
    assert repr(layer) == "RotaryLayer(forms=float64[16, 3, 9, 9], projection=float64[3, 8, 8])"
    assert len(repr(Text("book", "word " * 10**5, "0" * 64))) < 220


def test_a_forgotten_group_is_one_finding():
    audit = audited()
    (forgotten,) = audit.causes()
    assert {each.role for each in forgotten} == {"query", "key", "value", "output"}
    assert "query and 3 more (query, key, value, output): it has the base's settings: its group was forgotten" in str(
        audit
    )
    assert "learning_rate is 4 times" in str(audit)


def test_charts_refuse_nothing_and_add_up_the_rest():
    with pytest.raises(UsageError, match="nothing to draw"):
        draw_intervals("empty", "x", [])
    bars = draw_bars("many", "FLOPs", [(f"item {place}", 1.0) for place in range(30)])
    assert [each.get_text() for each in bars.axes[0].get_yticklabels()][-1] == "6 more"
    (axes,) = draw_intervals("open", "x", [Estimate("one", 2.0, (-math.inf, 3.0), (1.0, math.inf))]).axes
    assert np.isfinite(axes.get_xlim()).all()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for steps in ((3, 5), (2, 4)):
        run(Walk(steps=steps), 2, store=folder, progress=False)
    return folder


def walk_of(store, steps):
    return next(run for run in open_run(store).runs.values() if steps in run.grid()["steps"])


def test_a_store_opens_whole_or_by_run(store):
    runs = open_run(store)
    assert [path.rpartition("/")[0] for path in runs.runs] == ["toy/walk", "toy/walk"]
    assert repr(runs).startswith("2 runs")
    assert "toy/walk" in runs._repr_html_()
    assert set(runs.to_dataframe()["run"]) == set(runs.runs)
    assert [f"toy/walk/{path}" for path in open_run(store / "toy/walk").runs] == list(runs.runs)
    with pytest.raises(UsageError, match="expected one run, but it holds 2"):
        runs.plot()


def test_a_run_shows_its_verdicts_and_pictures(store):
    walk = walk_of(store, 3)
    assert "Run of toy/walk, 2 replicates, seed 0" in repr(walk)
    assert len(repr(walk)) <= LONGEST_TEXT
    assert "<details>" in walk._repr_html_()
    assert list(walk.to_dataframe()["claim"]) == ["one a step", "moves away", "ends near or far"]
    assert walk.pictures
    assert walk.plot()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="numbered from 0"):
        walk.plot(99)
    with pytest.raises(UsageError, match="part of one"):
        walk["trained"].plot()


def test_cells_are_a_grid_of_coordinates(store):
    walk = walk_of(store, 3)
    rate, trained = walk.grid()["rate"], walk["trained"].to_dataset()
    assert rate.dims == ("steps", "replicate")
    assert (rate.sel(steps=5).values == trained["rate"].sel(cell="steps=5").values).all()


def test_unfinished_runs_are_named_and_damaged_ones_refused(store, tmp_path):
    copy = shutil.copytree(store, tmp_path / "runs")
    path, other = sorted(copy.glob("toy/walk/*"))
    (path / "summary.json").unlink()
    runs = open_run(copy)
    assert len(runs.runs) == 1
    assert runs.attrs["unfinished"] == [path.relative_to(copy).as_posix()]
    assert "unfinished, left out: toy/walk/" in repr(runs)
    (other / "summary.json").rename(other / "kept")
    with pytest.raises(FileRefused, match="no run is finished yet"):
        open_run(copy)
    (other / "kept").rename(other / "summary.json")
    next(other.glob("table-*")).unlink()
    with pytest.raises(FileRefused, match=r"prediction 0 is missing"):
        open_run(copy)

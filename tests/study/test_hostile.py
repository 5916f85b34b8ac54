"""Studies that name, type or break things in unlucky ways: refused by name, or carried through unchanged."""

import dataclasses
import os
import re
import signal
import warnings
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
import xarray as xr
from tests.study.toys import SOURCE, Still

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Curve, Lines, Study, Verdict, check_study, grid, near, open_run, run
from manyheads.study.contract import ContractBroken
from manyheads.study.execution.executors import local_pool
from manyheads.study.execution.runner import ComparisonFailed, UnitFailed, WorkersLost
from manyheads.study.panels import Picture
from manyheads.study.registry import load
from manyheads.study.reporting.svg import svg
from manyheads.study.store.identity import fingerprint
from manyheads.study.store.provenance import command_of
from manyheads.study.store.run_store import StoreDamaged, find_runs

Y = {"long_name": "y", "units": "1"}


class Odd(Study):
    """Returns the variables that `kind` names."""

    name = "toy/odd"
    claim = "nothing much"
    source = SOURCE

    kind: str = "plain"
    rate: float = 1.0
    rates: tuple[float, ...] = (1.0,)
    count: int = 1

    def cells(self):
        return {
            "collision": grid(y=(1, 3)),
            "dimension": grid(layer=(1, 3)),
            "bench": grid(replicate=(1, 3)),
            "equal": (Cell(rate=1), Cell(rate=1.0)),
            "mixed": (Cell(rate=2), Cell(rate="two")),
        }.get(self.kind, grid(depth=(1, 3)))

    def predict(self, key):
        return xr.Dataset({"y": ((), 0.0, Y), "text": ((), "a", {"long_name": "a text"})})

    def train(self, key, **cell):
        layers = np.arange(cell.get("depth", 2))
        text = ("layer", [f"layer {layer}" for layer in layers], {"long_name": "a text"})
        variables = {
            "ragged": {"text": text, "flag": ("layer", layers > 0), "whole": ("layer", layers)},
            "kinds": {"text": ((), "a" if cell.get("depth") == 1 else 2.0)},
            "times": {"wall_seconds": ((), 1.0)},
            "coded": {"y": ((), 1.0, {"scale_factor": 2.0})},
            "listed": {"y": ((), 1.0, {"note": ["a", "b"]})},
            "days": {"y": ((), 3.0, {"units": "days", "when": np.float64(1)})},
            "comparison": {"y": ((), np.nan, Y)},
        }.get(self.kind, {"y": ((), 1.0, Y), "text": ((), "a", {"long_name": "a text"})})
        if self.kind in ("killed", "unpicklable") and _is_replicate(key, 3):
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Unpicklable("boom", 2)
        coordinates = {"layer": layers} if self.kind in ("ragged", "dimension") else {}
        return xr.Dataset(variables, coords=coordinates)

    def compare(self, predicted, trained, claims=None):
        if self.kind == "comparison":
            return (Verdict.from_samples("y", trained["y"].values[0], target=0.0, tolerance=1.0, basis="a test"),)
        return (Verdict.exact("one", 1.0, target=1.0, tolerance=0.0, basis="a test"),)


class Unpicklable(Exception):
    """Can be pickled, but not read back: its pickle calls it with one argument."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def _is_replicate(key, replicate):
    other = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), replicate)
    return bool((jax.random.key_data(key) == jax.random.key_data(other)).all())


def trained(kind, path):
    return run(Odd(kind=kind), replicates=2, store=path, progress=False)["trained"].to_dataset()


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("collision", UnitFailed, "'y' names a value of the cell"),
        ("dimension", UnitFailed, "'layer' names a value of the cell"),
        ("bench", UsageError, "'replicate' is reserved"),
        ("equal", UsageError, "distinct"),
        ("mixed", UsageError, "mix"),
        ("times", UnitFailed, "'wall_seconds' is reserved"),
        ("coded", UnitFailed, "'scale_factor' means something to the store"),
        ("listed", UnitFailed, "attribute 'note' is a list"),
        ("comparison", ComparisonFailed, "NaN"),
    ],
)
def test_what_would_be_misread_is_refused_by_name(kind, error, words, tmp_path):
    with pytest.raises(error, match=words):
        trained(kind, tmp_path)


def test_one_name_for_texts_and_numbers_is_refused_when_cells_are_joined(tmp_path):
    with pytest.raises(Exception, match=r"'text'.*'number'"):
        trained("kinds", tmp_path)


def test_labels_that_a_cell_lacks_leave_texts_empty_and_numbers_nan(tmp_path):
    joined = trained("ragged", tmp_path)
    assert joined["text"].dtype.kind in "UO"
    assert joined["text"].values[:, 0].tolist() == [["layer 0", "", ""], ["layer 0", "layer 1", "layer 2"]]
    np.testing.assert_array_equal(joined["whole"].values[:, 0], [[0, np.nan, np.nan], [0, 1, 2]])
    np.testing.assert_array_equal(joined["flag"].values[:, 0], [[0, np.nan, np.nan], [0, 1, 1]])


def test_units_that_look_like_dates_stay_words(tmp_path):
    y = trained("days", tmp_path)["y"]
    assert y.dtype == np.float64
    assert y.attrs == {"units": "days", "when": 1.0}


def test_a_text_that_is_predicted_and_trained_is_no_picture(tmp_path):
    assert trained("plain", tmp_path)["text"].dtype.kind == "U"


@pytest.mark.slow
def test_a_worker_that_dies_or_cannot_tell_why_costs_nothing_that_was_finished(tmp_path):
    with local_pool(1) as pool:
        for kind, error in (("unpicklable", UnitFailed), ("killed", WorkersLost)):  # no worker is left after this one
            with pytest.raises(error) as caught:
                run(Odd(kind=kind), replicates=5, executor=pool, store=tmp_path / kind, progress=False)
            (store,) = find_runs(tmp_path / kind)
            assert store.verify() >= 1 + 2 * 3  # the prediction, and two cells of the replicates before
            if kind == "unpicklable":
                assert "replicate 3: Unpicklable: boom" in str(caught.value)
                assert "in train" in caught.value.__notes__[0]


def test_equal_studies_have_one_identity():
    assert fingerprint(Odd(rate=1, rates=(1, 2)), 0) == fingerprint(Odd(rate=1.0, rates=(1.0, 2.0)), 0)
    assert fingerprint(Odd(count=1), 0) != fingerprint(Odd(count=2), 0)


@pytest.mark.parametrize("arguments", [{"seed": 1.0}, {"seed": "1"}, {"replicates": 2.5}])
def test_numbers_of_another_kind_are_refused(arguments, tmp_path):
    with pytest.raises(UsageError, match="an integer"):
        run(Odd(), **arguments, store=tmp_path, progress=False)
    assert run(Odd(), np.int64(1), np.int64(1), store=tmp_path, progress=False).attrs["seed"] == 1


@pytest.mark.parametrize("cell", [{"a/b": 1}, {"a": float("nan")}, {"a": float("inf")}, {"a": "x" * 300}])
def test_cells_that_are_no_folder_names_are_refused(cell):
    with pytest.raises(UsageError, match="cell"):
        Cell(**cell)


def test_equal_cells_have_equal_hashes():
    assert Cell(a=1, b=2) == Cell(b=2.0, a=1.0)
    assert hash(Cell(a=1, b=2)) == hash(Cell(b=2.0, a=1.0))
    assert Cell(a=np.float64(0.5)).slug == "a=0.5"


def test_an_estimated_error_of_the_prediction_widens_more_than_a_known_one():
    claim = {"target": 0.0, "tolerance": 1.0, "basis": "a test", "prediction_error": 0.1}
    known = Verdict.from_samples("it", [0.0, 0.1, -0.1], **claim)
    estimated = Verdict.from_samples("it", [0.0, 0.1, -0.1], **claim, prediction_dof=1)
    half = (known.interval[1] - known.figure, estimated.interval[1] - estimated.figure)
    student = 9.92484 * 0.1 / 3**0.5  # t quantile at 2 degrees of freedom, of the mean of three
    np.testing.assert_allclose(half, [np.hypot(student, 0.257583), np.hypot(student, 6.36567)], rtol=1e-5)


@pytest.mark.parametrize(
    "panel",
    [
        Lines("t", "x", "y", ()),
        Lines("t", "x", "y", (Curve((), (), "none"),)),
        Lines("t", "x", "y", (Curve((1.0, 2.0), (np.nan, np.nan), "nan"),), log_x=True, log_y=True),
        Lines("t", "x", "y", (Curve((-1.0, 0.0), (-1.0, 0.0), "negative"),), log_x=True, log_y=True),
        Lines("t", "x", "$\\frac$ and $5", (Curve((1.0,), (1.0,), "</svg><script>alert('1')</script> -- $"),)),
        Picture("t", "x", "y", ((np.nan, np.nan),)),
        Picture("t", "x", "y", ((0.5, 0.5),), limits=(0.0, 1.0)),
        Picture("t", "x", "y", ((1.0, 1.0),), x_ticks=("$", "$\\frac$")),
    ],
)
def test_every_panel_can_be_drawn_and_holds_no_foreign_markup(panel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = svg(panel, "p-")
    assert "<script" not in text
    assert text.count("</svg>") == 1


def test_many_points_become_pixels():
    points = tuple(np.linspace(0, 1, 20_001).tolist())
    wild = tuple(np.random.default_rng(0).normal(size=20_001).tolist())
    panel = Lines("t", "x", "y", (Curve(points, wild, "noise"),))
    text = svg(panel, "p-")
    assert "data:image/png;base64" in text
    assert len(text) < 100_000
    assert text == svg(panel, "p-")
    assert not re.search(r'href="#(?!p-)', text)


@pytest.mark.parametrize(("values", "ticks"), [((), ()), (((1.0,), (1.0, 2.0)), ()), (((1.0, 2.0),), ("a",))])
def test_a_picture_that_is_no_matrix_is_refused(values, ticks):
    with pytest.raises(UsageError, match="picture"):
        Picture("t", "x", "y", values, x_ticks=ticks)


class Refusing(Still):
    """Refuses numbers of its own and odd data; one of its claims no data can change."""

    name = "toy/refusing"
    unread_prediction = "a test"
    divisor: int = 3
    fixed: bool = False

    def __post_init__(self):
        if 12 % self.divisor:
            raise UsageError("no divisor of 12")

    def compare(self, predicted, trained, claims=None):
        if float(trained["x"].max()) > 50:
            raise UsageError("no such place")
        moved = Verdict.exact("it stays", float(abs(trained["x"]).max()), target=0.0, tolerance=9.0, basis="a test")
        always = Verdict.exact("always", 0.0, target=0.0, tolerance=1.0, basis="a test")
        return (moved, always) if self.fixed else (moved,)


def test_a_study_may_refuse_numbers_and_a_refusal_proves_nothing_of_other_claims():
    check_study(Refusing(divisor=4))
    with pytest.raises(ContractBroken, match=r"no data can change: \['always'\]"):
        check_study(Refusing(fixed=True))


def test_a_study_from_a_file_is_rerun_from_the_file(tmp_path):
    file = tmp_path / "a_study_of_mine.py"
    file.write_text("from tests.study.toys import Still\nclass Mine(Still):\n    name = 'toy/mine'\n")
    assert command_of(load(f"{file}:Mine")()) == f"manyheads study run {file}:Mine"


@pytest.mark.parametrize("change", [lambda text: text.replace('"holds"', '"refuted"'), lambda _: "{}", lambda _: "[]"])
def test_an_altered_summary_is_found_and_renewed_by_running_again(change, tmp_path):
    path = trained_path(tmp_path)
    before = (path / "summary.json").read_text()
    (path / "summary.json").write_text(change(before))
    with pytest.raises(StoreDamaged, match="run the same command again"):
        open_run(path)
    assert trained_path(tmp_path) == path
    assert (path / "summary.json").read_text() == before


class Misdeclared(Still):
    """A study whose class variables are of types that no header holds."""

    name = "toy/misdeclared"
    asked: ClassVar[list] = []

    def train(self, key, **cell):
        self.asked.append(cell)
        return super().train(key, **cell)


DECLARED = [("claim", ("a", "b")), ("revision", True), ("revision", "2"), ("chunk", 0), ("chunk", 2.0)]


@pytest.mark.parametrize(("name", "value"), DECLARED)
def test_a_declaration_that_cannot_be_stored_is_refused_before_anything_is_computed(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr(Misdeclared, "vectorized", True)
    monkeypatch.setattr(Misdeclared, name, value, raising=False)
    with pytest.raises(UsageError, match=r"Misdeclared|toy/misdeclared"):
        run(Misdeclared(), replicates=1, store=tmp_path, progress=False)
    assert not Misdeclared.asked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", [{"authors": ("A B", "C D")}, {"year": "1713"}, {"venue": None}, {"locus": 3}])
def test_a_source_of_other_types_is_refused_where_it_is_written(entry):
    with pytest.raises(UsageError, match=rf"{next(iter(entry))}=.*expected a"):
        dataclasses.replace(SOURCE, **entry)


def test_no_store_is_not_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="store=''"):
        run(Odd(), replicates=1, store="", progress=False)
    assert not list(tmp_path.iterdir())


def test_units_outlive_an_altered_header(tmp_path):
    """What its error says to do keeps every unit."""
    path = trained_path(tmp_path)
    (path / "run.json").write_text("{}")
    with pytest.raises(StoreDamaged, match="move this file away"):
        open_run(path)
    (path / "run.json").rename(tmp_path / "away.json")
    units = {file.name for file in path.glob("table-*")}
    assert trained_path(tmp_path) == path
    assert {file.name for file in path.glob("table-*")} == units


def trained_path(store):
    return Path(run(Odd(), replicates=1, store=store, progress=False).attrs["path"])


DRAWN = Lines("t", "x", "y", (Curve((0.0, 1.0), (0.0, 1.0), "c"),))
ARRAYS = dataclasses.replace(DRAWN, curves=(Curve(np.arange(3.0), np.arange(3.0), "c"),))


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("claims", [1], r"Misdeclared\.claims is list: expected a function of \(theory, trained\)"),
        ("pictures", (), r"Misdeclared\.pictures is tuple"),
        ("compare", lambda self, predicted, trained: (), r"takes other arguments.*\(predicted, trained, claims\)"),
        ("train", lambda self, key, heads: {}, r"Misdeclared\.train: .*'heads'; expected a function of \(key\)"),
        ("flops", lambda self, cell: "many", r"Misdeclared\.flops\(\)='many': expected an integer"),
    ],
)
def test_a_method_of_another_type_is_refused_before_anything_is_computed(method, given, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Misdeclared, method, given, raising=False)
    with pytest.raises(UsageError, match=words):
        run(Misdeclared(), replicates=1, store=tmp_path, progress=False)
    assert not Misdeclared.asked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("claims", None, "returns NoneType: expected to yield Claim"),
        ("claims", [3], "yields int 3: expected Claim"),
        ("claims", [Claim("one", "a", near(1, 0.1), "a test")], "'one': measured 'a'; expected one number"),
        ("claims", [Claim("one", None, near(1, 0.1), "a test")], "'one': measured None; expected one number"),
        ("compare", [3], "yields int 3: expected Verdict"),
        ("pictures", [xr.Dataset()], "yields Dataset .*: expected Lines or"),
        ("pictures", [ARRAYS], r"lines 't': .* expected texts, numbers and tuples of them as help\(Lines\)"),
        ("pictures", [dataclasses.replace(DRAWN, title=None)], "title: str holds None"),
    ],
)
def test_a_comparison_of_other_types_names_the_study_and_keeps_the_units(method, given, words, tmp_path, monkeypatch):
    for name in ("compare", "panels"):
        monkeypatch.delattr(Misdeclared.__mro__[1], name)
    claims = [Claim("one", 1.0, near(1, 0.1), "a test")]
    monkeypatch.setattr(Misdeclared, "claims", lambda *_: claims, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(Misdeclared, method, lambda *_: given, raising=False)
        with pytest.raises(ComparisonFailed, match=f"toy/misdeclared.*{words}") as told:
            run(Misdeclared(), replicates=1, store=tmp_path, progress=False)
    assert "\n" not in str(told.value)
    count = len(Misdeclared.asked)
    assert len(run(Misdeclared(), replicates=1, store=tmp_path, progress=False)["verdicts"]["figure"]) == 1
    assert len(Misdeclared.asked) == count  # nothing is computed again
    Misdeclared.asked.clear()

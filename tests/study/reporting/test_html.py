"""Reports: one file, the same bytes, nothing fetched, nothing that a name could inject."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest
import xarray as xr
from tests.study.reporting.html_links import parsed
from tests.study.toys import Averages, Still, Walk

from manyheads.errors import FileRefused, UsageError
from manyheads.study import Curve, Lines, Listing, Source, Verdict, cite, report, run
from manyheads.study.execution.runner import UnitFailed
from manyheads.study.panels import Multiples, Picture, Scatter, panel_from_json, spread_curve
from manyheads.study.reporting.drawing import draw
from manyheads.study.reporting.html import Section, write_report
from manyheads.study.reporting.style import number_text
from manyheads.study.reporting.svg import svg


@pytest.fixture(scope="module")
def store(tmp_path_factory, seed):
    root = tmp_path_factory.mktemp("runs")
    run(Averages(repeats=5), 3, seed=seed, store=root, progress=False)
    run(Walk(), 3, seed=seed, store=root, progress=False)
    return root


@pytest.mark.slow
def test_one_file_with_unique_ids_and_nothing_fetched(store):
    links = parsed(report(store))
    assert len(links.ids) == len(set(links.ids))
    assert set(links.references) <= set(links.ids)
    assert links.fetched == []
    assert not {"link", "iframe", "img", "object"} & set(links.tags)
    script = re.search("<script>(.*?)</script>", report(store).read_text(), re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in report(store).read_text()  # no other script may run


@pytest.mark.slow
def test_the_same_store_gives_the_same_bytes(store, tmp_path):
    assert report(store, tmp_path / "a.html").read_bytes() == report(store, tmp_path / "b.html").read_bytes()


def test_it_shows_claim_verdict_command_and_citation(store):
    text = report(store).read_text()
    for words in (
        Averages.claim,
        "the slope is −1/2",
        "manyheads study run",
        "--replicates 3",
        "bernoulli1713",
        "</svg>",
    ):
        assert words in text


def test_an_unfinished_run_is_left_out(tmp_path):
    with pytest.raises(UnitFailed):
        run(Walk(fail_at=0), 1, store=tmp_path, progress=False)
    with pytest.raises(FileRefused, match="no run is finished"):
        report(tmp_path)
    run(Averages(repeats=3), 1, store=tmp_path, progress=False)
    assert "1 unfinished run left out" in report(tmp_path).read_text()


def test_runs_of_one_study_say_by_what_they_differ(tmp_path):
    for walkers in (8, 16):
        run(Walk(walkers=walkers), 1, seed=3, store=tmp_path, progress=False)
    titles = re.findall("<h2[^>]*>(.*?)</h2>", report(tmp_path).read_text(), re.DOTALL)
    assert sorted(re.sub("<.*?>", "", title).strip() for title in titles) == [
        "toy/walk: walkers = 16",
        "toy/walk: walkers = 8",
    ]


EVIL = '<script>alert("1")</script>&amp;\'"'


class Hostile(Still):
    """Names that would like to be markup."""

    name = "toy/hostile"
    claim = EVIL
    source = Source("evil", EVIL, EVIL, 2026, locus=EVIL)

    def panels(self, predicted, trained, claims=None):
        curve = Curve((0.0, 1.0), (1.0, 2.0), EVIL)
        return (Lines(EVIL, EVIL, EVIL, (curve,), note=EVIL), Listing(EVIL, (EVIL,), ((EVIL,),)))


def test_formulas_are_typeset_and_numbers_have_a_minus(tmp_path):
    table = Listing(
        "Powers",
        ("a_1", "b", "c"),
        (("-0.5 ± 0.1", "x", "6.04e-14"), ("", "<b>N^(-1/2)</b>", "")),
        "within 1e-06, from -2",
    )
    text = write_report(
        [Section("t", "R_1^2/2 falls as n^-1/2, a_name", (table,))], tmp_path / "r.html", "t"
    ).read_text()
    for words in (
        "R<sub>1</sub><sup>2</sup>/2 falls as n<sup>−1/2</sup>, a_name",
        '<th scope="col" class="number">a<sub>1</sub></th>',
        '<td class="number">−0.5 ± 0.1</td>',
        "&lt;b&gt;N<sup>−1/2</sup>&lt;/b&gt;",
        '<td class="number">6.04×10⁻¹⁴</td>',
        "within 10⁻⁶, from −2",
    ):
        assert words in text


def test_the_filter_offers_the_outcomes_of_the_page_alone(tmp_path):
    def offered(*figures):
        verdicts = tuple(
            Verdict.exact(f"claim {place}", figure, target=0.0, tolerance=1.0, basis="a count")
            for place, figure in enumerate(figures)
        )
        page = write_report(
            [Section("a", "", (), verdicts), Section("b", "", ())], tmp_path / "r.html", "t"
        ).read_text()
        return re.findall('<option value="([a-z]+)">', page)

    assert offered() == offered(0.0, 0.5) == []
    assert offered(0.0, 2.0) == ["holds", "refuted", "unexpected"]


def test_names_cannot_become_markup(tmp_path):
    run(Hostile(), 1, store=tmp_path, progress=False)
    links = parsed(report(tmp_path))
    assert links.tags["script"] == 1  # our own
    assert all(re.fullmatch("[a-z0-9-]+", anchor) for anchor in links.ids if not re.match(r"s\d+p\d+-", anchor))


def test_panels_survive_the_store_and_draw():
    panels = (
        Lines("t", "x", "y", (Curve((1.0, 2.0), (1.0, np.nan), "c", low=(0.0, 0.0), high=(2.0, 2.0)),), log_x=True),
        Picture("t", "x", "y", ((0.0, 1.0), (1.0, 0.5)), x_ticks=("a", "b"), limits=(-1.0, 1.0), diverging=True),
        Listing("t", ("a", "b"), (("1", "x"),)),
        small_multiples(),
        scatter(),
    )
    for panel in panels:
        assert repr(panel_from_json(json.loads(json.dumps(panel.to_json(), allow_nan=False)))) == repr(panel)
    axes = draw(panels[0]).axes[0]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "x")
    assert svg(panels[1], "p-") == svg(panels[1], "p-")


def small_multiples(**changes):
    curve = Curve((0.0, 1.0), (1.0, 2.0), "layer 0")
    plots = {"curves": (((curve,), ()),), "row_labels": ("deep",), "column_labels": ("slow", "fast")}
    return Multiples("t", "x", "y", **plots | {"captions": (("loss 1.5", ""),)} | changes)


def test_small_multiples_share_their_axes_and_one_legend():
    figure = draw(small_multiples(log_y=True))
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert {left.get_yscale(), right.get_yscale()} == {"log"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layer 0"]
    assert [axes.get_title() for axes in figure.axes] == ["slow", "fast"]
    assert left.texts[0].get_text() == "loss 1.5"


def scatter(**changes):
    points = {"x": ((0.0, 1.0), (2.0,)), "y": ((0.5, 1.0), (3.0,)), "values": ((0.5, -1.0), (1.0,))}
    return Scatter("t", "x", "y", **points | {"labels": ("a", "b"), "value_label": "v"} | changes)


def test_scattered_points_share_one_scale_of_colours():
    left, right, bar = draw(scatter(limits=(-2.0, 2.0), diverging=True)).axes
    assert [axes.get_title() for axes in (left, right)] == ["a", "b"]
    assert left.get_xlim() == right.get_xlim()
    assert {axes.collections[0].get_clim() for axes in (left, right)} == {(-2.0, 2.0)}
    assert bar.get_ylabel() == "v"
    left, right, _ = draw(scatter(shared=False)).axes
    assert left.get_xlim() != right.get_xlim()


def test_a_few_whole_numbers_have_a_colour_each():
    figure = draw(scatter(values=((1.0, 2.0), (4.0,))))
    assert [text.get_text() for text in figure.axes[-1].get_yticklabels()] == ["1", "2", "4"]
    colours = [tuple(row) for axes in figure.axes[:2] for row in axes.collections[0].to_rgba([1.0, 2.0, 4.0])]
    assert len(set(colours)) == 3


def test_the_legend_counts_as_people_do():
    curves = tuple(Curve((0.0, 1.0), (1.0, 2.0), label) for label in ("H=16", "H=4, mean", "H=4", "0.5", "limit"))
    figure = draw(small_multiples(curves=((curves, ()),)))
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["0.5", "H=4", "H=4, mean", "H=16", "limit"]


@pytest.mark.parametrize(
    ("sizes", "marked"),
    [
        ((4.0, 8.0, 16.0, 64.0), ["4", "8", "16", "64"]),
        ((4.0, 8.0, 8.5, 64.0), None),  # two marks would touch
        ((4.0, 8.123456), None),
        (tuple(map(float, range(1, 40))), None),
    ],
)
def test_a_logarithmic_axis_is_marked_at_its_sizes_where_these_are_few(sizes, marked):
    axes = draw(Lines("t", "N", "y", (Curve(sizes, sizes, "c"),), log_x=True)).axes[0]
    axes.figure.canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels(which="both") if text.get_text()]
    assert (shown == marked) is (marked is not None)


def test_places_on_the_axis_may_have_names():
    panel = Lines(
        "t", "layer", "error", (Curve((0.0, 1.0), (1.0, 2.0), "c"),), x_ticks=("parity", "a layer of the same size")
    )
    shown = [text.get_text() for text in draw(panel).axes[0].get_xticklabels()]
    assert shown == ["parity", "a layer of the\nsame size"]
    assert "from 1 at parity to 2 at a layer of the same size" in svg(panel, "p-")
    assert panel_from_json(panel.to_json()) == panel
    with pytest.raises(UsageError, match=r"1 x_ticks for the places \[0.0, 1.0\]"):
        Lines("t", "layer", "error", panel.curves, x_ticks=("parity",))


def as_number(label):
    """Read a number of an axis back."""
    mantissa, ten, power = label.rpartition("10") if re.search("10[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]", label) else (label, "", "")
    exponent = power.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")) or "0"
    return float(mantissa.rstrip("×").replace("−", "-") or 1) * (10 ** float(exponent) if ten else 1)


def test_a_logarithmic_axis_over_a_short_range_has_several_marks():
    curve = Curve((1.0, 2.0, 3.0), (0.08, 0.11, 0.15), "c")
    axes = draw(Lines("t", "x", "y", (curve,), log_y=True)).axes[0]
    shown = [float(text.get_text()) for text in axes.get_yticklabels(which="both") if text.get_text()]
    low, high = axes.get_ylim()
    assert sum(low <= mark <= high for mark in shown) >= 3
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize("ends", [(1e-3, 0.1), (1.0, 5e6), (2.0, 30.0)])
def test_logarithmic_axes_are_labelled_with_plain_numbers(ends):
    figure = draw(Lines("t", "x", "y", (Curve(ends, ends, "c"),), log_x=True, log_y=True))
    figure.canvas.draw()
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels(which="both") if text.get_text()]
    assert labels
    for label in labels:
        assert label == number_text(as_number(label))
        assert len(label) <= 7


def test_malformed_panels_are_refused():
    with pytest.raises(UsageError, match=r"rows of \[2\] for \(1, 3\)"):
        small_multiples(column_labels=("a", "b", "c"))
    with pytest.raises(UsageError, match="captions"):
        small_multiples(captions=((),))
    with pytest.raises(UsageError, match="equally many"):
        Curve((1.0,), (1.0, 2.0), "c")
    with pytest.raises(UsageError, match="columns"):
        Listing("t", ("a",), (("1", "2"),))
    with pytest.raises(UsageError, match="equally many in each plot"):
        scatter(labels=("a",))
    with pytest.raises(UsageError, match="smaller and a larger"):
        scatter(limits=(1.0, 1.0))
    with pytest.raises(UsageError, match="unknown kind"):
        panel_from_json({"kind": "pie"})
    with pytest.raises(UsageError, match="at least one"):
        write_report([], None, "t")


def test_bands_reach_from_the_smallest_to_the_largest_replicate(rng):
    samples = rng.normal(size=(5, 3))
    curve = spread_curve([1, 2, 3], samples, "c")
    np.testing.assert_allclose([curve.y, curve.low, curve.high], [samples.mean(0), samples.min(0), samples.max(0)])


def test_the_default_panels_show_the_series_of_a_claim(store):
    tree = run(Averages(repeats=5), 3, store=store, progress=False)
    panel, _ = Averages(repeats=5).panels(tree["predicted"].to_dataset(), tree["trained"].to_dataset())
    assert isinstance(panel, Lines)
    trained, predicted = panel.curves
    assert (trained.role, predicted.role) == ("trained", "predicted")
    np.testing.assert_allclose(predicted.y, [0.5, 0.25, 0.125])
    assert trained.x == (4.0, 16.0, 64.0)


def test_a_report_is_not_written_over_a_folder(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        write_report([Section("t", "l")], tmp_path, "t")


def test_citations_name_each_source_once(store):
    assert cite(store).count("@misc") == 1
    assert cite(store) == Averages.source.bibtex()
    assert cite(Averages) == cite(Averages())
    with pytest.raises(UsageError, match="carries no source"):
        cite(xr.DataTree())
    with pytest.raises(UsageError, match="got a int"):
        cite(3)

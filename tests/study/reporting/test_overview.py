"""Forest plot of claims: one axis for all units, a head line that counts, anchors that are named once."""

import itertools
import math
from dataclasses import replace

import pytest

from manyheads.statistics import Interval
from manyheads.study import Curve, Lines, Verdict
from manyheads.study.panels import Listing, Picture
from manyheads.study.reporting.drawing import draw
from manyheads.study.reporting.overview import (
    Anchors,
    figure_text,
    headline,
    interval_text,
    quantity_text,
    region_text,
    state_findings,
    strip_of,
)
from manyheads.study.reporting.style import colour_rules, number_text, typeset
from manyheads.study.reporting.svg import describe, svg

LEFT, RIGHT = 100 / 3, 200 / 3  # ends of the range in which a claim holds, in percent of a row


def verdict(low, high, target=0.0, tolerance=1.0, expected="holds"):
    interval = Interval(low, high)
    return Verdict.from_interval("c", interval, target=target, tolerance=tolerance, basis="b", expected=expected)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])
def test_the_range_of_a_claim_has_the_same_place_in_every_unit(unit):
    strip = strip_of(verdict(9.5 * unit, 13 * unit, target=10 * unit, tolerance=2 * unit))
    assert strip.region == pytest.approx((LEFT, RIGHT), abs=0.01)
    assert strip.interval == pytest.approx((50 - 0.25 * 100 / 6, 50 + 1.5 * 100 / 6), abs=0.01)
    assert strip.target == 50.0


@pytest.mark.parametrize("tolerance", [(math.inf, 0.0), (math.inf, 0.3), (0.0, math.inf), (0.3, math.inf)])
def test_a_one_sided_claim_reaches_to_the_end_of_the_row(tolerance):
    inside, outside = (verdict(sign * 5.0, sign * 5.0 + 1, tolerance=tolerance) for sign in (-1, 1))
    if math.isinf(tolerance[1]):
        inside, outside = outside, inside
        assert strip_of(inside).region == pytest.approx((LEFT, 100), abs=0.01)
    else:
        assert strip_of(inside).region == pytest.approx((0, RIGHT), abs=0.01)
    low, high = strip_of(inside).region
    assert (inside.outcome, outside.outcome) == ("holds", "refuted")
    assert low <= strip_of(inside).figure <= high
    assert not low <= strip_of(outside).figure <= high


def test_what_lies_far_away_ends_in_an_arrow():
    assert strip_of(verdict(-100.0, 0.5)).cut == (True, False)
    assert strip_of(verdict(-math.inf, math.inf)).cut == (True, True)
    assert strip_of(verdict(-math.inf, math.inf)).figure is None
    assert strip_of(Verdict.exact("c", 3.0, target=2.0, tolerance=0.0, basis="b")).figure == 100.0
    assert strip_of(Verdict.exact("c", 2.0, target=2.0, tolerance=0.0, basis="b")).figure == 50.0


def test_the_head_line_counts_what_is_expected():
    holds, open_, fails = verdict(-0.5, 0.5), verdict(0.0, 2.0), verdict(5.0, 6.0)
    known = verdict(5.0, 6.0, expected="refuted")
    assert headline([holds, holds, open_]) == "3 claims: 2 hold, 1 is inconclusive."
    assert headline([fails, known]) == "2 claims: 2 are refuted (1 of them as expected, 1 against expectation)."
    assert headline([known]) == "1 claim: 1 is refuted (as expected)."
    assert headline([verdict(-0.5, 0.5, expected="refuted")]) == "1 claim: 1 holds (1 against expectation)."


def test_ranges_are_written_as_people_read_them():
    assert region_text(verdict(0.0, 1.0, tolerance=(math.inf, 0.25))) == "at most 0.25"
    assert region_text(verdict(0.0, 1.0, tolerance=(0.25, math.inf))) == "at least −0.25"
    assert region_text(verdict(0.0, 1.0, tolerance=0.0)) == "exactly 0"
    assert region_text(verdict(0.0, 1.0, target=96.0, tolerance=1e-9)) == "96 within 10⁻⁹"
    assert figure_text(verdict(-math.inf, math.inf)) == "not a number"
    assert interval_text(verdict(-2e-5, 0.5)) == "−2×10⁻⁵ … 0.5"


@pytest.mark.parametrize(
    ("claim", "quantity"),
    [
        ("The times agree (log ratio)", "log ratio"),
        ("The share falls (in doublings, worst of all)", "in doublings, worst of all"),
        ("The error scales as n^(-1/2)", ""),
        ("The drift is proportional to the rate (linear attention)", ""),
    ],
)
def test_a_quantity_is_stated_or_stands_in_brackets_after_the_claim(claim, quantity):
    found = replace(verdict(0.0, 1.0), claim=claim)
    assert quantity_text(found) == quantity
    assert quantity_text(replace(found, quantity="escape time (steps)")) == "escape time (steps)"


def test_anchors_are_named_after_what_they_mark_and_given_once():
    anchors = Anchors()
    assert anchors.name("limits/infinite-depth", "The slope is -1/2") == "limits-infinite-depth-the-slope-is-1-2"
    assert anchors.name("limits/infinite-depth", "The slope is -1/2") == "limits-infinite-depth-the-slope-is-1-2-2"
    assert anchors.name("Θ") == "part"


def test_numbers_are_typeset():
    assert typeset("-1.5e-07") == "−1.5×10⁻⁷"
    assert [number_text(value) for value in (1e5, 2e6, -1e-5, 0.001, 65536.0, 0.0006000000000000001)] == [
        "10⁵",
        "2×10⁶",
        "−10⁻⁵",
        "0.001",
        "65536",
        "6×10⁻⁴",
    ]


def test_a_drawing_has_real_text_a_title_and_words():
    curves = (Curve((1.0, 2.0), (3.0, 4.0), "first"), Curve((1.0, 2.0), (3.0, 5.0), "second", group=1))
    panel = Lines("A <title>", "x [s]", "y", curves)
    text = svg(panel, "p-")
    for words in (
        'role="img"',
        "A &lt;title&gt;</title>",
        ">first<",
        "x (s)",
        "first: from 3 at 1 to 4 at 2.",
        ' stroke="#e69f00" ',
    ):
        assert words in text
    assert "font-family" not in text
    assert "var(" not in text  # which viewers of pictures do not know
    assert 'svg [stroke="#e69f00"] { stroke: var(--c1); }' in colour_rules()
    assert (
        describe(Picture("t", "x", "y", ((0.0, math.nan),)))
        == "Heat map of values in 1 rows (y) and 2 columns (x), from 0 to 0."
    )


def test_few_curves_are_labelled_at_their_ends_without_overlap():
    curves = tuple(Curve((1.0, 2.0), (1.0, 2.0 + 1e-3 * at), f"c{at}", group=at) for at in range(5))
    axes = draw(Lines("t", "x", "y", curves)).axes[0]
    assert axes.get_legend() is None
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert len(heights) == 5
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 0.07


@pytest.mark.parametrize(
    "curves",
    [
        (Curve((1.0, 2.0), (1.0, 2.0), "long " * 9), Curve((1.0, 2.0), (1.0, 2.0), "b")),
        (Curve((1.0, 1.1), (1.0, 2.0), "ends early"), Curve((1.0, 2.0), (1.0, 2.0), "b")),
    ],
)
def test_other_curves_are_named_above_the_axes(curves):
    figure = draw(Lines("t", "x", "y", curves))
    figure.draw_without_rendering()
    legend, axes = figure.axes[0].get_legend(), figure.axes[0]
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_titles_of_pictures_say_what_was_decided_on_the_claims_they_show():
    exact = {"target": 0.0, "tolerance": 1.0, "basis": "a closed form"}
    held, refuted = (
        Verdict.exact(f"the {name} is small (ratio)", at, **exact) for name, at in (("bias", 0), ("std", 9))
    )
    interval = Interval(-2.0, 2.0)
    undecided = Verdict.from_interval("the mean is small", interval, **exact)
    verdicts = (held, refuted, undecided)

    def title(*shows):
        (panel,) = state_findings([Listing("Sizes", ("size",), (("1",),), shows=shows)], verdicts)
        return panel.title

    assert title() == title("the median") == "Sizes"
    assert title("bias") == "the bias is small"
    assert title("std") == "Refuted: the std is small"
    assert title("the mean") == "Undecided: the mean is small"
    assert title("bias", "std") == "Sizes (1 of 2 claims hold, 1 refuted)"

    pair = [Listing(name, ("size",), (("1",),), shows=("std",)) for name in ("Top", "Bottom")]
    assert [panel.title for panel in state_findings(pair, verdicts)] == ["Top (refuted)", "Bottom (refuted)"]

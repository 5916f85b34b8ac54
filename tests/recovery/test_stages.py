"""Stages one to five: every formula against something independent, and what shards may change: nothing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.recovery import evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.stages.agreement import RowCertificates, certify_rows, fit_simplex, measure_quality
from manyheads.recovery.examples.stages.crude_sum import Moments, estimate_crude_sum, measure_moments
from manyheads.recovery.examples.stages.hull import (
    Hull,
    HullSettings,
    choose_rows,
    count_by_gap,
    find_bottom_by_products,
    find_bottom_dense,
    find_hull,
    fit_hull,
    measure_gram,
    measure_span_error,
    multiply_gram,
    span_of,
    weighted_median,
)
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, measure_doubt, refine_sum
from manyheads.recovery.examples.stages.shards import add_up, open_shards
from manyheads.recovery.refusals import CertificateShortage, DesignError

LARGE = 10.0  # a threshold below which every row is


@pytest.fixture
def planted(rng):
    layer = planted_layer(rng, 5, 2)
    x = sequences(rng, 1500, 3, 5)
    return layer, x, evaluate_layer(layer, x)


def cut(x, y, rng, pieces=4):
    places = np.sort(rng.choice(np.arange(1, len(x)), pieces - 1, replace=False))
    return list(zip(np.split(x, places), np.split(y, places), strict=True))


def test_the_correlation_is_a_gradient_step_from_uniform_attention(rng):
    """Half the mean squared error of uniform attention with projection W, differentiated at W = 0 by differences."""
    x, y = rng.normal(size=(2, 30, 3, 4))

    def loss(projection):
        left = y - np.repeat(x.mean(1, keepdims=True), 3, axis=1) @ projection
        return (left**2).sum() / 2 / len(x)

    step = 1e-3
    units = np.eye(16).reshape(16, 4, 4) * step
    slopes = np.array([(loss(unit) - loss(-unit)) / (2 * step) for unit in units]).reshape(4, 4)
    found, _ = estimate_crude_sum(open_shards((x, y)), "correlation")
    np.testing.assert_allclose(found, -slopes, atol=1e-9)


def test_the_regression_is_the_least_squares_solution(rng):
    x, y = rng.normal(size=(2, 40, 3, 4))
    found, effective = estimate_crude_sum(open_shards((x, y)), "regression")
    np.testing.assert_allclose(found, np.linalg.lstsq(x.sum(1), y.sum(1))[0], atol=1e-12)
    assert effective > 0


def test_inputs_that_do_not_span_are_refused(rng):
    x = rng.normal(size=(40, 2, 4))
    x[..., 3] = x[..., 2]
    with pytest.raises(DesignError, match="do not span") as refused:
        estimate_crude_sum(open_shards((x, x)))
    assert refused.value.measured > refused.value.threshold


def test_every_row_of_one_head_is_certified_by_its_own_weights(rng):
    layer, x = planted_layer(rng, 6, 1), sequences(rng, 60, 4, 6, distribution="gaussian")
    weights, misfit = fit_simplex(x, evaluate_layer(layer, x), layer.projection[0])
    np.testing.assert_allclose(weights, layer.weights(x)[:, 0], atol=1e-10)
    assert misfit.max() < 1e-10


def test_the_fit_is_the_constrained_least_squares_solution(rng):
    """Against the normal equations with a Lagrange multiplier."""
    x, y, total = rng.normal(size=(3, 4, 6)), rng.normal(size=(3, 4, 6)), rng.normal(size=(6, 6))
    weights, misfit = fit_simplex(x, y, total)
    for sequence, row in np.ndindex(3, 4):
        z = x[sequence] @ total
        bordered = np.block([[z @ z.T, np.ones((4, 1))], [np.ones((1, 4)), np.zeros((1, 1))]])
        expected = np.linalg.solve(bordered, np.append(z @ y[sequence, row], 1))[:4]
        np.testing.assert_allclose(weights[sequence, row], expected, atol=1e-9)
        left = np.linalg.norm(y[sequence, row] - expected @ z) / np.linalg.norm(z - z.mean(0))
        assert misfit[sequence, row] == pytest.approx(left, rel=1e-9)


def test_equations_measure_the_change_of_the_weights(rng):
    """For any Theta the squared misses of a row are |D e|^2, e the errors of its logits; no token is special."""
    x, theta = rng.normal(size=(1, 4, 3)), rng.normal(size=(3, 3))
    layer = planted_layer(rng, 3, 1)
    y = evaluate_layer(layer, x)
    found = certify_rows(x, y, layer.projection[0], 1e-9, LARGE)
    assert len(found) == 4
    misses = np.square(found.misses(theta[None], np.ones(1))).sum((1, 2))
    pattern = layer.weights(x)[0, 0]
    for row in range(4):
        errors = x[0, row] @ theta @ x[0].T - np.log(pattern[row])
        change = np.diag(pattern[row]) - np.outer(pattern[row], pattern[row])
        assert misses[row] == pytest.approx(np.sum((change @ errors) ** 2), rel=1e-4, abs=1e-10)


def test_quality_is_infinite_without_all_tokens_and_trust_ends_at_zero(planted):
    layer, x, y = planted
    total, floor = layer.projection.sum(0), 0.05
    weights, misfit = fit_simplex(x, y, total)
    quality = measure_quality(x, y, total, floor)
    assert np.isinf(quality[weights.min(-1) <= floor]).all()
    clear = weights.min(-1) >= 2 * floor
    np.testing.assert_array_equal(quality[clear], misfit[clear])
    assert (quality >= misfit).all()
    threshold = np.quantile(quality[np.isfinite(quality)], 0.5)
    found = certify_rows(x, y, total, floor, threshold)
    assert len(found) == (quality < threshold).sum()
    assert found.trust.min() >= 0
    kept = np.sort(quality[quality < threshold])
    np.testing.assert_allclose(np.sort(found.trust)[::-1], (1 - (kept / threshold) ** 2) ** 2, atol=1e-12)


def exact_certificates(rng, theta, count):
    """Equations that hold for all heads: mixes along which the heads agree."""
    dim = theta.shape[1]
    query, mixes = rng.normal(size=(count, dim)), rng.normal(size=(count, 1, dim))
    for row in range(count):
        asked = query[row] @ theta  # (m, d)
        differ = asked[1:] - asked[:1]
        mixes[row, 0] -= differ.T @ np.linalg.lstsq(differ.T, mixes[row, 0])[0]
    targets = np.einsum("nd,de,nse->ns", query, theta[0], mixes)
    return RowCertificates(query, mixes, targets, np.ones(count))


def test_a_planted_hull_is_recovered_to_rounding_from_exact_equations(rng):
    theta = rng.normal(size=(3, 6, 6))
    found = exact_certificates(rng, theta, 400)
    data = open_shards((np.zeros((1, 2, 6)), np.zeros((1, 2, 6))))
    hull = fit_hull(data, [found], 1.0, 3, HullSettings())
    assert measure_span_error(span_of(hull), theta) < 1e-10
    assert hull.gap > 1e10
    assert count_by_gap(hull.eigenvalues) == 3
    flat = theta.reshape(3, -1)
    differences = (flat[1:] - flat[:1]).T
    nearest = flat[0] - differences @ np.linalg.lstsq(differences, flat[0])[0]
    np.testing.assert_allclose(hull.nearest.ravel(), nearest, atol=1e-9)
    np.testing.assert_allclose(flat @ nearest, nearest @ nearest, rtol=1e-9)  # the same margin for every head


def test_the_matrix_free_solver_finds_what_the_dense_one_finds(planted):
    layer, x, y = planted
    total = layer.projection.sum(0)
    parts, _ = choose_rows(open_shards((x, y)), total, HullSettings(kept=500))
    trust = [part.trust for part in parts]
    values, vectors = find_bottom_dense(parts, trust, 4)
    free, found = find_bottom_by_products(parts, trust, 4, np.random.default_rng(1))
    np.testing.assert_allclose(free, values, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[:, :2], vectors[:, :2], atol=1e-6)
    gram = measure_gram(parts[0], trust[0])
    vector = vectors[:, 0] + 1
    np.testing.assert_allclose(multiply_gram(parts[0], trust[0], vector), gram[0] @ vector, rtol=1e-9, atol=1e-12)
    data = open_shards((x, y))
    hulls = [find_hull(data, total, 2, HullSettings(kept=500, dense=dense)) for dense in (32, 1)]
    np.testing.assert_allclose(hulls[1].nearest, hulls[0].nearest, atol=1e-6)


def test_sums_over_shards_are_those_of_a_single_pass(planted, rng):
    _, x, y = planted
    whole = open_shards((x, y))
    with ThreadPoolExecutor(2) as pool:
        pieces = open_shards([(lambda pair=pair: pair) for pair in cut(x, y, rng)], pool)
        moments = [Moments(*add_up(data.map(measure_moments))) for data in (whole, pieces)]
        np.testing.assert_allclose(moments[1].inputs, moments[0].inputs, rtol=1e-12)
        np.testing.assert_allclose(moments[1].cross, moments[0].cross, rtol=1e-12, atol=1e-10)
        sums = [estimate_crude_sum(data)[0] for data in (whole, pieces)]
        np.testing.assert_allclose(sums[1], sums[0], rtol=0, atol=1e-12)
        hulls = [find_hull(data, total, 2, HullSettings()) for data, total in zip((whole, pieces), sums, strict=True)]
        assert hulls[1].threshold == pytest.approx(hulls[0].threshold, rel=1e-12)
        np.testing.assert_allclose(hulls[1].eigenvalues, hulls[0].eigenvalues, rtol=0, atol=1e-12)
        for form in ("margin", "trimmed"):
            settings = RefinementSettings(form, sequences=400, steps=2, inner=10)
            refined = [
                refine_sum(data, hull.nearest, settings) for data, hull in zip((whole, pieces), hulls, strict=True)
            ]
            np.testing.assert_allclose(refined[1], refined[0], rtol=0, atol=1e-11)


def test_order_statistics_and_places_do_not_know_the_cuts(planted, rng):
    layer, x, y = planted
    pieces = open_shards(cut(x, y, rng)).without_last(200)
    assert pieces.count == 1300
    expected = np.sort(measure_doubt(x[:1300], y[:1300], layer.theta[0]), axis=None)[:77]
    np.testing.assert_array_equal(pieces.smallest(measure_doubt, 77, layer.theta[0]), expected)
    places = rng.permutation(1300)[:50]
    np.testing.assert_array_equal(pieces.take(places)[0], x[places])
    np.testing.assert_array_equal(pieces.take(places)[1], y[places])


def test_a_weighted_median_ignores_what_has_no_weight(rng):
    values = rng.normal(size=101)
    assert weighted_median(values, np.ones(101)) == np.median(values)
    extended = np.append(values, [-100.0, 100.0, 50.0])
    assert weighted_median(extended, np.append(np.ones(101), np.zeros(3))) == np.median(values)


def test_both_refinements_improve_on_the_crude_sum(rng):
    """Two heads: the published form by the clearest rows, the trimmed head by much more."""
    layer = planted_layer(rng, 12, 2)
    x = sequences(rng, 12_000, 2, 12)
    data, total = open_shards((x, evaluate_layer(layer, x))), layer.projection.sum(0)
    crude, _ = estimate_crude_sum(data)
    nearest = find_hull(data, total, 2, HullSettings(reweighings=1)).nearest
    margin = refine_sum(data, nearest, RefinementSettings("margin"))
    trimmed = refine_sum(data, None, RefinementSettings(sequences=800, steps=4, inner=15))
    before, published, practical = (np.linalg.norm(estimate - total) for estimate in (crude, margin, trimmed))
    assert published < 0.9 * before
    assert practical < 0.4 * before


def test_too_few_rows_are_a_shortage(rng):
    layer, x = planted_layer(rng, 8, 2), sequences(rng, 40, 2, 8)
    with pytest.raises(CertificateShortage, match="of 80 rows"):
        find_hull(open_shards((x, evaluate_layer(layer, x))), layer.projection.sum(0), 2, HullSettings())


@pytest.mark.parametrize(
    ("examples", "error", "words"),
    [
        ([], UsageError, "no shard"),
        ((np.ones((3, 2, 2)), np.ones((3, 2, 1))), ShapeError, "one shape"),
        ((np.ones((3, 1, 2)), np.ones((3, 1, 2))), UsageError, "one token"),
        ((np.full((3, 2, 2), np.nan), np.ones((3, 2, 2))), UsageError, "NaN"),
        ((np.full((3, 2, 2), "a"), np.full((3, 2, 2), "a")), ShapeError, "numbers"),
        ([(np.ones((3, 2, 2)), np.ones((3, 2, 2))), (np.ones((3, 2, 4)), np.ones((3, 2, 4)))], ShapeError, "shards of"),
    ],
)
def test_bad_examples_are_refused(examples, error, words):
    with pytest.raises(error, match=words):
        open_shards(examples)


def test_forms_that_do_not_exist_are_refused(rng):
    data = open_shards((rng.normal(size=(20, 2, 2)), rng.normal(size=(20, 2, 2))))
    with pytest.raises(UsageError, match="form"):
        estimate_crude_sum(data, "other")
    with pytest.raises(UsageError, match="form"):
        RefinementSettings("other")
    with pytest.raises(UsageError, match="nearest to zero"):
        refine_sum(data, None, RefinementSettings("margin"))


def test_a_gap_is_never_more_than_rounding_allows():
    """Eigenvalues that are zero to rounding count as rounding; without any above, no hull stands out."""
    basis, heights = np.eye(2)[None], np.ones(1)
    for values, gap in (([0.0, 1.0, 2.0], 0.5e16), ([0.5, 1.0, 2.0], 2.0), ([0.0, 0.0, 0.0], 1.0), ([1.0], 1.0)):
        assert Hull(basis, heights, np.array(values), 9, 0.1).gap == pytest.approx(gap)


def test_shards_of_which_nothing_is_left_are_dropped(rng):
    x, y = rng.normal(size=(2, 30, 2, 3))
    left = open_shards([(x[:20], y[:20]), (x[20:27], y[20:27]), (x[27:], y[27:])]).without_last(10)
    assert (left.counts, len(left.shards), left.count) == ((20,), 1, 20)
    np.testing.assert_array_equal(left.take([19, 0])[0], x[[19, 0]])
    assert len(left.map(measure_quality, np.eye(3), 0.02)) == 1

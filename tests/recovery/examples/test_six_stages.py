"""Stage six, and the six stages together: what is found, what is refused, and by which name."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery import compare_layers, evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.six_stages import LITERAL, SixStageRun, StageSettings, learn_in_six_stages
from manyheads.recovery.examples.stages.acceptance_rate import (
    dimension_correction,
    predict_acceptance,
    predict_small_threshold,
)
from manyheads.recovery.examples.stages.fit import FitSettings, descend_in_span, differentiate, fit_in_span
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, regress_clear_rows
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.fit.variable_projection import Examples, Tangent
from manyheads.recovery.refusals import CertificateShortage, EffectiveSumError, NoFit, RecoveryRefused

QUICK = StageSettings(
    refinement=RefinementSettings(sequences=600, steps=4, inner=15),
    fit=FitSettings(sequences=200),
    joint_fit_sequences=600,
)

HOPELESS = replace(
    QUICK,
    refinement=RefinementSettings(sequences=300, steps=2, inner=10),
    fit=FitSettings(starts=2, sequences=100),
    joint_fit=GaussNewtonSettings(steps=2, inner=20),
    most_heads=1,
)


def labelled(rng, layer, count=3000, length=2):
    x = sequences(rng, count, length, layer.dim, distribution="gaussian")
    return x, evaluate_layer(layer, x)


def test_the_projected_jacobian_gives_the_slope_of_the_error(rng):
    """Against central differences of the error itself, the projections solved for anew at each point."""
    layer, span = planted_layer(rng, 4, 2), rng.normal(size=(3, 4, 4))
    x, y = labelled(rng, layer, 60, 3)
    examples, mixture = Examples(x, y), rng.normal(size=(2, 3)) * 0.3

    def at(mixture):
        return Tangent.at(examples, np.tensordot(mixture, span, 1))

    here = at(mixture)
    slope = -2 * (differentiate(here, span).T @ here.residual.ravel()).reshape(2, 3) / examples.power
    step = 1e-5
    for place in np.ndindex(2, 3):
        moved = np.zeros((2, 3))
        moved[place] = step
        numeric = (at(mixture + moved).loss - at(mixture - moved).loss) / (2 * step)
        assert slope[place] == pytest.approx(numeric, rel=1e-5, abs=1e-8)


def test_a_descent_never_climbs_and_the_net_keeps_its_best(rng):
    layer = planted_layer(rng, 4, 2)
    x, y = labelled(rng, layer, 150)
    span = np.linalg.qr(layer.theta.reshape(2, -1).T)[0].T.reshape(2, 4, 4)
    start = Tangent.at(Examples(x, y), np.tensordot(rng.normal(size=(2, 2)), span, 1))
    assert descend_in_span(start, span, FitSettings()).loss <= start.loss
    seed = int(rng.integers(2**31))
    few, many = (
        fit_in_span(span, x, y, 2, np.random.default_rng(seed), FitSettings("net", points=points, good=0.0))
        for points in (5, 60)
    )
    assert many.tried == 60
    assert many.error <= few.error


def test_heads_and_their_number_are_found_from_shards(rng):
    layer = planted_layer(rng, 5, 2)
    x, y = labelled(rng, layer, 4000)
    seed = int(rng.integers(2**31))
    with ThreadPoolExecutor(2) as pool:
        shards = ((x[part], y[part]) for part in (slice(0, 700), slice(700, 2500), slice(2500, None)))
        found = learn_in_six_stages(open_shards(shards, pool), settings=QUICK, rng=np.random.default_rng(seed))
    assert found.heads == 2
    assert compare_layers(layer, found.layer).worst < 1e-9
    assert found.certificate["held_out_error"] < 1e-20
    assert found.certificate["sequences"] == 400
    assert [stage.name for stage in found.stages][:2] == ["crude sum", "refined sum"]
    single = learn_in_six_stages((x, y), settings=QUICK, rng=np.random.default_rng(seed))
    np.testing.assert_allclose(single.layer.theta, found.layer.theta, atol=1e-9)


def test_the_published_forms_find_one_head_and_one_head_is_one(rng):
    layer = planted_layer(rng, 5, 1)
    x, y = labelled(rng, layer)
    for settings in (QUICK, LITERAL):
        found = learn_in_six_stages((x, y), settings=settings, rng=rng)
        assert found.heads == 1
        assert compare_layers(layer, found.layer).worst < 1e-9


def test_a_number_of_heads_that_was_fitted_later_and_better_has_its_joint_fit_too(rng, monkeypatch):
    """The first of two numbers had its joint fit in vain; the second is right, and nothing said it was enough."""
    layer = planted_layer(rng, 4, 2)
    x, y = labelled(rng, layer)
    monkeypatch.setattr(SixStageRun, "is_enough", lambda bench: len(bench.fitted) == 1)
    found = learn_in_six_stages((x, y), settings=replace(QUICK, most_heads=2), rng=rng)
    assert found.heads == 2
    assert compare_layers(layer, found.layer).worst < 1e-9


def test_more_heads_than_matrices_have_entries_end_as_a_refusal(rng):
    x = sequences(rng, 600, 2, 1, distribution="gaussian")
    with pytest.raises(RecoveryRefused):
        learn_in_six_stages((x, np.tanh(x)[:, ::-1] + x**2), settings=replace(HOPELESS, most_heads=6), rng=rng)


def test_noise_is_allowed_for(rng):
    layer = planted_layer(rng, 5, 1)
    x, y = labelled(rng, layer)
    y = y + 0.05 * rng.standard_normal(y.shape)
    found = learn_in_six_stages((x, y), settings=replace(QUICK, noise=0.05), rng=rng)
    assert found.heads == 1
    assert compare_layers(layer, found.layer).worst < 0.1
    with pytest.raises(RecoveryRefused) as refused:
        learn_in_six_stages((x, y), 1, settings=HOPELESS, rng=rng)
    assert refused.value.result.layer.heads == 1
    assert refused.value.measured > 0


def test_projections_that_cancel_are_named(rng):
    layer = planted_layer(rng, 16, 2)
    cancelling = AttentionLayer(layer.theta, np.stack([layer.projection[0], -layer.projection[0]]))
    x, y = labelled(rng, cancelling, 8000)
    with pytest.raises(EffectiveSumError, match="cancel"):
        learn_in_six_stages((x, y), settings=HOPELESS, rng=rng)


def test_what_is_no_such_layer_is_refused(rng):
    x = sequences(rng, 3000, 2, 4, distribution="gaussian")
    with pytest.raises(RecoveryRefused):
        learn_in_six_stages((x, np.tanh(x)[:, ::-1] + x**2), settings=HOPELESS, rng=rng)
    with pytest.raises(CertificateShortage):
        learn_in_six_stages((x[:20], x[:20] ** 2), settings=HOPELESS, rng=rng)


def test_bad_arguments_are_refused(rng):
    x = np.ones((5, 2, 2))
    for arguments in (
        {"examples": (x, x)},
        {"examples": (x, x), "heads": 0},
        {"examples": (rng.normal(size=(30, 2, 2)), np.zeros((30, 2, 2)))},
    ):
        with pytest.raises(UsageError):
            learn_in_six_stages(**arguments, rng=rng)
    for wrong in ({"most_heads": 0}, {"tolerance": 0.0}, {"noise": -1.0}):
        with pytest.raises(UsageError):
            StageSettings(**wrong)
    with pytest.raises(UsageError):
        FitSettings("other")


def test_the_limit_of_acceptance_is_its_law_at_small_thresholds(rng):
    """Two heads, two tokens: Monte Carlo against the closed form; five standard errors."""
    threshold, draws = 0.002, 400_000
    share = predict_acceptance(rng, 2, 2, [threshold], draws=draws)[0] / threshold
    limit = predict_small_threshold(2.0)
    assert abs(share / limit - 1) < 5 / (draws * threshold * limit) ** 0.5 + 0.01
    assert dimension_correction(1.0, 2, 16) == pytest.approx((0.5 + 0.75) / 16)
    with pytest.raises(UsageError):
        predict_acceptance(rng, 1, 2, [0.1])


def test_rows_that_tie_in_doubt_are_kept_together_or_refused_by_name(rng):
    """Tokens of signs have few distinct doubts: the smallest may be that of hundreds of rows."""
    layer = planted_layer(rng, 4, 1, scale=6.0)
    x = rng.choice([-1.0, 1.0], (2000, 2, 4))
    theta = np.zeros((4, 4))
    theta[0, 0] = 3.0  # doubts of +-3 and 0 alone
    found = regress_clear_rows(open_shards((x, layer(x))), theta, RefinementSettings(form="margin"))
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0.01
    same = np.repeat(x[:1], 5, 0)
    with pytest.raises(CertificateShortage, match="attend clearly to one token"):
        regress_clear_rows(open_shards((same[:2], same[:2])), theta, RefinementSettings(form="margin"))


def test_singular_equations_end_as_a_refusal(rng, monkeypatch):
    def singular(*_):
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr("manyheads.recovery.examples.six_stages.refine_sum", singular)
    with pytest.raises(NoFit, match="no solution"):
        learn_in_six_stages(labelled(rng, planted_layer(rng, 4, 2)), settings=QUICK, rng=rng)

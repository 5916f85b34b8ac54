"""A recovery in figures and pictures: ranks, norms, free parameters, and what the panels show."""

import json

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.attention import AttentionLayer
from manyheads.recovery import Recovery, gpt_layer, planted_layer
from manyheads.recovery.layers.panels import (
    Head,
    at_offset_one,
    describe_heads,
    free_parameters,
    layer_panels,
    rank_tolerance,
)
from manyheads.recovery.oracle.oracle import Counts
from manyheads.recovery.result.certificates import Certificate
from manyheads.recovery.result.reports import recovery_section, summarize_recovery
from manyheads.recovery.result.results import Extracted, Stage


def recovered(layer, error=1e-20):
    """Return a recovery of a layer as `extract_layer` would, with a certificate that says this error."""
    certificate = Certificate(error, error / 2, 0.023, 0.9999, 400, 1e-6, 1.0, "sequences of a test")
    return Recovery(
        layer,
        certificate,
        (Stage("sums", {"gap": np.float64(2.0), "worst": np.inf}, 0.1),),
        "subspaces",
        counts={"sums": Counts(3, 5, 12, 1.5), "verification": Counts(400, 900, 400)},
        extracted=Extracted(layer),
    )


def test_ranks_and_norms_are_those_of_the_matrices(rng):
    layer = gpt_layer(rng, 10, 3, rank=2)
    for head, row in enumerate(describe_heads(layer)):
        assert row.theta_rank == np.linalg.matrix_rank(layer.theta[head]) == 2
        assert row.projection_rank == np.linalg.matrix_rank(layer.projection[head]) == 2
        assert row.theta_norm == pytest.approx(np.sqrt((layer.theta[head] ** 2).sum()))
        assert row.projection_norm == pytest.approx(np.sqrt((layer.projection[head] ** 2).sum()))
        assert row.key_bias_norm == pytest.approx(np.sqrt((layer.key_bias[head] ** 2).sum()))
    # What is below the error of the recovery is no rank.
    rough = AttentionLayer(layer.theta + 1e-4 * rng.normal(size=layer.theta.shape), layer.projection)
    assert min(row.theta_rank for row in describe_heads(rough)) > 2
    assert {row.theta_rank for row in describe_heads(rough, rank_tolerance(1e-5))} == {2}


def test_free_parameters_are_those_of_the_factors(rng):
    """A matrix of rank r is a product of factors, up to an invertible r x r matrix: count the tangent directions."""
    dim, rank = 5, 2
    factors = rng.normal(size=(dim + 1, rank)), rng.normal(size=(dim, rank))
    directions = []
    for place, factor in enumerate(factors):
        for row, column in np.ndindex(factor.shape):
            moved = [np.zeros_like(factors[0]), np.zeros_like(factors[1])]
            moved[place][row, column] = 1
            directions.append((moved[0] @ factors[1].T + factors[0] @ moved[1].T).ravel())
    form = np.linalg.matrix_rank(np.stack(directions))

    assert free_parameters(dim, [Head(rank, 0, 1.0, 0.0, 0.0)]) == form + dim


def test_a_summary_is_json_and_compares_only_what_can_be(rng):
    layer = gpt_layer(rng, 6, 2)
    summary = summarize_recovery(recovered(layer), layer)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["stages"][0]["figures"] == {"gap": 2.0, "worst": None}
    assert summary["asked"]["calls"] == 403
    assert summary["numbers_per_parameter"] == pytest.approx(412 / summary["parameters"])
    assert summary["against_weights"] == {"heads": 2, "theta": 0, "projection": 0, "key_bias": 0, "bias": 0}
    assert summarize_recovery(recovered(layer), gpt_layer(rng, 6, 3))["against_weights"] == {"heads": 3}
    assert summarize_recovery(recovered(layer))["against_weights"] == {}


def test_a_layer_with_positions_is_shown_one_token_back(rng):
    layer = planted_rotary_layer(rng, 8, 2, key_bias=0.3)
    shown = at_offset_one(layer)
    x = rng.normal(size=(3, 2, 8))
    one, other = layer.form(1)[0], rng.normal(size=8)
    # The logit of a query against a key one back, less that against the zero key, is what the shown layer computes.
    query, key = np.append(x[0, 1], 1.0), np.append(other, 1.0)
    expected = query @ one @ key - query @ one @ np.append(np.zeros(8), 1.0)
    assert x[0, 1] @ shown.theta[0] @ other + shown.key_bias[0] @ other == pytest.approx(expected)
    assert summarize_recovery(recovered(layer), layer)["against_weights"]["theta"] == 0


def test_pictures_show_every_head_and_what_heads_share(rng):
    layer = planted_layer(rng, 7, 8, rank=2)
    projection = np.array(layer.projection)
    projection[:, :, 3:] = 0.0  # all heads write into three directions
    mosaic, theta, _, overlaps, table = layer_panels(AttentionLayer(layer.theta, projection))
    values = np.array(mosaic.values)
    assert np.sum(~np.isnan(values)) == 2 * 8 * 7 * 7
    assert np.nanmax(values) == 1.0
    assert [text for text in mosaic.y_ticks if text] == ["Θ 0-3", "W 0-3", "Θ 4-7", "W 4-7"]
    assert np.allclose(overlaps.values, 1.0)
    assert overlaps.limits == (0, 1)  # colours mean the same in every report
    assert len(theta.curves) == len(table.rows) == 8
    apart = AttentionLayer(np.zeros((2, 4, 4)), np.stack([np.diag([1.0, 1, 0, 0]), np.diag([0.0, 0, 1, 0])]))
    assert np.allclose(layer_panels(apart)[3].values, np.eye(2))


def test_a_section_says_what_was_asked_stage_by_stage(rng):
    found = recovered(gpt_layer(rng, 6, 2))
    section = recovery_section(found, summarize_recovery(found) | {"oracle": "a test"})
    assert section.title == "2 heads in 6 dimensions, from answers alone"
    assert ("oracle", "a test") in section.facts
    rows = {row[0]: row for row in section.panels[-1].rows}
    assert rows["sums"][1:] == ("3", "5", "12", "0.1", "gap 2, worst ∞")
    assert rows["verification"][1:4] == ("400", "900", "400")

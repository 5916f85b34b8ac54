"""`joma/real-text`: its statistics on curves of known shape, its optimizer against optax's, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xarray as xr

from manyheads.curves.summaries import RunSummary
from manyheads.errors import UsageError
from manyheads.studies.joma.text.real_text import RealText, adam_at
from manyheads.study.panels import Multiples
from manyheads.study.tables import on_grid

DEPTHS, LEARNING_RATES, SEEDS, HEADS = (1, 2, 3), (0.001, 0.01, 0.1, 0.3), 6, 2
STEPS = np.linspace(0, 1, 11)
LEVELS = xr.Dataset({"uniform": 3.0, "random_rank": 20.0})


def curves(rng, rebound, best, bottom_ends=None):
    """Make runs whose entropies fall by 2 to the middle and rise by `rebound(depth, rate)`, and fall to `best` in loss.

    With `bottom_ends` the bottom layer falls to it at the highest rate. Ranks fall by half. Noise is 0.005.
    """
    cells = [(depth, rate) for depth in DEPTHS for rate in LEARNING_RATES]
    entropy = np.full((len(cells), SEEDS, len(STEPS), max(DEPTHS), HEADS), np.nan)
    loss = np.empty((len(cells), SEEDS, len(STEPS)))
    rank = np.full(entropy.shape[:-1], np.nan)
    for cell, (depth, rate) in enumerate(cells):
        down = 3 - 4 * np.minimum(STEPS, 0.5) + 2 * rebound(depth, rate) * np.maximum(STEPS - 0.5, 0)
        entropy[cell, ..., :depth, :] = down[:, None, None]
        if rate == max(LEARNING_RATES) and bottom_ends is not None:
            entropy[cell, ..., 0, :] = (3 + (bottom_ends - 3) * STEPS)[:, None]
        loss[cell] = best(depth, rate) + 2 * (1 - STEPS)
        rank[cell, ..., :depth] = 20 - 10 * STEPS[:, None]
    noisy = [part + 0.005 * rng.normal(size=part.shape) for part in (entropy, loss, rank)]
    lead = ("cell", "replicate", "step")
    return xr.Dataset(
        {
            "entropy": ((*lead, "layer", "head"), noisy[0]),
            "validation_loss": (lead, noisy[1]),
            "stable_rank": ((*lead, "layer"), noisy[2]),
        },
        coords={
            "step": np.arange(len(STEPS)),
            "layer": np.arange(max(DEPTHS)),
            "depth": ("cell", [depth for depth, _ in cells]),
            "learning_rate": ("cell", [rate for _, rate in cells]),
        },
    )


def rate_decides(rng, bottom_ends=None):
    """Rebound and loss both follow the rate; within a rate deeper means more rebound and *more* loss."""
    order = {rate: place for place, rate in enumerate(LEARNING_RATES)}
    return curves(
        rng,
        lambda depth, rate: 0.3 + 0.2 * order[rate] + 0.05 * depth,
        lambda depth, rate: 3 - 0.3 * order[rate] + 0.05 * depth,
        bottom_ends,
    )


def test_a_correlation_that_the_rate_makes_vanishes_within_it(rng):
    found = RunSummary(on_grid(rate_decides(rng), xr.Dataset()), 20.0)
    rise = found.rise.mean("layer")
    assert found.correlation(rise).max() < -0.5
    assert found.correlation(rise, within=True).min() > 0.5
    assert found.best_rates == dict.fromkeys(DEPTHS, max(LEARNING_RATES))
    # Between seeds there is noise only: 12 coefficients of 6 pairs have a mean of spread 0.13; 4.2 of them are 0.55.
    assert abs(found.between_seeds(rise).mean()) < 0.55


def test_verdicts_follow_the_curves(rng):
    outcomes = {verdict.claim: verdict.outcome for verdict in RealText().compare(LEVELS, rate_decides(rng))}
    assert (
        outcomes[
            "Within a learning rate the rebound of attention entropy is highly correlated with low validation loss"
        ]
        == "refuted"
    )
    for layer in ("bottom", "top"):
        assert outcomes[f"At the best learning rate the attention entropy of the {layer} layer drops"] == "holds"
        assert outcomes[f"At the best learning rate the attention entropy of the {layer} layer rebounds"] == "holds"
    assert outcomes["At the best learning rate the stable rank of the lower MLP matrix drops"] == "holds"
    assert outcomes["At the best learning rate the stable rank of the lower MLP matrix rebounds"] != "holds"
    collapsed = {verdict.claim: verdict.outcome for verdict in RealText().compare(LEVELS, rate_decides(rng, 0.001))}
    assert collapsed["At the highest learning rate the attention of the bottom layer collapses to one-hot"] == "holds"


def test_outcomes_are_expected_of_the_default_text_and_size_alone(rng, tmp_path):
    """The authors' runs on other text and at the size of the paper end differently."""
    trained = rate_decides(rng)
    assert {verdict.expected for verdict in RealText().compare(LEVELS, trained)} == {"holds", "refuted"}
    for study in (RealText.full(), RealText(text=tmp_path / "other.txt"), RealText(steps=600)):
        assert {verdict.expected for verdict in study.compare(LEVELS, trained)} == {None}


def test_other_curves_get_other_verdicts(rng):
    order = {rate: place for place, rate in enumerate(LEARNING_RATES)}
    trained = curves(
        rng,
        lambda depth, rate: 0.1 * order[rate] + 0.3 * depth,
        lambda depth, rate: 3 - 0.1 * order[rate] - 0.3 * depth,
    )
    outcomes = {verdict.claim: verdict.outcome for verdict in RealText().compare(LEVELS, trained)}
    assert (
        outcomes[
            "Within a learning rate the rebound of attention entropy is highly correlated with low validation loss"
        ]
        == "holds"
    )
    assert outcomes["At the highest learning rate the attention of the bottom layer collapses to one-hot"] == "refuted"


def test_a_diverged_run_counts_with_what_it_had(rng):
    trained = rate_decides(rng)
    trained["validation_loss"][0, 0, 6:] = np.nan
    trained["entropy"][0, 0, 6:] = np.nan
    found = RunSummary(on_grid(trained, xr.Dataset()), 20.0)
    assert found.best[0, 0, 0] == trained["validation_loss"][0, 0, 5]
    assert np.isfinite(found.correlation(found.rise.mean("layer"))).all()


def test_small_multiples_show_every_depth_and_rate(rng):
    panels = RealText().panels(LEVELS, rate_decides(rng))
    entropy = next(panel for panel in panels if isinstance(panel, Multiples))
    assert [len(row) for row in entropy.curves] == [len(LEARNING_RATES)] * len(DEPTHS)
    for depth, row in zip(DEPTHS, entropy.curves, strict=True):
        assert all(len(plot) == depth + 1 for plot in row)  # the layers and the level of uniform attention
        assert all(len(curve.low) == len(STEPS) for plot in row for curve in plot[:-1])  # with bands over seeds
    assert sum(caption.startswith("★") for row in entropy.captions for caption in row) == len(DEPTHS)


def test_the_rate_as_data_changes_nothing(rng):
    weights = jnp.asarray(rng.normal(size=7), jnp.float32)
    ours, theirs = adam_at(0.02), optax.adam(0.02)
    states = ours.init(weights), theirs.init(weights)
    for _ in range(3):
        gradient = jnp.asarray(rng.normal(size=7), jnp.float32)
        first, second = ours.update(gradient, states[0], weights), theirs.update(gradient, states[1], weights)
        np.testing.assert_allclose(first[0], second[0], rtol=1e-5)
        assert first[0].dtype == jnp.float32
        states = first[1], second[1]
    assert jax.tree.structure(adam_at(0.1)) == jax.tree.structure(ours)  # so one compiled program serves both


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depths": (2, 1)}, "rising order"),
        ({"learning_rates": (0.1,)}, "two or more"),
        ({"learning_rates": (0.0, 0.1)}, "positive"),
        ({"depths": (0, 1)}, "at least 1"),
        ({"steps": 801}, "multiple"),
        ({"length": 1}, "length=1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        RealText(**fields)


def test_a_text_too_short_is_refused_before_work(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short " * 50)
    with pytest.raises(UsageError, match="30 held-out characters"):
        RealText(text=path).inputs()

"""What a layer learns from: draws keep the assumptions, and whatever breaks one is refused by name."""

import equinox as eqx
import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.task import Sizes, UpdateRule, draw_joma_task


def test_draws_keep_the_assumptions_in_double_precision(rng):
    task = draw_joma_task(Sizes(queries=3), rng)
    frame = np.concatenate([task.token_embeddings, task.query_embeddings], axis=1)
    assert frame.dtype == np.float64
    assert np.abs(frame.T @ frame - np.eye(15)).max() < 1e-13
    assert np.abs(task.contexts.sum(1) - 1).max() < 1e-12
    assert 0 <= task.queries.min() <= task.queries.max() < 3


def test_contexts_have_the_dirichlet_variance(rng):
    # Var x_m = (1/M)(1 - 1/M)/(M + 1): the mean over 48,000 entries is within 5% but for a chance far below 1e-6.
    sizes = Sizes(tokens=12, contexts=4000)
    expected = (1 / 12) * (11 / 12) / 13
    assert abs(draw_joma_task(sizes, rng).contexts.var(0).mean() / expected - 1) < 0.05


@pytest.mark.parametrize("name", ["token_embeddings", "query_embeddings"])
def test_embeddings_that_are_not_orthonormal_are_refused_by_name(rng, name):
    task = draw_joma_task(Sizes(queries=2), rng)
    skewed = getattr(task, name) + 0.01 * rng.normal(size=getattr(task, name).shape)
    arrays = {field: getattr(task, field) for field in task.__dataclass_fields__}
    with pytest.raises(UsageError, match="not orthonormal"):
        type(task)(**arrays | {name: skewed})


def test_contexts_and_shapes_that_make_no_sense_are_refused(rng):
    task = draw_joma_task(Sizes(), rng)
    with pytest.raises(UsageError, match="frequencies"):
        eqx.tree_at(lambda s: s.contexts, task, 2 * task.contexts).checked()
    for name, says in (("contexts", "frequencies"), ("queries", "queries holds nan"), ("labels", "labels holds nan")):
        broken = getattr(task, name).astype(float)
        broken.flat[0] = np.nan
        with pytest.raises(UsageError, match=says):
            eqx.tree_at(lambda s, name=name: getattr(s, name), task, broken).checked()
    with pytest.raises(ShapeError, match="labels"):
        eqx.tree_at(lambda s: s.labels, task, task.labels[:3]).checked()
    with pytest.raises(ShapeError, match="query_embeddings"):
        eqx.tree_at(lambda s: s.query_embeddings, task, task.query_embeddings[:5]).checked()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"learning_rate_ratio": -1},
        {"weight_decay": -0.1},
        {"attention": "cosine"},
        {"activation": "relax"},
    ],
)
def test_rules_that_make_no_sense_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        UpdateRule(**fields)

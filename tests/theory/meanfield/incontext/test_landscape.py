"""Saddle levels, fixed points of the attention and directions of negative curvature, against finite differences."""

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield.incontext.landscape import attention_fixed_point, escape_direction, saddle_levels
from manyheads.theory.meanfield.incontext.prompt_length import solve_attention
from manyheads.theory.meanfield.incontext.task import circle_task


def draw_saddle(rng, missed):
    """Return a task and a representation that spans some target features and foreign harmonics, mixed at random."""
    both = circle_task((1, 2, 2, 3, 3, 4), (1.0, 0.7, 0.4, 1.0, 1.0, 1.0))
    task = circle_task((1, 2, 2), (1.0, 0.7, 0.4))
    held = [place for place in range(3) if place not in missed] + [3, 4, 5][: len(missed)]
    return task, both.targets[:, held] @ rng.normal(size=(3, 3))


@pytest.mark.parametrize("missed", [(2,), (0, 2), (0, 1, 2)])
def test_saddles_have_their_level_and_a_direction_of_escape(rng, missed):
    task, h = draw_saddle(rng, missed)
    found = escape_direction(task, h)
    assert found.loss == pytest.approx(0.5 * sum((1.0, 0.49, 0.16)[place] for place in missed))
    assert np.abs(saddle_levels(task.covariance) - found.loss).min() < 1e-9
    assert found.curvature <= found.bound * (1 - 1e-9) < 0
    step = 1e-3 * np.sqrt(found.loss / abs(found.curvature))
    along = task.targets @ found.rotation.T
    values = [solve_attention(task, h + shift * along).loss for shift in (-step, 0, step)]
    assert (values[0] - 2 * values[1] + values[2]) / step**2 == pytest.approx(found.curvature, rel=1e-3)


def test_fixed_points_of_the_attention_solve_the_equation_of_the_paper(rng):
    task, h = draw_saddle(rng, (2,))
    second, cross = h.T @ h / len(h), task.targets.T @ h / len(h)
    start = rng.normal(size=(3, 3))
    limit = attention_fixed_point(task, h, start)
    flow = np.kron(cross.T @ cross, second)  # of the entries of W, row by row
    inverse = np.linalg.pinv(flow, rcond=1e-10)
    end = inverse @ (cross.T @ cross).ravel() + start.ravel() - inverse @ (flow @ start.ravel())
    np.testing.assert_allclose(limit.ravel(), end, atol=1e-7)
    assert np.abs(cross.T @ (cross - cross @ limit @ second)).max() < 1e-9
    assert np.abs(cross @ limit - cross @ np.linalg.inv(second)).max() < 1e-9
    assert np.abs(limit - np.linalg.inv(second)).max() > 1e-3  # W itself is not unique at a saddle


def test_points_without_a_direction_are_refused(rng):
    task, h = draw_saddle(rng, (2,))
    with pytest.raises(CertificateError, match="not critical"):
        escape_direction(task, h + 0.1 * task.targets @ rng.normal(size=(3, 3)))
    with pytest.raises(UsageError, match="global"):
        escape_direction(task, task.targets)
    with pytest.raises(UsageError, match="finite"):
        saddle_levels([[np.nan]])
    with pytest.raises(UsageError, match="covariance"):
        saddle_levels([[0.0, 1.0], [1.0, 0.0]])

"""Exact loss of finite prompts against enumeration and drawn prompts; best attention; refusals."""

import itertools

import jax
import numpy as np
import pytest

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.incontext.prompt_length import (
    draw_prompt_losses,
    length_coefficient,
    prompt_loss,
    solve_attention,
)
from manyheads.theory.meanfield.incontext.task import FeatureTask, circle_task


def draw_case(rng, nodes=4, features=2, noise=0.0):
    task = FeatureTask(rng.normal(size=(nodes, 3)), rng.normal(size=(nodes, features)), noise)
    return task, rng.normal(size=(nodes, features)), rng.normal(size=(features, features))


def enumerate_prompts(task, h, attention, length):
    """Sum over all prompts and queries; second moments of tasks and noise are those of the identity."""
    f, total = task.targets, 0.0
    for prompt in itertools.product(range(len(f)), repeat=length):
        answers = np.einsum("id,ij,jl,ql->qd", f[list(prompt)], h[list(prompt)], attention, h) / length  # over v
        noise = np.einsum("ij,jl,ql->qi", h[list(prompt)], attention, h) / length
        total += (((f - answers) ** 2).sum(1) + task.label_noise * (noise**2).sum(1)).mean()
    return 0.5 * total / len(f) ** length


@pytest.mark.parametrize(("length", "noise"), [(1, 0.0), (2, 0.7), (3, 0.0)])
def test_the_loss_is_the_sum_over_all_prompts(rng, length, noise):
    task, h, attention = draw_case(rng, noise=noise)
    assert prompt_loss(task, h, attention, length) == pytest.approx(enumerate_prompts(task, h, attention, length))


def test_the_loss_of_infinite_prompts_is_a_regression(rng):
    task, h, attention = draw_case(rng, nodes=6)
    answers = h @ attention.T @ (task.targets.T @ h / 6).T
    assert prompt_loss(task, h, attention) == pytest.approx(0.5 * ((task.targets - answers) ** 2).sum(1).mean())
    best = np.linalg.lstsq(h, task.targets, rcond=None)[0]
    found = solve_attention(task, h)
    assert found.loss == pytest.approx(0.5 * ((task.targets - h @ best) ** 2).sum(1).mean())
    assert prompt_loss(task, h, found.weights) == pytest.approx(found.loss)


@pytest.mark.parametrize("length", [1, 7, None])
def test_no_attention_is_better_than_the_best(rng, length):
    task, h, _ = draw_case(rng, nodes=6)
    found = solve_attention(task, h, length)
    assert prompt_loss(task, h, found.weights, length) == pytest.approx(found.loss)
    for _ in range(5):
        other = found.weights + 0.1 * rng.normal(size=(2, 2))
        assert prompt_loss(task, h, other, length) > found.loss
    assert found.prompt_condition == 1 or length


@pytest.mark.slow
def test_drawn_prompts_have_the_exact_loss(rng, seed):
    task, h, attention = draw_case(rng, nodes=8, noise=0.3)
    drawn = draw_prompt_losses(task, h, attention, 5, 4000, jax.random.key(seed)).raw
    error = drawn.std() / 4000**0.5
    assert abs(drawn.mean() - prompt_loss(task, h, attention, 5)) < 5 * error


@pytest.mark.slow
def test_losses_averaged_over_tasks_are_exact_and_scatter_less(rng, seed):
    task, h, attention = draw_case(rng, nodes=8)
    drawn = draw_prompt_losses(task, h, attention, 5, 4000, jax.random.key(seed))
    averaged, drawn = drawn.averaged, drawn.raw
    assert averaged.std() < drawn.std()
    assert abs(averaged.mean() - prompt_loss(task, h, attention, 5)) < 5 * averaged.std() / 4000**0.5


def test_the_correction_has_a_bound_for_every_representation(rng):
    task = circle_task((1, 2, 2), (1.0, 0.7, 0.4))
    for _ in range(5):
        h = task.targets @ rng.normal(size=(3, 3)) + rng.normal(size=task.targets.shape)
        attention = solve_attention(task, h).weights
        coefficient = length_coefficient(task, h, attention)
        excess = prompt_loss(task, h, attention, 7) - prompt_loss(task, h, attention)
        assert coefficient == pytest.approx(7 * excess)
        assert 0 < coefficient < 1.5 * (task.targets**2).sum(1).max()


def test_what_cannot_be_solved_is_refused(rng):
    task, h, attention = draw_case(rng)
    with pytest.raises(CertificateError, match="singular"):
        solve_attention(task, np.ones_like(h))
    with pytest.raises(ShapeError, match="representation"):
        solve_attention(task, h[:-1])
    with pytest.raises(ShapeError, match="attention"):
        prompt_loss(task, h, attention[:1])
    with pytest.raises(UsageError, match="finite"):
        prompt_loss(task, np.full_like(h, np.nan), attention)
    with pytest.raises(UsageError, match="finite"):
        prompt_loss(task, h, np.full_like(attention, np.inf))
    with pytest.raises(UsageError, match="length"):
        prompt_loss(task, h, attention, 0)
    with pytest.raises(ShapeError, match="nodes"):
        FeatureTask(task.inputs, task.targets[:-1])
    with pytest.raises(UsageError, match="label_noise"):
        FeatureTask(task.inputs, task.targets, -1.0)
    with pytest.raises(UsageError, match="degrees"):
        circle_task((2, 2, 2))
    with pytest.raises(UsageError, match="a degree for each feature"):
        circle_task(2)

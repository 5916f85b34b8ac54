"""Training on prompts: prompts as weights on nodes, saddle start, growth of missed features, SGD and flow."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads._settings import double_precision
from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.incontext.particles import particle_flow, represent
from manyheads.theory.meanfield.incontext.prompt_length import prompt_loss
from manyheads.theory.meanfield.incontext.prompt_training import (
    collect_prompts,
    draw_prompts,
    joint_flow,
    missed_growth_rates,
    prompt_losses,
    saddle_start,
    train_on_prompts,
)
from manyheads.theory.meanfield.incontext.task import ridge_task

SETTINGS = {"length": 30, "attention_speed": 5.0}


@pytest.fixture
def case(rng):
    task = ridge_task(4, (1.0, 0.2), 24, rng)
    return task, saddle_start(task, 0.5 * rng.standard_normal((16, 4)), 0.5, 0.1)


def test_a_prompt_as_weights_on_nodes_is_the_prompt_pair_by_pair(rng, case):
    task, start = case
    counts = rng.multinomial(7, np.full(24, 1 / 24), size=3)
    tasks, query = rng.standard_normal((3, 2)), np.array([0, 5, 9])
    h = represent(start, task.inputs, "sigmoid")
    errors = []
    for count, task_vector, asked in zip(counts, tasks, query, strict=True):
        pairs = np.repeat(np.arange(24), count)
        read = sum((task_vector @ task.targets[at]) * h[at] for at in pairs) / 7
        errors.append(task_vector @ task.targets[asked] - read @ start.attention @ h[asked])
    with double_precision():
        found = prompt_losses(jnp.asarray(h), start.attention, collect_prompts(task, counts, tasks, query, np.float64))
    assert float(found) == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-10)


def test_the_start_has_the_overlaps_and_the_growth_that_are_asked_for(case):
    task, start = case
    h = represent(start, task.inputs, "sigmoid")
    scale = np.sqrt(np.diag(task.covariance))
    np.testing.assert_allclose(task.targets.T @ h / 24, np.diag(0.05 * scale), atol=1e-12)
    np.testing.assert_allclose(h.T @ h / 24 @ start.attention, np.eye(2), atol=1e-9)
    step = 1e-5
    moved = particle_flow(task, start[:2], [step], activation="sigmoid", layers="both", step=step).particles
    overlaps = task.targets.T @ represent(moved, task.inputs, "sigmoid") / 24
    growth = (np.diag(overlaps) / (0.05 * scale) - 1) / step
    assert growth == pytest.approx(missed_growth_rates(task, start), rel=0.3)  # 16 neurons: mixed terms
    with pytest.raises(ShapeError, match="at least 4"):
        saddle_start(task, start.inner[:3], 0.5, 0.1)


def test_the_flow_descends_along_the_gradient_of_the_exact_loss(case):
    task, start = case
    step = 1e-5
    found = joint_flow(task, start, [0.0, step], step=step, **SETTINGS)
    assert found.loss[0] == pytest.approx(
        prompt_loss(task, represent(start, task.inputs, "sigmoid"), start.attention, 30)
    )
    moved = [(after - before) / step for after, before in zip(found.weights, start, strict=True)]
    power = (moved[0] ** 2).sum() / 16 + (moved[1] ** 2).sum() / 16 + (moved[2] ** 2).sum() / 5
    assert (found.loss[0] - found.loss[1]) / step == pytest.approx(power, rel=1e-2)


def test_sgd_on_many_prompts_follows_the_flow(rng, case):
    """For as long as the slope of the loss changes by a tenth: the prompts' own loss along the flow falls as much.

    To first order SGD lowers the exact loss by what the flow lowers the loss of the prompts, without sampling error;
    the exact loss along the flow differs from the latter by the standard error over blocks of prompts.
    """
    task, start = case
    prompts, steps, short = draw_prompts(task, 4000, 30, rng), 6, 1e-6
    slope, later = -np.diff(joint_flow(task, start, [0.0, short, 2 * short], step=short, **SETTINGS).loss) / short
    time = 0.1 / max(abs(later / slope - 1) / short, 50.0)
    plan = {"learning_rate": time / steps, "batch": 4000, "records": 2, "record_every": steps // 2}
    found = train_on_prompts(task, start, prompts, rng, **SETTINGS, **plan)
    flow = joint_flow(task, start, found.times, step=time / 8, **SETTINGS)

    def losses(weights):  # of blocks of prompts
        h = jnp.asarray(represent(weights, task.inputs, "sigmoid"))
        blocks = jax.tree.map(lambda each: each.reshape(40, 100, *each.shape[1:]), prompts)
        with double_precision():
            each = jax.vmap(lambda block: prompt_losses(h, jnp.asarray(weights.attention), block))
            return np.asarray(jax.jit(each)(blocks))

    before, after = losses(start), losses(flow.weights)
    moved, change = flow.loss[0] - flow.loss[-1], after - before
    assert moved == pytest.approx(slope * time, rel=0.2)
    assert found.loss[-1] - found.loss[0] == pytest.approx(change.mean(), abs=0.2 * moved)
    for blocks, exact in ((change, -moved), (before, flow.loss[0])):
        assert abs(blocks.mean() - exact) < 6 * blocks.std(ddof=1) / 40**0.5
    assert found.sample_loss[0] == pytest.approx(before.mean(), rel=1e-3)


def test_what_cannot_be_trained_is_refused(rng, case):
    task, start = case
    prompts = draw_prompts(task, 4000, 30, rng)
    plan = {"learning_rate": 0.002, "batch": 4000, "records": 2, "record_every": 3}
    with pytest.raises(UsageError, match="at most the 4000 prompts"):
        train_on_prompts(task, start, prompts, rng, **SETTINGS, **plan | {"batch": 4001})
    with pytest.raises(UsageError, match="learning_rate"):
        train_on_prompts(task, start, prompts, rng, **SETTINGS, **plan | {"learning_rate": np.nan})
    with pytest.raises(UsageError, match="attention_speed"):
        joint_flow(task, start, [1.0], length=30, attention_speed=0.0, step=0.1)
    for step in (0.0, -1.0, np.nan):
        with pytest.raises(UsageError, match=r"step=.*positive number"):
            joint_flow(task, start, [1.0], step=step, **SETTINGS)
    for sizes in ((0, 30), (10, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            draw_prompts(task, *sizes, rng)
    with pytest.raises(CertificateError, match="diverged"), jax.debug_nans(False):
        train_on_prompts(task, start, prompts, rng, **SETTINGS, **plan | {"learning_rate": 1e30})


def test_noise_of_the_labels_is_that_of_the_exact_loss(case):
    """The flow's loss and prompts drawn pair by pair, at a noise of twice the variance of the labels."""
    task, start = case
    noisy, length = replace(task, label_noise=2.4), 5
    h = represent(start, task.inputs, "sigmoid")
    exact = [prompt_loss(each, h, start.attention, length) for each in (task, noisy)]
    flow = joint_flow(noisy, start, [0.0, 1e-5], length=length, attention_speed=5.0, step=0.1)
    assert flow.loss[0] == pytest.approx(exact[1], rel=1e-12)
    assert flow.limit_loss[0] == pytest.approx(prompt_loss(task, h, start.attention), rel=1e-12)
    drawn = [draw_prompts(each, 40_000, length, np.random.default_rng(3)) for each in (task, noisy)]
    np.testing.assert_array_equal(drawn[0].answer, drawn[1].answer)  # the noise is drawn last
    losses = [float(prompt_losses(jnp.asarray(h, jnp.float32), jnp.asarray(start.attention), each)) for each in drawn]
    assert losses[1] - losses[0] == pytest.approx(exact[1] - exact[0], rel=0.1)
    assert exact[1] - exact[0] > 0.1


def test_ridge_tasks_that_cannot_be_drawn_are_refused(rng):
    with pytest.raises(UsageError, match="even number"):
        ridge_task(4, (1.0, 0.2), 25, rng)
    with pytest.raises(UsageError, match="steepness"):
        ridge_task(4, (1.0, 0.2), 24, rng, steepness=0.0)
    with pytest.raises(UsageError, match="rng=5: expected a generator"):
        ridge_task(4, (1.0, 0.2), 24, 5)

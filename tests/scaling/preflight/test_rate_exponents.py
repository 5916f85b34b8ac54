"""Exponents of the best learning rate in batch size and steps: known answers, coverage of the interval, refusals."""

import json

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.scaling import preflight
from manyheads.scaling.preflight_checks.rate_exponents import search_exponent

CURVATURES, START, RATE, NOISE = 1 / np.arange(1, 33), np.ones(32), 0.05, 3.0
GRID = np.geomspace(1 / 8, 8, 7)
SIZES = {"batch": (1, 2, 4), "steps": (32, 64, 128)}
BASE = (4, 2, 1)


def trainer(world):
    """Return gradient descent on a noisy quadratic."""

    def train(seed, steps, parts, factor):
        rng, weights, losses = np.random.default_rng((world, seed)), START, []
        for _ in range(steps):
            losses.append(float(0.5 * (CURVATURES * weights**2).sum()))
            noise = NOISE * rng.normal(size=(parts, len(weights))).mean(0)
            weights = weights - RATE * factor * (CURVATURES * weights + noise)
        return losses

    return train


def exact_exponent(axis):
    """Return the exponent of the minimum of the expected loss, from the recursion of mean and variance."""

    def expected(steps, parts, rates):
        mean, variance, losses = np.ones((len(rates), 1)) * START, 0.0, []
        for _ in range(steps):
            losses.append(0.5 * (CURVATURES * (mean**2 + variance)).sum(1))
            shrink = 1 - rates[:, None] * CURVATURES
            mean, variance = shrink * mean, shrink**2 * variance + rates[:, None] ** 2 * NOISE**2 / parts
        return np.mean(losses[-(steps // 8) :], axis=0)

    factors = np.geomspace(1 / 64, 64, 1201)
    settings = [(size, 1) if axis == "steps" else (128 // size, size) for size in SIZES[axis]]
    best = [factors[expected(steps, parts, RATE * factors).argmin()] for steps, parts in settings]
    return np.polyfit(np.log(SIZES[axis]), np.log(best), 1)[0]


@pytest.mark.parametrize(("axis", "rule"), [("batch", 1.0), ("steps", -0.4)])
def test_the_interval_covers_the_exponent_of_a_noisy_quadratic(axis, rule):
    exact = exact_exponent(axis)
    assert exact == pytest.approx(rule, abs=0.02)
    covered, figures, refused = 0, [], 0
    for world in range(100):
        try:
            found = search_exponent(axis, SIZES[axis], GRID, trainer(world), range(4), 32)
        except CertificateError:
            refused += 1  # an optimum at the end of a grid that was widened once
            continue
        figures.append(found.drift.fit.exponent)
        covered += found.drift.fit.interval.contains(exact)
    assert refused <= 10
    assert covered >= 0.96 * len(figures)  # below with probability 0.002 at 99%
    assert np.mean(figures) == pytest.approx(exact, abs=0.06)
    assert ("linear (1)" in found.sentence()) == (axis == "batch")


def test_an_optimum_at_the_end_and_one_beside_diverged_trainings():
    with pytest.raises(CertificateError, match=r"batch 1, seed 0: .*an end of the grid"):
        search_exponent("batch", (1, 2), GRID, lambda seed, steps, parts, factor: [-factor] * steps, (0, 1), 32)

    def cliff(seed, steps, parts, factor):
        return [np.inf if factor > 1.1 else -factor] * steps

    found = search_exponent("batch", (1, 2, 4), GRID, cliff, range(3), 32)
    # the optimum may lie anywhere between two neighbours of 1, at every size: (1/2, 1, 2) to (2, 1, 1/2)
    assert found.figures == pytest.approx({"exponent": 0, "low": -1, "high": 1})
    assert "rules within the interval: none (0), sqrt (0.5), linear (1)" in found.sentence()


def torch_make(shape, seed, steps=None, optimizer="sgd", schedule=False):
    import torch

    model = torch.nn.Linear(8, 1, bias=False)
    inputs = torch.randn(128, 16, 8)
    batches = [(each, each.sum(-1, keepdim=True) + 2 * torch.randn(16, 1)) for each in inputs]
    made = torch.optim.SGD(model.parameters(), 0.05)
    if schedule:
        made = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.1, steps or 32)
    return model, made, batches, lambda module, batch: (module(batch[0]) - batch[1]).square().mean()


@pytest.mark.torch
def test_a_preflight_measures_both_on_a_training_of_torch():
    found = preflight(torch_make, BASE, axes=("batch", "steps"), seeds=range(3), train=32)
    batch, steps = found.transfers
    assert batch.sizes == (1, 2, 4)
    assert steps.sizes == (32, 64, 128)
    assert batch.drift.fit.exponent > 0.3  # averaged gradients allow larger steps
    assert not found.growths
    assert found.passed
    shown = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert shown["transfers"][0]["low"] < batch.drift.fit.exponent < shown["transfers"][0]["high"]
    assert "learning rate along batch: measured: it goes as batch^" in str(found)
    assert found.plot().axes
    repr(found)
    assert not any("repeated" in note for note in found.notes)
    few = preflight(torch_make, BASE, axes={"batch": (1, 8)}, seeds=range(2), train=32)
    assert any("batches are repeated" in note for note in few.notes)


@pytest.mark.torch
def test_the_announced_number_of_trainings_and_notes_of_diverged_ones():
    import torch

    from manyheads.scaling import BaseHyperparameters

    def sized(shape, seed, steps=None):
        inputs = torch.randn(32, 16, 4 * shape.heads)
        batches = [(each, each.sum(-1, keepdim=True)) for each in inputs]
        model = torch.nn.Linear(4 * shape.heads, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), 0.05), batches, lambda m, b: (m(b[0]) - b[1]).square().mean()

    def diverged(shape, seed, steps=None):
        *made, loss = torch_make(shape, seed)
        return *made, lambda model, batch: loss(model, batch) * float("inf")

    said, options = [], {"seeds": range(2), "train": 8}
    preflight(sized, BASE, axes={"heads": (2, 4), "batch": (1, 2)}, announce=said.append, **options)
    assert "for 32 trainings at 2 shapes" in said[0]  # of two seeds: two updates, and 7 rates at two batch sizes
    found = preflight(diverged, BASE, axes={"batch": (1, 2)}, hyperparameters=BaseHyperparameters(0.05), **options)
    assert [note.partition(",")[0] for note in found.notes] == [
        "settings: not audited without an axis of the model", "learning rate along batch: not decided",
    ]  # fmt: skip


@pytest.mark.torch
def test_gradients_of_a_larger_batch_are_averaged():
    import torch

    from manyheads.scaling.preflight_checks.runs import find_trainer
    from manyheads.scaling.preflight_checks.training import Training

    def weights(parts, joined):
        torch.manual_seed(0)
        model, optimizer, batches, loss = torch_make(None, 0)
        if joined:
            batches = [tuple(map(torch.cat, zip(*batches[4 * i : 4 * i + 4], strict=True))) for i in range(8)]
        losses = find_trainer(Training.of((model, optimizer, batches, loss), "make")).losses(8, 1.0, parts)
        return model.weight.detach(), losses

    (accumulated, losses), (joined, expected) = weights(4, False), weights(1, True)
    torch.testing.assert_close(accumulated, joined)
    assert losses == pytest.approx(expected)


def test_a_preflight_measures_a_training_of_jax():
    import jax
    import jax.numpy as jnp
    import optax

    def make(shape, seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        inputs = jax.random.normal(keys[0], (128, 16, 8))
        targets = inputs.sum(-1) + 2 * jax.random.normal(keys[1], (128, 16))
        loss = lambda weights, batch: jnp.mean((batch[0] @ weights["w"] - batch[1]) ** 2)  # noqa: E731
        return {"w": jnp.zeros(8)}, optax.sgd(0.05), list(zip(inputs, targets, strict=True)), loss

    found = preflight(make, BASE, axes=("batch",), seeds=range(2), train=32)
    assert found.transfers[0].drift.fit.exponent > 0.3
    assert any("does not take steps" in note for note in found.notes)


@pytest.mark.torch
def test_a_schedule_has_to_know_the_number_of_steps():
    seen = set()

    def blind(shape, seed):
        return torch_make(shape, seed, schedule=True)

    def told(shape, seed, steps=None):
        seen.add(steps)
        return torch_make(shape, seed, steps, schedule=True)

    with pytest.raises(UsageError, match=r"take it as a third argument"):
        preflight(blind, BASE, axes=("steps",), seeds=range(2), train=16)
    preflight(told, BASE, axes={"steps": (16, 32)}, seeds=range(2), train=16)
    assert {16, 32} <= seen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"axes": {"batch": (1,)}}, "batch"),
        ({"axes": {"batch": (1, 1.5)}}, "batch=1.5: expected an integer"),
        ({"axes": {"steps": (4, 8)}}, "steps"),
        ({"axes": ("tokens",)}, "choose one of key_dim, heads, depth, stream, batch, steps"),
    ],
)
def test_wrong_sizes_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        preflight(torch_make, BASE, **given)

"""Audits under a schedule: what was tuned is judged, not what the schedule makes of it at the moment."""

import pytest
from tests.scaling.torch_models import BASE, build

from manyheads.scaling import BaseHyperparameters, Parametrization, audit_model, torch_groups
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

TUNED = BaseHyperparameters(learning_rate=1e-3, epsilon=1e-8, weight_decay=0.1)

SCHEDULES = {  # torch.optim.lr_scheduler, an optimizer, the tuned rates of its groups, a tenth of them → a schedule
    "LambdaLR": lambda lr, o, peaks, low: lr.LambdaLR(o, lambda step: min(1.0, step / 5)),
    "StepLR": lambda lr, o, peaks, low: lr.StepLR(o, 2),
    "ExponentialLR": lambda lr, o, peaks, low: lr.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda lr, o, peaks, low: lr.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda lr, o, peaks, low: lr.CosineAnnealingWarmRestarts(o, 2),
    "LinearLR": lambda lr, o, peaks, low: lr.LinearLR(o, 0.1, total_iters=4),
    "PolynomialLR": lambda lr, o, peaks, low: lr.PolynomialLR(o, 4, power=2.0),
    "ConstantLR": lambda lr, o, peaks, low: lr.ConstantLR(o, 0.1, total_iters=9),
    "SequentialLR": lambda lr, o, peaks, low: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CosineAnnealingLR(o, 4)], [2]
    ),
    "ChainedScheduler": lambda lr, o, peaks, low: lr.ChainedScheduler(
        [lr.LinearLR(o, 0.1, total_iters=2), lr.ExponentialLR(o, 0.5)]
    ),
    "OneCycleLR": lambda lr, o, peaks, low: lr.OneCycleLR(o, peaks, total_steps=10),
    "CyclicLR": lambda lr, o, peaks, low: lr.CyclicLR(o, low, peaks, step_size_up=2),
    "CyclicLR, momentum left": lambda lr, o, peaks, low: lr.CyclicLR(
        o, low, peaks, step_size_up=2, cycle_momentum=False
    ),
    "CyclicLR after a warm-up": lambda lr, o, peaks, low: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CyclicLR(o, low, peaks, step_size_up=2)], [2]
    ),
    "ReduceLROnPlateau": lambda lr, o, peaks, low: lr.ReduceLROnPlateau(o, patience=0),
}


def kept(groups):
    """The groups without names, which an optimizer would take for those of its tensors."""
    return [{key: value for key, value in group.items() if key not in ("names", "role")} for group in groups]


def scheduled(p, model, name, wrong=None):
    """Return the right optimizer of a model, but for the doubled rate of one class, and a schedule over it."""
    import torch

    groups = torch_groups(p, model, TUNED)
    learning_rates = [group["lr"] * (2 if group["role"] == wrong else 1) for group in groups]
    optimizer = torch.optim.AdamW(
        [group | {"lr": learning_rate} for group, learning_rate in zip(kept(groups), learning_rates, strict=True)]
    )
    return optimizer, SCHEDULES[name](
        torch.optim.lr_scheduler, optimizer, learning_rates, [learning_rate / 10 for learning_rate in learning_rates]
    )


@pytest.mark.parametrize("wrong", [None, "value"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_was_tuned_is_judged_and_not_what_a_schedule_makes_of_it(name, wrong):
    """At the start and after some steps; given the schedule itself, and as far as it leaves traces its optimizer."""
    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 3))
    optimizer, schedule = scheduled(p, model, name, wrong)
    lowers, silent = name == "ReduceLROnPlateau", name == "CyclicLR, momentum left"
    for step in range(4):
        for asked in (schedule,) if silent or (lowers and step) else (schedule, optimizer):
            faults = audit_model(p, model, asked, TUNED, fresh=False).faults
            assert {(each.role, each.quantity) for each in faults} == (
                {(wrong, "learning_rate")} if wrong else set()
            ), step
            assert [each.factor for each in faults] == pytest.approx([2] * len(faults))
        optimizer.step()
        schedule.step(*([1.0] if lowers else []))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_peak_that_is_known_is_held_against_the_tuned_one(name):
    """And not the rates against each other, which would be right."""
    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    _, schedule = scheduled(p, model, name)
    found = audit_model(p, model, schedule, BaseHyperparameters(2e-3, weight_decay=0.1), fresh=False)
    assert {(each.quantity, round(each.factor, 6)) for each in found.faults} == {("learning_rate", 0.5)}


def test_a_plateau_after_a_warm_up_leaves_its_peak():
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    optimizer, warm_up = scheduled(p, model, "LinearLR")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        optimizer.step()
        warm_up.step()
        plateau.step(1.0)
    assert audit_model(p, model, plateau, TUNED, fresh=False).passed
    assert not audit_model(p, model, plateau, BaseHyperparameters(2e-3, weight_decay=0.1), fresh=False).passed


def test_a_cycle_with_one_rate_for_all_is_a_fault():
    """A number where a list belongs overwrites the rates of all groups; of peaks the schedule alone knows."""
    import torch
    from torch.optim.lr_scheduler import CyclicLR

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    groups = torch_groups(p, model, TUNED)
    low = [group["lr"] / 10 for group in groups]
    optimizer = torch.optim.AdamW(kept(groups))
    faults = audit_model(p, model, CyclicLR(optimizer, low, TUNED.learning_rate), TUNED, fresh=False).faults
    assert {(each.quantity, each.meaning.partition(":")[0]) for each in faults} == {
        ("learning_rate", "it has the base's learning rate")
    }
    hidden = audit_model(p, model, optimizer, TUNED, fresh=False)
    assert hidden.passed
    assert "against each other, and not against the tuned one, for CyclicLR keeps its peak to itself" in hidden.notes[0]
    optimizer = torch.optim.AdamW(kept(groups))
    CyclicLR(optimizer, TUNED.learning_rate / 10, low)
    assert {each.quantity for each in audit_model(p, model, optimizer, TUNED, fresh=False).faults} == {"learning_rate"}
    optimizer = torch.optim.AdamW(kept(groups))
    CyclicLR(optimizer, 0.0, low)
    nothing = audit_model(p, model, optimizer, TUNED, fresh=False)
    assert "rates: not judged, they are zero, for CyclicLR" in nothing.notes[0]
    assert {each.quantity for each in nothing.findings} == {"epsilon", "weight_decay"}


def test_rates_of_zero_are_not_called_right_beside_each_other():
    """As before a warm-up that is made by hand: whatever they will be multiplied by, zeros do not tell."""
    import torch

    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    optimizer = torch.optim.AdamW([group | {"lr": 0.0} for group in kept(torch_groups(p, model, TUNED))])
    faults = audit_model(p, model, optimizer, TUNED, fresh=False).faults
    assert {(each.quantity, each.meaning.partition(":")[0]) for each in faults} == {("learning_rate", "it is zero")}
    assert all("give the schedule in place of the optimizer" in each.meaning for each in faults)


def test_rates_that_are_off_by_one_factor_are_told_as_such():
    """The tuned rate was another one, or a schedule has left no trace of it: no group was forgotten."""
    p, model = Parametrization(base=BASE), build("llama", Shape(8, 8, 2))
    optimizer, schedule = scheduled(p, model, "ReduceLROnPlateau")
    schedule.step(1.0)
    schedule.step(1.0)
    for asked, hyperparameters in (
        (optimizer, TUNED),
        (schedule.optimizer.param_groups, BaseHyperparameters(2e-3, weight_decay=0.1)),
    ):
        faults = audit_model(p, model, asked, hyperparameters, fresh=False).faults
        assert {each.quantity for each in faults} == {"learning_rate"}
        assert {each.meaning.partition(":")[0] for each in faults} == {
            "all learning rates are off by this factor and consistent with each other"
        }
    lowered = audit_model(p, model, schedule, TUNED, fresh=False)
    assert lowered.passed
    assert "ReduceLROnPlateau does not keep the rates" in lowered.notes[0]

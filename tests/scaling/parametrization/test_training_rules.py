"""Rules for another batch size and number of tokens, each held against a simulation or the formula it comes from."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.scaling import BaseHyperparameters, MuonHyperparameters
from manyheads.scaling.parametrization.training_rules import RULES, TrainingChange

CURVATURES = 1 / np.arange(1, 9)


def final_loss(update, batch, steps, noise, replicates=4000, seed=0):
    """Train many replicates of a noisy quadratic and return the mean loss at the end."""
    rng = np.random.default_rng(seed)
    weights, state = np.ones((replicates, len(CURVATURES))), None
    for step in range(steps):
        slopes = CURVATURES * weights + noise / batch**0.5 * rng.normal(size=weights.shape)
        change, state = update(slopes, state, step)
        weights = weights - change
    return float((0.5 * CURVATURES * weights**2).sum(1).mean())


def adam(rate, betas, epsilon):
    def update(slopes, state, step):
        mean, square = (np.zeros_like(slopes),) * 2 if state is None else state
        mean = betas[0] * mean + (1 - betas[0]) * slopes
        square = betas[1] * square + (1 - betas[1]) * slopes**2
        unbiased = mean / (1 - betas[0] ** (step + 1)), square / (1 - betas[1] ** (step + 1))
        return rate * unbiased[0] / (unbiased[1] ** 0.5 + epsilon), (mean, square)

    return update


def test_the_square_root_rule_keeps_the_training_of_adam_where_noise_dominates():
    base, betas, noise = BaseHyperparameters(0.02, epsilon=1.0), (0.975, 0.99), 100.0
    change = TrainingChange(batch=(1, 4), rules=("sqrt",))
    new = change.at(base)
    reached = final_loss(adam(base.learning_rate, betas, base.epsilon), 1, 1600, noise)
    scaled = final_loss(adam(new.learning_rate, change.betas(betas), new.epsilon), 4, 400, noise)
    assert scaled == pytest.approx(reached, rel=0.02)
    for rate in (base.learning_rate, 4 * base.learning_rate):  # no rule, and the linear one
        other = final_loss(adam(rate, change.betas(betas), new.epsilon), 4, 400, noise)
        assert abs(other / reached - 1) > 0.2


def test_the_linear_rule_keeps_the_training_of_gradient_descent():
    def descent(rate):
        return lambda slopes, state, step: (rate * slopes, None)

    new = TrainingChange(batch=(1, 4), rules=("linear",), optimizer="sgd").at(BaseHyperparameters(0.005))
    reached = final_loss(descent(0.005), 1, 1600, 5.0)
    assert final_loss(descent(new.learning_rate), 4, 400, 5.0) == pytest.approx(reached, rel=0.05)
    assert abs(final_loss(descent(0.01), 4, 400, 5.0) / reached - 1) > 0.1


def test_the_timescale_rule_keeps_what_is_left_of_the_start_at_any_rate():
    base = BaseHyperparameters(1e-3, weight_decay=0.1)
    for rules in (("timescale",), ("sqrt", "timescale"), ("batch=0.3", "tokens=-0.5", "timescale")):
        change = TrainingChange((256, 1024), (1e9, 8e9), rules)
        new = change.at(base)
        left = [
            (1 - each.learning_rate * each.weight_decay) ** (tokens / batch)
            for each, tokens, batch in ((base, 1e9, 256e3), (new, 8e9, 1024e3))
        ]
        assert left[1] == pytest.approx(left[0], rel=1e-4)


def test_published_fits_are_ratios_of_their_formulas():
    def steplaw(weights, tokens):  # equation 1 of arXiv:2503.04715
        return 1.79 * weights**-0.713 * tokens**0.307, 0.58 * tokens**0.571

    (rate, batch), (new_rate, new_batch) = steplaw(1e9, 1e10), steplaw(1e9, 1e11)
    change = TrainingChange((batch, new_batch), (1e10, 1e11), ("steplaw",))
    assert change.at(BaseHyperparameters(rate)).learning_rate == pytest.approx(new_rate)
    assert not any("its batch size is" in line for line in change.sentences())
    kept = TrainingChange(tokens=(1, 10), rules=("steplaw",)).sentences()
    assert any("its batch size is 3.72 times yours" in line for line in kept)

    def decay(
        batch, rate, tokens, weights
    ):  # of arXiv:2505.13738: batch / (rate decay tokens) = c (tokens/weights)^-.527
        return batch / (rate * tokens * 1.084 * (tokens / weights) ** -0.527)

    base = BaseHyperparameters(1e-3, weight_decay=decay(500, 1e-3, 2e9, 1e8))
    new = TrainingChange((500, 2000), (2e9, 6e10), ("power-lines", "sqrt"), (1e8, 1e9)).at(base)
    assert new.weight_decay == pytest.approx(decay(2000, 2e-3, 6e10, 1e9))
    assert TrainingChange(tokens=(1, 2), rules=("horizon",)).at(base).learning_rate == pytest.approx(1e-3 * 2**-0.32)


def test_without_a_rule_nothing_changes_and_is_said_to_be_assumed():
    base = BaseHyperparameters(1e-3, weight_decay=0.1, learning_rates={"norm": 0.1}, muon=MuonHyperparameters(0.02))
    change = TrainingChange((1, 4), (1, 2))
    assert change.at(base) == base
    assert [line for line in change.sentences() if line.startswith("rule none")] == [
        "rule none: weight decay unchanged by batch and tokens, an assumption",
        "rule none: learning rate unchanged by batch, an assumption",
        "rule none: learning rate unchanged by tokens, an assumption",
    ]
    measured = TrainingChange((1, 4), (1, 2), ("batch=0.5",), optimizer="muon")
    new = measured.at(base)
    assert (new.learning_rate, new.learning_rates["norm"], new.muon.learning_rate) == (2e-3, 0.2, 0.04)
    assert "measured batch=0.5: learning rate × 2; an exponent of your own" in measured.sentences()
    assert len([line for line in measured.sentences() if "unchanged by" in line]) == 2


def test_every_rule_names_a_source():
    assert all("arXiv:" in rule.source and rule.basis for rule in RULES.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rules": ("root",)}, "rule 'root': choose from none, sqrt"),
        ({"rules": ("batch=x",)}, "rule 'batch=x'"),
        ({"rules": ("batch=nan",)}, "rule 'batch=nan'"),
        ({"rules": ("tokens=400",)}, "rule 'tokens=400'"),
        ({"rules": ("sqrt", "sqrt")}, "rules sqrt sqrt: give each once"),
        ({"rules": ("sqrt", "batch=1")}, "rules sqrt and batch=1 both change the learning rate with batch"),
        ({"rules": ("sqrt", "steplaw")}, "both change the learning rate with batch"),
        ({"rules": ("horizon", "tokens=1")}, "both change the learning rate with tokens"),
        ({"rules": ("timescale", "power-lines"), "weights": (1, 2)}, "both change the rate x decay with batch"),
        ({"rules": ("power-lines",)}, "give weights"),
        ({"rules": ("linear",)}, "it is for sgd, not for adam"),
        ({"rules": ("sqrt",), "optimizer": "muon"}, "it is for adam, not for muon"),
        ({"rules": ("sqrt",), "batch": (1, 16)}, "leaves no beta of 0.9"),
        ({"batch": (0, 4)}, "batch=(0, 4): give the number at the base and the one now"),
        ({"tokens": (1,)}, "tokens=(1,)"),
    ],
)
def test_wrong_rules_are_refused(given, said):
    with pytest.raises(UsageError) as caught:
        TrainingChange(**given)
    assert said in str(caught.value)

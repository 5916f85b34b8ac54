"""Factors of the forward pass from given multipliers and inits: how each is provided for."""

import math

import pytest

from manyheads.models.infer.multipliers import ForwardPass, Multiplier
from manyheads.scaling import Parametrization
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.scaling.preflight_checks.factors import Factors, find_uses, multipliers
from manyheads.transformer import Shape

BASE, WIDE, DEEP = Shape(8, 4, 2), Shape(8, 8, 2), Shape(8, 4, 8)
GROWN = 2**0.5  # (D/D0)^1/2


class Given(Factors):
    """Multipliers and stds of the init without a model."""

    def __init__(self, name, part, forward, std):
        self.measured, self.stds = ForwardPass(**{name: Multiplier({"module": forward})}), {(name, part): (std, 1000)}


def use(name, part, shape, forward, weights):
    """Return the use of a factor whose multiplier and init are so many times those of the base, and the multipliers."""
    p = Parametrization(base=BASE)
    before, here = Given(name, part, 0.3, 0.2), Given(name, part, 0.3 * forward, 0.2 * weights)
    uses = find_uses(p, "depth" if shape == DEEP else "heads", shape, here, before)
    (found,) = [each for each in uses if each.name == name]
    return found, getattr(multipliers(p, shape, uses), name)


@pytest.mark.parametrize(
    ("forward", "weights", "state", "multiplier"),
    [
        (1.0, 1.0, "unchanged", 1.0),
        (GROWN, 1 / GROWN, "folded", GROWN),  # as Gemma has it: embeddings times the root of the width
        (GROWN, 1.0, "neither", 1.0),
        (1.0, 1 / GROWN, "other", 1.0),
        (2 * GROWN, 0.5 / GROWN, "other", 1.0),
    ],
)
def test_embeddings_may_be_multiplied_by_the_root_of_the_width(forward, weights, state, multiplier):
    found, applied = use("embedding", "embedding", WIDE, forward, weights)
    assert (found.state, applied) == (state, pytest.approx(multiplier))
    assert found.right == (state in ("unchanged", "folded"))


@pytest.mark.parametrize(
    ("forward", "weights", "state"),
    [(0.25, 1.0, "applied"), (1.0, 0.25, "folded"), (0.25, 0.25, "both"), (1.0, 1.0, "neither"), (0.5, 1.0, "other")],
)
def test_a_branch_factor_of_one_over_depth_acts_once(forward, weights, state):
    found, applied = use("branch", "output", DEEP, forward, weights)
    assert forward_multipliers(Parametrization(base=BASE), DEEP).branch == 0.25
    assert (found.state, found.wanted) == (state, pytest.approx(0.25))
    assert math.isclose(applied, 0.25 if state in ("applied", "both") else 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_multiplier_without_a_logarithm_is_unknown(bad):
    found, _ = use("branch", "output", DEEP, bad, 1.0)
    assert found.state == "unknown"
    assert "could not be measured" in found.sentence()

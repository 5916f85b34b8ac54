"""Attention functions with conserved quantities: the antiderivative of f/f', and the count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.layer import FUNCTIONS
from manyheads.theory.joma.task import UpdateRule
from manyheads.theory.joma.theorems.attention_functions import count_invariants
from manyheads.theory.joma.theorems.invariants import conserved_quantity, logit_side


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "square"])
def test_the_side_of_the_logits_is_the_antiderivative_of_f_over_its_derivative(name):
    rule = UpdateRule(name, temperature=1.3)
    z = np.array([0.3, 1.0, 2.0])
    with jax.enable_x64(True):
        f = jax.vmap(jax.value_and_grad(lambda s: FUNCTIONS[name](s / 1.3)))(jnp.asarray(z))
    value, slope = map(np.asarray, f)
    step = 1e-6
    rise = (logit_side(rule, z + step) - logit_side(rule, z - step)) / (2 * step)
    # The quantity is this side less a multiple of |v|^2, where the rule asks for F - |v|^2/2.
    multiple = -conserved_quantity(rule, np.zeros((1, 3)), np.ones((3, 1))) + logit_side(rule, np.zeros(3))
    np.testing.assert_allclose(rise, 2 * multiple * value / slope, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("square", 2), ("softmax", 1)])
def test_invariants_are_counted_by_the_algebra_of_the_gradients(rng, name, count):
    assert count_invariants(UpdateRule(name), 2, 3, 1, rng) == count


def test_layers_too_large_for_brackets_are_refused(rng):
    with pytest.raises(UsageError, match="24 or fewer"):
        count_invariants(UpdateRule("exp"), 12, 40, 24, rng)

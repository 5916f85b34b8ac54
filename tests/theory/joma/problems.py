"""One layer of one size for all tests of flows: equal shapes are compiled once."""

from manyheads.theory.joma.systems.gradient_flow import FixedSteps
from manyheads.theory.joma.systems.layer import draw_parameters, draw_upper
from manyheads.theory.joma.task import Sizes, draw_joma_task

SIZES = Sizes(tokens=6, queries=3, contexts=12, classes=3, neurons=5, width=12)
STEPS = FixedSteps(0.05, 4, 60)


def draw(rng, rule):
    """Draw a network, a task and the layer above."""
    return draw_parameters(SIZES, rule, rng), draw_joma_task(SIZES, rng), draw_upper(SIZES, rng)

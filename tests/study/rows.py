"""The smallest configuration of every registered study, and how many replicates its contract is checked with."""

from manyheads.attention.studies.costs import Costs
from manyheads.attention.studies.order_blindness import OrderBlindness
from manyheads.demo.text import TextTraining

SMALL = {
    "demo/text": (TextTraining(key_dim=4, heads=2, depth=1, length=48, batch=2, steps=12, snapshots=3), 2),
    "attention/costs": (Costs(width=8, heads=2, lengths=(4, 8, 16)), 2),
    "attention/order-blindness": (OrderBlindness(lengths=(6,), steps_per_token=5, key_dim=4, batch=8), 2),
}

"""FLOPs of recurrent and pooled networks as studies run them, beyond the textbook's counts."""

from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape


def baseline_flops(shape: RecurrentShape | PooledShape, length: int, batch: int, training: bool) -> int:
    """Return the FLOPs of one pass.

    Training differentiates the inputs too, and a pooled network has one more layer after the pool: 2 b H^2 forward,
    twice that backward.
    """
    inputs = 2 * batch * length * shape.inputs * shape.hidden if training else 0
    if isinstance(shape, RecurrentShape):
        return rnn_cost(shape, length, batch, training=training).flops + inputs
    mixing = 2 * batch * shape.hidden**2 * (3 if training else 1)
    return pooled_cost(shape, length, batch, training=training).flops + inputs + mixing

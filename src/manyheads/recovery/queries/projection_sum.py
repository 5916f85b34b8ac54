"""Sum of the output-value circuits, stage S0: with one token attention is 1, and the layer is x W_S + c."""

from typing import Any, NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Ask


class Sums(NamedTuple):
    """Sum of the projections W_S = sum_i W_i (d, d), and the output bias c (d,)."""

    projection: Array
    bias: Array

    def read(self, x: Any) -> Array:
        """Return x W_S + c, what one token (..., d) gives."""
        return x @ self.projection + self.bias


def read_sums(oracle: Ask, dim: int, reach: float = np.inf) -> Sums:
    r"""Read W_S and c from d + 1 sequences of one token, none longer than `reach`.

    .. math:: F(0) = c, \qquad F(\sqrt d\, e_a) = c + \sqrt d\, e_a W_S
    """
    scale = min(np.sqrt(dim), reach)  # the norm that tokens have in all stages
    answers = oracle(np.concatenate([np.zeros((1, dim)), scale * np.eye(dim)])[:, None], read="last")
    return Sums((answers[1:] - answers[0]) / scale, answers[0])

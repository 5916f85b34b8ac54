"""Oracles of a block with its MLP: its attention, exactly; and what other tokens change in its answers."""

from dataclasses import replace

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Behind, Read
from manyheads.recovery.queries.block.token_wise import TokenWise


class BlockAttention(Behind):
    r"""The attention of a block as an oracle: A_r(x) = D + N(u) W, without a constant.

    Tokens are asked at the scale s of `token_wise`: this is an attention layer behind a norm whose epsilon is that of
    the block over s^2. With one token it is N(x) W, and nothing is asked.
    """

    def __init__(self, token_wise: TokenWise, projection: Array, norm: Normalization):
        block = token_wise.block
        super().__init__(block, causal=token_wise.causal, limits=replace(block.limits, max_norm=None))
        self.token_wise, self.projection = token_wise, projection
        self.norm = replace(norm, epsilon=max(norm.epsilon, np.finfo(float).tiny))  # a token 0 has value 0

    def answer(self, x: Array, read: Read) -> Array:
        """Return the rows of the attention."""
        x = self.token_wise.scale * np.asarray(x, np.float64)
        if x.shape[1] == 1:
            rows = self.norm(x) @ self.projection  # attention is 1
        else:
            moved, base = self.token_wise.differences(x, read)  # those of the rows that are read must be large
            rows = moved + self.norm(base) @ self.projection
        return rows[:, -1] if read == "last" else rows


class BeyondOneToken(Behind):
    """What other tokens change in the answers of a block, F(x)_r - F([x_r]): the unit of its certificate."""

    def __init__(self, token_wise: TokenWise):
        super().__init__(token_wise.block, causal=token_wise.causal)
        self.token_wise = token_wise

    def answer(self, x: Array, read: Read) -> Array:
        """Return the differences of last rows, or of all."""
        return self.behind(x, read) - self.token_wise.answer(x[:, -1] if read == "last" else x, stage=None)

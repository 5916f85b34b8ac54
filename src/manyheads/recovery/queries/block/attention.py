"""Oracles of a block with its MLP: its attention, exactly; and what other tokens change in its answers."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.oracle.limits import ServerLimits
from manyheads.recovery.oracle.oracle import Counts, Oracle, Read
from manyheads.recovery.queries.block.token_wise import TokenWise
from manyheads.recovery.queries.block.value_sum import ValueSum


class _OfBlock(Oracle):
    """An oracle that asks the oracle of a block, which counts."""

    def __init__(self, token_wise: TokenWise, limits: ServerLimits):
        self.block, self.token_wise = token_wise.block, token_wise
        settings = replace(self.block.settings, causal=token_wise.causal, limits=limits)
        super().__init__(self.block.function, self.block.dim, settings)

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Queries of every stage to the block."""
        return self.block.counts

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count under this name what the block is asked within."""
        with self.block.stage(name):
            yield


class BlockAttention(_OfBlock):
    r"""The attention of a block as an oracle: A_r(x) = D + N(u) W, without a constant.

    Tokens are asked at the scale s of `token_wise`: this is an attention layer behind a norm whose epsilon is that of
    the block over s^2. With one token it is N(x) W, and nothing is asked.
    """

    def __init__(self, token_wise: TokenWise, sums: ValueSum):
        block = token_wise.block
        super().__init__(token_wise, replace(block.limits, max_norm=None))
        self.projection = sums.projection
        self.norm = replace(sums.norm, epsilon=max(sums.norm.epsilon, np.finfo(float).tiny))  # a token 0 has value 0
        self.answer_dtype = block.answer_dtype

    def __call__(self, x: Array, read: Read = "last") -> Array:
        """Ask about sequences (n, k, d); return the last rows (n, d), all rows (n, k, d) or some of them."""
        if read != "last" and self.limits.last_row:
            return np.stack([self(part) for part in self._seen_by(x, read)], axis=1)
        return self.attend(self.token_wise.scale * np.asarray(x, np.float64), read)

    def attend(self, x: Array, read: Read) -> Array:
        """Return the rows for tokens that are asked as they are; those of the rows that are read must be large."""
        if x.shape[1] == 1:
            rows = self.norm(x) @ self.projection  # attention is 1
        else:
            moved, base = self.token_wise.differences(x, read)
            rows = moved + self.norm(base) @ self.projection
        return rows[:, -1] if read == "last" else rows


class BeyondOneToken(_OfBlock):
    """What other tokens change in the answers of a block, F(x)_r - F([x_r]): the unit of its certificate."""

    def __init__(self, token_wise: TokenWise):
        super().__init__(token_wise, token_wise.block.limits)
        self.answer_dtype = token_wise.block.answer_dtype

    def __call__(self, x: Array, read: Read = "last") -> Array:
        """Ask about sequences (n, k, d); return the last rows (n, d) or all rows (n, k, d)."""
        own = x[:, -1] if read == "last" else x
        return self.block(x, read) - self.token_wise.answer(own, stage=None)

"""Sequences of the verification that a server takes: lengths and norms within its limits."""

from dataclasses import dataclass

import numpy as np

from manyheads.errors import UsageError
from manyheads.recovery._types import Generator
from manyheads.recovery.oracle.limits import ServerLimits
from manyheads.recovery.result.certificates import Draw, GaussianSequences, describe_draw


@dataclass(frozen=True)
class FittedSequences:
    """The sequences of a distribution with the lengths and norms that a server takes.

    Lengths of Gaussian sequences are cut at the limits; of other distributions, sequences of other lengths are left
    out. Longer tokens are shortened to the largest norm.
    """

    draw: Draw
    limits: ServerLimits

    def __call__(self, rng: Generator, count: int, dim: int) -> list[np.ndarray]:
        """Draw `count` sequences."""
        shortest, longest = self.limits.min_length, self.limits.longest
        draw, found = self._cut(), list[np.ndarray]()
        table = self.limits.vocabulary
        for _ in range(100):
            missing = count - sum(map(len, found))
            if not missing:
                break
            found += [x for x in draw(rng, missing, dim) if shortest <= x.shape[1] <= longest]
        else:
            raise UsageError(
                f"the distribution draws hardly any sequence of {shortest} to {longest:g} tokens: give another one"
            )
        if table is not None:
            return [table[rng.integers(len(table), size=x.shape[:2])] for x in found]
        for x in found:
            norms = np.linalg.norm(x, axis=-1, keepdims=True)
            x *= np.minimum(1.0, self.limits.reach / np.maximum(norms, np.finfo(float).tiny))
        return found

    def _cut(self) -> Draw:
        if not isinstance(self.draw, GaussianSequences):
            return self.draw
        most = max(self.draw.lengths) if self.limits.max_length is None else self.limits.max_length
        lengths = np.clip(self.draw.lengths, self.limits.min_length, max(most, self.limits.min_length))
        return GaussianSequences(tuple(lengths.tolist()), self.draw.scales)

    def __str__(self) -> str:
        if self.limits.vocabulary is not None:
            return f"tokens of the vocabulary, drawn evenly, in the lengths of: {describe_draw(self._cut())}"
        reach = "" if self.limits.max_norm is None else f", tokens shortened to a norm of {self.limits.max_norm:g}"
        lengths = ""
        if not isinstance(self.draw, GaussianSequences):
            lengths = f", those of {self.limits.min_length} to {self.limits.longest:g} tokens"
        return f"{describe_draw(self._cut())}{lengths}{reach}"

"""Distributions of the sequences of a verification, and what of them a layer or a server takes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manyheads._constraints import Constrained, Constraint, constrained
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.limits import ServerLimits

# A distribution of sequences: draws `count` independent ones of dimension `dim`, stacked by their length (n, k, d)
Draw = Callable[[Generator, int, int], list[Array]]


@dataclass(frozen=True)
class GaussianSequences(Constrained):
    """Sequences of Gaussian tokens with independent, uniformly drawn lengths and standard deviations `scales`.

    A repeated length is drawn in proportion. One default sequence in six has 32 to 128 tokens, so that a function with
    a shorter attention window is no attention layer.
    """

    lengths: tuple[int, ...] = constrained(4 * (2, 4, 8, 16) + (32, 64, 128), Constraint(least=1))
    scales: tuple[float, ...] = constrained((0.5, 1.0, 2.0), Constraint(above=0))

    def __call__(self, rng: Generator, count: int, dim: int) -> list[Array]:
        """Draw `count` sequences, those of a length stacked."""
        lengths, scales = rng.choice(self.lengths, count), rng.choice(self.scales, count)
        found = []
        for k in dict.fromkeys(self.lengths):
            if (chosen := lengths == k).any():
                found.append(rng.standard_normal((int(chosen.sum()), k, dim)) * scales[chosen, None, None])
        return found

    def __str__(self) -> str:
        scales = ", ".join(f"{scale:g}" for scale in self.scales)
        counts = Counter(self.lengths)
        groups = [(n, [str(k) for k in counts if counts[k] == n]) for n in dict.fromkeys(counts.values())]
        shares = [f"{', '.join(ks)}{f' ({n / len(self.lengths):.0%} each)' * (len(groups) > 1)}" for n, ks in groups]
        return f"Gaussian tokens of scale {scales} in sequences of length {', '.join(shares)}"


def draw_within(draw: Draw, rng: Generator, count: int, dim: int, shortest: int, longest: float) -> list[Array]:
    """Draw until there are `count` sequences of `shortest` to `longest` tokens; leave others out."""
    found: list[Array] = []
    for _ in range(100):
        if not (missing := count - sum(map(len, found))):
            return found
        found += [x for x in draw(rng, missing, dim) if shortest <= x.shape[1] <= longest]
    raise UsageError(f"the distribution draws hardly a sequence of {shortest} to {longest:g} tokens: give another")


@dataclass(frozen=True)
class ShortSequences:
    """The sequences of a distribution that have at most `longest` tokens."""

    draw: Draw
    longest: int

    def __call__(self, rng: Generator, count: int, dim: int) -> list[Array]:
        """Draw `count` sequences."""
        return draw_within(self.draw, rng, count, dim, 1, self.longest)

    def __str__(self) -> str:
        return f"{describe_draw(self.draw)}, those of at most {self.longest} tokens"


@dataclass(frozen=True)
class FittedSequences:
    """The sequences of a distribution with the lengths and norms that a server takes."""

    draw: Draw
    limits: ServerLimits

    def __call__(self, rng: Generator, count: int, dim: int) -> list[Array]:
        """Draw `count` sequences."""
        found = draw_within(self._cut(), rng, count, dim, self.limits.min_length, self.limits.longest)
        if (table := self.limits.vocabulary) is not None:
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
        cut, limits = describe_draw(self._cut()), self.limits
        if limits.vocabulary is not None:
            return f"tokens of the vocabulary, drawn evenly, in the lengths of: {cut}"
        gaussian = isinstance(self.draw, GaussianSequences)
        lengths = "" if gaussian else f", those of {limits.min_length} to {limits.longest:g} tokens"
        return (
            cut + lengths + ("" if limits.max_norm is None else f", tokens shortened to a norm of {limits.max_norm:g}")
        )


def describe_draw(draw: Draw) -> str:
    """Return what a distribution says of itself, or its name."""
    name = getattr(draw, "__qualname__", None)  # of a function
    return str(draw) if name is None else f"sequences drawn by {name}"
